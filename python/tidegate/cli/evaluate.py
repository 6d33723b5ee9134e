"""`tidegate eval`: a score, or what a model makes of its context."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..training.errors import UserError
from .errors import refuse


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="score a trained model on text or its task")
    parser.add_argument("run", help="run folder or saved model")
    parser.add_argument(
        "data", nargs="?", help="score all of this text; default: the run's validation split"
    )
    parser.add_argument("--token-dtype", default="uint16", help="of a .bin file")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=("auto", "fp32", "tf32", "bf16"),
        help="default: auto, as the run where it was trained in fp32 or tf32, else bf16 where that "
        "is faster",
    )
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
    context.add_argument("--batch-size", type=int, help="of --per-token (4) and --tasks")
    context.add_argument("--depths", type=int, help="of --needle (11)")
    context.add_argument("--samples", type=int, help="of --needle, a cell (4)")
    context.add_argument("--out", help="folder to write to (default: the run's)")
    tasks = parser.add_argument_group("tasks of lm-eval (docs/lm_eval.md)")
    tasks.add_argument("--tasks", help="their names, with commas between; of the run's model")
    tasks.add_argument("--num-fewshot", type=int, help="solved examples before each question")
    tasks.add_argument("--limit", type=float, help="documents of a task, or a part of them below 1")
    tasks.add_argument("--include-path", help="folder with tasks of your own")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    if options.tasks is not None:
        return _eval_tasks(options)
    for name in ("num_fewshot", "limit", "include_path"):
        refuse(options, "eval", name, "--tasks", "neither")
    meant = {
        "sequences": (options.per_token, "--per-token"),
        "batch_size": (options.per_token, "--per-token and --tasks"),
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
    from ..training.scoring import score_run

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


def _eval_tasks(options: argparse.Namespace) -> int:
    for name in ("data", "per_token", "needle", "length", "sequences", "depths", "samples"):
        refuse(options, "eval", name, "text", "--tasks")
    try:
        from ..lm_eval.tasks import described, run_tasks, write_results
    except ImportError as error:
        raise UserError(f"eval: tasks: {error}") from error

    results = run_tasks(
        options.run,
        options.tasks.split(","),
        include_path=options.include_path,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        device=options.device,
        precision=options.precision,
    )
    print(described(results, options.json))
    if options.out is not None:
        print(write_results(results, options.out), file=sys.stderr)
    return 0


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given; the others keep the function's defaults."""
    return {name: value for name, value in values.items() if value is not None}


def _eval_context(options: argparse.Namespace) -> int:
    from ..training.context import needle_of_run, per_token_of_run

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
