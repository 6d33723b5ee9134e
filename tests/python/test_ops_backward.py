"""`linear_scan`, `hgru`, `lru_scan`, backward: every gradient against the oracle, each device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import cases, oracle
from support.cases import Case
from torch import Tensor

import tidegate

LONG = 131072
SHORT_KINDS = [
    Case("hgru", dtype=torch.float32),
    Case("hgru", dtype=torch.bfloat16, theta=True),
    Case("linear_scan", dtype=torch.float32),
    Case("linear_scan", dtype=torch.complex64, constant=True),
    Case("lru_scan", dtype=torch.float32, theta=True),
    Case("lru_scan", dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", cases.every_length(), ids=str)
def test_every_length(case: Case, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", cases.every_regime(), ids=str)
def test_every_gate_regime(case: Case, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", cases.every_mix(), ids=str)
def test_every_mix_of_dtypes(case: Case, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", cases.every_layout(), ids=str)
def test_every_layout(case: Case, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("channels", [1, 2, 7, 31, 64, 65, 130, 257])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_any_number_of_channels(case: Case, channels: int, device: str) -> None:
    cases.check(replace(case, channels=channels, time=70, seed=channels), device)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "lengths", [(4, 0, 13, 1, 0), (0, 0, 18), (9, 9), (1,) * 18, (0, 0), (65, 2, 0, 70)], ids=str
)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_packed(case: Case, lengths: tuple[int, ...], reverse: bool, device: str) -> None:
    for offsets_dtype in (torch.int32, torch.int64):
        packed = replace(case, lengths=lengths, reverse=reverse, offsets_dtype=offsets_dtype)
        cases.check(packed, device)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0), (2, 0, 3), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_empty_dimensions(case: Case, shape: tuple[int, int, int], device: str) -> None:
    batch, time, channels = shape
    case = replace(case, batch=batch, time=time, channels=channels)
    found = cases.run(case, device, backward=True)
    expected = cases.reference(case, backward=True, exact=False)
    for name, grad in found.items():
        assert torch.equal(grad.cpu(), expected[name]), name


def test_no_sequences(device: str) -> None:
    for case in SHORT_KINDS:
        for name, grad in cases.run(replace(case, lengths=()), device, backward=True).items():
            assert not grad.count_nonzero(), name


# Which gradients flow ---------------------------------------------------------------------------


def leaves_of(case: Case, device: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The op's arguments, those of the loss apart."""
    made = cases.make_inputs(case)
    placed = {k: cases.to_device(v, device, case.layout) for k, v in made.items()}
    loss = {k: placed.pop(k) for k in ("dh", "dh_final")}
    return placed, loss


def call(case: Case, arguments: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    rest = dict(arguments)
    cu_seqlens = rest.pop("cu_seqlens")
    op = getattr(tidegate.ops, case.op)
    return op(*rest.values(), **cases.options(case), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("case", [*SHORT_KINDS, Case("hgru", theta=True)], ids=str)
def test_one_argument_alone_gets_the_gradient_it_gets_among_all(case: Case, device: str) -> None:
    expected = cases.run(case, device, backward=True)
    arguments, loss = leaves_of(case, device)
    for name, value in arguments.items():
        if value is None or name == "cu_seqlens":
            continue
        leaf = value.detach().requires_grad_()
        h, final = call(case, {**arguments, name: leaf})
        (grad,) = torch.autograd.grad((h, final), (leaf,), (loss["dh"], loss["dh_final"]))
        assert torch.equal(grad, expected[f"d{name}"]), name


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradients_have_the_dtype_and_shape_of_their_argument(case: Case, device: str) -> None:
    case = replace(case, h0="data", bound_dtype=case.dtype if case.op == "hgru" else None)
    assert_gradients_are_like_their_arguments(case, device)


@pytest.mark.parametrize("case", cases.every_mix(), ids=str)
def test_gradients_in_every_mix_of_dtypes_are_like_their_arguments(case: Case, device: str) -> None:
    assert_gradients_are_like_their_arguments(replace(case, time=2, channels=2), device)


def assert_gradients_are_like_their_arguments(case: Case, device: str) -> None:
    arguments, _ = leaves_of(case, device)
    found = cases.run(case, device, backward=True)
    for name, value in arguments.items():
        if value is not None and name != "cu_seqlens":
            assert found[f"d{name}"].dtype == value.dtype
            assert found[f"d{name}"].shape == value.shape
            assert found[f"d{name}"].device == value.device


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradients_of_a_sum(case: Case, device: str) -> None:
    """`h.sum()` hands over a gradient of strides zero; `h.transpose()` one of odd strides."""
    arguments, _ = leaves_of(case, device)
    data = next(iter(arguments))
    leaf = arguments[data].detach().requires_grad_()
    arguments[data] = leaf

    def grad_of(loss_of: object) -> Tensor:
        h, final = call(case, arguments)
        value = loss_of(h) + final.sum().real
        return torch.autograd.grad(value, leaf)[0]

    ones = torch.ones_like(leaf)
    expected = grad_of(lambda h: (h * ones).sum().real)
    assert torch.equal(grad_of(lambda h: h.sum().real), expected)
    assert torch.equal(grad_of(lambda h: h.transpose(1, 2).flatten().sum().real), expected)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradients_go_through_the_state_from_part_to_part(case: Case, device: str) -> None:
    case = replace(case, time=23)
    arguments, loss = leaves_of(case, device)
    exact = cases.reference(case, backward=True, exact=True)
    yardstick = cases.reference(case, backward=True, exact=False)
    data, gate = list(arguments)[:2]
    names = [k for k, v in arguments.items() if v is not None and k != "cu_seqlens"]
    arguments.update({k: arguments[k].detach().requires_grad_() for k in names})
    parts, state = [], arguments["h0"]
    for part in (slice(0, 9), slice(9, 10), slice(10, 23)):
        sliced = {**arguments, data: arguments[data][:, part], "h0": state}
        if arguments[gate].dim() == 3:
            sliced[gate] = arguments[gate][:, part]
        h, state = call(case, sliced)
        parts.append(h)
    results = (torch.cat(parts, 1), state)
    grads = torch.autograd.grad(results, [arguments[k] for k in names], tuple(loss.values()))
    for name, grad in zip(names, grads, strict=True):
        oracle.assert_within_rule(name, grad, exact[f"d{name}"], yardstick[f"d{name}"])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_no_gradient_leaks_across_a_boundary(case: Case, reverse: bool, device: str) -> None:
    """A loss over one sequence leaves exact zeros everywhere else."""
    case = replace(case, lengths=(5, 40, 0, 90, 3), reverse=reverse)
    arguments, loss = leaves_of(case, device)
    names = [k for k in list(arguments)[:2] if arguments[k].dim() == 3]
    arguments.update({k: arguments[k].detach().requires_grad_() for k in (*names, "h0")})
    offsets = arguments["cu_seqlens"].tolist()
    results = call(case, arguments)
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        dh, dh_final = torch.zeros_like(loss["dh"]), torch.zeros_like(loss["dh_final"])
        dh[:, start:end], dh_final[n] = loss["dh"][:, start:end], loss["dh_final"][n]
        leaves = [arguments[k] for k in (*names, "h0")]
        *grads, dh0 = torch.autograd.grad(results, leaves, (dh, dh_final), retain_graph=True)
        for grad in grads:
            assert not grad[:, :start].count_nonzero()
            assert not grad[:, end:].count_nonzero()
        others = [i for i in range(len(case.lengths)) if i != n]
        assert dh0[n].count_nonzero()
        assert not dh0[others].count_nonzero()


# Second oracle, extremes, what is kept ----------------------------------------------------------

GRADCHECK = [
    Case("linear_scan", dtype=torch.float64),
    Case("linear_scan", dtype=torch.complex128, reverse=True),
    Case("linear_scan", dtype=torch.complex128, gate_dtype=torch.float64),
    Case("linear_scan", dtype=torch.complex128, constant=True),
    Case("linear_scan", dtype=torch.float64, constant=True, lengths=(2, 0, 3)),
    Case("hgru", dtype=torch.float64),
    Case("hgru", dtype=torch.float64, theta=True),
    Case("hgru", dtype=torch.float64, theta=True, reverse=True, activation="none"),
    Case("hgru", dtype=torch.float64, gamma=False, lengths=(2, 0, 3), reverse=True),
    Case("lru_scan", dtype=torch.float64),
    Case("lru_scan", dtype=torch.float64, theta=True, lengths=(2, 0, 3)),
    Case("lru_scan", dtype=torch.float64, theta=True, reverse=True),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_gradcheck(case: Case, device: str) -> None:
    arguments, _ = leaves_of(replace(case, time=5, channels=2, batch=2), device)
    names = [k for k, v in arguments.items() if v is not None and k != "cu_seqlens"]
    leaves = [arguments[k].detach().requires_grad_() for k in names]

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(case, {**arguments, **dict(zip(names, values, strict=True))})

    assert torch.autograd.gradcheck(function, leaves, nondet_tol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("theta", [False, True])
def test_gradients_over_a_long_time(theta: bool, device: str) -> None:
    """lambda near 1 (and theta turning) over 131072 steps."""
    cases.check(Case(batch=1, time=LONG, channels=3, gates="open", theta=theta), device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [False, True])
def test_gradients_of_lru_over_a_long_time(theta: bool, dtype: torch.dtype, device: str) -> None:
    """Those of nu_log, theta_log and gamma_log are sums over 131072 steps."""
    case = Case("lru_scan", batch=1, time=LONG, channels=3, gates="open", theta=theta, dtype=dtype)
    cases.check(case, device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_only_inputs_and_h_are_kept_for_the_backward_pass(case: Case, device: str) -> None:
    case = replace(case, time=40, channels=16)
    arguments, _ = leaves_of(case, device)
    names = [k for k, v in arguments.items() if v is not None and k != "cu_seqlens"]
    arguments.update({k: arguments[k].detach().requires_grad_() for k in names})
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        h, _ = call(case, arguments)
    allowed = {v.data_ptr() for v in arguments.values() if v is not None} | {h.data_ptr()}
    small = case.channels * 4 * case.batch * 2  # states and bounds converted to the state's dtype
    for value in kept:
        assert value.data_ptr() in allowed or value.numel() <= small, tuple(value.shape)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_bitwise_repeatable(case: Case, device: str) -> None:
    case = replace(case, time=300, channels=70)
    first = cases.run(case, device, backward=True)
    threads = torch.get_num_threads()
    try:
        for run in range(3):
            torch.set_num_threads(1 + run)
            for name, value in cases.run(case, device, backward=True).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(threads)


def test_changing_an_input_between_the_passes_is_an_error(device: str) -> None:
    arguments, _ = leaves_of(Case(), device)
    leaf = arguments["c"].detach().requires_grad_()
    h, _ = call(Case(), {**arguments, "c": leaf})
    arguments["f"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_a_conjugate_gradient(device: str) -> None:
    """Autograd of `h.conj()` hands over a lazily conjugated dh."""
    case = Case("linear_scan", dtype=torch.complex64)
    arguments, loss = leaves_of(case, device)
    arguments["x"] = leaf = arguments["x"].detach().requires_grad_()
    h, _ = call(case, arguments)
    (lazy,) = torch.autograd.grad(h, leaf, loss["dh"].conj(), retain_graph=True)
    (solid,) = torch.autograd.grad(h, leaf, loss["dh"].conj().resolve_conj())
    assert torch.equal(lazy, solid)
