"""A trained model, as lm_eval asks it: log-likelihoods and continuations of strings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval.models  # noqa: F401  (else lm_eval takes ours for all that there are)
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

from ..models import CausalLM
from ..models.sampling import Sampler, SamplingOptions
from ..training.errors import UserError
from ..training.pieces import logits_in_pieces
from ..training.runtime import autocast
from ..training.trained import Trained, load_trained

TOKENS = 1 << 14  # of a batch, unless its size is said
PIECE = 2048  # tokens of a long text that are read at once
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")


@register_model("tidegate")
class TidegateLM(TemplateLM):
    """``--model tidegate --model_args path=RUN``: a run of `tidegate train`, or a saved model.

    Args:
        path: the folder; `pretrained` is another name for it.
        precision: auto, fp32, tf32 or bf16, as of `tidegate eval`.
        prefix_token_id: what comes before the first token of a text; default: the tokenizer's end
            of text, or else a line end, where `tidegate generate` begins, too.
        max_length: tokens that the model reads at most of a context and the continuation that is
            scored after it: contexts are cut from the left, and a longer continuation is refused.
            Default: none; a state has no longest context.
        max_gen_toks: tokens of a continuation whose task names no number.
        batch_size: sequences a forward pass; "auto": as many as have `TOKENS` tokens.

    Sequences are packed, not padded. The log-likelihood of a whole text reads each token once: the
    state is carried from piece to piece, however long the text is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        pretrained: str | None = None,
        device: str | None = None,
        precision: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        prefix_token_id: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        trained: Trained | None = None,
    ) -> None:
        super().__init__()
        if trained is None:
            path = pretrained if path is None else path
            if path is None:
                raise UserError("lm_eval: path: expected a run folder or a saved model, got none")
            trained = load_trained(str(path), "auto" if device is None else device)
        if not isinstance(trained.model, CausalLM):
            raise UserError(f"lm_eval: path: {path} holds a classifier, expected a language model")
        if trained.tokenizer is None:
            raise UserError(
                f"lm_eval: path: {path} was trained without text: it has no tokenizer, which every "
                "task needs"
            )
        self.model, self._text = trained.model, trained.tokenizer
        self._device = self.model.embedding.weight.device
        self.precision = trained.compute_in(precision)
        self.batch_size = _batch_size(batch_size)
        self.max_batch_size = max_batch_size
        self.max_length = None if max_length is None else _whole("max_length", max_length, 1)
        self.max_gen_toks = _whole("max_gen_toks", max_gen_toks, 0)
        self._prefix = None
        if prefix_token_id is not None:
            last = self.model.config.vocab_size - 1
            self._prefix = _whole("prefix_token_id", prefix_token_id, 0, last)

    # Text

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's end of text, where it has one by a usual name."""
        inner = getattr(self._text, "_inner", None)
        ids = [] if inner is None else [inner.token_to_id(name) for name in _ENDS]
        return next((i for i in ids if i is not None), None)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that comes before the first one of a text."""
        if self._prefix is not None:
            return self._prefix
        end = self.eot_token_id
        return int(self._text.encode(b"\n")[0]) if end is None else end

    @property
    def _prefix_is_a_mark(self) -> bool:
        return self._prefix is not None or self.eot_token_id is not None

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; no special ones are added, as in training."""
        return [int(i) for i in self._text.encode(string.encode("utf-8", "surrogateescape"))]

    def tok_decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are no UTF-8 become replacement characters."""
        return self._text.decode(ids).decode("utf-8", errors="replace")

    @property
    def tokenizer_name(self) -> str:
        return f"tidegate-{type(self._text).__name__}-{self._text.vocab_size}"

    # Log-likelihoods

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of the continuation in every (context, continuation), and whether each
        of its tokens is the likeliest one. Nothing after nothing is certain: lm_eval itself would
        look at its first token, and, where that is the prefix, too, not score it."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        asked, places = [], []
        for place, request in enumerate(requests):
            context, continuation = pair = request.args
            if context != "":
                asked.append((pair, *self._encode_pair(*pair)))
            elif ids := self.tok_encode(continuation):
                # A text may bring its own mark of the beginning; a line end is one of its tokens.
                begins = self._prefix_is_a_mark and ids[0] == self.prefix_token_id
                asked.append((pair, ids[:1], ids[1:]) if begins else (pair, [], ids))
            else:
                continue
            places.append(place)
        for place, answer in zip(
            places, self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm), strict=True
        ):
            found[place] = answer
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of the continuation in every (strings, context, continuation), and
        whether each of its tokens is the likeliest one."""
        if self.max_length is not None:
            longest = max((len(continuation) for _, _, continuation in requests), default=0)
            if longest > self.max_length:
                raise UserError(
                    f"lm_eval: max_length: expected {longest} or more, the tokens of the longest "
                    f"continuation, got {self.max_length}"
                )
        # A context of white space alone is empty here: lm_eval gives it to the continuation.
        ids = [
            self._cut((context or [self.prefix_token_id]) + continuation)
            for _, context, continuation in requests
        ]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods")
        for batch in self._batches([len(row) for row in ids]):
            counts = [len(requests[i][2]) for i in batch]
            for i, answer in zip(batch, self._score([ids[i] for i in batch], counts), strict=True):
                found[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            bar.update(len(batch))
        bar.close()
        return found

    @torch.no_grad()
    def _score(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """Scores the last `counts` tokens of each row, given all before them."""
        lengths = torch.tensor([len(row) - 1 for row in rows])
        ends = lengths.cumsum(0)
        read = [i for row in rows for i in row[:-1]]
        # Of no tokens at all, as of empty continuations alone, the dtype could not be seen.
        inputs = torch.tensor(read, dtype=torch.long, device=self._device)[None]
        bounds = F.pad(ends, (1, 0)).to(self._device)
        wanted = [torch.arange(e - n, e) for e, n in zip(ends.tolist(), counts, strict=True)]
        targets = [i for row, n in zip(rows, counts, strict=True) for i in row[len(row) - n :]]
        with autocast(self._device, self.precision):
            x, _ = self.model._run(self.model._embed(inputs), None, bounds)
            places = torch.cat(wanted).to(self._device)
            target = torch.tensor(targets, dtype=torch.long, device=self._device)
            logs, best = self._log_probabilities(x[0], places, target)
        return [
            (float(a.double().sum()), bool(b.all()))
            for a, b in zip(logs.split(counts), best.split(counts), strict=True)
        ]

    def _log_probabilities(
        self, x: Tensor, places: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log p of `targets` ``[P]`` after the hidden states x ``[T, dim]`` at `places`, and
        whether each is the likeliest; a few positions at a time, since logits are wide."""
        logs, best = [], []
        for at, target in zip(places.split(PIECE), targets.split(PIECE), strict=True):
            logits = self.model._logits(x[at]).float()
            logs.append(-F.cross_entropy(logits, target, reduction="none"))
            best.append(logits.argmax(-1) == target)
        return torch.cat(logs).cpu(), torch.cat(best).cpu()

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of every text, each token given all before it."""
        texts = [request.args[0] for request in requests]
        ids = [[self.prefix_token_id, *self.tok_encode(text)] for text in texts]
        found = [0.0] * len(ids)
        short = [i for i, row in enumerate(ids) if 1 < len(row) <= PIECE]
        bar = tqdm(total=len(ids), disable=disable_tqdm, desc="rolling log-likelihoods")
        for batch in self._batches([len(ids[i]) for i in short]):
            rows = [ids[short[i]] for i in batch]
            scores = self._score(rows, [len(row) - 1 for row in rows])
            for i, (score, _) in zip(batch, scores, strict=True):
                found[short[i]] = score
            bar.update(len(batch))
        for i, row in enumerate(ids):
            if len(row) > PIECE:
                found[i] = self._rolled(row)
                bar.update(1)
        bar.close()
        for text, score in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return found

    def _rolled(self, row: list[int]) -> float:
        """The log-likelihood of a long row after its first token, read piece by piece."""
        ids = torch.tensor(row, device=self._device)
        total = 0.0
        pieces = logits_in_pieces(self.model, ids[None, :-1], precision=self.precision, piece=PIECE)
        for start, logits in pieces:
            target = ids[start + 1 : start + 1 + logits.size(1)]
            total -= float(F.cross_entropy(logits[0], target, reduction="none").double().sum())
        return total

    # Continuations

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after the context of every (context, arguments), up to the first of
        arguments' `until` or to the end of text. Raises UserError, before anything is written, for
        arguments that would have no effect."""
        ids = [
            self._cut(self.tok_encode(request.args[0]) or [self.prefix_token_id], predicted=0)
            for request in requests
        ]
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        wanted = [
            _Wanted.of(requests[group[0]].args[1], self.max_gen_toks) for group in groups.values()
        ]
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="continuations")
        for group, how in zip(groups.values(), wanted, strict=True):
            for batch in self._batches([len(ids[i]) for i in group]):
                rows = [group[i] for i in batch]
                for i, text in zip(rows, self._write([ids[i] for i in rows], how), strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(rows))
        bar.close()
        return found

    def _write(self, rows: list[list[int]], wanted: _Wanted) -> list[str]:
        """Continuations of a batch of contexts."""
        until, count = wanted.until, wanted.count
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self._device)
        sampler = Sampler(wanted.sampling, ids, lengths, self.model.config.vocab_size)
        end = self.eot_token_id
        new: list[list[int]] = [[] for _ in rows]
        texts: list[str | None] = [None] * len(rows)
        with autocast(self._device, self.precision):
            logits, state = self.model.prefill(ids, lengths, capacity=count)
            for step in range(count):
                token = sampler(logits.float())
                for i, one in enumerate(token.tolist()):
                    if texts[i] is None:
                        new[i].append(one)
                        texts[i] = self._stopped(new[i], until, end)
                if None not in texts or step == count - 1:
                    break
                logits = self.model.step(token, state)
        return [
            _cut_at(self.tok_decode(tokens), until) if text is None else text
            for tokens, text in zip(new, texts, strict=True)
        ]

    def _stopped(self, tokens: list[int], until: list[str], end: int | None) -> str | None:
        """The text, where it has ended with the last of these tokens."""
        if end is not None and tokens[-1] == end:
            return _cut_at(self.tok_decode(tokens[:-1]), until)
        longest = max((len(stop.encode()) for stop in until), default=0)
        # A token is at least a byte, so a stop that the last one ends lies within as many of them.
        if longest == 0 or not any(s in self.tok_decode(tokens[-longest - 4 :]) for s in until):
            return None
        return _cut_at(self.tok_decode(tokens), until)

    # Batches

    def _cut(self, ids: list[int], predicted: int = 1) -> list[int]:
        """The last ids that max_length leaves; `predicted` more, since the model predicts the last
        of a continuation but does not read it."""
        return ids if self.max_length is None else ids[-(self.max_length + predicted) :]

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices of sequences, longest first, in batches of `batch_size`, or `TOKENS` tokens."""
        batch: list[int] = []
        tokens = 0
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if self.batch_size == "auto":
                full = tokens + lengths[i] > TOKENS
            else:
                full = len(batch) >= self.batch_size
            if batch and full:
                yield batch
                batch, tokens = [], 0
            batch.append(i)
            tokens += lengths[i]
        if batch:
            yield batch


_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True)
class _Wanted:
    """What a task's generation_kwargs ask for, under lm_eval's and transformers' names."""

    until: list[str]
    count: int
    sampling: SamplingOptions

    @classmethod
    def of(cls, arguments: dict[str, Any], count: int) -> _Wanted:
        """count: how many tokens where the arguments name no number. UserError, as of what
        transformers refuses, for an argument that is not among these."""
        known = ("until", *_COUNTS, *_SAMPLING, "num_beams")
        unknown = sorted(name for name in arguments if name not in known)
        if unknown:
            raise UserError(
                f"lm_eval: generation_kwargs: expected {', '.join(known)}; got {', '.join(unknown)}"
            )
        if arguments.get("num_beams") is not None:
            _whole("generation_kwargs: num_beams", arguments["num_beams"], 1, 1)
        until = arguments.get("until") or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        for name in _COUNTS:  # in lm_eval's order, should there be several
            if arguments.get(name) is not None:
                count = _whole(f"generation_kwargs: {name}", arguments[name], 0)
                break
        return cls(until, count, _sampling(arguments))


def _sampling(arguments: dict[str, Any]) -> SamplingOptions:
    """Greedy unless arguments, which have transformers' names, ask for draws."""
    draws = arguments.get("do_sample", float(arguments.get("temperature") or 0.0) > 0.0)
    penalty = float(arguments.get("repetition_penalty", 1.0))
    if draws:
        options = SamplingOptions(
            temperature=float(arguments.get("temperature", 1.0)),
            top_k=arguments.get("top_k") or None,  # 0 is transformers' word for none
            top_p=arguments.get("top_p"),
            min_p=arguments.get("min_p"),
            repetition_penalty=penalty,
            seed=arguments.get("seed"),
        )
    else:
        options = SamplingOptions(temperature=0.0, repetition_penalty=penalty)
    options.check("lm_eval: generation_kwargs")
    return options


def _whole(name: str, given: Any, least: int, most: int | None = None) -> int:
    """An argument as an integer; UserError, naming it, where it is none or out of range."""
    wanted = f"{least} or more" if most is None else f"{least} to {most}"
    wanted = str(least) if least == most else wanted
    try:
        value = int(given)
    except (TypeError, ValueError) as error:
        raise UserError(f"lm_eval: {name}: expected {wanted}, got {given!r}") from error
    if value < least or (most is not None and value > most):
        raise UserError(f"lm_eval: {name}: expected {wanted}, got {given!r}")
    return value


def _batch_size(given: int | str | None) -> int | str:
    if given is None or str(given).startswith("auto"):
        return "auto"
    if not str(given).isdecimal() or int(given) < 1:
        raise UserError(f"lm_eval: batch_size: expected auto or 1 or more, got {given!r}")
    return int(given)


def _cut_at(text: str, until: list[str]) -> str:
    """The text up to the first of the stops."""
    return text[: min([text.find(stop) for stop in until if stop in text], default=len(text))]
