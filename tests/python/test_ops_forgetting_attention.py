"""`forgetting_attention`: results and gradients against the oracle, what its options promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import error_rule, recurrence
from support import forgetting_attention_cases as attention_cases
from support import forgetting_attention_oracle as attention_oracle
from support.forgetting_attention_cases import AttentionCase, relative
from support.op_properties import check_export
from torch import Tensor

import tidegate

ops = tidegate.ops


def inputs_of(case: AttentionCase, device: str) -> dict[str, Tensor | None]:
    """The op's keyword arguments."""
    placed = attention_cases.on_device(case, device)
    del placed["do"], placed["dlse"]
    return placed | case.options()


def call(case: AttentionCase, arguments: dict) -> tuple[Tensor, Tensor]:
    return ops.forgetting_attention(**arguments, return_lse=True)


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


@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", ["normal", "open", "log -1e4", "zero"])
def test_pruning_is_bounded(gates: str, dtype: torch.dtype, eps: float, device: str) -> None:
    """docs/numerics.md: no element of o moves by more than 2 eps max|v|, lse by -log(1 - eps)."""
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


# Inside torch -------------------------------------------------------------------------------------

TORCH_CASES = [
    AttentionCase(queries=9),
    AttentionCase(queries=9, past=3, window=4, dtype=torch.bfloat16, prune=1e-6, scale=0.5),
    AttentionCase(lengths=((3, 0), (0, 0), (6, 2)), gate_dtype=torch.float32),
]
raw = torch.ops.tidegate


def positional(arguments: dict) -> tuple:
    """As torch.ops.tidegate takes them."""
    order = ("q", "k", "v", "log_f", "scale", "window", "cu_seqlens", "cu_seqlens_k", "prune")
    return tuple(arguments[name] for name in order)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck(case: AttentionCase, grad: bool, device: str) -> None:
    a = inputs_of(case, device)
    if grad:
        a |= {name: a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")}
    torch.library.opcheck(raw.forgetting_attention.default, positional(a))


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck_of_the_backward_op(case: AttentionCase, device: str) -> None:
    a = inputs_of(case, device)
    o, lse = call(case, a)
    options = [a[name] for name in ("scale", "window", "cu_seqlens", "cu_seqlens_k", "prune")]
    tensors = [a[name] for name in ("q", "k", "v", "log_f")]
    torch.library.opcheck(
        raw.forgetting_attention_backward.default,
        (torch.ones_like(o), torch.ones_like(lse), *tensors, o, lse, *options),
    )


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_fake_results_match_real_ones(case: AttentionCase) -> None:
    a = inputs_of(replace(case, layout="time_major"), "cpu")
    fake = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in a.items()}
    for real, meta in zip(call(case, a), call(case, fake), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def test_compiled_once_for_all_shapes(device: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def step(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
        o, lse = ops.forgetting_attention(q * 2, k, v, log_f * 1, window=7, return_lse=True)
        return (o * 2).sum() + lse.cos().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for batch, queries, past, heads in ((3, 9, 4, 4), (5, 17, 2, 6), (7, 10, 30, 8)):
        case = AttentionCase(batch=batch, queries=queries, past=past, heads=heads, key_heads=2)
        a = inputs_of(case, device)
        leaves = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]
        expected, found = step(*leaves), fast(*leaves)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        pairs = zip(
            torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
        )
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1, "a shape has caused a recompilation"


def test_autocast(device: str) -> None:
    a = inputs_of(AttentionCase(queries=40, head_dim=16), device)
    tensors = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]
    with torch.autocast(device, dtype=torch.bfloat16):
        o, lse = ops.forgetting_attention(*tensors, return_lse=True)
    expected = ops.forgetting_attention(*(t.bfloat16() for t in tensors[:3]), tensors[3])
    assert o.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    assert torch.equal(o, expected)
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(o.float().sum(), tensors))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    a = inputs_of(AttentionCase(queries=70, head_dim=16), device)
    leaves = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]
    plain = torch.autograd.grad(ops.forgetting_attention(*leaves).sin().sum(), leaves)
    again = checkpoint(ops.forgetting_attention, *leaves, use_reentrant=reentrant)
    again.sin().sum().backward()
    for leaf, grad in zip(leaves, plain, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-6, atol=1e-6)


def test_what_has_no_derivative_says_so(device: str) -> None:
    a = inputs_of(AttentionCase(queries=5), device)
    tensors = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]
    o = ops.forgetting_attention(*tensors)
    (dq,) = torch.autograd.grad(o.sin().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="forgetting_attention: double backward"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="forgetting_attention: vmap is not supported"):
        torch.vmap(ops.forgetting_attention)(*(t.detach()[None] for t in tensors))


def test_modes_without_gradients(device: str) -> None:
    a = inputs_of(AttentionCase(queries=70, head_dim=16), device)
    leaves = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]
    expected = ops.forgetting_attention(*leaves, return_lse=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = ops.forgetting_attention(*leaves, return_lse=True)
        for left, right in zip(found, expected, strict=True):
            assert not left.requires_grad
            assert torch.equal(left, right)


def test_export_with_dynamic_time(device: str) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ops.forgetting_attention(*tensors, window=7, scale=0.5, return_lse=True)

    def example(time: int) -> list[Tensor]:
        a = inputs_of(AttentionCase(queries=time), device)
        return [a[name] for name in ("q", "k", "v", "log_f")]

    check_export(function, example, over_time=(True,) * 4)


def test_outputs_do_not_alias_inputs(device: str) -> None:
    a = inputs_of(AttentionCase(queries=1, heads=1), device)
    o = ops.forgetting_attention(a["q"], a["k"], a["v"], a["log_f"])
    assert torch.equal(o, a["v"].expand_as(o))
    assert o.data_ptr() != a["v"].data_ptr()


@pytest.mark.gpu
def test_in_a_graph() -> None:
    from conftest import require_cuda

    require_cuda()
    a = inputs_of(AttentionCase(queries=100, head_dim=64, dtype=torch.bfloat16), "cuda")
    leaves = [a[name].detach().requires_grad_() for name in ("q", "k", "v", "log_f")]

    def step() -> tuple[Tensor, ...]:
        o = ops.forgetting_attention(*leaves, prune=1e-6)
        return (o, *torch.autograd.grad(o.float().sum(), leaves))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(-leaf.abs())
    graph.replay()
    for left, right in zip(captured, step(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-2)


# Decoding -----------------------------------------------------------------------------------------


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


def test_step_inside_torch(device: str) -> None:
    case = AttentionCase(batch=2, heads=4, key_heads=2, head_dim=8)
    q, k, v, gates = step_inputs(case, 12, device)
    lengths = torch.tensor([12, 3], dtype=torch.int32, device=device)
    torch.library.opcheck(raw.forgetting_attention_step.default, (q, k, v, gates, lengths, None, 5))
    with torch.inference_mode():
        expected = ops.forgetting_attention_step(q, k, v, gates, lengths)
    with torch.autocast(device, dtype=torch.bfloat16):  # the cache decides
        found = ops.forgetting_attention_step(q.bfloat16(), k, v, gates, lengths)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match=r"forgetting_attention_step: q requires a gradient"):
        ops.forgetting_attention_step(q.requires_grad_(), k, v, gates, lengths)


# Bad input ----------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, object]:
    return {
        "q": zeros(2, 6, 4, 8),
        "k": zeros(2, 7, 2, 8),
        "v": zeros(2, 7, 2, 8),
        "log_f": zeros(2, 7, 4),
    }


def packed(queries: list[int], keys: list[int] | None) -> dict[str, object]:
    out = {"q": zeros(1, 6, 4, 8), "k": zeros(1, 7, 2, 8), "v": zeros(1, 7, 2, 8)}
    out |= {"log_f": zeros(1, 7, 4), "cu_seqlens": torch.tensor(queries)}
    return out if keys is None else out | {"cu_seqlens_k": torch.tensor(keys)}


def raises(function, *parts: str, **arguments: object) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(**arguments)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


BAD = [
    ({"q": zeros(2, 6, 8)}, ["q must have shape [B, Tq, Hq, D]", "[2, 6, 8]"]),
    ({"q": zeros(2, 6, 4, 8, dtype=torch.int64)}, ["q must be float32", "int64"]),
    ({"q": zeros(2, 6, 5, 8)}, ["multiple of k's", "Hq = 5 and Hkv = 2"]),
    ({"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 8)}, ["multiple", "Hq = 4 and Hkv = 3"]),
    ({"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 8)}, ["multiple", "Hkv = 0"]),
    (
        {"k": zeros(2, 7, 2, 9)},
        ["k must have shape [B, Tk, Hkv, D] = [2, 7, 2, 8]", "[2, 7, 2, 9]"],
    ),
    ({"k": zeros(3, 7, 2, 8)}, ["k must have shape", "[3, 7, 2, 8]"]),
    ({"k": zeros(2, 7, 2, 8, dtype=torch.float16)}, ["k must be float32 like q", "float16"]),
    ({"v": zeros(2, 6, 2, 8)}, ["v must have shape [2, 7, 2, 8] like k", "[2, 6, 2, 8]"]),
    ({"log_f": zeros(2, 7, 2)}, ["log_f must have shape [B, Tk, Hq] = [2, 7, 4]", "[2, 7, 2]"]),
    ({"log_f": zeros(2, 6, 4)}, ["log_f must have shape", "[2, 6, 4]"]),
    ({"log_f": zeros(2, 7, 4, 1)}, ["log_f must have shape", "[2, 7, 4, 1]"]),
    ({"log_f": zeros(2, 7, 4, dtype=torch.float64)}, ["log_f must be float32", "float64"]),
    ({"q": zeros(2, 8, 4, 8)}, ["must not have more tokens than k", "Tq = 8 and Tk = 7"]),
    ({"window": 0}, ["window must be at least 1, got 0"]),
    ({"window": -3}, ["window must be at least 1, got -3"]),
    ({"scale": 0.0}, ["scale must be above 0", "got 0"]),
    ({"scale": -1.0}, ["scale must be above 0", "got -1"]),
    ({"scale": float("nan")}, ["scale must be above 0", "nan"]),
    ({"prune": 1.0}, ["prune must lie in [0, 1), got 1"]),
    ({"prune": -0.1}, ["prune must lie in [0, 1), got -0.1"]),
    ({"cu_seqlens": torch.tensor([0, 6])}, ["q must have a batch of 1"]),
    ({"cu_seqlens_k": torch.tensor([0, 7])}, ["cu_seqlens must be given when cu_seqlens_k is"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bad_input(changes: dict, parts: list[str], where: str) -> None:
    arguments = {
        k: v.to(where) if isinstance(v, Tensor) else v for k, v in (good() | changes).items()
    }
    raises(ops.forgetting_attention, "forgetting_attention: ", *parts, **arguments)


BAD_OFFSETS = [
    (packed([0, 6], None), ["as many tokens as q", "Tq = 6 and Tk = 7"]),
    (packed([0, 2, 6], [0, 7]), ["cu_seqlens_k must have shape [N + 1] = [3]", "[2]"]),
    (packed([0, 2, 6], [0, 1, 7]), ["more tokens than k", "Tq = 2 and Tk = 1 in sequence 0"]),
    (packed([0, 2, 5], [0, 2, 7]), ["cu_seqlens must rise from 0 to T = 6", "[0, 2, 5]"]),
    (packed([0, 2, 6], [0, 8, 7]), ["cu_seqlens_k must rise from 0 to Tk = 7", "[0, 8, 7]"]),
    (
        packed([0, 2, 6], [0, 2, 7]) | {"cu_seqlens_k": torch.tensor([0, 2, 7], dtype=torch.int32)},
        ["cu_seqlens_k must be int64 like cu_seqlens", "int32"],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD_OFFSETS, ids=lambda value: str(value)[-60:])
def test_bad_offsets(arguments: dict, parts: list[str]) -> None:
    raises(ops.forgetting_attention, "forgetting_attention: ", *parts, **arguments)


def test_mixed_devices() -> None:
    for name in ("k", "v", "log_f"):
        arguments = good()
        arguments[name] = arguments[name].to("meta")
        raises(
            ops.forgetting_attention, "forgetting_attention: ", f"got {name} on meta", **arguments
        )


@pytest.mark.parametrize("head_dim", [0, 257])
def test_head_dimensions_that_no_kernel_takes(head_dim: int, device: str) -> None:
    q = torch.zeros(1, 3, 2, head_dim, device=device)
    log_f = torch.zeros(1, 3, 2, device=device)
    parts = ["forgetting_attention: D must be from 1 to 256", f"D = {head_dim}"]
    raises(ops.forgetting_attention, *parts, q=q, k=q, v=q, log_f=log_f)


def test_gates_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    arguments = {k: v.to(device) for k, v in good().items()}
    arguments["log_f"][0, 3, 1] = 0.5
    ops.forgetting_attention(**arguments)
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    raises(ops.forgetting_attention, "log_f must be at most 0", "up to 0.5", **arguments)


def good_step() -> dict[str, object]:
    return {
        "q": zeros(2, 4, 8),
        "k_cache": zeros(2, 7, 2, 8),
        "v_cache": zeros(2, 7, 2, 8),
        "gate_cache": zeros(2, 7, 4),
        "lengths": torch.tensor([3, 7], dtype=torch.int32),
    }


BAD_STEP = [
    ({"q": zeros(2, 1, 4, 8)}, ["q must have shape [B, Hq, D]", "[2, 1, 4, 8]"]),
    ({"q": zeros(2, 3, 8)}, ["multiple of k_cache's", "Hq = 3 and Hkv = 2"]),
    ({"k_cache": zeros(2, 7, 2, 9)}, ["k_cache must have shape [B, Tmax, Hkv, D]"]),
    ({"v_cache": zeros(2, 8, 2, 8)}, ["v_cache must have shape", "like k_cache"]),
    ({"gate_cache": zeros(2, 7, 2)}, ["gate_cache must have shape [B, Tmax, Hq] = [2, 7, 4]"]),
    ({"gate_cache": zeros(2, 7, 4, dtype=torch.bfloat16)}, ["gate_cache must be float32"]),
    ({"lengths": torch.tensor([3, 7])}, ["lengths must be int32", "int64"]),
    ({"lengths": torch.tensor([3], dtype=torch.int32)}, ["lengths must have shape [B] = [2]"]),
    ({"window": 0}, ["window must be at least 1"]),
    ({"scale": 0.0}, ["scale must be above 0"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD_STEP, ids=lambda value: str(value)[:60])
def test_bad_input_of_a_step(changes: dict, parts: list[str]) -> None:
    function = ops.forgetting_attention_step
    raises(function, "forgetting_attention_step: ", *parts, **good_step() | changes)


def test_values_of_a_step_are_checked_when_debugging(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    step = ops.forgetting_attention_step
    arguments = {k: v.to(device) for k, v in good_step().items()}
    arguments["v_cache"].normal_()
    arguments["gate_cache"][0, 3:] = 7.0  # behind the first row's three tokens
    limits = torch.tensor([0, 7], dtype=torch.int32, device=device)
    beyond = torch.tensor([-2, 9], dtype=torch.int32, device=device)
    assert torch.equal(
        step(**arguments | {"lengths": beyond}), step(**arguments | {"lengths": limits})
    )
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    step(**arguments)
    step(**arguments | {"lengths": limits})
    for wrong in ([3, 8], [-1, 7]):
        lengths = torch.tensor(wrong, dtype=torch.int32, device=device)
        parts = [
            "forgetting_attention_step: lengths must lie in [0, Tmax = 7]",
            f"from {min(wrong)}",
        ]
        raises(step, *parts, **arguments | {"lengths": lengths})
    arguments["gate_cache"][1, 6, 2] = 0.5
    raises(step, "forgetting_attention_step: gate_cache must be at most 0", "0.5", **arguments)
