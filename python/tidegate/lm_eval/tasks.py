"""`tidegate eval RUN --tasks ...`: lm_eval's tasks on a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from ..training.errors import UserError
from .model import TidegateLM


def run_tasks(
    run: str,
    tasks: list[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int | str | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> dict[str, Any]:
    """lm_eval's results of the model in folder `run` on `tasks`, by their names there.

    include_path: a folder with tasks of one's own. limit: how many documents of a task, or which
    part of them. Raises UserError for an unknown task or a run without a language model.
    """
    manager = _manager(tasks, include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(f"eval: tasks: lm_eval knows no {', '.join(unknown)}: lm_eval ls tasks")
    lm = TidegateLM(run, device=device, precision=precision, batch_size=batch_size)
    return simple_evaluate(
        model=lm,
        tasks=manager.match_tasks(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
    )


def _manager(tasks: list[str], include_path: str | None) -> TaskManager:
    """What knows the tasks: those of include_path where they suffice, since to read through all
    that come with lm_eval takes ten seconds."""
    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([task]) for task in tasks):
            return manager
    return TaskManager(include_path=include_path)


def described(results: dict[str, Any], as_json: bool) -> str:
    """lm_eval's table of the results, or their numbers as JSON."""
    if as_json:
        return json.dumps(results["results"], default=handle_non_serializable)
    groups = [make_table(results, "groups")] if results.get("groups") else []
    return "\n".join([make_table(results), *groups])


def write_results(results: dict[str, Any], folder: str) -> Path:
    """lm_eval.json in `folder`: everything that lm_eval returned."""
    path = Path(folder) / "lm_eval.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, default=handle_non_serializable)
    path.write_text(text + "\n", encoding="utf-8")
    return path
