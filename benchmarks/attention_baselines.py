"""What baselines.py times of forgetting attention: tidegate's op, beside the two Triton kernels
that compute the same, torch's own attentions without gates, and a matrix product.

bf16, [B, T, H, D]. Rates count the products of causal attention: 4 B H (T T / 2) D forward, 2.5
times that backward. Gates are logsigmoid(N(0, 1) + 8), weak ones, for which a row's weights spread
over thousands of keys; pruned work has logsigmoid(N(0, 1)). The check is float64 on one head.

The paper's own kernel is not a package that registries hold: `--paper-kernel` names the file
ops/forgetting_attention.py of a checkout of zhixuan-lin/forgetting-transformer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import float64
import torch
import torch.nn.functional as F
from scan_baselines import TOLERANCE, FlaTuner, Implementation
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OP, STEP = "forgetting_attention", "forgetting_attention_step"
DETERMINISTIC = "deterministic backward"
MATMUL = 8192  # rows, columns and depth of the matrix product beside
WEAK, NORMAL = 8.0, 0.0  # what is added to N(0, 1) before the gates' log-sigmoid
PAPER_BOUND = math.exp(-10)  # the weight that the paper's kernel lets a row drop
PAUSE = 0.1  # seconds before each turn, see harness.measure
LSE_AND_SUMS = 24  # bytes a row and head beyond inputs, outputs and gradients: design


class AttentionWork(NamedTuple):
    """One piece of work; `goal`: TFLOP/s forward, backward and deterministic; milliseconds where it
    is pruned; percent of copy speed of a step."""

    op: str  # OP | STEP
    batch: int
    time: int
    heads: int
    size: int  # D
    goal: tuple[float, ...]
    key_heads: int | None = None
    prune: float | None = None
    group: str = "attention"
    dtype: torch.dtype = torch.bfloat16

    @property
    def is_step(self) -> bool:
        return self.op == STEP

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.time, self.heads, self.size

    @property
    def pair(self) -> tuple[int, int]:
        """Query heads and key heads."""
        return self.heads, self.key_heads or self.heads

    def bytes(self, direction: str) -> int:
        """Every tensor that must be read or written, once."""
        rows, keys = (self.batch * self.time * heads for heads in self.pair)
        if self.is_step:  # the cache and its gates; q and o beside it
            return 2 * 2 * keys * self.size + 4 * rows + 2 * 2 * self.batch * self.heads * self.size
        row, key = 2 * rows * self.size, 2 * keys * self.size
        if direction == "forward":  # q, k, v, log f; o, lse
            return 2 * row + 2 * key + 8 * rows
        return 4 * row + 4 * key + 12 * rows  # q, do, o, dq; k, v, dk, dv; log f, lse, dlog f

    def flops(self, direction: str) -> float:
        """Operations of causal attention without pruning; 0 for a step."""
        if self.is_step:
            return 0.0
        forward = 4 * self.batch * self.heads * self.time * self.time / 2 * self.size
        return forward * (1 if direction == "forward" else 2.5)

    def directions(self) -> tuple[str, ...]:
        if self.is_step:
            return ("forward",)
        return ("forward", "backward", *((DETERMINISTIC,) if self.prune is None else ()))

    def fields(self) -> dict[str, object]:
        """What a row of the results says of the shape."""
        found: dict[str, object] = {"B": self.batch, "T": self.time, "H": self.heads}
        if self.key_heads:
            found["Hkv"] = self.key_heads
        return found | {"D": self.size} | ({"prune": self.prune} if self.prune else {})

    def goal_of(self, direction: str) -> dict[str, object]:
        if self.is_step:
            return {"goal_percent": self.goal[0]}
        value = self.goal[("forward", "backward", DETERMINISTIC).index(direction)]
        return {"goal_percent": None, "goal_ms" if self.prune else "goal_tflops": value}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}{value}" for name, value in self.fields().items())
        return f"{self.op} bf16 {sizes}"


WORKS = [
    AttentionWork(OP, 2, 16384, 16, 128, (560, 470, 380)),
    AttentionWork(OP, 8, 4096, 16, 128, (500, 400, 310)),
    AttentionWork(OP, 2, 16384, 24, 64, (400, 370, 290)),
    AttentionWork(OP, 1, 65536, 8, 128, (570, 480, 380)),
    AttentionWork(OP, 2, 16384, 16, 128, (0.34, 0.75), prune=PAPER_BOUND),
    AttentionWork(STEP, 64, 8192, 16, 128, (80,), key_heads=4),
]
TINY = [
    AttentionWork(OP, 2, 70, 2, 32, (340, 285, 205)),
    AttentionWork(OP, 1, 130, 2, 64, (0.45, 0.95), prune=1e-3),
    AttentionWork(STEP, 3, 40, 4, 16, (80,), key_heads=2),
]


def one_head(tensor: Tensor) -> Tensor:
    """[B, T, H, ..] -> the last head of the last row, [T, ..]."""
    return tensor[-1, :, -1]


class AttentionInputs:
    """q, k, v, log f and do, set by set."""

    def __init__(self, work: AttentionWork, sets: int, device: torch.device) -> None:
        self.work = work
        self.exact: dict[bool, tuple[Tensor, ...]] = {}

        def draw(heads: int) -> list[Tensor]:
            shape = (work.batch, work.time, heads, work.size)
            return [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)]

        heads, key_heads = work.pair
        self.q, self.k, self.v, self.d_o = (draw(n) for n in (heads, key_heads, key_heads, heads))
        shift = WEAK if work.prune is None else NORMAL
        self.log_f = [
            F.logsigmoid(torch.randn(work.shape[:3], device=device) + shift) for _ in range(sets)
        ]

    def tensors(self, i: int) -> tuple[Tensor, ...]:
        return self.q[i], self.k[i], self.v[i], self.log_f[i]

    def sets(self) -> range:
        return range(len(self.q))

    def expected(self, gated: bool) -> tuple[Tensor, ...]:
        """float64 o and gradients of set 0 on one head, computed once."""
        if gated in self.exact:
            return self.exact[gated]
        q, k, v, log_f = (one_head(t[0]).double() for t in (self.q, self.k, self.v, self.log_f))
        log_f = log_f if gated else torch.zeros_like(log_f)
        d_o = one_head(self.d_o[0]).double()
        self.exact[gated] = float64.forgetting_attention(q, k, v, log_f, d_o)
        return self.exact[gated]

    def check(self, direction: str, gated: bool = True) -> Callable[[Sequence[Tensor]], float]:
        """The largest relative error of o, or of dq, dk, dv and (gated) dlog f."""
        o, *grads = self.expected(gated)
        wanted = [o] if direction == "forward" else grads[: 4 if gated else 3]

        def error(results: Sequence[Tensor]) -> float:
            pairs = zip(results, wanted, strict=False)
            return max(float64.distance(one_head(found), exact) for found, exact in pairs)

        return error


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """torch's switch, as it was afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def tidegate_attention(inputs: AttentionInputs, direction: str) -> Implementation:
    """The op, or the op that its autograd calls."""
    ops, work = torch.ops.tidegate, inputs.work
    options = (None, None, None, None, work.prune)  # scale, window, offsets

    def forward(i: int) -> tuple[Tensor, Tensor]:
        return ops.forgetting_attention(*inputs.tensors(i), *options)

    def backward(i: int, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        tensors = inputs.tensors(i)
        with deterministic(direction == DETERMINISTIC):
            return ops.forgetting_attention_backward(
                inputs.d_o[i], None, *tensors, o, lse, *options
            )

    if direction == "forward":
        calls = [lambda i=i: forward(i) for i in inputs.sets()]
    else:
        kept = [forward(i) for i in inputs.sets()]
        calls = [lambda i=i: backward(i, *kept[i]) for i in inputs.sets()]
    tolerance = TOLERANCE[work.dtype]
    moved, flops = work.bytes(direction), work.flops(direction)
    return Implementation(calls, moved, inputs.check(direction), tolerance, flops=flops)


def tidegate_step(work: AttentionWork, sets: int, device: torch.device) -> Implementation:
    """One query a row against a full cache."""
    heads, key_heads = work.pair

    def draw(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)]

    q = draw(work.batch, heads, work.size)
    k, v = (draw(work.batch, work.time, key_heads, work.size) for _ in range(2))
    gates = [F.logsigmoid(torch.randn(work.shape[:3], device=device) + WEAK) for _ in range(sets)]
    lengths = torch.full((work.batch,), work.time, dtype=torch.int32, device=device)

    def error(result: Tensor) -> float:
        past = (one_head(t[0]).double() for t in (k, v, gates))
        exact = float64.forgetting_attention(q[0][-1, -1:].double(), *past)[0]
        return float64.distance(result[-1, -1:], exact)

    step = torch.ops.tidegate.forgetting_attention_step
    calls = [lambda s=s: step(*s, lengths) for s in zip(q, k, v, gates, strict=True)]
    return Implementation(calls, work.bytes("forward"), error, TOLERANCE[work.dtype])


def matmul(device: torch.device, tiny: bool) -> Implementation:
    """The speed of this machine's matrix products, in the same harness."""
    size = 64 if tiny or device.type != "cuda" else MATMUL
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def error(result: Tensor) -> float:
        return float64.distance(result[:8], a[:8].double() @ b.double())

    return Implementation([lambda: a @ b], 6 * size * size, error, 1e-2, flops=2.0 * size**3)


UNGATED = {
    "SDPA FlashAttention-2, no gate": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN, no gate": SDPBackend.CUDNN_ATTENTION,
}


def ungated(inputs: AttentionInputs, direction: str, backend: SDPBackend) -> Implementation:
    """torch's causal attention, which knows no gates; backward by autograd, on a stream."""

    def forward(tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in tensors[:3])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def backward(o: Tensor, leaves: Sequence[Tensor], d_o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    if direction == "forward":
        calls = [lambda i=i: (forward(inputs.tensors(i)),) for i in inputs.sets()]
    else:
        calls = []
        with torch.enable_grad():
            for i in inputs.sets():
                leaves = [t.detach().requires_grad_() for t in inputs.tensors(i)[:3]]
                o, d_o = forward(leaves), inputs.d_o[i]
                calls.append(lambda o=o, leaves=leaves, d_o=d_o: backward(o, leaves, d_o))
    moved, flops = inputs.work.bytes(direction), inputs.work.flops(direction)
    check, tolerance = inputs.check(direction, gated=False), TOLERANCE[inputs.work.dtype]
    graph = direction == "forward"
    return Implementation(calls, moved, check, tolerance, graph=graph, flops=flops)


class BaselineKernel:
    """An autograd function, whose two passes are called without autograd."""

    TOLERANCE = 5e-2  # of dlog f: sums over columns alone, which are not judged here
    function: type[torch.autograd.Function]
    version: str

    def forward(self, tensors: Sequence[Tensor], prune: bool) -> tuple[Tensor, object]:
        """o, and the context that the backward pass wants."""
        raise NotImplementedError

    def backward(self, context: object, d_o: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv, dlog f."""
        raise NotImplementedError

    def implementation(self, inputs: AttentionInputs, direction: str) -> Implementation:
        prune = inputs.work.prune is not None
        if direction == "forward":
            calls = [lambda i=i: self.forward(inputs.tensors(i), prune)[:1] for i in inputs.sets()]
        else:
            kept = [self.forward(inputs.tensors(i), prune)[1] for i in inputs.sets()]
            pairs = zip(kept, inputs.d_o, strict=True)
            calls = [lambda c=c, d=d: self.backward(c, d) for c, d in pairs]
        moved, flops = inputs.work.bytes(direction), inputs.work.flops(direction)
        check = inputs.check(direction)
        return Implementation(calls, moved, check, self.TOLERANCE, flops=flops)

    def compile(self, work: AttentionWork) -> None:
        """Runs both passes on a short piece of the work: Triton's cache then holds its kernels."""
        if hasattr(self, "tuner"):
            self.tuner.only_compile = True
        inputs = AttentionInputs(work._replace(time=256), 1, torch.device("cuda"))
        context = self.forward(inputs.tensors(0), work.prune is not None)[1]
        self.backward(context, inputs.d_o[0])
        torch.cuda.synchronize()


def new_context() -> types.SimpleNamespace:
    """What an autograd function writes on."""
    context = types.SimpleNamespace()
    context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
    return context


class FlaAttention(BaselineKernel):
    """flash-linear-attention's parallel_forgetting_attn, which does not prune."""

    NAME = "fla.parallel_forgetting_attn"

    def __init__(self) -> None:
        module = importlib.import_module("fla.ops.attn.parallel")
        self.tuner = FlaTuner(importlib.import_module("fla.ops.utils.cumsum"))
        for tuner in self.tuner.tuners:  # the longest steps over time: others are slower
            longest = max((c.kwargs.get("BT", 0) for c in tuner.configs), default=0)
            tuner.configs = [
                c
                for c in tuner.configs
                if c.kwargs.get("BT", 0) == longest and c.num_stages in (1, 3)
            ]
        self.version = importlib.import_module("fla").__version__
        self.function = module.ParallelAttentionFunction

    def forward(self, tensors: Sequence[Tensor], prune: bool) -> tuple[Tensor, object]:
        context = new_context()
        scale = tensors[0].shape[-1] ** -0.5
        return self.function.forward(context, *tensors, None, scale, None, None), context

    def backward(self, context: object, d_o: Tensor) -> tuple[Tensor, ...]:
        return self.function.backward(context, d_o)[:4]


class PaperAttention(BaselineKernel):
    """The kernel of arXiv 2503.02130's authors, with their pruning ("adaptive computation")."""

    NAME = "paper's forgetting_attention"

    def __init__(self, path: str) -> None:
        spec = importlib.util.spec_from_file_location("paper_forgetting_attention", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.function = module.ForgettingAttention
        self.version = "file " + hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]

    def forward(self, tensors: Sequence[Tensor], prune: bool) -> tuple[Tensor, object]:
        context = new_context()
        turned = [t.transpose(1, 2) for t in tensors]
        bound = "auto" if prune else None
        rest = (False, False, None, False, False)  # what else to return and to record
        o = self.function.forward(context, *turned, None, True, None, bound, *rest)
        return o.transpose(1, 2), context

    def backward(self, context: object, d_o: Tensor) -> tuple[Tensor, ...]:
        grads = self.function.backward(context, d_o.transpose(1, 2))[:4]
        return tuple(grad.transpose(1, 2) for grad in grads)


Baselines = dict[str, BaselineKernel]
FLA, PAPER = "fla.attention", "forgetting-transformer"  # keys of baselines.py's


def loaders(paper_kernel: str | None) -> dict[str, Callable[[], BaselineKernel]]:
    """The baselines of this group, by name."""

    def paper() -> PaperAttention:
        if not paper_kernel:
            raise ImportError("no --paper-kernel is given")
        return PaperAttention(paper_kernel)

    return {FLA: FlaAttention, PAPER: paper}


def jobs() -> list[tuple[str, AttentionWork]]:
    """What is compiled, each in a process of its own."""
    works = [work for work in WORKS if work.op == OP]
    pairs = [(name, work) for work in works for name in (FLA, PAPER)]
    return [(name, work) for name, work in pairs if not (work.prune and name == FLA)]


def makers(
    work: AttentionWork,
    direction: str,
    sets: int,
    device: torch.device,
    baselines: dict[str, object],
    tiny: bool,
) -> dict[str, Callable[[], Implementation]]:
    """Name -> what makes the implementation, copies aside."""
    inputs = AttentionInputs(work, sets, device)
    found = {"tidegate": lambda: tidegate_attention(inputs, direction)}
    if direction == DETERMINISTIC:
        return found
    if direction == "forward":  # once a shape: it says how fast the machine is
        found["matmul"] = lambda: matmul(device, tiny)
    for key, kind in ((FLA, FlaAttention), (PAPER, PaperAttention)):
        if key in baselines and not (work.prune and kind is FlaAttention):
            found[kind.NAME] = lambda one=baselines[key]: one.implementation(inputs, direction)
    if device.type == "cuda" and work.prune is None:
        for name, backend in UNGATED.items():
            found[name] = lambda backend=backend: ungated(inputs, direction, backend)
    return found


def extra_memory(work: AttentionWork, direction: str, device: torch.device) -> dict[str, float]:
    """Bytes a row and head of one forward and backward pass, at their peak, beyond inputs, outputs
    and gradients; and what the design allows: the log-sum-exp and sums, and dq in fp32."""
    inputs = AttentionInputs(work, 1, device)
    leaves = [t.requires_grad_() for t in inputs.tensors(0)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # What is asked for: a block of the allocator's may be a MiB larger.
    base = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with torch.enable_grad(), deterministic(direction == DETERMINISTIC):
        o, _ = torch.ops.tidegate.forgetting_attention(*leaves, None, None, None, None, work.prune)
        grads = torch.autograd.grad(o, leaves, inputs.d_o[0])
    torch.cuda.synchronize()
    results = sum(t.numel() * t.element_size() for t in (o, *grads))
    rows = work.batch * work.time * work.heads
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - base - results
    allowed = LSE_AND_SUMS + 4 * work.size
    return {"extra_bytes_a_row": round(extra / rows, 2), "goal_bytes_a_row": allowed}
