"""`tidegate bench --generate`: what its JSON says about the run."""

from __future__ import annotations

import datetime
import json

import pytest

from tidegate import bench_generation
from tidegate._library import build_info
from tidegate.training import UserError


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
