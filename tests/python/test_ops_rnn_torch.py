"""gated_rnn inside torch: opcheck, compile, autocast, graphs; and what it refuses, by message."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from conftest import require_cuda
from support import cases, rnn_cases
from support.op_properties import check_export, check_no_alias, opcheck
from support.rnn_cases import RnnCase, arguments_of, leaves, with_grad
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tidegate

ops = tidegate.ops
raw = torch.ops.tidegate
BF16 = torch.bfloat16


@pytest.fixture
def _needs_a_gpu() -> None:
    require_cuda()


# Inside torch -----------------------------------------------------------------------------------

TORCH_CASES = [
    RnnCase(time=9, channels=4),
    RnnCase(time=9, channels=4, dtype=BF16, matrix_dtype=torch.float32, gamma="low"),
    RnnCase(channels=4, lengths=(3, 0, 6), h0=None, dtype=BF16, gate_dtype=torch.float32),
    RnnCase(channels=4, lengths=(3, 0, 6), gamma="high", bound_dtype=BF16, dtype=BF16),
    RnnCase(channels=4, dtype=torch.float64, gate_dtype=torch.float32, h0="single"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("time", [None, 0, 1])
@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck(case: RnnCase, time: int | None, grad: bool, device: str) -> None:
    """The first case is traced for no token and for one; test_compiled_once_for_all_shapes traces
    gated_rnn for more, with gradients."""
    is_first = case is TORCH_CASES[0]
    if time is not None:
        case = replace(case, time=time, lengths=None)
    arguments, _ = arguments_of(case, device)
    if grad:
        arguments = with_grad(arguments)
    given = list(arguments.values())
    opcheck(raw.gated_rnn.default, given, traced=not grad if time is None else is_first)
    opcheck(raw.gated_rnn_with_logits.default, given, traced=time is None or is_first)


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_opcheck_of_backward_and_step(case: RnnCase, device: str) -> None:
    arguments, (dh, dh_final) = arguments_of(case, device)
    h, _, logits = raw.gated_rnn_with_logits(*arguments.values())
    z, x, w, h0, cu_seqlens, gamma = arguments.values()
    kept = (x, w, logits, h, h0, z.dtype, cu_seqlens, gamma)
    torch.library.opcheck(raw.gated_rnn_backward.default, (dh, dh_final, *kept))
    state = torch.ones_like(x[:, 0], dtype=dh_final.dtype)
    torch.library.opcheck(raw.gated_rnn_step.default, (z[:, 0], x[:, 0], w, state, gamma))


@pytest.mark.parametrize("case", rnn_cases.KINDS, ids=str)
def test_fake_results_match_real_ones(case: RnnCase) -> None:
    for varied in (replace(case, h0="data"), replace(case, lengths=(3, 0, 2), layout="time_major")):
        arguments, _ = arguments_of(varied, "cpu")
        fake = {k: v if v is None else v.to("meta") for k, v in arguments.items()}
        results = raw.gated_rnn_with_logits(*arguments.values())
        for real, meta in zip(results, raw.gated_rnn_with_logits(*fake.values()), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (
                meta.shape,
                meta.dtype,
                meta.stride(),
            )


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_compiled_once_for_all_shapes(case: RnnCase, device: str) -> None:
    def step(named: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        h, final = ops.gated_rnn(**{k: v if v is None else v * 1 for k, v in named.items()})
        return h * 2, final

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for batch, time, channels in ((2, 9, 7), (3, 17, 6), (5, 8, 10), (4, 100, 3)):
        shaped = case.sized(batch, time, channels)
        if case.lengths:
            shaped = replace(shaped, lengths=(time, 0, 3, 2)[: 1 + batch])
        arguments, loss = arguments_of(shaped, device)
        named = with_grad(arguments)
        expected, found = step(named), fast(named)
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left, right)
        given = list(leaves(named).values())
        for left, right in zip(
            torch.autograd.grad(expected, given, loss),
            torch.autograd.grad(found, given, loss),
            strict=True,
        ):
            assert torch.equal(left, right)
    assert counter.frame_count == 1, "a shape has caused a recompilation"


def test_autocast(device: str) -> None:
    """Data go to autocast's type; the matrix, the bounds and the state keep fp32."""
    arguments, _ = arguments_of(RnnCase(time=20, channels=16, gamma="low"), device)
    named = with_grad(arguments)
    with torch.autocast(device, dtype=BF16):
        h, final = ops.gated_rnn(**named)
    narrow = arguments | {k: arguments[k].to(BF16) for k in "zx"}
    expected = ops.gated_rnn(**narrow)
    assert h.dtype == BF16
    assert final.dtype == torch.float32
    for left, right in zip((h, final), expected, strict=True):
        assert torch.equal(left, right)
    grads = torch.autograd.grad(h.float().sum() + final.sum(), list(leaves(named).values()))
    assert all(g.dtype == torch.float32 for g in grads)
    state = arguments["h0"].clone()
    with torch.autocast(device, dtype=BF16), torch.no_grad():
        token = named["z"][:, 0], named["x"][:, 0], named["w_zh"]
        h = ops.gated_rnn_step(*token, state, gamma=named["gamma"])
    assert torch.equal(h, expected[0][:, 0])


def test_checkpointing(device: str) -> None:
    arguments, loss = arguments_of(RnnCase(time=20, channels=16), device)
    named = with_grad(arguments)
    given = list(leaves(named).values())
    plain = torch.autograd.grad(ops.gated_rnn(**named), given, loss)
    again = torch.utils.checkpoint.checkpoint(lambda: ops.gated_rnn(**named), use_reentrant=False)
    for left, right in zip(plain, torch.autograd.grad(again, given, loss), strict=True):
        assert torch.equal(left, right)


def test_modes_without_gradients(device: str) -> None:
    named = with_grad(arguments_of(RnnCase(), device)[0])
    expected = ops.gated_rnn(**named)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = ops.gated_rnn(**named)
        for left, right in zip(found, expected, strict=True):
            assert not left.requires_grad
            assert torch.equal(left, right)


def test_export_with_dynamic_time(device: str) -> None:
    def example(time: int) -> list[Tensor]:
        arguments, _ = arguments_of(RnnCase(time=time), device)
        return [v for v in arguments.values() if v is not None]

    check_export(ops.gated_rnn, example, over_time=(True, True, False, False))


def test_outputs_do_not_alias_inputs(device: str) -> None:
    for time in (0, 1, 5):
        arguments, loss = arguments_of(RnnCase(time=time), device)
        named = with_grad(arguments)
        results = ops.gated_rnn(**named)
        grads = torch.autograd.grad(results, list(leaves(named).values()), loss)
        check_no_alias(leaves(named).values(), (*results, *grads))


def test_what_it_refuses(device: str) -> None:
    arguments, _ = arguments_of(RnnCase(), device)
    named = with_grad(arguments)
    h, _ = ops.gated_rnn(**named)
    (dx,) = torch.autograd.grad(h.sum(), named["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_rnn: double backward is not supported"):
        torch.autograd.grad(dx.sum(), named["x"])
    with pytest.raises(RuntimeError, match="gated_rnn: vmap is not supported"):
        torch.vmap(lambda x: ops.gated_rnn(x, x, named["w_zh"])[0])(named["x"].unsqueeze(1))
    z, x, w, state = named["z"][:, 0], named["x"][:, 0], named["w_zh"], arguments["h0"].clone()
    with pytest.raises(RuntimeError, match="gated_rnn_step: z requires a gradient"):
        ops.gated_rnn_step(z, x, w, state)


def test_a_step_bumps_the_version_of_its_state(device: str) -> None:
    arguments, _ = arguments_of(RnnCase(), device)
    state = arguments["h0"].clone().requires_grad_()
    kept = state.square()
    with torch.no_grad():
        z, x = arguments["z"][:, 0], arguments["x"][:, 0]
        ops.gated_rnn_step(z, x, arguments["w_zh"], state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
@pytest.mark.parametrize("width", [24, 128, 300])
def test_cuda_graph(width: int) -> None:
    arguments, _ = arguments_of(RnnCase(time=20, channels=width, batch=5, gamma="low"), "cuda")
    given = leaves(arguments)
    expected = ops.gated_rnn(**arguments)
    static = {k: torch.zeros_like(v) for k, v in given.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.gated_rnn(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gated_rnn(**static)
    for name, value in given.items():
        static[name].copy_(value)
    graph.replay()
    for left, right in zip(out, expected, strict=True):
        assert torch.equal(left, right)


# Each way that CUDA goes: one block, a cluster (of floats and of 16-bit numbers), clusters of
# sixteen, torch's products; packed, where no chip takes the matrix, the plain kernel.
CAPTURED = [
    *(RnnCase(batch=5, time=20, channels=width) for width in (24, 128, 200, 300, 512, 1024)),
    *(RnnCase(batch=5, time=20, channels=width, dtype=BF16) for width in (512, 1024)),
    RnnCase(batch=5, time=6, channels=1100),
    RnnCase(batch=5, time=6, channels=300, dtype=torch.float64),
    *(RnnCase(lengths=(7, 0, 13), channels=width) for width in (24, 300, 1000)),
    RnnCase(lengths=(7, 0, 13), channels=512, dtype=BF16, offsets_dtype=torch.int32),
    RnnCase(lengths=(2, 0, 3), channels=1100),
]


def scanned_by_products(case: RnnCase) -> bool:
    widest = 256 if case.dtype == torch.float64 else 1024
    return case.lengths is None and case.channels > widest


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
@pytest.mark.parametrize("gamma", [None, "low"])
@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_cuda_graph_of_training(case: RnnCase, gamma: str | None) -> None:
    """Forward and backward in one graph, replayed with new data."""

    def made(seed: int) -> tuple[dict[str, Tensor | None], tuple[Tensor, Tensor]]:
        arguments, loss = arguments_of(replace(case, gamma=gamma, seed=seed), "cuda")
        return with_grad(arguments), loss

    def train(named: dict[str, Tensor | None], loss: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        results = ops.gated_rnn(**named)
        given = leaves(named)
        grads = torch.autograd.grad(results, list(given.values()), loss)
        return dict(zip(("h", "final", *given), (*results, *grads), strict=True))

    static, static_loss = made(seed=0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(static, static_loss)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(static, static_loss)
    for seed in (1, 2):
        fresh, loss = made(seed)
        with torch.no_grad():
            for name, value in leaves(fresh).items():
                static[name].copy_(value)
            for kept, value in zip(static_loss, loss, strict=True):
                kept.copy_(value)
        graph.replay()
        for name, right in train(fresh, loss).items():
            left = captured[name]
            if name == "w_zh" or scanned_by_products(case):  # cuBLAS promises no bits here
                rtol = 2e-2 if right.dtype == BF16 else 1e-4
                torch.testing.assert_close(left, right, rtol=rtol, atol=1e-4)
            else:
                assert torch.equal(left, right), name


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_a_gpu")
def test_the_matrix_gradient_follows_torchs_settings_and_nothing_else_does() -> None:
    """float32 stays float32 whatever allow_tf32 says, but for dW, which is a product of torch's."""
    case = RnnCase(time=60, batch=4, channels=128, gamma="low")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = cases.run(case, "cuda", backward=True)
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = cases.run(case, "cuda", backward=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for name, value in exact.items():
        if name != "dw_zh":
            assert torch.equal(value, rounded[name]), name
    torch.testing.assert_close(exact["dw_zh"], rounded["dw_zh"], rtol=1e-2, atol=1e-2)


# Bad input --------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, Tensor]:
    return {"z": zeros(2, 6, 4), "x": zeros(2, 6, 4), "w_zh": zeros(4, 4), "h0": zeros(2, 4)}


WRONG = [
    ({"x": zeros(6, 4)}, "gated_rnn: x must have shape [B, T, D], got [6, 4]"),
    ({"x": zeros(2, 6, 4).long()}, "x must be float32, float64, bfloat16 or float16, got int64"),
    (
        {"z": zeros(2, 6, 3)},
        "gated_rnn: z must have shape [B, T, D] = [2, 6, 4] like x, got [2, 6, 3]",
    ),
    ({"z": zeros(2, 6, 4, dtype=BF16)}, "z must be float32 (x is float32), got bfloat16"),
    ({"w_zh": zeros(4, 3)}, "gated_rnn: w_zh must have shape [D, D] = [4, 4], got [4, 3]"),
    ({"w_zh": zeros(4)}, "gated_rnn: w_zh must have shape [D, D] = [4, 4], got [4]"),
    (
        {"w_zh": zeros(4, 4, dtype=torch.float64)},
        "gated_rnn: w_zh must be float32 (x is float32), got float64",
    ),
    ({"gamma": zeros(3)}, "gated_rnn: gamma must have shape [D] = [4], got [3]"),
    ({"gamma": zeros(4, dtype=BF16)}, "gamma must be float32 (x is float32), got bfloat16"),
    ({"h0": zeros(3, 4)}, "gated_rnn: h0 must have shape [N, D] = [2, 4], got [3, 4]"),
    ({"h0": zeros(2, 4, dtype=BF16)}, "h0 must be float32 (x is float32), got bfloat16"),
    (
        {"cu_seqlens": torch.tensor([0, 6])},
        "gated_rnn: x must have a batch of 1 when cu_seqlens is given, got [2, 6, 4]",
    ),
    ({"w_zh": zeros(4, 4).to("meta")}, "expected all tensors on cpu like x, got w_zh on meta"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.gated_rnn(**(good() | change))


def test_bounds_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"z": zeros(2, 4), "x": zeros(2, 4), "w_zh": zeros(4, 4), "state": zeros(2, 4)}
    wrong = {"gamma": torch.tensor([0, 0.5, 1, 0])}
    ops.gated_rnn(**good(), **wrong)  # the caller's responsibility otherwise
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    message = re.escape("gamma must lie in [0, 1), got values from 0 to 1")
    with pytest.raises(RuntimeError, match=f"gated_rnn: {message}"):
        ops.gated_rnn(**good(), **wrong)
    with pytest.raises(RuntimeError, match=f"gated_rnn_step: {message}"):
        ops.gated_rnn_step(**token, **wrong)


def test_wrong_offsets_and_steps() -> None:
    one = {k: v[:1] if v.dim() == 3 else v for k, v in good().items()}
    with pytest.raises(RuntimeError, match=re.escape("cu_seqlens must rise from 0 to T = 6, got")):
        ops.gated_rnn(**one, cu_seqlens=torch.tensor([0, 7, 6]))
    token = {"z": zeros(2, 4), "x": zeros(2, 4), "w_zh": zeros(4, 4), "state": zeros(2, 4)}
    wrong = [
        ({"x": zeros(2, 6, 4)}, "gated_rnn_step: x must have shape [B, D], got [2, 6, 4]"),
        ({"z": zeros(2, 5)}, "gated_rnn_step: z must have shape [B, D] = [2, 4] like x, got"),
        ({"w_zh": zeros(5, 4)}, "gated_rnn_step: w_zh must have shape [D, D] = [4, 4], got"),
        ({"state": zeros(1, 4)}, "gated_rnn_step: state must have shape [B, D] = [2, 4], got"),
        ({"state": zeros(2, 4).double()}, "gated_rnn_step: state must be float32"),
        ({"gamma": zeros(5)}, "gated_rnn_step: gamma must have shape [D] = [4], got [5]"),
    ]
    for change, message in wrong:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            ops.gated_rnn_step(**(token | change))
