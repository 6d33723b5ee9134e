"""wkv4 inside torch: opcheck, compile, autocast, export; and what it refuses, by message."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import wkv4_oracle
from support.op_properties import check_export, check_no_alias
from support.wkv4_cases import (
    ARGUMENTS,
    Wkv4Case,
    call,
    gradients,
    on_device,
    positional,
    with_grad,
)
from torch import Tensor

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate


# torch's machinery ------------------------------------------------------------------------------

OPCHECK = [
    Wkv4Case(time=11),
    Wkv4Case(time=11, dtype=torch.bfloat16, state=None),
    Wkv4Case(lengths=(3, 0, 9), layout="time_major"),
    Wkv4Case(time=0),
    Wkv4Case(time=1, state=None),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck(case: Wkv4Case, grad: bool, device: str) -> None:
    made = on_device(case, device)
    torch.library.opcheck(raw.wkv4.default, positional(with_grad(made) if grad else made))


@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck_of_the_ops_below(case: Wkv4Case, device: str) -> None:
    made = on_device(case, device)
    # Rows of the saved states that belong to no token are not written: nothing to compare there.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(raw.wkv4_saving.default, positional(made), test_utils=checks)
    o, final, saved = raw.wkv4_saving(*positional(made))
    torch.library.opcheck(
        raw.wkv4_backward.default,
        (
            torch.ones_like(o),
            torch.ones_like(final),
            *(made[n] for n in ARGUMENTS),
            final,
            saved,
            made["cu_seqlens"],
        ),
    )


def test_opcheck_of_the_step(device: str) -> None:
    w, u = torch.full((2, 4), 0.5, device=device).unbind(0)
    k, v = torch.randn(2, 2, 4, device=device).unbind(0)
    torch.library.opcheck(raw.wkv4_step.default, (w, u, k, v, torch.ones(2, 3, 4, device=device)))


@pytest.mark.parametrize("case", [Wkv4Case(), Wkv4Case(lengths=(5, 0, 12))], ids=str)
def test_compile(case: Wkv4Case, device: str) -> None:
    def function(w, u, k, v, state, cu_seqlens):
        o, final = ops.wkv4(w, u, k * 2, v, state, cu_seqlens=cu_seqlens)
        return o * 2, final

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for time in (17, 33):
        again = replace(case, time=time) if case.lengths is None else case
        made = with_grad(on_device(again, device))
        found, expected = compiled(*positional(made)), function(*positional(made))
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left, right)
        pairs = zip(gradients(made, found), gradients(made, expected), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_compiled_autograd(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(time=20), device))
    expected = gradients(made, call(made))

    def compiler(graph):
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    loss = call(made)
    with torch._dynamo.compiled_autograd._enable(compiler):
        total = loss[0].float().sin().sum() + wkv4_oracle.mean_and_log(loss[1]).sum()
        total.backward()
    for name, same in zip(ARGUMENTS, expected, strict=True):
        torch.testing.assert_close(made[name].grad, same)


def test_autocast(device: str) -> None:
    """Keys and values go to autocast's type; rates and bonuses keep their digits."""
    made = with_grad(on_device(Wkv4Case(), device))
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final = call(made)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    expected = call(made | {n: made[n].bfloat16() for n in ("k", "v")})
    assert torch.equal(o, expected[0])
    assert torch.equal(final, expected[1])
    for grad in gradients(made, (o, final)):
        assert grad.dtype == torch.float32
    token = [made[n][:, 0].detach() for n in ("k", "v")]
    state = made["state"].detach().clone()
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        step = ops.wkv4_step(made["w"], made["u"], *token, state)
    assert (step.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_checkpointing(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    made = with_grad(on_device(Wkv4Case(time=30), device))
    results = checkpoint(lambda: call(made), use_reentrant=False)
    again = gradients(made, results)
    for left, right in zip(again, gradients(made, call(made)), strict=True):
        assert torch.equal(left, right)


def test_modes_without_gradients(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(), device))
    expected = call(made)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = call(made)
        for left, right in zip(found, expected, strict=True):
            assert not left.requires_grad
            assert torch.equal(left, right)


def test_export_with_dynamic_time(device: str) -> None:
    def example(time: int) -> tuple[Tensor | None, ...]:
        return positional(on_device(Wkv4Case(time=time), device))[:5]

    check_export(ops.wkv4, example, over_time=(False, False, True, True, False))


def test_outputs_do_not_alias_inputs(device: str) -> None:
    for time in (0, 1, 5):
        made = with_grad(on_device(Wkv4Case(time=time), device))
        results = call(made)
        given = [v for v in made.values() if isinstance(v, Tensor)]
        check_no_alias(given, (*results, *gradients(made, results)))


def test_double_backward_is_an_error_by_name(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(), device))
    o, _ = call(made)
    (grad,) = torch.autograd.grad(o.sin().sum(), made["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="wkv4: double backward is not supported"):
        grad.sum().backward()


def test_transforms_and_gradients_of_steps_are_errors_by_name(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(), device))
    with pytest.raises(RuntimeError, match="wkv4: vmap is not supported"):
        torch.vmap(lambda k: raw.wkv4(made["w"].detach(), made["u"].detach(), k, k)[0])(
            torch.zeros(2, 2, 3, 5, device=device)
        )
    token = [made[n][:, 0] for n in ("k", "v")]
    state = made["state"].detach()
    with pytest.raises(RuntimeError, match="wkv4_step: w requires a gradient, but a step has none"):
        ops.wkv4_step(made["w"], made["u"], *token, state)
    with pytest.raises(RuntimeError, match="wkv4_saving: an argument requires a gradient"):
        raw.wkv4_saving(*positional(made))


# Errors -----------------------------------------------------------------------------------------

F = torch.float32
BAD = [
    ({"k": torch.ones(2, 5)}, r"wkv4: k must have shape \[B, T, D\], got \[2, 5\]"),
    ({"k": torch.ones(2, 7, 5, dtype=torch.int64)}, r"wkv4: k must be float32, .*, got int64"),
    ({"k": torch.ones(2, 7, 5, dtype=torch.complex64)}, r"wkv4: k must be float32, .*complex64"),
    ({"v": torch.ones(2, 6, 5)}, r"wkv4: v must have shape \[2, 7, 5\] like k, got \[2, 6, 5\]"),
    ({"v": torch.ones(2, 7, 5).half()}, r"wkv4: v must be float32 like k, got float16"),
    ({"w": torch.ones(4)}, r"wkv4: w must have shape \[D\] = \[5\], got \[4\]"),
    ({"w": torch.ones(5).half()}, r"wkv4: w must be float32 \(k is float32\), got float16"),
    ({"u": torch.ones(1, 5)}, r"wkv4: u must have shape \[D\] = \[5\], got \[1, 5\]"),
    ({"u": torch.ones(5).double()}, r"wkv4: u must be float32 \(k is float32\), got float64"),
    (
        {"state": torch.ones(2, 5)},
        r"wkv4: state must have shape \[N, 3, D\] = \[2, 3, 5\], got \[2, 5\]",
    ),
    ({"state": torch.ones(2, 3, 5).half()}, r"wkv4: state must be float32 .*, got float16"),
    ({"cu_seqlens": torch.tensor([0, 7])}, r"wkv4: .*cu_seqlens"),
    ({"w": torch.ones(5, device="meta")}, r"wkv4: expected all tensors on cpu like k, got w on"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_errors_by_message(change: dict[str, Tensor], message: str) -> None:
    made = Wkv4Case(time=7).make_inputs() | change
    with pytest.raises(RuntimeError, match=message):
        call(made)


def test_errors_of_steps_by_message() -> None:
    w, k, state = torch.ones(5), torch.ones(2, 5), torch.zeros(2, 3, 5)
    for arguments, message in (
        ((w, w, k[None], k[None], state), r"wkv4_step: k must have shape \[B, D\], got"),
        ((w, w, k, k, state[:, :2]), r"wkv4_step: state must have shape \[B, 3, D\] = \[2, 3, 5\]"),
        ((w[:4], w, k, k, state), r"wkv4_step: w must have shape \[D\] = \[5\], got \[4\]"),
        ((w, w, k, k[:1], state), r"wkv4_step: v must have shape \[2, 5\] like k, got \[1, 5\]"),
        ((w, w, k, k, state.half()), r"wkv4_step: state must be float32 .*, got float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.wkv4_step(*arguments)


def test_rates_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    made = Wkv4Case(time=7).make_inputs()
    made = {k: v if v is None else v.to(device) for k, v in made.items()}
    made["w"][3] = -0.5
    call(made)
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    with pytest.raises(RuntimeError, match=r"wkv4: w must be at least 0, got values down to -0.5"):
        call(made)
    step = [made["w"], made["u"], made["k"][:, 0], made["v"][:, 0]]
    state = torch.zeros(made["k"].size(0), 3, made["k"].size(2), device=device)
    with pytest.raises(RuntimeError, match=r"wkv4_step: w must be at least 0"):
        ops.wkv4_step(*step, state)
    made["w"][3] = 0.0  # no decay at all
    call(made)
