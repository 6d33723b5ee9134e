"""Optimisers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..nn import LowerBounds
from ..nn._common import stacked_rows
from .adamw import Adam, AdamW
from .muon import Combined, Muon

OPTIMIZERS = ("adamw", "adam", "muon")
DECAYS = ("matrices", "all")


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable weight matrices inside the layers: not embeddings, heads tied to them, or bounds.

    Recognised by shape and by the module that holds them; an untied head is one of them.
    """
    excluded = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, LowerBounds))
        for parameter in module.parameters(recurse=False)
    }
    return [
        p for p in model.parameters() if p.requires_grad and p.ndim >= 2 and id(p) not in excluded
    ]


def parameter_groups(model: nn.Module, weight_decay: float, decay: str = "matrices") -> list[dict]:
    """Splits the trainable parameters into one group that decays and one that does not.

    decay="matrices": only tensors with two or more axes inside the layers decay; biases, norm
    weights, rotation angles, lower bounds and embeddings do not. decay="all": everything decays,
    as in the fairseq runs of the HGRN paper. A tied parameter is counted once.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay: expected one of {', '.join(DECAYS)}, got {decay!r}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = trainable if decay == "all" else _hidden_matrices(model)
    ids = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) not in ids], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: Iterable[float] = (0.9, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "matrices",
    muon_lr: float = 0.02,
    capturable: bool = False,
) -> torch.optim.Optimizer | Combined:
    """`adamw` (decoupled decay), `adam` (decay added to the gradient), or `muon`.

    The HGRN papers say "Adam" with a weight decay of 0.1 or 0.2; the code they used decays
    decoupled, which is `adamw` here. `muon` steps the matrices of the blocks by Muon at `muon_lr`
    and everything else by AdamW at `lr`. Every group's entry "peak" is its peak learning rate.
    capturable: a step can be captured in a CUDA graph (parameters on CUDA; not `muon`).
    """
    first, second = betas
    adam = {"betas": (first, second), "eps": eps, "fused": True, "capturable": capturable}
    classes = {"adamw": AdamW, "adam": Adam}
    if name in classes:
        optimizer = classes[name](parameter_groups(model, weight_decay, decay), lr=lr, **adam)
    elif name == "muon":
        if capturable:
            raise ValueError("optimizer: muon's step cannot be captured in a CUDA graph")
        optimizer = _muon(model, lr, muon_lr, weight_decay, decay, adam)
    else:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer | Combined, multiplier: float) -> None:
    """Sets every group's learning rate to `multiplier` times its peak.

    A group that can be captured keeps its rate in one tensor on the parameters' device, which a
    replayed graph reads.
    """
    for group in optimizer.param_groups:
        rate = group["peak"] * multiplier
        if not group.get("capturable"):
            group["lr"] = rate
        elif isinstance(group["lr"], torch.Tensor) and group["lr"].is_cuda:
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate, device=group["params"][0].device)


def _muon(
    model: nn.Module, lr: float, muon_lr: float, weight_decay: float, decay: str, adam: dict
) -> Combined:
    """Muon for the matrices of linear layers and torch's own RNNs, stacked ones one by one, AdamW
    for what is left."""
    head = getattr(model, "head", None)
    rows: dict[int, list[int]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            rows[id(module.weight)] = stacked_rows(module)
        elif isinstance(module, nn.RNNBase):
            for weight in module.parameters(recurse=False):
                rows[id(weight)] = [module.hidden_size] * (len(weight) // module.hidden_size)
    matrices = [p for p in _hidden_matrices(model) if id(p) in rows]
    taken = {id(p) for p in matrices}
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) not in taken]}
        for group in parameter_groups(model, weight_decay, decay)
    ]
    groups = [group for group in groups if group["params"]]
    if not matrices or not groups:
        raise ValueError("optimizer: muon needs a model with linear layers and other parameters")
    splits = [rows[id(p)] for p in matrices]
    return Combined(
        Muon(matrices, splits, lr=muon_lr, weight_decay=weight_decay),
        AdamW(groups, lr=lr, **adam),
    )
