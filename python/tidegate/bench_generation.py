"""`tidegate bench --generate`: how fast models generate, beside what the memory's speed allows."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import _library
from .models import CausalLM, LMConfig, presets
from .nn._common import LEAST_PRUNED_BYTES
from .training.errors import UserError
from .training.runtime import resolve_device

_GRAPHS = "TIDEGATE_CUDA_GRAPHS"
# Over how many tokens the heads of a pruned model forget: from one to a thousand, as those of
# trained models do (docs/forgetting_transformer.md), in equal steps of the logarithm.
_SPANS = (1.0, 1000.0)
_DEFAULT = {
    "cuda": ["hgrn2-385m", "hgrn-379m", "fox-360m", "transformer-360m"],
    "cpu": ["demo"],
}


@dataclass
class Prefill:
    """Reading one long prompt, beside the forward pass of training (tokens/s)."""

    model: str
    tokens: int
    prefill: float
    training_forward: float


@dataclass
class Row:
    """One model at one batch size. Speeds are tokens/s a sequence."""

    model: str
    batch: int
    prompt: int
    new: int
    tokens_per_second: float
    eager: float | None
    bound: float  # the weights read, the states read and written, at the speed of a copy
    first_token_ms: float  # reading the prompts, and one token
    prune: float | None = None  # of forgetting attention, whose bound is then of what it leaves


def main(arguments: list[str]) -> int:
    """Measures, prints the table and, where asked, writes it as JSON."""
    options = _parser().parse_args(arguments)
    device = resolve_device(options.device or "auto")
    before = _checked(options)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    known = presets()
    names = options.models or (["fox-360m"] if options.prune else _DEFAULT[device.type])
    for name in names:
        if name not in known:
            raise UserError(f"bench: --models: no preset {name!r}; there are {', '.join(known)}")
        if known[name].vocab_size is None:
            raise UserError(f"bench: --models: {name} is an image model; it generates no tokens")
        if options.prune is not None:
            pruned_config(name, known[name], options.prune)
    rows, prefills = [], []
    speed = copy_speed(device)
    print(f"{_device_name(device)}, {options.dtype or dtype}, a copy {speed / 1e9:,.0f} GB/s")
    print(f"prompt {options.prompt}, {options.new} new tokens; tokens/s a sequence")
    if options.prune is not None:
        print(
            f"pruned at {options.prune:g}, with QK-norm; heads forget over {_SPANS[0]:g} to "
            f"{_SPANS[1]:g} tokens, and the bound has the keys that are left"
        )
    print(f"{'model':<18}{'batch':>6}{'tokens/s':>10}{'eager':>9}{'bound':>9}{'of it':>7}"
          f"{'in all':>10}{'prompt ms':>11}")  # fmt: skip
    for name in names:
        model = random_model(name, device, dtype, options.prune)
        if options.prefill:
            prefills.append(measure_prefill(name, model, options.prefill, options.repeats))
        for batch in options.batches:
            row = measure(name, model, batch, options, speed)
            rows.append(row)
            eager = "" if row.eager is None else f"{row.eager:,.0f}"
            print(
                f"{name:<18}{batch:>6}{row.tokens_per_second:>10,.0f}{eager:>9}{row.bound:>9,.0f}"
                f"{row.tokens_per_second / row.bound:>7.0%}"
                f"{row.tokens_per_second * batch:>10,.0f}{row.first_token_ms:>11,.1f}",
                flush=True,
            )
        del model
    for read in prefills:
        print(
            f"{read.model}, a prompt of {read.tokens:,} tokens: {read.prefill:,.0f} tokens/s, "
            f"{read.prefill / read.training_forward:.0%} of the forward pass of training"
        )
    if options.json:
        facts = {
            "kind": "generation",
            "date": datetime.date.today().isoformat(),
            "commit": _library.build_info().get("commit", "unknown"),
            "device": _device_name(device),
            "torch": torch.__version__,
            "dtype": str(dtype),
        }
        content = {**facts, "copy_bytes_per_second": speed, "rows": [asdict(row) for row in rows]}
        if prefills:
            content["prefills"] = [asdict(read) for read in prefills]
        if before is not None:
            content["before"] = before
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        _plot(rows, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate bench --generate", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="PRESET")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens that are generated")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--eager", action="store_true", help="also without CUDA graphs")
    parser.add_argument(
        "--prune",
        type=float,
        help="of forgetting attention: leave out what weighs less in all; with QK-norm, and gates "
        "like a trained model's",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="TOKENS",
        help="also read one prompt of so many tokens, beside the forward pass of training",
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--before",
        metavar="FILE",
        help="JSON of an earlier library on this machine, to keep beside",
    )
    parser.add_argument("--plot", metavar="FILE", help="tokens/s over the batch, as a picture")
    return parser


def _checked(options: argparse.Namespace) -> dict[str, Any] | None:
    """What --before keeps; UserError for what would fail, or mean nothing, after minutes."""
    for name in ("batches", "prompt", "new", "repeats", "prefill"):
        given = getattr(options, name)
        least = min(given) if isinstance(given, list) else given
        needed = 2 if name == "prefill" else 1  # a loss needs a token after the first
        if least is not None and least < needed:
            raise UserError(f"bench: --{name}: expected {needed} or more, got {least}")
    if options.prune is not None and not 0 < options.prune < 1:
        raise UserError(f"bench: --prune: expected a number between 0 and 1, got {options.prune:g}")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"bench: --{name}: {path}: its folder does not exist")
    if options.before is None:
        return None
    if options.json is None:
        raise UserError("bench: --before: expected with --json only, which keeps its figures")
    try:
        before = json.loads(Path(options.before).read_text(encoding="utf-8"))
        return {key: before[key] for key in ("commit", "rows")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"bench: --before: {options.before}: expected the JSON that --json wrote; got "
            f"{type(error).__name__}: {error}"
        ) from error


def _plot(rows: list[Row], file: str) -> None:
    """Tokens/s of all sequences over their number, one line a model."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("bench: --plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        batches = [row.batch for row in mine]
        (line,) = axes.loglog(
            batches, [row.batch * row.tokens_per_second for row in mine], "o-", base=2, label=model
        )
        axes.loglog(
            batches, [row.batch * row.bound for row in mine], ":", base=2, color=line.get_color()
        )
    axes.set_xlabel("sequences at a time")
    axes.set_ylabel("tokens/s (dotted: by the memory's speed)")
    axes.legend()
    figure.savefig(file)


def pruned_config(name: str, config: LMConfig, prune: float) -> LMConfig:
    """The preset with QK-norm, without which a step knows nothing of keys that it does not read."""
    if not config.mixer.startswith("fox"):
        raise UserError(f"bench: --prune: {name} has no forgetting attention")
    return config.replace(mixer_options={**config.mixer_options, "prune": prune, "qk_norm": True})


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, prune: float | None = None
) -> CausalLM:
    """The preset's model with numbers that were drawn on the device, which is fast."""
    config = presets()[name]
    if prune is not None:
        config = pruned_config(name, config, prune)
    model = CausalLM(config, device="meta").to_empty(device=device).to(dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        for buffer in model.buffers():
            buffer.zero_()
        if prune is not None:
            for block in model.blocks:
                _forget_like_a_trained_one(block.mixer)
    return model


def _forget_like_a_trained_one(mixer: torch.nn.Module) -> None:
    """Head h's gate is near exp(-1 / span_h)."""
    first, last = (math.log(span) for span in _SPANS)
    bias = mixer.gate_bias
    spans = torch.linspace(first, last, bias.numel(), device=bias.device, dtype=bias.dtype).exp()
    bias.copy_(torch.logit(torch.exp(-1 / spans)))


def steps_prune(model: CausalLM, batch: int, held: int) -> bool:
    """Whether steps leave out keys: on a GPU not of caches that are read sooner than looked at."""
    device = next(model.parameters()).device
    state = model.blocks[0].mixer.init_state(batch, device="meta", capacity=held)
    return device.type != "cuda" or state.k.nbytes >= LEAST_PRUNED_BYTES


@torch.no_grad()
def kept_share(model: CausalLM, held: int, capacity: int) -> float:
    """The share of its `held` keys that pruning leaves to a sequence's next token, by the gates of
    random tokens: QK-norm's weights are one, and the query's score of its own key counts as zero.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, held), generator=generator).to(device)
    shares = []

    def look(mixer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        log_f = mixer.log_gate(inputs[0]).double()
        fades = log_f.flip(1).cumsum(1).flip(1) - log_f
        least = math.log(mixer.prune / capacity) - 1.01 * math.sqrt(mixer.head_dim)
        kept = (fades >= least).unflatten(2, (mixer.num_kv_heads, -1)).any(-1)
        shares.append(kept.double().mean().item())

    hooks = [block.mixer.register_forward_pre_hook(look) for block in model.blocks]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.mean(shares)


def measure_prefill(name: str, model: CausalLM, tokens: int, repeats: int) -> Prefill:
    """Reading a prompt and drawing its first token, beside a forward pass with loss that keeps what
    a backward pass needs."""
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
    actions = (
        lambda: model.generate(ids, 1, temperature=0.8, top_p=0.95, seed=1),
        lambda: model(ids, "next").loss,
    )
    speeds = []
    for action, is_training in zip(actions, (False, True), strict=True):
        model.train(is_training)
        seconds = []
        for _ in range(repeats + 1):  # the first one makes buffers, and does not count
            _wait(device)
            start = time.perf_counter()
            kept = action()
            _wait(device)
            seconds.append(time.perf_counter() - start)
            del kept
        speeds.append(tokens / statistics.median(seconds[1:]))
    model.eval()
    return Prefill(name, tokens, *speeds)


def measure(
    name: str, model: CausalLM, batch: int, options: argparse.Namespace, speed: float
) -> Row:
    """One row of the table; the prompts' time is taken off."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(model.config.vocab_size, (batch, options.prompt), generator=generator).to(
        device
    )
    first, seconds = _seconds(model, ids, options.new, options.repeats)
    eager = None
    if options.eager and device.type == "cuda":
        with _graphs_off():
            eager = 1 / _seconds(model, ids, min(options.new, 64), 1)[1]
    held = options.prompt + options.new // 2
    share = 1.0
    if options.prune is not None and steps_prune(model, batch, held):
        share = kept_share(model, held, options.prompt + options.new)
    return Row(
        name, batch, options.prompt, options.new, 1 / seconds, eager,
        speed / step_bytes(model, batch, held, share), first * 1e3, options.prune,
    )  # fmt: skip


def _seconds(model: CausalLM, ids: torch.Tensor, new: int, repeats: int) -> tuple[float, float]:
    """Seconds for the prompts and their first tokens, and for every token after these."""

    def timed(count: int) -> float:
        _wait(ids.device)
        start = time.perf_counter()
        model.generate(ids, count, temperature=0.8, top_p=0.95, seed=1)
        _wait(ids.device)
        return time.perf_counter() - start

    timed(new + 1)  # captures what later calls replay
    first = statistics.median(timed(1) for _ in range(repeats))
    whole = statistics.median(timed(new + 1) for _ in range(repeats))
    return first, max(whole - first, 1e-9) / new


def step_bytes(model: CausalLM, batch: int, held: int, share: float = 1.0) -> float:
    """What a step must move: the weights, read once (of an embedding that is no head a row a
    sequence); recurrent states, read and written; what attention holds of `held` tokens, read, or
    the `share` of it that pruning leaves."""
    tied = model.head is None
    total = sum(p.nbytes for p in model.parameters())
    if not tied:
        weight = model.embedding.weight
        total -= weight.nbytes - batch * weight[0].nbytes
    for block in model.blocks:
        mixer = block.mixer
        if getattr(mixer, "keeps_tokens", False):
            state = mixer.init_state(1, device="meta", capacity=held)
            total += share * batch * sum(t.nbytes for t in state.caches)
        else:
            state = mixer.init_state(batch, device="meta")
            parts = [state] if isinstance(state, torch.Tensor) else state
            total += 2 * sum(t.nbytes for t in parts)
    return total


def copy_speed(device: torch.device) -> float:
    """Bytes/s that a large copy reads and writes."""
    size = 1 << (30 if device.type == "cuda" else 28)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    times = []
    for _ in range(10):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * size / min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    from .training.runtime import cpu_name

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


@contextmanager
def _graphs_off() -> Iterator[None]:
    before = os.environ.get(_GRAPHS)
    os.environ[_GRAPHS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GRAPHS]
        else:
            os.environ[_GRAPHS] = before
