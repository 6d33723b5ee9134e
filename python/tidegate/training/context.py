"""`tidegate eval --per-token`, `tidegate eval --needle` and `tidegate plot attention` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..models import CausalLM
from .data import Corpus, vocabulary_fits
from .errors import UserError
from .maps import head_maps
from .needle import needle_test
from .per_token import per_token_loss
from .report import count_in_words, model_name
from .scoring import check_has_text, corpus_of_run
from .trained import Trained, load_trained

DEFAULT_CONTEXT = 512  # of a saved model, which does not say what it was trained on
MAPS_PLOT, PER_TOKEN_PLOT, NEEDLE_PLOT = "attention_maps.png", "per_token.png", "needle.png"


def _opened(run: str, source: str | None, dtype: str, device: str) -> tuple[Trained, Corpus, str]:
    """The language model, a text, and the model's name for a title."""
    trained = load_trained(run, device)
    if not isinstance(trained.model, CausalLM):
        raise UserError(f"{run} holds a classifier; expected a language model")
    check_has_text(trained, run, source)
    corpus = corpus_of_run(run, source, dtype)
    if not isinstance(corpus, Corpus):
        raise UserError(f"{run} was trained on the task {corpus.name}; name a text to read")
    vocabulary_fits(corpus, trained.model.config.vocab_size)
    mixer = model_name(trained.model.config.mixer)
    count = sum(p.numel() for p in trained.model.parameters())
    return trained, corpus, f"{mixer}, {count_in_words(count)} parameters"


def _text(corpus: Corpus, source: str | None) -> np.ndarray:
    """The run's validation split, or all of a text that was named."""
    if source is None:
        return corpus.valid
    return np.concatenate([corpus.train, corpus.valid])


def _contexts(trained: Trained) -> tuple[int | None, int]:
    """The context length of training, None where it is unknown, and what to go by."""
    known = None if trained.train is None else trained.train.context
    return known, DEFAULT_CONTEXT if known is None else known


def per_token_of_run(
    run: str,
    source: str | None = None,
    *,
    length: int | None = None,
    sequences: int = 64,
    batch: int = 4,
    dtype: str = "uint16",
    device: str = "auto",
    precision: str = "auto",
    out: str | None = None,
) -> tuple[list[Path], list[str]]:
    """Writes per_token.csv, per_token.json and per_token.png into `out` (None: the run's folder).

    length: tokens of a sequence; None: four times the training context, or what the text has.
    Returns the files, and lines that say the most. Raises UserError as `per_token_loss` does.
    """
    from .. import plots_context

    trained, corpus, name = _opened(run, source, dtype, device)
    tokens = _text(corpus, source)
    known, context = _contexts(trained)
    length = max(1, min(4 * context, len(tokens) - 1)) if length is None else length
    found = per_token_loss(
        trained.model,
        tokens,
        length=length,
        sequences=sequences,
        batch=batch,
        precision=trained.compute_in(precision),
        trained=known,
        starts=corpus.windows(length, sequences) if source is None and length >= 1 else None,
    )
    folder = Path(run if out is None else out)
    files = found.write(folder)
    files.append(folder / PER_TOKEN_PLOT)
    title = f"Loss by position: {name}, {found.sequences} sequences of {Path(corpus.name).name}"
    plots_context.plot_per_token({name: found}, files[-1], title=title)
    smooth, perplexity = found.smoothed(), found.perplexities
    whole = len(found.losses)
    ends = [n for n in (known, whole) if n is not None and n <= whole]
    lines = [
        f"at {n:,} tokens: L {smooth[n - 1]:.4f} nats, P {perplexity[n - 1]:.4f}"
        for n in dict.fromkeys(ends)
    ]
    return files, lines


def needle_of_run(
    run: str,
    source: str | None = None,
    *,
    lengths: list[int] | None = None,
    depths: int = 11,
    samples: int = 4,
    dtype: str = "uint16",
    device: str = "auto",
    precision: str = "auto",
    out: str | None = None,
) -> tuple[list[Path], list[str]]:
    """Writes needle.json and needle.png into `out` (None: the run's folder).

    lengths: tokens of the prompts; None: 1, 2 and 4 times the training context. depths: how many,
    evenly from 0 to 1. Returns the files, and lines with the score of each length.
    """
    from .. import plots_context

    trained, corpus, name = _opened(run, source, dtype, device)
    if trained.tokenizer is None:
        raise UserError("needle: the model was trained without text; it has no tokenizer")
    if depths < 1:
        raise UserError(f"needle: depths: expected 1 or more, got {depths}")
    known, context = _contexts(trained)
    scores = needle_test(
        trained.model,
        _text(corpus, source),
        trained.tokenizer,
        lengths=[context, 2 * context, 4 * context] if lengths is None else lengths,
        depths=[float(d) for d in np.linspace(0, 1, depths)] if depths > 1 else [0.5],
        samples=samples,
        precision=trained.compute_in(precision),
        trained=known,
    )
    folder = Path(run if out is None else out)
    files = [scores.write(folder), folder / NEEDLE_PLOT]
    plots_context.plot_needle(scores, files[-1], title=f"Needle test: {name}")
    lines = [
        f"{n:,} tokens: exact match {scores.exact[:, i].mean():.2%}, "
        f"answer tokens {scores.tokens[:, i].mean():.2%}"
        for i, n in enumerate(scores.lengths)
    ]
    return files, lines


def maps_of_run(
    run: str,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    *,
    length: int | None = None,
    device: str = "auto",
) -> Path:
    """Draws attention_maps.png into the run's folder: the forget-gate matrix and the attention map
    of the chosen heads (from one; None: the first) of the chosen layers (from one; None: up to
    four, spread over all that attend), on the first `length` tokens of its validation text, or, of
    documents kept apart, of the first that is long enough."""
    from .. import plots_context

    trained, corpus, name = _opened(run, None, "uint16", device)
    length = _contexts(trained)[1] if length is None else length
    if not 1 <= length <= len(corpus.valid):
        raise UserError(f"plot: tokens: expected 1 to {len(corpus.valid)}, got {length}")
    if layers is None:
        attends: list[Any] = [
            k
            for k, block in enumerate(trained.model.blocks)
            if hasattr(block.mixer, "attention_operands")
        ]
        if not attends:
            raise UserError(f"plot: {run} holds a model without attention; it has no maps")
        chosen = np.linspace(0, len(attends) - 1, min(4, len(attends))).astype(int)
        layers = [attends[i] + 1 for i in chosen]
    within = corpus.windows(length, 1)
    start = 0 if within is None else int(within[0])
    ids = torch.from_numpy(np.asarray(corpus.valid[start : start + length], dtype=np.int64))
    maps = head_maps(trained.model, ids, layers, [1] if heads is None else heads)
    path = Path(run) / MAPS_PLOT
    title = f"Forget gates and attention over {length:,} tokens: {name}"
    plots_context.plot_head_maps(maps, path, title=title)
    return path
