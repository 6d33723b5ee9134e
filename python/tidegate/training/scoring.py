"""`tidegate eval`: the score of a trained model on a text or on its task."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from ..models import CausalLM
from ..models.block import WEIGHTS_FILE
from .checkpoint import RunFolder
from .config import TrainConfig, read_run
from .data import Corpus, load_corpus, vocabulary_fits
from .errors import UserError
from .evaluate import Score
from .sources import Source, open_source
from .stdlib_corpus import NAME as STDLIB
from .tokenizers import BYTES, TOKENIZER_FILE
from .trained import Trained, load_trained


def corpus_of_run(run: str, source: str | None = None, dtype: str = "uint16") -> Source:
    """The corpus that the run in folder `run` was trained on, or `source` under its tokenizer."""
    folder = RunFolder(run)
    kept = folder.path / TOKENIZER_FILE
    tokenizer = str(kept) if kept.exists() else BYTES
    if source is not None:
        tokenizer = BYTES if source.endswith((".npy", ".bin")) else tokenizer
        return load_corpus(source, tokenizer=tokenizer, dtype=dtype)
    if not folder.has_checkpoint:
        if (folder.path / WEIGHTS_FILE).exists():
            raise UserError(f"{run} is a saved model, which has no text of its own: name one")
        raise UserError(f"{run} is not a run folder: it holds no {folder.checkpoint.name}")
    values = read_run(folder.config)
    config = TrainConfig.from_dict(values["train"])
    tokenizer = BYTES if config.tokenizer == BYTES else str(kept)
    corpus = open_source(config, tokenizer=tokenizer)
    if corpus.fingerprint != values["data"]["fingerprint"]:
        raise UserError(
            f"data: the content of {corpus.name} is not what {run} was trained on; name a text to "
            "score the model on that"
        )
    return corpus


def score_run(
    run: str,
    source: str | None = None,
    *,
    dtype: str = "uint16",
    device: str = "auto",
    precision: str = "auto",
) -> Score:
    """Scores the model in folder `run`.

    source: all of this text or array of ids is scored; of `stdlib`, its validation split. None:
    the validation split, or the task, that the run was trained with.

    Raises:
        UserError: the model or the text is missing, damaged, or too short.
    """
    trained = load_trained(run, device)
    if source is not None and not isinstance(trained.model, CausalLM):
        raise UserError(f"data: {run} holds a classifier, which scores its own task; leave it out")
    check_has_text(trained, run, source)
    corpus = corpus_of_run(run, source, dtype)
    if source is not None and source != STDLIB:
        corpus = _whole(corpus, Path(source))
    vocabulary_fits(corpus, trained.model.config.vocab_size)
    if isinstance(corpus, Corpus) and len(corpus.valid) < 2:
        raise UserError(f"data: {corpus.name} is too short: expected at least 2 tokens to score")
    target = next(trained.model.parameters()).device
    known = None if trained.train is None else trained.train.context
    return corpus.score(trained.model, target, trained.compute_in(precision), trained=known)


def check_has_text(trained: Trained, run: str, source: str | None) -> None:
    """UserError for a text that nothing says how to turn into the model's ids."""
    if source is None or source.endswith((".npy", ".bin")) or trained.tokenizer is not None:
        return
    raise UserError(
        f"data: {run} has no {TOKENIZER_FILE}, and its vocabulary is "
        f"{trained.model.config.vocab_size}, not that of bytes, or was trained without text: put "
        "the file there, or name token ids in a .npy or .bin file"
    )


def _whole(corpus: Corpus, source: Path) -> Corpus:
    """The corpus with both of its splits to score."""
    ids = np.concatenate([corpus.train, corpus.valid])
    size = None
    if corpus.tokenizer is not None:
        size = corpus.valid_bytes + corpus.train_bytes
    return dataclasses.replace(corpus, name=str(source), valid=ids, valid_bytes=size)
