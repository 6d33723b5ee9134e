"""Looks for cliffs: shapes at which an op takes longer a byte, or a FLOP, than at shapes beside it.

    python scripts/sweep_shapes.py [--count 200] [--seed 0] [--out sweep.json] [--worst 20]
        [--seconds 600] [--fla] [--fla-count 30] [--fla-only] [--tuners 14] [--tune-seconds 300]
        [--gla-configs 4] [--shard 0/4]

Draws random shapes (B 1 to 256, T 64 to 65536, any D from 64 to 4096; bf16, fp16, fp32) for the ops
of the scan family, gated linear attention and forgetting attention, and times each beside tuned
shapes, whose sizes are powers of two. A row's ratio is its time a byte (scans) or a FLOP over that
of the nearest tuned shape or of the largest that is not larger in any size, whichever is kinder:
small shapes take as long as launches do. Forward is timed alone, and with the backward pass
("train"), in CUDA graphs. What is above --limit, or slower than a baseline, is timed once more with
all that it is compared with, and the shorter time of each counts. The last lines are a table of the
largest ratios of each op, every case beside its baseline, and every cliff. Ends with 1 where a
ratio is above --limit, a baseline is faster, or a shape could not be timed. --out is written after
every shape, so that a run that is killed leaves what it has found.

--fla times flash-linear-attention's op beside each, where there is one and it is installed. Triton
compiles its kernels anew for every head dimension, a minute of a core each, so --tuners processes
do that side by side first, and leave what they compiled in Triton's cache; the tuning itself, which
is timing, happens again while nothing else runs. Both count among --seconds, of which the processes
get --tune-seconds, or half; what they have not compiled by then has no baseline. --fla-count bounds
the shapes that have a baseline, as many of each op and type as possible; with --fla-only no others
are timed, and no tuned ones. chunk_gla has so many configurations that to compile them takes more
than four minutes a shape; --gla-configs bounds how many of each kernel are tried. On a machine of
four GPUs, --shard 0/4 to 3/4 divide the shapes among four processes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import harness

from tidegate import ops

SCANS = ("hgru", "linear_scan", "lru_scan", "wkv4")
OPS = (*SCANS, "gated_linear_attention", "forgetting_attention")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIRECTIONS = ("forward", "train")


class Shape(NamedTuple):
    """One call. Scans have channels in all; the others have heads of `head` channels."""

    op: str
    dtype: torch.dtype
    batch: int
    time: int
    channels: int
    head: int = 0

    @property
    def heads(self) -> int:
        return max(1, self.channels // self.head)

    def work(self) -> float:
        """Elements of a scan, which are its bytes but for a factor; FLOPs of the others' forward
        pass."""
        if self.op in SCANS:
            return float(self.batch * self.time * self.channels)
        rows = self.batch * self.time * self.heads
        if self.op == "forgetting_attention":  # two products, causal
            return 2.0 * rows * self.time * self.head
        return 4.0 * rows * self.head * (self.head + 64)  # the state's, and a chunk of 64's

    def __str__(self) -> str:
        head = f" head {self.head}" if self.head else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {dtype} B{self.batch} T{self.time} D{self.channels}{head}"


def draw(rng: random.Random, largest: int, longest: int) -> Shape:
    """A shape of at most `largest` elements; attention's T is at most `longest`."""

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    while True:
        op, dtype = rng.choice(OPS), rng.choice(DTYPES)
        batch, time, channels = (
            log_uniform(1, 256),
            log_uniform(64, 65536),
            log_uniform(64, 4096),
        )
        head = 0 if op in SCANS else min(rng.randint(16, 128), channels)
        if head:
            channels -= channels % head
        shape = Shape(op, dtype, batch, time, channels, head)
        too_long = op == "forgetting_attention" and time > longest
        if batch * time * channels <= largest and not too_long:
            return shape


def tuned(shape: Shape, to: Callable[[float], float]) -> Shape:
    """The shape whose sizes are powers of two, `to` (round, math.floor) of the shape's."""

    def power(size: int) -> int:
        return 2 ** int(to(math.log2(size)))

    head = min(128, max(16, power(shape.head))) if shape.head else 0
    heads = power(shape.heads) if head else 0
    channels = heads * head if head else power(shape.channels)
    return shape._replace(
        batch=power(shape.batch), time=power(shape.time), channels=channels, head=head
    )


def inputs_of(shape: Shape, device: str) -> list[Tensor]:
    """The op's tensors in their order, all with gradients."""
    rows = (shape.batch, shape.time)
    wide = (*rows, shape.heads, shape.head) if shape.head else (*rows, shape.channels)

    def data(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.float32)

    def of_type(x: Tensor) -> Tensor:
        return x.to(shape.dtype)

    width = shape.channels
    made = {
        "hgru": lambda: [of_type(data(*wide)), of_type(data(*wide)), data(width).sigmoid() * 0.9],
        "linear_scan": lambda: [of_type(data(*wide)), of_type(data(*wide).sigmoid())],
        "lru_scan": lambda: [of_type(data(*wide)), data(width) - 4, data(width) - 1],
        "wkv4": lambda: [
            data(width).exp(),
            data(width),
            of_type(data(*wide)),
            of_type(data(*wide)),
        ],
        "gated_linear_attention": lambda: [
            *(of_type(data(*wide)) for _ in range(3)),
            of_type(torch.nn.functional.logsigmoid(data(*wide))),
        ],
        "forgetting_attention": lambda: [
            *(of_type(data(*wide)) for _ in range(3)),
            torch.nn.functional.logsigmoid(data(*wide[:3]) + 8),
        ],
    }[shape.op]()
    return [x.detach().requires_grad_() for x in made]


def call(shape: Shape) -> Callable[..., Tensor]:
    """The op as a function of inputs_of's tensors, its first result alone."""

    def first(found: object) -> Tensor:
        return found if isinstance(found, Tensor) else found[0]

    if shape.op == "lru_scan":
        return lambda x, nu, gamma: first(ops.lru_scan(x, nu, None, gamma))
    return lambda *tensors: first(getattr(ops, shape.op)(*tensors))


def fla_call(shape: Shape) -> Callable[..., Tensor] | None:
    """flash-linear-attention's op on the same tensors, or nothing. It wants its x and log decay
    beforehand, which is in its favour."""
    if shape.op == "hgru":
        from fla.ops.hgrn import fused_recurrent_hgrn

        return lambda c, f, _: fused_recurrent_hgrn(c, -f.abs())[0]
    if shape.op == "gated_linear_attention":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g)[0]
    if shape.op == "forgetting_attention" and shape.dtype != torch.float32:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        return lambda q, k, v, g: parallel_forgetting_attn(q, k, v, g)
    return None


def has_baseline(shape: Shape) -> bool:
    kinds = {"hgru": DTYPES, "gated_linear_attention": DTYPES, "forgetting_attention": DTYPES[:2]}
    return shape.dtype in kinds.get(shape.op, ())


def beside_fla(shapes: list[Shape], count: int) -> list[Shape]:
    """Up to `count` of the shapes that have a baseline, of every op and type in turn."""
    kinds: dict[tuple[str, torch.dtype], list[Shape]] = {}
    for shape in filter(has_baseline, shapes):
        kinds.setdefault((shape.op, shape.dtype), []).append(shape)
    in_turn = itertools.zip_longest(*kinds.values())
    return [shape for each in in_turn for shape in each if shape is not None][:count]


def try_fewer_configurations(most: int | None) -> None:
    """Has Triton try so many configurations of each of chunk_gla's kernels, evenly spaced in its
    list of them, in the place of all."""
    if most is None:
        return
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs

    def some(self: Autotuner, kwargs: dict[str, object]) -> list[object]:
        found = every(self, kwargs)
        if not self.base_fn.__module__.startswith(("fla.ops.gla", "fla.ops.common")):
            return found
        return found[:: max(1, len(found) // most)][:most]

    Autotuner.prune_configs = some


def compile_baseline(shape: Shape, device: str) -> str:
    """Has Triton compile, and cache, what the baseline takes. Returns what went wrong."""
    try:
        inputs = inputs_of(shape, device)
        fla_call(shape)(*inputs).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:  # the other shapes go on
        return f"{shape}: {type(error).__name__}: {error}"
    return ""


def compile_baselines(
    shapes: list[Shape], device: str, processes: int, seconds: float, gla_configs: int | None
) -> list[Shape]:
    """Returns the shapes that were done after so many seconds; the others have no baseline."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(processes, len(shapes)), context, try_fewer_configurations, (gla_configs,)
    )
    jobs = {pool.submit(compile_baseline, shape, device): shape for shape in shapes}
    done, late = wait(jobs, None if math.isinf(seconds) else seconds)
    problems = {jobs[job]: str(job.exception() or job.result()) for job in done}
    for problem in filter(None, problems.values()):
        print(f"not compiled: {problem}", flush=True)
    for job in late:
        print(f"not compiled in {seconds:.0f} s: {jobs[job]}", flush=True)
    workers = list((pool._processes or {}).values())  # there is no other way to end a running job
    pool.shutdown(wait=not late, cancel_futures=True)
    for worker in workers if late else []:
        worker.kill()
    return [shape for shape, problem in problems.items() if not problem]


def seconds(shape: Shape, function: Callable[..., Tensor], device: str) -> dict[str, float]:
    """The median time of one call, forward alone and with its backward pass."""
    size = shape.batch * shape.time * shape.channels * shape.dtype.itemsize
    sets = 2 if size > 30_000_000 else 6
    torch.manual_seed(0)  # the same numbers in every run: the time of wkv4 depends on its keys
    inputs = [inputs_of(shape, device) for _ in range(sets)]
    grad = torch.ones(1, device=device, dtype=shape.dtype)

    def forward(tensors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    def train(tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
        out = function(*tensors)
        return torch.autograd.grad(out, tensors, grad.expand_as(out), allow_unused=True)

    found = {}
    for name, way in zip(DIRECTIONS, (forward, train), strict=True):
        calls = [lambda way=way, x=x: way(x) for x in inputs]
        runner = harness.make_runner(calls, torch.device(device))
        found[name] = statistics.median(runner.seconds(3))
        harness.free({name: runner})
    return found


def keep_shorter(
    known: dict[Shape, dict[str, float]], shape: Shape, found: dict[str, float]
) -> None:
    before = known.get(shape, found)
    known[shape] = {way: min(before[way], found[way]) for way in DIRECTIONS}


def row_of(
    shape: Shape,
    known: dict[Shape, dict[str, float]],
    device: str,
    *,
    beside_tuned: bool = True,
    fla: bool = False,
    limit: float = math.inf,
) -> dict[str, object]:
    """The shape's times beside its tuned shapes' and the baseline's."""
    neighbours = (tuned(shape, round), tuned(shape, math.floor)) if beside_tuned else ()
    baseline: dict[Shape, dict[str, float]] = {}
    row: dict[str, object] = {}
    why = ""
    for again in (False, True):
        for each in dict.fromkeys((shape, *neighbours)):
            if again or each not in known:
                keep_shorter(known, each, seconds(each, call(each), device))
        if fla and not why:
            try:
                keep_shorter(baseline, shape, seconds(shape, fla_call(shape), device))
            except Exception as error:  # a shape that the baseline does not take
                why = f"{type(error).__name__}: {str(error)[:200]}"
                torch.cuda.synchronize()
        row = compared(shape, known, neighbours, baseline.get(shape))
        if not is_worse(row, limit):
            break
    return row | {"fla": why} if why else row


def compared(
    shape: Shape,
    known: dict[Shape, dict[str, float]],
    neighbours: tuple[Shape, ...],
    baseline: dict[str, float] | None,
) -> dict[str, object]:
    row: dict[str, object] = {"shape": str(shape)}
    for way in DIRECTIONS:
        row[way] = {"us": round(known[shape][way] * 1e6, 2)}
        if neighbours:
            rates = {str(each): known[each][way] / each.work() for each in neighbours}
            nearest = max(rates, key=lambda name: rates[name])
            ratio = known[shape][way] / shape.work() / rates[nearest]
            row[way] |= {"tuned": nearest, "ratio": round(ratio, 3)}
        if baseline is not None:
            row[way]["fla_us"] = round(baseline[way] * 1e6, 2)
    return row


def is_worse(row: dict[str, object], limit: float) -> bool:
    """Whether either direction takes more than `limit` times its tuned shape, or the baseline."""
    return any(
        row[way].get("ratio", 0) > limit or row[way].get("fla_us", math.inf) < row[way]["us"]
        for way in DIRECTIONS
    )


def report(rows: list[dict[str, object]], limit: float, worst: int) -> bool:
    """Prints what was found, the short tables last. Returns whether all is well."""
    failed = [row for row in rows if "failed" in row]
    rows = [row for row in rows if "failed" not in row]
    flat = [(way, row["shape"], row[way]) for row in rows for way in DIRECTIONS]
    flat.sort(key=lambda entry: -entry[2].get("ratio", 0))
    for way, shape, found in flat[:worst]:
        if "ratio" in found:
            beside = f"{found['us']} us, beside {found['tuned']}"
            print(f"{found['ratio']:6.2f}  {way:7} {shape}: {beside}")
    for op in OPS:
        of_op = [entry for entry in flat if entry[1].startswith(op + " ") and "ratio" in entry[2]]
        if of_op:
            most = [next(found for w, _, found in of_op if w == way) for way in DIRECTIONS]
            figures = " / ".join(f"{found['ratio']:.2f}" for found in most)
            print(f"{op:24} {len(of_op) // 2:4} shapes, largest forward / train: {figures}")
    slower = 0
    for row in rows:
        if "fla_us" in row["forward"]:
            shares = [row[way]["us"] / row[way]["fla_us"] for way in DIRECTIONS]
            slower += sum(share > 1 for share in shares)
            mark = "  SLOWER THAN FLA" if max(shares) > 1 else ""
            print(f"{shares[0]:5.2f} / {shares[1]:4.2f} of fla's time: {row['shape']}{mark}")
    cliffs = [entry for entry in flat if entry[2].get("ratio", 0) > limit]
    for way, shape, found in cliffs:
        print(f"cliff: {found['ratio']:.2f}  {way} {shape}")
    for row in failed:
        print(f"failed: {row['shape']}: {row['failed']}")
    print(
        f"{len(rows)} shapes: {len(cliffs)} above {limit:g}, {slower} slower than fla, "
        f"{len(failed)} failed"
    )
    return not (cliffs or slower or failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=2**26, help="elements of a tensor")
    parser.add_argument("--longest", type=int, default=16384, help="T of attention")
    parser.add_argument("--limit", type=float, default=2.0, help="largest ratio allowed")
    parser.add_argument("--worst", type=int, default=20, help="rows printed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="draw no shape after these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--fla-count", type=int, default=sys.maxsize, help="shapes with a baseline")
    parser.add_argument("--fla-only", action="store_true", help="time no other shapes")
    parser.add_argument("--gla-configs", type=int, help="tried of each kernel of chunk_gla")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth shape from the Ith on")
    parser.add_argument("--tune-seconds", type=float, help="for baselines; half of --seconds")
    parser.add_argument("--tuners", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.fla |= arguments.fla_only
    if arguments.fla and importlib.util.find_spec("fla") is None:
        sys.exit("sweep_shapes: --fla asks for flash-linear-attention, which is not installed")

    begin = time.monotonic()
    rng = random.Random(arguments.seed)
    shapes = [draw(rng, arguments.largest, arguments.longest) for _ in range(arguments.count)]
    first, shards = map(int, arguments.shard.split("/"))
    shapes = shapes[first::shards]
    with_fla = beside_fla(shapes, arguments.fla_count) if arguments.fla else []
    if with_fla:
        allowed = arguments.tune_seconds or arguments.seconds / 2
        tuned_how = (arguments.device, arguments.tuners, allowed, arguments.gla_configs)
        with_fla = compile_baselines(with_fla, *tuned_how)
        try_fewer_configurations(arguments.gla_configs)
    gc.freeze()  # or every gc.collect between shapes looks through all modules, 0.1 s and more
    known: dict[Shape, dict[str, float]] = {}
    rows: list[dict[str, object]] = []
    for shape in with_fla if arguments.fla_only else shapes:
        if time.monotonic() - begin > arguments.seconds:
            print(f"stopped after {len(rows)} shapes: {arguments.seconds:g} seconds are over")
            break
        try:
            row = row_of(
                shape,
                known,
                arguments.device,
                beside_tuned=not arguments.fla_only,
                fla=shape in with_fla,
                limit=arguments.limit,
            )
        except RuntimeError as error:  # the others are still worth knowing
            row = {"shape": str(shape), "failed": str(error)[:200]}
        rows.append(row)
        if "fla" in row:
            print(f"no baseline: {shape}: {row['fla']}", flush=True)
        if arguments.out is not None:
            result = {"date": harness.today(), "seed": arguments.seed, "rows": rows}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begin:.0f} seconds")
    return 0 if report(rows, arguments.limit, arguments.worst) else 1


if __name__ == "__main__":
    sys.exit(main())
