"""Decoding with forgetting_attention_step: one token against a cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import error_rule, recurrence
from support import forgetting_attention_cases as attention_cases
from support import forgetting_attention_oracle as attention_oracle
from support.forgetting_attention_cases import AttentionCase, call, inputs_of, relative
from torch import Tensor

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate


def step_inputs(case: AttentionCase, capacity: int, device: str) -> tuple[Tensor, ...]:
    a = inputs_of(replace(case, queries=1, past=capacity - 1), device)
    gates = a["log_f"].to(recurrence.state_dtype(case.dtype))
    return a["q"][:, 0], a["k"], a["v"], gates


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100, 1500])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (10, 2), (9, 1)], ids=str)
def test_step_equals_the_last_row(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype, device: str
) -> None:
    """Rows of the cache of different lengths; what lies behind them is never read."""
    case = AttentionCase(batch=4, heads=heads[0], key_heads=heads[1], head_dim=40, dtype=dtype)
    q, k, v, gates = step_inputs(replace(case, gates="open"), 2500, device)
    counts = [2500, 1, 0, 1100]
    for row, count in enumerate(counts):
        for cache in (k, v, gates):
            cache[row, count:] = float("nan")
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    o = ops.forgetting_attention_step(q, k, v, gates, lengths, window=window)
    assert o.dtype is dtype
    for row, count in enumerate(counts):
        if count == 0:
            assert not o[row].count_nonzero()
            continue
        past = [t[row : row + 1, :count].cpu() for t in (k, v, gates)]
        alone = [q[row : row + 1, None].cpu(), *past]
        exact = attention_oracle.reference(*alone, window=window, exact=True)["o"][:, 0]
        same = attention_oracle.reference(*alone, window=window, exact=False)["o"][:, 0]
        error_rule.assert_within_rule(f"row {row}", o[row : row + 1], exact, same)


@pytest.mark.parametrize("head_dim", [1, 7, 16, 64, 128, 136, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_step_of_any_head_dimension(dtype: torch.dtype, head_dim: int, device: str) -> None:
    case = AttentionCase(
        batch=1, heads=3, key_heads=1, head_dim=head_dim, dtype=dtype, gates="open"
    )
    q, k, v, gates = step_inputs(case, 300, device)
    lengths = torch.tensor([300], dtype=torch.int32, device=device)
    o = ops.forgetting_attention_step(q, k, v, gates, lengths)
    cpu = [t.cpu() for t in (q[:, None], k, v, gates)]
    exact = attention_oracle.reference(*cpu, exact=True)["o"][:, 0]
    same = attention_oracle.reference(*cpu, exact=False)["o"][:, 0]
    error_rule.assert_within_rule("o", o, exact, same)


@pytest.mark.parametrize("gates", ["log -1e4", "first shut", "zero", "extreme"])
def test_step_at_gate_extremes(gates: str, device: str) -> None:
    case = AttentionCase(batch=1, heads=2, head_dim=16, gates=gates)
    q, k, v, log_f = step_inputs(case, 200, device)
    lengths = torch.tensor([200], dtype=torch.int32, device=device)
    o = ops.forgetting_attention_step(q, k, v, log_f, lengths)
    exact = attention_oracle.reference(*(t.cpu() for t in (q[:, None], k, v, log_f)), exact=True)[
        "o"
    ]
    assert relative(o[:, None], exact) < 1e-6
    shut = ops.forgetting_attention_step(q, k, v, torch.full_like(log_f, -torch.inf), lengths)
    torch.testing.assert_close(shut, v[:, -1].expand_as(shut), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_step_keeps_its_digits_at_a_million_tokens(device: str) -> None:
    """c is below -300000 there: next to it, fp32 numbers are 0.03 apart."""
    time = 1_000_000
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, time, 1, 8, generator=rng) for _ in range(2))
    q = torch.randn(1, 1, 8, generator=rng)
    gates = -torch.rand(1, time, 1, generator=rng)
    gates[:, -3000:] *= 1e-3
    lengths = torch.tensor([time], dtype=torch.int32, device=device)
    o = ops.forgetting_attention_step(*(t.to(device) for t in (q, k, v, gates)), lengths)
    last = [t[:, -4000:] for t in (k, v, gates)]
    exact = attention_oracle.reference(q[:, None], *last, exact=True)["o"][:, 0]
    assert relative(o, exact) < 2e-6


def test_steps_equal_prefill(device: str) -> None:
    case = AttentionCase(queries=20, heads=4, key_heads=2, head_dim=16, gates="open")
    a = inputs_of(case, device)
    whole, _ = call(case, a)
    cache = [torch.zeros(2, 32, *t.shape[2:], device=device) for t in (a["k"], a["v"], a["log_f"])]
    for t in range(20):
        for to, name in zip(cache, ("k", "v", "log_f"), strict=True):
            to[:, t] = a[name][:, t]
        lengths = torch.full((2,), t + 1, dtype=torch.int32, device=device)
        o = ops.forgetting_attention_step(a["q"][:, t], *cache, lengths)
        torch.testing.assert_close(o, whole[:, t], rtol=1e-5, atol=1e-6)


PRUNED_HEADS = [(2, 2), (4, 1), (10, 2)]


def pruned_inputs(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, time: int, device: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Keys of length sqrt(D), and gates from those that forget within ten tokens to open ones."""
    rng = torch.Generator().manual_seed(heads[0] + head_dim)
    rows = (4, time, heads[1], head_dim)
    k = torch.nn.functional.normalize(torch.randn(rows, generator=rng), dim=-1) * head_dim**0.5
    of_keys = torch.arange(heads[0]) // (heads[0] // heads[1])  # the head of a query head's keys
    logits = torch.randn(4, time, heads[0], generator=rng) + 2 * of_keys
    wide = recurrence.state_dtype(dtype)
    tensors = {
        "q": torch.randn(4, heads[0], head_dim, generator=rng).to(dtype),
        "k_cache": k.to(dtype),
        "v_cache": torch.randn(rows, generator=rng).to(dtype),
        "gate_cache": torch.nn.functional.logsigmoid(logits).to(wide),
    }
    norms = torch.full((1, 1), 1.01 * head_dim**0.5, dtype=wide, device=device)
    return {n: t.to(device) for n, t in tensors.items()}, norms.expand(4, heads[1])


def kept_keys(a: dict[str, Tensor], norms: Tensor, row: int, count: int, prune: float) -> list[int]:
    """The oldest key of each head of keys that the definition of `prune` leaves, in float64."""
    q, k, gates = (a[n][row].double().cpu() for n in ("q", "k_cache", "gate_cache"))
    group, scale = q.shape[0] // k.shape[1], q.shape[1] ** -0.5
    oldest = [count - 1] * k.shape[1]
    for head in range(q.shape[0]):
        g = head // group
        fade = gates[:count, head].flip(0).cumsum(0).flip(0) - gates[:count, head]
        most = scale * q[head].norm() * norms[row, g].double().cpu() + fade
        own = scale * q[head] @ k[count - 1, g]
        kept = most - own >= math.log(prune / k.shape[0]) + 1e-6
        oldest[g] = min(oldest[g], int(kept.nonzero()[0]))
    return oldest


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("heads", PRUNED_HEADS, ids=str)
@pytest.mark.parametrize(("head_dim", "time", "window"), [(40, 2500, None), (64, 700, 300)])
def test_pruned_step_reads_no_more_than_it_must(
    head_dim: int,
    time: int,
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    """What is left out weighs less than prune, and is not read: NaN there changes nothing."""
    prune = 1e-3
    a, norms = pruned_inputs(heads, head_dim, dtype, time, device)
    counts = [time, 1, 0, 600]
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    whole = ops.forgetting_attention_step(**a, lengths=lengths, window=window)
    pruned = {"lengths": lengths, "window": window, "prune": prune, "key_norms": norms}
    o = ops.forgetting_attention_step(**a, **pruned)
    largest = a["v_cache"].abs().max().item()
    rounding = 4 * torch.finfo(dtype).eps * largest
    assert (o - whole).abs().max().item() <= 2 * prune * largest + rounding
    is_any_hidden = False
    for row, count in enumerate(counts):
        if count == 0:
            continue
        oldest = kept_keys(a, norms, row, count, prune)
        for g, first in enumerate(oldest):
            # A thousandth of the bound is added for rounding: a few keys of a fade that hardly
            # moves may stay.
            hidden = max(0, int(0.9 * first) - 10)
            is_any_hidden |= hidden > 0
            for name in ("k_cache", "v_cache"):
                a[name][row, :hidden, g] = torch.nan
    assert is_any_hidden
    assert torch.equal(ops.forgetting_attention_step(**a, **pruned), o)


@pytest.mark.parametrize(("window", "past"), [(None, 0.01), (5000, 0.01), (None, -0.01)])
def test_pruned_step_finds_the_oldest_key_of_a_long_cache(
    window: int | None, past: float, device: str
) -> None:
    """Gates fall evenly, so that the last key that stays lies thousands of keys back, behind
    several tiles of the search; one gate that falls by log(prune / T) hides what is older, and a
    hundredth less does not."""
    time, prune, head_dim = 7000, 1e-3, 16
    rng = torch.Generator().manual_seed(5)
    k = torch.nn.functional.normalize(torch.randn(1, time, 2, head_dim, generator=rng), dim=-1)
    q = torch.nn.functional.normalize(torch.randn(1, 2, head_dim, generator=rng), dim=-1)
    k[:, -1] = q  # so that the query's score of its own key is the largest there can be
    v = torch.randn(1, time, 2, head_dim, generator=rng)
    gates = torch.zeros(1, time, 2)
    limit = -math.log(prune / time) + head_dim**-0.5 * 1e-4  # and the slack for rounding
    gates[0, 2000, 0] = -(limit + past)  # what lies before key 2000 goes, or stays
    gates[0, :, 1] = -0.004
    a = {"q": q, "k_cache": k, "v_cache": v, "gate_cache": gates}
    a = {name: t.to(device) for name, t in a.items()}
    pruned = {
        "lengths": torch.tensor([time], dtype=torch.int32, device=device),
        "prune": prune,
        "key_norms": torch.ones(1, 2, device=device),
        "window": window,
    }
    o = ops.forgetting_attention_step(**a, **pruned)
    oldest = 0 if window is None else time - window
    even = time - 1 - int(limit / 0.004)  # the oldest key that stays of the second head
    for name in ("k_cache", "v_cache"):
        a[name][0, : max(oldest, 2000), 0] = torch.nan
        a[name][0, : max(oldest, even - 2), 1] = torch.nan
    found = ops.forgetting_attention_step(**a, **pruned)
    assert found[0, 0].isnan().any() == (past < 0)
    assert torch.equal(found[0, 1], o[0, 1])
    a["v_cache"][0, even + 2, 1] = torch.nan  # stays
    assert ops.forgetting_attention_step(**a, **pruned)[0, 1].isnan().any() == (even + 2 >= oldest)


def test_pruned_step_of_a_gate_that_is_nan_leaves_out_nothing(device: str) -> None:
    a, norms = pruned_inputs((2, 2), 16, torch.float32, 900, device)
    lengths = torch.full((4,), 900, dtype=torch.int32, device=device)
    a["gate_cache"][0, 899, 0] = torch.nan
    a["q"][1, 1, 3] = torch.nan
    o = ops.forgetting_attention_step(**a, lengths=lengths, prune=1e-3, key_norms=norms)
    same = ops.forgetting_attention_step(**a, lengths=lengths)
    assert o[0, 0].isnan().all()
    assert o[1, 1].isnan().all()
    assert torch.equal(o.isnan(), same.isnan())


def test_step_inside_torch(device: str) -> None:
    case = AttentionCase(batch=2, heads=4, key_heads=2, head_dim=8)
    q, k, v, gates = step_inputs(case, 12, device)
    lengths = torch.tensor([12, 3], dtype=torch.int32, device=device)
    torch.library.opcheck(raw.forgetting_attention_step.default, (q, k, v, gates, lengths, None, 5))
    norms = torch.full((2, 2), 99.0, device=device)
    pruned = (q, k, v, gates, lengths, None, 5, 1e-3, norms)
    torch.library.opcheck(raw.forgetting_attention_step.default, pruned)
    with torch.inference_mode():
        expected = ops.forgetting_attention_step(q, k, v, gates, lengths)
    with torch.autocast(device, dtype=torch.bfloat16):  # the cache decides
        found = ops.forgetting_attention_step(q.bfloat16(), k, v, gates, lengths)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match=r"forgetting_attention_step: q requires a gradient"):
        ops.forgetting_attention_step(q.requires_grad_(), k, v, gates, lengths)
