"""Published attention checkpoints: state dicts with their names and shapes, and what they mean.

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

DIM, HEADS, HIDDEN = 16, 4, 24


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1))


def group_norm(x: Tensor, weight: Tensor, count: int, eps: float) -> Tensor:
    """RMSNorm of each of `count` groups of channels; weight of all, or of one group, shared."""
    normed = rms_norm(heads(x, count), torch.ones(1, dtype=x.dtype), eps)
    shared = weight.numel() < x.size(-1)
    return (normed * (weight if shared else weight.view(count, -1))).flatten(-2)


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [B, T, H, D]: flash-attention's rotation, not interleaved."""
    half = x.size(-1) // 2
    steps = torch.arange(x.size(1), dtype=x.dtype)[:, None]
    angles = (steps * theta ** (-torch.arange(half, dtype=x.dtype) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


def attend(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, window: int | None = None) -> Tensor:
    """q, k, v [B, T, H, D], log f [B, T, H], by scores of every pair."""
    repeat = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    c = log_f.cumsum(1).transpose(1, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.size(-1))
    scores = scores + c[..., :, None] - c[..., None, :]
    back = torch.arange(q.size(1))[:, None] - torch.arange(q.size(1))
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)


# flash-linear-attention


def fla_layer_state(config: dict, p: str) -> dict[str, Tensor]:
    """Names and shapes of ForgettingAttention and Attention."""
    kv_dim = DIM // HEADS * config.get("num_kv_heads", HEADS)
    is_fox = config["model_type"] == "forgetting_transformer"
    state = {f"{p}q_proj.weight": rand(DIM, DIM), f"{p}o_proj.weight": rand(DIM, DIM)}
    state |= {f"{p}{name}_proj.weight": rand(kv_dim, DIM) for name in "kv"}
    if is_fox:
        state |= {f"{p}f_proj.weight": rand(HEADS, DIM), f"{p}f_proj.bias": rand(HEADS)}
    if config.get("use_output_gate"):
        state[f"{p}g_proj.weight"] = rand(DIM, DIM)
    if config.get("qk_norm"):
        # GroupNorm with weights of all channels; Attention has one RMSNorm for its heads.
        state[f"{p}q_norm.weight"] = rand(DIM if is_fox else DIM // HEADS)
        state[f"{p}k_norm.weight"] = rand(kv_dim if is_fox else DIM // HEADS)
    return state


def fla_layer(state: dict, config: dict, p: str, x: Tensor) -> Tensor:
    kv_heads = config.get("num_kv_heads", HEADS)
    q, k, v = (linear(state, f"{p}{name}_proj", x) for name in "qkv")
    if config.get("qk_norm"):
        q = group_norm(q, state[f"{p}q_norm.weight"], HEADS, 1e-5)
        k = group_norm(k, state[f"{p}k_norm.weight"], kv_heads, 1e-5)
    q, k, v = heads(q, HEADS), heads(k, kv_heads), heads(v, kv_heads)
    log_f = x.new_zeros(*x.shape[:2], HEADS)
    if config["model_type"] == "forgetting_transformer":
        log_f = F.logsigmoid(linear(state, f"{p}f_proj", x))
    else:
        theta = config.get("rope_theta", 10000.0)
        q, k = rotated(q, theta), rotated(k, theta)
    o = attend(q, k, v, log_f, config.get("window_size"))
    if config.get("use_output_gate"):
        o = torch.sigmoid(linear(state, f"{p}g_proj", x)) * o
    return linear(state, f"{p}o_proj", o)


def frame_state(layers: int = 2, merged: bool = False) -> dict[str, Tensor]:
    """Names and shapes of everything but the attention."""
    state = {"model.embeddings.weight": rand(13, DIM), "model.norm.weight": rand(DIM)}
    state["lm_head.weight"] = rand(13, DIM)
    for k in range(layers):
        p = f"model.layers.{k}."
        state |= {f"{p}{name}_norm.weight": rand(DIM) for name in ("attn", "mlp")}
        state[f"{p}mlp.down_proj.weight"] = rand(DIM, HIDDEN)
        if merged:
            state[f"{p}mlp.gate_proj.weight"] = rand(2 * HIDDEN, DIM)
        else:
            state |= {f"{p}mlp.{n}_proj.weight": rand(HIDDEN, DIM) for n in ("gate", "up")}
    return state


def frame_forward(state: dict, ids: Tensor, layer, layers: int = 2, eps: float = 1e-6) -> Tensor:
    x = state["model.embeddings.weight"][ids]
    for k in range(layers):
        p = f"model.layers.{k}."
        x = x + layer(f"{p}attn.", rms_norm(x, state[f"{p}attn_norm.weight"], eps))
        y = rms_norm(x, state[f"{p}mlp_norm.weight"], eps)
        if f"{p}mlp.up_proj.weight" in state:
            gate, up = (linear(state, f"{p}mlp.{n}_proj", y) for n in ("gate", "up"))
        else:
            gate, up = linear(state, f"{p}mlp.gate_proj", y).chunk(2, -1)
        x = x + linear(state, f"{p}mlp.down_proj", F.silu(gate) * up)
    return F.linear(rms_norm(x, state["model.norm.weight"], eps), state["lm_head.weight"])


FLA = {"hidden_size": DIM, "num_hidden_layers": 2, "num_heads": HEADS, "vocab_size": 13}
FLA |= {"intermediate_size": HIDDEN, "model_type": "forgetting_transformer"}
FLA_CASES = [
    {},
    {"use_output_gate": True, "qk_norm": True},
    {"num_kv_heads": 2, "qk_norm": True},
    {"model_type": "transformer"},
    {"model_type": "transformer", "qk_norm": True, "window_size": 3, "rope_theta": 500.0},
]


@pytest.mark.parametrize("changes", FLA_CASES, ids=str)
def test_fla_model(changes):
    torch.manual_seed(0)
    config = {**FLA, **changes}
    state = frame_state()
    for k in range(2):
        state |= fla_layer_state(config, f"model.layers.{k}.attn.")
    model = loaders.causal_lm_from_fla(config, state)
    ids = torch.randint(0, 13, (2, 7))
    wanted = frame_forward(state, ids, lambda p, x: fla_layer(state, config, p, x))
    torch.testing.assert_close(model(ids).logits, wanted)
    assert model.generate(ids, 2).shape == (2, 9)


@pytest.mark.parametrize("changes", FLA_CASES, ids=str)
def test_fla_layer(changes):
    torch.manual_seed(0)
    config = {**FLA, **changes}
    state, x = fla_layer_state(config, ""), rand(2, 7, DIM)
    if config["model_type"] == "transformer":
        given = {"rope": config.get("rope_theta", 10000.0), "window": config.get("window_size")}
        mixer = loaders.attention_from_fla(state, HEADS, **given)
    else:
        mixer = loaders.forgetting_attention_from_fla(state, HEADS)
    torch.testing.assert_close(mixer(x)[0], fla_layer(state, config, "", x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "qkv_bias: True has no equal here"),
        ({"window_size": 8}, "window_size: 8 has no equal here"),
        ({"attnres_block_size": 2}, "attnres_block_size: 2 has no equal here"),
    ],
)
def test_fla_refuses(changes, message):
    with pytest.raises(ValueError, match=f"config_from_fla: {message}"):
        loaders.config_from_fla({**FLA, **changes})


def test_layers_refuse():
    state = fla_layer_state(FLA, "")
    with pytest.raises(ValueError, match="num_heads: expected a divisor of 16; got 3"):
        loaders.forgetting_attention_from_fla(state, 3)
    with pytest.raises(ValueError, match="without a place here: 'q_proj.bias'"):
        loaders.forgetting_attention_from_fla({**state, "q_proj.bias": rand(DIM)}, HEADS)
    del state["f_proj.bias"]
    with pytest.raises(ValueError, match=r"no tensor 'f_proj\.bias'"):
        loaders.forgetting_attention_from_fla(state, HEADS)


# The Forgetting Transformer's release


def released_layer_state(config: dict, p: str) -> dict[str, Tensor]:
    """Names and shapes of ForgettingAttentionLayer."""
    state = {f"{p}{name}_proj.weight": rand(DIM, DIM) for name in "qo"}
    for name in "kv":
        if config.get(f"use_{name}_shift"):
            state[f"{p}{name}_proj.linear.weight"] = rand(DIM, DIM)
            state[f"{p}{name}_proj.shift_proj.weight"] = rand(HEADS, DIM)
        else:
            state[f"{p}{name}_proj.weight"] = rand(DIM, DIM)
    gate = config.get("fgate_type", "full")
    if gate == "full":
        state |= {f"{p}fgate_proj.weight": rand(HEADS, DIM), f"{p}fgate_proj.bias": rand(HEADS)}
    elif gate != "none":
        state[f"{p}fgate_bias"] = rand(HEADS)
    if config.get("use_output_gate"):
        state[f"{p}ogate_proj.weight"] = rand(DIM, DIM)
    if config.get("use_output_norm"):
        state[f"{p}output_norm.weight"] = rand(DIM)
    if config.get("qk_norm"):
        size = DIM // HEADS if config.get("qk_norm_share_param_across_head") else DIM
        state |= {f"{p}{name}_norm.weight": rand(size) for name in "qk"}
    return state


def shift_linear(state: dict, p: str, x: Tensor) -> Tensor:
    if f"{p}.linear.weight" not in state:
        return linear(state, p, x)
    out = heads(linear(state, f"{p}.linear", x), HEADS)
    alpha = torch.sigmoid(linear(state, f"{p}.shift_proj", x))[..., None]
    before = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)
    return (alpha * before + (1 - alpha) * out).flatten(-2)


def released_layer(state: dict, config: dict, p: str, x: Tensor) -> Tensor:
    q = linear(state, f"{p}q_proj", x)
    k, v = (shift_linear(state, f"{p}{name}_proj", x) for name in "kv")
    if config.get("qk_norm"):
        q, k = (
            group_norm(t, state[f"{p}{name}_norm.weight"], HEADS, 1e-5)
            for t, name in ((q, "q"), (k, "k"))
        )
    q, k, v = (heads(t, HEADS) for t in (q, k, v))
    if config.get("use_rope"):
        q, k = (rotated(t, config.get("rope_base", 500000.0)) for t in (q, k))
    log_f = x.new_zeros(*x.shape[:2], HEADS)
    if f"{p}fgate_proj.weight" in state:
        log_f = F.logsigmoid(linear(state, f"{p}fgate_proj", x))
    elif f"{p}fgate_bias" in state:
        log_f = log_f + F.logsigmoid(state[f"{p}fgate_bias"])
    o = attend(q, k, v, log_f)
    if config.get("use_output_norm"):
        o = group_norm(o, state[f"{p}output_norm.weight"], HEADS, 1e-6)
    if config.get("use_output_gate"):
        act = F.silu if config.get("ogate_act") == "silu" else torch.sigmoid
        o = o * act(linear(state, f"{p}ogate_proj", x))
    return linear(state, f"{p}o_proj", o)


PRO = {"use_k_shift": True, "use_v_shift": True, "qk_norm": True}
PRO |= {"use_output_gate": True, "use_output_norm": True}
RELEASED = {"hidden_size": DIM, "num_hidden_layers": 2, "num_heads": HEADS, "vocab_size": 13}
RELEASED |= {"intermediate_size": HIDDEN, "model_type": "forgetting_transformer-project_fox"}
RELEASED_CASES = {
    "llama": {},
    "pro": PRO,
    "pro-shared-norms": {**PRO, "qk_norm_share_param_across_head": True},
    "transformer-pro": {**PRO, "fgate_type": "none", "use_rope": True},
    "independent": {
        "fgate_type": "bias_only",
        "fgate_bias_init": True,
        "decay_time_min": 2.0,
        "decay_time_max": 64.0,
    },
    "fixed": {
        "fgate_type": "fixed",
        "fgate_bias_init": True,
        "decay_time_min": 2,
        "decay_time_max": 64,
    },
    "silu": {"use_output_gate": True, "ogate_act": "silu", "use_rope": True, "rope_base": 70.0},
}
by_released = pytest.mark.parametrize("changes", RELEASED_CASES.values(), ids=RELEASED_CASES)


@by_released
def test_released_model(changes):
    torch.manual_seed(0)
    config = {**RELEASED, **changes}
    state = frame_state(merged=True)
    for k in range(2):
        state |= released_layer_state(config, f"model.layers.{k}.attn.")
    model = loaders.causal_lm_from_forgetting_transformer(config, state)
    ids = torch.randint(0, 13, (2, 7))
    wanted = frame_forward(state, ids, lambda p, x: released_layer(state, config, p, x))
    torch.testing.assert_close(model(ids).logits, wanted)
    count = sum(t.numel() for t in state.values())
    assert sum(t.numel() for t in model.state_dict().values()) == count


@pytest.mark.parametrize("name", [name for name in RELEASED_CASES if name != "silu"])
def test_released_layer(name):
    """Without SiLU, which a state dict does not show; a model's configuration does."""
    torch.manual_seed(0)
    changes = RELEASED_CASES[name]
    config = {**RELEASED, **changes}
    gates = {"bias_only": "independent", "fixed": "fixed", "none": "none"}
    state, x = released_layer_state(config, ""), rand(2, 7, DIM)
    mixer = loaders.forgetting_attention_from_forgetting_transformer(
        state,
        HEADS,
        gate=gates.get(config.get("fgate_type"), "data"),
        rope=500000.0 if config.get("use_rope") else None,
    )
    torch.testing.assert_close(mixer(x)[0], released_layer(state, config, "", x))


def test_released_configurations():
    config = {**RELEASED, "log_pruning_tolerance": -10.0, "hidden_ratio": 3.5}
    del config["intermediate_size"]
    ours = loaders.config_from_forgetting_transformer({**config, "hidden_size": 1536})
    assert ours.glu_hidden == 3584
    assert ours.mixer_options["prune"] == pytest.approx(math.exp(-10))
    assert (ours.norm_eps, ours.init_std, ours.tied) == (1e-6, 0.02, False)
    plain = {**RELEASED, "model_type": "transformer-project_fox", "window_size": 2048}
    ours = loaders.config_from_forgetting_transformer(plain)
    assert ours.mixer == "transformer"
    assert (ours.mixer_options["rope"], ours.mixer_options["window"]) == (500000.0, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fgate_type": "half"}, "fgate_type: 'half' has no equal here"),
        ({"use_k_shift": True}, "use_v_shift: None has no equal here"),
        ({"num_kv_heads": 2}, "num_kv_heads: 2 has no equal here"),
        ({"hidden_act": "sigmoid"}, "hidden_act: 'sigmoid' has no equal here"),
        ({"window_size": 64}, "window_size: 64 has no equal here"),
    ],
)
def test_released_refuses(changes, message):
    with pytest.raises(ValueError, match=f"config_from_forgetting_transformer: {message}"):
        loaders.config_from_forgetting_transformer({**RELEASED, **changes})
