"""What baselines.py times of RWKV-4's token mixing: tidegate's `wkv4`, and fla's recurrent kernel.

Keys are uniform on +-2, rates are RWKV-4's initial ones. The check is a float64 loop over a few
channels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

import float64
import torch
from float64 import Sample, relative_error
from scan_baselines import TOLERANCE, Implementation, Work
from torch import Tensor


class Wkv4Inputs:
    """k, v and the gradient of o, set by set; and float64 results of set 0 on sampled channels."""

    def __init__(self, work: Work, sets: int, device: torch.device) -> None:
        self.work, self.sample = work, Sample.of(work.batch, work.channels)
        shape = (work.batch, work.time, work.channels)

        def draw() -> list[Tensor]:
            return [torch.randn(shape, device=device, dtype=work.dtype) for _ in range(sets)]

        self.k, self.v, self.grad_o = draw(), draw(), draw()
        for k in self.k:
            k.uniform_(-2, 2)
        at = torch.arange(work.channels, device=device)
        self.w_log = -5 + 8 * (at / max(work.channels - 1, 1)) ** 0.7
        self.u = math.log(0.3) + 0.5 * ((at + 1) % 3 - 1)
        pick = self.sample.pick
        w, u = (self.sample.pick_parameter(p) for p in (self.w_log.exp(), self.u))
        self.expected = float64.wkv4(w, u, *(pick(x[0]) for x in (self.k, self.v, self.grad_o)))

    def check(self, direction: str) -> Callable[[Sequence[Tensor]], float]:
        """The relative error of o, or the larger one of dk and dv."""
        wanted = self.expected[:1] if direction == "forward" else self.expected[1:]

        def error(results: Sequence[Tensor]) -> float:
            pairs = zip(results, wanted, strict=True)
            return max(relative_error(self.sample.pick(found), exact) for found, exact in pairs)

        return error


def tidegate_wkv4(inputs: Wkv4Inputs, direction: str) -> Implementation:
    """torch.ops.tidegate.wkv4, or the op that its autograd calls."""
    ops, w, u = torch.ops.tidegate, inputs.w_log.exp(), inputs.u
    pairs = list(zip(inputs.k, inputs.v, strict=True))
    if direction == "forward":
        calls = [lambda k=k, v=v: ops.wkv4(w, u, k, v)[:1] for k, v in pairs]
    else:
        kept = [ops.wkv4_saving(w, u, k, v)[1:] for k, v in pairs]
        sets = zip(pairs, kept, inputs.grad_o, strict=True)
        calls = [
            lambda k=k, v=v, kept=kept_, g=g: ops.wkv4_backward(
                g, None, w, u, k, v, None, *kept, None
            )[2:4]
            for (k, v), kept_, g in sets
        ]
    moved = inputs.work.bytes(direction)
    return Implementation(calls, moved, inputs.check(direction), TOLERANCE[inputs.work.dtype])


class FlaRwkv4:
    """flash-linear-attention's fused_recurrent_rwkv4, called without autograd.

    It writes the state of every token, in the data's dtype, and its backward pass reads them.
    """

    TOLERANCE = 0.3  # of gradients that go through states in bf16: it is not judged here

    def __init__(self) -> None:
        self.module = importlib.import_module("fla.ops.rwkv4.fused_recurrent")
        self.version = importlib.import_module("fla").__version__

    def implementation(self, inputs: Wkv4Inputs, direction: str) -> Implementation:
        w, u = -inputs.w_log.exp(), inputs.u
        first = inputs.k[0].new_zeros(inputs.work.batch, 3, 1, inputs.work.channels)
        first[:, 2] = -1e30

        def forward(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return self.module.fused_recurrent_rwkv4_forward(w, u, k, v, first)

        pairs = list(zip(inputs.k, inputs.v, strict=True))
        if direction == "forward":
            calls = [lambda k=k, v=v: forward(k, v)[:1] for k, v in pairs]
        else:
            none = torch.zeros_like(first)
            kept = [forward(k, v)[1][:, :, :-1] for k, v in pairs]
            sets = zip(pairs, kept, inputs.grad_o, strict=True)
            calls = [
                lambda k=k, v=v, states=states, g=g: self.module.fused_recurrent_rwkv4_backward(
                    w, u, k, v, states, g, none
                )[2:4]
                for (k, v), states, g in sets
            ]
        return Implementation(
            calls, inputs.work.bytes(direction), inputs.check(direction), self.TOLERANCE
        )


def makers(
    work: Work, direction: str, sets: int, device: torch.device, fla: FlaRwkv4 | None
) -> dict[str, Callable[[], Implementation]]:
    """Name -> what makes the implementation, copies aside."""
    inputs = Wkv4Inputs(work, sets, device)
    found = {"tidegate": lambda: tidegate_wkv4(inputs, direction)}
    if fla is not None:
        found["fla.fused_recurrent_rwkv4"] = lambda: fla.implementation(inputs, direction)
    return found
