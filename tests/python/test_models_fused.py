"""Norms, residual sums and gated linear units in modules and models: what the ops replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tidegate.models import Block, CausalLM, LMConfig, mixers
from tidegate.nn import GLU
from tidegate.nn._common import add_norm, gated_norm, make_linear, make_norm, norm_and_project

KINDS = ["layer", "rms", "rms_no_weight"]


def torch_norm(kind: str, dim: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(dim, eps=1e-5)
    return nn.RMSNorm(dim, eps=1e-5, elementwise_affine=kind == "rms")


def both(kind: str, dim: int = 24) -> tuple[nn.Module, nn.Module]:
    ours, theirs = make_norm(kind, dim, 1e-5), torch_norm(kind, dim)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_torch_s_under_their_names(kind: str) -> None:
    ours, theirs = both(kind)
    x, residual, gate = torch.randn(3, 2, 5, 24).unbind()
    torch.testing.assert_close(ours(x), theirs(x))
    y, total = add_norm(ours, x, residual)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, theirs(residual + x))
    after = gated_norm(ours, x, gate, "silu")
    torch.testing.assert_close(after, theirs(x) * F.silu(gate))
    first = gated_norm(ours, x, gate, "sigmoid", gate_first=True)
    torch.testing.assert_close(first, theirs(torch.sigmoid(gate) * x))
    assert isinstance(ours, type(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_another_norm_in_its_place_is_called_as_it_is(kind: str) -> None:
    ours, theirs = both(kind)
    x, residual, gate = torch.randn(3, 2, 5, 24).unbind()
    for found, expected in zip(
        add_norm(theirs, x, residual), add_norm(ours, x, residual), strict=True
    ):
        torch.testing.assert_close(found, expected)
    for first in (False, True):
        torch.testing.assert_close(
            gated_norm(theirs, x, gate, "silu", first), gated_norm(ours, x, gate, "silu", first)
        )


def test_rms_norm_widens_to_its_weight_outside_autocast_alone() -> None:
    norm = make_norm("rms", 24, 1e-5)
    x = torch.randn(4, 24).bfloat16()
    assert norm(x).dtype == torch.float32
    y, total = add_norm(norm, x, x)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x.float()).dtype == torch.bfloat16
        y, total = add_norm(norm, x, x.float())
        assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_glu(activation: str) -> None:
    glu = GLU(8, activation=activation, bias=True)
    x = torch.randn(2, 5, 8)
    gate, value = glu.in_proj(x).chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else gate
    torch.testing.assert_close(glu(x), glu.out_proj(gate * value))


def config(**options: object) -> LMConfig:
    return LMConfig(**{"vocab_size": 17, "dim": 16, "layers": 3, **options})


@pytest.mark.parametrize("norm", KINDS)
def test_a_block_of_a_pair_is_the_block_of_its_sum(norm: str) -> None:
    torch.manual_seed(0)
    block = Block(config(norm=norm))
    added, residual = torch.randn(2, 2, 5, 16).unbind()
    expected, _ = block(residual + added)
    (left, right), _ = block((added, residual))
    torch.testing.assert_close(left + right, expected)
    (left, right), _ = block((None, residual + added))
    torch.testing.assert_close(left + right, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mixer", ["hgrn", "hgrn2", "gla", "transformer"])
def test_a_model_compiles_whole(mixer: str, autocast: bool) -> None:
    """One graph, forward and backward; of one mixer with a block that is neither first nor last, as
    blocks of all of them pass the sum on alike."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CausalLM(config(mixer=mixer, layers=3 if mixer == "hgrn" else 2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.randint(17, (2, 9))
    grads = []
    for call in (model, compiled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(ids, labels="next").loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for found, expected in zip(*grads, strict=True):
        tolerance = 0.05 if autocast else 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def pair_of(device: str) -> tuple[nn.Module, nn.Module]:
    """A GLU, and a norm with a projection after it, which one op each does."""
    glu, projection = GLU(8, device=device), make_linear(8, 4, False, device)
    nn.init.normal_(projection.weight)
    return glu, nn.Sequential(make_norm("rms", 8, 1e-5, device), projection)


def run_pair(pair: tuple[nn.Module, nn.Module], device: str) -> None:
    """Forward and backward, by the path that modules take themselves."""
    glu, (norm, projection) = pair
    x = torch.randn(3, 5, 8, device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = glu(x).sum() + norm_and_project(norm, projection, x).sum()
    loss.backward()


REGISTER = [
    nn.modules.module.register_module_forward_hook,
    nn.modules.module.register_module_forward_pre_hook,
    nn.modules.module.register_module_full_backward_hook,
    nn.modules.module.register_module_full_backward_pre_hook,
]


@pytest.mark.parametrize("register", REGISTER, ids=lambda f: f.__name__)
def test_hooks_of_all_modules_hear_all_of_them(register, device) -> None:
    pair = pair_of(device)
    heard: list[nn.Module] = []
    handle = register(lambda module, *_: heard.append(module))
    try:
        run_pair(pair, device)
    finally:
        handle.remove()
    glu, (norm, projection) = pair
    assert {glu, glu.in_proj, glu.out_proj, norm, projection} <= set(heard)


OWN = [
    nn.Module.register_forward_hook,
    nn.Module.register_forward_pre_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_backward_hook,
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using .*non-full")
@pytest.mark.parametrize("register", [*OWN, *REGISTER], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mixer", list(mixers()))
def test_hooks_hear_every_module_of_a_model(mixer, register) -> None:
    """Where a neighbour reads the weight of a projection or of the head, the module was not called,
    and its hooks never ran: those of the backward pass, and those of all modules."""
    options = {"rwkv4": {"time_shift": True}}.get(mixer, {})
    config = LMConfig(
        dim=64, vocab_size=29, layers=2, mixer=mixer, mixer_options=options, tied=False
    )
    model = CausalLM(config)
    parts = {m for m in model.modules() if any(True for _ in m.parameters(recurse=False))}
    heard: set[nn.Module] = set()
    handles = [
        register(*place, lambda module, *_: heard.add(module))
        for place in ([(part,) for part in parts] if register in OWN else [()])
    ]
    try:
        model(torch.zeros(1, 3, dtype=torch.long), "next").loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    assert not {name for name, m in model.named_modules() if m in parts - heard}


def test_torch_counts_all_products(device) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    with FlopCounterMode(display=False) as counter:
        run_pair(pair := pair_of(device), device)
    weights = [p for module in pair for p in module.parameters() if p.dim() == 2]
    # Forward and gradients of weights, and those of rows where x is not what they are made of.
    inner = pair[0].out_proj.weight.numel() + pair[1][1].weight.numel()
    assert counter.get_total_flops() == 2 * 15 * (2 * sum(w.numel() for w in weights) + inner)
