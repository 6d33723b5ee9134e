"""What a step sees: a function of seed and position alone, so that a run can resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORED = -100


class Batch(NamedTuple):
    """Sequences and what is asked of them.

    ids: int64 ``[B, T]``. labels: int64 ``[B, T]``, aligned with positions, -100 where nothing is
    asked, or ``[B]``, one class a sequence. lengths: ``[B]`` on the CPU where sequences are padded
    to T on the right, else None.
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding left out."""
        return self.ids.numel() if self.lengths is None else int(self.lengths.sum())

    def chunk(self, parts: int) -> list[Batch]:
        """The rows in `parts` equal parts."""
        columns = [[None] * parts if x is None else x.chunk(parts) for x in self]
        return [Batch(*row) for row in zip(*columns, strict=True)]

    def run(self, model: Callable[..., Any], device: torch.device) -> tuple[Any, Tensor]:
        """The model's output for this batch on `device`, and the labels there."""
        lengths = {} if self.lengths is None else {"lengths": self.lengths}
        labels = self.labels.to(device)
        return model(self.ids.to(device), labels, **lengths), labels


def count_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """How many labels that are not -100 the likeliest logits hit, and how many there are: ``[2]``
    int64, on the device. logits ``[..., C]``, labels ``[...]``."""
    asked = labels != IGNORED
    right = (logits.argmax(dim=-1) == labels) & asked
    return torch.stack([right.sum(), asked.sum()])


class WindowSampler:
    """Batches of windows of `context` + 1 tokens in a shuffled order.

    Each epoch cuts the tokens into windows, starting at a random phase, and visits every window
    once in random order. The order is drawn from (seed, epoch), so `position`, the number of
    windows given out so far, is the whole state: set it to go on from there.

    tokens: 1-D integer array (memory-mapped ones are read window by window).
    """

    def __init__(self, tokens: np.ndarray, batch: int, context: int, seed: int) -> None:
        if len(tokens) < context + 1:
            raise ValueError(
                f"WindowSampler: tokens: expected {context + 1} or more, got {len(tokens)}"
            )
        self.tokens = tokens
        self.batch = batch
        self.context = context
        self.seed = seed
        self.position = 0
        # One window fewer than fit leaves room for the phase.
        self.windows = max(1, (len(tokens) - 1) // context - 1)
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def _load_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        slack = len(self.tokens) - 1 - self.windows * self.context
        phase = int(generator.integers(0, slack + 1))
        self._starts = phase + self.context * generator.permutation(self.windows)
        self._epoch = epoch

    def next(self) -> Batch:
        """ids and labels ``[batch, context]``; labels are the tokens that follow."""
        rows = np.empty((self.batch, self.context + 1), dtype=np.int64)
        for row in rows:
            epoch, index = divmod(self.position, self.windows)
            self._load_epoch(epoch)
            start = self._starts[index]
            row[:] = self.tokens[start : start + self.context + 1]
            self.position += 1
        block = torch.from_numpy(rows)
        return Batch(block[:, :-1].contiguous(), block[:, 1:].contiguous())


class Streams:
    """The tokens as `rows` contiguous streams read side by side, `context` tokens at a time.

    For evaluation with the recurrent state carried along: every token but the first of a row is
    predicted from all that came before it in its row. limit: read only the beginning of each row,
    about so many tokens in all; None = everything.
    """

    def __init__(
        self, tokens: np.ndarray, rows: int, context: int, limit: int | None = None
    ) -> None:
        rows = max(1, min(rows, (len(tokens) - 1) // 2))
        spacing = (len(tokens) - 1) // rows
        self.context = context
        self.length = spacing if limit is None else max(1, min(spacing, limit // rows))
        starts = range(0, rows * spacing, spacing)
        self._rows = [tokens[start : start + self.length + 1] for start in starts]

    def __len__(self) -> int:
        return -(-self.length // self.context)

    def __iter__(self):
        for start in range(0, self.length, self.context):
            end = min(start + self.context, self.length)
            block = np.stack([row[start : end + 1].astype(np.int64) for row in self._rows])
            ids = torch.from_numpy(block)
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
