"""The C++ modules against the Python ones: same options, names, numbers and errors."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import pickle
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.module_registry import REGISTRY, SMALL, generating, public_modules
from torch import Tensor, nn

import tidegate
from tidegate.models import LMConfig

# Skipped where it was not built for this Python; one that is there and does not load is a failure.
if importlib.util.find_spec("tidegate._cpp") is None:
    pytest.skip("tidegate._cpp was not built for this Python", allow_module_level=True)

from tidegate import cpp

pytestmark = pytest.mark.usefixtures("one_thread")
ENTRIES = pytest.mark.parametrize("name", list(REGISTRY))
MIXERS = (
    "HGRU",
    "HGRU2",
    "GatedLinearAttention",
    "Attention",
    "ForgettingAttention",
    "GatedLinearRNN",
    "GatedRNN",
    "LRU",
    "SLRU",
    "RWKV4",
)
MODELS = ("CausalLM", "SequenceClassifier", "ImageClassifier")
CLOSE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def construct(cls: type, args: tuple, options: dict, **where: Any) -> tuple[Any, str]:
    """The module drawn from seed 0 and "", or None and the ValueError's text."""
    torch.manual_seed(0)
    try:
        return cls(*args, **options, **where), ""
    except ValueError as error:
        return None, str(error)


def pairs(name: str, **where: Any) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Every allowed combination of an entry's options: Python's module, C++'s, what they are."""
    entry = REGISTRY[name]
    for args, options in entry.arguments:
        native, _ = construct(entry.native, args, options, **where)
        if native is not None:
            twin, message = construct(getattr(cpp, name), args, options, **where)
            assert twin is not None, message
            yield native, twin, f"{name} {args} {options}"


def shake(native: nn.Module, twin: nn.Module) -> None:
    """Gives both the same parameters, none of which has its starting value."""
    generator = torch.Generator().manual_seed(7)
    for mine, other in zip(native.parameters(), twin.parameters(), strict=True):
        noise = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
        mine.data += 0.2 * noise.to(mine.device, mine.dtype)
        other.data.copy_(mine.data)


def leaves(value: Any) -> list[Tensor]:
    """The floating-point tensors in a nest of tuples."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for v in value for t in leaves(v)] if isinstance(value, (tuple, list)) else []


def differentiable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    if isinstance(value, tuple):
        return tuple(differentiable(v) for v in value)
    return value


def run(module: nn.Module, inputs: list, keywords: dict) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of a fixed function of them to inputs and parameters."""
    inputs = [differentiable(v) for v in inputs]
    keywords = {k: differentiable(v) for k, v in keywords.items()}
    torch.manual_seed(5)  # of the noise that Gumbel-Gate draws
    outputs = leaves(module(*inputs, **keywords))
    if not outputs:
        return [], []
    total = sum((y * torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).sum() for y in outputs)
    targets = leaves([*inputs, *keywords.values()]) + list(module.parameters())
    grads = torch.autograd.grad(total, targets, allow_unused=True)
    return outputs, [torch.zeros(()) if g is None else g for g in grads]


def assert_same(mine: list[Tensor], other: list[Tensor], what: str) -> None:
    assert len(mine) == len(other), what
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype, what
        torch.testing.assert_close(b, a, **CLOSE[a.dtype], msg=lambda m: f"{what}: {m}")


def refusal(use: Callable[[], Any]) -> str:
    """The text of the error that `use` raises: a ValueError, or, of checks that ops share with
    modules, a RuntimeError."""
    with pytest.raises(
        (ValueError, RuntimeError), match="expected|lengths|LMConfig|must"
    ) as caught:
        use()
    text = str(caught.value).splitlines()[0].replace("torch.int64", "Long")
    return re.sub(r"(\d)\.0\b", r"\1", text)  # C++ prints 1.0 as 1


# Options, names, initialisation


def test_every_public_module_is_registered_and_has_a_twin():
    public = public_modules()
    assert sorted(public) == sorted(REGISTRY)
    for name, entry in REGISTRY.items():
        assert entry.native is public[name]
        assert issubclass(getattr(cpp, name), nn.Module)
        assert name in cpp.__all__


def python_defaults(function: Any) -> dict[str, Any]:
    signature = inspect.signature(function)
    return {
        p.name: p.default
        for p in signature.parameters.values()
        if p.name != "self" and p.default is not inspect.Parameter.empty
    }


def cpp_defaults(function: Any) -> dict[str, Any]:
    """What pybind11's docstring says, which it takes from the C++ options classes."""
    signature = function.__doc__.splitlines()[0]
    found = re.findall(r"(\w+): [^=,]* = ('[^']*'|[^,)]+)", signature)
    return {name: eval(text, {"__builtins__": {}}) for name, text in found}


@ENTRIES
def test_option_defaults(name):
    native, twin = REGISTRY[name].native, getattr(cpp, name)
    assert cpp_defaults(twin._native.__init__) == python_defaults(native.__init__)
    for method in ("step", "init_state", "prefill", "generate"):
        if hasattr(native, method):
            wanted = python_defaults(getattr(native, method))
            assert cpp_defaults(getattr(twin._native, method)) == wanted, method


@ENTRIES
def test_both_languages_accept_and_reject_the_same_options(name):
    entry, allowed = REGISTRY[name], 0
    for args, options in entry.arguments:
        native, message = construct(entry.native, args, options)
        after = torch.random.get_rng_state()
        twin, cpp_message = construct(getattr(cpp, name), args, options)
        assert message == cpp_message, (args, options)
        if native is not None:
            allowed += 1
            assert torch.equal(after, torch.random.get_rng_state()), (args, options)
    assert allowed == entry.allowed


@ENTRIES
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16], ids=str)
def test_names_shapes_and_seeded_initialisation(name, dtype):
    for native, twin, what in pairs(name, dtype=dtype):
        assert_identical(native, twin, what)
        for module in (native, twin):
            torch.manual_seed(3)
            module.reset_parameters()
        assert_identical(native, twin, f"{what} after reset_parameters")


def assert_identical(native: nn.Module, twin: nn.Module, what: str) -> None:
    """Names in the same order, shapes, dtypes, and values bit for bit."""
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(native, kind)()), dict(getattr(twin, kind)())
        assert list(mine) == list(other), what
        for key, value in mine.items():
            assert value.dtype == other[key].dtype, (what, key)
            assert value.requires_grad == other[key].requires_grad, (what, key)
            assert torch.equal(value, other[key]), (what, key)


@ENTRIES
def test_nothing_is_drawn_or_allocated_on_meta(name):
    entry = REGISTRY[name]
    args, options = entry.arguments[0]
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    native = entry.native(*args, **options, device="meta")
    twin = getattr(cpp, name)(*args, **options, device="meta")
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(p.is_meta for p in twin.parameters())
    shapes = [(n, p.shape) for n, p in native.named_parameters()]
    assert shapes == [(n, p.shape) for n, p in twin.named_parameters()]


# Values


@ENTRIES
def test_forward_and_gradients(name, device):
    where = {"device": device, "dtype": torch.float64}
    for native, twin, what in pairs(name, **where):
        shake(native, twin)
        for variant in range(REGISTRY[name].variants):
            torch.manual_seed(variant)
            inputs, keywords = REGISTRY[name].inputs(
                native, torch.device(device), torch.float64, variant
            )
            outputs, grads = run(native, inputs, keywords)
            cpp_outputs, cpp_grads = run(twin, inputs, keywords)
            assert_same(outputs, cpp_outputs, f"{what}, inputs {variant}")
            assert_same(grads, cpp_grads, f"{what}, gradients of inputs {variant}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ENTRIES
def test_other_dtypes(name, dtype, device):
    """One module of each kind in the dtypes that people train with, cast by .to(dtype)."""
    native, twin, what = next(pairs(name, device=device))
    shake(native, twin)
    native.to(dtype)
    twin.to(dtype)
    for mine, other in zip(native.parameters(), twin.parameters(), strict=True):
        assert mine.dtype == other.dtype
    torch.manual_seed(0)
    inputs, keywords = REGISTRY[name].inputs(native, torch.device(device), dtype, 0)
    assert_same(run(native, inputs, keywords)[0], run(twin, inputs, keywords)[0], what)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_steps(name, device):
    for native, twin, what in pairs(name, device=device, dtype=torch.float64):
        native.eval()  # without Gumbel-Gate's noise
        twin.eval()
        if native.bidirectional:
            for module in (native, twin):
                with pytest.raises(ValueError, match="has no state"):
                    module.init_state(2)
            continue
        shake(native, twin)
        torch.manual_seed(0)
        inputs, keywords = REGISTRY[name].inputs(native, torch.device(device), torch.float64, 0)
        state, cpp_state = native.init_state(2, capacity=5), twin.init_state(2, capacity=5)
        assert_same(leaves(state), leaves(cpp_state), what)
        whole, final = twin(inputs[0], twin.init_state(2, capacity=5), **keywords)
        for t in range(inputs[0].size(1)):
            y = native.step(inputs[0][:, t], state, keywords.get("gamma"))
            cpp_y = twin.step(inputs[0][:, t], cpp_state, keywords.get("gamma"))
            mine, other = [y, *leaves(state)], [cpp_y, *leaves(cpp_state)]
            assert_same([*mine, whole[:, t]], [*other, cpp_y], f"{what}, token {t}")
        assert_same(leaves(final), leaves(cpp_state), what)


def offsets_misuses() -> dict[str, Callable[[Any], Any]]:
    """Bounds of packed sequences that do not fit, for modules that read them themselves."""
    x = torch.zeros(1, 6, 4)
    wrong = {
        "short": torch.tensor([0, 3, 5]),
        "long": torch.tensor([0, 3, 7]),
        "falling": torch.tensor([0, 5, 3, 6]),
        "late": torch.tensor([1, 3, 6]),
        "float": torch.tensor([0.0, 6.0]),
        "rank": torch.tensor([[0, 6]]),
        "none": torch.tensor([], dtype=torch.int64),
        "device": torch.zeros(2, dtype=torch.int64, device="meta"),
    }
    found = {
        name: lambda m, bounds=bounds: m(x, cu_seqlens=bounds) for name, bounds in wrong.items()
    }
    found |= {
        f"{name}-state": lambda m, bounds=bounds: m(
            x, m.init_state(bounds.numel() - 1), cu_seqlens=bounds
        )
        for name, bounds in wrong.items()
        if name in ("short", "long", "falling", "late")
    }
    return found | {"batch": lambda m: m(x.view(2, 3, 4), cu_seqlens=torch.tensor([0, 3]))}


def mixer_misuses() -> dict[str, tuple[str, dict, Any]]:
    x = torch.zeros(2, 3, 4)
    hgru = {
        "x-rank": ({}, lambda m: m(x[0])),
        "x-width": ({}, lambda m: m(torch.zeros(2, 3, 5))),
        "gamma-width": ({}, lambda m: m(x, gamma=torch.zeros(3))),
        "gamma-refused": (
            {"forget_gate": "none", "input_gate": "none"},
            lambda m: m(x, gamma=torch.zeros(4)),
        ),
        "gamma-missing": ({"forget_gate": "bound"}, lambda m: m(x)),
        "state-width": ({}, lambda m: m(x, torch.zeros(2, 4))),
        "state-both-ways": ({"bidirectional": True}, lambda m: m(x, torch.zeros(2, 8))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 7))),
        "step-both-ways": ({"bidirectional": True}, lambda m: m.step(x[:, 0], torch.zeros(2, 8))),
    }
    hgru2 = {
        "x-rank": ({}, lambda m: m(x[0])),
        "gamma-width": ({}, lambda m: m(x, gamma=torch.zeros(3))),
        "state-width": ({}, lambda m: m(x, torch.zeros(2, 2, 2, 4))),
        "state-both-ways": ({"bidirectional": True}, lambda m: m(x, torch.zeros(2, 2, 2, 2))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 4))),
        "init-both-ways": ({"bidirectional": True}, lambda m: m.init_state(2)),
    }
    pair = {"normalize": True, "feature_map": "relu"}
    gla = {
        "x-width": ({}, lambda m: m(x[..., :3])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(4))),
        "state-shape": ({}, lambda m: m(x, torch.zeros(2, 2, 1, 3))),
        "state-tuple": ({}, lambda m: m(x, (torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1)))),
        "state-tensor": (pair, lambda m: m(x, torch.zeros(2, 2, 1, 2))),
        "state-z": (pair, lambda m: m(x, (torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 2)))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
    }
    attention = {
        "x-rank": ({}, lambda m: m(x[0])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(4))),
        "rows": ({}, lambda m: m(x, m.init_state(3, capacity=5))),
        "tensors": ({}, lambda m: m(x, m.init_state(2, capacity=5)[:2])),
        "room": ({}, lambda m: m(x, m.init_state(2, capacity=2))),
        "step-room": ({}, lambda m: m.step(x[:, 0], m.init_state(2, capacity=0))),
    }
    vector = {
        "x-rank": ({}, lambda m: m(x[0])),
        "x-width": ({}, lambda m: m(x[..., :3])),
        "gamma": ({}, lambda m: m(x, gamma=torch.zeros(2))),
        "state-width": ({}, lambda m: m(x, m.init_state(2)[..., :2])),
        "state-rank": ({}, lambda m: m(x, torch.zeros(2))),
        "step-rank": ({}, lambda m: m.step(x, m.init_state(2))),
        "step-gamma": ({}, lambda m: m.step(x[:, 0], m.init_state(2), torch.zeros(2))),
        "step-state": ({}, lambda m: m.step(x[:, 0], m.init_state(2)[..., :2])),
    }
    shifted = {
        "state-rows": ({"time_shift": True}, lambda m: m(x, torch.zeros(2, 3, 4))),
        "step-rows": ({}, lambda m: m.step(x[:, 0], torch.zeros(2, 4, 4))),
    }
    bound = {
        "gamma-width": ({"lower_bound": True}, lambda m: m(x, gamma=torch.zeros(3))),
        "gamma-step": (
            {"lower_bound": True},
            lambda m: m.step(x[:, 0], m.init_state(2), torch.zeros(3)),
        ),
    }
    gated = {
        name: ({"gate": "data", **options}, use)
        for name, (options, use) in (bound | {"gamma-off": ({}, vector["gamma"][1])}).items()
    }
    attention |= {f"offsets-{name}": ({}, use) for name, use in offsets_misuses().items()}
    shifted |= {
        f"offsets-{name}": ({"time_shift": True}, use) for name, use in offsets_misuses().items()
    }
    everywhere = {
        "double": ({}, lambda m: m(x.double())),
        "half": ({}, lambda m: m(x.half())),
        "integers": ({}, lambda m: m(x.long())),
        "double-step": ({}, lambda m: m.step(x[:, 0].double(), m.init_state(2))),
        "expanded-step": ({}, lambda m: m.step(x[:, 0], expanded(m.init_state(2, capacity=3)))),
    }
    cases = {
        "HGRU": hgru,
        "HGRU2": hgru2,
        "GatedLinearAttention": gla | bound,
        "Attention": attention,
        "ForgettingAttention": attention | bound,
        "GatedLinearRNN": vector | bound,
        "GatedRNN": vector | bound,
        "LRU": vector | gated,
        "SLRU": vector,
        "RWKV4": vector | shifted,
    }
    assert sorted(cases) == sorted(MIXERS)
    with_heads = ("HGRU2", "GatedLinearAttention", "Attention", "ForgettingAttention")
    return {
        f"{name}-{case}": (name, ({"num_heads": 2} if name in with_heads else {}) | options, use)
        for name, found in cases.items()
        for case, (options, use) in (found | everywhere).items()
    }


@pytest.mark.parametrize("case", list(mixer_misuses()))
def test_mixer_errors_read_the_same(case):
    name, options, use = mixer_misuses()[case]
    native, twin = getattr(tidegate.nn, name)(4, **options), getattr(cpp, name)(4, **options)
    assert refusal(lambda: use(native)) == refusal(lambda: use(twin))


def expanded(state: Any) -> Any:
    """The state with all sequences in the memory of the first one."""
    if isinstance(state, Tensor):
        return state[:1].expand_as(state)
    parts = [part[:1].expand_as(part) for part in state[:-1]]
    return tuple(parts) + (state[-1],)


def model_misuses() -> dict[str, tuple[str, Any]]:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    varied = torch.arange(6).view(2, 3)
    return {
        "ids-rank": ("CausalLM", lambda m: m(ids[0])),
        "labels-shape": ("CausalLM", lambda m: m(ids, ids[:1])),
        "labels-name": ("CausalLM", lambda m: m(ids, "previous")),
        "ids-high": ("CausalLM", lambda m: m(ids + 11)),
        "ids-low": ("CausalLM", lambda m: m(ids - 1, "next")),
        "ids-float": ("CausalLM", lambda m: m(ids.float())),
        "ids-of-a-step": ("CausalLM", lambda m: m.step(ids, m.init_state(2))),
        "ids-of-a-prefill": ("CausalLM", lambda m: m.prefill(ids + 11)),
        "ids-to-generate": ("CausalLM", lambda m: m.generate(ids + 11, 1)),
        "ids-to-classify": ("SequenceClassifier", lambda m: m(ids + 11)),
        "labels-high": ("CausalLM", lambda m: m(ids, ids + 11)),
        "labels-low": ("CausalLM", lambda m: m(ids, ids - 5)),
        "labels-float": ("CausalLM", lambda m: m(ids, ids.float())),
        "labels-own": ("CausalLM", lambda m: m(varied, varied)),
        "labels-equal": ("CausalLM", lambda m: m(varied, varied.clone())),
        "positions-high": ("CausalLM", lambda m: m.logits_at(ids, ids + 3)),
        "positions-float": ("CausalLM", lambda m: m.logits_at(ids, ids.float())),
        "classes": ("SequenceClassifier", lambda m: m(ids, torch.tensor([0, 5]))),
        "classes-count": ("SequenceClassifier", lambda m: m(ids, torch.tensor([0]))),
        "classes-of-images": (
            "ImageClassifier",
            lambda m: m(torch.zeros(1, 3, 4, 4), torch.tensor([-1])),
        ),
        "state-count": ("CausalLM", lambda m: m(ids, state=(torch.zeros(2, 8),))),
        "prefill-empty": ("CausalLM", lambda m: m.prefill(ids[:, :0])),
        "positions": ("CausalLM", lambda m: m.logits_at(ids, ids[:1])),
        "lengths-long": ("CausalLM", lambda m: m.prefill(ids, torch.tensor([1, 4]))),
        "lengths-zero": ("CausalLM", lambda m: m.prefill(ids, torch.tensor([0, 3]))),
        "temperature": ("CausalLM", lambda m: m.generate(ids, 1, -1.0)),
        "top-k": ("CausalLM", lambda m: m.generate(ids, 1, top_k=0)),
        "top-p": ("CausalLM", lambda m: m.generate(ids, 1, top_p=1.5)),
        "count": ("CausalLM", lambda m: m.generate(ids, -1)),
        "both-bounds": (
            "SequenceClassifier",
            lambda m: m(ids, lengths=torch.tensor([1, 1]), cu_seqlens=torch.tensor([0, 3])),
        ),
        "image-size": ("ImageClassifier", lambda m: m(torch.zeros(1, 3, 5, 4))),
    }


@pytest.mark.parametrize("case", list(model_misuses()))
def test_model_errors_read_the_same(case):
    name, use = model_misuses()[case]
    config = SMALL.replace(num_classes=5, patch_size=2)
    native, twin = getattr(tidegate.models, name)(config), getattr(cpp, name)(config)
    assert refusal(lambda: use(native)) == refusal(lambda: use(twin))


# What torch.nn.Module should stand


@ENTRIES
def test_copies_pickles_and_state_dicts(name):
    native, twin, _ = next(pairs(name))
    shake(native, twin)
    before = torch.random.get_rng_state()
    for twins in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert_identical(twin, twins, name)
        for mine, other in zip(twin.parameters(), twins.parameters(), strict=True):
            assert mine.data_ptr() != other.data_ptr()
    assert torch.equal(before, torch.random.get_rng_state())
    fresh = getattr(cpp, name)(*REGISTRY[name].arguments[0][0], **REGISTRY[name].arguments[0][1])
    fresh.load_state_dict(native.state_dict())
    assert_identical(native, fresh, name)
    native.load_state_dict(twin.state_dict())
    parent = nn.Sequential(fresh)
    assert list(parent.state_dict()) == [f"0.{key}" for key in native.state_dict()]
    parent.load_state_dict(nn.Sequential(native).state_dict())
    with pytest.raises(RuntimeError, match="extra"):
        fresh.load_state_dict({**native.state_dict(), "extra": torch.zeros(1)})
    assert not twin.eval().training
    assert twin.train().training


@pytest.mark.parametrize("name", [*MIXERS, "LowerBounds"])
def test_half_modules_keep_fp32_what_came_as_fp64(name, device):
    """What stays fp32 in a 16-bit module is fp32 there, whatever it was: else no op takes it."""
    for native, twin, what in pairs(name, device=device):
        wanted = [p.dtype for p in native.half().parameters()]
        inputs, keywords = REGISTRY[name].inputs(native, torch.device(device), torch.float16, 0)
        for module in (native, twin):
            module.double().half()
            assert [p.dtype for p in module.parameters()] == wanted, what
            with torch.no_grad():
                assert all(leaf.isfinite().all() for leaf in leaves(module(*inputs, **keywords)))


def test_half_modules_keep_their_phases_and_bounds():
    hgru, bounds = cpp.HGRU(4).bfloat16(), cpp.LowerBounds(2, 4).half()
    assert hgru.theta.dtype == torch.float32
    assert bounds.logits.dtype == torch.float32
    assert {p.dtype for n, p in hgru.named_parameters() if n != "theta"} == {torch.bfloat16}
    assert hgru.double().theta.dtype == torch.float64


def test_a_twin_trains():
    torch.manual_seed(0)
    model = cpp.CausalLM(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    ids = torch.randint(0, 11, (4, 9))
    losses = []
    for _ in range(40):
        loss = model(ids, "next").loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# Configurations, generation, files


def test_configurations():
    ours, theirs = tidegate.models.presets(), cpp.presets()
    assert ours == theirs
    for config in ours.values():
        assert cpp._cpp.normalized_config(config.to_json()) == config.to_json()
    fields = inspect.signature(LMConfig).parameters.values()
    made = {"mixer_options": {}, "layer_options": []}
    defaults = {p.name: made.get(p.name, p.default) for p in fields}
    assert json.loads(cpp._cpp.default_config()) == defaults
    assert cpp.mixers() == list(tidegate.models.mixers())


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 0},
        {"layers": -1},
        {"vocab_size": 0},
        {"glu_hidden": 0},
        {"mixer": "hgrn9"},
        {"init_std": -1.0},
        {"mixer": "hgrn2", "mixer_options": {"theta": "fixed"}},
        {"mixer": "gla", "mixer_options": {"heads": 2}},
        {"mixer_options": {"size": 3}},
        {"glu_activation": "gelu"},
        {"norm": "batch"},
        {"lower_bound": "rising"},
        {"dropout": 1.0},
        {"norm_eps": 0.0},
        {"width": 3},
    ],
    ids=str,
)
def test_configuration_errors_read_the_same(changes):
    text = json.dumps({"mixer": "hgrn", **changes})
    ours = refusal(lambda: LMConfig.from_json(text))
    assert ours == refusal(lambda: cpp._cpp.normalized_config(text))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"dim": "wide"}', '{"dim": 2.5}', '{"mixer_options": []}'], ids=repr
)
def test_broken_json_is_refused_by_both(text):
    for parse in (LMConfig.from_json, cpp._cpp.normalized_config):
        with pytest.raises(ValueError, match="LMConfig"):
            parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"seed": 5},
        {"seed": 5, "temperature": 0.7, "top_k": 3},
        {"seed": 6, "top_p": 0.8},
        {"seed": 7, "top_k": 5, "top_p": 0.5, "eos": 2},
        {"temperature": 0.0, "eos": 4, "lengths": torch.tensor([2, 5, 1])},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", list(generating()))
def test_generation(options, name, device):
    config = generating()[name]
    native = tidegate.models.CausalLM(config, device=device, dtype=torch.float64)
    twin = cpp.CausalLM(config, device=device, dtype=torch.float64)
    shake(native, twin)
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (3, 5)).to(device)
    ours, theirs = native.generate(ids, 12, **options), twin.generate(ids, 12, **options)
    assert torch.equal(ours, theirs)
    assert twin.training
    positions = torch.tensor([[0], [4], [2]], device=device)
    mine = native.logits_at(ids, positions)
    assert_same([mine], [twin.logits_at(ids, positions)], f"{name} at positions")


FILES = {
    "hgrn": SMALL.replace(mixer_options={"theta": "fixed"}),
    "bounded": generating()["gla+transformer+fox+lru"],
}


@pytest.mark.parametrize("config", FILES.values(), ids=FILES)
@pytest.mark.parametrize("name", MODELS)
def test_both_languages_read_each_others_files(name, config, tmp_path):
    config = config.replace(num_classes=5, patch_size=2, vocab_size=11, tied=False)
    native, twin = getattr(tidegate.models, name)(config), getattr(cpp, name)(config)
    shake(native, twin)
    native.bfloat16().save(tmp_path / "python")
    twin.bfloat16().save(tmp_path / "cpp" / "new")
    for folder in (tmp_path / "python", tmp_path / "cpp" / "new"):
        for cls in (type(native), type(twin)):
            loaded = cls.load(folder)
            assert_identical(native, loaded, f"{cls.__module__} from {folder}")
            assert not loaded.training
            assert loaded.config == config
    texts = [(tmp_path / p / "config.json").read_text() for p in ("python", "cpp/new")]
    assert texts[0] == texts[1]
    assert not list(tmp_path.rglob("*.tmp*"))


def test_a_file_of_another_configuration_is_refused(tmp_path):
    cpp.CausalLM(SMALL).save(tmp_path)
    (tmp_path / "config.json").write_text(SMALL.replace(layers=3).to_json())
    messages = []
    for cls in (tidegate.models.CausalLM, cpp.CausalLM):
        with pytest.raises(ValueError, match="which the configuration asks for") as caught:
            cls.load(tmp_path)
        messages.append(str(caught.value).split("'")[0])
    assert messages[0] == messages[1]
    (tmp_path / "config.json").unlink()
    with pytest.raises(RuntimeError, match="no such file"):
        cpp.CausalLM.load(tmp_path)


# safetensors


def test_safetensors_between_the_libraries(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
    dtypes += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {f"t{i}": (torch.randn(i, 3) * 9).to(d) for i, d in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "strided": torch.randn(4, 6).t()[1:]}
    cpp.save_safetensors(tensors, tmp_path / "cpp.safetensors", {"format": "pt"})
    contiguous = {k: v.contiguous() for k, v in tensors.items()}
    library.save_file(contiguous, tmp_path / "library.safetensors", {"format": "pt"})
    for file in ("cpp", "library"):
        for load in (cpp.load_safetensors, library.load_file):
            loaded = load(tmp_path / f"{file}.safetensors")
            assert loaded.keys() == tensors.keys()
            for key, value in tensors.items():
                assert loaded[key].dtype == value.dtype
                assert torch.equal(loaded[key], value)


def test_one_checksum_for_both_languages(tmp_path):
    """A flipped bit anywhere is noticed by both, in a file of either."""
    tidegate.models.CausalLM(SMALL).save(tmp_path / "python")
    cpp.CausalLM(SMALL).save(tmp_path / "cpp")
    draw = random.Random(3)
    for language in ("python", "cpp"):
        folder = tmp_path / language
        for cls in (tidegate.models.CausalLM, cpp.CausalLM):
            cls.load(folder)
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (noted,) = re.findall(rb'"crc32":"([0-9a-f]{8})"', data)
        zeroed = data.replace(noted, b"00000000", 1)
        assert int(noted, 16) == zlib.crc32(zeroed)
        start = 8 + int.from_bytes(data[:8], "little")
        for _ in range(20):
            place = draw.randrange(start, len(data))
            flipped = bytearray(data)
            flipped[place] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            for cls in (tidegate.models.CausalLM, cpp.CausalLM):
                with pytest.raises((ValueError, RuntimeError), match="damaged: its checksum is "):
                    cls.load(folder)
        path.write_bytes(data.replace(noted, b"12345678", 1))
        for cls in (tidegate.models.CausalLM, cpp.CausalLM):
            with pytest.raises((ValueError, RuntimeError), match="'12345678' was noted when"):
                cls.load(folder)
        path.write_bytes(data.replace(b'"crc32"', b'"crc33"', 1))  # a file without one is taken
        for cls in (tidegate.models.CausalLM, cpp.CausalLM):
            cls.load(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_the_checksum_is_that_of_zlib(size, tmp_path):
    """Of any number of bytes: eight are taken at a time."""
    path = tmp_path / "a.safetensors"
    cpp.save_safetensors({"x": torch.arange(size, dtype=torch.uint8)}, path, {"about": "x"})
    data = path.read_bytes()
    (noted,) = re.findall(rb'"crc32":"([0-9a-f]{8})"', data)
    assert int(noted, 16) == zlib.crc32(data.replace(noted, b"00000000", 1))


def test_every_truncation_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    cpp.save_safetensors({"x": torch.arange(4), "y": torch.ones(3)}, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(RuntimeError, match=re.escape(str(path))):
            cpp.load_safetensors(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(RuntimeError, match="1 bytes after the last tensor"):
        cpp.load_safetensors(path)


BROKEN_HEADERS = {
    "not JSON": ("{", "broken safetensors header"),
    "a list": ("[]", "not a JSON object"),
    "twice": (
        '{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        '"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        "is twice",
    ),
    "dtype": ('{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,4]}}', "not supported"),
    "negative": ('{"x":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}', "no size"),
    "huge": (
        '{"x":{"dtype":"U8","shape":[4611686018427387904,4611686018427387904],'
        '"data_offsets":[0,4]}}',
        "do not fit",
    ),
    "size": ('{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}', "do not fit"),
    "backwards": ('{"x":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}', "do not fit"),
    "hole": ('{"x":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}', "begins at byte 1"),
    "fields": ('{"x":{"dtype":"U8"}}', "expected {dtype, shape, data_offsets}"),
}


@pytest.mark.parametrize("case", list(BROKEN_HEADERS))
def test_broken_headers_are_refused(case, tmp_path):
    header, message = BROKEN_HEADERS[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"abcd")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        cpp.load_safetensors(path)


def test_damaged_bytes_never_crash(tmp_path):
    """Any single changed byte of the header: a clear error, or tensors that the file can hold."""
    path = tmp_path / "a.safetensors"
    cpp.save_safetensors({"x": torch.arange(4), "y": torch.ones(3)}, path)
    data = path.read_bytes()
    for position in range(len(data) - 44):
        changed = bytearray(data)
        changed[position] = zlib.crc32(bytes([position])) & 0xFF
        path.write_bytes(changed)
        try:
            loaded = cpp.load_safetensors(path)
        except RuntimeError:
            continue
        assert sum(t.nbytes for t in loaded.values()) <= len(data)


def test_a_failed_save_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.safetensors"
    cpp.save_safetensors({"x": torch.arange(4)}, path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="dtype"):
        cpp.save_safetensors({"x": torch.zeros(2, dtype=torch.complex64)}, path)
    with pytest.raises(RuntimeError, match="cannot create"):
        cpp.save_safetensors({"x": torch.arange(4)}, tmp_path / "none" / "a.safetensors")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
