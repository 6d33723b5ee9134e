"""Bytes to token ids and back: bytes by default, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ..models._files import write_atomically
from ..models._json import shown
from .errors import UserError

BYTES = "bytes"
TOKENIZER_FILE = "tokenizer.json"
LARGEST_BPE = 1 << 24  # tokens: more than any text teaches
# A piece is encoded at once; cutting at line ends keeps memory small and loses no merge that
# matters, because byte-level BPE does not merge across the whitespace that begins a word.
_PIECE = 1 << 20


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, 1-D."""

    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of token ids."""


class ByteTokenizer:
    """Token ids are byte values; the vocabulary is 256."""

    vocab_size = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(int(i) & 255 for i in ids)


class FileTokenizer:
    """A Hugging Face `tokenizers` file (tokenizer.json).

    Truncation and padding, which such a file may ask for, are switched off: a model's longest
    sequence is no reason to leave out most of a text.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        library = _library()
        self._path = path
        if not Path(path).is_file():
            raise UserError(f"tokenizer: {path}: no such file")
        try:
            self._inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for any bad file
            raise UserError(f"tokenizer: {path} is not a tokenizers file: {error}") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: bytes) -> np.ndarray:
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        try:
            parts = [
                np.asarray(self._inner.encode(piece, add_special_tokens=False).ids, dtype=dtype)
                for piece in _pieces(text)
            ]
        except Exception as error:  # plain Exception: of a word that has no token, say
            raise UserError(f"tokenizer: {self._path}: cannot encode the text: {error}") from error
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def decode(self, ids: Iterable[int]) -> bytes:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False).encode()


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "tokenizer: the Python package `tokenizers` is not installed: pip install tokenizers"
        ) from error
    return tokenizers


def _pieces(text: bytes) -> Iterator[str]:
    """The text in pieces of about a megabyte that end at a line end where there is one, and in no
    case within a character, whose halves would both be lost."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            newline = text.rfind(b"\n", start, end)
            end = newline + 1 if newline >= start else character_start(text, end)
        yield text[start:end].decode("utf-8", errors="replace")
        start = end


def character_start(text: bytes, end: int) -> int:
    """Where the UTF-8 character that holds the byte at `end` begins; `end` itself where no byte of
    the three before it, which is as far as one reaches, could begin it."""
    for start in range(end, end - 4, -1):
        if text[start] & 0xC0 != 0x80:
            return start
    return end


def train_bpe(text: bytes, vocab_size: int, path: str | os.PathLike[str]) -> None:
    """Trains a byte-level BPE of `vocab_size` tokens on `text` and writes it to `path`.

    Raises:
        UserError: vocab_size is below 257 (256 bytes and one merge) or above LARGEST_BPE.
    """
    if vocab_size < 257:
        raise UserError(f"tokenizer: bpe:N needs N of 257 or more, got {vocab_size}")
    if vocab_size > LARGEST_BPE:
        raise UserError(
            f"tokenizer: bpe:N needs N of at most {LARGEST_BPE}, got {shown(vocab_size)}"
        )
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_pieces(text), trainer=trainer)
    write_atomically(Path(path), inner.to_str(pretty=True).encode())


def load_tokenizer(path: str | os.PathLike[str] | None) -> Tokenizer:
    """The tokenizer of a file, or bytes when there is none."""
    return ByteTokenizer() if path is None else FileTokenizer(path)
