"""Calls of `linear_scan`, `hgru` and `lru_scan`."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from support import cases, recurrence, scan_oracle


@dataclass(frozen=True)
class ScanCase(cases.Named):
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

    ORACLE = scan_oracle

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then dh and dh_final."""
        return _inputs(self)

    def options(self) -> dict[str, object]:
        """The op's keyword arguments in their order, cu_seqlens aside."""
        return _options(self)

    def ways(self, device: str) -> dict[str, object]:
        """Options of the oracle for a yardstick that computes as the device promises to."""
        return {}

    def sized(self, batch: int, time: int, width: int) -> ScanCase:
        return replace(self, batch=batch, time=time, channels=width)


def _inputs(case: ScanCase) -> dict[str, Tensor | None]:
    rng = torch.Generator().manual_seed(case.seed)
    batch, time, sequences, cu_seqlens = cases.packing(case)
    width = case.channels * (2 if case.theta else 1)
    state = recurrence.state_dtype(case.dtype)
    gate_dtype = case.gate_dtype or case.dtype
    shape = (batch, time, case.channels)

    data = cases.randn((batch, time, width), case.dtype, rng)
    inputs: dict[str, Tensor | None]
    if case.op == "linear_scan":
        a = cases.decay(case.gates, shape[2:] if case.constant else shape, rng)
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
            "f": cases.logits(case.gates, shape, rng).to(gate_dtype),
            "gamma": gamma.to(bound_dtype).clamp(max=below_one) if case.gamma else None,
            "theta": theta.to(bound_dtype) if case.theta else None,
        }
    h0_dtype = {"data": case.dtype, "single": recurrence.single_dtype(case.dtype)}.get(
        case.h0, state
    )
    inputs["h0"] = cases.randn((sequences, width), h0_dtype, rng) if case.h0 else None
    inputs["cu_seqlens"] = cu_seqlens
    final = cases.randn((sequences, width), state, rng)
    inputs["dh"] = cases.randn(data.shape, case.dtype, rng) if case.grads != "final" else None
    inputs["dh_final"] = final if case.grads != "h" else None
    return {k: v if v is None else cases.lay_out(v, case.layout) for k, v in inputs.items()}


def _lru_parameters(
    case: ScanCase, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Tensor | None]:
    shape = (case.channels,)
    if case.gates in ("extreme", "zero"):  # rates beyond every range, and of one
        nu_log = cases.logits(case.gates, shape, rng)
    else:
        smallest = torch.finfo(torch.float64).tiny
        nu_log = cases.decay(case.gates, shape, rng).clamp(smallest, 1 - 1e-16).log().neg().log()
    phases = 6.3 * torch.rand(shape, dtype=torch.float64, generator=rng)
    # Channels of like size: one that outweighs the others decides their largest error alone.
    gamma_log = -1 + torch.randn(shape, dtype=torch.float64, generator=rng) / 4
    return {
        "nu_log": nu_log.to(dtype),
        "theta_log": phases.log().to(dtype) if case.theta else None,
        "gamma_log": gamma_log.to(dtype),
    }


def _options(case: ScanCase) -> dict[str, object]:
    reverse: dict[str, object] = {"reverse": case.reverse}
    return {"activation": case.activation} | reverse if case.op == "hgru" else reverse


HGRU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SCAN_DTYPES = (*HGRU_DTYPES, torch.complex64, torch.complex128)

KINDS = tuple(
    [ScanCase("hgru", dtype=dtype, theta=theta) for dtype in HGRU_DTYPES for theta in (False, True)]
    + [
        ScanCase("linear_scan", dtype=dtype, constant=constant)
        for dtype in SCAN_DTYPES
        for constant in (False, True)
    ]
    + [
        # More channels than elsewhere: all gradients but x's are sums over time, one a channel, and
        # where h is rounded to 16 bits, five are too few for luck to average out.
        ScanCase("lru_scan", dtype=dtype, theta=theta, channels=16)
        for dtype in HGRU_DTYPES
        for theta in (False, True)
    ]
)


def vary(case: ScanCase, seed: int) -> ScanCase:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    single = recurrence.single_dtype(case.dtype)
    real_gate = cases.real_dtype(recurrence.state_dtype(case.dtype))
    other = single if case.dtype in cases.WIDEST or case.op == "lru_scan" else case.dtype
    other_h0 = "single" if case.dtype in cases.WIDEST else "data"
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
        lengths=cases.random_lengths(case.time, rng) if rng.random() < 0.4 else None,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(cases.LAYOUTS),
        gates=rng.choice(cases.GATES),
        grads=rng.choice(("both", "both", "h", "final")),
    )


def every_length() -> list[ScanCase]:
    """Each kind of call at each length of the list, its other options spread over the cases."""
    return [
        vary(replace(kind, time=time), seed=1000 * i + j)
        for i, kind in enumerate(KINDS)
        for j, time in enumerate(cases.TIMES)
    ]


def every_mix() -> list[ScanCase]:
    """Each kind of call with gates, bounds and states in every dtype that they may have."""
    mixes = []
    for kind in KINDS:
        single, state = recurrence.single_dtype(kind.dtype), recurrence.state_dtype(kind.dtype)
        gates = dict.fromkeys((kind.dtype, single))
        if kind.op == "linear_scan":
            gates |= dict.fromkeys((cases.real_dtype(state), torch.float32))
        bounds: Iterable[torch.dtype | None] = (None,)
        if kind.op == "hgru":
            bounds = dict.fromkeys((kind.dtype, single))
        elif kind.op == "lru_scan":  # never of 16 bits
            bounds, gates = dict.fromkeys((state, single)), {None: None}
        for gate, bound, h0 in product(gates, bounds, ("data", "single")):
            mixes.append(replace(kind, gate_dtype=gate, bound_dtype=bound, h0=h0))
    return list(dict.fromkeys(mixes))


def every_regime(time: int = 65) -> list[ScanCase]:
    """Each kind of call under each regime of the gates."""
    return [replace(kind, time=time, gates=g, seed=7) for kind in KINDS for g in cases.GATES]


def every_layout(time: int = 33) -> list[ScanCase]:
    """Each kind of call in each layout, padded and packed, forward and reversed."""
    return [
        replace(
            kind, time=time, channels=8, layout=layout, reverse=reverse, lengths=lengths, seed=9
        )
        for kind in KINDS
        for layout in cases.LAYOUTS
        for reverse, lengths in ((False, None), (True, (5, 0, 17, 1, 0, 10)))
    ]
