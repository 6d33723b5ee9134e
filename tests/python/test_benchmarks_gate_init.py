"""The sweep over gate initialisations: a tiny one on the CPU, stopped and gone on with."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.programs import run_here

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SWEEP = BENCHMARKS / "gate_init.py"
TINY = ("--train", "--dim=16", "--layers=2", "--batch-size=2", "--threads=1")


@pytest.fixture
def gate_init(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gate_init")


def run(python: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [python, str(SWEEP), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_tiny_sweep_and_one_that_goes_on_with_a_part_of_it(tmp_path, ranks):
    """The second one starts its run as a user's does, with a Python that has imported nothing."""
    table, picture, gates = (tmp_path / name for name in ("sweep.json", "sweep.png", "gates.png"))
    few = ("--dummies", 4, "--seeds", 1, "--eval-every", 2, "--processes", 2, "--device", "cpu")
    few += ("--out", tmp_path / "runs", "--commit", "fedcba")
    few += ("--methods", "standard", "ugi", "gumbel-ugi")
    drawn = ("--json", table, "--plot", picture, "--gates-plot", gates)
    done = run(ranks.python, *few, "--steps", 4, *drawn, *TINY)
    assert done.returncode == 0, done.stderr
    result = json.loads(table.read_text(encoding="utf-8"))
    assert (result["task"], result["dummies"], result["left_out"]) == ("copying", 4, 0)
    assert (result["precision"], result["compiled"]) == ("fp32", False)
    assert [row["method"] for row in result["runs"]] == ["standard", "ugi", "gumbel-ugi"]
    for row in result["runs"]:
        check_row(row, 4)
    for path in (picture, gates):
        assert path.read_bytes().startswith(b"\x89PNG")
    model = json.loads((tmp_path / "runs" / "gumbel-ugi-1" / "config.json").read_text())["model"]
    assert model["mixer_options"]["gate_init"] == "ugi"
    assert model["layer_options"] == [{"gate_init": "gumbel-softmax"}]

    shutil.rmtree(tmp_path / "runs" / "ugi-1")
    (tmp_path / "runs" / "gumbel-ugi-1" / "checkpoint.pt").unlink()
    second = tmp_path / "second.json"
    more = ("--steps", 6, "--resume-only", "--add", table, "--json", second)
    done = run_here(SWEEP, *few, *more, *TINY)
    assert done.returncode == 0, done.stderr
    rows = json.loads(second.read_text(encoding="utf-8"))["runs"]
    assert [row["method"] for row in rows] == ["standard", "ugi", "gumbel-ugi"]
    check_row(rows[0], 6)
    assert rows[1:] == result["runs"][1:]
    assert not (tmp_path / "runs" / "ugi-1").exists()


def check_row(row: dict, steps: int) -> None:
    """What the sweep records of a run that ended after so many steps."""
    assert (row["steps"], row["of_steps"]) == (steps, steps)
    assert row["curve"][-1][0] == steps
    assert row["accuracy"] == row["curve"][-1][1]
    assert not {"machine", "config"} & set(row)
    before, after = (np.array(row["gates"][when]) for when in ("before", "after"))
    assert before.sum() == pytest.approx(100.0, abs=0.05)
    assert after.sum() == pytest.approx(100.0, abs=0.05)
    assert 0 < np.abs(before - after).sum() < 50.0  # few steps: the same model


def test_every_method_names_settings_that_exist(gate_init, tmp_path):
    from tidegate import cli
    from tidegate.cli import train
    from tidegate.models import LMConfig

    for method in gate_init.METHODS:
        arguments = gate_init.parse(["--dummies=4", "--out", str(tmp_path), "--device=cpu"])
        flags = gate_init.command(arguments, method, 1, "cpu")[3:]
        _, model = train.settings(cli.build_parser().parse_args(flags))
        LMConfig(**{"mixer": "gated-linear-rnn", "vocab_size": 10, "dim": 8, "layers": 2, **model})


def test_curves_meet_where_all_seeds_were_scored(gate_init):
    curves = [[[10, 0.1, 2.0], [20, 0.3, 1.0]], [[10, 0.3, 2.0], [20, 0.5, 1.0], [30, 0.9, 0.1]]]
    runs = [{"method": "ugi", "curve": curve} for curve in curves]
    steps, scores = gate_init.means({"runs": runs})["ugi"]
    assert steps == [10, 20]
    assert np.array_equal(scores, [[0.1, 0.3], [0.3, 0.5]])
