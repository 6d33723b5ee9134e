"""Test cases for `gated_linear_attention` and `hgrn2`, which `cases` runs like the scans'."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support import cases, gla_oracle, recurrence

OPS = ("gated_linear_attention", "hgrn2")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GATES = (*cases.GATES, "log -1e4")  # "zero": logits of zero; log decays of zero


@dataclass(frozen=True)
class GlaCase(cases.Named):
    """One call of an op. Everything that it draws follows from `seed`."""

    op: str = "hgrn2"  # or "gated_linear_attention"
    batch: int = 2
    time: int = 17
    heads: int = 2
    key_dim: int = 5
    value_dim: int = 3
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype | None = None  # of f or log_f; None = dtype
    bound_dtype: torch.dtype | None = None  # of gamma; None = the state's
    h0: str | None = (
        "state"  # None: absent; "state" | "data" | "single": the state's dtype, q's, ..
    )
    scale: float = 0.5
    per_head: bool = False  # gated_linear_attention: log_f [B, T, H, 1]
    gamma: bool = True  # hgrn2
    q_activation: str = "silu"  # hgrn2
    v_activation: str = "none"  # hgrn2
    reverse: bool = False
    lengths: tuple[int, ...] | None = None  # packed: batch and time follow from them
    offsets_dtype: torch.dtype = torch.int64
    layout: str = "contiguous"
    gates: str = "normal"
    grads: str = "both"  # "both" | "h" | "final": which results the loss reads
    seed: int = 0

    ORACLE = gla_oracle

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then dh and dh_final."""
        return _inputs(self)

    def options(self) -> dict[str, object]:
        """The op's keyword arguments, cu_seqlens aside."""
        out: dict[str, object] = {"scale": self.scale}
        if self.op == "hgrn2":
            out |= {"q_activation": self.q_activation, "v_activation": self.v_activation}
        return out | {"reverse": self.reverse}

    def ways(self, device: str) -> dict[str, object]:
        return {"chunks": device == "cuda" and self.fits_tensor_cores()}

    def fits_tensor_cores(self) -> bool:
        """Whether CUDA takes the call in products of bf16 operands, padded where it must be
        (docs/kernels/gla_cuda_paths.md)."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        sizes_fit = max(self.key_dim, self.value_dim) <= 256
        whole = self.key_dim % 16 == self.value_dim % 16 == 0 and self.layout != "misaligned"
        time = self.time if self.lengths is None else sum(self.lengths)
        return half and sizes_fit and time > (2 if whole else 8)

    def sized(self, batch: int, time: int, width: int) -> GlaCase:
        return replace(self, batch=batch, time=time, key_dim=width, value_dim=width + 1)


def _flat(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[0], shape[1], shape[2] * shape[3]


def _log_decays(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """log f in (-inf, 0] of one regime, float64."""
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "log -1e4":
        u = torch.rand(shape, dtype=torch.float64, generator=rng)
        return torch.where(u < 0.3, -1e4, torch.where(u < 0.5, 0.0, -u))
    decay = cases.decay(kind, _flat(shape), rng).view(shape)
    return torch.log(decay).clamp_min(-1e4)


def _logits(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    kind = "extreme" if kind == "log -1e4" else kind
    return cases.logits(kind, _flat(shape), rng).view(shape)


def _inputs(case: GlaCase) -> dict[str, Tensor | None]:
    rng = torch.Generator().manual_seed(case.seed)
    batch, time, sequences, cu_seqlens = cases.packing(case)
    state = recurrence.state_dtype(case.dtype)
    gate_dtype = case.gate_dtype or case.dtype
    keys = (batch, time, case.heads, case.key_dim)
    values = (batch, time, case.heads, case.value_dim)
    states = (sequences, case.heads, case.key_dim, case.value_dim)

    q, v = cases.randn(keys, case.dtype, rng), cases.randn(values, case.dtype, rng)
    inputs: dict[str, Tensor | None]
    if case.op == "gated_linear_attention":
        gate = _log_decays(case.gates, (*keys[:3], 1) if case.per_head else keys, rng)
        log_f = gate.to(gate_dtype)
        inputs = {"q": q, "k": cases.randn(keys, case.dtype, rng), "v": v, "log_f": log_f}
    else:
        bound_dtype = case.bound_dtype or state
        gamma = torch.rand(case.heads, case.key_dim, dtype=torch.float64, generator=rng)
        edges = torch.tensor([0.0, 0.999, 0.99999], dtype=torch.float64)
        gamma[:, ::3] = edges[torch.arange(gamma[:, ::3].shape[1]) % 3]
        below_one = 1 - torch.finfo(bound_dtype).eps  # gamma < 1 after rounding, too
        inputs = {
            "q": q,
            "f": _logits(case.gates, keys, rng).to(gate_dtype),
            "v": v,
            "gamma": gamma.to(bound_dtype).clamp(max=below_one) if case.gamma else None,
        }
    h0_dtype = {"data": case.dtype, "single": torch.float32}.get(case.h0, state)
    inputs["h0"] = cases.randn(states, h0_dtype, rng) if case.h0 else None
    inputs["cu_seqlens"] = cu_seqlens
    final = cases.randn(states, state, rng)
    inputs["dh"] = cases.randn(values, case.dtype, rng) if case.grads != "final" else None
    inputs["dh_final"] = final if case.grads != "h" else None
    return {k: v if v is None else cases.lay_out(v, case.layout) for k, v in inputs.items()}


# Coverage ---------------------------------------------------------------------------------------

KINDS = tuple(
    case
    for dtype in DTYPES
    for case in (
        GlaCase("hgrn2", dtype=dtype),
        GlaCase("gated_linear_attention", dtype=dtype),
        GlaCase("gated_linear_attention", dtype=dtype, per_head=True),
    )
)


def vary(case: GlaCase, seed: int) -> GlaCase:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    widest = case.dtype in cases.WIDEST
    logits = case.op == "hgrn2"
    activations = ("none", "silu", "sigmoid")
    return replace(
        case,
        seed=seed,
        batch=rng.choice((1, 2, 3)),
        heads=rng.choice((1, 2, 3)),
        key_dim=rng.choice((1, 3, 8, 16, 17, 33)),
        value_dim=rng.choice((1, 5, 8, 16, 32, 40)),
        gate_dtype=rng.choice((None, None, torch.float32)),
        bound_dtype=rng.choice((None, torch.float32 if widest else case.dtype)) if logits else None,
        h0=rng.choice(("state", "state", "single" if widest else "data", None)),
        scale=rng.choice((1.0, 0.25)),
        gamma=rng.random() < 0.7,
        q_activation=rng.choice(activations) if logits else "silu",
        v_activation=rng.choice(activations) if logits else "none",
        reverse=rng.random() < 0.4,
        lengths=cases.random_lengths(case.time, rng) if rng.random() < 0.4 else None,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(cases.LAYOUTS),
        gates=rng.choice(GATES),
        grads=rng.choice(("both", "both", "h", "final")),
    )


def every_length() -> list[GlaCase]:
    """Each kind of call at each length of the list, its other options spread over the cases.

    Sizes are such that a result has more than a handful of numbers, whose errors' ratio would be
    chance, and that the oracle's loop is not slow.
    """
    varied = [
        vary(replace(kind, time=time), seed=1000 * i + j)
        for i, kind in enumerate(KINDS)
        for j, time in enumerate(cases.TIMES)
        if time < 4097 or i < 3
    ]
    long = {"batch": 1, "heads": 1, "key_dim": 5, "value_dim": 4}
    short = {"batch": 3, "heads": 2, "value_dim": 8}
    return [
        replace(case, **(long if case.time > 500 else short if case.time < 4 else {}))
        for case in varied
    ]


def every_mix() -> list[GlaCase]:
    """Each kind of call with gates, bounds and states in every dtype that they may have."""
    mixes = [
        replace(kind, gate_dtype=gate, bound_dtype=bound, h0=h0)
        for kind in KINDS
        for gate in (kind.dtype, torch.float32)
        for bound in ((kind.dtype, torch.float32) if kind.op == "hgrn2" else (None,))
        for h0 in ("data", "single")
    ]
    return list(dict.fromkeys(mixes))


def every_regime(time: int = 65) -> list[GlaCase]:
    """Each kind of call under each regime of the gates."""
    return [replace(kind, time=time, gates=g, seed=7) for kind in KINDS for g in GATES]


def every_layout(time: int = 33) -> list[GlaCase]:
    """Each kind of call in each layout, padded and packed, forward and reversed."""
    return [
        replace(
            kind, time=time, key_dim=8, value_dim=16, layout=layout, reverse=reverse,
            lengths=lengths, seed=9,
        )
        for kind in KINDS
        for layout in cases.LAYOUTS
        for reverse, lengths in ((False, None), (True, (5, 0, 17, 1, 0, 10)))
    ]  # fmt: skip


def on_tensor_cores() -> list[GlaCase]:
    """Each kind of call with 16-bit data of sizes that tensor cores take: lengths, then gates."""
    kinds = [kind for kind in KINDS if kind.dtype in (torch.bfloat16, torch.float16)]
    sizes = ((16, 48), (64, 16), (32, 32), (128, 64), (48, 128), (144, 80))
    by_length = []
    for i, kind in enumerate(kinds):
        for j, time in enumerate(t for t in cases.TIMES if 2 < t < 4097 or (t == 4097 and i == 1)):
            case = vary(replace(kind, time=time), seed=100_000 + 1000 * i + j)
            keys, values = sizes[(i + j) % len(sizes)]
            if time >= 1000:
                case, keys, values = replace(case, batch=1, heads=1), 16, 32
            aligned = "contiguous" if case.layout == "misaligned" else case.layout
            by_length.append(replace(case, key_dim=keys, value_dim=values, layout=aligned))
    by_regime = [
        replace(kind, time=131, heads=1, key_dim=32, value_dim=16, gates=g, seed=7)
        for kind in kinds
        for g in GATES
    ]
    large = [
        replace(kind, batch=1, heads=1, time=90, key_dim=256, value_dim=256, seed=3)
        for kind in kinds[:3]
    ]
    return by_length + by_regime + large + padded()


def padded() -> list[GlaCase]:
    """Sizes and rows that tensor cores take when they are padded: each part of a call once."""
    kinds = [kind for kind in KINDS if kind.dtype in (torch.bfloat16, torch.float16)]
    ways = [
        {"key_dim": 53, "value_dim": 53},
        {"key_dim": 16, "value_dim": 41, "lengths": (70, 0, 33), "reverse": True},
        {"key_dim": 88, "value_dim": 32, "h0": None, "grads": "h"},
        {"key_dim": 1, "value_dim": 1, "gate_dtype": torch.float32},
        {"key_dim": 32, "value_dim": 64, "layout": "misaligned"},
        {"key_dim": 250, "value_dim": 8, "batch": 1, "heads": 1},
        {"key_dim": 20, "value_dim": 20, "q_activation": "sigmoid", "v_activation": "sigmoid"},
        {"key_dim": 105, "value_dim": 105, "batch": 1},
        {"key_dim": 116, "value_dim": 116, "batch": 1, "gate_dtype": torch.float32},
        {"key_dim": 64, "value_dim": 127, "batch": 1, "layout": "misaligned", "reverse": True},
        {"key_dim": 129, "value_dim": 15, "heads": 1},
    ]
    return [
        replace(kind, time=100, seed=11 + i, **way)
        for i, way in enumerate(ways)
        for kind in kinds
        if kind.op == "hgrn2" or "q_activation" not in way
    ]
