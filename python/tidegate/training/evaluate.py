"""Validation: cross-entropy over text with the state carried along, and over a task's examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from .batches import IGNORED, Batch, Streams, count_answers, packed
from .distributed import ALONE, Group
from .runtime import autocast


@dataclass(frozen=True)
class Score:
    """nats: mean cross-entropy a token, natural logarithm. tokens: how many were predicted.
    bits_per_byte: None where the text behind the tokens is unknown. accuracy: the share of a task's
    answers that the model's likeliest one hits; None for text."""

    nats: float
    tokens: int
    bits_per_byte: float | None
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(nats), a token; infinite where that overflows."""
        return math.exp(self.nats) if self.nats < 700 else math.inf


T = TypeVar("T")
PIECE = 512  # of models that carry their state


def context_for(model: torch.nn.Module, trained: int | None) -> int:
    """How many tokens `evaluate` should read at a time: the context of training (None: unknown)
    where the model does not carry a state from one piece to the next."""
    mixers = [block.mixer for block in getattr(model, "blocks", [])]
    keeps = any(getattr(mixer, "keeps_tokens", False) for mixer in mixers)
    return trained if keeps and trained is not None else PIECE


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    tokens: np.ndarray,
    *,
    valid_bytes: int | None,
    device: torch.device,
    precision: str = "fp32",
    context: int = PIECE,
    rows: int = 32,
    limit: int | None = None,
    group: Group = ALONE,
) -> Score:
    """Mean cross-entropy of `tokens` (1-D integers, two or more).

    The tokens are read as `rows` streams side by side, `context` at a time, with the state carried
    from one piece to the next: every token is predicted from all that came before it in its row.
    Attention, whose state holds the tokens themselves, reads every piece by itself: its context
    should be that of training (`context_for`). limit: about how many tokens to read, spread over
    the whole; None = all. group: the processes that share the streams.
    """
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    state = None
    streams = Streams(tokens, rows, context, limit)
    counts = streams.take_share(group.rank, group.size)
    try:
        for ids, labels in streams:
            group.meet()
            with autocast(device, precision):
                output = model(ids.to(device), labels.to(device), state=state)
            state = output.state
            total += output.loss.double().cpu() * labels.numel() * counts
            count += labels.numel() * counts
    finally:
        model.train(training)
    total, count = _summed(group, total, count)
    nats = total / count
    bits = None
    if valid_bytes is not None:
        bits = nats / math.log(2) * len(tokens) / valid_bytes
    return Score(nats, count, bits)


@torch.no_grad()
def evaluate_packed(
    model: torch.nn.Module,
    tokens: np.ndarray,
    documents: np.ndarray,
    *,
    valid_bytes: int | None,
    device: torch.device,
    precision: str,
    context: int,
    rows: int = 32,
    limit: int | None = None,
    group: Group = ALONE,
) -> Score:
    """Mean cross-entropy of `tokens`, read as in training on packed documents: windows of `context`
    tokens, each by itself, whose sequences end where documents do; so every model sees as much.

    documents: where each begins, int64 ``[N]``. limit: about how many tokens to read, in windows
    spread over the whole; None = all. group: the processes that share the windows.
    """
    starts = np.arange(0, len(tokens) - 1, context)
    # A window in which every token begins a document asks for nothing.
    ends = np.minimum(starts + context, len(tokens) - 1)
    begun = np.searchsorted(documents, ends, "right") - np.searchsorted(documents, starts, "right")
    starts = starts[begun < ends - starts]
    if limit is not None and limit < len(tokens):
        count = max(1, min(len(starts), limit // context))
        starts = starts[np.linspace(0, len(starts) - 1, count).astype(np.int64)]
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    asked = 0
    try:
        for first, counts in _share_of(list(range(0, len(starts), rows)), group):
            group.meet()
            spans = [(int(s), min(int(s) + context, len(tokens))) for s in starts[first:][:rows]]
            batch = packed(tokens, documents, spans)
            count = int((batch.labels != IGNORED).sum()) * counts
            with autocast(device, precision):
                output, _ = batch.run(model, device)
            total += output.loss.double() * count
            asked += count
    finally:
        model.train(training)
    total, asked = _summed(group, total.cpu(), asked)
    nats = total / asked
    bits = None
    if valid_bytes is not None:
        bits = nats / math.log(2) * len(tokens) / valid_bytes
    return Score(nats, asked, bits)


@torch.no_grad()
def evaluate_batches(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device,
    precision: str,
    group: Group = ALONE,
) -> Score:
    """Mean cross-entropy and accuracy over the answers that `batches` ask for. group: the processes
    that share the batches, each of which is given all."""
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.int64)
    try:
        for batch, is_own in _share_of(batches, group):
            group.meet()
            with autocast(device, precision):
                output, labels = batch.run(model, device, logits=True)
            found = count_answers(output.logits, labels).cpu() * is_own
            total += output.loss.double().cpu() * found[1]
            counts += found
    finally:
        model.train(training)
    right, asked = group.sum(counts).tolist()
    return Score(float(group.sum(total)) / asked, asked, None, right / asked)


def _share_of(items: Iterable[T], group: Group) -> Iterator[tuple[T, bool]]:
    """This process's part of the items, every `size`-th, and whether each counts. All processes get
    as many: where they do not go round, some get the last one of their round again."""
    part: list[T] = []
    for item in items:
        part.append(item)
        if len(part) == group.size:
            yield part[group.rank], True
            part = []
    if part:
        has_own = group.rank < len(part)
        yield part[group.rank if has_own else -1], has_own


def _summed(group: Group, total: torch.Tensor, count: int) -> tuple[float, int]:
    """What all processes found: a sum of losses, and of how many."""
    counts = group.sum(torch.tensor(count))
    return float(group.sum(total)), int(counts)
