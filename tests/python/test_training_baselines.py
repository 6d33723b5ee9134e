"""The byte models without a network that runs are compared with."""

from __future__ import annotations

import bz2
import math

import numpy as np
import pytest

from tidegate.training.baselines import bz2_bits_per_byte, order2_bits_per_byte


def _order2_by_hand(train: bytes, valid: bytes) -> float:
    """The order-2 model once more, one byte at a time with dictionaries."""
    counts: dict[bytes, dict[int, int]] = {}
    for order in range(3):
        for i in range(order, len(train)):
            row = counts.setdefault(train[i - order : i], {})
            row[train[i]] = row.get(train[i], 0) + 1
    total = 0.0
    for i in range(2, len(valid)):
        p = (counts[b""].get(valid[i], 0) + 1) / (len(train) + 256)
        for order in (1, 2):
            row = counts.get(valid[i - order : i])
            if row:
                p = (row.get(valid[i], 0) + len(row) * p) / (sum(row.values()) + len(row))
        total -= math.log2(p)
    return total / (len(valid) - 2)


def test_order2_model_equals_the_one_written_by_hand():
    train, valid = b"the cat sat on the mat, the end" * 3, b"the dog sat on that mat \xff"
    ours = order2_bits_per_byte(np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8))
    assert ours == pytest.approx(_order2_by_hand(train, valid), rel=1e-12)


def test_bz2_bits():
    data = b"abc" * 1000
    bits = bz2_bits_per_byte(np.frombuffer(data, np.uint8))
    assert bits == pytest.approx(8 * len(bz2.compress(data, 9)) / 3000)
