"""`gated_rnn`: results and gradients against the oracle, and its manners inside torch."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from conftest import require_cuda
from support import cases, error_rule, recurrence, rnn_cases, rnn_oracle
from support.op_properties import check_export, check_no_alias
from support.rnn_cases import RnnCase
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate
SHORT_KINDS = [RnnCase(dtype=torch.float32, gamma="all"), RnnCase(dtype=torch.bfloat16)]
BF16 = torch.bfloat16


@pytest.fixture
def _needs_a_gpu() -> None:
    require_cuda()


def arguments_of(case: RnnCase, device: str) -> tuple[dict[str, Tensor | None], tuple]:
    """The op's arguments by name, and the gradients of its two results."""
    made = case.make_inputs()
    placed = {k: cases.to_device(v, device, case.layout) for k, v in made.items()}
    return placed, (placed.pop("dh"), placed.pop("dh_final"))


def leaves(arguments: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {k: v for k, v in arguments.items() if v is not None and k != "cu_seqlens"}


def with_grad(arguments: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return arguments | {k: v.detach().requires_grad_() for k, v in leaves(arguments).items()}


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


# Inside torch -----------------------------------------------------------------------------------

TORCH_CASES = [
    RnnCase(time=9, channels=4),
    RnnCase(time=9, channels=4, dtype=BF16, matrix_dtype=torch.float32, gamma="low"),
    RnnCase(channels=4, lengths=(3, 0, 6), h0=None, dtype=BF16, gate_dtype=torch.float32),
    RnnCase(channels=4, lengths=(3, 0, 6), gamma="high", bound_dtype=BF16, dtype=BF16),
    RnnCase(channels=4, dtype=torch.float64, gate_dtype=torch.float32, h0="single"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("time", [None, 0, 1])
@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck(case: RnnCase, time: int | None, grad: bool, device: str) -> None:
    if time is not None:
        case = replace(case, time=time, lengths=None)
    arguments, _ = arguments_of(case, device)
    if grad:
        arguments = with_grad(arguments)
    torch.library.opcheck(raw.gated_rnn.default, tuple(arguments.values()))
    torch.library.opcheck(raw.gated_rnn_with_logits.default, tuple(arguments.values()))


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck_of_backward_and_step(case: RnnCase, device: str) -> None:
    arguments, (dh, dh_final) = arguments_of(case, device)
    h, _, logits = raw.gated_rnn_with_logits(*arguments.values())
    z, x, w, h0, cu_seqlens, gamma = arguments.values()
    kept = (x, w, logits, h, h0, z.dtype, cu_seqlens, gamma)
    torch.library.opcheck(raw.gated_rnn_backward.default, (dh, dh_final, *kept))
    state = torch.ones_like(x[:, 0], dtype=dh_final.dtype)
    torch.library.opcheck(raw.gated_rnn_step.default, (z[:, 0], x[:, 0], w, state, gamma))


@pytest.mark.parametrize("case", rnn_cases.KINDS, ids=str)
def test_fake_results_match_real_ones(case: RnnCase) -> None:
    for varied in (replace(case, h0="data"), replace(case, lengths=(3, 0, 2), layout="time_major")):
        arguments, _ = arguments_of(varied, "cpu")
        fake = {k: v if v is None else v.to("meta") for k, v in arguments.items()}
        results = raw.gated_rnn_with_logits(*arguments.values())
        for real, meta in zip(results, raw.gated_rnn_with_logits(*fake.values()), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (
                meta.shape,
                meta.dtype,
                meta.stride(),
            )


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_compiled_once_for_all_shapes(case: RnnCase, device: str) -> None:
    def step(named: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        h, final = ops.gated_rnn(**{k: v if v is None else v * 1 for k, v in named.items()})
        return h * 2, final

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for batch, time, channels in ((2, 9, 7), (3, 17, 6), (5, 8, 10), (4, 100, 3)):
        shaped = case.sized(batch, time, channels)
        if case.lengths:
            shaped = replace(shaped, lengths=(time, 0, 3, 2)[: 1 + batch])
        arguments, loss = arguments_of(shaped, device)
        named = with_grad(arguments)
        expected, found = step(named), fast(named)
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left, right)
        given = list(leaves(named).values())
        for left, right in zip(
            torch.autograd.grad(expected, given, loss),
            torch.autograd.grad(found, given, loss),
            strict=True,
        ):
            assert torch.equal(left, right)
    assert counter.frame_count == 1, "a shape has caused a recompilation"


def test_autocast(device: str) -> None:
    """Data go to autocast's type; the matrix, the bounds and the state keep fp32."""
    arguments, _ = arguments_of(RnnCase(time=20, channels=16, gamma="low"), device)
    named = with_grad(arguments)
    with torch.autocast(device, dtype=BF16):
        h, final = ops.gated_rnn(**named)
    narrow = arguments | {k: arguments[k].to(BF16) for k in "zx"}
    expected = ops.gated_rnn(**narrow)
    assert h.dtype == BF16
    assert final.dtype == torch.float32
    for left, right in zip((h, final), expected, strict=True):
        assert torch.equal(left, right)
    grads = torch.autograd.grad(h.float().sum() + final.sum(), list(leaves(named).values()))
    assert all(g.dtype == torch.float32 for g in grads)
    state = arguments["h0"].clone()
    with torch.autocast(device, dtype=BF16), torch.no_grad():
        token = named["z"][:, 0], named["x"][:, 0], named["w_zh"]
        h = ops.gated_rnn_step(*token, state, gamma=named["gamma"])
    assert torch.equal(h, expected[0][:, 0])


def test_checkpointing(device: str) -> None:
    arguments, loss = arguments_of(RnnCase(time=20, channels=16), device)
    named = with_grad(arguments)
    given = list(leaves(named).values())
    plain = torch.autograd.grad(ops.gated_rnn(**named), given, loss)
    again = torch.utils.checkpoint.checkpoint(lambda: ops.gated_rnn(**named), use_reentrant=False)
    for left, right in zip(plain, torch.autograd.grad(again, given, loss), strict=True):
        assert torch.equal(left, right)


def test_modes_without_gradients(device: str) -> None:
    named = with_grad(arguments_of(RnnCase(), device)[0])
    expected = ops.gated_rnn(**named)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = ops.gated_rnn(**named)
        for left, right in zip(found, expected, strict=True):
            assert not left.requires_grad
            assert torch.equal(left, right)


def test_export_with_dynamic_time(device: str) -> None:
    def example(time: int) -> list[Tensor]:
        arguments, _ = arguments_of(RnnCase(time=time), device)
        return [v for v in arguments.values() if v is not None]

    check_export(ops.gated_rnn, example, over_time=(True, True, False, False))


def test_outputs_do_not_alias_inputs(device: str) -> None:
    for time in (0, 1, 5):
        arguments, loss = arguments_of(RnnCase(time=time), device)
        named = with_grad(arguments)
        results = ops.gated_rnn(**named)
        grads = torch.autograd.grad(results, list(leaves(named).values()), loss)
        check_no_alias(leaves(named).values(), (*results, *grads))


def test_what_it_refuses(device: str) -> None:
    arguments, _ = arguments_of(RnnCase(), device)
    named = with_grad(arguments)
    h, _ = ops.gated_rnn(**named)
    (dx,) = torch.autograd.grad(h.sum(), named["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_rnn: double backward is not supported"):
        torch.autograd.grad(dx.sum(), named["x"])
    with pytest.raises(RuntimeError, match="gated_rnn: vmap is not supported"):
        torch.vmap(lambda x: ops.gated_rnn(x, x, named["w_zh"])[0])(named["x"].unsqueeze(1))
    z, x, w, state = named["z"][:, 0], named["x"][:, 0], named["w_zh"], arguments["h0"].clone()
    with pytest.raises(RuntimeError, match="gated_rnn_step: z requires a gradient"):
        ops.gated_rnn_step(z, x, w, state)


def test_a_step_bumps_the_version_of_its_state(device: str) -> None:
    arguments, _ = arguments_of(RnnCase(), device)
    state = arguments["h0"].clone().requires_grad_()
    kept = state.square()
    with torch.no_grad():
        z, x = arguments["z"][:, 0], arguments["x"][:, 0]
        ops.gated_rnn_step(z, x, arguments["w_zh"], state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
@pytest.mark.parametrize("width", [24, 128, 300])
def test_cuda_graph(width: int) -> None:
    arguments, _ = arguments_of(RnnCase(time=20, channels=width, batch=5, gamma="low"), "cuda")
    given = leaves(arguments)
    expected = ops.gated_rnn(**arguments)
    static = {k: torch.zeros_like(v) for k, v in given.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.gated_rnn(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gated_rnn(**static)
    for name, value in given.items():
        static[name].copy_(value)
    graph.replay()
    for left, right in zip(out, expected, strict=True):
        assert torch.equal(left, right)


# Each way that CUDA goes: one block, a cluster (of floats and of 16-bit numbers), clusters of
# sixteen, torch's products; packed, where no chip takes the matrix, the plain kernel.
CAPTURED = [
    *(RnnCase(batch=5, time=20, channels=width) for width in (24, 128, 200, 300, 512, 1024)),
    *(RnnCase(batch=5, time=20, channels=width, dtype=BF16) for width in (512, 1024)),
    RnnCase(batch=5, time=6, channels=1100),
    RnnCase(batch=5, time=6, channels=300, dtype=torch.float64),
    *(RnnCase(lengths=(7, 0, 13), channels=width) for width in (24, 300, 1000)),
    RnnCase(lengths=(7, 0, 13), channels=512, dtype=BF16, offsets_dtype=torch.int32),
    RnnCase(lengths=(2, 0, 3), channels=1100),
]


def scanned_by_products(case: RnnCase) -> bool:
    widest = 256 if case.dtype == torch.float64 else 1024
    return case.lengths is None and case.channels > widest


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
@pytest.mark.parametrize("gamma", [None, "low"])
@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_cuda_graph_of_training(case: RnnCase, gamma: str | None) -> None:
    """Forward and backward in one graph, replayed with new data."""

    def made(seed: int) -> tuple[dict[str, Tensor | None], tuple[Tensor, Tensor]]:
        arguments, loss = arguments_of(replace(case, gamma=gamma, seed=seed), "cuda")
        return with_grad(arguments), loss

    def train(named: dict[str, Tensor | None], loss: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        results = ops.gated_rnn(**named)
        given = leaves(named)
        grads = torch.autograd.grad(results, list(given.values()), loss)
        return dict(zip(("h", "final", *given), (*results, *grads), strict=True))

    static, static_loss = made(seed=0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(static, static_loss)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(static, static_loss)
    for seed in (1, 2):
        fresh, loss = made(seed)
        with torch.no_grad():
            for name, value in leaves(fresh).items():
                static[name].copy_(value)
            for kept, value in zip(static_loss, loss, strict=True):
                kept.copy_(value)
        graph.replay()
        for name, right in train(fresh, loss).items():
            left = captured[name]
            if name == "w_zh" or scanned_by_products(case):  # cuBLAS promises no bits here
                rtol = 2e-2 if right.dtype == BF16 else 1e-4
                torch.testing.assert_close(left, right, rtol=rtol, atol=1e-4)
            else:
                assert torch.equal(left, right), name


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
def test_the_matrix_gradient_follows_torchs_settings_and_nothing_else_does() -> None:
    """float32 stays float32 whatever allow_tf32 says, but for dW, which is a product of torch's."""
    case = RnnCase(time=60, batch=4, channels=128, gamma="low")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = cases.run(case, "cuda", backward=True)
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = cases.run(case, "cuda", backward=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for name, value in exact.items():
        if name != "dw_zh":
            assert torch.equal(value, rounded[name]), name
    torch.testing.assert_close(exact["dw_zh"], rounded["dw_zh"], rtol=1e-2, atol=1e-2)


# Bad input --------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, Tensor]:
    return {"z": zeros(2, 6, 4), "x": zeros(2, 6, 4), "w_zh": zeros(4, 4), "h0": zeros(2, 4)}


WRONG = [
    ({"x": zeros(6, 4)}, "gated_rnn: x must have shape [B, T, D], got [6, 4]"),
    ({"x": zeros(2, 6, 4).long()}, "x must be float32, float64, bfloat16 or float16, got int64"),
    (
        {"z": zeros(2, 6, 3)},
        "gated_rnn: z must have shape [B, T, D] = [2, 6, 4] like x, got [2, 6, 3]",
    ),
    ({"z": zeros(2, 6, 4, dtype=BF16)}, "z must be float32 (x is float32), got bfloat16"),
    ({"w_zh": zeros(4, 3)}, "gated_rnn: w_zh must have shape [D, D] = [4, 4], got [4, 3]"),
    ({"w_zh": zeros(4)}, "gated_rnn: w_zh must have shape [D, D] = [4, 4], got [4]"),
    (
        {"w_zh": zeros(4, 4, dtype=torch.float64)},
        "gated_rnn: w_zh must be float32 (x is float32), got float64",
    ),
    ({"gamma": zeros(3)}, "gated_rnn: gamma must have shape [D] = [4], got [3]"),
    ({"gamma": zeros(4, dtype=BF16)}, "gamma must be float32 (x is float32), got bfloat16"),
    ({"h0": zeros(3, 4)}, "gated_rnn: h0 must have shape [N, D] = [2, 4], got [3, 4]"),
    ({"h0": zeros(2, 4, dtype=BF16)}, "h0 must be float32 (x is float32), got bfloat16"),
    (
        {"cu_seqlens": torch.tensor([0, 6])},
        "gated_rnn: x must have a batch of 1 when cu_seqlens is given, got [2, 6, 4]",
    ),
    ({"w_zh": zeros(4, 4).to("meta")}, "expected all tensors on cpu like x, got w_zh on meta"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.gated_rnn(**(good() | change))


def test_bounds_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"z": zeros(2, 4), "x": zeros(2, 4), "w_zh": zeros(4, 4), "state": zeros(2, 4)}
    wrong = {"gamma": torch.tensor([0, 0.5, 1, 0])}
    ops.gated_rnn(**good(), **wrong)  # the caller's responsibility otherwise
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    message = re.escape("gamma must lie in [0, 1), got values from 0 to 1")
    with pytest.raises(RuntimeError, match=f"gated_rnn: {message}"):
        ops.gated_rnn(**good(), **wrong)
    with pytest.raises(RuntimeError, match=f"gated_rnn_step: {message}"):
        ops.gated_rnn_step(**token, **wrong)


def test_wrong_offsets_and_steps() -> None:
    one = {k: v[:1] if v.dim() == 3 else v for k, v in good().items()}
    with pytest.raises(RuntimeError, match=re.escape("cu_seqlens must rise from 0 to T = 6, got")):
        ops.gated_rnn(**one, cu_seqlens=torch.tensor([0, 7, 6]))
    token = {"z": zeros(2, 4), "x": zeros(2, 4), "w_zh": zeros(4, 4), "state": zeros(2, 4)}
    wrong = [
        ({"x": zeros(2, 6, 4)}, "gated_rnn_step: x must have shape [B, D], got [2, 6, 4]"),
        ({"z": zeros(2, 5)}, "gated_rnn_step: z must have shape [B, D] = [2, 4] like x, got"),
        ({"w_zh": zeros(5, 4)}, "gated_rnn_step: w_zh must have shape [D, D] = [4, 4], got"),
        ({"state": zeros(1, 4)}, "gated_rnn_step: state must have shape [B, D] = [2, 4], got"),
        ({"state": zeros(2, 4).double()}, "gated_rnn_step: state must be float32"),
        ({"gamma": zeros(5)}, "gated_rnn_step: gamma must have shape [D] = [4], got [5]"),
    ]
    for change, message in wrong:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            ops.gated_rnn_step(**(token | change))
