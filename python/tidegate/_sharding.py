"""Parameters that may be sharded (DTensors, as FSDP2 makes them)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_sharded(t: Tensor) -> bool:
    """Whether this process may hold only a part of t."""
    return hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """What this process holds of t: the same memory."""
    return t.to_local() if is_sharded(t) else t


def whole(t: Tensor) -> Tensor:
    """All of t, gathered from the processes, of which each has to call this."""
    return t.full_tensor() if is_sharded(t) else t


def like_part(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of `like`, of which this process holds `part`."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def share_of(t: Tensor, like: Tensor) -> Tensor:
    """All of a plain t, which every process has, as `like` of the same shape is held: this process
    keeps its part. Nothing is sent."""
    if not is_sharded(like):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        t.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def fill(p: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Lets `draw` write all of p. A sharded p gets its share of what one process would have drawn,
    so sharding does not change a seed's model; every process draws the whole and keeps its part."""
    if not is_sharded(p):
        draw(p)
        return
    if p.is_meta:  # nothing is drawn there
        return
    drawn = torch.empty(p.shape, dtype=p.dtype)
    draw(drawn)
    with torch.no_grad():
        local(p).copy_(local(share_of(drawn, p)))
