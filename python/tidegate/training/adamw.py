"""AdamW and Adam: torch's classes, with a step of tidegate's own where that is faster."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as _optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DEVICES = ("cuda",)  # where the op is the faster step; tests look at the others, too


def _without_compiler(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of torch's, recorded only where the optimiser is differentiable, as torch's own
    wrapper has it."""
    plain = inspect.unwrap(step)

    @functools.wraps(plain)
    def recorded(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, closure)

    return recorded


class Adam(torch.optim.Adam):
    """torch.optim.Adam, without what torch imports to keep its compiler out of these methods:
    torch._dynamo, with sympy and triton, which takes two seconds before a run's first loss."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = _without_compiler(torch.optim.Adam.step)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, like `Adam`. With fused=True (build_optimizer's default) a step of fp32
    weights on CUDA is the op `adamw_`.

    torch's fused kernel gives a multiprocessor two or three blocks of a launch, by chance, and half
    of the chip waits for the other; the op's blocks share the work evenly.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    _step_by_torch = _without_compiler(torch.optim.AdamW.step)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weights: dict[nn.Parameter, Tensor] | None = None,
    ) -> Any:
        """One step. closure: computes the loss anew and returns it. weights: the bf16 weight of
        each fp32 master: its gradient is read, and the rounded master is written to it, in one pass
        and without wide copies of either. Given only where `fits_masters` says so; a parameter
        that is not in it steps by its own gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Asked after the closure, whose gradients it looks at.
        if weights is None and not self._op_makes_step():
            self._step_by_torch()
            return loss
        self._accelerator_graph_capture_health_check()
        weights = weights or {}
        with torch.no_grad():
            for group in self.param_groups:
                given = [p for p in group["params"] if weights.get(p, p).grad is not None]
                self._step_some(group, [p for p in given if p in weights], weights)
                self._step_some(group, [p for p in given if p not in weights])
        return loss

    def fits_masters(self, weights: dict[nn.Parameter, Tensor]) -> bool:
        """Whether `step` takes the weights of masters. Not where somebody has gradients of masters,
        or listens to steps: hooks find them where the optimiser's parameters are."""
        hooks = (
            *(self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks),
            *(_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks),
        )
        return (
            not any(hooks)
            and all(master.grad is None for master in weights)
            and self._op_makes_step(weights)
        )

    def _op_makes_step(self, weights: dict[nn.Parameter, Tensor] | None = None) -> bool:
        """Whether the op makes the step. A scaler of gradients has a say in torch's own alone."""
        states = self.state
        return not hasattr(self, "grad_scale") and all(
            _op_steps_group(group, states, weights or {}) for group in self.param_groups
        )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's state as torch's fused step keeps it, laid out as the parameter is: a file
        may have been written by one that lay otherwise."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in _MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif not _lies_like(state[name], parameter):
                laid_out = torch.empty_like(parameter, memory_format=torch.preserve_format)
                state[name] = laid_out.copy_(state[name])
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
        steps, means, squares = ([state[name] for state in states] for name in ("step", *_MOMENTS))
        torch._foreach_add_(steps, 1)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        torch.ops.tidegate.adamw_(
            *(parameters, gradients, means, squares, steps, rounded),
            *((lr, 0.0) if isinstance(lr, Tensor) else (None, float(lr))),
            *(beta1, beta2, group["weight_decay"], group["eps"]),
        )


def _lies_like(t: Tensor, parameter: Tensor) -> bool:
    """Whether the numbers of t lie in the order of the parameter's, of the same sizes. The stride
    of a dimension of size one says nothing."""
    if t.shape != parameter.shape:
        return False
    strides = t.stride(), parameter.stride()
    return strides[0] == strides[1] or all(
        a == b for size, a, b in zip(t.shape, *strides, strict=True) if size > 1
    )


def _op_steps_group(
    group: dict[str, Any],
    states: Mapping[nn.Parameter, dict[str, Tensor]],
    weights: dict[nn.Parameter, Tensor],
) -> bool:
    """Whether the op steps the group: as `build_optimizer` makes it, with gradients that lie as
    their parameters do, all on one GPU. weights: as in `AdamW.step`."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
        return False
    numbers = (*group["betas"], group["weight_decay"], group["eps"])
    if any(isinstance(number, Tensor) for number in numbers):
        return False
    device = group["params"][0].device if group["params"] else torch.device("cpu")

    def is_number_like(t: Tensor) -> bool:
        return t.numel() == 1 and t.dtype == torch.float32 and t.device == device

    def has_fitting_tensors(p: nn.Parameter) -> bool:
        weight = weights.get(p, p)
        gradient = weight.grad
        of_parameter = (
            type(p) is nn.Parameter
            and type(weight) is nn.Parameter
            and p.dtype == torch.float32
            and p.device == device
            and p.is_contiguous()
            and _lies_like(weight, p)
        )
        has_place = gradient is None or (
            not gradient.is_sparse and gradient.dtype == weight.dtype and _lies_like(gradient, p)
        )
        return of_parameter and has_place and weight.dtype in (p.dtype, torch.bfloat16)

    def has_fitting_state(p: nn.Parameter) -> bool:
        state = states.get(p)
        return not state or (
            is_number_like(state["step"])
            and all(
                (t.shape, t.dtype, t.device) == (p.shape, p.dtype, p.device)
                for t in (state[name] for name in _MOMENTS)
            )
        )

    lr = group["lr"]
    return (
        device.type in _DEVICES
        and (is_number_like(lr) if isinstance(lr, Tensor) else True)
        and all(map(has_fitting_tensors, group["params"]))
        and all(map(has_fitting_state, group["params"]))
    )
