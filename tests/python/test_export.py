"""Language models as programs: torch.export of every mixer, and AOTInductor's packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate import export
from tidegate.models import CausalLM, LMConfig, mixers

pytestmark = pytest.mark.usefixtures("one_thread")

NORMALIZED = {
    "num_heads": 2,
    "gate": "scalar",
    "normalize": True,
    "feature_map": "exp",
    "norm": "none",
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"mixer": name} for name in mixers()},
    "gla-normalized": {"mixer": "gla", "mixer_options": NORMALIZED},
    "rwkv4-shifted": {"mixer": "rwkv4", "mixer_options": {"time_shift": True}},
    "fox-window": {"mixer": "fox", "mixer_options": {"window": 4, "rope": 10000.0}},
    "fox-pruned": {"mixer": "fox-pro", "mixer_options": {"prune": 1e-10}},
    "hybrid": {"mixer": ["hgrn2", "fox"], "layers": 2, "lower_bound": "none", "tied": False},
}
CAPACITY = 24
# (B, T): one of each, a batch and a length of their own, and no more than there is room for.
SHAPES = ((1, 1), (1, 2), (4, 9), (2, CAPACITY - 2))


def causal_lm(name: str, dtype: torch.dtype = torch.float64) -> CausalLM:
    torch.manual_seed(2)
    small = {"vocab_size": 16, "dim": 16, "layers": 1, "glu_hidden": 16, "init_std": 0.4}
    return CausalLM(LMConfig(**{**small, **MODELS[name]}), dtype=dtype).eval()


def keeps_tokens(model: CausalLM) -> bool:
    return any(getattr(block.mixer, "keeps_tokens", False) for block in model.blocks)


@torch.no_grad()
def check_programs(
    model: CausalLM, run: dict[str, Callable[..., Any]], batch: int, time: int, tolerance: float
) -> None:
    """What prefill, two steps and, where there is one, extend say is what one forward pass says."""
    ids = torch.randint(16, (batch, time + 2 + 3), device=model.embedding.weight.device)
    whole = model(ids).logits
    close = {"rtol": 0.0, "atol": tolerance}
    logits, *state = run["prefill"](ids[:, :time].contiguous())
    torch.testing.assert_close(logits, whole[:, time - 1], **close)
    held = [t.data_ptr() for t in state]
    for t in (time, time + 1):
        logits = _one(run["step"](ids[:, t].contiguous(), *state))
        torch.testing.assert_close(logits, whole[:, t], **close)
    assert [t.data_ptr() for t in state] == held
    if "extend" in run:
        logits = _one(run["extend"](ids[:, time + 2 :].contiguous(), *state))
        torch.testing.assert_close(logits, whole[:, -1], **close)


def _one(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_mixer_is_exported(name: str) -> None:
    model = causal_lm(name)
    names = ["prefill", "step"] + ["extend"] * (not keeps_tokens(model))
    made = export.programs(model, names, capacity=CAPACITY)
    run = {key: program.module() for key, program in made.items()}
    for batch, time in SHAPES:
        check_programs(model, run, batch, time, 1e-9)
    *state, _ = run["prefill"](torch.zeros(2, 3, dtype=torch.int64))
    assert len(state) == len(export.state_names(model))


@pytest.mark.parametrize("name", ["fox", "fox-pruned"])
def test_steps_over_caches_of_any_size_are_exported(name: str, device: str) -> None:
    """On CUDA a pruned step looks at its cache's size, which an exported program does not know."""
    model = causal_lm(name).to(device)
    made = export.programs(model, ["prefill", "step"], capacity=CAPACITY)
    run = {key: program.module() for key, program in made.items()}
    check_programs(model, run, 2, 9, 1e-9)


@pytest.mark.parametrize("name", ["hgrn", "transformer-pro"])
def test_forward_is_exported(name: str) -> None:
    model = causal_lm(name)
    run = export.programs(model, ["forward"])["forward"].module()
    for shape in SHAPES:
        ids = torch.randint(16, shape)
        torch.testing.assert_close(run(ids), model(ids).logits)


def test_a_program_goes_through_a_file(tmp_path: Path) -> None:
    model = causal_lm("hgrn2", torch.float32)
    torch.export.save(export.programs(model, ["step"])["step"], tmp_path / "step.pt2")
    step = torch.export.load(tmp_path / "step.pt2").module()
    ids, state = torch.tensor([3, 1]), model.init_state(2)
    with torch.no_grad():
        mine = step(ids, *(s.clone() for s in state))
        torch.testing.assert_close(mine, model.step(ids, state))


def test_bf16_is_exported() -> None:
    model = causal_lm("hybrid", torch.bfloat16)
    made = export.programs(model, capacity=CAPACITY)
    run = {key: program.module() for key, program in made.items()}
    check_programs(model, run, 2, 7, 0.5)
    assert run["prefill"](torch.zeros(1, 3, dtype=torch.int64))[0].dtype == torch.bfloat16


def test_exporting_leaves_the_model_as_it_was() -> None:
    model = causal_lm("hgrn").train()
    export.programs(model, ["step"])
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_names_of_the_state() -> None:
    assert export.state_names(causal_lm("hgrn2")) == ["blocks.0"]
    fields = ("k", "v", "gates", "lengths", "seen", "last_k", "last_v")
    assert export.state_names(causal_lm("hybrid")) == [
        "blocks.0",
        *(f"blocks.1.{field}" for field in fields),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["prefil"]}, "names: expected of forward, prefill, extend, step; got 'prefil'"),
        ({"names": ["extend"]}, "names: expected no 'extend', since attention reads a prompt at"),
        ({"capacity": 0}, "capacity: expected a positive integer; got 0"),
        ({"model": torch.nn.Linear(2, 2)}, "model: expected a CausalLM; got a Linear"),
    ],
)
def test_what_cannot_be_exported_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"export: {message}"):
        export.programs(**{"model": causal_lm("fox"), **arguments})


def test_a_package_has_a_name_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.pt2; got .*model"):
        export.package(causal_lm("hgrn"), tmp_path / "model")
