"""The sweep of associative recall: a tiny one on the CPU, and how its runs are added up."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.programs import run_here
from torch import Tensor

from tidegate.models import CausalLM, LMConfig
from tidegate.training.tasks import Mqar

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MQAR = BENCHMARKS / "mqar.py"
CPU = torch.device("cpu")


@pytest.fixture
def mqar(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mqar")


def run(python: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [python, str(MQAR), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_tiny_sweep_writes_its_runs_and_the_plot(mqar, tmp_path, ranks):
    table, picture = tmp_path / "mqar.json", tmp_path / "mqar.png"
    tiny = ("--device", "cpu", "--lengths", 32, "--widths", 64, "--rates", 1e-2, "--seeds", 3, 5)
    few = ("--steps", 3, "--tokens", 256, "--examples", 24, "--score-every", 2, "--at-once", 3)
    done = run(ranks.python, *tiny, *few, "--commit", "fedcba", "--json", table, "--plot", picture)
    assert done.returncode == 0, done.stderr
    result = json.loads(table.read_text(encoding="utf-8"))
    assert (result["left_out"], result["commit"]) == (0, "fedcba")
    assert (result["gate_init"], result["at_once"]) == ("chrono", 3)
    assert [(row["mixer"], row["learning_rate"], row["seed"]) for row in result["runs"]] == [
        ("hgrn", 1e-2, 3),
        ("hgrn", 1e-2, 5),
        ("hgrn2", 1e-2, 3),
        ("hgrn2", 1e-2, 5),
    ]
    for row in result["runs"]:
        assert (row["length"], row["width"], row["steps"], row["of_steps"]) == (32, 64, 3, 3)
        assert row["batch"] == 8
        assert [step for step, _, _ in row["curve"]] == [2, 3]
        assert row["accuracy"] == row["curve"][-1][2]
        assert 0 <= row["accuracy"] < 1
        assert "machine" not in row
    first, second = (row["curve"] for row in result["runs"][:2])
    assert first != second  # seeds count
    for mixer in ("hgrn", "hgrn2"):
        found = [row["accuracy"] for row in result["runs"] if row["mixer"] == mixer]
        assert f"32 tokens, {mixer}: 64: {sum(found) / 2:.3f}" in done.stdout
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    again = run_here(MQAR, "--from-json", table, "--plot", tmp_path / "again.png")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert (tmp_path / "again.png").read_bytes() == drawn


@pytest.mark.slow
def test_runs_of_an_earlier_sweep_join(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tiny = ("--device", "cpu", "--lengths", 16, "--widths", 64, "--rates", 1e-2, "--score-every", 1)
    tiny += ("--tokens", 32, "--examples", 4)
    assert run_here(MQAR, *tiny, "--seeds", 1, 2, "--steps", 1, "--json", first).returncode == 0
    again = ("--seeds", 2, 3, "--steps", 2, "--add", first, "--json", second)
    assert run_here(MQAR, *tiny, *again).returncode == 0
    rows = json.loads(second.read_text(encoding="utf-8"))["runs"]
    assert [(row["seed"], row["steps"]) for row in rows] == [(1, 1), (2, 2), (3, 2)] * 2


def test_a_sweep_without_time_says_so(tmp_path):
    table = tmp_path / "mqar.json"
    done = run_here(MQAR, "--device", "cpu", "--limit-minutes", -1, "--json", table)
    assert done.returncode == 1
    assert "no run was done within --limit-minutes" in done.stderr
    assert not table.exists()


def test_a_run_does_not_depend_on_those_beside_it(mqar):
    arguments = mqar.parse(["--steps", "4", "--tokens", "64", "--examples", "20"])
    jobs = [mqar.Job(16, 64, mixer, 1e-2, 1) for mixer in mqar.MIXERS]

    def losses(at_once: int) -> list[tuple[str, list]]:
        rows: list[dict] = []
        pool, places = mqar.Pool(20), [mqar.Place("cpu") for _ in range(at_once)]

        def begin(job, place):
            return mqar.train(job, place, pool, arguments, rows.append)

        mqar.interleave(jobs, places, begin, end=float("inf"))
        return sorted((row["mixer"], row["curve"]) for row in rows)

    alone, together = losses(1), losses(2)
    assert [mixer for mixer, _ in alone] == ["hgrn", "hgrn2"]
    assert alone == together


def test_runs_take_turns_and_what_is_late_is_left(mqar, monkeypatch):
    place = mqar.Place("cpu")
    log: list[str] = []

    def begin(job, _place):
        name, steps = job
        for _ in range(steps - 1):
            log.append(name)
            yield
        log.append(name.upper())

    def run_all(jobs, places: int, end: float) -> str:
        log.clear()
        mqar.interleave(jobs, [place] * places, begin, end=end)
        return "".join(log)

    jobs = [("a", 3), ("b", 1), ("c", 2)]
    assert run_all(jobs, 2, math.inf) == "aBacAC"
    assert run_all(jobs, 1, math.inf) == "aaABcC"
    clock = itertools.count()
    monkeypatch.setattr(mqar.time, "monotonic", lambda: next(clock))
    assert run_all(jobs, 2, 2) == "aBac"


@pytest.mark.parametrize(("name", "wanted"), [("chrono", "chrono:48"), ("standard", None)])
def test_how_gates_start(mqar, monkeypatch, name, wanted):
    made = []
    monkeypatch.setattr(mqar, "CausalLM", lambda config: made.append(config) or config.missing)
    arguments = mqar.parse(["--gate-init", name, "--examples", "4"])
    run = mqar.train(
        mqar.Job(48, 64, "hgrn2", 1e-3, 1), mqar.Place("cpu"), mqar.Pool(4), arguments, print
    )
    with pytest.raises(AttributeError, match="missing"):
        next(run)
    assert made[0].mixer_options["gate_init"] == wanted


def test_the_rate_that_is_best_over_its_seeds_counts(mqar):
    keys = ("length", "mixer", "width", "learning_rate", "accuracy")
    rows = [
        (256, "hgrn", 64, 1e-3, 0.2),
        (256, "hgrn", 64, 1e-3, 0.5),
        (256, "hgrn", 64, 3e-3, 0.0),
        (256, "hgrn", 64, 3e-3, 0.6),
        (256, "hgrn", 128, 1e-3, 0.1),
        (256, "hgrn2", 64, 1e-3, 0.9),
        (512, "hgrn", 64, 1e-3, 0.0),
    ]
    result = {"runs": [dict(zip(keys, row, strict=True)) for row in rows]}
    assert mqar.best(result) == {
        (256, "hgrn"): {64: [0.2, 0.5], 128: [0.1]},
        (256, "hgrn2"): {64: [0.9]},
        (512, "hgrn"): {64: [0.0]},
    }


class KnowsFirstPairs:
    """Answers the first `known` queries of a row right, and all others wrong."""

    def __init__(self, task: Mqar, known: int) -> None:
        self.task, self.known = task, known

    def logits_at(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits = torch.zeros(*positions.shape, self.task.vocabulary)
        for row in range(len(ids)):
            pairs = ids[row, : 2 * self.task.pairs].view(-1, 2).tolist()
            value_of = dict(pairs)
            for n, position in enumerate(positions[row].tolist()):
                right = value_of[int(ids[row, position])]
                answer = right if n < self.known else (right + 1) % self.task.vocabulary
                logits[row, n, answer] = 1
        return logits


@pytest.mark.parametrize("known", [0, 1, 3, 4])
def test_accuracy_is_the_share_of_right_queries(mqar, monkeypatch, known):
    task = Mqar(length=40, pairs=4, vocabulary=30)
    monkeypatch.setattr(mqar, "ROWS", 10)  # three pieces, the last one shorter
    data = mqar.examples(task, 25, CPU, split=1)
    assert [tuple(part.shape) for part in data] == [(25, 40), (25, 4), (25, 4)]
    assert mqar.accuracy(KnowsFirstPairs(task, known), data, CPU) == known / 4


@pytest.mark.parametrize("mixer", ["hgrn", "hgrn2"])
def test_the_models_are_the_recipes_at_another_width(mqar, mixer):
    recipe = LMConfig.from_dict({**mqar.RECIPE.model, "vocab_size": 100})
    model = mqar.model_config(mixer, 256, 100, recipe.mixer_options["gate_init"])
    assert (model.mixer, model.dim, model.glu_hidden) == (mixer, 256, 256)
    same = recipe.replace(dim=256, glu_hidden=256)
    if mixer == "hgrn2":
        assert model == same
    blocks = [CausalLM(config, device="meta").blocks[1] for config in (model, same)]
    counts = [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert counts[0] == counts[1]  # equal width, equal size
