"""Synthetic tasks: every example against a checker that solves or refutes it, and runs on them."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
import torch
from training_cases import prepare

from tidegate import cli
from tidegate.models import CausalLM, SequenceClassifier
from tidegate.models.block import Output
from tidegate.training import UserError, load_trained
from tidegate.training.batches import IGNORED, Batch
from tidegate.training.checkpoint import load_checkpoint, read_metrics
from tidegate.training.evaluate import evaluate_batches
from tidegate.training.report import finish
from tidegate.training.task_corpus import TaskCorpus, draw
from tidegate.training.tasks import TASKS, Copying, ListOps, SelectiveCopying, make_task
from tidegate.training.tasks.images import SequentialImages
from tidegate.training.tasks.listops import CLOSE, MAX, MED, MIN, SM, SYMBOLS, evaluate

CPU = torch.device("cpu")
SHORT = {"max_depth": 4, "max_args": 4, "min_length": 3, "max_length": 40}
COPYING = [
    Copying(),
    Copying(tokens=4, memorize=3, dummies=0),
    SelectiveCopying(),
    SelectiveCopying(tokens=3, memorize=1, dummies=7),
]
DRAWN = [name for name, task in TASKS.items() if not issubclass(task, SequentialImages)]
by_name = pytest.mark.parametrize("task", COPYING, ids=lambda t: f"{t.name}-{t.dummies}")


# Checkers: they read one example as a person would, and raise where it breaks a rule.


def check_copying(task: Copying, ids: list[int], labels: list[int]) -> None:
    n, m, t = task.tokens, task.memorize, task.dummies
    assert len(ids) == len(labels) == t + 2 * m
    assert ids[-m:] == [n - 1] * m
    told = [token for token in ids[:-m] if token != 0]
    assert len(told) == m
    assert all(1 <= token <= n - 2 for token in told)
    if type(task) is Copying:
        assert ids[:m] == told
    assert labels[:-m] == [IGNORED] * (t + m)
    assert labels[-m:] == told


def check_listops(task: ListOps, tokens: list[int], label: int) -> None:
    assert task.min_length < len(tokens) < task.max_length
    open_lists: list[int] = []
    for token in tokens:
        if open_lists and token != CLOSE:
            open_lists[-1] += 1
        if token in (MIN, MAX, MED, SM):
            open_lists.append(0)
            assert len(open_lists) < task.max_depth
        if token == CLOSE:
            assert 2 <= open_lists.pop() <= task.max_args
    assert evaluate(tokens) == label


def generator(seed: int = 0, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# Copying


@by_name
def test_every_example_of_copying_is_one(task, device):
    batch = task.batch(50, generator(3, torch.device(device)))
    assert batch.ids.device.type == batch.labels.device.type == device
    assert batch.lengths is None
    assert int(batch.ids.max()) < task.vocab_size
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        check_copying(task, ids, labels)
    # The checker refutes: an answer, a dummy, the order.
    for position, change in ((-1, 1), (task.memorize, 1), (0, -1)):
        ids, labels = batch.ids[0].tolist(), batch.labels[0].tolist()
        (labels if position == -1 else ids)[position] += change
        with pytest.raises(AssertionError):
            check_copying(task, ids, labels)


@pytest.mark.parametrize("kind", [Copying, SelectiveCopying])
def test_tokens_and_places_are_uniform(kind):
    task = kind(tokens=6, memorize=4, dummies=12)
    ids = task.batch(20_000, generator(1)).ids[:, :16]
    counts = torch.bincount(ids[ids > 0], minlength=6)[1:5].double()
    # A share deviates by 4 standard deviations once in 16,000 times.
    expected = 80_000 / 4
    assert (counts - expected).abs().max() < 4 * math.sqrt(expected)
    taken = (ids > 0).double().mean(0)
    if kind is Copying:
        assert taken.tolist() == [1.0] * 4 + [0.0] * 12
    else:
        assert (taken - 0.25).abs().max() < 4 * math.sqrt(0.25 * 0.75 / 20_000)
        # Pairs of places too: the first two together, the first and the last.
        for other in (1, 15):
            both = ((ids[:, 0] > 0) & (ids[:, other] > 0)).double().mean()
            assert abs(float(both) - 4 * 3 / (16 * 15)) < 0.01


# ListOps


def tokens_of(text: str) -> list[int]:
    return [SYMBOLS.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 3 8 ]", 3),
        ("[MAX 3 8 0 ]", 8),
        ("[SM 9 9 9 ]", 7),
        ("[MED 9 0 4 ]", 4),
        ("[MED 1 2 ]", 1),
        ("[MED 5 0 9 8 ]", 6),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("[SM [MAX 1 [SM 8 5 ] ] [MED 6 6 0 9 ] ]", 9),
    ],
)
def test_listops_values_by_hand(text, value):
    assert evaluate(tokens_of(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 lists are not closed"),
        ("[MIN 1 2", "1 lists are not closed"),
        ("1 2", "wrong at position 1"),
        ("[MIN ]", "nothing to close at position 1"),
        ("]", "nothing to close at position 0"),
    ],
)
def test_listops_refuses_what_is_no_expression(text, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tokens_of(text))


@pytest.mark.parametrize("options", [{}, SHORT], ids=["lra", "short"])
def test_every_example_of_listops_is_one(options, device):
    task = ListOps(**options)
    batch = task.batch(100, generator(5, torch.device(device)))
    assert batch.ids.device.type == batch.labels.device.type == device
    assert batch.lengths.device.type == "cpu"
    assert batch.ids.size(1) == int(batch.lengths.max())
    rows = zip(batch.ids.tolist(), batch.lengths.tolist(), batch.labels.tolist(), strict=True)
    for ids, length, label in rows:
        check_listops(task, ids[:length], label)
        assert set(ids[length:]) <= {0}
        with pytest.raises(AssertionError):
            check_listops(task, ids[:length], (label + 1) % 10)
    assert len(set(batch.labels.tolist())) > 5


def naive_listops(task: ListOps, draw: random.Random) -> list[int]:
    """LRA's rule, written as it is told: draw a tree, keep it if its length fits."""

    def tree(depth: int) -> list[int]:
        if depth == task.max_depth or draw.random() > 0.25:
            return [draw.randrange(10)]
        count = draw.randint(2, task.max_args)
        inside = [token for _ in range(count) for token in tree(depth + 1)]
        return [draw.choice((MIN, MAX, MED, SM)), *inside, CLOSE]

    while True:
        tokens = tree(1)
        if task.min_length < len(tokens) < task.max_length:
            return tokens


def kolmogorov_smirnov(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest distance between two samples' distribution functions."""
    at = torch.cat([a, b]).sort().values
    cdf = [torch.searchsorted(x.sort().values, at, right=True) / len(x) for x in (a, b)]
    return float((cdf[0] - cdf[1]).abs().max())


def test_listops_are_distributed_as_in_lra():
    task = ListOps(**SHORT)
    draw = random.Random(2)
    naive = [naive_listops(task, draw) for _ in range(4000)]
    batch = task.batch(4000, generator(4))
    lengths = torch.tensor([len(tokens) for tokens in naive])
    # 1.95 sqrt(2 / n) is exceeded once in a thousand draws.
    bound = 1.95 * math.sqrt(2 / 4000)
    assert kolmogorov_smirnov(lengths.double(), batch.lengths.double()) < bound
    values = torch.tensor([evaluate(tokens) for tokens in naive])
    assert kolmogorov_smirnov(values.double(), batch.labels.double()) < bound
    inside = torch.arange(batch.ids.size(1)) < batch.lengths[:, None]
    mine = torch.bincount(batch.ids[inside], minlength=15).double()
    counted = Counter(token for tokens in naive for token in tokens)
    other = torch.tensor([counted[i] for i in range(15)], dtype=torch.float64)
    torch.testing.assert_close(mine / mine.sum(), other / other.sum(), rtol=0.06, atol=0)


# Seeds


@pytest.mark.parametrize("name", DRAWN)
def test_batches_depend_on_seed_split_and_index_alone(name, device):
    task = make_task(name, SHORT if name == "listops" else None)
    where = torch.device(device)
    torch.manual_seed(0)
    first = draw(task, 8, where, 1, 0, 4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = draw(task, 8, where, 1, 0, 4)
    assert torch.equal(before, torch.get_rng_state()), "torch's own generator stays untouched"
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.labels, again.labels)
    for other in ((2, 0, 4), (1, 1, 4), (1, 0, 5)):
        batch = draw(task, 8, where, *other)
        assert batch.ids.shape != first.ids.shape or not torch.equal(batch.ids, first.ids)


def test_a_sampler_goes_on_from_its_position():
    corpus = TaskCorpus(make_task("selective-copying"))
    one, other = (corpus.sampler(4, 532, 7, CPU) for _ in range(2))
    batches = [one.next() for _ in range(5)]
    other.position = 12
    assert torch.equal(other.next().ids, batches[3].ids)
    assert other.position == 16


def test_examples_that_are_counted_come_again():
    class Counted(Copying):
        train_examples = 12

    sampler = TaskCorpus(Counted()).sampler(4, 520, 0, CPU)
    ids = [sampler.next().ids for _ in range(6)]
    assert torch.equal(torch.cat(ids[:3]), torch.cat(ids[3:]))
    assert not torch.equal(ids[0], ids[1])


# Scores


class Solver(torch.nn.Module):
    """Gives the right answer of the copying tasks a probability, and the others what is left."""

    def __init__(self, task: Copying, probability: float) -> None:
        super().__init__()
        self.task, self.probability = task, probability

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, *, return_logits: bool) -> Output:
        assert return_logits
        m, n = self.task.memorize, self.task.tokens
        told = torch.stack([row[:-m][row[:-m] > 0] for row in ids])
        p = torch.full((*ids.shape, n), (1 - self.probability) / (n - 1))
        p[:, -m:].scatter_(2, told[..., None], self.probability)
        loss = torch.nn.functional.cross_entropy(p.log().flatten(0, 1), labels.flatten())
        return Output(p.log(), loss, None)


@by_name
def test_loss_and_accuracy_are_those_of_the_answers(task):
    batches = list(TaskCorpus(task).valid_batches(CPU, 100 * task.length))
    assert sum(batch.ids.size(0) for batch in batches) == 100
    for probability, accuracy in ((0.9, 1.0), (0.5 / task.tokens, 0.0)):
        solver = Solver(task, probability)
        score = evaluate_batches(solver, batches, device=CPU, precision="fp32")
        assert score.tokens == 100 * task.memorize
        assert score.nats == pytest.approx(-math.log(probability), rel=1e-5)
        assert score.accuracy == accuracy


# Runs


def test_a_model_learns_copying_and_its_folder_says_so(tmp_path, capsys):
    options = {"tokens": 4, "memorize": 2, "dummies": 4}
    changes = {"task_options": options, "context": 8, "steps": 150, "lr": 2e-2, "eval_every": 50}
    run = prepare(tmp_path / "run", "copying", **changes, batch_size=32)
    assert isinstance(run.trainer.model, CausalLM)
    assert run.trainer.run(quiet=True)
    score = finish(run)
    assert score.accuracy > 0.95
    assert finish(run) == score
    assert score.tokens == 2 * 1024
    rows = read_metrics(run.folder.metrics)
    assert rows[0]["accuracy"] < rows[-2]["accuracy"]
    config = json.loads(run.folder.config.read_text())
    assert config["train"]["task_options"] == options
    assert config["data"]["chance"] == 0.5
    folder = str(tmp_path / "run")
    assert cli.main(["eval", folder, "--json", "--device=cpu", "--precision=fp32"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == score.accuracy
    assert cli.main(["plot", folder, "--device=cpu"]) == 0
    drawn = capsys.readouterr().out.split()
    assert [path.rsplit("/", 1)[1] for path in drawn] == [
        "loss.png",
        "accuracy.png",
        "forget_gates.png",
    ]
    assert cli.main(["generate", folder]) == 2
    assert "it has no tokenizer" in capsys.readouterr().err


def test_a_classifier_trains_on_listops(tmp_path, device):
    changes = {"task_options": SHORT, "context": 39, "steps": 20, "lr": 1e-2, "device": device}
    run = prepare(tmp_path / "run", "listops", **changes, batch_size=16, grad_accum=2)
    assert isinstance(run.trainer.model, SequenceClassifier)
    assert run.trainer.run(quiet=True)
    score = finish(run)
    assert score.tokens == 2000
    assert score.nats < 2.4
    model = load_trained(str(tmp_path / "run"), "cpu").model
    assert isinstance(model, SequenceClassifier)
    batch = next(run.corpus.valid_batches(CPU))
    output = model(batch.ids, batch.labels, lengths=batch.lengths)
    assert output.logits.shape == (64, 10)
    assert cli.main(["plot", str(tmp_path / "run"), "--device=cpu"]) == 0
    assert cli.main(["eval", str(tmp_path / "run"), "stdlib", "--device=cpu"]) == 2


@pytest.mark.parametrize("name", ["selective-copying", "listops"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, name):
    options = SHORT if name == "listops" else {"memorize": 2, "dummies": 10}
    changes = {"task_options": options, "context": make_task(name, options).length, "steps": 12}
    whole = prepare(tmp_path / "whole", name, **changes)
    whole.trainer.run(quiet=True)
    run = prepare(tmp_path / "parts", name, **changes)
    inner = run.trainer._step
    run.trainer._step = lambda: (inner(), run.trainer.position.step == 5 and run.trainer.stop())
    assert not run.trainer.run(quiet=True)
    torch.manual_seed(99)
    again = prepare(tmp_path / "parts", name, **changes)
    assert again.resumed
    again.trainer.run(quiet=True)
    a, b = (load_checkpoint(tmp_path / part / "checkpoint.pt") for part in ("whole", "parts"))
    assert a["samples"] == b["samples"] == 48
    for key, value in a["model"].items():
        assert torch.equal(value, b["model"][key]), key
    rows = [read_metrics(tmp_path / part / "metrics.jsonl") for part in ("whole", "parts")]
    assert [row["accuracy"] for row in rows[0]][-1] == [row["accuracy"] for row in rows[1]][-1]


def test_flags_left_out_keep_the_runs_options(tmp_path, capsys):
    flags = ["--dim=8", "--layers=1", "--batch-size=2", "--device=cpu", "--threads=1", "--quiet"]
    train = ["train", "copying", *flags, "--out", str(tmp_path / "run")]
    assert cli.main([*train, "--task", "dummies=3", "--steps=2"]) == 0  # --task-option
    assert cli.main([*train, "--steps=3"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["task_options"] == {"tokens": 10, "memorize": 10, "dummies": 3}
    assert config["train"]["context"] == 23
    assert "goes on at step 2" in capsys.readouterr().err
    assert cli.main([*train, "--task", "dummies=4"]) == 2
    assert "holds a run of another configuration" in capsys.readouterr().err


def test_the_copying_recipe_names_its_model(tmp_path):
    changes = ["--set", "mixer_options.gate_init=ugi"]
    changes += ["--set", 'layer_options=[{"gate_init": "gumbel-softmax"}]']
    changes += ["--dim=8", "--layers=2", "--steps=2", "--batch-size=2", "--device=cpu", "--quiet"]
    out = tmp_path / "run"
    train = ["train", "copying", "--task", "dummies=3", "--recipe=copying", "--out", str(out)]
    assert cli.main([*train, *changes]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["model"]["mixer"] == "gated-linear-rnn"
    assert config["model"]["vocab_size"] == 10
    assert config["train"]["lr"] == 1e-4
    model = load_trained(str(out), "cpu").model
    assert [b.mixer.gate_init for b in model.blocks] == ["gumbel-softmax", "ugi"]
    assert (out / "forget_gates.png").exists()
    assert cli.main(["train", "--out", str(out), "--quiet"]) == 0


# What is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "sorting",
            {},
            "task: expected one of copying, selective-copying, listops.*, got 'sorting'",
        ),
        (
            "copying",
            {"length": 3},
            "copying has no option 'length'; it has tokens, memorize, dummies",
        ),
        ("copying", {"dummies": 2.5}, "copying: dummies: expected an integer, got 2.5"),
        ("copying", {"dummies": -1}, "copying: dummies: expected 0 or more, got -1"),
        ("copying", {"memorize": 0}, "copying: memorize: expected 1 or more, got 0"),
        ("selective-copying", {"tokens": 2}, "tokens: expected 3 or more, got 2"),
        ("listops", {"max_depth": 1}, "listops: max_depth: expected 2 or more, got 1"),
        ("listops", {"max_args": 1}, "listops: max_args: expected 2 or more, got 1"),
        ("listops", {"max_length": 501}, "listops: max_length: expected 502 or more, got 501"),
    ],
)
def test_options_that_make_no_task_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        make_task(name, options)


def test_lengths_that_no_expression_has_are_refused():
    task = ListOps(max_depth=2, max_args=2, min_length=4, max_length=7)
    with pytest.raises(UserError, match="none of 102400 had 4 < length < 7"):
        task.batch(1, generator())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["copying", "--context=100"],
            "copying has sequences of 520 tokens by its options, got 100",
        ),
        (["copying", "--tokenizer=bpe:300"], "tokenizer: the task copying has no text"),
        (["copying", "--valid=a.txt"], "valid: the task copying has no text"),
        (["copying", "--task-option=dummies"], "task-option: expected OPTION=N with a whole"),
        (
            ["copying", "--vocab-size=9"],
            "copying has token ids up to 9, the model's vocabulary is 9",
        ),
        (["a.txt", "--task=dummies=3"], "task-option: expected one of copying, "),
        (["a.txt", "--task-option=dummies=3"], "as data, got 'a.txt'"),
        (["copying", "--token-dtype=uint32"], "token-dtype: the task copying has no text"),
        (["listops", "--set=num_classes=3"], "num_classes: expected 10 or more for listops; got 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, capsys, arguments, message):
    assert cli.main(["train", *arguments, "--out", str(tmp_path / "run"), "--dim=8"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_batches_split_by_rows():
    batch = Batch(torch.arange(12).view(4, 3), torch.arange(4), torch.tensor([3, 1, 2, 3]))
    assert batch.tokens == 9
    parts = batch.chunk(2)
    assert [part.lengths.tolist() for part in parts] == [[3, 1], [2, 3]]
    assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
