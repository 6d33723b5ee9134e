"""The named recipes: models and how they are trained, from the papers and our own."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from .errors import UserError


@dataclass(frozen=True)
class Recipe:
    """Named hyperparameters: a model, by preset or by its fields, and training settings.

    data, task_options: what a new run trains on where nothing else is named. task_options hold for
    that task only, and single ones can be replaced.
    """

    train: dict[str, Any]
    about: str
    preset: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    task_options: dict[str, int] = field(default_factory=dict)


def recipes() -> dict[str, Recipe]:
    """The named recipes, the caller's own; what each is from stands beside it in the source."""
    return copy.deepcopy(_RECIPES)


_EARLIER_NAMES = {"fox-760m": "fox-757m"}  # the paper's round figure; the preset has the other


def recipe_named(name: str) -> Recipe:
    """The recipe `name`, which may be an earlier one's; UserError when there is none."""
    known = recipes()
    name = _EARLIER_NAMES.get(name, name)
    if name not in known:
        raise UserError(f"recipe: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _fox_training(lr: float, tokens: int) -> dict[str, Any]:
    """Appendix B.1 of the Forgetting Transformer's paper: batches of 2^19 tokens."""
    batch = 2**19
    return {
        "context": 16384,
        "batch_size": batch // 16384,
        "steps": tokens // batch,
        "warmup_steps": 256 * 2**20 // batch,
        "lr": lr,
        "schedule": "cosine",
        "floor": 0.1,
        "optimizer": "adamw",
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "clip": 1.0,
        "precision": "bf16",
        "checkpoint_every": 512,
        "eval_every": 1024,
    }


_RECIPES: dict[str, Recipe] = {
    # Table 16 of the HGRN paper, language modelling column: its batch of 128 sequences over all
    # GPUs, no clipping, and decay on every parameter, decoupled, as the code that the paper used
    # does under the name Adam.
    "hgrn-wikitext103": Recipe(
        preset="hgrn-44m",
        train={
            "tokenizer": "bpe:50265",
            "context": 512,
            "batch_size": 128,
            "steps": 50_000,
            "warmup_steps": 4_000,
            "lr": 5e-4,
            "schedule": "inverse-sqrt",
            "optimizer": "adamw",
            "betas": (0.9, 0.98),
            "eps": 1e-8,
            "weight_decay": 0.2,
            "decay": "all",
            "clip": 0.0,
            "checkpoint_every": 1_000,
            "eval_every": 1_000,
        },
        about="HGRN, Table 16: 44M on WikiText-103, BPE of 50265",
    ),
    # Section 4.1 of "Towards Understanding Gated Linear Recurrent Neural Networks", for its two
    # tasks; what that leaves open is torch's default for AdamW, and here GLUs of twice the width
    # with SiLU and a tied embedding.
    "copying": Recipe(
        model={
            "mixer": "gated-linear-rnn",
            "dim": 128,
            "layers": 6,
            "glu_activation": "silu",
        },
        train={
            "batch_size": 64,
            "steps": 100_000,
            "lr": 1e-4,
            "schedule": "constant",
            "optimizer": "adamw",
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.01,
            "decay": "all",
            "clip": 0.0,
            "cuda_graph": True,
            "precision": "fp32",
            "checkpoint_every": 1_000,
            "eval_every": 1_000,
        },
        about="six gated linear RNN layers of 128 on a copying task",
        data="copying",
    ),
    # Associative recall as HGRN2's paper has it (section 4.1), for 512 tokens at width 128: two
    # layers, AdamW with the cosine and the decay of Arora et al. 2023 (arXiv 2312.04927), whom the
    # paper follows, but fewer steps, and gates that start by chrono's rule. From the usual start,
    # near one half, next to nothing of a pair is left a hundred tokens on, and learning begins late
    # or never.
    "mqar": Recipe(
        model={
            "mixer": "hgrn2",
            "mixer_options": {
                "preset": "official",
                "expand_ratio": 64,
                "gate_init": "chrono:512",
            },
            "dim": 128,
            "layers": 2,
            "glu_hidden": 128,
            "glu_activation": "silu",
            "norm": "rms",
        },
        train={
            "batch_size": 64,
            "steps": 3_000,
            "lr": 6e-3,
            "schedule": "cosine",
            "warmup_fraction": 0.1,
            "optimizer": "adamw",
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "decay": "all",
            "clip": 0.0,
            "cuda_graph": True,
            "checkpoint_every": 1_000,
            "eval_every": 500,
        },
        about="two HGRN2 layers of 128 on associative recall",
        data="mqar",
        task_options={"length": 512},
    ),
    # Appendix B.1 of the Forgetting Transformer's paper, whose other models train with these two
    # under another preset; its tokens are GPT-2's, so name its tokenizer.json or token ids. Weights
    # start from N(0, 0.02) by the presets. What decays is left open; here the matrices do.
    "fox-757m": Recipe(
        preset="fox-757m",
        train=_fox_training(lr=1.25e-3, tokens=15 * 2**30),
        about="Forgetting Transformer, B.1: 760M on 15 Gi tokens of context 16384",
    ),
    "fox-360m": Recipe(
        preset="fox-360m",
        train=_fox_training(lr=1.5e-3, tokens=7 * 2**30),
        about="the same, 360M on 7 Gi tokens (the ablations of section 4.5)",
    ),
    "demo": Recipe(
        preset="demo",
        train={
            "seconds": 170.0,
            "context": 128,
            "batch_size": 16,
            "optimizer": "muon",
            "muon_lr": 0.03,
            "lr": 3e-3,
            "betas": (0.9, 0.99),
            "weight_decay": 0.1,
            "schedule": "linear",
            "warmup_fraction": 0.03,
            "eval_seconds": 20.0,
            "eval_tokens": 32_768,
            "checkpoint_seconds": 30.0,
        },
        about="byte-level real HGRN that two CPU cores train in three minutes",
        data="stdlib",
    ),
}
