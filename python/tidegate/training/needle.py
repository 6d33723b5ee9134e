"""The needle in the haystack, easy mode (Forgetting Transformer, appendix B.3): question and answer
stand somewhere in a long text, and the question is asked again at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..models import CausalLM
from ..models._files import write_atomically
from .errors import UserError
from .pieces import logits_in_pieces
from .tokenizers import Tokenizer

QUESTION = b"What is the best thing to do in San Francisco? Answer:"
ANSWER = (
    b" The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    b"day."
)
NEEDLE = b"\n" + QUESTION + ANSWER + b"\n"
TASK = (
    b"\nThere is an important piece of information hidden inside the above document. Now that "
    b"you've read the document, I will quiz you about it. Answer the following question: "
)


@dataclass(frozen=True)
class NeedleScores:
    """exact: the share of samples whose whole answer is the likeliest, float64 ``[depths,
    lengths]``; tokens: the share of the answers' tokens that are, each after the right ones before
    it. lengths: tokens of a prompt with its answer; depths: the needle's place in the text, 0 its
    beginning, 1 its end."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    exact: np.ndarray
    tokens: np.ndarray
    samples: int
    trained: int | None = None

    def write(self, folder: Path) -> Path:
        """needle.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "needle.json"
        values = {
            "samples": self.samples,
            "trained_context": self.trained,
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "exact_match": np.round(self.exact, 6).tolist(),
            "answer_tokens": np.round(self.tokens, 6).tolist(),
        }
        write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())
        return path


def needle_prompt(
    haystack: np.ndarray, tokenizer: Tokenizer, *, length: int, depth: float, start: int = 0
) -> tuple[np.ndarray, int]:
    """A prompt with its answer, int64 ``[length]``, and how many tokens the answer has.

    The text is `haystack` from token `start` on, cut where the needle, the task and the answer fill
    the rest; the needle stands at `depth` of it.

    Raises:
        UserError: length leaves no room for a text, or the haystack is shorter.
    """
    needle, end, answer = (
        np.asarray(tokenizer.encode(text), dtype=np.int64)
        for text in (NEEDLE, TASK + QUESTION, ANSWER)
    )
    room = length - len(needle) - len(end) - len(answer)
    if room < 1:
        raise UserError(
            f"needle: lengths: expected {length - room + 1} or more, for needle, question and "
            f"answer; got {length}"
        )
    text = np.asarray(haystack[start : start + room], dtype=np.int64)
    if len(text) < room:
        raise UserError(
            f"needle: lengths: expected at most {length - room + len(text)}, by the text's "
            f"{len(haystack)} tokens; got {length}"
        )
    at = round(depth * room)
    return np.concatenate([text[:at], needle, text[at:], end, answer]), len(answer)


def needle_test(
    model: CausalLM,
    haystack: np.ndarray,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 4,
    precision: str = "fp32",
    trained: int | None = None,
) -> NeedleScores:
    """Exact-match scores over depth x length, `samples` texts a cell, spread over the haystack.

    The answer counts when greedy decoding would give it whole: when every token of it is the
    likeliest after the right ones before it, which one pass over prompt and answer shows.

    Raises:
        UserError: a length, a depth or the number of samples is out of range.
    """
    if samples < 1:
        raise UserError(f"needle: samples: expected 1 or more, got {samples}")
    if not lengths or not depths:
        raise UserError("needle: expected at least one length and one depth, got none")
    if not all(0.0 <= depth <= 1.0 for depth in depths):
        raise UserError(f"needle: depths: expected numbers from 0 to 1, got {list(depths)}")
    exact = np.zeros((len(depths), len(lengths)))
    tokens = np.zeros_like(exact)
    for column, length in enumerate(lengths):
        starts = np.linspace(0, max(len(haystack) - length, 0), samples).astype(np.int64)
        for row, depth in enumerate(depths):
            prompts = [
                needle_prompt(haystack, tokenizer, length=length, depth=depth, start=int(start))
                for start in starts
            ]
            ids = torch.from_numpy(np.stack([prompt for prompt, _ in prompts]))
            right = _answers_hit(model, ids, prompts[0][1], precision)
            exact[row, column] = right.all(axis=1).mean()
            tokens[row, column] = right.mean()
    return NeedleScores(tuple(lengths), tuple(depths), exact, tokens, samples, trained)


def _answers_hit(model: CausalLM, ids: torch.Tensor, asked: int, precision: str) -> np.ndarray:
    """Which of the last `asked` tokens of ids ``[B, T]`` are the likeliest: bool ``[B, asked]``."""
    ids = ids.to(next(model.parameters()).device)
    first = ids.size(1) - asked
    hits = []
    training = model.training
    model.eval()
    try:
        for at, logits in logits_in_pieces(model, ids[:, :-1], precision=precision):
            skip = max(first - 1 - at, 0)
            if skip < logits.size(1):
                wanted = ids[:, at + 1 + skip : at + 1 + logits.size(1)]
                hits.append(logits[:, skip:].argmax(-1) == wanted)
    finally:
        model.train(training)
    return torch.cat(hits, dim=1).cpu().numpy()
