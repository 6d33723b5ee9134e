"""None where an op needs a tensor: the error names op and argument."""

from __future__ import annotations

import pytest
import torch
from support.op_arguments import arguments, said_name

from tidegate import ops


def test_every_op_is_here() -> None:
    """But the initialisers, which fill what they are given."""
    public = {name for name in ops.__all__ if not name.startswith("init_")}
    assert public | {"gated_rnn_with_logits"} == set(arguments())


@pytest.mark.parametrize("mode", ["plain", "gradients", "inference"])
@pytest.mark.parametrize("op", arguments())
def test_none_for_a_tensor_is_named(op: str, mode: str) -> None:
    if mode == "gradients" and op.endswith("_step"):
        pytest.skip("steps have no gradient")
    given = arguments()[op]
    for tensor in given.values():
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_(mode == "gradients")
    with torch.inference_mode(mode == "inference"):
        check(op, given)


def check(op: str, given: dict[str, torch.Tensor | None]) -> None:
    """Without any one of its tensors the op says which."""
    getattr(ops, op)(**given)
    for name in (name for name, tensor in given.items() if tensor is not None):
        with pytest.raises(
            RuntimeError, match=f"^({op}|{said_name(op)}): {name} must be a tensor, got"
        ):
            getattr(ops, op)(**{**given, name: None})
