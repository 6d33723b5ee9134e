"""What Muon takes for a matrix: every mixer says which ones its projections stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tidegate.models import CausalLM, LMConfig
from tidegate.models.registry import mixers
from tidegate.nn import GLU
from tidegate.training import build_optimizer

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
