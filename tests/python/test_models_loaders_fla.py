"""Weights of flash-linear-attention's own layers, loaded here: the same outputs.

Its kernels are Triton's, so this needs a GPU, and fla-core, flash-linear-attention and einops.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import require_cuda
from torch import Tensor, nn

from tidegate.models import loaders

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("fla")]

DIM, HEADS = 128, 4
TOKENS = 60  # up to 64 go through fla's loops over time, which do not multiply in TF32,
TF32 = 2e-3  # but its attention does: cutting q, k, p and v to TF32 alone makes 8e-4
Layer = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def fla_layer() -> Iterator[Layer]:
    """Makes a layer from its file's and class's name, with random weights.

    fla.layers imports transformers, of which these files need a logger at most: where it is not
    installed, the package is its folder, and transformers is that logger.
    """
    require_cuda()
    for name in ("triton", "einops", "fla.ops"):
        pytest.importorskip(name)
    folder = Path(sys.modules["fla"].__path__[0]) / "layers"
    if not folder.is_dir():
        pytest.skip("only fla-core is installed, without flash-linear-attention's layers")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("transformers") is None:
            stand_ins = {name: ModuleType(name) for name in ("fla.layers", "transformers.utils")}
            stand_ins["transformers"] = ModuleType("transformers")
            stand_ins["fla.layers"].__path__ = [str(folder)]
            stand_ins["transformers.utils"].logging = SimpleNamespace(get_logger=logging.getLogger)
            for name, module in stand_ins.items():
                patch.setitem(sys.modules, name, module)

        def make(file: str, name: str, **options: object) -> nn.Module:
            cls = getattr(importlib.import_module(f"fla.layers.{file}"), name)
            take_first_configurations()
            layer = cls(hidden_size=DIM, layer_idx=1, **options).cuda().eval()
            with torch.no_grad():
                for tensor in layer.parameters():
                    if tensor.dim() > 1:
                        tensor.normal_(std=1.5 * tensor.size(1) ** -0.5)
                    else:
                        tensor.add_(0.3 * torch.randn_like(tensor))
            return layer

        yield make


def take_first_configurations() -> None:
    """Every kernel of fla that would try many configurations takes its first: these are results,
    not times."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for value in list(vars(module).values()):
            while value is not None and hasattr(value, "fn"):
                if hasattr(value, "configs"):
                    value.configs = value.configs[:1]
                value = value.fn


def same_outputs(
    theirs: nn.Module,
    load: Callable[[dict], nn.Module],
    bound: Tensor | None = None,
    allowed: float = 1e-4,
) -> None:
    """In fp32, and in bf16 within its rounding; both with this lower bound of the gates."""
    x = torch.randn(2, TOKENS, DIM, device="cuda")
    ours = load(theirs.state_dict()).cuda()
    lower = {} if bound is None else {"lower_bound": bound}
    gamma = {} if bound is None else {"gamma": bound}
    for dtype, most in ((torch.float32, allowed), (torch.bfloat16, 2e-2)):
        with torch.no_grad():
            wanted = theirs.to(dtype)(x.to(dtype), **lower)[0].double()
            found = ours.to(dtype)(x.to(dtype), **gamma)[0].double()
        error = float((found - wanted).norm() / wanted.norm())
        assert error <= most, f"{dtype}: {error}"


@pytest.mark.parametrize("expand", [1, 2])
def test_hgrn(expand: int, fla_layer: Layer) -> None:
    torch.manual_seed(0)
    layer = fla_layer("hgrn", "HGRNAttention", expand_ratio=expand)
    bound = torch.rand(expand * DIM, device="cuda")
    same_outputs(layer, loaders.hgru_from_fla, bound)


def test_hgrn2(fla_layer: Layer) -> None:
    torch.manual_seed(1)
    layer = fla_layer("hgrn2", "HGRN2Attention", expand_ratio=DIM // HEADS)
    bound = torch.rand(DIM, device="cuda")
    same_outputs(layer, lambda state: loaders.hgru2_from_fla(state, HEADS), bound)


@pytest.mark.parametrize("output_gate", [False, True])
def test_gla(output_gate: bool, fla_layer: Layer) -> None:
    torch.manual_seed(2)
    options = {"num_heads": HEADS, "use_output_gate": output_gate}
    layer = fla_layer("gla", "GatedLinearAttention", **options)
    same_outputs(layer, lambda state: loaders.gla_from_fla(state, HEADS))


@pytest.mark.parametrize(
    ("qk_norm", "output_gate", "kv_heads"), [(False, False, None), (True, True, 2)]
)
def test_forgetting_attention(
    qk_norm: bool, output_gate: bool, kv_heads: int | None, fla_layer: Layer
) -> None:
    torch.manual_seed(3)
    options = {"qk_norm": qk_norm, "use_output_gate": output_gate, "num_kv_heads": kv_heads}
    layer = fla_layer("forgetting_attn", "ForgettingAttention", num_heads=HEADS, **options)
    load = loaders.forgetting_attention_from_fla
    same_outputs(layer, lambda state: load(state, HEADS), allowed=TF32)
