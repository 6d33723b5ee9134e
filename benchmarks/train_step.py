#!/usr/bin/env python3
"""Training steps of whole models on one GPU: tokens/s, memory, and where the time goes.

    python benchmarks/train_step.py --model hgrn2-756m --profile --json hgrn2.json
    python benchmarks/train_step.py --table hgrn2.json transformer.json

The Transformer has whichever of torch's attentions is the fastest at its shape, which is named.
A model a process, so that memory and the time to the first loss are its own. A step is forward,
backward and fused AdamW on one batch of random ids, eager unless --compile; --precision, --residual
and --recompute are those of `tidegate train`. "hgrn" is HGRN in the frame of the preset hgrn2-756m,
"fla:hgrn2-756m" and "fla:fox-757m" are flash-linear-attention's models of these sizes, with all
that it fuses (their first loss waits for Triton, which tunes itself for minutes).
--profile splits two steps more by kernels: matrix products, torch's attention, our ops (kernels of
this library), the optimiser, and the rest; idle is what of the step no kernel covers. The floor is
the products' operations at the speed of one large product, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tidegate
from tidegate.models import CausalLM, LMConfig, presets
from tidegate.nn._common import with_memory
from tidegate.training import TrainConfig
from tidegate.training.masters import clip_gradients
from tidegate.training.runtime import autocast

KINDS = {
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "attention": r"flash|fmha|cudnn",
    "optimiser": r"adam",
}
COLUMNS = ("products", "attention", "ours", "optimiser", "rest", "idle")


def process_seconds() -> float:
    """How long this process has been running."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - started / os.sysconf("SC_CLK_TCK")


def config_of(name: str, vocab: int, layers: int | None) -> LMConfig:
    """The preset `name`, also of "fla:name", or "hgrn"."""
    name = name.removeprefix("fla:")
    if name == "hgrn":
        config = presets()["hgrn2-756m"].replace(mixer="hgrn", mixer_options={"preset": "fla"})
    else:
        config = presets()[name]
    layers = config.layers if layers is None else layers
    return config.replace(vocab_size=vocab, layers=layers)


@torch.no_grad()
def make_model(config: LMConfig, device: torch.device) -> CausalLM:
    """A model whose first block is drawn, with the others equal to it: hundreds of millions of
    numbers from the CPU's generator take longer than the steps."""
    model = with_memory(CausalLM(config, device="meta"), device)
    torch.nn.init.normal_(model.embedding.weight, std=0.02)
    if model.head is not None:
        torch.nn.init.normal_(model.head.weight, std=0.02)
    for part in (model.lower_bounds, model.blocks[0]):
        if part is not None:
            part.reset_parameters()
    drawn = dict(model.blocks[0].named_parameters()) | dict(model.blocks[0].named_buffers())
    for block in model.blocks[1:]:
        for name, t in (*block.named_parameters(), *block.named_buffers()):
            t.copy_(drawn[name])
    torch.nn.init.ones_(model.norm.weight)
    if getattr(model.norm, "bias", None) is not None:
        torch.nn.init.zeros_(model.norm.bias)
    return model


def make_fla(config: LMConfig, device: torch.device) -> torch.nn.Module:
    """flash-linear-attention's model of such a configuration."""
    from fla import models

    names = {"hgrn2": "HGRN2", "fox": "ForgettingTransformer"}
    if config.mixer not in names:
        raise SystemExit(f"fla: expected a preset of {' or '.join(names)}; got {config.mixer}")
    more = {"expand_ratio": None} if config.mixer == "hgrn2" else {}
    made = getattr(models, f"{names[config.mixer]}Config")(
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_heads=config.mixer_options["num_heads"],
        intermediate_size=config.glu_hidden,
        vocab_size=config.vocab_size,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        use_cache=False,
        **more,
    )
    with device:
        return getattr(models, f"{names[config.mixer]}ForCausalLM")(made)


class Step:
    """A step of training; calling it returns the loss on the device."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.train = TrainConfig(
            steps=1,
            precision=options.precision,
            residual=options.residual,
            recompute=options.recompute,
            compile=options.compile,
        )
        config = config_of(options.model, options.vocab, options.layers)
        self.is_fla = options.model.startswith("fla:")
        self.model = (make_fla if self.is_fla else make_model)(config, device)
        self.train.prepare(self.model)
        if options.compile:
            for block in self.model.blocks:
                block.compile()
        self.optimizer = self.train.make_optimizer(self.model, capturable=False)
        shape = (options.batch, options.context)
        self.ids = torch.randint(options.vocab, shape, device=device)
        self.device = device
        self.clip = options.clip

    def forward(self) -> torch.Tensor:
        with autocast(self.device, self.train.precision):
            if self.is_fla:  # its models shift labels themselves
                return self.model(self.ids, labels=self.ids).loss
            return self.model(self.ids, "next").loss

    def __call__(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        if self.clip > 0:
            clip_gradients(self.optimizer, self.model, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def products(self) -> float:
        """Floating-point operations of a step's matrix products with weights."""
        used = {id(p): p for p in self.model.parameters() if p.dim() == 2}
        if self.is_fla or self.model.head is not None:
            for module in self.model.modules():
                if isinstance(module, torch.nn.Embedding):
                    used.pop(id(module.weight))
        return 6.0 * self.ids.numel() * sum(p.numel() for p in used.values())


def matmul_speed(device: torch.device) -> float:
    """Floating-point operations a second of one large product in bf16."""
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    best = 0.0
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            a @ b
        end.record()
        end.synchronize()
        best = max(best, 4 * 2 * 8192**3 / (begin.elapsed_time(end) / 1e3))
    return best


def fastest_attention(config: LMConfig, shape: tuple[int, int], device: torch.device) -> SDPBackend:
    """Which of torch's attentions takes least for a layer's forward and backward pass in bf16."""
    heads = config.mixer_options["num_heads"]
    size = (3, shape[0], shape[1], heads, config.dim // heads)
    q, k, v = torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_().unbind(0)
    seconds = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                for _ in range(3):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    o = F.scaled_dot_product_attention(
                        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
                    )
                    torch.autograd.grad(o.sum(), (q, k, v))
                    end.record()
                    end.synchronize()
                    seconds[backend] = begin.elapsed_time(end)
        except RuntimeError as error:  # not on this GPU, or not for this head
            print(f"{backend}: {str(error).splitlines()[0]}")
    return min(seconds, key=seconds.__getitem__)


def kind_of(kernel: str) -> str:
    """Which of COLUMNS a kernel's time belongs to. One of ours may be named after what it fuses."""
    if "tidegate" in kernel:
        return "optimiser" if "adamw" in kernel else "ours"
    found = (kind for kind, words in KINDS.items() if re.search(words, kernel, re.I))
    return next(found, "rest")


def profile(step: Step, steps: int = 2) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the kernels that take most of it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in prof.events():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if not is_kernel or event.name.startswith(("Optimizer.", "ProfilerStep")):  # a span's name
            continue
        milliseconds = event.device_time_total / 1e3 / steps
        kind = kind_of(event.name)
        kinds[kind] += milliseconds
        kernels[f"{kind}: {event.name[:110]}"] += milliseconds
    return {"kinds": dict(kinds), "kernels": dict(kernels.most_common(24))}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What --json holds."""
    device = torch.device(options.device)
    if options.model.startswith("transformer") and device.type == "cuda":
        config = config_of(options.model, options.vocab, options.layers)
        backend = fastest_attention(config, (options.batch, options.context), device)
        with sdpa_kernel(backend):
            return measure_with(options, device) | {"attention": backend.name}
    return measure_with(options, device)


def measure_with(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures the step with the attention that is set."""
    step = Step(options, device)
    loss = step.forward()
    first = loss.item()
    result: dict[str, Any] = {
        "model": options.model,
        "options": {name: getattr(options, name) for name in _SETTINGS},
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "seconds_to_first_loss": process_seconds(),
        "first_loss": first,
    }
    del loss
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warm):
        step().item()
    # The host runs ahead of the device as it does in training, which looks at a loss now and then.
    begin = time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    last = loss.item()
    seconds = (time.perf_counter() - begin) / options.steps
    result |= {
        "ms": 1e3 * seconds,
        "tokens_per_second": step.ids.numel() / seconds,
        "last_loss": last,
        "torch": torch.__version__,
        "commit": tidegate._library.build_info().get("commit"),
    }
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["gpu"] = torch.cuda.get_device_name()
        speed = matmul_speed(device)
        result["matmul_tflops"] = speed / 1e12
        result["floor_ms"] = 1e3 * step.products() / speed
        if options.profile:
            found = profile(step)
            found["kinds"]["idle"] = max(0.0, result["ms"] - sum(found["kinds"].values()))
            result["profile"] = found
    return result


def table(files: list[str]) -> str:
    """The results as lines."""
    lines = [
        f"{'model':<18}{'settings':<28}{'ms':>7}{'tok/s':>8}{'GiB':>6}{'1st s':>6}{'floor':>7}  "
        + " ".join(f"{name:>9}" for name in COLUMNS)
    ]
    for result in (json.loads(Path(file).read_text()) for file in files):
        options = result["options"]
        words = [options["precision"], options["residual"], options["recompute"]]
        words += ["compile"] if options["compile"] else []
        words += [result["attention"].partition("_")[0].lower()] if "attention" in result else []
        kinds = result.get("profile", {}).get("kinds", {})
        split = " ".join(f"{kinds.get(name, 0.0):>9.1f}" for name in COLUMNS) if kinds else ""
        lines.append(
            f"{result['model']:<18}{' '.join(words):<28}{result['ms']:>7.1f}"
            f"{result['tokens_per_second'] / 1e3:>7.1f}k{result.get('peak_gib', 0):>6.1f}"
            f"{result['seconds_to_first_loss']:>6.1f}{result.get('floor_ms', 0):>7.1f}  {split}"
        )
    return "\n".join(lines)


_SETTINGS = (
    *("batch", "context", "vocab", "layers", "precision", "residual", "recompute", "compile"),
    *("clip", "steps", "warm"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="hgrn2-756m", help="a preset's name, hgrn, or fla:preset"
    )
    parser.add_argument("--layers", type=int, help="fewer than the preset's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--residual", default="auto")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: none")
    parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print these results and stop")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    result = measure(options)
    text = json.dumps(result, indent=2)
    if options.json:
        Path(options.json).write_text(text + "\n")
        print(table([options.json]))
        for name, milliseconds in result.get("profile", {}).get("kernels", {}).items():
            print(f"  {milliseconds:8.2f} ms  {name}")
    else:
        print(text)


if __name__ == "__main__":
    main()
