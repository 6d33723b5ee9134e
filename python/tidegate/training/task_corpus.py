"""A task in the place of a corpus: what it trains on is drawn, not read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator

import numpy as np
import torch

from .batches import Batch
from .distributed import ALONE, Group
from .errors import UserError
from .evaluate import Score, evaluate_batches
from .tasks import Task

_TRAIN, _VALID = 0, 1
# Validation has its own seed and batch, so that runs of all seeds and batch sizes are scored on the
# same examples (of one device: generators of CPU and CUDA differ).
_VALID_SEED, _VALID_BATCH = 0, 64


def draw(task: Task, size: int, device: torch.device, seed: int, split: int, index: int) -> Batch:
    """The batch number `index` of a split: the same for the same arguments on one device."""
    state = np.random.SeedSequence([seed, split, index]).generate_state(1, np.uint64)
    generator = torch.Generator(device).manual_seed(int(state[0]))
    if split == _VALID:
        return task.valid_batch(index * _VALID_BATCH, size, generator)
    return task.batch(size, generator)


class TaskSampler:
    """Batches of a task; `position`, the sequences given out so far, is the whole state."""

    def __init__(self, task: Task, batch: int, seed: int, device: torch.device) -> None:
        self.task = task
        self.size = batch
        self.seed = seed
        self.device = device
        self.position = 0
        self.batch_tokens = 0  # of the last batch
        self._share = (0, 1)

    def take_share(self, rank: int, size: int) -> None:
        """Makes next() return this process's part of every batch, which all `size` processes draw
        whole: so the examples are the same for any number of them."""
        self._share = (rank, size)

    def next(self) -> Batch:
        """The next batch, or this process's part of it, on the device."""
        index = self.position // self.size
        self.position += self.size
        if self.task.train_examples is not None:
            index %= max(1, self.task.train_examples // self.size)
        batch = draw(self.task, self.size, self.device, self.seed, _TRAIN, index)
        self.batch_tokens = batch.tokens
        rank, size = self._share
        return batch.chunk(size)[rank]


class TaskCorpus:
    """What `Corpus` is for text, over the examples of a task."""

    tokenizer_file = None

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name = task.name
        self.vocab_size = task.vocab_size
        self.num_classes = task.num_classes
        self.unit = "nats/answer"
        self.nats_per_unit = 1.0
        fields = json.dumps(self.options(), sort_keys=True)
        self.fingerprint = hashlib.sha256(f"{task.name} {fields}".encode()).hexdigest()

    def options(self) -> dict[str, int]:
        """All options of the task."""
        return dataclasses.asdict(self.task)

    def describe(self) -> dict[str, object]:
        """What the run's config.json records."""
        return {
            "name": self.name,
            "task": self.options(),
            "length": self.task.length,
            "valid_examples": self.task.valid_examples,
            "valid_bytes": None,
            "vocab_size": self.vocab_size,
            "chance": self.task.chance,
            "fingerprint": self.fingerprint,
        }

    def summary(self) -> str:
        """What there is to train on, in words."""
        return f"{self.name}: sequences of up to {self.task.length:,} tokens, drawn as it goes"

    def check_length(self, context: int) -> None:
        """Raises UserError when sequences have another length than `context`."""
        if context != self.task.length:
            raise UserError(
                f"context: {self.name} has sequences of {self.task.length} tokens by its options, "
                f"got {context}; change them with --task-option"
            )

    def sampler(self, batch: int, context: int, seed: int, device: torch.device) -> TaskSampler:
        """Training batches of the examples of a seed; context is the task's own."""
        return TaskSampler(self.task, batch, seed, device)

    def baselines(self) -> None:
        """None: tasks are compared with chance."""

    def valid_batches(self, device: torch.device, limit: int | None = None) -> Iterator[Batch]:
        """The validation examples, about `limit` tokens of them; None = all."""
        left = self.task.valid_examples
        if limit is not None:
            left = max(1, min(left, limit // self.task.length))
        index = 0
        while left > 0:
            size = min(left, _VALID_BATCH)
            yield draw(self.task, size, device, _VALID_SEED, _VALID, index)
            left -= size
            index += 1

    def score(
        self,
        model: torch.nn.Module,
        device: torch.device,
        precision: str,
        limit: int | None = None,
        trained: int | None = None,
        group: Group = ALONE,
    ) -> Score:
        """Loss and accuracy over the validation examples, or about `limit` tokens of them. trained
        is ignored: examples have the task's length. group: the processes that share the work."""
        batches = self.valid_batches(device, limit)
        return evaluate_batches(model, batches, device=device, precision=precision, group=group)
