"""Steps replayed from a CUDA graph: the same training, and what is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import require_cuda
from training_cases import COPYING, prepare, write_text

from tidegate.training import TrainConfig, UserError
from tidegate.training.captured import CapturedStep
from tidegate.training.checkpoint import read_metrics
from tidegate.training.report import finish

SCHEDULED = {**COPYING, "schedule": "cosine", "warmup_steps": 4, "clip": 1.0}


@pytest.fixture
def cuda() -> None:
    require_cuda()


def trained(out, steps: int = 14, **changes):
    """The weights after a run, and the run."""
    run = prepare(out, **{**SCHEDULED, "device": "cuda", "steps": steps, **changes})
    assert run.trainer.run(quiet=True)
    return {name: p.detach().cpu() for name, p in run.trainer.model.named_parameters()}, run


def assert_close(a, b) -> None:
    """Equal but for the order of sums, which libraries may choose differently under capture."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["fox", "fox-pro", "hgrn2"])
def test_captured_steps_on_packed_documents_train_alike(tmp_path, cuda, mixer):
    (tmp_path / "text").mkdir()
    for n in range(24):
        write_text(tmp_path / "text" / f"{n}.txt", 100 + 40 * n, seed=n)
    settings = {"data": tmp_path / "text", "packed": True, "task_options": {}, "context": 64}
    settings["model"] = {"mixer": mixer, "mixer_options": {"num_heads": 2}, "dim": 64}
    losses = []
    for captures in (False, True):
        _, run = trained(tmp_path / f"{captures}", cuda_graph=captures, **settings)
        score = finish(run)
        rows = read_metrics(run.folder.metrics)
        losses.append([row["loss"] for row in rows if row["kind"] == "train"] + [score.nats])
    # The steps differ in the order of sums, and by default they are in bf16.
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"grad_accum": 2}, {"precision": "bf16"}], ids=str)
def test_captured_steps_train_alike(tmp_path, cuda, changes):
    eager, one = trained(tmp_path / "eager", cuda_graph=False, **changes)
    captured, two = trained(tmp_path / "captured", cuda_graph=True, **changes)
    if "precision" not in changes:
        assert_close(eager, captured)
    rows = [read_metrics(run.folder.metrics) for run in (one, two)]
    for left, right in zip(*rows, strict=True):
        assert left["step"] == right["step"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-2 if changes else 1e-3)
        if left["kind"] == "train":
            assert left["lr"] == pytest.approx(right["lr"], rel=1e-6)
            assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=5e-2)


@pytest.mark.gpu
def test_a_captured_run_resumes(tmp_path, cuda):
    whole, _ = trained(tmp_path / "whole", steps=14, cuda_graph=True, schedule="constant")
    trained(tmp_path / "parts", steps=8, cuda_graph=True, schedule="constant")
    parts, run = trained(tmp_path / "parts", steps=14, cuda_graph=True, schedule="constant")
    assert run.resumed
    assert_close(whole, parts)


@pytest.mark.gpu
def test_a_captured_run_goes_on_on_the_cpu(tmp_path, cuda):
    trained(tmp_path / "run", steps=6, cuda_graph=True)
    _, run = trained(tmp_path / "run", steps=8, device="cpu")
    assert run.resumed
    assert run.trainer.position.step == 8


@pytest.mark.gpu
def test_every_call_counts_once_and_results_are_kept(cuda):
    total = torch.zeros(3, device="cuda")

    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        total.add_(x)
        return (total * 2,)

    captured = CapturedStep(step, torch.device("cuda"))
    results = [captured(torch.full((3,), float(i)))[0] for i in range(8)]
    assert total.tolist() == [28.0] * 3
    assert [r[0].item() for r in results] == [2.0 * sum(range(i + 1)) for i in range(8)]
    with pytest.raises(ValueError, match=r"expected torch.float32 \(3,\) as at first, got"):
        captured(torch.zeros(4))


@pytest.mark.gpu
def test_sequences_of_differing_lengths_are_refused(tmp_path, cuda):
    options = {"min_length": 10, "max_length": 30}
    run = prepare(
        tmp_path / "run",
        "listops",
        task_options=options,
        context=29,
        model={"mixer": "hgrn"},
        device="cuda",
        cuda_graph=True,
    )
    with pytest.raises(UserError, match="expected sequences of one length, got listops"):
        run.trainer.run(quiet=True)


def test_the_cpu_refuses_the_flag(tmp_path):
    text = write_text(tmp_path / "text.txt")
    with pytest.raises(UserError, match="cuda-graph: expected a CUDA device"):
        prepare(tmp_path / "run", text, cuda_graph=True)


def test_muon_is_refused():
    with pytest.raises(UserError, match="cuda-graph: expected False with --optimizer muon"):
        TrainConfig(steps=1, optimizer="muon", cuda_graph=True)
