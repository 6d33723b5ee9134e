"""Settings of training that cannot be are refused by name."""

from __future__ import annotations

import pytest

from tidegate.training import TrainConfig, UserError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "train: expected --steps or --minutes, got neither"),
        ({"batch_size": 0}, "train: batch-size: expected 1 or more, got 0"),
        ({"grad_accum": 3}, "train: grad-accum: expected a divisor of the batch size 16, got 3"),
        ({"schedule": "none"}, "train: schedule: expected one of constant, linear, .*got 'none'"),
        ({"schedule": "inverse-sqrt"}, "train: warmup-steps: expected 1 or more with inverse-sqrt"),
        ({"lr": 0.0}, "train: lr: expected more than 0, got 0.0"),
        ({"lr": float("inf")}, "train: lr: expected more than 0, got inf"),
        ({"betas": (2, 3)}, r"train: betas: expected two numbers from 0 to below 1, got \(2, 3\)"),
        ({"betas": (0.9,)}, "train: betas: expected two numbers from 0 to below 1"),
        ({"eps": -1.0}, "train: eps: expected 0 or more, got -1.0"),
        ({"clip": float("nan")}, "train: clip: expected 0 or more, got nan"),
        ({"weight_decay": -0.1}, "train: weight-decay: expected 0 or more, got -0.1"),
        ({"warmup_steps": -3}, "train: warmup-steps: expected 0 or more, got -3"),
        ({"warmup_fraction": 3.0}, "train: warmup-fraction: expected a number from 0 to below 1"),
        ({"floor": 3.0}, "train: floor: expected a number from 0 to 1, got 3.0"),
        (
            {"precision": "fp8"},
            "train: precision: expected one of auto, fp32, tf32, bf16, bf16-weights, got 'fp8'",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**{"steps": 10, **changes})
