"""Choosing the next token from logits, and a model's modes while it generates."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

# By model: how many threads generate with it, and every module's mode before the first of them did.
_generating: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = (
    weakref.WeakKeyDictionary()
)
_generating_lock = threading.Lock()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout is off within, also where threads generate with one model at a time: the first to
    come notes the modules' modes and the last to go sets them again, also after an error."""
    with _generating_lock:
        threads, modes = _generating.get(model, (0, []))
        if threads == 0:
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
        _generating[model] = (threads + 1, modes)
    try:
        yield
    finally:
        with _generating_lock:
            threads, modes = _generating.pop(model)
            if threads > 1:
                _generating[model] = (threads - 1, modes)
            else:
                for module, mode in modes:
                    module.training = mode


class Sampler:
    """Draws one token a row from logits ``[B, vocab]``.

    temperature 0: the likeliest token. Otherwise softmax(logits / temperature), cut to the top_k
    likeliest tokens, then to the fewest whose probabilities sum to top_p.
    """

    def __init__(
        self,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int | None,
        device: torch.device,
    ) -> None:
        if not temperature >= 0.0:
            raise ValueError(f"CausalLM.generate: temperature: expected >= 0; got {temperature!r}")
        if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"CausalLM.generate: top_k: expected an integer >= 1; got {top_k!r}")
        if top_p is not None and not 0.0 < top_p <= 1.0:
            raise ValueError(f"CausalLM.generate: top_p: expected in (0, 1]; got {top_p!r}")
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits ``[B, vocab]`` -> int64 ``[B]``."""
        if self.temperature < torch.finfo(torch.float32).tiny:
            return logits.argmax(dim=-1)
        # The likeliest logit is zero, so that no temperature makes it overflow.
        logits = logits.float()
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.size(-1):
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probs = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1.0:
            ordered, index = probs.sort(dim=-1, descending=True)
            # A token stays while those before it have not reached top_p: the first always does.
            before = ordered.cumsum(dim=-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, index, ordered)
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(-1)
