"""Mixers' states as the layers of a transformers cache.

A cache that generate() or a user makes (``DynamicCache``, ``StaticCache``) holds transformers' own
layers; `adopt` puts these in their place before the first token. Both count the tokens they have
seen, padding included, as transformers does; padding itself never enters a state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..nn._attention_state import AttentionState


def _writable(t: Tensor) -> Tensor:
    """The tensor, or a copy of one that torch.inference_mode() made and lets nobody write, or keep
    for a gradient, outside: generate() goes on under no_grad() from a prompt that was read there.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return t
    return t.clone() if t.is_inference() else t


class _Counts:
    """What both kinds of layers share: the tokens they have seen, and rows of the batch.

    padding ``[B]``: how many of these tokens were padding, in the first layer of a cache, which
    speaks for all; None where there was none.
    """

    tokens: int
    padding: Tensor | None = None

    def get_seq_length(self, *_: Any) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            f"{type(self).__name__}: update(): the mixer writes its state, not keys and values"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self._take_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def add_padding(self, count: Tensor | None) -> None:
        """Notes that so many tokens of each row, among those written, were padding."""
        if count is not None:
            self.padding = count if self.padding is None else self.padding + count

    def _take_rows(self, rows: Tensor) -> None:
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.padding.device))
        if self.is_initialized:
            self._take_rows_of_state(rows)

    def _take_rows_of_state(self, rows: Tensor) -> None:
        raise NotImplementedError


class RecurrentStateLayer(_Counts, LinearAttentionLayer, CacheLayerMixin):
    """A recurrent mixer's state: one tensor or a NamedTuple of tensors ``[B, ...]``, in
    ``recurrent_states``. Constant in size, updated in place. A state cannot forget its last tokens,
    so it cannot be cropped."""

    is_croppable = False

    def __init__(self, **_: Any) -> None:
        LinearAttentionLayer.__init__(self)
        self.keys = self.values = None
        self.is_initialized = False
        self.tokens = 0
        self._kind: type = Tensor

    @property
    def batch_size(self) -> int:
        return self.recurrent_states[0].size(0) if self.is_initialized else -1

    def read(self, mixer: nn.Module, batch: int, device: torch.device) -> Any:
        """The state, None where there is none yet."""
        if not self.has_previous_state[0]:
            return None
        for i in range(self.number_of_states):
            self.recurrent_states[i] = _writable(self.recurrent_states[i])
        parts = [self.recurrent_states[i] for i in range(self.number_of_states)]
        return parts[0] if issubclass(self._kind, Tensor) else self._kind(*parts)

    def write(self, state: Any, tokens: int) -> None:
        """Keeps what the mixer returned after `tokens` more; where there is memory, in it."""
        parts = [state] if isinstance(state, Tensor) else list(state)
        self._kind = Tensor if isinstance(state, Tensor) else type(state)
        self.number_of_states = len(parts)
        for i, part in enumerate(parts):
            held = self.recurrent_states.get(i)
            fits = held is not None and held.shape == part.shape and held.dtype == part.dtype
            if held is part:
                pass
            elif fits and not part.requires_grad and not held.requires_grad:
                held.copy_(part)  # the address stays: CUDA graphs know it
            else:
                self.recurrent_states[i] = part
            self.is_recurrent_states_initialized[i] = self.has_previous_state[i] = True
            self.is_conv_states_initialized.setdefault(i, False)
        self.device, self.dtype = parts[0].device, parts[0].dtype
        self.is_initialized = True
        self.tokens += tokens

    def reset(self) -> None:
        """An empty state; the memory stays."""
        for i in range(self.number_of_states):
            if self.is_initialized:
                self.recurrent_states[i] = _writable(self.recurrent_states[i]).detach().zero_()
            self.has_previous_state[i] = False
        self.tokens, self.padding = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise RuntimeError(
                "RecurrentStateLayer: crop(): a recurrent state cannot take back tokens; got "
                f"{tokens_to_remove}"
            )

    def _take_rows_of_state(self, rows: Tensor) -> None:
        for i in range(self.number_of_states):
            state = self.recurrent_states[i]
            self.recurrent_states[i] = state.index_select(0, rows.to(state.device))


class AttentionStateLayer(_Counts, CacheLayerMixin):
    """An attention mixer's `AttentionState`: keys, values, log gates and lengths of every row. It
    grows with the tokens, up to `capacity` where that is given."""

    is_compileable = False  # whether there is room is looked up on the host
    supports_early_init = False

    def __init__(self, capacity: int | None = None, **_: Any) -> None:
        super().__init__()
        self.capacity = capacity
        self.tokens = 0
        self.state: AttentionState | None = None
        self._drops = False

    @property
    def batch_size(self) -> int:
        return self.state.lengths.size(0) if self.is_initialized else -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: read() makes the state, which has more than keys and values."""

    def read(self, mixer: nn.Module, batch: int, device: torch.device) -> AttentionState:
        """The state, an empty one where there is none yet: beside the mixer's weights, or, while
        accelerate keeps these elsewhere, on `device`, where they will be."""
        if self.state is None:
            own = mixer.out_proj.weight.device
            device = device if own.type == "meta" else own
            self.state = mixer.init_state(batch, device=device, capacity=self.capacity)
            self._drops = mixer.window is not None or getattr(mixer, "drop_pruned", False)
        self.state = AttentionState(*map(_writable, self.state))
        return self.state

    def write(self, state: AttentionState, tokens: int) -> None:
        """Keeps what the mixer returned after `tokens` more."""
        self.state, self.keys, self.values = state, state.k, state.v
        self.is_initialized = True
        self.tokens += tokens

    def get_max_length(self) -> int:
        return -1 if self.capacity is None else self.capacity

    def reset(self) -> None:
        """An empty state."""
        self.state = self.keys = self.values = None
        self.is_initialized = False
        self.tokens, self.padding = 0, None

    @property
    def is_croppable(self) -> bool:
        """Whether crop() can take tokens back, which it cannot where a window or pruning may have
        dropped earlier ones, nor with KV-shift, which keeps one token's keys and values alone."""
        return self.state is not None and not self._drops and self.state.last_k.size(1) == 0

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back: as many as a negative number says, or all but as many as a
        positive one says. Rows padded on the left lose their own last tokens."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.tokens - tokens_to_remove
        count = min(max(count, 0), self.tokens)
        if count == 0:
            return
        if not self.is_croppable:
            raise RuntimeError(
                "AttentionStateLayer: crop(): expected a mixer without window, drop_pruned and "
                f"kv_shift, whose earlier tokens are all here; got {tokens_to_remove}"
            )
        lengths = (self.state.lengths - count).clamp(min=0)
        seen = (self.state.seen - count).clamp(min=0)
        room = torch.stack([(self.state.room[0] - count).clamp(min=0), self.state.room[1]])
        self.state = self.state._replace(lengths=lengths, seen=seen, room=room)
        self.tokens -= count
        if self.padding is not None:
            self.padding = self.padding.clamp(max=self.tokens)

    def offload(self) -> None:
        self._to("cpu")

    def prefetch(self) -> None:
        """Nothing: nobody knows the device that comes next."""

    def _to(self, device: Any) -> None:
        if self.is_initialized:
            moved = (t.to(device, non_blocking=True) for t in self.state)
            self.write(AttentionState(*moved), 0)

    def _take_rows_of_state(self, rows: Tensor) -> None:
        *by_row, room = self.state
        by_row = (t.index_select(0, rows.to(t.device)) for t in by_row)
        self.write(AttentionState(*by_row, room), 0)


def adopt(cache: Cache, mixers: list[nn.Module]) -> Cache:
    """The cache, with a layer for each mixer: its own, or, before the first token, these instead.

    Layers that transformers' ``StaticCache`` sized keep that size. Raises ValueError for a cache
    that another model has filled.
    """
    mine = (RecurrentStateLayer, AttentionStateLayer)
    if len(cache.layers) == len(mixers) and all(isinstance(k, mine) for k in cache.layers):
        return cache
    if any(_is_filled(layer) for layer in cache.layers):
        raise ValueError(
            f"TidegateModel: cache: expected an empty one or this model's, of {len(mixers)} "
            f"layers; got {len(cache.layers)} layers that hold other states"
        )
    sizes = [getattr(layer, "max_cache_len", None) for layer in cache.layers]
    largest = max((s for s in sizes if s is not None), default=None)
    cache.layers[:] = [
        AttentionStateLayer(capacity=largest)
        if getattr(mixer, "keeps_tokens", False)
        else RecurrentStateLayer()
        for mixer in mixers
    ]
    return cache


def _is_filled(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return any(layer.has_previous_state.values())
    return bool(layer.is_initialized and layer.get_seq_length() > 0)
