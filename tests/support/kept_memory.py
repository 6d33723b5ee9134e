"""What a forward pass leaves alive for the backward pass, in bytes a token and layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tidegate.models import CausalLM, LMConfig


class Storages(TorchDispatchMode):
    """Remembers the memory that every op inside it returned."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for t in tree_leaves(results):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self._sizes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def alive(self) -> int:
        """Bytes that have not been freed since."""
        return sum(size for ref, size in self._sizes.values() if not ref.expired())


def _kept(model: CausalLM, tokens: int) -> int:
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    storages = Storages()
    with storages, torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, "next").loss
    assert loss.requires_grad
    return storages.alive()


def bytes_a_token(
    config: LMConfig, recompute: str = "none", residual: torch.dtype | None = None
) -> float:
    """Bytes that a layer of `config` keeps a token, in units of its width: what a layer more and
    128 tokens more add, so that weights, embedding and head are out of it."""
    deep, shallow = config.replace(layers=3), config.replace(layers=2)
    counts = []
    for c in (deep, shallow):
        torch.manual_seed(0)
        model = CausalLM(c)
        model.recompute, model.residual_dtype = recompute, residual
        counts += [_kept(model, tokens) for tokens in (256, 128)]
    added = (counts[0] - counts[1]) - (counts[2] - counts[3])
    return added / (128 * config.dim)
