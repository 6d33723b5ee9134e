"""`tidegate train`: its flags, and what they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

from ..models import LMConfig
from ..training.config import TrainConfig
from ..training.errors import UserError
from ..training.optim import DECAYS, OPTIMIZERS
from ..training.runs import DEFAULT_STEPS, VALIDATIONS
from ..training.schedules import SCHEDULES
from .errors import STOPPED
from .evaluate import describe_score
from .listing import WholeNames, names


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on text or a task, or go on with a run",
        formatter_class=WholeNames,
        description="Started again on an --out that holds a checkpoint, it goes on from there; "
        "flags left out keep the run's values. Defaults are those of a new run without --recipe "
        "and --preset; `tidegate list` says what each name is.",
    )
    parser.set_defaults(command=run)
    # Flags that are not given leave no trace, so that a resumed run can tell what was asked for.
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        help="text file or folder, `stdlib`, token ids in a .npy or .bin file, or a task: "
        f"{names('tasks')}; some recipes name their own",
    )
    add("--out", default="runs/train", help="run folder (default: %(default)s)")
    add("--recipe", help=f"named settings: {names('recipes')}")
    add("--quiet", action="store_true", default=False, help="no progress bar")
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_optimisation_flags(parser)
    _add_run_flags(parser)


def _defaults(config: type, parser: argparse._ArgumentGroup) -> Callable[..., None]:
    """A function that adds a flag for a field of `config` and tells its default."""
    known = {field.name: field.default for field in dataclasses.fields(config)}

    def add(flag: str, about: str = "", **options: Any) -> None:
        default = known[options.get("dest", flag[2:].replace("-", "_"))]
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if default is not False:
            about = f"{about} (default: {default})"
        parser.add_argument(flag, help=about.strip(), **options)

    return add


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The model that is trained."""
    model = parser.add_argument_group("model")
    add = _defaults(LMConfig, model)
    model.add_argument("--preset", help=f"a paper's configuration: {names('presets')}")
    add("--mixer", f"token mixer, or one a layer (a,a,b): {names('mixers')}")
    add("--dim", "width", type=int)
    add("--layers", type=int)
    model.add_argument(
        "--glu-hidden", type=int, help="hidden width of the channel mixer (default: 2 * dim)"
    )
    model.add_argument(
        "--vocab-size",
        type=int,
        help="default: the tokenizer's or the task's; of token ids the preset's, or one more than "
        "the largest",
    )
    add("--dropout", type=float)
    model.add_argument(
        "--set",
        dest="fields",
        action="append",
        metavar="FIELD=JSON",
        help="any other field of LMConfig, e.g. mixer_options.complex=false; repeatable",
    )
    model.add_argument(
        "--init-from",
        metavar="FOLDER",
        help="begin with the weights, and by default the configuration and the tokenizer, of this "
        "saved model, run, or checkpoint from elsewhere (what `tidegate convert` reads)",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    """What it is trained on."""
    data = parser.add_argument_group("data")
    add = _defaults(TrainConfig, data)
    add("--tokenizer", "bytes, bpe:N, or a tokenizer.json")
    data.add_argument("--valid", help="validate on this file (default: a tenth of the data)")
    add("--token-dtype", "of a .bin file")
    data.add_argument(
        "--task-option",
        "--task",
        dest="options",
        action="append",
        metavar="OPTION=N",
        help="an option of the task, e.g. dummies=1000; repeatable (`tidegate list tasks`)",
    )
    add("--context", "tokens a sequence; tasks have their own", type=int)
    data.add_argument(
        "--packed",
        action="store_true",
        help="keep files apart: sequences end where files do, and are packed end to end",
    )
    add("--batch-size", "sequences an optimiser step", type=int)
    add("--grad-accum", "parts a process's batch is computed in, to save memory", type=int)


def _add_optimisation_flags(parser: argparse.ArgumentParser) -> None:
    """How it is trained."""
    train = parser.add_argument_group("optimisation")
    add = _defaults(TrainConfig, train)
    train.add_argument(
        "--steps", type=int, help=f"optimiser steps (default: {DEFAULT_STEPS}, without --minutes)"
    )
    train.add_argument("--minutes", type=float, help="wall-time budget of training (default: none)")
    add("--optimizer", ", ".join(OPTIMIZERS))
    add("--lr", "peak learning rate", type=float)
    add("--muon-lr", "peak rate of the matrices under muon", type=float)
    add("--betas", "of the optimiser, as the next three", type=float, nargs=2)
    add("--eps", type=float)
    add("--weight-decay", type=float)
    add("--decay", f"what decays: {' or '.join(DECAYS)}")
    add("--clip", "largest gradient norm; 0 = no clipping", type=float)
    add("--schedule", ", ".join(SCHEDULES))
    add("--warmup-steps", "steps of a linear warm-up", type=int)
    add("--warmup-fraction", "warm-up as a part of the run", type=float)
    add("--floor", "last rate as a part of the peak", type=float)
    train.add_argument(
        "--cuda-graph", action="store_true", help="replay each step from a CUDA graph"
    )
    train.add_argument(
        "--compile", action="store_true", help="send the blocks through torch.compile"
    )
    add(
        "--precision",
        "fp32, tf32 (matrix products), bf16 (autocast), bf16-weights (with fp32 masters), or auto: "
        "bf16 where it is faster",
    )
    add("--residual", "the residual stream under autocast: auto, fp32 or bf16")
    add("--recompute", "what the backward pass computes again: none, norms or blocks")
    add("--label-smoothing", type=float)
    add("--z-loss", "weight of the squared log-sum-exp in the loss", type=float)
    add("--seed", type=int)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    """How often it is saved and scored, and where it runs."""
    run = parser.add_argument_group("run")
    add = _defaults(TrainConfig, run)
    run.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help=f"default: every {TrainConfig.checkpoint_seconds:g} seconds of training",
    )
    run.add_argument(
        "--eval-every",
        type=int,
        metavar="STEPS",
        help=f"validate every so many steps, 0 = at the end alone (default: {VALIDATIONS} times)",
    )
    add("--eval-tokens", "tokens a validation on the way reads", type=int)
    add("--device", "auto (CUDA where there is one), cpu, cuda or cuda:N")
    add("--threads", "CPU threads of torch, a process; 0 = its own choice", type=int)
    add(
        "--parallel",
        "under torchrun: every process holds the model (ddp), or a part of it (fsdp); they share "
        "each batch",
        metavar="none|ddp|fsdp",
    )
    add(
        "--timeout",
        "how long a process waits for the others",
        type=float,
        metavar="SECONDS",
    )


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MODEL_FLAGS = ("mixer", "dim", "layers", "glu_hidden", "vocab_size", "dropout")
_NOT_SETTINGS = {"command", "out", "recipe", "quiet", "preset", "fields", "options", "minutes"}
_NOT_SETTINGS.update(_MODEL_FLAGS)


def settings(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the flags of `train` ask for: fields of TrainConfig, fields of LMConfig."""
    given = vars(options)
    train = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    if "minutes" in given:
        train["seconds"] = seconds("train", given["minutes"])
    if "options" in given:
        train["task_options"] = dict(map(_task_option, given["options"]))
    model = {name: given[name] for name in _MODEL_FLAGS if name in given}
    if "," in model.get("mixer", ""):
        model["mixer"] = model["mixer"].split(",")
    for text in given.get("fields", []):
        set_field(model, text)
    return train, model


def seconds(command: str, minutes: float) -> float:
    """--minutes in seconds; UserError unless they are above 0."""
    if not 0 < minutes < math.inf:
        raise UserError(f"{command}: minutes: expected more than 0, got {minutes:g}")
    return minutes * 60.0


def _task_option(text: str) -> tuple[str, int]:
    """`option=number`."""
    name, equals, value = text.partition("=")
    if not equals or not value.removeprefix("-").isdecimal():
        raise UserError(f"task-option: expected OPTION=N with a whole number N, got {text!r}")
    return name, int(value)


def set_field(model: dict[str, Any], text: str) -> None:
    """Puts `field=json` or `mixer_options.name=json` into `model`. True, False and None are meant
    as Python has them; other bare words are strings, which the field or option may refuse."""
    from ..models._json import parse_json

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"set: expected FIELD=JSON, got {text!r}")
    try:
        parsed = _PYTHON_WORDS[value] if value in _PYTHON_WORDS else parse_json(value)
    except ValueError:
        parsed = value
    group, dot, key = name.partition(".")
    if dot:
        if group != "mixer_options":
            raise UserError(f"set: expected mixer_options.NAME, got {name!r}")
        options = model.setdefault(group, {})
        if not isinstance(options, dict):
            raise UserError(f"set: {name}: expected mixer_options to be an object, got {options!r}")
        options[key] = parsed
    else:
        model[name] = parsed


def run(options: argparse.Namespace) -> int:
    from ..training.report import finish, plot_run
    from ..training.runs import prepare_run

    train, model = settings(options)
    given = vars(options)
    recipe = given.get("recipe")
    run = prepare_run(options.out, train, model, preset=given.get("preset"), recipe=recipe)
    trainer, group = run.trainer, run.trainer.group
    if group.leads:
        _say_run(run, options.out, recipe)
    ended = trainer.run(options.quiet)
    score = finish(run) if ended else None
    group.leave()
    if not group.leads:
        return 0 if ended else STOPPED
    if not ended:
        print(f"stopped at step {trainer.position.step}; the same command goes on from there")
        return STOPPED
    if not any(plot_run(options.out, baselines=run.corpus.baselines(), device=run.config.device)):
        return 1
    print(f"validation: {describe_score(score)}; everything is in {options.out}")
    return 0


def _say_run(run: Any, out: str, recipe: str | None) -> None:
    """Says what is about to be trained; of a new run on a task whose recipe nobody asked for, that
    there is one."""
    from ..training import recipes
    from ..training.report import mixer_in_words

    trainer = run.trainer
    parameters = sum(p.numel() for p in trainer.model.parameters())
    config = run.model_config
    shared = f" by {run.config.parallel} in {trainer.group.size} processes"
    print(
        f"{mixer_in_words(config.mixer)}, {config.layers} layers of {config.dim}, "
        f"{parameters:,} parameters, "
        f"{run.config.precision} on {trainer.device}"
        f"{shared if trainer.group.mode != 'none' else ''}; {run.corpus.summary()}",
        file=sys.stderr,
    )
    if run.config.init_from and not run.resumed:
        print(f"it begins with the weights of {run.config.init_from}", file=sys.stderr)
    if run.config.cuda_graph and trainer.device.type != "cuda":
        print("without a CUDA device no step is replayed from a CUDA graph", file=sys.stderr)
    task = run.config.data
    if recipe is None and not run.resumed and task in recipes():
        print(
            f"no recipe is asked for: --recipe {task} trains {recipes()[task].about}",
            file=sys.stderr,
        )
    if run.begins_anew:
        print(f"the run in {out} has no checkpoint: it begins anew", file=sys.stderr)
    if run.resumed:
        state = "is finished" if trainer.progress() >= 1.0 else "goes on"
        print(f"the run in {out} {state} at step {trainer.position.step}", file=sys.stderr)
