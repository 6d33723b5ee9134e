"""`gated_linear_attention` and `hgrn2`: results and gradients against the oracle."""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import require_cuda
from fuzz import check, check_case, judge_again
from support import cases, error_rule, gla_cases, recurrence
from support import op_properties as properties
from support.gla_cases import GlaCase
from support.op_properties import call, leaves, placed
from torch import Tensor

import tidegate

ops = tidegate.ops
SHORT_KINDS = [
    GlaCase("hgrn2", dtype=torch.float32),
    GlaCase("hgrn2", dtype=torch.bfloat16, v_activation="silu"),
    GlaCase("gated_linear_attention", dtype=torch.float32),
    GlaCase("gated_linear_attention", dtype=torch.bfloat16, per_head=True),
]


def over_time(arguments: dict[str, Tensor | None]) -> list[str]:
    """The names of the arguments that have a time axis."""
    return [k for k in ("q", "k", "f", "v", "log_f") if k in arguments]


# Against the oracle -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", gla_cases.every_length(), ids=str)
def test_every_length(case: GlaCase, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", gla_cases.every_regime(), ids=str)
def test_every_gate_regime(case: GlaCase, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", gla_cases.every_layout(), ids=str)
def test_every_layout(case: GlaCase, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", gla_cases.every_mix(), ids=str)
def test_every_mix_of_dtypes(case: GlaCase, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", gla_cases.on_tensor_cores(), ids=str)
def test_sizes_of_tensor_cores(case: GlaCase, device: str) -> None:
    check_case(case, device, backward=True)


SIZES = [(1, 1), (2, 7), (16, 16), (31, 64), (64, 32), (65, 130), (128, 128), (257, 16), (16, 512)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_any_key_and_value_dimension(case: GlaCase, size: tuple[int, int], device: str) -> None:
    keys, values = size
    case = replace(case, key_dim=keys, value_dim=values, time=35, batch=1, seed=keys)
    check_case(case, device, backward=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "lengths", [(4, 0, 13, 1, 0), (0, 0, 18), (9, 9), (1,) * 18, (0, 0), (65, 2, 0, 70)], ids=str
)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_packed(case: GlaCase, lengths: tuple[int, ...], reverse: bool, device: str) -> None:
    for offsets_dtype in (torch.int32, torch.int64):
        packed = replace(case, lengths=lengths, reverse=reverse, offsets_dtype=offsets_dtype)
        check(packed, device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradients_of_open_gates_over_a_long_time(case: GlaCase, device: str) -> None:
    """Decays of 1 - 1e-4 .. 1: thousands of tokens are in every sum."""
    case = replace(case, batch=1, heads=1, time=3000, key_dim=16, value_dim=16, gates="open")
    cases.check(case, device)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Attention in chunks, which test_benchmarks.py holds against the loop."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("float64")


# What the gradient of fp32 log decays may be off by, by the shift of the gates: a little more than
# gla_errors.py's aims, which are for two heads.
OF_WIDE_GATES = {0.0: 8.5e-4, -5.0: 5.5e-4, 5.0: 2.7e-3}


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "fp32"])
@pytest.mark.parametrize("shift", OF_WIDE_GATES)
@pytest.mark.parametrize("op", gla_cases.OPS)
def test_gradient_of_the_gates_over_16384_tokens(
    op: str, shift: float, wide: bool, float64: ModuleType, device: str
) -> None:
    """With data of 16 bits and a state at both ends. Where gates have 16 bits, too, their gradient
    is rounded to as many, and may be 0.5 % from float64. Gates are sigmoid(N(0, 1) + shift), keys
    one minus them. On a CPU over a quarter as many: what is beyond a rounding of the gates may be a
    quarter there, and fp32 gates have digits of fp32."""
    rng = torch.Generator().manual_seed(7)
    size, time = (128, 16384) if device == "cuda" else (32, 4096)
    shape = (1, time, 2, size)
    q, v, do = (torch.randn(shape, generator=rng).bfloat16().to(device) for _ in range(3))
    gates = (torch.randn(shape, generator=rng) + shift).bfloat16().to(device)
    h0, last = (torch.randn(1, 2, size, size, generator=rng).to(device) for _ in range(2))
    k = torch.sigmoid(-gates)
    if wide:
        gates = gates.float()
    if op == "gated_linear_attention":
        gates = F.logsigmoid(gates)
    gates.requires_grad_()
    inputs = (q, gates, v, None, h0) if op == "hgrn2" else (q, k, v, gates, h0)
    results = getattr(ops, op)(*inputs)
    (found,) = torch.autograd.grad(results, gates, (do, last))

    head = 1
    leaf = gates.detach()[0, :, head].double().requires_grad_()
    of_head = [x[0, :, head].double() for x in (q, k, v, do)]
    keys, log_f = of_head[1], leaf
    if op == "hgrn2":
        keys, log_f = torch.sigmoid(-leaf), F.logsigmoid(leaf)
    results = float64.gated_linear_attention(
        of_head[0], keys, of_head[2], log_f, h0[0, head].double()
    )
    (exact,) = torch.autograd.grad(results, leaf, (of_head[3], last[0, head].double()))
    limit = OF_WIDE_GATES[shift] if wide and op == "gated_linear_attention" else 5e-3
    if device == "cpu":
        limit = 1e-6 if wide else 2e-3
    assert float64.distance(found[0, :, head], exact) <= limit


GRADCHECK = [
    GlaCase("hgrn2", v_activation="sigmoid"),
    GlaCase("hgrn2", gamma=False, lengths=(2, 0, 3), reverse=True),
    GlaCase("gated_linear_attention"),
    GlaCase("gated_linear_attention", per_head=True, reverse=True),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_gradcheck(case: GlaCase, device: str) -> None:
    case = replace(case, dtype=torch.float64, time=5, batch=2, heads=1, key_dim=3, value_dim=2)
    arguments, _ = placed(case, device)
    # Finite differences leave log f = 0 on both sides.
    if "log_f" in arguments:
        arguments["log_f"] = arguments["log_f"] - 0.01
    named = leaves(arguments)

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(case, {**arguments, **dict(zip(named, values, strict=True))})

    inputs = [v.detach().requires_grad_() for v in named.values()]
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


def test_hgrn2_is_gated_linear_attention_with_tied_keys(device: str) -> None:
    case = GlaCase("hgrn2", time=40, key_dim=16, value_dim=32, v_activation="sigmoid")
    a, _ = placed(case, device)
    f = a["gamma"] + (1 - a["gamma"]) * torch.sigmoid(a["f"])
    expected = ops.gated_linear_attention(
        torch.nn.functional.silu(a["q"]),
        (1 - a["gamma"]) * torch.sigmoid(-a["f"]),
        torch.sigmoid(a["v"]),
        f.log(),
        a["h0"],
        scale=case.scale,
    )
    for left, right in zip(call(case, a), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_one_gate_a_head_is_the_same_gate_in_every_channel(device: str) -> None:
    case = GlaCase("gated_linear_attention", per_head=True, time=40)
    a, _ = placed(case, device)
    wide = a["log_f"].expand_as(a["q"])
    for left, right in zip(call(case, a), call(case, {**a, "log_f": wide}), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_slices_of_one_projection_are_read_in_place(device: str) -> None:
    """What HGRU2 hands over: q, f and v of one [B, T, 3 H K] product."""
    wide = torch.randn(2, 33, 3 * 2 * 16, device=device, requires_grad=True)
    q, f, v = (part.unflatten(-1, (2, 16)) for part in wide.chunk(3, -1))
    o, final = ops.hgrn2(q, f, v, q_activation="silu")
    solid = [part.contiguous() for part in (q, f, v)]
    expected = ops.hgrn2(*solid, q_activation="silu")
    assert torch.equal(o, expected[0])
    assert torch.equal(final, expected[1])
    (found,) = torch.autograd.grad(o.sin().sum(), wide)
    (same,) = torch.autograd.grad(expected[0].sin().sum(), wide)
    assert torch.equal(found, same)


# States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("h0", ["state", "data", None])
@pytest.mark.parametrize("case", gla_cases.KINDS, ids=str)
def test_final_state_without_tokens_is_a_copy_of_h0(
    case: GlaCase, h0: str | None, device: str
) -> None:
    arguments, _ = placed(replace(case, time=0, h0=h0), device)
    o, final = call(case, arguments)
    assert o.shape == (2, 0, case.heads, case.value_dim)
    assert final.dtype == recurrence.state_dtype(case.dtype)
    assert final.shape == (2, case.heads, case.key_dim, case.value_dim)
    if h0 is None:
        assert not final.count_nonzero()
        return
    assert torch.equal(final, arguments["h0"].to(final.dtype))
    assert final.data_ptr() != arguments["h0"].data_ptr()


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0), (2, 0, 3), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_empty_dimensions(case: GlaCase, shape: tuple[int, int, int], device: str) -> None:
    batch, time, heads = shape
    case = replace(case, batch=batch, time=time, heads=heads)
    properties.check_equals_the_yardstick(case, device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_no_sequences(case: GlaCase, device: str) -> None:
    properties.check_no_sequences(case, device)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_split_anywhere_equals_the_whole(case: GlaCase, reverse: bool, device: str) -> None:
    case = replace(case, time=35, reverse=reverse)
    arguments, _ = placed(case, device)
    exact = cases.reference(case, backward=False, exact=True)
    yardstick = cases.reference(case, backward=False, exact=False, **case.ways(device))
    plain = cases.reference(case, backward=False, exact=False)
    for at in range(case.time + 1):
        parts = [slice(0, at), slice(at, None)]
        outputs, state = [], arguments["h0"]
        for part in reversed(parts) if reverse else parts:
            sliced = {k: arguments[k][:, part] for k in over_time(arguments)}
            o, state = call(case, {**arguments, **sliced, "h0": state})
            outputs.append(o)
        first = parts[-1] if reverse else parts[0]
        length = len(range(case.time)[first])
        if length > 0 and not replace(case, time=length).ways(device).get("chunks"):
            rows = plain["h"][:, first]  # the plain kernels', which no part before has rounded
            error_rule.assert_within_rule("first part", outputs[0], exact["h"][:, first], rows)
        joined = torch.cat(outputs[::-1] if reverse else outputs, 1)
        error_rule.assert_within_rule(f"split at {at}: o", joined, exact["h"], yardstick["h"])
        error_rule.assert_within_rule(
            f"split at {at}: final", state, exact["final"], yardstick["final"]
        )


@pytest.mark.parametrize("layout", ["contiguous", "projection", "channels_first"])
@pytest.mark.parametrize("case", gla_cases.KINDS, ids=str)
def test_steps_equal_prefill(case: GlaCase, layout: str, device: str) -> None:
    case = replace(case, time=9, key_dim=16, value_dim=24, layout=layout)
    arguments, _ = placed(case, device)
    exact = cases.reference(case, backward=False, exact=True)
    yardstick = cases.reference(case, backward=False, exact=False)
    state = arguments["h0"].clone()
    where, rows = state.data_ptr(), []
    options = case.options()
    options.pop("reverse")
    for t in range(case.time):
        token = [arguments[k][:, t] for k in arguments if k in over_time(arguments)]
        if case.op == "hgrn2":
            rows.append(ops.hgrn2_step(*token, arguments["gamma"], state, **options))
        else:
            rows.append(ops.gated_linear_attention_step(*token, state, **options))
    assert state.data_ptr() == where, "the state is updated in place"
    o = torch.stack(rows, 1)
    error_rule.assert_within_rule("o by steps", o, exact["h"], yardstick["h"])
    error_rule.assert_within_rule("state after steps", state, exact["final"], yardstick["final"])


def test_step_writes_into_a_view_of_a_state(device: str) -> None:
    """Decoding keeps all layers' states in one tensor: a step touches its own rows only."""
    ones = torch.ones(2, 1, 4, device=device)
    shut = torch.full_like(ones, -torch.inf)  # f = 0: the state becomes k v^T
    for pick in (lambda s: s[1], lambda s: s.transpose(0, 1)[:, 1]):
        states = torch.full((3, 2, 1, 4, 4), 0.5, device=device)
        o = ops.gated_linear_attention_step(ones, ones, ones, shut, pick(states))
        assert torch.equal(o, torch.full_like(ones, 4))
        assert torch.equal(states[1], torch.ones_like(states[1]))
        assert states[::2].eq(0.5).all()


def gradients_in_parts(case: GlaCase, device: str) -> dict[str, error_rule.Verdict]:
    """How gradients do that went through two states between parts of the sequence."""
    arguments, loss = placed(case, device)
    exact = cases.reference(case, backward=True, exact=True)
    yardstick = cases.reference(case, backward=True, exact=False, **case.ways(device))
    named = {k: v.detach().requires_grad_() for k, v in leaves(arguments).items()}
    parts, state = [], named["h0"]
    for part in (slice(0, 18), slice(18, 19), slice(19, 41)):
        sliced = {k: named[k][:, part] for k in over_time(arguments)}
        o, state = call(case, {**arguments, **named, **sliced, "h0": state})
        parts.append(o)
    found = torch.autograd.grad((torch.cat(parts, 1), state), list(named.values()), loss)
    return {
        name: error_rule.judge(
            grad, exact[f"d{name}"], yardstick[f"d{name}"], exact.get(f"|d{name}|")
        )
        for name, grad in zip(named, found, strict=True)
    }


def test_gradients_go_through_the_state_from_part_to_part(device: str) -> None:
    """On tensor cores one number of hundreds may be thrice as wrong as the yardstick's worst, and
    so may another way of dividing time be by the yardstick itself: they are judged as by `check`.
    """
    for case in SHORT_KINDS:
        case = replace(case, time=41)
        verdicts = gradients_in_parts(case, device)
        wrong = {name: verdict for name, verdict in verdicts.items() if not verdict}
        if wrong:
            problems = str({name: verdict.message for name, verdict in wrong.items()})
            assert case.ways(device)["chunks"], problems
            judge_again(case, wrong, lambda drawn: gradients_in_parts(drawn, device), problems)


# What reaches what ------------------------------------------------------------------------------


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality; NaN equals NaN."""
    return torch.equal(left.nan_to_num(7), right.nan_to_num(7))


@pytest.mark.parametrize("lengths", [None, (40, 0, 60, 50)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_a_nan_reaches_later_tokens_of_its_head_only(
    case: GlaCase, poison: float, reverse: bool, lengths: tuple[int, ...] | None, device: str
) -> None:
    case = replace(case, time=150, key_dim=16, value_dim=16, reverse=reverse, lengths=lengths)
    arguments, _ = placed(case, device)
    clean, clean_final = call(case, arguments)
    offsets = arguments["cu_seqlens"].tolist() if lengths else [0, 150]
    for name in over_time(arguments):
        for t in (0, 15, 63, 64, 99, 149):
            value = arguments[name].clone()
            value[0, t, 1, 0] = poison if name in "qkv" else float("nan")
            o, final = call(case, {**arguments, name: value})
            start = max(x for x in offsets[:-1] if x <= t)
            end = min(x for x in offsets if x > t)
            hit = torch.zeros_like(clean, dtype=torch.bool)
            columns = slice(0, 1) if name == "v" else slice(None)
            rows = slice(start, t + 1) if reverse else slice(t, end)
            hit[0, slice(t, t + 1) if name == "q" else rows, 1, columns] = True
            assert equal_bits(o[~hit], clean[~hit]), f"{name}[0, {t}, 1, 0] reaches too much"
            assert not o[0, t, 1, 0].isfinite(), f"{name}[0, {t}, 1, 0] does not reach its token"
            touched = torch.zeros_like(final, dtype=torch.bool)
            if name != "q":
                touched[0 if lengths is None else offsets.index(end) - 1, 1] = True
            assert equal_bits(final[~touched], clean_final[~touched])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_nothing_leaks_across_a_boundary(case: GlaCase, reverse: bool, device: str) -> None:
    """Values in one sequence change no other; a loss over one leaves exact zeros elsewhere."""
    case = replace(case, lengths=(5, 40, 0, 90, 3), reverse=reverse)
    arguments, loss = placed(case, device)
    clean, clean_final = call(case, arguments)
    names = (*over_time(arguments), "h0")
    named = {k: arguments[k].detach().requires_grad_() for k in names}
    results = call(case, {**arguments, **named})
    offsets = arguments["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        others = [i for i in range(len(case.lengths)) if i != n]
        for poison in (float("nan"), 1e30):
            v, h0 = arguments["v"].clone(), arguments["h0"].clone()
            v[:, start:end], h0[n] = poison, poison
            o, final = call(case, {**arguments, "v": v, "h0": h0})
            for t in (slice(0, start), slice(end, None)):
                assert torch.equal(o[:, t], clean[:, t]), f"sequence {n} leaks into {t}"
            assert torch.equal(final[others], clean_final[others])
        dh, dh_final = (torch.zeros_like(g) for g in loss)
        dh[:, start:end], dh_final[n] = loss[0][:, start:end], loss[1][n]
        *grads, dh0 = torch.autograd.grad(
            results, list(named.values()), (dh, dh_final), retain_graph=True
        )
        for grad in grads:
            assert not grad[:, :start].count_nonzero()
            assert not grad[:, end:].count_nonzero()
        assert dh0[n].count_nonzero()
        assert not dh0[others].count_nonzero()


def test_decays_of_exactly_zero_and_one(device: str) -> None:
    """log f = -inf and hgrn2's f = -1e4 forget all, log f = 0 and f = 1e4 nothing."""
    q, k, v = (torch.randn(1, 40, 1, 16, device=device) for _ in range(3))
    shut = torch.full_like(q, -torch.inf)
    o, final = ops.gated_linear_attention(q, k, v, shut)
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * v)
    torch.testing.assert_close(final[0, 0], k[0, -1].T @ v[0, -1])
    h0 = torch.randn(1, 1, 16, 16, device=device)
    o, final = ops.gated_linear_attention(q, torch.zeros_like(k), v, 0 * q, h0)
    assert torch.equal(final, h0)
    o, final = ops.hgrn2(q, torch.full_like(q, 1e4), v, h0=h0)
    assert torch.equal(final, h0)
    _, final = ops.hgrn2(q, torch.full_like(q, -1e4), v, h0=h0)
    torch.testing.assert_close(final[0, 0], v[0, -1].expand(16, 16))


# Which gradients flow, what is kept -------------------------------------------------------------


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_one_argument_alone_gets_the_gradient_it_gets_among_all(case: GlaCase, device: str) -> None:
    properties.check_one_argument_alone(case, device)


@pytest.mark.parametrize("case", gla_cases.every_mix(), ids=str)
def test_gradients_in_every_mix_of_dtypes_are_like_their_arguments(
    case: GlaCase, device: str
) -> None:
    properties.check_gradients_like_arguments(case, device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_gradients_of_a_sum(case: GlaCase, device: str) -> None:
    properties.check_gradients_of_a_sum(case, device)


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_only_inputs_are_kept_for_the_backward_pass(case: GlaCase, device: str) -> None:
    case = replace(case, time=40, key_dim=16, value_dim=16)
    kept, arguments, _ = properties.kept_for_backward(case, device)
    allowed = {v.data_ptr() for v in arguments.values() if v is not None}
    for value in kept:
        assert value.data_ptr() in allowed, tuple(value.shape)


@pytest.mark.parametrize("size", [(70, 140), (64, 128)], ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_bitwise_repeatable(case: GlaCase, size: tuple[int, int], device: str) -> None:
    case = replace(case, time=300, key_dim=size[0], value_dim=size[1])
    properties.check_bitwise_repeatable(case, device)


def test_positions_and_keywords_and_the_raw_operator_agree(device: str) -> None:
    a, _ = placed(GlaCase(), device)
    q, f, v, gamma, h0 = (a[k] for k in ("q", "f", "v", "gamma", "h0"))
    expected, _ = ops.hgrn2(q, f, v, gamma, h0)
    by_name, _ = ops.hgrn2(h0=h0, gamma=gamma, v=v, f=f, q=q, scale=1.0, q_activation="none")
    raw, _ = torch.ops.tidegate.hgrn2(q, f, v, gamma, h0, 1.0, "none", "none", False, None)
    assert torch.equal(expected, by_name)
    assert torch.equal(expected, raw)
    expected, _ = ops.gated_linear_attention(q, q, v, -f.abs(), h0, scale=2.0, reverse=True)
    raw, _ = torch.ops.tidegate.gated_linear_attention(q, q, v, -f.abs(), h0, 2.0, True, None)
    assert torch.equal(expected, raw)


def test_offsets_on_the_cpu_are_accepted(device: str) -> None:
    for case in SHORT_KINDS:
        arguments, _ = placed(replace(case, lengths=(3, 0, 9)), device)
        expected = call(case, arguments)
        found = call(case, {**arguments, "cu_seqlens": arguments["cu_seqlens"].cpu()})
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left, right)


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 4096, 16), (1, 65536, 12), (2, 4097, 16)], ids=str)
def test_memory_of_both_passes(shape: tuple[int, int, int]) -> None:
    """Half of the 7424 bytes a row and head that fla 0.6's chunk_gla takes at K = V = 128, inputs,
    results and gradients included (benchmarks/results/baselines_gla_h200.json)."""
    require_cuda()
    batch, time, heads = shape
    torch.manual_seed(0)
    gc.collect()  # what an earlier test left in cycles would be given back in the middle
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    draw = (batch, time, heads, 128)
    q, k, v, log_f = (torch.randn(draw, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    arguments = [t.requires_grad_() for t in (q, k, v, log_f.abs_().neg_())]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    o, _ = ops.gated_linear_attention(*arguments)
    torch.autograd.grad(o, arguments, torch.ones_like(o))
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    # A chunk of less than 64 tokens, the last one here, has the workspace of a whole one.
    rows = batch * heads * -(-time // 64) * 64
    print(f"{shape}: {peak / rows:.0f} bytes a row and head")
    assert peak <= rows * 7424 // 2


@pytest.mark.gpu
def test_no_copies_of_odd_sizes() -> None:
    """The forward pass reads rows that no 16 bytes divide where they are: it takes no more memory
    than that of the next size does."""
    require_cuda()

    def peak_of(width: int) -> int:
        q, k, v, log_f = torch.randn(4, 1, 4096, 4, width, device="cuda").bfloat16().unbind()
        log_f = -log_f.abs()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        results = ops.gated_linear_attention(q, k, v, log_f)
        torch.cuda.synchronize()
        del results
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    peak_of(32)  # what is made once
    assert peak_of(21) <= peak_of(32)
