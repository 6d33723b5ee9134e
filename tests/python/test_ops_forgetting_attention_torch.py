"""forgetting_attention inside torch: opcheck, compile, autocast, checkpointing, export, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.forgetting_attention_cases import AttentionCase, call, inputs_of
from support.op_properties import check_export
from torch import Tensor

import tidegate

ops = tidegate.ops


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
