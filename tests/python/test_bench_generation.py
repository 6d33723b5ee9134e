"""`tidegate bench --generate`: what its JSON says about the run."""

from __future__ import annotations

import datetime
import json

from tidegate import bench_generation
from tidegate._library import build_info


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
