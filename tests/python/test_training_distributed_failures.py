"""Several processes, of which one raises, is killed, hangs, finds its disk full or does not come:
all end with one line that names it, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.ranks import Ended, Ranks, free_port
from test_training_distributed import weights
from test_training_runs import assert_same
from training_cases import FLAGS, environment, write_text

from tidegate.training import UserError, prepare_run, runs
from tidegate.training.checkpoint import RunFolder, read_metrics

pytestmark = pytest.mark.xdist_group("ranks")
FAILING = "distributed_cases:failing"
COMMAND = "distributed_cases:command"
AGAIN = "the same command goes on from the last checkpoint"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text, ranks) -> Path:
    """A run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ended = ranks.run(2, COMMAND, *flags(text, out))
    assert [each.status for each in ended] == [0, 0], ended
    return out


def flags(text: Path, out: Path, *more: str) -> list[str]:
    """A run of ten steps with a checkpoint every third."""
    asked = ["--steps=10", "--checkpoint-every=3", "--quiet", "--parallel=ddp", *more]
    return ["train", str(text), "--out", str(out), *FLAGS, *asked]


def lines(ended: list[Ended]) -> list[str]:
    """What the processes said in tidegate's name."""
    said = "".join(each.stderr for each in ended).splitlines()
    return [line.removeprefix("tidegate: ") for line in said if line.startswith("tidegate: ")]


def goes_on(ranks: Ranks, out: Path, whole: Path, text: Path, *more: str) -> None:
    """The run in `out`, started again, ends as `whole`, one that nothing happened to."""
    ended = ranks.run(2, COMMAND, *flags(text, out, *more))
    assert [each.status for each in ended] == [0, 0], ended
    assert_same(weights(out), weights(whole))
    rows = [read_metrics(folder / "metrics.jsonl")[-1] for folder in (out, whole)]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert not list(out.rglob("*.tmp"))


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on(tmp_path, text, whole, ranks):
    ended = ranks.run(2, FAILING, "kill", 1, 8, *flags(text, tmp_path / "run"))
    assert [each.status for each in ended] == [2, -9]
    (said,) = lines(ended)
    assert said.startswith("train: rank 1 of 2 on ")
    assert said.endswith(f" is gone at step 8, killed or crashed: {AGAIN}")
    assert RunFolder(tmp_path / "run").choose().step in (3, 6)  # 6 may not have been whole yet
    goes_on(ranks, tmp_path / "run", whole, text)


def test_one_of_four_that_is_killed_is_named(tmp_path, text, ranks):
    more = ("--parallel=fsdp", "--batch-size=4")
    ended = ranks.run(4, FAILING, "kill", 3, 5, *flags(text, tmp_path / "run", *more))
    assert [each.status for each in ended] == [2, 2, 2, -9]
    (said,) = lines(ended)
    assert said.startswith("train: rank 3 of 4 on ")


def test_where_rank_0_is_killed_one_of_the_others_says_so(tmp_path, text, ranks):
    """Rank 0, which holds the store that they met at."""
    more = ("--batch-size=4",)
    ended = ranks.run(4, FAILING, "kill", 0, 5, *flags(text, tmp_path / "run", *more))
    assert [each.status for each in ended] == [-9, 2, 2, 2]
    (said,) = lines(ended)
    assert said.startswith("train: rank 0 of 4 on ")


@pytest.mark.parametrize(("rank", "count"), [(1, 2), (0, 4)])
def test_a_rank_that_raises_says_so_and_ends_the_others(tmp_path, text, ranks, rank, count):
    ended = ranks.run(count, FAILING, "raise", rank, 5, *flags(text, tmp_path / "run"))
    failed = ended.pop(rank)
    assert [each.status for each in ended] == [2] * (count - 1)
    (said,) = lines([failed, *ended])
    assert said.startswith(f"rank {rank} of {count} on ")
    assert said.endswith(": ValueError: boom: the traceback is this process's")
    assert not any("Traceback" in each.stderr for each in ended)
    assert 'raise ValueError("boom")' in failed.stderr


HANGING = {"hang": 1, "stop": 0}


@pytest.fixture(scope="module")
def hung(tmp_path_factory, text, ranks) -> dict[str, list[Ended]]:
    """How runs end of which a rank hangs: at the same time, since all of them wait."""
    folder = tmp_path_factory.mktemp("hung")
    scenarios = [
        (2, FAILING, how, rank, 5, *flags(text, folder / how, "--timeout=5"))
        for how, rank in HANGING.items()
    ]
    return dict(zip(HANGING, ranks.run_together(*scenarios), strict=True))


@pytest.mark.parametrize(("how", "rank"), HANGING.items())
def test_a_rank_that_hangs_is_named_and_ended(hung, how, rank):
    """One that would sleep for ten minutes; one that is stopped, with its threads and the store
    that all met at, and adds nothing when it wakes after the other has ended."""
    ended = hung[how]
    assert [each.status for each in ended] == [2, 2]
    (said,) = lines(ended)
    assert said.startswith(f"train: rank {rank} of 2 on ")
    assert " did not answer for 5 s (--timeout) at step 5: " in said


def test_a_signal_to_one_stops_all_with_a_checkpoint(tmp_path, text, ranks):
    ended = ranks.run(2, FAILING, "terminate", 1, 4, *flags(text, tmp_path / "run"))
    assert [each.status for each in ended] == [130, 130]
    assert not lines(ended)
    assert RunFolder(tmp_path / "run").choose().step == 5


def test_cuda_graph_with_several_processes_is_said(capsys):
    """By rank 0, which alone prepares a run. (On CPUs the flag is refused.)"""
    group = SimpleNamespace(mode="ddp", device=lambda _: torch.device("cuda"))
    config = SimpleNamespace(device="auto", cuda_graph=True)
    runs._check_graph(config, SimpleNamespace(cuda_graph=True), group)
    said = capsys.readouterr().err
    assert said.endswith(" --parallel ddp are not replayed from a graph: the run goes on without\n")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, text, ranks):
    ended = ranks.run(2, FAILING, "write-full", 1, 2, *flags(text, tmp_path / "run"))
    assert [each.status for each in ended] == [2, 2]
    (said,) = lines(ended)
    assert "step-6: cannot write the checkpoint: No space left on device" in said
    assert RunFolder(tmp_path / "run").choose().step == 3


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, text, whole, ranks):
    ended = ranks.run(2, FAILING, "write-kill", 1, 2, *flags(text, tmp_path / "run"))
    assert [each.status for each in ended] == [2, -9]
    assert len(lines(ended)) == 1
    assert RunFolder(tmp_path / "run").choose().step == 3
    assert (tmp_path / "run" / "checkpoints" / ".step-6.tmp").exists()
    goes_on(ranks, tmp_path / "run", whole, text)


def test_what_rank_0_takes_its_time_for_is_waited_for_in_silence(ranks):
    ended = ranks.run(2, "distributed_cases:wait_for_rank_0")
    assert [tuple(each) for each in ended] == [(7, "", 7)] * 2


def test_a_process_that_does_not_come_is_named(tmp_path, text, ranks):
    more = {"WORLD_SIZE": "3", "seconds": 30}
    ended = ranks.run(2, COMMAND, *flags(text, tmp_path / "run", "--timeout=3"), **more)
    assert [each.status for each in ended] == [2, 2]
    (said,) = lines(ended)
    assert said.startswith("train: rank 2 of 3 did not come within 3 s: start all processes")
    assert not (tmp_path / "run").exists()


def test_a_node_that_cannot_be_reached_is_said(tmp_path, text, ranks):
    port = str(free_port())
    more = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": port}
    ended = ranks.run(1, COMMAND, *flags(text, tmp_path / "run", "--timeout=1"), **more)
    (said,) = lines(ended)
    assert said.startswith("train: rank 1 on ")
    assert f"cannot reach 127.0.0.1:{port} within 1 s: start all 2 processes" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--parallel=none"], "parallel: expected ddp (every process holds the model) or fsdp"),
        (["--batch-size=5"], "batch-size: expected a multiple of 2 processes times grad-accum 1"),
        (["--parallel=fdsp"], "parallel: expected one of none, ddp, fsdp, got 'fdsp'"),
        (["--device=cuda:0"], "device: "),
        (["--timeout=0"], "timeout: expected more than 0, got 0.0"),
        (["--mixer=nothing"], "mixer"),
        (
            ["--precision=bf16-weights"],
            "precision: expected one of fp32, tf32, bf16 with --parallel ddp, got 'bf16-weights'",
        ),
        (["--init-from=/nowhere"], "init-from: /nowhere: no such folder"),
        (["--cuda-graph"], "cuda-graph: expected a CUDA device"),
    ],
)
def test_what_does_not_fit_is_said_once(tmp_path, text, ranks, more, message):
    ended = ranks.run(2, COMMAND, *flags(text, tmp_path / "run", *more))
    assert [each.status for each in ended] == [2, 2]
    (said,) = lines(ended)
    assert message in said
    assert not (tmp_path / "run").exists()


def test_one_process_takes_no_mode(tmp_path, text):
    with pytest.raises(UserError, match=r"parallel: ddp takes processes that torchrun starts"):
        prepare_run(str(tmp_path / "run"), {"data": str(text), "parallel": "ddp"}, {})


def test_another_run_in_the_folder_is_refused_once(tmp_path, text, ranks):
    folder = RunFolder(tmp_path / "run")
    folder.make()
    ended = ranks.run(2, COMMAND, *flags(text, tmp_path / "run"))
    assert [each.status for each in ended] == [2, 2]
    (said,) = lines(ended)
    assert said.startswith("out: another process is training in ")


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(tmp_path, text, ranks):
    """torchrun itself, with a restart: the second try ends the run."""
    program = Path(__file__).with_name("distributed_cases.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["kill", "1", "8", *flags(text, tmp_path / "run")]
    ended = subprocess.run(
        [ranks.python, *launch, "--max-restarts=1", str(program), *arguments],
        capture_output=True,
        text=True,
        env={**environment(), "ONLY_FIRST": "1"},
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("tidegate: ")]
    assert len(said) == 1
    assert " is gone at step 8, killed or crashed" in said[0]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [10, 10] or rows[-1]["step"] == 10
    assert not os.path.exists(tmp_path / "run" / "checkpoints" / ".step-9.tmp")
