"""tidegate.compat.fla's layers: fla's parameter names, its equations, masks, packing and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import compat_oracle as naive
from torch import Tensor, nn

from tidegate.compat import fla
from tidegate.models import loaders

DIM, HEADS = 16, 2


class FlaCache:
    """fla's protocol of a cache: len(), [layer], update(..., layer_idx), get_seq_length()."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Any]] = {}
        self.seen = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> dict[str, Any]:
        return self.layers[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def update(self, layer_idx: int, offset: int = 1, cache_kwargs=None, **state: Any) -> Any:
        self.seen += offset
        held = self.layers.setdefault(layer_idx, {})
        if "attn_state" in state and "attn_state" in held:
            pairs = zip(held["attn_state"], state["attn_state"], strict=True)
            state["attn_state"] = tuple(torch.cat(pair, 1) for pair in pairs)
            if window := (cache_kwargs or {}).get("window_size"):
                state["attn_state"] = tuple(t[:, -window:] for t in state["attn_state"])
        held.update(state)
        return held


LAYERS = {
    "hgrn": lambda **more: fla.HGRNAttention(hidden_size=DIM, layer_idx=0, **more),
    "hgrn2": lambda **more: fla.HGRN2Attention(
        hidden_size=DIM, num_heads=HEADS, expand_ratio=None, layer_idx=0, **more
    ),
    "gla": lambda **more: fla.GatedLinearAttention(
        hidden_size=DIM, num_heads=HEADS, layer_idx=0, **more
    ),
    "gla-grouped": lambda **more: fla.GatedLinearAttention(
        hidden_size=DIM, num_heads=HEADS, num_kv_heads=1, feature_map="relu", fuse_norm=False,
        clamp_min=-0.05, layer_idx=0, **more,
    ),
    "fox": lambda **more: fla.ForgettingAttention(
        hidden_size=DIM, num_heads=HEADS, layer_idx=0, **more
    ),
    "fox-all": lambda **more: fla.ForgettingAttention(
        hidden_size=DIM, num_heads=HEADS, num_kv_heads=1, qkv_bias=True, qk_norm=True,
        use_output_gate=True, layer_idx=0, **more,
    ),
}  # fmt: skip


@pytest.fixture(params=sorted(LAYERS))
def layer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return randomised(LAYERS[request.param]())


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.4 + (1.0 if p.dim() == 1 else 0.0))
    return module.double().eval()


def rms(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def definition(layer: nn.Module, x: Tensor, bound: Tensor | None = None) -> Tensor:
    """What fla's layers compute, written down once more."""

    def proj(name: str) -> Tensor:
        return getattr(layer, f"{name}_proj")(x)

    def heads(t: Tensor, width: int) -> Tensor:
        return t.unflatten(-1, (-1, width))

    def gate(logits: Tensor) -> Tensor:
        f = logits.sigmoid()
        return (f if bound is None else bound + (1 - bound) * f).log()

    if isinstance(layer, fla.HGRNAttention):
        g = gate(proj("f"))
        o, _ = naive.hgrn(F.silu(proj("i")) * (1 - g.exp()), g, None)
        return layer.o_proj(rms(o, layer.g_norm.weight) * F.silu(proj("g")))
    if isinstance(layer, fla.HGRN2Attention):
        g = gate(proj("f"))
        width = layer.head_f_dim
        q, k, v, g = (heads(t, width) for t in (F.silu(proj("q")), 1 - g.exp(), proj("i"), g))
        return layer.o_proj(rms(naive.gla(q, k, v, g, None)[0].flatten(-2), layer.g_norm.weight))
    if isinstance(layer, fla.GatedLinearAttention):
        return definition_of_gla(layer, x, heads)
    return definition_of_fox(layer, x, heads)


def definition_of_gla(layer: nn.Module, x: Tensor, heads) -> Tensor:
    k_dim, v_dim, groups = layer.head_k_dim, layer.head_v_dim, layer.num_kv_groups
    q = heads(layer.q_proj(x), k_dim)
    k = heads(layer.k_proj(x), k_dim).repeat_interleave(groups, 2)
    v = heads(layer.v_proj(x), v_dim).repeat_interleave(groups, 2)
    g = heads(F.logsigmoid(layer.gk_proj(x)) / 16, k_dim).repeat_interleave(groups, 2)
    if layer.clamp_min is not None:
        g, q, k = g.clamp(min=layer.clamp_min), F.relu(q), F.relu(k)
    norm = layer.g_norm_swish_gate if layer.fuse_norm_and_gate else layer.g_norm
    o = rms(naive.gla(q, k, v, g, None)[0], norm.weight).flatten(-2)
    return layer.o_proj(o * F.silu(layer.g_proj(x)))


def definition_of_fox(layer: nn.Module, x: Tensor, heads) -> Tensor:
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    q, k, v = (heads(t, layer.head_dim) for t in (q, k, v))
    if layer.qk_norm:
        q = rms(q, layer.q_norm.weight.view(-1, layer.head_dim))
        k = rms(k, layer.k_norm.weight.view(-1, layer.head_dim))
    o = naive.forgetting(q, k, v, F.logsigmoid(layer.f_proj(x))).flatten(-2)
    return layer.o_proj(layer.g_proj(x).sigmoid() * o if layer.use_output_gate else o)


def close(mine: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)  # fla widens the gate to float32


def test_equation(layer: nn.Module) -> None:
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    y, attentions, cache = layer(x)
    assert attentions is None
    assert cache is None
    close(y, definition(layer, x))


@pytest.mark.parametrize("name", ["hgrn", "hgrn2"])
def test_lower_bound(name: str) -> None:
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    layer = randomised(LAYERS[name]())
    bound = torch.rand(DIM, dtype=torch.float64)
    close(layer(x, lower_bound=bound)[0], definition(layer, x))  # of the first layer there is none
    layer.layer_idx = 1
    close(layer(x, lower_bound=bound)[0], definition(layer, x, bound))


def test_padding_takes_no_part(layer: nn.Module) -> None:
    x = torch.randn(3, 7, DIM, dtype=torch.float64)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[0, :3] = mask[2, :6] = 0
    y, _, _ = layer(x, attention_mask=mask)
    for row, first in enumerate((3, 0, 6)):
        close(y[row : row + 1, first:], layer(x[row : row + 1, first:])[0])
    with pytest.raises(AssertionError, match="0-1 matrix"):
        layer(x, attention_mask=mask[:, None])


def test_packed_sequences_do_not_leak(layer: nn.Module) -> None:
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    y, _, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 9]))
    close(y, torch.cat([layer(x[:, :4])[0], layer(x[:, 4:])[0]], 1))


@pytest.mark.parametrize("padded", [False, True])
def test_cache(layer: nn.Module, padded: bool) -> None:
    """A prefill and steps are the whole sequence, padded on the left or not."""
    x = torch.randn(2, 8, DIM, dtype=torch.float64)
    mask = torch.ones(2, 8, dtype=torch.int64)
    if padded:
        mask[1, :2] = 0
    cache = FlaCache()
    parts = []
    for past, t in ((5, slice(0, 5)), (6, slice(5, 6)), (7, slice(6, 7)), (8, slice(7, 8))):
        seen = mask[:, :past] if padded else None
        y, _, given = layer(x[:, t], attention_mask=seen, past_key_values=cache, use_cache=True)
        assert given is cache
        parts.append(y)
    whole, _, _ = layer(x, attention_mask=mask if padded else None)
    kept = mask[..., None].bool()
    close(torch.cat(parts, 1) * kept, whole * kept)


@pytest.mark.parametrize("name", ["hgrn", "hgrn2", "gla"])
def test_a_cache_needs_a_layer_index(name: str) -> None:
    layer = randomised(LAYERS[name]())
    layer.layer_idx = None
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        layer(torch.randn(1, 2, DIM, dtype=torch.float64), past_key_values=FlaCache())


READERS = {
    "hgrn": loaders.hgru_from_fla,
    "hgrn2": lambda tensors: loaders.hgru2_from_fla(tensors, HEADS),
    "gla": lambda tensors: loaders.gla_from_fla(tensors, HEADS),
    "fox": lambda tensors: loaders.forgetting_attention_from_fla(tensors, HEADS),
}


@pytest.mark.parametrize("name", sorted(READERS))
def test_state_dicts_are_flas(name: str) -> None:
    """What tidegate.models.loaders reads of fla's layers it reads of these, to the same outputs."""
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    layer = randomised(LAYERS[name]())
    close(READERS[name](layer.state_dict())(x)[0], layer(x)[0])


def test_gradients_reach_every_parameter(layer: nn.Module) -> None:
    layer.train()(torch.randn(2, 7, DIM, dtype=torch.float64))[0].square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_parameters_start_as_torch_modules_do() -> None:
    torch.manual_seed(3)
    layer = LAYERS["gla"]()
    torch.manual_seed(3)
    assert torch.equal(layer.q_proj.weight, nn.Linear(DIM, DIM // 2, bias=False).weight)
    assert layer.g_norm_swish_gate.weight.eq(1).all()
