"""Schedules, optimiser groups, batches, baselines, recipes: the parts of training by themselves."""

from __future__ import annotations

import bz2
import math

import numpy as np
import pytest
import torch

from tidegate.models import CausalLM, LMConfig, presets
from tidegate.training import Schedule, TrainConfig, UserError, build_optimizer, recipes
from tidegate.training.baselines import bz2_bits_per_byte, order2_bits_per_byte
from tidegate.training.batches import Streams, WindowSampler
from tidegate.training.muon import Muon, orthogonalize
from tidegate.training.optim import parameter_groups


def test_inverse_sqrt_warms_up_then_falls_with_the_root_of_the_step():
    schedule = Schedule("inverse-sqrt", warmup_steps=4000)
    assert schedule(0, 0.0) == pytest.approx(1 / 4000)
    assert schedule(1999, 0.04) == pytest.approx(0.5)
    assert schedule(3999, 0.08) == 1.0
    assert schedule(15999, 0.32) == pytest.approx(0.5)


def test_cosine_and_linear_end_at_their_floor():
    for name in ("cosine", "linear"):
        schedule = Schedule(name, floor=0.1)
        assert schedule(0, 0.0) == pytest.approx(1.0)
        assert schedule(50, 0.5) == pytest.approx(0.55)
        assert schedule(99, 1.0) == pytest.approx(0.1)


def test_warm_up_by_part_of_the_run_never_starts_at_zero():
    schedule = Schedule("constant", warmup_fraction=0.1)
    assert 0 < schedule(0, 0.0) < 0.1
    assert schedule(7, 0.05) == pytest.approx(0.5)
    assert schedule(7, 0.2) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sqrt"}, r"schedule: expected one of .*cosine.*got 'sqrt'"),
        ({"warmup_steps": -1}, "warmup_steps: expected 0 or more, got -1"),
        ({"warmup_fraction": 1.0}, "warmup_fraction: expected a number from 0 to below 1, got 1.0"),
        ({"floor": float("nan")}, "floor: expected a number from 0 to 1, got nan"),
    ],
)
def test_schedules_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**changes)


def _model() -> CausalLM:
    return CausalLM(LMConfig(mixer="hgrn", dim=8, layers=2, glu_bias=True))


def test_only_matrices_decay():
    model = _model()
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    decayed_names = {names[id(p)] for p in decayed["params"]}
    kept_names = {names[id(p)] for p in kept["params"]}
    assert "blocks.0.mixer.in_proj.weight" in decayed_names
    assert {"embedding.weight", "lower_bounds.logits", "norm.weight"} <= kept_names
    assert {"blocks.0.mixer.theta", "blocks.0.mixer.in_proj.bias"} <= kept_names
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_decay_all_puts_everything_in_one_group():
    (group,) = parameter_groups(_model(), 0.2, "all")
    assert group["weight_decay"] == 0.2


def test_optimizers_by_name():
    model = _model()
    assert type(build_optimizer(model, "adamw", lr=1e-3)) is torch.optim.AdamW
    assert type(build_optimizer(model, "adam", lr=1e-3)) is torch.optim.Adam
    with pytest.raises(ValueError, match="optimizer: expected one of adamw, adam, muon, got 'sgd'"):
        build_optimizer(model, "sgd", lr=1e-3)


def test_muon_takes_the_matrices_of_the_blocks_one_by_one():
    model = _model()
    optimizer = build_optimizer(model, "muon", lr=1e-3, muon_lr=0.02)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = [names[id(p)] for p in optimizer.muon.param_groups[0]["params"]]
    layer = ("mixer.in_proj", "mixer.out_proj", "glu.in_proj", "glu.out_proj")
    assert taken == [f"blocks.{k}.{name}.weight" for k in range(2) for name in layer]
    # Complex HGRU: c and g have a real and an imaginary part, f is real.
    assert optimizer.muon._splits[:3] == [[8] * 5, [8], [16, 16]]
    rest = sum(len(group["params"]) for group in optimizer.adamw.param_groups)
    assert len(taken) + rest == len(list(model.parameters()))
    assert [group["peak"] for group in optimizer.param_groups][:2] == [0.02, 1e-3]


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, *shape)))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_muon_step_moves_stacked_matrices_like_separate_ones():
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.randn(12, 4))
    parts = [torch.nn.Parameter(p.clone()) for p in stacked.detach().split(4)]
    stacked.grad = torch.randn(12, 4)
    for part, grad in zip(parts, stacked.grad.split(4), strict=True):
        part.grad = grad.clone()
    Muon([stacked], [[4, 4, 4]], lr=0.1, weight_decay=0.1).step()
    Muon(parts, [[4]] * 3, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([p.detach() for p in parts]))


def test_muon_refuses_splits_that_do_not_add_up():
    with pytest.raises(ValueError, match=r"Muon: splits: expected rows .* \(4, 2\), got \[3\]"):
        Muon([torch.nn.Parameter(torch.zeros(4, 2))], [[3]])


def test_every_window_is_seen_once_an_epoch():
    tokens = np.arange(16 * 10 + 8)
    sampler = WindowSampler(tokens, batch=3, context=16, seed=5)
    seen = torch.cat([sampler.next()[0] for _ in range(3)])
    assert sampler.windows == 9
    assert len(seen.flatten().unique()) == 9 * 16


def test_labels_are_the_tokens_that_follow():
    ids, labels, *_ = WindowSampler(np.arange(100), batch=2, context=8, seed=0).next()
    assert torch.equal(ids + 1, labels)


def test_a_sampler_goes_on_from_its_position():
    tokens = np.arange(500)
    one = WindowSampler(tokens, batch=4, context=8, seed=3)
    batches = [one.next()[0] for _ in range(40)]
    other = WindowSampler(tokens, batch=4, context=8, seed=3)
    other.position = 25 * 4
    assert all(torch.equal(other.next()[0], batch) for batch in batches[25:])


def test_one_window_is_enough():
    ids, labels, *_ = WindowSampler(np.arange(9), batch=2, context=8, seed=0).next()
    assert ids.tolist() == [list(range(8))] * 2
    assert labels[0, -1] == 8


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_streams_predict_every_token_of_their_rows(rows):
    pairs = list(Streams(np.arange(101), rows, context=7))
    count = sum(labels.numel() for _, labels in pairs)
    assert count == min(rows, 50) * (100 // min(rows, 50))
    assert all(torch.equal(ids + 1, labels) for ids, labels in pairs)


def test_limited_streams_are_spread_over_the_tokens():
    first = next(iter(Streams(np.arange(1001), rows=10, context=4, limit=40)))[0]
    assert first[:, 0].tolist() == list(range(0, 1000, 100))


def _order2_by_hand(train: bytes, valid: bytes) -> float:
    """The same model, one byte at a time with dictionaries."""
    counts: dict[bytes, dict[int, int]] = {}
    for order in range(3):
        for i in range(order, len(train)):
            row = counts.setdefault(train[i - order : i], {})
            row[train[i]] = row.get(train[i], 0) + 1
    total = 0.0
    for i in range(2, len(valid)):
        p = (counts[b""].get(valid[i], 0) + 1) / (len(train) + 256)
        for order in (1, 2):
            row = counts.get(valid[i - order : i])
            if row:
                p = (row.get(valid[i], 0) + len(row) * p) / (sum(row.values()) + len(row))
        total -= math.log2(p)
    return total / (len(valid) - 2)


def test_order2_model_equals_the_one_written_by_hand():
    train, valid = b"the cat sat on the mat, the end" * 3, b"the dog sat on that mat \xff"
    ours = order2_bits_per_byte(np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8))
    assert ours == pytest.approx(_order2_by_hand(train, valid), rel=1e-12)


def test_bz2_bits():
    data = b"abc" * 1000
    bits = bz2_bits_per_byte(np.frombuffer(data, np.uint8))
    assert bits == pytest.approx(8 * len(bz2.compress(data, 9)) / 3000)


def test_recipe_of_table_16():
    recipe = recipes()["hgrn-wikitext103"]
    config = TrainConfig(**recipe.train)
    model = presets()[recipe.preset]
    assert (config.steps, config.batch_size, config.context) == (50_000, 128, 512)
    assert (config.lr, config.schedule, config.warmup_steps) == (5e-4, "inverse-sqrt", 4_000)
    assert (config.betas, config.eps, config.weight_decay) == ((0.9, 0.98), 1e-8, 0.2)
    assert config.clip == 0.0
    assert config.tokenizer == f"bpe:{model.vocab_size}"


@pytest.mark.parametrize(
    ("name", "lr", "tokens"), [("fox-760m", 1.25e-3, 15 * 2**30), ("fox-360m", 1.5e-3, 7 * 2**30)]
)
def test_recipes_of_the_forgetting_transformer(name, lr, tokens):
    """FoT, appendix B.1: warm-up over 256 Mi tokens, cosine to a tenth, batches of half a Mi."""
    recipe = recipes()[name]
    config = TrainConfig(**recipe.train)
    model = presets()[recipe.preset]
    batch = config.batch_size * config.context
    assert batch == 2**19
    assert config.steps * batch == tokens
    assert config.warmup_steps * batch == 256 * 2**20
    schedule = config.learning_rate()
    assert config.lr == lr
    assert schedule(config.steps - 1, 1.0) == pytest.approx(0.1)
    assert (config.betas, config.weight_decay, config.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (model.init_std, model.tied, model.mixer) == (0.02, False, "fox")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "train: expected --steps or --minutes, got neither"),
        ({"batch_size": 0}, "train: batch-size: expected 1 or more, got 0"),
        ({"grad_accum": 3}, "train: grad-accum: expected a divisor of the batch size 16, got 3"),
        ({"schedule": "none"}, "train: schedule: expected one of constant, linear, .*got 'none'"),
        ({"schedule": "inverse-sqrt"}, "train: warmup-steps: expected 1 or more with inverse-sqrt"),
        ({"lr": 0.0}, "train: lr: expected more than 0, got 0.0"),
        ({"lr": float("inf")}, "train: lr: expected more than 0, got inf"),
        ({"betas": (2, 3)}, r"train: betas: expected two numbers from 0 to below 1, got \(2, 3\)"),
        ({"betas": (0.9,)}, "train: betas: expected two numbers from 0 to below 1"),
        ({"eps": -1.0}, "train: eps: expected 0 or more, got -1.0"),
        ({"clip": float("nan")}, "train: clip: expected 0 or more, got nan"),
        ({"weight_decay": -0.1}, "train: weight-decay: expected 0 or more, got -0.1"),
        ({"warmup_steps": -3}, "train: warmup-steps: expected 0 or more, got -3"),
        ({"warmup_fraction": 3.0}, "train: warmup-fraction: expected a number from 0 to below 1"),
        ({"floor": 3.0}, "train: floor: expected a number from 0 to 1, got 3.0"),
        (
            {"precision": "fp8"},
            "train: precision: expected one of auto, fp32, tf32, bf16, got 'fp8'",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**{"steps": 10, **changes})
