"""What models and modules are called with: errors name the argument, what it should be and is."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tidegate.models import CausalLM, LMConfig, SequenceClassifier

MIXERS = ("hgrn", "hgrn2", "gla", "lru", "rwkv4", "gated-rnn", "gated-linear-rnn")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(LMConfig("hgrn", dim=32, layers=1, vocab_size=50))


def ids(rows: int = 2, time: int = 5) -> torch.Tensor:
    return torch.arange(rows * time).view(rows, time) % 50


CALLS: dict[str, tuple[Callable[[CausalLM], object], str]] = {
    "ids above": (
        lambda m: m(ids() + 48),
        r"CausalLM: ids: expected 0 to below .*; got 57",
    ),
    "ids below": (lambda m: m(ids() - 1), r"CausalLM: ids: expected 0 to below .*; got -1"),
    "array": (lambda m: m(np.zeros((2, 3))), r"CausalLM: ids: expected an int.*; got array"),
    "list": (lambda m: m([[1, 2]]), r"CausalLM: ids: expected an int.*; got \[\[1, 2\]\]"),
    "step": (
        lambda m: m.step(ids()[:, 0] + 50, m.init_state(2)),
        r"CausalLM.step: ids: expected 0 to below vocab_size=50; got 55",
    ),
    "step's shape": (
        lambda m: m.step(ids(), m.init_state(2)),
        r"CausalLM.step: ids: expected int32 or int64 \[B\]; got torch.int64 \(2, 5\)",
    ),
    "states": (lambda m: m.step(ids()[:, 0], ()), r"CausalLM.step: state: .* 1 layers; got 0"),
    "generate": (lambda m: m.generate(ids() + 50, 3), r"CausalLM.generate: ids: .*; got 59"),
    "lengths": (
        lambda m: m.generate(ids(), 3, lengths="x"),
        r"lengths: expected int32 or int64 \[B=2\]; got 'x'",
    ),
    "prefill lengths": (
        lambda m: m.prefill(ids(), lengths="x"),
        r"lengths: expected int32 or int64 \[B=2\]; got 'x'",
    ),
    "float labels": (
        lambda m: m(ids(), ids().float()),
        r"CausalLM: labels: expected int64; got torch.float32",
    ),
    "labels in a list": (lambda m: m(ids(), [1]), r"CausalLM: labels: .* tensor; got a list"),
    "labels above": (
        lambda m: m(ids(), ids() + 45),
        r"CausalLM: labels: expected -100, or 0 to below 50; got 54",
    ),
    "labels below": (lambda m: m(ids(), ids() - 99), r"CausalLM: labels: expected .*; got -99"),
    "positions": (
        lambda m: m.logits_at(ids(), torch.tensor([[5], [0]])),
        r"CausalLM.logits_at: positions: expected 0 to below T=5; got 5",
    ),
    "float positions": (
        lambda m: m.logits_at(ids(), torch.zeros(2, 1)),
        r"CausalLM.logits_at: positions: expected int64; got torch.float32",
    ),
    "positions in a list": (
        lambda m: m.logits_at(ids(), [[1]]),
        r"CausalLM.logits_at: positions: expected an int64 tensor \[B, P\]; got a list",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_errors_name_argument_expected_and_given(case, model):
    call, message = CALLS[case]
    with pytest.raises(ValueError, match=message):
        call(model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_new_tokens", "an integer >= 0"),
        ("temperature", "a number >= 0"),
        ("top_k", "an integer >= 1"),
        ("top_p", r"a number in \(0, 1\]"),
        ("min_p", r"a number in \[0, 1\]"),
        ("repetition_penalty", "a number > 0"),
        ("eos", "an integer"),
        ("seed", "an integer"),
    ],
)
@pytest.mark.parametrize("wrong", ["x", "1", [1], torch.ones(2)], ids=repr)
def test_options_of_generate_that_are_no_numbers(name, expected, wrong, model):
    options = {"max_new_tokens": 1, name: wrong}
    message = rf"^CausalLM.generate: {name}: expected {expected}; got {re.escape(repr(wrong))}"
    with pytest.raises(ValueError, match=message):
        model.generate(ids(), **options)


@pytest.mark.parametrize("copied", [False, True])
def test_labels_that_are_the_ids_are_refused(copied, model):
    """The habit of Hugging Face's users trains an identity map here."""
    x = ids()
    with pytest.raises(ValueError, match='labels: .* got ids themselves: labels="next" predicts'):
        model(x, x.clone() if copied else x)
    assert model(x, "next").loss > 0
    masked = x.clone()
    masked[:, ::2] = -100
    assert model(x, masked).loss > 0
    constant = torch.full((2, 5), 7)  # whose next tokens are the same
    assert model(constant, constant.clone()).loss > 0


def test_labels_of_classes_are_checked():
    model = SequenceClassifier(LMConfig("hgrn", dim=32, layers=1, vocab_size=50, num_classes=3))
    with pytest.raises(ValueError, match=r"SequenceClassifier: labels: expected -100, or .* got 3"):
        model(ids(), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"labels: expected one a sequence, \(2,\); got \(3,\)"):
        model(ids(), torch.zeros(3, dtype=torch.int64))
    assert model(ids(), torch.tensor([0, 2])).loss > 0


@pytest.mark.parametrize("mixer", [*MIXERS, "transformer", "fox"])
def test_modules_name_the_dtype_that_they_take(mixer):
    module = CausalLM(LMConfig(mixer, dim=32, layers=1)).blocks[0].mixer
    for x, given in ((torch.randn(2, 3, 32).double(), "float64"), (ids(6, 32)[None], "int64")):
        message = rf"{type(module).__name__}: x: expected float32, as the .*; got {given}"
        with pytest.raises(ValueError, match=message):
            module(x)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
            module(x)
    with pytest.raises(ValueError, match=r"x: expected a tensor \[B, T, dim=32\]; got a list"):
        module([1.0])
    with torch.autocast("cpu", torch.bfloat16):  # casts what 16-bit layers before gave
        assert module(torch.randn(2, 3, 32).bfloat16())[0].isfinite().all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_expanded_state_is_refused_by_name(mixer):
    module = CausalLM(LMConfig(mixer, dim=32, layers=1)).blocks[0].mixer
    state = module.init_state(2)
    before = state.clone()
    with torch.no_grad(), pytest.raises(ValueError, match=r"\.step: state: expected memory of its"):
        module.step(torch.randn(2, 32), state[:1].expand_as(state))
    assert torch.equal(state, before)


@pytest.mark.parametrize("attention", ["transformer", "fox"])
def test_a_full_cache_is_refused_before_any_state_moves(attention):
    """The model's first layer is recurrent, and would have moved first."""
    model = CausalLM(LMConfig(["hgrn", attention], dim=32, layers=2)).eval()
    x = ids()
    with torch.no_grad():
        _, state = model.prefill(x, capacity=1)
        model.step(x[:, 0], state)
        before = [t.clone() for t in (state[0], *state[1])]
        with pytest.raises(ValueError, match=r"state: expected room for 7 tokens, .*; got 6"):
            model.step(x[:, 1], state)
        for was, now in zip(before, (state[0], *state[1]), strict=True):
            assert torch.equal(was, now)


def test_a_window_makes_room_in_a_full_cache():
    model = CausalLM(
        LMConfig(["hgrn", "transformer"], dim=32, layers=2, layer_options=[{}, {"window": 3}])
    ).eval()
    x = ids()
    with torch.no_grad():
        _, state = model.prefill(x, capacity=1)
        for n in range(8):
            model.step(x[:, n % 5], state)
