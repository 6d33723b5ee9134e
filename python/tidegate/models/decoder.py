"""A running batch that sequences enter and leave at any step: what a server needs."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import read_tensors, write_tensors
from .causal_lm import CausalLM
from .engine import engine_of, follow
from .sampling import SamplingOptions, whole

Prompt = Tensor | Sequence[int]


class DecodedToken(int):
    """A token of the sequence in `slot`: its id, as an integer, with what else is known of it.

    log_prob: by the logits as they are; zero unless the decoder was asked for it. is_last: whether
    it is the sequence's last token.
    """

    slot: int
    log_prob: float
    is_last: bool

    def __new__(
        cls, token: int, slot: int, log_prob: float = 0.0, is_last: bool = False
    ) -> DecodedToken:
        self = super().__new__(cls, token)
        self.slot, self.log_prob, self.is_last = slot, log_prob, is_last
        return self

    def __getnewargs__(self) -> tuple[int, int, float, bool]:  # type: ignore[override]
        return int(self), self.slot, self.log_prob, self.is_last

    __str__ = int.__repr__  # text and formats have the id alone

    def __repr__(self) -> str:
        return (
            f"DecodedToken({int(self)}, slot={self.slot}, log_prob={self.log_prob}, "
            f"is_last={self.is_last})"
        )


class _StopStrings:
    """Looks for strings in the text of the tokens that arrive, where a string may begin in one
    token and end in another."""

    def __init__(
        self, strings: Sequence[bytes], decode: Callable[[list[int]], str | bytes]
    ) -> None:
        self._strings = strings
        self._decode = decode
        # Every token adds a byte or more, but for a few at most.
        self._most = max(map(len, self._strings)) + 8
        self._ids: list[int] = []

    def found(self, token: int) -> bool:
        ids = [*self._ids, token][-self._most :]
        text = self._decode(list(ids))
        # Bytes that are no text may come as surrogates, which UTF-8 has no bytes for.
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        if not isinstance(data, (bytes, bytearray)):
            raise ValueError(f"Decoder: decode: expected text or bytes of it; got {text!r}")
        self._ids = ids
        return any(string in data for string in self._strings)


class Decoder:
    """A running batch of sequences of a `CausalLM`, which enter by add() and leave by remove() at
    any step.

    A step draws a token for every sequence and reads it. On a GPU it is one CUDA graph, captured
    for every number of sequences that comes up; ``TIDEGATE_CUDA_GRAPHS=0`` switches that off. The
    states of all `max_batch` sequences are in memory from the start. Not for several threads at a
    time.

    Args:
        model: as its configuration builds it, without hooks and adapters. The decoder uses its
            parameters where they are: make a new one after model.to() or load().
        max_batch: sequences at a time: the decoder's slots.
        capacity: tokens of a sequence, prompt included, that layers which keep them have room for
            at first. Memory grows where more come.
        max_stop_ids: ids of a sequence that end it, at most.
        prompt_chunk: tokens of prompts that are read at once: a bound on the memory that takes.
        log_probs: whether tokens come with their log-probabilities.
        invariant: whether a sequence's logits have the same bits whatever else is in the batch.
            Costs: a step always computes all slots (on the CPU its rows alone), prompts
            are read one by one, and capacity is a limit.
        decode: the text of a list of ids, for stop strings. What it raises reaches whoever calls
            steps(), and no token is lost.

    Raises ValueError for wrong arguments, here and in every method, before anything changes.
    """

    def __init__(
        self,
        model: CausalLM,
        max_batch: int,
        *,
        capacity: int = 1024,
        max_stop_ids: int = 8,
        prompt_chunk: int = 8192,
        log_probs: bool = False,
        invariant: bool = False,
        decode: Callable[[list[int]], str | bytes] | None = None,
    ) -> None:
        engine = engine_of(model) if isinstance(model, CausalLM) else None
        if engine is None:
            raise ValueError(
                "Decoder: model: expected a CausalLM as its configuration builds it, without hooks "
                f"and adapters, on the CPU or a GPU; got a {type(model).__name__} that is not"
            )
        self.model = model
        for name, value in (("log_probs", log_probs), ("invariant", invariant)):
            if not isinstance(value, bool):
                raise ValueError(f"Decoder: {name}: expected True or False; got {value!r}")
        if decode is not None and not callable(decode):
            raise ValueError(f"Decoder: decode: expected a function or None; got {decode!r}")
        max_batch = whole("Decoder", "max_batch", max_batch)
        capacity = whole("Decoder", "capacity", capacity)
        max_stop_ids = whole("Decoder", "max_stop_ids", max_stop_ids, 0)
        prompt_chunk = whole("Decoder", "prompt_chunk", prompt_chunk)
        self.max_batch = max_batch
        self._decode = decode
        self._stops: dict[int, _StopStrings] = {}
        self._streams: dict[int, object] = {}  # whose sequence is in a slot, of those of stream()
        # Tokens that were drawn and not yet looked at for stop strings, and that were and are not
        # yet returned: none between two calls, unless `decode` raised.
        self._drawn: deque[DecodedToken] = deque()
        self._ready: deque[DecodedToken] = deque()
        self._engine = engine
        self._decoder = torch.classes.tidegate.Decoder(
            engine, max_batch, capacity, max_stop_ids, prompt_chunk, log_probs, invariant
        )

    @property
    def active(self) -> int:
        """How many sequences go on: steps() has tokens of theirs."""
        ended = sum(token.is_last for token in (*self._drawn, *self._ready))
        return self._decoder.active() + ended

    @property
    def taken(self) -> int:
        """How many slots are taken: by sequences that go on, or that ended and were not removed."""
        return self._decoder.taken()

    def add(self, prompt: Prompt, **options: Any) -> int:
        """Reads a prompt, ids ``[length]``, and returns the slot of its sequence.

        options: temperature, top_k, top_p, min_p, repetition_penalty and seed, as
        `CausalLM.generate` takes them; a sequence's tokens depend on its prompt, its options and
        its seed alone, but for the rounding of products of other sizes. max_new_tokens: the
        sequence ends after so many; None: with a stop alone. stop_ids: it ends with any of these;
        stop_strings: or with the token that completes one of these in its text. stream: which of
        several samples of one seed it is.
        """
        return self.add_all([prompt], **options)[0]

    def add_all(self, prompts: Sequence[Prompt], **options: Any) -> list[int]:
        """Several prompts, read together, end to end: their slots. options: as in add()."""
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise ValueError(f"Decoder.add_all: prompts: expected a list; got {prompts!r}")
        asked = _Options(self, "Decoder.add", options)
        ids = [_ids("Decoder.add", prompt) for prompt in prompts]
        lists = [asked.lists() for _ in ids]
        follow(self._engine, self.model)
        slots = self._decoder.add(ids, [n for n, _ in lists], [i for _, i in lists])
        for slot in slots:
            asked.watch(slot)
        return slots

    def add_samples(self, prompt: Prompt, samples: int, **options: Any) -> list[int]:
        """So many sequences of one prompt, which is read once: the state is copied on the device.
        Each draws its own tokens. options: as in add()."""
        samples = whole("Decoder.add_samples", "samples", samples, 1)
        for name in ("stop_ids", "stop_strings"):  # each sample reads them
            options[name] = _list("Decoder.add_samples", name, options)
        free = self.max_batch - self.taken
        if samples > free:
            raise ValueError(
                f"Decoder.add_samples: samples: expected at most {free}, as many as slots are free;"
                f" got {samples}"
            )
        first = self.add(prompt, **options)
        slots, stream = [first], int(options.get("stream", 0))
        try:
            for i in range(1, samples):
                slots.append(self.fork(first, **{**options, "stream": stream + i}))
        except Exception:  # all of them, or none
            for slot in slots:
                self.remove(slot)
            raise
        return slots

    def fork(self, slot: int, **options: Any) -> int:
        """Another sequence that goes on from where the one in `slot` is: its slot. options: as in
        add(); they are not those of the other one. Stop strings are looked for in the new
        sequence's own tokens."""
        slot = self._returned_whole("Decoder.fork", slot)
        asked = _Options(self, "Decoder.fork", options)
        other = self._decoder.fork(slot, *asked.lists())
        asked.watch(other)
        return other

    def step(self) -> dict[int, DecodedToken]:
        """A token of every sequence that goes on, by its slot."""
        return {token.slot: token for token in self.steps(1)}

    def steps(self, count: int) -> list[DecodedToken]:
        """So many steps: their tokens in the order in which they were drawn; after a sequence's
        last one no more of it. The host waits once for all of them: a few at a time cost less than
        one by one.

        Where `decode` raises, so does this. The tokens of these steps are kept: the next calls ask
        `decode` again and return them, at most `count` a sequence, before any other step is made.
        remove() drops those of a sequence whose text cannot be made."""
        count = whole("Decoder.steps", "count", count, 1)
        if not self._drawn and not self._ready:
            self._draw(count)
        while self._drawn:
            self._look_for_stop()
        tokens = []
        counts: Counter[int] = Counter()
        while self._ready and counts[self._ready[0].slot] < count:
            counts[self._ready[0].slot] += 1
            tokens.append(self._ready.popleft())
        return tokens

    def _draw(self, count: int) -> None:
        """So many steps."""
        follow(self._engine, self.model)
        integers, log_probs = self._decoder.steps(count)
        self._drawn.extend(
            DecodedToken(token, slot, log_prob, bool(is_last))
            for (slot, token, is_last), log_prob in zip(
                integers.tolist(), log_probs.tolist(), strict=True
            )
        )

    def _returned_whole(self, owner: str, slot: Any) -> int:
        """The slot; ValueError where its sequence is ahead of the tokens that steps() returned."""
        slot = whole(owner, "slot", slot)
        if any(token.slot == slot for token in (*self._drawn, *self._ready)):
            raise ValueError(
                f"{owner}: slot: expected a sequence whose tokens steps() has returned; got "
                f"{slot}, some of which are kept since `decode` raised"
            )
        return slot

    def _look_for_stop(self) -> None:
        """The first token that was drawn becomes one to return; it changes nothing where `decode`
        raises."""
        token = self._drawn[0]
        stops = self._stops.get(token.slot)
        if stops is not None and stops.found(token):
            self._decoder.end(token.slot)
            self._drawn = deque(other for other in self._drawn if other.slot != token.slot)
            token.is_last = True
        else:
            self._drawn.popleft()
        self._ready.append(token)

    def remove(self, slot: int) -> None:
        """Ends the sequence in `slot`, or only frees the slot where it has ended."""
        slot = whole("Decoder.remove", "slot", slot)
        self._decoder.remove(slot)
        self._drawn = deque(token for token in self._drawn if token.slot != slot)
        self._ready = deque(token for token in self._ready if token.slot != slot)
        self._stops.pop(slot, None)
        self._streams.pop(slot, None)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[DecodedToken]:
        """The tokens of one sequence as they are drawn, for a decoder without others; the sequence
        is removed at the end, also where nobody asks for the rest. options: as in add()."""
        self._refuse_others(self.active)
        slot = self.add(prompt, **options)
        mine = self._streams[slot] = object()
        is_last = False
        try:
            # Whoever asks for the tokens may remove the sequence, and add another one in its slot.
            while not is_last and self.active and self._streams.get(slot) is mine:
                self._refuse_others(self.active - 1)
                for token in self.steps(1):
                    is_last = token.is_last
                    yield token
        finally:
            if self._streams.get(slot) is mine:
                self.remove(slot)

    def _refuse_others(self, count: int) -> None:
        if count:
            raise ValueError(
                f"Decoder.stream: expected no other sequence that goes on; got {count}: steps() "
                "has the tokens of all"
            )

    def save_prefix(self, slot: int, path: str | os.PathLike[str]) -> None:
        """Writes what the sequence in `slot`, which has not ended, has read: its state, as a
        safetensors file. Right after add() it is the prompt's: a prefix cache of one file a
        prefix."""
        tensors = self._decoder.save_prefix(self._returned_whole("Decoder.save_prefix", slot))
        write_tensors(Path(path), dict(tensors), {"format": "pt"})

    def load_prefix(self, path: str | os.PathLike[str], prompt: Prompt = (), **options: Any) -> int:
        """Goes on from what save_prefix() wrote, as if its tokens had been read, with more prompt,
        if any: the slot. options: as in add(). A file of a model of another configuration is
        refused; of one with other weights it is not, for nothing in the file says so."""
        asked = _Options(self, "Decoder.load_prefix", options)
        if not Path(path).is_file():
            raise FileNotFoundError(f"Decoder.load_prefix: {path}: no such file")
        tensors = read_tensors(Path(path), None)
        ids = _ids("Decoder.load_prefix", prompt)
        follow(self._engine, self.model)
        slot = self._decoder.load_prefix(tensors, ids, *asked.lists())
        asked.watch(slot)
        return slot


class _Options:
    """The options of add(), checked as far as the library's own checks do not: by `owner`."""

    def __init__(self, decoder: Decoder, owner: str, options: dict[str, Any]) -> None:
        options = dict(options)
        self._decoder = decoder
        most = options.pop("max_new_tokens", None)
        self._max_new_tokens = None if most is None else whole(owner, "max_new_tokens", most, 1)
        self._stop_ids = [whole(owner, "stop_ids", i) for i in _list(owner, "stop_ids", options)]
        self._stop_strings = _list(owner, "stop_strings", options)
        self._stream = whole(owner, "stream", options.pop("stream", 0))
        unknown = sorted(set(options) - set(SamplingOptions.__dataclass_fields__))
        if unknown:
            raise ValueError(f"{owner}: unknown option {unknown[0]!r}")
        self._sampling = SamplingOptions(**options)
        self._sampling.check(owner)
        if self._stop_strings and decoder._decode is None:
            raise ValueError(
                f"{owner}: stop_strings: expected a Decoder with decode=, which makes text of ids"
            )
        if not all(isinstance(string, str) and string for string in self._stop_strings):
            raise ValueError(f"{owner}: stop_strings: expected strings that are not empty")
        try:
            self._stop_bytes = [string.encode() for string in self._stop_strings]
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{owner}: stop_strings: expected text that UTF-8 can write; got {error.object!r}"
            ) from None

    def lists(self) -> tuple[list[float], list[int]]:
        """The options of one sequence as the library's class takes them."""
        s = self._sampling
        top_p, min_p = s.top_p, s.min_p
        numbers = [s.temperature, 1.0 if top_p is None else top_p, min_p or 0.0]
        integers = [s.top_k or 0, s.seed_now(), self._stream, self._max_new_tokens or 0]
        numbers = [float(n) for n in (*numbers, s.repetition_penalty)]
        return numbers, [*integers, *self._stop_ids]

    def watch(self, slot: int) -> None:
        """The sequence in `slot` ends with one of the stop strings."""
        if self._stop_strings:
            self._decoder._stops[slot] = _StopStrings(self._stop_bytes, self._decoder._decode)


def _list(owner: str, name: str, options: dict[str, Any]) -> list[Any]:
    """Takes a list out of the options. Text is none: its characters would become the elements."""
    value = options.pop(name, ())
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{owner}: {name}: expected a list; got {value!r}")
    return list(value)


def _ids(owner: str, prompt: Prompt) -> Tensor:
    """A prompt as a tensor."""
    if isinstance(prompt, Tensor):
        return prompt
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
        given = " ".join(repr(prompt).split())[:80]
        raise ValueError(f"{owner}: prompt: expected ids, a tensor or a list; got {given}")
    return torch.tensor([whole(owner, "prompt", i) for i in prompt], dtype=torch.int64)
