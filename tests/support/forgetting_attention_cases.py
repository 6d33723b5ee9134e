"""Test cases for `forgetting_attention`, run and held against the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support import cases, error_rule, recurrence
from support import forgetting_attention_oracle as attention_oracle

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GATES = (*cases.GATES, "log -1e4", "first shut")
BY_HEAD = "by head"  # weak gates in every second head, strong ones in the others; not in GATES


@dataclass(frozen=True)
class AttentionCase(cases.Named):
    """One call of the op. Everything that it draws follows from `seed`."""

    batch: int = 2
    queries: int = 17
    past: int = 0  # keys before the first query
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype | None = None  # None: the state's
    scale: float | None = None
    window: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None  # packed: queries and past of each sequence
    offsets_dtype: torch.dtype = torch.int64
    layout: str = "contiguous"
    gates: str = "normal"
    prune: float | None = None
    grads: str = "both"  # "both" | "o" | "lse": which results the loss reads
    seed: int = 0

    def fits_tensor_cores(self) -> bool:
        """Whether CUDA takes the call in products of 16-bit operands, padded where it must be
        (docs/kernels/attention_cuda.md)."""
        return self.dtype in (torch.bfloat16, torch.float16) and self.head_dim <= 256

    def options(self) -> dict[str, object]:
        """The op's keyword arguments, offsets aside."""
        return {"scale": self.scale, "window": self.window, "prune": self.prune}


def log_gates(kind: str, shape: tuple[int, int, int], rng: torch.Generator) -> Tensor:
    """log f [B, T, H], float64."""
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "log -1e4":
        u = torch.rand(shape, dtype=torch.float64, generator=rng)
        return torch.where(u < 0.3, -1e4, torch.where(u < 0.5, 0.0, -u))
    if kind == "first shut":
        gates = -0.1 * torch.rand(shape, dtype=torch.float64, generator=rng)
        gates[:, :1] = -1e4
        return gates
    if kind == BY_HEAD:
        gates = torch.log(cases.decay("normal", shape, rng))
        gates[..., ::2] *= 1e-3
        return gates
    return torch.log(cases.decay(kind, shape, rng)).clamp_min(-1e4)


def _offsets(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def make_inputs(case: AttentionCase, device: str = "cpu") -> dict[str, Tensor | None]:
    """The op's tensors, drawn on the device and laid out as the case says; then do and dlse. What
    is drawn depends on the device."""
    with torch.device(device):
        return _make_inputs(case, torch.Generator(device).manual_seed(case.seed))


def _make_inputs(case: AttentionCase, rng: torch.Generator) -> dict[str, Tensor | None]:
    batch, queries, keys = case.batch, case.queries, case.queries + case.past
    offsets: dict[str, Tensor | None] = {"cu_seqlens": None, "cu_seqlens_k": None}
    if case.lengths is not None:
        batch, queries = 1, sum(q for q, _ in case.lengths)
        keys = sum(q + past for q, past in case.lengths)
        offsets["cu_seqlens"] = _offsets([q for q, _ in case.lengths], case.offsets_dtype)
        if any(past for _, past in case.lengths):
            both = [q + past for q, past in case.lengths]
            offsets["cu_seqlens_k"] = _offsets(both, case.offsets_dtype)
    state = recurrence.state_dtype(case.dtype)
    rows = (batch, queries, case.heads, case.head_dim)
    of_keys = (batch, keys, case.key_heads, case.head_dim)
    inputs = {
        "q": cases.randn(rows, case.dtype, rng),
        "k": cases.randn(of_keys, case.dtype, rng),
        "v": cases.randn(of_keys, case.dtype, rng),
        "log_f": log_gates(case.gates, (batch, keys, case.heads), rng).to(case.gate_dtype or state),
    }
    do = cases.randn(rows, case.dtype, rng)
    dlse = cases.randn((batch, case.heads, queries), state, rng)
    inputs["do"] = do if case.grads != "lse" else None
    inputs["dlse"] = dlse if case.grads != "o" else None
    return {
        k: v if v is None else cases.lay_out(v, case.layout) for k, v in inputs.items()
    } | offsets


def on_device(case: AttentionCase, device: str) -> dict[str, Tensor | None]:
    return {k: cases.to_device(v, device, case.layout) for k, v in make_inputs(case).items()}


def run(case: AttentionCase, device: str, *, backward: bool) -> dict[str, Tensor]:
    """The op's results and gradients, named as the oracle names them, still on the device."""
    return run_inputs(case, on_device(case, device), backward=backward)


def run_inputs(
    case: AttentionCase, inputs: dict[str, Tensor | None], *, backward: bool
) -> dict[str, Tensor]:
    """The results of inputs that are on the device."""
    import tidegate

    placed = dict(inputs)
    offsets = {k: placed.pop(k) for k in ("cu_seqlens", "cu_seqlens_k")}
    loss = [placed.pop(k) for k in ("do", "dlse")]
    if backward:
        placed = {k: v.detach().requires_grad_() for k, v in placed.items()}
    results = tidegate.ops.forgetting_attention(
        **placed, **case.options(), **offsets, return_lse=True
    )
    out = dict(zip(("o", "lse"), results, strict=True))
    if not backward:
        return out
    pairs = [(r, g) for r, g in zip(results, loss, strict=True) if g is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(placed.values()), grads)
    return out | {f"d{k}": v for k, v in zip(placed, found, strict=True)}


def reference(
    case: AttentionCase, *, backward: bool, exact: bool, **ways: object
) -> dict[str, Tensor]:
    """What `run` should return: the oracle's values, or (exact=False) a yardstick's."""
    inputs = make_inputs(case)
    if not backward:
        inputs["do"] = inputs["dlse"] = None
    return attention_oracle.reference(**inputs, **case.options(), exact=exact, **ways)


def verdicts(
    case: AttentionCase,
    device: str,
    *,
    backward: bool,
    one_by_one: bool = False,
    exact: cases.Results | None = None,
) -> dict[str, error_rule.Verdict]:
    """How every result of the case does against the oracle, or the values that `exact` has instead
    of the oracle's, by one of the yardsticks."""
    found = run(case, device, backward=backward)
    exact = reference(case, backward=backward, exact=True) | (exact or {})
    operands = case.dtype if device == "cuda" and case.fits_tensor_cores() else None
    ways = {"operands": operands, "one_by_one": one_by_one}
    yardstick = reference(case, backward=backward, exact=False, **ways)
    state = recurrence.state_dtype(case.dtype)
    return {
        name: error_rule.judge(out, exact[name], yardstick[name], exact.get(f"|{name}|"), state)
        for name, out in found.items()
    }


def check(
    case: AttentionCase,
    device: str,
    *,
    backward: bool = True,
    exact: cases.Results | None = None,
) -> None:
    """Runs the case and holds every result and gradient against the oracle, or `exact`, by the
    error rule.

    A result passes against either of the two yardsticks, as a whole: sums of products as matmul
    adds them up, or one term after the other.
    """
    found = verdicts(case, device, backward=backward, exact=exact)
    problems = {k: v for k, v in found.items() if not v}
    if problems:
        second = verdicts(case, device, backward=backward, one_by_one=True, exact=exact)
        problems = {k: second[k] for k in problems if not second[k]}
    if problems:
        messages = {name: verdict.message for name, verdict in problems.items()}
        raise cases.BeyondRule(f"{case} on {device}: {messages}", problems)


def inputs_of(case: AttentionCase, device: str) -> dict[str, Tensor | None]:
    """The op's keyword arguments."""
    placed = on_device(case, device)
    del placed["do"], placed["dlse"]
    return placed | case.options()


def call(case: AttentionCase, arguments: dict) -> tuple[Tensor, Tensor]:
    """The op's results, o and lse."""
    import tidegate

    return tidegate.ops.forgetting_attention(**arguments, return_lse=True)


# Coverage ---------------------------------------------------------------------------------------


def vary(case: AttentionCase, seed: int) -> AttentionCase:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    key_heads = rng.choice((1, 2))
    lengths = None
    if rng.random() < 0.4:
        counts = cases.random_lengths(case.queries, rng)
        pasts = rng.random() < 0.5
        lengths = tuple((n, rng.choice((0, 1, 7, 70)) if pasts else 0) for n in counts)
    return replace(
        case,
        seed=seed,
        batch=rng.choice((1, 2, 3)),
        past=rng.choice((0, 0, 1, 64, 100)),
        key_heads=key_heads,
        heads=key_heads * rng.choice((1, 2, 3)),
        head_dim=rng.choice((1, 5, 8, 16, 17, 32, 40, 64)),
        gate_dtype=rng.choice((None, None, torch.float32, case.dtype)),
        scale=rng.choice((None, None, 0.3)),
        window=rng.choice((None, None, None, 1, 5, 64, 70)),
        lengths=lengths,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(cases.LAYOUTS),
        gates=rng.choice(GATES),
        prune=rng.choice((None, None, 1e-15 if case.dtype is torch.float64 else 1e-9)),
        grads=rng.choice(("both", "both", "o", "lse")),
    )


def every_length() -> list[AttentionCase]:
    """Each dtype at each length of the list, its other options spread over the cases."""
    varied = [
        vary(AttentionCase(dtype=dtype, queries=time), seed=1000 * i + j)
        for i, dtype in enumerate(DTYPES)
        for j, time in enumerate(cases.TIMES)
        if time < 4097 or i == 0
    ]
    long = {"batch": 1, "heads": 1, "key_heads": 1, "head_dim": 8}
    short = {"batch": 3, "heads": 4, "key_heads": 2, "head_dim": 16}
    return [
        replace(case, **(long if case.queries > 500 else short if case.queries < 4 else {}))
        for case in varied
    ]


def every_regime(time: int = 130) -> list[AttentionCase]:
    """Each dtype under each regime of the gates."""
    return [
        AttentionCase(queries=time, dtype=dtype, gates=gates, head_dim=16, seed=7)
        for dtype in DTYPES
        for gates in GATES
    ]


def every_layout() -> list[AttentionCase]:
    """Each dtype in each layout, padded and packed."""
    return [
        AttentionCase(queries=33, dtype=dtype, layout=layout, head_dim=16, lengths=lengths, seed=9)
        for dtype in DTYPES
        for layout in cases.LAYOUTS
        for lengths in (None, ((5, 3), (0, 0), (17, 60), (1, 0), (0, 4), (10, 0)))
    ]


def every_mix() -> list[AttentionCase]:
    """Each dtype with gates in every dtype that they may have."""
    return [
        AttentionCase(queries=40, dtype=dtype, gate_dtype=gate, head_dim=16)
        for dtype in DTYPES
        for gate in {dtype: None, torch.float32: None}
    ]


def relative(found: Tensor, exact: Tensor) -> float:
    """The distance from `exact` as a part of its size."""
    found, exact = found.double().cpu(), exact.double().cpu()
    return float((found - exact).norm() / exact.norm())
