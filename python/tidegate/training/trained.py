"""Loading the model that a run left, and writing it as plain files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models import CausalLM, LMConfig, SequenceClassifier
from ..models.block import holds_run
from .checkpoint import CHECKPOINT_FILE, RunFolder
from .checkpoint_content import weights_problem
from .config import INITIAL_WEIGHTS, TrainConfig, read_run
from .errors import UserError
from .exported import write_model
from .initial import open_initial
from .runtime import EXACT, resolve_device, resolve_precision, set_products
from .tasks import TASKS
from .tokenizers import BYTES, TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer
from .trainer import non_finite


@dataclass
class Trained:
    """A model that was trained, ready to use, and what it was trained on (None: unknown)."""

    model: CausalLM | SequenceClassifier
    tokenizer: Tokenizer | None
    train: TrainConfig | None

    def compute_in(self, precision: str) -> str:
        """Has the model compute in a precision, with the residual stream that it was trained with;
        returns the precision, "auto" resolved, for `autocast`. Under "auto" what was trained in
        fp32 or tf32 is computed so, as its run was validated."""
        if precision == "auto" and self.train is not None and self.train.precision in EXACT:
            precision = self.train.precision
        resolved = resolve_precision(precision, next(self.model.parameters()).device)
        set_products(resolved)
        if self.train is not None:
            self.train.set_residual(self.model, resolved)
        return resolved


def initial_model(values: dict[str, Any], kind: type[torch.nn.Module]) -> torch.nn.Module:
    """The model of a run's config.json as it was before the first step: on the CPU, of class `kind`
    (CausalLM or SequenceClassifier). torch's own generator is left as it was.

    Raises:
        UserError: the weights that it began with cannot be read, or its folder holds others now.
            Runs of earlier versions did not note which they were.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(values["train"]["seed"])
        model = kind(LMConfig.from_dict(values["model"]))
    if values["train"].get("init_from"):
        initial = open_initial(values["train"]["init_from"])
        noted = values.get(INITIAL_WEIGHTS)
        if noted is not None and initial.weights_checksum() != noted:
            raise UserError(
                f"init-from: {initial.name} holds other weights than the run began with"
            )
        initial.load_into(model)
    return model


def load_trained(path: str, device: str = "auto") -> Trained:
    """Loads a run folder (its last checkpoint) or a folder written by `CausalLM.save`.

    Raises:
        UserError: the folder is neither, or a file in it is damaged or does not fit.
    """
    folder = RunFolder(path)
    target = resolve_device(device)
    if not folder.path.is_dir():
        raise UserError(f"checkpoint: {path}: no such run folder")
    kept = folder.path / TOKENIZER_FILE
    if not folder.has_checkpoint:
        model = _load_model_folder(folder.path)
        _refuse_non_finite(folder.path, model)
        tokenizer = load_tokenizer(kept if kept.exists() else None)
        # Which ids are bytes is known of a vocabulary of 256 alone.
        has_text = kept.exists() or tokenizer.vocab_size == model.config.vocab_size
        if kept.exists():
            _check_vocabulary(kept, tokenizer, model.config)
        return Trained(model.to(target).eval(), tokenizer if has_text else None, None)
    values = read_run(folder.config)
    choice = folder.choose()
    content = folder.read(choice)
    try:
        model_config = LMConfig.from_dict(values["model"])
        config = TrainConfig.from_dict(values["train"])
        is_classifier = "head.bias" in content["model"]
        model = (SequenceClassifier if is_classifier else CausalLM)(model_config)
        config.set_weights_dtype(model)
        if problem := weights_problem(model, content["model"]):
            raise ValueError(problem)
        model.load_state_dict(content["model"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        detail = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{choice.path}: does not fit {folder.config.name} beside it: {detail}"
        ) from error
    _refuse_non_finite(choice.path, model)
    tokenizer = None
    if config.data not in TASKS and not config.data.endswith((".npy", ".bin")):
        tokenizer = load_tokenizer(None if config.tokenizer == BYTES else kept)
        _check_vocabulary(kept, tokenizer, model_config)
    return Trained(model.to(target).eval(), tokenizer, config)


def _check_vocabulary(path: Path, tokenizer: Tokenizer, model: LMConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{path}: it has {tokenizer.vocab_size} tokens, and the model's vocabulary is "
            f"{model.vocab_size}"
        )


def _refuse_non_finite(path: Path, model: torch.nn.Module) -> None:
    if name := non_finite(model):
        raise UserError(f"{path}: {name} holds numbers that are not finite: nothing comes of it")


def _load_model_folder(path: Path) -> CausalLM:
    try:
        return CausalLM.load(path)
    except FileNotFoundError as error:
        raise UserError(
            f"checkpoint: {path} is neither a run folder (with {CHECKPOINT_FILE}) nor a saved "
            "model (with config.json and model.safetensors)"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: {error}") from error


def export_trained(path: str, out: str | None = None) -> Path:
    """Writes the model of a run's last checkpoint as config.json and model.safetensors, which
    `CausalLM.load` and C++ read, and tokenizer.json where tokens are not bytes; the folder: `out`,
    or the run's own model/. What an earlier model left there is replaced or removed.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or `out` is a run's folder, whose own
            config.json would be lost.
    """
    folder = RunFolder(path)
    if not folder.has_checkpoint:
        raise UserError(f"export: {path} is not a run folder: it holds no checkpoint")
    target = folder.model if out is None else Path(out)
    if holds_run(target):
        raise UserError(
            f"export: out: {target}: expected a folder for a model; got a run, whose config.json "
            f"would be lost: name another folder, or none for {folder.model}"
        )
    trained = load_trained(path, "cpu")
    is_of_file = isinstance(trained.tokenizer, FileTokenizer)
    tokenizer = (folder.path / TOKENIZER_FILE).read_bytes() if is_of_file else None
    write_model(trained.model, target, step=str(folder.choose().step), tokenizer=tokenizer)
    return target
