"""Published HGRN2 and GLA checkpoints: state dicts with their names and shapes, and what they mean.

As in test_models_loaders.py, each reference is a plain forward of the published model, written from
its published behaviour over its own parameter names, in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_models_loaders import linear, rand, rms_norm
from torch import Tensor

from tidegate.models import loaders

DIM, HEADS = 8, 2


def recur(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
    """o_t = S_t^T q_t, S_t = diag(f_t) S_{t-1} + k_t v_t^T, heads third; heads joined again."""
    s, out = 0, []
    for t in range(q.size(1)):
        s = f[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(out, 1)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1))


# hgru2-pytorch


def hgru2_pytorch_state(bias: bool, norm: bool, prefix: str = "") -> dict[str, Tensor]:
    """Names and shapes of Hgru2_1d, BiHgru2_1d and of the language model's Hgru2."""
    state = {"in_proj.weight": rand(3 * DIM, DIM), "out_proj.weight": rand(DIM, DIM)}
    if bias:
        state |= {"in_proj.bias": rand(3 * DIM), "out_proj.bias": rand(DIM)}
    if norm:
        state |= {"norm.weight": rand(DIM), "norm.bias": rand(DIM)}
    return {prefix + name: value for name, value in state.items()}


def hgru2_pytorch_forward(
    state: dict, p: str, x: Tensor, bound: Tensor, acts: tuple, both_ways: bool = False
) -> Tensor:
    """acts: of q and of v. The rows of in_proj are v, q, f."""
    v, q, f = linear(state, f"{p}in_proj", x).chunk(3, -1)
    q, v = acts[0](q), acts[1](v)
    f = bound + (1 - bound) * torch.sigmoid(f)
    o = recur(heads(q), heads(1 - f), heads(v), heads(f))
    if both_ways:
        back = (heads(t.flip(1)) for t in (q, 1 - f, v, f))
        o = o + recur(*back).flip(1)
    o = o.flatten(-2)
    if f"{p}norm.weight" in state:
        o = F.layer_norm(o, (DIM,), state[f"{p}norm.weight"], state[f"{p}norm.bias"])
    else:
        o = rms_norm(o, torch.ones(DIM, dtype=o.dtype), 1e-6)
    return linear(state, f"{p}out_proj", o)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("bias", "norm"), [(True, True), (False, False)])
def test_hgru2_pytorch(bias, norm, both_ways):
    torch.manual_seed(0)
    state = hgru2_pytorch_state(bias, norm)
    mixer = loaders.hgru2_from_hgru2_pytorch(state, DIM // HEADS, bidirectional=both_ways)
    x, bound = rand(2, 9, DIM), torch.rand(DIM, dtype=torch.float64)
    acts = (torch.sigmoid, F.silu)
    wanted = hgru2_pytorch_forward(state, "", x, bound, acts, both_ways)
    torch.testing.assert_close(mixer(x, gamma=bound)[0], wanted)
    assert sum(p.numel() for p in mixer.parameters()) == sum(t.numel() for t in state.values())


def test_hgru2_pytorch_refuses():
    state = hgru2_pytorch_state(True, True)
    with pytest.raises(ValueError, match="tensors without a place here: 'extra'"):
        loaders.hgru2_from_hgru2_pytorch(state | {"extra": rand(2)}, 4)
    del state["out_proj.bias"]
    with pytest.raises(ValueError, match="no tensor 'out_proj.bias'"):
        loaders.hgru2_from_hgru2_pytorch(state, 4)


def identity(x: Tensor) -> Tensor:
    return x


PUBLISHED = {
    "model_type": "hgrn2",
    "decoder_embed_dim": DIM,
    "decoder_layers": 3,
    "expand_ratio": DIM // HEADS,
    "vocab_size": 13,
    "glu_dim": 10,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "norm_type": "layernorm", "glu_act": "silu", "no_scale_embedding": False},
        {"out_act": "sigmoid", "in_act": "silu", "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_published_language_model(changes):
    torch.manual_seed(0)
    config = PUBLISHED | changes
    bias, layer_norm = config.get("bias", False), config.get("norm_type") == "layernorm"
    state = {"model.embed_tokens.weight": rand(13, DIM), "model.lower_bounds": rand(3, DIM)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if "tie_word_embeddings" in config:
        state["lm_head.weight"] = rand(13, DIM)
    norms = ["model.final_norm"]
    for k in range(3):
        p = f"model.layers.{k}."
        state |= hgru2_pytorch_state(bias, layer_norm, f"{p}token_mixer.")
        norms += [f"{p}token_norm", f"{p}channel_norm"]
        for name, shape in (("l1", (10, DIM)), ("l2", (10, DIM)), ("l3", (DIM, 10))):
            state[f"{p}channel_mixer.{name}.weight"] = rand(*shape)
            if bias:
                state[f"{p}channel_mixer.{name}.bias"] = rand(shape[0])
    if layer_norm:
        state |= {f"{n}.{kind}": rand(DIM) for n in norms for kind in ("weight", "bias")}
    ids = torch.randint(0, 13, (2, 7))
    acts = {"silu": F.silu, "sigmoid": torch.sigmoid, "none": identity}
    mixer_acts = (acts[config.get("out_act", "silu")], acts[config.get("in_act", "none")])

    def norm(name: str, x: Tensor) -> Tensor:
        if layer_norm:
            return F.layer_norm(x, (DIM,), state[f"{name}.weight"], state[f"{name}.bias"])
        return rms_norm(x, torch.ones(DIM, dtype=x.dtype), 1e-6)

    p = state["model.lower_bounds"].softmax(0)
    bounds = p.cumsum(0) - p[0]
    x = state["model.embed_tokens.weight"][ids]
    x = x if config.get("no_scale_embedding", True) else x * math.sqrt(DIM)
    for k in range(3):
        p = f"model.layers.{k}."
        y = norm(f"{p}token_norm", x)
        x = x + hgru2_pytorch_forward(state, f"{p}token_mixer.", y, bounds[k], mixer_acts)
        y = norm(f"{p}channel_norm", x)
        gate = acts[config.get("glu_act", "none")](linear(state, f"{p}channel_mixer.l1", y))
        y = gate * linear(state, f"{p}channel_mixer.l2", y)
        x = x + linear(state, f"{p}channel_mixer.l3", y)
    wanted = F.linear(norm("model.final_norm", x), state["lm_head.weight"])
    model = loaders.causal_lm_from_hgru2_pytorch(config, state)
    torch.testing.assert_close(model(ids).logits, wanted)
    with pytest.raises(ValueError, match="config_from_hgru2_pytorch: out_act: 'gelu' has no equal"):
        loaders.causal_lm_from_hgru2_pytorch(config | {"out_act": "gelu"}, state)


# flash-linear-attention

FLA = {
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "intermediate_size": 6,
    "vocab_size": 13,
    "norm_eps": 1e-3,
}
HGRN2 = FLA | {"model_type": "hgrn2", "expand_ratio": DIM // HEADS}
GLA = FLA | {"model_type": "gla", "num_heads": HEADS}


def fla_hgrn2_state(p: str = "") -> dict[str, Tensor]:
    """Names and shapes of HGRN2Attention."""
    names = [f"{p}{name}_proj.weight" for name in "qfio"]
    return {name: rand(DIM, DIM) for name in names} | {f"{p}g_norm.weight": rand(DIM)}


def fla_hgrn2_mixer(state: dict, p: str, x: Tensor, bound: Tensor, eps: float) -> Tensor:
    """eps plays no part: the published layer leaves the fused norm's own."""
    q, v = F.silu(linear(state, f"{p}q_proj", x)), linear(state, f"{p}i_proj", x)
    f = bound + (1 - bound) * torch.sigmoid(linear(state, f"{p}f_proj", x))
    scale = (DIM // HEADS) ** -0.5
    o = scale * recur(heads(q), heads(1 - f), heads(v), heads(f)).flatten(-2)
    return linear(state, f"{p}o_proj", rms_norm(o, state[f"{p}g_norm.weight"], 1e-5))


def fla_gla_state(p: str = "", gate: bool = True, fused: bool = True) -> dict[str, Tensor]:
    """Names and shapes of GatedLinearAttention, with K half as wide as V."""
    rows = {"q": DIM // 2, "k": DIM // 2, "v": DIM} | ({"g": DIM} if gate else {})
    state = {f"{p}{name}_proj.weight": rand(n, DIM) for name, n in rows.items()}
    state |= {f"{p}gk_proj.0.weight": rand(16, DIM), f"{p}gk_proj.1.weight": rand(DIM // 2, 16)}
    state |= {f"{p}gk_proj.1.bias": rand(DIM // 2), f"{p}o_proj.weight": rand(DIM, DIM)}
    name = "g_norm_swish_gate" if gate and fused else "g_norm"
    return state | {f"{p}{name}.weight": rand(DIM // HEADS)}


def fla_gla_mixer(state: dict, p: str, x: Tensor, _bound: Tensor, eps: float) -> Tensor:
    q, k, v = (heads(linear(state, f"{p}{name}_proj", x)) for name in "qkv")
    logits = linear(state, f"{p}gk_proj.1", linear(state, f"{p}gk_proj.0", x))
    f = heads((F.logsigmoid(logits) / 16).exp())
    o = recur(q, k, v, f) * (DIM // 2 // HEADS) ** -0.5
    fused = f"{p}g_norm_swish_gate.weight"
    o = rms_norm(o, state[fused if fused in state else f"{p}g_norm.weight"], eps).flatten(-2)
    if f"{p}g_proj.weight" in state:
        o = o * F.silu(linear(state, f"{p}g_proj", x))
    return linear(state, f"{p}o_proj", o)


def fla_state(config: dict) -> dict[str, Tensor]:
    """Names and shapes of HGRN2ForCausalLM and GLAForCausalLM."""
    state = {"model.embeddings.weight": rand(13, DIM), "model.norm.weight": rand(DIM)}
    state["lm_head.weight"] = rand(13, DIM)
    if config["model_type"] == "hgrn2":
        state["model.lower_bounds"] = rand(3, DIM)
    for k in range(3):
        p = f"model.layers.{k}."
        mixer = fla_hgrn2_state if config["model_type"] == "hgrn2" else fla_gla_state
        state |= mixer(f"{p}attn.")
        state |= {f"{p}{name}_norm.weight": rand(DIM) for name in ("attn", "mlp")}
        state |= {f"{p}mlp.{name}_proj.weight": rand(6, DIM) for name in ("gate", "up")}
        state[f"{p}mlp.down_proj.weight"] = rand(DIM, 6)
    return state


@pytest.mark.parametrize("config", [HGRN2, GLA], ids=lambda c: c["model_type"])
def test_fla_model(config):
    torch.manual_seed(0)
    state, eps = fla_state(config), config["norm_eps"]
    bounds = torch.zeros(3, DIM)
    mixer = fla_gla_mixer
    if config["model_type"] == "hgrn2":
        p = state["model.lower_bounds"].softmax(0)
        bounds, mixer = p.cumsum(0) - p[0], fla_hgrn2_mixer
    ids = torch.randint(0, 13, (2, 9))
    x = state["model.embeddings.weight"][ids]
    for k in range(3):
        p = f"model.layers.{k}."
        y = rms_norm(x, state[f"{p}attn_norm.weight"], eps)
        x = x + mixer(state, f"{p}attn.", y, bounds[k], eps)
        y = rms_norm(x, state[f"{p}mlp_norm.weight"], eps)
        gate = F.silu(linear(state, f"{p}mlp.gate_proj", y))
        x = x + linear(state, f"{p}mlp.down_proj", gate * linear(state, f"{p}mlp.up_proj", y))
    wanted = F.linear(rms_norm(x, state["model.norm.weight"], eps), state["lm_head.weight"])
    model = loaders.causal_lm_from_fla(config, state)
    torch.testing.assert_close(model(ids).logits, wanted)
    assert model.generate(ids, 2).shape == (2, 11)


def test_fla_hgrn2_layer():
    torch.manual_seed(0)
    state = fla_hgrn2_state()
    x, bound = rand(2, 7, DIM), torch.rand(DIM, dtype=torch.float64)
    mixer = loaders.hgru2_from_fla(state, HEADS)
    wanted = fla_hgrn2_mixer(state, "", x, bound, 0.0)
    torch.testing.assert_close(mixer(x, gamma=bound)[0], wanted)


@pytest.mark.parametrize(("gate", "fused"), [(True, True), (True, False), (False, False)])
def test_fla_gla_layer(gate, fused):
    torch.manual_seed(0)
    state = fla_gla_state(gate=gate, fused=fused)
    x = rand(2, 7, DIM)
    mixer = loaders.gla_from_fla(state, HEADS, norm_eps=1e-4)
    torch.testing.assert_close(mixer(x)[0], fla_gla_mixer(state, "", x, x, 1e-4))


def test_fla_defaults():
    config = loaders.config_from_fla({"model_type": "hgrn2", "hidden_size": 1024})
    assert config.mixer_options["num_heads"] == 8
    heads = {"expand_ratio": None, "num_heads": 4, "hidden_size": 1024}
    config = loaders.config_from_fla({"model_type": "hgrn2", **heads})
    assert config.mixer_options["num_heads"] == 4
    config = loaders.config_from_fla({"model_type": "gla", "hidden_size": 1024})
    options = config.mixer_options
    assert (options["num_heads"], options["key_dim"], options["value_dim"]) == (4, 512, 1024)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (HGRN2, {"use_short_conv": True}, "use_short_conv: True has no equal here"),
        (HGRN2, {"expand_ratio": 3}, "expand_ratio: 3 has no equal here"),
        (HGRN2, {"model_type": "mamba"}, "model_type: 'mamba' has no equal here"),
        (HGRN2, {"attnres_block_size": 2}, "attnres_block_size: 2 has no equal here"),
        (GLA, {"num_kv_heads": 1}, "num_kv_heads: 1 has no equal here"),
        (GLA, {"feature_map": "gelu"}, "feature_map: 'gelu' has no equal here"),
        (GLA, {"clamp_min": -1.0}, "clamp_min: -1.0 has no equal here"),
    ],
)
def test_fla_refuses(config, changes, message):
    with pytest.raises(ValueError, match=f"config_from_fla: {message}"):
        loaders.config_from_fla(config | changes)


@pytest.mark.parametrize("config", [HGRN2, GLA], ids=lambda c: c["model_type"])
def test_fla_refuses_leftovers(config):
    state = fla_state(config)
    state["model.layers.0.attn.q_conv1d.weight"] = rand(DIM, 1, 4)
    with pytest.raises(ValueError, match="without a place here: 'model.layers.0.attn.q_conv1d"):
        loaders.causal_lm_from_fla(config, state)
