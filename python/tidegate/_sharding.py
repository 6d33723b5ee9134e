"""Writing parameters that may be sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def fill(p: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Lets `draw` write all of p. A sharded p (a DTensor, as FSDP2 makes them) gets its share of
    what one process would have drawn, so sharding does not change a seed's model."""
    if not hasattr(p, "device_mesh"):
        draw(p)
        return
    if p.is_meta:  # nothing is drawn there
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(p.shape, dtype=p.dtype)
    draw(whole)
    with torch.no_grad():
        p.copy_(distribute_tensor(whole.to(p.device), p.device_mesh, p.placements))
