"""The programs of examples/, run as a user runs them (the C++ one: test_packaging.py builds it)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run_here

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"train.py", "generate.py", "embed_mixer.py"}
SMALL = ["--dim", "32", "--layers", "1", "--context", "32", "--batch-size", "4"]

pytestmark = pytest.mark.xdist_group("examples")


def run(program: str, *arguments: object) -> str:
    """What the program prints, in a process of its own."""
    command = [sys.executable, EXAMPLES / program, *arguments]
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, f"{program}: {result.stdout}{result.stderr}"
    return result.stdout


def run_printing(program: str, *arguments: object) -> str:
    """What it prints in this process."""
    result = run_here(EXAMPLES / program, *arguments)
    assert result.returncode == 0, f"{program}: {result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tide.txt"
    path.write_text("the tide turns twice a day. " * 40, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text: Path) -> tuple[Path, str]:
    """The folder of a trained model, and what training printed."""
    folder = text.parent / "model"
    return folder, run("train.py", text, "--out", folder, *SMALL, "--steps", 60, "--lr", 1e-2)


def test_train(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.5 * losses[0]
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_train_says_when_a_text_is_too_short(text: Path) -> None:
    with pytest.raises(AssertionError, match="has 1120 bytes: more than --context are needed"):
        run_printing("train.py", text, "--out", text.parent / "none", "--context", 5000)


def test_generate(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    sampled, likeliest = run_printing(
        "generate.py", folder, "the tide", "--tokens", 12
    ).splitlines()
    assert sampled.startswith("the tide")
    assert re.fullmatch(r"likeliest: the tide.{12}", likeliest)


def test_embed_mixer() -> None:
    printed = run_printing("embed_mixer.py", "--time", 32)
    errors = [float(error) for error in re.findall(r"squared error ([\d.]+)", printed)]
    assert errors[-1] < 0.02 < errors[0]
    assert printed.endswith("one token at a time gives the same predictions\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_says_what_it_shows_and_how_to_run_it(path: Path) -> None:
    assert path.name in TESTED
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert said is not None
    assert f"    python examples/{path.name}" in said
    assert "What is shown: " in said
