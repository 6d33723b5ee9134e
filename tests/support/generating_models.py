"""Tiny language models of every mixer, with what a decoding step treats specially."""

from __future__ import annotations

import torch

from tidegate.models import CausalLM, Decoder, LMConfig

VOCAB = 37
# How tests draw: every filter at once.
SAMPLED = {"seed": 3, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}

CONFIGS = {
    "hgrn": {"mixer": "hgrn"},
    "hgrn-complex": {"mixer": "hgrn", "mixer_options": {"complex": True, "theta": "data"}},
    "hgrn2": {"mixer": "hgrn2", "mixer_options": {"num_heads": 2}},
    "gla": {"mixer": "gla", "mixer_options": {"num_heads": 2, "lower_bound": True}},
    "gla-normal": {
        "mixer": "gla",
        "mixer_options": {
            "num_heads": 2,
            "normalize": True,
            "feature_map": "elu+1",
            "norm": "none",
        },
    },
    "lru": {"mixer": "lru"},
    "slru-tied": {"mixer": "slru", "tied": True},
    "rwkv4": {"mixer": "rwkv4"},
    "gated-linear-rnn": {"mixer": "gated-linear-rnn", "mixer_options": {"lower_bound": True}},
    "gated-rnn": {"mixer": "gated-rnn"},
    "fox": {"mixer": "fox", "mixer_options": {"num_heads": 2}},
    "fox-pro-grouped": {
        "mixer": "fox-pro",
        "mixer_options": {"num_heads": 4, "num_kv_heads": 2, "rope": 1e4, "lower_bound": True},
    },
    "fox-pruned": {
        "mixer": "fox-pro",
        "mixer_options": {"num_heads": 2, "prune": 1e-4, "drop_pruned": True},
    },
    "transformer": {"mixer": "transformer", "mixer_options": {"num_heads": 2}},
    "transformer-window": {
        "mixer": "transformer-pro",
        "mixer_options": {"num_heads": 4, "num_kv_heads": 1, "window": 5},
    },
    "mixed": {"mixer": ["hgrn2", "transformer"]},
}


def make(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> CausalLM:
    """A model whose parameters are far from their start, so that its tokens vary."""
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "dim": 32, "layers": 2, "tied": False}
    model = CausalLM(LMConfig(**{**sizes, **CONFIGS[name]}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        model.embedding.weight.normal_()
        if model.head is not None:
            model.head.weight.normal_()
    return model.to(device, dtype).eval()


def prompts(*lengths: int) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return [torch.randint(0, VOCAB, (n,)) for n in lengths]


def tokens_of(decoder: Decoder, steps: int = 1) -> dict[int, list[int]]:
    """What each sequence draws until all have ended."""
    found: dict[int, list[int]] = {}
    while decoder.active:
        for token in decoder.steps(steps):
            found.setdefault(token.slot, []).append(token)
    return found


def alone(model: CausalLM, prompt: torch.Tensor, count: int, **options) -> list[int]:
    """What a Decoder draws after this prompt, and no other."""
    decoder = Decoder(model, 1)
    slot = decoder.add(prompt, max_new_tokens=count, **options)
    return tokens_of(decoder)[slot]
