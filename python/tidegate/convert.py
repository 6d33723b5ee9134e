"""`tidegate convert`: checkpoints of other implementations into ours, and back.

Formats: "tidegate" (what `CausalLM.save` writes), "hf" (`tidegate.hf`, for transformers), "fla"
(flash-linear-attention's HGRN, HGRN2, GLA, Forgetting Transformer and Transformer), "fox" (the
Forgetting Transformer's own release) and "hgru2-pytorch" (the authors' HGRN2 language models).
A folder holds config.json and weights: model.safetensors or pytorch_model.bin, whole or in shards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .models import CausalLM, LMConfig
from .models._json import parse_json
from .models.block import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_exactly,
    read_tensors,
    refuse_classifier,
)
from .models.layouts import LAYOUTS, export_config, export_tensors, import_tensors
from .nn._common import dtype_name
from .training.errors import UserError

FORMATS = ("tidegate", "hf", *LAYOUTS)
# What a converted model remembers of where it came from, so that the way back is exact.
SOURCE_FILE = "converted_from.json"
# Which tokens begin, end and pad a text, by the names that configurations of transformers have for
# them: no LMConfig says it, and without them `generate` of transformers would not know its end.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"
_PICKLE = "pytorch_model.bin"
_INDEX = ".index.json"


class Checkpoint(NamedTuple):
    """A model, and what its folder says of where it came from ({} where nothing): the format, its
    config.json, and the names and dtypes of its tensors. tokens: those of _TOKENS that are known.
    """

    model: CausalLM
    source: dict[str, Any]
    tokens: dict[str, Any]


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str | None = None,
    given: str | None = None,
    shard_bytes: int | None = None,
) -> str:
    """Converts the checkpoint in folder `source` into folder `out`; one line that says what it did.

    to: a format; None: "tidegate", or, from ours, the one that the checkpoint came from. given: the
    format of the source; None: what its config.json says. Other files of the folder, such as a
    tokenizer, come along. shard_bytes: the most that one file of weights holds; not of "tidegate",
    which has one.

    Raises ValueError, naming all tensors that are missing or have no place, or the option that the
    other format cannot say; FileNotFoundError; FileExistsError where `out` holds anything. Then
    nothing is written; otherwise `out` appears whole.
    """
    source, out = Path(source), Path(out)
    config = read_json(source / CONFIG_FILE)
    given = given or format_of(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out}: expected an empty or new folder")
    checkpoint = read(source, config, given)
    if to is None:
        to = checkpoint.source.get("format", "hf") if given in ("tidegate", "hf") else "tidegate"
    if to == "tidegate" and shard_bytes is not None:
        raise ValueError(
            f"shard-gb: expected with {', '.join(FORMATS[1:])} only, got it with tidegate, whose "
            "weights are one file"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(made, checkpoint, to, shard_bytes)
        _copy_rest(source, made)
        made.chmod(0o755)
        if out.exists():
            out.rmdir()
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    count = sum(p.numel() for p in checkpoint.model.parameters())
    return f"{source} ({given}) -> {out} ({to}): {count:,} parameters"


def format_of(config: Mapping[str, Any]) -> str:
    """The format whose config.json this is; ValueError where it is none of them."""
    kind = str(config.get("model_type", ""))
    if kind == "tidegate":
        return "hf"
    if not kind and "mixer" in config:
        return "tidegate"
    if "decoder_embed_dim" in config or "decoder_layers" in config:
        return "hgru2-pytorch"
    if kind.endswith("project_fox") or "fgate_type" in config:
        return "fox"
    if kind in ("hgrn", "hgrn2", "gla", "forgetting_transformer", "transformer"):
        return "fla"
    if kind == "rwkv":
        raise ValueError(
            "convert: RWKV-4's language models have no counterpart: their channel mixer has none; "
            "tidegate.nn.RWKV4 is their token mixer"
        )
    raise ValueError(
        f"{CONFIG_FILE}: model_type: expected a model of {', '.join(FORMATS)}; got {kind!r}"
    )


def read(folder: Path, config: Mapping[str, Any], given: str) -> Checkpoint:
    """The checkpoint in `folder`, in format `given`."""
    tensors = read_weights(folder)
    if given not in LAYOUTS:
        ours = LMConfig.from_dict(dict(config)) if given == "tidegate" else _from_hf(config)
        refuse_classifier(folder, ours, tensors)
        model = CausalLM(ours, device="meta")
        load_exactly(model, _without_prefix(tensors, ours.tied, given), str(folder))
        source = _remembered(folder)
        tokens = {**_tokens_of(source.get("config", {})), **_tokens_of(config)}
        if tokens:  # a source that nothing else is known of is transformers', which has their names
            kept = {"format": "hf", **source}
            source = {**kept, "config": {**source.get("config", {}), **tokens}}
        return Checkpoint(model, source, tokens)
    model = import_tensors(LAYOUTS[given], config, tensors, str(folder))
    dtypes = {name: dtype_name(t.dtype) for name, t in tensors.items()}
    source = {"format": given, "config": dict(config), "tensors": dtypes}
    return Checkpoint(model, source, _tokens_of(config))


def _remembered(folder: Path) -> dict[str, Any]:
    """What an earlier conversion wrote down in `folder`; {} where there was none."""
    file = folder / SOURCE_FILE
    return read_json(file) if file.is_file() else {}


def _tokens_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in _TOKENS if config.get(name) is not None}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of whichever file or shards it has."""
    for name in (WEIGHTS_FILE, _PICKLE):
        if (folder / name).is_file():
            return _read_file(folder / name)
        if (folder / f"{name}{_INDEX}").is_file():
            return _read_shards(folder, folder / f"{name}{_INDEX}")
    raise FileNotFoundError(f"{folder}: expected {WEIGHTS_FILE} or {_PICKLE}, whole or in shards")


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: weight_map: expected an object")
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise FileNotFoundError(f"{index}: {file}: no such file in {folder}")
        tensors = _read_file(folder / file)
        found |= {name: tensors[name] for name in tensors if places.get(name) == file}
    if lost := sorted(set(places) - set(found)):
        raise ValueError(f"{index}: no tensor {', '.join(lost)} in its file")
    return found


def _from_hf(config: Mapping[str, Any]) -> LMConfig:
    """The LMConfig of a TidegateConfig's JSON."""
    if config.get("model_type") != "tidegate":  # also where `given` says so
        kind = config.get("model_type", "")
        raise ValueError(f"{CONFIG_FILE}: model_type: expected 'tidegate'; got {kind!r}")
    fields = {n: config[n] for n in LMConfig.__dataclass_fields__ if n in config and n != "tied"}
    return LMConfig(tied=config.get("tie_word_embeddings", True), **fields)


def _without_prefix(tensors: dict[str, Tensor], tied: bool, given: str) -> dict[str, Tensor]:
    """A `TidegateForCausalLM`'s tensors under a CausalLM's names."""
    if given == "tidegate":
        return tensors
    found = {name.removeprefix("model."): t for name, t in tensors.items()}
    head = found.pop("lm_head.weight", None)
    if head is not None and not tied:
        found["head.weight"] = head
    return found


def _write(folder: Path, checkpoint: Checkpoint, to: str, shard_bytes: int | None) -> None:
    model, source, tokens = checkpoint
    if to in LAYOUTS:
        back = source if source.get("format") == to else {}
        names = list(back["tensors"]) if back else None
        config = {**export_config(LAYOUTS[to], model, back.get("config")), **tokens}
        tensors = export_tensors(LAYOUTS[to], model, names, back.get("tensors", {}))
        _write_json(folder / CONFIG_FILE, config)
        _write_weights(folder, tensors, shard_bytes)
        return
    if to == "tidegate":
        model.save(folder)
    else:
        _write_hf(folder, model, shard_bytes, tokens)
    if source and source.get("format") != to:
        _write_json(folder / SOURCE_FILE, source)


def _write_hf(
    folder: Path, model: CausalLM, shard_bytes: int | None, tokens: dict[str, Any]
) -> None:
    from .hf import TidegateForCausalLM

    size = "1000GB" if shard_bytes is None else shard_bytes
    theirs = TidegateForCausalLM.from_causal_lm(model, **tokens)
    theirs.save_pretrained(folder, max_shard_size=size)


def _write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int | None) -> None:
    from safetensors.torch import save_file

    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return
    places = {}
    for k, names in enumerate(shards, 1):
        file = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / f"{WEIGHTS_FILE}{_INDEX}", index)


def _shards(tensors: dict[str, Tensor], most: int | None) -> list[list[str]]:
    """Names, in order, in groups of at most `most` bytes, or of one."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, t in tensors.items():
        if most is not None and groups[-1] and held + t.nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += t.nbytes
    return groups


def _copy_rest(source: Path, out: Path) -> None:
    """Files beside the model, such as a tokenizer's; no subfolders. How to generate, the source's
    own file says better than the one that was written with the model."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth") or _INDEX in path.name
        written = (out / path.name).exists() and path.name != _GENERATION
        if path.is_file() and not (weights or written or path.name == SOURCE_FILE):
            shutil.copyfile(path, out / path.name)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FileNotFoundError or ValueError, each of one line."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = parse_json(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def run(options: argparse.Namespace) -> int:
    """Runs `tidegate convert`."""
    size = options.shard_gb
    if size is not None:
        if not 0 < size < math.inf:
            raise UserError(f"convert: shard-gb: expected more than 0, got {size:g}")
        size = max(int(size * 1e9), 1)
    try:
        print(
            convert(
                options.source, options.out, to=options.to, given=options.given, shard_bytes=size
            )
        )
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"convert: {error}") from error
    return 0
