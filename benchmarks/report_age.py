"""Which results are older than the kernels that they measure, by git: report.py warns of them.

A later commit need not have changed a time. But a figure is of the commit it names, and this says
where a new run is due.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from report_tables import Record

# The folder of kernels/ that an op's kernels are in; an op's step has its op's.
FAMILIES = {
    "hgru": "scan",
    "linear_scan": "scan",
    "lru_scan": "scan",
    "wkv4": "scan",
    "copying_step": "scan",  # its layers are gated linear RNNs, by hgru
    "gated_linear_attention": "gla",
    "hgrn2": "gla",
    "gla_errors": "gla",
    "forgetting_attention": "attention",
    "gated_rnn": "rnn",
    "norm": "norm",
    "add_norm": "norm",
    "glu": "norm",
}


def measured_families(record: Record) -> set[str]:
    """Folders of kernels/: by the ops of its rows, its work or its kind; all for models."""
    names = {row["op"] for row in record.get("rows", ()) if "op" in row}
    names |= {
        run["name"].split("/")[1] for run in record.get("benchmarks", ()) if "/" in run["name"]
    }
    names |= {str(record.get(key, "")).split(" ")[0] for key in ("work", "kind")}
    found = {FAMILIES.get(name.removesuffix("_step"), FAMILIES.get(name)) for name in names}
    return (found - {None}) or {*FAMILIES.values(), "rotary"}


def measured_paths(record: Record) -> list[str]:
    """Folders of kernels/ whose code a result times, and what of them runs on other machines."""
    machine = record.get("machine", {})
    on_gpu = "gpu" in machine or str(machine.get("device", "")).startswith("cuda")
    folders = [f"kernels/{name}" for name in sorted({*measured_families(record), "common"})]
    elsewhere = [f"{folder}/{'cpu' if on_gpu else 'cuda'}" for folder in folders]
    if on_gpu:
        elsewhere.append("kernels/common/cpu_*")
    return [*folders, *(f":(exclude){path}" for path in elsewhere)]


def git(root: Path, *arguments: str) -> str | None:
    """What it prints; None when it fails, or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def warnings(root: Path) -> Iterator[str]:
    """A line for each result whose kernels have changed since; none outside a git checkout."""
    if git(root, "rev-parse", "HEAD") is None:
        return
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        named = str(record.get("commit") or record.get("context", {}).get("commit", ""))
        commit = named.removesuffix("+")
        paths = measured_paths(record)
        later = git(root, "rev-list", f"{commit}..HEAD", "--", *paths) if commit else None
        if later is None:
            yield f"{path.name}: its commit, {named or 'which it lacks'}, is not in this checkout"
        elif later:
            folders = ", ".join(p for p in paths if not p.startswith(":"))
            count = len(later.splitlines())
            yield f"{path.name}: commits since its own, {named}, that changed {folders}: {count}"
