"""How the decoding engine draws a token, from its definition, naively and in float64.

kernels/sampling/sampling.h states it.
"""

from __future__ import annotations

import math

import numpy as np

_MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011)."""
    low, high = key & _MASK, key >> 32 & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ low, b & _MASK, (a >> 32) ^ c3 ^ high, a & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbels(seed: int, stream: int, drawn: int, vocab: int) -> np.ndarray:
    """-log E of standard exponentials E, one a token."""
    words: list[int] = []
    for group in range((vocab + 3) // 4):
        words += philox(seed, (group, drawn & _MASK, drawn >> 32, stream))
    uniform = (np.array(words[:vocab], dtype=np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log1p(-uniform))


def kept(z: np.ndarray, top_k: int | None, top_p: float | None, min_p: float | None) -> np.ndarray:
    """Which of the tokens may be drawn; z: their logits, scaled."""
    keep = np.ones(len(z), dtype=bool)
    if top_k is not None and top_k < len(z):
        keep &= z >= np.sort(z)[-top_k]
    if top_p is not None:
        mass = np.where(keep, np.exp(z - z.max()), 0.0)
        above = np.array([mass[z > own].sum() for own in z])
        keep &= above < top_p * mass.sum()
    if min_p is not None and min_p > 0:
        keep &= z - z.max() >= math.log(min_p)
    return keep


def draw(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seen: np.ndarray | None = None,
    seed: int = 0,
    stream: int = 0,
    drawn: int = 0,
) -> int:
    """The token, of logits ``[vocab]``; seen: which tokens the sequence has, bool ``[vocab]``."""
    logits = logits.astype(np.float64)
    if seen is not None:
        smaller = np.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = np.where(seen, smaller, logits)
    if temperature == 0.0:
        return int(logits.argmax())
    z = logits / temperature
    scores = z + gumbels(seed, stream, drawn, len(z))
    return int(np.where(kept(z, top_k, top_p, min_p), scores, -np.inf).argmax())
