"""`tidegate.nn.RWKV4` against its equations, written once more as a loop."""

from __future__ import annotations

import math

import pytest
import torch
from support.mixer_checks import (
    check_models,
    check_packed_sequences_do_not_touch,
    check_steps_and_splits,
    check_values_and_gradients,
)
from torch import Tensor

from tidegate.models import CausalLM, LMConfig, SequenceClassifier
from tidegate.nn import RWKV4

DIM = 7


def oracle(mixer: RWKV4, x: Tensor) -> Tensor:
    """A token at a time, in float64, without a running maximum."""
    weights = mixer.in_proj.weight.double().chunk(3)
    decay, u = (-mixer.w_log.double().exp()).exp(), mixer.u.double()
    x = x.double()
    y = z = before = torch.zeros_like(x[:, 0]) if x.size(1) else None
    out = []
    for t in range(x.size(1)):
        parts = []
        for i in range(3):
            mix = 1.0 if mixer.mix is None else mixer.mix[i].double()
            parts.append((mix * x[:, t] + (1 - mix) * before) @ weights[i].T)
        r, k, v = parts
        bonus = (u + k).exp()
        o = (y + bonus * v) / (z + bonus)
        y, z = decay * y + k.exp() * v, decay * z + k.exp()
        out.append((torch.sigmoid(r) * o) @ mixer.out_proj.weight.double().T)
        before = x[:, t]
    return torch.stack(out, 1) if out else x.clone()


def make(dtype: torch.dtype = torch.float64, device: str = "cpu", **options) -> RWKV4:
    torch.manual_seed(0)
    return RWKV4(DIM, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("time", [0, 1, 2, 17, 65])
@pytest.mark.parametrize("time_shift", [False, True])
def test_values_and_gradients(time: int, time_shift: bool, device: str) -> None:
    mixer = make(device=device, time_shift=time_shift, depth=0.5)
    x = torch.randn(2, time, DIM, dtype=torch.float64).to(device).requires_grad_()
    targets = [x, *mixer.parameters()]
    check_values_and_gradients(lambda: mixer(x)[:1], lambda: (oracle(mixer, x),), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time_shift", [False, True])
def test_other_dtypes(dtype: torch.dtype, time_shift: bool, device: str) -> None:
    mixer = make(dtype, device, time_shift=time_shift)
    assert mixer.w_log.dtype == mixer.u.dtype == torch.float32
    x = torch.randn(2, 33, DIM).to(device, dtype)
    y, state = mixer(x)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), oracle(mixer, x), **close)


@pytest.mark.parametrize("time_shift", [False, True])
def test_steps_and_splits(time_shift: bool, device: str) -> None:
    mixer = make(device=device, time_shift=time_shift)
    assert mixer.init_state(3).shape == (3, 4 if time_shift else 3, DIM)

    def same(mine: Tensor, other: Tensor) -> None:
        """The means; how the sums are scaled depends on the way there."""
        torch.testing.assert_close(mine[:, 0] / mine[:, 1], other[:, 0] / other[:, 1])
        assert torch.equal(mine[:, 3:], other[:, 3:])

    check_steps_and_splits(mixer, same_state=same)


@pytest.mark.parametrize("time_shift", [False, True])
def test_packed_sequences_do_not_touch(time_shift: bool, device: str) -> None:
    check_packed_sequences_do_not_touch(make(device=device, time_shift=time_shift))


def test_time_shift_hands_gradients_to_the_token_before(device: str) -> None:
    mixer = make(device=device, time_shift=True)
    with torch.no_grad():
        mixer.mix.fill_(0.25)
    x = torch.randn(1, 6, DIM, dtype=torch.float64).to(device).requires_grad_()
    y, _ = mixer(x, cu_seqlens=torch.tensor([0, 3, 6]))
    (grad,) = torch.autograd.grad(y[:, 3].sum(), x)
    assert not grad[:, :3].any(), "across a boundary"
    assert grad[:, 3].any()


def test_how_rates_and_bonuses_start() -> None:
    mixer = RWKV4(9, depth=0.0)
    assert mixer.w_log[0] == -5.0
    assert mixer.w_log[-1] == 3.0
    torch.testing.assert_close(mixer.w_log[4].item(), -5 + 8 * 0.5**0.7)
    assert (mixer.w_log.diff() > 0).all()
    expected = [math.log(0.3) + 0.5 * (j % 3 - 1) for j in range(1, 10)]
    torch.testing.assert_close(mixer.u, torch.tensor(expected))
    last = RWKV4(9, depth=1.0, time_shift=True)
    torch.testing.assert_close(last.w_log[4].item(), -5 + 8 * 0.5**2.0)
    torch.testing.assert_close(last.mix[1], torch.ones(9))
    torch.testing.assert_close(last.mix[2], torch.full((9,), 1.3))
    first = RWKV4(4, time_shift=True)
    torch.testing.assert_close(first.mix[1], torch.tensor([0.0, 0.25, 0.5, 0.75]))
    torch.testing.assert_close(first.mix[0], first.mix[1].sqrt())
    torch.manual_seed(0)
    plain = RWKV4(2000, decay_init="uniform")
    assert not plain.u.any()
    assert -5 <= plain.w_log.min() < -4.9
    assert 2.9 < plain.w_log.max() < 3
    assert abs(plain.w_log.mean() + 1) < 0.2


def test_16_bit_modules_keep_their_rates() -> None:
    mixer = RWKV4(4).bfloat16()
    assert mixer.in_proj.weight.dtype == torch.bfloat16
    assert mixer.w_log.dtype == mixer.u.dtype == torch.float32


@pytest.mark.parametrize("time_shift", [False, True])
def test_models_by_name(time_shift: bool) -> None:
    model = check_models("rwkv4", mixer_options={"time_shift": time_shift})
    assert model.lower_bounds is None


@pytest.mark.parametrize("model", [CausalLM, SequenceClassifier])
def test_layers_of_models_know_their_depth(model) -> None:
    config = LMConfig(mixer="rwkv4", dim=9, layers=3, num_classes=2)
    for block, depth in zip(model(config).blocks, (0.0, 0.5, 1.0), strict=True):
        assert block.mixer.depth == depth
        assert torch.equal(block.mixer.w_log, RWKV4(9, depth=depth).w_log)
    beside = config.replace(mixer=["hgrn", "rwkv4", "gated-rnn", "rwkv4"], layers=4)
    assert [block.mixer.depth for block in model(beside).blocks[1::2]] == [1 / 3, 1.0]
    (alone,) = model(config.replace(layers=1)).blocks
    assert alone.mixer.depth == 0.0


def test_options_go_before_the_layers_depth() -> None:
    config = LMConfig(mixer="rwkv4", dim=4, layers=3, mixer_options={"depth": 0.25})
    assert [config.of_layer(k).mixer_options["depth"] for k in range(3)] == [0.25] * 3
    config = config.replace(mixer_options={}, layer_options=[{}, {"depth": 0.75}])
    assert [block.mixer.depth for block in CausalLM(config).blocks] == [0.0, 0.75, 1.0]
    assert config.mixer_options == {}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m(torch.zeros(2, 3, 5)), r"RWKV4: x: expected \[B, T, dim=7\]; got \(2, 3, 5\)"),
        (lambda m: m(torch.zeros(2, DIM)), r"RWKV4: x: expected \[B, T, dim=7\]; got \(2, 7\)"),
        (
            lambda m: m.step(torch.zeros(2, 3, DIM), m.init_state(2)),
            r"RWKV4.step: x: expected \[B, dim=7\]",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), torch.zeros(2, 3, 6)),
            r"RWKV4: state: expected \[2, 3, 7\]; got \(2, 3, 6\)",
        ),
        (
            lambda m: m(torch.zeros(2, 3, DIM), gamma=torch.zeros(DIM)),
            "RWKV4: gamma: expected None, since it has no lower bound; got a tensor",
        ),
        (lambda _: RWKV4(0), "RWKV4: dim: expected a positive integer; got 0"),
        (lambda _: RWKV4(3, decay_init="fast"), "decay_init: expected one of 'speed', 'uniform'"),
        (lambda _: RWKV4(3, depth=1.5), "RWKV4: depth: expected a number from 0 to 1; got 1.5"),
        (lambda _: RWKV4(3, depth="1"), "RWKV4: depth: expected a number from 0 to 1; got '1'"),
    ],
)
def test_wrong_input_is_refused(use, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(make(torch.float32))
