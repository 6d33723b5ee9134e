"""Corpora: text files, folders, the standard library, arrays of ids, tokenizers; bad ones too."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from training_cases import write_text

from tidegate.training import UserError, load_corpus, tokenizers
from tidegate.training.data import vocabulary_fits
from tidegate.training.stdlib_corpus import load_stdlib, split_files, stdlib_files
from tidegate.training.tokenizers import FileTokenizer, train_bpe


def test_stdlib_splits_nine_to_one_and_leaves_tests_out():
    names = stdlib_files()
    assert "argparse.py" in names
    assert not [name for name in names if "/test/" in f"/{name}" or "/tests/" in f"/{name}"]
    assert not [name for name in names if name.startswith(("idlelib/", "site-packages/"))]
    train, valid = load_stdlib()
    sizes = sum(map(len, train)), sum(map(len, valid))
    assert 0.09 < sizes[1] / sum(sizes) < 0.12
    assert sum(sizes) > 3_000_000
    assert len(train) + len(valid) == len(names), "every file is in one of the two"
    # No text is in both, except what two files of this library share by themselves: some Pythons
    # have an empty __init__.py, or one of a single comment, more than once.
    assert sum(map(len, set(train) & set(valid))) <= 100


def test_stdlib_split_is_the_same_every_time():
    one, other = load_corpus("stdlib"), load_corpus("stdlib")
    assert one.fingerprint == other.fingerprint
    assert np.array_equal(one.valid, other.valid)


def test_stdlib_validation_is_made_of_whole_files():
    _, valid = load_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    sources = {(root / name).read_bytes() for name in stdlib_files()}
    assert set(valid) <= sources


def test_a_python_without_sources_says_so(tmp_path):
    with pytest.raises(UserError, match="stdlib: found 0 source files .* without sources"):
        load_stdlib(tmp_path)


def test_split_spreads_over_the_names():
    sizes = {f"{i:03}": 100 for i in range(100)}
    train, valid = split_files(sizes)
    assert len(valid) == 10
    assert [int(name) // 10 for name in valid] == list(range(10))
    assert sorted(train + valid) == sorted(sizes)
    assert "big" in split_files({**sizes, "big": 10**6}, largest=1000)[0]


def test_a_file_validates_on_its_last_tenth(tmp_path):
    path = write_text(tmp_path / "a.txt", 1000)
    corpus = load_corpus(str(path))
    assert (len(corpus.train), len(corpus.valid), corpus.valid_bytes) == (900, 100, 100)
    assert corpus.vocab_size == 256
    assert bytes(corpus.train) + bytes(corpus.valid) == path.read_bytes()


def test_a_folder_is_split_by_file_and_binary_files_are_passed_over(tmp_path):
    for i in range(40):
        write_text(tmp_path / f"{i:02}.txt", 500, seed=i)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / ".hidden").write_bytes(b"secret")
    corpus = load_corpus(str(tmp_path))
    assert len(corpus.train) + len(corpus.valid) == 40 * 500
    assert len(corpus.valid) == 4 * 500
    assert b"secret" not in bytes(corpus.train)


def test_validation_file_of_its_own(tmp_path):
    a, b = write_text(tmp_path / "a.txt", 1000), write_text(tmp_path / "b.txt", 300, seed=1)
    corpus = load_corpus(str(a), valid=str(b))
    assert (len(corpus.train), len(corpus.valid)) == (1000, 300)


@pytest.mark.parametrize("name", ["ids.npy", "ids.bin"])
def test_arrays_of_ids_are_memory_mapped(tmp_path, name):
    ids = np.random.default_rng(0).integers(0, 5000, 1000).astype(np.uint16)
    ids[17] = 4999
    path = tmp_path / name
    np.save(path, ids) if name.endswith("npy") else ids.tofile(path)
    corpus = load_corpus(str(path))
    assert isinstance(corpus.train, np.memmap)
    assert np.array_equal(np.concatenate([corpus.train, corpus.valid]), ids)
    assert (corpus.vocab_size, corpus.valid_bytes, corpus.tokenizer) == (5000, None, None)


def test_raw_ids_of_another_dtype(tmp_path):
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "ids.bin")
    corpus = load_corpus(str(tmp_path / "ids.bin"), dtype="uint32")
    assert len(corpus.train) + len(corpus.valid) == 100


def test_bpe_is_trained_once_and_gives_the_text_back(tmp_path):
    path = write_text(tmp_path / "a.txt", 5000)
    corpus = load_corpus(str(path), tokenizer="bpe:300", workdir=tmp_path)
    assert 257 <= corpus.vocab_size <= 300
    assert len(corpus.train) < 4500
    text = corpus.tokenizer.decode(corpus.train.tolist())
    assert text == path.read_bytes()[:4500]
    written = (tmp_path / "tokenizer.json").stat().st_mtime_ns
    again = load_corpus(str(path), tokenizer="bpe:300", workdir=tmp_path)
    assert again.fingerprint == corpus.fingerprint
    assert (tmp_path / "tokenizer.json").stat().st_mtime_ns == written
    loaded = load_corpus(str(path), tokenizer=str(tmp_path / "tokenizer.json"))
    assert loaded.fingerprint == corpus.fingerprint


def test_text_that_is_not_utf8_can_be_encoded(tmp_path):
    train_bpe(b"plain text " * 100, 300, tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(b"caf\xe9\n")).startswith(b"caf")


def test_a_tokenizer_file_that_truncates_keeps_the_text(tmp_path):
    """transformers writes the model's longest sequence into tokenizer.json."""
    text = b"plain text and more of it\n" * 400
    path = tmp_path / "tokenizer.json"
    train_bpe(text, 300, path)
    whole = FileTokenizer(path).encode(text)
    values = json.loads(path.read_text())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    path.write_text(json.dumps(values))
    assert np.array_equal(FileTokenizer(path).encode(text), whole)


def test_a_tokenizer_that_leaves_text_out_is_refused(tmp_path):
    """One whose normaliser removes letters, say."""
    tokenizers = pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("the tide turns twice a day " * 400)
    train_bpe(text.read_bytes(), 300, tmp_path / "whole.json")
    load_corpus(str(text), tokenizer=str(tmp_path / "whole.json"))
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "whole.json"))
    inner.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("[a-z]"), "")
    inner.save(str(tmp_path / "spaces.json"))
    with pytest.raises(UserError, match=r"spaces.json: expected tokens of the whole text, got "):
        load_corpus(str(text), tokenizer=str(tmp_path / "spaces.json"))


def test_a_tokenizer_that_lacks_a_word_says_so(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"tide": 0}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    assert FileTokenizer(tmp_path / "words.json").encode(b"tide tide").tolist() == [0, 0]
    with pytest.raises(UserError, match=r"words.json: cannot encode the text: .*UNK"):
        FileTokenizer(tmp_path / "words.json").encode(b"the tide")


@pytest.mark.parametrize("character", ["é", "€", "🎈"])
def test_pieces_of_text_without_lines_end_between_characters(character, monkeypatch):
    """A character cut in two was two that cannot be read, and both of its halves were lost."""
    monkeypatch.setattr(tokenizers, "_PIECE", 7)
    for before in range(4):
        text = "a" * before + 20 * character
        assert "".join(tokenizers._pieces(text.encode())) == text
    assert "".join(tokenizers._pieces(b"\x80" * 20)) == 20 * "\ufffd"


def test_bad_sources_are_named(tmp_path):
    missing = tmp_path / "missing.txt"
    with pytest.raises(UserError, match=f"data: {missing}: no such file or folder"):
        load_corpus(str(missing))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"data: .*empty.txt: the file is empty"):
        load_corpus(str(tmp_path / "empty.txt"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"data: .*folder: no text file in this folder"):
        load_corpus(str(tmp_path / "folder"))
    with pytest.raises(UserError, match=r"data: .*gone.npy: no such file"):
        load_corpus(str(tmp_path / "gone.npy"))


def test_bad_arrays_are_named(tmp_path):
    (tmp_path / "bad.npy").write_bytes(b"not an array")
    with pytest.raises(UserError, match="bad.npy is not an array of token ids"):
        load_corpus(str(tmp_path / "bad.npy"))
    np.save(tmp_path / "floats.npy", np.ones(10))
    with pytest.raises(UserError, match=r"expected a 1-D array of integers, got float64 \(10,\)"):
        load_corpus(str(tmp_path / "floats.npy"))
    np.save(tmp_path / "negative.npy", np.arange(-1, 99))
    with pytest.raises(UserError, match="token ids must be 0 or more, found -1"):
        load_corpus(str(tmp_path / "negative.npy"))
    with pytest.raises(UserError, match="holds token ids already, got 'bpe:300'"):
        load_corpus(str(tmp_path / "negative.npy"), tokenizer="bpe:300")


def test_bad_tokenizers_are_named(tmp_path):
    path = str(write_text(tmp_path / "a.txt", 1000))
    with pytest.raises(UserError, match=r"tokenizer: bpe:N needs N of 257 or more, got 10"):
        load_corpus(path, tokenizer="bpe:10", workdir=tmp_path)
    with pytest.raises(UserError, match=r"tokenizer: expected bpe:N with a number N, got 'bpe:x'"):
        load_corpus(path, tokenizer="bpe:x", workdir=tmp_path)
    with pytest.raises(UserError, match=r"tokenizer: gone.json: no such file"):
        load_corpus(path, tokenizer="gone.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer: .*bad.json is not a tokenizers file"):
        load_corpus(path, tokenizer=str(tmp_path / "bad.json"))


def test_too_short_and_too_large_ids_are_named(tmp_path):
    corpus = load_corpus(str(write_text(tmp_path / "a.txt", 100)))
    with pytest.raises(UserError, match="training part has 90 tokens, expected at least 129"):
        corpus.check_length(128)
    with pytest.raises(UserError, match="token ids up to 255, the model's vocabulary is 64"):
        vocabulary_fits(corpus, 64)


def test_text_that_a_tokenizer_cannot_read_is_refused(tmp_path):
    """It would be learnt as replacement characters."""
    path = tmp_path / "latin1.txt"
    path.write_bytes("Füße und Bäume\n".encode("latin-1") * 200)
    with pytest.raises(UserError, match=r"data: .*latin1.txt: not UTF-8 text: byte 1; convert it"):
        load_corpus(str(path), tokenizer="bpe:300", workdir=tmp_path)
    assert load_corpus(str(path)).vocab_size == 256  # bytes are bytes
    path.write_bytes(np.random.default_rng(0).bytes(20_000))
    with pytest.raises(UserError, match=r"latin1.txt: expected text, got a file with zero bytes"):
        load_corpus(str(path))


@pytest.mark.parametrize("character", ["é", "€", "🎈"])
def test_text_is_cut_between_characters(character, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text((character * 997)[:997] + "\n", encoding="utf-8")
    corpus = load_corpus(str(path), tokenizer="bpe:300", workdir=tmp_path)
    parts = (corpus.tokenizer.decode(ids.tolist()) for ids in (corpus.train, corpus.valid))
    assert b"".join(parts) == path.read_bytes()


@pytest.mark.parametrize("size", ["9" * 20, "9" * 5000, "100000000"])
def test_a_vocabulary_that_cannot_be_learnt_is_refused(size, tmp_path):
    path = str(write_text(tmp_path / "a.txt", 1000))
    with pytest.raises(UserError, match="tokenizer: .*bpe:N"):
        load_corpus(path, tokenizer=f"bpe:{size}", workdir=tmp_path)


def test_japanese_survives_the_borders_of_pieces(tmp_path, monkeypatch):
    text = "春はあけぼの。やうやう白くなりゆく山ぎは、" * 200
    train_bpe(text.encode(), 400, tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    for piece in (1000, 1001, 1002, 4097):
        monkeypatch.setattr(tokenizers, "_PIECE", piece)
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text.encode()
