"""Sequential images: a picture as a row of pixels, and its class; the data come with packages."""

from __future__ import annotations

import functools
import gzip
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UserError
from .task import Task


class Images(NamedTuple):
    """Pictures as rows of ids ``[N, T]`` int64 and their classes ``[N]`` int64."""

    ids: Tensor
    labels: Tensor


class SequentialImages(Task):
    """Pixels from left to right and from top to bottom, the brightness of each as its id.

    Training draws pictures of its part without repetition within a batch; validation reads all of
    the other part, in order.
    """

    num_classes: ClassVar[int] = 10

    @classmethod
    @abstractmethod
    def images(cls) -> tuple[Images, Images]:
        """The parts to train on and to validate on. Raises UserError when the package that brings
        them is not there."""

    @property
    def length(self) -> int:
        return self.images()[0].ids.size(1)

    @property
    def valid_examples(self) -> int:  # type: ignore[override]
        return len(self.images()[1].labels)

    @property
    def chance(self) -> float:
        return 1.0 / self.num_classes

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """See `Task`; labels ``[size]``."""
        ids, labels = self.images()[0]
        device = generator.device
        if size > len(labels):
            raise UserError(
                f"batch-size: {self.name} has {len(labels)} pictures to train on, got {size}"
            )
        chosen = torch.randperm(len(labels), generator=generator, device=device)[:size].cpu()
        return Batch(ids[chosen].to(device), labels[chosen].to(device))

    def valid_batch(self, first: int, size: int, generator: torch.Generator) -> Batch:
        """Pictures number `first` to `first + size` of the part to validate on."""
        device = generator.device
        part = slice(first, first + size)
        return Batch(*(values[part].to(device) for values in self.images()[1]))


@dataclass(frozen=True)
class Digits(SequentialImages):
    """scikit-learn's handwritten digits: 1797 pictures of 8 x 8 pixels in 17 shades, a fifth of
    them (every fifth) to validate on."""

    name: ClassVar[str] = "digits"
    vocab_size: ClassVar[int] = 17

    @classmethod
    def images(cls) -> tuple[Images, Images]:
        """See `SequentialImages`."""
        return _digits()


@dataclass(frozen=True)
class FashionMnist(SequentialImages):
    """Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) as Debian's dataset-fashion-mnist installs
    it: 60,000 pictures of 28 x 28 pixels in 256 shades to train on, 10,000 to validate on."""

    name: ClassVar[str] = "fashion-mnist"
    vocab_size: ClassVar[int] = 256
    folder: ClassVar[Path] = Path("/usr/share/datasets/fashion-mnist")

    @classmethod
    def images(cls) -> tuple[Images, Images]:
        """See `SequentialImages`."""
        return _fashion_mnist(cls.folder)


@functools.cache
def _digits() -> tuple[Images, Images]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "task: digits: the pictures come with scikit-learn: pip install scikit-learn"
        ) from error
    pictures, classes = load_digits(return_X_y=True)
    ids = torch.from_numpy(pictures.astype(np.int64))
    labels = torch.from_numpy(classes.astype(np.int64))
    held = torch.arange(len(labels)) % 5 == 4
    return Images(ids[~held], labels[~held]), Images(ids[held], labels[held])


@functools.cache
def _fashion_mnist(folder: Path) -> tuple[Images, Images]:
    return _idx_part(folder, "train"), _idx_part(folder, "t10k")


def _idx_part(folder: Path, part: str) -> Images:
    pictures = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
    classes = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
    if len(pictures) != len(classes):
        raise UserError(f"task: {folder}: {len(pictures)} pictures, but {len(classes)} classes")
    ids = torch.from_numpy(pictures.reshape(len(pictures), -1).astype(np.int64))
    return Images(ids, torch.from_numpy(classes.astype(np.int64)))


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """An array of bytes in the IDX format (two zero bytes, the type 8, the number of axes, then
    their sizes as big-endian 32-bit integers), compressed."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"task: fashion-mnist: no {path}; on Debian: apt install dataset-fashion-mnist"
        ) from error
    except (OSError, EOFError) as error:
        raise UserError(f"task: fashion-mnist: {path} cannot be read: {error}") from error
    start = 4 + 4 * axes
    sizes = np.frombuffer(content[4:start], ">u4") if len(content) >= start else []
    expected = start + int(np.prod(sizes, dtype=np.int64))
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != expected:
        raise UserError(f"task: fashion-mnist: {path} is not a whole IDX file of {axes} axes")
    return np.frombuffer(content[start:], np.uint8).reshape([int(size) for size in sizes])
