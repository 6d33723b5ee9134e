"""What a run trains on, by the name it was given: a task, or text and token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import TrainConfig
from .data import Corpus, absolute_source, load_corpus
from .errors import UserError
from .task_corpus import TaskCorpus
from .tasks import TASKS, make_task
from .tokenizers import BYTES

Source = Corpus | TaskCorpus


def resolve_source(
    values: dict[str, Any], asked: dict[str, Any], recorded: dict[str, Any]
) -> dict[str, Any]:
    """Training settings `values` with what their data decides filled in.

    Paths become absolute. A task gets all of its options, those recorded with the same task first,
    and its length as context. asked, recorded: the parts of `values` that come from the caller and
    from the run's folder, or a new run's recipe.

    Raises:
        UserError: settings of text were asked for beside a task, or options of a task beside text.
    """
    values = dict(values)
    name = values.get("data")
    if name not in TASKS:
        if asked.get("task_options"):
            raise UserError(
                f"task-option: expected one of {', '.join(TASKS)} as data, got {name!r}"
            )
        values.pop("task_options", None)  # a recipe's, for the task that it names itself
        for key in ("data", "valid"):
            if values.get(key):
                values[key] = absolute_source(values[key])
        if values.get("tokenizer", BYTES) != BYTES and not values["tokenizer"].startswith("bpe:"):
            values["tokenizer"] = absolute_source(values["tokenizer"])
        return values
    for key in ("tokenizer", "valid", "token_dtype", "packed"):
        if key in asked:
            raise UserError(f"{key.replace('_', '-')}: the task {name} has no text; leave it out")
    options = recorded.get("task_options", {}) if recorded.get("data") == name else {}
    options = {**options, **asked.get("task_options", {})}
    corpus = TaskCorpus(make_task(name, options))
    corpus.check_length(asked.get("context", corpus.task.length))
    values["task_options"] = corpus.options()
    values["context"] = corpus.task.length
    return values


def open_source(
    config: TrainConfig, *, workdir: Path | None = None, tokenizer: str | None = None
) -> Source:
    """The data that the settings name. workdir, tokenizer: see `load_corpus`; None = the settings'
    tokenizer.

    Raises:
        UserError: it is missing, empty or unreadable.
    """
    if config.data in TASKS:
        return TaskCorpus(make_task(config.data, config.task_options))
    return load_corpus(
        config.data,
        tokenizer=config.tokenizer if tokenizer is None else tokenizer,
        valid=config.valid,
        dtype=config.token_dtype,
        workdir=workdir,
        packed=config.packed,
    )
