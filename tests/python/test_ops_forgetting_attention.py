"""`forgetting_attention`: results and gradients against the oracle, what its options promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import forgetting_attention_cases as attention_cases
from support import forgetting_attention_oracle as attention_oracle
from support.forgetting_attention_cases import AttentionCase, call, inputs_of, relative
from torch import Tensor

import tidegate

ops = tidegate.ops


# Against the oracle -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", attention_cases.every_length(), ids=str)
def test_every_length(case: AttentionCase, device: str) -> None:
    attention_cases.check(case, device)


@pytest.mark.parametrize("case", attention_cases.every_regime(), ids=str)
def test_every_gate_regime(case: AttentionCase, device: str) -> None:
    attention_cases.check(case, device)


@pytest.mark.parametrize("case", attention_cases.every_layout(), ids=str)
def test_every_layout(case: AttentionCase, device: str) -> None:
    attention_cases.check(case, device)


@pytest.mark.parametrize("case", attention_cases.every_mix(), ids=str)
def test_every_mix_of_dtypes(case: AttentionCase, device: str) -> None:
    attention_cases.check(case, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "head_dim", [1, 2, 7, 16, 24, 31, 32, 33, 64, 72, 96, 100, 128, 136, 192, 248, 256]
)
def test_any_head_dimension(head_dim: int, dtype: torch.dtype, device: str) -> None:
    attention_cases.check(
        AttentionCase(queries=70, head_dim=head_dim, dtype=dtype, seed=head_dim), device
    )


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (6, 1), (8, 2)], ids=str)
def test_grouped_heads(heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    case = AttentionCase(heads=heads[0], key_heads=heads[1], queries=67, head_dim=16, dtype=dtype)
    attention_cases.check(case, device)


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("past", [1, 63, 64, 200])
def test_the_last_query_is_on_the_last_key(past: int, dtype: torch.dtype, device: str) -> None:
    case = AttentionCase(past=past, head_dim=16, dtype=dtype)
    for queries in (1, 5, 64, 65):
        # A query's o as it is stored shifts its whole row of dlog f: of a few of them it would be
        # chance which way of rounding does better.
        many = {"batch": 8, "heads": 6, "key_heads": 3} if queries == 1 else {}
        attention_cases.check(replace(case, queries=queries, **many), device)


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 129, 1000])
def test_window(window: int, dtype: torch.dtype, device: str) -> None:
    for past in (0, 40):
        case = AttentionCase(
            queries=200, past=past, head_dim=16, window=window, dtype=dtype, gates="open"
        )
        attention_cases.check(case, device)


PACKED = [
    ((4, 0), (0, 0), (13, 0), (1, 0), (0, 0)),
    ((0, 0), (0, 0), (18, 0)),
    ((65, 0), (2, 0), (0, 0), (70, 0)),
    ((1, 90), (0, 5), (64, 0), (63, 1), (130, 70)),
    ((0, 0), (0, 0)),
]


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_packed(lengths: tuple[tuple[int, int], ...], dtype: torch.dtype, device: str) -> None:
    for offsets in (torch.int32, torch.int64):
        case = AttentionCase(lengths=lengths, offsets_dtype=offsets, dtype=dtype, head_dim=16)
        attention_cases.check(case, device)
        attention_cases.check(replace(case, window=30), device)


GRADCHECK = [
    AttentionCase(queries=5),
    AttentionCase(queries=3, past=4, heads=2, key_heads=2, window=2, scale=0.7),
    AttentionCase(lengths=((2, 1), (0, 0), (3, 0))),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_gradcheck(case: AttentionCase, device: str) -> None:
    arguments = inputs_of(replace(case, dtype=torch.float64, batch=1, head_dim=3), device)
    names = ("q", "k", "v", "log_f")
    arguments["log_f"] = arguments["log_f"] - 0.01
    leaves = [arguments[name].detach().requires_grad_() for name in names]

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(case, arguments | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(function, leaves, nondet_tol=0.0)


@pytest.mark.parametrize("case", [*GRADCHECK, AttentionCase(queries=30, gates="open")], ids=str)
def test_the_oracle_has_the_gradients_that_autograd_finds(case: AttentionCase) -> None:
    case = replace(case, dtype=torch.float64, gates="open")
    inputs = attention_cases.make_inputs(case)
    names = ("q", "k", "v", "log_f")
    leaves = [inputs[name].detach().requires_grad_() for name in names]
    offsets = {k: inputs[k] for k in ("cu_seqlens", "cu_seqlens_k")}
    results = attention_oracle.forward(*leaves, **case.options(), **offsets)
    exact = attention_cases.reference(case, backward=True, exact=True)
    for name, value in zip(("o", "lse"), results, strict=True):
        torch.testing.assert_close(exact[name], value, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(results, leaves, (inputs["do"], inputs["dlse"]))
    for name, grad in zip(names, grads, strict=True):
        torch.testing.assert_close(exact[f"d{name}"], grad, rtol=1e-10, atol=1e-12)


# Other ways to say the same -----------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """torch's attention, causal when there is no bias; grouped heads, [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = bias is None
    return F.scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize("dtype", attention_cases.DTYPES)
def test_open_gates_are_softmax_attention(dtype: torch.dtype, device: str) -> None:
    """log f = 0: to rounding, results and gradients."""
    a = inputs_of(
        AttentionCase(queries=300, heads=4, key_heads=2, head_dim=64, dtype=dtype), device
    )
    leaves = [a[name].detach().requires_grad_() for name in ("q", "k", "v")]
    found = ops.forgetting_attention(*leaves, torch.zeros_like(a["log_f"]))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = sdpa(*wide, None)
    expected = sdpa(*leaves, None)
    loss = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, loss)
    exact_grads = torch.autograd.grad(exact, wide, loss.double())
    expected_grads = torch.autograd.grad(expected, leaves, loss)
    # In float64 torch's attention is `exact` itself; a row is a sum of 300 terms.
    floor = 1e-13 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
    for left, right, same in zip(
        (found, *grads), (exact, *exact_grads), (expected, *expected_grads), strict=True
    ):
        assert relative(left, right) <= 2 * relative(same, right) + floor


def test_the_gate_as_a_bias_matrix(device: str) -> None:
    a = inputs_of(AttentionCase(queries=150, heads=4, key_heads=2, head_dim=32), device)
    c = a["log_f"].double().cumsum(1).transpose(1, 2)
    bias = c[..., :, None] - c[..., None, :]
    bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), -torch.inf)
    expected = sdpa(*(a[name].double() for name in ("q", "k", "v")), bias)
    found = ops.forgetting_attention(a["q"], a["k"], a["v"], a["log_f"])
    assert relative(found, expected) < 1e-6


def test_one_gate_for_all_keys_before_it(device: str) -> None:
    """log f = -inf, or anything below -1e5, shuts off what came before; the first one nothing."""
    q, k, v = (torch.randn(1, 90, 2, 16, device=device) for _ in range(3))
    log_f = torch.zeros(1, 90, 2, device=device)
    whole = ops.forgetting_attention(q, k, v, log_f)
    for value in (-1e4, -1e30, -torch.inf):
        first, middle = log_f.clone(), log_f.clone()
        first[:, 0], middle[:, 70] = value, value
        assert torch.equal(ops.forgetting_attention(q, k, v, first), whole)
        o = ops.forgetting_attention(q, k, v, middle)
        assert torch.equal(o[:, :70], whole[:, :70])
        after = [x[:, 70:] for x in (q, k, v, log_f)]
        torch.testing.assert_close(o[:, 70:], ops.forgetting_attention(*after), rtol=0, atol=2e-6)


def test_a_window_of_one_copies_values(device: str) -> None:
    a = inputs_of(AttentionCase(queries=100, head_dim=16, heads=2, key_heads=1), device)
    o, lse = ops.forgetting_attention(
        a["q"], a["k"], a["v"], a["log_f"], window=1, scale=0.5, return_lse=True
    )
    assert torch.equal(o, a["v"].expand_as(o))
    scores = 0.5 * (a["q"] * a["k"]).sum(-1).transpose(1, 2)
    torch.testing.assert_close(lse, scores, rtol=1e-5, atol=1e-5)


def test_packed_equals_one_by_one(device: str) -> None:
    lengths = ((30, 0), (0, 0), (100, 50), (1, 0))
    case = AttentionCase(lengths=lengths, heads=4, key_heads=2, head_dim=16)
    a = inputs_of(case, device)
    o, lse = call(case, a)
    of_queries, of_keys = a["cu_seqlens"].tolist(), a["cu_seqlens_k"].tolist()
    for n in range(len(lengths)):
        rows, keys = slice(*of_queries[n : n + 2]), slice(*of_keys[n : n + 2])
        one = ops.forgetting_attention(
            a["q"][:, rows], a["k"][:, keys], a["v"][:, keys], a["log_f"][:, keys], return_lse=True
        )
        torch.testing.assert_close(o[:, rows], one[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[:, :, rows], one[1], rtol=1e-5, atol=1e-6)


# Pruning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [70, 71, 2**31 - 2, 2**31, 2**62])
def test_a_window_that_hides_nothing_is_none(window: int, device: str) -> None:
    """It is none also where a position and a window together are more than 32 bits hold."""
    a = inputs_of(AttentionCase(batch=1, queries=60, past=10, dtype=torch.bfloat16), device)
    names = ("q", "k", "v", "log_f")
    leaves = {name: a[name].detach().requires_grad_() for name in names}
    found = []
    for w in (None, window):
        o, lse = ops.forgetting_attention(**leaves, window=w, return_lse=True)
        found.append((o, lse, *torch.autograd.grad(o.sum(), list(leaves.values()))))
    (o, lse, *grads), (other, other_lse, *other_grads) = found
    assert equal_bits(o, other)
    assert equal_bits(lse, other_lse)
    for left, right in zip(grads, other_grads, strict=True):
        assert left.count_nonzero()
        assert relative(right, left) < 1e-6


@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", ["normal", "open", "log -1e4", "zero"])
def test_pruning_is_bounded(gates: str, dtype: torch.dtype, eps: float, device: str) -> None:
    """docs/numerics_ops.md: elements of o move by 2 eps max|v| at most, lse by -log(1 - eps)."""
    case = AttentionCase(queries=400, past=100, heads=4, key_heads=2, head_dim=16, gates=gates)
    case = replace(case, dtype=dtype, scale=0.05)
    a = inputs_of(case, device)
    o, lse = call(case, a)
    pruned, pruned_lse = call(case, a | {"prune": eps})
    rounding = 4 * torch.finfo(dtype).eps
    largest = a["v"].double().abs().max()
    moved = (pruned.double() - o.double()).abs().max()
    assert moved <= (2 * eps + rounding) * largest
    drop = lse.double() - pruned_lse.double()
    assert drop.max() <= -math.log1p(-eps) + 1e-5
    assert drop.min() >= -1e-5


def test_pruning_drops_something(device: str) -> None:
    """Poison in keys that cannot matter is not read where they are dropped."""
    q, k, v = (torch.randn(1, 1000, 2, 16, device=device) * 0.1 for _ in range(3))
    log_f = torch.full((1, 1000, 2), -1.0, device=device)
    expected = ops.forgetting_attention(q, k, v, log_f)
    v[:, :200] = float("nan")
    o = ops.forgetting_attention(q, k, v, log_f, prune=1e-6)
    if device == "cpu":  # elsewhere it may, and only tensor cores do
        assert o[:, 500:].isfinite().all()
        assert (o[:, 500:] - expected[:, 500:]).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_pruned_rows(dtype: torch.dtype, device: str) -> None:
    case = AttentionCase(queries=500, heads=2, head_dim=16, dtype=dtype, gates="normal", prune=1e-9)
    attention_cases.check(case, device)


# What reaches what --------------------------------------------------------------------------------


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality; NaN equals NaN."""
    return torch.equal(left.nan_to_num(7), right.nan_to_num(7))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lengths", [None, ((40, 0), (0, 0), (60, 10), (50, 0))], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_reaches_what_may_see_it_only(
    dtype: torch.dtype, poison: float, lengths: tuple | None, window: int | None, device: str
) -> None:
    case = AttentionCase(queries=150, batch=1, heads=2, key_heads=2, head_dim=16, dtype=dtype)
    case = replace(case, lengths=lengths, window=window, gates="open")
    a = inputs_of(case, device)
    clean, _ = call(case, a)
    of_queries = [0, 150] if lengths is None else a["cu_seqlens"].tolist()
    keys = a.get("cu_seqlens_k")
    of_keys = of_queries if keys is None else keys.tolist()
    for name in ("q", "k", "v", "log_f"):
        for t in (0, 15, 63, 64, 99, 149):
            value = a[name].clone()
            value[(0, t, 1, 0) if name != "log_f" else (0, t, 1)] = (
                poison if name in ("k", "v") else float("nan")
            )
            o, _ = call(case, a | {name: value})
            bounds = of_queries if name == "q" else of_keys
            n = max(i for i, start in enumerate(bounds[:-1]) if start <= t < bounds[i + 1])
            end = of_queries[n + 1]
            token = t if name == "q" else end - (of_keys[n + 1] - t)  # its row among the queries
            rows = slice(max(token, of_queries[n]), end)
            if name == "q":
                rows = slice(t, t + 1)
            elif window is not None and name != "log_f":
                rows = slice(rows.start, max(rows.start, min(end, token + window)))
            hit = torch.zeros_like(clean, dtype=torch.bool)
            hit[0, rows, 1, slice(0, 1) if name == "v" else slice(None)] = True
            if device == "cuda" and dtype is torch.bfloat16:
                # Tiles with a value that is not finite are summed another way.
                torch.testing.assert_close(o[~hit], clean[~hit], rtol=2e-2, atol=2e-2)
            else:
                assert equal_bits(o[~hit], clean[~hit]), f"{name} at {t} reaches too much"
            first_gate = name == "log_f" and t == of_keys[n]
            if rows.start < rows.stop and token == rows.start and not first_gate and name != "k":
                assert not o[0, rows.start, 1, 0].isfinite(), f"{name} at {t} does not arrive"


def test_nothing_leaks_across_a_boundary(device: str) -> None:
    """Values in one sequence change no other; a loss over one leaves exact zeros elsewhere."""
    case = AttentionCase(lengths=((5, 0), (40, 0), (0, 0), (90, 0), (3, 0)), heads=2, head_dim=16)
    a = inputs_of(case, device)
    clean, _ = call(case, a)
    offsets = a["cu_seqlens"].tolist()
    names = ("q", "k", "v", "log_f")
    leaves = {name: a[name].detach().requires_grad_() for name in names}
    o, _ = call(case, a | leaves)
    for start, end in zip(offsets, offsets[1:], strict=False):
        for name in ("k", "v", "log_f"):
            value = a[name].clone()
            value[:, start:end] = float("nan")
            found, _ = call(case, a | {name: value})
            for rows in (slice(0, start), slice(end, None)):
                assert torch.equal(found[:, rows], clean[:, rows])
        loss = torch.zeros_like(o)
        loss[:, start:end] = 1
        for grad in torch.autograd.grad(o, list(leaves.values()), loss, retain_graph=True):
            assert not grad[:, :start].count_nonzero()
            assert not grad[:, end:].count_nonzero()


@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 0, 2), (2, 0, 7, 2)], ids=str)
def test_empty_dimensions(shape: tuple[int, int, int, int], device: str) -> None:
    batch, queries, keys, heads = shape
    q = torch.randn(batch, queries, heads, 8, device=device, requires_grad=True)
    k, v = (torch.randn(batch, keys, heads, 8, device=device).requires_grad_() for _ in range(2))
    log_f = -torch.rand(batch, keys, heads, device=device)
    o, lse = ops.forgetting_attention(q, k, v, log_f.requires_grad_(), return_lse=True)
    assert o.shape == q.shape
    assert lse.shape == (batch, heads, queries)
    for leaf, grad in zip(
        (q, k, v, log_f), torch.autograd.grad((o.sum(), lse.sum()), (q, k, v, log_f)), strict=True
    ):
        assert grad.shape == leaf.shape
        assert not grad.count_nonzero()


def test_log_sum_exp_alone_and_output_alone(device: str) -> None:
    for grads in ("o", "lse"):
        attention_cases.check(AttentionCase(queries=70, head_dim=16, grads=grads), device)


# Repeatability ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_repeatable(dtype: torch.dtype, device: str) -> None:
    """Results have the same bits again and again, on the CPU with any number of threads."""
    case = AttentionCase(queries=300, batch=1, heads=4, key_heads=2, head_dim=40, dtype=dtype)
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first = attention_cases.run(case, device, backward=True)
        for run in range(5):
            torch.set_num_threads(1 + run)
            for name, value in attention_cases.run(case, device, backward=True).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)


def test_what_training_keeps(device: str) -> None:
    """The inputs, o and lse; nothing of the size of scores."""
    case = AttentionCase(queries=100, head_dim=16)
    a = inputs_of(case, device)
    leaves = {name: a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        o, lse = call(case, a | leaves)
    allowed = {t.data_ptr() for t in (*leaves.values(), o, lse)}
    assert len(kept) == 6
    assert {t.data_ptr() for t in kept} == allowed
