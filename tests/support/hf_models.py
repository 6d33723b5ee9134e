"""Small models in transformers' form, one for each kind of state that a mixer may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MIXERS: dict[str, dict[str, Any]] = {
    "hgrn": {"mixer": "hgrn"},
    "hgrn2": {"mixer": "hgrn2", "mixer_options": {"num_heads": 2}},
    "gla": {"mixer": "gla", "mixer_options": {"num_heads": 2}},
    "gla-normalized": {
        "mixer": "gla",
        "mixer_options": {
            "num_heads": 2, "gate": "scalar", "normalize": True, "feature_map": "exp",
            "norm": "none",
        },
    },
    "lru": {"mixer": "lru"},
    "slru": {"mixer": "slru"},
    "rwkv4": {"mixer": "rwkv4", "mixer_options": {"time_shift": True}},
    "gated-linear-rnn": {"mixer": "gated-linear-rnn"},
    "gated-rnn": {"mixer": "gated-rnn"},
    "fox": {"mixer": "fox", "mixer_options": {"num_heads": 2}},
    "fox-pro": {"mixer": "fox-pro", "mixer_options": {"num_heads": 2}},
    "transformer": {"mixer": "transformer", "mixer_options": {"num_heads": 2}},
    "hybrid": {"mixer": ["hgrn", "fox"], "lower_bound": "none"},
}  # fmt: skip


def config(name: str, **more: Any) -> Any:
    """A TidegateConfig of mixer `name`: 2 layers of 16 channels, 40 ids of which 0 is padding."""
    from tidegate.hf import TidegateConfig

    sizes = {"vocab_size": 40, "dim": 16, "layers": 2, "glu_hidden": 24, "pad_token_id": 0}
    return TidegateConfig(**{**sizes, **MIXERS[name], **more})


def causal_lm(name: str, seed: int = 0, **more: Any) -> Any:
    """A TidegateForCausalLM whose logits are far enough apart that roundings choose nothing."""
    from tidegate.hf import TidegateForCausalLM

    torch.manual_seed(seed)
    model = TidegateForCausalLM(config(name, **more)).double().eval()
    with torch.no_grad():
        model.model.embedding.weight.mul_(4)
        if not model.config.tie_word_embeddings:
            model.lm_head.weight.mul_(50)
    return model


def left_padded(*lengths: int, time: int | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """ids and mask ``[B, time]`` of rows of these lengths, zeros before them."""
    time = max(lengths) if time is None else time
    ids = torch.randint(1, 40, (len(lengths), time), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(time) >= time - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()
