"""`tidegate.nn.GatedRNN` against equations 5 to 7, written once more as a loop."""

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

from tidegate.nn import GatedLinearRNN, GatedRNN

DIM = 7


def oracle(
    mixer: GatedRNN, x: Tensor, h: Tensor | None = None, noise: Tensor | None = None, tau: float = 1
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
        h = torch.sigmoid(a) * h + torch.sigmoid(-a) * (x[:, t] @ w[DIM:].T + b[DIM:])
        out.append(h)
        logits.append(a)
    empty = x.new_zeros(x.size(0), 0, DIM)
    return torch.stack(out, 1) if out else empty, h, torch.stack(logits, 1) if out else empty


def make(dtype: torch.dtype = torch.float64, device: str = "cpu", **options) -> GatedRNN:
    torch.manual_seed(0)
    return GatedRNN(DIM, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("time", [0, 1, 2, 3, 17, 65])
@pytest.mark.parametrize("shift", [0.0, 12.0, -12.0, 40.0])
def test_values_and_gradients(time, shift, device):
    """shift moves the gates to their extremes: half, open, shut, open to the last digit."""
    mixer = make(device=device)
    with torch.no_grad():
        mixer.in_proj.bias[:DIM] += shift
    x = torch.randn(2, time, DIM, dtype=torch.float64).to(device).requires_grad_()
    h0 = torch.randn(2, DIM, dtype=torch.float64).to(device).requires_grad_()
    targets = [x, h0, *mixer.parameters()]
    check_values_and_gradients(lambda: mixer(x, h0), lambda: oracle(mixer, x, h0)[:2], targets)


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


def test_packed_sequences_do_not_touch(device):
    check_packed_sequences_do_not_touch(make(device=device))


@torch.no_grad()
def test_noise_and_tau_are_around_all_that_the_gate_reads():
    mixer = make(gumbel_gate=0.5)
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    torch.manual_seed(3)
    y, final = mixer(x)
    torch.manual_seed(3)
    u = torch.rand(2, 12, DIM).clamp(min=2.0**-25).double()
    expected = oracle(mixer, x, noise=u.logit(), tau=0.5)
    torch.testing.assert_close((y, final), expected[:2], rtol=1e-5, atol=1e-6)
    mixer.eval()
    torch.testing.assert_close(mixer(x), oracle(mixer, x)[:2])


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


@torch.no_grad()
def test_logits_of_packed_sequences_are_those_of_each(device):
    mixer = make(device=device)
    x = torch.randn(1, 9, DIM, dtype=torch.float64).to(device)
    packed = mixer.gate_parts(x, torch.tensor([0, 4, 4, 9]))
    alone = [mixer.gate_parts(part) for part in (x[:, :4], x[:, 4:])]
    for got, *wanted in zip(packed, *alone, strict=True):
        torch.testing.assert_close(got, torch.cat(wanted, 1))
    assert not torch.allclose(packed[0], mixer.gate_logits(x))  # the second begins anew


@torch.no_grad()
def test_without_the_state_in_the_gate_it_is_the_linear_one():
    mixer, linear = make(), GatedLinearRNN(DIM, dtype=torch.float64)
    linear.load_state_dict({k: v for k, v in mixer.state_dict().items() if "in_proj" in k})
    mixer.state_proj.weight.zero_()
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), linear(x))


def test_models_by_name():
    model = check_models("gated-rnn")
    assert model.lower_bounds is None
    assert all(p.grad.any() for p in model.parameters())


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
            "GatedRNN: gamma: expected None; got a tensor",
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
