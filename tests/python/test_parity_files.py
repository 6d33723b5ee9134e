"""Configurations, generation and files: both languages take and write the same."""

from __future__ import annotations

import inspect
import json
import random
import re
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from support.model_configs import SMALL, generating
from support.parity import MODELS, assert_identical, assert_same, cpp, refusal, shake

import tidegate
from tidegate.models import LMConfig

pytestmark = pytest.mark.usefixtures("one_thread")


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


RUNS = {
    "checkpoint.pt": b"",
    "checkpoints/step-20/a": b"",
    "config.json": b'{"train": {}, "model": {}}',
}
NO_RUNS = {
    "checkpoints/last": b"",
    "config.json": b'{"train": {}}',
    "config.json of a list": b"[]",
    "config.json that is broken": b"{",
    "config.json that is no text": b'{"train": {}, "model": "\xff"}',
}


def folder_holding(path: Path, name: str, content: bytes) -> Path:
    file = path / "folder" / name.split(" ")[0]
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return path / "folder"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("file", RUNS)
def test_a_runs_folder_is_no_place_for_a_model(file, name, tmp_path):
    folder = folder_holding(tmp_path, file, RUNS[file])
    config = SMALL.replace(num_classes=5, patch_size=2)
    native, twin = getattr(tidegate.models, name)(config), getattr(cpp, name)(config)
    for kind in (str, Path):
        ours, theirs = (refusal(partial(m.save, kind(folder))) for m in (native, twin))
        assert ours == theirs
        assert ours.startswith(f"{name}.save: {folder}: expected a folder for a model; got a run")
    assert [path.read_bytes() for path in folder.rglob("*") if path.is_file()] == [RUNS[file]]


@pytest.mark.parametrize("file", NO_RUNS)
def test_other_folders_take_a_model(file, tmp_path):
    for language in (tidegate.models, cpp):
        folder = folder_holding(tmp_path / language.__name__, file, NO_RUNS[file])
        language.CausalLM(SMALL).save(folder)
        language.CausalLM.load(folder)


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
    """Any number of bytes has it: eight are taken at a time."""
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
