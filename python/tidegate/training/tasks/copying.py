"""The copying tasks: remember tokens over a long stretch of nothing, then say them in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..batches import IGNORED, Batch
from .task import Task


@dataclass(frozen=True)
class Copying(Task):
    """The copying task (Arjovsky et al. 2016, arXiv 1511.06464).

    With N tokens: M tokens drawn from 1 .. N-2, then T dummies (0), then M times N-1, where the M
    tokens are asked for in their order. Length T + 2M.

    Options: tokens = N, memorize = M, dummies = T.
    """

    name: ClassVar[str] = "copying"
    tokens: int = 10
    memorize: int = 10
    dummies: int = 500

    def __post_init__(self) -> None:
        self._require("tokens", self.tokens >= 3, "3 or more")
        self._require("memorize", self.memorize >= 1, "1 or more")
        self._require("dummies", self.dummies >= 0, "0 or more")

    @property
    def vocab_size(self) -> int:
        return self.tokens

    @property
    def length(self) -> int:
        return self.dummies + 2 * self.memorize

    @property
    def chance(self) -> float:
        return 1.0 / (self.tokens - 2)

    def _positions(self, size: int, generator: torch.Generator) -> torch.Tensor:
        """Where the tokens to remember stand ``[size, M]``, rising along a row."""
        first = torch.arange(self.memorize, device=generator.device)
        return first.expand(size, self.memorize)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """See `Task`; one answer at each of the last M positions."""
        where = {"device": generator.device, "dtype": torch.int64}
        shape = (size, self.memorize)
        asked = torch.randint(1, self.tokens - 1, shape, generator=generator, **where)
        ids = torch.zeros(size, self.length, **where)
        ids.scatter_(1, self._positions(size, generator), asked)
        ids[:, -self.memorize :] = self.tokens - 1
        labels = torch.full_like(ids, IGNORED)
        labels[:, -self.memorize :] = asked
        return Batch(ids, labels)


@dataclass(frozen=True)
class SelectiveCopying(Copying):
    """The selective copying task (Jing et al. 2019, arXiv 1706.02761): `Copying` with the M tokens
    at random positions among the first T + M, every choice of positions as likely."""

    name: ClassVar[str] = "selective-copying"
    tokens: int = 16
    memorize: int = 16

    def _positions(self, size: int, generator: torch.Generator) -> torch.Tensor:
        places = self.dummies + self.memorize
        keys = torch.rand(size, places, generator=generator, device=generator.device)
        return keys.argsort(dim=1)[:, : self.memorize].sort(dim=1).values
