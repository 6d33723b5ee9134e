"""Muon: momentum whose matrices are orthogonalised before they are applied.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A step moves all
singular directions of a weight matrix equally far, where Adam's follow the few that dominate the
gradient; small models in their first thousand steps learn markedly more a step.

Unlike torch.optim.Muon, matrices stacked in one parameter (a mixer's input projections, GLU's gate
and value, attention's q, k and v: `stacked_rows` of the projection) are orthogonalised one by one,
and all matrices of a shape at once; on CPUs whose bf16 is not faster the iteration runs in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._sharding import is_sharded, like_part, local, share_of, whole
from .runtime import cpu_has_fast_bf16

# Quintic Newton-Schulz iteration: steepest at zero, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replaces the singular values of each matrix of ``[N, rows, columns]`` by values near one.

    Five Newton-Schulz iterations; float32 in and out, bf16 between where that is fast.
    """
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    if x.device.type == "cuda" or cpu_has_fast_bf16():
        x = x.bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, update, x, beta=_A)
    x = x.to(matrices.dtype)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for weight matrices, with Nesterov momentum and decoupled weight decay.

    params: 2-D parameters. splits: for each of them, the row counts of the matrices stacked in it.
    A matrix moves by ``lr * sqrt(max(1, rows / columns))`` times the orthogonalised momentum.

    Of sharded parameters (DTensors) the momentum is, too; what is orthogonalised is gathered, and
    every process orthogonalises all of it and keeps its part.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        splits: Sequence[Sequence[int]],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        params = list(params)
        for parameter, rows in zip(params, splits, strict=True):
            if parameter.ndim != 2 or sum(rows) != parameter.size(0):
                raise ValueError(
                    f"Muon: splits: expected rows that add up to those of a matrix of shape "
                    f"{tuple(parameter.shape)}, got {list(rows)}"
                )
        self._splits = [list(rows) for rows in splits]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step for every parameter that has a gradient."""
        (group,) = self.param_groups
        given = [
            (parameter, rows)
            for parameter, rows in zip(group["params"], self._splits, strict=True)
            if parameter.grad is not None
        ]
        if not given:
            return
        parameters = [parameter for parameter, _ in given]
        directions = [whole(ahead) for ahead in self._momenta(parameters, group["momentum"])]
        own = [local(parameter) for parameter in parameters]
        torch._foreach_mul_(own, 1.0 - group["lr"] * group["weight_decay"])
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        sharded: list[tuple[Tensor, Tensor]] = []  # and how far all of it moves
        for (parameter, rows), direction in zip(given, directions, strict=True):
            moved = parameter
            if is_sharded(parameter):
                moved = torch.zeros_like(direction)
                sharded.append((parameter, moved))
            pieces = zip(moved.split(rows), direction.split(rows), strict=True)
            for weight, piece in pieces:
                by_shape.setdefault(tuple(piece.shape), []).append((weight, piece))
        for (rows, columns), pairs in by_shape.items():
            orthogonal = orthogonalize(torch.stack([piece for _, piece in pairs]))
            scale = max(1.0, rows / columns) ** 0.5
            weights = [weight for weight, _ in pairs]
            torch._foreach_add_(weights, orthogonal.unbind(0), alpha=-group["lr"] * scale)
        for parameter, moved in sharded:
            local(parameter).add_(local(share_of(moved, parameter)))

    def _momenta(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Updates the moving means of the gradients; returns Nesterov's looks ahead, of sharded
        parameters this process's parts of them."""
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
        means = [local(self.state[parameter]["momentum"]) for parameter in parameters]
        gradients = [local(parameter.grad) for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1.0 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        return [like_part(a, p) for a, p in zip(ahead, parameters, strict=True)]


class Combined:
    """Two optimisers that step as one: Muon for matrices, AdamW for everything else."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.muon = muon
        self.adamw = adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        """One step of both."""
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """The reverse of state_dict()."""
        self.muon.load_state_dict(states["muon"])
        self.adamw.load_state_dict(states["adamw"])
