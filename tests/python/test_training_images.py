"""Sequential images: every picture against its source, pixel by pixel, and runs on them."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch
from training_cases import prepare

from tidegate.training import UserError
from tidegate.training.report import finish
from tidegate.training.task_corpus import TaskCorpus
from tidegate.training.tasks import Digits, FashionMnist

CPU = torch.device("cpu")


def all_of(task, generator=None):
    """(pixels, class) of every validation example, in order."""
    corpus = TaskCorpus(task)
    return [
        (tuple(ids.tolist()), int(label))
        for batch in corpus.valid_batches(CPU)
        for ids, label in zip(batch.ids, batch.labels, strict=True)
    ]


def test_digits_are_the_pictures_row_by_row():
    datasets = pytest.importorskip("sklearn.datasets")
    pictures = datasets.load_digits()
    known = {}
    for image, label in zip(pictures.images, pictures.target, strict=True):
        pixels = tuple(int(image[y][x]) for y in range(8) for x in range(8))
        known[pixels] = int(label)
    task = Digits()
    assert (task.length, task.vocab_size, task.num_classes) == (64, 17, 10)
    valid = all_of(task)
    assert len(valid) == task.valid_examples == 359
    train = [tuple(row.tolist()) for row in task.images()[0].ids]
    assert len(train) + len(valid) == len(pictures.target)
    assert all(known[pixels] == label for pixels, label in valid)
    batch = task.batch(200, torch.Generator().manual_seed(3))
    drawn = [tuple(row.tolist()) for row in batch.ids]
    assert len(set(drawn)) == 200
    assert set(drawn) <= set(train)
    assert not set(drawn) & {pixels for pixels, _ in valid}
    assert [known[pixels] for pixels in drawn] == batch.labels.tolist()


def test_a_classifier_learns_digits(tmp_path):
    pytest.importorskip("sklearn")
    settings = {"batch_size": 64, "steps": 200, "lr": 1e-2, "schedule": "linear"}
    run = prepare(tmp_path / "run", "digits", context=64, model={"dim": 32}, **settings)
    assert run.trainer.run(quiet=True)
    assert finish(run).accuracy > 0.3  # 0.49 was seen; guessing: 0.1


def write_idx(path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


@pytest.fixture
def garments(tmp_path, monkeypatch):
    """A folder like Debian's with 7 + 5 pictures; returns pictures and classes a part."""
    generator = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 7), ("t10k", 5)):
        pictures = generator.integers(0, 256, (count, 28, 28))
        classes = generator.integers(0, 10, count)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pictures)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", classes)
        parts[part] = (pictures, classes)
    monkeypatch.setattr(FashionMnist, "folder", tmp_path)
    return tmp_path, parts


def test_fashion_mnist_is_read_row_by_row(garments):
    _, parts = garments
    task = FashionMnist()
    assert (task.length, task.valid_examples) == (784, 5)
    pictures, classes = parts["t10k"]
    for (pixels, label), picture, wanted in zip(all_of(task), pictures, classes, strict=True):
        assert list(pixels) == [int(value) for row in picture for value in row]
        assert label == wanted
    batch = task.batch(7, torch.Generator().manual_seed(0))
    rows = {tuple(p.reshape(-1).tolist()): int(c) for p, c in zip(*parts["train"], strict=True)}
    assert [rows[tuple(ids.tolist())] for ids in batch.ids] == batch.labels.tolist()


@pytest.mark.skipif(not FashionMnist.folder.is_dir(), reason="no dataset-fashion-mnist here")
def test_fashion_mnist_as_debian_installs_it():
    """Its size, its classes and the mean and deviation that are published for it."""
    train, valid = FashionMnist.images()
    assert (tuple(train.ids.shape), tuple(valid.ids.shape)) == ((60_000, 784), (10_000, 784))
    assert (train.labels.bincount().tolist(), valid.labels.bincount().tolist()) == (
        [6_000] * 10,
        [1_000] * 10,
    )
    shades = train.ids.float() / 255
    assert (round(shades.mean().item(), 4), round(shades.std().item(), 4)) == (0.2860, 0.3530)


def test_more_pictures_than_there_are(garments):
    with pytest.raises(
        UserError, match="batch-size: fashion-mnist has 7 pictures to train on, got"
    ):
        FashionMnist().batch(8, torch.Generator())


def test_missing_and_damaged_files(garments, tmp_path):
    folder, _ = garments
    images = folder / "train-images-idx3-ubyte.gz"
    whole = gzip.decompress(images.read_bytes())
    images.write_bytes(gzip.compress(whole[:-1]))
    with pytest.raises(UserError, match="is not a whole IDX file of 3 axes"):
        FashionMnist.images()
    images.write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot be read"):
        FashionMnist.images()
    images.unlink()
    with pytest.raises(UserError, match="apt install dataset-fashion-mnist"):
        FashionMnist.images()
    write_idx(images, np.zeros((3, 28, 28)))
    with pytest.raises(UserError, match="3 pictures, but 7 classes"):
        FashionMnist.images()


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    from tidegate.training.tasks import images

    images._digits.cache_clear()
    with pytest.raises(UserError, match="pip install scikit-learn"):
        Digits.images()
