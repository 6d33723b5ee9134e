"""Runs that keep fewer activations, whose weights are bf16, or whose loss is another."""

from __future__ import annotations

import pytest
import torch
from test_training_runs import assert_same
from training_cases import COPYING, prepare, write_text

from tidegate.models import CausalLM, LMConfig
from tidegate.training import TrainConfig, UserError, runtime
from tidegate.training.checkpoint import load_checkpoint
from tidegate.training.report import finish
from tidegate.training.scoring import score_run
from tidegate.training.trained import load_trained

LEAN = {"precision": "bf16-weights", "residual": "bf16", "recompute": "norms"}


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def weights_of(out, data, **settings):
    run = prepare(out, data, **settings)
    assert run.trainer.run(quiet=True)
    return run.trainer.model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputing_changes_no_weight(tmp_path, text, precision):
    runs = [
        weights_of(
            tmp_path / recompute,
            text,
            recompute=recompute,
            precision=precision,
            model={"dropout": 0.1},
        )
        for recompute in ("none", "norms", "blocks")
    ]
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_masters_resumes_bit_for_bit(tmp_path, text, optimizer):
    """In pieces, and with another choice of what is recomputed."""
    settings = {**LEAN, "optimizer": optimizer, "schedule": "constant"}
    whole = weights_of(tmp_path / "whole", text, **settings, steps=6)
    assert whole["blocks.0.glu.in_proj.weight"].dtype == torch.bfloat16
    assert whole["lower_bounds.logits"].dtype == torch.float32
    weights_of(tmp_path / "parts", text, **settings, steps=3)
    parts = weights_of(tmp_path / "parts", text, **{**settings, "recompute": "none"}, steps=6)
    assert_same(whole, parts)
    one, two = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts"))
    assert_same(one["optimizer"]["masters"], two["optimizer"]["masters"])


def test_a_model_of_bf16_weights_is_saved_and_scored(tmp_path, text):
    run = prepare(tmp_path / "run", text, **LEAN)
    assert run.trainer.run(quiet=True)
    finish(run)
    model = CausalLM.load(run.folder.model)
    assert {p.dtype for n, p in model.named_parameters() if "proj" in n} == {torch.bfloat16}
    trained = load_trained(str(run.folder.path), "cpu")
    assert_same(trained.model.state_dict(), model.state_dict())
    for precision in ("fp32", "bf16"):
        score = score_run(str(run.folder.path), device="cpu", precision=precision)
        assert score.nats == pytest.approx(run.trainer.valid.nats, rel=0.02)
    assert model.generate(torch.arange(4)[None], 3).shape == (1, 7)


@pytest.mark.parametrize(
    ("precision", "residual"), [("bf16", "bf16"), ("bf16-weights", "fp32"), ("bf16", "auto")]
)
def test_a_run_is_scored_as_it_was_trained(tmp_path, text, precision, residual):
    """At its end and by `tidegate eval`: under autocast the residual stream's dtype is a part of
    the model. In fp32 there is none to choose."""
    run = prepare(tmp_path / "run", text, steps=2, precision=precision, residual=residual)
    assert run.trainer.run(quiet=True)
    wanted = finish(run)
    assert score_run(str(tmp_path / "run"), precision="bf16", device="cpu").nats == wanted.nats
    trained = load_trained(str(tmp_path / "run"), "cpu")
    assert trained.compute_in("fp32") == "fp32"
    assert trained.model.residual_dtype is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_fp32_is_scored_in_fp32_where_nothing_else_is_asked(
    tmp_path, text, precision, monkeypatch
):
    """`tidegate eval RUN` gave another number than the run itself, on devices fast in bf16."""
    monkeypatch.setattr(runtime, "cpu_has_fast_bf16", lambda: precision == "fp32")
    run = prepare(tmp_path / "run", text, steps=2, precision=precision)
    assert run.trainer.run(quiet=True)
    score = score_run(str(tmp_path / "run"), device="cpu")
    # What was trained under autocast is scored as is faster here.
    assert (score.nats == finish(run).nats) == (precision == "fp32")


def test_a_checkpoint_without_masters_is_refused(tmp_path, text):
    weights_of(tmp_path / "run", text, **LEAN, steps=2)
    path = tmp_path / "run" / "checkpoint.pt"
    content = load_checkpoint(path)
    run = prepare(tmp_path / "again", text, **LEAN, steps=2)
    del content["optimizer"]["masters"]
    with pytest.raises(UserError, match="optimizer: masters: expected [0-9]+ tensors"):
        run.trainer.restore(content)


def test_smoothing_is_training_s_alone(tmp_path, text):
    plain = prepare(tmp_path / "plain", text).trainer
    smooth = prepare(tmp_path / "smooth", text, label_smoothing=0.3, z_loss=0.01).trainer
    losses = []
    for trainer in (plain, smooth):
        trainer._step()
        losses.append(float(trainer._losses[0]))
    assert losses[1] > losses[0] + 0.1
    smooth.model.load_state_dict(plain.model.state_dict())
    assert smooth.validate(256) == plain.validate(256)


def test_a_task_counts_answers_and_text_sees_no_logits(tmp_path, text, monkeypatch):
    seen = []
    forward = CausalLM.forward

    def look(*args, **given):
        out = forward(*args, **given)
        seen.append(out.logits is not None)
        return out

    monkeypatch.setattr(CausalLM, "forward", look)
    task = prepare(tmp_path / "task", **COPYING).trainer
    task._step()
    assert seen == [True]
    assert task._answers[0][1] > 0
    prepare(tmp_path / "text", text).trainer._step()
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": "fp16"}, "train: residual: expected one of auto, fp32, bf16, got 'fp16'"),
        (
            {"residual": "bf16", "precision": "fp32"},
            "train: residual: expected auto or fp32 without autocast, got 'bf16'",
        ),
        ({"recompute": "all"}, "train: recompute: expected one of none, norms, blocks, got 'all'"),
        (
            {"recompute": "norms", "compile": True},
            "train: recompute: expected none or blocks with --compile, got 'norms'",
        ),
        ({"label_smoothing": 2.0}, "train: label-smoothing: expected 0 to 1, got 2.0"),
        ({"z_loss": -1.0}, "train: z-loss: expected 0 or more, got -1.0"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**{"steps": 10, **changes})


def test_models_that_have_no_such_thing_are_named():
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="not of tidegate.models, got 'norms', 'auto'"):
        TrainConfig(steps=1, recompute="norms").prepare(linear)
    with pytest.raises(UserError, match="expected 0 for what is not a language model, got 0.1"):
        TrainConfig(steps=1, label_smoothing=0.1).prepare(linear)
    TrainConfig(steps=1).prepare(linear)
    model = CausalLM(LMConfig(dim=8, layers=1, dropout=0.1))
    with pytest.raises(UserError, match="whose numbers a graph cannot draw again, got 'blocks'"):
        TrainConfig(steps=1, cuda_graph=True, recompute="blocks").prepare(model)
