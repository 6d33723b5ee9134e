"""Muon: momentum whose matrices are orthogonalised before they are applied.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A step moves all
singular directions of a weight matrix equally far, where Adam's follow the few that dominate the
gradient; small models in their first thousand steps learn markedly more a step.

Unlike torch.optim.Muon, matrices stacked in one parameter (a mixer's input projections, GLU's gate
and value, attention's q, k and v: `stacked_rows` of the projection) are orthogonalised one by one,
and all matrices of a shape at once; on CPUs whose bf16 is not faster the iteration runs in fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
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

    params: 2-D parameters, or groups of them with options of their own. splits: for each parameter,
    in the order of the groups, the row counts of the matrices stacked in it. A matrix moves by
    ``lr * sqrt(max(1, rows / columns))`` times the orthogonalised momentum.

    The momentum of sharded parameters (DTensors) is sharded, too; what is orthogonalised is
    gathered, and every process orthogonalises all of it and keeps its part.

    Raises:
        ValueError: there are not as many splits as parameters, or rows do not add up.
    """

    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)  # as `adamw.Adam` says
    _add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        splits: Sequence[Sequence[int]],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [{**group, "params": _listed(group["params"])} for group in groups]
        count = sum(len(group["params"]) for group in groups)
        if len(splits) != count:
            raise ValueError(f"Muon: splits: expected one a parameter, {count}; got {len(splits)}")
        at = 0
        for group in groups:
            group["splits"] = splits[at : at + len(group["params"])]
            at += len(group["params"])
        self._splits: list[list[int]] = []  # of all groups' parameters, one after another
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group with options of its own. Its "splits" are those of its parameters; without them
        each is one matrix."""
        group = {**param_group, "params": _listed(param_group["params"])}
        splits = group.pop("splits", None)
        if splits is None:
            splits = [[p.size(0)] if p.ndim == 2 else [] for p in group["params"]]
        for parameter, rows in zip(group["params"], splits, strict=True):
            has_rows = parameter.ndim == 2 and sum(rows) == parameter.size(0)
            if not has_rows or min(rows, default=0) < 0:
                raise ValueError(
                    f"Muon: splits: expected rows that add up to those of a matrix of shape "
                    f"{tuple(parameter.shape)}, got {list(rows)}"
                )
        self._add_param_group(group)
        self._splits += [list(rows) for rows in splits]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_splits": self._splits}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient. closure: computes the loss anew and
        returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        splits = iter(self._splits)
        stepped = []
        for group in self.param_groups:
            pairs = [(parameter, next(splits)) for parameter in group["params"]]
            stepped.append((group, [pair for pair in pairs if pair[0].grad is not None]))
        for _, given in stepped:  # before any parameter is changed
            for parameter, _ in given:
                if local(parameter.grad).layout != torch.strided:
                    raise RuntimeError("Muon: expected dense gradients; got a sparse one")
        for group, given in stepped:
            if given:
                self._step_group(group, given)
        return loss

    def _step_group(self, group: dict[str, Any], given: list[tuple[Tensor, list[int]]]) -> None:
        parameters = [parameter for parameter, _ in given]
        directions = [whole(ahead) for ahead in self._momenta(parameters, group["momentum"])]
        own = [local(parameter) for parameter in parameters]
        torch._foreach_mul_(own, 1.0 - group["lr"] * group["weight_decay"])
        alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        sharded: list[tuple[Tensor, Tensor]] = []  # and how far all of it moves
        for (parameter, rows), direction in zip(given, directions, strict=True):
            moved = parameter
            if is_sharded(parameter):
                moved = torch.zeros_like(direction)
                sharded.append((parameter, moved))
            pieces = zip(moved.split(rows), direction.split(rows), strict=True)
            for weight, piece in pieces:
                if piece.numel() > 0:
                    key = (*piece.shape, piece.device, piece.dtype)
                    alike.setdefault(key, []).append((weight, piece))
        for (rows, columns, *_), pairs in alike.items():
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


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


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
        """One step of both. AdamW's comes first: where a gradient is sparse, an embedding's, it
        raises, and nothing has been stepped."""
        self.adamw.step()
        self.muon.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Takes what state_dict() gave."""
        self.muon.load_state_dict(states["muon"])
        self.adamw.load_state_dict(states["adamw"])
