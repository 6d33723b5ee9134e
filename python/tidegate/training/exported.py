"""Folders with a trained model and nothing of another: of a run's end and of `tidegate export`."""

from __future__ import annotations

from pathlib import Path

from ..models._files import write_atomically
from ..models.block import Model
from .tokenizers import TOKENIZER_FILE

# What `tidegate convert` notes of where the model in a folder came from: an exported one came from
# its run.
_ORIGIN = "converted_from.json"


def write_model(model: Model, folder: Path, *, step: str, tokenizer: bytes | None) -> None:
    """Writes config.json, model.safetensors, which says of which step it is, and tokenizer.json
    where there is one.

    What an earlier model left beside its weights goes first: this one would be read by its
    tokenizer. Interrupted, the folder has a model without a tokenizer, never one with another's.
    """
    if not is_beside(folder, tokenizer):
        (folder / TOKENIZER_FILE).unlink(missing_ok=True)
    (folder / _ORIGIN).unlink(missing_ok=True)
    model.save(folder, metadata={"step": step})
    if tokenizer is not None:
        write_atomically(folder / TOKENIZER_FILE, tokenizer)


def is_beside(folder: Path, tokenizer: bytes | None) -> bool:
    """Whether the folder has this tokenizer, or none where there is none."""
    kept = folder / TOKENIZER_FILE
    return (kept.read_bytes() if kept.is_file() else None) == tokenizer
