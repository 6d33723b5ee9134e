"""norm and add_norm, against the float64 equations row by row."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from support import norm_cases as cases
from support.norm_cases import NormCase
from support.op_properties import opcheck
from torch import Tensor

from tidegate import ops

raw = torch.ops.tidegate
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FORMS = [
    NormCase(),
    NormCase(weight=None),
    NormCase(bias=True),
    NormCase(kind="layer", bias=True),
    NormCase(kind="layer", weight=None, bias=True),
    NormCase(kind="layer", weight="heads", bias=True),
    NormCase(weight="heads"),
    NormCase(gate="silu"),
    NormCase(gate="sigmoid", kind="layer", bias=True),
    NormCase(gate="sigmoid", kind="layer", bias=True, gate_first=True),
    NormCase(gate="silu", weight="heads", gate_first=True),
    NormCase(op="add_norm"),
    NormCase(op="add_norm", weight=None),
    NormCase(op="add_norm", kind="layer", bias=True),
]
by_form = pytest.mark.parametrize("form", FORMS, ids=str)
# Below a vector, odd, of a head, just past a warp's rows, of several warps, past the widest tile.
WIDTHS = (1, 7, 8, 24, 64, 96, 128, 250, 256, 264, 1000, 1536)


@by_dtype
@by_form
def test_forward_and_gradients(form: NormCase, dtype: torch.dtype, device: str) -> None:
    cases.check(replace(form, dtype=dtype), device)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_width(width: int, dtype: torch.dtype, device: str) -> None:
    for form in (FORMS[3], FORMS[6], FORMS[9], FORMS[11]):
        cases.check(replace(form, dtype=dtype, shape=(2, 3, width)), device)


def test_rows_wider_than_a_block(device: str) -> None:
    for width in (4096, 4104, 9000):
        for form in (FORMS[3], FORMS[7], FORMS[11]):
            cases.check(replace(form, dtype=torch.bfloat16, shape=(1, 3, width)), device)


def test_rows_of_several_warps(device: str) -> None:
    """Side by side in a block, of one warp to eight; some have more columns than the row."""
    for width in (264, 512, 520, 776, 1280, 2048, 2560, 3080, 3592):
        for form in (FORMS[3], FORMS[6], FORMS[7], FORMS[11]):
            cases.check(replace(form, dtype=torch.bfloat16, shape=(2, 7, width)), device)


def test_more_rows_than_are_under_way(device: str) -> None:
    rows = 6001 if device == "cuda" else 301
    for stream in (None, torch.float32):
        for kind in ("layer", "rms"):
            case = NormCase(
                op="add_norm", kind=kind, shape=(rows, 520), dtype=torch.bfloat16, stream=stream
            )
            cases.check(case, device)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 63, 64, 65, 1000])
def test_any_number_of_rows(rows: int, device: str) -> None:
    for form in (FORMS[3], FORMS[9], FORMS[11]):
        cases.check(replace(form, shape=(rows, 40)), device)
    cases.check(NormCase(weight="heads", kind="layer", bias=True, shape=(rows, 3, 40)), device)


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 5, 24), (2, 3, 4, 24), (2, 1, 3, 4, 24)])
def test_any_number_of_dimensions(shape: tuple[int, ...], device: str) -> None:
    cases.check(NormCase(kind="layer", bias=True, shape=shape), device)
    if len(shape) > 1:
        cases.check(NormCase(weight="heads", shape=shape), device)


@pytest.mark.parametrize("values", cases.VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extremes(values: str, dtype: torch.dtype, device: str) -> None:
    for form in FORMS:
        if form.gate is not None or "gates" not in values:
            cases.check(replace(form, dtype=dtype, values=values), device)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["own weight", "fp32 weight"])
def test_a_stream_in_float32(
    narrow: torch.dtype, weight_dtype: torch.dtype | None, device: str
) -> None:
    for form in (FORMS[0], FORMS[3], FORMS[6], FORMS[11], FORMS[13]):
        mixed = replace(form, dtype=narrow, stream=torch.float32, weight_dtype=weight_dtype)
        cases.check(mixed, device)
        cases.check(replace(mixed, shape=(2, 3, 7)), device)


def test_weights_in_float32_beside_16_bit_data(device: str) -> None:
    for form in (FORMS[3], FORMS[6], FORMS[9]):
        cases.check(replace(form, dtype=torch.bfloat16, weight_dtype=torch.float32), device)


@pytest.mark.parametrize("layout", ["wider rows", "misaligned", "time first", "channels first"])
def test_any_strides(layout: str, device: str) -> None:
    for form in FORMS:
        case = replace(form, shape=(2, 5, 3, 24), dtype=torch.bfloat16, layout=layout)
        plain = cases.run(replace(case, layout="contiguous"), plain_tensors(case, device), by_op)
        for name, value in cases.run(case, cases.make(case, device), by_op).items():
            if device == "cpu" or layout != "misaligned":  # there, another kernel
                assert torch.equal(value, plain[name]), name
        cases.check(case, device)


by_op = cases.by_op


def plain_tensors(case: NormCase, device: str) -> cases.Tensors:
    return {k: v.contiguous() for k, v in cases.make(case, device).items()}


def test_gradients_of_a_sum_are_expanded(device: str) -> None:
    case = NormCase(shape=(2, 5, 24))
    given = {k: v for k, v in cases.make(case, device).items() if k != "dy"}
    x = given.pop("x").requires_grad_()
    (found,) = torch.autograd.grad(ops.norm(x, **given).sum(), x)
    y = ops.norm(x, **given)
    (expected,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", [f for f in FORMS if f.op == "add_norm"], ids=str)
@pytest.mark.parametrize("stream", [None, torch.float32], ids=["one dtype", "fp32 stream"])
def test_one_result_alone(form: NormCase, stream: torch.dtype | None, device: str) -> None:
    """A gradient that is not given is zero."""
    case = replace(form, dtype=torch.bfloat16, stream=stream)
    tensors = cases.make(case, device)
    grads = {name: tensors.pop(name) for name in ("dy", "dresidual_out")}
    leaves = {k: v.detach().requires_grad_() for k, v in tensors.items()}
    for used in (0, 1):
        both = ops.add_norm(**leaves, **cases.options(case))
        losses = [g if i == used else torch.zeros_like(g) for i, g in enumerate(grads.values())]
        expected = torch.autograd.grad(both, list(leaves.values()), losses)
        alone = ops.add_norm(**leaves, **cases.options(case))[used]
        found = torch.autograd.grad(
            alone, list(leaves.values()), losses[used], materialize_grads=True
        )
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left, right)


@by_form
def test_one_argument_alone(form: NormCase, device: str) -> None:
    tensors = cases.make(form, device)
    expected = cases.run(form, tensors, by_op)
    losses = [tensors.pop(n) for n in ("dy", "dresidual_out") if n in tensors]
    for name, value in tensors.items():
        leaf = value.detach().requires_grad_()
        results = by_op(form, {**tensors, name: leaf})
        (grad,) = torch.autograd.grad(results, leaf, losses)
        assert torch.equal(grad, expected[f"d{name}"]), name


def test_gradcheck(device: str) -> None:
    for form in FORMS:
        case = replace(form, dtype=torch.float64, shape=(2, 2, 5))
        tensors = cases.make(case, device)
        names = [k for k in tensors if k not in ("dy", "dresidual_out")]
        leaves = [tensors[k].requires_grad_() for k in names]
        assert torch.autograd.gradcheck(
            lambda *t, case=case, names=names: by_op(case, dict(zip(names, t, strict=True))),
            leaves,
        )


def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    for form in FORMS:
        for width in (24, 7, 300):
            for bad in (math.nan, math.inf):
                case = replace(form, shape=(4, 3, width))
                tensors = cases.make(case, device)
                clean = cases.run(case, tensors, by_op)
                tensors["x"][1, 2, 5] = bad
                for name, value in cases.run(case, tensors, by_op).items():
                    if name in ("dweight", "dbias"):
                        continue
                    rows = ~torch.isfinite(value).all(-1)
                    rows[1, 2] = False
                    assert not rows.any(), name
                    kept = torch.ones(4, 3, dtype=torch.bool, device=device)
                    kept[1, 2] = False
                    assert torch.equal(value[kept], clean[name][kept]), name


def test_bitwise_repeatable(device: str) -> None:
    threads = torch.get_num_threads()
    for form in (FORMS[3], FORMS[6], FORMS[9], FORMS[13]):
        case = replace(form, shape=(7, 33, 72))
        tensors = cases.make(case, device)
        first = cases.run(case, tensors, by_op)
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for name, value in cases.run(case, tensors, by_op).items():
                    assert torch.equal(value, first[name]), name
        finally:
            torch.set_num_threads(threads)


def test_nothing_but_inputs_is_kept(device: str) -> None:
    """The backward pass computes again: norm keeps x and its parameters, add_norm the sum."""
    for form in FORMS:
        tensors = cases.make(form, device)
        given = {k: v for k, v in tensors.items() if k not in ("dy", "dresidual_out")}
        leaves = {k: v.requires_grad_() for k, v in given.items()}
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        ):
            results = by_op(form, leaves)
        allowed = {t.data_ptr() for t in leaves.values()}
        if form.op == "add_norm":
            allowed = {leaves[k].data_ptr() for k in ("weight", "bias") if k in leaves}
            allowed.add(results[1].data_ptr())
        assert {t.data_ptr() for t in kept} <= allowed


@pytest.mark.parametrize("width", [24, 7])
@by_form
def test_opcheck(form: NormCase, width: int, device: str) -> None:
    """The width decides which kernel there is, not what is traced. With gradients
    test_compiles_whole_with_dynamic_shapes traces every form."""
    tensors = cases.make(replace(form, shape=(2, 3, width)), device)
    given = {k: v for k, v in tensors.items() if k not in ("dy", "dresidual_out")}
    packet = getattr(raw, form.op).default
    opcheck(packet, (), {**given, **cases.options(form)}, traced=width == 24)
    leaves = {k: v.requires_grad_() for k, v in given.items()}
    opcheck(packet, (), {**leaves, **cases.options(form)}, traced=False)


@by_form
def test_compiles_whole_with_dynamic_shapes(form: NormCase, device: str) -> None:
    torch._dynamo.reset()

    def function(tensors: cases.Tensors) -> tuple[Tensor, ...]:
        result = getattr(ops, form.op)(**tensors, **cases.options(form))
        return tuple(r.square() for r in (result if isinstance(result, tuple) else (result,)))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        tensors = cases.make(replace(form, shape=(2, rows, 24), weight="shared"), device)
        given = {k: v for k, v in tensors.items() if k not in ("dy", "dresidual_out")}
        leaves = {k: v.requires_grad_() for k, v in given.items()}
        pairs = zip(compiled(leaves), function(leaves), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)
        losses = [sum(r.sum() for r in f(leaves)) for f in (compiled, function)]
        grads = [torch.autograd.grad(loss, list(leaves.values())) for loss in losses]
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected)


def test_autocast(device: str) -> None:
    """y goes to autocast's dtype; a float32 x or residual is normed as it is."""
    tensors = cases.make(NormCase(shape=(3, 24)), device)
    x, weight = tensors["x"], tensors["weight"]
    with torch.autocast(device, torch.bfloat16):
        y = ops.norm(x, weight)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, ops.norm(x, weight, dtype=torch.bfloat16))
        assert ops.norm(x, weight, dtype=torch.float32).dtype == torch.float32
        gated = ops.norm(x, weight, gate=x)
        low = x.bfloat16()
        y, total = ops.add_norm(x, x, weight)
        assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
        assert ops.norm(x.double()).dtype == torch.float64
    assert torch.equal(gated, ops.norm(low, weight, gate=low))
    assert torch.equal(total, x + low)


def test_double_backward_is_refused(device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    for results in ((ops.norm(x),), ops.add_norm(x, x)):
        (dx,) = torch.autograd.grad(sum(r.sin().sum() for r in results), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            dx.sum().backward()


def test_captured_in_a_cuda_graph(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CUDA graph needs CUDA")
    case = NormCase(op="add_norm", shape=(300, 1536), dtype=torch.bfloat16, stream=torch.float32)
    tensors = cases.make(case, device)
    cases.run(case, tensors, by_op)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cases.run(case, tensors, by_op)
    for tensor in tensors.values():
        tensor.normal_()
    graph.replay()
    for name, value in cases.run(case, tensors, by_op).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.sanitize
def test_sanitize(device: str) -> None:
    for form in FORMS:
        for width in (24, 7, 264):
            cases.check(replace(form, shape=(3, 2, width), dtype=torch.bfloat16), device)


X = torch.zeros(2, 3, 8)
WRONG = [
    ({"x": torch.zeros(())}, "norm: x must have shape [..., D], got []"),
    ({"x": X.long()}, "norm: x must be float32, float64, bfloat16 or float16, got int64"),
    ({"weight": torch.zeros(7)}, "norm: weight must have shape [D] = [8], got [7]"),
    ({"weight": torch.zeros(2, 8)}, "norm: weight must have shape [H, D] = [3, 8], got [2, 8]"),
    (
        {"weight": torch.zeros(3, 8), "bias": torch.zeros(8)},
        "norm: bias must have 2 dimensions like weight, got 1",
    ),
    ({"bias": torch.zeros(8).half()}, "norm: bias must be float32 (x is float32), got float16"),
    ({"gate": torch.zeros(2, 3, 7)}, "norm: gate must have shape [2, 3, 8] like x, got [2, 3, 7]"),
    ({"gate": X.half()}, "norm: gate must be float32 like x, got float16"),
    ({"kind": "batch"}, 'norm: kind must be "layer" or "rms", got "batch"'),
    (
        {"gate_activation": "relu"},
        'norm: gate_activation must be "silu" or "sigmoid", got "relu"',
    ),
    ({"eps": -1.0}, "norm: eps must be 0 or more and finite, got -1"),
    ({"eps": math.nan}, "norm: eps must be 0 or more and finite, got nan"),
    (
        {"dtype": torch.float64},
        "norm: dtype must be float32, bfloat16 or float16 (x is float32), got float64",
    ),
    (
        {"gate": X, "dtype": torch.bfloat16},
        "norm: dtype must be float32 (x is float32, with a gate), got bfloat16",
    ),
    (
        {"x": X.half(), "dtype": torch.bfloat16},
        "norm: dtype must be float16 (x is float16), got bfloat16",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[m for _, m in WRONG])
def test_errors_of_norm(changes: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        ops.norm(**{"x": X, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"residual": torch.zeros(2, 3, 7)},
            "add_norm: residual must have shape that of x = [2, 3, 8], got [2, 3, 7]",
        ),
        (
            {"residual": X.half()},
            "add_norm: residual must be float32 (x is float32), got float16",
        ),
        (
            {"x": X.double()},
            "add_norm: residual must be float64 like x, got float32",
        ),
        ({"kind": "none"}, 'add_norm: kind must be "layer" or "rms", got "none"'),
    ],
)
def test_errors_of_add_norm(changes: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        ops.add_norm(**{"x": X, "residual": X, **changes})
