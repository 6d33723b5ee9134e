"""`gated_rnn`: results and gradients against the oracle, states, what reaches what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import cases, error_rule, recurrence, rnn_cases, rnn_oracle
from support.rnn_cases import RnnCase, arguments_of, leaves, with_grad
from torch import Tensor

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate
SHORT_KINDS = [RnnCase(dtype=torch.float32, gamma="all"), RnnCase(dtype=torch.bfloat16)]
BF16 = torch.bfloat16


# Against the oracle -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        RnnCase(dtype=torch.float64, time=7),
        RnnCase(dtype=torch.float64, lengths=(0, 3, 0, 5, 1), h0=None, gamma="low"),
        RnnCase(dtype=torch.float64, time=0, gamma="high"),
    ],
    ids=str,
)
def test_gradients_of_the_oracle_are_those_of_autograd(case: RnnCase) -> None:
    arguments, loss = arguments_of(case, "cpu")
    named = with_grad(arguments)
    given = leaves(named)
    results = rnn_oracle.gated_rnn_forward(**named)
    found = torch.autograd.grad(results, list(given.values()), loss, allow_unused=True)
    expected = cases.reference(case, backward=True, exact=True)
    for name, grad in zip(given, found, strict=True):
        wanted = expected[f"d{name}"]
        if grad is None:
            assert not wanted.count_nonzero()
        else:
            torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", rnn_cases.every_length(), ids=str)
def test_every_length(case: RnnCase, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", rnn_cases.every_regime(), ids=str)
def test_every_gate_regime(case: RnnCase, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", rnn_cases.every_layout(), ids=str)
def test_every_layout(case: RnnCase, device: str) -> None:
    cases.check(case, device)


@pytest.mark.parametrize("case", rnn_cases.every_mix(), ids=str)
def test_every_mix_of_dtypes(case: RnnCase, device: str) -> None:
    cases.check(case, device)
    arguments, _ = arguments_of(case, device)
    found = cases.run(case, device, backward=True)
    for name, value in leaves(arguments).items():
        grad = found[f"d{name}"]
        assert (grad.dtype, grad.shape, grad.device) == (value.dtype, value.shape, value.device)


@pytest.mark.parametrize("width", rnn_cases.WIDTHS)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_any_width(case: RnnCase, width: int, device: str) -> None:
    for batch in (1, 3):
        cases.check(replace(case, channels=width, time=11, batch=batch, seed=width), device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_wider_than_the_matrix_fits_a_chip(case: RnnCase, device: str) -> None:
    for gamma in (None, "all"):
        cases.check(replace(case, channels=1100, time=4, batch=2, gamma=gamma), device)
        cases.check(replace(case, channels=1100, lengths=(2, 0, 3), gamma=gamma), device)


@pytest.mark.parametrize("case", [RnnCase(time=6, batch=3), RnnCase(lengths=(2, 0, 3))], ids=str)
def test_float64_that_no_chip_holds(case: RnnCase, device: str) -> None:
    """Padded: torch's products on CUDA, where the matrix is also too wide for the plain kernel."""
    for channels, gamma in ((256, None), (257, "all"), (300, None)):
        cases.check(replace(case, dtype=torch.float64, channels=channels, gamma=gamma), device)


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 9, 16, 33, 70])
@pytest.mark.parametrize("width", [24, 130, 500])
def test_any_batch(batch: int, width: int, device: str) -> None:
    cases.check(RnnCase(batch=batch, channels=width, time=5), device)


LENGTHS = [(4, 0, 13, 1, 0), (0, 0, 18), (9, 9), (1,) * 18, (0, 0), (65, 2, 0, 70)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("width", [6, 300])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_packed(case: RnnCase, width: int, lengths: tuple[int, ...], device: str) -> None:
    for offsets_dtype in (torch.int32, torch.int64):
        packed = replace(case, lengths=lengths, offsets_dtype=offsets_dtype, channels=width)
        cases.check(packed, device)


@pytest.mark.parametrize("gates", ["normal", "open"])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradient_of_the_bounds_over_many_tokens(case: RnnCase, gates: str, device: str) -> None:
    """Their terms are added up over time: a rounding at every step would show."""
    cases.check(replace(case, time=4097, batch=1, channels=7, gamma="low", gates=gates), device)


@pytest.mark.parametrize(
    "case",
    [
        RnnCase(),
        RnnCase(lengths=(2, 0, 3), gamma="low"),
        RnnCase(h0=None),
        RnnCase(gamma="high"),
    ],
    ids=str,
)
def test_gradcheck(case: RnnCase, device: str) -> None:
    case = replace(case, dtype=torch.float64, time=5, batch=2, channels=3)
    arguments, _ = arguments_of(case, device)
    named = leaves(arguments)

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return ops.gated_rnn(**{**arguments, **dict(zip(named, values, strict=True))})

    inputs = [v.detach().requires_grad_() for v in named.values()]
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


@pytest.mark.parametrize("gamma", [None, "all"])
def test_without_a_matrix_it_is_the_linear_recurrence(gamma: str | None, device: str) -> None:
    arguments, _ = arguments_of(RnnCase(time=40, channels=16, gamma=gamma), device)
    arguments["w_zh"] = torch.zeros_like(arguments["w_zh"])
    named = {k: arguments[k] for k in ("gamma", "h0")}
    expected = ops.hgru(arguments["x"], arguments["z"], activation="none", **named)
    for left, right in zip(ops.gated_rnn(**arguments), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_halves_of_one_projection_are_read_in_place(device: str) -> None:
    wide = torch.randn(2, 33, 2 * 16, device=device, requires_grad=True)
    w = torch.randn(16, 16, device=device)
    z, x = wide.chunk(2, -1)
    found = ops.gated_rnn(z, x, w)
    expected = ops.gated_rnn(z.contiguous(), x.contiguous(), w)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
    (grad,) = torch.autograd.grad(found[0].sin().sum(), wide)
    (same,) = torch.autograd.grad(expected[0].sin().sum(), wide)
    assert torch.equal(grad, same)


# States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("h0", ["state", "data", None])
@pytest.mark.parametrize("case", rnn_cases.KINDS, ids=str)
def test_final_state_without_tokens_is_a_copy_of_h0(case: RnnCase, h0, device: str) -> None:
    arguments, _ = arguments_of(replace(case, time=0, h0=h0), device)
    h, final = ops.gated_rnn(**arguments)
    assert h.shape == (2, 0, case.channels)
    assert final.dtype == recurrence.state_dtype(case.dtype)
    assert final.shape == (2, case.channels)
    if h0 is None:
        assert not final.count_nonzero()
        return
    assert torch.equal(final, arguments["h0"].to(final.dtype))
    assert final.data_ptr() != arguments["h0"].data_ptr()


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0), (2, 0, 3), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_empty_dimensions(case: RnnCase, shape: tuple[int, int, int], device: str) -> None:
    case = case.sized(*shape)
    found = cases.run(case, device, backward=True)
    expected = cases.reference(case, backward=True, exact=False)
    for name, value in found.items():
        assert value.shape == expected[name].shape
        assert torch.equal(value.cpu(), expected[name]), name


def test_no_sequences(device: str) -> None:
    for name, value in cases.run(RnnCase(lengths=()), device, backward=True).items():
        assert not value.count_nonzero(), name


@pytest.mark.parametrize("width", [5, 300])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_split_anywhere_equals_the_whole(case: RnnCase, width: int, device: str) -> None:
    case = replace(case, time=9, channels=width)
    arguments, _ = arguments_of(case, device)
    whole, final = ops.gated_rnn(**arguments)
    for at in range(case.time + 1):
        outputs, state = [], arguments["h0"]
        for part in (slice(0, at), slice(at, None)):
            sliced = {k: arguments[k][:, part] for k in "zx"}
            h, state = ops.gated_rnn(**{**arguments, **sliced, "h0": state})
            outputs.append(h)
        assert torch.equal(torch.cat(outputs, 1), whole)
        assert torch.equal(state, final)


@pytest.mark.parametrize("layout", ["contiguous", "projection", "channels_first"])
@pytest.mark.parametrize("case", [replace(k, gamma="low") for k in rnn_cases.KINDS], ids=str)
def test_steps_equal_prefill(case: RnnCase, layout: str, device: str) -> None:
    case = replace(case, time=9, channels=33, layout=layout)
    arguments, _ = arguments_of(case, device)
    expected, final = ops.gated_rnn(**arguments)
    state = arguments["h0"].clone()
    where, rows = state.data_ptr(), []
    for t in range(case.time):
        z, x = arguments["z"][:, t], arguments["x"][:, t]
        w_zh, gamma = arguments["w_zh"], arguments["gamma"]
        rows.append(ops.gated_rnn_step(z, x, w_zh, state, gamma=gamma))
    assert state.data_ptr() == where, "the state is updated in place"
    assert torch.equal(torch.stack(rows, 1), expected)
    assert torch.equal(state, final)


def test_step_writes_into_a_view_of_a_state(device: str) -> None:
    ones, shut = torch.ones(2, 4, device=device), torch.full((2, 4), -torch.inf, device=device)
    w = torch.zeros(4, 4, device=device)
    for pick in (lambda s: s[1], lambda s: s.transpose(0, 1)[:, 1]):
        for dtype in (torch.float32, torch.bfloat16):
            states = torch.full((3, 2, 4), 0.5, device=device, dtype=dtype)
            tokens = [t.to(dtype) for t in (shut, ones, w)]
            h = ops.gated_rnn_step(*tokens, pick(states))
            assert torch.equal(h, ones.to(dtype))
            assert states[1].eq(1).all()
            assert states[::2].eq(0.5).all()


def test_gradients_go_through_the_state_from_part_to_part(device: str) -> None:
    for case in SHORT_KINDS:
        case = replace(case, time=21, channels=16)
        arguments, loss = arguments_of(case, device)
        exact = cases.reference(case, backward=True, exact=True)
        yardstick = cases.reference(case, backward=True, exact=False)
        named = with_grad(arguments)
        parts, state = [], named["h0"]
        for part in (slice(0, 8), slice(8, 9), slice(9, 21)):
            sliced = {k: named[k][:, part] for k in "zx"}
            h, state = ops.gated_rnn(**{**named, **sliced, "h0": state})
            parts.append(h)
        given = leaves(named)
        found = torch.autograd.grad((torch.cat(parts, 1), state), list(given.values()), loss)
        for name, grad in zip(given, found, strict=True):
            expected = exact[f"d{name}"], yardstick[f"d{name}"]
            error_rule.assert_within_rule(name, grad, *expected, exact.get(f"|d{name}|"))


# What reaches what ------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, (20, 0, 15, 5)], ids=str)
@pytest.mark.parametrize("width", [6, 300])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nan_reaches_later_tokens_of_its_sequence_only(
    poison: float, width: int, lengths, device: str
) -> None:
    case = RnnCase(time=40, channels=width, lengths=lengths)
    arguments, _ = arguments_of(case, device)
    clean, clean_final = ops.gated_rnn(**arguments)
    offsets = arguments["cu_seqlens"].tolist() if lengths else [0, 40]
    for t in (0, 15, 20, 39):
        x = arguments["x"].clone()
        x[0, t, 1] = poison
        h, final = ops.gated_rnn(**{**arguments, "x": x})
        end = min(v for v in offsets if v > t)
        hit = torch.zeros_like(clean, dtype=torch.bool)
        hit[0, t:end] = True
        assert torch.equal(h[~hit], clean[~hit])
        assert not h[0, t, 1].isfinite()
        assert torch.equal(h[0, t, 2:], clean[0, t, 2:]), "within a token channels are apart"
        touched = 0 if lengths is None else offsets.index(end) - 1
        others = [n for n in range(len(final)) if n != touched]
        assert torch.equal(final[others], clean_final[others])


def test_a_loss_over_one_sequence_leaves_zeros_elsewhere(device: str) -> None:
    case = RnnCase(lengths=(5, 40, 0, 30, 3), channels=12)
    arguments, loss = arguments_of(case, device)
    named = with_grad(arguments)
    results = ops.gated_rnn(**named)
    offsets = arguments["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        dh, dh_final = (torch.zeros_like(g) for g in loss)
        dh[:, start:end], dh_final[n] = loss[0][:, start:end], loss[1][n]
        given = leaves(named)
        found = torch.autograd.grad(
            results, list(given.values()), (dh, dh_final), retain_graph=True
        )
        dz, dx, dh0 = (found[list(given).index(name)] for name in ("z", "x", "h0"))
        for grad in (dz, dx):
            assert not grad[:, :start].count_nonzero()
            assert not grad[:, end:].count_nonzero()
        assert dh0[n].count_nonzero()
        assert not dh0[[i for i in range(5) if i != n]].count_nonzero()


def test_a_sequence_does_not_depend_on_its_neighbours(device: str) -> None:
    for width in (40, 200):
        case = RnnCase(batch=13, channels=width, time=7, gamma="low")
        arguments, loss = arguments_of(case, device)
        named = with_grad(arguments)
        h, final = ops.gated_rnn(**named)
        dz, dx = torch.autograd.grad((h, final), (named["z"], named["x"]), loss)
        for n in (0, 5, 12):
            one = with_grad(
                {
                    k: v if k in ("w_zh", "gamma") else v[n : n + 1]
                    for k, v in arguments.items()
                    if v is not None
                }
            )
            h_one, final_one = ops.gated_rnn(**one)
            grads = torch.autograd.grad(
                (h_one, final_one), (one["z"], one["x"]), [g[n : n + 1] for g in loss]
            )
            torch.testing.assert_close(h_one[0], h[n], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(final_one[0], final[n], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grads[0][0], dz[n], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(grads[1][0], dx[n], rtol=1e-4, atol=1e-5)


def test_results_are_bitwise_the_same_each_time(device: str) -> None:
    for case in (
        RnnCase(batch=9, channels=128, time=33, gamma="low"),
        RnnCase(batch=5, channels=300, time=20, gamma="high"),
    ):
        first = cases.run(case, device, backward=True)
        for _ in range(3):
            again = cases.run(case, device, backward=True)
            assert all(torch.equal(first[k], again[k]) for k in first)


# Which gradients flow, what is kept -------------------------------------------------------------


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_one_argument_alone_gets_the_gradient_it_gets_among_all(case: RnnCase, device: str) -> None:
    expected = cases.run(case, device, backward=True)
    arguments, loss = arguments_of(case, device)
    for name, value in leaves(arguments).items():
        leaf = value.detach().requires_grad_()
        results = ops.gated_rnn(**{**arguments, name: leaf})
        (grad,) = torch.autograd.grad(results, (leaf,), loss)
        assert torch.equal(grad, expected[f"d{name}"]), name


def test_gradients_of_a_sum(device: str) -> None:
    """`h.sum()` hands over a gradient of strides zero; `h.transpose()` one of odd strides."""
    arguments, _ = arguments_of(RnnCase(), device)
    leaf = arguments["x"] = arguments["x"].detach().requires_grad_()

    def grad_of(loss_of) -> Tensor:
        h, final = ops.gated_rnn(**arguments)
        return torch.autograd.grad(loss_of(h) + final.sum(), leaf)[0]

    expected = grad_of(lambda h: (h * torch.ones_like(h)).sum())
    assert torch.equal(grad_of(lambda h: h.sum()), expected)
    assert torch.equal(grad_of(lambda h: h.transpose(1, 2).flatten().sum()), expected)


def test_logits_are_kept_only_where_a_gradient_is_recorded(device: str) -> None:
    arguments, _ = arguments_of(RnnCase(), device)
    seen: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        ops.gated_rnn(**arguments)
        with torch.no_grad():
            ops.gated_rnn(**with_grad(arguments))
    assert seen.count("tidegate.gated_rnn.default") == 2
    assert not any("with_logits" in name for name in seen)
    *results, logits = raw.gated_rnn_with_logits(*arguments.values())
    for left, right in zip(results, ops.gated_rnn(**arguments), strict=True):
        assert torch.equal(left, right)
    before = torch.cat([arguments["h0"][:, None], results[0][:, :-1]], 1)
    torch.testing.assert_close(logits, arguments["z"] + before @ arguments["w_zh"].T)
