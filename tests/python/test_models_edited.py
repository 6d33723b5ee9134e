"""Models edited after they were built, prefixes of other models, and what is no number."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.generating_models import VOCAB, make, prompts
from torch import nn

from tidegate.models import CausalLM, Decoder
from tidegate.models.engine import engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "norm", nn.RMSNorm(32, dtype=torch.float64)),
        lambda m: setattr(m, "blocks", m.blocks[:1]),
        lambda m: m.blocks.__setitem__(1, m.blocks[0]),
        lambda m: setattr(m, "head", nn.Linear(32, VOCAB, dtype=torch.float64)),
        lambda m: setattr(m, "scale", 0.3),
        lambda m: setattr(m.blocks[0].mixer, "window", 2),
        lambda m: setattr(m.blocks[0].mixer_norm, "eps", 3.0),
        lambda m: setattr(m.blocks[0], "step", lambda x, state, gamma: -x),
    ],
    ids=["other norm", "fewer", "shared", "other head", "scale", "window", "eps", "step"],
)
def test_a_model_edited_after_it_was_built_generates_what_it_computes(change):
    """The engine knows the configuration alone: it took no notice of other numbers in the modules,
    and complained of other tensors than the configuration's."""
    ids = torch.stack(prompts(9))
    model = make("fox").eval()
    plain = model.generate(ids, 12, temperature=0.0)
    change(model)
    assert engine_of(model) is None
    logits, state = model.prefill(ids, capacity=12)
    tokens = []
    for _ in range(12):
        tokens.append(logits.argmax(-1))
        with torch.no_grad():
            logits = model.step(tokens[-1], state)
    changed = model.generate(ids, 12, temperature=0.0)
    assert torch.equal(changed[:, 9:], torch.stack(tokens, 1))
    assert not torch.equal(changed, plain)


def test_a_matrix_transposed_in_place_is_read_as_it_is_now():
    """Its address is what it was; its strides are not."""
    ids = torch.stack(prompts(9))
    model = make("fox")
    model.generate(ids, 12, temperature=0.0)
    projection = model.blocks[0].mixer.out_proj.weight
    projection.data = projection.data.t()
    wanted = copy.deepcopy(model).generate(ids, 12, temperature=0.0)
    assert torch.equal(model.generate(ids, 12, temperature=0.0), wanted)
    assert engine_of(model) is not None  # what generation does not depend on may be changed
    model.recompute, model.note, model.blocks[0].number = "norms", "mine", 1
    model.blocks[0].dropout = nn.Identity()
    model.head = nn.Linear(32, VOCAB, bias=False, dtype=torch.float64)
    assert engine_of(model) is not None


INTEGERS = [
    ("CausalLM.generate: max_new_tokens", lambda m, v: m.generate(torch.zeros(1, 2).long(), v)),
    ("CausalLM.generate: eos", lambda m, v: m.generate(torch.zeros(1, 2).long(), 3, eos=v)),
    ("CausalLM.generate: top_k", lambda m, v: m.generate(torch.zeros(1, 2).long(), 3, top_k=v)),
    ("Decoder: max_batch", lambda m, v: Decoder(m, v)),
    ("Decoder: capacity", lambda m, v: Decoder(m, 1, capacity=v)),
    ("Decoder: max_stop_ids", lambda m, v: Decoder(m, 1, max_stop_ids=v)),
    ("Decoder: prompt_chunk", lambda m, v: Decoder(m, 1, prompt_chunk=v)),
    ("Decoder.add: max_new_tokens", lambda m, v: Decoder(m, 1).add([1], max_new_tokens=v)),
    ("Decoder.add: stop_ids", lambda m, v: Decoder(m, 1).add([1], stop_ids=[v])),
    ("Decoder.add: stream", lambda m, v: Decoder(m, 1).add([1], stream=v)),
    ("Decoder.remove: slot", lambda m, v: Decoder(m, 1).remove(v)),
    ("Decoder.fork: slot", lambda m, v: Decoder(m, 1).fork(v)),
    ("Decoder.save_prefix: slot", lambda m, v: Decoder(m, 1).save_prefix(v, "nowhere")),
    ("Decoder.steps: count", lambda m, v: Decoder(m, 1).steps(v)),
]


@pytest.mark.parametrize(("name", "call"), INTEGERS, ids=[name for name, _ in INTEGERS])
def test_what_is_no_integer_of_64_bits_is_refused_by_name(name, call):
    """torch's binding of the engine answered with its own declaration, or rounded 1.5 to 1."""
    model = make("hgrn2")
    for value in (1.5, "x", True, [1]):
        with pytest.raises(ValueError, match=f"^{name}: expected an integer.*; got "):
            call(model, value)
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of 64 bits; got 1000"):
        call(model, 10**30)


def test_text_is_no_list_of_stop_strings():
    """Each of its characters ended the sequence."""
    decoder = Decoder(make("hgrn2"), 1, decode=bytes)
    for name in ("stop_strings", "stop_ids"):
        with pytest.raises(ValueError, match=f"Decoder.add: {name}: expected a list; got 'END'"):
            decoder.add([1], **{name: "END"})
    with pytest.raises(ValueError, match="stop_strings: expected strings that are not empty"):
        decoder.add([1], stop_strings=[3])
    with pytest.raises(ValueError, match="stop_strings: expected text that UTF-8 can write"):
        decoder.add([1], stop_strings=["\ud800"])
    assert decoder.taken == 0


def test_a_prefix_of_another_configuration_is_refused(tmp_path):
    """Its tensors may have the very shapes that this model's state has."""
    path = tmp_path / "prefix"

    def saved(name: str) -> Decoder:
        decoder = Decoder(make(name), 1)
        decoder.save_prefix(decoder.add([1, 2, 3]), path)
        return decoder

    for name, other, field in (
        ("lru", "hgrn", "mixer = 'hgrn'; got one with 'lru'"),
        ("gla-normal", "gla", "mixer_options = {.*}; got one with {.*}"),
    ):
        saved(name)
        decoder = Decoder(make(other), 1)
        with pytest.raises(ValueError, match=f"expected the prefix of a model with {field}"):
            decoder.load_prefix(path)
        assert decoder.taken == 0
    decoder = saved("fox-pro-grouped")
    options = dict(reversed(decoder.model.config.mixer_options.items()))
    assert len(options) > 1  # in another order they are the same options
    same = CausalLM(dataclasses.replace(decoder.model.config, mixer_options=options)).double()
    assert Decoder(same, 1).load_prefix(path) == 0
    decoder = saved("fox")
    fewer = CausalLM(dataclasses.replace(decoder.model.config, layers=1)).double()
    with pytest.raises(ValueError, match="a model with layers = 1; got one with 2"):
        Decoder(fewer, 1).load_prefix(path)
    trained = CausalLM(dataclasses.replace(decoder.model.config, dropout=0.5)).double()
    assert Decoder(trained, 1).load_prefix(path) == 0
    # A field that the version which wrote the file did not know has its default.
    tensors = load_file(path)
    config = json.loads(bytes(tensors["config"].tolist()))
    for field, other in (("norm_eps", None), ("mixer", "a model with mixer = 'fox'")):
        older = json.dumps({k: v for k, v in config.items() if k != field}).encode()
        save_file({**tensors, "config": torch.tensor(list(older), dtype=torch.uint8)}, path)
        if other is None:
            assert Decoder(trained, 1).load_prefix(path) == 0
        else:
            with pytest.raises(ValueError, match=other):
                Decoder(trained, 1).load_prefix(path)
