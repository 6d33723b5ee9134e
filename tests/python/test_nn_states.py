"""States that do not fit are refused by the module, in its own words, alike in both languages."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tidegate.nn

DIM = 8
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "HGRU": ("HGRU", {}),
    "HGRU composed": ("HGRU", {"theta": "data"}),
    "HGRU2": ("HGRU2", {"num_heads": 2}),
    "GLA": ("GatedLinearAttention", {"num_heads": 2}),
    "GLA normalised": (
        "GatedLinearAttention",
        {"num_heads": 2, "normalize": True, "feature_map": "relu"},
    ),
    "Attention": ("Attention", {"num_heads": 2}),
    "ForgettingAttention": ("ForgettingAttention", {"num_heads": 2, "preset": "pro"}),
    "GatedLinearRNN": ("GatedLinearRNN", {}),
    "GatedRNN": ("GatedRNN", {}),
    "LRU": ("LRU", {}),
    "LRU gated": ("LRU", {"gate": "data"}),
    "SLRU": ("SLRU", {}),
    "RWKV4": ("RWKV4", {"time_shift": True}),
}
by_mixer = pytest.mark.parametrize("which", list(MIXERS))


def make(which: str) -> list[Any]:
    """The mixer, and its C++ twin where that was built for this Python."""
    name, options = MIXERS[which]
    mixers = [getattr(tidegate.nn, name)(DIM, **options)]
    if importlib.util.find_spec("tidegate._cpp") is not None:
        from tidegate import cpp

        mixers.append(getattr(cpp, name)(DIM, **options))
    return mixers


def parts_of(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def with_part(state: Any, place: int, part: Tensor) -> Any:
    """The state with another tensor in one place."""
    if isinstance(state, Tensor):
        return part
    parts = list(state)
    parts[place] = part
    return tuple(parts)


def wrong_dtype(part: Tensor) -> Tensor:
    return part.double() if part.is_floating_point() else part.float()


def check_refused(which: str, state: Any, said: str, **keywords: Any) -> None:
    """forward() and, where nothing is packed, step() refuse the state with the same words."""
    packed = "cu_seqlens" in keywords
    x = torch.zeros(1 if packed else 2, 4, DIM)
    texts = []
    for mixer in make(which):
        with pytest.raises(ValueError, match=said) as caught:
            mixer(x, state, **keywords)
        texts.append(str(caught.value))
        if not packed:
            with torch.no_grad(), pytest.raises(ValueError, match=said) as caught:
                mixer.step(x[:, 0], state)
            texts.append(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith(f"{MIXERS[which][0]}: state: ")


@by_mixer
def test_a_state_of_other_sequences_is_refused(which):
    mixer = make(which)[0]
    check_refused(which, mixer.init_state(3, capacity=9), r"expected .*\[2, .*\]; got \(3, ")
    bounds = torch.tensor([0, 1, 4, 4])
    check_refused(
        which,
        mixer.init_state(2, capacity=9),
        r"expected .*\[3, .*\]; got \(2, ",
        cu_seqlens=bounds,
    )


@by_mixer
def test_a_part_of_another_shape_or_dtype_is_refused(which):
    state = make(which)[0].init_state(2, capacity=9)
    for place, part in enumerate(parts_of(state)):
        check_refused(which, with_part(state, place, part[None]), r"expected .*\]; got \(1, 2")
        wrong = with_part(state, place, wrong_dtype(part))
        check_refused(which, wrong, "expected (float|int)[0-9]+; got (float|int)[0-9]+$")


@by_mixer
def test_the_state_that_a_mixer_returns_fits(which):
    bounds = torch.tensor([0, 1, 4, 4])
    for mixer in make(which):
        _, state = mixer(torch.randn(2, 4, DIM), mixer.init_state(2, capacity=9))
        mixer(torch.randn(2, 4, DIM), state)
        _, state = mixer(torch.randn(1, 4, DIM), mixer.init_state(3), cu_seqlens=bounds)
        mixer(torch.randn(1, 4, DIM), state, cu_seqlens=bounds)
        with torch.no_grad():
            mixer.step(torch.randn(3, DIM), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@by_mixer
def test_states_of_modules_in_other_dtypes_fit(which, dtype):
    for mixer in make(which):
        mixer = mixer.to(dtype)
        state = mixer.init_state(2, capacity=9)
        x = torch.randn(2, 4, DIM, dtype=dtype)
        _, state = mixer(x, state)
        with torch.no_grad():
            mixer.step(x[:, 0], state)


@by_mixer
def test_steps_take_states_of_any_strides_and_no_sequences(which):
    for mixer in make(which):
        mixer.requires_grad_(False)
        plain, strided = (mixer.init_state(3, capacity=9) for _ in range(2))
        for place, part in enumerate(parts_of(strided)):
            if part.is_floating_point():
                other = part.movedim(0, -1).contiguous().movedim(-1, 0)
                strided = with_part(strided, place, other)
        for x in torch.randn(3, 3, DIM):
            torch.testing.assert_close(mixer.step(x, strided), mixer.step(x, plain))
        for part, other in zip(parts_of(plain), parts_of(strided), strict=True):
            torch.testing.assert_close(part, other)
        assert mixer.step(torch.randn(0, DIM), mixer.init_state(0, capacity=9)).shape == (0, DIM)


def test_an_absent_state_is_refused():
    for which in ("HGRU", "HGRU2", "LRU", "RWKV4", "GatedRNN", "GatedLinearRNN"):
        mixer = make(which)[0]
        shape = ", ".join(map(str, mixer.state_shape))
        with pytest.raises(ValueError, match=rf"state: expected \[2, {shape}\]; got None"):
            mixer.step(torch.zeros(2, DIM), None)
        with pytest.raises(ValueError, match=rf"state: expected \[2, {shape}\]; got a tuple"):
            mixer.step(torch.zeros(2, DIM), (mixer.init_state(2),))


@pytest.mark.parametrize("size", [-1, 2.0, "2", True])
@by_mixer
def test_sizes_that_are_no_counts_are_refused(which, size):
    owner, mixer = MIXERS[which][0], make(which)[0]
    calls = {
        "batch": lambda: mixer.init_state(size),
        "capacity": lambda: mixer.init_state(2, capacity=size),
    }
    for name, call in calls.items():
        said = f"{owner}.init_state: {name}: expected an integer of 0 or more; got {size!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            call()


@pytest.mark.parametrize("which", ["HGRU", "GLA normalised", "Attention"])
def test_sizes_may_be_numpys_or_a_compilers(which):
    torch._dynamo.reset()
    mixer = make(which)[0]
    for part in parts_of(mixer.init_state(np.int64(0), capacity=np.int32(4))):
        assert part.numel() == 0 or part.shape == (2,)

    class Empty(torch.nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return parts_of(mixer.init_state(x.size(0), capacity=x.size(1)))

    compiled = torch.compile(Empty(), backend="eager", fullgraph=True, dynamic=True)
    sizes = torch.export.Dim.AUTO
    exported = torch.export.export(
        Empty(), (torch.zeros(3, 5),), dynamic_shapes=({0: sizes, 1: sizes},)
    ).module()
    for shape in ((3, 5), (4, 6)):
        wanted = mixer.init_state(shape[0], capacity=shape[1])
        for made in (compiled, exported):
            for part, other in zip(made(torch.zeros(shape)), parts_of(wanted), strict=True):
                assert part.shape == other.shape


@by_mixer
def test_a_step_refuses_to_lose_a_gradient(which):
    """In one sentence for every mixer, before the state moves."""
    for mixer in make(which):
        state = mixer.init_state(2, capacity=9)
        before = [part.clone() for part in parts_of(state)]
        x = torch.randn(2, DIM)
        with pytest.raises(RuntimeError) as caught:
            mixer.step(x, state)
        assert str(caught.value).splitlines()[0] == (
            f"{MIXERS[which][0]}.step: a step has no gradient, but one is recorded: call it under "
            "torch.no_grad(), or forward() over whole sequences"
        )
        for part, kept in zip(parts_of(state), before, strict=True):
            assert torch.equal(part, kept)
        mixer.requires_grad_(False)
        mixer.step(x, state)  # nothing asks for one
        with pytest.raises(RuntimeError, match=r"\.step: a step has no gradient"):
            mixer.step(x.requires_grad_(), state)
        with torch.inference_mode():
            mixer.step(x, mixer.init_state(2, capacity=9))


@by_mixer
def test_a_step_compiles_whole(which):
    """Attention's too, where its capacity is fixed."""
    torch._dynamo.reset()
    mixer = make(which)[0].requires_grad_(False)
    compiled = torch.compile(mixer.step, fullgraph=True, backend="aot_eager")
    states = [mixer.init_state(2, capacity=9) for _ in range(2)]
    with torch.no_grad():
        for x in torch.randn(4, 2, DIM):
            torch.testing.assert_close(compiled(x, states[0]), mixer.step(x, states[1]))
    for part, other in zip(*map(parts_of, states), strict=True):
        torch.testing.assert_close(part, other)


@pytest.mark.parametrize("which", ["HGRU2", "Attention", "ForgettingAttention"])
def test_a_step_is_exported(which):
    mixer = make(which)[0].requires_grad_(False)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: Tensor, *state: Tensor) -> Tensor:
            return self.mixer.step(x, state[0] if len(state) == 1 else state)

    state, other = (parts_of(mixer.init_state(2, capacity=9)) for _ in range(2))
    with torch.no_grad():
        exported = torch.export.export(Step(), (torch.randn(2, DIM), *state)).module()
        for x in torch.randn(3, 2, DIM):
            torch.testing.assert_close(exported(x, *state), Step()(x, *other))
    for part, expected in zip(state, other, strict=True):
        torch.testing.assert_close(part, expected)


def test_a_compiled_step_asks_for_a_capacity():
    torch._dynamo.reset()
    mixer = make("Attention")[0].requires_grad_(False)
    compiled = torch.compile(mixer.step, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="expected a capacity, which a compiled"):
        compiled(torch.randn(2, DIM), mixer.init_state(2))


@pytest.mark.parametrize("which", ["Attention", "ForgettingAttention"])
def test_a_state_on_two_devices_is_refused(which):
    texts = []
    for mixer in make(which):
        state = mixer.init_state(2, capacity=9)
        for place, said in ((3, "lengths: expected cpu, as its keys"), (7, "room: expected cpu")):
            wrong = with_part(state, place, state[place].to("meta"))
            for call in (mixer.step, lambda x, s, mixer=mixer: mixer(x[:, None], s)):
                with torch.no_grad(), pytest.raises(ValueError, match=f": state: {said}") as caught:
                    call(torch.randn(2, DIM), wrong)
                texts.append(str(caught.value).splitlines()[0])
    assert len(set(texts)) == 2
