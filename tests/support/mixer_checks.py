"""What every token mixer whose state is one tensor must do, and models over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tidegate.models import CausalLM, LMConfig, SequenceClassifier

Outputs = tuple[Tensor, ...]


def gamma_of(mixer: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """Lower bounds from zero to next to one, where the mixer takes them."""
    return torch.linspace(0.0, 0.95, mixer.gamma_size, dtype=dtype) if mixer.takes_gamma else None


def check_values_and_gradients(
    mine: Callable[[], Outputs], oracle: Callable[[], Outputs], targets: Sequence[Tensor]
) -> None:
    """Both compute y and, where they are compared too, further outputs in float64: the same values,
    and the same gradients of a function of all of them."""
    given, grads = [mine(), oracle()], []
    for y, *others in given:
        total = (y * torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).sum()
        total = total + sum(other.square().sum() for other in others)
        grads.append(torch.autograd.grad(total, targets, allow_unused=True))
    torch.testing.assert_close(given[0], given[1], rtol=1e-10, atol=1e-12)
    for own, other in zip(*grads, strict=True):
        if other is None:  # at T = 0, say
            assert own is None or not own.any()
        else:
            torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-11)


def tokens(mixer: nn.Module, *shape: int) -> Tensor:
    """Random x ``[*shape, dim]``, in the mixer's dtype and on its device."""
    like = next(mixer.parameters())
    return torch.randn(*shape, mixer.dim, dtype=torch.float64).to(like)


@torch.no_grad()
def check_steps_and_splits(
    mixer: nn.Module,
    gamma: Tensor | None = None,
    same_state: Callable[[Tensor, Tensor], None] = torch.testing.assert_close,
) -> None:
    """A sequence cut in two at any place, and one token at a time on a state in its place."""
    x = tokens(mixer, 3, 9)
    whole, final = mixer(x, gamma=gamma)
    for cut in range(10):
        first, state = mixer(x[:, :cut], gamma=gamma)
        second, state = mixer(x[:, cut:], state, gamma=gamma)
        torch.testing.assert_close(torch.cat([first, second], 1), whole)
        same_state(state, final)
    state = mixer.init_state(3)
    where = state.data_ptr()
    steps = [mixer.step(x[:, t], state, gamma) for t in range(9)]
    assert state.data_ptr() == where
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    same_state(state, final)


@torch.no_grad()
def check_packed_sequences_do_not_touch(mixer: nn.Module, gamma: Tensor | None = None) -> None:
    """Each goes on from its own state as it does alone; empty ones hand theirs on."""
    x = tokens(mixer, 1, 10)
    _, entering = mixer(tokens(mixer, 3, 5), gamma=gamma)
    for bounds in ([0, 4, 4, 10], [0, 0, 10, 10], [0, 1, 2, 10]):
        for before in (entering, None):
            y, state = mixer(x, before, gamma=gamma, cu_seqlens=torch.tensor(bounds))
            for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
                own = None if before is None else before[n : n + 1]
                alone, after = mixer(x[:, start:end], own, gamma=gamma)
                torch.testing.assert_close(y[:, start:end], alone)
                torch.testing.assert_close(state[n : n + 1], after)
    empty, _ = mixer(x[:, :0], entering, gamma=gamma, cu_seqlens=torch.tensor([0, 0, 0, 0]))
    assert empty.shape == (1, 0, mixer.dim)


def check_models(mixer: str | list[str], **options: object) -> CausalLM:
    """A language model and a classifier of it train, and generation is what the parallel forward
    says; returns the former."""
    torch.manual_seed(0)
    config = LMConfig(mixer=mixer, vocab_size=9, dim=6, layers=2, num_classes=3, **options)
    model = CausalLM(config)
    ids = torch.randint(9, (2, 5))
    model(ids, labels="next").loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    more = model.generate(ids, 4, temperature=0.0)
    whole = model(more[:, :-1]).logits.argmax(-1)
    assert torch.equal(more[:, 5:], whole[:, 4:])
    output = SequenceClassifier(config)(ids, torch.tensor([0, 2]), lengths=torch.tensor([5, 2]))
    output.loss.backward()
    assert output.logits.shape == (2, 3)
    return model
