#!/usr/bin/env python3
"""Training on several GPUs of one host beside one of them: speed, memory, checkpoints.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --json results.json
    python benchmarks/distributed.py --table results.json

Each case trains a model on one GPU, while the others wait, and then on all, each with as many
tokens a step as the one had. Steps are those of `tidegate train`: bf16 autocast, fused AdamW,
clipping. Memory is what a process holds of weights, gradients and optimiser states when the
optimiser steps. A checkpoint is timed as the training sees it: how long it stands still, and how
long a step takes while the rest is written. --tiny does all of it on CPUs in a moment.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
import torch.distributed as dist

from tidegate._sharding import local
from tidegate.models import CausalLM, LMConfig, presets
from tidegate.training import TrainConfig, load_corpus
from tidegate.training.checkpoint import RunFolder
from tidegate.training.distributed import ALONE, Group, join
from tidegate.training.trainer import Trainer

WARMUP, WINDOWS, STEPS = 3, 3, 4
CONTEXT = 2048


class Case(NamedTuple):
    """A model, and how it is shared. tokens: of a step, a GPU. checkpoint: is it timed."""

    name: str
    mode: str
    tokens: int
    checkpoint: bool = False


CASES = (
    Case("hgrn2-360m", "ddp", 32768),
    Case("hgrn2-756m", "fsdp", 16384, checkpoint=True),
    Case("fox-757m", "fsdp", 16384),
)


def config_of(name: str, tiny: bool) -> LMConfig:
    """The preset, or the mixer in the frame of the other 360m models."""
    if name == "hgrn2-360m":
        frame = presets()["fox-360m"]
        config = frame.replace(mixer="hgrn2", mixer_options={"num_heads": 8, "preset": "fla"})
    else:
        config = presets()[name]
    if not tiny:
        return config
    options = {**config.mixer_options, "num_heads": 2}
    sizes = {"dim": 32, "layers": 2, "glu_hidden": 64, "vocab_size": 64}
    return config.replace(mixer_options=options, **sizes)


def random_model(config: LMConfig, device: torch.device) -> CausalLM:
    """Its speed is any model's of this size, and drawing on the device takes no time."""
    model = CausalLM(config, device="meta").to_empty(device=device)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "lower_bounds" not in name:
                p.normal_(0.0, 0.02, generator=generator)
            else:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


class Measured:
    """A trainer of a case in a group, and what it measures."""

    def __init__(self, case: Case, group: Group, folder: Path, tiny: bool) -> None:
        context = 32 if tiny else CONTEXT
        sequences = 2 if tiny else case.tokens // context
        self.config = config_of(case.name, tiny)
        settings = TrainConfig(
            data=str(folder / "ids.npy"),
            steps=1_000_000,
            batch_size=sequences * group.size,
            context=context,
            precision="bf16",
            schedule="constant",
            lr=1e-4,
            device="cpu" if tiny else "cuda",
            parallel=group.mode,
        )
        device = group.device(settings.device)
        corpus = load_corpus(settings.data)
        model = random_model(self.config, device)
        self.trainer = Trainer(model, corpus, settings, RunFolder(folder / "run"), group)
        del model
        self.group = group
        self.held = 0
        self.tokens = sequences * context * group.size
        self.trainer.optimizer.register_step_post_hook(lambda *_: self._weigh())

    def _weigh(self) -> None:
        tensors = []
        for p in self.trainer.model.parameters():
            tensors += [p, p.grad, *self.trainer.optimizer.state[p].values()]
        found = [local(t.detach()) for t in tensors if t is not None]
        self.held = sum(t.numel() * t.element_size() for t in found)

    def _synchronize(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)

    def seconds(self, steps: int) -> float:
        """A step's time in a window of so many."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.trainer._step()
            self.group.agree(False, 0.0)
        self._synchronize()
        return (time.perf_counter() - begin) / steps

    def speed(self) -> dict[str, Any]:
        self.seconds(WARMUP)
        windows = [self.seconds(STEPS) for _ in range(WINDOWS)]
        median = statistics.median(windows)
        found = {
            "processes": self.group.size,
            "seconds_a_step": windows,
            "tokens_per_second": self.tokens / median,
            "held_bytes": self.held,
            "loss": float(self.trainer._losses[-1]),
        }
        if self.trainer.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(self.trainer.device)
        return found

    def checkpoint(self) -> dict[str, Any]:
        """Times a checkpoint; the slowest of the processes counts."""
        trainer = self.trainer
        self.group.meet()
        begin = time.perf_counter()
        trainer._saver.prepare(trainer.model.state_dict(), trainer.optimizer, trainer._generators())
        found = {"prepared_s": time.perf_counter() - begin, "stands_still_s": [], "on_disk_s": []}
        found["step_meanwhile_s"] = []
        for _ in range(2):
            self.seconds(1)
            begin = time.perf_counter()
            trainer.save(wait=False)
            found["stands_still_s"].append(time.perf_counter() - begin)
            found["step_meanwhile_s"].append(self.seconds(3))
            trainer._saver.wait()
            found["on_disk_s"].append(time.perf_counter() - begin)
        bytes_written = 0
        if self.group.leads:
            last = trainer.folder.choose().path
            bytes_written = sum(path.stat().st_size for path in last.iterdir())
        return {**{name: _slowest(value) for name, value in found.items()}, "bytes": bytes_written}


def _slowest(value: float | list[float]) -> float | list[float]:
    seconds = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist()


def measured(case: Case, group: Group, folder: Path, tiny: bool) -> dict[str, Any]:
    if not tiny:
        torch.cuda.reset_peak_memory_stats()
    found = Measured(case, group, folder, tiny)
    result = found.speed()
    if case.checkpoint and group is not ALONE:
        result["checkpoint"] = found.checkpoint()
    parameters = sum(p.numel() for p in found.trainer.model.parameters())
    del found
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    return {**result, "parameters": parameters}


def compared(case: Case, group: Group, folder: Path, tiny: bool) -> dict[str, Any]:
    """One GPU, which rank 0 has while the others wait, and all."""
    group.first((folder / "run").mkdir)
    one = group.first(lambda: measured(case, ALONE, folder, tiny))
    many = measured(case, group, folder, tiny)
    group.first(lambda: shutil.rmtree(folder / "run"))
    ratio = many["tokens_per_second"] / (group.size * one["tokens_per_second"])
    figures = {"speed_ratio": ratio, "held_ratio": many["held_bytes"] / one["held_bytes"]}
    return {**case._asdict(), **figures, "one": one, "many": many}


def make_folder(tiny: bool) -> Path:
    """With ids to train on."""
    folder = Path(tempfile.mkdtemp())
    ids = np.random.default_rng(1).integers(0, 64, 200_000 if tiny else 4_000_000)
    np.save(folder / "ids.npy", ids.astype(np.uint16))
    return folder


def run(cases: list[Case], tiny: bool) -> Iterator[tuple[dict[str, Any], Group]]:
    """The results; of each mode there is one group."""
    for mode in dict.fromkeys(case.mode for case in cases):
        group = join(mode, device="cpu" if tiny else "cuda", timeout=300.0)
        folder = group.first(lambda: make_folder(tiny))
        for case in (case for case in cases if case.mode == mode):
            yield compared(case, group, folder, tiny), group
        if group.leads:
            shutil.rmtree(folder)
        group.leave()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--case", action="append", help="name of a model; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs")
    parser.add_argument("--table", type=Path, help="print a file's results, and measure nothing")
    parser.add_argument("--commit", help="where git does not tell it")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return 0
    cases = [case for case in CASES if not options.case or case.name in options.case]
    results: dict[str, Any] = {"date": harness.today(), "commit": harness.commit(options.commit)}
    results["cases"] = []
    for found, group in run(cases, options.tiny):
        if not group.leads:
            continue
        device = torch.device("cpu" if options.tiny else "cuda")
        results |= {"processes": group.size, "machine": harness.describe_machine(device)}
        results["cases"].append(found)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if results["cases"]:
        print(table(results), flush=True)
    return 0


def table(results: dict[str, Any]) -> str:
    """A line a case, and one of the checkpoint."""
    count = results["processes"]
    device = results["machine"].get("gpu", {}).get("name", "CPU")
    lines = [f"{count} processes; {device}; {results['commit']}"]
    for case in results["cases"]:
        one, many = case["one"], case["many"]
        lines.append(
            f"{case['name']} {case['mode']}, {case['tokens']} tokens a GPU: "
            f"{many['tokens_per_second']:,.0f} tokens/s, {case['speed_ratio']:.3f} of {count} x "
            f"{one['tokens_per_second']:,.0f}; held {many['held_bytes'] / 2**30:.2f} GiB, "
            f"{case['held_ratio']:.3f} of {one['held_bytes'] / 2**30:.2f}; peak "
            f"{many.get('peak_bytes', 0) / 2**30:.1f} / {one.get('peak_bytes', 0) / 2**30:.1f} GiB"
        )
        if found := many.get("checkpoint"):
            still = " / ".join(f"{seconds:.2f}" for seconds in found["stands_still_s"])
            disk = " / ".join(f"{seconds:.1f}" for seconds in found["on_disk_s"])
            step = statistics.median(found["step_meanwhile_s"])
            usual = statistics.median(many["seconds_a_step"])
            lines.append(
                f"  checkpoint of {found['bytes'] / 2**30:.1f} GiB: stands still {still} s, on the "
                f"disk after {disk} s, a step meanwhile {step:.3f} s ({usual:.3f}), prepared in "
                f"{found['prepared_s']:.1f} s"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
