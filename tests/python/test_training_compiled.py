"""Training steps through torch.compile, and TF32: the same training, and runs that go on."""

from __future__ import annotations

import pytest
import torch
from conftest import require_cuda
from test_training_runs import assert_same
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from training_cases import COPYING, FLAGS, prepare, write_text

from tidegate.models import mixers
from tidegate.training import UserError
from tidegate.training.checkpoint import load_checkpoint, read_metrics
from tidegate.training.report import finish
from tidegate.training.runtime import set_products


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


@pytest.fixture(autouse=True)
def fresh():
    """Compiled code is a process's: each test begins without any, and with fp32 products."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    set_products("fp32")


def trained(out, **changes):
    """The weights after a run, and its metrics."""
    run = prepare(out, **{**COPYING, **changes})
    assert run.trainer.run(quiet=True)
    finish(run)
    rows = read_metrics(run.folder.metrics)
    return {name: p.detach().cpu() for name, p in run.trainer.model.named_parameters()}, rows


@pytest.mark.xdist_group("inductor")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_steps_train_alike(tmp_path, precision):
    settings = {"precision": precision, "steps": 10, "eval_every": 5, "clip": 1.0}
    eager, one = trained(tmp_path / "eager", **settings)
    torch._dynamo.utils.counters.clear()
    compiled, two = trained(tmp_path / "compiled", compile=True, **settings)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 2  # a block, the final norm; validation: none
    assert not counted["graph_break"]
    assert [row["kind"] for row in one] == [row["kind"] for row in two]
    for left, right in zip(one, two, strict=True):
        assert left["loss"] == pytest.approx(
            right["loss"], rel=1e-5 if precision == "fp32" else 1e-2
        )
    for name, weight in eager.items():
        if precision == "fp32":
            torch.testing.assert_close(compiled[name], weight, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("mixer", sorted(mixers()))
def test_every_mixer_s_block_can_be_traced(tmp_path, text, mixer, monkeypatch):
    """Once for all layers; with torch's own code for the backward graph, not a compiler's."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_(self, backend=counter))
    losses = []
    for name in ("eager", "compiled"):
        model = {"mixer": mixer, "mixer_options": {}, "dim": 16}
        settings = {"compile": name == "compiled", "steps": 10, "checkpoint_seconds": 0.0}
        run = prepare(tmp_path / name, text, model=model, **settings)
        run.trainer.run(quiet=True)
        losses.append(run.trainer.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert counter.frame_count == 1


def test_one_compilation_serves_blocks_that_are_computed_again(tmp_path, text, monkeypatch):
    counter = CompileCounter()
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_(self, backend=counter))
    settings = {"compile": True, "recompute": "blocks", "precision": "bf16"}
    run = prepare(tmp_path / "run", text, model={"layers": 4}, **settings)
    run.trainer._step()
    run.trainer._step()
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_compiled_run_resumes_bit_for_bit(tmp_path, text, ranks):
    """Dropout included, in processes of their own."""

    def train(*arguments: object) -> None:
        (ended,) = ranks.run(1, "distributed_cases:command", "train", *arguments)
        assert ended.status == 0, ended

    flags = [*FLAGS, "--compile", "--dropout=0.1", "--schedule=constant", "--quiet"]
    train(text, *flags, "--steps=7", "--out", tmp_path / "whole")
    train(text, *flags, "--steps=4", "--out", tmp_path / "parts")
    train("--steps=7", "--quiet", "--out", tmp_path / "parts")
    whole, parts = (load_checkpoint(tmp_path / n / "checkpoint.pt") for n in ("whole", "parts"))
    assert_same(whole["model"], parts["model"])
    assert_same(whole["rng"], parts["rng"])


def test_a_run_stays_compiled_or_not(tmp_path, text):
    prepare(tmp_path / "run", text, steps=2).trainer.run(quiet=True)
    with pytest.raises(UserError, match="compile: False, now True"):
        prepare(tmp_path / "run", text, steps=2, compile=True)


def test_the_precision_decides_how_products_are_computed(tmp_path):
    for precision, allowed in (("tf32", True), ("fp32", False), ("bf16", False)):
        prepare(tmp_path / precision, **{**COPYING, "precision": precision})
        assert torch.backends.cuda.matmul.allow_tf32 == allowed


def test_tf32_on_the_cpu_is_fp32(tmp_path):
    weights = [trained(tmp_path / p, precision=p, steps=3)[0] for p in ("tf32", "fp32")]
    assert_same(*weights)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
def test_compiled_steps_on_a_gpu(tmp_path, precision, captures):
    require_cuda()
    settings = {"device": "cuda", "steps": 14, "eval_every": 7, "cuda_graph": captures}
    _, one = trained(tmp_path / "plain", precision="fp32", **settings)
    _, two = trained(tmp_path / "compiled", precision=precision, compile=True, **settings)
    assert [row["kind"] for row in one] == [row["kind"] for row in two]
    for left, right in zip(one, two, strict=True):
        assert left["loss"] == pytest.approx(
            right["loss"], rel=1e-3 if precision == "fp32" else 2e-2
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["fox-pro", "gated-rnn", "hgrn", "hgrn2", "lru", "rwkv4"])
def test_compiled_blocks_of_other_mixers_on_a_gpu(tmp_path, text, mixer):
    require_cuda()
    losses = []
    for name in ("eager", "compiled"):
        model = {"mixer": mixer, "mixer_options": {}, "dim": 64}
        settings = {"compile": name == "compiled", "device": "cuda", "cuda_graph": True}
        settings |= {"checkpoint_seconds": 0.0}
        run = prepare(tmp_path / name, text, model=model, steps=10, context=64, **settings)
        run.trainer.run(quiet=True)
        losses.append(run.trainer.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
