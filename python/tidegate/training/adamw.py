"""AdamW and Adam: torch's classes, with a step of tidegate's own where that is faster."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Adam(torch.optim.Adam):
    """torch.optim.Adam, without what torch imports to keep its compiler out of these methods:
    torch._dynamo, with sympy and triton, which takes two seconds before a run's first loss."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, like `Adam`; a step of fp32 weights on CUDA is the op `adamw_`.

    torch's fused kernel gives a multiprocessor two or three blocks of a launch, by chance, and half
    of the chip waits for the other; the op's blocks share the work evenly.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    _step_by_torch = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; closure: computes the loss anew and returns it."""
        if not all(map(_fits, self.param_groups)) or hasattr(self, "grad_scale"):
            return self._step_by_torch(closure)
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_some(group, [p for p in group["params"] if p.grad is not None])
        return loss

    @torch.no_grad()
    def step_masters(self, weights: dict[nn.Parameter, Tensor]) -> bool:
        """One step of masters, which become their bf16 weights' values rounded, by the gradients
        that those have, in one pass and without wide copies of either. weights: per master; a
        parameter without one steps by its own gradient. False where the op does not fit: nothing
        has happened then."""
        every = [p for group in self.param_groups for p in group["params"]]
        if not all(_fits(group, weights) for group in self.param_groups):
            return False
        if any(p in weights and p.grad is not None for p in every):  # somebody took gradients over
            return False
        self._accelerator_graph_capture_health_check()
        for group in self.param_groups:
            masters = [p for p in group["params"] if p in weights]
            self._step_some(group, [p for p in masters if weights[p].grad is not None], weights)
            own = [p for p in group["params"] if p not in weights]
            self._step_some(group, [p for p in own if p.grad is not None])
        return True

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's state as torch's fused step keeps it."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _step_some(
        self,
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        weights: dict[nn.Parameter, Tensor] | None = None,
    ) -> None:
        if not parameters:
            return
        rounded = [] if weights is None else [weights[p] for p in parameters]
        gradients = [p.grad for p in (parameters if weights is None else rounded)]
        states = [self._state_of(p) for p in parameters]
        steps, means, squares = (
            [state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        is_on_device = isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32
        torch.ops.tidegate.adamw_(
            *(parameters, gradients, means, squares, steps, rounded),
            *((lr, 0.0) if is_on_device else (None, float(lr))),
            *(beta1, beta2, group["weight_decay"], group["eps"]),
        )


def _fits(group: dict[str, Any], weights: dict[nn.Parameter, Tensor] | None = None) -> bool:
    """Whether the op steps the group: as `build_optimizer` makes it, with gradients that lie as
    their parameters do, all on one GPU. weights: as in `AdamW.step_masters`."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
        return False
    device = group["params"][0].device if group["params"] else torch.device("cpu")

    def fits(p: nn.Parameter) -> bool:
        weight = p if weights is None else weights.get(p, p)
        gradient = weight.grad
        of_parameter = (
            type(p) is nn.Parameter
            and type(weight) is nn.Parameter
            and p.dtype == torch.float32
            and p.device == device
            and p.is_contiguous()
            and weight.stride() == p.stride()
        )
        has_place = gradient is None or (
            not gradient.is_sparse
            and gradient.dtype == weight.dtype
            and gradient.stride() == p.stride()
        )
        return of_parameter and has_place and weight.dtype in (p.dtype, torch.bfloat16)

    return device.type == "cuda" and all(map(fits, group["params"]))
