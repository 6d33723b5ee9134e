"""`tidegate.nn.LRU` and `SLRU` against their equations, written once more as a loop."""

from __future__ import annotations

import math

import pytest
import torch
from support.mixer_checks import (
    check_models,
    check_packed_sequences_do_not_touch,
    check_steps_and_splits,
    check_values_and_gradients,
    gamma_of,
)
from torch import Tensor

from tidegate import reference
from tidegate.nn import LRU, SLRU

DIM = 6
KINDS = [
    (LRU, {}),
    (LRU, {"state": 9, "skip": True}),
    (LRU, {"gate": "data"}),
    (LRU, {"gate": "data", "state": 5, "lower_bound": True}),
    (SLRU, {}),
    (SLRU, {"state": 5, "skip": True}),
]
EVERY = pytest.mark.parametrize(("cls", "options"), KINDS, ids=lambda v: getattr(v, "__name__", v))


def oracle(
    mixer: LRU | SLRU, x: Tensor, h: Tensor | None = None, gamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The equations with complex matrices, a token at a time, in double."""
    w = {name: p.double() for name, p in mixer.named_parameters()}
    x, s = x.double(), mixer.state
    into, out = w["in_proj.weight"], w["out_proj.weight"]
    lam = torch.exp(-torch.exp(w["nu_log"]))
    if isinstance(mixer, LRU):
        into = torch.complex(into[:s], into[s:])  # B
        out = torch.complex(out[:, :s], -out[:, s:])  # C: Re(C h) = C_re h_re - C_im h_im
        lam = lam * torch.exp(1j * torch.exp(w["theta_log"]))
        h = None if h is None else torch.complex(h[:, :s], h[:, s:])
    h = torch.zeros(x.size(0), s, dtype=into.dtype, device=x.device) if h is None else h
    rows = []
    for t in range(x.size(1)):
        now = x[:, t].to(into.dtype)
        decay = lam
        if "gate_proj.weight" in w:
            sharpness = torch.sigmoid(x[:, t] @ w["gate_proj.weight"].T + w["gate_proj.bias"])
            modulus = lam.abs() ** sharpness
            if gamma is not None:
                modulus = gamma + (1 - gamma) * modulus
            decay = modulus * (lam / lam.abs())
        h = decay * h + torch.exp(w["gamma_log"]) * (now @ into.T)
        y = (h @ out.T).real
        rows.append(y + w["skip_weight"] * x[:, t] if mixer.skip else y)
    final = torch.cat([h.real, h.imag], -1) if h.is_complex() else h
    return (torch.stack(rows, 1) if rows else x.new_zeros(x.size(0), 0, mixer.dim)), final


def make(cls, options, dtype: torch.dtype = torch.float64, device: str = "cpu") -> LRU | SLRU:
    torch.manual_seed(0)
    return cls(DIM, dtype=dtype, device=device, **options)


@EVERY
@pytest.mark.parametrize("time", [0, 1, 2, 17, 65])
def test_values_and_gradients(cls, options, time, device):
    mixer = make(cls, options, device=device)
    x = torch.randn(2, time, DIM, dtype=torch.float64).to(device).requires_grad_()
    h0 = torch.randn(2, mixer.state_size, dtype=torch.float64).to(device).requires_grad_()
    gamma = gamma_of(mixer)
    targets = [x, h0, *mixer.parameters()]
    if gamma is not None:
        gamma = gamma.to(device).requires_grad_()
        targets.append(gamma)
    check_values_and_gradients(
        lambda: mixer(x, h0, gamma=gamma), lambda: oracle(mixer, x, h0, gamma), targets
    )


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(cls, options, dtype, device):
    """Decays, phases and scales stay fp32."""
    mixer = make(cls, options, dtype, device)
    assert mixer.nu_log.dtype == mixer.gamma_log.dtype == torch.float32
    x = torch.randn(2, 33, DIM).to(device, dtype)
    y, state = mixer(x)
    wanted, final = oracle(mixer, x)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 5e-2}
    torch.testing.assert_close(y.double(), wanted, **close)
    torch.testing.assert_close(state.double(), final, **close)


@EVERY
def test_decays_keep_their_digits_in_a_half_precision_module(cls, options):
    mixer = make(cls, options, torch.float32)
    before = mixer.nu_log.detach().clone()
    mixer.bfloat16()
    assert mixer.in_proj.weight.dtype == torch.bfloat16
    assert torch.equal(mixer.nu_log, before)
    mixer.double()
    assert mixer.nu_log.dtype == torch.float64


@EVERY
def test_steps_and_splits(cls, options, device):
    mixer = make(cls, options, device=device)
    gamma = gamma_of(mixer)
    check_steps_and_splits(mixer, None if gamma is None else gamma.to(device))


@EVERY
def test_packed_sequences_do_not_touch(cls, options, device):
    mixer = make(cls, options, device=device)
    gamma = gamma_of(mixer)
    check_packed_sequences_do_not_touch(mixer, None if gamma is None else gamma.to(device))


@EVERY
def test_autocast(cls, options, device):
    mixer = make(cls, options, torch.float32, device)
    x = torch.randn(2, 12, DIM, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, state = mixer(x)
    assert state.dtype == torch.float32
    y.float().sum().backward()
    wanted, _ = oracle(mixer, x)
    torch.testing.assert_close(y.double(), wanted, rtol=3e-2, atol=5e-2)
    assert mixer.nu_log.grad.isfinite().all()


# How they start ---------------------------------------------------------------------------------


def largest_gap(values: Tensor, low: float, high: float) -> float:
    """Kolmogorov and Smirnov's statistic against the uniform distribution on [low, high]."""
    u = ((values.sort().values - low) / (high - low)).double()
    n = len(u)
    above = torch.arange(1, n + 1) / n - u
    below = u - torch.arange(n) / n
    return float(torch.maximum(above, below).max())


@pytest.mark.parametrize(("r_min", "r_max"), [(0.9, 0.999), (0.0, 1.0), (0.5, 0.6)])
def test_lambda_starts_uniform_on_the_ring(r_min, r_max):
    torch.manual_seed(0)
    mixer = LRU(4, state=20000, r_min=r_min, r_max=r_max, max_phase=1.5)
    nu = mixer.nu_log.detach().double().exp()
    critical = 1.63 / math.sqrt(len(nu))  # exceeded once in a hundred
    assert largest_gap(torch.exp(-2 * nu), r_min**2, r_max**2) < critical
    assert largest_gap(mixer.theta_log.detach().double().exp(), 0.0, 1.5) < critical
    assert largest_gap(torch.exp(-2 * nu), r_min**2, r_max**2 + 0.1) > critical
    gamma = mixer.gamma_log.detach().double().exp()
    torch.testing.assert_close(gamma, torch.sqrt(-torch.expm1(-2 * nu)), rtol=1e-5, atol=0)
    for p in mixer.parameters():
        assert p.isfinite().all()


@torch.no_grad()
def test_gamma_keeps_the_size_of_independent_inputs():
    """At the start the state is as large as what enters it, however long the memory."""
    torch.manual_seed(0)
    for cls, r_max in ((LRU, 0.99), (SLRU, 0.95)):
        mixer = cls(8, state=64, r_min=0.9, r_max=r_max)
        x = torch.randn(64, 1000, 8)
        entering = mixer.in_proj(x)[:, -1].square().mean()
        _, state = mixer(x)
        assert 0.8 < float(state.square().mean() / entering) < 1.25


def test_sizes_of_the_presets():
    """SLRU's matrices are as large as LRU's: a state of 2 dim real numbers, or dim complex ones."""
    lru, slru = LRU(8), SLRU(8)
    matrices = [sum(p.numel() for p in m.parameters() if p.dim() == 2) for m in (lru, slru)]
    assert matrices == [4 * 64, 4 * 64]
    assert (lru.state_size, slru.state_size) == (16, 16)
    assert [n for n, _ in lru.named_parameters()] == [
        "nu_log",
        "theta_log",
        "gamma_log",
        "in_proj.weight",
        "out_proj.weight",
    ]


# In models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["lru", "slru"])
def test_models_by_name(mixer):
    assert check_models(mixer).lower_bounds is None


def test_gradients_where_a_modulus_is_subnormal():
    """They divided by it. Widths of one take torch's scalar loops, which do not flush to zero."""
    torch.manual_seed(0)
    for _ in range(50):
        mixer = LRU(1, gate="data")
        with torch.no_grad():
            mixer.nu_log.fill_(5.2)
        mixer(torch.randn(1, 6, 1))[0].sum().backward()
        assert all(p.grad.isfinite().all() for p in mixer.parameters())
    nu_log = torch.linspace(6.6, 6.62, 21, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(21, dtype=torch.float64)
    h, _ = reference.lru_scan(torch.ones(1, 3, 42, dtype=torch.float64), nu_log, ones, ones)
    (gradient,) = torch.autograd.grad(h.sum(), nu_log)
    assert (gradient.abs() < 1e-300).all()


@pytest.mark.parametrize("cls", [LRU, SLRU])
def test_wrong_input_is_refused(cls):
    name, mixer = cls.__name__, cls(DIM)
    x, size = torch.zeros(2, 3, DIM), mixer.state_size
    for use, message in (
        (lambda: mixer(torch.zeros(2, 3, 5)), rf"{name}: x: expected \[B, T, dim=6\]; got \(2, 3"),
        (lambda: mixer(x[0]), rf"{name}: x: expected \[B, T, dim=6\]; got \(3, 6\)"),
        (
            lambda: mixer.step(x, mixer.init_state(2)),
            rf"{name}.step: x: expected \[B, dim=6\]; got",
        ),
        (
            lambda: mixer(x, torch.zeros(2, 5)),
            rf"{name}: state: expected \[2, {size}\]; got \(2, 5\)",
        ),
        (lambda: mixer(x, gamma=torch.zeros(DIM)), f"{name}: gamma: expected None"),
        (
            lambda: mixer.step(x[:, 0], mixer.init_state(2), torch.zeros(DIM)),
            f"{name}: gamma: expected None",
        ),
        (lambda: cls(0), f"{name}: dim: expected a positive integer; got 0"),
        (lambda: cls(4, state=0), f"{name}: state: expected a positive integer; got 0"),
        (
            lambda: cls(4, r_min=0.95, r_max=0.5),
            f"{name}: r_min, r_max: expected 0 <= r_min <= r_max <= 1.*; got 0.95 and 0.5",
        ),
        (
            lambda: cls(4, r_min="0", r_max=None),
            f"{name}: r_min, r_max: expected 0 <= r_min <= r_max <= 1.*; got '0' and None",
        ),
        (lambda: cls(None), f"{name}: dim: expected a positive integer; got None"),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_wrong_options_of_lru_are_refused():
    with pytest.raises(ValueError, match="LRU: gate: expected one of None, 'data'; got 'fixed'"):
        LRU(4, gate="fixed")
    for phase, given in ((-1.0, "-1"), (math.inf, "inf"), (math.nan, "nan"), ("1", "'1'")):
        message = f"LRU: max_phase: expected a number above 0; got {given}$"
        with pytest.raises(ValueError, match=message):
            LRU(4, max_phase=phase)
