"""Training by several processes (gloo, on the CPU): the curve of one process, and checkpoints that
any number of processes reads."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from test_training_runs import assert_same
from training_cases import FLAGS, prepare, write_text

from tidegate.models import CausalLM, mixers
from tidegate.training import UserError, load_trained
from tidegate.training.checkpoint import RunFolder, read_metrics
from tidegate.training.report import finish

pytestmark = pytest.mark.xdist_group("ranks")
TRAIN = "distributed_cases:train"
COMMAND = "distributed_cases:command"
# Sums over processes are made in another order than in one, so runs agree up to rounding, which
# training lets grow: the losses of ten to twenty steps by this much, relatively.
BOUND = 2e-5
MUON_BOUND = 5e-4  # its iteration rounds to bf16 where that is fast
ALIKE = {"steps": 12, "batch_size": 8, "lr": 3e-3, "eval_every": 6, "checkpoint_seconds": 0.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def in_one(out: Path, data: Path | str, **changes) -> list[dict]:
    """The metrics of a run of one process, to its end."""
    finishes = changes.pop("finishes", True)
    run = prepare(out, data, **{**ALIKE, **changes})
    assert run.trainer.run(quiet=True)
    if finishes:
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
    """Asserts equal rows; numbers that come from sums may differ by `bound`."""
    assert [row["kind"] for row in rows] == [row["kind"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        for name, value in want.items():
            if value is not None and name in ("loss", "grad_norm", "perplexity", "bits_per_byte"):
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
    """Scored in training, after the step before the last, and not once more after it, where a model
    is written."""
    changes = {**ALIKE, "steps": 10, "eval_every": 9, "finishes": False}
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
        assert [row["kind"] for row in rows] == ["train", "valid", "train"]
        for mode in ("ddp", "fsdp"):
            assert_alike(metrics(tmp_path / f"{mixer}-{mode}"), rows, 1e-4)


def test_compiled_blocks_and_bf16_train_alike(tmp_path, text, ranks):
    """With torch's own code for the backward graph, which takes no compiler."""
    changes = {**ALIKE, "steps": 4, "eval_every": 2, "precision": "bf16"}
    wanted = in_one(tmp_path / "one", text, **changes)
    runs = [
        (tmp_path / mode, text, {**changes, "compile": True, "parallel": mode})
        for mode in ("ddp", "fsdp")
    ]
    ended = ranks.run(2, "distributed_cases:train_compiled", runs)
    assert [each.status for each in ended] == [0, 0], ended
    for out, _, _ in runs:
        assert_alike(metrics(out), wanted, 1e-2)


@pytest.mark.parametrize("recompute", ["norms", "blocks"])
def test_what_the_backward_pass_computes_again_is_the_same(tmp_path, text, ranks, recompute):
    changes = {**ALIKE, "steps": 4, "eval_every": 2, "model": {"mixer": "hgrn2"}}
    changes["model"]["mixer_options"] = {"num_heads": 2}
    wanted = in_one(tmp_path / "one", text, **changes)
    runs = [
        (tmp_path / mode, text, {**changes, "recompute": recompute, "parallel": mode})
        for mode in ("ddp", "fsdp")
    ]
    ended = ranks.run(2, "distributed_cases:train_all", runs)
    assert [each.status for each in ended] == [0, 0], ended
    for out, _, _ in runs:
        assert_alike(metrics(out), wanted)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, text) -> Path:
    """A run that others begin with."""
    out = tmp_path_factory.mktemp("begun") / "run"
    in_one(out, text, steps=3, seed=5)
    return out


def test_runs_begin_with_the_weights_of_another(tmp_path, text, ranks, begun):
    """And with all that the loss may have beside the cross-entropy."""
    changes = {**ALIKE, "steps": 4, "eval_every": 2, "init_from": str(begun), "z_loss": 1e-3}
    changes["label_smoothing"] = 0.1
    wanted = in_one(tmp_path / "one", text, **changes)
    drawn = in_one(tmp_path / "drawn", text, **{**changes, "init_from": None})
    assert wanted[0]["loss"] < drawn[0]["loss"] - 0.01
    runs = [(tmp_path / mode, text, {**changes, "parallel": mode}) for mode in ("ddp", "fsdp")]
    ended = ranks.run(2, "distributed_cases:train_all", runs)
    assert [each.status for each in ended] == [0, 0], ended
    for out, _, _ in runs:
        assert_alike(metrics(out), wanted)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_weights_that_do_not_fit_are_refused_once(tmp_path, text, ranks, begun, mode):
    flags = [*FLAGS, f"--parallel={mode}", "--quiet", f"--init-from={begun}", "--dim=32"]
    ended = ranks.run(2, COMMAND, "train", text, *flags, "--out", tmp_path / "run")
    assert [each.status for each in ended] == [2, 2]
    said = [line for each in ended for line in each.stderr.splitlines() if "tidegate: " in line]
    assert len(said) == 1, said
    assert "tidegate: init-from: " in said[0]
    assert "does not fit the model: " in said[0]
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_any_number_of_processes(tmp_path, text, ranks):
    """Two, four, one and two again, by either mode, and one reads what several wrote."""
    changes = {**ALIKE, "schedule": "constant", "eval_every": 0}
    wanted = in_one(tmp_path / "one", text, **changes)
    out = tmp_path / "run"
    in_several(ranks, 2, out, text, **{**changes, "steps": 3})
    assert RunFolder(out).choose().step == 3
    in_several(ranks, 4, out, text, **{**changes, "steps": 6, "parallel": "fsdp"})
    in_one(out, text, **{**changes, "steps": 9, "parallel": "none"})
    gc.collect()  # the run has the folder's lock
    assert RunFolder(out).choose().path.name == "checkpoint.pt"
    rows = in_several(ranks, 2, out, text, **{**changes, "steps": 12, "parallel": "fsdp"})
    assert RunFolder(out).choose().step == 12
    assert [row["step"] for row in rows if row["kind"] == "train"] == [3, 6, 9, 10, 12]
    found, whole = weights(out), weights(tmp_path / "one")
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=BOUND, msg=name)
    assert rows[-1]["loss"] == pytest.approx(wanted[-1]["loss"], rel=BOUND)


@pytest.mark.parametrize(("mode", "optimizer"), [("ddp", "adamw"), ("fsdp", "muon")])
def test_as_many_processes_go_on_bit_for_bit(tmp_path, text, ranks, mode, optimizer):
    """Dropout included, of which every process draws its own."""
    changes = {**ALIKE, "schedule": "constant", "parallel": mode, "model": {"dropout": 0.1}}
    changes["optimizer"] = optimizer
    runs = [
        (tmp_path / "whole", text, {**changes, "steps": 8}),
        (tmp_path / "parts", text, {**changes, "steps": 5}),
        (tmp_path / "parts", text, {**changes, "steps": 8}),
    ]
    ended = ranks.run(2, "distributed_cases:train_all", runs)
    assert [each.status for each in ended] == [0, 0], ended
    assert_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    several = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert sorted(several) == ["step-8", "step-8.1"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, text, ranks) -> Path:
    """A run of two processes."""
    out = tmp_path_factory.mktemp("sharded") / "run"
    changes = {"checkpoint_every": 2, "steps": 4, "parallel": "fsdp", "schedule": "constant"}
    in_several(ranks, 2, out, text, **changes)
    return out


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "run.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    tmp_path, sharded, capsys, name, how
):
    out = shutil.copytree(sharded, tmp_path / "run")
    last = RunFolder(out).choose().path
    file = last / name
    content = bytearray(file.read_bytes())
    if how == "flipped":
        place = len(content) // 2 if name != "__1_0.distcp" else content.index(b"archive/data/0")
        content[place + (100 if name.endswith("distcp") else 0)] ^= 0x10
    file.write_bytes(content[:-3] if how == "cut" else content)
    if how == "missing":
        file.unlink()
    load_trained(str(out), "cpu")
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{last}: the checkpoint is truncated or damaged ({name}" in said
    assert "checkpoints/step-4, of step 4, is used instead" in said


def test_a_damaged_checkpoint_is_not_kept_in_the_place_of_a_whole_one(
    tmp_path, text, sharded, ranks
):
    out = shutil.copytree(sharded, tmp_path / "run")
    (out / "checkpoints" / "step-4.1" / ".metadata").write_bytes(b"")
    changes = {"steps": 6, "schedule": "constant", "checkpoint_every": 5, "parallel": "fsdp"}
    in_several(ranks, 2, out, text, **{**changes, "finishes": False})
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-5", "step-6"]
    (out / "checkpoints" / "step-6" / ".metadata").write_bytes(b"")
    in_several(ranks, 2, out, text, **{**changes, "checkpoint_every": 0, "finishes": False})
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-5", "step-6.1"]
    assert RunFolder(out).choose().step == 6


def test_where_every_checkpoint_is_damaged_the_last_is_named(tmp_path, sharded):
    out = shutil.copytree(sharded, tmp_path / "run")
    for path in (out / "checkpoints").iterdir():
        (path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"step-4.1: the checkpoint is truncated or damaged"):
        load_trained(str(out), "cpu")


def test_another_model_s_checkpoint_is_refused(tmp_path, text, sharded, ranks):
    out = shutil.copytree(sharded, tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    config["model"]["dim"] = 32
    (out / "config.json").write_text(json.dumps(config))
    flags = [flag for flag in FLAGS if not flag.startswith(("--dim", "--batch"))]
    arguments = ["train", text, "--out", out, *flags, "--steps=6", "--quiet", "--parallel=fsdp"]
    ended = ranks.run(2, COMMAND, *arguments)
    assert [each.status for each in ended] == [2, 2]
    said = "".join(each.stderr for each in ended).splitlines()
    assert len([line for line in said if line.startswith("tidegate:")]) == 1, said
    assert "the checkpoint is of another model" in said[-1]


def test_packed_documents_of_a_tokenizer_that_rank_0_learns(tmp_path, ranks):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(24):
        write_text(folder / f"{n}.txt", 200 + 40 * n, seed=n)
    changes = {**ALIKE, "tokenizer": "bpe:270", "packed": True, "steps": 4, "context": 24}
    wanted = in_one(tmp_path / "one", folder, **changes)
    rows = in_several(ranks, 2, tmp_path / "two", folder, **changes)
    assert_alike(rows, wanted)
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("task", "options", "context"),
    [
        ("copying", {"dummies": 20}, 40),
        ("listops", {"min_length": 10, "max_length": 30}, 29),
    ],
)
def test_tasks_show_the_same_examples_to_any_number(tmp_path, ranks, task, options, context):
    changes = {**ALIKE, "task_options": options, "context": context, "eval_tokens": 4000}
    changes |= {"steps": 4, "eval_every": 2, "finishes": False}
    wanted = in_one(tmp_path / "one", task, **changes)
    rows = in_several(ranks, 2, tmp_path / "two", task, **changes, parallel="fsdp")
    assert_alike(rows, wanted)


def test_a_budget_of_time_ends_all_at_one_step(tmp_path, text, ranks):
    changes = {"steps": None, "seconds": 0.3, "eval_seconds": 0.1, "checkpoint_seconds": 0.1}
    rows = in_several(ranks, 2, tmp_path / "run", text, **{**changes, "eval_every": 0})
    assert rows[-1]["kind"] == "final"
    assert RunFolder(tmp_path / "run").choose().step == rows[-1]["step"]


def test_the_benchmark_of_several_gpus_runs_on_cpus(tmp_path, ranks):
    found = tmp_path / "found.json"
    ended = ranks.run(2, "distributed_cases:benchmark", "--tiny", "--json", found)
    assert [each.status for each in ended] == [0, 0], ended
    results = json.loads(found.read_text())
    assert [case["name"] for case in results["cases"]] == ["hgrn2-360m", "hgrn2-756m", "fox-757m"]
    held = [case["held_ratio"] for case in results["cases"]]
    assert held == pytest.approx([1.0, 0.5, 0.5], rel=0.05)
    checkpoint = results["cases"][1]["many"]["checkpoint"]
    assert len(checkpoint["stands_still_s"]) == 2
    assert checkpoint["bytes"] > 3 * 4 * results["cases"][1]["one"]["parameters"]
