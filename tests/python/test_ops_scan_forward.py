"""`linear_scan`, `hgru` and `lru_scan`, forward: every dtype, length, layout and gate regime."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import cases, error_rule, recurrence, scan_cases, scan_oracle
from support.scan_cases import ScanCase

import tidegate

LONG = 131072
SHORT_KINDS = [
    ScanCase("hgru", dtype=torch.float32),
    ScanCase("hgru", dtype=torch.bfloat16, theta=True),
    ScanCase("linear_scan", dtype=torch.float32),
    ScanCase("linear_scan", dtype=torch.complex64, constant=True),
    ScanCase("lru_scan", dtype=torch.float32, theta=True),
    ScanCase("lru_scan", dtype=torch.bfloat16),
]


def call(case: ScanCase, inputs: dict, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's op on `inputs` (as made by make_inputs), some of them changed."""
    arguments = {k: v for k, v in {**inputs, **changes}.items() if k not in ("dh", "dh_final")}
    return getattr(tidegate.ops, case.op)(**arguments, **cases.options(case))


def step(case: ScanCase, inputs: dict, t: int, state: torch.Tensor) -> torch.Tensor:
    """The case's step at token t of `inputs`."""
    names = [k for k in inputs if k not in ("h0", "cu_seqlens", "dh", "dh_final")]
    token = (v if v is None or v.dim() == 1 else v[:, t] for v in map(inputs.get, names))
    options = {"activation": case.activation} if case.op == "hgru" else {}
    return getattr(tidegate.ops, f"{case.op}_step")(*token, state, **options)


def inputs_on(case: ScanCase, device: str) -> dict:
    made = cases.make_inputs(case)
    return {k: cases.to_device(v, device, case.layout) for k, v in made.items()}


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality; NaN equals NaN."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(), right.nan_to_num()
    )


@pytest.mark.parametrize("case", scan_cases.every_length(), ids=str)
def test_every_length(case: ScanCase, device: str) -> None:
    cases.check(case, device, backward=False)


@pytest.mark.parametrize("case", scan_cases.every_regime(), ids=str)
def test_every_gate_regime(case: ScanCase, device: str) -> None:
    cases.check(case, device, backward=False)


@pytest.mark.parametrize("case", scan_cases.every_layout(), ids=str)
def test_every_layout(case: ScanCase, device: str) -> None:
    cases.check(case, device, backward=False)


@pytest.mark.parametrize("channels", [1, 2, 7, 31, 64, 65, 130, 257])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_any_number_of_channels(case: ScanCase, channels: int, device: str) -> None:
    cases.check(replace(case, channels=channels, time=70, seed=channels), device, backward=False)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0), (2, 0, 3), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_empty_dimensions(case: ScanCase, shape: tuple[int, int, int], device: str) -> None:
    batch, time, channels = shape
    case = replace(case, batch=batch, time=time, channels=channels)
    inputs = inputs_on(case, device)
    h, final = call(case, inputs)
    assert h.shape == inputs["dh"].shape
    assert torch.equal(final, inputs["h0"] if time == 0 else torch.zeros_like(final))


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_no_sequences(case: ScanCase, device: str) -> None:
    h, final = call(case, inputs_on(replace(case, lengths=()), device))
    assert h.numel() == 0
    assert final.shape[0] == 0


# States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("h0", ["state", "data", None])
@pytest.mark.parametrize("case", scan_cases.KINDS, ids=str)
def test_final_state_without_tokens_is_a_copy_of_h0(
    case: ScanCase, h0: str | None, device: str
) -> None:
    inputs = inputs_on(replace(case, time=0, h0=h0), device)
    _, final = call(case, inputs)
    assert final.dtype == recurrence.state_dtype(case.dtype)
    if h0 is None:
        assert torch.equal(final, torch.zeros_like(final))
        assert final.shape == (2, final.shape[1])
        return
    assert torch.equal(final, inputs["h0"].to(final.dtype))
    assert final.data_ptr() != inputs["h0"].data_ptr()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_split_anywhere_equals_the_whole(case: ScanCase, reverse: bool, device: str) -> None:
    case = replace(case, time=19, reverse=reverse)
    inputs = inputs_on(case, device)
    exact = cases.reference(case, backward=False, exact=True)
    yardstick = cases.reference(case, backward=False, exact=False)
    data, gate = list(inputs)[:2]
    for at in range(case.time + 1):
        parts = [slice(0, at), slice(at, None)]
        hidden, state = [], inputs["h0"]
        for part in reversed(parts) if reverse else parts:
            changes = {data: inputs[data][:, part], "h0": state}
            if inputs[gate].dim() == 3:
                changes[gate] = inputs[gate][:, part]
            h, state = call(case, inputs, **changes)
            hidden.append(h)
        joined = torch.cat(hidden[::-1] if reverse else hidden, 1)
        error_rule.assert_within_rule(f"split at {at}: h", joined, exact["h"], yardstick["h"])
        error_rule.assert_within_rule(
            f"split at {at}: final", state, exact["final"], yardstick["final"]
        )


@pytest.mark.parametrize("layout", ["contiguous", "projection", "channels_first"])
@pytest.mark.parametrize("case", scan_cases.KINDS, ids=str)
def test_steps_equal_prefill(case: ScanCase, layout: str, device: str) -> None:
    case = replace(case, time=9, channels=6, layout=layout)
    inputs = inputs_on(case, device)
    exact = cases.reference(case, backward=False, exact=True)
    yardstick = cases.reference(case, backward=False, exact=False)
    state = inputs["h0"].clone()
    where = state.data_ptr()
    rows = [step(case, inputs, t, state) for t in range(case.time)]
    assert state.data_ptr() == where, "the state is updated in place"
    h = torch.stack(rows, 1)
    error_rule.assert_within_rule("h by steps", h, exact["h"], yardstick["h"])
    error_rule.assert_within_rule("state after steps", state, exact["final"], yardstick["final"])


@pytest.mark.parametrize("case", scan_cases.every_mix(), ids=str)
def test_a_step_updates_a_state_of_any_dtype_in_place(case: ScanCase, device: str) -> None:
    case = replace(case, time=1, channels=6)
    inputs = inputs_on(case, device)
    exact = cases.reference(case, backward=False, exact=True)
    yardstick = cases.reference(case, backward=False, exact=False)
    state = inputs["h0"].clone()
    where, version = state.data_ptr(), state._version
    row = step(case, inputs, 0, state)
    assert (state.data_ptr(), state.dtype) == (where, inputs["h0"].dtype)
    assert state._version > version
    wide = recurrence.state_dtype(case.dtype)
    error_rule.assert_within_rule("h", row, exact["h"][:, 0], yardstick["h"][:, 0], state=wide)
    final = yardstick["final"].to(state.dtype)
    error_rule.assert_within_rule("state", state, exact["final"], final, state=wide)


def test_step_writes_into_a_view_of_a_state(device: str) -> None:
    """Decoding keeps all layers' states in one tensor: a step touches its own rows only."""
    states = torch.full((3, 2, 4), 0.5, device=device)
    x, a = torch.ones(2, 4, device=device), torch.full((2, 4), 0.5, device=device)
    h = tidegate.ops.linear_scan_step(x, a, states[1])
    assert torch.equal(h, torch.full_like(h, 1.25))
    assert torch.equal(states[1], h)
    for other in (0, 2):
        assert torch.equal(states[other], torch.full((2, 4), 0.5, device=device))
    across = torch.full((2, 3, 4), 0.5, device=device)
    tidegate.ops.linear_scan_step(x, a, across[:, 1])
    assert torch.equal(across[:, 1], h)
    assert across[:, ::2].eq(0.5).all()


# Packed sequences -------------------------------------------------------------------------------

PACKED = [(4, 0, 13, 1, 0), (0, 0, 18), (18,), (9, 9), (1,) * 18, (0, 0), (65, 2, 0, 70)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_packed(case: ScanCase, lengths: tuple[int, ...], reverse: bool, device: str) -> None:
    for offsets_dtype in (torch.int32, torch.int64):
        packed = replace(case, lengths=lengths, reverse=reverse, offsets_dtype=offsets_dtype)
        cases.check(packed, device, backward=False)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_nothing_leaks_across_a_boundary(
    case: ScanCase, reverse: bool, poison: float, device: str
) -> None:
    case = replace(case, lengths=(5, 40, 0, 90, 3), reverse=reverse)
    inputs = inputs_on(case, device)
    data = next(iter(inputs))
    clean, clean_final = call(case, inputs)
    offsets = inputs["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        x, h0 = inputs[data].clone(), inputs["h0"].clone()
        x[:, start:end], h0[n] = poison, poison
        h, final = call(case, inputs, **{data: x, "h0": h0})
        for t in (slice(0, start), slice(end, None)):
            assert torch.equal(h[:, t], clean[:, t]), f"sequence {n} leaks into {t}"
        others = [i for i in range(len(case.lengths)) if i != n]
        assert torch.equal(final[others], clean_final[others])


def test_offsets_on_the_cpu_are_accepted(device: str) -> None:
    case = replace(SHORT_KINDS[0], lengths=(3, 0, 9))
    inputs = inputs_on(case, device)
    expected = call(case, inputs)
    found = call(case, inputs, cu_seqlens=inputs["cu_seqlens"].cpu())
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


# Extremes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, (40, 0, 60, 50)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_a_nan_poisons_only_its_channel_from_then_on(
    case: ScanCase, poison: float, reverse: bool, lengths: tuple[int, ...] | None, device: str
) -> None:
    case = replace(case, time=150, channels=6, gates="open", reverse=reverse, lengths=lengths)
    inputs = inputs_on(case, device)
    clean, clean_final = call(case, inputs)
    offsets = inputs["cu_seqlens"].tolist() if lengths else [0, 150]
    d = 2
    for name in list(inputs)[:2]:
        if inputs[name].dim() != 3:
            continue
        for t in (0, 63, 64, 99, 149):
            value = inputs[name].clone()
            value[0, t, d] = poison if name in "xc" else float("nan")
            h, final = call(case, inputs, **{name: value})
            start = max(o for o in offsets[:-1] if o <= t)
            end = min(o for o in offsets if o > t)
            hit = torch.zeros_like(clean, dtype=torch.bool)
            hit[0, slice(start, t + 1) if reverse else slice(t, end), d :: case.channels] = True
            assert equal_bits(h[~hit], clean[~hit]), f"{name}[0, {t}, {d}] poisons too much"
            own = h[0, start : t + 1, d] if reverse else h[0, t:end, d]
            assert not own.isfinite().any(), f"{name}[0, {t}, {d}] does not reach its channel"
            row = 0 if lengths is None else offsets.index(end) - 1
            touched = torch.zeros_like(final, dtype=torch.bool)
            touched[row, d :: case.channels] = True
            assert equal_bits(final[~touched], clean_final[~touched])
            assert not final[row, d].isfinite()


@pytest.mark.parametrize("theta", [False, True])
def test_gates_beyond_every_range(theta: bool, device: str) -> None:
    """f = +-inf and the largest finite numbers: lambda is exactly 1 or gamma, nothing is NaN."""
    case = ScanCase(time=40, theta=theta, gamma=True)
    inputs = inputs_on(case, device)
    for value in (float("inf"), 3e38, 88.8, 104.0):
        f = torch.full_like(inputs["f"], value)
        h, _ = call(
            case, inputs, f=f, theta=None if not theta else torch.zeros_like(inputs["theta"])
        )
        held = inputs["h0"][:, None].expand_as(h)
        torch.testing.assert_close(h, held, rtol=1e-6, atol=0)
        shut, _ = call(case, inputs, f=-f, gamma=None)
        torch.testing.assert_close(
            shut, torch.nn.functional.silu(inputs["c"]), rtol=3e-6, atol=1e-37
        )


@pytest.mark.parametrize(("dtype", "reverse"), [(torch.float32, False), (torch.float64, True)])
def test_memory_over_a_long_time(dtype: torch.dtype, reverse: bool, device: str) -> None:
    """Decays of 1 - 1e-7 .. 1 - 1e-4 over 131072 steps."""
    case = ScanCase(batch=1, time=LONG, channels=3, dtype=dtype, gates="open", reverse=reverse)
    cases.check(replace(case, gamma=False), device, backward=False)


def test_phase_over_a_long_time(device: str) -> None:
    """theta keeps turning for 131072 steps while lambda hardly decays."""
    case = ScanCase(batch=1, time=LONG, channels=3, gates="open", theta=True)
    cases.check(case, device, backward=False)


def test_constant_complex_decay_over_a_long_time(device: str) -> None:
    case = ScanCase(
        "linear_scan", batch=1, time=LONG, channels=3, dtype=torch.complex64, constant=True
    )
    cases.check(replace(case, gates="open"), device, backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("theta", [False, True])
def test_constant_decay_of_lru_over_a_long_time(
    theta: bool, dtype: torch.dtype, device: str
) -> None:
    """|lambda| = 0.9999 over 131072 steps: nearer to float64 than the error rule asks for, since
    with a lambda rounded to float32, as torch ops have it, h is wrong by 1e-4 by then, and by 7e-4
    where it is complex."""
    case = ScanCase("lru_scan", batch=1, time=LONG, channels=3, dtype=dtype, theta=theta)
    inputs = inputs_on(case, device)
    # In float64: float32's own 0.9999 is one of the few moduli that lose nothing.
    nu_log = torch.full_like(inputs["nu_log"], math.log(-math.log(0.9999)))
    h, final = call(case, inputs, nu_log=nu_log)
    made = {k: v for k, v in cases.make_inputs(case).items() if k not in ("dh", "dh_final")}
    exact, exact_final = scan_oracle.lru_scan_forward(**{**made, "nu_log": nu_log.cpu()})
    rounding = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-3}[dtype]
    for found, expected in ((h, exact), (final, exact_final)):
        tolerance = rounding if found.dtype == dtype else 5e-6  # the state of bfloat16 is float32
        error = torch.linalg.vector_norm(found.cpu().double() - expected)
        assert error <= tolerance * torch.linalg.vector_norm(expected)


def test_many_steps_of_lru_equal_prefill(device: str) -> None:
    """Decoding does not drift from prefill where the memory is long."""
    case = ScanCase("lru_scan", batch=1, time=3000, channels=3, theta=True, gates="open")
    inputs = inputs_on(case, device)
    state = inputs["h0"].clone()
    for t in range(case.time):
        step(case, inputs, t, state)
    _, final = call(case, inputs)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-4)


# Repeatability ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SHORT_KINDS, ids=str)
def test_bitwise_repeatable(case: ScanCase, device: str) -> None:
    case = replace(case, time=300, channels=70)
    inputs = inputs_on(case, device)
    first = call(case, inputs)
    threads = torch.get_num_threads()
    try:
        for run in range(4):
            torch.set_num_threads(1 + run % 3)
            again = call(case, inputs)
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])
    finally:
        torch.set_num_threads(threads)


def test_positions_and_keywords_and_the_raw_operator_agree(device: str) -> None:
    i = inputs_on(ScanCase(theta=True), device)
    expected, _ = tidegate.ops.hgru(i["c"], i["f"], i["gamma"], i["theta"], i["h0"])
    by_name, _ = tidegate.ops.hgru(
        f=i["f"], c=i["c"], theta=i["theta"], gamma=i["gamma"], h0=i["h0"], activation="silu"
    )
    raw, _ = torch.ops.tidegate.hgru(
        i["c"], i["f"], i["gamma"], i["theta"], i["h0"], "silu", False, None
    )
    assert torch.equal(expected, by_name)
    assert torch.equal(expected, raw)
    i = inputs_on(ScanCase("linear_scan"), device)
    expected, _ = tidegate.ops.linear_scan(i["x"], i["a"], i["h0"], reverse=True)
    raw, _ = torch.ops.tidegate.linear_scan(i["x"], i["a"], i["h0"], True, None)
    assert torch.equal(expected, raw)
    i = inputs_on(ScanCase("lru_scan", theta=True), device)
    parameters = (i["nu_log"], i["theta_log"], i["gamma_log"])
    expected, _ = tidegate.ops.lru_scan(i["x"], *parameters, i["h0"], reverse=True)
    raw, _ = torch.ops.tidegate.lru_scan(i["x"], *parameters, i["h0"], True, None)
    assert torch.equal(expected, raw)


def test_inputs_of_stride_zero(device: str) -> None:
    """Expanded tensors: one row seen at every step, or by every batch row."""
    case = ScanCase("linear_scan", batch=3, time=20, channels=4)
    inputs = inputs_on(case, device)
    for shape in ((3, 20, 4), (1, 20, 4), (3, 1, 4)):
        x = inputs["x"][: shape[0], : shape[1]].expand(3, 20, 4)
        a = inputs["a"][: shape[0], : shape[1]].expand(3, 20, 4)
        expected, _ = call(case, inputs, x=x.contiguous(), a=a.contiguous())
        found, _ = call(case, inputs, x=x, a=a)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("constant", [False, True])
def test_lazily_conjugated_and_negated_views(constant: bool, device: str) -> None:
    """x.conj() and x.conj().imag share x's memory and carry a bit that says how to read it."""
    case = ScanCase("linear_scan", dtype=torch.complex64, constant=constant)
    inputs = inputs_on(case, device)
    lazy = {name: inputs[name].conj() for name in ("x", "a", "h0")}
    assert all(value.is_conj() for value in lazy.values())
    solid = {name: value.resolve_conj() for name, value in lazy.items()}
    for left, right in zip(call(case, inputs, **lazy), call(case, inputs, **solid), strict=True):
        assert torch.equal(left, right)
    negative = inputs["x"].conj().imag
    assert negative.is_neg()
    a = inputs["a"].real
    h, _ = tidegate.ops.linear_scan(negative, a)
    assert torch.equal(h, tidegate.ops.linear_scan(negative.resolve_neg(), a.clone())[0])
