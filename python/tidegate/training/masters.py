"""Weights in bf16 whose masters, in fp32, the optimiser has.

A rate of 1e-3 moves a weight by less than bf16's spacing around it, so that a step on bf16 weights
themselves would often move nothing. The masters take the step, and the weights are the masters
rounded. Beside autocast over fp32 weights this saves the casts of every step and the bf16 copies
that the backward pass keeps of them: 4 bytes a weight of 18 (docs/training.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import AdamW
from .muon import Combined


class MasterWeights:
    """`optimizer` over fp32 copies of the weights of `model`, which this makes bf16.

    model: in fp32, whose parameters `optimizer` was made for and has not stepped yet. What
    ``model.bfloat16()`` leaves in fp32 (lower bounds, phases) stays its own master.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | Combined) -> None:
        wide = {id(p): p.data for group in optimizer.param_groups for p in group["params"]}
        model.bfloat16()
        self.optimizer = optimizer
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._own: list[Tensor] = []  # parameters that stayed in fp32
        for group in optimizer.param_groups:
            group["params"] = [self._master_of(p, wide[id(p)]) for p in group["params"]]

    def _master_of(self, weight: Tensor, wide: Tensor) -> Tensor:
        if weight.dtype == wide.dtype:
            self._own.append(weight)
            return weight
        master = nn.Parameter(wide)
        self.weights.append(weight)
        self.masters.append(master)
        return master

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimiser, of masters."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def take_gradients(self) -> list[Tensor]:
        """Moves the weights' gradients to the masters, in fp32; returns all that the optimiser
        steps, whose gradients may then be clipped."""
        pairs = [(m, w) for m, w in zip(self.masters, self.weights, strict=True)]
        for master, weight in pairs:
            if master.grad is not None and weight.grad is not None:  # taken before, not stepped by
                master.grad.add_(weight.grad)
                weight.grad = None
        given = [(m, w) for m, w in pairs if w.grad is not None]
        if given:
            wide = [torch.empty_like(m) for m, _ in given]
            torch._foreach_copy_(wide, [w.grad for _, w in given])
            for (master, weight), gradient in zip(given, wide, strict=True):
                master.grad, weight.grad = gradient, None
        return [*self.masters, *self._own]

    @torch.no_grad()
    def clip_gradients(self, largest: float) -> Tensor:
        """Scales the gradients that the next step goes by down to a norm of `largest`; returns the
        one that they had, in fp32. Where that step makes one pass, gradients are scaled where they
        are, and so rounded to bf16 once more; elsewhere they are moved to the masters before."""
        if self._weights_in_one_pass() is None:
            return nn.utils.clip_grad_norm_(self.take_gradients(), largest)
        every = (*self.weights, *self._own)
        gradients = [p.grad for p in every if p.grad is not None]
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            kinds.setdefault(gradient.dtype, []).append(gradient)
        if not kinds:
            return torch.zeros(())
        norms = [torch._foreach_norm(kind, 2, dtype=torch.float32) for kind in kinds.values()]
        norm = torch.linalg.vector_norm(torch.stack([n for of_kind in norms for n in of_kind]))
        if largest < math.inf:
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
            for dtype, kind in kinds.items():
                torch._foreach_mul_(kind, factor.to(dtype))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """A step of the optimiser, by the gradients that the masters or their weights have; no
        parameter has one after it, nor those that are their own masters."""
        weights = self._weights_in_one_pass()
        if weights is not None:
            self.optimizer.step(weights=weights)
        else:
            self.take_gradients()
            self.optimizer.step()
            if self.weights:
                torch._foreach_copy_(self.weights, self.masters)
        for parameter in (*self.weights, *self.masters, *self._own):
            parameter.grad = None

    def _weights_in_one_pass(self) -> dict[nn.Parameter, Tensor] | None:
        """The weights by master, where the optimiser steps both in one pass."""
        weights = dict(zip(self.masters, self.weights, strict=True))
        fits = isinstance(self.optimizer, AdamW) and self.optimizer.fits_masters(weights)
        return weights if fits else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, of the weights, too."""
        self.optimizer.zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's states, and the masters."""
        masters = [m.detach() for m in self.masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, states: dict[str, Any]) -> None:
        """The reverse of state_dict(); the weights become the masters rounded."""
        for master, given in zip(self.masters, states["masters"], strict=True):
            master.copy_(given)
        self.optimizer.load_state_dict(states["optimizer"])
        if self.weights:
            torch._foreach_copy_(self.weights, self.masters)


def clip_gradients(
    optimizer: torch.optim.Optimizer | Combined | MasterWeights, model: nn.Module, largest: float
) -> Tensor:
    """Scales the gradients that a step goes by down to a norm of `largest`; returns the one that
    they had."""
    if isinstance(optimizer, MasterWeights):
        return optimizer.clip_gradients(largest)
    return nn.utils.clip_grad_norm_(model.parameters(), largest)
