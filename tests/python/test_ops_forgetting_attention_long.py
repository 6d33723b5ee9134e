"""`forgetting_attention` over many tokens: digits, memory, and the bound on what pruning drops."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
import torch
import torch.nn.functional as F
from conftest import require_cuda
from support import forgetting_attention_oracle as attention_oracle
from support.forgetting_attention_cases import relative
from torch import Tensor

import tidegate

ops = tidegate.ops

# Digits -------------------------------------------------------------------------------------------


def gates_of(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """log f [B, T, H]: "weak", "strong", or mostly weak and one in a hundred strong."""
    x = torch.randn(shape, generator=rng)
    if kind == "mixed":
        return F.logsigmoid(x + torch.where(torch.rand(shape, generator=rng) < 0.01, -2.0, 9.0))
    return F.logsigmoid(x + {"weak": 8.0, "strong": 0.0}[kind])


def gate_gradient_error(
    gates: str, heads: int, key_heads: int, head_dim: int, device: str, time: int = 16384
) -> tuple[float, Tensor]:
    """The relative error of dlog f over so many tokens of bfloat16 data, and dlog f."""
    rng = torch.Generator().manual_seed(5)
    shapes = [(1, time, count, head_dim) for count in (heads, key_heads, key_heads, heads)]
    q, k, v, do = (torch.randn(s, generator=rng).bfloat16().to(device) for s in shapes)
    log_f = gates_of(gates, (1, time, heads), rng).to(device)
    leaves = [t.requires_grad_() for t in (q, k, v, log_f)]
    o = ops.forgetting_attention(*leaves)
    found = torch.autograd.grad(o, leaves, do)[3]
    with torch.device(device), torch.no_grad():
        exact = attention_oracle.reference(q, k, v, log_f, do, exact=True)["dlog_f"]
    return relative(found, exact), found


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["weak", "strong", "mixed"])
def test_gradient_of_the_gates_over_16384_tokens(gates: str, device: str) -> None:
    """Sums over rows and columns of the same dS: at most 0.5 % from float64 with 16-bit data. On a
    CPU over half as many, with half the error, and of gates that are not weak, whose sums are
    shorter, over a quarter."""
    time, limit = 16384, 5e-3
    if device == "cpu":
        time, limit = (8192, 2.5e-3) if gates == "weak" else (4096, 5e-3)
    error, found = gate_gradient_error(gates, 1, 1, 16, device, time)
    assert error <= limit
    assert not found[:, 0].any()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("gates", ["weak", "strong", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradient_of_the_gates_of_grouped_heads(head_dim: int, gates: str) -> None:
    """That holds for four query heads that share two key heads, on tensor cores."""
    require_cuda()
    error, found = gate_gradient_error(gates, 4, 2, head_dim, "cuda")
    print(f"dlog f, D {head_dim}, {gates} gates: {100 * error:.3f} %")
    assert error <= 5e-3
    assert not found[:, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digits_after_a_hundred_thousand_tokens(dtype: torch.dtype, device: str) -> None:
    """The last rows of 131072 tokens, whose c is near -70000, against float64."""
    rng = torch.Generator().manual_seed(3)
    time = 131072
    q = torch.randn(1, 3, 1, 16, generator=rng).to(dtype)
    k, v = (torch.randn(1, time, 1, 16, generator=rng).to(dtype) for _ in range(2))
    log_f = F.logsigmoid(torch.randn(1, time, 1, generator=rng))
    log_f[:, -2000:] *= 0.01
    assert log_f.sum() < -5e4
    found = ops.forgetting_attention(*(t.to(device) for t in (q, k, v, log_f)))
    last = [t[:, -30000:] for t in (k, v, log_f)]  # the rest weighs exp(-15000)
    exact = attention_oracle.reference(q, *last, exact=True)["o"]
    assert relative(found, exact) < (2e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.slow
def test_65536_tokens(device: str) -> None:
    """The last token is right where scores would take 16 GiB, in a window."""
    time = 65536
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, time, 1, 8, generator=rng) for _ in range(3))
    log_f = F.logsigmoid(torch.randn(1, time, 1, generator=rng) + 6)
    leaves = [t.to(device).requires_grad_() for t in (q, k, v, log_f)]
    o = ops.forgetting_attention(*leaves, window=3000)
    last = [t[:, -3000:] for t in (k, v, log_f)]
    exact = attention_oracle.reference(q[:, -1:], *last, exact=True)["o"]
    assert relative(o[:, -1:], exact) < 1e-5
    grads = torch.autograd.grad(o.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


# Memory -------------------------------------------------------------------------------------------

# Forward and backward in a process of its own, whose freed memory goes back to the system at once:
# prints the bytes that its resident set grew by, at the peak, beyond o and the gradients.
GROWN = """
import json, sys
from pathlib import Path

import torch

from tidegate import ops

def resident(field):
    (line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if field in l]
    return 1024 * int(line.split()[1])

def run(time):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, time, 2, 16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v, -torch.rand(1, time, 2))]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = resident("VmRSS")
    o = ops.forgetting_attention(*leaves)
    results = (o, *torch.autograd.grad(o, leaves, do))
    return resident("VmHWM") - before - sum(4 * t.numel() for t in results)

torch.set_num_threads(2)
run(256)  # threads and code
print(json.dumps([run(int(time)) for time in sys.argv[1:]]))
"""


def test_memory_is_linear_in_time_on_the_cpu() -> None:
    """What twice the tokens add is what the tokens before them took, and far below their scores:
    of 8192 tokens 256 MiB a head."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process cannot be set back here")
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    source = str(Path(tidegate.__file__).parent.parent)
    command = [sys.executable, "-c", GROWN, "2048", "4096", "8192"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment | {"PYTHONPATH": source},
    )
    first, second, third = json.loads(result.stdout)
    allowed = 1 << 20  # a page here and there, buffers of the threads
    assert third - second <= 2 * max(second - first, 0) + allowed
    assert third <= 64 * 2 * 8192 + allowed, "more than 64 bytes a row and head"


def extra_on_the_gpu(time: int, head_dim: int, prune: float | None) -> float:
    """Bytes at the peak of forward and backward beyond inputs, outputs and gradients."""
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16}
    q, do = (torch.randn(2, time, 4, head_dim, **where) for _ in range(2))
    k, v = (torch.randn(2, time, 2, head_dim, **where) for _ in range(2))
    log_f = -torch.rand(2, time, 4, device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, log_f)]
    gc.collect()  # what an earlier test left in cycles would be given back in the middle
    # Autograd's thread lets go of the last pass's tensors a moment after that has returned.
    sleep(0.2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # What is asked for: a block of the allocator's may be a MiB larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    o = ops.forgetting_attention(*leaves, prune=prune)
    results = (o, *torch.autograd.grad(o, leaves, do))
    torch.cuda.synchronize()
    results_bytes = sum(t.numel() * t.element_size() for t in results)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - results_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("prune", [None, 1e-6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear_in_time_on_the_gpu(
    deterministic: bool, head_dim: int, prune: float | None
) -> None:
    """24 bytes a row and head, 4 D more where dq is added up in fp32, and a constant: its sums are
    in whole tiles of rows. A deterministic pass adds in order on Hopper, unless it prunes."""
    require_cuda()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        extra_on_the_gpu(300, head_dim, prune)
        one, two = (extra_on_the_gpu(time, head_dim, prune) for time in (8192, 16384))
    finally:
        torch.use_deterministic_algorithms(before)
    in_order = torch.cuda.get_device_capability()[0] == 9 and prune is None
    a_row = 24 + (4 * head_dim if in_order or not deterministic else 0)
    for time, extra in ((8192, one), (16384, two)):
        print(f"T {time}, D {head_dim}, prune {prune}: {extra / (8 * time):.2f} of {a_row} bytes")
        assert extra <= 8 * (time + 256) * a_row + 65536
    assert two <= 2 * one + 65536


# Queries without keys -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("prune", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [[0, 1, 75], [0, 0, 75], [0, 70, 75]], ids=str)
def test_queries_without_keys(keys: list[int], dtype: torch.dtype, prune: float | None) -> None:
    """More queries than keys, which only offsets on a GPU can say unchecked: o = 0 and
    lse = -infinity where there is none, no gradient, and the other rows as alone. (Elsewhere such
    offsets are refused: test_bad_offsets.)"""
    require_cuda()
    torch.manual_seed(0)
    queries = [0, 4, 74]
    q, do = (torch.randn(1, 74, 2, 16, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, 75, 1, 16, device="cuda", dtype=dtype) for _ in range(2))
    log_f = -0.1 * torch.rand(1, 75, 2, device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, log_f)]
    bounds = [torch.tensor(b, device="cuda") for b in (queries, keys)]
    o, lse = ops.forgetting_attention(
        *leaves, cu_seqlens=bounds[0], cu_seqlens_k=bounds[1], prune=prune, return_lse=True
    )
    found = torch.autograd.grad(o, leaves, do)
    assert all(grad.isfinite().all() for grad in found)
    for n in range(2):
        rows, of_keys = slice(*queries[n : n + 2]), slice(*keys[n : n + 2])
        without = max(0, (rows.stop - rows.start) - (of_keys.stop - of_keys.start))
        lost = slice(rows.start, rows.start + without)
        assert not o[:, lost].count_nonzero()
        assert (lse[:, :, lost] == -torch.inf).all()
        assert not found[0][:, lost].count_nonzero()
        kept = slice(rows.start + without, rows.stop)
        if kept.start == kept.stop:
            continue
        parts = [q[:, kept], k[:, of_keys], v[:, of_keys], log_f[:, of_keys]]
        alone = [t.detach().requires_grad_() for t in parts]
        expected, expected_lse = ops.forgetting_attention(*alone, prune=prune, return_lse=True)
        grads = torch.autograd.grad(expected, alone, do[:, kept])
        close = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(o[:, kept], expected, rtol=close, atol=close)
        torch.testing.assert_close(lse[:, :, kept], expected_lse, rtol=1e-3, atol=1e-3)
        for whole, part, where in zip(found, grads, (kept, of_keys, of_keys, of_keys), strict=True):
            largest = float(part.abs().max())
            torch.testing.assert_close(whole[:, where], part, rtol=0, atol=close * (1 + largest))


# Pruning ------------------------------------------------------------------------------------------


def adversary(
    eps: float, time: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """q, k, v, log f and eps max|v|, that come as near to the bound as the proof allows: all
    queries are one vector, 128 old keys that vector and the others its negative, so that the
    Cauchy-Schwarz inequality is an equality for every key that goes; values are +1 before and -1
    after. One gate between them; over the batch it goes from too shut to drop nothing to too open
    to drop anything."""
    old, dim = 128, 16
    unit = F.one_hot(torch.tensor(0), dim).double()
    sign = torch.where(torch.arange(time) < old, 1.0, -1.0).double()[None, :, None, None]
    gaps = torch.linspace(-1, 2, 31, dtype=torch.float64)
    log_f = torch.zeros(31, time, 1, dtype=torch.float64)
    largest_score = 2 * dim**-0.5  # of q . (k_j - k_p)
    log_f[:, old, 0] = -(largest_score - math.log(eps / time) - gaps)
    shape = (31, time, 1, dim)
    q, k, v = (t.expand(shape).to(device, dtype).contiguous() for t in (unit, sign * unit, sign))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return [q, k, v, log_f.to(device, wide)], v.abs().max().double()


@pytest.mark.parametrize("eps", [0.3, 0.1, 1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time", [130, 600])
def test_an_adversary_stays_within_the_bound(
    time: int, dtype: torch.dtype, eps: float, device: str
) -> None:
    """And comes near it: a kernel that drops twice what it may fails here."""
    tensors, largest = adversary(eps, time, dtype, device)
    o, lse = ops.forgetting_attention(*tensors, return_lse=True)
    pruned, pruned_lse = ops.forgetting_attention(*tensors, return_lse=True, prune=eps)
    moved = (pruned.double() - o.double()).abs().max()
    rounding = 4 * torch.finfo(dtype).eps
    assert moved <= (2 * eps + rounding) * largest
    drop = (lse.double() - pruned_lse.double()).max()
    assert drop <= -math.log1p(-eps) + 1e-5
    reached = float(moved / (2 * eps * largest))
    print(f"{device}, {dtype}, eps {eps}, {time} tokens: {reached:.2f} of the bound")
    # On CUDA only tensor cores prune, and they count all keys of a sequence, not those so far.
    prunes = device == "cpu" or dtype is torch.bfloat16
    if prunes and rounding < eps:
        assert reached > (0.5 if device == "cpu" or time == 130 else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("prune", [None, 1e-6])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_sequences_without_keys_between_long_ones(
    head_dim: int, prune: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that takes many tiles of queries goes from a tile with many keys to one with none and
    on: the former are as without the latter, which are zeros. As many keys as such queries have
    none themselves: there are no more queries than keys in all, which the op always asks for.
    It asks that of each sequence only in debug mode."""
    require_cuda()
    monkeypatch.delenv("TIDEGATE_DEBUG", raising=False)
    torch.manual_seed(0)
    count, long, short = 40, 300, 64
    of_queries, of_keys = (
        torch.tensor(x).repeat(count) for x in ([long, short, 0], [long, 0, short])
    )
    offsets = [F.pad(n.cumsum(0), (1, 0)).cuda() for n in (of_queries, of_keys)]
    shape = (1, count * (long + short), 8, head_dim)
    q, k, v = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16)
    log_f = -0.1 * torch.rand(shape[:-1], device="cuda")
    o = ops.forgetting_attention(
        q, k, v, log_f, cu_seqlens=offsets[0], cu_seqlens_k=offsets[1], prune=prune
    )
    q, k, v, log_f, o = (t.unflatten(1, (count, -1))[0] for t in (q, k, v, log_f, o))
    assert not o[:, long:].count_nonzero()
    alone = ops.forgetting_attention(*(t[:, :long] for t in (q, k, v, log_f)))
    assert (o[:, :long] - alone).norm() < 1e-3 * alone.norm()
