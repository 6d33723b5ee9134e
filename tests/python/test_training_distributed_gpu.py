"""Training on two GPUs, by NCCL: the curve of one, another number of them, one that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from test_training_distributed import ALIKE, assert_alike, metrics, weights
from test_training_distributed_failures import FAILING, flags, goes_on, lines
from training_cases import write_text

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]
TRAIN_ALL = "distributed_cases:train_all"
# Products of fewer rows are summed in another order, too.
BOUND = 2e-4
CUDA = {**ALIKE, "device": "cuda", "context": 64, "eval_tokens": 2000}
MODELS = {
    "hgrn": {"mixer": "hgrn", "dim": 64},
    "hgrn2": {"mixer": "hgrn2", "mixer_options": {"num_heads": 2}, "dim": 64},
    "fox": {"mixer": "fox", "mixer_options": {"num_heads": 2}, "dim": 64},
}


@pytest.fixture
def gpus(ranks) -> Ranks:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"takes two GPUs, found {torch.cuda.device_count()}")
    return ranks


@pytest.fixture
def text(tmp_path) -> Path:
    return write_text(tmp_path / "text.txt")


def ran(gpus: Ranks, count: int, runs: list) -> None:
    ended = gpus.run(count, TRAIN_ALL, runs, seconds=120)
    assert [each.status for each in ended] == [0] * count, ended


def test_two_gpus_train_as_one_does(tmp_path, text, gpus):
    ran(gpus, 1, [(tmp_path / n, text, {**CUDA, "model": m}) for n, m in MODELS.items()])
    runs = [
        (tmp_path / f"{name}-{mode}", text, {**CUDA, "model": model, "parallel": mode, **changes})
        for name, model in MODELS.items()
        for mode, changes in (("ddp", {"grad_accum": 2}), ("fsdp", {}))
    ]
    ran(gpus, 2, runs)
    for out, _, changes in runs:
        assert_alike(metrics(out), metrics(tmp_path / changes["model"]["mixer"]), BOUND)


@pytest.mark.parametrize("precision", ["bf16"])
def test_muon_and_bf16_on_two_gpus(tmp_path, text, gpus, precision):
    changes = {**CUDA, "model": MODELS["hgrn2"], "optimizer": "muon", "precision": precision}
    ran(gpus, 1, [(tmp_path / "one", text, changes)])
    runs = [(tmp_path / mode, text, {**changes, "parallel": mode}) for mode in ("ddp", "fsdp")]
    ran(gpus, 2, runs)
    for out, _, _ in runs:
        assert_alike(metrics(out), metrics(tmp_path / "one"), 1e-2)


def test_one_gpu_goes_on_from_two_and_two_from_one(tmp_path, text, gpus):
    changes = {**CUDA, "model": MODELS["hgrn2"], "schedule": "constant", "eval_every": 0}
    ran(gpus, 1, [(tmp_path / "whole", text, changes)])
    out = tmp_path / "parts"
    ran(gpus, 2, [(out, text, {**changes, "steps": 4, "parallel": "fsdp"})])
    ran(gpus, 1, [(out, text, {**changes, "steps": 8, "parallel": "none"})])
    ran(gpus, 2, [(out, text, {**changes, "parallel": "ddp"})])
    found = weights(out)
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=BOUND, msg=name)


@pytest.mark.parametrize(("how", "said"), [("kill", "is gone"), ("hang", "did not answer for 1 s")])
def test_a_process_that_is_gone_or_hangs_is_named(tmp_path, text, gpus, how, said):
    asked = flags(text, tmp_path / "run", "--device=cuda", "--parallel=fsdp", "--timeout=1")
    ended = gpus.run(2, FAILING, how, 1, 5, *asked)
    assert ended[0].status == 2
    (line,) = lines(ended)
    assert line.startswith("train: rank 1 of 2 on ")
    assert said in line
    if how == "kill":
        goes_on(gpus, tmp_path, text, "--device=cuda", "--parallel=fsdp")
