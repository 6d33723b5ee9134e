"""Starting a run, resuming it, and loading the model that it left."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import sys
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
from ..nn._common import is_number
from .checkpoint import CONFIG_FILE, LOSS_PLOT, Choice, RunFolder
from .config import (
    INITIAL_WEIGHTS,
    MAY_CHANGE,
    TrainConfig,
    current_names,
    differences,
    read_run,
)
from .data import Corpus, vocabulary_fits
from .distributed import Group, is_launched, join
from .errors import UserError
from .exported import is_beside, write_model
from .initial import Initial, open_initial
from .recipe import recipe_named
from .runtime import (
    describe_machine,
    resolve_device,
    resolve_precision,
    set_products,
    set_threads,
)
from .sharded_folders import FOLDER as SEVERAL
from .sharded_folders import find_by_all
from .sources import Source, open_source, resolve_source
from .tasks import TASKS
from .tokenizers import TOKENIZER_FILE
from .trainer import LOG_EVERY, Trainer

DEFAULT_STEPS = 1000
VALIDATIONS = 10  # of a run that nothing else is said of: enough for a curve
SHARED_PRECISIONS = ("fp32", "tf32", "bf16")  # of several processes: weights are fp32
# A preset's vocabulary may be a tokenizer's, rounded up by so small a part of it.
_PADDING = 64


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
        """Writes model/, unless it holds these weights of this step: config.json and
        model.safetensors, which C++ reads too and which says of which step it is; tokenizer.json
        where tokens are not bytes. All of several processes call it."""
        tensors = self.trainer.placement.whole_state()
        if not self.trainer.group.leads or self._is_exported(tensors):
            return
        model = type(self.trainer.model)(self.model_config, device="meta")
        model.load_state_dict(tensors, assign=True)
        write_model(model, self.folder.model, step=self._step, tokenizer=self._tokenizer())

    def is_exported(self) -> bool:
        """Whether model/ holds these weights of this step, bit for bit. A write that failed, or a
        run that was killed or went on since, left another."""
        return self._is_exported(self.trainer.placement.whole_state())

    def _is_exported(self, tensors: dict[str, torch.Tensor]) -> bool:
        try:
            config = self.model_config.to_json().encode()
            if (self.folder.model / MODEL_CONFIG).read_bytes() != config:
                return False
            with safe_open(self.folder.model / MODEL_WEIGHTS, "pt") as file:
                if (file.metadata() or {}).get("step") != self._step:
                    return False
            if not is_beside(self.folder.model, self._tokenizer()):
                return False
            saved = read_tensors(self.folder.model / MODEL_WEIGHTS)
        except (OSError, ValueError, SafetensorError):
            return False
        return saved.keys() == tensors.keys() and all(
            _same(saved[name], t.cpu()) for name, t in tensors.items()
        )

    def _tokenizer(self) -> bytes | None:
        """The content of the run's tokenizer file; None where tokens are bytes, or ids."""
        if self.corpus.tokenizer_file is None:
            return None
        return (self.folder.path / TOKENIZER_FILE).read_bytes()

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

    Under torchrun every process calls it, with `parallel` among the settings; see `distributed`.

    Raises:
        UserError: data, settings, folder or checkpoint do not fit, or nothing names the data.
            Nothing on disk was changed.
    """
    folder = RunFolder(out)
    asked_train, asked_model = _named(train, model, preset, recipe)
    asked = _Asked(
        asked_train,
        asked_model,
        recipe,
        vocabulary=None if "vocab_size" in model else asked_model.pop("vocab_size", None),
        cuda_graph=bool(train.get("cuda_graph")),
        adds_options="mixer_options" not in _named({}, {}, preset, recipe)[1],
    )
    if asked.train.get("init_from"):
        asked.train["init_from"] = os.path.abspath(asked.train["init_from"])
    group = _join(folder, asked.train)
    with group.watch(lambda: "while the run was prepared"):
        is_new = group.leads and not folder.path.exists()
        group.first(folder.make)  # before anything in it is read: from here on it is ours alone
        try:
            find_by_all(folder.path, group)
            # A tokenizer that is learnt becomes the folder's with its first config.json: of a start
            # that is refused or killed before, none stays for the next one to take.
            with tempfile.TemporaryDirectory() as scratch:
                ready = _ready(group, folder, Path(scratch), asked)
                return _build(folder, ready, group)
        except BaseException:
            if is_new:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise


def _join(folder: RunFolder, asked: dict[str, Any]) -> Group:
    """The processes that this one trains with; what is not asked for, the run's record says."""
    values: dict[str, Any] = {}
    if is_launched():
        with contextlib.suppress(UserError):  # said where it is read again
            values = read_run(folder.config)["train"]
    values = {"parallel": "none", "device": "auto", "timeout": 600.0, **values, **asked}
    timeout = values["timeout"]
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise UserError(f"train: timeout: expected more than 0, got {timeout!r}")
    return join(values["parallel"], device=values["device"], timeout=timeout)


@dataclass
class _Asked:
    """What prepare_run() was asked for, explicitly or by a name. vocabulary: of a preset that was
    named. cuda_graph: whether it is asked for by itself. adds_options: whether its mixer_options
    are single ones that were asked for, rather than all that a preset or a recipe has."""

    train: dict[str, Any]
    model: dict[str, Any]
    recipe: str | None
    vocabulary: int | None
    cuda_graph: bool
    adds_options: bool


@dataclass
class _Ready:
    """What a run is made of. choice: the checkpoint that it goes on from. initial: the weights that
    it begins with instead, where init_from names some; initial_checksum: of these, in a process
    that was told of them. tokenizer: of a learnt one the file's content, in such a process."""

    recorded: dict[str, Any] | None
    config: TrainConfig
    model_config: LMConfig
    choice: Choice | None
    corpus: Source | None
    fingerprint: str
    initial: Initial | None = None
    initial_checksum: int | None = None
    tokenizer: bytes | None = None

    def told(self) -> _Ready:
        """What the other processes of a run are told of it."""
        file = self.corpus.tokenizer_file if self.config.tokenizer.startswith("bpe:") else None
        return dataclasses.replace(
            self,
            choice=None if self.choice is None else self.choice.told(),
            corpus=None,
            initial=None,
            initial_checksum=None if self.initial is None else self.initial.checksum(),
            tokenizer=None if file is None else file.read_bytes(),
        )

    def follow(self, scratch: Path) -> _Ready:
        """In a process that was told: with the data read here."""
        if self.tokenizer is not None:
            (scratch / TOKENIZER_FILE).write_bytes(self.tokenizer)
        corpus = open_source(self.config, workdir=scratch)
        if corpus.fingerprint != self.fingerprint:
            raise UserError(f"data: {corpus.name} does not hold here what it holds for rank 0")
        initial = None
        if self.initial_checksum is not None:
            initial = open_initial(self.config.init_from)
            if initial.checksum() != self.initial_checksum:
                raise UserError(
                    f"init-from: {initial.name} does not hold here what it holds for rank 0"
                )
        return dataclasses.replace(self, corpus=corpus, initial=initial)


def _ready(group: Group, folder: RunFolder, scratch: Path, asked: _Asked) -> _Ready:
    """Rank 0 goes first, so that what is wrong for all is said once; the others take from it what
    it chose and made."""
    own: list[_Ready] = []

    def lead() -> _Ready:
        own.append(_prepare(group, folder, scratch, asked))
        return own[0].told() if group.size > 1 else own[0]

    told = group.first(lead)
    return group.everywhere(lambda: own[0] if own else told.follow(scratch))


def _prepare(group: Group, folder: RunFolder, scratch: Path, asked: _Asked) -> _Ready:
    """What prepare_run() finds before it builds anything."""
    recorded = _recorded(folder)
    base = current_names(recorded["train"]) if recorded else _data_of(asked.recipe)
    values = {**base, **asked.train}
    if "data" not in values:
        raise UserError(
            "train: name a text file or folder to train on, `stdlib`, a task, or a recipe that "
            "names one"
        )
    initial = None
    if values.get("init_from") and not folder.has_checkpoint:
        initial = open_initial(values["init_from"])
        if values["data"] not in TASKS:
            initial.settle(values)
    values = resolve_source(values, asked.train, base)
    values["parallel"] = group.mode
    config = _train_config(values, recorded)
    _check_graph(config, asked, group)
    _check_share(config, group)
    kept = _kept_tokenizer(folder, recorded, config)
    corpus = open_source(config, workdir=folder.path if kept else scratch)
    corpus.check_length(config.context)
    start = recorded["model"] if recorded else initial and initial.config.to_dict()
    fields = dict(asked.model)
    if start is None:
        fields["vocab_size"] = _vocabulary(fields, asked.vocabulary, corpus)
    elif asked.adds_options and fields.get("mixer", start["mixer"]) == start["mixer"]:
        options = {**start.get("mixer_options", {}), **fields.get("mixer_options", {})}
        fields["mixer_options"] = options
    model_config = _model_config({**(start or {}), **fields}, corpus)
    _refuse_other(folder, recorded, config, model_config, corpus)
    vocabulary_fits(corpus, model_config.vocab_size)  # else of another run's text, which is said
    choice = folder.choose() if folder.has_checkpoint else None
    return _Ready(recorded, config, model_config, choice, corpus, corpus.fingerprint, initial)


def _check_graph(config: TrainConfig, asked: _Asked, group: Group) -> None:
    """UserError where a CUDA graph is asked for by itself and the device has none."""
    device = group.device(config.device)
    if asked.cuda_graph and device.type != "cuda":
        raise UserError(
            "train: cuda-graph: expected a CUDA device, which steps are replayed on, got "
            f"{device}; leave it out"
        )
    if group.mode != "none" and config.cuda_graph:
        problem = f"cuda-graph: steps with --parallel {group.mode} are not replayed from a graph"
        print(f"{problem}: the run goes on without", file=sys.stderr)


def _check_share(config: TrainConfig, group: Group) -> None:
    """UserError unless the processes can share every batch, and the model."""
    if config.batch_size % (group.size * config.grad_accum):
        raise UserError(
            f"train: batch-size: expected a multiple of {group.size} processes times grad-accum "
            f"{config.grad_accum}, got {config.batch_size}: it is the sequences of a step over all "
            "processes"
        )
    if group.mode != "none" and config.precision not in SHARED_PRECISIONS:
        raise UserError(
            f"train: precision: expected one of {', '.join(SHARED_PRECISIONS)} with --parallel "
            f"{group.mode}, got {config.precision!r}"
        )


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
    asked = model.get("mixer_options", {})
    if not isinstance(asked, dict):
        raise UserError(f"train: mixer_options: expected an object of options, got {asked!r}")
    options = {**fields.get("mixer_options", {}), **asked}
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
        ours = [folder.metrics, folder.checkpoint, folder.model, folder.path / LOSS_PLOT]
        ours.append(folder.path / SEVERAL)
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
    if recorded is None and not {"eval_every", "eval_seconds"} & set(values):
        steps = values.get("steps")
        if type(steps) is int and steps > 0:
            every = -(-steps // VALIDATIONS)
            # In step with the rows of training, which a validation ends early.
            values["eval_every"] = (
                every if every < LOG_EVERY else -(-every // LOG_EVERY) * LOG_EVERY
            )
        elif steps is None:
            values["eval_seconds"] = values["seconds"] / VALIDATIONS
    config = TrainConfig.from_dict(values)
    if config.precision == "auto":
        began = recorded["train"]["precision"] if recorded else None
        resolved = began or resolve_precision("auto", resolve_device(config.device))
        config = dataclasses.replace(config, precision=resolved)
    return config


def _vocabulary(asked: dict[str, Any], named: int | None, corpus: Source) -> int | None:
    """The vocabulary of a new model: the one that was asked for; else that of the tokenizer or the
    task, which a preset's `named` one may exceed by a little; of token ids, of which nobody knows
    the largest to come, the preset's."""
    if asked.get("vocab_size") is not None:
        return asked["vocab_size"]
    own = corpus.vocab_size
    if isinstance(corpus, Corpus) and corpus.tokenizer is None:
        return named
    return named if named is not None and 0 <= named - own <= own // _PADDING else own


def _model_config(values: dict[str, Any], corpus: Source) -> LMConfig:
    """The model's configuration; its vocabulary and classes are the corpus's unless something names
    others."""
    values = dict(values)
    if values.get("vocab_size") is None:
        values["vocab_size"] = corpus.vocab_size
    if corpus.num_classes is not None:
        values.setdefault("num_classes", corpus.num_classes)
    try:
        return LMConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


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


def _build(folder: RunFolder, ready: _Ready, group: Group) -> Run:
    """The model and its trainer, restored where there is a checkpoint, else with the weights that
    it begins with, if any."""
    config, corpus, model_config = ready.config, ready.corpus, ready.model_config
    set_threads(config.threads)
    set_products(config.precision)
    torch.manual_seed(config.seed)
    try:
        # A model that is cut into parts is drawn part by part.
        model = _make_model(model_config, corpus, "meta" if group.mode == "fsdp" else None)
    except ValueError as error:
        raise UserError(str(error)) from error
    trainer = Trainer(model, corpus, config, folder, group, ready.initial)
    if ready.choice is not None:
        how: dict[str, Any] = {}
        if group.mode != "none":
            likes = (trainer.model.state_dict(), trainer.optimizer)
            how = {"likes": likes, "group": group}
        trainer.restore(folder.read(ready.choice, **how), ready.choice.path)
    elif group.leads:
        folder.cut_metrics(0)
        folder.previous.unlink(missing_ok=True)  # of a run whose last one somebody deleted
    if group.leads:
        _write_config(folder, trainer, ready)
    begins_anew = ready.recorded is not None and ready.choice is None
    resumed = ready.choice is not None
    return Run(folder, model_config, config, corpus, trainer, resumed, begins_anew)


def _write_config(folder: RunFolder, trainer: Trainer, ready: _Ready) -> None:
    """config.json, and the tokenizer beside it."""
    corpus = trainer.corpus
    begun: dict[str, Any] = {}
    if ready.initial is not None:
        begun = {INITIAL_WEIGHTS: ready.initial.weights_checksum()}
    elif ready.choice is not None and INITIAL_WEIGHTS in ready.recorded:
        begun = {INITIAL_WEIGHTS: ready.recorded[INITIAL_WEIGHTS]}
    if trainer.progress() < 1.0:  # of a finished run it says what was done, not what is asked for
        folder.write_config(
            {
                "model": ready.model_config.to_dict(),
                "train": trainer.config.to_dict(),
                **begun,
                "data": corpus.describe(),
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "machine": {
                    **describe_machine(trainer.device),
                    "processes": trainer.group.size,
                },
            }
        )
    kept = folder.path / TOKENIZER_FILE
    if corpus.tokenizer_file is not None and not kept.exists():
        write_atomically(kept, corpus.tokenizer_file.read_bytes())


def _make_model(
    config: LMConfig, corpus: Source, device: str | None = None
) -> CausalLM | SequenceClassifier:
    """A language model, or a classifier where the corpus has classes."""
    if corpus.num_classes is None:
        return CausalLM(config, device=device)
    if (config.num_classes or 0) < corpus.num_classes:
        raise ValueError(
            f"LMConfig: num_classes: expected {corpus.num_classes} or more for {corpus.name}; "
            f"got {config.num_classes}"
        )
    return SequenceClassifier(config, device=device)
