"""One training call of any op, whichever family its case is of: what tests of graphs, streams,
devices and memory share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from support import cases, fox_cases, wkv4_cases, wkv4_oracle
from support.fox_cases import FoxCase
from support.gla_cases import GlaCase
from support.rnn_cases import RnnCase
from support.scan_cases import ScanCase
from support.wkv4_cases import Wkv4Case

AnyCase = ScanCase | GlaCase | Wkv4Case | RnnCase | FoxCase
Inputs = dict[str, Tensor | None]

_LOSS = ("dh", "dh_final", "do", "dfinal", "dlse")  # gradients of the results, in their order


def name(case: AnyCase) -> str:
    """A test's id; the cases of some families do not say their op."""
    family = {Wkv4Case: "wkv4-", FoxCase: "forgetting_attention-"}
    return family.get(type(case), "") + str(case)


def inputs_of(case: AnyCase, device: str = "cuda", seed: int = 0) -> Inputs:
    """The op's tensors by name, and the gradients of its two results."""
    case = replace(case, seed=seed)
    made = fox_cases.make_inputs(case) if isinstance(case, FoxCase) else case.make_inputs()
    return {k: cases.to_device(v, device, case.layout) for k, v in made.items()}


def train(case: AnyCase, inputs: Inputs) -> list[Tensor]:
    """Both results and every gradient of one call."""
    named = {k: v for k, v in inputs.items() if k not in _LOSS}
    leaves = [v for k, v in named.items() if v is not None and not k.startswith("cu_seqlens")]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = [inputs[k] for k in _LOSS if k in inputs]
    with _repeatable(isinstance(case, FoxCase)):
        results, differentiated = _call(case, named)
        return [*results, *torch.autograd.grad(differentiated, leaves, loss)]


def _call(case: AnyCase, named: Inputs) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results, and what the loss reads of them."""
    from tidegate import ops

    if isinstance(case, Wkv4Case):  # a state has a gauge, which has no gradient
        o, final = ops.wkv4(**named)
        return (o, final), (o, wkv4_oracle.mean_and_log(final))
    if isinstance(case, FoxCase):
        results = ops.forgetting_attention(**named, **case.options(), return_lse=True)
    else:
        results = getattr(ops, case.op)(**named, **case.options())
    return results, results


@contextmanager
def _repeatable(wanted: bool) -> Iterator[None]:
    """Attention's gradients have the same bits only where torch is asked for that."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def of_time(case: AnyCase, time: int) -> AnyCase:
    """The same call for another length."""
    return replace(case, **{"queries" if isinstance(case, FoxCase) else "time": time})


def check(case: AnyCase, device: str) -> None:
    """Runs the case and holds every result and gradient against its oracle."""
    checks = {Wkv4Case: wkv4_cases.check, FoxCase: fox_cases.check}
    checks.get(type(case), cases.check)(case, device)
