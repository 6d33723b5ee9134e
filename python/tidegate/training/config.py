"""Settings of a training run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import CausalLM, LMConfig
from ..models._files import read_text
from ..models._json import JsonError, fits_64_bits, parse_json, shown
from ..models.block import RECOMPUTE, Model, draws
from ..models.registry import type_problem
from ..nn._common import is_number
from .distributed import PARALLEL
from .errors import UserError
from .masters import MasterWeights
from .muon import Combined
from .optim import DECAYS, OPTIMIZERS, build_optimizer
from .runtime import AUTOCAST, PRECISIONS, RESIDUALS
from .schedules import Schedule

# What may differ when a run is started again on its folder: how long it goes on, how often it
# writes, and where it runs. Everything else decides what the weights will be.
MAY_CHANGE = (
    "steps",
    "seconds",
    "checkpoint_every",
    "eval_every",
    "eval_tokens",
    "device",
    "threads",
    "recompute",
    "grad_accum",
    "parallel",
    "timeout",
)

# More than any machine runs, and few enough for a product of two to fit 64 bits.
_MOST = {"batch_size": 1 << 24, "context": 1 << 32, "threads": 1 << 10}


@dataclass
class TrainConfig:
    """How a model is trained.

    Attributes:
        data: what `load_corpus` reads.
        task_options: of a task, where data names one.
        tokenizer, valid: as `load_corpus` takes them.
        token_dtype: of the ids in a .bin file, as its `dtype`.
        steps: optimiser steps; None when only `seconds` bounds the run.
        seconds: wall-time budget of training, validation left out; None when only `steps` does.
        batch_size: sequences an optimiser step.
        context: tokens a sequence; a task's own length, where data names one.
        packed: sequences end where files of the data do, and are packed end to end: nothing is
            predicted from another file.
        grad_accum: parts that a batch is computed in, one after the other, to save memory.
        optimizer: "adamw", "adam" or "muon" (Muon for the matrices, AdamW for the rest).
        lr: peak learning rate.
        muon_lr: the peak rate of the matrices under "muon".
        betas, eps, weight_decay, decay: of the optimiser (see `build_optimizer`).
        clip: largest norm of the gradient; 0 = no clipping.
        schedule, warmup_steps, warmup_fraction, floor: see `Schedule`.
        cuda_graph: on CUDA, replay each step from a CUDA graph, so that launches do not set the
            pace of small models; not with "muon", nor where sequences have lengths of their own.
        compile: the blocks and the final norm go through torch.compile in training steps, which
            fuses what is between the matrix products; validation runs them as they are written.
        precision: "fp32"; "tf32" = fp32, but matrix products on CUDA round what they multiply to
            ten bits of mantissa; "bf16" = autocast; "bf16-weights" = autocast over weights that are
            bf16 themselves, with fp32 masters in the optimiser; "auto" = bf16 where the device
            multiplies it faster, else fp32.
        init_from: folder of the model whose weights the run begins with (`open_initial`); None =
            they are drawn from the seed.
        residual: dtype of the residual stream under autocast, "fp32" or "bf16"; "auto" = that of
            the embedding's weight.
        recompute: what the backward pass computes again instead of keeping it: "none", "norms"
            (and the products of GLUs) or "blocks".
        label_smoothing, z_loss: of a language model's training loss (see
            `tidegate.ops.linear_cross_entropy`); validation is without them.
        seed: of the initialisation, the order of the data, and dropout.
        checkpoint_every, eval_every: in steps; 0 = only at the end.
        checkpoint_seconds, eval_seconds: the same by wall time of training, for runs bounded by it.
        eval_tokens: tokens that each validation on the way reads; the last one reads them all.
        device: "auto" = CUDA where there is one.
        threads: of torch on the CPU; 0 = torch's own choice.
        parallel: how several processes share the model: "ddp" (each holds all of it), "fsdp" (each
            holds a part); "none" = one process. batch_size is that of all, and grad_accum divides
            the part of each.
        timeout: seconds that a process waits for the others.
    """

    data: str = "stdlib"
    task_options: dict[str, int] = field(default_factory=dict)
    tokenizer: str = "bytes"
    valid: str | None = None
    token_dtype: str = "uint16"
    steps: int | None = None
    seconds: float | None = None
    batch_size: int = 16
    context: int = 256
    packed: bool = False
    grad_accum: int = 1
    optimizer: str = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: str = "matrices"
    clip: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    floor: float = 0.0
    cuda_graph: bool = False
    compile: bool = False
    precision: str = "auto"
    init_from: str | None = None
    residual: str = "auto"
    recompute: str = "none"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    seed: int = 1
    checkpoint_every: int = 0
    checkpoint_seconds: float = 60.0
    eval_every: int = 0
    eval_seconds: float = 0.0
    eval_tokens: int = 65536
    device: str = "auto"
    threads: int = 0
    parallel: str = "none"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self._check_types()
        self.betas = tuple(self.betas)
        if self.steps is None and self.seconds is None:
            raise UserError("train: expected --steps or --minutes, got neither")
        for name in ("batch_size", "context", "grad_accum", "eval_tokens"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name, most in _MOST.items():
            self._require(name, getattr(self, name) <= most, f"at most {most}")
        for name in ("checkpoint_every", "checkpoint_seconds", "eval_every", "eval_seconds"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        for name in ("threads", "seed", "clip", "weight_decay", "eps"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        for name in ("steps", "seconds", "lr", "muon_lr", "timeout"):
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < math.inf, "more than 0")
        are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._require("betas", are_betas, "two numbers from 0 to below 1")
        self._require(
            "grad_accum",
            self.batch_size % self.grad_accum == 0,
            f"a divisor of the batch size {self.batch_size}",
        )
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("decay", DECAYS),
            ("precision", PRECISIONS),
            ("residual", RESIDUALS),
            ("recompute", RECOMPUTE),
            ("parallel", PARALLEL),
        ):
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        if self.optimizer == "muon":
            self._require("cuda_graph", not self.cuda_graph, "False with --optimizer muon")
        if self.precision in ("fp32", "tf32"):
            self._require("residual", self.residual != "bf16", "auto or fp32 without autocast")
        if self.compile:
            self._require("recompute", self.recompute != "norms", "none or blocks with --compile")
        self._require("label_smoothing", 0 <= self.label_smoothing <= 1, "0 to 1")
        self._require("z_loss", 0 <= self.z_loss < math.inf, "0 or more")
        if self.packed:
            self._require("grad_accum", self.grad_accum == 1, "1 with --packed")
        try:
            self.learning_rate()
        except ValueError as error:
            name, _, problem = str(error).partition(":")
            raise UserError(f"train: {name.replace('_', '-')}:{problem}") from error
        if self.schedule == "inverse-sqrt":
            self._require("warmup_steps", self.warmup_steps > 0, "1 or more with inverse-sqrt")

    def _check_types(self) -> None:
        """UserError for the first field whose value is of another type, or a number that no file
        or no library would take."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "betas":
                are = isinstance(value, (list, tuple)) and all(map(is_number, value))
                problem = "" if are else "two numbers from 0 to below 1"
            elif f.name == "task_options":
                are = isinstance(value, dict) and all(isinstance(name, str) for name in value)
                are = are and all(not _type_problem("int", number) for number in value.values())
                problem = "" if are else "a dictionary of integers"
            else:
                problem = _type_problem(f.type, value)
            if problem:
                flag = f.name.replace("_", "-")
                raise UserError(f"train: {flag}: expected {problem}, got {shown(value)}")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            flag = name.replace("_", "-")
            raise UserError(f"train: {flag}: expected {wanted}, got {getattr(self, name)!r}")

    def make_optimizer(
        self, model: nn.Module, *, capturable: bool
    ) -> torch.optim.Optimizer | Combined | MasterWeights:
        """The optimiser that these settings name; capturable: see `build_optimizer`. Under
        "bf16-weights" the model's weights become bf16."""
        optimizer = build_optimizer(
            model,
            self.optimizer,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            decay=self.decay,
            muon_lr=self.muon_lr,
            capturable=capturable,
        )
        if self.precision == "bf16-weights":
            return MasterWeights(model, optimizer)
        return optimizer

    def prepare(self, model: nn.Module) -> None:
        """Tells a model how its training steps compute.

        Raises:
            UserError: these settings ask for what a model of its class has not.
        """
        if self.loss_options() and not isinstance(model, CausalLM):
            raise UserError(
                "train: label-smoothing, z-loss: expected 0 for what is not a language model, got "
                f"{self.label_smoothing!r}, {self.z_loss!r}"
            )
        if not isinstance(model, Model):
            if self.recompute != "none" or self.residual != "auto":
                raise UserError(
                    "train: recompute, residual: expected none and auto for a model that is not of "
                    f"tidegate.models, got {self.recompute!r}, {self.residual!r}"
                )
            return
        is_replayed = self.cuda_graph and self.recompute == "blocks"
        if is_replayed and any(map(draws, model.modules())):
            raise UserError(
                "train: recompute: expected none or norms with --cuda-graph for a model with "
                "dropout or a gumbel_gate, whose numbers a graph cannot draw again, got 'blocks'"
            )
        model.recompute = self.recompute
        self.set_residual(model, self.precision)

    def set_residual(self, model: Model, precision: str) -> None:
        """Gives a model that computes in `precision` the residual stream of these settings, which
        autocast alone has."""
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        model.residual_dtype = dtypes.get(self.residual) if precision in AUTOCAST else None

    def set_weights_dtype(self, model: nn.Module) -> None:
        """Makes the weights of a model in fp32 what those of a run with these settings are."""
        if self.precision == "bf16-weights":
            model.bfloat16()

    def loss_options(self) -> dict[str, float]:
        """What a training step's loss has beside the cross-entropy, as `CausalLM.forward` takes
        it."""
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return {name: value for name, value in options.items() if value}

    def learning_rate(self) -> Schedule:
        """The schedule that these settings name."""
        return Schedule(self.schedule, self.warmup_steps, self.warmup_fraction, self.floor)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json holds them."""
        values = dataclasses.asdict(self)
        values["betas"] = list(self.betas)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The reverse of to_dict(); keys that this version does not know are an error."""
        values = current_names(values)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"config: unknown training settings {', '.join(unknown)}")
        return cls(**values)


def current_names(train: dict[str, Any]) -> dict[str, Any]:
    """Training settings by the names of this version: earlier ones called token_dtype `dtype`."""
    return {"token_dtype" if name == "dtype" else name: value for name, value in train.items()}


def differences(old: dict[str, Any], new: dict[str, Any], skip: tuple[str, ...] = ()) -> list[str]:
    """What differs between two configurations, as "name: old, now new"."""
    missing = object()
    return [
        f"{key}: {old.get(key, 'unset')!r}, now {new.get(key, 'unset')!r}"
        for key in sorted(set(old) | set(new))
        if key not in skip and old.get(key, missing) != new.get(key, missing)
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError when it is missing or damaged."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except JsonError as error:
        raise UserError(f"{path}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


# What a run's config.json says of its data, and what of itself.
_DATA = {
    "name": "str",
    "fingerprint": "str",
    "valid_tokens": "int | None",
    "valid_bytes": "int | None",
}


# Where config.json holds the checksum of the weights that init_from named when the run began. Runs
# of earlier versions lack it.
INITIAL_WEIGHTS = "initial_weights"


def read_run(path: Path) -> dict[str, Any]:
    """config.json of a run folder: model, train, data, parameters, machine, and initial_weights
    where the run began with some.

    Raises:
        UserError: it is missing, damaged, or something else; the line names the field.
    """
    values = read_json(path)
    for name in ("model", "train", "data"):
        if not isinstance(values.get(name), dict):
            raise UserError(f"{path}: not the configuration of a run: {name}: expected an object")
    try:
        TrainConfig.from_dict(values["train"])
        LMConfig.from_dict(values["model"])
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error
    fields = {**{f"data: {name}": kind for name, kind in _DATA.items()}, "parameters": "int"}
    fields[INITIAL_WEIGHTS] = "int | None"
    found = {**{f"data: {name}": values["data"].get(name) for name in _DATA}, **values}
    for name, kind in fields.items():
        if problem := _type_problem(kind, found.get(name)):
            raise UserError(f"{path}: {name}: expected {problem}, got {shown(found.get(name))}")
    chance = values["data"].get("chance")
    if chance is not None and not (is_number(chance) and 0 <= chance <= 1):
        raise UserError(f"{path}: data: chance: expected 0 to 1, got {shown(chance)}")
    return values


def _type_problem(kind: str, value: object) -> str:
    """What was expected of a field annotated `kind`; "" where the value is that."""
    kind, _, other = kind.partition(" | ")
    if other and value is None:
        return ""
    if kind == "int" and type(value) is int and not fits_64_bits(value):
        return "an integer of 64 bits"
    if kind == "float" and isinstance(value, float):
        return ""  # its range is looked at where it is known
    return type_problem(kind, value)
