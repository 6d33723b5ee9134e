"""Which tokens of a batch are real, and which belong together: from masks and positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Tokens:
    """The tokens ``[B, T]`` of one forward pass, laid out as the mixers take them.

    cu_seqlens: None for B whole rows; otherwise the bounds of the sequences in ``take(x)``. padded:
    whether take() leaves tokens out. packed: whether the sequences are not the rows, so that no
    cache can go on with them.
    """

    def __init__(self, shape: torch.Size) -> None:
        self.batch, self.time = shape
        self.cu_seqlens: Tensor | None = None
        self.packed = False
        self._places: Tensor | None = None

    @property
    def padded(self) -> bool:
        return self._places is not None

    def take(self, x: Tensor) -> Tensor:
        """x ``[B, T, ...]`` as the mixers take it: itself, or ``[1, tokens, ...]``."""
        if self.cu_seqlens is None:
            return x
        x = x.flatten(0, 1)
        return (x if self._places is None else x[self._places])[None]

    def put(self, y: Tensor) -> Tensor:
        """What take() gave back at its places, zeros at padding: ``[B, T, ...]``."""
        if self.cu_seqlens is None:
            return y
        flat = y[0]
        if self._places is not None:
            rows = y.new_zeros(self.batch * self.time, *y.shape[2:])
            flat = rows.index_copy(0, self._places.to(y.device), flat)
        return flat.unflatten(0, (self.batch, self.time))


def lay_out(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tokens:
    """How to read embeddings x ``[B, T, dim]``.

    attention_mask ``[B, >= T]``: 1 for tokens, 0 for padding, wherever it is; the last T columns
    belong to x. Without one, cu_seqlens ``[N + 1]`` bounds the sequences packed into a batch of
    one, or position_ids ``[B, T]`` that begin anew do. Looks at masks and positions on the host,
    but not while it is compiled, when masks are believed to be there for a reason.
    """
    tokens = Tokens(x.shape[:2])
    if cu_seqlens is not None:
        if tokens.batch != 1:
            raise ValueError(
                f"TidegateModel: cu_seq_lens_q: expected a batch of 1; got {tokens.batch}"
            )
        tokens.cu_seqlens, tokens.packed = cu_seqlens, True
    elif attention_mask is not None:
        _leave_padding_out(tokens, attention_mask, x)
    elif position_ids is not None and tokens.time > 1:
        _find_sequences(tokens, position_ids)
    return tokens


def _leave_padding_out(tokens: Tokens, mask: Tensor, x: Tensor) -> None:
    if mask.dim() != 2 or mask.size(0) != tokens.batch or mask.size(1) < tokens.time:
        raise ValueError(
            f"TidegateModel: attention_mask: expected [B={tokens.batch}, T >= {tokens.time}] of 1 "
            f"for tokens and 0 for padding; got {tuple(mask.shape)}"
        )
    kept = mask[:, mask.size(1) - tokens.time :].to(x.device).bool()
    if not torch.compiler.is_compiling() and bool(kept.all()):
        return
    tokens._places = kept.flatten().nonzero().squeeze(-1)
    tokens.cu_seqlens = F.pad(kept.sum(1).cumsum(0), (1, 0))


def _find_sequences(tokens: Tokens, positions: Tensor) -> None:
    """A sequence begins wherever a position does not follow the one before."""
    if positions.dim() != 2 or positions.size(1) != tokens.time:
        return  # of several dimensions: another model's
    positions = positions.expand(tokens.batch, -1)
    begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    first = begins.flatten().nonzero().squeeze(-1)
    if first.numel() == tokens.batch:
        return  # whole rows
    tokens.cu_seqlens = F.pad(first, (0, 1), value=tokens.batch * tokens.time)
    tokens.packed = True


def bounds_from(kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of packed sequences among the arguments that transformers' collators make for
    varlen attention; the others of these are taken out, too."""
    bounds = kwargs.pop("cu_seq_lens_q", None)
    other = kwargs.pop("cu_seq_lens_k", None)
    for name in ("max_length_q", "max_length_k", "seq_idx"):
        kwargs.pop(name, None)
    return other if bounds is None else bounds
