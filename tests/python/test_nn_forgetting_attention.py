"""`tidegate.nn.ForgettingAttention` against its equations, its ablations, ALiBi, and its pruning.

What it shares with Attention is in test_nn_softmax_attention.py.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from support.attention_mixers import FORGETTING, check_against
from support.attention_mixers import FORGETTING_DIM as DIM
from support.attention_mixers import FORGETTING_HEADS as HEADS
from support.attention_mixers import forgetting as make
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from tidegate.models import CausalLM, LMConfig
from tidegate.nn import Attention, ForgettingAttention

pytestmark = pytest.mark.usefixtures("one_thread")


by_options = pytest.mark.parametrize("options", FORGETTING.values(), ids=FORGETTING)


def by_equation_11(mixer: ForgettingAttention, x: Tensor, gamma: Tensor | None = None) -> Tensor:
    """What the module computes of one ``[T, dim]``, its attention written out over F_ij."""
    plain = Attention(
        mixer.dim,
        mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        qk_norm=mixer.qk_norm,
        qk_norm_shared=mixer.qk_norm_shared,
        output_gate=mixer.output_gate,
        output_activation=mixer.output_activation,
        output_norm=mixer.output_norm_on,
        kv_shift=mixer.kv_shift,
        rope=mixer.rope,
        dtype=x.dtype,
    )
    own = dict(mixer.named_parameters())
    logits = x.new_zeros(x.size(0), mixer.num_heads)
    if mixer.gate == "data":
        logits = F.linear(x, own["gate_proj.weight"]) + own["gate_bias"]
    elif mixer.gate != "none":
        logits = mixer.gate_bias.expand(x.size(0), -1)
    f = torch.ones_like(logits) if mixer.gate == "none" else torch.sigmoid(logits)
    if gamma is not None:
        f = gamma + (1 - gamma) * f

    def attend(q: Tensor, k: Tensor, v: Tensor, _log_f: None, _bounds: None) -> Tensor:
        repeat = mixer.num_heads // mixer.num_kv_heads
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        out = torch.zeros_like(q)
        for h in range(mixer.num_heads):
            for i in range(x.size(0)):
                first = 0 if mixer.window is None else max(0, i - mixer.window + 1)
                faded = [f[j + 1 : i + 1, h].prod() for j in range(first, i + 1)]
                scores = k[0, first : i + 1, h] @ q[0, i, h] / math.sqrt(mixer.head_dim)
                weights = torch.stack(faded) * scores.exp()
                out[0, i, h] = weights @ v[0, first : i + 1, h] / weights.sum()
        return out

    plain._attend = attend
    for name, child in mixer.named_children():
        if name != "gate_proj":
            setattr(plain, name, child)
    return plain(x[None])[0][0]


@by_options
def test_equals_its_equations(options):
    check_against(make(options), by_equation_11)


# The rows of FoT's Table 3: what is on, and the parameters that come with it.
TABLE_3 = [
    ({"gate": "none"}, set()),
    ({"gate": "none", "rope": 5e5}, set()),
    ({"rope": 5e5}, {"gate"}),
    ({}, {"gate"}),
    ({"qk_norm": True}, {"gate", "qk_norm"}),
    ({"qk_norm": True, "output_gate": True}, {"gate", "qk_norm", "output_gate"}),
    (
        {"qk_norm": True, "output_gate": True, "output_norm": True},
        {"gate", "qk_norm", "output_gate", "output_norm"},
    ),
    ({"preset": "pro"}, {"gate", "qk_norm", "output_gate", "output_norm", "kv_shift"}),
    (
        {"preset": "pro", "qk_norm": False},
        {"gate", "output_gate", "output_norm", "kv_shift"},
    ),
    ({"preset": "pro", "output_gate": False}, {"gate", "qk_norm", "output_norm", "kv_shift"}),
    ({"preset": "pro", "output_norm": False}, {"gate", "qk_norm", "output_gate", "kv_shift"}),
    ({"preset": "pro", "kv_shift": False}, {"gate", "qk_norm", "output_gate", "output_norm"}),
    (
        {"preset": "pro", "rope": 5e5},
        {"gate", "qk_norm", "output_gate", "output_norm", "kv_shift"},
    ),
    (
        {"preset": "pro", "gate": "none", "rope": 5e5},
        {"qk_norm", "output_gate", "output_norm", "kv_shift"},
    ),
    ({"preset": "pro", "gate": "none"}, {"qk_norm", "output_gate", "output_norm", "kv_shift"}),
]


@pytest.mark.parametrize(
    ("options", "parts"), [pytest.param(*row, id=str(row[0])) for row in TABLE_3]
)
def test_the_rows_of_table_3(options, parts):
    mixer = make(options)
    shapes = {name: tuple(p.shape) for name, p in mixer.named_parameters()}
    size = DIM // HEADS
    wanted = {"in_proj.weight": ((3 + ("output_gate" in parts)) * DIM, DIM)}
    wanted["out_proj.weight"] = (DIM, DIM)
    if "gate" in parts:
        wanted |= {"gate_proj.weight": (HEADS, DIM), "gate_bias": (HEADS,)}
    if "qk_norm" in parts:
        wanted |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    if "output_norm" in parts:
        wanted["output_norm.weight"] = (DIM,)
    if "kv_shift" in parts:
        wanted["shift_proj.weight"] = (2 * HEADS, DIM)
    assert shapes == wanted
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0][0], by_equation_11(mixer, x[0]))


@pytest.mark.parametrize("preset", ["llama", "pro"])
def test_without_a_gate_it_is_attention(preset):
    mixer = make({"preset": preset, "gate": "none", "rope": 1e4})
    plain = Attention(DIM, HEADS, preset=preset, rope=1e4, dtype=torch.float64)
    plain.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 33, DIM, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], plain(x)[0])


def test_fixed_gates_of_eight_heads_are_alibi():
    """Section 4.5: long initialisation with (2, 256) gives slopes 2^-1 to 2^-8."""
    torch.manual_seed(0)
    dim, heads, time = 128, 8, 50
    mixer = ForgettingAttention(
        dim, heads, gate="fixed", gate_init=("long", 2, 256), dtype=torch.float64
    )
    assert [n for n, _ in mixer.named_buffers()] == ["gate_bias"]
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
    x = torch.randn(2, time, dim, dtype=torch.float64)
    # The biases are drawn in fp32.
    torch.testing.assert_close(mixer.log_gate(x)[0, 0], -slopes, rtol=2e-6, atol=0.0)
    q, k, v = F.linear(x, mixer.in_proj.weight).unflatten(-1, (3, heads, -1)).unbind(2)
    back = torch.arange(time)[:, None] - torch.arange(time)
    bias = (-slopes[:, None, None] * back).masked_fill(back < 0, -torch.inf)
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=bias)
    wanted = mixer.out_proj(o.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_long_initialisation_spreads_the_times(heads):
    mixer = ForgettingAttention(12 * heads, heads, gate="independent", gate_init=("long", 2, 64))
    times = -1 / F.logsigmoid(mixer.gate_bias.detach().double())
    part = torch.arange(heads, dtype=torch.float64) / max(heads - 1, 1)
    torch.testing.assert_close(times, 2 * 32.0**part, rtol=1e-5, atol=0.0)


def test_a_half_module_keeps_its_gates_biases():
    mixer = make({"gate_init": "long:2:4096"}, torch.float32)
    bias = mixer.gate_bias.detach().clone()
    mixer.bfloat16()
    assert mixer.gate_bias.dtype == torch.float32
    assert torch.equal(mixer.gate_bias, bias)
    y, state = mixer(torch.randn(1, 5, DIM).bfloat16(), mixer.init_state(1))
    assert y.dtype == state.k.dtype == torch.bfloat16
    assert state.gates.dtype == torch.float32


@torch.no_grad()
def test_pruning_changes_little_and_drops_what_is_unreachable():
    """With strong gates a pruned state of fixed size takes any number of tokens."""
    options = {"preset": "pro", "prune": 1e-6, "drop_pruned": True}
    mixer = make(options)
    for norm in (mixer.q_norm, mixer.k_norm):
        norm.weight.clamp_(-0.5, 0.5)
    mixer.gate_bias.fill_(-2.0)
    exact = copy.deepcopy(mixer)
    exact.prune, exact.drop_pruned = None, False
    x = torch.randn(2, 300, DIM, dtype=torch.float64)
    whole, _ = exact(x)
    torch.testing.assert_close(mixer(x)[0], whole, rtol=0.0, atol=1e-4)
    state = mixer.init_state(2, capacity=64)
    held = []
    for t in range(300):
        y = mixer.step(x[:, t], state)
        held.append(int(state.lengths.max()))
        torch.testing.assert_close(y, whole[:, t], rtol=0.0, atol=1e-4)
    assert max(held) <= 64
    assert state.seen.tolist() == [300, 300]
    state = mixer.init_state(2, capacity=64)
    for t in range(0, 300, 30):
        y, state = mixer(x[:, t : t + 30], state)
        torch.testing.assert_close(y, whole[:, t : t + 30], rtol=0.0, atol=1e-4)
    assert state.capacity == 64


@torch.no_grad()
def test_a_pruned_step_reads_what_can_be_seen():
    """QK-norm bounds the keys of a state, so that a step leaves out old ones without reading them;
    without it every key is read."""
    options = {"num_heads": 4, "prune": 1e-6}
    x = torch.randn(2, 300, DIM, dtype=torch.float64)
    for more, is_read in (({"preset": "pro"}, False), ({"preset": "llama"}, True)):
        mixer = make(options | more)
        mixer.gate_bias.fill_(-2.0)
        _, state = mixer(x, mixer.init_state(2, capacity=301))
        last = torch.randn(2, DIM, dtype=torch.float64)
        kept, hidden = copy.deepcopy(state), copy.deepcopy(state)
        hidden.k[:, :200] = torch.nan
        y, found = (mixer.step(last, s) for s in (kept, hidden))
        assert found.isnan().any() == is_read
        if not is_read:
            torch.testing.assert_close(found, y, rtol=0.0, atol=0.0)
            mixer.prune = None
            torch.testing.assert_close(mixer.step(last, copy.deepcopy(state)), y, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_step_prunes_only_by_norms_that_bound_their_rows(request):
    """Another norm in place of the one that was built, or a hook on it, may make keys of any
    length: then every key is read, as without pruning."""

    def edited(edit):
        mixer = make({"num_heads": 4, "preset": "pro", "prune": 1e-3})
        mixer.gate_bias.fill_(-0.5)
        edit(mixer)
        return mixer

    def with_layer_norm(mixer):
        mixer.k_norm = torch.nn.LayerNorm(mixer.head_dim, dtype=torch.float64)
        mixer.k_norm.bias.normal_(0.0, 40.0)

    def with_identity(mixer):
        mixer.k_norm = torch.nn.Identity()

    def with_hook(mixer):
        mixer.k_norm.register_forward_hook(lambda module, inputs, output: 30 * output)

    def with_hook_of_all_modules(mixer):
        def lengthen(module, inputs, output):
            return 30 * output if module is mixer.k_norm else None

        request.addfinalizer(register_module_forward_hook(lengthen).remove)

    x = torch.randn(1, 301, DIM, dtype=torch.float64)
    for edit in (with_layer_norm, with_identity, with_hook, with_hook_of_all_modules):
        mixer = edited(edit)
        _, state = mixer(x[:, :300], mixer.init_state(1, capacity=301))
        other = copy.deepcopy(state)
        y = mixer.step(x[:, 300], state)
        mixer.prune = None
        torch.testing.assert_close(y, mixer.step(x[:, 300], other), rtol=0.0, atol=0.0)


@torch.no_grad()
def test_a_pruned_step_over_a_state_of_another_type():
    mixer = make({"preset": "pro", "prune": 1e-3})
    state = mixer.init_state(1, capacity=4, dtype=torch.float32)
    assert mixer.step(torch.randn(1, DIM, dtype=torch.float64), state).isfinite().all()


@torch.no_grad()
def test_a_token_that_may_be_seen_is_never_dropped():
    """With open gates nothing is unreachable, and a fixed state fills."""
    mixer = make({"preset": "pro", "prune": 1e-6, "drop_pruned": True})
    mixer.gate_bias.fill_(12.0)
    state = mixer.init_state(1, capacity=3)
    x = torch.randn(1, DIM, dtype=torch.float64)
    for _ in range(3):
        mixer.step(x, state)
    with pytest.raises(ValueError, match=r"ForgettingAttention: state: expected room for 4 tokens"):
        mixer.step(x, state)


def test_bad_options():
    calls = {
        r"gate: expected one of 'data', 'independent', 'fixed', 'none'; got 'open'": {
            "gate": "open"
        },
        r"gate_init: expected 'zero', 'long:T_min:T_max' .*; got 'long:0:4'": {
            "gate_init": ("long", 0, 4)
        },
        r"gate_init: expected 'zero' with gate='none'": {"gate": "none", "gate_init": "long:2:4"},
        r"prune: expected a number between 0 and 1; got 1": {"prune": 1.0},
        r"prune: expected a number between 0 and 1; got '1e-4'": {"prune": "1e-4"},
        r"drop_pruned: expected False without prune and qk_norm": {
            "drop_pruned": True,
            "prune": 1e-3,
        },
        r"num_kv_heads: expected a divisor of num_heads=4; got 3": {
            "num_heads": 4,
            "num_kv_heads": 3,
        },
        r"window: expected a positive integer; got 0": {"window": 0},
    }
    for message, options in calls.items():
        with pytest.raises(ValueError, match=f"ForgettingAttention: {message}"):
            make(options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("preset", ["llama", "pro"])
def test_training_compiles_whole(preset, packed):
    """One graph for every length, packed or not."""
    mixer = make({"preset": preset, "rope": 100.0})
    torch._dynamo.reset()
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=True)
    for time in (9, 14):
        x = torch.randn(1, time, DIM, dtype=torch.float64)
        bounds = {"cu_seqlens": torch.tensor([0, 4, 4, time])} if packed else {}
        torch.testing.assert_close(compiled(x, **bounds)[0], mixer(x, **bounds)[0])


@pytest.mark.parametrize("mixer", ["fox", "fox-pro", "transformer-pro"])
@torch.no_grad()
def test_generation_is_what_the_parallel_forward_says(mixer):
    """Greedy tokens of prompts of unequal lengths, each the likeliest of the whole row so far."""
    torch.manual_seed(0)
    config = LMConfig(
        mixer=mixer, vocab_size=17, dim=DIM, layers=2, mixer_options={"num_heads": HEADS}
    )
    model = CausalLM(config, dtype=torch.float64)
    ids, lengths = torch.randint(0, 17, (3, 6)), torch.tensor([6, 2, 4])
    out = model.generate(ids, 8, temperature=0.0, lengths=lengths)
    for row, n in zip(out, lengths.tolist(), strict=True):
        logits = model(row[None, : n + 8]).logits[0]
        assert torch.equal(logits[n - 1 : n + 7].argmax(-1), row[n : n + 8])


def test_a_model_learns():
    torch.manual_seed(0)
    config = LMConfig(mixer="fox-pro", vocab_size=11, dim=DIM, layers=1, init_std=0.2)
    model = CausalLM(config.replace(mixer_options={"num_heads": HEADS}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 11, (4, 20))
    losses = []
    for _ in range(60):
        loss = model(ids, "next").loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
