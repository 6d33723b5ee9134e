"""`tidegate.nn.GatedRNN` against equations 5 to 7, written once more as a loop."""

from __future__ import annotations

import numpy as np
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

from tidegate.models import CausalLM, LMConfig
from tidegate.nn import GatedLinearRNN, GatedRNN
from tidegate.training import forget_gates, gate_parts

DIM = 7


def oracle(
    mixer: GatedRNN,
    x: Tensor,
    h: Tensor | None = None,
    noise: Tensor | None = None,
    tau: float = 1,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state and the gate's logits, a token at a time, in float64."""
    w, b = mixer.in_proj.weight.double(), mixer.in_proj.bias.double()
    w_zh = mixer.state_proj.weight.double()
    x = x.double()
    h = x.new_zeros(x.size(0), DIM) if h is None else h.double()
    out, logits = [], []
    for t in range(x.size(1)):
        a = x[:, t] @ w[:DIM].T + b[:DIM] + h @ w_zh.T
        if noise is not None:
            a = (a + noise[:, t]) / tau
        shut = torch.sigmoid(-a) if gamma is None else (1 - gamma) * torch.sigmoid(-a)
        h = (1 - shut) * h + shut * (x[:, t] @ w[DIM:].T + b[DIM:])
        out.append(h)
        logits.append(a)
    empty = x.new_zeros(x.size(0), 0, DIM)
    return torch.stack(out, 1) if out else empty, h, torch.stack(logits, 1) if out else empty


def make(dtype: torch.dtype = torch.float64, device: str = "cpu", **options) -> GatedRNN:
    torch.manual_seed(0)
    return GatedRNN(DIM, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("time", [0, 1, 2, 3, 17, 65])
@pytest.mark.parametrize("shift", [0.0, 12.0, -12.0, 40.0])
def test_values_and_gradients(time, shift, bounded, device):
    """shift moves the gates to their extremes: half, open, shut, open to the last digit."""
    mixer = make(device=device, lower_bound=bounded)
    with torch.no_grad():
        mixer.in_proj.bias[:DIM] += shift
    x = torch.randn(2, time, DIM, dtype=torch.float64).to(device).requires_grad_()
    h0 = torch.randn(2, DIM, dtype=torch.float64).to(device).requires_grad_()
    targets = [x, h0, *mixer.parameters()]
    gamma = gamma_of(mixer)
    if gamma is not None:
        gamma = gamma.to(device).requires_grad_()
        targets.append(gamma)
    check_values_and_gradients(
        lambda: mixer(x, h0, gamma=gamma),
        lambda: oracle(mixer, x, h0, gamma=gamma)[:2],
        targets,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, device):
    mixer = make(dtype, device)
    x = torch.randn(2, 33, DIM).to(device, dtype)
    y, state = mixer(x)
    wanted, final, _ = oracle(mixer, x)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), wanted, **close)
    torch.testing.assert_close(state.double(), final, **close)


def test_steps_and_splits(device):
    check_steps_and_splits(make(device=device))
    bounded = make(device=device, lower_bound=True)
    check_steps_and_splits(bounded, gamma_of(bounded).to(device))


def test_packed_sequences_do_not_touch(device):
    check_packed_sequences_do_not_touch(make(device=device))
    bounded = make(device=device, lower_bound=True)
    check_packed_sequences_do_not_touch(bounded, gamma_of(bounded).to(device))


@torch.no_grad()
def test_noise_and_tau_are_around_all_that_the_gate_reads():
    """The lower bound is around the noise and tau."""
    mixer = make(gumbel_gate=0.5, lower_bound=True)
    x, gamma = torch.randn(2, 12, DIM, dtype=torch.float64), gamma_of(mixer)
    torch.manual_seed(3)
    y, final = mixer(x, gamma=gamma)
    torch.manual_seed(3)
    u = torch.rand(2, 12, DIM).clamp(min=2.0**-25).double()
    expected = oracle(mixer, x, noise=u.logit(), tau=0.5, gamma=gamma)
    torch.testing.assert_close((y, final), expected[:2], rtol=1e-5, atol=1e-6)
    mixer.eval()
    torch.testing.assert_close(mixer(x, gamma=gamma), oracle(mixer, x, gamma=gamma)[:2])


@torch.no_grad()
def test_logits_of_the_gate_and_their_parts(device):
    mixer = make(device=device)
    x = torch.randn(2, 12, DIM, dtype=torch.float64).to(device)
    h, _, wanted = oracle(mixer, x)
    logits, from_x = mixer.gate_parts(x)
    torch.testing.assert_close(logits, wanted)
    torch.testing.assert_close(mixer.gate_logits(x), wanted)
    torch.testing.assert_close(from_x, mixer.in_proj(x)[..., :DIM])
    from_state = torch.nn.functional.pad(mixer.state_proj(h[:, :-1]), (0, 0, 1, 0))
    torch.testing.assert_close(logits - from_x, from_state)
    bounded = make(device=device, lower_bound=True)
    gamma = gamma_of(bounded).to(device)
    torch.testing.assert_close(
        bounded.gate_logits(x, gamma=gamma), oracle(bounded, x, gamma=gamma)[2]
    )


@torch.no_grad()
def test_logits_of_packed_sequences_are_those_of_each(device):
    mixer = make(device=device)
    x = torch.randn(1, 9, DIM, dtype=torch.float64).to(device)
    packed = mixer.gate_parts(x, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    alone = [mixer.gate_parts(part) for part in (x[:, :4], x[:, 4:])]
    for got, *wanted in zip(packed, *alone, strict=True):
        torch.testing.assert_close(got, torch.cat(wanted, 1))
    assert not torch.allclose(packed[0], mixer.gate_logits(x))  # the second begins anew


@torch.no_grad()
def test_without_the_state_in_the_gate_it_is_the_linear_one():
    mixer = make(lower_bound=True)
    linear = GatedLinearRNN(DIM, lower_bound=True, dtype=torch.float64)
    linear.load_state_dict({k: v for k, v in mixer.state_dict().items() if "in_proj" in k})
    mixer.state_proj.weight.zero_()
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    gamma = gamma_of(mixer)
    torch.testing.assert_close(mixer(x, gamma=gamma), linear(x, gamma=gamma))


def test_models_by_name():
    model = check_models("gated-rnn")
    assert model.lower_bounds is None
    assert all(p.grad.any() for p in model.parameters())
    bounded = check_models("gated-rnn", mixer_options={"lower_bound": True})
    assert bounded.lower_bounds is not None
    assert all(p.grad.any() for p in bounded.parameters())


@torch.no_grad()
def test_what_plots_of_gates_show_is_bounded():
    config = LMConfig(
        mixer="gated-rnn",
        mixer_options={"lower_bound": True},
        vocab_size=11,
        dim=8,
        layers=2,
        lower_bound="decreasing",
    )
    model = CausalLM(config)
    ids = torch.randint(0, 11, (2, 9))
    low, high = forget_gates(model, ids)[1].min(), forget_gates(model, ids)[0].min()
    assert low < 0.5 < high  # the last layer has no bound, the first one half
    x = model.blocks[0].mixer_norm(model._embed(ids))
    logits = model.blocks[0].mixer.gate_logits(x, gamma=model.gammas()[0])
    from_input, from_state = gate_parts(model, ids)[0]
    np.testing.assert_allclose(from_input + from_state, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m(torch.zeros(2, 3, 5)), r"GatedRNN: x: expected \[B, T, dim=7\]; got"),
        (lambda m: m(torch.zeros(2, DIM)), r"GatedRNN: x: expected \[B, T, dim=7\]; got"),
        (
            lambda m: m.step(torch.zeros(2, 3, DIM), m.init_state(2)),
            r"GatedRNN.step: x: expected \[B, dim=7\]",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), torch.zeros(2, 6)),
            r"GatedRNN: state: expected \[2, 7\]; got \(2, 6\)",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), gamma=torch.zeros(DIM)),
            "GatedRNN: gamma: expected None with lower_bound=False; got a tensor",
        ),
        (
            lambda m: m.gate_logits(torch.zeros(2, 3, DIM), gamma=torch.zeros(DIM)),
            "GatedRNN: gamma: expected None with lower_bound=False; got a tensor",
        ),
        (
            lambda _: make(lower_bound=True)(
                torch.zeros(2, 3, DIM, dtype=torch.float64), gamma=torch.zeros(3)
            ),
            r"GatedRNN: gamma: expected \[dim=7\]; got \(3,\)",
        ),
    ],
)
def test_wrong_input_is_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use(make(torch.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "GatedRNN: dim"),
        ({"dim": 4, "gate_init": "UGI"}, "GatedRNN: gate_init: expected 'standard'"),
        ({"dim": 4, "gumbel_gate": 0.0}, "GatedRNN: gumbel_gate: expected a number above 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GatedRNN(**options)
