"""What a person sees while a model trains: the bar of a terminal, the lines of a log, nothing."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path

import pytest
from training_cases import COPYING, prepare, write_text

from tidegate.training.evaluate import Score
from tidegate.training.progress import Progress


class Terminal(io.StringIO):
    """Standard error as a terminal or a file shows it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def seen_on(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> Terminal:
    shown = Terminal(is_terminal)
    for name in ("COLUMNS", "LINES"):  # tqdm cuts its bar to them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_status_says_loss_and_speed(tmp_path, text):
    """Losses of bytes are in bits. The speed is this process's: a resumed run has read more."""
    trainer = prepare(tmp_path / "run", text).trainer
    trainer.position.tokens, trainer.position.seconds = 5_000, 10.0
    progress = Progress(trainer)
    assert progress.status() == "step 0, 0 tokens/s"

    trainer.position.step, trainer.position.tokens, trainer.position.seconds = 30, 11_000, 14.0
    trainer.loss = 1.5 * math.log(2)
    assert progress.status() == "step 30, loss 1.500 bits/byte, 1,500 tokens/s"
    trainer.valid = Score(1.25 * math.log(2), 100, 1.25)
    assert progress.status() == (
        "step 30, loss 1.500 bits/byte, valid 1.250 bits/byte, 1,500 tokens/s"
    )


def test_status_of_a_task_says_accuracy(tmp_path):
    trainer = prepare(tmp_path / "run", **COPYING).trainer
    trainer.position.step, trainer.loss = 10, 2.0
    trainer.valid = Score(1.75, 100, None, 0.625)
    assert Progress(trainer).status() == (
        "step 10, loss 2.000 nats/answer, valid 1.750 nats/answer, accuracy 62.5%, 0 tokens/s"
    )


def test_a_terminal_shows_a_bar_with_loss_and_speed(tmp_path, text, monkeypatch):
    trainer = prepare(tmp_path / "run", text, steps=20, eval_every=10).trainer
    shown = seen_on(monkeypatch, True)
    assert trainer.run()
    first, *_, last = shown.getvalue().split("\r")[1:]
    assert first.startswith("training |")
    assert "  0% [" in first
    wanted = (
        r"training \|.*\| 100% \[[^]]*\], step 20, loss \d\.\d{3} bits/byte, "
        r"valid \d\.\d{3} bits/byte, [\d,]+ tokens/s\s*"
    )
    assert re.fullmatch(wanted, last), last
    assert f"loss {trainer.loss / math.log(2):.3f} " in last
    assert shown.getvalue().count("\n") == 1  # no line between: they would tear the bar


def test_a_bar_of_a_resumed_run_goes_on(tmp_path, text, monkeypatch):
    trainer = prepare(tmp_path / "run", text, steps=20).trainer
    trainer.position.step = 15
    shown = seen_on(monkeypatch, True)
    assert trainer.run()
    assert " 75% [" in shown.getvalue().split("\r")[1]


def test_elsewhere_a_line_every_ten_seconds(tmp_path, text, monkeypatch):
    """Steps that take three seconds each: the fourth, the eighth ... of them writes a line."""
    trainer = prepare(tmp_path / "run", text, steps=20).trainer
    shown = seen_on(monkeypatch, False)
    monkeypatch.setattr(
        "tidegate.training.progress.time.monotonic", lambda: 3.0 * trainer.position.step
    )
    assert trainer.run()
    lines = shown.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"[{5 * step:3}%] step {step}" for step in (4, 8, 12, 16, 20)
    ]
    assert re.fullmatch(r"\[ 20%\] step 4, [\d,]+ tokens/s", lines[0])
    assert re.fullmatch(r"\[100%\] step 20, loss \d\.\d{3} bits/byte, [\d,]+ tokens/s", lines[-1])


def test_elsewhere_a_line_after_every_validation(tmp_path, text, monkeypatch):
    trainer = prepare(tmp_path / "run", text, steps=6, eval_every=2).trainer
    shown = seen_on(monkeypatch, False)
    assert trainer.run()
    lines = shown.getvalue().splitlines()
    assert [line[: len("[ 33%] step 2")] for line in lines] == ["[ 33%] step 2", "[ 67%] step 4"]
    assert all(re.search(r", valid \d\.\d{3} bits/byte, ", line) for line in lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_says_nothing(tmp_path, text, monkeypatch, is_terminal):
    trainer = prepare(tmp_path / "run", text, steps=6, eval_every=2).trainer
    shown = seen_on(monkeypatch, is_terminal)
    monkeypatch.setattr(
        "tidegate.training.progress.time.monotonic", lambda: 30.0 * trainer.position.step
    )
    assert trainer.run(quiet=True)
    assert shown.getvalue() == ""
