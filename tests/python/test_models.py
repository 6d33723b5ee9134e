"""`tidegate.models`: configuration, CausalLM, generation. (Classifiers: test_models_classifiers.py,
files: test_models_files.py.)"""

from __future__ import annotations

import copy
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tidegate
from tidegate.models import (
    Block,
    CausalLM,
    ImageClassifier,
    LMConfig,
    SequenceClassifier,
    mixers,
    presets,
)
from tidegate.nn import GatedLinearRNN
from tidegate.nn._common import with_memory

SMALL = LMConfig(mixer="hgrn", vocab_size=11, dim=8, layers=3, glu_hidden=12)
VARIANTS = {
    "complex": SMALL,
    "real": SMALL.replace(mixer_options={"complex": False, "expand": 2}, lower_bound="decreasing"),
    "fla": SMALL.replace(mixer_options={"preset": "fla"}, norm="rms", tied=False),
    "no-bounds": SMALL.replace(lower_bound="none", final_norm="rms_no_weight"),
    "bound": SMALL.replace(mixer_options={"forget_gate": "bound"}),
    "no-forget": SMALL.replace(mixer_options={"forget_gate": "none", "input_gate": "free"}),
    "theta-data": SMALL.replace(mixer_options={"theta": "data"}, lower_bound="independent"),
    "expanded": SMALL.replace(mixer_options={"expansion": "krp", "expand": 2}),
    "hgrn2": SMALL.replace(mixer="hgrn2", mixer_options={"num_heads": 2}),
    "hgrn2-fla": SMALL.replace(
        mixer="hgrn2", mixer_options={"preset": "fla"}, norm="rms", tied=False, lower_bound="none"
    ),
    "gla": SMALL.replace(mixer="gla", mixer_options={"num_heads": 2}),
    "lru": SMALL.replace(mixer="lru", mixer_options={"skip": True}),
    "lru-gate": SMALL.replace(mixer="lru", mixer_options={"gate": "data"}, tied=False),
    "slru": SMALL.replace(mixer="slru"),
    "gla-bounded": SMALL.replace(
        mixer="gla", mixer_options={"num_heads": 2, "lower_bound": True}, lower_bound="independent"
    ),
    "fox-bounded": SMALL.replace(mixer="fox", mixer_options={"num_heads": 2, "lower_bound": True}),
    "lru-bounded": SMALL.replace(mixer="lru", mixer_options={"gate": "data", "lower_bound": True}),
    "transformer": SMALL.replace(mixer="transformer", mixer_options={"num_heads": 2}, norm="rms"),
    "gla-normal": SMALL.replace(
        mixer="gla",
        mixer_options={"gate": "scalar", "normalize": True, "feature_map": "elu+1"},
    ),
    "layers": SMALL.replace(
        mixer=["gated-linear-rnn", "hgrn", "hgrn"],
        layer_options=[{"gate_init": "ugi"}, {"complex": False}],
    ),
}


def make(config: LMConfig, cls=CausalLM, seed: int = 0, dtype: torch.dtype = torch.float64):
    torch.manual_seed(seed)
    model = cls(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (3, 10))


# Configuration


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_json_round_trip(config):
    assert LMConfig.from_json(config.to_json()) == config
    assert LMConfig.from_dict(json.loads(config.to_json())) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"widht": 3}, "LMConfig: unknown key 'widht'; known: mixer, vocab_size, dim"),
        ({"mixer": "lstm"}, "mixer: 'lstm' is unknown; available: hgrn, hgrn2"),
        (
            {"mixer": "hgrn2", "mixer_options": {"theta": "data"}},
            "mixer 'hgrn2' has no option 'theta'; it has num_heads, expand_ratio",
        ),
        ({"dim": 0}, "LMConfig: dim: expected a positive integer; got 0"),
        ({"layers": 2.0}, "LMConfig: layers: expected a positive integer; got 2.0"),
        ({"vocab_size": -1}, "LMConfig: vocab_size: expected a positive integer; got -1"),
        ({"norm": "batch"}, "LMConfig: norm: expected one of 'layer'"),
        ({"final_norm": "x"}, "LMConfig: final_norm: expected one of None, 'layer'"),
        ({"lower_bound": "up"}, "LMConfig: lower_bound: expected one of 'cumulative'"),
        ({"glu_activation": "relu"}, "LMConfig: glu_activation: expected one of 'silu', 'none'"),
        ({"dropout": 1.0}, "LMConfig: dropout: expected 0 <= p < 1; got 1.0"),
        ({"norm_eps": 0}, "LMConfig: norm_eps: expected a positive number; got 0"),
        ({"tied": "yes"}, "LMConfig: tied: expected True or False; got 'yes'"),
        ({"mixer_options": []}, "LMConfig: mixer_options: expected a dictionary; got a list"),
        (
            {"mixer": "hgrn", "mixer_options": {"heads": 2}},
            "mixer 'hgrn' has no option 'heads'; it has complex, theta",
        ),
        ([1], "LMConfig: JSON: expected an object; got a list"),
        (
            {"mixer": ["hgrn", "hgrn"]},
            "mixer: expected a name, or a list of one for each of the 4 layers; got 2 names",
        ),
        ({"mixer": 3}, "LMConfig: mixer: expected a name, or a list of names; got 3"),
        ({"mixer": ["hgrn", "hgrn", "hgrn", "lstm"]}, "mixer: 'lstm' is unknown"),
        (
            {"mixer": "hgrn", "layer_options": [{}] * 5},
            "layer_options: expected a list of at most 4 dictionaries, one a layer; got",
        ),
        (
            {"mixer": "hgrn", "layer_options": {"expand": 2}},
            "layer_options: expected a list of dictionaries; got a dictionary",
        ),
        (
            {"mixer": "hgrn", "layer_options": [{}, {"heads": 2}]},
            "mixer 'hgrn' has no option 'heads'",
        ),
    ],
    ids=str,
)
def test_bad_config(values, message):
    with pytest.raises(ValueError, match=message):
        LMConfig.from_dict(values)


def test_bad_json():
    with pytest.raises(ValueError, match="LMConfig: not valid JSON"):
        LMConfig.from_json("{")


def test_layers_may_differ():
    config = VARIANTS["layers"].replace(mixer_options={})
    model = make(config)
    first, second, third = (block.mixer for block in model.blocks)
    assert isinstance(first, GatedLinearRNN)
    assert (first.gate_init, second.complex, third.complex) == ("ugi", False, True)
    gammas = model.gammas()
    assert gammas[0] is None
    assert gammas[2].shape == (8,)
    assert config.of_layer(1).mixer_options == {"complex": False}
    over = SMALL.replace(mixer_options={"complex": False}, layer_options=[{"complex": True}])
    assert over.of_layer(0).mixer_options == {"complex": True}
    assert over.of_layer(2).mixer_options == {"complex": False}
    copy = config.replace()
    copy.layer_options[0]["gate_init"] = "standard"
    assert config.layer_options[0]["gate_init"] == "ugi"


def test_registry():
    assert list(mixers()) == [
        "hgrn",
        "hgrn2",
        "gla",
        "lru",
        "slru",
        "rwkv4",
        "gated-linear-rnn",
        "gated-rnn",
        "fox",
        "fox-pro",
        "transformer",
        "transformer-pro",
    ]
    assert LMConfig().mixer == "hgrn2"
    assert CausalLM(LMConfig(), device="meta").blocks[0].mixer.num_heads == 2


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (CausalLM, {"mixer_options": {"bidirectional": True}}, "expected bidirectional=False"),
        (CausalLM, {"vocab_size": None}, "CausalLM: vocab_size"),
        (CausalLM, {"mixer_options": {"forget_gate": "none"}}, "HGRU: input_gate: expected"),
        (
            CausalLM,
            {"mixer_options": {"forget_gate": "bound"}, "lower_bound": "none"},
            "LMConfig: lower_bound: expected 'cumulative'",
        ),
        (
            CausalLM,
            {"layer_options": [{}, {"expand": 2}]},
            "lower_bound: expected 'none', or mixers whose bounds have one width; got widths 8, 16",
        ),
        (CausalLM, {"layer_options": [{}, {"bidirectional": True}]}, "expected bidirectional=Fals"),
        (
            CausalLM,
            {"lower_bound": "none", "layer_options": [{}, {"forget_gate": "bound"}]},
            "LMConfig: lower_bound: expected 'cumulative'",
        ),
        (Block, {"layer_options": [{}]}, "Block: config: expected one layer's.*of layer_options"),
        (Block, {"mixer": ["hgrn"] * 3}, "Block: config: expected one layer's.*list of mixers"),
        (SequenceClassifier, {}, "SequenceClassifier: num_classes"),
        (SequenceClassifier, {"num_classes": 2, "vocab_size": None}, "Classifier: vocab_size"),
        (ImageClassifier, {}, "ImageClassifier: num_classes"),
        (ImageClassifier, {"num_classes": 2}, "ImageClassifier: patch_size"),
    ],
)
def test_bad_models(cls, changes, message):
    with pytest.raises(ValueError, match=message):
        cls(SMALL.replace(**changes), device="meta")


# CausalLM: loss


def test_forward_by_hand(ids):
    """The whole model from its parts' public behaviour."""
    model = make(SMALL)
    x = model.embedding.weight[ids] * math.sqrt(8)
    gammas = model.lower_bounds()
    for k, block in enumerate(model.blocks):
        x = x + block.mixer(block.mixer_norm(x), gamma=gammas[k])[0]
        x = x + block.glu(block.glu_norm(x))
    logits = model.norm(x) @ model.embedding.weight.T
    torch.testing.assert_close(model(ids).logits, logits)
    untied = make(SMALL.replace(tied=False))
    assert untied.head.weight.shape == (11, 8)
    assert untied.scale == 1.0


def test_labels(ids):
    model = make(SMALL)
    logits = model(ids).logits
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, "next").loss, wanted)
    aligned = torch.full_like(ids, -100)
    aligned[:, 4] = ids[:, 0]
    wanted = F.cross_entropy(logits[:, 4], ids[:, 0])
    torch.testing.assert_close(model(ids, aligned).loss, wanted)
    assert model(ids, torch.full_like(ids, -100)).loss == 0
    assert model(ids).loss is None
    with pytest.raises(ValueError, match=r"labels: expected the shape of ids, \(3, 10\)"):
        model(ids, ids[:, 1:])
    with pytest.raises(ValueError, match="labels: expected a tensor or 'next'; got 'prev'"):
        model(ids, "prev")
    with pytest.raises(ValueError, match="ids: expected int32 or int64"):
        model(ids.float())


def test_next_labels_do_not_cross_sequences(ids):
    model = make(SMALL)
    row = ids.view(1, -1)
    bounds = [0, 0, 1, 14, 14, 30]
    out = model(row, "next", cu_seqlens=torch.tensor(bounds), return_logits=True)
    losses = []
    for start, end in ((1, 14), (14, 30)):
        part = row[:, start:end]
        logits = model(part).logits
        torch.testing.assert_close(out.logits[:, start:end], logits)
        losses.append(F.cross_entropy(logits[0, :-1], part[0, 1:], reduction="sum"))
    torch.testing.assert_close(out.loss, sum(losses) / (12 + 15))


def test_gradients_reach_every_parameter(ids):
    for name, config in VARIANTS.items():
        model = make(config)
        model(ids, "next").loss.backward()
        for key, p in model.named_parameters():
            assert p.grad is not None, (name, key)
            assert p.grad.isfinite().all(), (name, key)


def test_dropout(ids):
    model = make(SMALL.replace(dropout=0.5))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_at_some_positions(config, ids):
    model = make(config)
    positions = torch.tensor([[0, 9], [3, 3], [5, 2]])
    wanted = model(ids).logits.gather(1, positions[..., None].expand(-1, -1, 11))
    torch.testing.assert_close(model.logits_at(ids, positions), wanted)
    with pytest.raises(
        ValueError, match=r"logits_at: positions: expected \[B=3, P\]; got \(2, 2\)"
    ):
        model.logits_at(ids, positions[:2])


# CausalLM: state and generation


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_split_anywhere(config, ids):
    model = make(config)
    with torch.no_grad():
        whole = model(ids, state=model.init_state(3, capacity=10))
        for cut in (0, 1, 5):
            head = model(ids[:, :cut], state=model.init_state(3, capacity=10))
            middle = model(ids[:, cut : cut + 2], state=head.state)
            steps = [model.step(ids[:, t], middle.state) for t in range(cut + 2, 10)]
            logits = torch.cat([head.logits, middle.logits, torch.stack(steps, 1)], 1)
            torch.testing.assert_close(logits, whole.logits)
            torch.testing.assert_close(middle.state, whole.state)
        torch.testing.assert_close(model(ids).logits, whole.logits)
    with pytest.raises(ValueError, match="CausalLM: state: expected one state for each of the 3"):
        model(ids, state=whole.state[:2])


def greedy(model: CausalLM, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Generation by whole forwards only."""
    for _ in range(count):
        token = model(prompt[None]).logits[0, -1].argmax()
        prompt = torch.cat([prompt, token[None]])
    return prompt


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_greedy_generation(config, ids):
    model = make(config)
    wanted = torch.stack([greedy(model, row, 6) for row in ids])
    assert torch.equal(model.generate(ids, 6, temperature=0.0), wanted)
    lengths = torch.tensor([4, 10, 1])
    out = model.generate(ids, 6, temperature=0.0, lengths=lengths)
    assert out.shape == (3, 16)
    for row, prompt, n in zip(out, ids, lengths.tolist(), strict=True):
        assert torch.equal(row[: n + 6], greedy(model, prompt[:n], 6))
        assert not row[n + 6 :].any()


def test_eos(ids):
    model = make(SMALL)
    free = model.generate(ids, 12, temperature=0.0)
    eos = int(free[0, 12])  # the third new token of the first row
    out = model.generate(ids, 12, temperature=0.0, eos=eos)
    for row, unbounded in zip(out, free, strict=True):
        ends = (unbounded[10:] == eos).nonzero()
        count = out.size(1) if not len(ends) else 10 + int(ends[0]) + 1
        assert torch.equal(row[:count], unbounded[: out.size(1)][:count])
        assert (row[count:] == eos).all()


def test_sampling(ids):
    model = make(SMALL, dtype=torch.float32)
    model.train()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, two = (model.generate(ids, 8, seed=3) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, model.generate(ids, 8, seed=4))
    assert torch.equal(torch.get_rng_state(), state), "a seed leaves torch's generator alone"
    assert model.training
    best = model.generate(ids, 8, temperature=0.0)
    assert torch.equal(model.generate(ids, 8, top_k=1), best)
    assert torch.equal(model.generate(ids, 8, top_p=1e-6), best)
    for temperature in (1e-4, 1e-37, 1e-40, 5e-324):
        assert torch.equal(model.generate(ids, 8, temperature=temperature), best)
    assert model.generate(ids, 0).shape == ids.shape


def test_generation_leaves_every_modules_mode(ids):
    model = make(SMALL).train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {True, False}
    model.generate(ids, 2)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_threads_that_generate_leave_every_modules_mode(ids):
    """The last of them to end, not the first, sets the modes again."""
    model = make(SMALL.replace(dropout=0.5)).train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    expected = model.generate(ids, 6, temperature=0.0)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            calls = [pool.submit(model.generate, ids, 2 + k, 0.0) for k in range(8)]
            for k, call in enumerate(calls):
                length = ids.size(1) + min(2 + k, 6)
                assert torch.equal(call.result()[:, :length], expected[:, :length])
            assert {name: m.training for name, m in model.named_modules()} == modes
    with pytest.raises(ValueError, match="lengths"):
        model.generate(ids, 2, lengths=torch.tensor([1, 2]))
    assert {name: m.training for name, m in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0; got -1"),
        ({"temperature": -1.0}, "temperature: expected >= 0; got -1.0"),
        ({"top_k": 0}, "top_k: expected an integer >= 1; got 0"),
        ({"top_k": 2.5}, "top_k: expected an integer >= 1; got 2.5"),
        ({"top_p": 0.0}, r"top_p: expected in \(0, 1\]; got 0.0"),
        ({"lengths": torch.tensor([1, 2])}, r"lengths: expected int32 or int64 \[B=3\]"),
        ({"lengths": torch.tensor([1, 0, 2])}, r"lengths: expected 1 to T=10; got \[1, 0, 2\]"),
        ({"ids": torch.zeros(3, 0, dtype=torch.int64)}, "ids: expected at least one token"),
        ({"ids": [1, 2]}, r"ids: expected an int32 or int64 tensor \[B, T\]; got \[1, 2\]"),
    ],
)
def test_bad_generation(arguments, message, ids):
    arguments = {"ids": ids, "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        make(SMALL).generate(**arguments)


# Modules


def test_seeded_reset():
    torch.manual_seed(7)
    built = CausalLM(SMALL)
    other = make(SMALL, dtype=torch.float32)
    empty = CausalLM(SMALL, device="meta").to_empty(device="cpu")
    for model in (other, empty):
        torch.manual_seed(7)
        model.reset_parameters()
        for (name, one), two in zip(model.named_parameters(), built.parameters(), strict=True):
            assert torch.equal(one, two), name


@pytest.mark.parametrize("name", list(mixers()))
def test_fake_tensors(name):
    """torch's way to ask for shapes and dtypes without memory builds models and runs them: moving
    them from the meta device had failed there."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # imports sympy

    config = LMConfig(dim=64, vocab_size=11, layers=2, mixer=name)
    with FakeTensorMode():
        mixers()[name](64)
        model = CausalLM(config)
        out = model(torch.zeros(2, 3, dtype=torch.long), "next", return_logits=True)
        out.loss.backward()
    assert out.logits.shape == (2, 3, 11)
    for p in model.parameters():
        assert isinstance(p, nn.Parameter)
        assert isinstance(p.data, FakeTensor)
        assert p.device.type == "cpu"


def test_memory_of_parameters_that_modules_share():
    """They stay one, and so do their kinds, dtypes and whether they are trained."""
    one, other = (nn.Linear(2, 3, device="meta", dtype=torch.float16) for _ in range(2))
    other.weight = one.weight
    other.bias.requires_grad_(False)
    for part in (one, other):
        part.register_buffer("seen", one.bias.detach() if part is one else one.seen)
    both = with_memory(nn.Sequential(one, other), torch.device("cpu"))
    assert other.weight is one.weight
    assert other.bias is not one.bias
    assert other.seen is one.seen
    for t in (*both.parameters(), one.seen):
        assert (t.device.type, t.dtype) == ("cpu", torch.float16)
    assert not isinstance(one.seen, nn.Parameter)
    assert [p.requires_grad for p in both.parameters()] == [True, True, False]


def test_half(ids):
    model = make(SMALL, dtype=torch.float32).eval()
    half = copy.deepcopy(model).bfloat16()
    assert half.lower_bounds.logits.dtype == torch.float32
    assert half.blocks[0].mixer.theta.dtype == torch.float32
    out = half(ids, "next", return_logits=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, model(ids, "next").loss, rtol=0.05, atol=0.05)
    assert half.generate(ids, 3).shape == (3, 13)


@pytest.mark.gpu
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_cuda_equals_cpu(config, ids, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    model = make(config, dtype=torch.float32)
    wanted = model(ids, "next").loss
    there = copy.deepcopy(model).to(device)
    loss = there(ids.to(device), "next").loss
    torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-4, atol=1e-5)
    lengths = torch.tensor([4, 10, 1])
    out = there.generate(ids.to(device), 5, temperature=0.0, lengths=lengths)
    assert torch.equal(out.cpu(), model.generate(ids, 5, temperature=0.0, lengths=lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_autocast_on_cuda(config, ids, device):
    if device == "cpu":
        pytest.skip("the CPU's autocast is tested with the mixers")
    model = make(config, dtype=torch.float32).to(device)
    wanted = model(ids.to(device), "next").loss
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(ids.to(device), "next").loss
    torch.testing.assert_close(loss, wanted, rtol=0.05, atol=0.05)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


def test_demo_preset_trains():
    """A few steps on a periodic text bring the loss down."""
    torch.manual_seed(0)
    model = CausalLM(presets()["demo"].replace(dim=32, glu_hidden=64, layers=2))
    text = torch.arange(64).remainder(7)[None] + 65
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(text, "next").loss
        loss.backward()
        optimizer.step()
    assert loss < 0.5


@pytest.mark.slow
def test_sharded_reset_draws_the_same(tmp_path):
    """FSDP2's way to make a model: meta device, shard, to_empty, reset_parameters."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    config = VARIANTS["theta-data"]
    torch.manual_seed(7)
    wanted = CausalLM(config)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = CausalLM(config, device="meta")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh).to_empty(device="cpu")
        torch.manual_seed(7)
        model.reset_parameters()
        for (name, one), two in zip(model.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), two), name
        ids = torch.arange(10)[None]
        torch.testing.assert_close(model(ids, "next").loss, wanted(ids, "next").loss)
    finally:
        dist.destroy_process_group()


def test_the_decoder_is_public_beside_the_models():
    assert tidegate.Decoder is tidegate.models.Decoder
