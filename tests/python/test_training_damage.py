"""Damaged run folders: what is damaged is named or left out, and the checkpoint before is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import prepare, write_text

from tidegate import cli
from tidegate.models import CausalLM
from tidegate.training import UserError, load_trained
from tidegate.training.checkpoint import load_checkpoint, save_checkpoint
from tidegate.training.metrics import load_metrics, read_metrics
from tidegate.training.report import finish


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text) -> Path:
    """A finished run with a checkpoint of step 3 before that of step 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    finish_run(folder, text)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def finish_run(folder: Path, text: Path, **changes: Any):
    run = prepare(folder, text, checkpoint_every=3, **changes)
    assert run.trainer.run(quiet=True)
    finish(run)
    return run


def line_of(capsys, *arguments: object) -> str:
    """The one line that a command fails with."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# Checkpoints


def test_every_flipped_byte_of_a_checkpoint_is_noticed_or_changes_nothing(trained, tmp_path):
    whole = (trained / "checkpoint.pt").read_bytes()
    wanted = load_checkpoint(trained / "checkpoint.pt")
    path = tmp_path / "checkpoint.pt"
    messages = []
    places = np.random.default_rng(3).integers(0, len(whole), 150)
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(place) % 8
        path.write_bytes(broken)
        try:
            found = load_checkpoint(path)
        except UserError as error:
            messages.append(str(error))
        else:  # padding, or a date in the archive's table
            assert repr(found) == repr(wanted)
            for name, value in wanted["model"].items():
                assert torch.equal(found["model"][name], value)
    assert len(messages) > 0.4 * len(places)
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_a_flipped_weight_is_noticed(run):
    """torch.load() compares no checksum."""
    path = run / "checkpoint.pt"
    weight = load_checkpoint(path)["model"]["embedding.weight"]
    content = path.read_bytes()
    place = content.index(weight.numpy().tobytes()[:64]) + 3
    path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
    assert torch.load(path, weights_only=True)
    with pytest.raises(UserError, match=r"checkpoint.pt: the checkpoint is truncated or damaged"):
        load_checkpoint(path)


def test_the_checkpoint_before_is_used(run, trained, text, capsys):
    """It ends with the same bits, and is not replaced by the damaged one."""
    path = run / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    before = (run / "checkpoint.previous.pt").read_bytes()
    load_trained(str(run), "cpu")
    again = prepare(run, text, checkpoint_every=3)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0] == said[1]
    assert f"{path}: the checkpoint is truncated or damaged" in said[0]
    assert f"{run / 'checkpoint.previous.pt'}, of step 6, is used instead" in said[0]
    again.trainer.save()
    assert (run / "checkpoint.previous.pt").read_bytes() == before
    finish(again)
    whole, found = (load_checkpoint(folder / "checkpoint.pt") for folder in (trained, run))
    for name, value in whole["model"].items():
        assert torch.equal(found["model"][name], value)
    assert [row["kind"] for row in read_metrics(run / "metrics.jsonl")][-1] == "final"


def test_a_run_goes_on_from_the_checkpoint_before(tmp_path, text, trained):
    run = prepare(tmp_path / "run", text, checkpoint_every=2)
    inner = run.trainer._step
    run.trainer._step = lambda: (inner(), run.trainer.position.step == 4 and run.trainer.stop())
    assert not run.trainer.run(quiet=True)
    assert load_checkpoint(run.folder.previous)["position"]["step"] == 2
    run.folder.checkpoint.write_bytes(b"")
    again = prepare(tmp_path / "run", text, checkpoint_every=2)
    assert again.trainer.position.step == 2
    assert again.trainer.run(quiet=True)
    whole = load_trained(str(trained), "cpu").model.state_dict()
    for name, value in again.trainer.model.state_dict().items():
        assert torch.equal(whole[name], value)


def test_where_both_are_damaged_the_last_is_named(run, text):
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (run / name).write_bytes(b"PK")
    with pytest.raises(UserError, match=r"checkpoint.pt: the checkpoint is truncated .*2 bytes"):
        prepare(run, text)


def test_a_file_system_without_links_keeps_a_copy(tmp_path, text, monkeypatch):
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    folder = finish_run(tmp_path / "run", text).folder
    steps = [load_checkpoint(p)["position"]["step"] for p in (folder.previous, folder.checkpoint)]
    assert steps == [6, 6]  # the last step's, and once more behind the final score


def test_a_checkpoint_that_somebody_deleted_takes_the_one_before_with_it(run, text):
    (run / "checkpoint.pt").unlink()
    assert prepare(run, text).begins_anew
    assert not (run / "checkpoint.previous.pt").exists()


def _without(field: str):
    return lambda content: content.pop(field)


def _set(*keys: Any):
    *path, last, value = keys

    def change(content: dict) -> None:
        for key in path:
            content = content[key]
        content[last] = value

    return change


FIELDS = {
    "no position": (_without("position"), "position: expected a dictionary, got nothing"),
    "word": (
        _set("position", "step", "six"),
        "position: step: expected an integer >= 0, got a str",
    ),
    "nan": (_set("position", "seconds", float("nan")), "position: seconds: expected .* got nan"),
    "samples": (_set("samples", -1), "samples: expected an integer >= 0, got -1"),
    "no samples": (_without("samples"), "samples: expected an integer >= 0, got nothing"),
    "size": (_set("metrics_size", 1.5), "metrics_size: expected an integer >= 0, got 1.5"),
    "no fingerprint": (_without("fingerprint"), "fingerprint: expected a string, got nothing"),
    "no optimizer": (_without("optimizer"), "optimizer: expected a dictionary, got nothing"),
    "no model": (_without("model"), "model: expected a dictionary, got nothing"),
    "list": (_set("model", "norm.weight", [1.0]), "'norm.weight': expected a tensor, got a list"),
    "no rng": (_set("rng", {}), "rng: cpu: expected a tensor, got nothing"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_of_a_checkpoint_are_checked(case, run, text):
    change, message = FIELDS[case]
    content = load_checkpoint(run / "checkpoint.pt")
    change(content)
    save_checkpoint(run / "checkpoint.pt", content)
    (run / "checkpoint.previous.pt").unlink()
    with pytest.raises(UserError, match=f"not the checkpoint of a run: .*{message}") as caught:
        prepare(run, text)
    assert "\n" not in str(caught.value)


STATE = ("optimizer", "state", 1)
STATES = {
    "shape": (_set(*STATE, "exp_avg", torch.zeros(3)), r"state 1: exp_avg: expected \[.*got \[3\]"),
    "dtype": (
        lambda c: c["optimizer"]["state"][1].update(
            exp_avg_sq=c["optimizer"]["state"][1]["exp_avg_sq"].double()
        ),
        "exp_avg_sq: expected float32, got float64",
    ),
    "expanded": (
        lambda c: c["optimizer"]["state"][1].update(
            exp_avg=torch.zeros(1).expand_as(c["optimizer"]["state"][1]["exp_avg"])
        ),
        "exp_avg: expected it to be laid out as the parameter is",
    ),
    "missing": (
        lambda c: c["optimizer"]["state"][1].pop("exp_avg"),
        "expected exp_avg, exp_avg_sq",
    ),
    "step": (_set(*STATE, "step", 7), "state 1: step: expected a tensor, got 7"),
    "none": (_set("optimizer", "state", {}), "optimizer: it holds no states"),
    "number": (_set("optimizer", "state", 999, {}), "parameter 999, which is not there"),
    "groups": (_set("optimizer", "param_groups", []), "grouped in another way"),
    "weights": (
        lambda c: c["model"].update({"norm.weight": c["model"]["norm.weight"].double()}),
        "'norm.weight': expected float32, got float64",
    ),
    "rng": (_set("rng", "cpu", torch.zeros(3, dtype=torch.uint8)), "RNG state"),
}


@pytest.mark.parametrize("case", STATES)
def test_states_are_checked_before_a_fused_optimiser_meets_them(case, run, text):
    change, message = STATES[case]
    content = load_checkpoint(run / "checkpoint.pt")
    change(content)
    save_checkpoint(run / "checkpoint.pt", content)
    with pytest.raises(UserError, match=f"of another model: .*{message}"):
        prepare(run, text, steps=9, schedule="cosine")


def test_the_settings_of_a_run_are_those_of_its_configuration(run, text):
    """Not what a checkpoint holds beside the states."""
    content = load_checkpoint(run / "checkpoint.pt")
    for group in content["optimizer"]["param_groups"]:
        group.update(peak="fast", betas=None, eps=0)
    save_checkpoint(run / "checkpoint.pt", content)
    optimizer = prepare(run, text).trainer.optimizer
    assert {group["peak"] for group in optimizer.param_groups} == {0.003}


def test_momentum_is_checked(tmp_path, text):
    folder = finish_run(tmp_path / "run", text, optimizer="muon").folder
    content = load_checkpoint(folder.checkpoint)
    content["optimizer"]["muon"]["state"][0]["momentum"] = torch.zeros(2, 2)
    save_checkpoint(folder.checkpoint, content)
    with pytest.raises(UserError, match=r"state 0: momentum: expected \[.*got \[2, 2\]"):
        prepare(folder.path, text, optimizer="muon")


# The exported model


def test_every_flipped_bit_of_a_model_is_noticed(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run / "model", model)
    path = model / "model.safetensors"
    whole = path.read_bytes()
    assert CausalLM.load(model)
    for place in np.random.default_rng(5).integers(0, len(whole), 120):
        broken = bytearray(whole)
        broken[place] ^= 1 << int(place) % 8
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model.safetensors: "):
            CausalLM.load(model)


def test_a_flipped_weight_of_a_model_is_named_damaged(run, capsys):
    path = run / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    line = line_of(capsys, "generate", run / "model")
    assert f"{path}: damaged: its checksum is " in line


def test_a_model_without_a_checksum_is_taken(run):
    from safetensors.torch import load_file, save_file

    path = run / "model" / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt"})
    assert CausalLM.load(run / "model")


# metrics.jsonl


def _row(**changes: Any) -> bytes:
    row = {"kind": "train", "step": 10, "tokens": 640, "loss": 2.5, **changes}
    return json.dumps(row).encode()


NO_ROWS = [
    b"",
    b"[]",
    b"{",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    _row(kind="other"),
    _row(kind=None),
    _row(kind=["train"]),
    _row(step="ten"),
    _row(step=True),
    _row(step=-1),
    _row(tokens=None),
    _row(tokens=10**30),
    _row(loss="low"),
    _row(loss=float("nan")),
    _row(loss=10**400),
    _row(accuracy="high"),
    _row(lr=[1]),
    _row(kind="final", bits_per_byte=2.0),
]


def test_rows_that_make_no_sense_are_counted_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [_row(step=n) for n in range(len(NO_ROWS) + 1)]
    lines = [line for pair in zip(good, NO_ROWS, strict=False) for line in pair]
    path.write_bytes(b"\n".join([*lines, good[-1], good[-1], b'{"kind": "tr']))
    found = load_metrics(path)
    assert [row["step"] for row in found.rows] == list(range(len(good)))
    assert found.left_out == len(NO_ROWS) + 1


def test_damaged_metrics_are_plotted_and_a_finished_run_ends(run, text, capsys):
    path = run / "metrics.jsonl"
    path.write_bytes(b"\n".join(NO_ROWS) + b"\n" + path.read_bytes())
    assert cli.main(["plot", str(run)]) == 0
    assert f"{path}: {len(NO_ROWS)} lines make no sense, left out" in capsys.readouterr().err
    again = prepare(run, text, checkpoint_every=3)
    finish(again)
    rows = read_metrics(path)
    assert [row["kind"] for row in rows].count("final") == 1


def test_a_row_behind_a_line_without_an_end_is_kept(run, text):
    """A damaged file is shorter than the checkpoint says."""
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:40])
    longer = prepare(run, text, checkpoint_every=3)
    finish(longer)
    found = load_metrics(path)
    assert found.left_out == 0
    assert [row["kind"] for row in found.rows] == ["final"]


def test_a_row_that_the_disk_refuses_is_not_half_there(run, monkeypatch):
    from tidegate.training.checkpoint import RunFolder

    folder = RunFolder(run)
    before = folder.metrics.read_bytes()

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:10])

    plain = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        file = plain(path, mode, **options)
        return Full(file) if mode == "ab" else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: No space left"):
        folder.append_metrics({"kind": "train", "step": 7, "note": "x" * 50})
    monkeypatch.undo()
    assert folder.metrics.read_bytes() == before


# config.json


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("train", "seed", "one", "train: seed: expected an integer, got 'one'"),
        ("train", "seed", True, "train: seed: expected an integer, got True"),
        ("train", "lr", None, "train: lr: expected a number, got None"),
        ("train", "betas", 3, "train: betas: expected two numbers"),
        ("train", "compile", 1, "train: compile: expected True or False, got 1"),
        ("train", "task_options", {"a": "b"}, "train: task-options: expected a dictionary"),
        ("train", "width", 3, "unknown training settings width"),
        ("model", "dim", "wide", "LMConfig: dim: expected a positive integer; got 'wide'"),
        ("data", "name", 3, "data: name: expected a string, got 3"),
        ("data", "fingerprint", None, "data: fingerprint: expected a string, got None"),
        ("data", "valid_bytes", "x", "data: valid_bytes: expected an integer, got 'x'"),
        ("data", "chance", 7, "data: chance: expected 0 to 1, got 7"),
    ],
)
def test_fields_of_a_configuration_are_checked(part, name, value, message, run, capsys):
    path = run / "config.json"
    values = json.loads(path.read_text())
    values[part][name] = value
    path.write_text(json.dumps(values))
    for command in ("plot", "eval"):
        line = line_of(capsys, command, run)
        assert f"{path}: " in line
        assert message in line


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", ""], "out: expected the name of a run folder, got ''"),
        (["--seed", str(2**65)], "train: seed: expected an integer of 64 bits"),
        (["--vocab-size", "10" * 20], "LMConfig: vocab_size: expected at most"),
        (["--batch-size", "10" * 20], "train: batch-size: expected an integer of 64 bits"),
        (["--threads", "99999999"], "train: threads: expected at most 1024"),
        (["--tokenizer", "bpe:1" + "0" * 20], "bpe:N needs N of at most"),
    ],
)
def test_absurd_numbers_are_one_line(arguments, message, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in line_of(capsys, "train", text, "--out", "run", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError("Unable to allocate 9 TiB")]
)
def test_a_disk_and_a_memory_that_refuse_are_one_line(error, run, capsys, monkeypatch):
    def refuses(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tidegate.plots.write_atomically", refuses)
    line = line_of(capsys, "plot", run, "--no-baselines")
    assert line.endswith(str(error.args[-1]))


def test_a_text_that_changed_is_not_scored_as_the_run_s(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    finish_run(tmp_path / "run", text)
    write_text(text, seed=9)
    line = line_of(capsys, "eval", tmp_path / "run")
    assert "text.txt is not what" in line
    assert cli.main(["eval", str(tmp_path / "run"), str(text)]) == 0


def test_a_model_s_folder_holds_its_tokenizer(tmp_path, text, capsys):
    run = finish_run(tmp_path / "run", text, tokenizer="bpe:300")
    model = run.folder.model
    assert (model / "tokenizer.json").read_bytes() == (
        run.folder.path / "tokenizer.json"
    ).read_bytes()
    # In one precision: a run is scored in its own, a model's folder knows none.
    assert cli.main(["eval", str(model), str(text), "--precision", "fp32"]) == 0
    saved = capsys.readouterr().out
    assert cli.main(["eval", str(tmp_path / "run"), str(text), "--precision", "fp32"]) == 0
    assert "bits/byte" in saved
    assert saved.split()[0] == capsys.readouterr().out.split()[0]
    (model / "tokenizer.json").unlink()
    assert not run.is_exported()
    for command in (["eval", model, text], ["generate", model]):
        assert "tokenizer" in line_of(capsys, *command)
