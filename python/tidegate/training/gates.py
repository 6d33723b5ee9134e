"""Forget-gate values of a trained model on what it reads (HGRN, Table 12, Figures 2 and 3)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..models import CausalLM, SequenceClassifier


def windows_of(tokens: np.ndarray, *, rows: int = 8, context: int = 256) -> Tensor:
    """`rows` windows of `context` tokens spread over `tokens`: int64 ``[rows, context]``."""
    starts = np.linspace(0, max(0, len(tokens) - context - 1), rows).astype(np.int64)
    windows = [np.asarray(tokens[start : start + context], dtype=np.int64) for start in starts]
    return torch.from_numpy(np.stack(windows))


@torch.no_grad()
def forget_gates(
    model: CausalLM | SequenceClassifier, ids: Tensor, lengths: Tensor | None = None
) -> list[np.ndarray]:
    """lambda = gamma + (1 - gamma) * sigmoid(f) of every layer: one array ``[channels, samples]``
    of float32 in (0, 1) a layer with a data-dependent forget gate, over all tokens of ids
    ``[B, T]``. lengths: of padded rows, for classifiers.
    """
    ids = ids.to(next(model.parameters()).device)
    logits: dict[int, torch.Tensor] = {}
    handles = []
    for layer, block in enumerate(model.blocks):
        if getattr(block.mixer, "has_gate_logits", False):

            def keep(mixer, inputs, _output, layer=layer):
                # One product more than the layer needs, but it asks for nothing but the projection.
                logits[layer] = mixer.gate_logits(inputs[0]).float()

            handles.append(block.mixer.register_forward_hook(keep))
    training = model.training
    model.eval()
    try:
        model(ids, **({} if lengths is None else {"lengths": lengths}))
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    gates = []
    for layer, gamma in enumerate(model.gammas()):
        if layer not in logits:
            continue
        gate = torch.sigmoid(logits[layer]).flatten(0, 1).T
        if gamma is not None:
            bound = gamma.float()[:, None]
            gate = bound + (1 - bound) * gate
        gates.append(gate.cpu().numpy())
    return gates
