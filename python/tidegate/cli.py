"""The command line: `tidegate train | eval | generate | export | convert | plot | bench | info |
demo`.

Exit status: 0 = done; 2 = something the caller can put right, said in one line on stderr; 130 = a
run stopped by Ctrl-C or SIGTERM, with a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from ._memory import keep_freed_memory
from ._plot_command import add_plot, refuse
from ._several import end_with_the_others, is_one_of_several, tell_the_others
from .training.errors import UserError

STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if arguments is None:  # the process is this command's alone
        keep_freed_memory()
    try:
        status = options.command(options)
        sys.stdout.flush()  # what the disk refuses is said here, not while Python shuts down
        return status
    except UserError as error:
        problem, cause = str(error), error
    except BrokenPipeError:
        _drop_output()
        return 0
    except KeyboardInterrupt:
        try:  # noqa: SIM105  (a second Ctrl-C may meet any function that is called here)
            print("tidegate: interrupted", file=sys.stderr)
        except KeyboardInterrupt:
            pass
        return STOPPED
    except OSError as error:
        _drop_output()
        where = error.filename if error.filename is not None else "the disk"
        problem, cause = f"{where}: cannot be read or written: {error.strerror or error}", error
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            tell_the_others(error, forces=arguments is None)
            raise
        problem, cause = f"out of memory: {error}", error
    except Exception as error:
        tell_the_others(error, forces=arguments is None)
        raise
    if is_one_of_several():
        return end_with_the_others(cause, problem, forces=arguments is None)
    print("tidegate:", " ".join(problem.split()), file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Sends what is still to be written to stdout nowhere: whoever reads it is gone, or its disk is
    full, and Python would try once more while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch, on a CPU or a GPU, found no memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; needs neither torch nor numpy."""
    parser = argparse.ArgumentParser(
        prog="tidegate", description="Train and use language models with gated linear recurrences."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    _add_demo(commands)
    _add_eval(commands)
    _add_generate(commands)
    export = commands.add_parser(
        "export", help="write the model of a run's last checkpoint as plain files"
    )
    export.add_argument("run", help="run folder")
    export.add_argument("out", nargs="?", help="folder to write to (default: the run's model/)")
    export.set_defaults(command=_export)
    _add_convert(commands)
    add_plot(commands)
    bench = commands.add_parser("bench", help="run the benchmark binaries of a build tree")
    bench.add_argument("filter", nargs="?", default="", help="part of a benchmark's name")
    bench.add_argument(
        "--models",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="instead, training and decoding of every mixer beside Transformers of as many "
        "parameters; the rest goes to that program (--models --help lists its flags)",
    )
    bench.set_defaults(command=_bench)
    info = commands.add_parser("info", help="versions, devices, and which kernels were built")
    info.set_defaults(command=_info)
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on text or a task, or go on with a run",
        description="Started again on an --out that holds a checkpoint, it goes on from there; "
        "flags left out keep the run's values.",
    )
    parser.set_defaults(command=_train)
    # Flags that are not given leave no trace, so that a resumed run can tell what was asked for.
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        help="text file or folder, `stdlib`, token ids in a .npy or .bin file, or a task: copying, "
        "selective-copying, listops, mqar, digits, fashion-mnist; some recipes name their own",
    )
    add("--out", default="runs/train", help="run folder (default: %(default)s)")
    add(
        "--recipe",
        help="named settings: hgrn-wikitext103 (HGRN, Table 16), copying, mqar, "
        "fox-757m, fox-360m, demo",
    )
    add("--quiet", action="store_true", default=False, help="no progress bar")
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_optimisation_flags(parser)
    _add_run_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The model that is trained."""
    model = parser.add_argument_group("model")
    model.add_argument("--preset", help="a paper's configuration, e.g. hgrn-44m")
    model.add_argument("--mixer", help="token mixer, e.g. hgrn; or one a layer: a,a,b")
    model.add_argument("--dim", type=int, help="width")
    model.add_argument("--layers", type=int)
    model.add_argument("--glu-hidden", type=int, help="hidden width of the channel mixer")
    model.add_argument("--vocab-size", type=int, help="default: the preset's or the tokenizer's")
    model.add_argument("--dropout", type=float)
    model.add_argument(
        "--set",
        dest="fields",
        action="append",
        metavar="FIELD=JSON",
        help="any other field of LMConfig, e.g. mixer_options.complex=false; repeatable",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    """What it is trained on."""
    data = parser.add_argument_group("data")
    data.add_argument("--tokenizer", help="bytes (default), bpe:N, or a tokenizer.json")
    data.add_argument("--valid", help="validate on this file instead of a tenth of the data")
    data.add_argument("--token-dtype", help="of a .bin file (default: uint16)")
    data.add_argument(
        "--task-option",
        "--task",
        dest="options",
        action="append",
        metavar="OPTION=N",
        help="an option of the task, e.g. dummies=1000; repeatable",
    )
    data.add_argument("--context", type=int, help="tokens a sequence (tasks: their own)")
    data.add_argument(
        "--packed",
        action="store_true",
        help="keep files apart: sequences end where files do, and are packed end to end",
    )
    data.add_argument("--batch-size", type=int, help="sequences an optimiser step")
    data.add_argument("--grad-accum", type=int, help="parts a process's batch is computed in")


def _add_optimisation_flags(parser: argparse.ArgumentParser) -> None:
    """How it is trained."""
    train = parser.add_argument_group("optimisation")
    train.add_argument("--steps", type=int, help="optimiser steps (default: 1000)")
    train.add_argument("--minutes", type=float, help="wall-time budget of training")
    train.add_argument("--optimizer", help="adamw, adam or muon")
    train.add_argument("--lr", type=float, help="peak learning rate")
    train.add_argument("--muon-lr", type=float, help="peak rate of the matrices under muon")
    train.add_argument("--betas", type=float, nargs=2)
    train.add_argument("--eps", type=float)
    train.add_argument("--weight-decay", type=float)
    train.add_argument("--decay", help="what decays: matrices or all")
    train.add_argument("--clip", type=float, help="largest gradient norm; 0 = no clipping")
    train.add_argument("--schedule", help="constant, linear, cosine or inverse-sqrt")
    train.add_argument("--warmup-steps", type=int)
    train.add_argument("--warmup-fraction", type=float, help="warm-up as a part of the run")
    train.add_argument("--floor", type=float, help="last rate as a part of the peak")
    train.add_argument(
        "--cuda-graph", action="store_true", help="replay each step from a CUDA graph"
    )
    train.add_argument(
        "--compile", action="store_true", help="send the blocks through torch.compile"
    )
    train.add_argument("--precision", help="auto, fp32, tf32 (matrix products) or bf16 (autocast)")
    train.add_argument("--seed", type=int)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    """How often it is saved and scored, and where it runs."""
    run = parser.add_argument_group("run")
    run.add_argument("--checkpoint-every", type=int, metavar="STEPS")
    run.add_argument("--eval-every", type=int, metavar="STEPS")
    run.add_argument("--eval-tokens", type=int, help="tokens a validation on the way reads")
    run.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    run.add_argument("--threads", type=int, help="CPU threads of torch, a process")
    run.add_argument(
        "--parallel",
        metavar="ddp|fsdp",
        help="under torchrun: every process holds the model (ddp), or a part of it (fsdp); they "
        "share each batch",
    )
    run.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a process waits for the others (default: 600)",
    )


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train a small HGRN in three minutes and report")
    parser.add_argument("--out", default="runs/demo", help="run folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="another wall-time budget of training")
    parser.add_argument("--seed", type=int)
    parser.set_defaults(command=_demo)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="score a trained model on text or its task")
    parser.add_argument("run", help="run folder or saved model")
    parser.add_argument(
        "data", nargs="?", help="score all of this text; default: the run's validation split"
    )
    parser.add_argument("--token-dtype", default="uint16", help="of a .bin file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "tf32", "bf16"))
    parser.add_argument("--json", action="store_true", help="print JSON")
    context = parser.add_argument_group("use of the context; writes numbers and a plot")
    context.add_argument(
        "--per-token", action="store_true", help="loss by position and perplexity by length"
    )
    context.add_argument(
        "--needle", action="store_true", help="find an answer in a long text, by depth and length"
    )
    context.add_argument(
        "--length",
        type=int,
        nargs="+",
        help="tokens of a sequence (--per-token: one, 4 times the training context; --needle: "
        "several)",
    )
    context.add_argument("--sequences", type=int, help="of --per-token (64)")
    context.add_argument("--batch-size", type=int, help="of --per-token (4)")
    context.add_argument("--depths", type=int, help="of --needle (11)")
    context.add_argument("--samples", type=int, help="of --needle, a cell (4)")
    context.add_argument("--out", help="folder to write to (default: the run's)")
    parser.set_defaults(command=_eval)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="write text with a trained model")
    parser.add_argument("run", help="run folder or saved model")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to write (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = the likeliest token")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.set_defaults(command=_generate)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="checkpoints of other implementations into ours, and back",
        description="Folders with config.json and weights, whole or in shards. What cannot be said "
        "in the other format is an error, and then nothing is written.",
    )
    formats = ("tidegate", "hf", "fla", "fox", "hgru2-pytorch")
    parser.add_argument("source", help="folder of a checkpoint")
    parser.add_argument("out", help="new folder")
    parser.add_argument(
        "--to", choices=formats, help="default: ours; from ours, where it came from"
    )
    parser.add_argument(
        "--from", dest="given", choices=formats, help="default: what config.json says"
    )
    parser.add_argument("--shard-gb", type=float, help="the most that a file of weights holds")
    parser.set_defaults(command=_convert)


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MODEL_FLAGS = ("mixer", "dim", "layers", "glu_hidden", "vocab_size", "dropout")
_NOT_SETTINGS = {"command", "out", "recipe", "quiet", "preset", "fields", "options", "minutes"}
_NOT_SETTINGS.update(_MODEL_FLAGS)


def settings(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the flags of `train` ask for: fields of TrainConfig, fields of LMConfig."""
    given = vars(options)
    train = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    if "minutes" in given:
        train["seconds"] = _seconds("train", given["minutes"])
    if "options" in given:
        train["task_options"] = dict(map(_task_option, given["options"]))
    model = {name: given[name] for name in _MODEL_FLAGS if name in given}
    if "," in model.get("mixer", ""):
        model["mixer"] = model["mixer"].split(",")
    for text in given.get("fields", []):
        _set_field(model, text)
    return train, model


def _seconds(command: str, minutes: float) -> float:
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


def _set_field(model: dict[str, Any], text: str) -> None:
    """Puts `field=json` or `mixer_options.name=json` into `model`. True, False and None are meant
    as Python has them; other bare words are strings, which the field or option may refuse."""
    from .models._json import parse_json

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


def _train(options: argparse.Namespace) -> int:
    from .training.report import finish, plot_run
    from .training.runs import prepare_run

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
    from .training import recipes
    from .training.report import mixer_in_words

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


def describe_score(score: Any) -> str:
    """A score in words."""
    if score.accuracy is not None:
        return (
            f"accuracy {score.accuracy:.2%}, {score.nats:.4f} nats/answer over {score.tokens:,} "
            "answers"
        )
    bits = "" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f} bits/byte, "
    return (
        f"{bits}{score.nats:.4f} nats/token, perplexity {score.perplexity:.3f} "
        f"over {score.tokens:,} tokens"
    )


def _demo(options: argparse.Namespace) -> int:
    from .training.demo import run_demo

    seconds = None if options.minutes is None else _seconds("demo", options.minutes)
    return 0 if run_demo(options.out, seconds=seconds, seed=options.seed) else STOPPED


def _eval(options: argparse.Namespace) -> int:
    meant = {
        "sequences": (options.per_token, "--per-token"),
        "batch_size": (options.per_token, "--per-token"),
        "depths": (options.needle, "--needle"),
        "samples": (options.needle, "--needle"),
        "length": (options.per_token or options.needle, "--per-token or --needle"),
        "out": (options.per_token or options.needle, "--per-token or --needle"),
    }
    kinds = [f for f in ("--per-token", "--needle") if getattr(options, f[2:].replace("-", "_"))]
    for name, (has_meaning, place) in meant.items():
        if not has_meaning:
            refuse(options, "eval", name, place, " and ".join(kinds) or "neither")
    if kinds:
        refuse(options, "eval", "json", "neither --per-token nor --needle", " and ".join(kinds))
        return _eval_context(options)
    from .training.scoring import score_run

    score = score_run(
        options.run,
        options.data,
        dtype=options.token_dtype,
        device=options.device,
        precision=options.precision,
    )
    if options.json:
        print(
            json.dumps(
                {
                    "bits_per_byte": score.bits_per_byte,
                    "nats_per_token": score.nats,
                    "perplexity": score.perplexity,
                    "tokens": score.tokens,
                    "accuracy": score.accuracy,
                }
            )
        )
    else:
        print(describe_score(score))
    return 0


def _given(**values: Any) -> dict[str, Any]:
    """Those that were given; the others keep the function's defaults."""
    return {name: value for name, value in values.items() if value is not None}


def _eval_context(options: argparse.Namespace) -> int:
    from .training.context import needle_of_run, per_token_of_run

    where = {
        "dtype": options.token_dtype,
        "device": options.device,
        "precision": options.precision,
        "out": options.out,
    }
    if options.per_token:
        if options.length is not None and len(options.length) != 1:
            raise UserError(f"eval: length: expected one with --per-token, got {options.length}")
        files, lines = per_token_of_run(
            options.run,
            options.data,
            length=options.length[0] if options.length else None,
            **_given(sequences=options.sequences, batch=options.batch_size),
            **where,
        )
        print("\n".join([*lines, *map(str, files)]))
    if options.needle:
        files, lines = needle_of_run(
            options.run,
            options.data,
            lengths=options.length,
            **_given(depths=options.depths, samples=options.samples),
            **where,
        )
        print("\n".join([*lines, *map(str, files)]))
    return 0


def _generate(options: argparse.Namespace) -> int:
    from .training.generate import generate_text
    from .training.trained import load_trained

    text = generate_text(
        load_trained(options.run, options.device),
        options.prompt.encode("utf-8", errors="surrogateescape"),
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    print(text.decode("utf-8", errors="replace"))
    return 0


def _export(options: argparse.Namespace) -> int:
    from .training.trained import export_trained

    print(export_trained(options.run, options.out))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from .convert import run

    return run(options)


def _bench(options: argparse.Namespace) -> int:
    from ._system import run_benchmarks, run_model_benchmark

    if options.models is not None:
        return run_model_benchmark(options.models)
    return run_benchmarks(options.filter)


def _info(_options: argparse.Namespace) -> int:
    from ._system import info_lines

    print("\n".join(info_lines()))
    return 0
