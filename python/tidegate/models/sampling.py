"""Choosing the next token from logits, and a model's modes while it generates."""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._library import load

load()

# For each model, how many threads generate with it, and its modules' modes before the first did.
_generating: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = (
    weakref.WeakKeyDictionary()
)
_generating_lock = threading.Lock()
_LARGEST_SEED = (1 << 63) - 1


def whole(owner: str, name: str, value: Any, least: int | None = None) -> int:
    """The value as an int that the library can take; ValueError where it is none, is below `least`
    or does not fit 64 bits."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" >= {least}"
        raise ValueError(f"{owner}: {name}: expected an integer{bound}; got {value!r}")
    if not -_LARGEST_SEED <= number <= _LARGEST_SEED:
        raise ValueError(f"{owner}: {name}: expected an integer of 64 bits; got {value!r}")
    return number


def _number(
    owner: str, name: str, value: Any, wanted: str, is_right: Callable[[float], bool]
) -> None:
    """ValueError where the value is no number (text that spells one is none), or not as wanted."""
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = None
    given = " ".join(repr(value).split())[:80]
    if number is None:
        raise ValueError(f"{owner}: {name}: expected a number {wanted}; got {given}")
    if not is_right(number):
        raise ValueError(f"{owner}: {name}: expected {wanted}; got {given}")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout is off within, also where threads generate with one model at a time: the first to
    come notes the modules' modes and the last to go sets them again, also after an error."""
    with _generating_lock:
        threads, modes = _generating.get(model, (0, []))
        if threads == 0:
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
        _generating[model] = (threads + 1, modes)
    try:
        yield
    finally:
        with _generating_lock:
            threads, modes = _generating.pop(model)
            if threads > 1:
                _generating[model] = (threads - 1, modes)
            else:
                for module, mode in modes:
                    module.training = mode


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; see `CausalLM.generate`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def check(self, owner: str) -> None:
        """Raises ValueError, beginning with `owner`, for what is no number or out of its range."""
        _number(owner, "temperature", self.temperature, ">= 0", lambda x: x >= 0.0)
        if self.top_k is not None:
            whole(owner, "top_k", self.top_k, 1)
        of_any_size = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not of_any_size:
            whole(owner, "seed", self.seed)
        if self.top_p is not None:
            _number(owner, "top_p", self.top_p, "in (0, 1]", lambda x: 0.0 < x <= 1.0)
        if self.min_p is not None:
            _number(owner, "min_p", self.min_p, "in [0, 1]", lambda x: 0.0 <= x <= 1.0)
        penalty = self.repetition_penalty
        _number(owner, "repetition_penalty", penalty, "> 0", lambda x: x > 0.0)

    def seed_now(self) -> int:
        """The seed, as 63 bits; one from torch's default generator where there is none."""
        if self.seed is not None:
            return int(self.seed) & _LARGEST_SEED
        return int(torch.randint(_LARGEST_SEED, ())) if self.temperature > 0 else 0


class Sampler:
    """Draws one token a row from logits ``[B, vocab]``, as the library's engine draws them: the
    same tokens from the same logits and seed. The rows' first tokens are those of the prompts ids
    ``[B, T]``, cut to `lengths` where these are given, which matters to a repetition penalty."""

    def __init__(
        self, options: SamplingOptions, ids: Tensor, lengths: Tensor | None, vocab_size: int
    ) -> None:
        seen = None
        if options.repetition_penalty != 1.0:
            seen = torch.zeros(ids.size(0), vocab_size, dtype=torch.uint8, device=ids.device)
            for b, row in enumerate(ids):
                row = row if lengths is None else row[: int(lengths[b])]
                seen[b].index_fill_(0, row.long(), 1)
        self._rows = torch.classes.tidegate.RowSampler(
            ids.size(0),
            vocab_size,
            ids.device,
            float(options.temperature),
            options.top_k,
            None if options.top_p is None else float(options.top_p),
            None if options.min_p is None else float(options.min_p),
            float(options.repetition_penalty),
            options.seed_now(),
            seen,
        )

    def __call__(self, logits: Tensor) -> Tensor:
        """logits ``[B, vocab]`` -> int64 ``[B]``."""
        return self._rows.sample(logits)
