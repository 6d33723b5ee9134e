"""Test cases for `wkv4`: inputs of every kind, held against `wkv4_oracle`."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support import cases, error_rule, recurrence, wkv4_oracle

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = cases.LAYOUTS
#  normal: N(0, 2).  wide: -80 .. 80.  falling, rising: between the two over the sequence.
#  high, low: near 80 and -80.  peak: one token at 80 among others at -80.
KEYS = ("normal", "wide", "falling", "rising", "high", "low", "peak")
RATES = ("spread", "slow", "fast")  # 1e-4 .. 20; 1e-7; 5 .. 50
BONUSES = ("normal", "large")  # N(0, 1); 100 or -100, whose exponentials overflow a float


@dataclass(frozen=True)
class Wkv4Case(cases.Named):
    """One call of the op. Everything that it draws follows from `seed`."""

    batch: int = 2
    time: int = 17
    channels: int = 5
    dtype: torch.dtype = torch.float32
    rate_dtype: torch.dtype | None = None  # of w and u; None = the state's
    state: str | None = "state"  # None: empty; "state" | "data" | "single": its dtype
    lengths: tuple[int, ...] | None = None  # packed: batch and time follow from them
    offsets_dtype: torch.dtype = torch.int64
    layout: str = "contiguous"
    keys: str = "normal"
    rates: str = "spread"
    bonuses: str = "normal"
    grads: str = "both"  # "both" | "o" | "final": which results the loss reads
    seed: int = 0

    def make_inputs(self) -> dict[str, Tensor | None]:
        """The op's tensors, on the CPU, laid out as the case says; then do and dfinal."""
        rng = torch.Generator().manual_seed(self.seed)
        batch, time, rows, cu_seqlens = cases.packing(self)
        shape, width = (batch, time, self.channels), self.channels
        wide = recurrence.state_dtype(self.dtype)
        state_dtype = {"data": self.dtype, "single": torch.float32}.get(self.state, wide)
        state = cases.randn((rows, 3, width), torch.float64, rng)
        state[:, 1] = state[:, 1].abs() + 0.2
        state[:, 2] = _keys(self.keys, (rows, 1, width), rng)[:, 0].to(torch.bfloat16)
        u = torch.randn(width, dtype=torch.float64, generator=rng)
        if self.bonuses == "large":
            u = 100 * u.sign()
        inputs = {
            "w": _rates(self.rates, width, rng).to(self.rate_dtype or wide),
            "u": u.to(self.rate_dtype or wide),
            "k": _keys(self.keys, shape, rng).to(self.dtype),
            "v": cases.randn(shape, self.dtype, rng),
            "state": state.to(state_dtype) if self.state else None,
            "cu_seqlens": cu_seqlens,
        }
        if self.grads != "final":
            inputs["do"] = cases.randn(shape, self.dtype, rng)
        # A sequence that is empty from an empty state has no mean and no logarithm.
        if self.grads != "o" and self.has_final():
            inputs["dfinal"] = cases.randn((rows, 2, width), wide, rng)
        return {n: t if t is None else cases.lay_out(t, self.layout) for n, t in inputs.items()}

    def has_final(self) -> bool:
        lengths = (self.time,) if self.lengths is None else self.lengths
        return self.state is not None or min(lengths, default=0) > 0


def _keys(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    u = torch.rand(shape, dtype=torch.float64, generator=rng)
    if kind == "wide":
        return 160 * u - 80
    if kind in ("falling", "rising"):
        line = torch.linspace(80, -80, shape[1], dtype=torch.float64)[:, None] + u
        return line if kind == "falling" else -line
    if kind in ("high", "low"):
        return (80 - u) * (1 if kind == "high" else -1)
    if kind == "peak":
        out = u - 80
        if shape[1]:
            out[:, shape[1] // 3] += 160
        return out
    return 2 * torch.randn(shape, dtype=torch.float64, generator=rng)


def _rates(kind: str, width: int, rng: torch.Generator) -> Tensor:
    u = torch.rand(width, dtype=torch.float64, generator=rng)
    if kind == "slow":
        return 1e-7 * (1 + u)
    if kind == "fast":
        return 5 * 10**u
    return 10 ** (-4 + 5.3 * u)


def on_device(case: Wkv4Case, device: str) -> dict[str, Tensor | None]:
    made = case.make_inputs()
    return {n: cases.to_device(t, device, case.layout) for n, t in made.items()}


ARGUMENTS = ("w", "u", "k", "v", "state")


def run(case: Wkv4Case, device: str, *, backward: bool = True) -> dict[str, Tensor]:
    """The op's results and gradients, named as the oracle names them, still on the device."""
    import tidegate

    placed = on_device(case, device)
    arguments = {n: placed[n] for n in ARGUMENTS}
    if backward:
        arguments = {
            n: t if t is None else t.detach().requires_grad_() for n, t in arguments.items()
        }
    o, final = tidegate.ops.wkv4(**arguments, cu_seqlens=placed["cu_seqlens"])
    out = {"o": o, "final": wkv4_oracle.mean_and_log(final)}
    pairs = [(r, placed[g]) for r, g in ((o, "do"), (out["final"], "dfinal")) if g in placed]
    if not backward or not pairs:
        return {n: t.detach() for n, t in out.items()}
    results, grads = zip(*pairs, strict=True)
    leaves = {n: t for n, t in arguments.items() if t is not None}
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return {n: t.detach() for n, t in out.items()} | {
        f"d{n}": g for n, g in zip(leaves, found, strict=True)
    }


def verdicts(
    case: Wkv4Case,
    device: str,
    *,
    backward: bool,
    fused: bool = False,
    exact: cases.Results | None = None,
) -> dict[str, error_rule.Verdict]:
    """How every result of the case does against the oracle, or the values that `exact` has instead
    of the oracle's, by one of the yardsticks."""
    found = run(case, device, backward=backward)
    inputs, state = case.make_inputs(), recurrence.state_dtype(case.dtype)
    exact = wkv4_oracle.reference(inputs, exact=True) | (exact or {})
    yardstick = wkv4_oracle.reference(inputs, exact=False, fused=fused)

    def judge(name: str, size: Tensor | None) -> error_rule.Verdict:
        return error_rule.judge(found[name], exact[name], yardstick[name], size, state)

    judged = {}
    for name in found:
        if name == "final" and not case.has_final():
            continue
        size = exact.get(f"|{name}|")
        judged[name] = judge(name, size)
        # What is within the rule by the size of its terms alone is within it by a larger one.
        if not judged[name] and size is not None:
            judged[name] = judge(name, torch.hypot(size, _sizes_of_roundings(case)[f"|{name}|"]))
    return judged


@functools.lru_cache(maxsize=4)
def _sizes_of_roundings(case: Wkv4Case) -> dict[str, Tensor]:
    return wkv4_oracle.sizes_of_roundings(case.make_inputs())


def check(
    case: Wkv4Case,
    device: str = "cpu",
    *,
    backward: bool = True,
    exact: cases.Results | None = None,
) -> None:
    """Runs the case and holds every result and gradient against the oracle, or `exact`."""
    cases.judge_by_either(case, device, backward=backward, verdicts=verdicts, exact=exact)


def call(inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The op's results, o and the final state."""
    import tidegate

    return tidegate.ops.wkv4(**{n: inputs[n] for n in ARGUMENTS}, cu_seqlens=inputs["cu_seqlens"])


def positional(inputs: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    return (*(inputs[n] for n in ARGUMENTS), inputs["cu_seqlens"])


def with_grad(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return inputs | {
        n: inputs[n].detach().requires_grad_() for n in ARGUMENTS if inputs[n] is not None
    }


def gradients(inputs: dict[str, Tensor | None], results: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = [inputs[n] for n in ARGUMENTS if inputs[n] is not None and inputs[n].requires_grad]
    loss = results[0].float().sin().sum() + wkv4_oracle.mean_and_log(results[1]).sum()
    return list(torch.autograd.grad(loss, leaves))


def vary(case: Wkv4Case, seed: int) -> Wkv4Case:
    """`case` with every option that it leaves open drawn from `seed`."""
    rng = random.Random(seed)
    narrow = torch.float32 if case.dtype == torch.float64 else case.dtype
    return replace(
        case,
        seed=seed,
        batch=rng.choice((1, 2, 3)),
        channels=rng.choice((1, 3, 5, 8, 16, 33, 64, 130)),
        rate_dtype=rng.choice((None, narrow)),
        state=rng.choice(("state", "single" if case.dtype == torch.float64 else "data", None)),
        lengths=cases.random_lengths(case.time, rng) if rng.random() < 0.4 else None,
        offsets_dtype=rng.choice((torch.int32, torch.int64)),
        layout=rng.choice(LAYOUTS),
        keys=rng.choice(KEYS),
        rates=rng.choice(RATES),
        bonuses=rng.choice(("normal", "normal", "normal", "large")),
        grads=rng.choice(("both", "both", "o", "final")),
    )


KINDS = tuple(Wkv4Case(dtype=dtype) for dtype in DTYPES)


def every_length() -> list[Wkv4Case]:
    return [
        vary(replace(kind, time=time), seed=1000 * i + j)
        for i, kind in enumerate(KINDS)
        for j, time in enumerate(cases.TIMES)
    ]


def every_regime(time: int = 65) -> list[Wkv4Case]:
    return [
        replace(kind, time=time, keys=keys, rates=rates, seed=7)
        for kind in KINDS
        for keys in KEYS
        for rates in RATES
    ]


def every_layout(time: int = 33) -> list[Wkv4Case]:
    return [
        replace(kind, time=time, channels=8, layout=layout, lengths=lengths, seed=9)
        for kind in KINDS
        for layout in LAYOUTS
        for lengths in (None, (5, 0, 17, 1, 0, 10))
    ]
