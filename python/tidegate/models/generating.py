"""How CausalLM.generate continues prompts: by the library's engine, or where only Python knows what
the model computes, by steps of the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._inputs import lengths_tensor
from .engine import engine_of
from .sampling import Sampler, SamplingOptions, evaluating

if TYPE_CHECKING:
    from .causal_lm import CausalLM


def continued(
    model: CausalLM,
    ids: Tensor,
    lengths: Tensor | None,
    count: int,
    options: SamplingOptions,
    eos: int | None,
) -> Tensor:
    """The new tokens ``[B, <= count]``."""
    engine = engine_of(model)
    if engine is None:
        with evaluating(model):
            return _continued_in_python(model, ids, lengths, count, options, eos)
    if lengths is not None:
        lengths = lengths_tensor(lengths, ids.size(0))
    running = engine.start(
        ids,
        lengths,
        count,
        float(options.temperature),
        options.top_k,
        None if options.top_p is None else float(options.top_p),
        None if options.min_p is None else float(options.min_p),
        float(options.repetition_penalty),
        eos,
        options.seed_now(),
    )
    while running.advance():  # between two of which Python sees an interrupt
        pass
    return running.tokens()


def _continued_in_python(
    model: CausalLM,
    ids: Tensor,
    lengths: Tensor | None,
    count: int,
    options: SamplingOptions,
    eos: int | None,
) -> Tensor:
    """A prefill, then steps."""
    logits, state = model.prefill(ids, lengths, capacity=count)
    sampler = Sampler(options, ids, lengths, model.config.vocab_size)
    done = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
    new: list[Tensor] = []
    while len(new) < count:
        if new:
            logits = model.step(new[-1], state)
        token = sampler(logits)
        if eos is not None:
            token = torch.where(done, eos, token)
            done = done | (token == eos)
        new.append(token)
        if eos is not None and bool(done.all()):
            break
    return torch.stack(new, dim=1) if new else ids.new_empty(ids.size(0), 0)
