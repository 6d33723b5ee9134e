"""Windows to train on and streams to validate on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidegate.training.batches import Streams, WindowSampler


def test_every_window_is_seen_once_an_epoch():
    tokens = np.arange(16 * 10 + 8)
    sampler = WindowSampler(tokens, batch=3, context=16, seed=5)
    seen = torch.cat([sampler.next()[0] for _ in range(3)])
    assert sampler.windows == 9
    assert len(seen.flatten().unique()) == 9 * 16


def test_labels_are_the_tokens_that_follow():
    ids, labels, *_ = WindowSampler(np.arange(100), batch=2, context=8, seed=0).next()
    assert torch.equal(ids + 1, labels)


def test_a_sampler_goes_on_from_its_position():
    tokens = np.arange(500)
    one = WindowSampler(tokens, batch=4, context=8, seed=3)
    batches = [one.next()[0] for _ in range(40)]
    other = WindowSampler(tokens, batch=4, context=8, seed=3)
    other.position = 25 * 4
    assert all(torch.equal(other.next()[0], batch) for batch in batches[25:])


def test_one_window_is_enough():
    ids, labels, *_ = WindowSampler(np.arange(9), batch=2, context=8, seed=0).next()
    assert ids.tolist() == [list(range(8))] * 2
    assert labels[0, -1] == 8


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_streams_predict_every_token_of_their_rows(rows):
    pairs = list(Streams(np.arange(101), rows, context=7))
    count = sum(labels.numel() for _, labels in pairs)
    assert count == min(rows, 50) * (100 // min(rows, 50))
    assert all(torch.equal(ids + 1, labels) for ids, labels in pairs)


def test_limited_streams_are_spread_over_the_tokens():
    first = next(iter(Streams(np.arange(1001), rows=10, context=4, limit=40)))[0]
    assert first[:, 0].tolist() == list(range(0, 1000, 100))
