"""The initialiser ops: what they draw, on what generator, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tidegate

ops = tidegate.ops

INITIALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda p: ops.init_uniform_(p, -0.25, 0.75),
    "normal": lambda p: ops.init_normal_(p, 1.5, 0.5),
    "constant": lambda p: ops.init_constant_(p, 0.3),
    "chrono": lambda p: ops.init_chrono_(p, 100),
    "gumbel": lambda p: ops.init_gumbel_softmax_(p, 40, 0.5, 0.7),
    "ring": lambda p: ops.init_lru_nu_log_(p, 0.5, 0.999),
    "phase": lambda p: ops.init_lru_theta_log_(p, 3.0),
    "long": lambda p: ops.init_long_(p, 2.0, 4096.0),
    "rope": lambda p: ops.init_rope_theta_(p),
}


def expected(name: str, size: int) -> Tensor:
    """What seed 3 should give, in float32."""
    torch.manual_seed(3)
    if name == "uniform":
        return torch.empty(size).uniform_(-0.25, 0.75)
    if name == "normal":
        return torch.empty(size).normal_(1.5, 0.5)
    if name == "chrono":
        return torch.empty(size).uniform_(1, 99).double().log().float()
    if name == "gumbel":
        u = torch.empty(size).uniform_(1 / 40, 1 - 1 / 40).double()
        return ((0.5 + u.log() - (-u).log1p()) / 0.7).float()
    if name == "ring":
        r2 = 0.25 + (0.999**2 - 0.25) * torch.empty(size).uniform_().double()
        return (-0.5 * r2.log()).log().float()
    if name == "phase":
        return (3.0 * torch.empty(size).uniform_().double()).log().float()
    if name == "long":
        part = torch.arange(size, dtype=torch.float64) / max(size - 1, 1)
        return -(1 / (2.0 * 2048.0**part)).expm1().log().float()
    if name == "constant":
        return torch.full((size,), 0.3)
    return (10000.0 ** (-2.0 * torch.arange(size, dtype=torch.float64) / size)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", INITIALISERS)
def test_values(name: str, dtype: torch.dtype, device: str) -> None:
    values = expected(name, 1000)
    p = torch.empty(1000, dtype=dtype, device=device)
    torch.manual_seed(3)
    assert INITIALISERS[name](p) is p
    torch.testing.assert_close(p.cpu(), values.to(dtype), rtol=1e-6, atol=0)
    if name not in ("rope", "long"):
        assert torch.equal(p.cpu(), values.to(dtype)), "drawn in float32, then cast"


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_views_and_shapes_draw_in_the_order_of_elements(name: str, device: str) -> None:
    values = expected(name, 12).view(3, 4)
    for p in (torch.empty(4, 3, device=device).t(), torch.empty(3, 9, device=device)[:, 1::2]):
        torch.manual_seed(3)
        INITIALISERS[name](p)
        assert torch.equal(p.cpu(), values)


@pytest.mark.parametrize("name", INITIALISERS)
def test_nothing_is_drawn_on_meta(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    INITIALISERS[name](torch.empty(5, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)
    INITIALISERS[name](torch.empty(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", INITIALISERS)
def test_a_sharded_tensor_gets_what_one_process_would_have_drawn(name: str, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for make in (torch.Tensor.detach, torch.nn.Parameter):
            p = make(distribute_tensor(torch.zeros(12), mesh, [Shard(0)]))
            values = expected(name, 12)
            torch.manual_seed(3)
            assert INITIALISERS[name](p) is p
            torch.testing.assert_close(p.full_tensor().detach(), values, rtol=1e-6, atol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", INITIALISERS)
def test_parameters_take_it_without_a_record(name: str) -> None:
    p = torch.nn.Parameter(torch.empty(6))
    version = p._version
    INITIALISERS[name](p)
    assert p.requires_grad
    assert p.grad_fn is None
    assert p._version > version
