"""Which tokens of a batch are real, and which belong together: from masks and positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Tokens:
    """The tokens ``[B, T]`` of one forward pass, laid out as the mixers take them.

    cu_seqlens: None for B whole rows; otherwise the bounds of the sequences in ``take(x)``. packed:
    whether the sequences are not the rows, so that no cache can go on with them. padding: how many
    tokens of each row take() leaves out ``[B]``; None where it leaves out none.
    """

    def __init__(self, shape: torch.Size) -> None:
        self.batch, self.time = shape
        self.cu_seqlens: Tensor | None = None
        self.packed = False
        self.padding: Tensor | None = None
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


# The arguments that transformers' collators and models have for packed rows, and fla's models.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k", "seq_idx")


def packing_from(kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
    """What `lay_out` takes of these arguments; the others of them are taken out, too."""
    given = {name: kwargs.pop(name, None) for name in PACKED}
    bounds = (given[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"))
    return {
        "cu_seqlens": next((b for b in bounds if b is not None), None),
        "seq_idx": given["seq_idx"],
    }


def lay_out(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    past: int = 0,
) -> Tokens:
    """How to read embeddings x ``[B, T, dim]`` that come after `past` tokens of a cache.

    attention_mask ``[B, T]`` or ``[B, past + T]``: 1 for tokens, 0 for padding, wherever it is; the
    last T columns belong to x. Packed sequences are bounded by cu_seqlens ``[N + 1]``, in a batch
    of one; without it by seq_idx ``[B, T]``, which numbers each token's sequence, and padding as it
    likes; without either,
    and without a mask, as in transformers, by position_ids ``[B, T]`` that begin anew. Looks at
    masks, numbers and positions on the host, but at a mask not while it is compiled, when it is
    believed to be there for a reason.
    """
    tokens = Tokens(x.shape[:2])
    if cu_seqlens is not None:
        if tokens.batch != 1:
            raise ValueError(
                f"TidegateModel: cu_seq_lens_q: expected a batch of 1; got {tokens.batch}"
            )
        tokens.cu_seqlens, tokens.packed = cu_seqlens, True
    elif seq_idx is not None:
        if seq_idx.shape != x.shape[:2]:
            raise ValueError(
                f"TidegateModel: seq_idx: expected [B={tokens.batch}, T={tokens.time}]; got "
                f"{tuple(seq_idx.shape)}"
            )
        _cut_where(tokens, seq_idx[:, 1:] != seq_idx[:, :-1])
    elif attention_mask is None and position_ids is not None:
        _find_sequences(tokens, position_ids)
    if attention_mask is not None:
        _leave_padding_out(tokens, attention_mask, x, past)
    if tokens.padded and tokens.packed and cu_seqlens is None:  # a number that padding has alone
        tokens.cu_seqlens = tokens.cu_seqlens.unique_consecutive()
    return tokens


def _leave_padding_out(tokens: Tokens, mask: Tensor, x: Tensor, past: int) -> None:
    batch, time = tokens.batch, tokens.time
    if mask.dim() != 2 or mask.size(0) != batch or mask.size(1) not in (time, past + time):
        columns = f"T={time}" + (f" or past + T={past + time}" if past else "")
        raise ValueError(
            f"TidegateModel: attention_mask: expected [B={batch}, {columns}] of 1 for tokens and 0 "
            f"for padding; got {tuple(mask.shape)}"
        )
    kept = mask[:, mask.size(1) - time :].to(x.device).bool()
    if not torch.compiler.is_compiling() and bool(kept.all()):
        return
    tokens.padding = time - kept.sum(1)
    kept = kept.flatten()
    tokens._places = kept.nonzero().squeeze(-1)
    bounds = tokens.cu_seqlens
    if bounds is None:
        bounds = torch.arange(0, batch * time + 1, time, device=x.device)
    tokens.cu_seqlens = F.pad(kept.cumsum(0), (1, 0))[bounds.to(x.device, torch.long)]


def _find_sequences(tokens: Tokens, positions: Tensor) -> None:
    """A sequence begins wherever a position does not follow the one before."""
    if positions.dim() != 2 or positions.size(1) != tokens.time:
        return  # of several dimensions: another model's
    positions = positions.expand(tokens.batch, -1)
    _cut_where(tokens, positions[:, 1:] != positions[:, :-1] + 1)


def _cut_where(tokens: Tokens, cut: Tensor) -> None:
    """Sequences begin with the rows, and after each token where `cut` ``[B, T - 1]`` says so."""
    if tokens.time < 2:
        return
    first = F.pad(cut, (1, 0), value=True).flatten().nonzero().squeeze(-1)
    if first.numel() == tokens.batch:
        return  # whole rows
    tokens.cu_seqlens = F.pad(first, (0, 1), value=tokens.batch * tokens.time)
    tokens.packed = True


def check_past(mask: Tensor, padding: Tensor | None) -> None:
    """ValueError where the mask ``[B, past]`` of a cache's tokens hides one that it has read, which
    a state does not forget; padding ``[B]``: how many of them it left out when it read them. Those
    stay left out, whatever the mask now says."""
    hidden = (mask == 0).sum(1)
    known = torch.zeros_like(hidden) if padding is None else padding.to(hidden.device)
    if bool((hidden > known).any()):
        raise ValueError(
            "TidegateModel: attention_mask: expected 1 for every token that the cache has read, "
            f"since a state does not forget it; got zeros for {hidden.tolist()} tokens of the "
            f"rows' past, which had {known.tolist()} of padding"
        )
