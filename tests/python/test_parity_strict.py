"""Configurations and files that are broken: both languages refuse the same ones in the same words,
in one line, before anything is built, and in time that grows with the file alone."""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.model_configs import SMALL

import tidegate
from tidegate.models import LMConfig, mixers
from tidegate.models.registry import option_names

# Skipped where it was not built for this Python; one that is there and does not load is a failure.
if importlib.util.find_spec("tidegate._cpp") is None:
    pytest.skip("tidegate._cpp was not built for this Python", allow_module_level=True)

from tidegate import cpp

FIELDS = list(LMConfig().to_dict())
INT64 = 2**63
VALUES: list[Any] = [None, True, False, [], [1], ["hgrn"], ["hgrn", 3], {}, {"a": 1}, {"bias": 1}]
VALUES += [{"expand": [1]}, [{"expand": [1]}], [{}, 3], [{"bias": "x"}], [{}] * 5, ["hgrn"] * 4]
VALUES += [0, 1, -1, 2, 4, 100_001, 2**24, 2**24 + 1, 2**31 - 1, 2**31, INT64 - 1, -INT64]
VALUES += [INT64, -INT64 - 1, 2**64, 10**30, -(10**30), 10**400, 10**5]
VALUES += [0.0, 2.0, 0.5, -0.5, 1e-5, 1e15, 1e16, 1.5e300, 5e-324, float("nan"), float("-inf")]
VALUES += ["", "x", "none", "layer", "data", "True", "1", "tab\t'quoted'", "é🎈\x7f", "y" * 200]


def text_of(values: dict[str, Any]) -> str:
    return json.dumps({"mixer": "hgrn", **values})


def answer(parse: Callable[[str], Any], text: str) -> tuple[Any, str]:
    """The configuration that a parser reads and "", or None and its error."""
    try:
        return parse(text), ""
    except ValueError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 700, message
        # What a parser says of text that is no JSON at all is its own.
        return None, "no JSON" if re.search("parse_error|line 1 col|is no number", message) else (
            message
        )


def native(text: str) -> LMConfig:
    return LMConfig.from_json(text)


def twin(text: str) -> LMConfig:
    return LMConfig.from_json(cpp._cpp.normalized_config(text))


def assert_both_say_the_same(text: str) -> str:
    ours, theirs = answer(native, text), answer(twin, text)
    assert ours == theirs, text[:300]
    return ours[1]


def everything_wrong() -> Iterator[dict[str, Any]]:
    """Each field, and each option of each mixer, with each value."""
    for value in VALUES:
        yield from ({field: value} for field in FIELDS)
        yield {"unknown": value}
        for mixer in cpp.mixers():
            for option in (*option_names(mixer), "unknown"):
                yield {"mixer": mixer, "mixer_options": {option: value}}


def test_a_single_wrong_value_reads_the_same():
    refused = sum(assert_both_say_the_same(text_of(values)) != "" for values in everything_wrong())
    assert refused > 3000


def test_random_configurations_read_the_same():
    """Several fields and options at once: the same one is named first."""
    draw = random.Random(5)
    for _ in range(600):
        mixer = draw.choice(cpp.mixers())
        options = [*option_names(mixer), "unknown"]
        values: dict[str, Any] = {"mixer": mixer}
        for field in draw.sample(FIELDS, draw.randint(0, 3)):
            values[field] = draw.choice(VALUES)
        for group in draw.sample(["mixer_options", "layer_options"], draw.randint(0, 2)):
            chosen = draw.sample(options, draw.randint(1, 2))
            given = {option: draw.choice(VALUES) for option in chosen}
            values[group] = given if group == "mixer_options" else [{}, given]
        assert_both_say_the_same(text_of(values))


def test_what_is_read_is_built_or_refused_by_both():
    """Without the values: the modules of C++ print numbers and strings as C++ does."""
    small = {"dim": 8, "layers": 1, "vocab_size": 11}
    cases = [
        *everything_wrong(),
        {"mixer": "transformer", "mixer_options": {"norm_eps": -0.5, "qk_norm": True}},
    ]
    refused = 0
    for values in cases:
        config, _ = answer(native, text_of(small | values))
        if config is None or config.layers > 1:
            continue
        messages = []
        for cls in (tidegate.models.CausalLM, cpp.CausalLM):
            try:
                cls(config, device="meta")
                messages.append("")
            except ValueError as error:
                messages.append(str(error).rsplit("; got", 1)[0])
        assert messages[0] == messages[1], values
        refused += messages[0] != ""
    assert refused > 50


NESTED = 100_000
TEXTS = {
    "lists": ("[" * NESTED, "not valid JSON: nested more than 64 levels deep"),
    "closed lists": (
        '{"dim": ' + "[" * NESTED + "]" * NESTED + "}",
        "not valid JSON: nested more than 64 levels deep",
    ),
    "objects": ('{"a":' * NESTED, "not valid JSON: nested more than 64 levels deep"),
    "brackets in a string": ('{"' + "[" * 100 + '": 1}', "unknown key '" + "[" * 80 + "'..."),
    "quotes in a string": ('{"' + '\\"[' * NESTED, "no JSON"),
    "twice": ('{"dim": 8, "dim": 9}', "not valid JSON: key 'dim' is twice"),
    "twice within": (
        '{"mixer_options": {"expand": 1, "expand": 2}}',
        "not valid JSON: key 'expand' is twice",
    ),
    "NaN": ('{"dropout": NaN}', "no JSON"),
    "Infinity": ('{"norm_eps": Infinity}', "no JSON"),
    "1e400": (
        '{"norm_eps": 1e400}',
        "not valid JSON: expected numbers of at most 64 bits; got 1e400",
    ),
    "10**5000": (
        '{"vocab_size": 1' + "0" * 5000 + "}",
        f"not valid JSON: expected numbers of at most 64 bits; got 1{'0' * 39}...",
    ),
    "bytes order mark": ("\ufeff{}", "no JSON|byte order mark"),
    "zero byte": ("{}\0", "not valid JSON|no JSON"),
    "half a surrogate pair": ('{"norm": "\\ud800"}', "half a surrogate|no JSON"),
    "layers": ('{"layers": 1000000000}', "layers: expected at most 100000; got 1000000000"),
    "vocab_size": ('{"vocab_size": 3000000000}', "vocab_size: expected at most 2147483647; got 3"),
    "dim": ('{"dim": 1000000000}', "dim: expected at most 16777216; got 1000000000"),
    "patch_size": ('{"patch_size": 1000000000}', "patch_size: expected at most 4096; got"),
    "expand": (
        '{"mixer": "hgrn", "mixer_options": {"expand": 3000000000}}',
        "mixer_options: expand: expected at most 2147483647; got 3000000000",
    ),
}


@pytest.mark.parametrize("case", list(TEXTS))
def test_texts_that_no_loop_or_recursion_may_follow(case):
    text, message = TEXTS[case]
    start = time.monotonic()
    for parse in (native, twin):
        found = answer(parse, text)[1]
        assert any(part in found for part in message.split("|")), found
    assert time.monotonic() - start < 5.0


def test_many_layers_are_checked_quickly():
    start = time.monotonic()
    for changes in ({}, {"mixer": ["hgrn"] * 100_000}, {"layer_options": [{"expand": 1}] * 99_999}):
        assert assert_both_say_the_same(text_of({"layers": 100_000, **changes})) == ""
    assert time.monotonic() - start < 10.0


def test_switches_and_numbers_are_not_each_other():
    for changes in (
        {"tied": 1},
        {"norm_eps": True},
        {"dropout": float("nan")},
        {"norm_eps": float("inf")},
        {"dim": 10**30},
        {"dim": 10**5000},
        {"init_std": 10**30},
        {"mixer": "hgrn", "mixer_options": {"bias": "x"}},
        {"mixer": "hgrn", "mixer_options": {"norm_eps": None}},
        {"mixer": "hgrn", "mixer_options": {"gumbel_gate": "x"}},
        {"mixer": "hgrn", "mixer_options": {"expand": 1.0}},
        {"mixer": "hgrn", "mixer_options": {"gumbel_gate": float("inf")}},
    ):
        with pytest.raises(ValueError, match=r"LMConfig: \w+: (\w+: )?expected .*; got "):
            LMConfig(**changes)


def test_integers_are_numbers_and_tuples_become_text():
    config = LMConfig(mixer="fox", dropout=0, norm_eps=1, mixer_options={"rope": 10_000})
    assert [type(config.dropout), type(config.norm_eps)] == [float, float]
    assert native(config.to_json()) == twin(config.to_json()) == config
    config = LMConfig(mixer="fox", mixer_options={"gate_init": ("long", 2, 256)})
    assert config.mixer_options == {"gate_init": "long:2:256"}
    assert twin(config.to_json()) == config


@pytest.mark.parametrize("name", list(mixers()))
def test_switches_of_modules_take_true_and_false_alone(name):
    """A word is not taken for True: the command line's "False" was."""
    cls = mixers()[name]
    parameters = inspect.signature(cls).parameters.values()
    switches = [p.name for p in parameters if str(p.annotation).startswith("bool")]
    for option in switches:
        for value in ("False", 1, 0.0, []):
            with pytest.raises(ValueError, match=f"{option}: expected True or False; got "):
                cls(64, **{option: value})
        with pytest.raises(TypeError):
            getattr(cpp, cls.__name__)(64, **{option: "False"})


# Files


def refusals(use: Callable[[type], Any]) -> list[str]:
    """The errors of both languages' CausalLM, each of one line."""
    texts = []
    for cls in (tidegate.models.CausalLM, cpp.CausalLM):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            use(cls)
        texts.append(str(caught.value))
        assert "\n" not in texts[-1]
    return texts


def write_tensors(path: Any, header: str, data: bytes = b"") -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def test_a_configuration_that_is_not_utf8(tmp_path):
    cpp.CausalLM(SMALL).save(tmp_path)
    path = tmp_path / "config.json"
    for data, position in ((b'{"dim": \xff}', 8), (b'"\xc3', 1), (b"\xe2\x82\xac\xed\xa0\x80", 3)):
        path.write_bytes(data)
        assert set(refusals(lambda cls: cls.load(tmp_path))) == {
            f"{path}: not UTF-8 text: byte {position}"
        }


def test_weights_of_integers(tmp_path):
    model = cpp.CausalLM(SMALL)
    model.save(tmp_path)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    weights["embedding.weight"] = weights["embedding.weight"].to(torch.int32)
    cpp.save_safetensors(weights, tmp_path / "model.safetensors")
    texts = refusals(lambda cls: cls.load(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].endswith("'embedding.weight': expected a floating-point dtype; got int32")


ENTRY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HEADERS = {
    "twice": (f'{{"x":{ENTRY},"x":{ENTRY}}}', "not valid JSON: key 'x' is twice"),
    "nested": ('{"x":' + "[" * NESTED, "not valid JSON: nested more than 64 levels deep"),
    "huge": ('{"x":{"dtype":"U8","shape":[1e400]}}', "not valid JSON: expected numbers of at most"),
}


@pytest.mark.parametrize("case", list(HEADERS))
def test_headers_refused_by_both(case, tmp_path):
    header, message = HEADERS[case]
    cpp.CausalLM(SMALL).save(tmp_path)
    write_tensors(tmp_path / "model.safetensors", header)
    for text in refusals(lambda cls: cls.load(tmp_path)):
        assert f"model.safetensors: broken safetensors header: {message}" in text


def test_an_empty_tensor_of_impossible_extents_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    extents = "0,4611686018427387904,4611686018427387904"
    write_tensors(path, f'{{"x":{{"dtype":"U8","shape":[{extents}],"data_offsets":[0,0]}}}}')
    with pytest.raises(RuntimeError, match="do not fit its dtype and shape"):
        cpp.load_safetensors(path)


def test_headers_are_read_in_linear_time(tmp_path):
    """40,000 names took 25 seconds where each looked through those before it."""
    path = tmp_path / "a.safetensors"
    names = [f"layer.{i}.weight" for i in range(40_000)]
    write_tensors(path, "{" + ",".join(f'"{name}":{ENTRY}' for name in names) + "}")
    start = time.monotonic()
    assert len(cpp.load_safetensors(path)) == len(names)
    assert time.monotonic() - start < 5.0
