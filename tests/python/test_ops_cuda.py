"""What only a GPU shows: graphs, streams, several devices, huge tensors, splits of time.

The tests of the other files run on the GPU too, through the `device` fixture; here is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import require_cuda
from support import (
    cases,
    error_rule,
    fox_cases,
    gla_cases,
    rnn_cases,
    scan_cases,
    scan_oracle,
    walks,
    wkv4_cases,
)
from support.fox_cases import FoxCase
from support.gla_cases import GlaCase
from support.rnn_cases import RnnCase
from support.scan_cases import ScanCase
from support.wkv4_cases import Wkv4Case
from torch import Tensor

import tidegate

pytestmark = pytest.mark.gpu
ops = tidegate.ops
LONG = 131072


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    require_cuda()


KINDS = [
    ScanCase("hgru", batch=2, time=300, channels=64, dtype=torch.bfloat16),
    ScanCase("hgru", batch=2, time=300, channels=64, dtype=torch.bfloat16, theta=True),
    ScanCase("hgru", channels=33, dtype=torch.float32, lengths=(100, 0, 200)),
    ScanCase("linear_scan", batch=2, time=300, channels=64, dtype=torch.float32),
    ScanCase("linear_scan", batch=2, time=300, channels=7, dtype=torch.complex64, constant=True),
    ScanCase("linear_scan", batch=1, time=9000, channels=8, dtype=torch.float16, reverse=True),
    ScanCase("lru_scan", batch=2, time=300, channels=64, dtype=torch.bfloat16, theta=True),
    ScanCase("lru_scan", channels=33, dtype=torch.float32, lengths=(100, 0, 200), reverse=True),
    GlaCase("hgrn2", time=300, key_dim=64, value_dim=32, dtype=torch.bfloat16),
    GlaCase("hgrn2", lengths=(100, 0, 200), key_dim=17, dtype=torch.float32),
    GlaCase("gated_linear_attention", time=300, key_dim=32, value_dim=64, dtype=torch.float16),
    GlaCase("gated_linear_attention", time=300, key_dim=16, value_dim=16, per_head=True),
]


def inputs_of(case: ScanCase, device: str = "cuda", seed: int = 0) -> dict[str, Tensor | None]:
    made = cases.make_inputs(replace(case, seed=seed))
    return {k: cases.to_device(v, device, case.layout) for k, v in made.items()}


def train(case: ScanCase, inputs: dict[str, Tensor | None]) -> list[Tensor]:
    """Both results and every gradient of one call."""
    named = {k: v for k, v in inputs.items() if k not in ("dh", "dh_final")}
    leaves = [v for k, v in named.items() if v is not None and k != "cu_seqlens"]
    for leaf in leaves:
        leaf.requires_grad_()
    results = getattr(ops, case.op)(**named, **cases.options(case))
    return [*results, *torch.autograd.grad(results, leaves, (inputs["dh"], inputs["dh_final"]))]


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"result {i} differs"


# Streams and graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_graph_capture_and_replay(case: ScanCase) -> None:
    static = inputs_of(case)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(case, static)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(case, static)
    for seed in (1, 2):
        fresh = inputs_of(case, seed=seed)
        with torch.no_grad():
            for name, value in fresh.items():
                if value is not None:
                    static[name].copy_(value)
        graph.replay()
        assert_same_bits(train(case, fresh), captured)


def test_steps_in_a_graph() -> None:
    x, a, state = torch.randn(3, 4, 64, device="cuda").unbind(0)
    expected = state.clone()
    ops.linear_scan_step(x, a, state.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear_scan_step(x, a, state)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, ops.linear_scan_step(x, a, expected))
    assert torch.equal(state, expected)


def test_steps_with_heads_in_a_graph() -> None:
    q, f, v = torch.randn(3, 4, 2, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    state = torch.randn(4, 2, 64, 64, device="cuda")
    expected = state.clone()
    ops.hgrn2_step(q, f, v, None, state.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.hgrn2_step(q, f, v, None, state)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, ops.hgrn2_step(q, f, v, None, expected))
    assert torch.equal(state, expected)


def test_offsets_on_the_cpu_are_an_error_while_capturing() -> None:
    case = ScanCase(lengths=(3, 4))
    inputs = inputs_of(case)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].cpu()
    graph = torch.cuda.CUDAGraph()
    message = "hgru: cu_seqlens must be on cuda:0 while a CUDA graph is captured, got it on cpu"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        ops.hgru(inputs["c"], inputs["f"], cu_seqlens=inputs["cu_seqlens"])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_runs_on_the_current_stream(case: ScanCase) -> None:
    """On a side stream, inputs that arrive late on that stream are waited for."""
    fresh = inputs_of(case)
    expected = train(case, fresh)
    late = {k: v if v is None else torch.zeros_like(v) for k, v in fresh.items()}
    if fresh["cu_seqlens"] is not None:
        late["cu_seqlens"].copy_(fresh["cu_seqlens"])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for name, value in late.items():
            if value is not None:
                value.copy_(fresh[name].detach())
        found = train(case, late)
    side.synchronize()
    assert_same_bits(expected, found)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_nothing_synchronises(case: ScanCase) -> None:
    inputs = inputs_of(case)
    train(case, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(case, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Devices ----------------------------------------------------------------------------------------


@pytest.fixture
def second_device() -> Iterator[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    yield "cuda:1"
    assert torch.cuda.current_device() == 0, "an op has left another device current"


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_tensors_not_on_the_current_device(case: ScanCase, second_device: str) -> None:
    expected = train(case, inputs_of(case, "cuda:0"))
    found = train(case, inputs_of(case, second_device))
    assert all(value.device == torch.device(second_device) for value in found)
    assert_same_bits([value.cpu() for value in expected], [value.cpu() for value in found])
    x, a, state = torch.ones(3, 2, 8, device=second_device).unbind(0)
    assert torch.equal(ops.linear_scan_step(x, a, state), torch.full_like(x, 2))


def test_tensors_of_two_gpus(second_device: str) -> None:
    x = torch.zeros(2, 5, 4, device="cuda:0")
    for other in (second_device, "cpu"):
        message = f"linear_scan: expected all tensors on cuda:0 like x, got a on {other}"
        with pytest.raises(RuntimeError, match=message):
            ops.linear_scan(x, x.to(other))


def test_tensors_of_two_kinds_of_device() -> None:
    x = torch.zeros(2, 5, 4, device="cuda")
    with pytest.raises(RuntimeError, match="linear_scan: expected all tensors on cuda:0 .* on cpu"):
        ops.linear_scan(x, x.cpu())
    with pytest.raises(RuntimeError, match="hgru: expected all tensors on cpu .* on cuda:0"):
        ops.hgru(x.cpu(), x)
    with pytest.raises(RuntimeError, match="hgru: expected all tensors on cuda:0 .* h0 on cpu"):
        ops.hgru(x, x, h0=torch.zeros(2, 4))


# Sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        ScanCase("hgru", batch=1, time=LONG, channels=5, dtype=torch.bfloat16),
        ScanCase("hgru", batch=1, time=LONG, channels=4, theta=True, gates="open", reverse=True),
        ScanCase(
            "hgru", channels=8, dtype=torch.bfloat16, theta=True, lengths=(60000, 0, 3, 70000)
        ),
        ScanCase(
            "linear_scan", batch=1, time=LONG, channels=3, dtype=torch.complex64, constant=True
        ),
        ScanCase("linear_scan", channels=8, lengths=(30000, 0, 1, 40000), gates="loguniform"),
        ScanCase("lru_scan", batch=1, time=LONG, channels=4, dtype=torch.bfloat16, theta=True),
        ScanCase(
            "lru_scan", batch=1, time=LONG, channels=3, gates="open", reverse=True, theta=True
        ),
        ScanCase("lru_scan", channels=8, lengths=(60000, 0, 3, 70000), gates="open"),
    ],
    ids=str,
)
def test_long_and_narrow_shapes(case: ScanCase) -> None:
    """So little to do in parallel that time is split."""
    cases.check(case, "cuda")


@pytest.mark.parametrize("channels", [1, 8, 64, 200])
def test_a_nan_in_split_time(channels: int) -> None:
    """A NaN in a later split does not reach earlier ones, nor other channels or sequences."""
    case = ScanCase(channels=channels, lengths=(20000, 30000), gates="open", dtype=torch.bfloat16)
    inputs = inputs_of(case)
    c, rest = inputs["c"], {"cu_seqlens": inputs["cu_seqlens"], "h0": inputs["h0"]}
    clean, _ = ops.hgru(c, inputs["f"], **rest)
    for t in (0, 9999, 19999, 20000, 35000, 49999):
        dirty = c.clone()
        dirty[0, t, 0] = float("nan")
        h, final = ops.hgru(dirty, inputs["f"], **rest)
        end = 20000 if t < 20000 else 50000
        assert h[0, t:end, 0].isnan().all()
        assert h.isnan().sum() == end - t
        assert final.isnan().sum() == 1
        finite = ~h.isnan()
        assert torch.equal(h[finite], clean[finite])


@pytest.mark.parametrize("sequences", [65535, 70000, 150001])
def test_more_sequences_than_a_grid_is_wide(sequences: int) -> None:
    x = torch.randn(sequences, 2, 3, device="cuda")
    a = torch.rand(sequences, 2, 3, device="cuda")
    h, final = ops.linear_scan(x, a)
    expected = a[:, 1] * x[:, 0] + x[:, 1]
    torch.testing.assert_close(h[:, 1], expected)
    torch.testing.assert_close(final, expected)
    offsets = torch.arange(0, 2 * sequences + 1, 2, device="cuda", dtype=torch.int32)
    flat, final = ops.linear_scan(x.view(1, -1, 3), a.view(1, -1, 3), cu_seqlens=offsets)
    torch.testing.assert_close(flat.view_as(h), h)
    torch.testing.assert_close(final, expected)


def test_wide_rows() -> None:
    cases.check(ScanCase(batch=1, time=20, channels=70000, dtype=torch.bfloat16), "cuda")


def needs_memory(gibibytes: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes:g} GiB of free device memory, {free / 2**30:.0f} are there")


def close_in_parts(left: Tensor, right: Tensor, tolerance: float) -> None:
    """|left - right| <= tolerance * (|right| + 1), without large temporaries."""
    assert left.shape == right.shape
    left, right = (values.detach().flatten().split(1 << 28) for values in (left, right))
    for a, b in zip(left, right, strict=True):
        error = (a.float() - b.float()).abs_().div_(b.float().abs_().add_(1)).max()
        assert error <= tolerance


@pytest.mark.large
@pytest.mark.parametrize("theta", [False, True])
def test_more_than_two_to_the_31_elements(theta: bool) -> None:
    """Each batch row of a huge call equals the call of that row alone, gradients too."""
    needs_memory(60)
    batch, time, width = 4, 65537, 8224
    assert batch * time * width > 2**31
    channels = width // 2 if theta else width
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    phase = torch.rand(channels, device="cuda") if theta else None
    c, f = randn(batch, time, width).requires_grad_(), randn(batch, time, channels).requires_grad_()
    dh = randn(batch, time, width)
    h, final = ops.hgru(c, f, theta=phase)
    dc, df = torch.autograd.grad(h, (c, f), dh)
    for row in (0, batch - 1):
        part = slice(row, row + 1)
        leaves = [v.detach()[part].clone().requires_grad_() for v in (c, f)]
        alone, state = ops.hgru(*leaves, theta=phase)
        close_in_parts(h[part], alone, 2**-7)
        close_in_parts(final[part], state, 1e-4)
        for whole, grad in zip((dc, df), torch.autograd.grad(alone, leaves, dh[part]), strict=True):
            close_in_parts(whole[part], grad, 2**-6)
        channel = slice(channels - 3, channels)
        halves = [channel] if not theta else [channel, slice(width - 3, width)]
        corner = torch.cat([c.detach()[part, :, s] for s in halves], -1).cpu()
        gate = f.detach()[part, :, channel].cpu()
        turn = phase[channel].cpu() if theta else None
        found = torch.cat([h.detach()[part, :, s] for s in halves], -1)
        exact, _ = scan_oracle.hgru_forward(corner, gate, None, turn)
        same, _ = scan_oracle.hgru_forward(corner, gate, None, turn, exact=False)
        error_rule.assert_within_rule(f"row {row}", found, exact, same)


@pytest.mark.large
def test_slices_of_one_projection_beyond_two_to_the_31() -> None:
    """Strided views whose last rows lie more than 2^31 elements into their storage."""
    needs_memory(30)
    time, channels = LONG, 5504
    projection = torch.randn(1, time, 3 * channels, device="cuda", dtype=torch.bfloat16)
    assert projection.numel() > 2**31
    _, f, c = projection.split(channels, -1)
    h, _ = ops.hgru(c, f)
    last = slice(channels - 5, channels)
    corner, gate = c[..., last].cpu(), f[..., last].cpu()
    exact, _ = scan_oracle.hgru_forward(corner, gate)
    same, _ = scan_oracle.hgru_forward(corner, gate, exact=False)
    error_rule.assert_within_rule("last channels", h[..., last], exact, same)
    copies, _ = ops.hgru(c.contiguous(), f.contiguous())
    close_in_parts(h, copies, 2**-7)


@pytest.mark.large
def test_rows_two_to_the_31_bytes_apart() -> None:
    """A view of time steps that lie further apart than a kernel's row stride can say."""
    needs_memory(20)
    far = torch.randn(3, (1 << 30) + 8, device="cuda", dtype=torch.bfloat16)
    x = far[:, :8].unsqueeze(0)
    assert x.stride(1) * x.element_size() > 2**31
    a = torch.rand(1, 3, 8, device="cuda", dtype=torch.bfloat16)
    leaf = x.detach().requires_grad_()
    h, _ = ops.linear_scan(leaf, a)
    assert torch.equal(h, ops.linear_scan(x.contiguous(), a)[0])
    (dx,) = torch.autograd.grad(h.sum(), leaf)
    assert dx.shape == x.shape
    assert dx.isfinite().all()


# Repeatability and stale memory -----------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *KINDS,
        ScanCase("hgru", batch=1, time=40000, channels=64, dtype=torch.bfloat16),
        ScanCase("hgru", batch=8, time=512, channels=512, dtype=torch.bfloat16, theta=True),
        ScanCase("lru_scan", batch=1, time=40000, channels=64, dtype=torch.bfloat16, theta=True),
        ScanCase("linear_scan", channels=16, lengths=(30000, 0, 1, 9000), dtype=torch.float32),
    ],
    ids=str,
)
def test_bitwise_repeatable_beside_other_work(case: ScanCase) -> None:
    inputs = inputs_of(case)
    first = train(case, inputs)
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            noise @ noise
        assert_same_bits(first, train(case, inputs))


@pytest.mark.parametrize("case", [*scan_cases.KINDS, *gla_cases.KINDS], ids=str)
def test_outputs_do_not_show_what_was_in_memory(case: ScanCase) -> None:
    """All free memory of the allocator holds NaN before the call."""
    for time in (0, 1, 70):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (64, 500, 5000, 10**5) * 9]
        del poison
        cases.check(replace(case, time=time), "cuda")


# Under compute-sanitizer ------------------------------------------------------------------------

SANITIZED_ATTENTION = [
    FoxCase(queries=20, past=13, head_dim=7, window=9),
    FoxCase(lengths=((9, 0), (0, 3), (20, 13)), dtype=torch.float64, prune=1e-15),
    FoxCase(queries=70, past=9, head_dim=32, heads=4, dtype=torch.bfloat16, window=30),
    FoxCase(queries=70, head_dim=72, dtype=torch.float16, prune=1e-9, gates="shut"),
    FoxCase(lengths=((66, 9), (0, 0), (3, 0)), head_dim=128, dtype=torch.bfloat16),
    FoxCase(queries=70, batch=1, head_dim=128, dtype=torch.bfloat16, prune=1e-9, gates="shut"),
    FoxCase(queries=70, batch=1, head_dim=200, dtype=torch.bfloat16),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("case", [*scan_cases.KINDS, *gla_cases.KINDS], ids=str)
def test_tiny_shapes_under_the_sanitizer(case: ScanCase | GlaCase) -> None:
    """Each kernel once or twice: forward, backward and step, padded and packed."""
    cases.check(case.sized(2, 70, 8), "cuda")
    cases.check(replace(case.sized(1, 0, 3), lengths=(3, 0, 60, 1), reverse=True), "cuda")
    cases.check(replace(case, time=1), "cuda")


@pytest.mark.sanitize
@pytest.mark.parametrize("case", rnn_cases.KINDS, ids=str)
def test_tiny_gated_rnns_under_the_sanitizer(case: RnnCase) -> None:
    """Forward, backward and step, padded and packed; D 70 is divided among blocks otherwise.

    Rows of dW are never whole 16 bytes in 16-bit types: such a product cuBLAS writes by TMA, which
    initcheck does not see (scripts/sanitize.sh).
    """
    cases.check(case.sized(2, 20, 12), "cuda")
    cases.check(case.sized(3, 5, 70), "cuda")
    cases.check(replace(case.sized(1, 0, 3), lengths=(3, 0, 20, 1)), "cuda")
    made = inputs_of(case.sized(2, 3, 16))
    state = torch.zeros(2, 16, device="cuda", dtype=walks.state_dtype(case.dtype))
    for t in range(3):
        h = ops.gated_rnn_step(made["z"][:, t], made["x"][:, t], made["w_zh"], state)
    assert h.isfinite().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("case", wkv4_cases.KINDS, ids=str)
def test_tiny_wkv4_under_the_sanitizer(case: Wkv4Case) -> None:
    """Forward, backward and step, padded and packed."""
    wkv4_cases.check(replace(case, time=70, channels=8), "cuda")
    wkv4_cases.check(replace(case, lengths=(3, 0, 60, 1), channels=3), "cuda")
    made = wkv4_cases.on_device(case, "cuda")
    token = [made[name][:, 0] for name in ("k", "v")]
    o = ops.wkv4_step(made["w"], made["u"], *token, made["state"].clone())
    assert o.isfinite().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SANITIZED_ATTENTION, ids=str)
def test_tiny_attention_under_the_sanitizer(case: FoxCase, deterministic: bool) -> None:
    """Every class of head dimensions on tensor cores, and the plain path."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        fox_cases.check(case, "cuda")
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.sanitize
@pytest.mark.parametrize("head_dim", [7, 16, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tiny_attention_steps_under_the_sanitizer(dtype: torch.dtype, head_dim: int) -> None:
    """A cache longer than a split, in which sequences of other lengths lie; five heads a key."""
    wide = walks.state_dtype(dtype)
    q = torch.randn(3, 5, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(3, 300, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    gates = -torch.rand(3, 300, 5, device="cuda", dtype=wide)
    lengths = torch.tensor([300, 0, 131], device="cuda", dtype=torch.int32)
    o = ops.forgetting_attention_step(q, k, v, gates, lengths)
    assert o.isfinite().all()
    assert not o[1].count_nonzero()
