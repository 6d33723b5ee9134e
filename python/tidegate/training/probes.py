"""What a trained model does with what it reads: forget-gate values (HGRN, Table 12, Figures 2 and
3) and token-mixing matrices (its Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import CausalLM, SequenceClassifier


def windows_of(tokens: np.ndarray, *, rows: int = 8, context: int = 256) -> Tensor:
    """`rows` windows of `context` tokens spread over `tokens`: int64 ``[rows, context]``."""
    starts = np.linspace(0, max(0, len(tokens) - context - 1), rows).astype(np.int64)
    windows = [np.asarray(tokens[start : start + context], dtype=np.int64) for start in starts]
    return torch.from_numpy(np.stack(windows))


def mixer_inputs(
    model: CausalLM | SequenceClassifier, ids: Tensor, lengths: Tensor | None = None
) -> list[Tensor]:
    """What every layer's token mixer reads ``[B, T, dim]`` when the model, in evaluation, reads ids
    ``[B, T]``. lengths: of padded rows, for classifiers, whose mixers read them packed, B = 1."""
    return [x for x, _ in _mixer_calls(model, ids, lengths)]


@torch.no_grad()
def _mixer_calls(
    model: CausalLM | SequenceClassifier, ids: Tensor, lengths: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """mixer_inputs() with the offsets of packed sequences ``[N+1]``."""
    ids = ids.to(next(model.parameters()).device)
    calls: dict[int, tuple[Tensor, Tensor | None]] = {}

    def keep(layer: int):
        return lambda _mixer, given, named, _output: calls.__setitem__(
            layer, (given[0], named.get("cu_seqlens"))
        )

    handles = [
        block.mixer.register_forward_hook(keep(layer), with_kwargs=True)
        for layer, block in enumerate(model.blocks)
    ]
    training = model.training
    model.eval()
    try:
        model(ids, **({} if lengths is None else {"lengths": lengths}))
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return [calls[layer] for layer in range(len(model.blocks))]


@torch.no_grad()
def forget_gates(
    model: CausalLM | SequenceClassifier, ids: Tensor, lengths: Tensor | None = None
) -> dict[int, np.ndarray]:
    """What multiplies the state, by layer with a data-dependent forget gate, counted from 0:
    ``lambda = gamma + (1 - gamma) * sigmoid(f)``, f_t of gated linear attention, ``|lambda_t|`` of
    LRU, bounded. One array ``[channels, samples]`` of float32 in (0, 1) each, over all tokens of
    ids ``[B, T]``. lengths: of padded rows, for classifiers.
    """
    gates = {}
    calls = zip(_mixer_calls(model, ids, lengths), model.gammas(), strict=True)
    for layer, ((x, offsets), gamma) in enumerate(calls):
        mixer = model.blocks[layer].mixer
        # One product more than the layer needs, but it asks for nothing but the projection.
        if getattr(mixer, "has_data_gate", False):
            gate = mixer.forget_gate(x, gamma, offsets).float()
            gates[layer] = gate.flatten(0, 1).T.cpu().numpy()
    return gates


@torch.no_grad()
def gate_parts(
    model: CausalLM | SequenceClassifier, ids: Tensor, lengths: Tensor | None = None
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Where the gate's logits come from in layers whose gate reads the state, counted from 0: what
    the input and what the state gives, float32 ``[B, T, dim]`` each, over ids ``[B, T]`` ("Towards
    Understanding Gated Linear Recurrent Neural Networks", Figure 3). With lengths, of the packed
    tokens ``[1, T, dim]``."""
    parts = {}
    calls = zip(_mixer_calls(model, ids, lengths), model.gammas(), strict=True)
    for layer, ((x, offsets), gamma) in enumerate(calls):
        mixer = model.blocks[layer].mixer
        if hasattr(mixer, "gate_parts"):
            logits, from_input = (part.float() for part in mixer.gate_parts(x, gamma, offsets))
            parts[layer] = (from_input.cpu().numpy(), (logits - from_input).cpu().numpy())
    return parts


@torch.no_grad()
def token_mixing(
    model: CausalLM,
    ids: Tensor,
    layers: Sequence[int] | None = None,
    *,
    heads: int | None = None,
    pixels: int | None = None,
) -> dict[int, np.ndarray]:
    """Token-mixing matrices (HGRN, equations 5-7) of the layers, counted from 0, that have one:
    float64 ``[heads, T, T]`` each, over ids ``[1, T]``; row t says what the state or output after
    token t is made of. layers: None = all.

    heads: only the first ones. pixels: magnitudes, of each tile the largest, in as few tokens a
    tile as make no more than `pixels` rows and columns. One layer's whole matrices are in memory at
    a time, T * T * 8 bytes a head.

    Raises:
        ValueError: there is no such layer.
    """
    matrices = {}
    chosen = range(len(model.blocks)) if layers is None else layers
    if wrong := [layer for layer in chosen if not 0 <= layer < len(model.blocks)]:
        raise ValueError(
            f"token_mixing: layers: expected 0 to {len(model.blocks) - 1}, got {wrong[0]}"
        )
    inputs, gammas = mixer_inputs(model, ids), list(model.gammas())
    for layer in chosen:
        mixer = model.blocks[layer].mixer
        if hasattr(mixer, "token_mixing"):
            matrix = mixer.token_mixing(inputs[layer], gammas[layer])[0, :heads]
            matrix = matrix if pixels is None else _largest_of_tiles(matrix, pixels)
            matrices[layer] = matrix.cpu().numpy()
    return matrices


def _largest_of_tiles(matrix: Tensor, pixels: int) -> Tensor:
    """``[H, T, T]`` -> ``[H, P, P]``, P <= pixels: the largest magnitude of each tile."""
    time = matrix.size(-1)
    tile = max(1, -(-time // pixels))
    count = -(-time // tile)
    rows = [band.abs().amax(1) for band in matrix.split(tile, 1)]  # a band of rows at a time
    columns = F.pad(torch.stack(rows, 1), (0, count * tile - time))
    return columns.unflatten(2, (count, tile)).amax(3)
