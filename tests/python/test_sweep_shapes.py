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
    monkeypatch.setattr(sweep, "seconds", lambda *_: {"forward": 7e-5, "train": 4e-5})
    monkeypatch.setattr(sweep, "fla_call", lambda _: None)
    row = sweep.row_of(shape, known, "cpu", fla=True)
    rates = [known[near]["forward"] / near.work() for near in list(known)[1:]]
    assert row["forward"]["ratio"] == pytest.approx(6e-5 / shape.work() / max(rates), abs=1e-3)
    assert (row["forward"]["us"], row["forward"]["fla_us"], row["train"]["fla_us"]) == (60, 70, 40)
    alone = sweep.row_of(shape, known, "cpu", beside_tuned=False)
    assert alone["train"] == {"us": 30.0}


def test_what_is_worse_is_timed_twice(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One disturbed time is no cliff."""
    shape = sweep.Shape("hgru", torch.float32, 3, 100, 100)
    times: dict[object, list[float]] = {shape: [9e-4, 2e-5]}
    calls = []

    def seconds(each: object, *_: object) -> dict[str, float]:
        calls.append(each)
        return dict.fromkeys(sweep.DIRECTIONS, times.get(each, [1e-5]).pop(0))

    monkeypatch.setattr(sweep, "seconds", seconds)
    near = {sweep.tuned(shape, to) for to in (round, math.floor)}
    times |= {each: [1e-5, 1e-5] for each in near}
    row = sweep.row_of(shape, {}, "cpu", limit=2.0)
    assert row["forward"]["us"] == 20
    assert sorted(map(str, calls)) == sorted(map(str, [shape, shape, *near, *near]))
    assert not sweep.is_worse(row, 2.0)


def test_report_says_whether_all_is_well(
    sweep: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"us": 10.0, "tuned": "hgru float32 B2 T64 D64", "ratio": 1.5}
    fine = {"shape": "hgru float32 B3 T100 D100", "forward": found, "train": found | {"ratio": 1.8}}
    assert sweep.report([fine], 2.0, 5)
    assert "largest forward / train: 1.50 / 1.80" in capsys.readouterr().out
    slower = fine | {"train": {"us": 10.0, "fla_us": 9.0}, "forward": {"us": 1.0, "fla_us": 2.0}}
    for bad in (fine | {"train": found | {"ratio": 2.1}}, slower, {"shape": "x", "failed": "why"}):
        assert not sweep.report([fine, bad], 2.0, 5)
    assert "3 shapes" not in capsys.readouterr().out
