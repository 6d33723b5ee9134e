"""Looks for cliffs: shapes at which an op takes longer a byte, or a FLOP, than at shapes beside it.

    python scripts/sweep_shapes.py [--count 200] [--seed 0] [--out sweep.json] [--fla] [--worst 20]
        [--seconds 600]

Draws random shapes (B 1 to 256, T 64 to 65536, any D from 64 to 4096; bf16, fp16, fp32) for the ops
of the scan family, gated linear attention and forgetting attention, and times each beside tuned
shapes, whose sizes are powers of two. A row's ratio is its time a byte (scans) or a FLOP over that
of the nearest tuned shape or of the largest that is not larger in any size, whichever is kinder:
small shapes take as long as launches do. Forward is timed alone, and with the backward pass
("train"), in CUDA graphs. --fla times flash-linear-attention's op beside each, where there is one
and it is installed. Ends with 1 where a ratio is above --limit or a baseline is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
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


def seconds(shape: Shape, function: Callable[..., Tensor], device: str) -> dict[str, float]:
    """The median time of one call, forward alone and with its backward pass."""
    size = shape.batch * shape.time * shape.channels * shape.dtype.itemsize
    sets = 2 if size > 30_000_000 else 6
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


def row_of(
    shape: Shape, known: dict[Shape, dict[str, float]], device: str, fla: bool
) -> dict[str, object]:
    """The shape's times beside its tuned shapes' and the baseline's."""
    for each in (shape, tuned(shape, round), tuned(shape, math.floor)):
        if each not in known:
            known[each] = seconds(each, call(each), device)
    row: dict[str, object] = {"shape": str(shape)}
    beside = fla_call(shape) if fla else None
    baseline = seconds(shape, beside, device) if beside is not None else {}
    for way in DIRECTIONS:
        rates = {
            str(each): known[each][way] / each.work()
            for each in (tuned(shape, round), tuned(shape, math.floor))
        }
        nearest = max(rates, key=lambda name: rates[name])
        row[way] = {
            "us": round(known[shape][way] * 1e6, 2),
            "tuned": nearest,
            "ratio": round(known[shape][way] / shape.work() / rates[nearest], 3),
        }
        if way in baseline:
            row[way]["fla_us"] = round(baseline[way] * 1e6, 2)
    return row


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.fla and importlib.util.find_spec("fla") is None:
        sys.exit("sweep_shapes: --fla asks for flash-linear-attention, which is not installed")

    rng = random.Random(arguments.seed)
    known: dict[Shape, dict[str, float]] = {}
    rows = []
    begin = time.monotonic()
    for _ in range(arguments.count):
        shape = draw(rng, arguments.largest, arguments.longest)
        if time.monotonic() - begin > arguments.seconds:
            print(f"stopped after {len(rows)} shapes: {arguments.seconds:g} seconds are over")
            break
        row = row_of(shape, known, arguments.device, arguments.fla)
        rows.append(row)
        for way in DIRECTIONS:
            if row[way]["ratio"] > arguments.limit:
                print(f"cliff: {way} {shape}: {row[way]}", flush=True)
    flat = [(way, row["shape"], row[way]) for row in rows for way in DIRECTIONS]
    flat.sort(key=lambda entry: -entry[2]["ratio"])
    for way, shape, found in flat[: arguments.worst]:
        print(f"{found['ratio']:6.2f}  {way:7} {shape}: {found['us']} us, beside {found['tuned']}")
    cliffs = sum(found["ratio"] > arguments.limit for _, _, found in flat)
    slower = [entry for entry in flat if entry[2].get("fla_us", math.inf) < entry[2]["us"]]
    for way, shape, found in slower:
        print(f"slower than fla: {way} {shape}: {found['us']} us, fla {found['fla_us']} us")
    print(f"{len(flat)} rows: {cliffs} above {arguments.limit:g}, {len(slower)} slower than fla")
    if arguments.out is not None:
        result = {"date": harness.today(), "seed": arguments.seed, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if cliffs or slower else 0


if __name__ == "__main__":
    sys.exit(main())
