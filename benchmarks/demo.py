#!/usr/bin/env python3
"""The demo's text, trainer and wall time with other models in place of its HGRN.

    make bench-demo                     # trains all, each with the waiting policy that suits it
    PYTHONPATH=build/python python benchmarks/demo.py --models hgrn2 [--demo runs/demo]

The others are an HGRN2 language model of the demo's size, and a byte-level torch.nn.GRU of 3 layers
of 256, once with the demo's optimiser and once with AdamW, because what suits one architecture need
not suit the other. They learn the same split for the same seconds, with the same batch and schedule
as `tidegate demo`, and are scored the same way. Run it when the machine is idle, right after the
demo: all figures depend on how many steps the time allows. The JSON holds them, with machine,
versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tidegate
from tidegate._memory import keep_freed_memory
from tidegate.models import CausalLM, presets
from tidegate.training import TrainConfig, Trainer, load_corpus, recipes
from tidegate.training.baselines import baselines
from tidegate.training.checkpoint import RunFolder, read_metrics
from tidegate.training.config import read_json
from tidegate.training.runtime import describe_machine, resolve_device, resolve_precision


class Output(NamedTuple):
    """What the trainer reads: as tidegate.models.Output."""

    logits: Tensor
    loss: Tensor | None
    state: Tensor | None


class GRULanguageModel(nn.Module):
    """Embedding, stacked torch.nn.GRU, linear head: the baseline."""

    def __init__(self, vocab_size: int = 256, dim: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, *, state: Tensor | None = None
    ) -> Output:
        """ids int64 [B, T] -> Output(logits [B, T, vocab], mean loss, state [layers, B, dim])."""
        h, state = self.gru(self.embedding(ids), state)
        logits = self.head(h)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return Output(logits, loss, state)


def hgrn2() -> CausalLM:
    """The demo's model with HGRN2 as its mixer, in heads of 32: as many parameters."""
    options = {"expand_ratio": 32}
    return CausalLM(presets()["demo"].replace(mixer="hgrn2", mixer_options=options))


class OtherModel(NamedTuple):
    """A model beside the demo's, and what of the demo's settings it changes."""

    name: str
    make: Callable[[], nn.Module]
    changes: dict[str, str]


OTHERS = {
    "hgrn2": OtherModel("HGRN2", hgrn2, {}),
    "gru-muon": OtherModel("`torch.nn.GRU`, muon", GRULanguageModel, {}),
    "gru-adamw": OtherModel("`torch.nn.GRU`, adamw", GRULanguageModel, {"optimizer": "adamw"}),
}


def train(other: OtherModel, out: Path, changes: dict) -> dict:
    """Trains and scores another model; returns its figures."""
    values = {**recipes()["demo"].train, "data": "stdlib", **other.changes, **changes}
    config = TrainConfig(**values)
    device = resolve_device(config.device)
    precision = resolve_precision(config.precision, device)
    config = dataclasses.replace(config, precision=precision)
    folder = RunFolder(out)
    if folder.path.exists():
        raise SystemExit(f"demo: {folder.path} exists; name another --out or delete it")
    folder.make()
    corpus = load_corpus(config.data)
    torch.manual_seed(config.seed)
    model = other.make()
    trainer = Trainer(model, corpus, config, folder)
    if not trainer.run():
        raise SystemExit("demo: stopped before its end; nothing was recorded")
    score = trainer.validate()
    position = trainer.position
    return {
        "model": other.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": config.optimizer,
        "precision": config.precision,
        "seconds": round(position.seconds, 1),
        "steps": position.step,
        "bytes_read": position.tokens,
        "bytes_per_second": round(position.tokens / position.seconds),
        "bits_per_byte": round(score.bits_per_byte, 4),
    }


def demo_figures(path: str) -> dict:
    """The figures of a finished `tidegate demo`."""
    folder = RunFolder(path)
    last = read_metrics(folder.metrics)[-1]
    if last["kind"] != "final":
        raise SystemExit(f"demo: {path} holds no finished demo; run `make demo` first")
    config = read_json(folder.config)
    return {
        "parameters": config["parameters"],
        "optimizer": config["train"]["optimizer"],
        "precision": config["train"]["precision"],
        "seconds": round(last["seconds"], 1),
        "steps": last["step"],
        "bytes_read": last["tokens"],
        "bytes_per_second": round(last["tokens"] / last["seconds"]),
        "bits_per_byte": round(last["bits_per_byte"], 4),
    }


def main() -> int:
    """Runs the comparison and prints or writes its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/demo_others", help="a run folder a model goes here")
    parser.add_argument("--models", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--demo", help="folder of a finished demo to put beside it")
    parser.add_argument("--add", help="JSON of this script whose models are put before these")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seconds", type=float, help="another wall-time budget")
    parser.add_argument("--precision", help="fp32 or bf16")
    options = parser.parse_args()
    names = ("seconds", "precision")
    changes = {name: getattr(options, name) for name in names if getattr(options, name)}
    keep_freed_memory()  # as the `tidegate` command does
    others = [train(OTHERS[name], Path(options.out, name), changes) for name in options.models]
    if options.add:
        others = read_json(Path(options.add))["others"] + others
    corpus = load_corpus("stdlib")
    figures = {
        "what": "byte-level language models on the standard library's sources, same wall time",
        "machine": describe_machine(torch.device("cpu")),
        "python": sys.version.split()[0],
        "tidegate": tidegate.__version__,
        "commit": harness.commit(),
        "validation_bytes": corpus.valid_bytes,
        "baselines": {k: round(v, 4) for k, v in baselines(corpus.train, corpus.valid).items()},
        "others": others,
    }
    if options.demo:
        figures["hgrn"] = demo_figures(options.demo)
    text = json.dumps(figures, indent=2) + "\n"
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
