"""Weights in bf16 whose masters, in fp32, the optimiser has.

A rate of 1e-3 moves a weight by less than bf16's spacing around it, so that a step on bf16 weights
themselves would often move nothing. The masters take the step, and the weights are the masters
rounded. Beside autocast over fp32 weights this saves the casts of every step and the bf16 copies
that the backward pass keeps of them: 4 bytes a weight of 18 (docs/training_optimisers.md).
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

    Raises:
        ValueError: a parameter has 16 bits already, or the optimiser has stepped.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | Combined) -> None:
        wide = {id(p): p.data for group in optimizer.param_groups for p in group["params"]}
        for given in wide.values():
            if given.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    "MasterWeights: model: expected parameters in float32, of which masters are "
                    f"made; got one of shape {tuple(given.shape)} in {given.dtype}"
                )
        if states := _states_of(optimizer):
            raise ValueError(
                "MasterWeights: optimizer: expected one that has not stepped yet; got one with "
                f"states of {states} parameters"
            )
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
        _check_dense([*self.weights, *self._own])
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
        """Scales the gradients that the next step goes by down to a norm of `largest`, as
        ``torch.nn.utils.clip_grad_norm_`` does; returns the one that they had, in fp32.

        An infinite `largest` only measures. Otherwise a norm that is NaN makes every gradient NaN,
        and one that is infinite makes them zero, or NaN where they were infinite. Where the step
        makes one pass, gradients are scaled where they are, by a factor in fp32, and so rounded to
        bf16 once more; elsewhere they are moved to the masters before.

        Raises:
            ValueError: `largest` is NaN or negative.
        """
        if not largest >= 0:
            raise ValueError(
                f"MasterWeights: clip_gradients: largest: expected a number of at least 0, got "
                f"{largest}"
            )
        if self._weights_in_one_pass() is None:
            every = self.take_gradients()
        else:
            every = [*self.weights, *self._own]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in (p.grad for p in every if p.grad is not None):
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        if not kinds:
            return torch.zeros(())
        norms = [torch._foreach_norm(kind, 2, dtype=torch.float32) for kind in kinds.values()]
        first = norms[0][0].device
        every_norm = torch.stack([n.to(first) for of_kind in norms for n in of_kind])
        norm = torch.linalg.vector_norm(every_norm)
        if largest < math.inf:
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
            for (device, dtype), kind in kinds.items():
                own = factor.to(device)
                if dtype.itemsize < factor.dtype.itemsize:
                    # _foreach_mul_ would round the factor to 16 bits.
                    torch.ops.tidegate.scale_(kind, own)
                else:
                    torch._foreach_mul_(kind, own.to(dtype))
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
        """The reverse of state_dict(); the weights become the masters rounded.

        Raises:
            ValueError: there are not as many masters, or one has another shape; nothing has
                changed then.
        """
        masters = states["masters"]
        if len(masters) != len(self.masters):
            raise ValueError(
                f"MasterWeights: masters: expected {len(self.masters)}; got {len(masters)}"
            )
        for number, (master, given) in enumerate(zip(self.masters, masters, strict=True)):
            if given.shape != master.shape:
                raise ValueError(
                    f"MasterWeights: master {number}: expected the shape {tuple(master.shape)}; "
                    f"got {tuple(given.shape)}"
                )
        for master, given in zip(self.masters, masters, strict=True):
            master.copy_(given)
        self.optimizer.load_state_dict(states["optimizer"])
        if self.weights:
            torch._foreach_copy_(self.weights, self.masters)


def _states_of(optimizer: torch.optim.Optimizer | Combined) -> int:
    """How many parameters the optimiser has states of."""
    parts = (optimizer.muon, optimizer.adamw) if isinstance(optimizer, Combined) else (optimizer,)
    return sum(len(part.state) for part in parts)


def _check_dense(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(
                "MasterWeights: expected dense gradients; got a sparse one of a parameter of shape "
                f"{tuple(p.shape)}"
            )


def clip_gradients(
    optimizer: torch.optim.Optimizer | Combined | MasterWeights, model: nn.Module, largest: float
) -> Tensor:
    """Scales the gradients that a step goes by down to a norm of `largest`; returns the one that
    they had."""
    if isinstance(optimizer, MasterWeights):
        return optimizer.clip_gradients(largest)
    return nn.utils.clip_grad_norm_(model.parameters(), largest)
