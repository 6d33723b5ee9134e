"""What attention looks at: the forget-gate matrix F and the attention map of single heads
(Forgetting Transformer, Figure 3), computed in tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models import CausalLM
from .errors import UserError
from .probes import mixer_inputs


@dataclass(frozen=True)
class HeadMap:
    """forget: F_ij = prod of f over j < l <= i; None for a head without a gate. attention: the
    weights of key j for query i. Both float32 ``[P, P]``, the largest value of each tile of
    `tile` x `tile` tokens; zero where j > i. layer, head: counted from 1."""

    layer: int
    head: int
    tile: int
    forget: np.ndarray | None
    attention: np.ndarray


@torch.no_grad()
def head_maps(
    model: CausalLM, ids: Tensor, layers: Sequence[int], heads: Sequence[int], *, pixels: int = 512
) -> list[HeadMap]:
    """The maps of the chosen heads of the chosen layers, both counted from 1, for one sequence ids
    ``[T]``, in at most `pixels` x `pixels` tiles. Never more than a row of tiles is in memory.

    Raises:
        UserError: a layer has no attention, or there is no such layer or head.
    """
    operands = _attention_operands(model, ids[None], layers)
    found = []
    for layer in layers:
        q, k, log_f, window = operands[layer]
        for head in heads:
            if not 1 <= head <= q.size(2):
                raise UserError(f"plot: heads: expected numbers from 1 to {q.size(2)}, got {head}")
            at, group = head - 1, (head - 1) * k.size(2) // q.size(2)
            gate = None if log_f is None else log_f[0, :, at]
            forget, attention, tile = _tiled(q[0, :, at], k[0, :, group], gate, window, pixels)
            found.append(HeadMap(layer, head, tile, forget, attention))
    return found


def _attention_operands(model: CausalLM, ids: Tensor, layers: Sequence[int]) -> dict[int, Any]:
    """q, k, log f and the window of each of the layers."""
    for layer in layers:
        if not 1 <= layer <= len(model.blocks):
            raise UserError(
                f"plot: layers: expected numbers from 1 to {len(model.blocks)}, got {layer}"
            )
        mixer = model.blocks[layer - 1].mixer
        if not hasattr(mixer, "attention_operands"):
            raise UserError(
                f"plot: layers: expected layers of softmax attention; layer {layer} is "
                f"{type(mixer).__name__}"
            )
    inputs, gammas = mixer_inputs(model, ids), model.gammas()
    mixers = {layer: model.blocks[layer - 1].mixer for layer in layers}
    return {
        layer: (*mixer.attention_operands(inputs[layer - 1], gammas[layer - 1]), mixer.window)
        for layer, mixer in mixers.items()
    }


def _tiled(
    q: Tensor, k: Tensor, log_f: Tensor | None, window: int | None, pixels: int
) -> tuple[np.ndarray | None, np.ndarray, int]:
    """F and attention of one head, q, k ``[T, D]``, log f ``[T]``, tile by tile."""
    time = q.size(0)
    tile = max(1, -(-time // pixels))
    count = -(-time // tile)
    places = torch.arange(time, device=q.device)
    # Sums over many tokens keep their digits in fp64.
    c = None if log_f is None else log_f.double().cumsum(0)
    forget = None if c is None else np.zeros((count, count), dtype=np.float32)
    attention = np.zeros((count, count), dtype=np.float32)
    for row in range(count):
        here = slice(row * tile, min((row + 1) * tile, time))
        hidden = places[here, None] < places
        scores = (q[here].float() @ k.float().T) / math.sqrt(q.size(1))
        if c is not None:
            fades = (c[here, None] - c).masked_fill(hidden, -torch.inf)
            forget[row] = _largest(fades.exp().float(), tile, count)
            scores = scores + fades.float()
        if window is not None:
            hidden = hidden | (places[here, None] - places >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attention[row] = _largest(weights, tile, count)
    return forget, attention, tile


def _largest(values: Tensor, tile: int, count: int) -> np.ndarray:
    """The largest of each `tile` columns of all rows ``[R, T]``: ``[count]``."""
    columns = values.amax(0)
    padded = torch.nn.functional.pad(columns, (0, count * tile - columns.numel()))
    return padded.view(count, tile).amax(1).cpu().numpy()
