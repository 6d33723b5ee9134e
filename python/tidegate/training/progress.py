"""What a person sees while a model trains."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trainer import Trainer


class Progress:
    """A bar with loss and tokens/s on a terminal; a line every ten seconds elsewhere.

    The bar counts steps, or the seconds of a wall-time budget. Losses are shown in the corpus's
    unit.
    """

    def __init__(self, trainer: Trainer, quiet: bool = False) -> None:
        self._trainer = trainer
        self._quiet = quiet
        self._tty = sys.stderr.isatty()
        self._bar = None
        self._last_line = time.monotonic()
        self._start_tokens = trainer.position.tokens
        self._start_seconds = trainer.position.seconds

    def __enter__(self) -> Progress:
        if self._tty and not self._quiet:
            from tqdm import tqdm

            self._bar = tqdm(
                total=1000,
                initial=round(1000 * self._trainer.progress()),
                bar_format="{desc} |{bar}| {percentage:3.0f}% [{elapsed}<{remaining}]{postfix}",
                dynamic_ncols=True,
                desc="training",
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _loss(self, nats: float) -> str:
        corpus = self._trainer.corpus
        return f"{nats / corpus.nats_per_unit:.3f} {corpus.unit}"

    def status(self) -> str:
        """Step, losses, speed, in one line."""
        trainer = self._trainer
        position = trainer.position
        seconds = max(position.seconds - self._start_seconds, 1e-9)
        speed = (position.tokens - self._start_tokens) / seconds
        parts = [f"step {position.step}"]
        if math.isfinite(trainer.loss):
            parts.append(f"loss {self._loss(trainer.loss)}")
        if trainer.valid is not None:
            parts.append(f"valid {self._loss(trainer.valid.nats)}")
            if trainer.valid.accuracy is not None:
                parts.append(f"accuracy {trainer.valid.accuracy:.1%}")
        parts.append(f"{speed:,.0f} tokens/s")
        return ", ".join(parts)

    def update(self) -> None:
        """Called after every step."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(self.status(), refresh=False)
            self._bar.update(round(1000 * self._trainer.progress()) - self._bar.n)
        elif time.monotonic() - self._last_line >= 10.0:
            self.report()

    def report(self) -> None:
        """Called when there is news; prints a line where there is no bar."""
        if self._quiet or self._bar is not None:
            return
        self._last_line = time.monotonic()
        done = 100 * self._trainer.progress()
        print(f"[{done:3.0f}%] {self.status()}", file=sys.stderr, flush=True)
