"""Run folders: training, resuming bit for bit, SIGKILL, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from training_cases import FLAGS, command, environment, prepare, tidegate, write_text

from tidegate.models import CausalLM
from tidegate.training import UserError, adamw, load_trained
from tidegate.training.checkpoint import RunFolder, load_checkpoint, read_metrics, save_checkpoint
from tidegate.training.report import finish


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def assert_same(a, b, where: str = "") -> None:
    """Equality of nested containers, tensors bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, to see that nothing changed."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_training_learns_and_writes_its_folder(tmp_path, text):
    run = prepare(tmp_path / "run", text, steps=60, lr=1e-2, eval_every=20)
    assert run.trainer.run(quiet=True)
    score = finish(run)
    assert score.bits_per_byte < 5.0
    assert score.bits_per_byte == pytest.approx(score.nats / np.log(2))
    rows = read_metrics(run.folder.metrics)
    assert [row["step"] for row in rows if row["kind"] == "valid"] == [20, 40]
    assert rows[-1]["kind"] == "final"
    assert rows[-1]["bits_per_byte"] == score.bits_per_byte
    train = [row["loss"] for row in rows if row["kind"] == "train"]
    assert train[-1] < train[0]
    config = json.loads(run.folder.config.read_text())
    assert config["model"]["dim"] == 16
    assert config["train"]["lr"] == 1e-2
    exported = CausalLM.load(run.folder.model)
    loaded = load_trained(str(tmp_path / "run"), "cpu").model
    assert_same(exported.state_dict(), loaded.state_dict())


def test_two_runs_of_one_seed_are_the_same_bit_for_bit(tmp_path, text):
    for name in ("a", "b"):
        assert prepare(tmp_path / name, text).trainer.run(quiet=True)
    a, b = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("a", "b"))
    assert_same(a["model"], b["model"])
    other = prepare(tmp_path / "c", text, seed=2)
    other.trainer.run(quiet=True)
    c = load_checkpoint(tmp_path / "c" / "checkpoint.pt")
    assert not torch.equal(a["model"]["embedding.weight"], c["model"]["embedding.weight"])


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, text):
    states = []
    for parts in (1, 2, 4):
        run = prepare(tmp_path / str(parts), text, grad_accum=parts, steps=3)
        run.trainer.run(quiet=True)
        states.append(run.trainer.model.state_dict())
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-3, atol=1e-4)


def gradients_used(run) -> list[torch.Tensor]:
    """What the optimiser of a run makes its first step with."""
    found = []

    def keep(optimizer, *_) -> None:
        if not found:
            groups = optimizer.param_groups
            found.extend(p.grad.clone() for group in groups for p in group["params"])

    handle = run.trainer.optimizer.register_step_pre_hook(keep)
    assert run.trainer.run(quiet=True)
    handle.remove()
    return found


def norm_of(gradients: list[torch.Tensor]) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients]).norm())


@pytest.mark.parametrize("clip", [0.0, 0.05, 1000.0])
def test_gradients_are_clipped_to_a_norm(tmp_path, text, clip):
    """Those that the optimiser uses, together; the log has the norm before that. Where it is small
    enough already, and with 0, they are what backward() gives."""
    plain = prepare(tmp_path / "plain", text).trainer
    plain.sampler.next().run(plain.model, plain.device)[0].loss.backward()
    wanted = [p.grad for group in plain.optimizer.param_groups for p in group["params"]]
    norm = norm_of(wanted)
    assert 1.0 < norm < 1000.0

    run = prepare(tmp_path / "run", text, clip=clip, steps=1)
    used = gradients_used(run)
    assert len(used) == len(wanted) > 10
    if clip == 0.05:
        assert 0.999 * clip < norm_of(used) <= clip * (1 + 1e-6)
        wanted = [g * (clip / norm) for g in wanted]
    for got, expected in zip(used, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-9)
    (row,) = [row for row in read_metrics(run.folder.metrics) if row["kind"] == "train"]
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_run_steps_masters_in_one_pass(tmp_path, text, clip, device, monkeypatch):
    """The norm is that of the gradients where they are, so that none is moved to be looked at."""
    monkeypatch.setattr(adamw, "_DEVICES", ("cpu", "cuda"))
    run = prepare(
        tmp_path / "run", text, precision="bf16-weights", clip=clip, steps=2, device=device
    )
    masters = run.trainer.optimizer
    monkeypatch.setattr(masters, "take_gradients", pytest.fail)
    before = [master.detach().clone() for master in masters.masters]
    assert run.trainer.run(quiet=True)
    for master, weight, start in zip(masters.masters, masters.weights, before, strict=True):
        assert not torch.equal(master, start)
        assert torch.equal(weight, master.bfloat16())
    (row,) = [row for row in read_metrics(run.folder.metrics) if row["kind"] == "train"]
    assert 0.05 < row["grad_norm"] < 1000


@pytest.mark.parametrize(("precision", "seen"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_autocast_keeps_fp32_weights(tmp_path, text, precision, seen):
    """Products are bf16 in training and in validation, weights and what the optimiser keeps are
    not; without bf16 nothing is."""
    run = prepare(tmp_path / "run", text, precision=precision, steps=20, lr=1e-2)
    trainer = run.trainer
    found: dict[str, set[torch.dtype]] = {"train": set(), "valid": set()}
    linear = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linear) > 4
    for module in linear:
        module.register_forward_hook(
            lambda m, _, out: found["train" if m.training else "valid"].add(out.dtype)
        )
    trainer.run(quiet=True)
    trainer.validate(500)
    assert found == {"train": {seen}, "valid": {seen}}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    kept = [t for state in trainer.optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in kept} == {torch.float32}
    losses = [row["loss"] for row in read_metrics(run.folder.metrics) if row["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_training_on_a_device(tmp_path, text, device):
    run = prepare(tmp_path / "run", text, device=device, precision="auto", steps=3)
    assert run.trainer.run(quiet=True)
    assert finish(run).tokens > 0
    assert load_trained(str(tmp_path / "run"), device).model is not None


def test_wall_time_bounds_a_run_and_a_resumed_one(tmp_path, text):
    changes = {"steps": None, "seconds": 0.4, "schedule": "linear", "checkpoint_seconds": 0.05}
    run = prepare(tmp_path / "run", text, **changes)
    trainer = run.trainer
    start = time.monotonic()
    stop_at = time.perf_counter() + 0.2
    inner = trainer._step

    def step() -> None:
        inner()
        if time.perf_counter() > stop_at:
            trainer.stop()

    trainer._step = step
    assert not trainer.run(quiet=True)
    steps, seconds = trainer.position.step, trainer.position.seconds
    again = prepare(tmp_path / "run", text, **changes)
    assert again.resumed
    assert again.trainer.position.step == steps
    assert again.trainer.progress() == pytest.approx(seconds / 0.4)
    assert again.trainer.run(quiet=True)
    assert again.trainer.position.seconds >= 0.4
    assert time.monotonic() - start < 30
    rates = [row["lr"] for row in read_metrics(run.folder.metrics) if row["kind"] == "train"]
    assert rates[-1] < rates[0]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "muon"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, text, optimizer):
    changes = {"steps": 12, "model": {"dropout": 0.1}, "optimizer": optimizer}
    whole = prepare(tmp_path / "whole", text, **changes)
    whole.trainer.run(quiet=True)
    run = prepare(tmp_path / "parts", text, **changes)
    inner = run.trainer._step
    run.trainer._step = lambda: (inner(), run.trainer.position.step == 5 and run.trainer.stop())
    assert not run.trainer.run(quiet=True)
    torch.manual_seed(99)
    again = prepare(tmp_path / "parts", text, **changes)
    assert again.resumed
    assert again.trainer.position.step == 5
    assert again.trainer.run(quiet=True)
    a, b = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts"))
    for key in ("model", "optimizer", "rng", "samples"):
        assert_same(a[key], b[key], key)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_sigkill_in_the_middle_then_resumed_ends_with_the_same_weights(tmp_path, text, ranks):
    flags = [*FLAGS, "--steps=150", "--checkpoint-every=7", "--dropout=0.1", "--quiet", text]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        command("train", *flags, "--out", killed),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    metrics = killed / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    step = load_checkpoint(killed / "checkpoint.pt")["position"]["step"]
    assert 0 < step < 150
    assert not (killed / "model").exists()

    for out in (killed, whole):
        (ended,) = ranks.run(1, "distributed_cases:command", "train", *flags, "--out", out)
        assert ended.status == 0, ended
    a, b = load_checkpoint(whole / "checkpoint.pt"), load_checkpoint(killed / "checkpoint.pt")
    for key in ("model", "optimizer", "rng", "samples"):
        assert_same(a[key], b[key], key)
    assert b["position"]["step"] == 150
    model = "model/model.safetensors"
    assert (whole / model).read_bytes() == (killed / model).read_bytes()
    one, two = (
        [
            {k: v for k, v in row.items() if "second" not in k}
            for row in read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (whole, killed)
    )
    assert one == two


HOLDER = """
import sys
from training_cases import prepare
run = prepare(sys.argv[1], sys.argv[2])
print("prepared", flush=True)
sys.stdin.read()
"""


def test_two_processes_in_one_folder_are_refused(tmp_path, text):
    """The second one changes nothing; the folder is free again when the first is killed."""
    folder = tmp_path / "run"
    paths = [environment()["PYTHONPATH"], str(Path(__file__).parent)]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder, text],
        env={**environment(), "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with first:
        assert first.stdout.readline() == "prepared\n"
        before = files(folder)
        with pytest.raises(UserError, match=f"out: another process is training in {folder}"):
            prepare(folder, text)
        second = tidegate("train", *FLAGS, "--steps=6", text, "--out", folder, check=False)
        assert second.returncode == 2
        assert second.stderr.splitlines()[-1].startswith("tidegate: out: another process")
        assert files(folder) == before
        first.kill()
    run = prepare(folder, text)
    again = prepare(folder, text)  # this process may
    assert run.trainer.run(quiet=True)
    assert again.folder.path == run.folder.path


def test_a_finished_run_is_left_as_it_is(tmp_path, text):
    run = prepare(tmp_path / "run", text)
    run.trainer.run(quiet=True)
    score = finish(run)
    before = files(tmp_path / "run")
    again = prepare(tmp_path / "run", text)
    again.trainer.run(quiet=True)
    assert finish(again) == score
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    "damage", ["stale", "gone", "no-weights", "cut", "another-config", "empty"]
)
def test_the_exported_model_is_written_again_where_it_is_another(tmp_path, text, damage):
    """A write that failed or was killed, or more steps since: a finished run's model/ is the
    weights of its last step, or becomes it."""
    folder = tmp_path / "run" / "model"
    run = prepare(tmp_path / "run", text, schedule="constant")
    run.trainer.run(quiet=True)
    finish(run)
    if damage == "stale":
        older = files(folder)
        run = prepare(tmp_path / "run", text, schedule="constant", steps=9)
        run.trainer.run(quiet=True)
        finish(run)
        for name, content in older.items():
            Path(name).write_bytes(content)
    elif damage == "gone":
        shutil.rmtree(folder)
    elif damage == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif damage == "no-weights":
        (folder / "model.safetensors").unlink()
    elif damage == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-9])
    else:
        (folder / "config.json").write_text("{}")
    steps = {"steps": 9} if damage == "stale" else {}
    again = prepare(tmp_path / "run", text, schedule="constant", **steps)
    assert not again.is_exported()
    rows = len(read_metrics(again.folder.metrics))
    finish(again)
    assert again.is_exported()
    assert len(read_metrics(again.folder.metrics)) == rows  # what was scored is not scored again
    assert_same(CausalLM.load(folder).state_dict(), again.trainer.model.state_dict())


def test_a_finished_run_can_be_given_more_steps(tmp_path, text):
    prepare(tmp_path / "run", text, schedule="constant").trainer.run(quiet=True)
    longer = prepare(tmp_path / "run", text, schedule="constant", steps=9)
    assert longer.resumed
    longer.trainer.run(quiet=True)
    whole = prepare(tmp_path / "whole", text, schedule="constant", steps=9)
    whole.trainer.run(quiet=True)
    assert_same(longer.trainer.model.state_dict(), whole.trainer.model.state_dict())


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path, text):
    first = prepare(tmp_path / "run", text, steps=4)
    assert not first.begins_anew
    first.trainer.run(quiet=True)
    assert not prepare(tmp_path / "run", text, steps=4).begins_anew
    first.folder.checkpoint.unlink()
    again = prepare(tmp_path / "run", text, steps=4)
    assert again.begins_anew
    assert not again.resumed
    assert again.folder.metrics_size() == 0


def test_a_finished_run_keeps_its_configuration(tmp_path, text):
    """What it was trained with, whatever is asked for later."""
    prepare(tmp_path / "run", text, steps=4).trainer.run(quiet=True)
    before = files(tmp_path / "run")
    again = prepare(tmp_path / "run", text, steps=2, threads=1)
    assert again.trainer.progress() == 1.0
    assert files(tmp_path / "run") == before


def test_a_failure_leaves_no_folder_behind(tmp_path, text, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("tidegate.training.runs.Trainer", fails)
    with pytest.raises(MemoryError):
        prepare(tmp_path / "run", text)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text):
    run = prepare(tmp_path / "run", text, steps=4)
    with torch.no_grad():
        run.trainer.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"the loss is nan at step 4: lower --lr"):
        run.trainer.run(quiet=True)
    assert not run.folder.checkpoint.exists()


def test_weights_that_are_not_finite_replace_nothing(tmp_path, text):
    """The last update may make them so, of which no loss tells: the checkpoint and the model before
    stay."""
    run = prepare(tmp_path / "run", text, schedule="constant", steps=4)
    run.trainer.run(quiet=True)
    finish(run)
    before = {**files(run.folder.model), "checkpoint": run.folder.checkpoint.read_bytes()}
    longer = prepare(tmp_path / "run", text, schedule="constant", steps=8, checkpoint_every=1)
    with torch.no_grad():
        longer.trainer.model.norm.weight[0] = float("inf")
    for writes in (longer.trainer.save, longer.trainer.validate):
        with pytest.raises(UserError, match=r"norm.weight holds numbers that are not finite"):
            writes()
    after = {**files(run.folder.model), "checkpoint": run.folder.checkpoint.read_bytes()}
    assert after == before


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, text):
    run = prepare(tmp_path / "run", text, steps=4)
    run.trainer.model.norm.weight.register_hook(lambda g: torch.full_like(g, float("nan")))
    with pytest.raises(UserError, match=r"train: the (loss|gradient's norm) is nan at step 4"):
        run.trainer.run(quiet=True)
    assert not run.folder.checkpoint.exists()


def test_a_model_that_is_not_finite_is_said_to_be(tmp_path, text):
    run = prepare(tmp_path / "run", text, steps=4)
    run.trainer.run(quiet=True)
    finish(run)
    with torch.no_grad():
        run.trainer.model.embedding.weight.fill_(float("nan"))
    run.trainer.model.save(run.folder.model)
    with pytest.raises(UserError, match=r"weight holds numbers that are not finite"):
        load_trained(str(run.folder.model), device="cpu")


def test_a_refused_start_leaves_no_tokenizer(tmp_path, text):
    """One learnt for settings that were refused would be the next run's."""
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UserError):
        prepare(folder, text, tokenizer="bpe:300", context=10**6)
    assert not (folder / "tokenizer.json").exists()


def _refused(tmp_path: Path, text: Path | str, message: str, **changes) -> None:
    before = files(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / "run", text, **changes)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before


def test_a_setting_that_a_run_did_not_know_yet_has_its_default(tmp_path, text):
    prepare(tmp_path / "run", text).trainer.run(quiet=True)
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    for part, name in (("train", "grad_accum"), ("model", "norm_eps")):
        del config[part][name]
    file.write_text(json.dumps(config))
    assert prepare(tmp_path / "run", text).trainer.progress() >= 1.0


def test_a_run_whose_settings_had_other_names_goes_on(tmp_path):
    """token_dtype was dtype."""
    (np.arange(4000, dtype=np.uint32) % 50).tofile(tmp_path / "ids.bin")
    changes = {"token_dtype": "uint32"}
    assert prepare(tmp_path / "run", tmp_path / "ids.bin", **changes).trainer.run(quiet=True)
    file = tmp_path / "run" / "config.json"
    values = json.loads(file.read_text())
    values["train"]["dtype"] = values["train"].pop("token_dtype")
    file.write_text(json.dumps(values))
    for names in ({}, changes, {"dtype": "uint32"}):
        run = prepare(tmp_path / "run", tmp_path / "ids.bin", **names)
        assert run.resumed
        assert run.config.token_dtype == "uint32"
    assert load_trained(str(tmp_path / "run"), "cpu").train.token_dtype == "uint32"
    with pytest.raises(UserError, match="token_dtype: 'uint32', now 'uint16'"):
        prepare(tmp_path / "run", tmp_path / "ids.bin", token_dtype="uint16")


def test_a_checkpoint_with_more_about_its_position_goes_on(tmp_path, text):
    """Earlier versions kept the steps of the last validation and checkpoint there."""
    run = prepare(tmp_path / "run", text)
    assert run.trainer.run(quiet=True)
    content = load_checkpoint(run.folder.checkpoint)
    content["position"] |= {"last_eval_step": 3, "last_checkpoint_step": 6}
    save_checkpoint(run.folder.checkpoint, content)
    assert prepare(tmp_path / "run", text).trainer.position == run.trainer.position


def test_another_configuration_is_refused(tmp_path, text):
    prepare(tmp_path / "run", text).trainer.run(quiet=True)
    _refused(
        tmp_path,
        text,
        r"run holds a run of another configuration \(dim: 16, now 32\): name another --out",
        model={"dim": 32},
    )
    _refused(tmp_path, text, r"\(lr: 0.003, now 0.1; seed: 1, now 5\)", lr=0.1, seed=5)


def test_changed_text_is_refused(tmp_path, text):
    prepare(tmp_path / "run", text).trainer.run(quiet=True)
    write_text(text, seed=7)
    _refused(tmp_path, text, r"the content of .*text.txt changed")


def test_a_truncated_checkpoint_is_refused(tmp_path, text):
    run = prepare(tmp_path / "run", text)
    run.trainer.run(quiet=True)
    whole = run.folder.checkpoint.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        run.folder.checkpoint.write_bytes(whole[:size])
        message = rf"checkpoint.pt: the checkpoint is truncated or damaged \({size} bytes\)"
        _refused(tmp_path, text, message)
        with pytest.raises(UserError, match="truncated or damaged"):
            load_trained(str(tmp_path / "run"), "cpu")


def test_a_checkpoint_of_another_model_is_refused(tmp_path, text):
    prepare(tmp_path / "run", text).trainer.run(quiet=True)
    other = prepare(tmp_path / "other", text, model={"dim": 24})
    other.trainer.run(quiet=True)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    checkpoint.write_bytes(other.folder.checkpoint.read_bytes())
    _refused(tmp_path, text, r"checkpoint.pt: the checkpoint is of another model")
    with pytest.raises(UserError, match=r"checkpoint.pt: does not fit config.json beside it"):
        load_trained(str(tmp_path / "run"), "cpu")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, text):
    (tmp_path / "file").write_text("here first")
    with pytest.raises(UserError, match=r"out: cannot write to the run folder .*file.run"):
        prepare(tmp_path / "file" / "run", text)
    assert (tmp_path / "file").read_text() == "here first"


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "loss.png", "model"])
def test_a_folder_with_files_that_a_run_would_overwrite_is_refused(name, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}\n")
    _refused(tmp_path, text, rf"run holds {name} but no config.json: a run would overwrite")


def test_a_broken_configuration_is_refused(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{broken")
    _refused(tmp_path, text, r"config.json: not valid JSON")


def test_bad_data_leaves_no_folder_behind(tmp_path, text):
    write_text(text, 30)
    _refused(
        tmp_path,
        text,
        r"is too short: its training part has 27 tokens, .*context of 64",
        context=64,
    )
    _refused(tmp_path, tmp_path / "gone", "no such file or folder")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_is_refused(tmp_path, text):
    _refused(tmp_path, text, "LMConfig: mixer: 'hgrn9' is unknown", model={"mixer": "hgrn9"})
    _refused(tmp_path, text, "LMConfig: unknown key 'width'", model={"width": 3})
    _refused(tmp_path, text, "the model's vocabulary is 100", model={"vocab_size": 100})


def test_a_failed_write_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"value": torch.ones(3)})
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    message = "cannot write the checkpoint: No space left on device; the earlier one is untouched"
    with pytest.raises(UserError, match=message):
        save_checkpoint(path, {"value": torch.zeros(3)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_left_by_a_kill_are_cleared(tmp_path):
    (tmp_path / ".checkpoint.pt.abc").write_bytes(b"half")
    RunFolder(tmp_path).make()
    assert list(tmp_path.iterdir()) == []
