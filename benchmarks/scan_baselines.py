"""What baselines.py times: tidegate's ops, copies of as many bytes, and other libraries' scans.

An `Implementation` is one call an input set, the fewest bytes its work must move, and a check of
its results against a float64 loop. Other libraries are optional: `available_baselines` says what is
there.
"""

from __future__ import annotations

import importlib
import os
import statistics
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import float64
import numpy as np
import torch
import torch.nn.functional as F
from float64 import Sample, relative_error
from torch import Tensor

os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # fla is tuned anew for every shape, see FlaTuner

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}


class Work(NamedTuple):
    """One piece of work; `group` says why it is measured, `goal` the percent of copy speed."""

    op: str
    batch: int
    time: int
    channels: int
    group: str
    goal: tuple[int, int] | None = None  # forward, backward
    complex: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def elements(self) -> int:
        """How many numbers a real [B, T, D] has."""
        return self.batch * self.time * self.channels

    def bytes(self, direction: str) -> int:
        """Every tensor that must be read or written, once (design of the element-wise scans)."""
        width = self.dtype.itemsize
        if self.op == "hgru_step":  # c, f in, h out; the fp32 state in and out
            return self.elements * (3 * width + 8)
        halves = 2 if self.complex else 1
        if self.op == "hgru":  # c, f; h | c, f, h, dh; dc, df
            tensors = 2 * halves + 1 if direction == "forward" else 4 * halves + 2
        elif self.op == "lru_scan":  # x; h | x, h, dh; dx
            tensors = (2 if direction == "forward" else 4) * halves
        else:  # x, a; h | a, h, dh; dx, da: of wkv4 k, v; o | k, v, do; dk, dv
            tensors = 3 if direction == "forward" else 5
        return tensors * width * self.elements

    def directions(self) -> tuple[str, ...]:
        return ("forward",) if self.op == "hgru_step" else ("forward", "backward")

    def fields(self) -> dict[str, object]:
        """What a row of the results says of the shape."""
        return {
            "complex": self.complex,
            "B": self.batch,
            "T": self.time,
            "D": self.channels,
        }

    def goal_of(self, direction: str) -> dict[str, object]:
        return {"goal_percent": self.goal[direction == "backward"] if self.goal else None}

    def __str__(self) -> str:
        kind = "complex " if self.complex else ""
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        return f"{self.op} {kind}{dtype} B{self.batch} T{self.time} D{self.channels}"


class Implementation(NamedTuple):
    """Calls over rotating input sets, and what they must give for set 0."""

    calls: Sequence[Callable[[], object]]
    bytes: int
    error: Callable[[object], float]  # results of call 0 -> relative error
    tolerance: float
    before: Callable[[], object] = lambda: None  # run once before the first call
    graph: bool = True  # False: enqueued on a stream instead
    flops: float = 0  # 0: rates of computation say nothing of it


def copy_baseline(work: Work, direction: str, sets: int, device: torch.device) -> Implementation:
    """`copy_` that reads and writes as many bytes in all as the work."""
    half = work.bytes(direction) // 4  # bf16 numbers to read, as many to write
    sources = [torch.randn(half, device=device, dtype=torch.bfloat16) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = zip(sources, targets, strict=True)
    calls = [lambda source=s, target=t: target.copy_(source) for s, t in pairs]
    first = sources[0]
    return Implementation(
        calls, 4 * half, lambda copied: float(not torch.equal(copied, first)), 0.5
    )


# ---- tidegate ----


class HgruInputs:
    """Random inputs of hgru; gates spread over (0, 1), lower bounds over [0, 0.9)."""

    def __init__(self, work: Work, sets: int, device: torch.device) -> None:
        self.work = work
        self.sample = Sample.of(work.batch, work.channels)
        width = work.channels * (2 if work.complex else 1)

        def draw(columns: int) -> list[Tensor]:
            shape = (work.batch, work.time, columns)
            return [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)]

        self.c, self.f, self.dh = draw(width), draw(work.channels), draw(width)
        self.gamma = torch.rand(work.channels, device=device) * 0.9
        self.theta = torch.rand(work.channels, device=device) if work.complex else None

    def reference(self) -> float64.HgruResults:
        """float64 results of set 0 on the sampled channels."""
        pick, turned = self.sample.pick, self.work.complex
        theta = self.sample.pick_parameter(self.theta) if self.theta is not None else None
        gamma = self.sample.pick_parameter(self.gamma)
        c, f, dh = pick(self.c[0], turned), pick(self.f[0]), pick(self.dh[0], turned)
        return float64.hgru(c, f, gamma, theta, dh)


def tidegate_hgru(
    inputs: HgruInputs, direction: str, expected: float64.HgruResults
) -> Implementation:
    """torch.ops.tidegate.hgru, or the op that its autograd calls."""
    work, sample, gamma, theta = inputs.work, inputs.sample, inputs.gamma, inputs.theta
    ops = torch.ops.tidegate

    def forward(c: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        return ops.hgru(c, f, gamma, theta)

    def backward(c: Tensor, f: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        return ops.hgru_backward(dh, None, c, f, h, gamma, theta, None, "silu", False, None)

    def error(results: tuple[Tensor, ...]) -> float:
        main = sample.pick(results[0], work.complex)
        if direction == "forward":
            return relative_error(main, expected.h)
        return max(
            relative_error(main, expected.dc), relative_error(sample.pick(results[1]), expected.df)
        )

    sets = list(zip(inputs.c, inputs.f, strict=True))
    if direction == "forward":
        calls = [lambda c=c, f=f: forward(c, f) for c, f in sets]
    else:
        full = [(*s, forward(*s)[0], dh) for s, dh in zip(sets, inputs.dh, strict=True)]
        calls = [lambda s=s: backward(*s) for s in full]
    return Implementation(calls, work.bytes(direction), error, TOLERANCE[work.dtype])


def tidegate_step(work: Work, sets: int, device: torch.device) -> Implementation:
    """hgru_step, whose state changes in place: it is checked on a copy before the calls."""
    shape = (work.batch, work.channels)
    c, f = (
        [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)] for _ in range(2)
    )
    states = [torch.randn(shape, device=device) for _ in range(sets)]
    gamma = torch.rand(work.channels, device=device) * 0.9
    step = torch.ops.tidegate.hgru_step

    def error(_: object) -> float:
        state = states[0].clone()
        found = step(c[0], f[0], gamma, None, state)
        wide = [tensor.double() for tensor in (c[0], f[0], gamma, states[0])]
        decay = wide[2] + (1 - wide[2]) * torch.sigmoid(wide[1])
        expected = decay * wide[3] + (1 - decay) * F.silu(wide[0])
        return relative_error(found.double().cpu().numpy(), expected.cpu().numpy())

    calls = [
        lambda c=c_, f=f_, s=s_: step(c, f, gamma, None, s)
        for c_, f_, s_ in zip(c, f, states, strict=True)
    ]
    return Implementation(calls, work.bytes("forward"), error, TOLERANCE[work.dtype])


def tidegate_lru(work: Work, direction: str, sets: int, device: torch.device) -> Implementation:
    """torch.ops.tidegate.lru_scan, or the op that its autograd calls; |lambda| from 0.9 to
    0.9999."""
    sample, ops = Sample.of(work.batch, work.channels), torch.ops.tidegate
    shape = (work.batch, work.time, work.channels * (2 if work.complex else 1))
    x, dh = (
        [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)] for _ in range(2)
    )
    rows = torch.rand(3, work.channels, device=device)
    nu_log, gamma_log = -2.25 - 7 * rows[0], rows[1] - 1
    theta_log = (rows[2] + 0.01).log() if work.complex else None
    parameters = (nu_log, theta_log, gamma_log)

    def error(results: tuple[Tensor, ...]) -> float:
        nu, gamma = (np.exp(sample.pick_parameter(p)) for p in (nu_log, gamma_log))
        theta = 0 if theta_log is None else np.exp(sample.pick_parameter(theta_log))
        decay = np.exp(-nu + 1j * theta) if work.complex else np.exp(-nu)
        decay = np.broadcast_to(decay, (work.time, *decay.shape))
        if direction == "forward":
            expected = float64.scan(gamma * sample.pick(x[0], work.complex), decay)
        else:
            wide = sample.pick(dh[0], work.complex)
            expected = gamma * float64.scan_backward(wide, decay, wide)[0]
        return relative_error(sample.pick(results[0], work.complex), expected)

    if direction == "forward":
        calls = [lambda x=x_: ops.lru_scan(x, *parameters) for x_ in x]
    else:
        full = [(x_, ops.lru_scan(x_, *parameters)[0], dh_) for x_, dh_ in zip(x, dh, strict=True)]
        calls = [
            lambda x=x_, h=h_, dh=dh_: ops.lru_scan_backward(
                dh, None, x, h, *parameters, None, False, None
            )
            for x_, h_, dh_ in full
        ]
    return Implementation(calls, work.bytes(direction), error, TOLERANCE[work.dtype])


# ---- plain scans: x, a [B, T, D] -> h ----


class ScanInputs:
    """x and decays a of a plain scan, set by set, and their float64 results for set 0."""

    def __init__(self, x: list[Tensor], a: list[Tensor], dh: list[Tensor], log: bool) -> None:
        self.x, self.a, self.dh, self.log = x, a, dh, log
        self.sample = Sample.of(x[0].size(0), x[0].size(2))
        wide = [self.sample.pick(tensors[0]) for tensors in (x, a, dh)]
        decay = np.exp(wide[1]) if log else wide[1]
        self.h = float64.scan(wide[0], decay)
        self.dx, previous = float64.scan_backward(wide[2], decay, self.h)
        self.da = self.dx * previous * (decay if log else 1)

    @staticmethod
    def of_hgru(inputs: HgruInputs, log: bool) -> ScanInputs:
        """Inputs of hgru's recurrence, gates and activation applied beforehand, untimed."""
        x, a = [], []
        for c, f in zip(inputs.c, inputs.f, strict=True):
            decay = inputs.gamma + (1 - inputs.gamma) * torch.sigmoid(f.float())
            x.append(((1 - decay) * F.silu(c.float())).to(c.dtype))
            a.append((decay.log() if log else decay).to(c.dtype))
        return ScanInputs(x, a, inputs.dh, log)

    def error(self, direction: str, turned: bool = False) -> Callable[[object], float]:
        """Checks (h) or (dx, da); `turned`: the results are [B, D, T]."""

        def pick(tensor: Tensor) -> float64.Array:
            return self.sample.pick(tensor.transpose(1, 2) if turned else tensor)

        def forward(results: object) -> float:
            first = results if isinstance(results, Tensor) else results[0]
            return relative_error(pick(first), self.h)

        def backward(results: Sequence[Tensor]) -> float:
            pairs = ((results[0], self.dx), (results[1], self.da))
            return max(relative_error(pick(found), expected) for found, expected in pairs)

        return forward if direction == "forward" else backward


def scan_implementation(
    inputs: ScanInputs,
    direction: str,
    forward: Callable[[Tensor, Tensor], object],
    backward: Callable[[Tensor, Tensor, Tensor], object],
    tolerance: float,
    turned: bool = False,
    before: Callable[[], object] = lambda: None,
) -> Implementation:
    """forward(x, a) -> h; backward(dh, a, h) -> (dx, da); `turned`: on [B, D, T] tensors."""

    def laid_out(tensors: list[Tensor]) -> list[Tensor]:
        return [t.transpose(1, 2).contiguous() if turned else t for t in tensors]

    x, a = laid_out(inputs.x), laid_out(inputs.a)
    tensors = 3 if direction == "forward" else 5
    moved = tensors * x[0].numel() * x[0].element_size()
    if direction == "forward":
        calls = [lambda x=x_, a=a_: forward(x, a) for x_, a_ in zip(x, a, strict=True)]
    else:
        before()
        h = [forward(x_, a_) for x_, a_ in zip(x, a, strict=True)]
        h = [t if isinstance(t, Tensor) else t[0] for t in h]
        sets = zip(laid_out(inputs.dh), a, h, strict=True)
        calls = [lambda s=s: backward(*s) for s in sets]
    return Implementation(calls, moved, inputs.error(direction, turned), tolerance, before)


def tidegate_scan(inputs: ScanInputs, direction: str) -> Implementation:
    """torch.ops.tidegate.linear_scan, or the op that its autograd calls."""
    ops = torch.ops.tidegate
    return scan_implementation(
        inputs,
        direction,
        lambda x, a: ops.linear_scan(x, a),
        lambda dh, a, h: ops.linear_scan_backward(dh, None, a, h, None, False, None),
        TOLERANCE[inputs.x[0].dtype],
    )


# ---- other libraries ----


class FlaTuner:
    """Lets fla's autotuner choose anew for every shape, quickly.

    fla tunes by D alone, on whatever shape comes first; that would penalise it in a sweep. And its
    tuner measures 0.1 s a configuration, a long time for 12 to 48 of them a kernel.
    """

    def __init__(self, *modules: types.ModuleType) -> None:
        from triton.runtime.autotuner import Autotuner

        self.tuners = []
        for module in modules:
            for value in vars(module).values():
                while value is not None and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None) if hasattr(value, "run") else None
                if value is not None and value not in self.tuners:
                    value.do_bench = self.quick_bench
                    self.tuners.append(value)

    only_compile = False

    def quick_bench(self, call: Callable[[], object], quantiles: object = None) -> list[float]:
        """Milliseconds; slow kernels are run a few times only."""
        from triton.testing import do_bench

        call()
        if self.only_compile:
            return [1.0, 1.0, 1.0]

        def once() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end)

        time = once()
        if time > 3:
            return [time] * 3
        if time > 0.2:
            return [statistics.median([once() for _ in range(5)])] * 3
        return do_bench(call, warmup=3, rep=12, quantiles=quantiles)

    def forget(self) -> None:
        for tuner in self.tuners:
            tuner.cache.clear()


class Fla:
    """flash-linear-attention's HGRN scans: x and the log of the decay in, h out.

    The backward functions are called without autograd, which would cast dg from fp32: in the
    baseline's favour.

    In fla 0.6.0, chunk_hgrn's backward kernel now and then gives a wrong fp32 gradient: a row of dx
    goes from one turn of its loop to the next through global memory, from some threads to others,
    and its PTX has no barrier.
    """

    def __init__(self) -> None:
        chunk = importlib.import_module("fla.ops.hgrn.chunk")
        fused = importlib.import_module("fla.ops.hgrn.fused_recurrent")
        self.version = importlib.import_module("fla").__version__
        self.tuner = FlaTuner(chunk, fused)
        chunk_function = chunk.ChunkHGRNFunction

        def chunk_backward(dh: Tensor, g: Tensor, h: Tensor) -> Sequence[Tensor]:
            return chunk_function.backward(types.SimpleNamespace(saved_tensors=(g, h, None)), dh)

        def fused_backward(dh: Tensor, g: Tensor, h: Tensor) -> Sequence[Tensor]:
            return fused.fused_recurrent_hgrn_bwd(g, h, dh)

        self.functions = {
            "fla.chunk_hgrn": (chunk.chunk_hgrn, chunk_backward),
            "fla.fused_recurrent_hgrn": (fused.fused_recurrent_hgrn, fused_backward),
        }

    def implementation(self, name: str, inputs: ScanInputs, direction: str) -> Implementation:
        forward, backward = self.functions[name]
        tolerance = TOLERANCE[inputs.x[0].dtype]
        return scan_implementation(
            inputs, direction, forward, backward, tolerance, before=self.tuner.forget
        )


class AcceleratedScan:
    """accelerated-scan's Triton scan: [B, D, T], linear decays; it combines in the input's dtype,
    hence the wider tolerance. Its backward is called without autograd."""

    TOLERANCE = 8e-2
    BLOCK = 2048

    def __init__(self) -> None:
        try:
            module = importlib.import_module("accelerated_scan.scalar")
        except ModuleNotFoundError as error:
            if error.name != "accelerated_scan.scalar":
                raise
            module = importlib.import_module("accelerated_scan.triton")  # its name before 0.3
        self.function = module.Scan
        self.version = importlib.import_module("accelerated_scan").__version__
        self.scan = module.scan

    def implementation(self, name: str, inputs: ScanInputs, direction: str) -> Implementation:
        def backward(dh: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            context = types.SimpleNamespace(saved_tensors=(a, h))
            da, dx = self.function.backward(context, dh)
            return dx, da

        def forward(x: Tensor, a: Tensor) -> Tensor:
            h = self.scan(a, x)
            if direction == "forward" or h.size(2) % self.BLOCK == 0:
                return h
            # Its backward reads h past the end of T, up to a whole block: give it room there.
            roomy = h.new_zeros(h.numel() + self.BLOCK)
            roomy[: h.numel()] = h.flatten()
            return roomy[: h.numel()].view_as(h)

        return scan_implementation(
            inputs, direction, forward, backward, self.TOLERANCE, turned=True
        )


Loaders = Mapping[str, Callable[[], object]]
BASELINES: Loaders = {"fla": Fla, "accelerated-scan": AcceleratedScan}


def available_baselines(
    device: torch.device, loaders: Loaders = BASELINES
) -> tuple[dict[str, object], list[str]]:
    """The baselines that can be imported, and one line for each that cannot."""
    if device.type != "cuda":
        return {}, [f"{name}: not timed, it needs a GPU" for name in loaders]
    baselines: dict[str, object] = {}
    missing = []
    for name, load in loaders.items():
        try:
            baselines[name] = load()
        except Exception as error:  # a baseline may fail in any way: its figures are left out
            reason = (str(error).splitlines() or [""])[0]
            missing.append(f"{name}: not timed: {type(error).__name__}: {reason}")
    return baselines, missing
