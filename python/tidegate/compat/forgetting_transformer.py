"""The Forgetting Transformer's release (zhixuan-lin/forgetting-transformer), backed by tidegate.

``from forgetting_transformer import forgetting_attention`` becomes
``from tidegate.compat.forgetting_transformer import forgetting_attention``.
"""

from __future__ import annotations

import math
from typing import Literal, Optional, Union

import torch
from torch import Tensor

from .. import ops
from ._common import common_dtype, gate_for

__all__ = ["forgetting_attention"]

# What "auto" leaves out, of the weights in a row: exp(-10) over the number of keys each.
_AUTO_TOLERANCE = -10.0


def forgetting_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_fgate: torch.Tensor,
    *,
    head_first: bool = False,
    seq_start: Optional[torch.Tensor] = None,  # noqa: UP045
    sm_scale: Optional[float] = None,  # noqa: UP045
    adaptive_threshold: Optional[Union[Literal["auto"], float, torch.Tensor]] = None,  # noqa: UP007, UP045
):
    """Forgetting attention: q ``[B, Tq, H, D]``, k, v ``[B, Tk, H, D]``, log_fgate ``[B, Tk, H]``
    -> o ``[B, Tq, H, D]``; with head_first heads before time, in and out.

    The last query is on the last key. seq_start int ``[B]``: no query of row b sees a key before
    seq_start[b], for batches padded on the left; a query that sees no key gives zeros. sm_scale:
    ``D^-0.5`` when None. adaptive_threshold: "auto" leaves out keys whose weights in a row are
    proven to be below exp(-10) together. A number or a tensor, how far a gate must have forgotten
    before the release leaves a key out, is taken for "auto": that bound needs no norms of q and k.
    """
    if head_first:
        q, k, v, log_fgate = (t.transpose(1, 2) for t in (q, k, v, log_fgate))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    dtype = common_dtype(q, k, v)
    q, k, v, log_f = q.to(dtype), k.to(dtype), v.to(dtype), gate_for(log_fgate, dtype)
    prune = _prune(adaptive_threshold)
    if seq_start is None:
        o = ops.forgetting_attention(q, k, v, log_f, scale=scale, prune=prune)
    else:
        o = _from_start(q, k, v, log_f, seq_start, scale, prune)
    return o.transpose(1, 2) if head_first else o


def _prune(threshold: Literal["auto"] | float | Tensor | None) -> float | None:
    """The op's bound on the weights that are left out in a row."""
    if isinstance(threshold, str) and threshold != "auto":
        raise ValueError(
            "forgetting_attention: adaptive_threshold: expected 'auto', a number or a tensor; "
            f"got {threshold!r}"
        )
    return None if threshold is None else math.exp(_AUTO_TOLERANCE)


def _from_start(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    start: Tensor,
    scale: float,
    prune: float | None,
) -> Tensor:
    """The op over the keys from start ``[B]`` on, without waiting for the device: the gate of the
    first of them is shut, which leaves nothing of the keys before."""
    keys = torch.arange(k.shape[1], device=k.device)
    start = start.to(k.device)[:, None]
    log_f = log_f.masked_fill((keys < start)[..., None], 0.0)
    log_f = log_f.masked_fill((keys == start)[..., None], -math.inf)
    o = ops.forgetting_attention(q, k, v, log_f, scale=scale, prune=prune)
    positions = keys[k.shape[1] - q.shape[1] :]
    return o.masked_fill((positions < start)[..., None, None], 0.0)
