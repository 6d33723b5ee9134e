#!/usr/bin/env python3
"""tidegate's ops beside other libraries' and beside `copy_` of as many bytes, in one run.

    python benchmarks/baselines.py --out benchmarks/results/baselines_h200.json
    python benchmarks/baselines.py --groups gla --out benchmarks/results/baselines_gla_h200.json
    python benchmarks/baselines.py --groups attention --paper-kernel forgetting_attention.py \
        --out benchmarks/results/baselines_attention_h200.json

Every implementation runs in the same harness (harness.py): K calls on K sets of inputs in one CUDA
graph, replayed in turns, medians; nobody's host time counts. What is timed was checked against
float64 loops first. Baselines that are not installed are named and left out; so is, in a row, a
baseline whose result is wrong there. A wrong result of tidegate, and any other failure, makes the
run end with 1. `--device cpu --tiny` goes the same way through small shapes, without baselines.

The groups: of the scans, the work that has aims ("aims"), a sweep of twelve training shapes
("sweep"), a plain scan and the decoding step ("extra"); gated linear attention ("gla"); forgetting
attention ("attention").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attention_baselines
import gla_baselines
import harness
import torch
import wkv4_baselines
from attention_baselines import AttentionWork, BaselineKernel
from gla_baselines import FlaGla, GlaWork
from report_tables import reaches_goal
from scan_baselines import (
    BASELINES,
    AcceleratedScan,
    Fla,
    HgruInputs,
    Implementation,
    ScanInputs,
    Work,
    available_baselines,
    copy_baseline,
    tidegate_hgru,
    tidegate_lru,
    tidegate_scan,
    tidegate_step,
)
from wkv4_baselines import FlaRwkv4

import tidegate

AnyWork = Work | GlaWork | AttentionWork
Baselines = dict[str, Fla | AcceleratedScan | FlaGla | FlaRwkv4 | BaselineKernel]

NOTES = (
    "us: median time of one call; K calls on K sets of inputs lie in one CUDA graph, "
    "implementations take turns, events lie between replays: no host time for anyone.",
    "bytes: every tensor that must be read or written, once. percent_of_copy: the time of copy_ "
    "with as many bytes in the same harness, in the graph or on a stream, whichever is faster, "
    "over the implementation's time.",
    "hgru: lower bounds given, SiLU and gates inside the op; its backward is the op that autograd "
    "calls, dgamma's sums included.",
    "fla: its inputs x = (1 - decay) silu(c) and g = log decay are made beforehand, untimed, and "
    "its backward ends at dx and dg: both favour the baseline. Its autotuner chooses anew for "
    "every shape. Its GB/s count its own bytes: x, g, h; and g, h, dh, dx, dg.",
    "accelerated-scan: [B, D, T] layout, linear decays, beside linear_scan.",
    "wkv4: forward as without gradients; the backward pass reads, uncounted, a state in eight that "
    "the forward pass of training keeps. fla.fused_recurrent_rwkv4 keeps all of them.",
)
GLA_NOTES = (
    *NOTES[:2],
    "hgrn2: q, f and v are slices of one projection's result; SiLU on q, gates and keys inside the "
    "op. Backward passes are the ops that autograd calls, and keep nothing but the inputs.",
    "fla.chunk_gla: keys and log decays in bf16 are made beforehand, untimed, as they are for "
    "gated_linear_attention. Its autotuner chooses among all configurations for every shape of 16 "
    "heads; 12 heads take what its own keys give. fla.fused_recurrent_gla writes the new state "
    "elsewhere.",
    "peak_bytes: allocated at the peak of one forward and backward pass, above what was allocated "
    "before the inputs were: inputs, results, their gradients and workspace included.",
)
ATTENTION_NOTES = (
    *NOTES[:2],
    "TFLOP/s count the products of causal attention, 4 B H T T/2 D forward and 2.5 times that "
    "backward, whatever a kernel does; whole calls, sums of gates and all. Inputs are bf16, [B, T, "
    "H, D]; gates logsigmoid(N(0, 1) + 8), where work is pruned logsigmoid(N(0, 1)).",
    "matmul: bf16, 8192 x 8192 x 8192, in turns with the others. After matrix products everything "
    "is slower for a while, as if they had used the GPU's power up: 0.1 s lie before each turn, "
    "and every round has another order.",
    "Backward passes are the ops that autograd calls, the two Triton implementations' without "
    "autograd; torch's attentions without gates run theirs by autograd, on a stream.",
    "pruned: each row drops less than exp(-10) of its weight, which is the bound of the paper's "
    'kernel in its mode "auto". fla does not prune.',
    "The error is the largest of o, or of dq, dk, dv and dlog f; the baselines' is that of dlog f.",
    "extra_bytes_a_row: memory at the peak of one forward and backward pass beyond inputs, outputs "
    "and gradients, a row and head, as torch's allocator rounds it; the design allows 24, and 4 D "
    "more where dq is summed in fp32.",
    "Decoding reads K, V and gates of a full cache; percent_of_copy is over their bytes.",
)

AIMS = [
    Work("hgru", 8, 2048, 2048, "aims", (85, 80)),
    Work("hgru", 1, 131072, 1024, "aims", (80, 75)),
    Work("hgru", 64, 1024, 512, "aims", (80, 75)),
    Work("hgru", 8, 2048, 1024, "aims", (80, 70), complex=True),
    Work("lru_scan", 8, 2048, 1024, "aims", (85, 80), complex=True),
    Work("wkv4", 8, 4096, 2048, "aims", (75, 65)),
    Work("wkv4", 1, 65536, 1024, "aims", (60, 60)),
]
SWEEP = [
    Work("hgru", batch, time, channels, "sweep")
    for batch, time, channels in (
        (1, 65536, 2048),
        (1, 32768, 4096),
        (1, 16384, 512),
        (2, 16384, 1024),
        (2, 8192, 4096),
        (4, 8192, 256),
        (4, 4096, 2048),
        (8, 4096, 1024),
        (16, 1024, 2048),
        (16, 2048, 512),
        (32, 512, 1024),
        (64, 256, 512),
    )
]
EXTRA = [
    Work("hgru", 8, 2048, 2048, "extra", dtype=torch.float32),
    Work("hgru", 1, 65536, 512, "extra", complex=True),
    Work("lru_scan", 8, 2048, 2048, "extra"),
    Work("lru_scan", 1, 65536, 1024, "extra", complex=True),
    Work("linear_scan", 8, 2048, 2048, "extra"),
    Work("linear_scan", 1, 131072, 1024, "extra"),
    Work("linear_scan", 64, 1024, 512, "extra"),
    Work("hgru_step", 1, 1, 2048, "extra"),
    Work("hgru_step", 256, 1, 2048, "extra"),
]
GROUPS = ("aims", "sweep", "extra", "gla", "attention")
# How the names begin of what is no other library's.
OURS = ("tidegate", "copy_", "matmul")
NOTES_OF = {"gla": GLA_NOTES, "attention": ATTENTION_NOTES}  # of a run of one group
WORKS = AIMS + SWEEP + EXTRA + gla_baselines.WORKS + attention_baselines.WORKS
TINY = [
    Work("hgru", 2, 33, 24, "aims", (80, 75)),
    Work("hgru", 3, 17, 8, "aims", (80, 70), complex=True),
    Work("hgru", 1, 40, 12, "sweep"),
    Work("hgru", 2, 9, 16, "extra", dtype=torch.float32),
    Work("lru_scan", 2, 21, 16, "aims", (85, 80), complex=True),
    Work("wkv4", 2, 19, 16, "aims", (75, 65)),
    Work("lru_scan", 2, 13, 16, "extra"),
    Work("linear_scan", 2, 21, 16, "extra"),
    Work("hgru_step", 4, 1, 16, "extra"),
    *gla_baselines.TINY,
    *attention_baselines.TINY,
]


class WrongResult(RuntimeError):
    """An implementation's results are not those of its work."""


class Bench:
    """One run: options, baselines, rows so far."""

    def __init__(
        self, device: torch.device, baselines: Baselines, options: argparse.Namespace
    ) -> None:
        self.device, self.baselines, self.options = device, baselines, options
        self.rows: list[dict[str, object]] = []
        self.problems: list[str] = []
        self.baseline_problems: list[str] = []

    def implementations(self, work: AnyWork, direction: str, sets: int) -> dict[str, object]:
        """Name -> a function that makes the implementation; copies first."""
        device = self.device
        if isinstance(work, AttentionWork) and not work.is_step:
            return attention_baselines.makers(
                work, direction, sets, device, self.baselines, self.options.tiny
            )
        makers: dict[str, object] = {
            "copy_": lambda: copy_baseline(work, direction, sets, device),
        }
        if device.type == "cuda":  # in a graph a copy is a node of another kind than a kernel
            makers["copy_ on a stream"] = lambda: makers["copy_"]()._replace(graph=False)
        if isinstance(work, AttentionWork):
            return makers | {
                "tidegate": lambda: attention_baselines.tidegate_step(work, sets, device)
            }
        if isinstance(work, GlaWork):
            fla = self.baselines.get("fla.gla")
            return makers | gla_baselines.makers(work, direction, sets, device, fla)
        if work.op == "hgru_step":
            return makers | {"tidegate": lambda: tidegate_step(work, sets, device)}
        if work.op == "lru_scan":
            return makers | {"tidegate": lambda: tidegate_lru(work, direction, sets, device)}
        if work.op == "wkv4":
            fla = self.baselines.get("fla.rwkv4")
            return makers | wkv4_baselines.makers(work, direction, sets, device, fla)
        inputs = HgruInputs(work, sets, device)
        if work.op == "hgru":
            reference = inputs.reference()
            makers["tidegate"] = lambda: tidegate_hgru(inputs, direction, reference)
            if "fla" in self.baselines and not work.complex:
                fla = self.baselines["fla"]
                scan = ScanInputs.of_hgru(inputs, log=True)
                for name in fla.functions:
                    makers[name] = lambda name=name: fla.implementation(name, scan, direction)
            return makers
        scan = ScanInputs.of_hgru(inputs, log=False)
        makers["tidegate"] = lambda: tidegate_scan(scan, direction)
        if "accelerated-scan" in self.baselines:
            baseline = self.baselines["accelerated-scan"]
            name = "accelerated-scan"
            makers[name] = lambda: baseline.implementation(name, scan, direction)
        return makers

    def prepared(self, implementation: Implementation) -> tuple[harness.Runner, float]:
        """A runner whose results were checked. WrongResult when they are wrong."""
        implementation.before()
        runner = harness.make_runner(implementation.calls, self.device, implementation.graph)
        error = implementation.error(runner.results[0])
        if not error <= implementation.tolerance:
            runner.free()
            raise WrongResult(f"relative error {error:.1e}, allowed {implementation.tolerance:.0e}")
        return runner, error

    def report_problem(self, what: str, problem: Exception, of_baseline: bool = False) -> None:
        """Records a failure; the run goes on, but ends with 1 unless only a baseline was wrong."""
        reason = (str(problem).splitlines() or [""])[0]
        line = f"{what}: {type(problem).__name__}: {reason}"[:300]
        (self.baseline_problems if of_baseline else self.problems).append(line)
        print(("BASELINE PROBLEM " if of_baseline else "PROBLEM ") + line, flush=True)

    def run(self, work: AnyWork, direction: str) -> None:
        """Measures one row."""
        moved = work.bytes(direction)
        sets = harness.sets_needed(moved, self.device, self.options.tiny)
        runners: dict[str, harness.Runner] = {}
        results: dict[str, dict[str, object]] = {}
        flops: dict[str, float] = {}
        for name, make in self.implementations(work, direction, sets).items():
            try:
                implementation = make()
                runners[name], error = self.prepared(implementation)
            except Exception as problem:  # one implementation's failure must not cost the whole run
                of_baseline = isinstance(problem, WrongResult) and not name.startswith(OURS)
                self.report_problem(f"{work} {direction}, {name}", problem, of_baseline)
                continue
            flops[name] = implementation.flops
            results[name] = {
                "bytes": implementation.bytes,
                "error": float(f"{error:.2e}"),
                "timing": runners[name].timing,
            }
        rested = isinstance(work, AttentionWork) and self.device.type == "cuda"
        pause = attention_baselines.PAUSE if rested else 0
        times = harness.measure(runners, self.options.rounds, self.options.budget, pause)
        harness.free(runners)
        if isinstance(work, GlaWork) and direction == "backward" and self.device.type == "cuda":
            fla = self.baselines.get("fla.gla") if "fla.chunk_gla" in results else None
            for name, peak in gla_baselines.peak_memory(work, self.device, fla).items():
                results[name]["peak_bytes"] = peak
        if isinstance(work, AttentionWork) and not work.is_step and self.device.type == "cuda":
            memory = attention_baselines.extra_memory(work, direction, self.device)
            results.get("tidegate", {}).update(memory)
        for name, seconds in times.items():
            results[name] |= harness.summary(seconds, results[name]["bytes"])
            if flops[name]:
                results[name]["tflops"] = round(flops[name] / results[name]["us"] * 1e-6, 1)
        self.add_row(work, direction, moved, sets, results)

    def add_row(
        self, work: AnyWork, direction: str, moved: int, sets: int, results: dict[str, dict]
    ) -> None:
        """Adds percentages and the figures beside baselines, records the row and prints it."""
        copies = [result["us"] for name, result in results.items() if name.startswith("copy_")]
        if copies:
            for result in results.values():
                percent = 100 * min(copies) / result["us"]
                result["percent_of_copy"] = round(percent * result["bytes"] / moved, 1)
        row = {
            "group": work.group,
            "op": work.op,
            "dtype": str(work.dtype).removeprefix("torch."),
            **work.fields(),
            "direction": direction,
            "bytes": moved,
            "sets": sets,
            **work.goal_of(direction),
            "results": results,
        }
        ours = results.get("tidegate")
        baselines = {name: results[name]["us"] for name in others(results)}
        if ours and baselines:
            best = min(baselines, key=baselines.__getitem__)
            row["best_baseline"] = best
            row["times_best_baseline"] = round(baselines[best] / ours["us"], 2)
        self.rows.append(row)
        print(line_of(row), flush=True)


def others(results: dict[str, dict]) -> list[str]:
    """The implementations of other libraries that compute the same."""
    return [name for name in results if not name.startswith((*OURS, "SDPA"))]


def attention_line(row: dict) -> str:
    """One short line of rates."""
    sizes = " ".join(f"{letter}{row[letter]}" for letter in "BTHD")
    parts = [f"{row['op']} {sizes} {row['direction']}{' pruned' if row.get('prune') else ''}"]
    for name, result in row["results"].items():
        rate = f" {result['tflops']:.0f}TF" if "tflops" in result else ""
        memory = f" +{result['extra_bytes_a_row']}B/row" if "extra_bytes_a_row" in result else ""
        parts.append(f"{name} {result['us']:.0f}us{rate}{memory}")
        if name == "tidegate":
            goal = row.get("goal_ms") or row["goal_tflops"]
            parts[-1] += f" (goal {goal}: {'ok' if reaches_goal(row) else 'MISSED'})"
    return " | ".join(parts)


def line_of(row: dict) -> str:
    """One short line a row."""
    if row.get("goal_tflops") or "prune" in row:
        return attention_line(row)
    kind = ("c" if row.get("complex") else "") + row["dtype"].replace("float", "")
    sizes = " ".join(f"{letter}{row[letter]}" for letter in "BTDH" if letter in row)
    shape = f"{row['op']:11.11} {kind:6} {sizes}"
    parts = [f"{shape:38} {row['direction'][:3]}"]
    ours = row["results"].get("tidegate")
    copies = [result for name, result in row["results"].items() if name.startswith("copy_")]
    copied = min(copies, key=lambda result: result["us"], default=None)
    if copied:
        parts.append(f"copy {copied['us']:.1f}us {copied['gb_per_s']:.0f}GB/s")
    if ours:
        percent = f" {ours['percent_of_copy']:.1f}%" if copied else ""
        verdict = ""
        if reaches_goal(row) is not None:
            goal = row.get("goal_percent") or f"{row['goal_ms']} ms"
            verdict = f" (goal {goal}: {'ok' if reaches_goal(row) else 'MISSED'})"
        parts.append(f"tg {ours['us']:.1f}us {ours['gb_per_s']:.0f}GB/s{percent}{verdict}")
    for name in others(row["results"]):
        result = row["results"][name]
        short = name.removeprefix("fla.").removesuffix("_hgrn")
        ratio = f" x{result['us'] / ours['us']:.2f}" if ours else ""
        parts.append(f"{short} {result['us']:.0f}us {result['gb_per_s']:.0f}GB/s{ratio}")
    return " | ".join(parts)


def summary_of(rows: list[dict], problems: list[str], baseline_problems: list[str]) -> list[str]:
    """What the run says of the goals, and of what failed."""
    lines = []
    goals = [reached for row in rows if (reached := reaches_goal(row)) is not None]
    lines.append(f"goals reached: {sum(goals)} of {len(goals)}")
    beside = [row for row in rows if "times_best_baseline" in row]
    if beside:
        worst = min(beside, key=lambda row: row["times_best_baseline"])
        lines.append(
            f"against the best baseline: {sum(r['times_best_baseline'] >= 1 for r in beside)} of "
            f"{len(beside)} rows not slower; worst x{worst['times_best_baseline']} at "
            f"{worst['op']} B{worst['B']} T{worst['T']} {worst['direction']}"
        )
    lines += [f"BASELINE PROBLEM {line}" for line in baseline_problems]
    lines += [f"PROBLEM {line}" for line in problems]
    return lines


def compile_baselines(
    works: list[AnyWork], baselines: Baselines, options: argparse.Namespace
) -> None:
    """Fills Triton's cache with all of fla's variants, many at once: minutes become seconds."""
    command = [sys.executable, __file__]
    channels = sorted({w.channels for w in works if w.op == "hgru" and not w.complex})
    tasks = [["--compile-fla", str(d)] for d in channels]
    if any(isinstance(work, GlaWork) for work in works):
        cores = os.cpu_count() or 1
        tasks += [["--compile-gla", str(part), str(cores)] for part in range(cores)]
    if any(isinstance(work, AttentionWork) for work in works):
        kernel = ["--paper-kernel", options.paper_kernel] if options.paper_kernel else []
        jobs = [i for i, (name, _) in enumerate(attention_baselines.jobs()) if name in baselines]
        tasks += [[*kernel, "--compile-attention", str(i)] for i in jobs]
    children = [
        subprocess.Popen([*command, *task], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for task in tasks
    ]
    for child in children:
        child.wait()


def compile_fla(channels: int) -> None:
    """Compiles what fla needs for one D; a child of compile_baselines."""
    fla = Fla()
    fla.tuner.only_compile = True
    device = torch.device("cuda")
    inputs = HgruInputs(Work("hgru", 1, 256, channels, "extra"), 1, device)
    scan = ScanInputs.of_hgru(inputs, log=True)
    for name in fla.functions:
        fla.implementation(name, scan, "backward").calls[0]()
    torch.cuda.synchronize()


def versions(baselines: Baselines) -> dict[str, str]:
    """Of everything that was timed."""
    found = {"torch": torch.__version__, "tidegate": tidegate.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found | {name.split(".")[0]: baseline.version for name, baseline in baselines.items()}


def save(record: dict, path: Path) -> None:
    """Writes the rows so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes: tries this script out")
    parser.add_argument("--groups", nargs="+", default=["aims", "sweep", "extra"], choices=GROUPS)
    parser.add_argument("--no-baselines", action="store_true", help="tidegate and copies only")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each implementation")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each implementation")
    parser.add_argument("--commit", help="commit to record, where git cannot tell")
    parser.add_argument(
        "--compile-only", action="store_true", help="fill Triton's cache, time nothing"
    )
    parser.add_argument(
        "--paper-kernel",
        default=os.environ.get("TIDEGATE_PAPER_KERNEL"),
        metavar="FILE",
        help="forgetting_attention.py of zhixuan-lin/forgetting-transformer (or "
        "$TIDEGATE_PAPER_KERNEL)",
    )
    parser.add_argument("--compile-fla", type=int, metavar="D", help=argparse.SUPPRESS)
    parser.add_argument("--compile-gla", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compile-attention", type=int, metavar="JOB", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.compile_fla:
        compile_fla(options.compile_fla)
        return 0
    if options.compile_gla:
        FlaGla().compile(*options.compile_gla)
        return 0
    if options.compile_attention is not None:
        name, work = attention_baselines.jobs()[options.compile_attention]
        attention_baselines.loaders(options.paper_kernel)[name]().compile(work)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("baselines: no CUDA device is visible; --device cpu --tiny tries it out")
    device = torch.device(options.device)
    begin = time.perf_counter()
    torch.manual_seed(0)
    loaders = {**(BASELINES if not {"gla", "attention"}.issuperset(options.groups) else {})}
    if "aims" in options.groups:
        loaders["fla.rwkv4"] = FlaRwkv4
    if "gla" in options.groups:
        loaders["fla.gla"] = FlaGla
    if "attention" in options.groups:
        loaders |= attention_baselines.loaders(options.paper_kernel)
    baselines, missing = ({}, []) if options.no_baselines else available_baselines(device, loaders)
    for line in missing:
        print(line, flush=True)
    works = [w for w in (TINY if options.tiny else WORKS) if w.group in options.groups]
    if baselines:
        compile_baselines(works, baselines, options)
        print(f"fla's kernels compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    if options.compile_only:
        return 0
    bench = Bench(device, baselines, options)
    record = {
        "kind": "baselines",
        "date": harness.today(),
        "commit": harness.commit(options.commit),
        "machine": harness.describe_machine(device),
        "versions": versions(baselines),
        "missing": missing,
        "notes": NOTES_OF.get("".join(options.groups), NOTES),
        "rows": bench.rows,
        "problems": bench.problems,
        "baseline_problems": bench.baseline_problems,
    }
    with torch.no_grad():
        for work, direction in ((w, d) for w in works for d in w.directions()):
            try:
                bench.run(work, direction)
            except Exception as problem:  # after a CUDA error nothing works: keep what there is
                bench.report_problem(f"{work} {direction}: the run ends here", problem)
                break
            finally:
                if options.out:
                    save(record, Path(options.out))
    print("\n".join(summary_of(bench.rows, bench.problems, bench.baseline_problems)))
    print(f"took {time.perf_counter() - begin:.0f} s")
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main())
