"""How the processes of a run share a model: whole in each (DDP), or a part in each (FSDP2).

Both are torch's own, and so is what they reduce gradients with. Parameters, gradients and optimiser
states stay fp32 and forward passes run under autocast, as in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._sharding import is_sharded, share_of, whole
from .distributed import ALONE, Group


class Placement:
    """A model on this process's device, for a group of one.

    model: where it is looked at, saved and scored. call: what a training step calls.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: Group = ALONE) -> None:
        self.group = group
        self.device = device
        self.model = self._place(model)
        self.call: Callable[..., Any] = self.model

    def _place(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def connect(self) -> None:
        """Called once, when blocks and parameters are as they will be."""

    def reducing(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of one part of a batch, forward and backward: gradients are summed over the
        processes with the last."""
        return contextlib.nullcontext()

    def share_of_state(self, content: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's whole tensors as this process holds them."""
        return content

    def whole_state(self) -> dict[str, Tensor]:
        """The model's tensors in rank 0; where they are shared, all have to call it, and the others
        get nothing."""
        return self.model.state_dict()

    def all_finite(self, finite: Tensor) -> Tensor:
        """Flags ``[N]`` of this process's parts of the parameters, as they are for the whole."""
        return finite


class Replicated(Placement):
    """A whole model in each process, by DistributedDataParallel."""

    def connect(self) -> None:
        self.call = nn.parallel.DistributedDataParallel(
            self.model, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    @contextlib.contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else self.call.no_sync():
            yield


class Sharded(Placement):
    """A part of every parameter in each process, by FSDP2 (fully_shard): a block's parameters are
    gathered where it runs, and what is outside the blocks for the whole step.

    model: may be on the meta device, and is drawn then, each process its part of what one would
    have drawn.
    """

    def _place(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.group.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=self.device)
            model.reset_parameters()
        return model

    @contextlib.contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(is_last)
        yield

    def share_of_state(self, content: dict[str, Any]) -> dict[str, Any]:
        like = next(self.model.parameters())  # all are cut alike, into rows

        def place(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: place(each) for key, each in value.items()}
            is_whole = isinstance(value, Tensor) and value.ndim and not is_sharded(value)
            return share_of(value, like) if is_whole else value

        placed = {name: place(content[name]) for name in ("model", "optimizer")}
        return {**content, **placed}

    def whole_state(self) -> dict[str, Tensor]:
        found = {}
        for name, t in self.model.state_dict().items():
            t = whole(t).cpu()  # every process takes part in this
            if self.group.leads:
                found[name] = t
        return found

    def all_finite(self, finite: Tensor) -> Tensor:
        wrong = self.group.sum((~finite).to(torch.int64))
        return wrong == 0


_PLACEMENTS = {"none": Placement, "ddp": Replicated, "fsdp": Sharded}


def place(model: nn.Module, device: torch.device, group: Group) -> Placement:
    """The model as the group's mode has it."""
    return _PLACEMENTS[group.mode](model, device, group)
