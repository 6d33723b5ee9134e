"""scripts/sweep_shapes.py: the shapes it draws, what they are compared with, their baselines."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("sweep_shapes")


def shapes_of(sweep: ModuleType, count: int = 200) -> list:
    rng = random.Random(0)
    return [sweep.draw(rng, 2**26, 16384) for _ in range(count)]


def test_shapes_and_their_neighbours(sweep: ModuleType) -> None:
    for shape in shapes_of(sweep):
        assert shape.batch * shape.time * shape.channels <= 2**26
        assert not shape.head or shape.channels == shape.heads * shape.head
        for to in (round, math.floor):
            near = sweep.tuned(shape, to)
            sizes = near.batch, near.time, near.channels
            assert all(size & (size - 1) == 0 for size in sizes), near
        assert sweep.tuned(shape, math.floor).work() <= shape.work()


def test_baselines_are_shared_among_ops_and_types(sweep: ModuleType) -> None:
    shapes = shapes_of(sweep)
    chosen = sweep.beside_fla(shapes, 8)
    assert len({(shape.op, shape.dtype) for shape in chosen}) == 8
    assert all(sweep.has_baseline(shape) for shape in sweep.beside_fla(shapes, 1000))
    assert len(sweep.beside_fla(shapes, 1000)) == sum(map(sweep.has_baseline, shapes))


def test_a_row_is_beside_the_kinder_neighbour(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = sweep.Shape("hgru", torch.float32, 3, 100, 100)
    known = {
        shape: {"forward": 6e-5, "train": 3e-5},
        sweep.tuned(shape, round): {"forward": 1.0 * 2e-5, "train": 1e-5},
        sweep.tuned(shape, math.floor): {"forward": 1e-5, "train": 1e-5},
    }
    monkeypatch.setattr(sweep, "seconds", lambda *_: {"forward": 7e-5, "train": 2e-5})
    monkeypatch.setattr(sweep, "fla_call", lambda _: None)
    row = sweep.row_of(shape, known, "cpu", fla=True)
    rates = [known[near]["forward"] / near.work() for near in list(known)[1:]]
    assert row["forward"]["ratio"] == pytest.approx(6e-5 / shape.work() / max(rates), abs=1e-3)
    assert (row["forward"]["us"], row["forward"]["fla_us"], row["train"]["fla_us"]) == (60, 70, 20)
    alone = sweep.row_of(shape, known, "cpu", beside_tuned=False)
    assert alone["train"] == {"us": 30.0}
