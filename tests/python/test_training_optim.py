"""Optimisers by name, what decays, and what Muon takes for a matrix: every mixer says which ones
its projections stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tidegate.models import CausalLM, LMConfig
from tidegate.models.registry import mixers
from tidegate.nn import GLU, LowerBounds
from tidegate.training import build_optimizer
from tidegate.training.muon import Muon, orthogonalize
from tidegate.training.optim import parameter_groups

DIM, HEADS, KV_HEADS, RANK, HIDDEN, VOCABULARY = 8, 4, 2, 3, 12, 16
KV_DIM = KV_HEADS * DIM // HEADS
MIXER_OPTIONS = {
    "hgrn2": {"num_heads": HEADS},
    "gla": {"num_heads": HEADS, "key_dim": 4, "gate_rank": RANK},
    "lru": {"state": 6, "gate": "data"},
    "slru": {"state": 6},
    **{
        name: {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
        for name in ("fox", "fox-pro", "transformer", "transformer-pro")
    },
}
# The rows of each matrix, from the equations: what multiplies x for each quantity by itself.
STACKED = {
    "hgrn": {"in_proj": [DIM] * 5},  # Re c, Im c, f, Re g, Im g
    "hgrn2": {"in_proj": [DIM] * 3},  # q, f, v
    "gla": {"in_proj": [4, 4, DIM, DIM, RANK], "gate_proj": [4]},  # q, k, v, g, W_1
    "lru": {"in_proj": [6, 6], "gate_proj": [6]},  # Re B, Im B
    "slru": {"in_proj": [6]},
    "rwkv4": {"in_proj": [DIM] * 3},  # r, k, v
    "gated-linear-rnn": {"in_proj": [DIM] * 2},  # z, h
    "gated-rnn": {"in_proj": [DIM] * 2, "state_proj": [DIM]},
    "fox": {"in_proj": [DIM, KV_DIM, KV_DIM], "gate_proj": [HEADS]},  # q, k, v
    "fox-pro": {
        "in_proj": [DIM, KV_DIM, KV_DIM, DIM],  # and the output gate
        "shift_proj": [KV_HEADS] * 2,
        "gate_proj": [HEADS],
    },
    "transformer": {"in_proj": [DIM, KV_DIM, KV_DIM]},
    "transformer-pro": {"in_proj": [DIM, KV_DIM, KV_DIM, DIM], "shift_proj": [KV_HEADS] * 2},
}


def _model(mixer: str) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(
        LMConfig(
            mixer=mixer,
            vocab_size=VOCABULARY,
            dim=DIM,
            layers=1,
            glu_hidden=HIDDEN,
            mixer_options=MIXER_OPTIONS.get(mixer, {}),
        )
    )


def _optimizer(model: CausalLM):
    return build_optimizer(model, "muon", lr=1e-3, muon_lr=0.02)


def _hgrn() -> CausalLM:
    return CausalLM(LMConfig(mixer="hgrn", dim=DIM, layers=2, glu_bias=True))


def test_only_matrices_decay():
    model = _hgrn()
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


def test_bounds_of_a_class_of_ones_own_do_not_decay():
    class Bounds(LowerBounds):
        pass

    model = nn.ModuleDict({"bounds": Bounds(2, 3), "linear": nn.Linear(4, 4, bias=False)})
    decayed, kept = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 4)]
    assert [p.shape for p in kept["params"]] == [(2, 3)]


def test_decay_all_puts_everything_in_one_group():
    (group,) = parameter_groups(_hgrn(), 0.2, "all")
    assert group["weight_decay"] == 0.2


def test_optimizers_by_name():
    model = _hgrn()
    assert isinstance(build_optimizer(model, "adamw", lr=1e-3), torch.optim.AdamW)
    assert not isinstance(build_optimizer(model, "adam", lr=1e-3), torch.optim.AdamW)
    with pytest.raises(ValueError, match="optimizer: expected one of adamw, adam, muon, got 'sgd'"):
        build_optimizer(model, "sgd", lr=1e-3)


def test_muon_takes_the_matrices_of_the_blocks_one_by_one():
    model = _hgrn()
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


def test_every_mixer_is_looked_at():
    assert set(STACKED) == set(mixers())


@pytest.mark.parametrize("mixer", STACKED)
def test_muon_takes_what_a_mixer_stacks_apart(mixer):
    model = _model(mixer)
    muon = _optimizer(model).muon
    taken = zip(muon.param_groups[0]["params"], muon._splits, strict=True)
    rows = {id(weight): split for weight, split in taken}
    block = model.blocks[0]
    found = {
        name: rows[id(module.weight)]
        for name, module in block.mixer.named_children()
        if isinstance(module, nn.Linear)
    }
    width = block.mixer.out_proj.out_features if hasattr(block.mixer, "out_proj") else None
    outputs = {} if width is None else {"out_proj": [width]}
    assert found == STACKED[mixer] | outputs
    assert rows[id(block.glu.in_proj.weight)] == [HIDDEN] * 2  # gate and value


@pytest.mark.parametrize("mixer", STACKED)
def test_a_steep_matrix_leaves_its_neighbours_their_step(mixer):
    """The first matrix's gradient sixteen times as large: no weight moves by another amount."""
    after = []
    for scale in (1.0, 16.0):
        model = _model(mixer)
        projection = model.blocks[0].mixer.in_proj
        optimizer = _optimizer(model)
        gradient = torch.randn(projection.weight.shape, generator=torch.Generator().manual_seed(2))
        gradient[: STACKED[mixer]["in_proj"][0]] *= scale
        projection.weight.grad = gradient
        optimizer.muon.step()
        after.append(projection.weight.detach())
    torch.testing.assert_close(*after)


def test_a_module_of_ones_own_says_what_it_stacks():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 4)
            self.said, self.silent = nn.Linear(4, 12), nn.Linear(4, 12)
            self.said.stacked_rows = [4, 8]
            self.glu = GLU(4)

    assert _optimizer(Stack()).muon._splits == [[4, 8], [12], [8, 8], [4]]
