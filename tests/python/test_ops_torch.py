"""The ops inside torch: opcheck, compile, export, autocast, checkpointing, and what they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import cases, gla_cases, scan_cases
from support.gla_cases import GlaCase
from support.op_calls import CASES, arguments_of, call, gradients, ids, loss_of, positional
from support.op_properties import opcheck
from support.scan_cases import ScanCase
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate

# Schemas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ops.__all__, "gated_rnn_with_logits"])
def test_schema_has_the_arguments_and_defaults_of_the_function(name: str) -> None:
    """So that `torch.ops.tidegate.<name>` can be called with as little as the function can."""
    arguments = getattr(raw, name).default._schema.arguments
    signature = inspect.signature(getattr(ops, name)).parameters.values()
    parameters = [p for p in signature if p.name != "return_lse"]  # the op always returns lse
    assert [a.name for a in arguments] == [p.name for p in parameters]
    # A state to overwrite has no default, and so nothing before it can have one in a schema.
    without = 1 + max((i for i, a in enumerate(arguments) if a.is_write), default=-1)
    for index, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True)):
        expected = parameter.default is not parameter.empty and index >= without
        assert argument.has_default_value() == expected, argument.name
        if expected:
            assert argument.default_value == parameter.default, argument.name


# opcheck ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", CASES, **ids)
def test_opcheck(case: ScanCase, grad: bool, device: str) -> None:
    """With gradients test_compiled_once_for_all_shapes traces every case."""
    named = arguments_of(case, device, grad=grad)
    opcheck(getattr(raw, case.op).default, positional(case, named), traced=not grad)


@pytest.mark.parametrize("time", [0, 1])
def test_opcheck_of_short_sequences(time: int, device: str) -> None:
    for case in (CASES[0], CASES[3]):
        short = replace(case, time=time)
        named = arguments_of(short, device, grad=True)
        torch.library.opcheck(getattr(raw, case.op).default, positional(short, named))


@pytest.mark.parametrize("case", CASES, **ids)
def test_opcheck_of_the_backward_op(case: ScanCase, device: str) -> None:
    named = arguments_of(case, device)
    h, final = call(case, named)
    if isinstance(case, GlaCase):
        kept = positional(case, named)
    elif case.op == "linear_scan":
        kept = (named["a"], h, named["h0"], case.reverse, named["cu_seqlens"])
    elif case.op == "lru_scan":
        x, *rest = positional(case, named)
        kept = (x, h, *rest)
    else:
        c, f, *rest = positional(case, named)
        kept = (c, f, h, *rest)
    torch.library.opcheck(
        getattr(raw, f"{case.op}_backward").default,
        (torch.ones_like(h), torch.ones_like(final), *kept),
    )


def test_opcheck_of_steps_and_initialisers(device: str) -> None:
    def ones(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=device)

    torch.library.opcheck(raw.linear_scan_step.default, (ones(2, 4), ones(4), ones(2, 4)))
    torch.library.opcheck(
        raw.hgru_step.default, (ones(2, 8), ones(2, 4), ones(4), ones(4), ones(2, 8), "silu")
    )
    torch.library.opcheck(
        raw.lru_scan_step.default, (ones(2, 8), ones(4), ones(4), ones(4), ones(2, 8))
    )
    tokens = [ones(2, 3, 4) for _ in range(4)]
    state = ones(2, 3, 4, 4)
    torch.library.opcheck(raw.gated_linear_attention_step.default, (*tokens, state, 0.5))
    torch.library.opcheck(
        raw.hgrn2_step.default, (*tokens[:3], ones(3, 4), state.clone(), 0.5, "silu", "sigmoid")
    )
    torch.library.opcheck(raw.init_constant_.default, (ones(4), 0.1))
    torch.library.opcheck(raw.init_rope_theta_.default, (ones(4),))


@pytest.mark.parametrize("case", [*scan_cases.KINDS, *gla_cases.KINDS], **ids)
def test_fake_results_match_real_ones(case: ScanCase) -> None:
    for varied in (replace(case, h0="data"), replace(case, lengths=(3, 0, 2), layout="time_major")):
        named = arguments_of(varied, "cpu")
        fake = {k: v if v is None else v.to("meta") for k, v in named.items()}
        for real, meta in zip(call(varied, named), call(varied, fake), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (
                meta.shape,
                meta.dtype,
                meta.stride(),
            )


# torch.compile and export -----------------------------------------------------------------------


def compiled(function: Callable, backend: str) -> tuple[Callable, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@pytest.mark.parametrize("case", CASES, **ids)
def test_compiled_once_for_all_shapes(case: ScanCase, device: str) -> None:
    def step(named: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        h, final = call(case, {k: v if v is None else v * 1 for k, v in named.items()})
        return h * 2, final

    fast, counter = compiled(step, "aot_eager")
    frames = []
    for batch, time, channels in ((2, 9, 7), (3, 17, 6), (5, 8, 10), (4, 100, 3)):
        shaped = case.sized(batch, time, channels)
        if case.lengths:
            shaped = replace(shaped, lengths=(time, 0, 3, 2)[: 1 + batch])
        named = arguments_of(shaped, device, grad=True)
        expected, found = step(named), fast(named)
        for left, right in zip(expected, found, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        for left, right in zip(gradients(named, expected), gradients(named, found), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        frames.append(counter.frame_count)
    # Once in a process torch starts anew when a float is among the arguments, as the scale is.
    assert frames[0] <= (2 if "scale" in case.options() else 1)
    assert frames[0] == frames[-1], "a shape has caused a recompilation"


def test_compiled_with_offsets_on_the_cpu(device: str) -> None:
    """Where cu_seqlens stays on the CPU, a call copies it, and a graph does so too."""

    def step(x: Tensor, a: Tensor, cu_seqlens: Tensor) -> Tensor:
        return ops.linear_scan(x, a, cu_seqlens=cu_seqlens)[0] * 2

    fast, counter = compiled(step, "aot_eager")
    for lengths in ([3, 0, 6], [4, 1, 9]):
        time = sum(lengths)
        x, a = torch.randn(1, time, 4, device=device), torch.rand(1, time, 4, device=device)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        assert torch.equal(fast(x, a, cu_seqlens), step(x, a, cu_seqlens))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
def test_compiled_with_inductor(device: str) -> None:
    """Once through the default backend, with work to fuse on both sides of the op."""
    case = replace(CASES[0], activation="none")

    def step(c: Tensor, f: Tensor, h0: Tensor) -> Tensor:
        h, final = ops.hgru(c.sin(), f + 1, h0=h0, activation="none")
        return (h.cos() * 2).sum() + final.sum()

    fast, counter = compiled(step, "inductor")
    for time in (9, 30):
        named = arguments_of(replace(case, time=time), device, grad=True)
        leaves = [named[k] for k in ("c", "f", "h0")]
        torch.testing.assert_close(fast(*leaves), step(*leaves), rtol=1e-5, atol=1e-5)
        expected = torch.autograd.grad(step(*leaves), leaves)
        for left, right in zip(expected, torch.autograd.grad(fast(*leaves), leaves), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_steps_compile(device: str) -> None:
    def decode(c: Tensor, f: Tensor, state: Tensor) -> Tensor:
        h = ops.hgru_step(c, f, None, None, state)
        return h + ops.linear_scan_step(c, f, state)

    def decode_heads(q: Tensor, f: Tensor, state: Tensor) -> Tensor:
        o = ops.hgrn2_step(q, f, q, None, state, q_activation="silu")
        return o + ops.gated_linear_attention_step(q, f, o, -f.abs(), state)

    fast, counter = compiled(decode_heads, "aot_eager")
    frames = []
    for batch in (2, 3, 5):
        q, f = (torch.randn(batch, 6, 4, device=device) for _ in range(2))
        plain, other = (torch.ones(batch, 6, 4, 4, device=device) for _ in range(2))
        assert torch.equal(decode_heads(q, f, plain), fast(q, f, other))
        assert torch.equal(plain, other)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1], "a shape has caused a recompilation"  # scale costs a restart

    def decode_lru(x: Tensor, state: Tensor) -> Tensor:
        return ops.lru_scan_step(x, x[0, :2], x[0, 2:], x[1, :2], state) * 2

    fast, counter = compiled(decode_lru, "aot_eager")
    for batch in (2, 3, 5):
        x = torch.randn(batch, 4, device=device)
        plain, other = (torch.ones(batch, 4, device=device) for _ in range(2))
        assert torch.equal(decode_lru(x, plain), fast(x, other))
        assert torch.equal(plain, other)
    assert counter.frame_count == 1

    fast, counter = compiled(decode, "aot_eager")
    for batch in (2, 3, 5):
        c, f = (torch.randn(batch, 4, device=device) for _ in range(2))
        plain, other = (torch.ones(batch, 4, device=device) for _ in range(2))
        assert torch.equal(decode(c, f, plain), fast(c, f, other))
        assert torch.equal(plain, other)
        assert not torch.equal(plain, torch.ones_like(plain))
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", CASES, **ids)
def test_export_with_dynamic_batch_and_time(case: ScanCase, device: str) -> None:
    everything = arguments_of(case, device)
    names = [k for k, v in everything.items() if v is not None]
    over_time = [k for k in names if k != "h0" and everything[k].dim() > 2]
    nothing = dict.fromkeys(everything)

    class Model(torch.nn.Module):
        def forward(self, values: list[Tensor]) -> tuple[Tensor, Tensor]:
            return call(case, {**nothing, **dict(zip(names, values, strict=True))})

    def example(time: int) -> list[Tensor]:
        lengths = case.lengths and (time - 2, 0, 2)
        shaped = replace(case, time=time, lengths=lengths)
        return [v for v in arguments_of(shaped, device).values() if v is not None]

    time = torch.export.Dim("time", min=2, max=1000)
    shapes = [{1: time} if k in over_time else None for k in names]
    exported = torch.export.export(Model(), (example(9),), dynamic_shapes=(shapes,))
    for length in (4, 50):
        values = example(length)
        for left, right in zip(exported.module()(values), Model()(values), strict=True):
            assert torch.equal(left, right)


# Autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [False, True])
def test_autocast_of_hgru(theta: bool, device: str) -> None:
    """c and f go to autocast's type, bounds and states stay as they are, gradients come back."""
    case = ScanCase(theta=theta, channels=4)
    named = arguments_of(case, device, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, final = call(case, named)
    assert (h.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    half = {k: v if k not in "cf" else v.to(torch.bfloat16) for k, v in named.items()}
    expected = call(case, half)
    assert torch.equal(h, expected[0])
    assert torch.equal(final, expected[1])
    expected_grads = gradients(named, expected)
    for left, right in zip(gradients(named, (h, final)), expected_grads, strict=True):
        assert left.dtype == torch.float32
        assert torch.equal(left, right)


def test_autocast_of_linear_scan(device: str) -> None:
    """A decay near one needs its fp32 digits: only x goes to autocast's type."""
    case = ScanCase("linear_scan", channels=4, gates="open")
    named = arguments_of(case, device, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, final = call(case, named)
    expected, _ = call(case, {**named, "x": named["x"].bfloat16()})
    assert (h.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(h, expected)
    for grad in gradients(named, (h, final)):
        assert grad.dtype == torch.float32


def test_autocast_of_lru_scan(device: str) -> None:
    """Only x goes to autocast's type: the parameters need their digits."""
    case = ScanCase("lru_scan", channels=4, gates="open", theta=True)
    named = arguments_of(case, device, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, final = call(case, named)
    half = {**named, "x": named["x"].bfloat16()}
    expected = call(case, half)
    assert (h.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(h, expected[0])
    assert torch.equal(final, expected[1])
    for left, right in zip(gradients(named, (h, final)), gradients(named, expected), strict=True):
        assert left.dtype == torch.float32
        assert torch.equal(left, right)
    parameters = [named[k].detach() for k in ("nu_log", "theta_log", "gamma_log")]
    state = named["h0"].detach().clone()
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        row = ops.lru_scan_step(named["x"][:, 0].detach(), *parameters, state)
    assert (row.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("op", gla_cases.OPS)
def test_autocast_of_ops_with_heads(op: str, device: str) -> None:
    """q, k, v and logits go to autocast's type; log decays keep their digits near 0."""
    case = GlaCase(op, key_dim=4, gates="open")
    named = arguments_of(case, device, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final = call(case, named)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    half = {k: v.bfloat16() if k in ("q", "k", "v", "f") else v for k, v in named.items()}
    expected = call(case, half)
    assert torch.equal(o, expected[0])
    assert torch.equal(final, expected[1])
    expected_grads = gradients(named, expected)
    for left, right in zip(gradients(named, (o, final)), expected_grads, strict=True):
        assert left.dtype == torch.float32
        assert torch.equal(left, right)
    token = {k: v[:, 0] for k, v in half.items() if k in ("q", "k", "v", "f", "log_f")}
    state = named["h0"].detach().clone()
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        step = getattr(ops, f"{op}_step")(**token, state=state)
    assert (step.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_makes_one_dtype_of_what_layers_hand_over(device: str) -> None:
    """A Linear under autocast gives bfloat16, a LayerNorm float32: both meet in one call."""
    linear = torch.nn.Linear(4, 4, device=device)
    x = torch.randn(2, 5, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, _ = ops.hgru(torch.nn.functional.layer_norm(x.float(), (4,)), linear(x))
        state = torch.zeros(2, 4, device=device)
        with torch.no_grad():
            step = ops.hgru_step(x[:, 0], linear(x[:, 0]), None, None, state)
    assert (h.dtype, step.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert h.isfinite().all()


@pytest.mark.parametrize(
    "case",
    [
        ScanCase(dtype=torch.float64),
        ScanCase(
            dtype=torch.float64, gate_dtype=torch.float32, bound_dtype=torch.float32, h0="single"
        ),
        ScanCase("linear_scan", dtype=torch.float64, gate_dtype=torch.float32),
        ScanCase("linear_scan", dtype=torch.complex64),
        ScanCase("linear_scan", dtype=torch.complex128, gate_dtype=torch.float32),
    ],
    **ids,
)
def test_autocast_leaves_float64_and_complex_alone(case: ScanCase, device: str) -> None:
    """The gates beside such data, too."""
    named = arguments_of(case, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = call(case, named)
    for left, right in zip(found, call(case, named), strict=True):
        assert torch.equal(left, right)


# Modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, **ids)
def test_modes_without_gradients(case: ScanCase, device: str) -> None:
    named = arguments_of(case, device, grad=True)
    expected = call(case, named)
    assert all(result.requires_grad for result in expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = call(case, named)
        for left, right in zip(expected, found, strict=True):
            assert not right.requires_grad
            assert torch.equal(left, right)
    with torch.inference_mode():
        inside = call(case, {k: v if v is None else v.clone() for k, v in named.items()})
    assert torch.equal(inside[0], expected[0])


def test_steps_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        state = torch.ones(2, 4, device=device)
        x = torch.ones(2, 4, device=device)
        assert torch.equal(ops.linear_scan_step(x, x, state), torch.full_like(x, 2))
        assert torch.equal(state, torch.full_like(x, 2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", CASES, **ids)
def test_checkpointing(case: ScanCase, reentrant: bool, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    named = arguments_of(case, device, grad=True)
    expected = gradients(named, call(case, named))
    names = list(named)

    def function(*values: Tensor | None) -> tuple[Tensor, Tensor]:
        return call(case, dict(zip(names, values, strict=True)))

    results = checkpoint(function, *named.values(), use_reentrant=reentrant)
    leaves = [v for v in named.values() if v is not None and v.requires_grad]
    loss_of(results).backward()  # the reentrant form refuses autograd.grad
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_gradients_inside_threads(device: str) -> None:
    """Data-parallel loops of one process run forward and backward in several threads."""
    from concurrent.futures import ThreadPoolExecutor

    case = replace(CASES[0], time=50)
    expected = cases.run(case, device, backward=True)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(cases.run, case, device, backward=True) for _ in range(8)]
        for job in jobs:
            for name, value in job.result().items():
                assert torch.equal(value, expected[name]), name


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, **ids)
def test_double_backward_is_an_error(case: ScanCase, device: str) -> None:
    named = arguments_of(case, device, grad=True)
    leaves = [v for v in named.values() if v is not None and v.requires_grad]
    grads = torch.autograd.grad(loss_of(call(case, named)), leaves, create_graph=True)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.requires_grad, "a gradient without a graph is a second derivative of zero"
        with pytest.raises(RuntimeError, match=f"{case.op}: double backward is not supported"):
            torch.autograd.grad(grad.abs().sum(), leaf, retain_graph=True)


def test_vmap_is_an_error(device: str) -> None:
    x = torch.zeros(3, 2, 5, 4, device=device)
    state = torch.zeros(3, 2, 4, device=device)
    with pytest.raises(RuntimeError, match="linear_scan: vmap is not supported"):
        torch.vmap(ops.linear_scan)(x, x)
    with pytest.raises(RuntimeError, match="hgru: vmap is not supported"):
        torch.vmap(ops.hgru)(x, x)
    with pytest.raises(RuntimeError, match="hgru: vmap is not supported"):
        torch.vmap(ops.hgru, in_dims=(0, None))(x, x[0])
    with pytest.raises(RuntimeError, match="linear_scan_step: vmap is not supported"):
        torch.vmap(ops.linear_scan_step)(state, state, state)
    with pytest.raises(RuntimeError, match="lru_scan: vmap is not supported"):
        torch.vmap(lambda v: ops.lru_scan(v, v[0, 0], None, v[0, 1]))(x)


def test_transforms_of_ops_with_heads_are_errors(device: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    x = torch.zeros(2, 3, 5, 1, 4, device=device)
    state = torch.zeros(2, 3, 1, 4, 4, device=device)
    calls = {
        "gated_linear_attention": lambda v: ops.gated_linear_attention(v, v, v, v)[0],
        "hgrn2": lambda v: ops.hgrn2(v, v, v)[0],
    }
    for name, function in calls.items():
        with pytest.raises(RuntimeError, match=f"{name}: vmap is not supported"):
            torch.vmap(function)(x)
        with pytest.raises(RuntimeError, match=f"{name}: torch.func transforms"):
            torch.func.grad(lambda v, f=function: f(v).sum())(x[0])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x[0], torch.ones_like(x[0]))
            with pytest.raises(RuntimeError, match=f"{name}: forward-mode"):
                function(dual)
    with pytest.raises(RuntimeError, match="hgrn2_step: vmap is not supported"):
        torch.vmap(ops.hgrn2_step)(x[:, :, 0], x[:, :, 0], x[:, :, 0], state=state)


def test_forward_mode_is_an_error(device: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    x = torch.ones(2, 5, 4, device=device)
    for op in (ops.linear_scan, ops.hgru, ops.lru_scan):
        rest = (x[0, 0], None, x[0, 0]) if op is ops.lru_scan else (x,)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(RuntimeError, match=f"{op.__name__}: forward-mode"):
                op(dual, *rest)
            leaf = x.clone().requires_grad_()
            weighed = (op(leaf, *rest)[0] * dual).sum()  # a gradient with a tangent comes back
            for graph in (False, True):
                with pytest.raises(RuntimeError, match=f"{op.__name__}: forward-mode"):
                    torch.autograd.grad(weighed, leaf, retain_graph=True, create_graph=graph)


def test_function_transforms_are_an_error(device: str) -> None:
    x = torch.ones(2, 5, 4, device=device)
    for op in (ops.linear_scan, ops.hgru, ops.lru_scan):
        rest = (x[0, 0], None, x[0, 0]) if op is ops.lru_scan else (x,)
        with pytest.raises(RuntimeError, match=f"{op.__name__}: torch.func transforms"):
            torch.func.grad(lambda v, op=op, rest=rest: op(v, *rest)[0].sum())(x)


def test_gradients_through_steps_are_an_error(device: str) -> None:
    x = torch.ones(2, 4, device=device)
    state = torch.ones(2, 4, device=device)
    leaf = x.clone().requires_grad_()
    for arguments, name in (((leaf, x, state), "x"), ((x, leaf, state), "a")):
        with pytest.raises(RuntimeError, match=f"linear_scan_step: {name} requires a gradient"):
            ops.linear_scan_step(*arguments)
    with pytest.raises(RuntimeError, match="linear_scan_step: state requires a gradient"):
        ops.linear_scan_step(x, x, leaf * 1)
    for name in ("c", "f", "gamma", "theta"):
        arguments = {"c": torch.ones(2, 8, device=device), "f": x, "gamma": x[0] / 2, "theta": x[0]}
        arguments[name] = arguments[name].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"hgru_step: {name} requires a gradient"):
            ops.hgru_step(**arguments, state=torch.ones(2, 8, device=device))
    for name in ("x", "nu_log", "theta_log", "gamma_log", "state"):
        arguments = {"x": torch.ones(2, 8, device=device), "state": torch.ones(2, 8, device=device)}
        arguments |= dict.fromkeys(("nu_log", "theta_log", "gamma_log"), x[0])
        arguments[name] = arguments[name].clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match=f"lru_scan_step: {name} requires a gradient"):
            ops.lru_scan_step(**arguments)
    assert torch.equal(state, torch.ones_like(state))
    tokens = {name: torch.zeros(2, 3, 4, device=device) for name in ("q", "f", "v")}
    for name in (*tokens, "gamma"):
        arguments = tokens | {"gamma": torch.zeros(3, 4, device=device)}
        arguments[name] = arguments[name].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"hgrn2_step: {name} requires a gradient"):
            ops.hgrn2_step(**arguments, state=torch.ones(2, 3, 4, 4, device=device))
    with torch.no_grad():
        ops.linear_scan_step(leaf, x, state)
    assert torch.equal(state, torch.full_like(state, 2))


def test_a_step_invalidates_what_autograd_saved(device: str) -> None:
    """The version of the state is bumped: a stale gradient is an error, not a wrong number."""
    state = torch.ones(2, 4, device=device)
    weight = torch.ones(2, 4, device=device, requires_grad=True)
    loss = (weight * state).sum()
    version = state._version
    x = torch.ones(2, 4, device=device)
    ops.linear_scan_step(x, x, state)
    assert state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    version = state._version
    ops.hgru_step(x, x, None, None, state)
    assert state._version > version
    version = state._version
    ops.lru_scan_step(x, x[0], None, x[0], state)
    assert state._version > version
    matrix, token = torch.ones(2, 1, 4, 4, device=device), x.unsqueeze(1)
    version = matrix._version
    ops.hgrn2_step(token, token, token, None, matrix)
    assert matrix._version > version
    ops.gated_linear_attention_step(token, token, token, -token, matrix)
    assert matrix._version > version + 1


def test_outputs_do_not_alias_inputs(device: str) -> None:
    for case in CASES:
        for time in (0, 5):
            lengths = case.lengths and ((time,) if time else (0, 0))
            named = arguments_of(replace(case, time=time, lengths=lengths), device, grad=True)
            results = call(case, named)
            grads = gradients(named, results)
            given = {v.untyped_storage().data_ptr() for v in named.values() if v is not None}
            for result in (*results, *grads):
                if result.numel():
                    assert result.untyped_storage().data_ptr() not in given
