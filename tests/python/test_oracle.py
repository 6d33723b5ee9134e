"""The oracle's own tests: hand-written gradients against autograd, loops against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import error_rule, gla_chunks, gla_oracle, scan_oracle, wkv4_oracle
from support.cases import make_inputs, options
from support.gla_cases import GlaCase
from support.scan_cases import ScanCase
from support.wkv4_cases import Wkv4Case

CASES = [
    ScanCase("linear_scan", time=7, dtype=torch.float64),
    ScanCase("linear_scan", time=7, dtype=torch.complex128, reverse=True),
    ScanCase("linear_scan", time=7, dtype=torch.complex128, gate_dtype=torch.float64),
    ScanCase("linear_scan", dtype=torch.complex128, constant=True, lengths=(0, 3, 0, 5, 1)),
    ScanCase("linear_scan", dtype=torch.float64, lengths=(2, 0, 4), reverse=True, h0=None),
    ScanCase("linear_scan", time=0, dtype=torch.float64),
    ScanCase("hgru", time=7, dtype=torch.float64),
    ScanCase("hgru", time=7, dtype=torch.float64, theta=True, reverse=True),
    ScanCase("hgru", dtype=torch.float64, theta=True, lengths=(0, 3, 0, 5, 1), activation="none"),
    ScanCase("hgru", dtype=torch.float64, lengths=(2, 0, 4), reverse=True, gamma=False, h0=None),
    ScanCase("hgru", time=0, dtype=torch.float64, theta=True),
    ScanCase("lru_scan", time=7, dtype=torch.float64),
    ScanCase("lru_scan", time=7, dtype=torch.float64, theta=True, reverse=True),
    ScanCase("lru_scan", dtype=torch.float64, theta=True, lengths=(0, 3, 0, 5, 1)),
    ScanCase("lru_scan", dtype=torch.float64, lengths=(2, 0, 4), reverse=True, h0=None),
    ScanCase("lru_scan", time=0, dtype=torch.float64, theta=True),
    GlaCase("hgrn2", time=7, dtype=torch.float64),
    GlaCase("hgrn2", dtype=torch.float64, lengths=(0, 3, 0, 5, 1), v_activation="sigmoid"),
    GlaCase("hgrn2", dtype=torch.float64, lengths=(2, 0, 4), reverse=True, gamma=False, h0=None),
    GlaCase("gated_linear_attention", time=7, dtype=torch.float64),
    GlaCase("gated_linear_attention", time=7, dtype=torch.float64, per_head=True, reverse=True),
    GlaCase("gated_linear_attention", dtype=torch.float64, lengths=(0, 3, 0, 5, 1), h0=None),
    GlaCase("gated_linear_attention", time=0, dtype=torch.float64),
]


@pytest.mark.parametrize("grads", ["both", "h", "final"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_by_hand_equal_autograd(case: ScanCase, grads: str) -> None:
    inputs = make_inputs(replace(case, grads=grads))
    loss = [inputs.pop("dh"), inputs.pop("dh_final")]
    by_hand = getattr(case.ORACLE, f"{case.op}_reference")(
        **inputs, dh=loss[0], dh_final=loss[1], **options(case)
    )
    leaves = {
        k: v.detach().requires_grad_()
        for k, v in inputs.items()
        if v is not None and k != "cu_seqlens"
    }
    results = getattr(case.ORACLE, f"{case.op}_forward")(**{**inputs, **leaves}, **options(case))
    pairs = [(r, g) for r, g in zip(results, loss, strict=True) if g is not None]
    results, grads_in = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        results, list(leaves.values()), grads_in, allow_unused=True, materialize_grads=True
    )
    for name, grad in zip(leaves, found, strict=True):
        torch.testing.assert_close(by_hand[f"d{name}"], grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_loop_equals_the_parallel_form(dtype: torch.dtype) -> None:
    """h_t = sum over s <= t of (prod over s < r <= t of a_r) x_s, with x_{-1} = h0."""
    case = ScanCase("linear_scan", batch=1, time=12, channels=3, dtype=dtype, seed=3)
    inputs = make_inputs(case)
    x, a, h0 = inputs["x"][0], inputs["a"][0], inputs["h0"]
    terms = torch.cat([h0, x])
    for t in range(12):
        expected = sum(terms[s] * a[s : t + 1].prod(0) for s in range(t + 2))
        h, final = scan_oracle.linear_scan_forward(x[None], a[None], h0)
        torch.testing.assert_close(h[0, t], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final[0], h[0, -1])


def test_loop_over_states_equals_the_parallel_form() -> None:
    """o_t = scale * sum over s <= t of (q_t . (prod over s < r <= t of f_r) k_s) v_s, and of h0."""
    case = GlaCase("gated_linear_attention", batch=1, time=9, heads=1, dtype=torch.float64, seed=3)
    inputs = make_inputs(case)
    q, k, v = (inputs[name][0, :, 0] for name in "qkv")
    f, h0 = inputs["log_f"][0, :, 0].exp(), inputs["h0"][0, 0]
    found, final = gla_oracle.gated_linear_attention_forward(
        *(inputs[name] for name in ("q", "k", "v", "log_f", "h0")), scale=0.3
    )
    for t in range(9):
        expected = (q[t] * f[: t + 1].prod(0)) @ h0
        for s in range(t + 1):
            expected = expected + (q[t] * f[s + 1 : t + 1].prod(0)) @ k[s] * v[s]
        torch.testing.assert_close(found[0, t, 0], 0.3 * expected, rtol=1e-12, atol=1e-12)
    last = sum((f[s + 1 :].prod(0) * k[s])[:, None] * v[s] for s in range(9))
    torch.testing.assert_close(final[0, 0], last + f.prod(0)[:, None] * h0, rtol=1e-12, atol=0)


def test_hgrn2_is_gated_linear_attention() -> None:
    i = make_inputs(GlaCase("hgrn2", dtype=torch.float64))
    f = i["gamma"] + (1 - i["gamma"]) * torch.sigmoid(i["f"])
    silu = torch.nn.functional.silu
    found = gla_oracle.hgrn2_forward(
        i["q"], i["f"], i["v"], i["gamma"], i["h0"], q_activation="silu", v_activation="sigmoid"
    )
    expected = gla_oracle.gated_linear_attention_forward(
        silu(i["q"]), 1 - f, torch.sigmoid(i["v"]), f.log(), i["h0"]
    )
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


IN_CHUNKS = [
    GlaCase("hgrn2", time=150, v_activation="silu"),
    GlaCase("hgrn2", time=70, gates="extreme", grads="final"),
    GlaCase("gated_linear_attention", lengths=(0, 17, 0, 90, 1), reverse=True, h0=None),
    GlaCase("gated_linear_attention", time=65, per_head=True, gates="log -1e4", grads="h"),
    GlaCase("gated_linear_attention", time=0),
]


@pytest.mark.parametrize("case", IN_CHUNKS, ids=str)
def test_chunks_equal_the_loop_but_for_the_rounding_of_operands(
    case: GlaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, dtype=torch.float64)
    compute = getattr(gla_oracle, f"{case.op}_reference")
    call = {**make_inputs(case), **options(case)}
    exact, rounded = compute(**call), compute(**call, chunks=True)
    monkeypatch.setattr(gla_chunks, "_operand", lambda x: x)
    found = compute(**call, chunks=True)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
        error = float((rounded[name] - value).norm())
        size = exact.get(f"|{name}|", value)
        assert error <= 2**-7 * float(size.norm()), name
    if case.time:
        assert not torch.equal(rounded["h"], exact["h"])


def test_complex_hgru_is_the_complex_linear_scan() -> None:
    case = ScanCase(dtype=torch.float64, theta=True, activation="none", gamma=False)
    i = make_inputs(case)
    h, final = scan_oracle.hgru_forward(
        i["c"], i["f"], None, i["theta"], i["h0"], activation="none"
    )
    c, h0 = (torch.complex(*i[k].chunk(2, -1)) for k in ("c", "h0"))
    lam = torch.sigmoid(i["f"])
    a = lam * torch.exp(1j * i["theta"])
    z, z_final = scan_oracle.linear_scan_forward((1 - lam) * c, a, h0)
    torch.testing.assert_close(h, torch.cat([z.real, z.imag], -1))
    torch.testing.assert_close(final, torch.cat([z_final.real, z_final.imag], -1))


def test_lru_is_the_linear_scan_of_a_constant() -> None:
    i = make_inputs(ScanCase("lru_scan", dtype=torch.float64, theta=True))
    parameters = (i["nu_log"], i["theta_log"], i["gamma_log"])
    h, final = scan_oracle.lru_scan_forward(i["x"], *parameters, i["h0"])
    x, h0 = (torch.complex(*i[k].chunk(2, -1)) for k in ("x", "h0"))
    a = torch.exp(torch.complex(-i["nu_log"].exp(), i["theta_log"].exp()))
    z, z_final = scan_oracle.linear_scan_forward(i["gamma_log"].exp() * x, a, h0)
    torch.testing.assert_close(h, torch.cat([z.real, z.imag], -1))
    torch.testing.assert_close(final, torch.cat([z_final.real, z_final.imag], -1))


def test_rule_accepts_the_yardstick_and_refuses_what_is_wrong() -> None:
    exact = torch.linspace(-1, 1, 64, dtype=torch.float64)
    same = exact.float()
    error_rule.assert_within_rule("good", same, exact, same)
    wrong = {
        "scaled": same * (1 + 4e-6),
        "one element": same + torch.eye(64)[5] * 1e-5,
        "nan": torch.where(torch.arange(64) == 9, torch.nan, same),
        "zero": torch.zeros(64),
        "shape": same[None],
        "dtype": exact,
    }
    for name, value in wrong.items():
        with pytest.raises(AssertionError, match=name):
            error_rule.assert_within_rule(name, value, exact, same)


@pytest.mark.parametrize("ways", [(), (False,), (True,)], ids=["exact", "stable", "fused"])
def test_wkv4_s_sequence_equals_its_steps(ways: tuple[bool, ...]) -> None:
    """The oracle does all tokens at once where it can; the equations are those of one token. Both
    are float64, whose exp of many numbers may round otherwise than that of one."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 50, 3)
    w, u, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))
    w = w.exp()
    state = torch.rand(3 if ways else 2, 2, 3, dtype=torch.float64, generator=generator).unbind(0)
    whole = wkv4_oracle._stable_sequence if ways else wkv4_oracle._plain_sequence
    step = wkv4_oracle.stable_step if ways else wkv4_oracle.plain_step
    found = whole(w, u, k, v, *state, *ways)
    outputs = []
    for token in zip(*(x.unbind(1) for x in (w, u, k, v)), strict=True):
        o, *state = step(*token, *state, *ways)
        outputs.append(o)
    for left, right in zip(found, (torch.stack(outputs, 1), *state), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_wkv4_s_sizes_of_roundings() -> None:
    """Against differences: every sum of every token a little off, one after the other, and what
    flows back by the equations as the kernels have them."""
    inputs = Wkv4Case(time=4, channels=2, dtype=torch.float64).make_inputs()
    w, u, k, v, state = (inputs[name] for name in ("w", "u", "k", "v", "state"))
    time = k.shape[1]

    def gradients(off: torch.Tensor) -> torch.Tensor:
        y, z = state[:, 0] * state[:, 2].exp(), state[:, 1] * state[:, 2].exp()
        entering = []
        for t in range(time):
            entering.append((y, z, wkv4_oracle.plain_step(w, u, k[:, t], v[:, t], y, z)))
            y, z = (x * (1 + off[0, i, :, t]) for i, x in enumerate(entering[-1][2][1:]))
        mean, log = inputs["dfinal"].unbind(1)
        into_y, into_z = mean / z, (log - mean * y / z) / z
        dw = du = torch.zeros_like(y)
        for t in reversed(range(time)):
            y, z, (o, *_) = entering[t]
            into_y = into_y * (1 + off[1, 0, :, t]) * (1 + off[0, 0, :, t])
            into_z = into_z * (1 + off[1, 1, :, t]) * (1 + off[0, 1, :, t])
            bonus, decay = torch.exp(u + k[:, t]), torch.exp(-w)
            by_o = inputs["do"][:, t] / (z + bonus)
            dw = dw - decay * (into_y * y + into_z * z)
            du = du + by_o * bonus * (v[:, t] - o)
            into_y, into_z = decay * into_y + by_o, decay * into_z - by_o * o
        return torch.stack([dw.sum(0), du.sum(0)])

    squares = torch.zeros(2, k.shape[2], dtype=torch.float64)
    for index in range(4 * k.numel()):
        off = torch.zeros(4 * k.numel(), dtype=torch.float64)
        off[index] = 1e-5
        off = off.view(2, 2, *k.shape)
        squares += ((gradients(off) - gradients(-off)) / 2e-5).square()
    found = wkv4_oracle.sizes_of_roundings(inputs)
    torch.testing.assert_close(
        torch.stack([found["|dw|"], found["|du|"]]), squares.sqrt(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("case", CASES[:16], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_scans_in_numpy_equal_torch_s(case, exact, monkeypatch) -> None:
    """The loops that NumPy runs are those that torch would: bit for bit where numbers are real."""
    if case.dtype is torch.float64:
        case = replace(case, dtype=torch.float32)
    reference = getattr(scan_oracle, f"{case.op}_reference")
    found = reference(**make_inputs(case), **options(case), exact=exact)
    monkeypatch.setattr(scan_oracle, "_NUMPY", ())
    wanted = reference(**make_inputs(case), **options(case), exact=exact)
    assert found.keys() == wanted.keys()
    close = 1e-14 if case.dtype.is_complex or (case.theta and exact) else 0
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=close, atol=close, msg=name)
