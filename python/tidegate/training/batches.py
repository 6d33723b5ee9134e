"""What a step sees: a function of seed and position alone, so that a run can resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORED = -100


class Batch(NamedTuple):
    """Sequences and what is asked of them.

    ids: int64 ``[B, T]``. labels: int64 ``[B, T]``, aligned with positions, -100 where nothing is
    asked, or ``[B]``, one class a sequence. lengths: ``[B]`` on the CPU where sequences are padded
    to T on the right, else None. cu_seqlens: int64 ``[N+1]``, the bounds of the sequences that are
    packed into a batch of one row, else None.
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding left out."""
        return self.ids.numel() if self.lengths is None else int(self.lengths.sum())

    def chunk(self, parts: int) -> list[Batch]:
        """The rows in `parts` equal parts."""
        columns = [[None] * parts if x is None else x.chunk(parts) for x in self]
        return [Batch(*row) for row in zip(*columns, strict=True)]

    def run(
        self,
        model: Callable[..., Any],
        device: torch.device,
        *,
        logits: bool = False,
        **options: Any,
    ) -> tuple[Any, Tensor]:
        """The model's output for this batch on `device`, and the labels there. logits: whether a
        language model returns them beside the loss; a classifier always does. options: further
        ones of the model's."""
        given: dict[str, Any] = dict(options)
        if logits and self.labels.dim() == 2:
            given["return_logits"] = True
        if self.lengths is not None:
            given["lengths"] = self.lengths
        if self.cu_seqlens is not None:
            given["cu_seqlens"] = self.cu_seqlens.to(device)
        labels = self.labels.to(device)
        return model(self.ids.to(device), labels, **given), labels


def count_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """How many labels that are not -100 the likeliest logits hit, and how many there are: ``[2]``
    int64, on the device. logits ``[..., C]``, labels ``[...]``."""
    asked = labels != IGNORED
    right = (logits.argmax(dim=-1) == labels) & asked
    return torch.stack([right.sum(), asked.sum()])


class WindowOrder:
    """Windows of `context` + 1 tokens in a shuffled order.

    Each epoch cuts the tokens into windows, starting at a random phase, and visits every window
    once in random order. The order is drawn from (seed, epoch), so `position`, the number of
    windows given out so far, is the whole state: set it to go on from there.

    tokens: 1-D integer array (memory-mapped ones are read window by window).
    """

    def __init__(self, tokens: np.ndarray, batch: int, context: int, seed: int) -> None:
        if len(tokens) < context + 1:
            raise ValueError(
                f"{type(self).__name__}: tokens: expected {context + 1} or more, got {len(tokens)}"
            )
        self.tokens = tokens
        self.batch = batch
        self.context = context
        self.seed = seed
        self.position = 0
        self.batch_tokens = batch * context
        self._share = (0, 1)
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

    def take_share(self, rank: int, size: int) -> None:
        """Makes next() return this process's part of every batch, which `size` processes read."""
        self._share = (rank, size)

    def _next_starts(self) -> list[int]:
        """Where the windows of this process's part of the next batch begin."""
        found = []
        for _ in range(self.batch):
            epoch, index = divmod(self.position, self.windows)
            self._load_epoch(epoch)
            found.append(int(self._starts[index]))
            self.position += 1
        rank, size = self._share
        return found[rank * self.batch // size : (rank + 1) * self.batch // size]


class WindowSampler(WindowOrder):
    """Batches of windows as rows."""

    def next(self) -> Batch:
        """ids and labels ``[batch, context]``; labels are the tokens that follow."""
        starts = self._next_starts()
        rows = np.empty((len(starts), self.context + 1), dtype=np.int64)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.tokens[start : start + self.context + 1]
        block = torch.from_numpy(rows)
        return Batch(block[:, :-1].contiguous(), block[:, 1:].contiguous())


class PackedSampler(WindowOrder):
    """Batches of windows laid end to end, in which a sequence ends where its document does.

    documents: where each begins in `tokens`, rising, int64 ``[N]``.
    """

    def __init__(
        self, tokens: np.ndarray, documents: np.ndarray, batch: int, context: int, seed: int
    ) -> None:
        super().__init__(tokens, batch, context, seed)
        self.documents = documents
        # Every batch has as many bounds, for CUDA graphs: enough for any.
        ends = np.searchsorted(documents, documents + context)
        most = int((ends - np.arange(len(documents))).max(initial=0))
        self._bounds = 1 + min(most, context)

    def next(self) -> Batch:
        """ids and labels ``[1, batch * context]``, with cu_seqlens, which is padded with empty
        sequences at its end."""
        spans = [(start, start + self.context) for start in self._next_starts()]
        bounds = len(spans) * self._bounds + 1
        return packed(self.tokens, self.documents, spans, bounds=bounds)


def packed(
    tokens: np.ndarray,
    documents: np.ndarray,
    spans: Sequence[tuple[int, int]],
    *,
    bounds: int | None = None,
) -> Batch:
    """The tokens [begin, end) of each span, end to end; a sequence is what a span holds of one
    document. Labels are the tokens that follow; nothing is asked where none of the document does.

    bounds: pad cu_seqlens to so many with empty sequences.
    """
    ids, labels, cu_seqlens, total = [], [], [0], 0
    for begin, end in spans:
        low, high = np.searchsorted(documents, [begin + 1, end + 1])
        first = documents[low:high]  # tokens begin + 1 .. end that begin a document
        piece = np.asarray(tokens[begin : end + 1], dtype=np.int64)
        follow = piece[1:].copy()
        follow[first - begin - 1] = IGNORED
        if len(follow) < end - begin:  # the text's last token
            follow = np.append(follow, IGNORED)
        ids.append(piece[: end - begin])
        labels.append(follow)
        cu_seqlens.extend((first[first < end] - begin + total).tolist())
        total += end - begin
        cu_seqlens.append(total)
    if bounds is not None:
        cu_seqlens += [total] * (bounds - len(cu_seqlens))
    rows = (torch.from_numpy(np.concatenate(parts))[None] for parts in (ids, labels))
    return Batch(*rows, cu_seqlens=torch.tensor(cu_seqlens))


def windows_within(documents: np.ndarray, total: int, length: int, most: int) -> np.ndarray:
    """Where at most `most` windows of `length` + 1 of `total` tokens begin that lie within a
    document each and share no token that is read; every document has its windows spread over it,
    with equal gaps. Empty where no document is long enough.
    """
    sizes = np.diff(np.append(documents, total))
    found = []
    for begin, size in zip(documents, sizes, strict=True):
        count = (size - 1) // length
        gap = (size - 1 - count * length) / (count + 1)
        found.extend(begin + np.floor(gap * (n + 1)) + n * length for n in range(int(count)))
    starts = np.asarray(found, dtype=np.int64)
    if len(starts) <= most:
        return starts
    return starts[np.linspace(0, len(starts) - 1, most).astype(np.int64)]


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

    def take_share(self, rank: int, size: int) -> bool:
        """Leaves this process's part of the rows, where `size` read them. False: there is none, and
        it reads a row that does not count, as all have to read as often."""
        own = self._rows[rank::size]
        self._rows = own or self._rows[:1]
        return bool(own)

    def __len__(self) -> int:
        return -(-self.length // self.context)

    def __iter__(self):
        for start in range(0, self.length, self.context):
            end = min(start + self.context, self.length)
            block = np.stack([row[start : end + 1].astype(np.int64) for row in self._rows])
            ids = torch.from_numpy(block)
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
