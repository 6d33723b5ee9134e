"""What forgetting_attention and its step refuse, by message."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tidegate

ops = tidegate.ops


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, object]:
    return {
        "q": zeros(2, 6, 4, 8),
        "k": zeros(2, 7, 2, 8),
        "v": zeros(2, 7, 2, 8),
        "log_f": zeros(2, 7, 4),
    }


def packed(queries: list[int], keys: list[int] | None) -> dict[str, object]:
    out = {"q": zeros(1, 6, 4, 8), "k": zeros(1, 7, 2, 8), "v": zeros(1, 7, 2, 8)}
    out |= {"log_f": zeros(1, 7, 4), "cu_seqlens": torch.tensor(queries)}
    return out if keys is None else out | {"cu_seqlens_k": torch.tensor(keys)}


def raises(function, *parts: str, **arguments: object) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(**arguments)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


BAD = [
    ({"q": zeros(2, 6, 8)}, ["q must have shape [B, Tq, Hq, D]", "[2, 6, 8]"]),
    ({"q": zeros(2, 6, 4, 8, dtype=torch.int64)}, ["q must be float32", "int64"]),
    ({"q": zeros(2, 6, 5, 8)}, ["multiple of k's", "Hq = 5 and Hkv = 2"]),
    ({"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 8)}, ["multiple", "Hq = 4 and Hkv = 3"]),
    ({"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 8)}, ["multiple", "Hkv = 0"]),
    (
        {"k": zeros(2, 7, 2, 9)},
        ["k must have shape [B, Tk, Hkv, D] = [2, 7, 2, 8]", "[2, 7, 2, 9]"],
    ),
    ({"k": zeros(3, 7, 2, 8)}, ["k must have shape", "[3, 7, 2, 8]"]),
    ({"k": zeros(2, 7, 2, 8, dtype=torch.float16)}, ["k must be float32 like q", "float16"]),
    ({"v": zeros(2, 6, 2, 8)}, ["v must have shape [2, 7, 2, 8] like k", "[2, 6, 2, 8]"]),
    ({"log_f": zeros(2, 7, 2)}, ["log_f must have shape [B, Tk, Hq] = [2, 7, 4]", "[2, 7, 2]"]),
    ({"log_f": zeros(2, 6, 4)}, ["log_f must have shape", "[2, 6, 4]"]),
    ({"log_f": zeros(2, 7, 4, 1)}, ["log_f must have shape", "[2, 7, 4, 1]"]),
    ({"log_f": zeros(2, 7, 4, dtype=torch.float64)}, ["log_f must be float32", "float64"]),
    ({"q": zeros(2, 8, 4, 8)}, ["must not have more tokens than k", "Tq = 8 and Tk = 7"]),
    ({"window": 0}, ["window must be at least 1, got 0"]),
    ({"window": -3}, ["window must be at least 1, got -3"]),
    ({"scale": 0.0}, ["scale must be above 0", "got 0"]),
    ({"scale": -1.0}, ["scale must be above 0", "got -1"]),
    ({"scale": float("nan")}, ["scale must be above 0", "nan"]),
    ({"prune": 1.0}, ["prune must lie in [0, 1), got 1"]),
    ({"prune": -0.1}, ["prune must lie in [0, 1), got -0.1"]),
    ({"cu_seqlens": torch.tensor([0, 6])}, ["q must have a batch of 1"]),
    ({"cu_seqlens_k": torch.tensor([0, 7])}, ["cu_seqlens must be given when cu_seqlens_k is"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bad_input(changes: dict, parts: list[str], where: str) -> None:
    arguments = {
        k: v.to(where) if isinstance(v, Tensor) else v for k, v in (good() | changes).items()
    }
    raises(ops.forgetting_attention, "forgetting_attention: ", *parts, **arguments)


BAD_OFFSETS = [
    (packed([0, 6], None), ["as many tokens as q", "Tq = 6 and Tk = 7"]),
    (packed([0, 2, 6], [0, 7]), ["cu_seqlens_k must have shape [N + 1] = [3]", "[2]"]),
    (packed([0, 2, 6], [0, 1, 7]), ["more tokens than k", "Tq = 2 and Tk = 1 in sequence 0"]),
    (packed([0, 2, 5], [0, 2, 7]), ["cu_seqlens must rise from 0 to T = 6", "[0, 2, 5]"]),
    (packed([0, 2, 6], [0, 8, 7]), ["cu_seqlens_k must rise from 0 to Tk = 7", "[0, 8, 7]"]),
    (
        packed([0, 2, 6], [0, 2, 7]) | {"cu_seqlens_k": torch.tensor([0, 2, 7], dtype=torch.int32)},
        ["cu_seqlens_k must be int64 like cu_seqlens", "int32"],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD_OFFSETS, ids=lambda value: str(value)[-60:])
def test_bad_offsets(arguments: dict, parts: list[str]) -> None:
    raises(ops.forgetting_attention, "forgetting_attention: ", *parts, **arguments)


def test_mixed_devices() -> None:
    for name in ("k", "v", "log_f"):
        arguments = good()
        arguments[name] = arguments[name].to("meta")
        raises(
            ops.forgetting_attention, "forgetting_attention: ", f"got {name} on meta", **arguments
        )


@pytest.mark.parametrize("head_dim", [0, 257])
def test_head_dimensions_that_no_kernel_takes(head_dim: int, device: str) -> None:
    q = torch.zeros(1, 3, 2, head_dim, device=device)
    log_f = torch.zeros(1, 3, 2, device=device)
    parts = ["forgetting_attention: D must be from 1 to 256", f"D = {head_dim}"]
    raises(ops.forgetting_attention, *parts, q=q, k=q, v=q, log_f=log_f)


def test_gates_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    arguments = {k: v.to(device) for k, v in good().items()}
    arguments["log_f"][0, 3, 1] = 0.5
    ops.forgetting_attention(**arguments)
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    raises(ops.forgetting_attention, "log_f must be at most 0", "up to 0.5", **arguments)


def good_step() -> dict[str, object]:
    return {
        "q": zeros(2, 4, 8),
        "k_cache": zeros(2, 7, 2, 8),
        "v_cache": zeros(2, 7, 2, 8),
        "gate_cache": zeros(2, 7, 4),
        "lengths": torch.tensor([3, 7], dtype=torch.int32),
    }


BAD_STEP = [
    ({"q": zeros(2, 1, 4, 8)}, ["q must have shape [B, Hq, D]", "[2, 1, 4, 8]"]),
    ({"q": zeros(2, 3, 8)}, ["multiple of k_cache's", "Hq = 3 and Hkv = 2"]),
    ({"k_cache": zeros(2, 7, 2, 9)}, ["k_cache must have shape [B, Tmax, Hkv, D]"]),
    ({"v_cache": zeros(2, 8, 2, 8)}, ["v_cache must have shape", "like k_cache"]),
    ({"gate_cache": zeros(2, 7, 2)}, ["gate_cache must have shape [B, Tmax, Hq] = [2, 7, 4]"]),
    ({"gate_cache": zeros(2, 7, 4, dtype=torch.bfloat16)}, ["gate_cache must be float32"]),
    ({"lengths": torch.tensor([3, 7])}, ["lengths must be int32", "int64"]),
    ({"lengths": torch.tensor([3], dtype=torch.int32)}, ["lengths must have shape [B] = [2]"]),
    ({"window": 0}, ["window must be at least 1"]),
    ({"scale": 0.0}, ["scale must be above 0"]),
    ({"prune": 1.0}, ["prune must lie in [0, 1), got 1"]),
    ({"prune": 1e-3}, ["prune = 0.001 needs key_norms", "got None"]),
    ({"key_norms": zeros(2, 4)}, ["key_norms must have shape [B, Hkv] = [2, 2]"]),
    ({"key_norms": zeros(2, 2, dtype=torch.float64)}, ["key_norms must be float32", "float64"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD_STEP, ids=lambda value: str(value)[:60])
def test_bad_input_of_a_step(changes: dict, parts: list[str]) -> None:
    function = ops.forgetting_attention_step
    raises(function, "forgetting_attention_step: ", *parts, **good_step() | changes)


def test_values_of_a_step_are_checked_when_debugging(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    step = ops.forgetting_attention_step
    arguments = {k: v.to(device) for k, v in good_step().items()}
    arguments["v_cache"].normal_()
    arguments["gate_cache"][0, 3:] = 7.0  # behind the first row's three tokens
    limits = torch.tensor([0, 7], dtype=torch.int32, device=device)
    beyond = torch.tensor([-2, 9], dtype=torch.int32, device=device)
    assert torch.equal(
        step(**arguments | {"lengths": beyond}), step(**arguments | {"lengths": limits})
    )
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    step(**arguments)
    step(**arguments | {"lengths": limits})
    arguments["k_cache"][1, 2, 1] = 2.0  # sqrt(32) long
    norms = torch.full((2, 2), 5.7, device=device)
    step(**arguments | {"prune": 1e-3, "key_norms": norms})
    short = arguments | {"prune": 1e-3, "key_norms": 0.9 * norms}
    raises(step, "forgetting_attention_step: key_norms must be at least the length", **short)
    for wrong in ([3, 8], [-1, 7]):
        lengths = torch.tensor(wrong, dtype=torch.int32, device=device)
        parts = [
            "forgetting_attention_step: lengths must lie in [0, Tmax = 7]",
            f"from {min(wrong)}",
        ]
        raises(step, *parts, **arguments | {"lengths": lengths})
    arguments["gate_cache"][1, 6, 2] = 0.5
    raises(step, "forgetting_attention_step: gate_cache must be at most 0", "0.5", **arguments)
