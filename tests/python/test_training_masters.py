"""bf16 weights over fp32 masters, and Muon over groups: rules that both languages keep."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from conftest import require_cuda
from torch import Tensor, nn

from tidegate.models import CausalLM, LMConfig
from tidegate.training import adamw
from tidegate.training.adamw import AdamW
from tidegate.training.masters import MasterWeights
from tidegate.training.muon import Muon
from tidegate.training.optim import build_optimizer

try:
    from tidegate import cpp
except ImportError:
    cpp = None

LANGUAGES = [
    "python",
    "in one pass",
    pytest.param("on a GPU", marks=pytest.mark.gpu),  # in one pass, too
    pytest.param("cpp", marks=pytest.mark.skipif(cpp is None, reason="needs the bindings of C++")),
]


def masters_of(language: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, object]:
    """A model in bf16 and its masters. "python": gradients move to the masters before they are
    clipped; the others clip them where they are."""
    config = LMConfig(mixer="hgrn", vocab_size=23, dim=16, layers=2)
    torch.manual_seed(0)
    if language == "cpp":
        model = cpp.CausalLM(config)
        optimizer = cpp._cpp.AdamW(model.cpp_module, lr=0.1, weight_decay=0.1)
        return model, cpp._cpp.MasterWeights(model.cpp_module, optimizer)
    if language == "in one pass":
        monkeypatch.setattr(adamw, "_DEVICES", ("cpu", "cuda"))
    model = CausalLM(config)
    if language == "on a GPU":
        require_cuda()
        model.cuda()
    return model, MasterWeights(model, build_optimizer(model, lr=0.1, weight_decay=0.1))


def draw(model: nn.Module) -> list[Tensor]:
    """Gives every parameter a gradient; returns copies of them in float64."""
    rng = torch.Generator().manual_seed(1)
    for _, p in sorted(model.named_parameters()):
        p.grad = torch.randn(p.shape, generator=rng).to(p)
    return [p.grad.double() for p in model.parameters()]


def gradients_of(model: nn.Module, masters: object) -> Iterator[Tensor]:
    """The gradients that the next step goes by."""
    pairs = zip(getattr(masters, "weights", ()), getattr(masters, "masters", ()), strict=True)
    wide = {id(w): m for w, m in pairs if m.grad is not None}
    for p in model.parameters():
        yield wide.get(id(p), p).grad


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_clipped_gradient_is_rounded_once(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By half of bf16's spacing, at most 2^-8 of a number: a factor that is rounded to bf16 before
    scales all gradients alike by up to as much again."""
    model, masters = masters_of(language, monkeypatch)
    before = draw(model)
    norm = math.sqrt(sum(float(g.square().sum()) for g in before))
    # A factor halfway between two numbers of bf16.
    largest = norm * (0.75 + 2**-9)
    assert float(masters.clip_gradients(largest)) == pytest.approx(norm, rel=1e-5)
    for found, given in zip(gradients_of(model, masters), before, strict=True):
        wanted = given * (largest / norm)
        allowed = (2**-8 if found.dtype == torch.bfloat16 else 0) + 1e-5
        assert bool(((found.double() - wanted).abs() <= allowed * wanted.abs()).all())


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_does_as_torch_s(
    value: float, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, masters = masters_of(language, monkeypatch)
    draw(model)
    next(model.parameters()).grad.view(-1)[3] = value
    other = nn.ParameterList([nn.Parameter(p.detach().float()) for p in model.parameters()])
    for mine, p in zip(other, model.parameters(), strict=True):
        mine.grad = p.grad.float()
    assert not math.isfinite(masters.clip_gradients(1.0))
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    for found, like in zip(gradients_of(model, masters), other, strict=True):
        torch.testing.assert_close(found.float(), like.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_infinite_largest_norm_only_measures(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, masters = masters_of(language, monkeypatch)
    before = draw(model)
    next(model.parameters()).grad.view(-1)[3] = before[0].view(-1)[3] = math.nan
    assert math.isnan(masters.clip_gradients(math.inf))
    for found, given in zip(gradients_of(model, masters), before, strict=True):
        torch.testing.assert_close(found.double(), given, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("largest", [math.nan, -1.0])
def test_a_largest_norm_is_a_number_of_at_least_zero(
    largest: float, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, masters = masters_of(language, monkeypatch)
    before = draw(model)
    message = f"MasterWeights: clip_gradients: largest: expected a number .* got {largest:g}"
    with pytest.raises(ValueError, match=message):
        masters.clip_gradients(largest)
    for p, given in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad.double(), given)
    assert float(masters.clip_gradients(0.0)) > 0
    assert not any(bool(g.any()) for g in gradients_of(model, masters))


SHAPES = [(1,), (), (0, 3), (7,), (4096,), (4097,), (3, 9000), (64, 128)]


def test_scale_makes_products_in_float32(device: str) -> None:
    """Tensors of all types, more than a launch takes, and such as do not begin at 16 bytes or are
    not dense."""
    factor = torch.tensor(0.3337, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        made = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES * 20]
        made += [made[5][1:], made[6].t(), made[7][:, ::2]]
        made = [t.clone(memory_format=torch.preserve_format) for t in made[:-3]] + made[-3:]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wanted = [(t.to(wide) * factor.to(wide)).to(dtype) for t in made]
        with torch.no_grad():
            torch.ops.tidegate.scale_(made, factor)
        assert all(map(torch.equal, made, wanted))
        assert {t._version for t in made} == {1}


def test_scale_says_what_it_cannot_take() -> None:
    one, number = [torch.ones(3)], torch.ones(())
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"^scale_: factor must be one float32 number, got"):
            torch.ops.tidegate.scale_(one, torch.ones(2))
        with pytest.raises(
            RuntimeError, match=r"^scale_: tensors must be .* tensors\[1\] in int64"
        ):
            torch.ops.tidegate.scale_([*one, torch.ones(3).long()], number)
        with pytest.raises(RuntimeError, match=r"^scale_: tensors must be .* on meta"):
            torch.ops.tidegate.scale_([torch.ones(3, device="meta")], number)
    with pytest.raises(RuntimeError, match=r"^scale_: it is not differentiated"):
        torch.ops.tidegate.scale_(one, number)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_on_two_devices_are_clipped_together(fused: bool) -> None:
    """Two groups, each on a device of its own; fused takes the GPU's in one pass alone."""
    require_cuda()
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 4).cuda()])
    groups = [{"params": list(layer.parameters())} for layer in model]
    masters = MasterWeights(model, AdamW(groups, lr=0.1, fused=fused))
    before = draw_any(model)
    norm = math.sqrt(sum(float(g.square().sum()) for g in before))
    assert float(masters.clip_gradients(norm / 2)) == pytest.approx(norm, rel=1e-5)
    assert float(masters.clip_gradients(math.inf)) == pytest.approx(norm / 2, rel=1e-2)
    masters.step()
    for weight, master in zip(masters.weights, masters.masters, strict=True):
        assert torch.equal(weight, master.bfloat16())


def draw_any(model: nn.Module) -> list[Tensor]:
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p)
    return [p.grad.double().cpu() for p in model.parameters()]


def a_layer() -> tuple[nn.Linear, AdamW]:
    layer = nn.Linear(3, 2)
    return layer, AdamW(layer.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_made_of_wide_weights(dtype: torch.dtype) -> None:
    layer = nn.Linear(3, 2).to(dtype)
    with pytest.raises(ValueError, match=r"model: expected parameters in float32, .*\(2, 3\) in"):
        MasterWeights(layer, AdamW(layer.parameters(), lr=0.1))
    assert layer.weight.dtype == dtype


def test_masters_are_made_before_a_step() -> None:
    layer, optimizer = a_layer()
    draw_any(layer)
    optimizer.step()
    with pytest.raises(ValueError, match="has not stepped yet; got one with states of 2 param"):
        MasterWeights(layer, optimizer)
    assert layer.weight.dtype == torch.float32


def test_masters_name_a_sparse_gradient() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    masters = MasterWeights(model, AdamW(model.parameters(), lr=0.1, fused=True))
    model(torch.tensor([1])).sum().backward()
    message = r"MasterWeights: expected dense gradients; got a sparse one .* \(5, 3\)"
    for call in (masters.step, lambda: masters.clip_gradients(1.0)):
        with pytest.raises(ValueError, match=message):
            call()


def test_masters_of_another_model_change_nothing() -> None:
    masters = MasterWeights(*a_layer())
    given = masters.state_dict()
    before = [m.clone() for m in masters.masters]
    for wrong, message in (
        ([torch.ones(2, 3), torch.ones(1)], r"master 1: expected the shape \(2,\); got \(1,\)"),
        ([torch.ones(2, 3)], "masters: expected 2; got 1"),
    ):
        with pytest.raises(ValueError, match=f"^MasterWeights: {message}"):
            masters.load_state_dict({**given, "masters": wrong})
        assert all(map(torch.equal, masters.masters, before))


def test_parameters_without_elements_have_masters(device: str) -> None:
    model = nn.ParameterList([torch.ones(0, 3, device=device), torch.ones(3, device=device)])
    masters = MasterWeights(model, AdamW(list(model), lr=0.1, fused=True))
    for p in model:
        p.grad = torch.ones_like(p)
    assert float(masters.clip_gradients(0.5)) == pytest.approx(3**0.5)
    masters.step()
    assert float(model[1].detach()[0]) < 1
    assert model[0].shape == (0, 3)


# ---- Muon


def matrices(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=rng).to(dtype)
    return made


def test_groups_of_muon_step_by_their_own_options() -> None:
    shapes = (4, 4), (6, 4), (4, 4)
    options = {"lr": 0.3, "weight_decay": 0.5, "momentum": 0.5}
    one, two, three = matrices(*shapes)
    groups = [{"params": one}, {"params": [two], **options}]
    muon = Muon(groups, [[4], [2, 4]], lr=0.1)
    muon.add_param_group({"params": [three], "lr": 0.2})
    alone = matrices(*shapes)
    each = [
        Muon(alone[:1], [[4]], lr=0.1),
        Muon(alone[1:2], [[2, 4]], **options),
        Muon(alone[2:], [[4]], lr=0.2),
    ]
    for optimizer in (muon, *each):
        optimizer.step()
    assert all(map(torch.equal, (one, two, three), alone))
    assert [g["lr"] for g in muon.param_groups] == [0.1, 0.3, 0.2]


def test_muon_calls_its_closure_with_gradients() -> None:
    (weight,) = matrices((3, 3))
    muon = Muon([weight], [[3]])

    def closure() -> float:
        muon.zero_grad()
        (weight.sum() * 2).backward()
        return 7.0

    assert muon.step(closure) == 7.0
    assert torch.equal(weight.grad, torch.full((3, 3), 2.0))


def test_copies_of_muon_know_what_is_stacked() -> None:
    (weight,) = matrices((6, 3))
    model = nn.ParameterList([weight])
    muon = Muon(model.parameters(), [[2, 4]])
    both = copy.deepcopy({"model": model, "optimizer": muon})
    both["model"][0].grad = weight.grad.clone()
    for optimizer in (muon, both["optimizer"]):
        optimizer.step()
    assert torch.equal(weight, both["model"][0])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_muon_passes_over_matrices_without_elements(shape: tuple[int, int]) -> None:
    empty, other = matrices(shape, (3, 3))
    before = other.detach().clone()
    Muon([empty, other], [[shape[0]], [0, 3]]).step()
    assert not torch.equal(before, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_beside_each_other_step_as_if_alone(dtype: torch.dtype) -> None:
    pair = [*matrices((4, 4)), *matrices((4, 4), dtype=dtype)]
    alone = [*matrices((4, 4)), *matrices((4, 4), dtype=dtype)]
    Muon(pair, [[4], [4]]).step()
    for p in alone:
        Muon([p], [[4]]).step()
    assert all(map(torch.equal, pair, alone))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([[4], [3]], "expected one a parameter, 1; got 2"),
        ([[-1, 5]], r"expected rows that add up to those of a matrix of shape \(4, 2\)"),
    ],
)
def test_splits_that_do_not_fit(splits: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Muon: splits: {message}"):
        Muon(matrices((4, 2)), splits)


def test_muon_takes_matrices_alone() -> None:
    muon = Muon(matrices((4, 2)), [[4]])
    with pytest.raises(ValueError, match=r"^Muon: splits: .* matrix of shape \(3,\), got \[\]"):
        muon.add_param_group({"params": nn.Parameter(torch.ones(3))})
    assert len(muon.param_groups) == 1


def test_muon_does_not_step_where_adamw_cannot() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    optimizer = build_optimizer(model, "muon", lr=0.1, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_muon_names_a_sparse_gradient() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="^Muon: expected dense gradients; got a sparse one"):
        Muon([model.weight], [[5]], weight_decay=1.0).step()
    assert torch.equal(before, model.weight)
