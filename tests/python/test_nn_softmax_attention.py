"""What `Attention` and `ForgettingAttention` have in common: states, packing, autocast, CUDA."""

from __future__ import annotations

import re

import pytest
import torch
from support.attention_mixers import MAKERS
from support.mixer_checks import gamma_of

from tidegate import ops

pytestmark = pytest.mark.usefixtures("one_thread")
by_case = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
by_preset = pytest.mark.parametrize("name", ["attention-pro", "forgetting-pro"])


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@by_case
@pytest.mark.parametrize("capacity", [9, None])
@torch.no_grad()
def test_split_anywhere(make, capacity):
    mixer = make()
    x, gamma = randn(3, 9, mixer.dim), gamma_of(mixer)
    whole, _ = mixer(x, gamma=gamma)
    for cut in (0, 1, 4, 8):
        head, state = mixer(x[:, :cut], mixer.init_state(3, capacity=capacity), gamma=gamma)
        middle, state = mixer(x[:, cut : cut + 1], state, gamma=gamma)
        tail = [mixer.step(x[:, t], state, gamma)[:, None] for t in range(cut + 1, 9)]
        torch.testing.assert_close(torch.cat([head, middle, *tail], dim=1), whole)
        assert state.lengths.tolist() == [9] * 3


@by_case
@pytest.mark.parametrize("capacity", [11, None])
@torch.no_grad()
def test_packed_equals_separate_and_goes_on(make, capacity):
    mixer = make()
    first, more, token = randn(1, 12, mixer.dim), randn(1, 7, mixer.dim), randn(4, mixer.dim)
    bounds, new = [0, 5, 5, 6, 12], [0, 1, 4, 4, 7]
    gamma = gamma_of(mixer)
    y, none = mixer(first, gamma=gamma, cu_seqlens=torch.tensor(bounds))
    assert none is None
    empty = mixer.init_state(4, capacity=capacity)
    z, state = mixer(first, empty, gamma=gamma, cu_seqlens=torch.tensor(bounds))
    assert state.lengths.tolist() == [5, 0, 1, 6]
    torch.testing.assert_close(z, y)
    after, state = mixer(more, state, gamma=gamma, cu_seqlens=torch.tensor(new))
    last = mixer.step(token, state, gamma)
    assert state.seen.tolist() == [7, 4, 2, 10]
    for n in range(4):
        parts = [first[:, bounds[n] : bounds[n + 1]], more[:, new[n] : new[n + 1]]]
        whole = mixer(torch.cat([*parts, token[n][None, None]], dim=1), gamma=gamma)[0][0]
        got = [y[0, bounds[n] : bounds[n + 1]], after[0, new[n] : new[n + 1]], last[n][None]]
        torch.testing.assert_close(torch.cat(got), whole)


@by_case
@torch.no_grad()
def test_rows_go_on_from_different_lengths(make):
    """Whole rows after a state whose sequences hold 4, 0 and 2 tokens."""
    mixer = make()
    first, rows, bounds = randn(1, 6, mixer.dim), randn(3, 2, mixer.dim), [0, 4, 4, 6]
    gamma = gamma_of(mixer)
    empty = mixer.init_state(3)
    _, state = mixer(first, empty, gamma=gamma, cu_seqlens=torch.tensor(bounds))
    z, last = mixer(rows, state, gamma=gamma)
    assert last.lengths.tolist() == last.seen.tolist() == [6, 2, 4]
    assert last.room.tolist() == [6, -1]
    for n in range(3):
        tokens = torch.cat([first[:, bounds[n] : bounds[n + 1]], rows[n][None]], dim=1)
        whole = mixer(tokens, gamma=gamma)[0]
        torch.testing.assert_close(z[n], whole[0, -2:])


@by_case
def test_no_token_at_all(make):
    mixer = make()
    y, state = mixer(randn(2, 0, mixer.dim), mixer.init_state(2))
    assert y.shape == (2, 0, mixer.dim)
    assert state.lengths.tolist() == [0, 0]


@by_preset
@torch.no_grad()
def test_a_state_is_left_as_it_was_by_forward(name):
    mixer = MAKERS[name]()
    x = randn(2, 3, mixer.dim)
    _, state = mixer(x, mixer.init_state(2))
    before = [t.clone() for t in state]
    mixer(x, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@by_preset
@torch.no_grad()
def test_memory_grows_by_doubling(name):
    mixer = MAKERS[name]()
    state, x = mixer.init_state(2), randn(2, mixer.dim)
    sizes = set()
    for _ in range(130):
        mixer.step(x, state)
        sizes.add(state.capacity)
    assert sorted(sizes) == [64, 128, 256]
    assert state.lengths.tolist() == [130, 130]


@by_preset
def test_wrong_arguments_are_refused(name):
    mixer = MAKERS[name]()
    owner, heads = type(mixer).__name__, f"{mixer.num_kv_heads}, {mixer.head_dim}"
    x, state = randn(2, 3, mixer.dim), mixer.init_state(2, capacity=2)
    calls = {
        r"state: expected room for 3 tokens, .* capacity; got 2": lambda: mixer(x, state),
        rf"state: expected keys \[2, capacity, {heads}\]; got \(1, 2, {heads}\)": lambda: mixer(
            x, mixer.init_state(1, capacity=2)
        ),
        r"state: expected the 8 tensors of an AttentionState; got 3": lambda: mixer(x, state[:3]),
        r"gamma: expected None": lambda: mixer(x, gamma=x[0, 0]),
        rf"x: expected \[B, T, dim={mixer.dim}\]; got": lambda: mixer(x[0]),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"^{owner}: {message}"):
            call()
    mixer(x[:, :2], state)
    mixer.requires_grad_(False)
    for _ in range(2):
        mixer.step(x[:, 0], state)
    with pytest.raises(ValueError, match=r"expected room for 3 tokens, .*; got 2"):
        mixer.step(x[:, 0], state)


@by_case
@pytest.mark.parametrize("has_state", [False, True])
def test_offsets_that_do_not_fit(make, has_state):
    mixer = make()
    x = randn(1, 6, mixer.dim)
    calls = {
        "must rise from 0 to T = 6, got [0, 3, 5]": torch.tensor([0, 3, 5]),
        "must rise from 0 to T = 6, got [0, 3, 7]": torch.tensor([0, 3, 7]),
        "must rise from 0 to T = 6, got [0, 5, 3, 6]": torch.tensor([0, 5, 3, 6]),
        "must rise from 0 to T = 6, got [1, 6]": torch.tensor([1, 6], dtype=torch.int32),
        "must be int32 or int64, got float32": torch.tensor([0.0, 6.0]),
        "must have shape [N + 1], got [1, 2]": torch.tensor([[0, 6]]),
    }
    for message, bounds in calls.items():
        state = mixer.init_state(bounds.numel() - 1) if has_state else None
        with pytest.raises(RuntimeError, match=re.escape(f"{mixer._owner}: cu_seqlens {message}")):
            mixer(x, state, cu_seqlens=bounds)
    message = f"x must have a batch of 1 when cu_seqlens is given, got [2, 6, {mixer.dim}]"
    with pytest.raises(RuntimeError, match=re.escape(f"{mixer._owner}: {message}")):
        mixer(x.expand(2, 6, -1), cu_seqlens=torch.tensor([0, 6]))
    message = "expected all tensors on cpu like x, got cu_seqlens on meta"
    with pytest.raises(RuntimeError, match=f"{mixer._owner}: {message}"):
        mixer(x, cu_seqlens=torch.zeros(2, dtype=torch.int64, device="meta"))


def test_packed_bounds(device):
    x = torch.zeros(1, 6, 2, device=device)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = ops.packed_bounds("Attention", x, bounds)
    assert found.device == x.device
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 2, 6]
    for given in (bounds.to(device), found):
        torch.library.opcheck(torch.ops.tidegate.packed_bounds.default, (x, given, "Attention"))


@pytest.mark.gpu
@by_preset
def test_offsets_on_the_gpu_are_looked_at_in_debug_mode(name, device, monkeypatch):
    if device == "cpu":
        pytest.skip("those on the CPU always are")
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    mixer = MAKERS[name]().to(device)
    x = randn(1, 6, mixer.dim).to(device)
    with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to T = 6"):
        mixer(x, cu_seqlens=torch.tensor([0, 9], device=device))


@by_preset
def test_autocast(name):
    mixer = MAKERS[name](dtype=torch.float32)
    x = torch.randn(2, 9, mixer.dim)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer(x)
        z, state = mixer(x, mixer.init_state(2))
        with torch.no_grad():
            mixer.step(x[:, 0], state)
    wanted = mixer(x)[0]
    for got in (y, z):
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.gpu
@by_case
def test_cuda_equals_cpu(make, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    mixer = make(dtype=torch.float32)
    x, gamma = torch.randn(2, 33, mixer.dim), gamma_of(mixer, torch.float32)
    wanted, _ = mixer(x, gamma=gamma)
    y, _ = mixer.to(device)(x.to(device), gamma=None if gamma is None else gamma.to(device))
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-4)
