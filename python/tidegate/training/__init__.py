"""Training on text and on tasks: data, schedules, the loop, run folders, baselines.

The command line (`tidegate train`) is a thin layer over `prepare_run`.
"""

import importlib
from typing import Any

_WHERE = {
    "Corpus": "data",
    "Recipe": "recipe",
    "Run": "runs",
    "Schedule": "schedules",
    "Task": "tasks",
    "Score": "evaluate",
    "TrainConfig": "config",
    "Trained": "trained",
    "Trainer": "trainer",
    "UserError": "errors",
    "build_optimizer": "optim",
    "forget_gates": "probes",
    "gate_parts": "probes",
    "generate_text": "generate",
    "load_corpus": "data",
    "load_trained": "trained",
    "make_task": "tasks",
    "prepare_run": "runs",
    "recipes": "recipe",
    "token_mixing": "probes",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    # Imported on first use: most of these need torch and numpy, and the command line does not.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
