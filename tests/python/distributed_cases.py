"""What the processes of test_training_distributed*.py do."""

from __future__ import annotations

from typing import Any


def command(*arguments: str) -> int:
    """`tidegate` with these arguments, but nothing is drawn."""
    from tidegate.cli import main
    from tidegate.training import report

    report.plot_run = lambda *_, **__: [True]
    return main(list(arguments))


def train(out: str, data: str, changes: dict[str, Any]) -> int:
    """A run of `training_cases.prepare` to its end; without its last score, where "finishes" among
    the changes is False."""
    from training_cases import prepare

    from tidegate.training.report import finish

    finishes = changes.pop("finishes", True)
    run = prepare(out, data, **changes)
    ended = run.trainer.run(quiet=True)
    if ended and finishes:
        finish(run)
    run.trainer.group.leave()
    return 0 if ended else 130


def train_all(runs: list[tuple[str, str, dict[str, Any]]]) -> int:
    """train() of each, one after the other."""
    return max(train(*each) for each in runs)


def train_compiled(runs: list[tuple[str, str, dict[str, Any]]]) -> int:
    """train_all() with blocks that are traced, but not compiled."""
    import torch

    inner = torch.compile  # which torch.nn.Module.compile calls
    torch.compile = lambda *given, **how: inner(*given, **{**how, "backend": "aot_eager"})
    return train_all(runs)


def wait_for_rank_0() -> int:
    """Rank 0 works for longer than the timeout, which is for collectives."""
    import time

    from tidegate.training.distributed import join

    group = join("ddp", device="cpu", timeout=2.0)
    value = group.first(lambda: time.sleep(3.0) or 7)
    group.leave()
    return value


def benchmark(*arguments: str) -> int:
    """benchmarks/distributed.py with these arguments."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from distributed import main

    return main(list(arguments))


def failing(how: str, rank: int, step: int, *arguments: str) -> int:
    """command() in which something happens to a rank at a step."""
    import os

    from tidegate.training.trainer import Trainer

    inner = Trainer._step
    if how == "stop":
        from tidegate.training import distributed, failures

        distributed.STAYS = failures.STAYS = failures.ANSWER = 1.0

    def step_or_fail(self: Any) -> None:
        if self.group.rank == rank and self.position.step == step:
            _FAILURES[how]()
        inner(self)

    if how.startswith("write-"):
        _fail_at_write(_FAILURES[how.removeprefix("write-")], rank, step)
    else:
        Trainer._step = step_or_fail
    if os.environ.get("ONLY_FIRST") and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        Trainer._step = inner
    return command(*arguments)


def _fail_at_write(failure: Any, rank: int, count: int) -> None:
    """In the thread that writes a rank's part of the checkpoint number `count`."""
    import os

    from torch.distributed.checkpoint import FileSystemWriter

    inner, written = FileSystemWriter.write_data, []

    def write_data(self: Any, *given: Any) -> Any:
        written.append(None)
        if os.environ["RANK"] == str(rank) and len(written) == count:
            failure()
        return inner(self, *given)

    FileSystemWriter.write_data = write_data


def _raise() -> None:
    raise ValueError("boom")


def _kill() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


def _hang() -> None:
    import time

    time.sleep(600)


def _stop() -> None:
    """Stands still, with all its threads, until a child wakes it when the others have ended."""
    import os
    import signal
    import time

    if os.fork() == 0:
        time.sleep(12)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _full() -> None:
    raise OSError(28, "No space left on device")


_FAILURES = {
    "raise": _raise,
    "kill": _kill,
    "terminate": _terminate,
    "hang": _hang,
    "stop": _stop,
    "full": _full,
}

if __name__ == "__main__":  # what torchrun starts
    import sys

    how, which, at, *rest = sys.argv[1:]
    sys.exit(failing(how, int(which), int(at), *rest))
