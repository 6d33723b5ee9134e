"""What the processes of test_training_distributed*.py do."""

from __future__ import annotations

from typing import Any


def command(*arguments: str) -> int:
    """`tidegate` with these arguments."""
    from tidegate.cli import main

    return main(list(arguments))


def train(out: str, data: str, changes: dict[str, Any]) -> int:
    """A run of `training_cases.prepare` to its end."""
    from training_cases import prepare

    from tidegate.training.report import finish

    run = prepare(out, data, **changes)
    ended = run.trainer.run(quiet=True)
    if ended:
        finish(run)
    run.trainer.group.leave()
    return 0 if ended else 130


def train_all(runs: list[tuple[str, str, dict[str, Any]]]) -> int:
    """train() of each, one after the other."""
    return max(train(*each) for each in runs)
