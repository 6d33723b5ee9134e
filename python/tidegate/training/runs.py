"""Starting a run, resuming it, and loading the model that it left."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..models import CausalLM, LMConfig, SequenceClassifier, presets
from ..models._files import read_tensors, write_atomically
from ..models.block import CONFIG_FILE as MODEL_CONFIG
from ..models.block import WEIGHTS_FILE as MODEL_WEIGHTS
from .checkpoint import CHECKPOINT_FILE, CONFIG_FILE, LOSS_PLOT, RunFolder
from .checkpoint_content import weights_problem
from .config import MAY_CHANGE, TrainConfig, current_names, differences, read_run
from .data import vocabulary_fits
from .errors import UserError
from .recipe import recipe_named
from .runtime import (
    describe_machine,
    resolve_device,
    resolve_precision,
    set_products,
    set_threads,
)
from .sources import Source, open_source, resolve_source
from .tasks import TASKS
from .tokenizers import BYTES, TOKENIZER_FILE, Tokenizer, load_tokenizer
from .trainer import Trainer, non_finite

DEFAULT_STEPS = 1000
DEFAULT_MODEL = {"mixer": "hgrn"}


@dataclass
class Run:
    """A run that is ready to train: run.trainer.run() does it."""

    folder: RunFolder
    model_config: LMConfig
    config: TrainConfig
    corpus: Source
    trainer: Trainer
    resumed: bool  # from a checkpoint
    begins_anew: bool = False  # in a folder whose run left no checkpoint

    def export(self) -> None:
        """Writes model/: config.json and model.safetensors, which C++ reads too and which says of
        which step it is; tokenizer.json where tokens are not bytes."""
        self.folder.model.mkdir(exist_ok=True)
        if self.corpus.tokenizer_file is not None:
            own = (self.folder.path / TOKENIZER_FILE).read_bytes()
            write_atomically(self.folder.model / TOKENIZER_FILE, own)
        self.trainer.model.save(self.folder.model, metadata={"step": self._step})

    def is_exported(self) -> bool:
        """Whether model/ holds these weights of this step, bit for bit. A write that failed, or a
        run that was killed or went on since, left another."""
        model = self.trainer.model
        tensors = model.state_dict()
        try:
            if (self.folder.model / MODEL_CONFIG).read_bytes() != model.config.to_json().encode():
                return False
            with safe_open(self.folder.model / MODEL_WEIGHTS, "pt") as file:
                if (file.metadata() or {}).get("step") != self._step:
                    return False
            if self.corpus.tokenizer_file is not None:
                folders = (self.folder.path, self.folder.model)
                if len({(folder / TOKENIZER_FILE).read_bytes() for folder in folders}) > 1:
                    return False
            saved = read_tensors(self.folder.model / MODEL_WEIGHTS)
        except (OSError, ValueError, SafetensorError):
            return False
        return saved.keys() == tensors.keys() and all(
            _same(saved[name], t.cpu()) for name, t in tensors.items()
        )

    @property
    def _step(self) -> str:
        return str(self.trainer.position.step)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)  # which refuses to compare two dtypes


def prepare_run(
    out: str,
    train: dict[str, Any],
    model: dict[str, Any],
    *,
    preset: str | None = None,
    recipe: str | None = None,
) -> Run:
    """Reads the data, builds the model, and resumes where the folder `out` holds a checkpoint.

    train, model: what was asked for explicitly, by field of `TrainConfig` and `LMConfig`. What is
    not there comes from the run recorded in `out`; in a new folder, from the recipe, the preset and
    the defaults.

    Raises:
        UserError: data, settings, folder or checkpoint do not fit, or nothing names the data.
            Nothing on disk was changed.
    """
    folder = RunFolder(out)
    asked_train, asked_model = _named(train, model, preset, recipe)
    is_new = not folder.path.exists()
    folder.make()  # before anything in it is read: from here on it is ours alone
    try:
        recorded = _recorded(folder)
        base = current_names(recorded["train"]) if recorded else _data_of(recipe)
        if "data" not in {**base, **asked_train}:
            raise UserError(
                "train: name a text file or folder to train on, `stdlib`, a task, or a recipe that "
                "names one"
            )
        values = resolve_source({**base, **asked_train}, asked_train, base)
        config = _train_config(values, recorded)
        # A tokenizer that is learnt becomes the folder's with its first config.json: of a start
        # that is refused or killed before, none stays for the next one to take.
        with tempfile.TemporaryDirectory() as scratch:
            kept = _kept_tokenizer(folder, recorded, config)
            corpus = open_source(config, workdir=folder.path if kept else Path(scratch))
            corpus.check_length(config.context)
            model_config = _model_config(asked_model, recorded, corpus)
            _refuse_other(folder, recorded, config, model_config, corpus)
            content = folder.load() if folder.checkpoint.exists() else None
            run = _build(folder, model_config, config, corpus, content)
        run.begins_anew = recorded is not None and content is None
    except BaseException:
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return run


def _kept_tokenizer(
    folder: RunFolder, recorded: dict[str, Any] | None, config: TrainConfig
) -> bool:
    """Whether the folder holds its run's tokenizer; UserError where it holds somebody else's."""
    kept = folder.path / TOKENIZER_FILE
    if recorded is None and kept.exists() and config.tokenizer != os.path.abspath(kept):
        raise UserError(
            f"out: {folder.path} holds {TOKENIZER_FILE} but no {CONFIG_FILE}: the run would take "
            "it for its own; name another --out"
        )
    return kept.exists()


def _named(
    train: dict[str, Any], model: dict[str, Any], preset: str | None, recipe: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Explicit settings, over those of a recipe and a preset that were named."""
    settings: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    if recipe is not None:
        named = recipe_named(recipe)
        settings.update(named.train)
        if preset is None:
            preset = named.preset
            fields.update(named.model)
    if preset is not None:
        known_presets = presets()
        if preset not in known_presets:
            raise UserError(f"preset: expected one of {', '.join(known_presets)}, got {preset!r}")
        fields.update(known_presets[preset].to_dict())
        if fields["vocab_size"] is None:
            raise UserError(f"preset: {preset} is an image model; train takes language models")
    if model.get("mixer", fields.get("mixer")) != fields.get("mixer"):
        fields.pop("mixer_options", None)  # another mixer has other options
    options = {**fields.get("mixer_options", {}), **model.get("mixer_options", {})}
    merged = {**fields, **model}
    if options:
        merged["mixer_options"] = options
    return {**settings, **current_names(train)}, merged


def _data_of(recipe: str | None) -> dict[str, Any]:
    """What a recipe's new run trains on, as training settings."""
    named = None if recipe is None else recipe_named(recipe)
    if named is None or named.data is None:
        return {}
    return {"data": named.data, "task_options": named.task_options}


def _recorded(folder: RunFolder) -> dict[str, Any] | None:
    """config.json of a run that is already in the folder."""
    if not folder.config.exists():
        ours = (folder.metrics, folder.checkpoint, folder.model, folder.path / LOSS_PLOT)
        if found := [path.name for path in ours if path.exists()]:
            raise UserError(
                f"out: {folder.path} holds {', '.join(found)} but no {CONFIG_FILE}: a run would "
                "overwrite what is not its own; name another --out"
            )
        return None
    return read_run(folder.config)


def _train_config(values: dict[str, Any], recorded: dict[str, Any] | None) -> TrainConfig:
    """Settings with the device's precision resolved; a resumed run keeps the one it began with."""
    values = dict(values)
    if values.get("steps") is None and values.get("seconds") is None:
        values["steps"] = DEFAULT_STEPS
    config = TrainConfig.from_dict(values)
    if config.precision == "auto":
        began = recorded["train"]["precision"] if recorded else None
        resolved = began or resolve_precision("auto", resolve_device(config.device))
        config = dataclasses.replace(config, precision=resolved)
    return config


def _model_config(
    asked: dict[str, Any], recorded: dict[str, Any] | None, corpus: Source
) -> LMConfig:
    """The model's configuration; its vocabulary and classes are the corpus's unless something names
    others."""
    base = recorded["model"] if recorded else DEFAULT_MODEL
    values = {**base, **asked}
    if values.get("vocab_size") is None:
        values["vocab_size"] = corpus.vocab_size
    if corpus.num_classes is not None:
        values.setdefault("num_classes", corpus.num_classes)
    try:
        config = LMConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    vocabulary_fits(corpus, config.vocab_size)
    return config


def _refuse_other(
    folder: RunFolder,
    recorded: dict[str, Any] | None,
    config: TrainConfig,
    model_config: LMConfig,
    corpus: Source,
) -> None:
    """UserError when the folder's run is not the one that is asked for."""
    if recorded is None:
        return
    # Read back first: an earlier version's files lack the settings that came after it.
    old_model, old_train = (
        kind.from_dict(recorded[key]).to_dict()
        for kind, key in ((LMConfig, "model"), (TrainConfig, "train"))
    )
    changed = differences(old_model, model_config.to_dict())
    changed += differences(old_train, config.to_dict(), MAY_CHANGE)
    if not changed and recorded["data"].get("fingerprint") != corpus.fingerprint:
        changed = [f"the content of {corpus.name} changed"]
    if changed:
        raise UserError(
            f"out: {folder.path} holds a run of another configuration ({'; '.join(changed)}): "
            "name another --out, or delete it"
        )


def _build(
    folder: RunFolder,
    model_config: LMConfig,
    config: TrainConfig,
    corpus: Source,
    content: dict[str, Any] | None,
) -> Run:
    """The model and its trainer, restored from `content` when there is a checkpoint."""
    set_threads(config.threads)
    set_products(config.precision)
    torch.manual_seed(config.seed)
    try:
        model = _make_model(model_config, corpus)
    except ValueError as error:
        raise UserError(str(error)) from error
    trainer = Trainer(model, corpus, config, folder)
    if content is not None:
        trainer.restore(content)
    else:
        folder.cut_metrics(0)
        folder.previous.unlink(missing_ok=True)  # of a run whose last one somebody deleted
    if trainer.progress() < 1.0:  # of a finished run it says what was done, not what is asked for
        folder.write_config(
            {
                "model": model_config.to_dict(),
                "train": config.to_dict(),
                "data": corpus.describe(),
                "parameters": sum(p.numel() for p in model.parameters()),
                "machine": describe_machine(trainer.device),
            }
        )
    kept = folder.path / TOKENIZER_FILE
    if corpus.tokenizer_file is not None and not kept.exists():
        write_atomically(kept, corpus.tokenizer_file.read_bytes())
    return Run(folder, model_config, config, corpus, trainer, content is not None)


def _make_model(config: LMConfig, corpus: Source) -> CausalLM | SequenceClassifier:
    """A language model, or a classifier where the corpus has classes."""
    if corpus.num_classes is None:
        return CausalLM(config)
    if (config.num_classes or 0) < corpus.num_classes:
        raise ValueError(
            f"LMConfig: num_classes: expected {corpus.num_classes} or more for {corpus.name}; "
            f"got {config.num_classes}"
        )
    return SequenceClassifier(config)


@dataclass
class Trained:
    """A model that was trained, ready to use, and what it was trained on (None: unknown)."""

    model: CausalLM | SequenceClassifier
    tokenizer: Tokenizer | None
    train: TrainConfig | None


def initial_model(values: dict[str, Any], kind: type[torch.nn.Module]) -> torch.nn.Module:
    """The model of a run's config.json as it was before the first step: on the CPU, of class `kind`
    (CausalLM or SequenceClassifier). torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(values["train"]["seed"])
        return kind(LMConfig.from_dict(values["model"]))


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
    if not folder.checkpoint.exists():
        model = _load_model_folder(folder.path)
        _refuse_non_finite(folder.path, model)
        tokenizer = load_tokenizer(kept if kept.exists() else None)
        # Which ids are bytes is known of a vocabulary of 256 alone.
        has_text = kept.exists() or tokenizer.vocab_size == model.config.vocab_size
        if kept.exists():
            _check_vocabulary(kept, tokenizer, model.config)
        return Trained(model.to(target).eval(), tokenizer if has_text else None, None)
    values = read_run(folder.config)
    content = folder.load()
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
            f"{folder.checkpoint}: does not fit {folder.config.name} beside it: {detail}"
        ) from error
    _refuse_non_finite(folder.checkpoint, model)
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
