"""Initialisers of gate biases, the options gate_init and gumbel_gate: distributions by
Kolmogorov-Smirnov against their closed forms, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tidegate
from tidegate.nn import (
    HGRU,
    HGRU2,
    LRU,
    ForgettingAttention,
    GatedLinearAttention,
    GatedLinearRNN,
    GatedRNN,
    init,
)
from tidegate.nn._gate_init import gumbel_gate, parse_gate_init

COUNT = 40_000
D = 50


def spread(u: Tensor) -> Tensor:
    """Distribution function of U(1/D, 1 - 1/D)."""
    return (u - 1 / D) / (1 - 2 / D)


# Each initialiser, what makes it, and its distribution function.
INITIALISERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "standard": (lambda p: init.standard_(p, D), lambda b: (b * math.sqrt(D) + 1) / 2),
    "chrono": (lambda p: init.chrono_(p, 1020), lambda b: (b.exp() - 1) / 1018),
    "ugi": (lambda p: init.ugi_(p, D), lambda b: spread(b.sigmoid())),
    "gumbel-softmax": (
        lambda p: init.gumbel_softmax_(p, D),
        lambda b: spread((0.5 * b).sigmoid()),
    ),
    "gumbel-softmax-alpha": (
        lambda p: init.gumbel_softmax_(p, D, alpha=3.0, tau=0.2),
        lambda b: spread((0.2 * b - 3.0).sigmoid()),
    ),
}


def distance(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """The Kolmogorov-Smirnov statistic of a sample, times the root of its size: 1.95 is exceeded
    once in a thousand samples."""
    x = sample.double().sort().values
    n = x.numel()
    f = cdf(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = torch.maximum((steps[1:] - f).abs(), (f - steps[:-1]).abs()).max()
    return float(gap) * math.sqrt(n)


@pytest.mark.parametrize("name", INITIALISERS)
def test_distributions(name):
    draw, cdf = INITIALISERS[name]
    torch.manual_seed(11)
    p = torch.empty(COUNT)
    assert draw(p) is p
    assert distance(p, cdf) < 1.95
    assert float(cdf(p.double()).min()) >= -1e-6
    assert float(cdf(p.double()).max()) <= 1 + 1e-6


def test_the_statistic_tells_the_distributions_apart():
    """Each initialiser's sample is refused by every other one's distribution function."""
    for name, (draw, _) in INITIALISERS.items():
        p = draw(torch.empty(COUNT))
        for other, (_, cdf) in INITIALISERS.items():
            if other != name:
                assert distance(p, lambda b, cdf=cdf: cdf(b).clamp(0, 1)) > 10, (name, other)


def test_alpha_zero_tau_one_is_ugi():
    drawn = []
    for draw in (init.ugi_, lambda p: init.gumbel_softmax_(p, alpha=0.0, tau=1.0)):
        torch.manual_seed(5)
        drawn.append(draw(torch.empty(300)))
    assert torch.equal(*drawn)
    torch.manual_seed(5)
    u = torch.empty(300).uniform_(1 / 300, 1 - 1 / 300).double()
    torch.testing.assert_close(drawn[0].double(), u.logit(), rtol=1e-6, atol=1e-7)


def test_bounds_come_from_the_elements_where_no_d_is_named():
    p = init.ugi_(torch.empty(4))
    assert float(p.sigmoid().min()) >= 0.25 - 1e-6
    assert float(p.sigmoid().max()) <= 0.75 + 1e-6
    assert float(init.standard_(torch.empty(400)).abs().max()) <= 1 / 20


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda p: tidegate.ops.init_long_(p, 0.0, 3.0),
            "init_long_: t_min and t_max must be above 0, got 0 and 3",
        ),
        (lambda p: init.chrono_(p, 1), "init_chrono_: t_max must be at least 2, got 1"),
        (lambda p: init.ugi_(p, 1), "init_gumbel_softmax_: d must be at least 2, got 1"),
        (
            lambda p: init.gumbel_softmax_(p, tau=0.0),
            "init_gumbel_softmax_: tau must be above 0, got 0",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(use, message):
    with pytest.raises(RuntimeError, match=message):
        use(torch.empty(8))


# gate_init


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("standard", ("standard", 2, 0.0, 0.5)),
        ("ugi", ("ugi", 2, 0.0, 1.0)),
        ("chrono:1020", ("chrono", 1020, 0.0, 0.5)),
        ("gumbel-softmax", ("gumbel-softmax", 2, 0.0, 0.5)),
        ("gumbel-softmax:-1.5:0.2", ("gumbel-softmax", 2, -1.5, 0.2)),
        ("gumbel-softmax:3:1", ("gumbel-softmax", 2, 3.0, 1.0)),
    ],
)
def test_what_the_option_means(text, meaning):
    assert parse_gate_init("HGRU", text, 8) == meaning


@pytest.mark.parametrize(
    "text",
    ["", "UGI", "chrono", "chrono:", "chrono:1", "chrono:2.5", "gumbel-softmax:1", 3, ("ugi",)]
    + ["gumbel-softmax:0:0", "gumbel-softmax:0:-1", "gumbel-softmax:1e3:1", "ugi "],
)
def test_what_the_option_does_not_take(text):
    with pytest.raises(ValueError, match=r"HGRU: gate_init: expected 'standard', 'ugi'.*got") as e:
        HGRU(4, gate_init=text)
    assert str(e.value).endswith(repr(text))


CDFS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "standard": lambda b, dim, s: (b * math.sqrt(dim) + 1) / 2,
    "chrono:500": lambda b, dim, s: (b.exp() - 1) / 498,
    "ugi": lambda b, dim, s: (b.sigmoid() - 1 / s) / (1 - 2 / s),
    "gumbel-softmax": lambda b, dim, s: ((0.5 * b).sigmoid() - 1 / s) / (1 - 2 / s),
}
OPTIONS = {
    "paper": {},
    "expand-no-output-gate": {"expand": 3, "output_gate": False},
    "theta-data-free": {"theta": "data", "input_gate": "free"},
    "fla": {"preset": "fla"},
    "fla-free": {"preset": "fla", "input_gate": "free"},
    "both-ways": {"bidirectional": True},
    "kp": {"expansion": "kp", "expand": 2},
    "kp-free-no-bias": {"expansion": "kp", "expand": 2, "input_gate": "free", "bias": False},
}


def gate_biases(mixer: HGRU) -> tuple[Tensor, Tensor | None]:
    """The biases of f and i, wherever they are: what the gates of zeros are."""
    x = torch.zeros(1, 1, mixer.dim)
    parts = mixer._project(x)
    return parts["f"].flatten(), parts["i"].flatten() if "i" in parts else None


@pytest.mark.parametrize("text", CDFS)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_the_forget_gate_starts_as_asked(name, text):
    torch.manual_seed(4)
    mixer = HGRU(600, gate_init=text, **OPTIONS[name])
    f, i = gate_biases(mixer)
    assert distance(f, lambda b: CDFS[text](b, 600, mixer.channels)) < 1.95
    if i is not None:
        assert torch.equal(i, -f)
    torch.manual_seed(4)
    plain = HGRU(600, **OPTIONS[name])
    own, other = dict(mixer.named_parameters()), dict(plain.named_parameters())
    extra = set(own) - set(other)
    assert extra == ({"gate_bias"} if mixer.in_proj.bias is None else set())
    assert torch.equal(own["in_proj.weight"], other["in_proj.weight"])
    if mixer.in_proj.bias is not None:
        changed = (own["in_proj.bias"] != other["in_proj.bias"]).sum().item()
        gates = 1 if i is None else 2
        # Some number may be drawn twice; the rows that are not gates' are the same.
        assert gates * mixer.channels - 5 <= changed <= gates * mixer.channels


@pytest.mark.parametrize("name", ["fla-free", "kp-free-no-bias", "theta-data-free"])
def test_a_gate_bias_is_trained_and_steps_as_it_mixes(name):
    torch.manual_seed(0)
    mixer = HGRU(6, gate_init="ugi", dtype=torch.float64, **OPTIONS[name])
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y, final = mixer(x)
    y.square().sum().backward()
    if mixer.gate_bias is not None:
        assert mixer.gate_bias.shape == (2 * mixer.channels,)
        assert (mixer.gate_bias.grad != 0).all()
    state = mixer.init_state(2)
    with torch.no_grad():
        steps = [mixer.step(x[:, t], state) for t in range(5)]
    torch.testing.assert_close(torch.stack(steps, 1), y)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_init": "ugi", "forget_gate": "bound"}, "gate_init: expected None unless forget_g"),
        (
            {"gumbel_gate": 0.9, "forget_gate": "none", "input_gate": "free"},
            "gumbel_gate: expected None unless forget_gate='data', .*; got 0.9",
        ),
        ({"gumbel_gate": 0.0}, "gumbel_gate: expected a number above 0; got 0.0"),
        ({"gumbel_gate": "0.5"}, "gumbel_gate: expected a number above 0; got '0.5'"),
        ({"gumbel_gate": True}, "gumbel_gate: expected a number above 0; got True"),
        ({"gumbel_gate": math.inf}, "gumbel_gate: expected a number above 0; got inf"),
    ],
)
def test_gate_options_without_a_gate_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HGRU(4, **options)


def test_too_few_channels_to_spread_are_refused():
    with pytest.raises(ValueError, match="expected 2 or more channels with 'ugi'.*got 1"):
        GatedLinearRNN(1, gate_init="ugi")
    HGRU(1, expand=2, gate_init="ugi")


# The other gated modules

GATED = {
    "hgrn2": lambda **o: HGRU2(600, 4, **o),
    "hgrn2-fla": lambda **o: HGRU2(600, 4, preset="fla", **o),
    "gla": lambda **o: GatedLinearAttention(600, 4, key_dim=600, gate_rank=25, **o),
    "gla-scalar": lambda **o: GatedLinearAttention(600, 600, key_dim=600, gate="scalar", **o),
    "lru": lambda **o: LRU(600, gate="data", **o),
    "fox": lambda **o: ForgettingAttention(600, 600, **o),
    "fox-fixed": lambda **o: ForgettingAttention(600, 600, gate="fixed", **o),
    "gated-linear-rnn": lambda **o: GatedLinearRNN(600, **o),
    "gated-rnn": lambda **o: GatedRNN(600, **o),
}
# Where one bias holds the rows of several parts: the gate's, and all rows there are.
GATE_ROWS = {
    "hgrn2": (slice(600, 1200), 1800),
    "gated-linear-rnn": (slice(0, 600), 1200),
    "gated-rnn": (slice(0, 600), 1200),
}


def kept_by(name: str, mixer: torch.nn.Module) -> tuple[Tensor, int]:
    """The bias of the logits of what the state keeps, and how many channels its gate reads."""
    if name in GATE_ROWS:
        return mixer.in_proj.bias[GATE_ROWS[name][0]], 600
    if name.startswith("gla"):
        return mixer.gate_proj.bias, mixer.gate_proj.in_features
    # s of LRU is what forgets.
    return (-mixer.gate_proj.bias if name == "lru" else mixer.gate_bias), 600


@pytest.mark.parametrize("text", CDFS)
@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_gates_of_every_module_start_as_asked(name, text):
    torch.manual_seed(4)
    mixer = GATED[name](gate_init=text)
    bias, fan_in = kept_by(name, mixer)
    assert bias.numel() == 600
    assert distance(bias, lambda b: CDFS[text](b, fan_in, 600)) < 1.95
    torch.manual_seed(4)
    plain = dict(GATED[name]().named_parameters())
    own = dict(mixer.named_parameters())
    assert set(own) - set(plain) == ({"gate_bias"} if name == "hgrn2-fla" else set())
    assert torch.equal(own["in_proj.weight"], plain["in_proj.weight"])
    if name in GATE_ROWS:
        rows, count = GATE_ROWS[name]
        other = torch.ones(count, dtype=torch.bool)
        other[rows] = False
        rest = own["in_proj.bias"][other]
        assert torch.equal(rest, plain["in_proj.bias"][other])
        assert distance(rest, lambda b: CDFS["standard"](b, 600, 600)) < 1.95


@pytest.mark.parametrize("name", ["hgrn2", "hgrn2-fla", "gla", "gla-scalar", "lru", "fox"])
def test_their_biases_are_trained_and_step_as_they_mix(name):
    small = {
        "hgrn2": HGRU2(8, 2, gate_init="chrono:9"),
        "hgrn2-fla": HGRU2(8, 2, preset="fla", gate_init="chrono:9"),
        "gla": GatedLinearAttention(8, 2, gate_init="chrono:9"),
        "gla-scalar": GatedLinearAttention(8, 2, gate="scalar", gate_init="chrono:9"),
        "lru": LRU(8, gate="data", gate_init="chrono:9"),
        "fox": ForgettingAttention(8, 2, gate_init="chrono:9"),
    }
    mixer = small[name].double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    y, _ = mixer(x)
    y.square().sum().backward()
    if name in ("hgrn2-fla", "fox"):
        bias = mixer.gate_bias
    else:
        bias = mixer.in_proj.bias if name == "hgrn2" else mixer.gate_proj.bias
    assert (bias.grad != 0).all()
    state = mixer.init_state(2, dtype=torch.float64)
    with torch.no_grad():
        steps = [mixer.step(x[:, t], state) for t in range(5)]
    torch.testing.assert_close(torch.stack(steps, 1), y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HGRU2(4, gate_init="zero"), "HGRU2: gate_init: expected 'standard', .*got 'zero'"),
        (lambda: HGRU2(4, gumbel_gate=0.0), "HGRU2: gumbel_gate: expected a number above 0; got 0"),
        (
            lambda: GatedLinearAttention(4, 1, gate="scalar", gate_init="ugi"),
            "GatedLinearAttention: gate_init: expected 2 or more channels with 'ugi'.*got 1",
        ),
        (
            lambda: LRU(4, gate_init="ugi"),
            "LRU: gate_init: expected None unless gate='data', whose logits it changes; got 'ugi'",
        ),
        (lambda: LRU(4, gumbel_gate=0.9), "LRU: gumbel_gate: expected None unless gate='data'"),
        (
            lambda: ForgettingAttention(4, 2, gate_init="UGI"),
            "ForgettingAttention: gate_init: expected 'zero', 'long:T_min:T_max' with .* 0, "
            "'standard', 'ugi', 'chrono:T_max' .*got 'UGI'",
        ),
        (
            lambda: ForgettingAttention(4, 2, gate="fixed", gumbel_gate=0.9),
            "ForgettingAttention: gumbel_gate: expected None unless gate='data'.*got 0.9",
        ),
        (
            lambda: ForgettingAttention(4, 2, gate="none", gate_init="ugi"),
            "ForgettingAttention: gate_init: expected 'zero' with gate='none'; got 'ugi'",
        ),
    ],
)
def test_their_options_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Gumbel-Gate


@pytest.mark.parametrize("tau", [0.9, 0.3])
def test_the_noise_is_logistic(tau, device):
    torch.manual_seed(8)
    f = torch.full((COUNT,), 1.5, device=device)
    noisy = gumbel_gate(f, tau)
    assert distance(noisy.cpu(), lambda z: (tau * z - 1.5).sigmoid()) < 1.95
    assert not torch.equal(noisy, gumbel_gate(f, tau))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_noise_is_finite_where_uniform_numbers_are_zero(dtype, monkeypatch):
    ends = torch.tensor([0.0, 1 - 2.0**-24])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: ends)
    noisy = gumbel_gate(torch.zeros(2, dtype=dtype), 1.0)
    assert noisy.dtype == dtype
    torch.testing.assert_close(
        noisy.double(), torch.tensor([-17.3, 16.6]).double(), rtol=0.01, atol=0
    )


NOISY = {
    "hgru": lambda **o: HGRU(8, **o),
    "gated-linear-rnn": lambda **o: GatedLinearRNN(8, **o),
    "gated-rnn": lambda **o: GatedRNN(8, **o),
    "hgru2": lambda **o: HGRU2(8, 2, **o),
    "hgru2-fla": lambda **o: HGRU2(8, 2, preset="fla", **o),
    "gla": lambda **o: GatedLinearAttention(8, 2, **o),
    "gla-scalar": lambda **o: GatedLinearAttention(8, 2, gate="scalar", **o),
    "lru": lambda **o: LRU(8, gate="data", **o),
    "fox": lambda **o: ForgettingAttention(8, 2, **o),
    "fox-pro": lambda **o: ForgettingAttention(8, 2, preset="pro", **o),
}


@pytest.mark.parametrize("make", NOISY.values(), ids=NOISY)
def test_gumbel_gate_acts_in_training_alone(make):
    torch.manual_seed(1)
    mixer = make(gumbel_gate=0.9)
    plain = make()
    plain.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 6, 8, requires_grad=True)
    first, second = mixer(x)[0], mixer(x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = mixer(x)[0]
    torch.manual_seed(3)
    assert torch.equal(again, mixer(x)[0])
    again.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all((p.grad != 0).any() for name, p in mixer.named_parameters() if "gate" in name)
    mixer.eval()
    torch.testing.assert_close(mixer(x)[0], plain(x)[0], rtol=0, atol=0)
    state = mixer.train().init_state(2)
    with torch.no_grad():
        steps = [mixer.step(x[:, t], state) for t in range(6)]
    torch.testing.assert_close(torch.stack(steps, 1), plain(x)[0])


def test_names_are_public():
    assert tidegate.nn.init is init
    assert sorted(init.__all__) == ["chrono_", "gumbel_softmax_", "standard_", "ugi_"]
