"""ListOps of the Long Range Arena: nested list operations, whose value is one digit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UserError
from .task import Task

DIGITS = 10
MIN, MAX, MED, SM, CLOSE = range(DIGITS, DIGITS + 5)
SYMBOLS = (*map(str, range(DIGITS)), "[MIN", "[MAX", "[MED", "[SM", "]")
_OPERATORS = 4
_OPERATOR_SHARE = 0.25  # of the nodes that may be operators, as in LRA's generator
_CANDIDATES = 1024
_TRIES = 100


def evaluate(tokens: Sequence[int]) -> int:
    """The value of one expression, by reading it once from left to right.

    MIN, MAX; MED: the median, the mean of the middle two rounded down where their number is even;
    SM: the sum modulo 10. Raises ValueError where the tokens are not exactly one expression.
    """
    open_lists: list[tuple[int, list[int]]] = []
    result = None
    for position, token in enumerate(tokens):
        if result is not None or not 0 <= token <= CLOSE:
            raise ValueError(f"listops: tokens: no expression, wrong at position {position}")
        if token in (MIN, MAX, MED, SM):
            open_lists.append((token, []))
            continue
        value = token
        if token == CLOSE:
            if not open_lists or not open_lists[-1][1]:
                raise ValueError(f"listops: tokens: nothing to close at position {position}")
            value = _apply(*open_lists.pop())
        if open_lists:
            open_lists[-1][1].append(value)
        else:
            result = value
    if result is None:
        raise ValueError(f"listops: tokens: {len(open_lists)} lists are not closed")
    return result


def _apply(operator: int, values: list[int]) -> int:
    if operator == MIN:
        return min(values)
    if operator == MAX:
        return max(values)
    if operator == SM:
        return sum(values) % DIGITS
    ordered, middle = sorted(values), len(values) // 2
    if len(values) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


class _Level(NamedTuple):
    """The nodes of one depth of many trees, siblings side by side, in their parents' order."""

    parent: Tensor  # index in the level above; of roots: the tree's number
    tree: Tensor
    symbol: Tensor  # digit or operator
    operator: Tensor  # indices of the nodes that are operators
    arguments: Tensor  # how many each of these has
    first: Tensor  # index in the level below of each one's first argument


@dataclass(frozen=True)
class ListOps(Task):
    """LRA's ListOps (Tay et al. 2021, arXiv 2011.04006): a nested expression of MIN, MAX, MED and
    SM (sum modulo 10) over digits; the class is its value.

    A node above the deepest level is an operator of 2 to `max_args` arguments with probability 1/4,
    else a digit; expressions are kept when min_length < tokens < max_length. Parentheses are
    dropped, an operator is one token, "]" closes its list. Ids: the digits, then MIN, MAX, MED, SM,
    "]"; padding is 0 and no token of the sequence.

    Options: max_depth, max_args, min_length, max_length.
    """

    name: ClassVar[str] = "listops"
    num_classes: ClassVar[int] = DIGITS
    valid_examples: ClassVar[int] = 2000
    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        self._require("max_depth", self.max_depth >= 2, "2 or more")
        self._require("max_args", self.max_args >= 2, "2 or more")
        self._require("min_length", self.min_length >= 1, "1 or more")
        least = self.min_length + 2
        self._require("max_length", self.max_length >= least, f"{least} or more")

    @property
    def vocab_size(self) -> int:
        return len(SYMBOLS)

    @property
    def length(self) -> int:
        return self.max_length - 1

    @property
    def chance(self) -> float:
        return 1.0 / DIGITS

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """See `Task`: labels ``[size]``, lengths ``[size]``."""
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        found = 0
        while found < size:
            if found == 0 and len(drawn) == _TRIES:
                raise UserError(
                    f"task: listops: min_length: expected lengths that expressions have; none of "
                    f"{_TRIES * _CANDIDATES} had {self.min_length} < length < {self.max_length}"
                )
            drawn.append(self._draw(generator))
            found += drawn[-1][1].numel()
        width = max(ids.size(1) for ids, _, _ in drawn)
        ids = torch.cat([torch.nn.functional.pad(x, (0, width - x.size(1))) for x, _, _ in drawn])
        labels = torch.cat([values for _, values, _ in drawn])[:size]
        lengths = torch.cat([lengths for _, _, lengths in drawn])[:size].cpu()
        return Batch(ids[:size, : int(lengths.max())], labels, lengths)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """ids, values and lengths of the trees of the right length among some candidates."""
        levels = self._grow(generator)
        lengths = _lengths(levels)
        fits = (lengths[0] > self.min_length) & (lengths[0] < self.max_length)
        row = fits.cumsum(0) - 1
        ids = torch.zeros(int(fits.sum()), self.max_length - 1, **_like(row))
        start = torch.zeros_like(row)
        for depth, level in enumerate(levels):
            if depth > 0:
                above = levels[depth - 1]
                before = lengths[depth].cumsum(0) - lengths[depth]
                node_first = torch.zeros_like(start)
                node_first[above.operator] = above.first
                first = node_first[level.parent]
                start = start[level.parent] + 1 + before - before[first]
            kept = fits[level.tree]
            ids[row[level.tree[kept]], start[kept]] = level.symbol[kept]
            ends = level.operator[kept[level.operator]]
            ids[row[level.tree[ends]], start[ends] + lengths[depth][ends] - 1] = CLOSE
        return ids, _values(levels)[fits], lengths[0][fits]

    def _grow(self, generator: torch.Generator) -> list[_Level]:
        """Trees, level by level. Their roots are operators: a digit alone is too short."""
        device = generator.device
        parent = tree = torch.arange(_CANDIDATES, device=device)
        levels: list[_Level] = []
        for depth in range(1, self.max_depth + 1):
            count = parent.numel()
            symbol = torch.randint(0, DIGITS, (count,), generator=generator, device=device)
            grows = torch.rand(count, generator=generator, device=device) < _OPERATOR_SHARE
            if depth == 1:
                grows = torch.ones_like(grows)
            elif depth == self.max_depth:
                grows = torch.zeros_like(grows)
            operator = grows.nonzero().squeeze(1)
            shape = operator.shape
            symbol[operator] = DIGITS + torch.randint(
                0, _OPERATORS, shape, generator=generator, device=device
            )
            arguments = torch.randint(
                2, self.max_args + 1, shape, generator=generator, device=device
            )
            first = arguments.cumsum(0) - arguments
            levels.append(_Level(parent, tree, symbol, operator, arguments, first))
            if operator.numel() == 0:
                break
            parent = operator.repeat_interleave(arguments)
            tree = tree[parent]
        return levels


def _like(x: Tensor) -> dict[str, object]:
    return {"device": x.device, "dtype": x.dtype}


def _lengths(levels: list[_Level]) -> list[Tensor]:
    """Tokens of every subtree, a level each."""
    lengths = [torch.ones_like(level.symbol) for level in levels]
    for depth in range(len(levels) - 1, 0, -1):
        above = lengths[depth - 1]
        above[levels[depth - 1].operator] = 2
        above.index_add_(0, levels[depth].parent, lengths[depth])
    return lengths


def _values(levels: list[_Level]) -> Tensor:
    """The value of every tree, from the leaves up: sorted among siblings, the arguments of an
    operator have their least, greatest and middle values at known places."""
    values = levels[-1].symbol
    for below, level in zip(levels[:0:-1], levels[-2::-1], strict=True):
        order = (below.parent * DIGITS + values).sort().values
        ordered = order - order // DIGITS * DIGITS
        first, count = level.first, level.arguments
        total = torch.zeros_like(level.symbol).index_add_(0, below.parent, values)
        median = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
        results = torch.stack(
            [
                ordered[first],
                ordered[first + count - 1],
                median,
                total[level.operator] % DIGITS,
            ]
        )
        operator = level.symbol[level.operator] - DIGITS
        values = level.symbol.clone()
        values[level.operator] = results.gather(0, operator[None]).squeeze(0)
    return values
