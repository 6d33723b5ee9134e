"""What the cases of all ops share: how inputs are drawn and laid out, and held against the oracle.

A case makes its own inputs and says where its oracle is; each family has a module of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from support import error_rule, recurrence

LAYOUTS = ("contiguous", "projection", "time_major", "misaligned", "channels_first")
GATES = ("normal", "open", "shut", "extreme", "alternating", "loguniform", "zero")
Results = dict[str, Tensor]  # results and gradients by their names


class Named:
    """A case, a dataclass, whose text is its op and what differs from the default: a test's id."""

    def __str__(self) -> str:
        default = type(self)()
        changed = (
            f"{name}={getattr(self, name)}".replace("torch.", "")
            for name in self.__dataclass_fields__
            if name != "op" and getattr(self, name) != getattr(default, name)
        )
        op = [self.op] if hasattr(self, "op") else []
        return "-".join([*op, *changed]).replace(" ", "") or "default"


def packing(case: Any) -> tuple[int, int, int, Tensor | None]:
    """B, T, N and cu_seqlens of a case: its batch and time, or those that follow from lengths."""
    if case.lengths is None:
        return case.batch, case.time, case.batch, None
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(case.offsets_dtype)
    return 1, sum(case.lengths), len(case.lengths), cu_seqlens


class Case(Protocol):
    """What a case is, whichever op it calls: `scan_cases.ScanCase`, `gla_cases.GlaCase`, ..."""

    op: str
    dtype: torch.dtype
    layout: str
    ORACLE: ModuleType  # the module that has `<op>_reference`

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then dh and dh_final."""

    def options(self) -> dict[str, object]:
        """The op's keyword arguments in their order, cu_seqlens aside."""

    def ways(self, device: str) -> dict[str, object]:
        """Options of the oracle for a yardstick that computes as the device promises to."""

    def sized(self, batch: int, time: int, width: int) -> Case:
        """The case with other sizes."""


def lay_out(value: Tensor, layout: str) -> Tensor:
    """`value`, placed in memory another way; what surrounds it is NaN."""
    if layout == "contiguous" or value.dim() < 2:
        return value.contiguous()
    nan = float("nan")
    if layout == "misaligned":  # starts one element into its storage
        out = value.new_full((value.numel() + 2,), nan)[1:-1].view(value.shape)
    elif value.dim() not in (3, 4):
        return value.contiguous()
    elif layout == "projection" and value.dim() == 4:  # one of three slices, heads side by side
        batch, time, heads, width = value.shape
        wide = value.new_full((batch, time, 3 * heads * width), nan)
        out = wide[..., heads * width : 2 * heads * width].unflatten(-1, (heads, width))
    elif layout == "projection":  # one slice of a wide projection, at an odd offset
        batch, time, width = value.shape
        out = value.new_full((batch, time, 3 * width + 2), nan)[..., width + 1 : 2 * width + 1]
    elif layout == "time_major":
        out = value.new_full(value.transpose(0, 1).shape, nan).transpose(0, 1)
    elif layout == "channels_first":  # last stride is not one: the op copies
        out = value.new_full(value.transpose(1, -1).shape, nan).transpose(1, -1)
    else:
        raise ValueError(layout)
    return out.copy_(value)


def randn(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=rng).to(dtype)


def decay(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Decays in [0, 1] of one regime, float64."""
    u = torch.rand(shape, dtype=torch.float64, generator=rng)
    if kind == "open":
        return 1 - 1e-4 * u
    if kind == "shut":
        return 1e-30 * u
    if kind == "extreme":
        return (u > 0.5).double()
    if kind == "alternating":
        steps = (torch.arange(shape[len(shape) // 2]) % 2).double()  # of time; constant: channels
        return (steps[:, None] if len(shape) == 3 else steps).expand(shape).contiguous()
    if kind == "loguniform":
        return 1 - 10 ** (-7 * u)
    return u


def logits(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Pre-sigmoid gates of one regime, float64."""
    u = torch.rand(shape, dtype=torch.float64, generator=rng)
    if kind == "open":
        return 8 + 6 * u
    if kind == "shut":
        return -20 - 60 * u
    if kind in ("extreme", "alternating"):
        return 1e4 * (2 * decay(kind, shape, rng) - 1)
    if kind == "zero":  # of either sign, and next to zero: a masked logit is often -0.0
        near = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-7, -1e-7], dtype=torch.float64)
        return near[(len(near) * u).long()]
    if kind == "loguniform":
        return -torch.log(10 ** (-7 * u)) * torch.where(u > 0.5, 1.0, -1.0)
    return 2 * torch.randn(shape, dtype=torch.float64, generator=rng)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def make_inputs(case: Case) -> dict[str, Tensor | None]:
    return case.make_inputs()


def options(case: Case) -> dict[str, object]:
    return case.options()


_LOSS = ("dh", "dh_final")


def to_device(value: Tensor | None, device: str, layout: str) -> Tensor | None:
    """A copy on the device that keeps the layout (`.to` would make some contiguous)."""
    if value is None or device == "cpu":
        return value
    return lay_out(value.to(device), layout)


def run(case: Case, device: str, *, backward: bool) -> dict[str, Tensor]:
    """The op's results and gradients, named as the oracle names them, still on the device."""
    import tidegate

    placed = {k: to_device(v, device, case.layout) for k, v in make_inputs(case).items()}
    cu_seqlens = placed.pop("cu_seqlens")
    loss = {k: placed.pop(k) for k in _LOSS}
    if backward:
        placed = {k: v if v is None else v.detach().requires_grad_() for k, v in placed.items()}
    op: Callable[..., tuple[Tensor, Tensor]] = getattr(tidegate.ops, case.op)
    h, final = op(**placed, **options(case), cu_seqlens=cu_seqlens)
    out = {"h": h, "final": final}
    if not backward:
        return out
    leaves = {f"d{k}": v for k, v in placed.items() if v is not None}
    pairs = [(r, g) for r, g in zip((h, final), loss.values(), strict=True) if g is not None]
    results, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return out | dict(zip(leaves, found, strict=True))


def reference(case: Case, *, backward: bool, exact: bool, **ways: object) -> dict[str, Tensor]:
    """What `run` should return: the oracle's values, or (exact=False) a yardstick's."""
    inputs = make_inputs(case)
    loss = {k: inputs.pop(k) for k in _LOSS}
    compute = getattr(case.ORACLE, f"{case.op}_reference")
    return compute(**inputs, **(loss if backward else {}), **options(case), exact=exact, **ways)


class BeyondRule(AssertionError):
    """Results are further from the oracle than the error rule allows."""

    def __init__(self, message: str, verdicts: dict[str, error_rule.Verdict]) -> None:
        super().__init__(message)
        self.verdicts = verdicts  # of the results that are wrong


def verdicts(
    case: Case, device: str, *, backward: bool, fused: bool = False, exact: Results | None = None
) -> dict[str, error_rule.Verdict]:
    """How every result of the case does against the oracle, or the values that `exact` has instead
    of the oracle's, by one of the yardsticks."""
    found = run(case, device, backward=backward)
    exact = reference(case, backward=backward, exact=True) | (exact or {})
    ways = {"fused": fused, **case.ways(device)}
    yardstick = reference(case, backward=backward, exact=False, **ways)
    state = recurrence.state_dtype(case.dtype)
    options = {"state": state}
    if case.op == "lru_scan" and case.theta:
        options["widest_floor"] = error_rule.ROTATION_FLOOR
    return {
        name: error_rule.judge(out, exact[name], yardstick[name], exact.get(f"|{name}|"), **options)
        for name, out in found.items()
    }


def judge_by_either(
    case: object,
    device: str,
    *,
    backward: bool,
    verdicts: Callable[..., dict[str, error_rule.Verdict]],
    exact: Results | None = None,
) -> None:
    """Raises BeyondRule unless every result passes.

    A result passes against either of the two yardsticks, as a whole: lambda as a sum or as one
    minus the rest, a product and a sum rounded twice or once, are the same maths, and where an open
    gate or a few numbers decide, one of them has hardly any error by luck.
    """
    problems = verdicts(case, device, backward=backward, exact=exact)
    if all(problems.values()):
        return
    second = verdicts(case, device, backward=backward, fused=True, exact=exact)
    problems = {k: second[k] for k, verdict in problems.items() if not (verdict or second[k])}
    if problems:
        messages = {name: verdict.message for name, verdict in problems.items()}
        raise BeyondRule(f"{case} on {device}: {messages}", problems)


def check(
    case: Case, device: str = "cpu", *, backward: bool = True, exact: Results | None = None
) -> None:
    """Runs the case and holds every result and gradient against the oracle, or `exact`."""
    judge_by_either(case, device, backward=backward, verdicts=verdicts, exact=exact)


# Coverage ---------------------------------------------------------------------------------------

TIMES = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097)
WIDEST = (torch.float64, torch.complex128)  # gates, bounds and states may be narrower than these


def random_lengths(time: int, rng: random.Random) -> tuple[int, ...]:
    """Sequence lengths that add up to `time`, empty ones among them."""
    cuts = sorted(rng.randint(0, time) for _ in range(rng.randint(0, 5)))
    cuts += rng.sample(cuts, min(len(cuts), 2))  # twice the same offset: an empty sequence
    offsets = [0, *sorted(cuts), time]
    return tuple(end - start for start, end in zip(offsets, offsets[1:], strict=False))
