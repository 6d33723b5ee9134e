"""The C++ modules against the Python ones: same options, names, numbers."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest
import torch
from support.model_configs import SMALL
from support.module_registry import REGISTRY, public_modules
from support.parity import (
    MIXERS,
    assert_identical,
    assert_same,
    construct,
    cpp,
    leaves,
    pairs,
    run,
    shake,
)
from torch import nn

from tidegate.models import CausalLM, LMConfig

pytestmark = pytest.mark.usefixtures("one_thread")
ENTRIES = pytest.mark.parametrize("name", list(REGISTRY))


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


@pytest.mark.parametrize("mixer", ["hgrn", "hgrn2", "fox"])
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_steps_round_the_residual_stream_as_a_pass_does(residual, mixer):
    """In the dtype that is asked for inside autocast, bit for bit."""
    heads = {} if mixer == "hgrn" else {"mixer_options": {"num_heads": 2}}
    config = LMConfig(dim=16, layers=3, vocab_size=11, mixer=mixer, **heads)
    native, twin = (m(config).eval().requires_grad_(False) for m in (CausalLM, cpp.CausalLM))
    shake(native, twin)
    ids = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    drawn = []
    for model in (native, twin):
        model.residual_dtype = residual
        state = model.init_state(3, capacity=6)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(ids).logits
            for t in range(ids.size(1)):
                assert torch.equal(model.step(ids[:, t], state), wanted[:, t])
            drawn.append(model.generate(ids, 40, seed=1))
    assert torch.equal(*drawn)


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


def test_copies_and_pickles_train_as_their_models_do():
    """What is set after construction, and not in a state dict, comes along, as in Python."""
    model = cpp.CausalLM(LMConfig(dim=4, layers=1, vocab_size=5))
    model.recompute, model.residual_dtype = "blocks", torch.float32
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (other.recompute, other.residual_dtype) == ("blocks", torch.float32)


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
