"""Learning-rate schedules: their shapes, and settings that cannot be."""

from __future__ import annotations

import pytest

from tidegate.training import Schedule


def test_inverse_sqrt_warms_up_then_falls_with_the_root_of_the_step():
    schedule = Schedule("inverse-sqrt", warmup_steps=4000)
    assert schedule(0, 0.0) == pytest.approx(1 / 4000)
    assert schedule(1999, 0.04) == pytest.approx(0.5)
    assert schedule(3999, 0.08) == 1.0
    assert schedule(15999, 0.32) == pytest.approx(0.5)


def test_cosine_and_linear_end_at_their_floor():
    for name in ("cosine", "linear"):
        schedule = Schedule(name, floor=0.1)
        assert schedule(0, 0.0) == pytest.approx(1.0)
        assert schedule(50, 0.5) == pytest.approx(0.55)
        assert schedule(99, 1.0) == pytest.approx(0.1)


def test_warm_up_by_part_of_the_run_never_starts_at_zero():
    schedule = Schedule("constant", warmup_fraction=0.1)
    assert 0 < schedule(0, 0.0) < 0.1
    assert schedule(7, 0.05) == pytest.approx(0.5)
    assert schedule(7, 0.2) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sqrt"}, r"schedule: expected one of .*cosine.*got 'sqrt'"),
        ({"warmup_steps": -1}, "warmup_steps: expected 0 or more, got -1"),
        ({"warmup_fraction": 1.0}, "warmup_fraction: expected a number from 0 to below 1, got 1.0"),
        ({"floor": float("nan")}, "floor: expected a number from 0 to 1, got nan"),
    ],
)
def test_schedules_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**changes)
