"""tidegate.compat.fla: fla-core 0.6.0's signatures and conventions, and its ops' definitions."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import compat_oracle as naive
from support.signatures import FLA_LAYERS, FLA_OPS, of_library, recorded
from torch import Tensor

from tidegate.compat import fla

BOUNDS = [0, 3, 3, 10]  # of packed sequences, one of which is empty


def ours() -> dict[str, list]:
    return of_library(
        {name: getattr(fla, name) for name in FLA_OPS},
        {name: getattr(fla, name) for name in FLA_LAYERS},
    )


@pytest.mark.parametrize("name", sorted(recorded()))
def test_signatures_are_those_recorded(name: str) -> None:
    assert ours()[name] == recorded()[name]


def test_recorded_signatures_are_the_installed_ones() -> None:
    metadata = importlib.import_module("importlib.metadata")
    try:
        version = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    if version != "0.6.0":
        pytest.skip(f"fla-core is {version}; 0.6.0 was recorded")
    layers = pytest.importorskip("fla.layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = {name: getattr(importlib.import_module(m), name) for name, m in FLA_OPS.items()}
    assert of_library(library, {n: getattr(layers, n) for n in FLA_LAYERS}) == recorded()


def rand(*shape: int, dtype=torch.float64, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def gates(*shape: int) -> Tensor:
    """Log gates, most of them open, some nearly shut."""
    return F.logsigmoid(4 * torch.randn(*shape, dtype=torch.float64) + 1).requires_grad_()


def same_with_gradients(
    call: Callable[..., tuple], exact: Callable[..., tuple], inputs: dict[str, Tensor]
) -> None:
    """Outputs and the gradients of all inputs, within roundings of float64."""
    results = []
    for run in (call, exact):
        out = run(**inputs)
        weights = [torch.randn(t.shape, generator=seeded(k)).double() for k, t in enumerate(out)]
        loss = sum((t.double() * w).sum() for t, w in zip(out, weights, strict=True))
        results.append((out, torch.autograd.grad(loss, list(inputs.values()))))
    (out, grads), (expected, expected_grads) = results
    for t, e in zip(out, expected, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-9, atol=1e-10)
    for name, t, e in zip(inputs, grads, expected_grads, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"d{n}: {m}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pieces(bounds: list[int], run: Callable[[slice, int], tuple[Tensor, Tensor]]) -> tuple:
    """A definition for each packed sequence: outputs end to end, states stacked."""
    found = [run(slice(a, b), n) for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))]
    return torch.cat([o for o, _ in found], 1), torch.cat([h for _, h in found])


@pytest.mark.parametrize("op", ["chunk_hgrn", "fused_recurrent_hgrn"])
@pytest.mark.parametrize("has_state", [False, True])
def test_hgrn(op: str, has_state: bool) -> None:
    torch.manual_seed(0)
    inputs = {"x": rand(2, 9, 5), "g": gates(2, 9, 5)}
    if has_state:
        inputs["initial_state"] = rand(2, 5)
    same_with_gradients(
        lambda **t: getattr(fla, op)(**t, output_final_state=True),
        lambda x, g, initial_state=None: naive.hgrn(x, g, initial_state),
        inputs,
    )


def test_hgrn_packed() -> None:
    torch.manual_seed(1)
    inputs = {"x": rand(1, 10, 5), "g": gates(1, 10, 5), "initial_state": rand(3, 5)}

    def exact(x: Tensor, g: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        def one(s: slice, n: int) -> tuple[Tensor, Tensor]:
            h0 = initial_state[n : n + 1]
            return naive.hgrn(x[:, s], g[:, s], h0) if s.stop > s.start else (x[:, s], h0)

        return pieces(BOUNDS, one)

    cu_seqlens = torch.tensor(BOUNDS)
    same_with_gradients(
        lambda **t: fla.fused_recurrent_hgrn(**t, output_final_state=True, cu_seqlens=cu_seqlens),
        exact,
        inputs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hgrn_returns_what_fla_does(dtype: torch.dtype) -> None:
    x, g = torch.randn(2, 7, 4).to(dtype), F.logsigmoid(torch.randn(2, 7, 4)).to(dtype)
    for h0 in (None, torch.randn(2, 4), torch.randn(2, 4).to(dtype)):
        o, state = fla.chunk_hgrn(x, g, h0, True)
        assert (o.dtype, state.dtype) == (dtype, torch.float32)
        o, state = fla.fused_recurrent_hgrn(x, g, h0, True)
        assert (o.dtype, state.dtype) == (dtype, dtype)
    assert fla.chunk_hgrn(x, g)[1] is None
    assert fla.fused_recurrent_hgrn(x, g)[1] is None


def gla_inputs(batch: int, time: int, states: int, v_first: bool = False) -> dict[str, Tensor]:
    heads, k, v = 2, 4, 3
    state = (states, heads, v, k) if v_first else (states, heads, k, v)
    return {
        "q": rand(batch, time, heads, k),
        "k": rand(batch, time, heads, k),
        "v": rand(batch, time, heads, v),
        "gk": gates(batch, time, heads, k),
        "initial_state": rand(*state),
    }


def by_name(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op, whose gate is `g` or `gk`."""
    call = getattr(fla, op)
    if op == "fused_recurrent_gla":
        return call
    return lambda gk, **t: call(g=gk, **t)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("op", ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"])
def test_gla(op: str, scale: float | None, v_first: bool) -> None:
    torch.manual_seed(2)
    options = {"scale": scale, "output_final_state": True, "state_v_first": v_first}

    def exact(q, k, v, gk, initial_state):
        turn = (lambda h: h.transpose(-1, -2)) if v_first else (lambda h: h)
        o, state = naive.gla(q, k, v, gk, turn(initial_state), scale)
        return o, turn(state)

    same_with_gradients(
        lambda **t: by_name(op)(**t, **options), exact, gla_inputs(2, 9, 2, v_first)
    )


@pytest.mark.parametrize("op", ["chunk_gla", "fused_recurrent_gla"])
def test_gla_packed(op: str) -> None:
    torch.manual_seed(3)

    def exact(q, k, v, gk, initial_state):
        def one(s: slice, n: int) -> tuple[Tensor, Tensor]:
            h0 = initial_state[n : n + 1]
            if s.stop == s.start:
                return v[:, s], h0
            return naive.gla(q[:, s], k[:, s], v[:, s], gk[:, s], h0)

        return pieces(BOUNDS, one)

    more = {"output_final_state": True, "cu_seqlens": torch.tensor(BOUNDS)}
    same_with_gradients(lambda **t: by_name(op)(**t, **more), exact, gla_inputs(1, 10, 3))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_fused_recurrent_gla_in_reverse_and_without_gate(gated: bool, reverse: bool) -> None:
    torch.manual_seed(4)
    inputs = gla_inputs(2, 6, 2)
    if not gated:
        del inputs["gk"]
    same_with_gradients(
        lambda **t: fla.fused_recurrent_gla(**t, output_final_state=True, reverse=reverse),
        lambda q, k, v, initial_state, gk=None: naive.gla(
            q, k, v, gk, initial_state, reverse=reverse
        ),
        inputs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_gla_returns_what_fla_does(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 7, 2, 4).to(dtype) for _ in range(3))
    g = F.logsigmoid(torch.randn(2, 7, 2, 4)).to(gate_dtype)
    h0 = torch.randn(2, 2, 4, 4)
    for start in (None, h0, h0.to(dtype)):
        for o, state in (
            fla.chunk_gla(q, k, v, g, initial_state=start, output_final_state=True),
            fla.fused_recurrent_gla(q, k, v, g, initial_state=start, output_final_state=True),
        ):
            assert (o.dtype, state.dtype) == (dtype, torch.float32)
            assert state.is_contiguous()
    assert fla.chunk_gla(q, k, v, g)[1] is None


def test_gla_of_mixed_dtypes() -> None:
    """fla's kernels read each tensor in its own dtype; o is in v's, or q's, as theirs."""
    q, k, v = torch.randn(1, 5, 2, 4).bfloat16(), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    g = F.logsigmoid(torch.randn(1, 5, 2, 4))
    exact, _ = naive.gla(q, k, v, g, None)
    assert fla.chunk_gla(q, k, v, g)[0].dtype == torch.float32
    torch.testing.assert_close(fla.chunk_gla(q, k, v, g)[0], exact.float(), rtol=1e-4, atol=1e-5)
    assert fla.fused_recurrent_gla(q, k, v, g)[0].dtype == torch.bfloat16
    o = fla.parallel_forgetting_attn(q, k, v.bfloat16(), g[..., 0])
    assert o.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("scale", "window", "values"), [(None, None, 4), (0.7, 3, 4), (None, 2, 3), (0.1, None, 7)]
)
def test_forgetting_attention(scale: float | None, window: int | None, values: int) -> None:
    torch.manual_seed(5)
    inputs = {
        "q": rand(2, 9, 4, 4),
        "k": rand(2, 9, 2, 4),
        "v": rand(2, 9, 2, values),
        "g": gates(2, 9, 4),
    }
    same_with_gradients(
        lambda **t: (fla.parallel_forgetting_attn(**t, scale=scale, window_size=window),),
        lambda **t: (naive.forgetting(**t, scale=scale, window=window),),
        inputs,
    )


def test_forgetting_attention_packed() -> None:
    torch.manual_seed(6)
    inputs = {"q": rand(1, 10, 2, 4), "k": rand(1, 10, 1, 4), "v": rand(1, 10, 1, 4)}
    inputs["g"] = gates(1, 10, 2)

    def exact(**t: Tensor) -> tuple[Tensor]:
        spans = [slice(a, b) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False) if b > a]
        return (
            torch.cat([naive.forgetting(**{n: x[:, s] for n, x in t.items()}) for s in spans], 1),
        )

    cu_seqlens = torch.tensor(BOUNDS)
    same_with_gradients(
        lambda **t: (fla.parallel_forgetting_attn(**t, cu_seqlens=cu_seqlens),), exact, inputs
    )


@pytest.mark.parametrize("empty", [False, True])
def test_rwkv4(empty: bool) -> None:
    torch.manual_seed(7)
    state = torch.zeros(2, 3, 1, 5, dtype=torch.float64) if empty else rand(2, 3, 1, 5, grad=False)
    state[:, 1].abs_()  # a denominator
    inputs = {"w": rand(5), "u": rand(5), "k": rand(2, 9, 5), "v": rand(2, 9, 5)}
    inputs["state"] = state.requires_grad_()

    def call(**t: Tensor) -> tuple[Tensor, Tensor]:
        o, end = fla.fused_recurrent_rwkv4(**t)
        assert end.shape == (2, 3, 1, 5)
        alpha, beta, eps = end.squeeze(2).unbind(1)
        return o, torch.stack([alpha * eps.exp(), beta * eps.exp()], 1)

    same_with_gradients(call, naive.rwkv4, inputs)


def test_rwkv4_can_be_split() -> None:
    torch.manual_seed(8)
    w, u, k, v = torch.randn(5), torch.randn(5), torch.randn(2, 9, 5), torch.randn(2, 9, 5)
    start = torch.zeros(2, 3, 1, 5)
    whole, _ = fla.fused_recurrent_rwkv4(w, u, k, v, start)
    first, state = fla.fused_recurrent_rwkv4(w, u, k[:, :4], v[:, :4], start)
    rest, _ = fla.fused_recurrent_rwkv4(w, u, k[:, 4:], v[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)


def test_what_has_no_counterpart_raises_by_name() -> None:
    q = torch.randn(1, 4, 2, 4)
    with pytest.raises(NotImplementedError, match="fused_recurrent_gla: gv has no counterpart"):
        fla.fused_recurrent_gla(q, q, q, gv=q)
    with pytest.raises(NotImplementedError, match="fused_recurrent_gla: head_first=True"):
        fla.fused_recurrent_gla(q, q, q, head_first=True)
    with pytest.raises(NotImplementedError, match="fused_recurrent_gla: offsets has no counter"):
        fla.fused_recurrent_gla(q, q, q, offsets=None)
    fla.fused_recurrent_gla(q, q, q, head_first=False)
    for layer in (fla.HGRNAttention, fla.HGRN2Attention, fla.GatedLinearAttention):
        with pytest.raises(NotImplementedError, match=f"{layer.__name__}: use_short_conv=True"):
            layer(hidden_size=128, use_short_conv=True)
    with pytest.raises(NotImplementedError, match="GatedLinearAttention: feature_map='hedgehog'"):
        fla.GatedLinearAttention(hidden_size=64, feature_map="hedgehog")


def test_errors_are_those_of_fla() -> None:
    q = torch.randn(2, 4, 2, 4)
    bounds = torch.tensor([0, 4])
    for call in (
        lambda: fla.chunk_gla(q, q, q, -q.abs(), cu_seqlens=bounds),
        lambda: fla.fused_recurrent_gla(q, q, q, cu_seqlens=bounds),
        lambda: fla.fused_recurrent_hgrn(q[:, :, 0], q[:, :, 0], cu_seqlens=bounds),
        lambda: fla.parallel_forgetting_attn(q, q, q, -q[..., 0].abs(), cu_seqlens=bounds),
    ):
        with pytest.raises(ValueError, match="batch size is expected to be 1 rather than 2"):
            call()
    with pytest.raises(ValueError, match="number of initial states"):
        fla.chunk_gla(*[q[:1]] * 4, initial_state=torch.zeros(3, 2, 4, 4), cu_seqlens=bounds)
    with pytest.raises(AssertionError, match="q, k, g must have the same shape"):
        fla.chunk_gla(q, q, q, q[..., :1])
    with pytest.raises(ValueError, match="Cannot pass both"):
        fla.fused_recurrent_gla(q, q, q, state_v_first=True, transpose_state_layout=True)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        fla.fused_recurrent_gla(q, q, q, transpose_state_layout=True)
