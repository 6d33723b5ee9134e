"""Optimisers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch

OPTIMIZERS = ("adamw", "adam")
DECAYS = ("matrices", "all")


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, decay: str = "matrices"
) -> list[dict]:
    """Splits the trainable parameters into one group that decays and one that does not.

    decay="matrices": only tensors with two or more axes inside the layers decay; biases, norm
    weights, rotation angles, lower bounds and embeddings do not. decay="all": everything decays,
    as in the fairseq runs of the HGRN paper. A tied parameter is counted once.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay: expected one of {', '.join(DECAYS)}, got {decay!r}")
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    bounds = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ == "LowerBounds"
        for parameter in module.parameters()
    }
    kept: list[torch.nn.Parameter] = []
    decayed: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.ndim < 2 or id(parameter) in embeddings or id(parameter) in bounds
        (kept if decay == "matrices" and plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: torch.nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: Iterable[float] = (0.9, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "matrices",
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay) or Adam (decay added to the gradient), in torch's fused form.

    The HGRN papers say "Adam" with a weight decay of 0.1 or 0.2; the code they used decays
    decoupled, which is `adamw` here.
    """
    classes = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if name not in classes:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")
    first, second = betas
    groups = parameter_groups(model, weight_decay, decay)
    return classes[name](groups, lr=lr, betas=(first, second), eps=eps, fused=True)
