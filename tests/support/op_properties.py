"""What holds of every op's gradients, whatever the op computes: one check a property.

A case is a `cases.Case`, a `gla_cases.GlaCase` or their like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from support import cases

Arguments = dict[str, Tensor | None]


def placed(case: cases.Case, device: str) -> tuple[Arguments, tuple[Tensor | None, Tensor | None]]:
    """The op's arguments by name, and the gradients of its two results."""
    made = case.make_inputs()
    tensors = {k: cases.to_device(v, device, case.layout) for k, v in made.items()}
    return tensors, (tensors.pop("dh"), tensors.pop("dh_final"))


# opcheck's tests without the one that traces the call and compares results and gradients, most of
# its time: for calls of which another test does that, of the very kind that is traced (what is
# traced knows dtypes and which arguments there are, but neither sizes above one nor the kernel).
NOT_TRACED = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(
    op: torch._ops.OpOverload,
    arguments: Sequence[object],
    keywords: dict[str, object] | None = None,
    *,
    traced: bool = True,
) -> None:
    """torch's opcheck; see NOT_TRACED."""
    tests = (*NOT_TRACED, "test_aot_dispatch_dynamic") if traced else NOT_TRACED
    torch.library.opcheck(op, tuple(arguments), keywords, test_utils=tests)


def call(case: cases.Case, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The op's result over time, and the final state."""
    import tidegate

    return getattr(tidegate.ops, case.op)(**arguments, **case.options())


def leaves(arguments: Arguments) -> dict[str, Tensor]:
    """The arguments that have a gradient."""
    return {k: v for k, v in arguments.items() if v is not None and k != "cu_seqlens"}


def check_packed(case: cases.Case, device: str, lengths: tuple[int, ...], reverse: bool) -> None:
    """Packed sequences, their offsets in either integer type, against the oracle."""
    for offsets_dtype in (torch.int32, torch.int64):
        packed = replace(case, lengths=lengths, reverse=reverse, offsets_dtype=offsets_dtype)
        cases.check(packed, device)


def check_equals_the_yardstick(case: cases.Case, device: str) -> None:
    """Bit by bit, as where nothing is computed: no batch, no time, no channels."""
    found = cases.run(case, device, backward=True)
    expected = cases.reference(case, backward=True, exact=False)
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert torch.equal(value.cpu(), expected[name]), name


def check_no_sequences(case: cases.Case, device: str) -> None:
    """Results and gradients of no sequences are zero, or empty."""
    for name, value in cases.run(replace(case, lengths=()), device, backward=True).items():
        assert not value.count_nonzero(), name


def check_one_argument_alone(case: cases.Case, device: str) -> None:
    """An argument that alone wants a gradient gets the one that it gets among all."""
    expected = cases.run(case, device, backward=True)
    arguments, loss = placed(case, device)
    for name, value in leaves(arguments).items():
        leaf = value.detach().requires_grad_()
        results = call(case, {**arguments, name: leaf})
        (grad,) = torch.autograd.grad(results, (leaf,), loss)
        assert torch.equal(grad, expected[f"d{name}"]), name


def check_gradients_like_arguments(case: cases.Case, device: str) -> None:
    """A gradient has its argument's dtype, shape and device."""
    arguments, _ = placed(case, device)
    found = cases.run(case, device, backward=True)
    for name, value in leaves(arguments).items():
        grad = found[f"d{name}"]
        assert (grad.dtype, grad.shape, grad.device) == (value.dtype, value.shape, value.device)


def check_gradients_of_a_sum(case: cases.Case, device: str) -> None:
    """`h.sum()` hands over a gradient of strides zero; `h.transpose()` one of odd strides."""
    arguments, _ = placed(case, device)
    name = next(iter(arguments))
    leaf = arguments[name] = arguments[name].detach().requires_grad_()

    def grad_of(loss_of: object) -> Tensor:
        h, final = call(case, arguments)
        return torch.autograd.grad(loss_of(h) + final.sum().real, leaf)[0]

    expected = grad_of(lambda h: (h * torch.ones_like(h)).sum().real)
    assert torch.equal(grad_of(lambda h: h.sum().real), expected)
    assert torch.equal(grad_of(lambda h: h.transpose(1, -1).flatten().sum().real), expected)


def kept_for_backward(case: cases.Case, device: str) -> tuple[list[Tensor], Arguments, Tensor]:
    """What autograd keeps of a call, its arguments, and its result over time."""
    arguments, _ = placed(case, device)
    arguments |= {k: v.detach().requires_grad_() for k, v in leaves(arguments).items()}
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        h, _ = call(case, arguments)
    assert kept
    return kept, arguments, h


def check_bitwise_repeatable(case: cases.Case, device: str) -> None:
    """Results have the same bits again and again, on any number of threads."""
    first = cases.run(case, device, backward=True)
    threads = torch.get_num_threads()
    try:
        for run in range(3):
            torch.set_num_threads(1 + run)
            for name, value in cases.run(case, device, backward=True).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(threads)


def check_export(
    function: Callable, example: Callable[[int], Sequence[Tensor]], over_time: Sequence[bool]
) -> None:
    """A program exported with a dynamic time, dimension 1 of the tensors that have one, computes
    the same at other lengths. example: the arguments of that many tokens."""

    class Model(torch.nn.Module):
        def forward(self, values: list[Tensor]) -> tuple[Tensor, ...]:
            return function(*values)

    time = torch.export.Dim("time", min=2, max=1000)
    shapes = [{1: time} if is_over else None for is_over in over_time]
    exported = torch.export.export(Model(), (list(example(9)),), dynamic_shapes=(shapes,))
    for length in (4, 50):
        values = list(example(length))
        for left, right in zip(exported.module()(values), Model()(values), strict=True):
            assert torch.equal(left, right)


def check_no_alias(given: Iterable[Tensor], results: Iterable[Tensor]) -> None:
    """No result shares memory with what was given."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in given}
    for result in results:
        assert not result.numel() or result.untyped_storage().data_ptr() not in storages
