"""Training by several processes (gloo, on the CPU): the curve of one process, and checkpoints that
any number of processes reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from test_training_runs import assert_same
from training_cases import prepare, write_text

from tidegate.models import CausalLM, mixers
from tidegate.training.checkpoint import read_metrics
from tidegate.training.report import finish

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="torch was built without gloo",
    ),
]
TRAIN = "distributed_cases:train"
COMMAND = "distributed_cases:command"
# Sums over processes are made in another order than in one, so runs agree up to rounding, which
# training lets grow: the losses of ten to twenty steps by this much, relatively.
BOUND = 2e-5
MUON_BOUND = 5e-4  # its iteration rounds to bf16 where that is fast
ALIKE = {"steps": 12, "batch_size": 8, "lr": 3e-3, "eval_every": 6, "checkpoint_seconds": 0.0}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def in_one(out: Path, data: Path | str, **changes) -> list[dict]:
    """The metrics of a run of one process, to its end."""
    run = prepare(out, data, **{**ALIKE, **changes})
    assert run.trainer.run(quiet=True)
    finish(run)
    return metrics(out)


def in_several(ranks: Ranks, count: int, out: Path, data: Path | str, **changes) -> list[dict]:
    """That of `count` processes."""
    ended = ranks.run(count, TRAIN, out, data, {**ALIKE, "parallel": "ddp", **changes})
    assert [each.status for each in ended] == [0] * count, ended
    return metrics(out)


def metrics(out: Path) -> list[dict]:
    """A run's metrics without what a clock says."""
    rows = read_metrics(out / "metrics.jsonl")
    times = ("seconds", "tokens_per_second")
    return [{name: v for name, v in row.items() if name not in times} for row in rows]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return CausalLM.load(out / "model").state_dict()


def assert_alike(rows: list[dict], wanted: list[dict], bound: float = BOUND) -> None:
    """The same rows, numbers that come from sums up to `bound`."""
    assert [row["kind"] for row in rows] == [row["kind"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        for name, value in want.items():
            if name in ("loss", "grad_norm", "perplexity", "bits_per_byte"):
                assert row[name] == pytest.approx(value, rel=bound), (row, want)
            else:
                assert row[name] == value, name


def test_two_processes_do_what_one_does_with_two_parts_bit_for_bit(tmp_path, text, ranks):
    """A sum of two is the same in any order."""
    whole = in_one(tmp_path / "one", text, grad_accum=2)
    rows = in_several(ranks, 2, tmp_path / "two", text)
    assert_alike(rows, whole, 1e-6)
    for row, want in zip(rows, whole, strict=True):
        assert row["kind"] != "train" or row == want
    assert_same(weights(tmp_path / "two"), weights(tmp_path / "one"))


@pytest.mark.parametrize(
    ("count", "changes", "bound"),
    [
        (4, {}, BOUND),
        (4, {"optimizer": "muon"}, MUON_BOUND),
        (2, {"grad_accum": 2, "model": {"dropout": 0.0, "norm": "layer"}}, BOUND),
    ],
    ids=["adamw", "muon", "grad_accum"],
)
def test_the_curve_is_that_of_one_process(tmp_path, text, ranks, count, changes, bound):
    wanted = in_one(tmp_path / "one", text, **{**changes, "grad_accum": 1})
    runs = [
        (tmp_path / mode, text, {**ALIKE, **changes, "parallel": mode}) for mode in ("ddp", "fsdp")
    ]
    ended = ranks.run(count, "distributed_cases:train_all", runs)
    assert [each.status for each in ended] == [0] * count, ended
    for out, _, _ in runs:
        assert_alike(metrics(out), wanted, bound)
        found = weights(out)
        for name, value in weights(tmp_path / "one").items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=bound, msg=name)


def test_every_mixer_s_curve_is_that_of_one_process(tmp_path, text, ranks):
    changes = {**ALIKE, "steps": 10, "eval_every": 0}
    runs, wanted = [], {}
    for mixer in sorted(mixers()):
        model = {"mixer": mixer, "mixer_options": {}}
        wanted[mixer] = in_one(tmp_path / mixer, text, **changes, model=model)
        for mode in ("ddp", "fsdp"):
            out = tmp_path / f"{mixer}-{mode}"
            runs.append((out, text, {**changes, "model": model, "parallel": mode}))
    ended = ranks.run(2, "distributed_cases:train_all", runs, seconds=200)
    assert [each.status for each in ended] == [0, 0], ended
    for mixer, rows in wanted.items():
        for mode in ("ddp", "fsdp"):
            assert_alike(metrics(tmp_path / f"{mixer}-{mode}"), rows, 1e-4)
