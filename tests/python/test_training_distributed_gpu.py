"""Training on two GPUs, by NCCL: the curve of one, another number of them, one that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from test_training_distributed import ALIKE, assert_alike, metrics, weights
from test_training_distributed_failures import COMMAND, FAILING, flags, lines
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
CURVES = {
    "hgrn": {"model": MODELS["hgrn"]},
    "hgrn2": {"model": MODELS["hgrn2"]},
    "fox": {"model": MODELS["fox"]},
    "muon": {"model": MODELS["hgrn2"], "optimizer": "muon", "precision": "bf16"},
}
PARTS = {**CUDA, "model": MODELS["hgrn2"], "schedule": "constant", "eval_every": 0}


@pytest.fixture(scope="module")
def gpus(ranks) -> Ranks:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"takes two GPUs, found {torch.cuda.device_count()}")
    return ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def ran(gpus: Ranks, count: int, runs: list) -> None:
    ended = gpus.run(count, TRAIN_ALL, runs, seconds=120)
    assert [each.status for each in ended] == [0] * count, ended


def runs_of(folder: Path, text: Path, modes: tuple[str, ...]) -> list:
    """Every curve that is compared, by every mode."""
    return [
        (folder / f"{name}-{mode}", text, {**CUDA, **changes, "parallel": mode})
        for name, changes in CURVES.items()
        for mode in modes
    ]


@pytest.fixture(scope="module")
def curves(gpus, text, tmp_path_factory) -> Path:
    """The runs of CURVES and the first part of PARTS, by as few processes as there can be: each
    begins with a second or two of CUDA and NCCL."""
    folder = tmp_path_factory.mktemp("curves")
    ran(gpus, 1, [*runs_of(folder, text, ("none",)), (folder / "whole", text, PARTS)])
    part = (folder / "parts", text, {**PARTS, "steps": 4, "parallel": "fsdp"})
    ran(gpus, 2, [*runs_of(folder, text, ("ddp", "fsdp")), part])
    return folder


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_two_gpus_train_as_one_does(curves, name, mode):
    bound = 3e-2 if "precision" in CURVES[name] else BOUND
    assert_alike(metrics(curves / f"{name}-{mode}"), metrics(curves / f"{name}-none"), bound)


def test_one_gpu_goes_on_from_two_and_two_from_one(curves, text, gpus):
    out = curves / "parts"
    ran(gpus, 1, [(out, text, {**PARTS, "steps": 8})])
    ran(gpus, 2, [(out, text, {**PARTS, "parallel": "ddp"})])
    found = weights(out)
    for name, value in weights(curves / "whole").items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=BOUND, msg=name)


def test_a_process_that_hangs_is_named(tmp_path, text, gpus):
    asked = flags(text, tmp_path / "run", "--device=cuda", "--parallel=fsdp", "--timeout=5")
    ended = gpus.run(2, FAILING, "hang", 1, 5, *asked)
    assert ended[0].status == 2
    (line,) = lines(ended)
    assert line.startswith("train: rank 1 of 2 on ")
    assert "did not answer for 5 s" in line


def test_a_process_that_is_killed_is_named_and_the_run_goes_on(tmp_path, text, gpus):
    more = ("--device=cuda", "--parallel=fsdp")
    ended = gpus.run(2, FAILING, "kill", 1, 8, *flags(text, tmp_path / "run", *more))
    assert [each.status for each in ended] == [2, -9]
    (line,) = lines(ended)
    assert line.startswith("train: rank 1 of 2 on ")
    assert re.search(r"is gone at step [89],", line)  # the host runs ahead of its device
    for name in ("run", "whole"):
        ended = gpus.run(2, COMMAND, *flags(text, tmp_path / name, *more))
        assert [each.status for each in ended] == [0, 0], ended
    found = weights(tmp_path / "run")
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
