"""The language model's loss: from hidden states, by chunks of logits that nobody sees."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tidegate.models import CausalLM, LMConfig, mixers
from tidegate.training import TrainConfig
from tidegate.training.checkpoint_content import optimizer_states
from tidegate.training.masters import MasterWeights


def model_of(device: str = "cpu", **options: object) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(LMConfig(**{"vocab_size": 29, "dim": 16, "layers": 2, **options})).to(device)


def ids_of(rows: int = 2, time: int = 13, vocab: int = 29, device: str = "cpu") -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (rows, time), generator=rng).to(device)


def by_logits(model: CausalLM, ids: torch.Tensor, labels: torch.Tensor, **given) -> torch.Tensor:
    logits = model(ids, **given).logits.double().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten().long())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [2, 29, 64, 257])
def test_loss_and_gradients_are_those_of_the_logits(tied: bool, vocab: int, device: str) -> None:
    model = model_of(device, vocab_size=vocab, tied=tied)
    ids = ids_of(vocab=vocab, device=device)
    labels = ids.roll(-1, 1)
    labels[0, ::3] = -100
    for given in (labels, labels.int(), labels.short()):
        out = model(ids, given)
        assert out.logits is None
        grads = torch.autograd.grad(out.loss, list(model.parameters()))
        wanted = by_logits(model, ids, labels)
        torch.testing.assert_close(out.loss, wanted.float())
        expected = torch.autograd.grad(wanted, list(model.parameters()))
        for one, two in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, two)


class LowRank(nn.Module):
    """An adapter as PEFT puts it in a linear layer's place: `weight` is that of the layer alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 29)
        self.weight = base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("kind", ["adapter", "bias", "hook"])
def test_a_head_that_does_more_than_multiply_by_its_weight_is_called(kind: str) -> None:
    """The loss and the logits had read its weight and left out the rest."""
    model, ids = model_of(tied=False), ids_of()
    plain = model(ids).logits
    if kind == "adapter":
        model.head = LowRank(model.head)
    elif kind == "bias":
        model.head.bias = nn.Parameter(torch.randn(29))
    else:
        model.head.register_forward_hook(lambda module, args, y: y * 0.5)
    labels = ids.roll(-1, 1)
    labels[0, ::3] = -100
    logits = model(ids).logits
    assert not torch.allclose(logits, plain)
    assert torch.allclose(model.prefill(ids)[0], logits[:, -1], atol=1e-5)
    first = model.logits_at(ids, torch.zeros_like(ids[:, :1]))
    torch.testing.assert_close(first[:, 0], logits[:, 0])
    loss = model(ids, labels, label_smoothing=0.1, z_loss=1e-2).loss
    kept = labels != -100
    z_loss = 1e-2 * logits[kept].logsumexp(-1).square().mean()
    wanted = F.cross_entropy(logits[kept], labels[kept], label_smoothing=0.1) + z_loss
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad is not None for p in model.head.parameters())
    assert model(ids, torch.full_like(ids, -100)).loss == 0


def test_logits_are_returned_where_they_are_asked_for() -> None:
    model, ids = model_of(), ids_of()
    alone = model(ids)
    assert alone.loss is None
    out = model(ids, "next", return_logits=True)
    assert torch.equal(out.logits, alone.logits)
    assert torch.equal(out.loss, model(ids, "next").loss)
    assert model(ids, "next").logits is None
    assert model(ids, return_logits=False)[:2] == (None, None)
    # Both may be differentiated at once.
    (out.loss + out.logits.square().mean()).backward()
    assert model.embedding.weight.grad.isfinite().all()


def test_packed_sequences_and_smoothing(device: str) -> None:
    model, ids = model_of(device), ids_of(1, 24, device=device)
    bounds = torch.tensor([0, 0, 5, 24, 24], device=device)
    labels = ids.roll(-1, 1)
    labels[0, [4, 23]] = -100
    logits = model(ids, cu_seqlens=bounds).logits[0]
    kept = labels[0] != -100
    wanted = F.cross_entropy(logits[kept], labels[0][kept], label_smoothing=0.2)
    wanted = wanted + 0.01 * logits[kept].logsumexp(-1).square().mean()
    loss = model(ids, "next", cu_seqlens=bounds, label_smoothing=0.2, z_loss=0.01).loss
    torch.testing.assert_close(loss, wanted)


class LargestTensor(TorchDispatchMode):
    """The most numbers that an op returned in one tensor."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return results


@pytest.mark.parametrize("tied", [True, False])
def test_nothing_of_tokens_times_vocabulary_exists(tied: bool) -> None:
    model, ids = model_of(vocab_size=1000, tied=tied), ids_of(2, 40, vocab=1000)
    with LargestTensor() as largest, torch.autocast("cpu", torch.bfloat16):
        model(ids, "next").loss.backward()
    assert largest.numbers < ids.numel() * 1000
    assert largest.numbers == model.embedding.weight.numel()


def test_one_token_that_is_not_a_number_spoils_its_own_row_alone(device: str) -> None:
    """A loss of NaN and gradients of NaN in the hidden state of that token; nowhere else."""
    model, ids = model_of(device, mixer="hgrn2", norm="rms"), ids_of(device=device)
    x = torch.randn(2, 13, 16, device=device)
    x[1, 4] = float("nan")
    x.requires_grad_()
    y = model.norm(x)
    loss = torch.ops.tidegate.linear_cross_entropy(
        y, model.embedding.weight, ids, None, -100, 0.1, 0.01, "none"
    )
    assert loss.isnan().nonzero().tolist() == [[1, 4]]
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert dx.isnan().any(-1).nonzero().tolist() == [[1, 4]]


# Precision


class Casts(TorchDispatchMode):
    """How often each of some tensors was copied to another dtype."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {t.untyped_storage()._cdata: name for name, t in tensors.items()}
        self.counts = dict.fromkeys(tensors, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            name = self._names.get(args[0].untyped_storage()._cdata)
            if name is not None:
                self.counts[name] += 1
        return result


def step_casts(mixer: str, precision: str) -> dict[str, int]:
    """The casts of weights that one step makes."""
    model = model_of(mixer=mixer, norm="rms", tied=False)
    train = TrainConfig(steps=1, precision=precision)
    optimizer = train.make_optimizer(model, capturable=False)
    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2}
    with Casts(matrices) as casts:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids_of(), "next").loss
        loss.backward()
        optimizer.step()
    return casts.counts


@pytest.mark.parametrize("mixer", mixers())
def test_no_weight_is_cast_twice_a_step(mixer: str) -> None:
    assert max(step_casts(mixer, "bf16").values()) == 1
    # LowerBounds and a recurrent matrix are read in fp32.
    counts = step_casts(mixer, "bf16-weights")
    assert not [name for name, count in counts.items() if count and name.endswith("proj.weight")]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_masters_move_where_bf16_weights_would_not(optimizer: str) -> None:
    model = model_of(mixer="hgrn", tied=False)
    wide = {n: p.detach().clone() for n, p in model.named_parameters()}
    train = TrainConfig(
        steps=1, precision="bf16-weights", optimizer=optimizer, lr=1e-5, muon_lr=1e-5
    )
    masters = train.make_optimizer(model, capturable=False)
    assert isinstance(masters, MasterWeights)
    plain = TrainConfig(steps=1, precision="bf16", optimizer=optimizer, lr=1e-5, muon_lr=1e-5)
    other = model_of(mixer="hgrn", tied=False)
    stepped = plain.make_optimizer(other, capturable=False)
    names = {id(p): n for n, p in model.named_parameters()}
    assert model.lower_bounds.logits.dtype == torch.float32
    for _ in range(8):
        for net, optim in ((model, masters), (other, stepped)):
            with torch.autocast("cpu", torch.bfloat16):
                net(ids_of(), "next").loss.backward()
            optim.step()
            optim.zero_grad()
    kept = {names[id(w)]: m for w, m in zip(masters.weights, masters.masters, strict=True)}
    assert set(kept) == {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    moved = dict(other.named_parameters())
    for name, master in kept.items():
        assert torch.equal(dict(model.named_parameters())[name], master.bfloat16())
        ours, theirs = (master - wide[name]).detach(), (moved[name] - wide[name]).detach()
        assert ours.abs().max() > 0
        if optimizer == "adamw":  # by as much, though the gradients are of rounded weights
            assert abs(ours.norm() / theirs.norm() - 1) < 0.2, name


def test_masters_are_saved_and_restored() -> None:
    def run(model, optimizer, steps):
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                model(ids_of(), "next").loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin():
        model = model_of()
        train = TrainConfig(steps=1, precision="bf16-weights")
        return model, train.make_optimizer(model, capturable=False)

    model, optimizer = begin()
    run(model, optimizer, 3)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, 2)
    again, stepped = begin()
    again.load_state_dict(kept[0])
    stepped.load_state_dict(optimizer_states(stepped, kept[1], True))
    run(again, stepped, 2)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert all(map(torch.equal, stepped.masters, optimizer.masters))
    kept[1]["masters"][1] = kept[1]["masters"][1][:3]
    with pytest.raises(ValueError, match=r"optimizer: master 1: expected \["):
        optimizer_states(stepped, kept[1], True)
    with pytest.raises(ValueError, match="optimizer: masters: expected "):
        optimizer_states(stepped, {**kept[1], "masters": None}, True)
