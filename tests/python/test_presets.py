"""The papers' configurations: parameters, integer for integer, without allocating any."""

from __future__ import annotations

import pytest

from tidegate.models import CausalLM, ImageClassifier, LMConfig, presets

COUNTS = {
    "hgrn-44m": 46_248_448,
    "hgrn-real-d": 46_239_232,
    "hgrn-real-2d": 45_462_016,
    "hgrn-150m": 153_647_616,
    "hgrn-350m": 378_683_392,
    "hgrn-379m": 378_683_392,
    "hgrn-1b": 1_084_497_920,
    "hgrn2-44m": 44_661_244,
    "hgrn2-150m": 144_788_736,
    "hgrn2-385m": 385_476_608,
    "hgrn2-1b": 1_027_837_952,
    "hgrn2-2.9b": 2_983_536_640,
    "hgrn2-756m": 756_820_992,
    "transformer-386m": 385_504_256,
    "transformer-756m": 756_747_264,
    "fox-757m": 757_189_920,
    "transformer-pro-757m": 757_675_008,
    "fox-pro-758m": 758_117_664,
    "transformer-360m": 359_794_688,
    "fox-360m": 359_991_488,
    "transformer-pro-360m": 366_900_224,
    "fox-pro-360m": 366_706_880,
    "transformer-125m": 123_551_232,
    "fox-125m": 123_606_600,
    "transformer-pro-125m": 123_783_168,
    "fox-pro-125m": 123_729_480,
    "pese-lr-4": 385_236_992,
    "pese-lr-8": 385_822_720,
    "pese-glt-4": 385_556_480,
    "pese-glti-4": 385_557_728,
    "pese-krp-4": 385_875_968,
    "pese-kp-4": 385_556_792,
    "hgrn-vit-tiny": 6_107_560,
    "hgrn-vit-small": 23_715_688,
    "demo": 2_698_752,
}

# What the papers print, in millions.
PRINTED = {
    "hgrn-44m": (46.25, 0.01),
    "hgrn-real-d": (46.24, 0.01),
    "hgrn-real-2d": (45.46, 0.01),
    "hgrn-150m": (150, 10),
    "hgrn-379m": (379, 1),
    "hgrn-1b": (1000, 100),
    "hgrn2-44m": (44.66, 0.01),
    "hgrn2-150m": (150, 10),
    "hgrn2-385m": (385, 1),
    "hgrn2-1b": (1000, 100),
    "hgrn2-2.9b": (2900, 100),
    "hgrn2-756m": (756, 1),
    "transformer-386m": (386, 1),
    "transformer-756m": (756, 1),
    "fox-757m": (757, 1),
    "transformer-pro-757m": (757, 1),
    "fox-pro-758m": (758, 1),
    "transformer-360m": (360, 10),
    "fox-360m": (360, 10),
    "transformer-pro-360m": (360, 10),
    "fox-pro-360m": (360, 10),
    "transformer-125m": (125, 10),
    "fox-125m": (125, 10),
    "transformer-pro-125m": (125, 10),
    "fox-pro-125m": (125, 10),
    "pese-lr-4": (385, 1),
    "pese-lr-8": (386, 1),
    "pese-glt-4": (386, 1),
    "pese-glti-4": (386, 1),
    "pese-krp-4": (386, 1),
    "pese-kp-4": (386, 1),
    "hgrn-vit-tiny": (6.1, 0.1),
    "hgrn-vit-small": (23.7, 0.1),
}


def count(config: LMConfig) -> int:
    cls = CausalLM if config.patch_size is None else ImageClassifier
    return sum(p.numel() for p in cls(config, device="meta").parameters())


# Each call of presets() makes and checks every configuration: one call is enough for reading.
ALL = presets()
# FoT counts the untied head, but not the input embedding.
WITHOUT_EMBEDDING = tuple(
    name for name in COUNTS if name == "hgrn2-756m" or ALL[name].vocab_size == 50257
)


def test_every_preset_is_counted():
    assert set(ALL) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name):
    config = ALL[name]
    embedding = config.vocab_size * config.dim if name in WITHOUT_EMBEDDING else 0
    assert count(config) - embedding == COUNTS[name]


@pytest.mark.parametrize("name", PRINTED)
def test_within_a_printed_unit(name):
    millions, unit = PRINTED[name]
    assert abs(COUNTS[name] / 1e6 - millions) < unit


@pytest.mark.parametrize("name", COUNTS)
def test_json(name):
    config = ALL[name]
    assert LMConfig.from_json(config.to_json()) == config


def test_presets_are_fresh():
    presets()["hgrn-real-2d"].mixer_options["expand"] = 7
    assert presets()["hgrn-real-2d"].mixer_options["expand"] == 2
    presets()["hgrn-44m"].mixer_options["expand"] = 7
    assert presets()["hgrn-44m"].mixer_options == {}
