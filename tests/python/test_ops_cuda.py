"""What only a GPU shows: graphs, streams, several devices, splits of time, stale memory.

The tests of the other files run on the GPU too, through the `device` fixture; tensors of more than
2^31 elements are in test_ops_cuda_large.py; here is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from conftest import require_cuda
from fuzz import check
from support import any_op, cases, gla_cases, recurrence, rnn_cases, scan_cases, wkv4_cases
from support import forgetting_attention_cases as attention_cases
from support.any_op import AnyCase, inputs_of, train
from support.forgetting_attention_cases import AttentionCase
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
    Wkv4Case(time=300, channels=64, dtype=torch.bfloat16),
    Wkv4Case(channels=33, lengths=(100, 0, 200)),
    Wkv4Case(batch=1, time=9000, channels=8, dtype=torch.float16),
    AttentionCase(queries=100, head_dim=64, dtype=torch.bfloat16),
    AttentionCase(queries=70, past=30, head_dim=7, window=40),
    AttentionCase(
        lengths=((66, 9), (0, 0), (30, 0)), head_dim=128, dtype=torch.bfloat16, prune=1e-9
    ),
]
# One block, a cluster of either size, packed, and a product of torch's at every token. Their graphs
# are in test_ops_rnn.py.
RNN_KINDS = [
    RnnCase(time=40, channels=100, dtype=torch.bfloat16, gamma="low"),
    RnnCase(time=40, channels=300, gamma="low"),
    RnnCase(time=20, channels=600, dtype=torch.float16),
    RnnCase(channels=33, lengths=(20, 0, 40), gamma="low"),
    RnnCase(channels=300, lengths=(20, 0, 40), dtype=torch.bfloat16),
    RnnCase(time=5, channels=1100, gamma="low"),
]


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"result {i} differs"


# Streams and graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", KINDS, ids=any_op.name)
def test_graph_capture_and_replay(case: AnyCase) -> None:
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


def a_step(op: str, device: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The op's step as a function of its state, and a state."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    one, other, third = draw(3, 4, 64).unbind(0)
    q, k, v = draw(3, 4, 2, 64).unbind(0)
    per_channel = torch.rand(4, 64, device=device)
    gamma, theta, rates, bonus = per_channel.unbind(0)
    matrix = draw(64, 64) / 8
    state, in_halves = draw(4, 64, dtype=torch.float32), draw(4, 128, dtype=torch.float32)
    weights = torch.stack([state, state.abs() + 1, other.float()], 1)
    of_heads = draw(4, 2, 64, 64, dtype=torch.float32)
    decays = -torch.rand(4, 2, 64, device=device)
    wide = torch.cat([one, third], -1)
    logs = per_channel.log()
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "linear_scan": (lambda s: ops.linear_scan_step(one, other, s), state),
        "hgru": (lambda s: ops.hgru_step(one, other, gamma, None, s), state),
        "hgru complex": (lambda s: ops.hgru_step(wide, other, gamma, theta, s), in_halves),
        "lru_scan": (lambda s: ops.lru_scan_step(one, logs[0], None, logs[1], s), state),
        "lru_scan complex": (
            lambda s: ops.lru_scan_step(wide, logs[0], logs[1], logs[2], s),
            in_halves,
        ),
        "hgrn2": (lambda s: ops.hgrn2_step(q, k, v, None, s), of_heads),
        "gated_linear_attention": (
            lambda s: ops.gated_linear_attention_step(q, k, v, decays, s),
            of_heads,
        ),
        "wkv4": (lambda s: ops.wkv4_step(rates, bonus, one, third, s), weights),
        "gated_rnn": (lambda s: ops.gated_rnn_step(one, third, matrix, s, gamma=gamma), state),
    }
    return calls[op]


STEPS = (
    "linear_scan",
    "hgru",
    "hgru complex",
    "lru_scan",
    "lru_scan complex",
    "hgrn2",
    "gated_linear_attention",
    "wkv4",
    "gated_rnn",
)


@pytest.mark.parametrize("op", STEPS)
def test_steps_in_a_graph(op: str) -> None:
    """Each replay goes on from where the last one left the state."""
    step, state = a_step(op, "cuda")
    first, expected = state.clone(), state.clone()
    step(state.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(state)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, step(expected))
    assert torch.equal(state, expected)
    assert not torch.equal(state, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_attention_in_a_graph(dtype: torch.dtype) -> None:
    """The cache grows between replays: lengths are read on the device."""
    q = torch.randn(3, 4, 64, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 3, 700, 2, 64, device="cuda", dtype=dtype).unbind(0)
    gates = -torch.rand(3, 700, 4, device="cuda")
    lengths = torch.tensor([700, 0, 131], device="cuda", dtype=torch.int32)
    ops.forgetting_attention_step(q, k, v, gates, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.forgetting_attention_step(q, k, v, gates, lengths)
    seen = []
    for now in ([1, 2, 3], [300, 0, 700], [700, 699, 5]):
        lengths.copy_(torch.tensor(now))
        q.neg_()
        graph.replay()
        assert torch.equal(out, ops.forgetting_attention_step(q, k, v, gates, lengths))
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_offsets_on_the_cpu_are_an_error_while_capturing() -> None:
    case = ScanCase(lengths=(3, 4))
    inputs = inputs_of(case)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].cpu()
    graph = torch.cuda.CUDAGraph()
    message = "hgru: cu_seqlens must be on cuda:0 while a CUDA graph is captured, got it on cpu"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        ops.hgru(inputs["c"], inputs["f"], cu_seqlens=inputs["cu_seqlens"])


@pytest.mark.parametrize("case", [*KINDS, *RNN_KINDS], ids=any_op.name)
def test_runs_on_the_current_stream(case: AnyCase) -> None:
    """On a side stream, inputs that arrive late on that stream are waited for."""
    fresh = inputs_of(case)
    expected = train(case, fresh)
    late = {k: v if v is None else torch.zeros_like(v) for k, v in fresh.items()}
    for name in ("cu_seqlens", "cu_seqlens_k"):
        if fresh.get(name) is not None:
            late[name].copy_(fresh[name])
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


@pytest.mark.parametrize("case", [*KINDS, *RNN_KINDS], ids=any_op.name)
def test_nothing_synchronises(case: AnyCase) -> None:
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


@pytest.mark.parametrize("case", [*KINDS, *RNN_KINDS], ids=any_op.name)
def test_tensors_not_on_the_current_device(case: AnyCase, second_device: str) -> None:
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
    """There is so little to do in parallel that time is split."""
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


# Repeatability and stale memory -----------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *KINDS,
        *RNN_KINDS,
        ScanCase("hgru", batch=1, time=40000, channels=64, dtype=torch.bfloat16),
        ScanCase("hgru", batch=8, time=512, channels=512, dtype=torch.bfloat16, theta=True),
        ScanCase("lru_scan", batch=1, time=40000, channels=64, dtype=torch.bfloat16, theta=True),
        ScanCase("linear_scan", channels=16, lengths=(30000, 0, 1, 9000), dtype=torch.float32),
    ],
    ids=any_op.name,
)
def test_bitwise_repeatable_beside_other_work(case: AnyCase) -> None:
    inputs = inputs_of(case)
    first = train(case, inputs)
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            noise @ noise
        assert_same_bits(first, train(case, inputs))


@pytest.mark.parametrize(
    "case",
    [
        *scan_cases.KINDS,
        *gla_cases.KINDS,
        # The error rule is luck for gradients of a few numbers.
        *(replace(case, channels=16) for case in (*wkv4_cases.KINDS, *rnn_cases.KINDS)),
        RnnCase(channels=300, gamma="low"),
        RnnCase(channels=300, dtype=torch.bfloat16),
        *(AttentionCase(dtype=dtype) for dtype in attention_cases.DTYPES),
        AttentionCase(head_dim=64, dtype=torch.bfloat16),
    ],
    ids=any_op.name,
)
def test_outputs_do_not_show_what_was_in_memory(case: AnyCase) -> None:
    """All free memory of the allocator holds NaN before the call."""
    for time in (0, 1, 70):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (64, 500, 5000, 10**5) * 9]
        del poison
        any_op.check(any_op.of_time(case, time), "cuda")


# Under compute-sanitizer ------------------------------------------------------------------------

SANITIZED_ATTENTION = [
    AttentionCase(queries=20, past=13, head_dim=7, window=9),
    AttentionCase(lengths=((9, 0), (0, 3), (20, 13)), dtype=torch.float64, prune=1e-15),
    AttentionCase(queries=70, past=9, head_dim=32, heads=4, dtype=torch.bfloat16, window=30),
    AttentionCase(queries=70, head_dim=72, dtype=torch.float16, prune=1e-9, gates="shut"),
    AttentionCase(lengths=((66, 9), (0, 0), (3, 0)), head_dim=128, dtype=torch.bfloat16),
    AttentionCase(
        queries=70, batch=1, head_dim=128, dtype=torch.bfloat16, prune=1e-9, gates="shut"
    ),
    AttentionCase(queries=70, batch=1, head_dim=200, dtype=torch.bfloat16),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("case", [*scan_cases.KINDS, *gla_cases.KINDS], ids=str)
def test_tiny_shapes_under_the_sanitizer(case: ScanCase | GlaCase) -> None:
    """Each kernel once or twice: forward, backward and step, padded and packed."""
    check(case.sized(2, 70, 8), "cuda")
    check(replace(case.sized(1, 0, 3), lengths=(3, 0, 60, 1), reverse=True), "cuda")
    check(replace(case, time=1), "cuda")


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
    state = torch.zeros(2, 16, device="cuda", dtype=recurrence.state_dtype(case.dtype))
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
def test_tiny_attention_under_the_sanitizer(case: AttentionCase, deterministic: bool) -> None:
    """Every class of head dimensions on tensor cores, and the plain path."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        attention_cases.check(case, "cuda")
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.sanitize
@pytest.mark.parametrize("head_dim", [7, 16, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tiny_attention_steps_under_the_sanitizer(dtype: torch.dtype, head_dim: int) -> None:
    """A cache longer than a split, in which sequences of other lengths lie; five heads a key."""
    wide = recurrence.state_dtype(dtype)
    q = torch.randn(3, 5, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(3, 300, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    gates = -torch.rand(3, 300, 5, device="cuda", dtype=wide)
    lengths = torch.tensor([300, 0, 131], device="cuda", dtype=torch.int32)
    o = ops.forgetting_attention_step(q, k, v, gates, lengths)
    assert o.isfinite().all()
    assert not o[1].count_nonzero()


SIZES_OF_ALL_KINDS = [
    GlaCase("hgrn2", time=100, key_dim=53, value_dim=41, dtype=torch.bfloat16),
    GlaCase("gated_linear_attention", time=100, key_dim=88, value_dim=88, dtype=torch.float16),
    AttentionCase(queries=100, head_dim=53, dtype=torch.bfloat16),
    AttentionCase(queries=100, head_dim=92, dtype=torch.float16, window=40),
    AttentionCase(queries=100, head_dim=9, dtype=torch.bfloat16, layout="misaligned"),
]


@pytest.mark.parametrize("case", SIZES_OF_ALL_KINDS, ids=str)
def test_no_size_of_16_bit_data_takes_the_plain_path(case: AnyCase) -> None:
    """The plain path takes 10 to 200 times as long."""
    inputs = inputs_of(case, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(case, inputs)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "tidegate" in event.key]
    assert kernels
    assert not [name for name in kernels if "plain" in name]


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_pruning_sees_the_queries_of_its_own_tile(head_dim: int) -> None:
    """Where a block takes many tiles of queries, one after another: what may be dropped depends on
    the largest of a tile's queries, which those of another tile are much smaller than."""
    generator = torch.Generator("cuda").manual_seed(5)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v = torch.randn(3, 4, 640, 64, head_dim, **options)
    q[:, :256] *= 1e-3
    q[:, 256:] *= 8
    log_f = torch.full((4, 640, 64), -0.2, device="cuda")
    whole = ops.forgetting_attention(q, k, v, log_f)
    first = ops.forgetting_attention(q, k, v, log_f, prune=1e-6)
    assert (first - whole).norm() < 1e-2 * whole.norm()
    for _ in range(20):
        again = ops.forgetting_attention(q, k, v, log_f, prune=1e-6)
        assert torch.equal(again, first)
