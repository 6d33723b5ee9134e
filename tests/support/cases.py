"""Test cases for the ops: inputs of every kind, held against the oracle.

`Case` is a call of `linear_scan`, `hgru` or `lru_scan`; `gla_cases.GlaCase` of an op with heads.
Whatever takes a case here takes either: a case makes its own inputs and says where its oracle is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from support import oracle

LAYOUTS = ("contiguous", "projection", "time_major", "misaligned", "channels_first")
GATES = ("normal", "open", "shut", "extreme", "alternating", "loguniform", "zero")


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


@dataclass(frozen=True)
class Case(Named):
    """One call of an op. Everything that it draws follows from `seed`."""

    op: str = "hgru"  # "hgru" | "linear_scan" | "lru_scan"
    batch: int = 2
    time: int = 17
    channels: int = 5
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype | None = None  # of a or f; None = dtype
    bound_dtype: torch.dtype | None = None  # of parameters [D]; None = the state's (real)
    h0: str | None = (
        "state"  # None: absent; "state" | "data" | "single": the state's dtype, x's, ..
    )
    theta: bool = False  # hgru, lru_scan: complex
    gamma: bool = True  # hgru
    activation: str = "silu"  # hgru
    constant: bool = False  # linear_scan: a [D]
    reverse: bool = False
    lengths: tuple[int, ...] | None = None  # packed: batch and time follow from them
    offsets_dtype: torch.dtype = torch.int64
    layout: str = "contiguous"
    gates: str = "normal"
    grads: str = "both"  # "both" | "h" | "final": which results the loss reads
    seed: int = 0

    ORACLE = oracle  # the module that has `<op>_reference`

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then dh and dh_final."""
        return _scan_inputs(self)

    def options(self) -> dict[str, object]:
        """The op's keyword arguments in their order, cu_seqlens aside."""
        return _scan_options(self)

    def ways(self, device: str) -> dict[str, object]:
        """Options of the oracle for a yardstick that computes as the device promises to."""
        return {}

    def sized(self, batch: int, time: int, width: int) -> Case:
        return replace(self, batch=batch, time=time, channels=width)


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


def _scan_inputs(case: Case) -> dict[str, Tensor | None]:
    rng = torch.Generator().manual_seed(case.seed)
    batch, time, sequences, cu_seqlens = packing(case)
    width = case.channels * (2 if case.theta else 1)
    state = oracle.state_dtype(case.dtype)
    gate_dtype = case.gate_dtype or case.dtype
    shape = (batch, time, case.channels)

    data = randn((batch, time, width), case.dtype, rng)
    inputs: dict[str, Tensor | None]
    if case.op == "linear_scan":
        a = decay(case.gates, shape[2:] if case.constant else shape, rng)
        if gate_dtype.is_complex:
            a = torch.polar(a, 7 * torch.rand(a.shape, dtype=a.dtype, generator=rng))
        elif case.gates == "normal":
            a = a * torch.where(torch.rand(a.shape, generator=rng) > 0.2, 1.0, -1.0)
        inputs = {"x": data, "a": a.to(gate_dtype)}
    elif case.op == "lru_scan":
        inputs = {"x": data, **_lru_parameters(case, case.bound_dtype or state, rng)}
    else:
        bound_dtype = case.bound_dtype or state
        gamma = torch.rand(case.channels, dtype=torch.float64, generator=rng)
        edges = torch.tensor([0.0, 0.999, 0.99999], dtype=torch.float64)
        gamma[::3] = edges[torch.arange(len(gamma[::3])) % 3]
        theta = 6.3 * torch.rand(case.channels, dtype=torch.float64, generator=rng)
        below_one = 1 - torch.finfo(bound_dtype).eps  # gamma < 1 after rounding, too
        inputs = {
            "c": 2 * data,
            "f": logits(case.gates, shape, rng).to(gate_dtype),
            "gamma": gamma.to(bound_dtype).clamp(max=below_one) if case.gamma else None,
            "theta": theta.to(bound_dtype) if case.theta else None,
        }
    h0_dtype = {"data": case.dtype, "single": oracle.single_dtype(case.dtype)}.get(case.h0, state)
    inputs["h0"] = randn((sequences, width), h0_dtype, rng) if case.h0 else None
    inputs["cu_seqlens"] = cu_seqlens
    final = randn((sequences, width), state, rng)
    inputs["dh"] = randn(data.shape, case.dtype, rng) if case.grads != "final" else None
    inputs["dh_final"] = final if case.grads != "h" else None
    return {k: v if v is None else lay_out(v, case.layout) for k, v in inputs.items()}


def _lru_parameters(
    case: Case, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Tensor | None]:
    shape = (case.channels,)
    if case.gates in ("extreme", "zero"):  # rates beyond every range, and of one
        nu_log = logits(case.gates, shape, rng)
    else:
        smallest = torch.finfo(torch.float64).tiny
        nu_log = decay(case.gates, shape, rng).clamp(smallest, 1 - 1e-16).log().neg().log()
    phases = 6.3 * torch.rand(shape, dtype=torch.float64, generator=rng)
    # Channels of like size: one that outweighs the others decides their largest error alone.
    gamma_log = -1 + torch.randn(shape, dtype=torch.float64, generator=rng) / 4
    return {
        "nu_log": nu_log.to(dtype),
        "theta_log": phases.log().to(dtype) if case.theta else None,
        "gamma_log": gamma_log.to(dtype),
    }


def _scan_options(case: Case) -> dict[str, object]:
    reverse: dict[str, object] = {"reverse": case.reverse}
    return {"activation": case.activation} | reverse if case.op == "hgru" else reverse


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
    h, final = op(*placed.values(), **options(case), cu_seqlens=cu_seqlens)
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

    def __init__(self, message: str, excess: float) -> None:
        super().__init__(message)
        self.excess = excess  # the largest error over what is allowed


def verdicts(
    case: Case, device: str, *, backward: bool, fused: bool = False
) -> dict[str, oracle.Verdict]:
    """How every result of the case does against the oracle, by one of the yardsticks."""
    found = run(case, device, backward=backward)
    exact = reference(case, backward=backward, exact=True)
    ways = {"fused": fused, **case.ways(device)}
    yardstick = reference(case, backward=backward, exact=False, **ways)
    state = oracle.state_dtype(case.dtype)
    options = {"state": state}
    if case.op == "lru_scan" and case.theta:
        options["widest_floor"] = oracle.ROTATION_FLOOR
    return {
        name: oracle.judge(out, exact[name], yardstick[name], exact.get(f"|{name}|"), **options)
        for name, out in found.items()
    }


def judge_by_either(
    case: object, device: str, *, backward: bool, verdicts: Callable[..., dict[str, oracle.Verdict]]
) -> None:
    """Raises BeyondRule unless every result passes.

    A result passes against either of the two yardsticks, as a whole: lambda as a sum or as one
    minus the rest, a product and a sum rounded twice or once, are the same maths, and where an open
    gate or a few numbers decide, one of them has hardly any error by luck.
    """
    problems = verdicts(case, device, backward=backward)
    if all(problems.values()):
        return
    second = verdicts(case, device, backward=backward, fused=True)
    problems = {k: second[k] for k, verdict in problems.items() if not (verdict or second[k])}
    if problems:
        messages = {name: verdict.message for name, verdict in problems.items()}
        excess = max(verdict.excess for verdict in problems.values())
        raise BeyondRule(f"{case} on {device}: {messages}", excess)


def check(case: Case, device: str = "cpu", *, backward: bool = True) -> None:
    """Runs the case and holds every result and gradient against the oracle."""
    judge_by_either(case, device, backward=backward, verdicts=verdicts)


# Coverage ---------------------------------------------------------------------------------------

TIMES = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097)

HGRU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SCAN_DTYPES = (*HGRU_DTYPES, torch.complex64, torch.complex128)
WIDEST = (torch.float64, torch.complex128)  # gates, bounds and states may be narrower than these

KINDS = tuple(
    [Case("hgru", dtype=dtype, theta=theta) for dtype in HGRU_DTYPES for theta in (False, True)]
    + [
        Case("linear_scan", dtype=dtype, constant=constant)
        for dtype in SCAN_DTYPES
        for constant in (False, True)
    ]
    + [
        # More channels than elsewhere: all gradients but x's are sums over time, one a channel, and
        # where h is rounded to 16 bits, five are too few for luck to average out.
        Case("lru_scan", dtype=dtype, theta=theta, channels=16)
        for dtype in HGRU_DTYPES
        for theta in (False, True)
    ]
)


def random_lengths(time: int, rng: random.Random) -> tuple[int, ...]:
    """Sequence lengths that add up to `time`, empty ones among them."""
    cuts = sorted(rng.randint(0, time) for _ in range(rng.randint(0, 5)))
    cuts += rng.sample(cuts, min(len(cuts), 2))  # twice the same offset: an empty sequence
    offsets = [0, *sorted(cuts), time]
    return tuple(end - start for start, end in zip(offsets, offsets[1:], strict=False))


def vary(case: Case, seed: int) -> Case:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    single = oracle.single_dtype(case.dtype)
    real_gate = real_dtype(oracle.state_dtype(case.dtype))
    other = single if case.dtype in WIDEST or case.op == "lru_scan" else case.dtype
    other_h0 = "single" if case.dtype in WIDEST else "data"
    return replace(
        case,
        seed=seed,
        batch=rng.choice((1, 2, 3)),
        channels=rng.choice((1, 3, 5, 8, 16, 33)),
        gate_dtype=rng.choice((None, None, single, real_gate)),
        bound_dtype=rng.choice((None, other)) if case.op != "linear_scan" else None,
        h0=rng.choice(("state", "state", other_h0, None)),
        gamma=rng.random() < 0.7,
        activation=rng.choice(("silu", "silu", "none")) if case.op == "hgru" else "silu",
        reverse=rng.random() < 0.4,
        lengths=random_lengths(case.time, rng) if rng.random() < 0.4 else None,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(LAYOUTS),
        gates=rng.choice(GATES),
        grads=rng.choice(("both", "both", "h", "final")),
    )


def every_length() -> list[Case]:
    """Each kind of call at each length of the list, its other options spread over the cases."""
    return [
        vary(replace(kind, time=time), seed=1000 * i + j)
        for i, kind in enumerate(KINDS)
        for j, time in enumerate(TIMES)
    ]


def every_mix() -> list[Case]:
    """Each kind of call with gates, bounds and states in every dtype that they may have."""
    mixes = []
    for kind in KINDS:
        single = oracle.single_dtype(kind.dtype)
        gates = dict.fromkeys((kind.dtype, single))
        if kind.op == "linear_scan":
            gates |= dict.fromkeys((real_dtype(oracle.state_dtype(kind.dtype)), torch.float32))
        bounds: Iterable[torch.dtype | None] = (None,)
        if kind.op == "hgru":
            bounds = dict.fromkeys((kind.dtype, single))
        elif kind.op == "lru_scan":  # never of 16 bits
            bounds, gates = dict.fromkeys((oracle.state_dtype(kind.dtype), single)), {None: None}
        for gate, bound, h0 in product(gates, bounds, ("data", "single")):
            mixes.append(replace(kind, gate_dtype=gate, bound_dtype=bound, h0=h0))
    return list(dict.fromkeys(mixes))


def every_regime(time: int = 65) -> list[Case]:
    """Each kind of call under each regime of the gates."""
    return [replace(kind, time=time, gates=g, seed=7) for kind in KINDS for g in GATES]


def every_layout(time: int = 33) -> list[Case]:
    """Each kind of call in each layout, padded and packed, forward and reversed."""
    return [
        replace(
            kind, time=time, channels=8, layout=layout, reverse=reverse, lengths=lengths, seed=9
        )
        for kind in KINDS
        for layout in LAYOUTS
        for reverse, lengths in ((False, None), (True, (5, 0, 17, 1, 0, 10)))
    ]
