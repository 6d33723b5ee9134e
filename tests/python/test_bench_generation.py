"""`tidegate bench --generate`: what its JSON says about the run."""

from __future__ import annotations

import datetime
import json

import pytest
import torch

from tidegate import bench_generation
from tidegate._library import build_info
from tidegate.models import presets
from tidegate.training.errors import UserError


def test_the_record_names_date_commit_and_machine(tmp_path, capsys):
    path = tmp_path / "record.json"
    what = "--models demo --device cpu --batches 1 --prompt 3 --new 2 --repeats 1 --json"
    assert bench_generation.main([*what.split(), str(path)]) == 0
    record = json.loads(path.read_text("utf-8"))
    assert record["commit"] == build_info()["commit"]
    assert datetime.date.fromisoformat(record["date"]) <= datetime.date.today()
    (row,) = record["rows"]
    assert (row["model"], row["batch"], row["prompt"], row["new"]) == ("demo", 1, 3, 2)
    assert "demo" in capsys.readouterr().out
    # An earlier library's figures stay beside those of now.
    beside = tmp_path / "beside.json"
    assert bench_generation.main([*what.split(), str(beside), "--before", str(path)]) == 0
    assert json.loads(beside.read_text("utf-8"))["before"] == {
        "commit": record["commit"],
        "rows": record["rows"],
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batches 1 0", "--batches: expected 1 or more, got 0"),
        ("--prompt 0", "--prompt: expected 1 or more, got 0"),
        ("--new -3", "--new: expected 1 or more, got -3"),
        ("--repeats 0", "--repeats: expected 1 or more, got 0"),
        ("--prefill 1", "--prefill: expected 2 or more, got 1"),
        ("--prune 1", "--prune: expected a number between 0 and 1, got 1"),
        ("--device tpu", "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        ("--models hgrn-vit-tiny", "hgrn-vit-tiny is an image model"),
        ("--json nowhere/x.json", "--json: nowhere/x.json: its folder does not exist"),
        ("--plot nowhere/x.png", "--plot: nowhere/x.png: its folder does not exist"),
        ("--before x.json", "--before: expected with --json only"),
        ("--json y.json --before x.json", "--before: x.json: expected the JSON that --json wrote"),
    ],
)
def test_what_it_cannot_measure_is_refused_before_it_does(flags, message, tmp_path, monkeypatch):
    """--batches 0 was printed as 256,000,000,000 tokens/s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    monkeypatch.setattr(bench_generation, "copy_speed", lambda device: pytest.fail("measured"))
    with pytest.raises(UserError, match=message):
        bench_generation.main(flags.split())


def test_pruned_models_and_long_prompts(tmp_path, capsys, monkeypatch):
    """--prune counts what pruning leaves, --prefill reads a prompt beside a pass of training."""
    small = presets()["fox-125m"].replace(dim=48, layers=2, vocab_size=50, glu_hidden=32)
    monkeypatch.setattr(bench_generation, "presets", lambda: presets() | {"small-fox": small})
    path = tmp_path / "record.json"
    what = "--models small-fox --device cpu --batches 2 --prompt 600 --new 2 --repeats 1"
    assert bench_generation.main([*what.split(), "--prefill", "64", "--json", str(path)]) == 0
    whole = json.loads(path.read_text("utf-8"))
    assert whole["prefills"][0]["tokens"] == 64
    assert whole["rows"][0]["prune"] is None
    assert "of the forward pass of training" in capsys.readouterr().out
    assert bench_generation.main([*what.split(), "--prune", "1e-4", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["prune"] == 1e-4
    device, dtype = torch.device("cpu"), torch.float32
    model = bench_generation.random_model("small-fox", device, dtype, 1e-4)
    share = bench_generation.kept_share(model, 600, 602)
    # Heads that forget over 1 to 1,000 tokens: of 600 keys the first see a few, the last all.
    assert 0.3 < share < 0.8
    held = [bench_generation.step_bytes(model, 2, 600, s) for s in (0.0, share, 1.0)]
    assert held[1] == pytest.approx(held[0] + share * (held[2] - held[0]))
    with pytest.raises(UserError, match="bench: --prune: demo has no forgetting attention"):
        bench_generation.main(["--models", "demo", "--device", "cpu", "--prune", "1e-4"])
