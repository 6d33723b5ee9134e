"""What the demo is compared with: an order-2 byte model with back-off, and a file compressor.

Both see the same split as the language model. The order-2 model learns from the training bytes; bz2
compresses the validation bytes by themselves, as a compressor does.
"""

from __future__ import annotations

import bz2

import numpy as np


def _interpolate(
    counts: np.ndarray, totals: np.ndarray, kinds: np.ndarray, lower: np.ndarray
) -> np.ndarray:
    """Witten-Bell: (count + kinds * lower) / (total + kinds); `lower` where nothing was seen."""
    weight = totals + kinds
    return np.where(weight > 0, (counts + kinds * lower) / np.maximum(weight, 1), lower)


def _tables(codes: np.ndarray, contexts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts of (context, byte) codes, and for each context its total and its distinct bytes."""
    counts = np.bincount(codes, minlength=contexts * 256).astype(np.int32)
    table = counts.reshape(contexts, 256)
    return counts, table.sum(axis=1), np.count_nonzero(table, axis=1)


def order2_bits_per_byte(train: np.ndarray, valid: np.ndarray) -> float:
    """Cross-entropy in bits per byte of `valid` under an order-2 model counted on `train`.

    Trigram counts backed off to bigrams and those to single bytes by Witten-Bell interpolation;
    single bytes have add-one smoothing. train, valid: 1-D arrays of uint8, 3 bytes or more.
    """
    if len(train) < 3 or len(valid) < 3:
        raise ValueError("order2_bits_per_byte: needs at least 3 bytes of each split")
    seen = np.asarray(train, dtype=np.int32)
    counts1 = np.bincount(seen, minlength=256)
    counts2, totals2, kinds2 = _tables((seen[:-1] << 8) | seen[1:], 256)
    codes3 = (seen[:-2] << 16) | (seen[1:-1] << 8) | seen[2:]
    counts3, totals3, kinds3 = _tables(codes3, 65536)

    text = np.asarray(valid, dtype=np.int32)
    older, newer, target = text[:-2], text[1:-1], text[2:]
    p1 = (counts1[target] + 1.0) / (counts1.sum() + 256.0)
    p2 = _interpolate(counts2[(newer << 8) | target], totals2[newer], kinds2[newer], p1)
    context = (older << 8) | newer
    p3 = _interpolate(counts3[(context << 8) | target], totals3[context], kinds3[context], p2)
    return float(-np.log2(p3).mean())


def bz2_bits_per_byte(valid: np.ndarray) -> float:
    """Size in bits per byte of `valid` compressed by bz2 at its best level."""
    data = np.asarray(valid, dtype=np.uint8).tobytes()
    if not data:
        raise ValueError("bz2_bits_per_byte: needs at least one byte")
    return 8.0 * len(bz2.compress(data, 9)) / len(data)


def baselines(train: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """Bits per byte of every baseline, by the name that tables and plots show."""
    return {
        "order-2 byte model": order2_bits_per_byte(train, valid),
        "bz2 -9": bz2_bits_per_byte(valid),
    }
