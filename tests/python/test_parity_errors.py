"""Calls that do not fit: the C++ modules and the Python ones say so in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.model_configs import SMALL
from support.parity import MIXERS, cpp, refusal
from torch import Tensor

import tidegate

pytestmark = pytest.mark.usefixtures("one_thread")


def offsets_misuses() -> dict[str, Callable[[Any], Any]]:
    """Bounds of packed sequences that do not fit, for modules that read them themselves."""
    x = torch.zeros(1, 6, 4)
    wrong = {
        "short": torch.tensor([0, 3, 5]),
        "long": torch.tensor([0, 3, 7]),
        "falling": torch.tensor([0, 5, 3, 6]),
        "late": torch.tensor([1, 3, 6]),
        "float": torch.tensor([0.0, 6.0]),
        "rank": torch.tensor([[0, 6]]),
        "none": torch.tensor([], dtype=torch.int64),
        "device": torch.zeros(2, dtype=torch.int64, device="meta"),
    }
    found = {
        name: lambda m, bounds=bounds: m(x, cu_seqlens=bounds) for name, bounds in wrong.items()
    }
    found |= {
        f"{name}-state": lambda m, bounds=bounds: m(
            x, m.init_state(bounds.numel() - 1), cu_seqlens=bounds
        )
        for name, bounds in wrong.items()
        if name in ("short", "long", "falling", "late")
    }
    return found | {"batch": lambda m: m(x.view(2, 3, 4), cu_seqlens=torch.tensor([0, 3]))}


TAKES_GAMMA = {
    "HGRU": ("HGRU", {}),
    "HGRU composed": ("HGRU", {"input_gate": "free"}),
    "HGRU composed, complex": ("HGRU", {"theta": "data"}),
    "HGRU2": ("HGRU2", {"num_heads": 1}),
    "GLA": ("GatedLinearAttention", {"num_heads": 2, "gate": "scalar", "lower_bound": True}),
    "ForgettingAttention": ("ForgettingAttention", {"num_heads": 4, "lower_bound": True}),
    "LRU": ("LRU", {"gate": "data", "lower_bound": True}),
    "GatedLinearRNN": ("GatedLinearRNN", {"lower_bound": True}),
    "GatedRNN": ("GatedRNN", {"lower_bound": True}),
}


@pytest.mark.parametrize("which", TAKES_GAMMA)
def test_a_gamma_is_float32_or_of_the_modules_dtype(which):
    name, options = TAKES_GAMMA[which]
    x = torch.zeros(2, 3, 4)
    mixers = [getattr(tidegate.nn, name)(4, **options), getattr(cpp, name)(4, **options)]
    gamma = torch.zeros(mixers[0].gamma_size)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        wanted = f"{name}: gamma: expected float32; got {str(dtype).removeprefix('torch.')}"
        for mixer in mixers:
            with pytest.raises(ValueError, match=f"^{wanted}(\n|$)"):
                mixer(x, gamma=gamma.to(dtype))
    for mixer in mixers:
        with torch.autocast("cpu", torch.bfloat16):
            mixer(x, gamma=gamma.bfloat16())
        mixer.double()
        for dtype in (torch.float32, torch.float64):
            mixer(x.double(), gamma=gamma.to(dtype))
        with pytest.raises(ValueError, match="gamma: expected float32 or float64; got bfloat16"):
            mixer(x.double(), gamma=gamma.bfloat16())


def mixer_misuses() -> dict[str, tuple[str, dict, Any]]:
    x = torch.zeros(2, 3, 4)
    hgru = {
        "x-rank": ({}, lambda m: m(x[0])),
        "x-width": ({}, lambda m: m(torch.zeros(2, 3, 5))),
        "gamma-width": ({}, lambda m: m(x, gamma=torch.zeros(3))),
        "gamma-refused": (
            {"forget_gate": "none", "input_gate": "none"},
            lambda m: m(x, gamma=torch.zeros(4)),
        ),
        "gamma-missing": ({"forget_gate": "bound"}, lambda m: m(x)),
        "state-width": ({}, lambda m: m(x, torch.zeros(2, 4))),
        "state-both-ways": ({"bidirectional": True}, lambda m: m(x, torch.zeros(2, 8))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 7))),
        "step-both-ways": ({"bidirectional": True}, lambda m: m.step(x[:, 0], torch.zeros(2, 8))),
    }
    hgru2 = {
        "x-rank": ({}, lambda m: m(x[0])),
        "gamma-width": ({}, lambda m: m(x, gamma=torch.zeros(3))),
        "state-width": ({}, lambda m: m(x, torch.zeros(2, 2, 2, 4))),
        "state-both-ways": ({"bidirectional": True}, lambda m: m(x, torch.zeros(2, 2, 2, 2))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 4))),
        "init-both-ways": ({"bidirectional": True}, lambda m: m.init_state(2)),
    }
    pair = {"normalize": True, "feature_map": "relu"}
    gla = {
        "x-width": ({}, lambda m: m(x[..., :3])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(4))),
        "state-shape": ({}, lambda m: m(x, torch.zeros(2, 2, 1, 3))),
        "state-tuple": ({}, lambda m: m(x, (torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1)))),
        "state-tensor": (pair, lambda m: m(x, torch.zeros(2, 2, 1, 2))),
        "state-z": (pair, lambda m: m(x, (torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 2)))),
        "state-of-three": (pair, lambda m: m(x, (*m.init_state(2), torch.zeros(2)))),
        "step-without-a-state": (pair, lambda m: m.step(x[:, 0], None)),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
    }
    attention = {
        "x-rank": ({}, lambda m: m(x[0])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(4))),
        "rows": ({}, lambda m: m(x, m.init_state(3, capacity=5))),
        "tensors": ({}, lambda m: m(x, m.init_state(2, capacity=5)[:2])),
        "room": ({}, lambda m: m(x, m.init_state(2, capacity=2))),
        "step-room": (
            {},
            lambda m: m.requires_grad_(False).step(x[:, 0], m.init_state(2, capacity=0)),
        ),
    }
    vector = {
        "x-rank": ({}, lambda m: m(x[0])),
        "x-width": ({}, lambda m: m(x[..., :3])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(2))),
        "state-width": ({}, lambda m: m(x, m.init_state(2)[..., :2])),
        "state-rank": ({}, lambda m: m(x, torch.zeros(2))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-gamma": ({}, lambda m: m.step(x[:, 0], m.init_state(2), torch.zeros(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], m.init_state(2)[..., :2])),
    }
    shifted = {
        "state-rows": ({"time_shift": True}, lambda m: m(x, torch.zeros(2, 3, 4))),
        "step-rows": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 4, 4))),
    }
    bound = {
        "gamma-width": ({"lower_bound": True}, lambda m: m(x, gamma=torch.zeros(3))),
        "gamma-step": (
            {"lower_bound": True},
            lambda m: m.step(x[:, 0], m.init_state(2), torch.zeros(3)),
        ),
    }
    gated = {
        name: ({"gate": "data", **options}, use)
        for name, (options, use) in (bound | {"gamma-off": ({}, vector["gamma"][1])}).items()
    }
    attention |= {f"offsets-{name}": ({}, use) for name, use in offsets_misuses().items()}
    shifted |= {
        f"offsets-{name}": ({"time_shift": True}, use) for name, use in offsets_misuses().items()
    }
    everywhere = {
        "double": ({}, lambda m: m(x.double())),
        "half": ({}, lambda m: m(x.half())),
        "integers": ({}, lambda m: m(x.long())),
        "double-step": ({}, lambda m: m.step(x[:, 0].double(), m.init_state(2))),
        "init-batch": ({}, lambda m: m.init_state(-1)),
        "init-capacity": ({}, lambda m: m.init_state(2, capacity=-1)),
        "expanded-step": ({}, lambda m: m.step(x[:, 0], expanded(m.init_state(2, capacity=3)))),
    }
    cases = {
        "HGRU": hgru,
        "HGRU2": hgru2,
        "GatedLinearAttention": gla | bound,
        "Attention": attention,
        "ForgettingAttention": attention | bound,
        "GatedLinearRNN": vector | bound,
        "GatedRNN": vector | bound,
        "LRU": vector | gated,
        "SLRU": vector,
        "RWKV4": vector | shifted,
    }
    assert sorted(cases) == sorted(MIXERS)
    with_heads = ("HGRU2", "GatedLinearAttention", "Attention", "ForgettingAttention")
    return {
        f"{name}-{case}": (name, ({"num_heads": 2} if name in with_heads else {}) | options, use)
        for name, found in cases.items()
        for case, (options, use) in (found | everywhere).items()
    }


@pytest.mark.parametrize("case", list(mixer_misuses()))
def test_mixer_errors_read_the_same(case):
    name, options, use = mixer_misuses()[case]
    native, twin = getattr(tidegate.nn, name)(4, **options), getattr(cpp, name)(4, **options)
    assert refusal(lambda: use(native)) == refusal(lambda: use(twin))


def expanded(state: Any) -> Any:
    """The state with all sequences in the memory of the first one."""
    if isinstance(state, Tensor):
        return state[:1].expand_as(state)
    parts = [part[:1].expand_as(part) for part in state[:-1]]
    return tuple(parts) + (state[-1],)


def model_misuses() -> dict[str, tuple[str, Any]]:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    varied = torch.arange(6).view(2, 3)
    return {
        "ids-rank": ("CausalLM", lambda m: m(ids[0])),
        "labels-shape": ("CausalLM", lambda m: m(ids, ids[:1])),
        "labels-name": ("CausalLM", lambda m: m(ids, "previous")),
        "ids-high": ("CausalLM", lambda m: m(ids + 11)),
        "ids-low": ("CausalLM", lambda m: m(ids - 1, "next")),
        "ids-float": ("CausalLM", lambda m: m(ids.float())),
        "ids-of-a-step": ("CausalLM", lambda m: m.step(ids, m.init_state(2))),
        "ids-of-a-prefill": ("CausalLM", lambda m: m.prefill(ids + 11)),
        "ids-to-generate": ("CausalLM", lambda m: m.generate(ids + 11, 1)),
        "ids-to-classify": ("SequenceClassifier", lambda m: m(ids + 11)),
        "labels-high": ("CausalLM", lambda m: m(ids, ids + 11)),
        "labels-low": ("CausalLM", lambda m: m(ids, ids - 5)),
        "labels-float": ("CausalLM", lambda m: m(ids, ids.float())),
        "labels-own": ("CausalLM", lambda m: m(varied, varied)),
        "labels-equal": ("CausalLM", lambda m: m(varied, varied.clone())),
        "positions-high": ("CausalLM", lambda m: m.logits_at(ids, ids + 3)),
        "positions-float": ("CausalLM", lambda m: m.logits_at(ids, ids.float())),
        "classes": ("SequenceClassifier", lambda m: m(ids, torch.tensor([0, 5]))),
        "classes-count": ("SequenceClassifier", lambda m: m(ids, torch.tensor([0]))),
        "classes-of-images": (
            "ImageClassifier",
            lambda m: m(torch.zeros(1, 3, 4, 4), torch.tensor([-1])),
        ),
        "init-batch": ("CausalLM", lambda m: m.init_state(-1)),
        "state-count": ("CausalLM", lambda m: m(ids, state=(torch.zeros(2, 8),))),
        "prefill-empty": ("CausalLM", lambda m: m.prefill(ids[:, :0])),
        "positions": ("CausalLM", lambda m: m.logits_at(ids, ids[:1])),
        "lengths-long": ("CausalLM", lambda m: m.prefill(ids, torch.tensor([1, 4]))),
        "lengths-zero": ("CausalLM", lambda m: m.prefill(ids, torch.tensor([0, 3]))),
        "temperature": ("CausalLM", lambda m: m.generate(ids, 1, -1.0)),
        "top-k": ("CausalLM", lambda m: m.generate(ids, 1, top_k=0)),
        "top-p": ("CausalLM", lambda m: m.generate(ids, 1, top_p=1.5)),
        "count": ("CausalLM", lambda m: m.generate(ids, -1)),
        "both-bounds": (
            "SequenceClassifier",
            lambda m: m(ids, lengths=torch.tensor([1, 1]), cu_seqlens=torch.tensor([0, 3])),
        ),
        "image-size": ("ImageClassifier", lambda m: m(torch.zeros(1, 3, 5, 4))),
    }


@pytest.mark.parametrize("case", list(model_misuses()))
def test_model_errors_read_the_same(case):
    name, use = model_misuses()[case]
    config = SMALL.replace(num_classes=5, patch_size=2)
    native, twin = getattr(tidegate.models, name)(config), getattr(cpp, name)(config)
    assert refusal(lambda: use(native)) == refusal(lambda: use(twin))
