"""A model's `init_std` beside what the options of its mixers say about how something starts."""

from __future__ import annotations

import math

import pytest
import torch
from support.model_configs import STARTS

from tidegate.models import CausalLM, LMConfig

DIM = 64


def make(mixer: str, options: dict, init_std: float | None) -> CausalLM:
    torch.manual_seed(0)
    config = LMConfig(mixer, dim=DIM, layers=2, mixer_options=options, init_std=init_std)
    return CausalLM(config)


def gate_rows(mixer: torch.nn.Module) -> torch.Tensor:
    """The bias of the forget gate, as logits of keeping."""
    name = type(mixer).__name__
    if getattr(mixer, "gate_bias", None) is not None:
        return mixer.gate_bias.detach()[: getattr(mixer, "channels", None)]
    if name == "HGRU":
        return mixer.in_proj.bias.detach().view(-1)[mixer.state_size :][: mixer.channels]
    if name == "HGRU2":
        return mixer.in_proj.bias.detach()[DIM : 2 * DIM]
    if name in ("GatedLinearRNN", "GatedRNN"):
        return mixer.in_proj.bias.detach()[:DIM]
    bias = mixer.gate_proj.bias.detach()
    return -bias if name == "LRU" else bias


@pytest.mark.parametrize(
    ("mixer", "options"), [case for case in STARTS if "gate_init" in case[1]], ids=str
)
def test_gate_init_stays(mixer, options):
    """Gates spread alike with and without init_std: sorted, the logits of one start are
    random numbers of one distribution, whose means over 128 gates agree within a few percent."""
    means = []
    for std in (None, 0.02):
        gates = torch.cat([gate_rows(block.mixer) for block in make(mixer, options, std).blocks])
        means.append(gates.sigmoid().mean().item())
        assert gates.std() > 0.3
    assert means[1] == pytest.approx(means[0], abs=0.08)
    if "chrono:512" in options["gate_init"]:
        assert min(means) > 0.95


def test_theta_stays():
    model = make("hgrn", {"theta": "data"}, 0.02)
    for block in model.blocks:
        angles = block.mixer.in_proj.bias.detach()[-DIM:]
        expected = 10000.0 ** (-2.0 * torch.arange(DIM) / DIM)
        torch.testing.assert_close(angles, expected)


def test_biases_without_an_option_are_zero():
    mixer = make("hgrn2", {"num_heads": 2, "gate_init": "chrono:512"}, 0.02).blocks[0].mixer
    others = torch.cat([mixer.in_proj.bias[:DIM], mixer.in_proj.bias[2 * DIM :]])
    assert not others.any()
    assert not mixer.out_proj.bias.any()


@pytest.mark.parametrize(
    "options",
    [options for _, options in STARTS if "expansion" in options],
    ids=lambda options: options["expansion"],
)
def test_state_expansions_pass_something_on(options):
    """Every tensor of the expansion starts with numbers, and learns from the first step on."""
    model = make("hgrn", options, 0.02)
    ids = torch.randint(0, 256, (2, 32))
    model(ids, labels="next").loss.backward()
    for block in model.blocks:
        for name, p in block.mixer.in_proj.named_parameters():
            if name != "bias":
                assert p.std() > 0, name
                assert p.grad.abs().max() > 0, name
        spread = {"mix": options["expand"] ** -0.5, "scale": 1.0}
        for name, p in block.mixer.in_proj.named_parameters():
            if name in spread and p.numel() > 30:
                assert p.std().item() == pytest.approx(spread[name], rel=0.3)
            elif name in ("weight", "down", "up"):
                assert p.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_models_loss_starts_at_that_of_guessing():
    loss = make("hgrn", {"expansion": "lr", "expand": 4}, 0.02)(
        torch.randint(0, 256, (2, 64)), labels="next"
    ).loss
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)
