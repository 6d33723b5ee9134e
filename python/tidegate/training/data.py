"""Where tokens come from: text files and folders, the corpus `stdlib`, arrays of token ids."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from ..models._files import decode_text
from ..models._json import shown
from . import stdlib_corpus
from .baselines import baselines
from .batches import PackedSampler, WindowSampler, windows_within
from .distributed import ALONE, Group
from .errors import UserError
from .evaluate import PIECE, Score, context_for, evaluate, evaluate_packed
from .tokenizers import (
    BYTES,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    character_start,
    train_bpe,
)

ARRAY_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_SPLIT_BY_FILE = 20
_LONGEST_NUMBER = 40  # digits: Python itself refuses to read thousands
_SAMPLE = 1 << 16  # bytes of a text that show what a tokenizer makes of it
_PIECE = 1 << 26  # memory-mapped arrays are read in pieces of so many ids


@dataclass
class Corpus:
    """Tokens to train on and tokens to validate on.

    Attributes:
        train, valid: 1-D integer arrays, memory-mapped where the source allows it.
        vocab_size: ids are below it.
        train_bytes, valid_bytes: length in bytes of the texts, for bits per byte; None for arrays
            of ids, whose text is unknown.
        tokenizer: None for arrays of ids.
        tokenizer_file: the tokenizer's file; None for bytes and for arrays of ids.
        fingerprint: SHA-256 over both splits, in hexadecimal: a resumed run must see the same
            tokens, and, packed, the same documents.
        train_documents, valid_documents: where each document of the text begins, int64 ``[N]``,
            when they are to be kept apart; None: text is one stream.
    """

    name: str
    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    train_bytes: int | None
    valid_bytes: int | None
    tokenizer: Tokenizer | None
    tokenizer_file: Path | None
    fingerprint: str
    train_documents: np.ndarray | None = None
    valid_documents: np.ndarray | None = None

    num_classes: ClassVar[None] = None

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes of text."""
        return self.valid_bytes == len(self.valid)

    @property
    def unit(self) -> str:
        """What losses are shown in."""
        return "bits/byte" if self.is_bytes else "nats/token"

    @property
    def nats_per_unit(self) -> float:
        """How many nats a token one of these is."""
        return math.log(2) if self.is_bytes else 1.0

    def describe(self) -> dict[str, object]:
        """What the run's config.json records."""
        return {
            "name": self.name,
            "train_tokens": len(self.train),
            "valid_tokens": len(self.valid),
            "valid_bytes": self.valid_bytes,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
        }

    def summary(self) -> str:
        """What there is to train on, in words."""
        return f"{len(self.train):,} tokens to train on, {len(self.valid):,} to validate on"

    def check_length(self, context: int) -> None:
        """Raises UserError when a split is too short for one window of `context` tokens."""
        for split, ids, needed in (
            ("training", self.train, context + 1),
            ("validation", self.valid, 2),
        ):
            if len(ids) < needed:
                raise UserError(
                    f"data: {self.name} is too short: its {split} part has {len(ids)} tokens, "
                    f"expected at least {needed} with a context of {context}"
                )
        for split, ids, documents in (
            ("training", self.train, self.train_documents),
            ("validation", self.valid, self.valid_documents),
        ):
            if documents is not None and len(documents) == len(ids):
                raise UserError(
                    f"packed: expected files of two tokens or more, got {self.name}, in whose "
                    f"{split} part no file has a token that follows another"
                )

    def sampler(
        self, batch: int, context: int, seed: int, device: torch.device
    ) -> WindowSampler | PackedSampler:
        """Training batches in the order of a seed."""
        if self.train_documents is not None:
            return PackedSampler(self.train, self.train_documents, batch, context, seed)
        return WindowSampler(self.train, batch, context, seed)

    def windows(self, length: int, most: int) -> np.ndarray | None:
        """Where windows of `length` + 1 validation tokens begin that lie within a document each
        (`windows_within`); None where text is one stream.

        Raises:
            UserError: no document is so long.
        """
        if self.valid_documents is None:
            return None
        starts = windows_within(self.valid_documents, len(self.valid), length, most)
        if not len(starts):
            raise UserError(
                f"data: {self.name}: no document to validate on has {length + 1} tokens or more"
            )
        return starts

    def baselines(self) -> dict[str, float] | None:
        """Baselines in bits per byte; None where they would mean nothing."""
        if not self.is_bytes or min(len(self.train), len(self.valid)) < 3:
            return None
        return baselines(self.train, self.valid)

    def score(
        self,
        model: torch.nn.Module,
        device: torch.device,
        precision: str,
        limit: int | None = None,
        trained: int | None = None,
        group: Group = ALONE,
    ) -> Score:
        """The score on the validation split, or on about `limit` tokens of it. trained: the context
        length of training, see `context_for`. group: the processes that share the work."""
        if self.valid_documents is not None:
            return evaluate_packed(
                model,
                self.valid,
                self.valid_documents,
                valid_bytes=self.valid_bytes,
                device=device,
                precision=precision,
                context=PIECE if trained is None else trained,
                limit=limit,
                group=group,
            )
        return evaluate(
            model,
            self.valid,
            valid_bytes=self.valid_bytes,
            device=device,
            precision=precision,
            context=context_for(model, trained),
            limit=limit,
            group=group,
        )


def load_corpus(
    source: str,
    *,
    tokenizer: str = BYTES,
    valid: str | None = None,
    dtype: str = "uint16",
    workdir: Path | None = None,
    packed: bool = False,
) -> Corpus:
    """Reads a source of tokens.

    Args:
        source: `stdlib`; a text file (its last tenth validates); a folder of text files (split by
            file, 9:1 by bytes; below 20 files by the last tenth of their text); or token ids in a
            .npy file or a raw .bin file of `dtype`.
        tokenizer: `bytes`, `bpe:N` (a byte-level BPE of N tokens, trained on the training text), or
            a Hugging Face tokenizer.json. Arrays of ids take none.
        valid: a file of the same kind to validate on instead; the whole source trains then.
        workdir: where `bpe:N` keeps its tokenizer.json (found there, it is not trained again).
        packed: keep files apart, as documents; not with arrays of ids.

    Raises:
        UserError: the source is missing, empty, unreadable, or ids do not fit.
    """
    if source.endswith((".npy", ".bin")):
        if tokenizer != BYTES:
            raise UserError(f"tokenizer: {source} holds token ids already, got {tokenizer!r}")
        if packed:
            raise UserError(f"packed: expected files of text, got token ids in {source}")
        return _array_corpus(source, valid, dtype)
    is_utf8 = tokenizer != BYTES
    train_files, valid_files = _read_text(source, valid, is_utf8)
    train_text, valid_text = b"".join(train_files), b"".join(valid_files)
    encoder, path = _make_tokenizer(tokenizer, train_text, workdir)
    if path is not None:
        _check_keeps_text(encoder, train_text, path)
    documents = {}
    if packed:
        train_ids, documents["train_documents"] = _encoded_apart(encoder, train_files)
        valid_ids, documents["valid_documents"] = _encoded_apart(encoder, valid_files)
    else:
        train_ids, valid_ids = encoder.encode(train_text), encoder.encode(valid_text)
    return Corpus(
        name=source,
        train=train_ids,
        valid=valid_ids,
        vocab_size=encoder.vocab_size,
        train_bytes=len(train_text),
        valid_bytes=len(valid_text),
        tokenizer=encoder,
        tokenizer_file=path,
        fingerprint=_fingerprint(train_ids, valid_ids, *documents.values()),
        **documents,
    )


def _encoded_apart(encoder: Tokenizer, files: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the files, end to end, and where each that has some begins."""
    parts = [ids for text in files if len(ids := encoder.encode(text))]
    starts = np.cumsum([0, *map(len, parts)])[: len(parts)]
    return np.concatenate(parts) if parts else encoder.encode(b""), starts


def _read_text(source: str, valid: str | None, is_utf8: bool) -> tuple[list[bytes], list[bytes]]:
    """The files to train on and to validate on; a part of a file counts as one. is_utf8: a
    tokenizer will read them as UTF-8, and anything else is refused."""
    if source == stdlib_corpus.NAME:
        return stdlib_corpus.load_stdlib()
    path = Path(source)
    if not path.exists():
        raise UserError(f"data: {source}: no such file or folder")
    if valid is not None:
        other = Path(valid)
        if not other.exists():
            raise UserError(f"data: {valid}: no such file or folder")
        return list(_texts(path, is_utf8).values()), list(_texts(other, is_utf8).values())
    texts = _texts(path, is_utf8)
    if len(texts) >= _SPLIT_BY_FILE:
        train, held_out = stdlib_corpus.split_files({k: len(v) for k, v in texts.items()})
        return [texts[k] for k in train], [texts[k] for k in held_out]
    return _cut_apart(list(texts.values()), is_utf8)


def _cut_apart(files: list[bytes], is_utf8: bool) -> tuple[list[bytes], list[bytes]]:
    """The files up to nine tenths of their bytes, and what comes after; UTF-8 is cut between
    characters."""
    total = sum(map(len, files))
    left = total - total // 10
    train, valid = [], []
    for text in files:
        cut = left
        if is_utf8 and 0 < cut < len(text):
            cut = character_start(text, cut)
        train.append(text[:cut])
        valid.append(text[cut:])
        left = max(0, left - len(text))
    return [text for text in train if text], [text for text in valid if text]


def _texts(path: Path, is_utf8: bool) -> dict[str, bytes]:
    """Contents by relative path: of the file, or of every text file below a folder.

    Files in a folder that are hidden or hold a zero byte in their first 8 kB are passed over.
    """
    if path.is_dir():
        files = {
            file.relative_to(path).as_posix(): file
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        }
        texts = {name: _read_bytes(file) for name, file in files.items()}
        texts = {name: text for name, text in texts.items() if text and not _is_binary(text)}
        if not texts:
            raise UserError(f"data: {path}: no text file in this folder")
    else:
        files, texts = {path.name: path}, {path.name: _read_bytes(path)}
        if not texts[path.name]:
            raise UserError(f"data: {path}: the file is empty")
        if _is_binary(texts[path.name]):
            raise UserError(
                f"data: {path}: expected text, got a file with zero bytes; token ids are read from "
                ".npy and .bin files"
            )
    if is_utf8:
        for name, text in texts.items():
            _check_utf8(text, files[name])
    return texts


def _is_binary(text: bytes) -> bool:
    return b"\0" in text[:8192]


def _check_utf8(text: bytes, file: Path) -> None:
    """UserError for text that a tokenizer would read as replacement characters."""
    try:
        decode_text(text, file)
    except ValueError as error:
        raise UserError(
            f"data: {error}; convert it (iconv -t UTF-8), or train on bytes without --tokenizer"
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"data: {path}: cannot be read: {error.strerror}") from error


def _make_tokenizer(
    tokenizer: str, text: bytes, workdir: Path | None
) -> tuple[Tokenizer, Path | None]:
    if tokenizer == BYTES:
        return ByteTokenizer(), None
    if not tokenizer.startswith("bpe:"):
        return FileTokenizer(tokenizer), Path(tokenizer)
    size = tokenizer.removeprefix("bpe:")
    if not size.isdecimal() or len(size) > _LONGEST_NUMBER:
        raise UserError(f"tokenizer: expected bpe:N with a number N, got {shown(tokenizer)}")
    if workdir is None:
        raise ValueError("load_corpus: workdir: expected a folder for bpe:N, got None")
    path = workdir / TOKENIZER_FILE
    if not path.is_file():
        train_bpe(text, int(size), path)
    return FileTokenizer(path), path


def _check_keeps_text(tokenizer: Tokenizer, text: bytes, path: Path) -> None:
    """UserError where most of the beginning of a text is not in its tokens: a model that reads what
    is left has a low loss for every byte of the text, and learnt nothing of it."""
    sample = text[: character_start(text, _SAMPLE) if len(text) > _SAMPLE else len(text)]
    ids = tokenizer.encode(sample)
    back = len(tokenizer.decode(ids.tolist()))
    if 2 * back < len(sample):
        raise UserError(
            f"tokenizer: {path}: expected tokens of the whole text, got {len(ids):,} for its first "
            f"{len(sample):,} bytes, which decode to {back:,}"
        )


def _array_corpus(source: str, valid: str | None, dtype: str) -> Corpus:
    ids = _map_array(source, dtype)
    if valid is not None:
        train, held_out = ids, _map_array(valid, dtype)
    else:
        cut = len(ids) - len(ids) // 10
        train, held_out = ids[:cut], ids[cut:]
    lowest = min(_extreme(train, np.min), _extreme(held_out, np.min))
    if lowest < 0:
        raise UserError(f"data: {source}: token ids must be 0 or more, found {lowest}")
    return Corpus(
        name=source,
        train=train,
        valid=held_out,
        vocab_size=max(_extreme(train, np.max), _extreme(held_out, np.max)) + 1,
        train_bytes=None,
        valid_bytes=None,
        tokenizer=None,
        tokenizer_file=None,
        fingerprint=_fingerprint(train, held_out),
    )


def _map_array(source: str, dtype: str) -> np.ndarray:
    path = Path(source)
    if not path.is_file():
        raise UserError(f"data: {source}: no such file")
    if path.stat().st_size == 0:
        raise UserError(f"data: {source}: the file is empty")
    try:
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            if dtype not in ARRAY_DTYPES:
                expected = ", ".join(ARRAY_DTYPES)
                raise UserError(f"data: token-dtype: expected one of {expected}, got {dtype!r}")
            ids = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"data: {source} is not an array of token ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise UserError(
            f"data: {source}: expected a 1-D array of integers, got {ids.dtype} {ids.shape}"
        )
    return ids


def _extreme(ids: np.ndarray, pick) -> int:
    """np.min or np.max of a memory-mapped array, in pieces; 0 when it is empty."""
    pieces = range(0, len(ids), _PIECE)
    return int(pick([pick(ids[i : i + _PIECE]) for i in pieces])) if len(ids) else 0


def _fingerprint(*arrays: np.ndarray) -> str:
    """SHA-256 of the token ids, and of where documents begin where they are kept apart."""
    digest = hashlib.sha256()
    for ids in arrays:
        digest.update(f"{ids.dtype.str}{len(ids)}".encode())
        for i in range(0, len(ids), _PIECE):
            digest.update(np.ascontiguousarray(ids[i : i + _PIECE]).tobytes())
    return digest.hexdigest()


def vocabulary_fits(corpus: Corpus, vocab_size: int) -> None:
    """Raises UserError when ids of the corpus would not fit the model's vocabulary."""
    if corpus.vocab_size > vocab_size:
        raise UserError(
            f"data: {corpus.name} has token ids up to {corpus.vocab_size - 1}, the model's "
            f"vocabulary is {vocab_size}"
        )


def absolute_source(source: str) -> str:
    """The source as a run records it: an absolute path, or the name of a named corpus."""
    return source if source == stdlib_corpus.NAME else os.path.abspath(source)
