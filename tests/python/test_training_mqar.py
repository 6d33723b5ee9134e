"""Multi-query associative recall: every example against a solver that knows the rule, and a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from training_cases import prepare, write_text

from tidegate import cli
from tidegate.training import UserError, prepare_run
from tidegate.training.batches import IGNORED
from tidegate.training.report import finish
from tidegate.training.task_corpus import TaskCorpus
from tidegate.training.tasks import Mqar, make_task

CPU = torch.device("cpu")
TASKS = [
    Mqar(),
    Mqar(length=64),
    Mqar(length=512),
    Mqar(length=8, pairs=2, vocabulary=6),
    Mqar(length=30, pairs=1, vocabulary=4),
]
by_size = pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.length}-{t.pairs}")


@pytest.fixture
def few_to_score(monkeypatch):
    """Four examples to validate on instead of 3,000."""
    monkeypatch.setattr(Mqar, "valid_examples", 4)


def recorded(out: Path) -> dict:
    """A run's config.json."""
    return json.loads((out / "config.json").read_text(encoding="utf-8"))


def generator(seed: int = 0, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def solve(task: Mqar, ids: list[int]) -> list[int]:
    """The labels of an example, by reading it once from left to right; AssertionError where it
    breaks a rule."""
    assert len(ids) == task.length
    told = 2 * task.pairs
    memory = dict(zip(ids[0:told:2], ids[1:told:2], strict=True))
    assert len(memory) == task.pairs, "keys differ"
    assert len(set(memory.values())) == task.pairs, "values differ"
    assert all(1 <= key < task.vocabulary // 2 for key in memory)
    assert all(task.vocabulary // 2 <= value < task.vocabulary for value in memory.values())
    labels = [IGNORED] * told
    asked = []
    for position, token in enumerate(ids[told:], told):
        if token != 0:
            asked.append(token)
            assert position % 2 == 0
        labels.append(memory[token] if token else IGNORED)
    assert sorted(asked) == sorted(memory), "every key is asked for once"
    return labels


@by_size
def test_a_solver_gets_every_example_right(task, device):
    batch = task.batch(40, generator(3, torch.device(device)))
    assert batch.ids.device.type == batch.labels.device.type == device
    assert batch.lengths is None
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        assert solve(task, ids) == labels
    # The solver refutes: another value, a key asked for twice, a query that is missing.
    ids = batch.ids[0].tolist()
    query = next(i for i in range(2 * task.pairs, task.length) if ids[i])
    for position, token in ((1, 1), (query, ids[1]), (query, 0)):
        wrong = list(ids)
        wrong[position] = token
        with pytest.raises((AssertionError, KeyError)):
            solve(task, wrong)


def test_sizes_of_the_paper():
    sizes = {length: Mqar(length=length).pairs for length in (64, 128, 256, 512, 1024)}
    assert sizes == {64: 4, 128: 8, 256: 16, 512: 64, 1024: 64}
    task = Mqar()
    assert (task.vocab_size, task.train_examples, task.valid_examples) == (8192, 100_000, 3000)


def test_queries_follow_the_power_law():
    """The first query's place, against weights j^(power - 1), by 4 standard deviations."""
    task = Mqar(length=20, pairs=1, vocabulary=40)
    count = 20_000
    batch = task.batch(count, generator(1))
    place = (batch.labels != IGNORED).int().argmax(dim=1) // 2 - 1
    weights = torch.arange(1, 10).double() ** (Mqar.power - 1)
    expected = count * weights / weights.sum()
    counts = torch.bincount(place, minlength=9).double()
    assert ((counts - expected).abs() < 4 * expected.sqrt()).all()
    keys = torch.bincount(batch.ids[:, 0], minlength=20)[1:].double()
    assert ((keys - count / 19).abs() < 4 * math.sqrt(count / 19)).all()


def test_places_are_drawn_one_after_another():
    """The first key draws first, so that it is asked for first as often as the weights say."""
    task = Mqar(length=16, pairs=2, vocabulary=64)
    count = 20_000
    batch = task.batch(count, generator(2))
    first = (batch.labels != IGNORED).int().argmax(dim=1)
    same = batch.ids.gather(1, first[:, None])[:, 0] == batch.ids[:, 0]
    w = (torch.arange(1, 7).double() ** (Mqar.power - 1)).tolist()
    expected = sum(
        w[i] / sum(w) * w[j] / (sum(w) - w[i]) for i in range(6) for j in range(i + 1, 6)
    )
    assert abs(same.double().mean() - expected) < 4 * math.sqrt(0.25 / count)


def test_training_repeats_its_examples_and_validation_has_others():
    task = Mqar(length=8, pairs=1, vocabulary=512, train_examples=6)
    corpus = TaskCorpus(task)
    sampler = corpus.sampler(3, 8, 0, CPU)
    ids = [sampler.next().ids for _ in range(4)]
    assert torch.equal(ids[0], ids[2])
    assert torch.equal(ids[1], ids[3])
    assert not torch.equal(ids[0], ids[1])
    valid = torch.cat([batch.ids for batch in corpus.valid_batches(CPU)])
    assert valid.size(0) == 3000
    assert not torch.equal(valid[:3], ids[0])
    again = torch.cat([batch.ids for batch in TaskCorpus(task).valid_batches(CPU)])
    assert torch.equal(valid, again)


def test_a_model_learns_to_recall(tmp_path):
    """Two keys among seven: far better than naming one of the two values that were told."""
    options = {"length": 8, "pairs": 2, "vocabulary": 16, "train_examples": 4096}
    run = prepare(
        tmp_path / "run",
        "mqar",
        task_options=options,
        context=8,
        steps=300,
        lr=1e-2,
        batch_size=64,
        model={"mixer": "hgrn2", "mixer_options": {"num_heads": 2}, "dim": 32},
    )
    assert run.trainer.run(quiet=True)
    score = finish(run)
    assert score.tokens == 2 * 3000
    assert score.accuracy > 0.9


# The recipe's model at a small size.
SMALL = ["--task-option=vocabulary=300", "--dim=32", "--glu-hidden=32", "--batch-size=4"]
SMALL += ["--set=mixer_options.expand_ratio=16", "--device=cpu", "--threads=1", "--quiet"]


def test_the_recipe_names_its_task(tmp_path, capsys, few_to_score):
    out = tmp_path / "run"
    assert cli.main(["train", "--recipe=mqar", "--out", str(out), *SMALL, "--steps=2"]) == 0
    train = recorded(out)["train"]
    assert train["data"] == "mqar"
    assert train["task_options"]["length"] == train["context"] == 512
    assert train["task_options"]["vocabulary"] == 300
    assert "no recipe" not in capsys.readouterr().err


def test_a_task_whose_recipe_nobody_asked_for_says_so(tmp_path, capsys, few_to_score):
    train = ["train", "--out", str(tmp_path / "run"), "--dim=8", "--device=cpu", "--quiet"]
    train += ["--batch-size=2", "--threads=1"]
    sizes = ["--task-option=length=64", "--task-option=vocabulary=300"]
    assert cli.main([*train, "mqar", *sizes, "--steps=1"]) == 0
    said = "no recipe is asked for: --recipe mqar trains two HGRN2 layers of 128 on associative"
    assert said in capsys.readouterr().err
    assert cli.main([*train, "--steps=2"]) == 0
    assert "no recipe" not in capsys.readouterr().err


def test_a_run_of_another_length_than_its_recipes_goes_on(tmp_path, few_to_score):
    """As one does that began when the recipe named no length: 256 was the task's own."""
    train = ["train", "--recipe=mqar", "--out", str(tmp_path / "run"), *SMALL]
    assert cli.main([*train, "mqar", "--task-option=length=256", "--steps=1"]) == 0
    assert cli.main([*train, "mqar", "--steps=2"]) == 0
    assert cli.main([*train, "--steps=3"]) == 0
    assert recorded(tmp_path / "run")["train"]["task_options"]["length"] == 256


def test_a_recipes_task_options_are_for_its_own_task(tmp_path):
    text = str(write_text(tmp_path / "text.txt"))
    train = {"steps": 1, "context": 16, "device": "cpu", "threads": 1}
    small = {"dim": 32, "mixer_options": {"expand_ratio": 16}}
    run = prepare_run(str(tmp_path / "a"), {**train, "data": text}, small, recipe="mqar")
    assert run.config.task_options == {}
    train["context"] = 520
    run = prepare_run(str(tmp_path / "b"), {**train, "data": "copying"}, small, recipe="mqar")
    assert run.config.task_options == {"tokens": 10, "memorize": 10, "dummies": 500}


def test_the_recipe_trains(tmp_path):
    """HGRN2's paper, section 4.1, and gates that start long, at a small size."""
    out = tmp_path / "run"
    small = ["mqar", "--task-option=length=32", "--steps=2", *SMALL]
    assert cli.main(["train", "--recipe=mqar", "--out", str(out), *small]) == 0
    config = recorded(out)
    model, train = config["model"], config["train"]
    assert (model["mixer"], model["layers"], model["dim"]) == ("hgrn2", 2, 32)
    assert model["mixer_options"] == {
        "preset": "official",
        "expand_ratio": 16,
        "gate_init": "chrono:512",
    }
    assert (train["optimizer"], train["weight_decay"], train["decay"]) == ("adamw", 0.1, "all")
    assert (train["schedule"], train["warmup_fraction"], train["lr"]) == ("cosine", 0.1, 6e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": -1}, "mqar: pairs: expected 0 or more, got -1"),
        ({"length": 63}, "mqar: length: expected an even number of 4 .* = 12 or more, got 63"),
        ({"length": 16, "pairs": 5}, "mqar: length: expected an even number of .* = 20 or more"),
        ({"vocabulary": 32}, "mqar: vocabulary: expected an even number of 34 or more, got 32"),
        ({"train_examples": 0}, "mqar: train_examples: expected 1 or more, got 0"),
        ({"keys": 4}, "mqar has no option 'keys'; it has length, pairs, vocabulary"),
    ],
)
def test_options_that_make_no_task_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_task("mqar", options)
