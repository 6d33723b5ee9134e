"""What every task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..batches import Batch
from ..errors import UserError


class Task(ABC):
    """A source of examples with exact answers. Subclasses are frozen dataclasses whose fields,
    integers, are the task's options.

    Attributes:
        name: what the command line calls it.
        vocab_size: ids are below it.
        length: tokens of the longest sequence.
        num_classes: of the one answer a sequence has; None where positions have answers of their
            own (labels aligned with positions, not shifted).
        chance: accuracy of guessing without looking.
        valid_examples: how many validation has.
        train_examples: how many training repeats; None = each step draws new ones.
    """

    name: ClassVar[str]
    num_classes: ClassVar[int | None] = None
    valid_examples: ClassVar[int] = 1024
    train_examples: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def length(self) -> int: ...

    @property
    @abstractmethod
    def chance(self) -> float: ...

    @abstractmethod
    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """`size` examples drawn from `generator`, on its device: ids ``[size, T]``; labels
        ``[size, T]``, -100 where nothing is asked, or ``[size]`` classes; lengths ``[size]`` on the
        CPU where sequences are padded to T on the right."""

    def valid_batch(self, first: int, size: int, generator: torch.Generator) -> Batch:
        """The validation examples from number `first` on; where they are drawn, `generator` is
        another one for every `first`."""
        return self.batch(size, generator)

    def _require(self, option: str, holds: bool, wanted: str) -> None:
        """Raises UserError naming task, option, expected and given."""
        if not holds:
            given = getattr(self, option)
            raise UserError(f"task: {self.name}: {option}: expected {wanted}, got {given!r}")
