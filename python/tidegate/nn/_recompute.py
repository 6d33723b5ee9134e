"""What is cheap to make again is not kept for the backward pass.

A matrix product keeps its input for its weight's gradient. Where that input is a norm's result or a
GLU's product, it follows in one pass over memory from what the norm or the GLU keeps anyway, so
inside `recomputing()` the product keeps a recipe in its place. torch.utils.checkpoint would run all
of a region again, products and scans included; here nothing is but the pass itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Recipe:
    """How one tensor is made again from `inputs`, which autograd keeps anyway."""

    def __init__(self, y: Tensor, inputs: Sequence[Tensor | None], make: Callable) -> None:
        self.storage = StorageWeakRef(y.untyped_storage())
        self.dtype, self.version = y.dtype, y._version
        self._make = make
        self._inputs = [None if x is None else x.detach() for x in inputs]
        self._versions = [None if x is None else x._version for x in self._inputs]
        self._made: Tensor | None = None
        self._kept = 0  # places that keep this recipe
        self._left = 0  # of these, how many have not asked yet

    def makes(self, t: Tensor) -> bool:
        """Whether t is the tensor, or a view of it, with the values that it was made with."""
        return t.dtype == self.dtype and t._version == self.version

    def keep(self) -> None:
        self._kept += 1

    @torch.no_grad()
    def make(self) -> Tensor:
        """The tensor, which is let go when every place that keeps the recipe has had it."""
        if self._made is None:
            versions = [None if x is None else x._version for x in self._inputs]
            if versions != self._versions:
                raise RuntimeError(
                    "recompute: a tensor that a norm or a GLU read has been modified in place "
                    "since, so what it made cannot be made again for the backward pass"
                )
            self._made, self._left = self._make(*self._inputs), self._kept
        made = self._made
        self._left -= 1
        if self._left == 0:
            self._made = None
        return made


class _Active(threading.local):
    recipes: dict[int, _Recipe] | None = None


_active = _Active()


def is_recomputing() -> bool:
    """Whether results that are cheap to make again should be given to `remember`."""
    return _active.recipes is not None and torch.is_grad_enabled()


def remember(y: Tensor, inputs: Sequence[Tensor | None], make: Callable) -> None:
    """Inside `recomputing()`: y is ``make(*inputs)``, bit for bit, whatever autocast is then; the
    inputs are kept for the backward pass by what made y."""
    recipe = _Recipe(y, inputs, make)
    _active.recipes[recipe.storage.cdata] = recipe


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Tensors given to `remember` in this context are not kept for the backward pass but made again
    in it, once for all that need them."""
    recipes: dict[int, _Recipe] = {}
    before, _active.recipes = _active.recipes, recipes

    def pack(t: Tensor) -> Any:
        if type(t) is not Tensor and not isinstance(t, torch.nn.Parameter):
            return t  # a subclass may have no storage
        recipe = recipes.get(t.untyped_storage()._cdata)
        if recipe is None or not recipe.makes(t):
            return t
        recipe.keep()
        return recipe, t.shape, t.stride(), t.storage_offset()

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _active.recipes = before


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    recipe, *view = kept
    return recipe.make().as_strided(*view)
