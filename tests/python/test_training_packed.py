"""Training and scoring on documents that are kept apart, packed end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_cases import prepare

from tidegate import cli
from tidegate.models import CausalLM, LMConfig
from tidegate.training import UserError
from tidegate.training.batches import IGNORED, PackedSampler, packed, windows_within
from tidegate.training.checkpoint import read_metrics
from tidegate.training.data import load_corpus
from tidegate.training.evaluate import evaluate_packed

SIZES = (5, 1, 30, 2, 17, 45)
DOCUMENTS = np.cumsum([0, *SIZES])[:-1]
TOKENS = np.random.default_rng(0).integers(0, 256, sum(SIZES)).astype(np.uint8)


def document_of(place: int) -> int:
    return int(np.searchsorted(DOCUMENTS, place, side="right"))


@pytest.mark.parametrize("spans", [[(0, 100)], [(3, 40), (38, 39), (5, 6)], [(60, 80), (90, 100)]])
def test_packed_windows_by_hand(spans):
    batch = packed(TOKENS, DOCUMENTS, spans, bounds=40)
    ids, labels, bounds = [], [], [0]
    for begin, end in spans:
        for place in range(begin, end):
            last = place + 1 == len(TOKENS) or document_of(place) != document_of(place + 1)
            ids.append(int(TOKENS[place]))
            labels.append(IGNORED if last else int(TOKENS[place + 1]))
            if last and place + 1 < end:
                bounds.append(len(ids))
        bounds.append(len(ids))
    assert batch.ids.tolist() == [ids]
    assert batch.labels.tolist() == [labels]
    assert batch.cu_seqlens.tolist() == bounds + [len(ids)] * (40 - len(bounds))
    assert batch.tokens == len(ids)


def test_the_sampler_gives_every_window_once_in_batches_of_one_shape():
    sampler = PackedSampler(TOKENS, DOCUMENTS, batch=3, context=7, seed=1)
    batches = [sampler.next() for _ in range(sampler.windows)]  # three epochs
    assert {tuple(batch.ids.shape) for batch in batches} == {(1, 21)}
    assert len({batch.cu_seqlens.numel() for batch in batches}) == 1
    seen = torch.cat([batch.ids.view(3, 7) for batch in batches])
    for epoch in seen.view(3, sampler.windows, 7):
        assert len({tuple(row.tolist()) for row in epoch}) == sampler.windows
    for batch in batches:
        bounds = batch.cu_seqlens
        assert {0, 7, 14, 21} <= set(bounds.tolist())
        assert (bounds.diff() >= 0).all()
        assert bounds.diff().max() <= 7
        # Inside a sequence, and only there, the label is the next id.
        ends = set((bounds[1:] - 1).tolist())
        inside = [n for n in range(21) if n not in ends]
        assert batch.labels[0, inside].tolist() == batch.ids[0, [n + 1 for n in inside]].tolist()
    again = PackedSampler(TOKENS, DOCUMENTS, batch=3, context=7, seed=1)
    again.position = 9
    assert torch.equal(again.next().ids, batches[3].ids)


def test_bounds_are_enough_for_documents_of_one_token():
    documents = np.arange(40)
    sampler = PackedSampler(np.arange(40), documents, batch=2, context=8, seed=0)
    for _ in range(10):
        batch = sampler.next()
        assert (batch.labels == IGNORED).all()
        assert len(set(batch.cu_seqlens.tolist())) == 17


def test_windows_lie_within_documents():
    starts = windows_within(DOCUMENTS, len(TOKENS), 8, 100)
    for start in starts:
        assert document_of(start) == document_of(start + 8)
    counts = np.bincount([document_of(start) - 1 for start in starts], minlength=len(SIZES))
    assert counts.tolist() == [(size - 1) // 8 for size in SIZES]
    assert (np.diff(starts) >= 8).all()
    assert starts[0] == 6 + 1  # 29 = 3 * 8 + 5, in four gaps
    few = windows_within(DOCUMENTS, len(TOKENS), 8, 3)
    assert set(few) <= set(starts)
    assert len(few) == 3
    assert len(windows_within(DOCUMENTS, len(TOKENS), 45, 3)) == 0


@pytest.mark.parametrize("mixer", ["hgrn2", "fox"])
def test_the_score_reads_windows_of_documents(mixer):
    torch.manual_seed(0)
    options = {"num_heads": 2}
    config = LMConfig(mixer=mixer, dim=16, layers=2, mixer_options=options, tied=False)
    model = CausalLM(config, dtype=torch.float64)
    with torch.no_grad():
        model.head.weight.mul_(20.0)
    losses = []
    for begin in range(0, len(TOKENS), 16):
        places = list(range(begin, min(begin + 16, len(TOKENS))))
        for document in sorted({document_of(place) for place in places}):
            ids = torch.from_numpy(
                TOKENS[[p for p in places if document_of(p) == document]].astype(np.int64)
            )
            last = max(p for p in places if document_of(p) == document)
            asked = len(ids) - 1
            labels = ids[1:]
            if last + 1 < len(TOKENS) and document_of(last + 1) == document:
                labels, asked = torch.cat([labels, torch.tensor([int(TOKENS[last + 1])])]), len(ids)
            logits = model(ids[None]).logits[0, :asked]
            losses += F.cross_entropy(logits, labels, reduction="none").tolist()
    given = {"valid_bytes": 50, "device": torch.device("cpu"), "precision": "fp32", "context": 16}
    score = evaluate_packed(model, TOKENS, DOCUMENTS, **given, rows=3)
    assert score.tokens == len(losses) == len(TOKENS) - len(SIZES)
    assert score.nats == pytest.approx(np.mean(losses), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(score.nats / np.log(2) * len(TOKENS) / 50)
    part = evaluate_packed(model, TOKENS, DOCUMENTS, **given, limit=40)
    assert part.tokens == 14 + 3  # the first window and the last, which is short


def write_files(folder: Path, sizes: list[int]) -> None:
    folder.mkdir()
    letters = np.random.default_rng(1).integers(97, 123, sum(sizes)).astype(np.uint8).tobytes()
    for n, size in enumerate(sizes):
        (folder / f"{n:03}.txt").write_bytes(letters[sum(sizes[:n]) :][:size])


def test_a_folder_of_documents(tmp_path):
    sizes = [40 + 7 * n for n in range(30)]
    write_files(tmp_path / "text", sizes)
    apart = load_corpus(str(tmp_path / "text"), packed=True)
    stream = load_corpus(str(tmp_path / "text"))
    assert np.array_equal(apart.train, stream.train)
    assert np.array_equal(apart.valid, stream.valid)
    assert stream.valid_documents is None
    assert stream.windows(9, 3) is None
    both = [
        np.diff(np.append(s, len(t))).tolist()
        for s, t in ((apart.train_documents, apart.train), (apart.valid_documents, apart.valid))
    ]
    assert sorted(both[0] + both[1]) == sizes
    with pytest.raises(UserError, match="no document to validate on has 1001 tokens or more"):
        apart.windows(1000, 5)
    (tmp_path / "few").mkdir()
    for n in range(3):
        (tmp_path / "few" / f"{n}.txt").write_bytes(b"abcdefghij" * (n + 1))
    few = load_corpus(str(tmp_path / "few"), packed=True)
    assert few.train_documents.tolist() == [0, 10, 30]
    assert (len(few.train), len(few.valid)) == (54, 6)
    assert few.valid_documents.tolist() == [0]
    np.save(tmp_path / "ids.npy", np.arange(100))
    with pytest.raises(UserError, match="packed: expected files of text, got token ids in"):
        load_corpus(str(tmp_path / "ids.npy"), packed=True)


def test_a_packed_run_resumes_and_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "text", [30 + 40 * n for n in range(30)])
    command = ["train", "text", "--packed", "--mixer", "fox", "--dim", "16", "--layers", "1"]
    command += ["--context", "24", "--batch-size", "3", "--quiet", "--precision", "fp32"]
    command += ["--device", "cpu", "--threads", "1", "--schedule", "constant", "--eval-every", "0"]
    assert cli.main([*command, "--steps", "20", "--out", "whole"]) == 0
    assert cli.main([*command, "--steps", "10", "--out", "parts"]) == 0
    assert cli.main(["train", "--steps", "20", "--out", "parts", "--quiet"]) == 0
    whole, parts = (CausalLM.load(tmp_path / name / "model") for name in ("whole", "parts"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert rows[-1]["kind"] == "final"
    assert rows[0]["tokens"] == 10 * 3 * 24
    capsys.readouterr()
    assert cli.main(["eval", "whole", "--device", "cpu", "--precision", "fp32"]) == 0
    assert f"{rows[-1]['bits_per_byte']:.4f} bits/byte" in capsys.readouterr().out
    more = ["--per-token", "--length", "96", "--device", "cpu"]
    assert cli.main(["eval", "whole", *more]) == 0
    assert (tmp_path / "whole" / "per_token.png").exists()
    assert cli.main(["plot", "attention", "whole", "--device", "cpu", "--tokens", "60"]) == 0
    capsys.readouterr()
    assert cli.main(["eval", "whole", *more[:2], "5000", "--device", "cpu"]) == 2
    assert "no document to validate on has 5001 tokens" in capsys.readouterr().err
    assert cli.main([*command, "--grad-accum", "3", "--steps", "1", "--out", "other"]) == 2
    assert "grad-accum: expected 1 with --packed, got 3" in capsys.readouterr().err
    assert cli.main(["train", "copying", "--packed", "--out", "other"]) == 2
    assert "packed: the task copying has no text; leave it out" in capsys.readouterr().err


def test_documents_whose_bounds_moved_are_refused(tmp_path):
    """The text is the same from end to end."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one two three four " * 30)
    (folder / "b.txt").write_text("five six seven eight " * 30)
    prepare(tmp_path / "run", folder, packed=True).trainer.run(quiet=True)
    a, b = ((folder / name).read_text() for name in ("a.txt", "b.txt"))
    (folder / "a.txt").write_text(a + b[:20])
    (folder / "b.txt").write_text(b[20:])
    with pytest.raises(UserError, match=r"the content of .*texts changed"):
        prepare(tmp_path / "run", folder, packed=True)


def test_files_of_one_byte_are_refused(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(100):
        (folder / f"{n:03}.txt").write_text("x")
    with pytest.raises(UserError, match="packed: expected files of two tokens or more"):
        prepare(tmp_path / "run", folder, packed=True)
