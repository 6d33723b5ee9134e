"""Reading long sequences piece by piece, the state carried along."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..models import CausalLM
from .runtime import autocast


@torch.no_grad()
def logits_in_pieces(
    model: CausalLM, ids: Tensor, *, precision: str = "fp32", piece: int = 2048
) -> Iterator[tuple[int, Tensor]]:
    """(position, logits ``[B, <= piece, vocab]``) of ids ``[B, T]`` on the model's device, piece
    after piece: every position sees all before it, and the logits of one piece are held at a time.
    """
    if piece < 1:
        raise ValueError(f"logits_in_pieces: piece: expected 1 or more, got {piece}")
    keeps = any(getattr(block.mixer, "keeps_tokens", False) for block in model.blocks)
    state = model.init_state(ids.size(0), capacity=ids.size(1)) if keeps else None
    for start in range(0, ids.size(1), piece):
        with autocast(ids.device, precision):
            output = model(ids[:, start : start + piece], state=state)
        state = output.state
        yield start, output.logits.float()
