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
from baseline_lines import OURS, line_of, others, summary_of
from baseline_works import GROUPS, NOTES, NOTES_OF, TINY, WORKS, AnyWork
from gla_baselines import FlaGla, GlaWork
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

Baselines = dict[str, Fla | AcceleratedScan | FlaGla | FlaRwkv4 | BaselineKernel]


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
    """The versions of everything that was timed."""
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
