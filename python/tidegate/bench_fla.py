"""flash-linear-attention's language models beside ours, at the sizes of a run of bench_models.

``tidegate bench --models`` comes here after its own models where `fla` and `transformers` are
installed and the run was on a GPU. A model here has the width, the layers, the vocabulary and the
heads of our row of the same name, and the GLU width that brings its parameters closest to that
row's. It trains as fla's users are told to: its fused norms, SwiGLU and linear cross-entropy, bf16
autocast over float32 weights, fused AdamW; it decodes by its own ``generate`` with bf16 weights.
A turn that is not timed comes first, in which Triton compiles and tunes.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_STEPS = 5  # timed steps of training, at most
_WIDTH_UNIT = 64  # of the GLU

# Our mixers that fla has a language model of: the classes' common name, and the options that give
# it the heads of benchmarks/models/sizes.cpp.
_MODELS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "fox": ("ForgettingTransformer", lambda dim: {"num_heads": max(dim // 128, 1)}),
    "hgrn": ("HGRN", lambda dim: {}),
    "hgrn2": ("HGRN2", lambda dim: {"num_heads": max(dim // 128, 1), "expand_ratio": None}),
    "gla": ("GLA", lambda dim: {"num_heads": max(dim // 256, 1)}),
}


def is_installed() -> bool:
    """Whether flash-linear-attention's models can be imported; imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in ("fla", "transformers"))


def add_fla(path: str | os.PathLike[str]) -> int:
    """Times fla's models at every size of the file that bench_models wrote, and adds them to it.

    The file gets a key "fla" with fla's version and rows like ours: mixer, context, batch, layers,
    glu_hidden, parameters, train, decode; `speed_of_ours` and `memory_of_ours` are ours over fla's
    (above 1: ours is faster) and ours over fla's (below 1: ours is smaller). What failed has
    "errors". Written anew after every row. Returns 1 if a row failed, else 0.
    """
    file = Path(path)
    record = json.loads(file.read_text("utf-8"))
    wanted = [row for row in record["rows"] if row["mixer"] in _MODELS and "train" in row]
    if record["machine"]["device"] != "cuda" or not wanted:
        return 0
    import fla

    record["fla"] = {"version": fla.__version__, "rows": []}
    print(f"flash-linear-attention {fla.__version__}, the same sizes", flush=True)
    for row in wanted:
        record["fla"]["rows"].append(_measured(record, row))
        print(_line(record["fla"]["rows"][-1]), flush=True)
        partial = file.with_name(file.name + ".part")
        partial.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        partial.replace(file)
    return int(any("errors" in row for row in record["fla"]["rows"]))


def _measured(record: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The row of fla's model beside `ours`."""
    row = {key: ours[key] for key in ("mixer", "context", "batch", "layers")}
    model = None
    try:
        model = _model(record, ours)
        row["glu_hidden"] = model.config.intermediate_size
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row["train"] = _train(model, record, ours)
        if record["decode_tokens"] > 0:
            row["decode"] = _decode(model, record, ours)
    # Triton, CUDA and transformers each have errors of their own, and a model that fails is a row.
    except Exception as error:
        row["errors"] = [
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ]
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _model(record: dict[str, Any], ours: dict[str, Any], device: str = "cuda") -> Any:
    """fla's model with about as many parameters as ours, in float32."""
    models = importlib.import_module("fla.models")
    name, options_of = _MODELS[ours["mixer"]]
    make_config, make = getattr(models, f"{name}Config"), getattr(models, f"{name}ForCausalLM")
    dim = record["dim"]

    def config(glu_hidden: int) -> Any:
        return make_config(
            hidden_size=dim,
            num_hidden_layers=ours["layers"],
            vocab_size=record["vocab_size"],
            intermediate_size=glu_hidden,
            fuse_cross_entropy=False,
            fuse_linear_cross_entropy=True,
            **options_of(dim),
        )

    def count(glu_hidden: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in make(config(glu_hidden)).parameters())

    one = count(_WIDTH_UNIT)
    more = (ours["parameters"] - one) / (count(2 * _WIDTH_UNIT) - one)
    width = _WIDTH_UNIT * (1 + max(round(more), 0))
    with torch.device(device):
        return make(config(width))


def _autocast(record: dict[str, Any]) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, enabled=record["precision"] == "bf16")


def _train(model: Any, record: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Forward, backward and fused AdamW on one batch of random ids."""
    model.train()
    shape = (ours["batch"], ours["context"])
    ids = torch.randint(record["vocab_size"], shape, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        with _autocast(record):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    first = step()
    step()  # AdamW's state is there now, and memory is laid out
    torch.cuda.reset_peak_memory_stats()
    times = []
    last = first
    for _ in range(_STEPS):
        with _seconds(times):
            last = step()
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated()
    return {
        "tokens_per_s": ids.numel() / seconds,
        "step_ms": 1e3 * seconds,
        "steps": len(times),
        "first_loss": first,
        "last_loss": last,
        "peak_bytes": peak,
        "speed_of_ours": ours["train"]["tokens_per_s"] * seconds / ids.numel(),
        "memory_of_ours": ours["train"]["peak_bytes"] / peak,
    }


@torch.no_grad()
def _decode(model: Any, record: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding after a prompt of the context's length by the model's own ``generate``."""
    model.eval()
    if record["precision"] == "bf16":
        model.bfloat16()
    batch, context, tokens = ours["batch"], ours["context"], record["decode_tokens"]
    ids = torch.randint(record["vocab_size"], (batch, context), device="cuda")

    def generate(count: int) -> float:
        times: list[float] = []
        with _seconds(times):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return times[0]

    generate(2)  # not timed
    one = min(generate(1) for _ in range(2))
    token = max(generate(1 + tokens) - one, 1e-9) / tokens
    result = {
        "tokens_per_s": batch / token,
        "token_ms": 1e3 * token,
        "prefill_ms": 1e3 * one,
        "prefill_tokens_per_s": batch * context / one,
    }
    if "decode" in ours:
        result["speed_of_ours"] = 1e3 * token / ours["decode"]["token_ms"]
    return result


@contextmanager
def _seconds(times: list[float]) -> Iterator[None]:
    """Appends how long the block took on the device and the host."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    yield
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)


def _line(row: dict[str, Any]) -> str:
    """A row in words."""
    head = f"  {row['mixer']}, context {row['context']}:"
    if "errors" in row:
        return f"{head} failed: {row['errors'][0]}"
    train = row["train"]
    text = (
        f"{head} {row['parameters'] / 1e6:.0f}M, {train['tokens_per_s']:,.0f} tokens/s (ours "
        f"{train['speed_of_ours']:.2f} times that), {train['peak_bytes'] / 2**30:.1f} GiB (ours "
        f"{train['memory_of_ours']:.2f} of it)"
    )
    if "decode" in row:
        decode = row["decode"]
        text += f"; decoding {decode['tokens_per_s']:,.0f} tokens/s"
        text += f" (ours {decode['speed_of_ours']:.1f} times)" if "speed_of_ours" in decode else ""
    return text
