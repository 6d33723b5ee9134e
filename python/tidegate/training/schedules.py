"""Learning-rate schedules.

Every schedule is a warm-up followed by a decay, both expressed as a multiplier of the peak rate.
`progress` is the part of the run that is done, in [0, 1]: steps over steps when the run has a fixed
number of them, or seconds over seconds when it has a wall-time budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt")


@dataclass(frozen=True)
class Schedule:
    """Multiplier of the peak learning rate.

    Attributes:
        name: one of SCHEDULES.
        warmup_steps: linear warm-up over this many steps (0: none).
        warmup_fraction: linear warm-up over this part of the run, for runs bounded by wall time;
            used when warmup_steps is 0.
        floor: what `linear` and `cosine` end at, as a part of the peak.
    """

    name: str = "cosine"
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {self.name!r}")
        if not 0 <= self.warmup_steps < math.inf:
            raise ValueError(f"warmup_steps: expected 0 or more, got {self.warmup_steps}")
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ValueError(
                f"warmup_fraction: expected a number from 0 to below 1, got {self.warmup_fraction}"
            )
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor: expected a number from 0 to 1, got {self.floor}")

    def warmup(self, step: int, progress: float) -> float:
        """The warm-up factor in (0, 1] of step number `step` (from 0)."""
        if self.warmup_steps:
            return min(1.0, (step + 1) / self.warmup_steps)
        if self.warmup_fraction:
            # The first step would otherwise have a rate of zero and be wasted.
            return min(1.0, max(progress / self.warmup_fraction, 0.02))
        return 1.0

    def __call__(self, step: int, progress: float) -> float:
        """The multiplier for step number `step` (from 0) when `progress` of the run is done."""
        warm = self.warmup(step, progress)
        done = min(1.0, max(0.0, progress))
        if self.name == "linear":
            return warm * (self.floor + (1.0 - self.floor) * (1.0 - done))
        if self.name == "cosine":
            return warm * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
        if self.name == "inverse-sqrt":
            # This is fairseq's `inverse_sqrt`: continuous at the end of the warm-up, where it is 1.
            start = max(1, self.warmup_steps)
            return warm if step + 1 <= start else math.sqrt(start / (step + 1))
        return warm
