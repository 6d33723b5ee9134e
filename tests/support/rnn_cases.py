"""Test cases for `gated_rnn`, which `cases` runs like the scans'."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support import cases, recurrence, rnn_oracle


@dataclass(frozen=True)
class RnnCase(cases.Named):
    """One call of the op. Everything that it draws follows from `seed`."""

    op: str = "gated_rnn"
    batch: int = 2
    time: int = 17
    channels: int = 5
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype | None = None  # of z; None = dtype
    matrix_dtype: torch.dtype | None = None  # of w_zh; None = dtype
    gamma: str | None = None  # "low" | "high" | "all" (0 to next to one); None: absent
    bound_dtype: torch.dtype | None = None  # of gamma; None = the state's
    h0: str | None = (
        "state"  # None: absent; "state" | "data" | "single": the state's dtype, x's, ..
    )
    lengths: tuple[int, ...] | None = None  # packed: batch and time follow from them
    offsets_dtype: torch.dtype = torch.int64
    layout: str = "contiguous"
    gates: str = "normal"
    grads: str = "both"  # "both" | "h" | "final": which results the loss reads
    seed: int = 0

    ORACLE = rnn_oracle

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then dh and dh_final."""
        return _inputs(self)

    def options(self) -> dict[str, object]:
        """The op's keyword arguments, cu_seqlens aside."""
        return {}

    def ways(self, device: str) -> dict[str, object]:
        """How the yardstick computes on a device, beside the dtype: float32 wherever it is."""
        return {}

    def sized(self, batch: int, time: int, width: int) -> RnnCase:
        return replace(self, batch=batch, time=time, channels=width)


def _inputs(case: RnnCase) -> dict[str, Tensor | None]:
    rng = torch.Generator().manual_seed(case.seed)
    batch, time, sequences, cu_seqlens = cases.packing(case)
    state = recurrence.state_dtype(case.dtype)
    shape, states = (batch, time, case.channels), (sequences, case.channels)
    z = cases.logits(case.gates, shape, rng).to(case.gate_dtype or case.dtype)
    x = cases.randn(shape, case.dtype, rng)
    w = cases.randn((case.channels, case.channels), torch.float64, rng) / case.channels**0.5
    h0_dtype = {"data": case.dtype, "single": torch.float32}.get(case.h0, state)
    inputs: dict[str, Tensor | None] = {
        "z": z,
        "x": x,
        "w_zh": w.to(case.matrix_dtype or case.dtype),
        "h0": cases.randn(states, h0_dtype, rng) if case.h0 else None,
        "cu_seqlens": cu_seqlens,
        "gamma": _bounds(case, rng),
    }
    final = cases.randn(states, state, rng)
    inputs["dh"] = cases.randn(shape, case.dtype, rng) if case.grads != "final" else None
    inputs["dh_final"] = final if case.grads != "h" else None
    return {k: v if v is None else cases.lay_out(v, case.layout) for k, v in inputs.items()}


def _bounds(case: RnnCase, rng: torch.Generator) -> Tensor | None:
    if case.gamma is None:
        return None
    dtype = case.bound_dtype or recurrence.state_dtype(case.dtype)
    u = torch.rand(case.channels, generator=rng, dtype=torch.float64)
    low, high = {"low": (0.0, 0.1), "high": (0.9, 0.999), "all": (0.0, 1.0)}[case.gamma]
    gamma = low + (high - low) * u
    if case.gamma == "all":
        gamma[::3], gamma[1::3] = 0.0, 1.0
    return gamma.clamp(max=1 - 2.0 ** (-8 if dtype.itemsize == 2 else -24)).to(dtype)


# Coverage ---------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def arguments_of(case: RnnCase, device: str) -> tuple[dict[str, Tensor | None], tuple]:
    """The op's arguments by name, and the gradients of its two results."""
    made = case.make_inputs()
    placed = {k: cases.to_device(v, device, case.layout) for k, v in made.items()}
    return placed, (placed.pop("dh"), placed.pop("dh_final"))


def leaves(arguments: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {k: v for k, v in arguments.items() if v is not None and k != "cu_seqlens"}


def with_grad(arguments: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return arguments | {k: v.detach().requires_grad_() for k, v in leaves(arguments).items()}


KINDS = tuple(RnnCase(dtype=dtype) for dtype in DTYPES)


def vary(case: RnnCase, seed: int) -> RnnCase:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    widest = case.dtype in cases.WIDEST
    return replace(
        case,
        seed=seed,
        batch=rng.choice((1, 2, 3, 9)),
        channels=rng.choice((1, 3, 5, 8, 16, 33, 130)) if case.time < 1000 else 7,
        gate_dtype=rng.choice((None, None, torch.float32)),
        matrix_dtype=rng.choice((None, None, torch.float32)),
        gamma=rng.choice((None, None, "low", "high", "all")),
        bound_dtype=rng.choice((None, torch.float32 if widest else case.dtype)),
        h0=rng.choice(("state", "state", "single" if widest else "data", None)),
        lengths=cases.random_lengths(case.time, rng) if rng.random() < 0.4 else None,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(cases.LAYOUTS),
        gates=rng.choice(cases.GATES),
        grads=rng.choice(("both", "both", "h", "final")),
    )


def every_length() -> list[RnnCase]:
    """Each dtype at each length of the list, the other options spread over the cases."""
    return [
        vary(replace(kind, time=time), seed=1000 * i + j)
        for i, kind in enumerate(KINDS)
        for j, time in enumerate(cases.TIMES)
    ]


def every_mix() -> list[RnnCase]:
    """Each dtype with gates, matrices and states in every dtype that they may have."""
    mixes = [
        replace(kind, gate_dtype=gate, matrix_dtype=matrix, gamma="low", bound_dtype=bound, h0=h0)
        for kind in KINDS
        for gate in (kind.dtype, torch.float32)
        for matrix in (kind.dtype, torch.float32)
        for bound, h0 in ((kind.dtype, "data"), (torch.float32, "single"))
    ]
    return list(dict.fromkeys(mixes))


def every_regime(time: int = 65) -> list[RnnCase]:
    """Each dtype under each regime of the gates."""
    return [
        replace(kind, time=time, channels=16, gates=g, gamma=gamma, seed=7)
        for kind in KINDS
        for g in cases.GATES
        for gamma in (None, "all")
    ]


def every_layout(time: int = 33) -> list[RnnCase]:
    """Each dtype in each layout, padded and packed."""
    return [
        replace(kind, time=time, channels=8, layout=layout, lengths=lengths, seed=9)
        for kind in KINDS
        for layout in cases.LAYOUTS
        for lengths in (None, (5, 0, 17, 1, 0, 10))
    ]


# Widths around those at which the kernels change how they divide the matrix.
WIDTHS = (
    1,
    2,
    7,
    31,
    64,
    65,
    127,
    128,
    129,
    200,
    256,
    257,
    384,
    511,
    512,
    513,
    640,
    768,
    1000,
    1024,
)
