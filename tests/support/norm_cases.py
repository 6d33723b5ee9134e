"""Norms and gated linear units: cases to try, the equations in float64, and torch's own ops.

The oracle is written from the equations and shares nothing with `tidegate.reference`: it goes row
by row, by numbers as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from support.error_rule import assert_within_rule

Tensors = dict[str, Tensor]
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NormCase:
    """op: "norm", or "add_norm", which has a residual and no gate."""

    op: str = "norm"
    shape: tuple[int, ...] = (2, 5, 24)
    kind: str = "rms"
    weight: str | None = "shared"  # or "heads"
    bias: bool = False
    gate: str | None = None
    gate_first: bool = False
    eps: float = 1e-5
    dtype: torch.dtype = torch.float32  # of y
    stream: torch.dtype | None = None  # of x, or of the residual; None: dtype
    weight_dtype: torch.dtype | None = None
    values: str = "normal"
    layout: str = "contiguous"
    seed: int = 0

    def __str__(self) -> str:
        differs = [
            f"{name}={value}".removeprefix("dtype=torch.")
            for name, value in vars(self).items()
            if value != getattr(NormCase, name)
        ]
        return ",".join(differs).replace("torch.", "") or "plain"

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.stream or self.dtype


# What rows may look like: mean much larger than spread, one outlier, tiny, all the same; gates so
# far out that they are open or shut.
VALUES = ("normal", "offset", "outlier", "tiny", "constant", "shut gates", "open gates")


def make(case: NormCase, device: str) -> Tensors:
    """The op's tensors, and the gradients of its results."""
    rng = torch.Generator().manual_seed(case.seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    x = draw(case.shape)
    if case.values == "offset":
        x = x + 30
    elif case.values == "outlier":
        x[..., -1] = 1e4
    elif case.values == "tiny":
        x = x * 1e-6
    elif case.values == "constant":
        x = torch.full_like(x, 0.5)
    of_gate = {"shut gates": -100.0, "open gates": 100.0}.get(case.values, 0.0)
    narrow = case.dtype if case.op == "add_norm" else case.stream_dtype
    made = {"x": x.to(narrow)}
    if case.op == "add_norm":
        made["residual"] = draw(case.shape).to(case.stream_dtype)
    width = case.shape[-2:] if case.weight == "heads" else case.shape[-1:]
    of_weight = case.weight_dtype or case.dtype
    if case.weight is not None:
        made["weight"] = (1 + draw(width)).to(of_weight)
    if case.bias:
        made["bias"] = draw(width).to(of_weight)
    if case.gate is not None:
        made["gate"] = (3 * draw(case.shape) + of_gate).to(case.dtype)
    made["dy"] = draw(case.shape).to(case.dtype)
    if case.op == "add_norm":
        made["dresidual_out"] = draw(case.shape).to(case.stream_dtype)
    return {name: placed(t.to(device), case.layout) for name, t in made.items()}


def placed(t: Tensor, layout: str) -> Tensor:
    """t's numbers, otherwise laid out."""
    if layout == "contiguous" or t.dim() < 3:
        return t
    if layout == "wider rows":  # a view of one projection
        wide = torch.full((*t.shape[:-1], 3 * t.shape[-1]), float("nan"), dtype=t.dtype)
        view = wide.to(t.device)[..., t.shape[-1] : 2 * t.shape[-1]]
    elif layout == "misaligned":
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 1), float("nan"), dtype=t.dtype)
        view = wide.to(t.device)[..., 1:]
    elif layout == "time first":
        view = torch.empty_like(t.transpose(0, 1).contiguous()).transpose(0, 1)
    else:
        assert layout == "channels first"
        view = torch.empty_like(t.transpose(-1, -2).contiguous()).transpose(-1, -2)
    return view.copy_(t)


def options(case: NormCase) -> dict:
    given = {"kind": case.kind, "eps": case.eps}
    if case.op == "norm":
        given["gate_first"] = case.gate_first
        if case.gate is not None:
            given["gate_activation"] = case.gate
        if case.stream not in (None, case.dtype):
            given["dtype"] = case.dtype
    return given


def run(case: NormCase, tensors: Tensors, function) -> Tensors:
    """Results and gradients, by name; function(case, tensors) -> the results."""
    given = {k: v for k, v in tensors.items() if k not in ("dy", "dresidual_out")}
    leaves = {k: v.detach().requires_grad_() for k, v in given.items()}
    results = function(case, leaves)
    losses = [tensors["dy"]] + ([tensors["dresidual_out"]] if case.op == "add_norm" else [])
    found = dict(zip(("y", "residual_out"), (r.detach() for r in results), strict=False))
    grads = torch.autograd.grad(
        results,
        list(leaves.values()),
        [g.to(r) for g, r in zip(losses, results, strict=True)],
        materialize_grads=True,  # without rows the oracle has nothing that depends on them
    )
    return found | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def by_op(case: NormCase, tensors: Tensors) -> tuple[Tensor, ...]:
    from tidegate import ops

    result = getattr(ops, case.op)(**tensors, **options(case))
    return result if isinstance(result, tuple) else (result,)


def by_equation(case: NormCase, t: Tensors) -> tuple[Tensor, ...]:
    """In the tensors' own dtype, which is float64: row by row."""
    act = {"sigmoid": lambda z: 1 / (1 + torch.exp(-z)), "silu": lambda z: z / (1 + torch.exp(-z))}
    x = t["x"]
    if case.op == "add_norm":
        # The op norms the sum as it is stored.
        total = t["x"] + t["residual"]
        x = total + (total.detach().to(case.stream_dtype).to(total) - total.detach())
    size = case.shape[-1]
    heads = case.shape[-2] if case.weight == "heads" else 1
    rows = []
    gates = t["gate"].reshape(-1, size) if "gate" in t else [None] * (x.numel() // max(size, 1))
    for index, (row, gate) in enumerate(zip(x.reshape(-1, size), gates, strict=True)):
        u = act[case.gate](gate) * row if gate is not None and case.gate_first else row
        mean = u.sum() / size if case.kind == "layer" else 0.0
        y = (u - mean) / torch.sqrt(((u - mean) ** 2).sum() / size + case.eps)
        if "weight" in t:
            y = y * t["weight"].reshape(heads, size)[index % heads]
        if "bias" in t:
            y = y + t["bias"].reshape(heads, size)[index % heads]
        rows.append(act[case.gate](gate) * y if gate is not None and not case.gate_first else y)
    y = torch.stack(rows).reshape(case.shape) if rows else x * 0
    return (y, x) if case.op == "add_norm" else (y,)


def by_torch(case: NormCase, t: Tensors) -> tuple[Tensor, ...]:
    """The case computed by torch's ops in its dtypes."""
    act = {"sigmoid": torch.sigmoid, "silu": F.silu}
    x = t["residual"] + t["x"] if case.op == "add_norm" else t["x"]
    u = act[case.gate](t["gate"]) * x if "gate" in t and case.gate_first else x
    wide = u.float() if u.dtype in _HALF else u
    size = (case.shape[-1],)
    if case.kind == "layer":
        y = F.layer_norm(wide, size, eps=case.eps)
    else:
        y = F.rms_norm(wide, size, eps=case.eps)
    y = y.to(case.dtype)
    if "weight" in t:
        y = y * t["weight"].to(y)
    if "bias" in t:
        y = y + t["bias"].to(y)
    y = act[case.gate](t["gate"]) * y if "gate" in t and not case.gate_first else y
    return (y.to(case.dtype), x) if case.op == "add_norm" else (y.to(case.dtype),)


def check(case: NormCase, device: str) -> Tensors:
    """The op against the oracle by the error rule, forward and gradients; returns what it found."""
    tensors = make(case, device)
    found = run(case, tensors, by_op)
    host = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    exact = run(case, {k: v.double() for k, v in host.items()}, by_equation)
    yardstick = run(case, host, by_torch)
    for name, value in found.items():
        given = tensors.get(name.removeprefix("d"))
        if name.startswith("d") and given is not None:
            assert (value.dtype, value.shape) == (given.dtype, given.shape), name
        size = terms_of_dgate(case, host, exact[name]) if name == "dgate" else None
        assert_within_rule(name, value, exact[name], yardstick[name].to(value.dtype), size)
    return found


def terms_of_dgate(case: NormCase, tensors: Tensors, exact: Tensor) -> Tensor | None:
    """SiLU's derivative s + x s (1 - s) is a difference where x < 0: the size of its terms."""
    if case.gate != "silu":
        return None
    x = tensors["gate"].double()
    rest = torch.sigmoid(-x)
    return exact.abs() * (1 + x.abs() * rest) / (1 + x * rest).abs()


def variants(case: NormCase, **choices: tuple) -> list[NormCase]:
    """The case with every combination of the choices."""
    cases = [case]
    for name, values in choices.items():
        cases = [replace(c, **{name: value}) for c in cases for value in values]
    return cases
