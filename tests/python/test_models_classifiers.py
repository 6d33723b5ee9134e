"""`tidegate.models`: classifiers of sequences and of images."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_models import SMALL, make

from tidegate.models import ImageClassifier, SequenceClassifier

SEQUENCES = SMALL.replace(num_classes=4)
BOTH_WAYS = SEQUENCES.replace(mixer_options={"bidirectional": True})


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (3, 10))


@pytest.mark.parametrize("config", [SEQUENCES, BOTH_WAYS], ids=["causal", "bidirectional"])
def test_padding_never_enters(config, ids):
    model = make(config, SequenceClassifier)
    lengths = torch.tensor([7, 10, 2])
    labels = torch.tensor([0, 3, 1])
    out = model(ids, labels, lengths=lengths)
    alone = [model(row[None, :n]).logits for row, n in zip(ids, lengths.tolist(), strict=True)]
    torch.testing.assert_close(out.logits, torch.cat(alone))
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    packed = torch.cat([row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)])
    bounds = torch.tensor([0, 7, 17, 19])
    torch.testing.assert_close(model(packed[None], cu_seqlens=bounds).logits, out.logits)
    other = ids.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 11
    assert torch.equal(model(other, lengths=lengths).logits, out.logits)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_empty_sequence_pools_to_zero(ids):
    model = make(SEQUENCES, SequenceClassifier)
    out = model(ids, lengths=torch.tensor([0, 3, 4]))
    torch.testing.assert_close(out.logits[0], model.head.bias)
    assert out.logits.isfinite().all()


def test_pooling_does_not_overflow_in_fp16():
    config = SEQUENCES.replace(dim=32, layers=1)
    model = make(config, SequenceClassifier, dtype=torch.float32).half().eval()
    ids = torch.full((1, 60000), 2)
    # Every channel has the same sign at every token, so sums in fp16 would end at infinity.
    with torch.no_grad():
        out = model(ids).logits
        assert (model._run(model.embedding(ids), None, None)[0].float().sum(1) > 65504).any()
        packed = model(ids, lengths=torch.tensor([60000])).logits
    torch.testing.assert_close(out, packed, rtol=1e-2, atol=2e-3)  # sums of another order


def test_sequence_classifier_refuses(ids):
    model = make(SEQUENCES, SequenceClassifier)
    bounds = torch.tensor([0, 10])
    with pytest.raises(ValueError, match="expected lengths or cu_seqlens; got both"):
        model(ids, lengths=bounds, cu_seqlens=bounds)
    with pytest.raises(ValueError, match=r"lengths: expected 0 to T=10; got \[11, 1, 1\]"):
        model(ids, lengths=torch.tensor([11, 1, 1]))


IMAGES = SMALL.replace(
    vocab_size=None,
    num_classes=4,
    patch_size=2,
    mixer_options={"bidirectional": True},
    final_norm="rms_no_weight",
    glu_activation="silu",
)


def test_image_classifier_by_hand():
    model = make(IMAGES, ImageClassifier)
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    weight = model.patch.weight.view(8, 3, 2, 2)
    x = F.conv2d(images, weight, model.patch.bias, stride=2).flatten(2).transpose(1, 2)
    gammas = model.lower_bounds()
    for k, block in enumerate(model.blocks):
        x = block(x, gamma=gammas[k])[0]
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    wanted = model.head(x.mean(1))
    out = model(images, torch.tensor([1, 3]))
    torch.testing.assert_close(out.logits, wanted)
    assert out.state is None
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_image_without_patches_pools_to_zero():
    model = make(IMAGES, ImageClassifier)
    out = model(torch.randn(2, 3, 0, 4, dtype=torch.float64))
    torch.testing.assert_close(out.logits, model.head.bias.expand(2, 4))


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 1, 4, 4), (3, 4, 4)])
def test_image_classifier_refuses(shape):
    model = make(IMAGES, ImageClassifier)
    with pytest.raises(ValueError, match=r"images: expected \[B, 3, H, W\] with H and W multiples"):
        model(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("cls", "config"), [(SequenceClassifier, BOTH_WAYS), (ImageClassifier, IMAGES)]
)
def test_classifier_files(cls, config, tmp_path):
    model = make(config, cls, dtype=torch.float32)
    model.save(tmp_path)
    loaded = cls.load(tmp_path)
    for (name, one), two in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.gpu
def test_pooling_on_cuda(ids, device):
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    model = make(BOTH_WAYS, SequenceClassifier)
    lengths = torch.tensor([7, 0, 2])
    there = copy.deepcopy(model).to(device)
    out = there(ids.to(device), lengths=lengths)
    torch.testing.assert_close(out.logits.cpu(), model(ids, lengths=lengths).logits)
