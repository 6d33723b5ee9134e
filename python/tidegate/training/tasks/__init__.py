"""Tasks: sequences with an exact answer to each, drawn anew for every step, or small pictures.

One file a task. `task.Task` says what a task is; adding one is a dataclass and a line in `TASKS`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import UserError
from .copying import Copying, SelectiveCopying
from .images import Digits, FashionMnist
from .listops import ListOps
from .mqar import Mqar
from .task import Task

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Copying, SelectiveCopying, ListOps, Mqar, Digits, FashionMnist)
}

__all__ = [
    "TASKS",
    "Copying",
    "Digits",
    "FashionMnist",
    "ListOps",
    "Mqar",
    "SelectiveCopying",
    "Task",
    "make_task",
]


def make_task(name: str, options: dict[str, Any] | None = None) -> Task:
    """The task called `name` with some of its options changed.

    Raises:
        UserError: there is no such task or option, or the options make no task.
    """
    if name not in TASKS:
        raise UserError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    known = [field.name for field in dataclasses.fields(TASKS[name])]
    for key, value in (options or {}).items():
        if key not in known:
            raise UserError(f"task: {name} has no option {key!r}; it has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"task: {name}: {key}: expected an integer, got {value!r}")
    return TASKS[name](**(options or {}))
