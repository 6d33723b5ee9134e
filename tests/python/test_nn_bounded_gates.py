"""The option `lower_bound` of `GatedLinearAttention`, `ForgettingAttention` and `LRU`: what their
gates share, its digits, and models over them; how every gate is read. Their own tests hold the
modules against equations.
"""

from __future__ import annotations

import inspect
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.mixer_checks import check_models
from torch import Tensor, nn

from tidegate.models import CausalLM, LMConfig
from tidegate.models.registry import mixers
from tidegate.nn import (
    HGRU,
    HGRU2,
    LRU,
    Attention,
    ForgettingAttention,
    GatedLinearAttention,
    GatedLinearRNN,
    GatedRNN,
)
from tidegate.nn._common import bounded_decay, bounded_log_gate
from tidegate.training import forget_gates

GAMMAS = [0.0, 1e-6, 0.3, 0.9, 1 - 2.0**-24]
LOGITS = [-100, -60, -30, -17, -9, -4, -1.3, -0.2, 0, 0.4, 2, 6, 16.5, 40, 100]
# Gated linear attention takes a root of the sigmoid, which is closer to one.
LOG_GATES = [float(F.logsigmoid(torch.tensor(float(z)))) / t for z in LOGITS for t in (1, 16)]
LOG_GATES += [0.0, -200.0, -0.6931, -0.6932, -1.0, -1.0001, -1e-3, -1e-12]


def exactly(log_gate: float, gamma: float) -> tuple[float, float, float, float]:
    """f, log f, and log f's derivatives for log_gate and for gamma, from 80 decimal digits."""
    with localcontext() as context:
        context.prec = 80
        gate, bound = Decimal(log_gate).exp(), Decimal(gamma)
        f = bound + (1 - bound) * gate
        return tuple(map(float, (f, f.ln(), (1 - bound) * gate / f, (1 - gate) / f)))


def every_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """log gates, bounds, and what is exact: ``[4, cases]``."""
    given = (torch.tensor(values, dtype=dtype) for values in (LOG_GATES, GAMMAS))
    log_gate, gamma = torch.cartesian_prod(*given).unbind(1)
    rows = [exactly(a, b) for a, b in zip(log_gate.tolist(), gamma.tolist(), strict=True)]
    return log_gate, gamma, torch.tensor(rows, dtype=torch.float64).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_have_their_digits(dtype):
    log_gate, gamma, (f, log_f, by_gate, by_gamma) = every_case(dtype)
    limits = torch.finfo(dtype)
    close = {"rtol": 4 * limits.eps, "atol": limits.tiny}
    inputs = log_gate.requires_grad_(), gamma.requires_grad_()
    y = bounded_log_gate(*inputs)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), log_f, **close)
    grads = torch.autograd.grad(y.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    torch.testing.assert_close(grads[0].double(), by_gate, **close)
    # A sum that the type cannot hold has no derivative for gamma that it could hold.
    held = f >= limits.tiny
    torch.testing.assert_close(grads[1].double()[held], by_gamma[held], **close)
    decay = bounded_decay(*inputs)
    torch.testing.assert_close(decay.double(), f, **close)
    grads = torch.autograd.grad(decay.sum(), inputs)
    torch.testing.assert_close(grads[0].double(), by_gate * f, **close)
    torch.testing.assert_close(grads[1].double(), by_gamma * f, **close)


def test_a_bound_of_zero_is_none():
    log_gate = torch.tensor(LOG_GATES)
    zero = torch.zeros(())
    eps = {"rtol": 2.0**-22, "atol": 0.0}
    torch.testing.assert_close(bounded_log_gate(log_gate, zero), log_gate, **eps)
    assert bounded_log_gate(log_gate, None) is log_gate
    torch.testing.assert_close(bounded_decay(log_gate, zero), log_gate.exp(), **eps)


def test_gates_next_to_one_keep_their_digits_over_many_steps():
    """Sums of log f and products of f over 10^5 open gates, and gates that are open to the last
    digit, which lose nothing at all."""
    torch.manual_seed(0)
    gamma = torch.tensor([0.1, 0.3, 0.45])  # at 0.7 naive's roundings even out on some CPUs
    log_gate = F.logsigmoid(12 + torch.randn(100_000, 3))
    exact = torch.log1p(torch.expm1(log_gate.double()) * (1 - gamma.double())).sum(0)
    total = bounded_log_gate(log_gate, gamma).double().sum(0)
    torch.testing.assert_close(total, exact, rtol=1e-7, atol=0.0)

    def errors(f: Tensor) -> Tensor:
        return (f.double().log().sum(0) - exact).abs()

    mine, naive = bounded_decay(log_gate, gamma), gamma + (1 - gamma) * log_gate.exp()
    assert errors(mine).max() < 1e-5
    assert errors(naive).min() > 5e-5
    never = torch.zeros(3)
    assert not bounded_log_gate(never, gamma).any()
    assert (bounded_decay(never, gamma) == 1).all()


# Modules

DIM = 6
BOUND = {"lower_bound": True}
HEADS = {"num_heads": 2}
KEYS = {**HEADS, "key_dim": 4}
MAKERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "gla": (GatedLinearAttention, KEYS, "key_dim=4"),
    "gla-scalar": (GatedLinearAttention, {**KEYS, "gate": "scalar"}, "num_heads=2"),
    "fox": (ForgettingAttention, HEADS, "num_heads=2"),
    "fox-independent": (ForgettingAttention, {**HEADS, "gate": "independent"}, "num_heads=2"),
    "fox-fixed": (ForgettingAttention, {**HEADS, "gate": "fixed"}, "num_heads=2"),
    "lru": (LRU, {"gate": "data", "state": 5}, "state=5"),
}
every = pytest.mark.parametrize("name", list(MAKERS))
with_data = pytest.mark.parametrize("name", ["gla", "gla-scalar", "fox", "lru"])


def make(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    cls, options, _ = MAKERS[name]
    torch.manual_seed(0)
    return cls(DIM, **options, **more, dtype=dtype)


def gates_of(mixer: nn.Module, x: Tensor, gamma: Tensor | None) -> Tensor:
    if isinstance(mixer, ForgettingAttention):
        return mixer.log_gate(x, gamma).exp()
    return mixer.forget_gate(x, gamma)


@every
def test_without_a_gamma_nothing_changes(name):
    plain, bounded = make(name), make(name, lower_bound=True)
    assert not plain.takes_gamma
    assert bounded.takes_gamma
    for mine, other in zip(plain.parameters(), bounded.parameters(), strict=True):
        assert torch.equal(mine, other)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    assert torch.equal(plain(x)[0], bounded(x)[0])
    assert "lower_bound=True" in repr(bounded)


@every
def test_the_gate_that_is_shown_is_the_bounded_one(name):
    mixer = make(name, lower_bound=True)
    gamma = torch.linspace(0.1, 0.9, mixer.gamma_size, dtype=torch.float64)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    gates = gates_of(mixer, x, gamma)
    torch.testing.assert_close(gates, gamma + (1 - gamma) * gates_of(mixer, x, None))


@every
def test_bounds_keep_their_digits_in_a_half_precision_module(name):
    mixer = make(name, torch.bfloat16, lower_bound=True)
    gamma = torch.full((mixer.gamma_size,), 1 - 2.0**-20)
    x = torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    gates = gates_of(mixer, x, gamma)
    assert gates.dtype == torch.float32
    assert (gates >= gamma).all()
    assert (gates < 1).any()
    assert mixer(x, gamma=gamma)[0].dtype == torch.bfloat16


def shut_(mixer: nn.Module) -> None:
    """Gates that are nothing but their bound, under any noise."""
    with torch.no_grad():
        if isinstance(mixer, LRU):
            mixer.nu_log.fill_(10.0)
            mixer.gate_proj.bias.fill_(1e3)
        else:
            own = getattr(mixer, "gate_bias", None)
            (mixer.gate_proj.bias if own is None else own).fill_(-1e4)


@with_data
def test_noise_does_not_reach_below_the_bound(name):
    mixer = make(name, lower_bound=True, gumbel_gate=0.9)
    gamma = torch.linspace(0.1, 0.9, mixer.gamma_size, dtype=torch.float64)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    noisy, quiet = mixer(x, gamma=gamma)[0], mixer.eval()(x, gamma=gamma)[0]
    assert not torch.allclose(noisy, quiet)
    shut_(mixer)
    torch.testing.assert_close(mixer.train()(x, gamma=gamma)[0], mixer.eval()(x, gamma=gamma)[0])


@with_data
@pytest.mark.parametrize("logits", [-1e4, -200.0, 200.0, 1e4])
def test_gradients_are_finite_at_any_gate(name, logits):
    mixer = make(name, torch.float32, lower_bound=True)
    bias = getattr(mixer, "gate_bias", None)
    with torch.no_grad():
        (mixer.gate_proj.bias if bias is None else bias).fill_(logits)
    gamma = torch.linspace(0.0, 1 - 2.0**-24, mixer.gamma_size).requires_grad_()
    x = torch.randn(2, 9, DIM, requires_grad=True)
    y, _ = mixer(x, gamma=gamma)
    y.square().sum().backward()
    for t in (y, x.grad, gamma.grad, *(p.grad for p in mixer.parameters())):
        assert t.isfinite().all()


@every
def test_bounds_that_do_not_fit_are_refused(name):
    plain, bounded, width = make(name), make(name, lower_bound=True), MAKERS[name][2]
    owner = type(plain).__name__
    x = torch.zeros(2, 3, DIM, dtype=torch.float64)
    one, wrong = torch.zeros(plain.gamma_size), torch.zeros(3)
    for mixer, gamma, said in (
        (plain, one, "expected None with lower_bound=False; got a tensor"),
        (bounded, wrong, rf"expected \[{width}\]; got \(3,\)"),
        (bounded, one[None], rf"expected \[{width}\]; got \(1, {plain.gamma_size}\)"),
    ):
        for use in (
            lambda m, g: m(x, gamma=g),
            lambda m, g: m.step(x[:, 0], m.init_state(2), g),
            lambda m, g: gates_of(m, x, g),
        ):
            with pytest.raises(ValueError, match=f"^{owner}: gamma: {said}"):
                use(mixer, gamma)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: ForgettingAttention(8, gate="none", lower_bound=True),
            "ForgettingAttention: lower_bound: expected False with gate='none', .*; got True",
        ),
        (
            lambda: LRU(8, lower_bound=True),
            "LRU: lower_bound: expected False unless gate='data', whose modulus .*; got True",
        ),
        (
            lambda: Attention(8, 2)(torch.zeros(1, 2, 8), gamma=torch.zeros(2)),
            "Attention: gamma: expected None, since it has no lower bound",
        ),
    ],
)
def test_gates_that_are_not_there_have_no_bound(use, message):
    with pytest.raises(ValueError, match=message):
        use()


SWITCHED: list[tuple[type, dict[str, Any]]] = [
    (GatedLinearAttention, KEYS),
    (ForgettingAttention, HEADS),
    (ForgettingAttention, {**HEADS, "gate": "none"}),
    (LRU, {"gate": "data"}),
    (LRU, {}),
    (GatedLinearRNN, {}),
    (GatedRNN, {}),
]


@pytest.mark.parametrize(("cls", "options"), SWITCHED)
@pytest.mark.parametrize("given", ["yes", 1, None])
def test_lower_bound_is_a_switch(cls, options, given):
    said = f"^{cls.__name__}: lower_bound: expected True or False; got {given!r}"
    with pytest.raises(ValueError, match=said):
        cls(DIM, **options, lower_bound=given)


# What probes of models call

PROBED: dict[str, tuple[type, dict[str, Any]]] = {
    "hgrn": (HGRU, {}),
    "hgrn2": (HGRU2, HEADS),
    "gla": (GatedLinearAttention, {**KEYS, **BOUND}),
    "fox": (ForgettingAttention, {**HEADS, **BOUND}),
    "lru": (LRU, {**BOUND, "gate": "data"}),
    "gated-linear-rnn": (GatedLinearRNN, BOUND),
    "gated-rnn": (GatedRNN, BOUND),
}


@pytest.mark.parametrize("name", list(PROBED))
@torch.no_grad()
def test_every_data_dependent_gate_is_read_by_one_call(name):
    cls, options = PROBED[name]
    assert mixers()[name] is cls
    called = list(inspect.signature(cls.forget_gate).parameters)
    assert called == ["self", "x", "gamma", "cu_seqlens"]
    torch.manual_seed(0)
    mixer = cls(DIM, **options, dtype=torch.bfloat16)
    assert mixer.has_data_gate
    x = torch.randn(1, 4, DIM, dtype=torch.bfloat16)
    gamma = torch.linspace(0.1, 0.9, mixer.gamma_size)
    # Sequences of one token: the gate that reads the state reads none.
    offsets = torch.arange(5)
    free, gates = (mixer.forget_gate(x, bound, offsets) for bound in (None, gamma))
    assert gates.dtype == torch.float32
    assert gates.shape == (1, 4, mixer.gamma_size)
    assert ((free > 0) & (free < 1)).all()
    torch.testing.assert_close(gates, gamma + (1 - gamma) * free)
    with pytest.raises(ValueError, match=f"^{cls.__name__}: gamma: expected "):
        mixer.forget_gate(x, gamma[:1])


def test_other_gates_are_not():
    without = [
        HGRU(DIM, forget_gate="bound"),
        ForgettingAttention(DIM, 2, gate="independent"),
        LRU(DIM),
    ]
    assert not any(mixer.has_data_gate for mixer in without)


# Models

MODELS: dict[str, tuple[Any, dict[str, Any], list[int | None]]] = {
    "gla": ("gla", {"mixer_options": {**KEYS, **BOUND}}, [4, 4]),
    "gla-scalar": ("gla", {"mixer_options": {**KEYS, **BOUND, "gate": "scalar"}}, [2, 2]),
    "fox": ("fox", {"mixer_options": {**HEADS, **BOUND}}, [2, 2]),
    "fox-pro": ("fox-pro", {"mixer_options": {**HEADS, **BOUND, "gate": "independent"}}, [2, 2]),
    "lru": ("lru", {"mixer_options": {**BOUND, "gate": "data", "state": 4}}, [4, 4]),
    "one-of-two": ("gla", {"mixer_options": KEYS, "layer_options": [{}, BOUND]}, [None, 4]),
    "two-kinds": (
        ["lru", "fox"],
        {"layer_options": [{**BOUND, "gate": "data", "state": 2}, {**HEADS, **BOUND}]},
        [2, 2],
    ),
    "beside-others": (
        ["transformer", "lru"],
        {"layer_options": [{"num_heads": 1}, {**BOUND, "gate": "data"}]},
        [None, 6],
    ),
    "turned-off": ("fox", {"mixer_options": {**HEADS, **BOUND}, "lower_bound": "none"}, [None] * 2),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name, tmp_path):
    """Training, generation and files of models whose layers have bounds, or some of them."""
    mixer, options, widths = MODELS[name]
    model = check_models(mixer, **options)
    assert [None if row is None else row.numel() for row in model.gammas()] == widths
    assert (model.lower_bounds is None) == (name == "turned-off")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    model.save(tmp_path)
    loaded = CausalLM.load(tmp_path)
    ids = torch.randint(9, (2, 7))
    assert loaded.config == model.config
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("name", ["gla", "fox", "lru", "beside-others"])
def test_a_models_bounds_reach_its_gates(name):
    """The last layer's bounds at one: what the gates let go of is gone."""
    mixer, options, _ = MODELS[name]
    torch.manual_seed(0)
    model = CausalLM(LMConfig(mixer=mixer, vocab_size=9, dim=6, layers=2, **options))
    ids = torch.randint(9, (2, 40))
    before = model(ids).logits
    with torch.no_grad():
        model.lower_bounds.logits.copy_(torch.tensor([[-40.0], [40.0]]).expand(2, -1))
    gates = forget_gates(model, ids)[1]
    assert gates.min() > 1 - 2.0**-22
    assert not torch.allclose(model(ids).logits, before, rtol=1e-3, atol=1e-3)


def test_bounds_of_different_widths_do_not_share_a_model():
    config = LMConfig(
        mixer=["fox", "lru"],
        layers=2,
        dim=6,
        vocab_size=9,
        layer_options=[{**HEADS, **BOUND}, {**BOUND, "gate": "data"}],
    )
    with pytest.raises(ValueError, match="bounds have one width; got widths 2, 6"):
        CausalLM(config, device="meta")
