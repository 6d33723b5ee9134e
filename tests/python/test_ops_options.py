"""Options of ops that torch itself would take, a word of bytes or 2 for True, are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_ops_errors import zeros

import tidegate

ops = tidegate.ops
Q = zeros(1, 6, 2, 16)
GATES = zeros(1, 6, 2)


@pytest.mark.parametrize("op", ["gated_linear_attention", "hgrn2", "forgetting_attention"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 0.0, True])
def test_scales_that_are_none(op: str, scale: float) -> None:
    gate = {"gated_linear_attention": Q, "hgrn2": Q, "forgetting_attention": GATES}[op]
    arguments = (Q, gate, Q) if op == "hgrn2" else (Q, Q, Q, gate)
    expected = "must be a number" if scale is True else "must be above 0 and finite"
    with pytest.raises(RuntimeError, match=f"{op}: scale {expected}, got"):
        getattr(ops, op)(*arguments, scale=scale)


def test_words_and_switches_that_torch_would_take() -> None:
    c = zeros(1, 6, 4)
    p = zeros(4)
    calls: dict[str, Callable[[], object]] = {
        r"hgru: activation must be a string, got b'silu'": lambda: ops.hgru(
            c, c, activation=b"silu"
        ),
        r"hgru: reverse must be True or False, got 2": lambda: ops.hgru(c, c, reverse=2),
        r"linear_scan: reverse must be True or False, got None": lambda: ops.linear_scan(
            c, c, reverse=None
        ),
        r"glu: activation must be a string, got b'silu'": lambda: ops.glu(c, activation=b"silu"),
        r"norm: kind must be a string, got b'rms'": lambda: ops.norm(c, kind=b"rms"),
        r"norm: gate_activation must be a string, got 1": lambda: ops.norm(c, gate_activation=1),
        r"add_norm: kind must be a string, got b'rms'": lambda: ops.add_norm(c, c, kind=b"rms"),
        r"hgrn2: q_activation must be a string, got None": lambda: ops.hgrn2(
            Q, Q, Q, q_activation=None
        ),
        r"forgetting_attention: window must be a number, got True": lambda: (
            ops.forgetting_attention(Q, Q, Q, GATES, window=True)
        ),
        r"forgetting_attention: return_lse must be True or False, got 1": lambda: (
            ops.forgetting_attention(Q, Q, Q, GATES, return_lse=1)
        ),
        r"init_chrono_: t_max must be a number, got True": lambda: ops.init_chrono_(p, True),
        r"init_lru_gamma_log_: nu_log must be a tensor, got NoneType": lambda: (
            ops.init_lru_gamma_log_(p, None)
        ),
        r"init_lru_gamma_log_: p must be a tensor, got NoneType": lambda: ops.init_lru_gamma_log_(
            None, p
        ),
        r"init_uniform_: p must be a tensor, got list": lambda: ops.init_uniform_([0.0], 0.0, 1.0),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()
