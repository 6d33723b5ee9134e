"""`tidegate.nn.HGRU` against its equations, and everything a torch.nn.Module should stand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.mixer_checks import check_values_and_gradients
from torch import Tensor

from tidegate.nn import HGRU

DIM = 6

ONE_WAY = {
    "default": {},
    "expand": {"expand": 2},
    "theta-fixed": {"theta": "fixed"},
    "theta-data": {"theta": "data"},
    "official": {"preset": "official"},
    "official-srms": {"preset": "official", "bias": False, "norm": "rms_no_weight"},
    "fla": {"preset": "fla"},
    "fla-expand": {"preset": "fla", "expand": 2},
    "real": {"complex": False},
    "real-official": {"complex": False, "preset": "official", "expand": 2},
    "no-output-gate": {"output_gate": False},
    "free-input": {"input_gate": "free"},
    "no-input-gate": {"input_gate": "none"},
    "bound": {"forget_gate": "bound"},
    "bound-free": {"forget_gate": "bound", "input_gate": "free"},
    "no-forget-gate": {"forget_gate": "none", "input_gate": "free"},
    "no-gates": {"forget_gate": "none", "input_gate": "none", "output_gate": False},
    "data-bound-none": {"theta": "data", "forget_gate": "bound", "input_gate": "none"},
    "real-free": {"complex": False, "input_gate": "free"},
    "real-bound": {"complex": False, "forget_gate": "bound"},
    "real-no-forget": {"complex": False, "forget_gate": "none", "input_gate": "free"},
    "real-no-input": {"complex": False, "input_gate": "none"},
    "naive": {"expansion": "naive", "expand": 2, "norm": "rms"},
    "lr": {"expansion": "lr", "expand": 4, "preset": "official"},
    "glti": {"expansion": "glti", "expand": 3, "output_gate": False},
    "krp-free": {"expansion": "krp", "expand": 2, "input_gate": "free", "preset": "fla"},
    "kp-bound": {"expansion": "kp", "expand": 2, "forget_gate": "bound"},
}
BOTH_WAYS = {
    "both": {"bidirectional": True},
    "both-fixed": {"bidirectional": True, "theta": "fixed"},
    "both-data": {"bidirectional": True, "theta": "data"},
    "both-real": {"bidirectional": True, "complex": False, "preset": "official"},
    "both-free": {"bidirectional": True, "input_gate": "free"},
    "both-bound": {"bidirectional": True, "forget_gate": "bound"},
    "both-glt": {"bidirectional": True, "expansion": "glt", "expand": 2},
}


def make(options: dict, seed: int = 0, dtype: torch.dtype = torch.float64) -> HGRU:
    """A mixer whose every number differs from its starting value."""
    torch.manual_seed(seed)
    mixer = HGRU(DIM, **options, dtype=dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return mixer


def make_gamma(mixer: HGRU) -> Tensor | None:
    if not mixer.takes_gamma:
        return None
    return torch.linspace(0.0, 0.95, mixer.channels, dtype=torch.float64)


def projections(mixer: HGRU, x: Tensor) -> dict[str, Tensor]:
    """c, f, g, i, theta as far as there are any: rows of in_proj by the order its documentation
    gives. (An expansion has a test of its own: test_nn_expansion.py.)"""
    s = mixer.channels
    sizes = [("c", 2 * s if mixer.complex else s)]
    sizes += [("f", s)] if mixer.forget_gate_mode == "data" else []
    sizes += [("g", 2 * s if mixer.complex else s)] if mixer.output_gate else []
    sizes += [("i", s)] if mixer.input_gate == "free" else []
    sizes += [("theta", s), ("theta back", s)] if mixer.theta_mode == "data" else []
    if mixer.expansion is not None:
        return dict(zip([name for name, _ in sizes], mixer.in_proj(x), strict=True))
    rows = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias)
    parts, at = {}, 0
    for name, size in sizes:
        parts[name] = rows[..., at : at + size]
        at += size
    return parts


def reference(mixer: HGRU, x: Tensor, gamma: Tensor | None, reverse: bool = False) -> Tensor:
    """[Re h, Im h] of one direction by the equations: a loop over time, complex arithmetic."""
    s, parts = mixer.channels, projections(mixer, x)
    gamma = torch.zeros(s, dtype=x.dtype) if gamma is None else gamma
    lam = {
        "data": lambda: gamma + (1 - gamma) / (1 + torch.exp(-parts["f"])),
        "bound": lambda: gamma.expand(*x.shape[:2], s),
        "none": lambda: torch.ones(*x.shape[:2], s, dtype=x.dtype),
    }[mixer.forget_gate_mode]()
    gate = {
        "tied": lambda: 1 - lam,
        "free": lambda: 1 / (1 + torch.exp(-parts["i"])),
        "none": lambda: torch.ones_like(lam),
    }[mixer.input_gate]()
    act = parts["c"] / (1 + torch.exp(-parts["c"]))
    if mixer.complex:
        act = torch.complex(act[..., :s], act[..., s:])
        if mixer.theta_mode == "data":
            theta = parts["theta back" if reverse else "theta"]
        else:
            theta = mixer.theta[int(reverse)] if mixer.bidirectional else mixer.theta
        lam = lam * torch.exp(1j * theta)
    h = torch.zeros(x.size(0), s, dtype=act.dtype)
    states = [h] * x.size(1)
    for t in reversed(range(x.size(1))) if reverse else range(x.size(1)):
        h = lam[:, t] * h + gate[:, t] * act[:, t]
        states[t] = h
    h = torch.stack(states, dim=1)
    return torch.cat([h.real, h.imag], dim=-1) if mixer.complex else h


def reference_output(mixer: HGRU, x: Tensor, gamma: Tensor | None) -> Tensor:
    """y by the equations."""
    h = reference(mixer, x, gamma)
    if mixer.bidirectional:
        h = h + reference(mixer, x, gamma, reverse=True)
    g = projections(mixer, x).get("g")
    expanded = mixer.expansion is not None
    if g is not None and (mixer.preset == "paper" or expanded):
        h = h / (1 + torch.exp(-g)) * (1 if mixer.preset == "paper" else g)
    if expanded:
        h = sum(h[..., i * DIM : (i + 1) * DIM] for i in range(mixer.expand))
    if isinstance(mixer.norm, torch.nn.LayerNorm):
        h = h - h.mean(-1, keepdim=True)
    h = h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if mixer.norm.weight is not None:
        h = h * mixer.norm.weight
    if getattr(mixer.norm, "bias", None) is not None:
        h = h + mixer.norm.bias
    if g is not None and mixer.preset != "paper" and not expanded:
        h = h * g / (1 + torch.exp(-g))
    return F.linear(h, mixer.out_proj.weight, mixer.out_proj.bias)


@pytest.mark.parametrize("options", [*ONE_WAY.values(), *BOTH_WAYS.values()], ids=str)
def test_equals_its_equations(options):
    mixer = make(options)
    gamma = make_gamma(mixer)
    x = torch.randn(2, 11, DIM, dtype=torch.float64, requires_grad=True)
    check_values_and_gradients(
        lambda: (mixer(x, gamma=gamma)[0],),
        lambda: (reference_output(mixer, x, gamma),),
        [x, *mixer.parameters()],
    )


@pytest.mark.parametrize("options", ONE_WAY.values(), ids=str)
def test_split_anywhere(options):
    """Prefill, more prefill from its state, then steps: all equal one forward."""
    mixer = make(options)
    gamma = make_gamma(mixer)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    with torch.no_grad():
        whole, final = mixer(x, gamma=gamma)
        for cut in (0, 1, 4, 8):
            head, state = mixer(x[:, :cut], mixer.init_state(3), gamma=gamma)
            middle, state = mixer(x[:, cut : cut + 1], state, gamma=gamma)
            tail = [mixer.step(x[:, t], state, gamma) for t in range(cut + 1, 9)]
            y = torch.cat([head, middle, *(row[:, None] for row in tail)], dim=1)
            torch.testing.assert_close(y, whole)
            torch.testing.assert_close(state, final)


@pytest.mark.parametrize("options", [*ONE_WAY.values(), *BOTH_WAYS.values()], ids=str)
def test_packed_equals_separate(options):
    mixer = make(options)
    gamma = make_gamma(mixer)
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    bounds = [0, 5, 5, 6, 12]
    with torch.no_grad():
        y, state = mixer(x, gamma=gamma, cu_seqlens=torch.tensor(bounds))
        for n in (0, 2, 3):
            rows = slice(bounds[n], bounds[n + 1])
            part, final = mixer(x[:, rows], gamma=gamma)
            torch.testing.assert_close(y[:, rows], part)
            if state is not None:
                torch.testing.assert_close(state[n : n + 1], final)
        if state is not None:
            assert not state[1].any(), "an empty sequence leaves an empty state"


@pytest.mark.parametrize("options", [{}, {"input_gate": "free"}, {"complex": False}], ids=str)
def test_gradient_through_state(options):
    mixer = make(options)
    x = torch.randn(2, 8, DIM, dtype=torch.float64, requires_grad=True)
    whole, _ = mixer(x)
    head, state = mixer(x[:, :3])
    tail, _ = mixer(x[:, 3:], state)
    (one,) = torch.autograd.grad(whole.pow(2).sum(), x)
    (two,) = torch.autograd.grad(head.pow(2).sum() + tail.pow(2).sum(), x)
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("options", [{}, {"theta": "data"}, {"preset": "fla"}], ids=str)
@pytest.mark.parametrize("length", [0, 1])
def test_short(options, length):
    mixer = make(options)
    state = torch.randn(2, mixer.state_size, dtype=torch.float64)
    y, final = mixer(torch.randn(2, length, DIM, dtype=torch.float64), state)
    assert y.shape == (2, length, DIM)
    assert final.shape == state.shape
    if length == 0:
        torch.testing.assert_close(final, state)


ERRORS = [
    ({"theta": "learned", "complex": False}, r"HGRU: theta: expected none with complex=False"),
    ({"theta": "data", "preset": "fla"}, r"HGRU: theta: expected none with complex=False"),
    ({"theta": "rope"}, r"HGRU: theta: expected one of 'learned', 'fixed', 'data'; got 'rope'"),
    ({"input_gate": "open"}, r"HGRU: input_gate: expected one of 'tied', 'free', 'none'; got"),
    ({"forget_gate": "open"}, r"HGRU: forget_gate: expected one of 'data', 'bound', 'none'"),
    ({"forget_gate": "none"}, r"HGRU: input_gate: expected 'free' or 'none' with forget_gate="),
    ({"preset": "mine"}, r"HGRU: preset: expected one of 'paper', 'official', 'fla'; got 'mine'"),
    ({"expansion": "cp"}, r"HGRU: expansion: expected one of None, 'naive', .* 'kp'; got 'cp'"),
    ({"expansion": "lr", "rank": 0}, r"HGRU: rank: expected a positive integer; got 0"),
    ({"rank": 4}, r"HGRU: rank: expected none unless expansion='lr', which alone has one; got 4"),
    ({"expansion": "kp", "complex": True}, r"HGRU: complex: expected False with an expansion"),
    (
        {"expansion": "glt", "expand": 4},
        r"HGRU: expand: expected a divisor of dim=6 with expansion='glt'; got 4",
    ),
    ({"expand": 0}, r"HGRU: expand: expected a positive integer; got 0"),
    ({"expand": 1.5}, r"HGRU: expand: expected a positive integer; got 1.5"),
    ({"norm": "batch"}, r"HGRU: norm: expected one of 'layer', 'rms', 'rms_no_weight'"),
    ({"norm_eps": float("nan")}, r"^HGRU: norm_eps: expected 0 or more; got nan"),
    ({"norm_eps": -1.0}, r"^HGRU: norm_eps: expected 0 or more; got -1$"),
    ({"norm_eps": None}, r"^HGRU: norm_eps: expected 0 or more; got None"),
    ({"complex": "yes"}, r"HGRU: complex: expected True or False; got 'yes'"),
    ({"output_gate": "no"}, r"HGRU: output_gate: expected True or False; got 'no'"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=lambda v: str(v)[:40])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HGRU(DIM, **options)


def test_bad_arguments():
    mixer, both = HGRU(DIM), HGRU(DIM, bidirectional=True)
    x, state = torch.zeros(2, 3, DIM), mixer.init_state(2)
    bound = HGRU(DIM, forget_gate="bound")
    ungated = HGRU(DIM, forget_gate="none", input_gate="free")
    calls = {
        r"HGRU: x: expected \[B, T, dim=6\]; got \(2, 3, 5\)": lambda: mixer(x[..., :5]),
        r"HGRU: x: expected \[B, T, dim=6\]; got \(3, 6\)": lambda: mixer(x[0]),
        r"HGRU.step: x: expected \[B, dim=6\]; got \(2, 3, 6\)": lambda: mixer.step(x, state),
        r"HGRU: state: expected \[2, 12\]; got \(2, 6\)": lambda: mixer(x, state[:, :6]),
        r"HGRU: gamma: expected \[expand\*dim=6\]; got \(12,\)": lambda: mixer(
            x, gamma=torch.zeros(12)
        ),
        r"HGRU: gamma: expected the lower bound": lambda: bound(x),
        r"HGRU: gamma: expected None with forget_gate='none'": lambda: ungated(
            x, gamma=torch.zeros(DIM)
        ),
        r"HGRU: a state: a bidirectional HGRU reads the whole": lambda: both(x, state),
        r"HGRU: step\(\): a bidirectional": lambda: both.step(x[:, 0], state),
        r"HGRU: init_state\(\): a bidirectional": lambda: both.init_state(2),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_step_has_no_gradient():
    mixer = HGRU(DIM)
    with pytest.raises(RuntimeError, match="HGRU.step: a step has no gradient"):
        mixer.step(torch.zeros(2, DIM), mixer.init_state(2))


@pytest.mark.parametrize(
    "options", [{}, {"theta": "fixed", "expand": 2}, {"theta": "data"}], ids=str
)
def test_theta_starts_as_rope(options):
    mixer = HGRU(DIM, **options)
    s = mixer.channels
    theta = mixer.in_proj.bias[-s:] if mixer.theta_mode == "data" else mixer.theta
    wanted = 10000.0 ** (-2 * torch.arange(s, dtype=torch.float64) / s)
    torch.testing.assert_close(theta.detach(), wanted.float())
    assert isinstance(mixer.theta, torch.nn.Parameter) == (mixer.theta_mode == "learned")


def tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("options", [*ONE_WAY.values(), *BOTH_WAYS.values()], ids=str)
def test_seeded_reset(options):
    """Constructing, resetting, and to_empty with a reset draw the same numbers."""
    torch.manual_seed(7)
    built = HGRU(DIM, **options)
    other = make(options, seed=3, dtype=torch.float32)
    empty = HGRU(DIM, **options, device="meta").to_empty(device="cpu")
    for mixer in (other, empty):
        torch.manual_seed(7)
        mixer.reset_parameters()
        for name, t in tensors(mixer).items():
            assert torch.equal(t, tensors(built)[name]), name


def test_meta_draws_nothing():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    mixer = HGRU(DIM, device="meta")
    mixer.reset_parameters()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"theta": "fixed"}, {"preset": "fla"}], ids=str)
def test_copies(options):
    mixer = make(options)
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    loaded = HGRU(DIM, **options, dtype=torch.float64)
    loaded.load_state_dict(mixer.state_dict())
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), loaded):
        assert torch.equal(other(x)[0], mixer(x)[0])
        assert list(other.state_dict()) == list(mixer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", ["learned", "fixed"])
def test_half_keeps_theta(dtype, theta):
    mixer = make({"theta": theta}, dtype=torch.float32)
    before = mixer.theta.detach().clone()
    half = copy.deepcopy(mixer).to(dtype)
    assert half.theta.dtype == torch.float32
    assert torch.equal(half.theta, before)
    assert half.in_proj.weight.dtype == dtype
    x = torch.randn(2, 50, DIM)
    y, state = half(x.to(dtype))
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    torch.testing.assert_close(y.float(), mixer(x)[0], rtol=0.05, atol=0.1)
    half.double()
    assert half.theta.dtype == torch.float64
    made = HGRU(DIM, theta=theta, dtype=dtype)
    assert made.theta.dtype == torch.float32
    assert made.init_state(1).dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"preset": "fla"}, {"input_gate": "free"}], ids=str)
def test_autocast(options):
    mixer = make(options, dtype=torch.float32)
    x = torch.randn(2, 5, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
    assert state.dtype == torch.float32
    torch.testing.assert_close(y.float(), mixer(x)[0], rtol=0.05, atol=0.1)
    y.float().sum().backward()


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "inductor"), ({"theta": "data", "input_gate": "free"}, "aot_eager")],
    ids=str,
)
def test_compile(options, backend):
    mixer = make(options, dtype=torch.float32)
    gamma = make_gamma(mixer).float()
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 8):
        x = torch.randn(2, length, DIM, requires_grad=True)
        y, state = mixer(x, gamma=gamma)
        z, other = compiled(x, gamma=gamma)
        torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, state, rtol=1e-4, atol=1e-5)
        (one,) = torch.autograd.grad(y.sum(), x)
        (two,) = torch.autograd.grad(z.sum(), x)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*ONE_WAY.values(), *BOTH_WAYS.values()], ids=str)
def test_cuda_equals_cpu(options, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    mixer = make(options, dtype=torch.float32)
    gamma = make_gamma(mixer)
    gamma = None if gamma is None else gamma.float()
    x = torch.randn(2, 33, DIM)
    wanted, _ = mixer(x, gamma=gamma)
    there = copy.deepcopy(mixer).to(device)
    y, _ = there(x.to(device), gamma=None if gamma is None else gamma.to(device))
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-4)


def test_an_open_gate_with_a_bound_is_one_exactly() -> None:
    """The composed forms too: a rounding below one would be repeated every step."""
    mixer = HGRU(7, complex=False, input_gate="free")
    f = torch.full((1, 1, 7), 40.0)
    gamma = torch.tensor([0.1, 0.3, 0.7, 0.9, 0.99, 1 / 3, 0.77])
    decay, _ = mixer._gates({"f": f, "i": f}, gamma)
    assert torch.equal(decay, torch.ones_like(decay))
