"""What models keep for the backward pass, and what they compute again in it instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.kept_memory import bytes_a_token
from torch import nn

from tidegate.models import CausalLM, ImageClassifier, LMConfig, mixers
from tidegate.nn import GLU
from tidegate.nn._common import make_norm
from tidegate.nn._recompute import recomputing

DOCS = Path(__file__).parents[2] / "docs" / "training_memory.md"


def small(mixer: str = "hgrn2", **options: object) -> LMConfig:
    return LMConfig(mixer=mixer, vocab_size=19, dim=16, layers=3, **options)


def gradients(model: CausalLM, recompute: str, device: str = "cpu", **given: object) -> list:
    """Loss and gradients under autocast."""
    model.recompute = recompute
    model.zero_grad()
    ids = torch.arange(2 * 21, device=device).remainder(19).view(2, 21)
    torch.manual_seed(3)
    with torch.autocast(device, torch.bfloat16):
        loss = model(ids, "next", **given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("mixer", mixers())
def test_gradients_are_the_same_bits(mixer: str, device: str) -> None:
    torch.manual_seed(0)
    model = CausalLM(small(mixer)).to(device)
    wanted = gradients(model, "none", device)
    # Attention adds up the gradient of q in any order on CUDA.
    repeatable = device == "cpu" or not mixer.startswith(("fox", "transformer"))
    for recompute in ("norms", "blocks"):
        for one, two in zip(gradients(model, recompute, device), wanted, strict=True):
            if repeatable:
                assert torch.equal(one, two), recompute
            else:
                torch.testing.assert_close(one, two, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_the_residual_stream_has_the_dtype_that_is_asked_for(residual: torch.dtype) -> None:
    torch.manual_seed(0)
    model = CausalLM(small(norm="rms"))
    plain = gradients(model, "none")
    seen = []
    model.blocks[1].glu_norm.register_forward_hook(lambda m, x, y: seen.append(y[1].dtype))
    model.residual_dtype = residual
    wanted = gradients(model, "none")
    for one, two in zip(wanted, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.05)
    for recompute in ("norms", "blocks"):
        for one, two in zip(gradients(model, recompute), wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=0.1, atol=0.01)
    assert set(seen) == {residual}


def test_the_residual_stream_keeps_its_dtype_outside_autocast() -> None:
    """As in a step, so that a prompt is read alike by both."""
    torch.manual_seed(0)
    model = CausalLM(small()).eval()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        model.residual_dtype = torch.bfloat16
        assert torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("recompute", ["norms", "blocks"])
def test_dropout_and_noise_are_drawn_once(recompute: str) -> None:
    torch.manual_seed(0)
    for config in (
        small(dropout=0.3),
        small("fox", mixer_options={"num_heads": 2, "gumbel_gate": 0.5}),
    ):
        model = CausalLM(config)
        wanted = gradients(model, "none")
        after = torch.rand(())
        assert all(map(torch.equal, gradients(model, recompute), wanted))
        assert torch.rand(()) == after


def test_packed_sequences_and_other_models() -> None:
    torch.manual_seed(0)
    model = CausalLM(small())
    ids, bounds = torch.arange(30).remainder(19)[None], torch.tensor([0, 7, 7, 30])
    grads = {}
    for recompute in ("none", "norms", "blocks"):
        model.recompute = recompute
        loss = model(ids, "next", cu_seqlens=bounds).loss
        grads[recompute] = torch.autograd.grad(loss, list(model.parameters()))
    for recompute in ("norms", "blocks"):
        assert all(map(torch.equal, grads[recompute], grads["none"]))
    images = ImageClassifier(small(num_classes=3, patch_size=2))
    wanted = [p.grad for p in images.parameters()]
    for recompute in ("none", "norms", "blocks"):
        images.recompute = recompute
        images.zero_grad()
        images(torch.ones(2, 3, 4, 4), torch.tensor([0, 2])).loss.backward()
        found = [p.grad.clone() for p in images.parameters()]
        wanted = found if recompute == "none" else wanted
        assert all(map(torch.equal, found, wanted))


def test_a_graph_may_be_walked_twice() -> None:
    model = CausalLM(small())
    model.recompute = "norms"
    loss = model(torch.arange(12)[None], "next").loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))


def test_what_changed_since_is_not_computed_again() -> None:
    norm, linear = make_norm("rms", 8, 1e-5), nn.Linear(8, 8)
    x = torch.randn(3, 8)
    with recomputing():
        y = linear(norm(x))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place since"):
        y.sum().backward()
    with recomputing():
        h = norm(torch.randn(3, 8))
        y = linear(h.mul_(2))  # not what the norm made any more: kept
    y.sum().backward()


def test_views_are_made_again() -> None:
    glu, norm = GLU(8), make_norm("layer", 8, 1e-5)
    x = torch.randn(4, 6, 8)
    grads = []
    for context in (torch.enable_grad(), recomputing()):
        with context:
            h = norm(x)
            y = glu(h[1:, ::2]) + glu(h.flatten(0, 1)[3]) + h.transpose(0, 1)[:3, :1] * 2
        grads.append(torch.autograd.grad(y.square().sum(), [*glu.parameters(), *norm.parameters()]))
    assert all(map(torch.equal, *grads))


def test_the_cpp_model_has_the_same() -> None:
    cpp = pytest.importorskip("tidegate.cpp", exc_type=ImportError)
    torch.manual_seed(0)
    model = cpp.CausalLM(small())
    assert model.recompute == "none"
    assert model.residual_dtype is None
    wanted = gradients(model, "none")
    for recompute in ("norms", "blocks"):
        assert all(map(torch.equal, gradients(model, recompute), wanted))
    model.residual_dtype = torch.bfloat16
    assert model.residual_dtype == torch.bfloat16
    for one, two in zip(gradients(model, "blocks"), wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.05)
    assert not torch.equal(gradients(model, "blocks")[1], wanted[1])
    with pytest.raises(ValueError, match="recompute: expected one of 'none', 'norms', 'blocks'; "):
        model.recompute = "all"
    ids = torch.arange(9)
    logits = model(ids[None]).logits
    out = model(ids[None], "next", return_logits=True, label_smoothing=0.1)
    assert torch.equal(out.logits, logits)
    smooth = torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:], label_smoothing=0.1)
    torch.testing.assert_close(out.loss, smooth)


def test_options_are_checked() -> None:
    model = CausalLM(small())
    with pytest.raises(ValueError, match="recompute: expected one of 'none', 'norms', 'blocks'; "):
        model.recompute = "all"
    model.recompute = "norms"
    with pytest.raises(Exception, match="expected 'none' or 'blocks' under torch.compile"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.arange(9)[None], "next")
    assert model.eval()(torch.arange(9)[None]).logits.shape == (1, 9, 19)


def test_blocks_compile_whole() -> None:
    torch._dynamo.reset()
    model = CausalLM(small())
    ids = torch.arange(12)[None]
    wanted = torch.autograd.grad(model(ids, "next").loss, list(model.parameters()))
    model.recompute = "blocks"
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(ids, "next").loss, list(model.parameters()))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


def documented() -> dict[str, list[str]]:
    """docs/training_memory.md's table: mixer -> bytes as they are written."""
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|((?: [\d.]+ \|){3})$", DOCS.read_text(), re.MULTILINE)
    return {name: numbers.split(" |")[:-1] for name, numbers in rows}


def test_what_is_kept_is_what_the_docs_say() -> None:
    table = documented()
    assert sorted(table) == sorted(mixers())
    config = LMConfig(dim=256, vocab_size=64, norm="rms", glu_activation="silu", glu_hidden=512)
    for mixer, written in table.items():
        none = bytes_a_token(config.replace(mixer=mixer))
        norms = bytes_a_token(config.replace(mixer=mixer), "norms")
        lean = bytes_a_token(config.replace(mixer=mixer), "norms", torch.bfloat16)
        assert [f"{n:.1f}" for n in (none, norms, lean)] == [n.strip() for n in written], mixer
    assert bytes_a_token(config, "blocks") == 4
    assert bytes_a_token(config, "blocks", torch.bfloat16) == 2
