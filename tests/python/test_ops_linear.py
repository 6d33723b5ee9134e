"""linear, glu_linear, norm_linear and hgrn2_qfv: what modules use of products with a weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import norm_cases as norms
from support.error_rule import assert_within_rule
from support.norm_cases import NormCase
from support.op_properties import opcheck
from torch import Tensor

from tidegate import ops

raw = torch.ops.tidegate
Tensors = dict[str, Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = [
    NormCase(),
    NormCase(weight=None),
    NormCase(kind="layer", bias=True),
    NormCase(gate="silu"),
    NormCase(gate="sigmoid", kind="layer", bias=True, gate_first=True),
]
# Widths of a vector and not, one row, none.
SHAPES = [(2, 5, 24), (3, 14), (16,), (1, 2, 3, 4, 32), (0, 8)]
OUTPUTS = 40  # enough that the luck of a rounding averages out
ROWS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x: x,
    "glu_linear": lambda x: F.silu(x[..., : x.size(-1) // 2]) * x[..., x.size(-1) // 2 :],
}


def draw(*shape: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return spread * torch.randn(*shape, generator=generator, dtype=torch.float64)


def arguments(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, of_weight: torch.dtype
) -> Tensors:
    width = shape[-1] // (2 if op == "glu_linear" else 1)
    made = {
        "x": draw(*shape).to(dtype),
        "weight": draw(OUTPUTS, width, spread=0.3).to(of_weight),
        "bias": draw(OUTPUTS).to(of_weight),
    }
    return made | {"dy": draw(*shape[:-1], OUTPUTS).to(dtype)}


def results(function: Callable[..., Tensor], given: Tensors) -> Tensors:
    """y and the gradients, by name."""
    leaves = {k: v.detach().requires_grad_() for k, v in given.items() if k != "dy"}
    y = function(**leaves)
    grads = torch.autograd.grad(y, list(leaves.values()), given["dy"].to(y))
    return {"y": y.detach()} | {f"d{k}": g for k, g in zip(leaves, grads, strict=True)}


def check(op: str, given: Tensors, exact: Tensors, yardstick: Tensors, found: Tensors) -> None:
    for name, value in found.items():
        like = given.get(name.removeprefix("d"))
        if name.startswith("d"):
            assert (value.dtype, value.shape) == (like.dtype, like.shape), name
        wanted = yardstick[name].to(value.dtype)
        assert_within_rule(f"{op} {name}", value, exact[name], wanted)


def by_torch(op: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(ROWS[op](x), weight.to(x.dtype), bias.to(x.dtype))


def on_host(given: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    return {k: v.detach().cpu().to(dtype or v.dtype) for k, v in given.items()}


def types() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Pairs of dtypes, of rows and of the weight."""
    for dtype in DTYPES:
        yield dtype, dtype
        if dtype != torch.float32:
            yield dtype, torch.float32


by_types = pytest.mark.parametrize(("dtype", "of_weight"), list(types()), ids=str)
by_op = pytest.mark.parametrize("op", ROWS)


@by_types
@by_op
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(op, shape, dtype, of_weight, device) -> None:
    given = {k: v.to(device) for k, v in arguments(op, shape, dtype, of_weight).items()}
    function = getattr(ops, op)
    exact = results(lambda **t: by_torch(op, **t), on_host(given, torch.float64))
    yardstick = results(lambda **t: by_torch(op, **t), on_host(given))
    check(op, given, exact, yardstick, results(function, given))


def norm_arguments(case: NormCase, of_weight: torch.dtype, device: str) -> Tensors:
    given = norms.make(case, "cpu")
    for name in ("weight", "bias"):
        if name in given:
            given[f"norm_{name}"] = given.pop(name)
    width = case.shape[-1]
    dy = draw(*case.shape[:-1], OUTPUTS).to(case.dtype)
    weights = {
        "weight": draw(OUTPUTS, width, spread=0.3).to(of_weight),
        "bias": draw(OUTPUTS).to(of_weight),
    }
    return {k: v.to(device) for k, v in (given | weights | {"dy": dy}).items()}


def norm_then_linear(case: NormCase, norm: Callable, weight: Tensor, bias: Tensor, **t: Tensor):
    of_norm = {k.removeprefix("norm_"): v for k, v in t.items()}
    (y,) = norm(case, of_norm)
    return F.linear(y, weight.to(y), bias.to(y))


@by_types
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norm_linear(form: NormCase, dtype, of_weight, device) -> None:
    for shape in SHAPES[:3]:
        case = replace(form, dtype=dtype, shape=shape, weight_dtype=of_weight)
        given = norm_arguments(case, of_weight, device)
        exact, yardstick = (
            results(partial(norm_then_linear, case, norm), on_host(given, wide))
            for norm, wide in ((norms.by_equation, torch.float64), (norms.by_torch, None))
        )
        found = results(partial(ops.norm_linear, **norms.options(case)), given)
        check("norm_linear", given, exact, yardstick, found)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norm_linear_is_the_two_ops(form: NormCase, device) -> None:
    """Bit for bit: what the backward pass makes again is what the norm made. 1536 and 24 channels
    are of the fast kernels, 30 of those for any size; float32 rows may have 16-bit results."""
    for width, stream in ((1536, None), (24, None), (30, None), (24, torch.float32)):
        if stream is not None and form.gate is not None:
            continue
        case = replace(form, dtype=torch.bfloat16, stream=stream, shape=(2, 9, width))
        given = norm_arguments(case, torch.bfloat16, device)
        two = results(partial(norm_then_linear, case, norms.by_op), given)
        one = results(partial(ops.norm_linear, **norms.options(case)), given)
        for name, value in one.items():
            assert torch.equal(value, two[name]), (width, name)


@pytest.mark.parametrize("width", [48, 4096, 14])
def test_glu_linear_is_the_two_ops(width: int, device) -> None:
    given = arguments("glu_linear", (2, 9, width), torch.bfloat16, torch.bfloat16)
    given = {k: v.to(device) for k, v in given.items()}
    two = results(lambda x, weight, bias: F.linear(ops.glu(x), weight, bias), given)
    one = results(ops.glu_linear, given)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_gradients_of_a_float32_weight_are_not_rounded(device) -> None:
    """The sum over rows has more digits than bf16."""
    x, weight = torch.ones(257, 8, device=device).bfloat16(), torch.zeros(4, 8, device=device)
    weight.requires_grad_()
    for y in (
        ops.linear(x, weight),
        ops.norm_linear(x, weight),
        ops.glu_linear(x.repeat(1, 2), weight),
    ):
        (dw,) = torch.autograd.grad(y.sum(), weight)
        assert dw.dtype == torch.float32
        if device == "cuda" and y.grad_fn.name().startswith("LinearFunction"):
            assert torch.equal(dw, torch.full_like(dw, 257.0))


def test_rows_that_are_narrowed_are_made_once(device) -> None:
    """Tensors of their size are results alone: the checks make none to name a dtype by."""
    weight = draw(4, 64).to(device, torch.bfloat16)
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(8, 64).to(device, dtype)
        with torch.profiler.profile(acc_events=True) as profile:
            ops.norm_linear(x, weight, dtype=torch.bfloat16)
        made.append(sum(event.name.startswith("aten::empty") for event in profile.events()))
    assert made[0] == made[1]


def qfv_arguments(dtype: torch.dtype, device: str, time: int = 37, width: int = 16) -> Tensors:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rng = torch.Generator().manual_seed(time)
    qfv = torch.randn(2, time, 3, 2, width, generator=rng).to(dtype)
    return {
        "qfv": qfv.to(device).requires_grad_(),
        "gamma": torch.rand(2, width, generator=rng).to(device, wide).requires_grad_(),
        "h0": torch.randn(2, 2, width, width, generator=rng).to(device, wide).requires_grad_(),
    }


def moved(t: Tensor) -> Tensor:
    """A copy one element further on in memory: no longer aligned to 16 bytes."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t)


# Tensor cores take a width of 16 as it is; 16-bit data of others on CUDA, and what is not aligned,
# are copied into their form.
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "moved"])
@pytest.mark.parametrize("width", [8, 16, 24, 53])
@pytest.mark.parametrize("time", [0, 1, 37, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hgrn2_of_one_projection(dtype, time, width, aligned, device) -> None:
    given = qfv_arguments(dtype, device, time, width)
    options = {"q_activation": "silu", "v_activation": "sigmoid", "scale": 0.5, "reverse": True}
    one = ops.hgrn2_qfv(**given, **options)
    gradients = [torch.cos(torch.arange(r.numel(), device=device)).view_as(r).to(r) for r in one]
    if not aligned:
        gradients[0] = moved(gradients[0])
    found = torch.autograd.grad(one, list(given.values()), gradients)
    parts = [t.detach().requires_grad_() for t in given["qfv"].unbind(2)]
    rest = (given["gamma"], given["h0"])
    two = ops.hgrn2(*parts, *rest, **options)
    dq, df, dv, *others = torch.autograd.grad(two, (*parts, *rest), gradients)
    for left, right in zip(
        (*one, *found), (*two, torch.stack([dq, df, dv], 2), *others), strict=True
    ):
        assert torch.equal(left, right)


def test_packed_sequences_of_one_projection(device) -> None:
    given = qfv_arguments(torch.float32, device)
    qfv, bounds = given["qfv"][:1].detach().requires_grad_(), torch.tensor([0, 5, 5, 37])
    o, final = ops.hgrn2_qfv(qfv, cu_seqlens=bounds)
    wanted = ops.hgrn2(*qfv.unbind(2), cu_seqlens=bounds)
    assert torch.equal(o, wanted[0])
    assert torch.equal(final, wanted[1])
    (found,) = torch.autograd.grad(o.sum(), qfv)
    (two,) = torch.autograd.grad(wanted[0].sum(), qfv)
    assert torch.equal(found, two)


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_final_state_of_one_projection_alone(dtype, width, device) -> None:
    """A loss without o: autograd has no gradient of it to give."""
    given = qfv_arguments(dtype, device, width=width)
    leaves = list(given.values())
    found = torch.autograd.grad(ops.hgrn2_qfv(**given)[1].sum(), leaves)
    rest = (given["gamma"], given["h0"])
    wanted = torch.autograd.grad(ops.hgrn2(*given["qfv"].unbind(2), *rest)[1].sum(), leaves)
    for left, right in zip(found, wanted, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("has_do", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_of_hgrn2_s_backward_ops(dtype, has_do, width, device) -> None:
    """An absent state has a gradient, too, of the states' shape. The width decides which
    kernel there is, not what is traced."""
    qfv = qfv_arguments(dtype, device, width=width)["qfv"].detach()
    do, dh_final = torch.ones_like(qfv[:, :, 0]), torch.ones(2, 2, width, width, device=device)
    options = (None, None, 1.0, "none", "none", False, None)
    one = (do if has_do else None, dh_final, qfv, *options)
    opcheck(raw.hgrn2_qfv_backward.default, one, traced=width == 16)
    found = raw.hgrn2_qfv_backward(*one)
    assert [t.shape for t in found] == [qfv.shape, (0,), dh_final.shape]
    if has_do:
        three = (do, dh_final, *qfv.unbind(2), *options)
        opcheck(raw.hgrn2_backward.default, three, traced=width == 16)
        assert raw.hgrn2_backward(*three)[-1].shape == dh_final.shape


def calls(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensors]:
    """A small call of each, with everything it takes."""
    norm = replace(FORMS[4], dtype=dtype, shape=(2, 3, 8))
    made = {op: arguments(op, (2, 3, 16), dtype, torch.float32) for op in ROWS}
    made["norm_linear"] = norm_arguments(norm, torch.float32, device)
    made["hgrn2_qfv"] = qfv_arguments(dtype, device, 5)
    return {
        op: {k: v.detach().to(device) for k, v in given.items() if k != "dy"}
        for op, given in made.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [*ROWS, "norm_linear", "hgrn2_qfv"])
def test_opcheck(op, dtype, device) -> None:
    """With gradients of float32 test_compiles_whole traces every op."""
    given = calls(device, dtype)[op]
    packet = getattr(raw, op).default
    opcheck(packet, (), given)
    leaves = {k: v.requires_grad_() for k, v in given.items()}
    opcheck(packet, (), leaves, traced=dtype != torch.float32)


@pytest.mark.parametrize("op", [*ROWS, "norm_linear", "hgrn2_qfv"])
def test_one_argument_alone(op, device) -> None:
    """What is frozen has no gradient, and the others' do not change."""
    given = calls(device)[op]
    function = getattr(ops, op)

    def first(**tensors: Tensor) -> Tensor:
        result = function(**tensors)
        return result if isinstance(result, Tensor) else result[0]

    leaves = {k: v.detach().requires_grad_() for k, v in given.items()}
    y = first(**leaves)
    wanted = dict(zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True))
    for name, value in given.items():
        leaf = value.detach().requires_grad_()
        (found,) = torch.autograd.grad(first(**{**given, name: leaf}).sum(), leaf)
        assert torch.equal(found, wanted[name]), name


def saved_in(kept: list[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)


def test_what_is_kept(device) -> None:
    """x and the weight as it is multiplied; of frozen weights nothing that only they would need."""
    for op, given in calls(device, torch.bfloat16).items():
        if op == "hgrn2_qfv":
            continue
        leaves = {k: v.requires_grad_() for k, v in given.items()}
        kept: list[Tensor] = []
        with saved_in(kept):
            getattr(ops, op)(**leaves)
        inputs = {t.data_ptr() for t in leaves.values()}
        others = [t for t in kept if t.data_ptr() not in inputs]
        assert [(t.dtype, t.shape) for t in others] == [(torch.bfloat16, leaves["weight"].shape)], (
            op
        )
    x, weight = (
        torch.randn(3, 8, device=device, requires_grad=True),
        torch.randn(4, 8, device=device),
    )
    kept = []
    with saved_in(kept):
        ops.linear(x, weight)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr()]


def test_autocast_rounds_rows_and_keeps_float32_weights(device) -> None:
    for op, given in calls(device).items():
        leaves = {k: v.requires_grad_() for k, v in given.items()}
        with torch.autocast(device, torch.bfloat16):
            y = getattr(ops, op)(**leaves)
        y = y if isinstance(y, Tensor) else y[0]
        assert y.dtype == torch.bfloat16
        grads = torch.autograd.grad(y.sum(), list(leaves.values()))
        assert {g.dtype for g in grads} == {torch.float32}, op


@pytest.mark.parametrize("op", [*ROWS, "norm_linear", "hgrn2_qfv"])
def test_double_backward_is_refused(op, device) -> None:
    leaves = {k: v.requires_grad_() for k, v in calls(device)[op].items()}
    y = getattr(ops, op)(**leaves)
    y = y if isinstance(y, Tensor) else y[0]
    grads = torch.autograd.grad(y.square().sum(), list(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grads[0].sum().backward()


@pytest.mark.parametrize("op", [*ROWS, "norm_linear", "hgrn2_qfv"])
def test_compiles_whole(op, device) -> None:
    torch._dynamo.reset()
    given = calls(device)[op]

    def function(tensors: Tensors) -> Tensor:
        y = getattr(ops, op)(**tensors)
        return (y if isinstance(y, Tensor) else y[0]).square()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves = {k: v.requires_grad_() for k, v in given.items()}
    pair = compiled(leaves), function(leaves)
    torch.testing.assert_close(*pair)
    for one, two in zip(
        *(torch.autograd.grad(y.sum(), list(leaves.values())) for y in pair), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.linear(torch.zeros(2, 7), torch.zeros(3, 8)),
            "linear: weight must have shape [N, K] = [3, 7], got [3, 8]",
        ),
        (
            lambda: ops.linear(torch.zeros(2, 7), torch.zeros(7)),
            "linear: weight must have shape [N, K], got [7]",
        ),
        (
            lambda: ops.linear(torch.zeros(2, 7), torch.zeros(3, 7), torch.zeros(4)),
            "linear: bias must have shape [N] = [3], got [4]",
        ),
        (
            lambda: ops.linear(torch.zeros(2, 7), torch.zeros(3, 7).bfloat16()),
            "linear: weight must be float32 (x is float32), got bfloat16",
        ),
        (
            lambda: ops.glu_linear(torch.zeros(2, 8), torch.zeros(3, 8)),
            "glu_linear: weight must have shape [N, K] = [3, 4], got [3, 8]",
        ),
        (
            lambda: ops.norm_linear(torch.zeros(2, 8), torch.zeros(3, 9)),
            "norm_linear: weight must have shape [N, K] = [3, 8], got [3, 9]",
        ),
        (
            lambda: ops.hgrn2_qfv(torch.zeros(1, 4, 2, 2, 8)),
            "hgrn2_qfv: qfv must have shape [B, T, 3, H, K] = [1, 4, 3, 2, 8], got [1, 4, 2, 2, 8]",
        ),
        (
            lambda: ops.hgrn2_qfv(torch.zeros(1, 4, 2, 8)),
            "hgrn2_qfv: qfv must have shape [B, T, 3, H, K], got [1, 4, 2, 8]",
        ),
        (  # what a user of HGRU2 gave, who did not call this op
            lambda: ops.hgrn2_qfv(torch.zeros(1, 4, 3, 2, 8), h0=torch.zeros(1, 2, 8, 9)),
            "hgrn2: h0 must have shape [N, H, K, V] = [1, 2, 8, 8], got [1, 2, 8, 9]",
        ),
        (
            lambda: ops.hgrn2_qfv(torch.zeros(1, 4, 3, 2, 8), scale=True),
            "hgrn2: scale must be a number, got True",
        ),
    ],
)
def test_errors(call, message) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        call()
