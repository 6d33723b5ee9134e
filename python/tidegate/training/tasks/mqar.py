"""Multi-query associative recall: name the values of keys that were read once, long before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..batches import IGNORED, Batch
from .task import Task

PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}


def _distinct(low: int, high: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different integers from [low, high) in random order, a row: ``[size, count]``."""
    keys = torch.rand(size, high - low, generator=generator, device=generator.device)
    return keys.topk(count, dim=1).indices + low


@dataclass(frozen=True)
class Mqar(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927), as HGRN2's paper has it
    (arXiv 2404.07904, section 4.1).

    `pairs` keys, each followed by its value, then the keys once more in random places, each of
    which asks for the value at its own position, and 0 everywhere else::

        ids     k1 v1 k2 v2 | k2  0  0  0 k1  0
        labels   .  .  .  . | v2  .  .  . v1  .

    Keys are drawn without replacement from 1 .. vocabulary/2 - 1, values from the upper half. The
    places are every second position after the pairs: place j = 1, 2, ... is drawn without
    replacement with weight j^(power - 1), so that most keys are asked for soon.

    Options: length (even), pairs (0: 4, 8, 16, 64 for the lengths 64, 128, 256, 512, and a
    sixteenth of another length), vocabulary, train_examples.
    """

    name: ClassVar[str] = "mqar"
    valid_examples: ClassVar[int] = 3000
    power: ClassVar[float] = 0.01
    length: int = 256
    pairs: int = 0
    vocabulary: int = 8192
    train_examples: int = 100_000

    def __post_init__(self) -> None:
        if self.pairs == 0:
            object.__setattr__(self, "pairs", PAIRS.get(self.length, max(1, self.length // 16)))
        self._require("pairs", self.pairs >= 1, "0 or more")
        fits = self.length % 2 == 0 and self.length >= 4 * self.pairs
        self._require("length", fits, f"an even number of 4 * pairs = {4 * self.pairs} or more")
        least = 2 * self.pairs + 2
        fits = self.vocabulary % 2 == 0 and self.vocabulary >= least
        self._require("vocabulary", fits, f"an even number of {least} or more")
        self._require("train_examples", self.train_examples >= 1, "1 or more")

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def chance(self) -> float:
        """The share that guessing among the sequence's values gets right."""
        return 1.0 / self.pairs

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """See `Task`; `pairs` answers a row, at the positions of the queries."""
        where = {"device": generator.device, "dtype": torch.int64}
        half, told = self.vocabulary // 2, 2 * self.pairs
        keys = _distinct(1, half, size, self.pairs, generator)
        values = _distinct(half, self.vocabulary, size, self.pairs, generator)
        places = torch.arange(1, (self.length - told) // 2 + 1, device=generator.device)
        weights = (places.double() ** (self.power - 1.0)).float().expand(size, -1)
        asked = told + 2 * torch.multinomial(weights, self.pairs, generator=generator)
        ids = torch.zeros(size, self.length, **where)
        ids[:, 0:told:2], ids[:, 1:told:2] = keys, values
        ids.scatter_(1, asked, keys)
        labels = torch.full_like(ids, IGNORED).scatter_(1, asked, values)
        return Batch(ids, labels)
