"""One training call of any op, whichever family its case is of: what tests of graphs, streams,
devices and memory share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from support import cases, wkv4_cases, wkv4_oracle
from support import forgetting_attention_cases as attention_cases
from support.forgetting_attention_cases import AttentionCase
from support.gla_cases import GlaCase
from support.rnn_cases import RnnCase
from support.scan_cases import ScanCase
from support.wkv4_cases import Wkv4Case

AnyCase = ScanCase | GlaCase | Wkv4Case | RnnCase | AttentionCase
Inputs = dict[str, Tensor | None]

LOSS = ("dh", "dh_final", "do", "dfinal", "dlse")  # gradients of the results, in their order


def name(case: AnyCase) -> str:
    """A test's id; the cases of some families do not say their op."""
    family = {Wkv4Case: "wkv4-", AttentionCase: "forgetting_attention-"}
    return family.get(type(case), "") + str(case)


def inputs_of(case: AnyCase, device: str = "cuda", seed: int = 0) -> Inputs:
    """The op's tensors by name, and the gradients of its two results."""
    case = replace(case, seed=seed)
    made = (
        attention_cases.make_inputs(case) if isinstance(case, AttentionCase) else case.make_inputs()
    )
    return {k: cases.to_device(v, device, case.layout) for k, v in made.items()}


def train(case: AnyCase, inputs: Inputs) -> list[Tensor]:
    """Both results and every gradient of one call."""
    import tidegate

    named = {k: v for k, v in inputs.items() if k not in LOSS}
    leaves = [v for k, v in named.items() if v is not None and not k.startswith("cu_seqlens")]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = [inputs[k] for k in LOSS if k in inputs]
    with _repeatable(isinstance(case, AttentionCase)):
        results, differentiated = call(case, named, tidegate.ops)
        return [*results, *torch.autograd.grad(differentiated, leaves, loss)]


def call(
    case: AnyCase, named: Inputs, functions: ModuleType, **options: object
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results of `tidegate.ops` or `tidegate.reference`, and what the loss reads of them."""
    if isinstance(case, Wkv4Case):  # a state has a scaling exponent, which has no gradient
        o, final = functions.wkv4(**named, **options)
        return (o, final), (o, wkv4_oracle.mean_and_log(final))
    if isinstance(case, AttentionCase):
        options |= case.options()
        results = functions.forgetting_attention(**named, **options, return_lse=True)
    else:
        results = getattr(functions, case.op)(**named, **case.options(), **options)
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
    """The case with another length."""
    return replace(case, **{"queries" if isinstance(case, AttentionCase) else "time": time})


def check(case: AnyCase, device: str, **options: object) -> None:
    """Runs the case and holds every result and gradient against its oracle."""
    checks = {Wkv4Case: wkv4_cases.check, AttentionCase: attention_cases.check}
    checks.get(type(case), cases.check)(case, device, **options)


def oracle(case: AnyCase) -> dict[str, Tensor]:
    """Results and gradients of the case's own oracle, in float64."""
    if isinstance(case, Wkv4Case):
        return wkv4_oracle.reference(case.make_inputs(), exact=True)
    family = attention_cases if isinstance(case, AttentionCase) else cases
    return family.reference(case, backward=True, exact=True)


def reference(case: AnyCase) -> dict[str, Tensor]:
    """What `oracle` has but the sizes of terms, by `tidegate.reference` and autograd."""
    import tidegate

    wide = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
    made = inputs_of(case, "cpu", case.seed)
    results = {Wkv4Case: ("o", "final"), AttentionCase: ("o", "lse")}.get(type(case))
    results = results or ("h", "final")
    loss = {"h": "dh", "o": "do", "lse": "dlse"}
    loss["final"] = "dfinal" if isinstance(case, Wkv4Case) else "dh_final"
    named = {k: v for k, v in made.items() if k not in LOSS}
    for name, value in named.items():
        if value is not None and not name.startswith("cu_seqlens"):
            named[name] = value.to(wide.get(value.dtype, torch.float64)).requires_grad_()
    _, found = call(case, named, tidegate.reference, dtype=torch.float64)
    read = [(r, made.get(loss[n])) for n, r in zip(results, found, strict=True)]
    read = [(r, grad.to(r.dtype)) for r, grad in read if grad is not None]
    leaves = {k: v for k, v in named.items() if v is not None and v.requires_grad}
    out = dict(zip(results, found, strict=True))
    if read:
        outputs, grads = zip(*read, strict=True)
        found = torch.autograd.grad(
            outputs, list(leaves.values()), grads, allow_unused=True, materialize_grads=True
        )
        out |= {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {name: value.detach() for name, value in out.items()}
