"""Many calls of `forgetting_attention` held against the oracle at once, on the calls' own device.

The equations are those of forgetting_attention_oracle.py, over the heads of many calls in padded
matrices: thousands of small calls then take a second, where the oracle takes one for each dozen.
In float64 the gates between two tokens come from cumulative sums here, whose digits are 1e-16 of
the sums: for results of 16-bit calls that is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from support import error_rule, recurrence
from support import forgetting_attention_cases as attention_cases
from support.forgetting_attention_cases import AttentionCase

Verdicts = dict[str, error_rule.Verdict]  # of a call's results
RESULTS = ("o", "lse", "dq", "dk", "dv", "dlog_f")
_OF_QUERIES = ("o", "lse", "dq", "q", "do", "dlse")
_KEY_HEADS = ("k", "v", "dk", "dv")  # which have as many heads as k
_LARGEST = 1 << 23  # elements of a padded matrix


@dataclass(frozen=True)
class Block:
    """Sequences of one call that are as long as each other: the batch rows of a padded call, or one
    sequence of a packed one."""

    call: int
    case: AttentionCase
    rows: slice
    queries: slice
    keys: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def part(self, value: Tensor, name: str) -> Tensor:
        """The block's part of one of the call's tensors, [rows, heads, time, ...]."""
        time = self.queries if name in _OF_QUERIES else self.keys
        if name in ("lse", "dlse"):
            return value[self.rows, :, time]
        return value[self.rows, time].transpose(1, 2)


def blocks_of(call: int, case: AttentionCase) -> Iterator[Block]:
    if case.lengths is None:
        keys = slice(0, case.queries + case.past)
        yield Block(call, case, slice(0, case.batch), slice(0, case.queries), keys)
        return
    query = key = 0
    for count, past in case.lengths:
        keys = slice(key, key + count + past)
        yield Block(call, case, slice(0, 1), slice(query, query + count), keys)
        query, key = query + count, keys.stop


def _groups(blocks: list[Block]) -> Iterator[list[Block]]:
    """The blocks in groups of one dtype each, of sizes near each other, whose padded matrices are
    not too large."""

    def kind(block: Block) -> tuple:
        case = block.case
        gates = case.gate_dtype or recurrence.state_dtype(case.dtype)
        return str(case.dtype), str(gates), (case.head_dim + 63) // 64

    group: list[Block] = []
    heads = queries = keys = 0
    for block in sorted(blocks, key=lambda b: (kind(b), b.lengths[1], b.lengths[0])):
        count, lengths = block.count * block.case.heads, block.lengths
        padded = max(queries, lengths[0]), max(keys, lengths[1])
        size = (heads + count) * max(padded[0], 64 * kind(block)[2]) * padded[1]
        if group and (kind(block) != kind(group[0]) or size > _LARGEST):
            yield group
            group, heads, padded = [], 0, lengths
        group.append(block)
        heads, (queries, keys) = heads + count, padded
    if group:
        yield group


class Heads:
    """The heads of a group of blocks in padded matrices."""

    def __init__(self, group: list[Block], device: str) -> None:
        self.group, self.device = group, device
        self.queries = max(1, *(b.lengths[0] for b in group))
        self.keys = max(1, *(b.lengths[1] for b in group))
        self.dim = max(b.case.head_dim for b in group)
        table, key_head, calls = [], 0, []
        for b in group:
            of_one = b.case.heads // b.case.key_heads
            scale = b.case.head_dim**-0.5 if b.case.scale is None else b.case.scale
            row = (*b.lengths, b.case.window or 1 << 30, scale, b.call)
            for row_of_heads in range(b.count):
                first = key_head + row_of_heads * b.case.key_heads
                table += [(*row, first + h // of_one) for h in range(b.case.heads)]
            key_head += b.count * b.case.key_heads
            calls += [b.call] * (b.count * b.case.key_heads)
        table = torch.tensor(table, dtype=torch.float64).to(device)
        self.count, self.length, window, self.call, self.key_head = (
            table[:, i].long() for i in (0, 1, 2, 4, 5)
        )
        self.scale = table[:, 3, None, None]
        self.call_of_key_head = torch.tensor(calls).to(device)
        i, j = torch.arange(self.queries, device=device), torch.arange(self.keys, device=device)
        position = i + (self.length - self.count)[:, None]
        self.exists = i < self.count[:, None]
        p = position[:, :, None]
        self.sees = (j <= p) & (j > p - window[:, None, None]) & self.exists[:, :, None]
        self.position = position.clamp_max(self.keys - 1)
        self.apart = j != p

    def gather(self, tensors: list[dict[str, Tensor | None]], name: str) -> Tensor:
        """One of the calls' tensors in a padded matrix, zeros where there is nothing."""
        heads = len(self.call_of_key_head if name in _KEY_HEADS else self.call)
        time = self.queries if name in _OF_QUERIES else self.keys
        width = () if name in ("lse", "dlse", "log_f", "dlog_f") else (self.dim,)
        out = torch.zeros(heads, time, *width, device=self.device)
        at = 0
        for b in self.group:
            count = b.count * (b.case.key_heads if name in _KEY_HEADS else b.case.heads)
            value = tensors[b.call][name]
            if value is not None and value.numel() > 0:
                part = b.part(value.detach(), name)
                to = out[at : at + count].unflatten(0, part.shape[:2])
                to = to[:, :, : part.shape[2]]
                (to if part.dim() == 3 else to[..., : part.shape[3]]).copy_(part)
            at += count
        return out

    def compute(
        self,
        inputs: dict[str, Tensor],
        *,
        exact: bool,
        operands: torch.dtype | None = None,
        one_by_one: bool = False,
    ) -> dict[str, Tensor]:
        """As forgetting_attention_oracle.reference has it."""
        dtype = torch.float64 if exact else torch.float32
        case = self.group[0].case
        q, k, v, log_f, do, dlse = (
            inputs[name].to(dtype) for name in ("q", "k", "v", "log_f", "do", "dlse")
        )
        k, v, scale = k[self.key_head], v[self.key_head], self.scale.to(dtype)
        multiply = _add_one_by_one if one_by_one else torch.matmul

        def operand(matrix: Tensor) -> Tensor:
            return matrix if exact or operands is None else matrix.to(operands).to(dtype)

        def of_key_heads(matrix: Tensor) -> Tensor:
            heads = len(self.call_of_key_head)
            return matrix.new_zeros(heads, *matrix.shape[1:]).index_add_(0, self.key_head, matrix)

        log_f = log_f.clamp_min(-1e5)
        log_f[:, 0] = 0
        c = log_f.cumsum(1)
        gates = c.gather(1, self.position)[:, :, None] - c[:, None, :]
        scores = torch.where(self.sees, scale * multiply(q, k.mT) + gates, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        P = torch.where(self.sees, torch.exp(scores - lse[:, :, None]), 0)
        o = multiply(operand(P), v)
        stored = o if exact else o.to(case.dtype).to(dtype)
        delta, delta_size = (do * stored).sum(-1) - dlse, (do * stored).abs().sum(-1) + dlse.abs()
        dP = multiply(do, v.mT)
        dS = P * (dP - delta[:, :, None])
        apart = operand(dS) * self.apart
        sums = -apart.sum(1)
        sums.scatter_add_(1, self.position, apart.sum(-1))
        dlog_f = sums.flip(1).cumsum(1).flip(1)
        dlog_f[:, 0] = 0
        out = {
            "o": o,
            "lse": torch.where(self.exists, lse, 0),
            "dq": scale * multiply(operand(dS), k),
            "dk": of_key_heads(scale * multiply(operand(dS).mT, q)),
            "dv": of_key_heads(multiply(operand(P).mT, do)),
            "dlog_f": torch.where(self.of_keys(), dlog_f, 0),
        }
        if not exact:
            gate_dtype = case.gate_dtype or torch.float32
            return {
                name: x.to({"lse": torch.float32, "dlog_f": gate_dtype}.get(name, case.dtype))
                for name, x in out.items()
            }
        size = P * (dP.abs() + delta_size[:, :, None])
        terms = scale.abs() * (q.abs() @ k.abs().mT) + gates.abs()
        sizes = {
            "|lse|": torch.maximum(out["lse"].abs(), (P * terms).sum(-1)),
            "|dq|": scale * (size @ k.abs()),
            "|dk|": of_key_heads(scale * (size.mT @ q.abs())),
            "|dv|": of_key_heads(P.mT @ do.abs()),
            "|dlog_f|": torch.zeros_like(c).scatter_add_(1, self.position, size.sum(-1)),
        }
        return out | sizes

    def of_keys(self) -> Tensor:
        return torch.arange(self.keys, device=self.device) < self.length[:, None]

    def measure(self, name: str, found: Tensor, exact: dict[str, Tensor], same: Tensor) -> Tensor:
        """For each head, sums of squares and largest ones of three things: the errors of `found`,
        those of the yardstick `same`, and what they are relative to. [6, heads]"""
        right, size = exact[name], exact.get(f"|{name}|", exact[name])
        limit = torch.finfo(same.dtype).max
        overflow = same.isinf() & (found == same) & (right.abs() > limit)
        measures = []
        for x in (found - right, same - right, size):
            x = x.double().masked_fill(overflow, 0).flatten(1).abs().nan_to_num(torch.inf)
            measures += [x.square().sum(1), x.amax(1)]
        return torch.stack(measures)


class Batch:
    """Calls, run forward and backward one after another, to be judged together."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: list[AttentionCase] = []
        self.inputs: list[dict[str, Tensor | None]] = []
        self.found: list[dict[str, Tensor]] = []

    def add(self, case: AttentionCase, *, deterministic: bool = False) -> None:
        self.calls.append(case)
        self.inputs.append(attention_cases.make_inputs(case, self.device))
        torch.use_deterministic_algorithms(deterministic)
        try:
            self.found.append(attention_cases.run_inputs(case, self.inputs[-1], backward=True))
        finally:
            torch.use_deterministic_algorithms(False)

    def judge(self, *, one_by_one: bool = False) -> list[Verdicts]:
        """How every result of every call does by the error rule; by which of the two yardsticks of
        forgetting_attention_cases.check()."""
        return _judge(self.calls, self.inputs, self.found, self.device, one_by_one)


def _add_one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, its terms added up in their order."""
    out = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for i in range(right.shape[-2]):
        out.addcmul_(left[..., :, i, None], right[..., None, i, :])
    return out


def _judge(
    calls: list[AttentionCase],
    inputs: list[dict[str, Tensor | None]],
    found: list[dict[str, Tensor]],
    device: str,
    one_by_one: bool,
) -> list[Verdicts]:
    sums = torch.zeros(len(RESULTS), 3, len(calls), dtype=torch.float64, device=device)
    largest = torch.zeros_like(sums)
    blocks = [b for i, case in enumerate(calls) for b in blocks_of(i, case) if b.lengths[1] > 0]
    for group in _groups(blocks):
        heads = Heads(group, device)
        names = ("q", "k", "v", "log_f", "do", "dlse")
        padded = {name: heads.gather(inputs, name) for name in names}
        exact = heads.compute(padded, exact=True)
        operands = group[0].case.dtype if device == "cuda" else None
        same = heads.compute(padded, exact=False, operands=operands, one_by_one=one_by_one)
        for i, name in enumerate(RESULTS):
            measures = heads.measure(name, heads.gather(found, name), exact, same[name])
            call = heads.call_of_key_head if name in _KEY_HEADS else heads.call
            sums[i].index_add_(1, call, measures[0::2])
            largest[i].scatter_reduce_(1, call.expand(3, -1), measures[1::2], "amax")
    in_norm, of_one = error_rule.FLOOR
    # [calls, results, norms, kinds]
    table = torch.stack([sums.sqrt(), largest]).permute(3, 1, 0, 2).tolist()
    verdicts = []
    for call, of_call in enumerate(table):
        verdicts.append({})
        for name, norms in zip(RESULTS, of_call, strict=True):
            least = error_rule.ABSOLUTE_FLOOR * max(1, found[call][name].numel()) ** 0.5
            measures = tuple(
                error_rule.Measure(
                    wrong, baseline, in_norm * whole + of_one * norms[1][2] + least, whole
                )
                for wrong, baseline, whole in norms
            )
            worst = max(measures, key=lambda m: m.excess)
            message = f"error {worst.error:.3e}, allowed {worst.allowed:.3e}"
            verdicts[-1][name] = error_rule.Verdict(worst.excess, message, measures)
    return verdicts
