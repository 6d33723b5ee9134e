#!/usr/bin/env python3
"""The demo's text, trainer and wall time with torch.nn.GRU in place of HGRN.

    make bench-demo                     # trains both, each with the waiting policy that suits it
    PYTHONPATH=build/python python benchmarks/demo_gru.py --out runs/demo_gru [--demo runs/demo]

A byte-level GRU of 3 layers of 256 learns the same split for the same seconds, with the same batch
and schedule as `tidegate demo`, and is scored the same way: once with the demo's optimiser and once
with AdamW, because what suits one architecture need not suit the other. Run it when the machine is
idle, right after the demo: all figures depend on how many steps the time allows. The JSON holds
them, with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tidegate
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


def train_gru(out: Path, changes: dict) -> dict:
    """Trains and scores the GRU; returns its figures."""
    values = {**recipes()["demo"].train, "data": "stdlib", **changes}
    config = TrainConfig(**values)
    device = resolve_device(config.device)
    precision = resolve_precision(config.precision, device)
    config = dataclasses.replace(config, precision=precision)
    folder = RunFolder(out)
    if folder.path.exists():
        raise SystemExit(f"demo_gru: {folder.path} exists; name another --out or delete it")
    folder.make()
    corpus = load_corpus(config.data)
    torch.manual_seed(config.seed)
    model = GRULanguageModel()
    trainer = Trainer(model, corpus, config, folder)
    if not trainer.run():
        raise SystemExit("demo_gru: stopped before its end; nothing was recorded")
    score = trainer.validate()
    position = trainer.position
    return {
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
        raise SystemExit(f"demo_gru: {path} holds no finished demo; run `make demo` first")
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


def commit() -> str:
    """The checkout's commit, or "unknown"."""
    result = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def main() -> int:
    """Runs the comparison and prints or writes its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/demo_gru", help="run folder of the GRU")
    parser.add_argument("--demo", help="folder of a finished demo to put beside it")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seconds", type=float, help="another wall-time budget")
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    parser.add_argument("--precision", help="fp32 or bf16")
    options = parser.parse_args()
    names = ("seconds", "precision")
    changes = {name: getattr(options, name) for name in names if getattr(options, name)}
    gru = [
        train_gru(Path(options.out, name), {**changes, "optimizer": name})
        for name in options.optimizers
    ]
    corpus = load_corpus("stdlib")
    figures = {
        "what": "byte-level language models on the standard library's sources, same wall time",
        "machine": describe_machine(torch.device("cpu")),
        "python": sys.version.split()[0],
        "tidegate": tidegate.__version__,
        "commit": commit(),
        "validation_bytes": corpus.valid_bytes,
        "baselines": {k: round(v, 4) for k, v in baselines(corpus.train, corpus.valid).items()},
        "gru": gru,
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
