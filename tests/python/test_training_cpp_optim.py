"""C++'s Muon and masters beside Python's: the same bits from the same gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tidegate.models import CausalLM, LMConfig
from tidegate.training.masters import MasterWeights
from tidegate.training.optim import build_optimizer

# Not there, or made for another Python.
cpp = pytest.importorskip("tidegate.cpp", reason="needs the C++ bindings", exc_type=ImportError)

LAYERS = ["hgrn", "hgrn2", "gla", "lru", "rwkv4", "fox-pro", "gated-rnn", "gated-linear-rnn"]
RATES = {"lr": 1e-2, "muon_lr": 0.02, "weight_decay": 0.1}


def pair(mixer: str) -> tuple[CausalLM, object]:
    """The model in both languages, with the same parameters."""
    config = LMConfig(mixer=mixer, vocab_size=23, dim=16, layers=2, tied=mixer != "hgrn2")
    models = []
    for cls in (CausalLM, cpp.CausalLM):
        torch.manual_seed(0)
        models.append(cls(config))
    return models[0], models[1]


def draw(model: object, step: int) -> None:
    rng = torch.Generator().manual_seed(step)
    for _, p in sorted(model.named_parameters()):
        p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)


def parameters(model: object) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def assert_same(one: object, two: object) -> None:
    ours, theirs = parameters(one), parameters(two)
    assert ours.keys() == theirs.keys()
    different = [name for name, p in ours.items() if not torch.equal(p, theirs[name])]
    assert not different


@pytest.mark.parametrize("mixer", LAYERS)
def test_muon_steps_are_the_same_bits(mixer: str) -> None:
    model, twin = pair(mixer)
    ours = build_optimizer(model, "muon", **RATES)
    theirs = cpp._cpp.MuonAdamW(twin.cpp_module, **RATES)
    assert theirs.splits == ours.muon._splits
    for step in range(3):
        for m, optimizer in ((model, ours), (twin, theirs)):
            draw(m, step)
            optimizer.step()
    assert_same(model, twin)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_steps_of_masters_are_the_same_bits(name: str) -> None:
    model, twin = pair("hgrn")
    ours = MasterWeights(model, build_optimizer(model, name, **RATES))
    rates = {k: v for k, v in RATES.items() if name == "muon" or k != "muon_lr"}
    optimizer = cpp._cpp.MuonAdamW if name == "muon" else cpp._cpp.AdamW
    theirs = cpp._cpp.MasterWeights(twin.cpp_module, optimizer(twin.cpp_module, **rates))
    for step in range(3):
        for m in (model, twin):
            draw(m, step)
        norms = [masters.clip_gradients(1e9) for masters in (ours, theirs)]
        torch.testing.assert_close(*norms)
        ours.step()
        theirs.step()
        for p in (*model.parameters(), *twin.parameters()):  # float32's own masters, too
            assert p.grad is None
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16, torch.float32}
    assert_same(model, twin)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_forget_what_they_stepped_by_and_nothing_before(name: str) -> None:
    """Two backward passes around clip_gradients() add up; a weight without a gradient stays."""
    model, twin = pair("hgrn")
    ours = MasterWeights(model, build_optimizer(model, name, **RATES))
    optimizer = cpp._cpp.MuonAdamW if name == "muon" else cpp._cpp.AdamW
    rates = {k: v for k, v in RATES.items() if name == "muon" or k != "muon_lr"}
    theirs = cpp._cpp.MasterWeights(twin.cpp_module, optimizer(twin.cpp_module, **rates))
    half = (model, ours), (twin, theirs)
    for m, masters in half:
        draw(m, 0)
        masters.clip_gradients(math.inf)
        first = {key: p.grad for key, p in parameters(m).items()}
        draw(m, 0)
        for key, p in parameters(m).items():  # as backward() adds to what is there
            if first[key] is not None:
                p.grad += first[key]
        masters.step()
    assert_same(model, twin)
    alone, other = pair("hgrn")
    whole = MasterWeights(alone, build_optimizer(alone, name, **RATES))
    draw(alone, 0)
    for p in alone.parameters():
        p.grad *= 2
    whole.step()
    assert_same(model, alone)
    before = {key: p.clone() for key, p in parameters(model).items()}
    for m, masters in half:
        for p in m.parameters():
            p.grad = None
        masters.step()
    assert all(torch.equal(before[key], p) for key, p in parameters(model).items())
    assert_same(model, twin)
