"""`tidegate.nn.HGRU2` and `tidegate.nn.GatedLinearAttention` against their equations, and what a
torch.nn.Module should stand."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.mixer_checks import check_values_and_gradients, gamma_of
from torch import Tensor, nn

from tidegate.nn import HGRU2, GatedLinearAttention, GLAState

DIM = 12

HGRU2_CASES = {
    "paper": {"num_heads": 3},
    "ratio": {"expand_ratio": 6},
    "one-head": {},
    "official": {"num_heads": 2, "preset": "official"},
    "fla": {"num_heads": 4, "preset": "fla"},
    "mixed": {"num_heads": 3, "q_activation": "none", "v_activation": "sigmoid", "norm": "rms"},
}
BOTH_WAYS = {
    "both": {"num_heads": 3, "bidirectional": True},
    "both-fla": {"num_heads": 2, "bidirectional": True, "preset": "fla"},
}
GLA_CASES = {
    "vector": {"num_heads": 3, "gate_rank": 4},
    "scalar": {"num_heads": 2, "gate": "scalar"},
    "wide": {"num_heads": 2, "key_dim": 10, "value_dim": 6, "output_gate": False, "norm": "layer"},
    "temperature": {"num_heads": 3, "gate_temperature": 2.5, "norm": "rms_no_weight"},
    "mapped": {"num_heads": 3, "feature_map": "relu"},
    "normal-elu": {"num_heads": 2, "gate": "scalar", "normalize": True, "feature_map": "elu+1"},
    "normal-exp": {
        "num_heads": 3,
        "normalize": True,
        "feature_map": "exp",
        "output_gate": False,
        "norm": "none",
    },
    "normal-relu": {"num_heads": 2, "normalize": True, "feature_map": "relu", "norm": "none"},
    "bounded": {"num_heads": 3, "key_dim": 9, "lower_bound": True},
    "bounded-scalar": {
        "num_heads": 2,
        "gate": "scalar",
        "normalize": True,
        "feature_map": "exp",
        "lower_bound": True,
    },
}
ONE_WAY = [(HGRU2, o) for o in HGRU2_CASES.values()]
ONE_WAY += [(GatedLinearAttention, o) for o in GLA_CASES.values()]
ALL = ONE_WAY + [(HGRU2, o) for o in BOTH_WAYS.values()]
CASES = pytest.mark.parametrize(("cls", "options"), ALL, ids=str)
CAUSAL = pytest.mark.parametrize(("cls", "options"), ONE_WAY, ids=str)


def make(cls: type, options: dict, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A mixer whose every number differs from its starting value."""
    torch.manual_seed(seed)
    mixer = cls(DIM, **options, dtype=dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return mixer


def tensors(state: Tensor | GLAState | None) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state or ())


def assert_states(one, two) -> None:
    for a, b in zip(tensors(one), tensors(two), strict=True):
        torch.testing.assert_close(a, b)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, f: Tensor, reverse: bool = False) -> Tensor:
    """o_t = S_t^T q_t with S_t = diag(f_t) S_{t-1} + k_t v_t^T: q, k, f [B, T, H, K]."""
    s = q.new_zeros(q.size(0), q.size(2), q.size(3), v.size(3))
    out: list = [None] * q.size(1)
    for t in reversed(range(q.size(1))) if reverse else range(q.size(1)):
        s = f[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[t] = (q[:, t, :, :, None] * s).sum(-2)
    return torch.stack(out, 1)


def normed(mixer: nn.Module, o: Tensor) -> Tensor:
    """The mixer's norm over the last dimension, by hand."""
    if isinstance(mixer.norm, nn.Identity):
        return o
    if isinstance(mixer.norm, nn.LayerNorm):
        o = o - o.mean(-1, keepdim=True)
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if mixer.norm.weight is not None:
        o = o * mixer.norm.weight
    return o + getattr(mixer.norm, "bias", 0.0)


def activated(name: str, x: Tensor) -> Tensor:
    gate = 1 / (1 + torch.exp(-x))
    return {"none": x, "sigmoid": gate, "silu": x * gate}[name]


def hgru2_by_hand(mixer: HGRU2, x: Tensor, gamma: Tensor | None) -> Tensor:
    """Equation 3, and the rows of in_proj as its documentation orders them."""
    q_act, v_act, scale = {
        "paper": ("sigmoid", "silu", 1.0),
        "official": ("silu", "none", 1.0),
        "fla": ("silu", "none", mixer.expand_ratio**-0.5),
    }[mixer.preset]
    if mixer.q_activation == "none":  # the case that overrides its preset
        q_act, v_act = "none", "sigmoid"
    rows = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias)
    q, f, v = (part.unflatten(-1, (mixer.num_heads, -1)) for part in rows.split(DIM, -1))
    gamma = torch.zeros(DIM, dtype=x.dtype) if gamma is None else gamma
    gamma = gamma.view(mixer.num_heads, -1)
    f = gamma + (1 - gamma) / (1 + torch.exp(-f))
    q, v = activated(q_act, q), activated(v_act, v)
    o = linear_attention(q, 1 - f, v, f)
    if mixer.bidirectional:
        o = o + linear_attention(q, 1 - f, v, f, reverse=True)
    o = normed(mixer, scale * o.flatten(-2))
    return F.linear(o, mixer.out_proj.weight, mixer.out_proj.bias)


def gla_by_hand(mixer: GatedLinearAttention, x: Tensor, gamma: Tensor | None) -> Tensor:
    """The equations of the class, and the rows of in_proj as it orders them."""
    h, keys, values = mixer.num_heads, mixer.key_dim, mixer.value_dim
    sizes = [keys, keys, values] + [values] * mixer.output_gate
    sizes += [mixer.in_proj.weight.size(0) - sum(sizes)]
    parts = F.linear(x, mixer.in_proj.weight).split(sizes, -1)
    low = parts[-1] if mixer.gate == "vector" else x
    logits = F.linear(low, mixer.gate_proj.weight, mixer.gate_proj.bias)
    default = 16.0 if mixer.gate == "vector" else 1.0
    temperature = 2.5 if mixer.gate_temperature == 2.5 else default
    f = (1 / (1 + torch.exp(-logits))) ** (1 / temperature)
    if gamma is not None:
        f = gamma + (1 - gamma) * f
    phi = {
        None: lambda t: t,
        "relu": lambda t: t.clamp(min=0),
        "exp": torch.exp,
        "elu+1": lambda t: F.elu(t) + 1,
    }[mixer.feature_map]
    q, k, v = (part.unflatten(-1, (h, -1)) for part in parts[:3])
    q, k = phi(q), phi(k)
    f = f.unflatten(-1, (h, -1)).expand(k.shape)
    o = linear_attention(q, k, v, f)
    if mixer.normalize:
        divisor = linear_attention(q, k, torch.ones_like(v[..., :1]), f)
        o = o / torch.where(divisor > 0, divisor, 1.0)
    else:
        o = o * (keys // h) ** -0.5
    o = normed(mixer, o).flatten(-2)
    if mixer.output_gate:
        o = o * activated("silu", parts[3])
    return F.linear(o, mixer.out_proj.weight)


@CASES
def test_equals_its_equations(cls, options):
    mixer = make(cls, options)
    gamma = gamma_of(mixer)
    bounds = [] if gamma is None else [gamma.requires_grad_()]
    x = torch.randn(2, 11, DIM, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(x, gamma=gamma)
    by_hand = hgru2_by_hand if cls is HGRU2 else gla_by_hand
    check_values_and_gradients(
        lambda: (y,), lambda: (by_hand(mixer, x, gamma),), [x, *bounds, *mixer.parameters()]
    )


@CAUSAL
@torch.no_grad()
def test_split_anywhere(cls, options):
    """Prefill, more prefill from its state, then steps: all equal one forward."""
    mixer = make(cls, options)
    gamma = gamma_of(mixer)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    whole, final = mixer(x, gamma=gamma)
    for cut in (0, 1, 4, 8):
        head, state = mixer(x[:, :cut], mixer.init_state(3), gamma=gamma)
        middle, state = mixer(x[:, cut : cut + 1], state, gamma=gamma)
        tail = [mixer.step(x[:, t], state, gamma) for t in range(cut + 1, 9)]
        y = torch.cat([head, middle, *(row[:, None] for row in tail)], dim=1)
        torch.testing.assert_close(y, whole)
        assert_states(state, final)


@CASES
@torch.no_grad()
def test_packed_equals_separate(cls, options):
    mixer = make(cls, options)
    gamma = gamma_of(mixer)
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    bounds = [0, 5, 5, 6, 12]
    y, state = mixer(x, gamma=gamma, cu_seqlens=torch.tensor(bounds))
    for n in (0, 2, 3):
        rows = slice(bounds[n], bounds[n + 1])
        part, final = mixer(x[:, rows], gamma=gamma)
        torch.testing.assert_close(y[:, rows], part)
        for mine, other in zip(tensors(state), tensors(final), strict=True):
            torch.testing.assert_close(mine[n : n + 1], other)
    for mine in tensors(state):
        assert not mine[1].any(), "an empty sequence leaves an empty state"


@pytest.mark.parametrize(
    ("cls", "options"), [ONE_WAY[0], ONE_WAY[6], ONE_WAY[11]], ids=lambda v: str(v)
)
def test_gradient_through_state(cls, options):
    mixer = make(cls, options)
    x = torch.randn(2, 8, DIM, dtype=torch.float64, requires_grad=True)
    whole, _ = mixer(x)
    head, state = mixer(x[:, :3])
    tail, _ = mixer(x[:, 3:], state)
    (one,) = torch.autograd.grad(whole.pow(2).sum(), x)
    (two,) = torch.autograd.grad(head.pow(2).sum() + tail.pow(2).sum(), x)
    torch.testing.assert_close(one, two)


@CAUSAL
def test_gradient_of_the_state_alone(cls, options):
    mixer = make(cls, options)
    x = torch.randn(2, 8, DIM, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x)
    loss = sum(part.pow(2).sum() for part in tensors(state))
    (with_output,) = torch.autograd.grad(loss + 0.0 * y.sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, with_output)


@pytest.mark.parametrize("length", [0, 1])
@CAUSAL
def test_short(cls, options, length):
    mixer = make(cls, options)
    state = mixer.init_state(2)
    for part in tensors(state):
        part.copy_(torch.rand_like(part))
    y, final = mixer(torch.randn(2, length, DIM, dtype=torch.float64), state)
    assert y.shape == (2, length, DIM)
    assert [t.shape for t in tensors(final)] == [t.shape for t in tensors(state)]
    if length == 0:
        assert_states(final, state)


def test_weights_all_zero_give_zero():
    """A relu feature map can leave nothing to average: o = 0, not 0 / 0."""
    mixer = make(GatedLinearAttention, GLA_CASES["normal-relu"])
    with torch.no_grad():
        mixer.in_proj.weight[:6] = 0
    x = torch.randn(1, 3, DIM, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(x)
    assert not y.any()
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_gates_that_shut_and_that_never_forget():
    """Logits of +-1e4: outputs and gradients stay finite, and the state does what they say."""
    for shut in (True, False):
        mixer = make(HGRU2, {"num_heads": 2, "preset": "official"})
        with torch.no_grad():
            mixer.in_proj.weight[DIM : 2 * DIM] = 0
        x = torch.randn(1, 6, DIM, dtype=torch.float64, requires_grad=True)
        q, f, v = mixer._project(x)
        f = f + (-1e4 if shut else 1e4)
        o, state = mixer._recur((q, f, v), None, None, False, None)
        o.square().sum().backward()
        assert x.grad.isfinite().all()
        if shut:  # only the last token is there, with key 1
            torch.testing.assert_close(state[0], v[0, -1, :, None, :].expand(2, 6, 6))
        else:
            assert not state.any()


ERRORS = [
    (HGRU2, {"num_heads": 5}, r"HGRU2: num_heads: expected a divisor of dim=12; got 5"),
    (HGRU2, {"num_heads": 0}, r"HGRU2: num_heads: expected a positive integer; got 0"),
    (HGRU2, {"expand_ratio": 7}, r"HGRU2: expand_ratio: expected a divisor of dim=12; got 7"),
    (
        HGRU2,
        {"num_heads": 2, "expand_ratio": 4},
        r"HGRU2: expand_ratio: expected dim / num_heads = 6, or only one of the two; got 4",
    ),
    (HGRU2, {"preset": "mine"}, r"HGRU2: preset: expected one of 'paper', 'official', 'fla'; got"),
    (HGRU2, {"q_activation": "relu"}, r"HGRU2: q_activation: expected one of 'none', 'silu', 's"),
    (HGRU2, {"v_activation": "relu"}, r"HGRU2: v_activation: expected one of"),
    (HGRU2, {"norm": "batch"}, r"HGRU2: norm: expected one of 'layer', 'rms', 'rms_no_weight'"),
    (GatedLinearAttention, {"num_heads": 4}, r"key_dim: expected a multiple of num_heads=4; got 6"),
    (
        GatedLinearAttention,
        {"num_heads": 2, "value_dim": 5},
        r"GatedLinearAttention: value_dim: expected a multiple of num_heads=2; got 5",
    ),
    (GatedLinearAttention, {"num_heads": 2, "gate": "both"}, r"gate: expected one of 'vector', 's"),
    (
        GatedLinearAttention,
        {"num_heads": 2, "feature_map": "cos"},
        r"feature_map: expected one of None, 'elu\+1', 'relu', 'exp'; got 'cos'",
    ),
    (
        GatedLinearAttention,
        {"num_heads": 2, "normalize": True},
        r"feature_map: expected 'elu\+1', 'relu' or 'exp' with normalize=True, .*; got None",
    ),
    (
        GatedLinearAttention,
        {"num_heads": 2, "gate_temperature": 0},
        r"gate_temperature: expected a positive number; got 0",
    ),
    (
        GatedLinearAttention,
        {"num_heads": 2, "gate_temperature": "16"},
        r"GatedLinearAttention: gate_temperature: expected a positive number; got '16'",
    ),
    (HGRU2, {"norm_eps": "0"}, r"^HGRU2: norm_eps: expected 0 or more; got '0'"),
    (GatedLinearAttention, {"num_heads": 2, "normalize": "no"}, r"normalize: expected True or Fal"),
    (
        GatedLinearAttention,
        {"num_heads": 2, "norm_eps": -1},
        r"^GatedLinearAttention: norm_eps: expected 0 or more; got -1",
    ),
    (
        GatedLinearAttention,
        {"num_heads": 1, "key_dim": 1024},
        r"GatedLinearAttention: key_dim: expected at most 512 channels a head; got 1024",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), ERRORS, ids=lambda v: str(v)[:40])
def test_bad_options(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(DIM, **options)


def test_a_width_that_is_no_number_is_refused():
    """Before half of it is taken for the keys."""
    with pytest.raises(ValueError, match="Attention: dim: expected a positive integer; got 'x'"):
        GatedLinearAttention("x")


def test_widths_that_heads_of_128_do_not_fit():
    """The widest head up to that fits is taken."""
    sizes = {64: 64, 128: 128, 192: 96, 200: 100, 320: 80, 4: 4, 256: 128}
    assert {dim: HGRU2(dim, device="meta").expand_ratio for dim in sizes} == sizes


def test_widths_that_heads_do_not_fit():
    with pytest.raises(ValueError, match=r"num_heads: expected a divisor of dim=131, or an expand"):
        HGRU2(131)  # heads of one channel were not meant
    for heads in ({"num_heads": 1}, {"expand_ratio": 1024}):
        with pytest.raises(ValueError, match=r"expand_ratio: expected at most 512 .*; got 1024"):
            HGRU2(1024, **heads)


def test_default_heads():
    assert [HGRU2(d, device="meta").num_heads for d in (64, 128, 1024)] == [1, 1, 8]


def test_bad_arguments():
    mixer, both = HGRU2(DIM, 3), HGRU2(DIM, 3, bidirectional=True)
    gla = GatedLinearAttention(DIM, 2)
    normal = GatedLinearAttention(DIM, 2, normalize=True, feature_map="relu")
    x, state = torch.zeros(2, 3, DIM), mixer.init_state(2)
    s, z = normal.init_state(2)
    calls = {
        r"HGRU2: x: expected \[B, T, dim=12\]; got \(2, 3, 5\)": lambda: mixer(x[..., :5]),
        r"HGRU2.step: x: expected \[B, dim=12\]; got \(2, 3, 12\)": lambda: mixer.step(x, state),
        r"HGRU2: state: expected \[2, 3, 4, 4\]; got \(2, 12, 4\)": lambda: mixer(
            x, state.flatten(1, 2)
        ),
        r"HGRU2: gamma: expected \[dim=12\]; got \(4,\)": lambda: mixer(x, gamma=torch.zeros(4)),
        r"HGRU2: a state: a bidirectional HGRU2 reads the whole": lambda: both(x, state),
        r"HGRU2: step\(\): a bidirectional": lambda: both.step(x[:, 0], state),
        r"HGRU2: init_state\(\): a bidirectional": lambda: both.init_state(2),
        r"Attention: x: expected \[B, T, dim=12\]": lambda: gla(x[0]),
        r"Attention: state: expected \[2, 2, 3, 6\]; got \(2, 2, 3, 5\)": lambda: gla(
            x, s[..., :5]
        ),
        r"state: expected a pair \(s, z\) with normalize=True; got a tensor": lambda: normal(x, s),
        r"state: expected a tensor with normalize=False; got a tuple": lambda: gla(x, (s, z)),
        r"state: expected a tensor with normalize=False; got a int$": lambda: gla(x, 3),
        r"state: expected a pair \(s, z\) .*; got a int$": lambda: normal(x, 3),
        r"state: expected a pair \(s, z\) .*; got None": lambda: normal.step(x[:, 0], None),
        r"state: expected a pair \(s, z\) .*; got a tuple of 3": lambda: normal(x, (s, z, z)),
        r"state: expected a pair \(s, z\) .*; got a dict": lambda: normal(x, {"s": s, "z": z}),
        r"gamma: expected None with lower_bound=False; got a float": lambda: gla(x, gamma=0.5),
        r"state: z: expected \[2, 2, 3\]; got \(2, 2, 2\)": lambda: normal(x, (s, z[..., :2])),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_steps_have_no_gradient():
    for mixer in (HGRU2(DIM, 3), GatedLinearAttention(DIM, 2)):
        with pytest.raises(RuntimeError, match=r"\.step: a step has no gradient"):
            mixer.step(torch.zeros(2, DIM), mixer.init_state(2))


@CASES
def test_seeded_reset(cls, options):
    """Constructing, resetting, and to_empty with a reset draw the same numbers."""
    torch.manual_seed(7)
    built = cls(DIM, **options)
    other = make(cls, options, seed=3, dtype=torch.float32)
    empty = cls(DIM, **options, device="meta").to_empty(device="cpu")
    for mixer in (other, empty):
        torch.manual_seed(7)
        mixer.reset_parameters()
        for (name, one), two in zip(mixer.named_parameters(), built.parameters(), strict=True):
            assert torch.equal(one, two), name


@pytest.mark.parametrize(("cls", "options"), [ONE_WAY[0], ONE_WAY[11]], ids=str)
def test_copies(cls, options):
    mixer = make(cls, options)
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    loaded = cls(DIM, **options, dtype=torch.float64)
    loaded.load_state_dict(mixer.state_dict())
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), loaded):
        assert torch.equal(other(x)[0], mixer(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@CAUSAL
def test_half(cls, options, dtype):
    mixer = make(cls, options, dtype=torch.float32)
    half = copy.deepcopy(mixer).to(dtype)
    gamma = gamma_of(mixer, torch.float32)
    x = torch.randn(2, 20, DIM)
    y, state = half(x.to(dtype), gamma=gamma)
    assert y.dtype == dtype
    assert {t.dtype for t in tensors(state)} == {torch.float32}
    wanted = mixer(x, gamma=gamma)[0]
    assert (y.float() - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize(("cls", "options"), [ONE_WAY[0], ONE_WAY[6], ONE_WAY[11]], ids=str)
def test_autocast(cls, options):
    mixer = make(cls, options, dtype=torch.float32)
    x = torch.randn(2, 9, DIM)
    wanted = mixer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
    assert {t.dtype for t in tensors(state)} == {torch.float32}
    assert (y.float() - wanted).norm() < 0.06 * wanted.norm()
    y.float().sum().backward()


@pytest.mark.parametrize(
    ("cls", "options"), [ONE_WAY[0], ONE_WAY[6], ONE_WAY[11], ONE_WAY[14]], ids=str
)
def test_compile(cls, options):
    """One graph, forward and backward."""
    mixer = make(cls, options, dtype=torch.float32)
    gamma = gamma_of(mixer, torch.float32)
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 8):
        x = torch.randn(2, length, DIM, requires_grad=True)
        y, state = mixer(x, gamma=gamma)
        z, other = compiled(x, gamma=gamma)
        torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-5)
        for one, two in zip(tensors(other), tensors(state), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        (one,) = torch.autograd.grad(y.sum(), x)
        (two,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@CASES
def test_cuda_equals_cpu(cls, options, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    mixer = make(cls, options, dtype=torch.float32)
    gamma = gamma_of(mixer, torch.float32)
    x = torch.randn(2, 33, DIM)
    wanted, _ = mixer(x, gamma=gamma)
    there = copy.deepcopy(mixer).to(device)
    y, _ = there(x.to(device), gamma=None if gamma is None else gamma.to(device))
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_normaliser_shows_without_a_norm():
    """The Forgetting Transformer's equations 7 to 9: with the other norms, which take out of a head
    what it was divided by, the normaliser makes no difference, and a warning says so."""
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    options = {"gate": "scalar", "feature_map": "elu+1"}
    outputs = {}
    for norm, normalize in itertools.product(("none", "rms"), (False, True)):
        torch.manual_seed(0)
        expected = (
            pytest.warns(UserWarning, match="normalize=True changes nothing before norm='rms'")
            if normalize and norm == "rms"
            else contextlib.nullcontext()
        )
        with expected:
            mixer = GatedLinearAttention(
                DIM, 2, normalize=normalize, norm=norm, dtype=torch.float64, **options
            )
        outputs[norm, normalize] = mixer(x)[0]
    difference = {
        norm: (outputs[norm, True] - outputs[norm, False]).abs().max().item()
        for norm in ("none", "rms")
    }
    size = outputs["none", True].abs().max().item()
    assert difference["none"] > 0.1 * size
    assert difference["rms"] < 1e-3 * outputs["rms", True].abs().max().item()
