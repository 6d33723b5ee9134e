"""tidegate.compat.fla beside the installed flash-linear-attention, which needs a GPU.

Layers with one state dict, and the ops that its own tests do not reach; tests/run_fla_tests.py runs
those.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import require_cuda
from test_models_loaders_fla import DIM, HEADS, TF32, TOKENS, Layer, fla_layer  # noqa: F401
from torch import Tensor

from tidegate.compat import fla

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("fla")]
HGRN2 = {"num_heads": HEADS, "expand_ratio": None}
CASES = {
    "hgrn": ("hgrn", "HGRNAttention", {}),
    "hgrn2": ("hgrn2", "HGRN2Attention", HGRN2),
    "gla": ("gla", "GatedLinearAttention", {"num_heads": HEADS}),
    "gla-grouped": ("gla", "GatedLinearAttention", {"num_heads": HEADS, "num_kv_heads": 2}),
    "fox": ("forgetting_attn", "ForgettingAttention", {"num_heads": HEADS}),
    "fox-gated": (
        "forgetting_attn",
        "ForgettingAttention",
        {"num_heads": HEADS, "qk_norm": True, "use_output_gate": True},
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("padded", [False, True])
def test_layer(name: str, padded: bool, fla_layer: Layer) -> None:  # noqa: F811
    torch.manual_seed(0)
    file, cls, options = CASES[name]
    theirs = fla_layer(file, cls, **options)
    ours = getattr(fla, cls)(hidden_size=DIM, layer_idx=1, **options).cuda().eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, TOKENS, DIM, device="cuda")
    mask = torch.ones(2, TOKENS, device="cuda", dtype=torch.int64)
    if padded:
        mask[1, :7] = 0
    more = {"attention_mask": mask if padded else None}
    if "hgrn" in name:
        more["lower_bound"] = torch.rand(DIM, device="cuda")
    with torch.no_grad():
        wanted, found = (layer(x, **more)[0] * mask[..., None] for layer in (theirs, ours))
    assert float((found - wanted).norm() / wanted.norm()) <= TF32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rwkv4(dtype: torch.dtype) -> None:
    require_cuda()
    theirs = pytest.importorskip("fla.ops.rwkv4").fused_recurrent_rwkv4
    torch.manual_seed(1)
    w, u = torch.randn(DIM, device="cuda"), torch.randn(DIM, device="cuda")
    k, v = (torch.randn(2, TOKENS, DIM, device="cuda").to(dtype) for _ in range(2))
    state = torch.zeros(2, 3, 1, DIM, device="cuda")
    given = [t.requires_grad_() for t in (w, u, k, v)]
    results = []
    for call in (theirs, fla.fused_recurrent_rwkv4):
        o, end = call(*given, state.to(dtype))
        assert (o.dtype, end.dtype, end.shape) == (dtype, dtype, state.shape)
        weight = torch.linspace(-1, 1, o.numel(), device="cuda").view(o.shape)
        results.append([o, *torch.autograd.grad((o.float() * weight).sum(), given)])
    allowed = 1e-3 if dtype == torch.float32 else 3e-2
    for name, wanted, found in zip(("o", "w", "u", "k", "v"), *results, strict=True):
        error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        assert error <= allowed, f"{name}: {error}"


@pytest.mark.parametrize("op", ["chunk_hgrn", "fused_recurrent_hgrn"])
def test_hgrn_dtypes(op: str) -> None:
    """The final state's dtype, which fla's two ops do not share."""
    require_cuda()
    theirs = getattr(pytest.importorskip("fla.ops.hgrn"), op)
    x = torch.randn(2, 9, DIM, device="cuda", dtype=torch.bfloat16)
    g: Tensor = F.logsigmoid(x)
    wanted, found = (call(x, g, output_final_state=True) for call in (theirs, getattr(fla, op)))
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
