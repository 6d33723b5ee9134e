"""Calls of the ops with a state, as the tests of what torch makes of ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

import tidegate
from support import cases
from support.gla_cases import GlaCase
from support.scan_cases import ScanCase

ops = tidegate.ops

CASES = [
    ScanCase("hgru", batch=2, time=9, channels=4, dtype=torch.float32),
    ScanCase("hgru", batch=2, time=9, channels=4, dtype=torch.bfloat16, theta=True),
    ScanCase("hgru", channels=4, lengths=(3, 0, 6), gamma=False, h0=None, gate_dtype=torch.float32),
    ScanCase("linear_scan", batch=2, time=9, channels=4, dtype=torch.float32, reverse=True),
    ScanCase("linear_scan", batch=2, time=9, channels=4, dtype=torch.complex64, constant=True),
    ScanCase("linear_scan", channels=4, dtype=torch.complex64, gate_dtype=torch.float32, h0=None),
    ScanCase("lru_scan", batch=2, time=9, channels=4, dtype=torch.bfloat16, theta=True),
    ScanCase("lru_scan", channels=4, lengths=(3, 0, 6), h0=None, reverse=True),
    ScanCase("lru_scan", channels=4, dtype=torch.float64, bound_dtype=torch.float32, theta=True),
    *(
        ScanCase(
            op, channels=4, dtype=dtype, gate_dtype=gate, bound_dtype=torch.float32, h0="single"
        )
        for op, dtype, gate in (
            ("hgru", torch.float64, torch.float32),
            ("linear_scan", torch.complex128, torch.float32),
        )
    ),
    # No size is another one's: torch.compile takes equal sizes for one.
    GlaCase(time=9, heads=3, key_dim=4),
    GlaCase(heads=3, key_dim=4, lengths=(3, 0, 6), gamma=False, h0=None, gate_dtype=torch.float32),
    GlaCase("gated_linear_attention", time=9, heads=3, key_dim=4, dtype=torch.bfloat16),
    GlaCase("gated_linear_attention", time=9, heads=3, per_head=True, h0="data", reverse=True),
]
ids = {"ids": str}


def arguments_of(case: ScanCase, device: str, *, grad: bool = False) -> dict[str, Tensor | None]:
    """The op's tensors by name, without the loss."""
    made = {k: cases.to_device(v, device, case.layout) for k, v in cases.make_inputs(case).items()}
    named = {k: v for k, v in made.items() if k not in ("dh", "dh_final")}
    if grad:
        for name, value in named.items():
            if value is not None and name != "cu_seqlens":
                named[name] = value.detach().requires_grad_()
    return named


def positional(case: ScanCase, named: dict[str, Tensor | None]) -> tuple[object, ...]:
    """The call as torch.ops.tidegate takes it."""
    tensors = [v for k, v in named.items() if k != "cu_seqlens"]
    return (*tensors, *case.options().values(), named["cu_seqlens"])


def call(case: ScanCase, named: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    return getattr(ops, case.op)(**named, **cases.options(case))


def loss_of(results: tuple[Tensor, Tensor]) -> Tensor:
    """A real scalar that weighs every element of both results."""
    total = torch.zeros((), device=results[0].device)
    for result in results:
        value = torch.view_as_real(result) if result.is_complex() else result
        total = total + (value.float() * value.float().detach().cos()).sum()
    return total


def gradients(named: dict[str, Tensor | None], results: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = [v for v in named.values() if v is not None and v.requires_grad]
    return list(torch.autograd.grad(loss_of(results), leaves))
