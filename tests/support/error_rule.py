"""The error rule of docs/numerics.md: how far from the oracle a result may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from support.recurrence import state_dtype

# The floor beside twice the yardstick's error, relative to what is compared: (of the norm, of the
# largest number). Where a handful of numbers decide, the yardstick may have rounded none of them;
# over many, luck averages out.
_UNIT = torch.finfo(torch.float32).eps
FLOOR = (2 * _UNIT, 2 * _UNIT)
# The oracle is float64 itself, so the yardstick has no error, and each of 4097 steps may add a
# rounding of 2e-16 (tests/kernels holds float64 against long double, by the rule above).
_WIDEST_FLOOR = (1e-12, 0.0)
# A constant rotation: float64's exp may round an angle near 2 pi by a unit of its last place,
# 8.9e-16, and every step turns by it once more: 3.6e-12 over 4097. (Held against 200 bits where
# this was seen, the oracle erred by 2.5e-12, and a recurrence whose decay has two words by 6e-14.)
ROTATION_FLOOR = (4e-12, 0.0)
ABSOLUTE_FLOOR = 1e-35  # gradients at extreme gates are zero, or underflow in fp32


@dataclass(frozen=True)
class Measure:
    """A result's error and the yardstick's, by one norm."""

    error: float
    yardstick: float
    floor: float  # what the error may be beside twice the yardstick's
    size: float  # of the numbers that these are errors of

    def relative(self) -> Measure:
        """This measure for numbers of size one."""
        size = self.size if 0 < self.size < math.inf else 1.0
        return Measure(self.error / size, self.yardstick / size, self.floor / size, 1.0)

    @property
    def allowed(self) -> float:
        return 2 * self.yardstick + self.floor

    @property
    def excess(self) -> float:
        excess = self.error / self.allowed
        return excess if excess >= 0 else math.inf  # NaN


@dataclass(frozen=True)
class Verdict:
    """How a result does by the error rule: its error over what is allowed, and what to say."""

    excess: float  # at most one when the rule holds
    message: str
    measures: tuple[Measure, ...] = ()  # in norm, and of the largest error

    def __bool__(self) -> bool:
        return self.excess <= 1


_CHANCE = 5.0
_WIDEST_RATIO = math.log(8)  # of error and allowed: beyond it, one draw says no more


def hold_over(first: Verdict, fresh: list[Verdict], *, surely: bool = False) -> bool:
    """Whether the rule holds for a result of `fresh` draws of one call, data apart, and for
    `first`, which was chosen for being beyond it.

    Where few numbers decide, the ratio of two rounding errors is chance: the yardstick may have
    rounded hardly anything. So errors are judged as those of one large sample, each relative to its
    own draw's numbers: their root mean square, and, since one large draw of the yardstick's may
    carry that, the geometric mean of error over allowed. `first` may be beyond what the sample
    allows by less than a factor of five. `surely`: the geometric mean with two standard errors, for
    samples that may be followed by a larger one.
    """
    if math.isinf(first.excess) or any(math.isinf(draw.excess) for draw in fresh):
        return False  # NaN, or another dtype or shape
    for kind, measure in enumerate(first.measures):
        draws = [draw.measures[kind] for draw in fresh if draw.measures]
        draws = [draw.relative() for draw in draws if math.isfinite(draw.yardstick)]
        if 2 * len(draws) < len(fresh):
            return False  # nothing to go by

        def over(field: str, draws: list[Measure] = draws) -> float:
            squares = math.fsum(getattr(draw, field) ** 2 for draw in draws)
            return math.sqrt(squares / len(draws))

        sample = Measure(*(over(field) for field in ("error", "yardstick", "floor")), 1.0)
        if not (sample.excess <= 1 and measure.relative().error <= _CHANCE * sample.allowed):
            return False
        least, most = -_WIDEST_RATIO, _WIDEST_RATIO
        logs = [min(max(math.log(max(d.excess, 1e-300)), least), most) for d in draws]
        mean = math.fsum(logs) / len(logs)
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs)) / len(logs)
        if mean + (2 * spread if surely else 0) > 0:
            return False
    return True


def judge(
    out: Tensor,
    exact: Tensor,
    yardstick: Tensor,
    size: Tensor | None = None,
    state: torch.dtype | None = None,
    widest_floor: tuple[float, float] = _WIDEST_FLOOR,
) -> Verdict:
    """||out - exact|| / ||exact|| and the largest error: each at most twice the yardstick's.

    `yardstick` is the same maths done by torch ops, rounded to out's dtype. The floor is there so
    that a yardstick without error asks for nothing impossible; for a sum over time it is relative
    to `size`, that of its terms, which is what roundings are relative to where they cancel. `state`
    None: the state that goes with data of out's dtype. `widest_floor`: of float64 states.
    """
    if out.dtype != yardstick.dtype or out.shape != exact.shape:
        expected = (yardstick.dtype, tuple(exact.shape))
        got = (out.dtype, tuple(out.shape))
        return Verdict(float("inf"), f"dtype and shape {got}, expected {expected}")
    if out.numel() == 0:
        return Verdict(0, "nothing to compare")
    wide = exact.dtype
    found, same = out.detach().cpu(), yardstick
    # Beyond what the dtype can hold, in all three: infinity is then how the result rounds.
    overflow = same.isinf() & (found == same) & (exact.abs() > torch.finfo(out.dtype).max)
    error = (found.to(wide) - exact).abs().masked_fill(overflow, 0).flatten()
    allowed = (same.to(wide) - exact).abs().masked_fill(overflow, 0).flatten()
    widest = (state or state_dtype(out.dtype)) in (torch.float64, torch.complex128)
    in_norm, of_one = widest_floor if widest else FLOOR
    values = (exact if size is None else size).abs().flatten()
    measures, messages = [], []
    for kind, norm in (("norm", torch.linalg.vector_norm), ("largest", torch.max)):
        whole, wrong, baseline = (float(norm(x)) for x in (values, error, allowed))
        floor = in_norm * whole + of_one * float(values.max())
        measure = Measure(wrong, baseline, floor + ABSOLUTE_FLOOR * values.numel() ** 0.5, whole)
        measures.append(measure)
        messages.append(
            f"{kind} error {wrong:.3e} of {whole:.3e}, allowed {measure.allowed:.3e} (torch "
            f"ops in {out.dtype}: {baseline:.3e}); worst at flat index "
            f"{int(error.nan_to_num(float('inf')).argmax())} of shape {tuple(out.shape)}"
        )
    worst = max(range(len(measures)), key=lambda i: measures[i].excess)
    return Verdict(measures[worst].excess, messages[worst], tuple(measures))


def assert_within_rule(
    name: str,
    out: Tensor,
    exact: Tensor,
    yardstick: Tensor,
    size: Tensor | None = None,
    state: torch.dtype | None = None,
) -> None:
    """Fails with `name` and what is wrong; see `judge`."""
    verdict = judge(out, exact, yardstick, size, state)
    assert verdict, f"{name}: {verdict.message}"
