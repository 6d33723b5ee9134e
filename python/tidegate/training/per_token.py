"""Per-token loss L(i) and perplexity P(l) over context lengths (Forgetting Transformer, eq. 15)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ..models import CausalLM
from ..models._files import write_atomically
from .errors import UserError
from .pieces import logits_in_pieces


@dataclass(frozen=True)
class PerToken:
    """losses: L(i), nats, of the token that follows position i = 1 .. T, mean over `sequences`:
    float64 ``[T]``. trained: the context length of training; None: unknown."""

    losses: np.ndarray
    sequences: int
    trained: int | None = None

    @property
    def perplexities(self) -> np.ndarray:
        """P(l) = exp(mean of L(1) .. L(l)): float64 ``[T]``."""
        return np.exp(np.cumsum(self.losses) / np.arange(1, len(self.losses) + 1))

    def smoothed(self, window: int = 101) -> np.ndarray:
        """L(i) as the mean over a window around i, shorter at the ends: float64 ``[T]``."""
        sums = np.concatenate([[0.0], np.cumsum(self.losses)])
        places = np.arange(len(self.losses))
        low = np.maximum(places - window // 2, 0)
        high = np.minimum(places + window // 2 + 1, len(self.losses))
        return (sums[high] - sums[low]) / (high - low)

    @classmethod
    def read(cls, folder: Path) -> PerToken:
        """What write() wrote; several of them make one plot of `plots_context.plot_per_token`.

        Raises:
            UserError: the folder holds no such files.
        """
        try:
            table = np.loadtxt(folder / "per_token.csv", delimiter=",", skiprows=1, ndmin=2)
            values = json.loads((folder / "per_token.json").read_text(encoding="utf-8"))
            return cls(table[:, 1], values["sequences"], values["trained_context"])
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(f"{folder}: no numbers of eval --per-token: {error}") from error

    def write(self, folder: Path) -> list[Path]:
        """per_token.csv, a line a position, and per_token.json, the same at powers of two."""
        folder.mkdir(parents=True, exist_ok=True)
        table, summary = folder / "per_token.csv", folder / "per_token.json"
        rows = zip(range(1, len(self.losses) + 1), self.losses, self.perplexities, strict=True)
        lines = ["position,loss,perplexity", *(f"{i},{x:.6f},{p:.6f}" for i, x, p in rows)]
        write_atomically(table, ("\n".join(lines) + "\n").encode())
        lengths = [2**n for n in range(len(self.losses).bit_length()) if 2**n <= len(self.losses)]
        lengths += [] if lengths[-1] == len(self.losses) else [len(self.losses)]
        smooth = self.smoothed()
        values = {
            "sequences": self.sequences,
            "trained_context": self.trained,
            "loss_smoothed_over": 101,
            "loss": {str(n): round(float(smooth[n - 1]), 6) for n in lengths},
            "perplexity": {str(n): round(float(self.perplexities[n - 1]), 6) for n in lengths},
        }
        write_atomically(summary, (json.dumps(values, indent=2) + "\n").encode())
        return [table, summary]


def per_token_loss(
    model: CausalLM,
    tokens: np.ndarray,
    *,
    length: int,
    sequences: int = 64,
    batch: int = 4,
    precision: str = "fp32",
    trained: int | None = None,
    starts: np.ndarray | None = None,
) -> PerToken:
    """L(i) of a model over `sequences` windows of `length` tokens, spread over `tokens`.

    Windows do not overlap; where fewer fit, there are fewer. Every token is predicted from all that
    came before it in its window, however long the model was trained on; memory is linear in length.
    starts: where the windows begin instead.

    Raises:
        UserError: a number is below one, or no window fits.
    """
    for name, value in (("length", length), ("sequences", sequences), ("batch", batch)):
        if value < 1:
            raise UserError(f"eval: {name}: expected 1 or more, got {value}")
    most = (len(tokens) - 1) // length
    if most < 1:
        raise UserError(
            f"eval: length: expected at most {len(tokens) - 1}, the tokens of the text but one; "
            f"got {length}"
        )
    if starts is None:
        starts = np.linspace(0, (most - 1) * length, min(sequences, most)).astype(np.int64)
    count = len(starts)
    device = next(model.parameters()).device
    total = torch.zeros(length, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        for first in range(0, count, batch):
            rows = [
                np.asarray(tokens[start : start + length + 1], dtype=np.int64)
                for start in starts[first : first + batch]
            ]
            block = torch.from_numpy(np.stack(rows)).to(device)
            for at, logits in logits_in_pieces(model, block[:, :-1], precision=precision):
                asked = block[:, at + 1 : at + 1 + logits.size(1)]
                loss = F.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="none")
                total[at : at + logits.size(1)] += loss.view(asked.shape).double().sum(0).cpu()
    finally:
        model.train(training)
    return PerToken((total / count).numpy(), count, trained)
