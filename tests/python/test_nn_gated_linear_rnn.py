"""`tidegate.nn.GatedLinearRNN` against equations 2 to 4, written once more as a loop."""

from __future__ import annotations

import pytest
import torch
from support.mixer_checks import (
    check_models,
    check_packed_sequences_do_not_touch,
    check_steps_and_splits,
    check_values_and_gradients,
)
from torch import Tensor

from tidegate.models import CausalLM, LMConfig
from tidegate.nn import GatedLinearRNN

DIM = 7


def oracle(
    mixer: GatedLinearRNN, x: Tensor, gamma: Tensor | None = None, h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = z_t h_{t-1} + (1 - z_t) (W_x x_t + b_x), a token at a time, in float64."""
    w, b = mixer.in_proj.weight.double(), mixer.in_proj.bias.double()
    x = x.double()
    h = x.new_zeros(x.size(0), mixer.dim) if h is None else h.double()
    out = []
    for t in range(x.size(1)):
        s = x[:, t] @ w[: mixer.dim].T + b[: mixer.dim]
        keeps, enters = torch.sigmoid(s), torch.sigmoid(-s)
        if gamma is not None:
            keeps, enters = gamma + (1 - gamma) * keeps, (1 - gamma) * enters
        h = keeps * h + enters * (x[:, t] @ w[mixer.dim :].T + b[mixer.dim :])
        out.append(h)
    return (torch.stack(out, 1) if out else x.new_zeros(x.size(0), 0, mixer.dim)), h


def make(dtype: torch.dtype = torch.float64, device: str = "cpu", **options) -> GatedLinearRNN:
    torch.manual_seed(0)
    return GatedLinearRNN(DIM, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("time", [0, 1, 2, 3, 17, 65])
@pytest.mark.parametrize("shift", [0.0, 12.0, -12.0, 40.0])
@pytest.mark.parametrize("bounded", [False, True])
def test_values_and_gradients(time, shift, bounded, device):
    """shift moves the gates to their extremes: half, open, shut, open to the last digit."""
    mixer = make(device=device, lower_bound=bounded)
    with torch.no_grad():
        mixer.in_proj.bias[:DIM] += shift
    x = torch.randn(2, time, DIM, dtype=torch.float64).to(device).requires_grad_()
    h0 = torch.randn(2, DIM, dtype=torch.float64).to(device).requires_grad_()
    gamma = None
    if bounded:
        gamma = torch.linspace(0.0, 0.95, DIM, dtype=torch.float64, device=device)
        gamma.requires_grad_()
    targets = [x, h0, *mixer.parameters(), *([gamma] if bounded else [])]
    check_values_and_gradients(
        lambda: mixer(x, h0, gamma=gamma), lambda: oracle(mixer, x, gamma, h0), targets
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, device):
    mixer = make(dtype, device)
    x = torch.randn(2, 33, DIM).to(device, dtype)
    y, state = mixer(x)
    wanted, final = oracle(mixer, x)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), wanted, **close)
    torch.testing.assert_close(state.double(), final, **close)


def test_steps_and_splits(device):
    gamma = torch.full((DIM,), 0.3, dtype=torch.float64, device=device)
    check_steps_and_splits(make(device=device, lower_bound=True), gamma)


def test_packed_sequences_do_not_touch(device):
    check_packed_sequences_do_not_touch(make(device=device))


def test_it_has_the_size_of_the_equations_and_no_bound_of_its_own():
    mixer = make()
    assert [tuple(p.shape) for p in mixer.parameters()] == [(2 * DIM, DIM), (2 * DIM,)]
    model = CausalLM(LMConfig(mixer="gated-linear-rnn", vocab_size=9, dim=6, layers=2))
    assert model.lower_bounds is None
    bounded = LMConfig(
        mixer="gated-linear-rnn", vocab_size=9, dim=6, layers=2, mixer_options={"lower_bound": True}
    )
    assert CausalLM(bounded).lower_bounds.logits.shape == (2, 6)


def test_models_by_name():
    check_models("gated-linear-rnn")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m(torch.zeros(2, 3, 5)), r"GatedLinearRNN: x: expected \[B, T, dim=7\]; got"),
        (lambda m: m(torch.zeros(2, DIM)), r"GatedLinearRNN: x: expected \[B, T, dim=7\]; got"),
        (
            lambda m: m.step(torch.zeros(2, 3, DIM), m.init_state(2)),
            r"GatedLinearRNN.step: x: expected \[B, dim=7\]",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), torch.zeros(2, 6)),
            r"GatedLinearRNN: state: expected \[2, 7\]; got \(2, 6\)",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), gamma=torch.zeros(DIM)),
            "gamma: expected None with lower_bound=False; got a tensor",
        ),
    ],
)
def test_wrong_input_is_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use(make(torch.float32))


def test_a_wrong_bound_is_refused():
    mixer = make(torch.float32, lower_bound=True)
    with pytest.raises(ValueError, match=r"gamma: expected \[dim=7\]; got \(3,\)"):
        mixer(torch.zeros(2, 3, DIM), gamma=torch.zeros(3))
