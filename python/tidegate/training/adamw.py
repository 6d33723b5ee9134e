"""AdamW and Adam: torch's classes, with a step of tidegate's own where that is faster."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
        if not all(map(self._fits, self.param_groups)):
            return self._step_by_torch(closure)
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _fits(self, group: dict[str, Any]) -> bool:
        """Whether the op steps the group: as `build_optimizer` makes it, with gradients that lie as
        their parameters do, all on one GPU."""
        if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
            return False
        if getattr(self, "grad_scale", None) is not None or not hasattr(
            torch.ops.tidegate, "adamw_"
        ):
            return False
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        return device.type == "cuda" and all(
            type(p) is torch.nn.Parameter
            and p.dtype == torch.float32
            and p.device == device
            and (p.grad is None or (not p.grad.is_sparse and p.grad.stride() == p.stride()))
            and p.is_contiguous()
            for p in group["params"]
        )

    def _step_group(self, group: dict[str, Any]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        parameters, gradients, means, squares, _, steps = lists
        if not parameters:
            return
        torch._foreach_add_(steps, 1)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        is_on_device = isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32
        torch.ops.tidegate.adamw_(
            *(parameters, gradients, means, squares, steps),
            *((lr, 0.0) if is_on_device else (None, float(lr))),
            *(beta1, beta2, group["weight_decay"], group["eps"]),
        )
