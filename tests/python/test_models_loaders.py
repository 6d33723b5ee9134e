"""Published checkpoints: state dicts with their names and shapes, and what they mean.

Each reference below is a plain forward of the published model written from its published
behaviour over its own parameter names, in float64; ours, loaded from the same tensors, must give
the same numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate.models import loaders

DIM = 6


def rand(*shape: int) -> Tensor:
    return 0.5 * torch.randn(*shape, dtype=torch.float64)


def linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def scan(decay: Tensor, inputs: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + inputs_t over the second dimension."""
    h, states = torch.zeros_like(inputs[:, 0]), []
    for t in range(inputs.size(1)):
        h = decay[:, t] * h + inputs[:, t]
        states.append(h)
    return torch.stack(states, 1)


def hgru_pytorch_state(kind: str, bias: bool = True) -> dict[str, Tensor]:
    """Names and shapes of Hgru1d, BiHgru1d, HgruRealV6."""
    wide = DIM if kind == "real" else 2 * DIM
    shapes = {
        "input_proj": (wide, DIM),
        "lambda_proj": (DIM, DIM),
        "gate": (wide, DIM),
        "out_proj": (DIM, wide),
    }
    state = {f"{name}.weight": rand(*shape) for name, shape in shapes.items()}
    if bias:
        state |= {f"{name}.bias": rand(shape[0]) for name, shape in shapes.items()}
    state |= {"norm.weight": rand(wide), "norm.bias": rand(wide)}
    thetas = {"one": ["theta"], "bi": ["theta_forward", "theta_reverse"], "real": []}[kind]
    return state | {name: rand(1, 1, DIM) for name in thetas}


def hgru_pytorch_forward(state: dict, x: Tensor, bound: Tensor, both_ways: bool) -> Tensor:
    """x [B, T, dim]; real and imaginary rows of input_proj alternate."""
    u = F.silu(linear(state, "input_proj", x))
    lam = bound + (1 - bound) * torch.sigmoid(linear(state, "lambda_proj", x))
    is_complex = u.size(-1) != DIM
    if is_complex:
        u = torch.view_as_complex(u.unflatten(-1, (DIM, 2)).contiguous())
    h = 0
    for way in ("forward", "reverse") if both_ways else ("forward",):
        theta = state.get("theta", state.get(f"theta_{way}"))
        decay = lam * torch.exp(1j * theta) if is_complex else lam
        flip = [1] if way == "reverse" else []
        h = h + scan(decay.flip(flip), ((1 - lam) * u).flip(flip)).flip(flip)
    if is_complex:
        h = torch.cat([h.real, h.imag], -1)
    h = F.layer_norm(h, h.shape[-1:], state["norm.weight"], state["norm.bias"])
    return linear(state, "out_proj", h * F.silu(linear(state, "gate", x)))


@pytest.mark.parametrize(
    ("kind", "bias", "both_ways"),
    [("one", True, False), ("one", False, False), ("one", True, True), ("bi", True, True)]
    + [("real", True, False), ("real", True, True)],
)
def test_hgru_pytorch(kind, bias, both_ways):
    torch.manual_seed(0)
    state = hgru_pytorch_state(kind, bias)
    mixer = loaders.hgru_from_hgru_pytorch(state, bidirectional=both_ways and kind != "bi")
    x, bound = rand(2, 9, DIM), torch.rand(DIM, dtype=torch.float64)
    wanted = hgru_pytorch_forward(state, x, bound, both_ways)
    torch.testing.assert_close(mixer(x, gamma=bound)[0], wanted)
    assert mixer.bidirectional == both_ways
    assert sum(p.numel() for p in mixer.parameters()) == sum(t.numel() for t in state.values()) + (
        DIM if both_ways and kind == "one" else 0
    )


def test_loaded_tensors_are_copies():
    state = hgru_pytorch_state("real")
    mixer = loaders.hgru_from_hgru_pytorch(state)
    before = state["out_proj.weight"].clone()
    with torch.no_grad():
        mixer.out_proj.weight.zero_()
    assert torch.equal(state["out_proj.weight"], before)


def test_hgru_pytorch_refuses():
    state = hgru_pytorch_state("one")
    with pytest.raises(ValueError, match=r"tensors without a place here: 'extra.weight'"):
        loaders.hgru_from_hgru_pytorch(state | {"extra.weight": rand(2)})
    del state["gate.weight"]
    with pytest.raises(ValueError, match=r"no tensor 'gate.weight'"):
        loaders.hgru_from_hgru_pytorch(state)


FLA = {
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "intermediate_size": 8,
    "vocab_size": 13,
    "norm_eps": 1e-6,
    "model_type": "hgrn",
}


def fla_state(config: dict) -> dict[str, Tensor]:
    """Names and shapes of HGRNForCausalLM."""
    dim, hidden = config["hidden_size"], config["intermediate_size"]
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    wide = dim * config.get("expand_ratio", 1)
    state = {"model.embeddings.weight": rand(vocab, dim), "model.norm.weight": rand(dim)}
    state["lm_head.weight"] = state["model.embeddings.weight"]
    if not config.get("tie_word_embeddings", False):
        state["lm_head.weight"] = rand(vocab, dim)
    if config.get("use_lower_bound", True):
        state["model.lower_bounds"] = rand(layers, dim)
    for k in range(layers):
        p = f"model.layers.{k}."
        state |= {f"{p}attn.{name}_proj.weight": rand(wide, dim) for name in "ifg"}
        state |= {f"{p}{name}_norm.weight": rand(dim) for name in ("attn", "mlp")}
        state[f"{p}attn.g_norm.weight"] = rand(wide)
        state[f"{p}attn.o_proj.weight"] = rand(dim, wide)
        state[f"{p}mlp.gate_proj.weight"] = rand(hidden, dim)
        state[f"{p}mlp.up_proj.weight"] = rand(hidden, dim)
        state[f"{p}mlp.down_proj.weight"] = rand(dim, hidden)
    return state


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def fla_mixer(state: dict, p: str, x: Tensor, bound: Tensor | None, eps: float) -> Tensor:
    forget = torch.sigmoid(linear(state, f"{p}f_proj", x))
    if bound is not None:
        forget = bound + (1 - bound) * forget
    h = scan(forget, F.silu(linear(state, f"{p}i_proj", x)) * (1 - forget))
    h = rms_norm(h, state[f"{p}g_norm.weight"], eps)
    return linear(state, f"{p}o_proj", h * F.silu(linear(state, f"{p}g_proj", x)))


def fla_forward(state: dict, config: dict, ids: Tensor) -> Tensor:
    eps = config["norm_eps"]
    bounds = None
    if "model.lower_bounds" in state:
        p = state["model.lower_bounds"].softmax(0)
        bounds = p.cumsum(0) - p[0]
    x = state["model.embeddings.weight"][ids]
    for k in range(config["num_hidden_layers"]):
        p = f"model.layers.{k}."
        y = rms_norm(x, state[f"{p}attn_norm.weight"], eps)
        bound = bounds[k] if bounds is not None and k > 0 else None
        x = x + fla_mixer(state, f"{p}attn.", y, bound, eps)
        y = rms_norm(x, state[f"{p}mlp_norm.weight"], eps)
        gate = F.silu(linear(state, f"{p}mlp.gate_proj", y))
        x = x + linear(state, f"{p}mlp.down_proj", gate * linear(state, f"{p}mlp.up_proj", y))
    return F.linear(rms_norm(x, state["model.norm.weight"], eps), state["lm_head.weight"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"use_lower_bound": False, "expand_ratio": 2}],
    ids=str,
)
def test_fla_model(changes):
    torch.manual_seed(0)
    config = {**FLA, **changes}
    state = fla_state(config)
    model = loaders.causal_lm_from_fla(config, state)
    ids = torch.randint(0, 13, (2, 9))
    torch.testing.assert_close(model(ids).logits, fla_forward(state, config, ids))
    assert model.generate(ids, 2).shape == (2, 11)


def test_fla_fused_gate():
    """Older versions hold both halves of the channel mixer in gate_proj."""
    state = fla_state(FLA)
    ids = torch.randint(0, 13, (1, 5))
    wanted = loaders.causal_lm_from_fla(FLA, state)(ids).logits
    for k in range(3):
        p = f"model.layers.{k}.mlp."
        halves = [state[f"{p}gate_proj.weight"], state.pop(f"{p}up_proj.weight")]
        state[f"{p}gate_proj.weight"] = torch.cat(halves)
    assert torch.equal(loaders.causal_lm_from_fla(FLA, state)(ids).logits, wanted)


def test_fla_layer():
    torch.manual_seed(0)
    whole = fla_state({**FLA, "expand_ratio": 2})
    prefix = "model.layers.1.attn."
    state = {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)}
    mixer = loaders.hgru_from_fla(state)
    x, bound = rand(2, 7, DIM), torch.rand(2 * DIM, dtype=torch.float64)
    wanted = fla_mixer(state, "", x, bound, 1e-5)
    torch.testing.assert_close(mixer(x, gamma=bound)[0], wanted)


def test_fla_hidden_width():
    config = loaders.config_from_fla({"hidden_size": 1024, "num_hidden_layers": 2})
    assert config.glu_hidden == 2816
    assert (config.tied, config.norm, config.norm_eps) == (False, "rms", 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_short_conv": True}, "use_short_conv: True has no equal here"),
        ({"attn": {"layers": [1]}}, "attn: .* has no equal here"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' has no equal here"),
        ({"expand_ratio": 1.5}, "expand_ratio: 1.5 has no equal here"),
        ({"expand_ratio": 2}, "expand_ratio: 2 has no equal here"),
    ],
)
def test_fla_refuses(changes, message):
    with pytest.raises(ValueError, match=f"config_from_fla: {message}"):
        loaders.config_from_fla({**FLA, **changes})


def test_fla_refuses_leftovers():
    state = fla_state(FLA)
    state["model.layers.0.attn.i_conv1d.weight"] = rand(DIM, 1, 4)
    with pytest.raises(ValueError, match="without a place here: 'model.layers.0.attn.i_conv1d"):
        loaders.causal_lm_from_fla(FLA, state)
