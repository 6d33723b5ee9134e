"""Bad input of the ops, their steps and the initialisers: an error with op, argument, what was
expected and what was given."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tidegate

ops = tidegate.ops


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good_scan() -> dict[str, Tensor]:
    return {"x": zeros(2, 6, 4), "a": zeros(2, 6, 4), "h0": zeros(2, 4)}


def good_hgru(complex_: bool = False) -> dict[str, Tensor]:
    width = 8 if complex_ else 4
    out = {"c": zeros(2, 6, width), "f": zeros(2, 6, 4), "gamma": zeros(4)}
    return out | ({"theta": zeros(4)} if complex_ else {}) | {"h0": zeros(2, width)}


def good_lru(complex_: bool = False) -> dict[str, Tensor | None]:
    width = 8 if complex_ else 4
    parameters = {k: zeros(4) for k in ("nu_log", "theta_log", "gamma_log")}
    parameters["theta_log"] = parameters["theta_log"] if complex_ else None
    return {"x": zeros(2, 6, width), **parameters, "h0": zeros(2, width)}


def good_gla() -> dict[str, Tensor]:
    names = ("q", "k", "v", "log_f")
    return {k: zeros(2, 6, 3, 4) for k in names} | {"h0": zeros(2, 3, 4, 4)}


def good_hgrn2() -> dict[str, Tensor]:
    tokens = {k: zeros(2, 6, 3, 4) for k in ("q", "f", "v")}
    return tokens | {"gamma": zeros(3, 4), "h0": zeros(2, 3, 4, 4)}


GOOD = {
    "linear_scan": good_scan,
    "hgru": good_hgru,
    "lru_scan": good_lru,
    "gated_linear_attention": good_gla,
    "hgrn2": good_hgrn2,
}


def packed(good: dict[str, Tensor], sequences: int = 2) -> dict[str, Tensor]:
    """The call over one batch row, for `sequences` packed sequences."""
    out = {k: v[:1] if v is not None and v.shape[:2] == (2, 6) else v for k, v in good.items()}
    return out | {"h0": zeros(sequences, *good["h0"].shape[1:])}


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def raises(function: Callable[..., object], *parts: str, **arguments: object) -> None:
    """`function(**arguments)` raises a RuntimeError whose message has `parts` in this order."""
    with pytest.raises(RuntimeError, match=".*".join(map(re.escape, parts))) as caught:
        function(**arguments)
    # The message says it in one line; what follows may be torch's C++ trace.
    assert len(str(caught.value).splitlines()[0]) < 400


def parts_id(value: object) -> str:
    """A test id from the parts of the message; nothing from the arguments."""
    return "-".join(value) if isinstance(value, list) else ""


BF16, F64 = torch.bfloat16, torch.float64

# (what is changed in a good call, parts of the message)
SCAN = [
    ({"x": zeros(6, 4)}, ["linear_scan", "x", "[B, T, D]", "[6, 4]"]),
    ({"x": zeros(1, 2, 6, 4)}, ["linear_scan", "x", "[B, T, D]", "[1, 2, 6, 4]"]),
    ({"a": zeros(2, 5, 4)}, ["linear_scan", "a", "[B, T, D]", "[2, 6, 4]", "got", "[2, 5, 4]"]),
    ({"a": zeros(1, 6, 4)}, ["linear_scan", "a", "[2, 6, 4]", "got", "[1, 6, 4]"]),
    ({"a": zeros(5)}, ["linear_scan", "a", "[D]", "[4]", "got", "[5]"]),
    ({"a": zeros()}, ["linear_scan", "a", "got", "[]"]),
    ({"a": zeros(6, 4)}, ["linear_scan", "a", "[2, 6, 4]", "got", "[6, 4]"]),
    ({"h0": zeros(3, 4)}, ["linear_scan", "h0", "[N, D]", "[2, 4]", "got", "[3, 4]"]),
    ({"h0": zeros(2, 1, 4)}, ["linear_scan", "h0", "[N, D]", "[2, 4]", "got", "[2, 1, 4]"]),
    ({"h0": zeros(4)}, ["linear_scan", "h0", "[2, 4]", "got", "[4]"]),
    ({"x": zeros(2, 6, 4, dtype=torch.int64)}, ["linear_scan", "x", "float32", "got", "int64"]),
    ({"x": zeros(2, 6, 4, dtype=torch.bool)}, ["linear_scan", "x", "float32", "got", "bool"]),
    (
        {"x": zeros(2, 6, 4, dtype=torch.float8_e4m3fn)},
        ["linear_scan", "x", "got", "float8_e4m3fn"],
    ),
    ({"a": zeros(2, 6, 4, dtype=BF16)}, ["linear_scan", "a", "float32", "got", "bfloat16"]),
    ({"a": zeros(2, 6, 4, dtype=F64)}, ["linear_scan", "a", "float32", "got", "float64"]),
    (
        {"a": zeros(2, 6, 4, dtype=torch.complex64)},
        ["linear_scan", "a", "float32", "got", "complex64"],
    ),
    ({"h0": zeros(2, 4, dtype=torch.float16)}, ["linear_scan", "h0", "float32", "got", "float16"]),
    ({"h0": zeros(2, 4, dtype=F64)}, ["linear_scan", "h0", "float32", "got", "float64"]),
    (
        {"x": zeros(2, 6, 4, dtype=BF16), "a": zeros(2, 6, 4, dtype=torch.float16)},
        ["linear_scan", "a", "bfloat16 or float32", "got", "float16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex64), "a": zeros(2, 6, 4, dtype=BF16)},
        ["linear_scan", "a", "complex64 or float32", "got", "bfloat16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex64), "a": zeros(2, 6, 4, dtype=F64)},
        ["linear_scan", "a", "complex64 or float32", "x is complex64", "got", "float64"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex64), "a": zeros(2, 6, 4, dtype=torch.complex128)},
        ["linear_scan", "a", "complex64 or float32", "x is complex64", "got", "complex128"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex128), "a": zeros(2, 6, 4, dtype=BF16)},
        ["linear_scan", "a", "complex128, float64, complex64 or float32", "got", "bfloat16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex128), "h0": zeros(2, 4, dtype=F64)},
        ["linear_scan", "h0", "complex128 or complex64", "got", "float64"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=F64), "a": zeros(2, 6, 4, dtype=BF16)},
        ["linear_scan", "a", "float64 or float32", "x is float64", "got", "bfloat16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=F64), "h0": zeros(2, 4, dtype=torch.float16)},
        ["linear_scan", "h0", "float64 or float32", "x is float64", "got", "float16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=torch.complex64), "a": zeros(2, 6, 4)},
        ["linear_scan", "h0", "complex64", "got", "float32"],
    ),
]

HGRU = [
    ({"c": zeros(6, 4)}, ["hgru", "c", "[B, T, D]", "[6, 4]"]),
    ({"f": zeros(2, 5, 4)}, ["hgru", "f", "[B, T, D]", "[2, 6, 4]", "got", "[2, 5, 4]"]),
    ({"f": zeros(2, 6, 2)}, ["hgru", "f", "[2, 6, 4]", "got", "[2, 6, 2]"]),
    ({"f": zeros(4)}, ["hgru", "f", "[2, 6, 4]", "got", "[4]"]),
    ({"gamma": zeros(5)}, ["hgru", "gamma", "[D]", "[4]", "got", "[5]"]),
    ({"gamma": zeros(2, 6, 4)}, ["hgru", "gamma", "[D]", "[4]", "got", "[2, 6, 4]"]),
    ({"h0": zeros(2, 8)}, ["hgru", "h0", "[N, D]", "[2, 4]", "got", "[2, 8]"]),
    ({"h0": zeros(1, 4)}, ["hgru", "h0", "[2, 4]", "got", "[1, 4]"]),
    ({"c": zeros(2, 6, 4, dtype=torch.complex64)}, ["hgru", "c", "float32", "got", "complex64"]),
    ({"c": zeros(2, 6, 4, dtype=torch.int32)}, ["hgru", "c", "float32", "got", "int32"]),
    ({"f": zeros(2, 6, 4, dtype=BF16)}, ["hgru", "f", "float32", "got", "bfloat16"]),
    ({"gamma": zeros(4, dtype=F64)}, ["hgru", "gamma", "float32", "got", "float64"]),
    ({"h0": zeros(2, 4, dtype=BF16)}, ["hgru", "h0", "float32", "got", "bfloat16"]),
    (
        {"c": zeros(2, 6, 4, dtype=BF16), "f": zeros(2, 6, 4, dtype=torch.float16)},
        ["hgru", "f", "bfloat16 or float32", "c is bfloat16", "got", "float16"],
    ),
    (
        {"c": zeros(2, 6, 4, dtype=F64), "f": zeros(2, 6, 4, dtype=BF16)},
        ["hgru", "f", "float64 or float32", "c is float64", "got", "bfloat16"],
    ),
    (
        {"c": zeros(2, 6, 4, dtype=F64), "gamma": zeros(4, dtype=torch.float16)},
        ["hgru", "gamma", "float64 or float32", "c is float64", "got", "float16"],
    ),
    ({"activation": "tanh"}, ["hgru", "activation", "silu", "none", "got", "tanh"]),
    ({"activation": ""}, ["hgru", "activation", "silu", "none", "got"]),
]

COMPLEX_HGRU = [
    ({"c": zeros(2, 6, 7)}, ["hgru", "c", "[B, T, 2D]", "even", "got", "[2, 6, 7]"]),
    ({"c": zeros(2, 6, 4)}, ["hgru", "f", "[2, 6, 2]", "got", "[2, 6, 4]"]),
    ({"theta": zeros(8)}, ["hgru", "theta", "[D]", "[4]", "got", "[8]"]),
    ({"theta": zeros(4, dtype=BF16)}, ["hgru", "theta", "float32", "got", "bfloat16"]),
    ({"h0": zeros(2, 4)}, ["hgru", "h0", "[N, 2D]", "[2, 8]", "got", "[2, 4]"]),
]


@pytest.mark.parametrize(("changes", "parts"), SCAN, ids=parts_id)
def test_linear_scan(changes: dict, parts: list[str]) -> None:
    raises(ops.linear_scan, *parts, **(good_scan() | changes))
    meta = {k: v.to("meta") for k, v in (good_scan() | changes).items()}
    raises(ops.linear_scan, *parts, **meta)


@pytest.mark.parametrize(("changes", "parts"), HGRU, ids=parts_id)
def test_hgru(changes: dict, parts: list[str]) -> None:
    arguments = good_hgru() | changes
    raises(ops.hgru, *parts, **arguments)
    raises(
        ops.hgru,
        *parts,
        **{k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()},
    )


@pytest.mark.parametrize(("changes", "parts"), COMPLEX_HGRU, ids=parts_id)
def test_complex_hgru(changes: dict, parts: list[str]) -> None:
    raises(ops.hgru, *parts, **(good_hgru(complex_=True) | changes))


LRU = [
    ({"x": zeros(6, 4)}, ["lru_scan", "x", "[B, T, D]", "[6, 4]"]),
    ({"x": zeros(2, 6, 4, dtype=torch.int32)}, ["lru_scan", "x", "float32", "got", "int32"]),
    ({"x": zeros(2, 6, 4, dtype=torch.complex64)}, ["lru_scan", "x", "got", "complex64"]),
    ({"nu_log": zeros(5)}, ["lru_scan", "nu_log", "[D]", "[4]", "got", "[5]"]),
    ({"nu_log": zeros(1, 4)}, ["lru_scan", "nu_log", "[D]", "[4]", "got", "[1, 4]"]),
    ({"gamma_log": zeros()}, ["lru_scan", "gamma_log", "[D]", "[4]", "got", "[]"]),
    ({"nu_log": zeros(4, dtype=F64)}, ["lru_scan", "nu_log", "float32", "got", "float64"]),
    (
        {"x": zeros(2, 6, 4, dtype=BF16), "gamma_log": zeros(4, dtype=BF16)},
        ["lru_scan", "gamma_log must be float32 (x is bfloat16), got bfloat16"],
    ),
    (
        {"x": zeros(2, 6, 4, dtype=F64), "nu_log": zeros(4, dtype=torch.float16)},
        ["lru_scan", "nu_log must be float64 or float32 (x is float64), got float16"],
    ),
    ({"h0": zeros(3, 4)}, ["lru_scan", "h0", "[N, D]", "[2, 4]", "got", "[3, 4]"]),
    ({"h0": zeros(2, 4, dtype=F64)}, ["lru_scan", "h0", "float32", "got", "float64"]),
]

COMPLEX_LRU = [
    ({"x": zeros(2, 6, 7)}, ["lru_scan", "x", "[B, T, 2D]", "theta_log", "even", "got", "7"]),
    ({"x": zeros(2, 6, 6)}, ["lru_scan", "nu_log", "[D]", "[3]", "got", "[4]"]),
    ({"theta_log": zeros(8)}, ["lru_scan", "theta_log", "[D]", "[4]", "got", "[8]"]),
    ({"theta_log": zeros(4, dtype=F64)}, ["lru_scan", "theta_log", "float32", "got", "float64"]),
    ({"h0": zeros(2, 4)}, ["lru_scan", "h0", "[N, 2D]", "[2, 8]", "got", "[2, 4]"]),
]


@pytest.mark.parametrize("complex_", [False, True])
def test_lru_scan(complex_: bool) -> None:
    for changes, parts in COMPLEX_LRU if complex_ else LRU:
        arguments = good_lru(complex_) | changes
        raises(ops.lru_scan, *parts, **arguments)
        meta = {k: v if v is None else v.to("meta") for k, v in arguments.items()}
        raises(ops.lru_scan, *parts, **meta)


def test_a_final_states_gradient_has_the_width_of_its_state() -> None:
    """The backward ops of both complex recurrences name [N, 2D]."""
    x, wide, small = zeros(2, 6, 4), zeros(2, 6, 8), zeros(4)
    raw = torch.ops.tidegate
    for complex_, data, shape in ((False, x, "[N, D] = [2, 4]"), (True, wide, "[N, 2D] = [2, 8]")):
        theta = small if complex_ else None
        calls = {
            "lru_scan_backward": (data, small, theta, small, None, False, None),
            "hgru_backward": (x, data, None, theta, None, "silu", False, None),
        }
        for op, rest in calls.items():
            expected = f"{op}: dh_final must have shape {shape}, got [3, 4]"
            with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}"):
                getattr(raw, op)(data, zeros(3, 4), data, *rest)


def test_lru_scan_step() -> None:
    good = {"x": zeros(2, 4), "nu_log": zeros(4), "theta_log": None, "gamma_log": zeros(4)}
    good["state"] = zeros(2, 4)
    bad = [
        ({"x": zeros(2, 1, 4)}, ["x", "[B, D]", "got", "[2, 1, 4]"]),
        ({"theta_log": zeros(4)}, ["nu_log", "[D]", "[2]", "got", "[4]"]),
        ({"gamma_log": zeros(3)}, ["gamma_log", "[D]", "[4]", "got", "[3]"]),
        ({"state": zeros(3, 4)}, ["state", "[B, D]", "[2, 4]", "got", "[3, 4]"]),
        ({"state": zeros(2, 4, dtype=F64)}, ["state", "float32", "got", "float64"]),
    ]
    for changes, parts in bad:
        raises(ops.lru_scan_step, "lru_scan_step", *parts, **(good | changes))


F16 = torch.float16
HEADS = "gated_linear_attention"
GLA = [
    ({"q": zeros(2, 6, 4)}, [HEADS, "q", "[B, T, H, K]", "got", "[2, 6, 4]"]),
    ({"k": zeros(2, 6, 3, 5)}, [HEADS, "k", "[2, 6, 3, 4]", "like q", "got", "[2, 6, 3, 5]"]),
    ({"k": zeros(2, 6, 3, 4, dtype=BF16)}, [HEADS, "k", "float32", "like q", "got", "bfloat16"]),
    ({"v": zeros(2, 6, 2, 4)}, [HEADS, "v", "[B, T, H, V]", "[2, 6, 3, 4]", "got", "[2, 6, 2, 4]"]),
    ({"v": zeros(2, 5, 3, 9)}, [HEADS, "v", "[2, 6, 3, 9]", "like q", "got", "[2, 5, 3, 9]"]),
    ({"v": zeros(6, 3, 4)}, [HEADS, "v", "[2, 6, 3, 4]", "got", "[6, 3, 4]"]),
    ({"v": zeros(2, 6, 3, 4, dtype=F64)}, [HEADS, "v", "float32", "like q", "got", "float64"]),
    (
        {"log_f": zeros(2, 6, 3, 2)},
        [HEADS, "log_f", "[B, T, H, K] (or [B, T, H, 1]", "[2, 6, 3, 4]", "got", "[2, 6, 3, 2]"],
    ),
    ({"log_f": zeros(2, 6, 1, 1)}, [HEADS, "log_f", "[2, 6, 3, 1]", "got", "[2, 6, 1, 1]"]),
    ({"log_f": zeros(2, 6, 3)}, [HEADS, "log_f", "[2, 6, 3, 4]", "got", "[2, 6, 3]"]),
    ({"log_f": zeros(2, 6, 3, 4, dtype=F16)}, [HEADS, "log_f", "float32", "got", "float16"]),
    (
        {"h0": zeros(2, 3, 4, 5)},
        [HEADS, "h0", "[N, H, K, V]", "[2, 3, 4, 4]", "got", "[2, 3, 4, 5]"],
    ),
    ({"h0": zeros(1, 3, 4, 4)}, [HEADS, "h0", "[2, 3, 4, 4]", "got", "[1, 3, 4, 4]"]),
    ({"h0": zeros(2, 3, 16)}, [HEADS, "h0", "[2, 3, 4, 4]", "got", "[2, 3, 16]"]),
    ({"h0": zeros(2, 3, 4, 4, dtype=F64)}, [HEADS, "h0", "float32", "got", "float64"]),
    ({"q": zeros(2, 6, 3, 4, dtype=torch.complex64)}, [HEADS, "q", "float32", "got", "complex64"]),
    ({"q": zeros(2, 6, 3, 4, dtype=torch.int64)}, [HEADS, "q", "float32", "got", "int64"]),
]

HGRN2 = [
    ({"q": zeros(6, 3, 4)}, ["hgrn2", "q", "[B, T, H, K]", "got", "[6, 3, 4]"]),
    ({"f": zeros(2, 6, 3, 1)}, ["hgrn2", "f", "[2, 6, 3, 4]", "like q", "got", "[2, 6, 3, 1]"]),
    ({"f": zeros(2, 6, 3, 4, dtype=BF16)}, ["hgrn2", "f", "float32", "got", "bfloat16"]),
    ({"v": zeros(2, 6, 4, 4)}, ["hgrn2", "v", "[B, T, H, V]", "got", "[2, 6, 4, 4]"]),
    ({"gamma": zeros(4)}, ["hgrn2", "gamma", "[H, K]", "[3, 4]", "got", "[4]"]),
    ({"gamma": zeros(12)}, ["hgrn2", "gamma", "[3, 4]", "got", "[12]"]),
    ({"gamma": zeros(3, 4, dtype=F64)}, ["hgrn2", "gamma", "float32", "got", "float64"]),
    ({"h0": zeros(2, 3, 4)}, ["hgrn2", "h0", "[N, H, K, V]", "got", "[2, 3, 4]"]),
    ({"q_activation": "relu"}, ["hgrn2", "q_activation", "none", "silu", "sigmoid", "got", "relu"]),
    ({"v_activation": ""}, ["hgrn2", "v_activation", "none", "silu", "sigmoid", "got"]),
]


@pytest.mark.parametrize(("changes", "parts"), [*GLA, *HGRN2], ids=parts_id)
def test_ops_with_heads(changes: dict, parts: list[str]) -> None:
    arguments = GOOD[parts[0]]() | changes
    raises(getattr(ops, parts[0]), *parts, **arguments)
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
    raises(getattr(ops, parts[0]), *parts, **meta)


@pytest.mark.parametrize(("keys", "values"), [(513, 4), (4, 513), (0, 4), (4, 0)])
def test_head_dimensions_that_no_kernel_takes(keys: int, values: int, device: str) -> None:
    q, v = torch.zeros(1, 2, 1, keys, device=device), torch.zeros(1, 2, 1, values, device=device)
    parts = ["K and V must be from 1 to 512", "got", f"K = {keys}", f"V = {values}"]
    raises(ops.gated_linear_attention, HEADS, *parts, q=q, k=q, v=v, log_f=q)
    raises(ops.hgrn2, "hgrn2", *parts, q=q, f=q, v=v)
    state = torch.zeros(1, 1, keys, values, device=device)
    token = {"q": q[:, 0], "f": q[:, 0], "v": v[:, 0], "state": state}
    raises(ops.hgrn2_step, "hgrn2_step", *parts, **token)


# Offsets ----------------------------------------------------------------------------------------

BAD_OFFSETS = [
    (torch.tensor([0.0, 6.0]), ["cu_seqlens", "int32 or int64", "got", "float32"]),
    (offsets(0, 6, dtype=torch.int16), ["cu_seqlens", "int32 or int64", "got", "int16"]),
    ((0, 6), ["cu_seqlens", "a tensor of int32 or int64", "got tuple"]),
    (torch.tensor(6), ["cu_seqlens", "[N + 1]", "got", "[]"]),
    (torch.tensor([[0, 2, 6]]), ["cu_seqlens", "[N + 1]", "got", "[1, 3]"]),
    (torch.tensor([], dtype=torch.int64), ["cu_seqlens", "[N + 1]", "got", "[0]"]),
    (offsets(0, 3, 5), ["cu_seqlens", "from 0 to T = 6", "got", "[0, 3, 5]"]),
    (offsets(0, 3, 7), ["cu_seqlens", "from 0 to T = 6", "got", "[0, 3, 7]"]),
    (offsets(1, 3, 6), ["cu_seqlens", "from 0 to T = 6", "got", "[1, 3, 6]"]),
    (offsets(0, 7, 6), ["cu_seqlens", "from 0 to T = 6", "got", "[0, 7, 6]"]),
    (offsets(0, -1, 6), ["cu_seqlens", "from 0 to T = 6", "got", "[0, -1, 6]"]),
    (
        offsets(0, 3, 6, dtype=torch.int32) + 1,
        ["cu_seqlens", "from 0 to T = 6", "got", "[1, 4, 7]"],
    ),
    (offsets(0, 2, 4, 6), ["h0", "[3, ", "got", "[2, "]),
]


@pytest.mark.parametrize("op", list(GOOD))
@pytest.mark.parametrize(("cu_seqlens", "parts"), BAD_OFFSETS, ids=parts_id)
def test_offsets_that_do_not_fit(op: str, cu_seqlens: Tensor, parts: list[str]) -> None:
    good = packed(GOOD[op]())
    raises(getattr(ops, op), op, *parts, **good, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("op", list(GOOD))
def test_offsets_need_a_batch_of_one(op: str) -> None:
    good = GOOD[op]()
    parts = [op, "batch of 1", "cu_seqlens", "got", "[2, 6, "]
    raises(getattr(ops, op), *parts, **good, cu_seqlens=offsets(0, 2, 6))


def test_offsets_of_no_sequence_for_some_tokens() -> None:
    good = packed(good_scan(), sequences=0)
    raises(ops.linear_scan, "cu_seqlens", "T = 6", "got", "[0]", **good, cu_seqlens=offsets(0))


# Devices and layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good"),
    [
        *GOOD.items(),
        ("hgru", lambda: good_hgru(complex_=True)),
        ("lru_scan", lambda: good_lru(complex_=True)),
    ],
)
def test_mixed_devices(name: str, good: Callable[[], dict[str, Tensor]]) -> None:
    """Every argument in turn on another device (meta: it is there without a GPU, too)."""
    op, data = getattr(ops, name), next(iter(good()))
    for moved in (k for k, v in good().items() if v is not None):
        arguments = good() | {moved: good()[moved].to("meta")}
        with pytest.raises(RuntimeError, match=f"{name}: expected all tensors on") as caught:
            op(**arguments)
        message = str(caught.value)
        assert "cpu" in message, message
        assert "meta" in message, message
        assert f"like {data}" in message, message
        if moved != data:
            assert f"got {moved} on meta" in message, message


def test_offsets_on_another_device() -> None:
    arguments = packed(good_scan()) | {"cu_seqlens": offsets(0, 2, 6).to("meta")}
    parts = ["linear_scan", "all tensors on cpu", "got", "cu_seqlens", "meta"]
    raises(ops.linear_scan, *parts, **arguments)
    raw = torch.ops.tidegate.linear_scan
    with pytest.raises(RuntimeError, match="cu_seqlens on meta"):
        raw(arguments["x"], arguments["a"], arguments["h0"], False, arguments["cu_seqlens"])


@pytest.mark.parametrize("op", list(GOOD))
def test_layouts(op: str) -> None:
    good = GOOD[op]()
    data, gate = list(good)[:2]
    ones = torch.ones_like(good[data])
    layouts = [(data, ones.to_sparse(), "sparse_coo"), (gate, ones.to_sparse(), "sparse_coo")]
    if torch.backends.mkldnn.is_available():
        layouts.append((data, ones.to_mkldnn(), "mkldnn"))
    nested = torch.nested.nested_tensor([ones[0], ones[1, :3]])
    for name, value, layout in (*layouts, (data, nested, "nested")):
        parts = [op, "strided", "got layout", layout]
        with torch.no_grad():
            raises(getattr(ops, op), *parts, **(good | {name: value}))
        raises(getattr(ops, op), *parts, **(good | {name: value}))


# Steps ------------------------------------------------------------------------------------------


def test_linear_scan_step() -> None:
    good = {"x": zeros(2, 4), "a": zeros(2, 4), "state": zeros(2, 4)}
    bad = [
        ({"x": zeros(2, 1, 4)}, ["x", "[B, D]", "got", "[2, 1, 4]"]),
        ({"a": zeros(2, 3)}, ["a", "[2, 4]", "got", "[2, 3]"]),
        ({"a": zeros(3)}, ["a", "[4]", "got", "[3]"]),
        ({"state": zeros(1, 4)}, ["state", "[2, 4]", "got", "[1, 4]"]),
        ({"state": zeros(2, 4, dtype=F64)}, ["state", "float32", "got", "float64"]),
        (
            {"x": zeros(2, 4, dtype=F64), "state": zeros(2, 4, dtype=BF16)},
            ["state", "float64 or float32", "got", "bfloat16"],
        ),
        ({"state": zeros(2, 4).to("meta")}, ["expected all tensors on cpu", "state on meta"]),
        ({"x": zeros(2, 4, dtype=torch.int64)}, ["x", "float32", "got", "int64"]),
    ]
    for changes, parts in bad:
        raises(ops.linear_scan_step, "linear_scan_step", *parts, **(good | changes))


def test_hgru_step() -> None:
    good = {"c": zeros(2, 8), "f": zeros(2, 4), "gamma": zeros(4), "theta": zeros(4)}
    good["state"] = zeros(2, 8)
    bad = [
        ({"c": zeros(2, 1, 8)}, ["c", "[B, 2D]", "got", "[2, 1, 8]"]),
        ({"c": zeros(2, 7)}, ["c", "even", "got", "[2, 7]"]),
        ({"f": zeros(2, 8)}, ["f", "[2, 4]", "got", "[2, 8]"]),
        ({"gamma": zeros(8)}, ["gamma", "[4]", "got", "[8]"]),
        ({"theta": None}, ["f", "[2, 8]", "got", "[2, 4]"]),
        ({"state": zeros(2, 4)}, ["state", "[2, 8]", "got", "[2, 4]"]),
        ({"activation": "relu"}, ["activation", "silu", "none", "got", "relu"]),
    ]
    for changes, parts in bad:
        raises(ops.hgru_step, "hgru_step", *parts, **(good | changes))
    with pytest.raises(RuntimeError, match="hgru_step: state must be a tensor"):
        ops.hgru_step(good["c"], good["f"], theta=good["theta"])


def test_steps_with_heads() -> None:
    tokens = {k: zeros(2, 3, 4) for k in ("q", "k", "v", "log_f")}
    state = {"state": zeros(2, 3, 4, 4)}
    bad = [
        ({"q": zeros(2, 1, 3, 4)}, ["q", "[B, H, K]", "got", "[2, 1, 3, 4]"]),
        ({"k": zeros(2, 3, 5)}, ["k", "[2, 3, 4]", "got", "[2, 3, 5]"]),
        ({"v": zeros(2, 2, 4)}, ["v", "[B, H, V]", "[2, 3, 4]", "got", "[2, 2, 4]"]),
        ({"log_f": zeros(2, 3, 3)}, ["log_f", "[B, H, K] (or [B, H, 1]", "got", "[2, 3, 3]"]),
        ({"state": zeros(2, 3, 4, 5)}, ["state", "[B, H, K, V]", "got", "[2, 3, 4, 5]"]),
        ({"state": zeros(1, 3, 4, 4)}, ["state", "[2, 3, 4, 4]", "got", "[1, 3, 4, 4]"]),
        ({"state": zeros(2, 3, 4, 4, dtype=F64)}, ["state", "float32", "got", "float64"]),
        ({"state": state["state"].to("meta")}, ["expected all tensors on cpu", "state on meta"]),
    ]
    step = ops.gated_linear_attention_step
    for changes, parts in bad:
        raises(step, f"{HEADS}_step", *parts, **(tokens | state | changes))
    good = {k: zeros(2, 3, 4) for k in ("q", "f", "v")} | {"gamma": zeros(3, 4)} | state
    bad = [
        ({"f": zeros(2, 3, 1)}, ["f", "[2, 3, 4]", "got", "[2, 3, 1]"]),
        ({"gamma": zeros(4)}, ["gamma", "[H, K]", "[3, 4]", "got", "[4]"]),
        ({"q_activation": "tanh"}, ["q_activation", "silu", "got", "tanh"]),
    ]
    for changes, parts in bad:
        raises(ops.hgrn2_step, "hgrn2_step", *parts, **(good | changes))
    with pytest.raises(RuntimeError, match="hgrn2_step: state must be a tensor"):
        ops.hgrn2_step(good["q"], good["f"], good["v"])


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_gated_rnn_is_called_so_whether_a_gradient_is_recorded_or_not(needs_gradient) -> None:
    """Where one is, another op runs, whose name no caller knows."""
    z, w = torch.zeros(1, 3, 4, requires_grad=needs_gradient), torch.zeros(4, 4)
    for call, said in (
        (lambda: ops.gated_rnn(z, z, w[:, :3]), "w_zh must have shape"),
        (lambda: ops.gated_rnn(z, z, w, torch.zeros(2, 4)), "h0 must have shape"),
        (lambda: ops.gated_rnn(z, z, w, gamma=torch.zeros(3)), "gamma must have shape"),
        (lambda: ops.gated_rnn(z.double(), z, w), "z must be"),
    ):
        for mode in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with mode, pytest.raises(RuntimeError, match=rf"^gated_rnn: {said}"):
                call()


def test_a_failed_step_leaves_the_state_alone() -> None:
    state = torch.ones(2, 4)
    version = state._version
    with pytest.raises(RuntimeError, match="linear_scan_step"):
        ops.linear_scan_step(zeros(2, 3), zeros(2, 3), state)
    assert torch.equal(state, torch.ones(2, 4))
    assert state._version == version


# Initialisers -----------------------------------------------------------------------------------


def test_initialisers() -> None:
    integers = torch.zeros(4, dtype=torch.int64)
    for call in (
        lambda p: ops.init_uniform_(p, 0.0, 1.0),
        lambda p: ops.init_normal_(p, 0.0, 1.0),
        lambda p: ops.init_constant_(p, 1.0),
        ops.init_rope_theta_,
    ):
        with pytest.raises(RuntimeError, match=r"init_\w+_: p must be floating-point.*got int64"):
            call(integers)
    with pytest.raises(RuntimeError, match=r"init_uniform_: high must be at least low = 2"):
        ops.init_uniform_(zeros(3), 2.0, 1.0)
    with pytest.raises(RuntimeError, match=r"init_normal_: std must be at least 0, got -1"):
        ops.init_normal_(zeros(3), 0.0, -1.0)
    with pytest.raises(RuntimeError, match=r"init_lru_nu_log_: expected 0 <= r_min .* 0.9 and 0.5"):
        ops.init_lru_nu_log_(zeros(3), 0.9, 0.5)
    with pytest.raises(RuntimeError, match=r"init_lru_theta_log_: max_phase must be above 0"):
        ops.init_lru_theta_log_(zeros(3), 0.0)
    with pytest.raises(RuntimeError, match=r"init_lru_gamma_log_: nu_log .*\[3\] like p.*\[2\]"):
        ops.init_lru_gamma_log_(zeros(3), zeros(2))
    with pytest.raises(RuntimeError, match=r"init_rope_theta_: p must have shape \[D\].*\[2, 3\]"):
        ops.init_rope_theta_(zeros(2, 3))


# Values, under TIDEGATE_DEBUG=1 -----------------------------------------------------------------


def test_values_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    good = {k: v.to(device) for k, v in good_hgru(complex_=True).items()}
    bad = [
        ({"gamma": torch.tensor([0, 0.5, 1, 0])}, ["gamma", "[0, 1)", "got", "0 to 1"]),
        ({"gamma": torch.tensor([0, -0.5, 0, 0])}, ["gamma", "[0, 1)", "got", "-0.5 to 0"]),
        ({"gamma": torch.tensor([0, torch.nan, 0, 0])}, ["gamma", "[0, 1)", "got"]),
        ({"theta": torch.tensor([0, torch.inf, 0, 0])}, ["theta", "finite", "got", "1 value"]),
    ]
    for changes, parts in bad:
        arguments = good | {k: v.to(device) for k, v in changes.items()}
        monkeypatch.setenv("TIDEGATE_DEBUG", "1")
        raises(ops.hgru, "hgru", *parts, **arguments)
        monkeypatch.delenv("TIDEGATE_DEBUG")
        ops.hgru(**arguments)  # the caller's responsibility otherwise
    good_lru_on = {k: v.to(device) for k, v in good_lru(complex_=True).items()}
    for name in ("nu_log", "theta_log", "gamma_log"):
        arguments = good_lru_on | {name: torch.tensor([0, torch.inf, 0, 0]).to(device)}
        monkeypatch.setenv("TIDEGATE_DEBUG", "1")
        raises(ops.lru_scan, "lru_scan", name, "finite", "got", "1 value", **arguments)
        monkeypatch.delenv("TIDEGATE_DEBUG")
        ops.lru_scan(**arguments)
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    ops.hgru(**good)
    arguments = {k: v.to(device) for k, v in packed(good_hgru()).items()}
    wrong = offsets(0, 4, 5).to(device)
    raises(ops.hgru, "cu_seqlens", "T = 6", "[0, 4, 5]", **arguments, cu_seqlens=wrong)


def test_values_of_ops_with_heads_are_checked_when_debugging(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    good = {op: {k: v.to(device) for k, v in GOOD[op]().items()} for op in (HEADS, "hgrn2")}
    above, missing = torch.full((2, 6, 3, 4), -1.0), torch.full((2, 6, 3, 1), -1.0)
    above[1, 2, 0, 3], missing[0, 0, 1, 0] = 0.25, torch.nan
    bad = [
        (HEADS, {"log_f": above}, ["log_f", "at most 0", "got values up to 0.25"]),
        (HEADS, {"log_f": missing}, ["log_f", "at most 0", "got values up to", "nan"]),
        ("hgrn2", {"gamma": torch.ones(3, 4)}, ["gamma", "[0, 1)", "got", "1 to 1"]),
    ]
    for op, changes, parts in bad:
        arguments = good[op] | {k: v.to(device) for k, v in changes.items()}
        monkeypatch.setenv("TIDEGATE_DEBUG", "1")
        raises(getattr(ops, op), op, *parts, **arguments)
        monkeypatch.delenv("TIDEGATE_DEBUG")
        getattr(ops, op)(**arguments)  # the caller's responsibility otherwise
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    for op, arguments in good.items():
        getattr(ops, op)(**arguments)
