"""Classifiers over the same blocks: token sequences and images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn._common import make_linear, normal_, reset_linear, wide_dtype, widen
from ._inputs import check_ids, check_labels
from .block import Model, Output, mean_cross_entropy
from .causal_lm import pack
from .config import LMConfig


def _check_classes(owner: str, config: LMConfig) -> None:
    if config.num_classes is None:
        raise ValueError(f"{owner}: num_classes: expected a positive integer; got None")


def mean_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean over each packed sequence: x ``[total, dim]`` -> ``[N, dim]``, summed in fp32 (fp64
    for fp64); zeros for an empty sequence."""
    lengths = cu_seqlens.to(x.device).long().diff()
    sums = torch.segment_reduce(widen(x), "sum", lengths=lengths, axis=0, unsafe=True, initial=0)
    return (sums / lengths.clamp(min=1)[:, None]).to(x.dtype)


def mean_over_time(x: Tensor) -> Tensor:
    """The mean over T: x ``[B, T, dim]`` -> ``[B, dim]``, summed in fp32 (fp64 for fp64)."""
    return (x.sum(dim=1, dtype=wide_dtype(x.dtype)) / max(x.size(1), 1)).to(x.dtype)


class SequenceClassifier(Model):
    """Classifies token sequences: embedding, blocks, final norm, mean over time, head (HGRN's
    Long Range Arena models; section 4.1).

    Padding takes no part in anything: padded batches are packed first. Parameters:
    ``embedding.weight``, ``lower_bounds``, ``blocks``, ``norm``, ``head.{weight,bias}``.
    """

    def __init__(self, config: LMConfig, *, device=None, dtype=None) -> None:
        super().__init__(config, dtype=dtype)
        _check_classes("SequenceClassifier", config)
        if config.vocab_size is None:
            raise ValueError(
                "SequenceClassifier: vocab_size: expected a positive integer; got None"
            )
        where = {"device": "meta", "dtype": dtype}
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.dim, **where), freeze=False
        )
        self.head = make_linear(config.dim, config.num_classes, True, **where)
        self._materialise(device)

    def reset_parameters(self) -> None:
        """embedding (normal, 1), lower_bounds, blocks, norm, head, in this order."""
        normal_(self.embedding.weight, 1.0)
        self._reset_blocks()
        reset_linear(self.head)
        self._reset_matrices()

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Output:
        """ids ``[B, T]`` -> Output(logits ``[N, classes]``, loss, None).

        N = B whole rows, or the first `lengths` ``[B]`` tokens of each (read on the host), or the
        N sequences that cu_seqlens ``[N+1]`` bounds in a B = 1 batch. labels: int64 ``[N]``.
        An empty sequence's pooled features are zeros.
        """
        check_ids("SequenceClassifier", ids, self.config.vocab_size)
        if lengths is not None:
            if cu_seqlens is not None:
                raise ValueError("SequenceClassifier: expected lengths or cu_seqlens; got both")
            ids, cu_seqlens = pack(ids, lengths)
        x, _ = self._run(self.embedding(ids), None, cu_seqlens)
        pooled = mean_over_time(x) if cu_seqlens is None else mean_pool(x[0], cu_seqlens)
        logits = self.head(pooled)
        if labels is not None:
            count, classes = logits.shape
            check_labels("SequenceClassifier", labels, (count,), "one a sequence", classes)
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        return Output(logits, loss, None)


class ImageClassifier(Model):
    """Classifies images (HGRN, Table 7): patches in reading order, linear embedding, blocks, final
    norm, mean over patches, head. No class token, no positions, so any image size goes.

    Parameters: ``patch.{weight,bias}`` with weight ``[dim, channels * patch * patch]``,
    ``lower_bounds``, ``blocks``, ``norm``, ``head.{weight,bias}``.
    """

    def __init__(self, config: LMConfig, *, device=None, dtype=None) -> None:
        super().__init__(config, dtype=dtype)
        _check_classes("ImageClassifier", config)
        if config.patch_size is None:
            raise ValueError("ImageClassifier: patch_size: expected a positive integer; got None")
        where = {"device": "meta", "dtype": dtype}
        pixels = config.image_channels * config.patch_size**2
        self.patch = make_linear(pixels, config.dim, True, **where)
        self.head = make_linear(config.dim, config.num_classes, True, **where)
        self._materialise(device)

    def reset_parameters(self) -> None:
        """patch, lower_bounds, blocks, norm, head, in this order."""
        reset_linear(self.patch)
        self._reset_blocks()
        reset_linear(self.head)
        self._reset_matrices()

    def _patches(self, images: Tensor) -> Tensor:
        """images ``[B, C, H, W]`` -> patches in reading order ``[B, H/p * W/p, C*p*p]``."""
        p, c = self.config.patch_size, self.config.image_channels
        if images.dim() != 4 or images.size(1) != c or images.size(2) % p or images.size(3) % p:
            raise ValueError(
                f"ImageClassifier: images: expected [B, {c}, H, W] with H and W multiples of the "
                f"patch size {p}; got {tuple(images.shape)}"
            )
        b, _, h, w = images.shape
        x = images.reshape(b, c, h // p, p, w // p, p)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // p) * (w // p), c * p * p)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        """images ``[B, C, H, W]`` -> Output(logits ``[B, classes]``, loss, None); labels int64
        ``[B]``. The pooled features of an image without patches are zeros."""
        x, _ = self._run(self.patch(self._patches(images)), None, None)
        logits = self.head(mean_over_time(x))
        if labels is not None:
            count, classes = logits.shape
            check_labels("ImageClassifier", labels, (count,), "one an image", classes)
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        return Output(logits, loss, None)
