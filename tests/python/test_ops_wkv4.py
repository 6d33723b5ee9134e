"""`wkv4`: results and gradients against the oracle, states, what reaches what, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import error_rule, recurrence, wkv4_cases, wkv4_oracle
from support.wkv4_cases import (
    ARGUMENTS,
    Wkv4Case,
    call,
    check,
    gradients,
    on_device,
    positional,
    with_grad,
)
from torch import Tensor

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate
SHORT_KINDS = [Wkv4Case(dtype=torch.float32), Wkv4Case(dtype=torch.bfloat16)]


# Against the oracle -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", wkv4_cases.every_length(), ids=str)
def test_every_length(case: Wkv4Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", wkv4_cases.every_regime(), ids=str)
def test_every_regime(case: Wkv4Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("time", [3, 300])
@pytest.mark.parametrize("keys", wkv4_cases.KEYS)
@pytest.mark.parametrize("case", wkv4_cases.KINDS, ids=str)
def test_a_bonus_whose_exponential_overflows(
    case: Wkv4Case, keys: str, time: int, device: str
) -> None:
    check(replace(case, time=time, channels=66, keys=keys, bonuses="large"), device)


@pytest.mark.parametrize("case", wkv4_cases.every_layout(), ids=str)
def test_every_layout(case: Wkv4Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("seed", range(60))
def test_any_case(seed: int, device: str) -> None:
    kind = wkv4_cases.KINDS[seed % len(wkv4_cases.KINDS)]
    check(wkv4_cases.vary(replace(kind, time=7 * seed % 300), seed), device)


@pytest.mark.parametrize("rates", wkv4_cases.RATES)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_a_long_time(case: Wkv4Case, rates: str, device: str) -> None:
    """Slow decays beside a large scaling exponent: what each step rounds away must not add up."""
    for keys in ("normal", "high"):
        check(replace(case, batch=1, time=6000, channels=6, rates=rates, keys=keys), device)


def test_gradcheck(device: str) -> None:
    case = Wkv4Case(dtype=torch.float64, time=11, channels=3, rates="spread")
    for lengths in (None, (2, 0, 9)):
        made = on_device(replace(case, lengths=lengths), device)
        exponent = made["state"][:, 2:]

        def function(w, u, k, v, sums, made=made, exponent=exponent):
            state = torch.cat([sums, exponent], 1)
            o, final = ops.wkv4(w, u, k, v, state, cu_seqlens=made["cu_seqlens"])
            return o, wkv4_oracle.mean_and_log(final)

        leaves = [made[n] for n in ("w", "u", "k", "v")] + [made["state"][:, :2].contiguous()]
        inputs = [t.detach().requires_grad_() for t in leaves]
        assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


def test_equals_the_two_real_lrus_of_the_article(device: str) -> None:
    """Su Jianlin's form (2023), gamma = exp(u) and lambda = exp(-w): with the *new* sums,
    x_t = (y_t + (gamma lambda - 1) e^k v) / (z_t + (gamma lambda - 1) e^k)."""
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(6, dtype=torch.float64, generator=generator) + 0.05
    u, (k, v) = (
        torch.randn(s, dtype=torch.float64, generator=generator) for s in (6, (2, 2, 30, 6))
    )
    gamma, lam, weight = u.exp(), (-w).exp(), k.exp()
    decays = lam.expand_as(k)
    # The two sums by the package's own linear recurrence: x_t = lambda x_{t-1} + input.
    y, _ = ops.linear_scan(weight * v, decays)
    z, _ = ops.linear_scan(weight, decays)
    bonus = (gamma * lam - 1) * weight
    expected = (y + bonus * v) / (z + bonus)
    found, _ = ops.wkv4(*(t.to(device) for t in (w, u, k, v)))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift", [-1000.0, 1000.0, 2.0**17])
def test_only_differences_of_keys_count(shift: float, device: str) -> None:
    """Keys of any size; eighths, so that the shift loses no digit."""
    made = on_device(Wkv4Case(time=40, channels=70, state=None), device)
    made["k"] = (made["k"] * 8).round() / 8
    o, final = call(made)
    shifted, shifted_final = call(made | {"k": made["k"] + shift})
    torch.testing.assert_close(shifted, o, rtol=2e-5, atol=1e-5)
    mean, log = wkv4_oracle.mean_and_log(final).unbind(1)
    shifted_mean, shifted_log = wkv4_oracle.mean_and_log(shifted_final).unbind(1)
    torch.testing.assert_close(shifted_mean, mean, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(shifted_log - shift, log, rtol=1e-4, atol=0.02)


def test_rates_of_any_size(device: str) -> None:
    """Nothing is forgotten at w = 0, everything at once at 1e4."""
    made = on_device(Wkv4Case(time=50, channels=4, state=None, dtype=torch.float64), device)
    weights = made["k"].exp()
    o, final = call(made | {"w": torch.zeros_like(made["w"])})
    mean = (weights * made["v"]).sum(1) / weights.sum(1)
    torch.testing.assert_close(wkv4_oracle.mean_and_log(final)[:, 0], mean)
    o, final = call(made | {"w": torch.full_like(made["w"], 1e4)})
    torch.testing.assert_close(wkv4_oracle.mean_and_log(final)[:, 0], made["v"][:, -1])
    share = torch.sigmoid(made["u"] + made["k"][:, 1:] - made["k"][:, :-1])
    expected = share * made["v"][:, 1:] + (1 - share) * made["v"][:, :-1]
    torch.testing.assert_close(o[:, 1:], expected)


# States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["state", "data", None])
@pytest.mark.parametrize("case", wkv4_cases.KINDS, ids=str)
def test_final_state_without_tokens_is_a_copy(
    case: Wkv4Case, state: str | None, device: str
) -> None:
    made = on_device(replace(case, time=0, state=state), device)
    o, final = call(made)
    assert o.shape == (2, 0, 5)
    assert final.shape == (2, 3, 5)
    assert final.dtype == recurrence.state_dtype(case.dtype)
    if state is None:
        assert not final.count_nonzero()
        return
    assert torch.equal(final, made["state"].to(final.dtype))
    assert final.data_ptr() != made["state"].data_ptr()


def test_gradients_without_tokens(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(time=0), device))
    _, final = call(made)
    found = torch.autograd.grad(final, [made["state"], made["w"]], torch.ones_like(final))
    assert torch.equal(found[0][:, :2], torch.ones_like(found[0][:, :2]))
    assert not found[0][:, 2].count_nonzero()
    assert not found[1].count_nonzero()


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0), (2, 0, 3), (0, 0, 0)], ids=str)
def test_empty_dimensions(shape: tuple[int, int, int], device: str) -> None:
    batch, time, channels = shape
    case = Wkv4Case(batch=batch, time=time, channels=channels)
    found = wkv4_cases.run(case, device)
    assert found["o"].shape == shape
    made = case.make_inputs()
    for name in ARGUMENTS:
        assert found[f"d{name}"].shape == made[name].shape


def test_zeros_are_an_empty_state(device: str) -> None:
    for keys in ("normal", "low", "high"):
        made = on_device(Wkv4Case(time=20, state=None, keys=keys), device)
        o, final = call(made)
        for exponent in (0.0, -1e38, 90.0):
            state = torch.zeros(2, 3, 5, device=device)
            state[:, 2] = exponent
            found = call(made | {"state": state})
            assert torch.equal(found[0], o)
            assert torch.equal(found[1], final)


def test_the_scaling_exponent_of_a_state_does_not_matter(device: str) -> None:
    case = Wkv4Case(time=20)
    made = with_grad(on_device(case, device))
    o, final = call(made)
    grads = gradients(made, (o, final))
    for shift in (-30.0, 30.0):
        state = made["state"].detach().double()
        factor = torch.tensor(-shift, dtype=torch.float64, device=device).exp()
        state = torch.cat([state[:, :2] * factor, state[:, 2:] + shift], 1).float()
        moved = made | {"state": state.requires_grad_()}
        found = call(moved)
        torch.testing.assert_close(found[0], o, rtol=1e-4, atol=1e-5)
        moved_grads = gradients(moved, found)
        for left, right in zip(moved_grads[:4], grads[:4], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
        scaled = moved_grads[4][:, :2] * factor.float()
        torch.testing.assert_close(scaled, grads[4][:, :2], rtol=1e-3, atol=1e-4)
        assert not moved_grads[4][:, 2].count_nonzero()


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_split_anywhere_equals_the_whole(case: Wkv4Case, device: str) -> None:
    case = replace(case, time=35)
    made = on_device(case, device)
    exact = wkv4_oracle.reference(case.make_inputs(), exact=True)
    yardstick = wkv4_oracle.reference(case.make_inputs(), exact=False)
    for at in range(case.time + 1):
        outputs, state = [], made["state"]
        for part in (slice(0, at), slice(at, None)):
            sliced = {n: made[n][:, part] for n in ("k", "v")}
            o, state = call(made | sliced | {"state": state})
            outputs.append(o)
        o, final = torch.cat(outputs, 1), wkv4_oracle.mean_and_log(state)
        error_rule.assert_within_rule(f"split at {at}", o, exact["o"], yardstick["o"])
        error_rule.assert_within_rule(f"split at {at}", final, exact["final"], yardstick["final"])


@pytest.mark.parametrize("keys", ["normal", "wide"])
@pytest.mark.parametrize("layout", ["contiguous", "projection", "channels_first"])
@pytest.mark.parametrize("case", wkv4_cases.KINDS, ids=str)
def test_steps_equal_prefill(case: Wkv4Case, layout: str, keys: str, device: str) -> None:
    case = replace(case, time=9, channels=24, layout=layout, keys=keys)
    made = on_device(case, device)
    exact = wkv4_oracle.reference(case.make_inputs(), exact=True)
    yardstick = wkv4_oracle.reference(case.make_inputs(), exact=False)
    state = made["state"].clone()
    where, rows = state.data_ptr(), []
    for t in range(case.time):
        token = [made[n][:, t] for n in ("k", "v")]
        rows.append(ops.wkv4_step(made["w"], made["u"], *token, state))
    assert state.data_ptr() == where, "the state is updated in place"
    o, final = torch.stack(rows, 1), wkv4_oracle.mean_and_log(state)
    kind = state.dtype
    error_rule.assert_within_rule("o by steps", o, exact["o"], yardstick["o"], state=kind)
    error_rule.assert_within_rule("state", final, exact["final"], yardstick["final"], state=kind)


def test_step_writes_into_a_view_of_a_state(device: str) -> None:
    """Decoding keeps all layers' states in one tensor: a step touches its own rows only."""
    k, v = torch.randn(2, 2, 4, device=device).unbind(0)
    w, u = torch.rand(4, device=device), torch.randn(4, device=device)
    for pick in (lambda s: s[1], lambda s: s.transpose(0, 1)[:, 1]):
        states = torch.zeros(3, 2, 3, 4, device=device)
        o = ops.wkv4_step(w, u, k, v, pick(states))
        torch.testing.assert_close(o, v)
        torch.testing.assert_close(wkv4_oracle.mean_and_log(states[1])[:, 0], v)
        assert not states[::2].count_nonzero()


def test_gradients_go_through_the_state_from_part_to_part(device: str) -> None:
    case = Wkv4Case(time=41)
    made = with_grad(on_device(case, device))
    exact = wkv4_oracle.reference(case.make_inputs(), exact=True)
    yardstick = wkv4_oracle.reference(case.make_inputs(), exact=False)
    parts, state = [], made["state"]
    for part in (slice(0, 18), slice(18, 19), slice(19, 41)):
        o, state = call(made | {n: made[n][:, part] for n in ("k", "v")} | {"state": state})
        parts.append(o)
    results = (torch.cat(parts, 1), wkv4_oracle.mean_and_log(state))
    leaves = [made[n] for n in ARGUMENTS]
    found = torch.autograd.grad(results, leaves, (made["do"], made["dfinal"]))
    for name, grad in zip(ARGUMENTS, found, strict=True):
        expected = exact[f"d{name}"], yardstick[f"d{name}"]
        error_rule.assert_within_rule(name, grad, *expected, exact.get(f"|d{name}|"))


@pytest.mark.parametrize("u", [100.0, -100.0])
@pytest.mark.parametrize("key", [80.0, -100.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_of_an_empty_state_is_finite(
    dtype: torch.dtype, key: float, u: float, device: str
) -> None:
    """The true one is exp(-u - key) times something, beyond a float: then it is bounded."""
    for time in (1, 40):
        case = Wkv4Case(time=time, channels=64, dtype=dtype, grads="o")
        made = on_device(case, device)
        made |= {
            "u": torch.full_like(made["u"], u),
            "k": torch.full_like(made["k"], key),
            "state": torch.zeros_like(made["state"]),
        }
        named = with_grad(made)
        o, _ = call(named)
        torch.testing.assert_close(o[:, 0], made["v"][:, 0])  # the first token is the whole mean
        leaves = [named[n] for n in ARGUMENTS]
        for name, grad in zip(ARGUMENTS, torch.autograd.grad(o, leaves, made["do"]), strict=True):
            assert grad.isfinite().all(), name


# What reaches what ------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("lengths", [None, (40, 0, 60, 50)], ids=str)
def test_a_nan_reaches_later_tokens_of_its_channel_only(
    poison: float, lengths: tuple[int, ...] | None, device: str
) -> None:
    made = on_device(Wkv4Case(time=150, channels=66, lengths=lengths), device)
    clean, clean_final = call(made)
    offsets = made["cu_seqlens"].tolist() if lengths else [0, 150]
    for name in ("k", "v"):
        for t in (0, 15, 63, 64, 99, 149):
            value = made[name].clone()
            value[0, t, 1] = poison
            o, final = call(made | {name: value})
            end = min(x for x in offsets if x > t)
            hit = torch.zeros_like(clean, dtype=torch.bool)
            hit[0, t:end, 1] = True
            assert torch.equal(o[~hit], clean[~hit]), f"{name}[0, {t}, 1] reaches too much"
            if name == "v" or poison != poison:
                assert not o[0, t, 1].isfinite()
            touched = torch.zeros_like(final, dtype=torch.bool)
            touched[0 if lengths is None else offsets.index(end) - 1, :, 1] = True
            assert torch.equal(final[~touched], clean_final[~touched])


def test_a_key_of_minus_infinity_has_no_weight(device: str) -> None:
    made = on_device(Wkv4Case(time=30, channels=4, state=None, dtype=torch.float64), device)
    keep = torch.ones(30, dtype=torch.bool, device=device)
    keep[[0, 1, 7, 29]] = False
    k = made["k"].masked_fill(~keep[:, None], -torch.inf)
    w = torch.zeros_like(made["w"])  # so that time without weight does not count
    o, final = call(made | {"k": k, "w": w})
    kept = {n: made[n][:, keep] for n in ("k", "v")}
    expected, expected_final = call(made | kept | {"w": w})
    torch.testing.assert_close(o[:, keep], expected)
    torch.testing.assert_close(
        wkv4_oracle.mean_and_log(final), wkv4_oracle.mean_and_log(expected_final)
    )


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_nothing_leaks_across_a_boundary(case: Wkv4Case, device: str) -> None:
    lengths = (5, 40, 0, 90, 3)
    made = on_device(replace(case, lengths=lengths, channels=66), device)
    clean, clean_final = call(made)
    named = with_grad(made)
    results = call(named)
    offsets = made["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        others = [i for i in range(len(lengths)) if i != n]
        v, state = made["v"].clone(), made["state"].clone()
        v[:, start:end], state[n] = float("nan"), float("nan")
        o, final = call(made | {"v": v, "state": state})
        assert torch.equal(o[:, :start], clean[:, :start])
        assert torch.equal(o[:, end:], clean[:, end:])
        assert torch.equal(final[others], clean_final[others])
        do, dfinal = torch.zeros_like(clean), torch.zeros_like(clean_final)
        do[:, start:end], dfinal[n] = 1, 1
        dk, dv, dstate = torch.autograd.grad(
            results, [named[i] for i in ("k", "v", "state")], (do, dfinal), retain_graph=True
        )
        for grad in (dk, dv):
            assert not grad[:, :start].count_nonzero()
            assert not grad[:, end:].count_nonzero()
        assert dstate[n].count_nonzero()
        assert not dstate[others].count_nonzero()


# Gradients and what is kept ---------------------------------------------------------------------


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_one_argument_alone_gets_the_gradient_it_gets_among_all(
    case: Wkv4Case, device: str
) -> None:
    made = on_device(replace(case, time=70), device)
    everything = with_grad(made)
    expected = gradients(everything, call(everything))
    for name, same in zip(ARGUMENTS, expected, strict=True):
        one = made | {name: made[name].detach().requires_grad_()}
        (grad,) = gradients(one, call(one))
        assert torch.equal(grad, same), name
        assert (grad.dtype, grad.shape) == (made[name].dtype, made[name].shape)


def test_gradients_of_a_sum(device: str) -> None:
    """`o.sum()` hands over a gradient of strides zero; `o.transpose()` one of odd strides."""
    made = with_grad(on_device(Wkv4Case(time=40, channels=64), device))

    def grad_of(loss_of: object) -> Tensor:
        o, _ = call(made)
        return torch.autograd.grad(loss_of(o), made["k"])[0]

    expected = grad_of(lambda o: (o * torch.ones_like(o)).sum())
    assert torch.equal(grad_of(lambda o: o.sum()), expected)
    assert torch.equal(grad_of(lambda o: o.transpose(1, 2).flatten().sum()), expected)


def test_training_keeps_inputs_and_a_state_for_eight_tokens(device: str) -> None:
    made = with_grad(on_device(Wkv4Case(time=40, channels=16), device))
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(made)
    inputs = {t.data_ptr() for t in made.values() if t is not None}
    extra = [t for t in kept if t.data_ptr() not in inputs]
    assert sorted(t.shape for t in extra) == [(2, 3, 16), (2, 40 // 8 + 1, 3, 16)]
    kept.clear()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(made)
    assert not kept


@pytest.mark.parametrize("case", wkv4_cases.KINDS, ids=str)
def test_bitwise_repeatable(case: Wkv4Case, device: str) -> None:
    case = replace(case, batch=2, time=700, channels=140)
    first = wkv4_cases.run(case, device)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, value in wkv4_cases.run(case, device).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(threads)


def test_offsets_on_the_cpu_and_the_raw_operator(device: str) -> None:
    made = on_device(Wkv4Case(lengths=(3, 0, 9)), device)
    expected = call(made)
    found = call(made | {"cu_seqlens": made["cu_seqlens"].cpu()})
    for left, right, bare in zip(found, expected, raw.wkv4(*positional(made)), strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left, bare)


# On a GPU ---------------------------------------------------------------------------------------

LONG = [
    Wkv4Case(batch=1, time=9000, channels=64, dtype=torch.bfloat16),
    Wkv4Case(batch=1, time=4097, channels=130, dtype=torch.float16, keys="wide"),
    Wkv4Case(batch=1, time=3000, channels=33),
    Wkv4Case(lengths=(0, 2500, 1, 700, 0, 900), channels=64, dtype=torch.bfloat16),
    Wkv4Case(batch=40, time=300, channels=256, dtype=torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG, ids=str)
def test_where_blocks_share_a_sequence(case: Wkv4Case) -> None:
    from conftest import require_cuda

    require_cuda()
    check(case, "cuda")
    first = wkv4_cases.run(case, "cuda")
    for _ in range(3):
        for name, value in wkv4_cases.run(case, "cuda").items():
            assert torch.equal(value, first[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LONG[0], LONG[3], Wkv4Case(time=300, channels=70)], ids=str)
def test_graph_capture_and_replay(case: Wkv4Case) -> None:
    from conftest import require_cuda

    require_cuda()

    def train(inputs: dict[str, Tensor | None]) -> list[Tensor]:
        results = call(inputs)
        return [*results, *gradients(inputs, results)]

    static = with_grad(on_device(case, "cuda"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(static)
    for seed in (1, 2):
        fresh = with_grad(on_device(replace(case, seed=seed), "cuda"))
        with torch.no_grad():
            for name in ARGUMENTS:
                if static[name] is not None:
                    static[name].copy_(fresh[name])
        graph.replay()
        for left, right in zip(captured, train(fresh), strict=True):
            assert torch.equal(left, right)
