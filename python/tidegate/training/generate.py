"""Text from a trained model."""

from __future__ import annotations

import torch

from .errors import UserError
from .trained import Trained


def generate_text(
    trained: Trained,
    prompt: bytes,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = 1,
) -> bytes:
    """The prompt and `tokens` tokens that the model adds to it.

    An empty prompt begins at a line end. Raises UserError when the model was trained on token ids
    or on a task, whose text is unknown, or a sampling setting is out of range.
    """
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise UserError("generate: the model was trained without text; it has no tokenizer")
    ids = tokenizer.encode(prompt or b"\n")
    if len(ids) == 0:
        raise UserError("generate: the prompt has no tokens")
    device = next(trained.model.parameters()).device
    start = torch.tensor([[int(i) for i in ids]], dtype=torch.int64, device=device)
    try:
        result = trained.model.generate(
            start, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return tokenizer.decode(result[0].tolist())
