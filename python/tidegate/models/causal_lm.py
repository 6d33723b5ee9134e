"""The language model: embedding, blocks, head; training loss, generation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..nn._common import Linear, is_listened_to, make_linear, normal_
from ._inputs import (
    IGNORED,
    check_ids,
    check_labels,
    check_positions,
    lengths_tensor,
    refuse_own_labels,
)
from .block import Model, Output, embedding_std, mean_cross_entropy, refuse_sharded
from .config import LMConfig
from .generating import continued
from .sampling import SamplingOptions, whole


class CausalLM(Model):
    """A causal language model over one of the mixers (HGRN, section 3.1 and Figure 1).

    Embedding (scaled by sqrt(dim) when tied), pre-norm blocks, final norm, head (the embedding's
    transpose when tied). Parameters: ``embedding.weight``, ``lower_bounds.logits``,
    ``blocks.{k}.{mixer_norm,mixer,glu_norm,glu}.*``, ``norm.*``, and ``head.weight`` when untied.

    Raises ValueError when the configuration is bidirectional or has no vocabulary.
    """

    _is_language_model = True

    def __init__(self, config: LMConfig, *, device=None, dtype=None) -> None:
        super().__init__(config, dtype=dtype)
        if config.vocab_size is None:
            raise ValueError("CausalLM: vocab_size: expected a positive integer; got None")
        if any(block.mixer.bidirectional for block in self.blocks):
            raise ValueError(
                "CausalLM: mixer_options: expected bidirectional=False: a causal model must not "
                "see later tokens; got True"
            )
        where = {"device": "meta", "dtype": dtype}
        scaled = config.tied if config.scale_embedding is None else config.scale_embedding
        self.scale = math.sqrt(config.dim) if scaled else 1.0
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.dim, **where), freeze=False
        )
        self.head = None
        if not config.tied:
            self.head = make_linear(config.dim, config.vocab_size, False, **where)
        self._materialise(device)

    def reset_parameters(self) -> None:
        """embedding (normal, dim^-1/2 when tied, else 0.02), lower_bounds, blocks, norm, head
        (normal, 0.02), in this order."""
        normal_(self.embedding.weight, embedding_std(self.config))
        self._reset_blocks()
        if self.head is not None:
            normal_(self.head.weight, 0.02)
        self._reset_matrices()

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x * self.scale if self.scale != 1.0 else x

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _logits(self, x: Tensor) -> Tensor:
        if not self._is_head_linear():
            return self.head(x)
        return F.linear(x, self._head_weight(), None if self.head is None else self.head.bias)

    def _is_head_linear(self) -> bool:
        """Whether the head is its weight and bias and nothing else: no adapter stands in its place,
        and no hook waits for its calls or gradients."""
        head = self.head
        return head is None or (
            type(head).forward in (nn.Linear.forward, Linear.forward) and not is_listened_to(head)
        )

    def _loss(self, x: Tensor, labels: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
        """The mean loss of hidden states ``[B, T, dim]``."""
        labels = labels if labels.dtype in (torch.int32, torch.int64) else labels.long()
        if self._is_head_linear():
            bias = None if self.head is None else self.head.bias
            how = {"label_smoothing": label_smoothing, "z_loss": z_loss}
            return ops.linear_cross_entropy(x, self._head_weight(), labels, bias, **how)
        return mean_cross_entropy(self.head(x), labels, label_smoothing, z_loss)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | str | None = None,
        *,
        state: tuple[Any, ...] | None = None,
        cu_seqlens: Tensor | None = None,
        return_logits: bool | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Output:
        """ids int32 or int64 ``[B, T]`` -> Output(logits ``[B, T, vocab]`` or None, loss, state).

        labels: what each position should predict, int64 ``[B, T]``, -100 = ignored; or "next":
        the next id of the same sequence (the last one of a sequence is ignored). The loss is the
        mean over the positions not ignored. state: the one returned for the tokens before.
        cu_seqlens: bounds ``[N+1]`` of the sequences packed into a B = 1 batch.

        return_logits: whether logits are returned; None: where there are no labels. The loss does
        without them: `tidegate.ops.linear_cross_entropy` makes a chunk of rows at a time, so no
        tensor of tokens x vocabulary exists in training unless it is asked for here, which costs a
        product with the head more. label_smoothing, z_loss: as that op takes them.
        """
        check_ids("CausalLM", ids, self.config.vocab_size)
        labels = self._labels(ids, labels, cu_seqlens)
        x, state = self._run(self._embed(ids), state, cu_seqlens)
        loss = None
        if labels is not None:
            loss = self._loss(x, labels, label_smoothing, z_loss)
        has_logits = labels is None if return_logits is None else return_logits
        return Output(self._logits(x) if has_logits else None, loss, state)

    def _labels(
        self, ids: Tensor, labels: Tensor | str | None, cu_seqlens: Tensor | None
    ) -> Tensor | None:
        if labels is None:
            return None
        if isinstance(labels, str):
            if labels != "next":
                raise ValueError(f"CausalLM: labels: expected a tensor or 'next'; got {labels!r}")
            return next_labels(ids, cu_seqlens)
        end = self.config.vocab_size
        check_labels("CausalLM", labels, ids.shape, "the shape of ids", end)
        refuse_own_labels("CausalLM", ids, labels)
        return labels

    def logits_at(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits at some positions only: ids ``[B, T]``, positions int64 ``[B, P]`` ->
        ``[B, P, vocab]``; for tasks that ask at few places, where the head is most of the cost."""
        check_ids("CausalLM.logits_at", ids, self.config.vocab_size)
        check_positions("CausalLM.logits_at", positions, ids)
        x, _ = self._run(self._embed(ids), None, None)
        return self._logits(x.gather(1, positions[..., None].expand(-1, -1, x.size(-1))))

    def init_state(self, batch: int, *, capacity: int | None = None) -> tuple[Any, ...]:
        """The empty state of `batch` sequences, one entry a layer."""
        return tuple(block.mixer.init_state(batch, capacity=capacity) for block in self.blocks)

    def step(self, ids: Tensor, state: tuple[Any, ...]) -> Tensor:
        """One token a sequence: ids ``[B]`` -> logits ``[B, vocab]``; the state is updated in
        place. Constant work a token. Call it under torch.no_grad()."""
        check_ids("CausalLM.step", ids, self.config.vocab_size, "B")
        self._check_states(state, ids.size(0))
        x = self._as_residual(self._embed(ids))
        for block, gamma, s in zip(self.blocks, self.gammas(), state, strict=True):
            x = block.step(x, s, gamma)
        return self._logits(self.norm(x))

    def _check_states(self, state: tuple[Any, ...], batch: int) -> None:
        """Raises ValueError where a layer's cache has no room for a token, before the states of the
        layers below it move."""
        if len(state) != len(self.blocks):
            raise ValueError(
                f"CausalLM.step: state: expected one state for each of the {len(self.blocks)} "
                f"layers; got {len(state)}"
            )
        for block, s in zip(self.blocks, state, strict=True):
            if getattr(block.mixer, "keeps_tokens", False):
                block.mixer.check_room(s, batch)

    def prefill(
        self, ids: Tensor, lengths: Tensor | None = None, *, capacity: int = 0
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Reads the prompts ``[B, T]``: logits ``[B, vocab]`` after each one's last token, and
        the state. Prompts shorter than T, padded on the right, have their lengths ``[B]`` in
        `lengths`; the padding is left out of the computation. capacity: tokens to come, for mixers
        that keep them."""
        check_ids("CausalLM.prefill", ids, self.config.vocab_size)
        empty = None
        if any(getattr(block.mixer, "keeps_tokens", False) for block in self.blocks):
            empty = self.init_state(ids.size(0), capacity=ids.size(1) + capacity)
        if lengths is None:
            if ids.size(1) == 0:
                raise ValueError("CausalLM.prefill: ids: expected at least one token; got none")
            x, state = self._run(self._embed(ids), empty, None)
            return self._logits(x[:, -1]), state
        packed, cu_seqlens = pack(ids, lengths, minimum=1)
        x, state = self._run(self._embed(packed), empty, cu_seqlens)
        return self._logits(x[0, cu_seqlens[1:] - 1]), state

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | None = None,
        seed: int | None = None,
        *,
        lengths: Tensor | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
    ) -> Tensor:
        """Continues the prompts ids ``[B, T]``; returns ids ``[B, T + n]``, n <= max_new_tokens.

        Each row of the result is its prompt, then its new tokens, then `eos` (0 when there is
        none) up to the end. temperature 0 takes the likeliest token, otherwise tokens are drawn,
        from the top_k likeliest, from the fewest whose probabilities reach top_p, and from those
        at least so likely as min_p times the likeliest. repetition_penalty divides the logits of
        tokens that the row has, or multiplies them where they are negative. A row ends with `eos`,
        an id of the vocabulary; generation ends when all rows have. seed: what is drawn depends on
        it, on the row's number and the token's, and torch's own generators stay untouched.
        lengths: as in prefill().

        The library's decoding engine makes the steps, on a GPU as one CUDA graph each
        (docs/generation.md).
        """
        check_ids("CausalLM.generate", ids, self.config.vocab_size)
        max_new_tokens = whole("CausalLM.generate", "max_new_tokens", max_new_tokens, 0)
        eos = None if eos is None else whole("CausalLM.generate", "eos", eos)
        if eos is not None and not 0 <= eos < self.config.vocab_size:
            raise ValueError(
                "CausalLM.generate: eos: expected an id from 0 to below "
                f"vocab_size={self.config.vocab_size}; got {eos}"
            )
        refuse_sharded("CausalLM.generate", self.named_parameters(), "load it whole to generate")
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        options.check("CausalLM.generate")
        new = continued(self, ids, lengths, max_new_tokens, options, eos)
        return append(ids, lengths, new, 0 if eos is None else eos)


def next_labels(ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Labels ``[B, T]`` that predict the next id; -100 at the end of every sequence."""
    labels = torch.full_like(ids, IGNORED, dtype=torch.int64)
    if ids.size(1) == 0:
        return labels
    labels[:, :-1] = ids[:, 1:]
    if cu_seqlens is not None:
        # Where sequences before the first token are empty, their last position is taken modulo
        # T: the last one, which is ignored anyway.
        last = (cu_seqlens[1:].to(ids.device).long() - 1).remainder(ids.size(1))
        labels.index_fill_(1, last, IGNORED)
    return labels


def pack(ids: Tensor, lengths: Tensor, minimum: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids ``[B, T]`` cut to `lengths` ``[B]`` and laid end to end: ``[1, sum]`` and
    cu_seqlens ``[B+1]``. Reads the lengths on the host."""
    lengths = lengths_tensor(lengths, ids.size(0))
    if lengths.shape != ids.shape[:1] or lengths.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            f"lengths: expected int32 or int64 [B={ids.size(0)}]; got {lengths.dtype} "
            f"{tuple(lengths.shape)}"
        )
    host = lengths.tolist()
    if host and not minimum <= min(host) <= max(host) <= ids.size(1):
        raise ValueError(f"lengths: expected {minimum} to T={ids.size(1)}; got {host}")
    rows = [row[:n] for row, n in zip(ids, host, strict=True)]
    packed = torch.cat(rows) if rows else ids.new_empty(0)
    cu_seqlens = F.pad(lengths.to(ids.device).long().cumsum(0), (1, 0))
    return packed[None], cu_seqlens


def append(ids: Tensor, lengths: Tensor | None, new: Tensor, fill: int) -> Tensor:
    """Each row's prompt, then its row of `new`, then `fill`: ``[B, T + n]``."""
    if lengths is None:
        return torch.cat([ids, new.to(ids.dtype)], dim=1)
    lengths = torch.as_tensor(lengths).to(ids.device).long()[:, None]
    out = torch.cat([ids, new.to(ids.dtype)], dim=1)
    position = torch.arange(out.size(1), device=ids.device)[None]
    out = out.masked_fill(position >= lengths, fill)
    places = lengths + torch.arange(new.size(1), device=ids.device)[None]
    return out.scatter(1, places, new.to(ids.dtype))
