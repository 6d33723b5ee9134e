"""`tidegate.reference`: held against the naive oracles, and every op held against it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from support import any_op, cases, gla_cases, norm_cases, rnn_cases, scan_cases, wkv4_cases
from support import forgetting_attention_cases as attention_cases
from support.any_op import AnyCase
from support.forgetting_attention_cases import AttentionCase
from support.gla_cases import GlaCase
from support.rnn_cases import RnnCase
from support.scan_cases import ScanCase
from support.wkv4_cases import Wkv4Case

import tidegate
from tidegate import ops, reference

LENGTHS = (5, 0, 17, 1, 0, 10)
# Every option of every op that has a recurrence or a softmax.
OPTIONS: list[AnyCase] = [
    ScanCase("linear_scan", reverse=True),
    ScanCase("linear_scan", constant=True, dtype=torch.complex64, lengths=LENGTHS),
    ScanCase("linear_scan", dtype=torch.complex64, gate_dtype=torch.float32, h0=None, time=1),
    ScanCase("linear_scan", time=0),
    ScanCase("hgru", theta=True, reverse=True, lengths=LENGTHS),
    ScanCase("hgru", gamma=False, activation="none", h0=None, time=65),
    ScanCase("hgru", lengths=()),
    ScanCase("lru_scan", theta=True, reverse=True, lengths=LENGTHS, channels=16),
    ScanCase("lru_scan", h0=None, channels=16),
    GlaCase("gated_linear_attention", per_head=True, reverse=True, lengths=LENGTHS),
    GlaCase("gated_linear_attention", h0=None, time=65),
    GlaCase("gated_linear_attention", time=0),
    GlaCase("hgrn2", v_activation="sigmoid", lengths=LENGTHS),
    GlaCase("hgrn2", q_activation="none", gamma=False, reverse=True, h0=None, time=65),
    Wkv4Case(lengths=LENGTHS),
    Wkv4Case(state=None, time=65),
    Wkv4Case(time=0),
    RnnCase(gamma="all", lengths=LENGTHS, channels=8),
    RnnCase(h0=None, time=65),
    AttentionCase(past=9, heads=4, key_heads=2, window=5),
    AttentionCase(queries=70, scale=0.3, prune=1e-9, grads="lse"),
    AttentionCase(lengths=((5, 3), (0, 0), (17, 60), (1, 0), (0, 4), (10, 0)), window=30),
    AttentionCase(queries=0),
]
# Gates that are open, shut, at either end, and keys that span hundreds of logarithms.
EXTREMES: list[AnyCase] = [
    *(ScanCase(op, gates=gates, time=65, channels=16, theta=op == "hgru", seed=7)
      for op in ("linear_scan", "hgru", "lru_scan") for gates in cases.GATES),
    *(GlaCase(op, gates=gates, time=65, seed=7)
      for op in gla_cases.OPS for gates in gla_cases.GATES),
    *(Wkv4Case(keys=keys, rates=rates, time=65, seed=7)
      for keys in wkv4_cases.KEYS for rates in wkv4_cases.RATES),
    *(RnnCase(gates=gates, gamma="all", time=65, channels=16, seed=7) for gates in cases.GATES),
    *(AttentionCase(gates=gates, queries=130, head_dim=16, seed=7)
      for gates in attention_cases.GATES),
]  # fmt: skip
DTYPES: list[AnyCase] = [
    *(replace(kind, time=33, gates="loguniform") for kind in scan_cases.KINDS),
    *(replace(kind, time=33, gates="loguniform") for kind in gla_cases.KINDS),
    *(replace(kind, time=33) for kind in (*wkv4_cases.KINDS, *rnn_cases.KINDS)),
    *(AttentionCase(queries=33, dtype=dtype) for dtype in attention_cases.DTYPES),
]
CASES = [*OPTIONS, *EXTREMES, *DTYPES]
by_case = pytest.mark.parametrize("case", CASES, ids=any_op.name)

pytestmark = pytest.mark.usefixtures("one_thread")


@by_case
def test_equals_the_naive_oracle(case: AnyCase) -> None:
    """Forward and gradients, in float64; the two share no code."""
    found, oracle = any_op.reference(case), any_op.oracle(case)
    for name, value in found.items():
        if name == "final" and isinstance(case, Wkv4Case) and not case.has_final():
            continue  # the mean of nothing
        size = float(oracle.get(f"|{name}|", oracle[name]).abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(value, oracle[name], rtol=1e-11, atol=1e-11 * size)


@by_case
def test_the_op_equals_the_reference(case: AnyCase, device: str) -> None:
    """Forward and gradients, by the error rule, as against the oracle."""
    any_op.check(case, device, exact=any_op.reference(case))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotary(rows: int, inverse: bool, device: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64, generator=rng).to(device).requires_grad_()
    angles = 100 * torch.randn(rows, 9, 4, dtype=torch.float64, generator=rng).to(device)
    dy = torch.randn(x.shape, dtype=torch.float64, generator=rng).to(device)
    expected = reference.rotary(x, angles.cos(), angles.sin(), inverse=inverse)
    found = ops.rotary(x, angles.cos(), angles.sin(), inverse=inverse)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    pair = (torch.autograd.grad(y, x, dy)[0] for y in (found, expected))
    torch.testing.assert_close(*pair, rtol=1e-14, atol=1e-14)
    as_numbers = torch.complex(*x.detach().chunk(2, -1)) * torch.polar(
        torch.ones_like(angles), -angles if inverse else angles
    ).unsqueeze(2)
    by_number = torch.cat([as_numbers.real, as_numbers.imag], -1)
    torch.testing.assert_close(expected.detach(), by_number, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "form",
    norm_cases.variants(
        norm_cases.NormCase(bias=True, dtype=torch.float64),
        kind=("layer", "rms"),
        weight=("shared", "heads"),
        gate=(None, "silu", "sigmoid"),
        gate_first=(False, True),
    )
    + [
        norm_cases.NormCase(op="add_norm", kind=kind, dtype=torch.float64)
        for kind in ("layer", "rms")
    ],
    ids=str,
)
def test_norms(form: norm_cases.NormCase, device: str) -> None:
    """Against the op, and against equations that go row by row."""
    tensors = norm_cases.make(form, device)

    def by_reference(case: norm_cases.NormCase, t: norm_cases.Tensors) -> tuple[torch.Tensor, ...]:
        result = getattr(reference, case.op)(**t, **norm_cases.options(case))
        return result if isinstance(result, tuple) else (result,)

    found = norm_cases.run(form, tensors, by_reference)
    for other in (norm_cases.by_op, norm_cases.by_equation):
        for name, value in norm_cases.run(form, tensors, other).items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid"])
def test_glu(activation: str, device: str) -> None:
    x = torch.randn(5, 24, dtype=torch.float64, device=device).requires_grad_()
    pair = (reference.glu(x, activation), ops.glu(x, activation))
    torch.testing.assert_close(*pair, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in pair))


@pytest.mark.parametrize("name", reference.__all__)
def test_signature_is_the_op_s(name: str) -> None:
    """It has the op's parameters with their defaults and kinds, and dtype after them."""
    of_op = dict(inspect.signature(getattr(ops, name)).parameters)
    found = dict(inspect.signature(getattr(reference, name)).parameters)
    assert found["dtype"].default is None
    if "dtype" not in of_op:  # norm has one itself
        del found["dtype"]
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in of_op.values()
    ]


def test_every_recurrence_of_the_ops_has_a_reference() -> None:
    others = {n for n in ops.__all__ if n.endswith("_step") or n.startswith("init_")}
    assert set(ops.__all__) - others == set(reference.__all__)
    assert tidegate.reference is reference


@pytest.mark.parametrize("case", DTYPES, ids=any_op.name)
def test_without_a_dtype_it_returns_what_the_op_returns(case: AnyCase) -> None:
    """Its dtypes and shapes, and nearly its numbers: lru_scan rounds lambda twice here."""
    inputs = {k: v for k, v in any_op.inputs_of(case, "cpu").items() if k not in any_op.LOSS}
    pairs = zip(
        any_op.call(case, inputs, reference)[1], any_op.call(case, inputs, ops)[1], strict=True
    )
    for left, right in pairs:
        tolerance = 64 * torch.finfo(right.dtype).eps
        scale = float(right.abs().max())
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    "case", [ScanCase("hgru", theta=True), GlaCase("hgrn2"), AttentionCase()], ids=any_op.name
)
def test_float64_is_kept_when_asked_for(case: AnyCase) -> None:
    inputs = {k: v for k, v in any_op.inputs_of(case, "cpu").items() if k not in any_op.LOSS}
    results, _ = any_op.call(case, inputs, reference, dtype=torch.float64)
    assert {r.dtype for r in results} == {torch.float64}


def test_differentiable_twice() -> None:
    """What the ops refuse."""
    q, f, v = torch.randn(3, 1, 4, 1, 2, dtype=torch.float64).requires_grad_().unbind()
    (dq,) = torch.autograd.grad(reference.hgrn2(q, f, v)[0].square().sum(), q, create_graph=True)
    assert torch.autograd.grad(dq.square().sum(), f)[0].isfinite().all()
