"""What baselines.py times of gated linear attention: tidegate's ops, and fla's chunk_gla.

Heads of K = V = 128, bf16. `hgrn2` reads pre-activations, three slices of one projection's result;
`gated_linear_attention` and fla read keys and bf16 log decays that were made beforehand, untimed.
The check is float64 on one head.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

import float64
import torch
import torch.nn.functional as F
from scan_baselines import TOLERANCE, FlaTuner, Implementation
from torch import Tensor

SIZE = 128  # K and V


class GlaWork(NamedTuple):
    """One piece of work; `goal` is in milliseconds, or percent of copy speed for a step."""

    op: str  # "hgrn2" | "gated_linear_attention" | "hgrn2_step"
    batch: int
    time: int
    heads: int
    goal: tuple[float, ...] | None = None  # forward, backward
    size: int = SIZE
    group: str = "gla"
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.time, self.heads, self.size

    def bytes(self, direction: str) -> int:
        """Every tensor that must be read or written, once."""
        rows = self.batch * self.time * self.heads * self.size
        if self.op == "hgrn2_step":  # q, f, v in, o out; the fp32 state in and out
            return 4 * 2 * rows + 2 * 4 * rows * self.size
        inputs = 3 if self.op == "hgrn2" else 4  # q, f, v | q, k, v, log f
        # Beside them lie o (forward), or do and as many gradients (backward).
        return 2 * rows * (inputs + 1 if direction == "forward" else 2 * inputs + 1)

    def directions(self) -> tuple[str, ...]:
        return ("forward",) if self.op == "hgrn2_step" else ("forward", "backward")

    def fields(self) -> dict[str, object]:
        """What a row of the results says of the shape."""
        return {"B": self.batch, "T": self.time, "H": self.heads, "K": self.size, "V": self.size}

    def goal_of(self, direction: str) -> dict[str, object]:
        if self.goal is None:
            return {"goal_percent": None}
        goal = self.goal[direction == "backward"]
        return {"goal_percent": goal} if self.op == "hgrn2_step" else {"goal_ms": goal}

    def __str__(self) -> str:
        return f"{self.op} bf16 B{self.batch} T{self.time} H{self.heads} K{self.size} V{self.size}"


WORKS = [
    GlaWork("hgrn2", 8, 4096, 16, (0.40, 1.2)),
    GlaWork("gated_linear_attention", 8, 4096, 16, (0.40, 1.2)),
    GlaWork("hgrn2", 1, 65536, 12, (0.9, 2.4)),
    GlaWork("gated_linear_attention", 1, 65536, 12, (0.9, 2.4)),
    GlaWork("hgrn2", 2, 4096, 16, (0.20, 0.55)),
    GlaWork("gated_linear_attention", 2, 4096, 16, (0.20, 0.55)),
    GlaWork("hgrn2_step", 256, 1, 16, (85,)),
]
TINY = [
    GlaWork("hgrn2", 2, 37, 2, (0.40, 1.2), size=16),
    GlaWork("gated_linear_attention", 1, 40, 2, size=32),
    GlaWork("hgrn2_step", 3, 1, 2, (85,), size=16),
]


class GlaInputs:
    """Inputs set by set: pre-activations of hgrn2, and the keys and log decays that they stand for.

    Gates are sigmoid(N(0, 1)) above lower bounds that are spread over [0, 0.9).
    """

    def __init__(self, work: GlaWork, sets: int, device: torch.device) -> None:
        self.work = work

        def draw() -> list[Tensor]:
            return [torch.randn(work.shape, device=device, dtype=work.dtype) for _ in range(sets)]

        if work.op == "hgrn2":  # slices of what one projection writes
            wide = (*work.shape[:2], 3 * work.heads * work.size)
            parts = [
                torch.randn(wide, device=device, dtype=work.dtype).chunk(3, -1) for _ in range(sets)
            ]
            slices = [[x.unflatten(-1, work.shape[2:]) for x in part] for part in parts]
            self.q, self.f, self.v = (list(x) for x in zip(*slices, strict=True))
        else:
            self.q, self.f, self.v = draw(), draw(), draw()
        self.d_o = draw()
        self.gamma = torch.rand(work.heads, work.size, device=device) * 0.9
        self.k, self.log_f = [], []
        if work.op == "gated_linear_attention":
            for i, f in enumerate(self.f):
                decay = self.gamma + (1 - self.gamma) * torch.sigmoid(f.float())
                self.k.append((1 - decay).to(work.dtype))
                self.log_f.append(decay.log().to(work.dtype))
                self.f[i] = f[:0]

    def tensors(self, i: int) -> tuple[Tensor, ...]:
        if self.work.op == "hgrn2":
            return self.q[i], self.f[i], self.v[i]
        return self.q[i], self.k[i], self.v[i], self.log_f[i]

    def sets(self) -> range:
        return range(len(self.q))

    def expected(self, direction: str) -> tuple[Tensor, ...]:
        """float64 results of set 0 on the last head of the last row: o, or its gradients."""
        with torch.enable_grad():
            leaves = [one_head(t).double().requires_grad_() for t in self.tensors(0)]
            if self.work.op == "hgrn2":
                q, f, v = leaves
                gamma = self.gamma[-1].double()
                decay = gamma + (1 - gamma) * torch.sigmoid(f)
                k, log_f, q = (1 - gamma) * torch.sigmoid(-f), decay.log(), F.silu(q)
            else:
                q, k, v, log_f = leaves
            o, _ = float64.gated_linear_attention(q, k, v, log_f)
            if direction == "forward":
                return (o.detach(),)
            return torch.autograd.grad(o, leaves, one_head(self.d_o[0]).double())

    def check(self, direction: str) -> Callable[[object], float]:
        """The largest relative error of o, or of dq, dk, dv, dlog f (dq, df, dv)."""
        wanted = self.expected(direction)

        def error(results: Sequence[Tensor]) -> float:
            pairs = zip(results, wanted, strict=False)
            return max(float64.distance(one_head(found), exact) for found, exact in pairs)

        return error


def one_head(tensor: Tensor) -> Tensor:
    """[B, T, H, ..] -> the last head of the last row, [T, ..]."""
    return tensor[-1, :, -1]


def tidegate_gla(inputs: GlaInputs, direction: str) -> Implementation:
    """The op, or the op that its autograd calls."""
    ops, gamma = torch.ops.tidegate, inputs.gamma
    tolerance = TOLERANCE[inputs.work.dtype]

    def forward(i: int) -> object:
        tensors = inputs.tensors(i)
        if inputs.work.op == "hgrn2":
            return ops.hgrn2(*tensors, gamma, None, 1.0, "silu")
        return ops.gated_linear_attention(*tensors, None, 1.0)

    def backward(i: int) -> tuple[Tensor, ...]:
        tensors, d_o = inputs.tensors(i), inputs.d_o[i]
        if inputs.work.op == "hgrn2":
            found = ops.hgrn2_backward(
                d_o, None, *tensors, gamma, None, 1.0, "silu", "none", False, None
            )
            return found[:3]
        found = ops.gated_linear_attention_backward(d_o, None, *tensors, None, 1.0, False, None)
        return found[:4]

    run = forward if direction == "forward" else backward
    calls = [lambda i=i: run(i) for i in inputs.sets()]
    return Implementation(calls, inputs.work.bytes(direction), inputs.check(direction), tolerance)


def step_inputs(work: GlaWork, sets: int, device: torch.device) -> tuple[list[Tensor], ...]:
    """q, f, v [B, H, K] and states, set by set."""
    rows = (work.batch, work.heads, work.size)
    q, f, v = (
        [torch.randn(rows, device=device, dtype=work.dtype) for _ in range(sets)] for _ in range(3)
    )
    return q, f, v, [torch.randn(*rows, work.size, device=device) for _ in range(sets)]


def tidegate_step(work: GlaWork, sets: int, device: torch.device) -> Implementation:
    """hgrn2_step, whose state changes in place: it is checked on a copy before the calls."""
    inputs = step_inputs(work, sets, device)
    gamma = torch.rand(work.heads, work.size, device=device) * 0.9
    step = torch.ops.tidegate.hgrn2_step

    def error(_: object) -> float:
        q, f, v, state = (tensors[0] for tensors in inputs)
        found = step(q, f, v, gamma, state.clone(), 1.0, "silu", "none")
        wide = [t[-1, -1].double() for t in (q, f, v, gamma[None], state)]
        decay = wide[3] + (1 - wide[3]) * torch.sigmoid(wide[1])
        after = decay[:, None] * wide[4] + (1 - decay)[:, None] * wide[2]
        return float64.distance(found[-1, -1], F.silu(wide[0]) @ after)

    calls = [
        lambda s=s: step(*s[:3], gamma, s[3], 1.0, "silu", "none")
        for s in zip(*inputs, strict=True)
    ]
    return Implementation(calls, work.bytes("forward"), error, TOLERANCE[work.dtype])


class FlaGla:
    """flash-linear-attention's chunk_gla, and its recurrent kernel for decoding.

    Its gradients are functions of what its forward pass keeps, called without autograd. Its
    autotuner chooses among all of its configurations, anew for every work of as many heads as the
    first one; for another number of heads, which would compile all of them again, only where fla's
    own keys ask for it.
    """

    TOLERANCE = 0.2  # of its dlog f: gla_errors.py measures it, and it is not judged here
    COMPILED = (
        (8, 16),
        (2, 16),
        (1, 16),
        (1, 12),
    )  # batch and heads of the works, all configurations

    def __init__(self) -> None:
        chunk = importlib.import_module("fla.ops.gla.chunk")
        states = importlib.import_module("fla.ops.common.chunk_h")
        sums = importlib.import_module("fla.ops.utils.cumsum")
        recurrent = importlib.import_module("fla.ops.common.fused_recurrent")
        self.version = importlib.import_module("fla").__version__
        self.tuner = FlaTuner(chunk, states, sums, recurrent)
        self.function = chunk.ChunkGLAFunction
        self.recurrent = importlib.import_module("fla.ops.gla").fused_recurrent_gla

    def tune_for(self, heads: int) -> None:
        if heads == self.COMPILED[0][1]:
            self.tuner.forget()

    def do_not_tune(self) -> None:
        """Takes every kernel's first configuration: for results, not for times."""
        for tuner in self.tuner.tuners:
            tuner.configs = tuner.configs[:1]

    def compile(self, part: int, parts: int) -> None:
        """Fills Triton's cache with a share of all configurations."""
        self.tuner.only_compile = True
        for tuner in self.tuner.tuners:
            tuner.configs = tuner.configs[part::parts] or tuner.configs[:1]
        for batch, heads in self.COMPILED:
            work = GlaWork("gated_linear_attention", batch, 256, heads)
            inputs = GlaInputs(work, 1, torch.device("cuda"))
            context = self.forward(inputs.tensors(0))[2]
            self.backward(context, inputs.d_o[0])

    def forward(self, tensors: Sequence[Tensor], h0: Tensor | None = None) -> tuple[object, ...]:
        """o, the final state, and the context that the backward pass wants."""
        context = types.SimpleNamespace()
        context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
        final = h0 is not None
        o, last = self.function.forward(context, *tensors, 1.0, h0, final, False, None, None)
        return o, last, context

    def backward(
        self, context: object, d_o: Tensor, dh_final: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv, dlog f."""
        return self.function.backward(context, d_o, dh_final)[:4]

    def implementation(self, inputs: GlaInputs, direction: str) -> Implementation:
        if direction == "forward":
            calls = [lambda i=i: self.forward(inputs.tensors(i))[:1] for i in inputs.sets()]
        else:
            kept = [self.forward(inputs.tensors(i))[2] for i in inputs.sets()]
            pairs = zip(kept, inputs.d_o, strict=True)
            calls = [lambda c=c, d=d: self.backward(c, d) for c, d in pairs]
        moved = inputs.work.bytes(direction)
        check, heads = inputs.check(direction), inputs.work.heads
        if direction == "backward":  # its kernels were forgotten with those of the forward pass
            return Implementation(calls, moved, check, self.TOLERANCE)
        return Implementation(
            calls, moved, check, self.TOLERANCE, before=lambda: self.tune_for(heads)
        )

    def step(self, work: GlaWork, sets: int, device: torch.device) -> Implementation:
        """One token; the new state is another tensor."""
        inputs = step_inputs(work, sets, device)

        def call(q: Tensor, f: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, ...]:
            log_f = f[:, None]
            return self.recurrent(
                q[:, None], q[:, None], v[:, None], log_f, scale=1.0, initial_state=state,
                output_final_state=True,
            )  # fmt: skip

        def error(results: Sequence[Tensor]) -> float:
            q, f, v, state = (tensors[0][-1, -1].double() for tensors in inputs)
            after = f.exp()[:, None] * state + q[:, None] * v
            return float64.distance(results[0][-1, 0, -1], q @ after)

        for f in inputs[1]:
            f.copy_(F.logsigmoid(f.float()))
        calls = [lambda s=s: call(*s) for s in zip(*inputs, strict=True)]
        return Implementation(calls, work.bytes("forward"), error, TOLERANCE[work.dtype])


def makers(
    work: GlaWork, direction: str, sets: int, device: torch.device, fla: FlaGla | None
) -> dict[str, Callable[[], Implementation]]:
    """Name -> what makes the implementation, copies aside."""
    if work.op == "hgrn2_step":
        found = {"tidegate": lambda: tidegate_step(work, sets, device)}
        if fla is not None:
            found["fla.fused_recurrent_gla"] = lambda: fla.step(work, sets, device)
        return found
    inputs = GlaInputs(work, sets, device)
    found = {"tidegate": lambda: tidegate_gla(inputs, direction)}
    if fla is not None and work.op == "gated_linear_attention":
        found["fla.chunk_gla"] = lambda: fla.implementation(inputs, direction)
    return found


def peak_memory(work: GlaWork, device: torch.device, fla: FlaGla | None) -> dict[str, int]:
    """Bytes of forward and backward at their peak, inputs, results and gradients included."""
    runs: dict[str, Callable[..., Tensor]] = {
        "tidegate": (lambda q, f, v: torch.ops.tidegate.hgrn2(q, f, v, None, None, 1.0, "silu")[0])
        if work.op == "hgrn2"
        else (lambda *t: torch.ops.tidegate.gated_linear_attention(*t, None, 1.0)[0])
    }
    if fla is not None:
        runs["fla.chunk_gla"] = lambda *t: fla.function.apply(
            *t, 1.0, None, False, False, None, None
        )[0]
    peaks = {}
    for name, run in runs.items():
        for _ in range(2):  # the first one loads and tunes
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            count = 4 if name.startswith("fla") or work.op != "hgrn2" else 3
            with torch.enable_grad():
                tensors = [
                    torch.randn(work.shape, device=device, dtype=work.dtype) for _ in range(count)
                ]
                if count == 4:
                    tensors[3] = -tensors[3].abs_()
                leaves = [t.requires_grad_() for t in tensors]
                o = run(*leaves)
                torch.autograd.grad(o, leaves, torch.ones_like(o))
            peaks[name] = torch.cuda.max_memory_allocated() - base
            del tensors, leaves, o
    return peaks
