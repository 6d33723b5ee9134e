"""What mixers remember between calls: the state of one tensor, and what may come in as a state."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from ._common import check_mixer_input, dtype_name, kind_of, wide_dtype


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """N: how many sequences x ``[B, T, dim]`` holds."""
    return x.size(0) if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)


def check_sizes(owner: str, batch: object, capacity: object) -> None:
    """Raises ValueError unless both sizes that init_state() takes are integers of at least zero, or
    the capacity None. A compiler's symbols are integers, which it checks itself."""
    sizes = {"batch": batch} if capacity is None else {"batch": batch, "capacity": capacity}
    for name, size in sizes.items():
        if isinstance(size, torch.SymInt):
            continue
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
            raise ValueError(
                f"{owner}.init_state: {name}: expected an integer of 0 or more; got {size!r}"
            )


def empty_state(
    weight: Tensor,
    *shape: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Zeros for a running state: on the weight's device unless another is named, in fp32, or fp64
    for a dtype (the weight's unless another is named) of float64."""
    return torch.zeros(
        shape,
        device=weight.device if device is None else device,
        dtype=wide_dtype(weight.dtype if dtype is None else dtype),
    )


def check_state_tensor(name: str, state: object, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError, beginning with `name` (module and state), unless `state` is a tensor of
    this shape and dtype."""
    if not isinstance(state, Tensor):
        raise ValueError(f"{name}: expected {list(shape)}; got {kind_of(state)}")
    if tuple(state.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {list(shape)}; got {tuple(state.shape)}")
    if state.dtype != dtype:
        wanted, given = map(dtype_name, (dtype, state.dtype))
        raise ValueError(f"{name}: expected {wanted}; got {given}")


def check_own_memory(name: str, state: Tensor) -> None:
    """Raises ValueError for an expanded tensor, which cannot be written in place."""
    if any(
        stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape, strict=True)
    ):
        raise ValueError(f"{name}: expected memory of its own; got an expanded tensor: clone() it")


def refuse_gradients(owner: str, module: nn.Module, *tensors: Tensor) -> None:
    """Raises RuntimeError, beginning with `owner`, where gradients are recorded and one of
    `tensors` or of the module's parameters requires one: a step would lose it."""
    if torch.is_grad_enabled() and any(
        t.requires_grad for group in (tensors, module.parameters()) for t in group
    ):
        raise RuntimeError(
            f"{owner}: a step has no gradient, but one is recorded: call it under "
            "torch.no_grad(), or forward() over whole sequences"
        )


class TensorStateMixer(nn.Module):
    """A token mixer whose state is one tensor, its shape documented with the class.

    Checks what comes in. A class of its own says what errors call it, `_owner`, which gamma it
    takes, and what it computes: `_forward_checked` and `_step_checked`.
    """

    bidirectional = False
    _owner: str

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        gamma: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x ``[B, T, dim]`` -> y ``[B, T, dim]`` and the state after the last token.

        state: where to go on from; None = an empty one. gamma: this layer's lower bound
        ``[gamma_size]`` in [0, 1), where the mixer takes one (`takes_gamma`); None = 0. cu_seqlens:
        bounds ``[N+1]`` of the sequences packed into a B = 1 batch. Where the mixer is
        bidirectional no state goes in, and None comes out.
        """
        check_mixer_input(self._owner, x, self.dim, weight=self._own_weight())
        self._check_gamma(gamma)
        if state is not None:
            self._refuse_bidirectional("a state")
            self._check_state(state, x, cu_seqlens)
        return self._forward_checked(x, state, gamma, cu_seqlens)

    def step(self, x: Tensor, state: Tensor, gamma: Tensor | None = None) -> Tensor:
        """One token: x ``[B, dim]`` -> y ``[B, dim]``; `state` is updated in place. Has no
        gradient: call it under torch.no_grad() or torch.inference_mode()."""
        self._refuse_bidirectional("step()")
        check_mixer_input(f"{self._owner}.step", x, self.dim, False, self._own_weight())
        self._check_gamma(gamma)
        self._check_state(state, x)
        check_own_memory(f"{self._owner}.step: state", state)
        refuse_gradients(f"{self._owner}.step", self, x, state)
        return self._step_checked(x, state, gamma)

    def _forward_checked(
        self, x: Tensor, state: Tensor | None, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What forward() returns, of arguments that were checked."""
        raise NotImplementedError

    def _step_checked(self, x: Tensor, state: Tensor, gamma: Tensor | None) -> Tensor:
        """What step() returns, of arguments that were checked."""
        raise NotImplementedError

    def _check_gamma(self, gamma: Tensor | None) -> None:
        """Raises ValueError for a lower bound that the mixer does not take, or lacks."""
        raise NotImplementedError

    def _check_mixing(self, x: Tensor, gamma: Tensor | None) -> None:
        """The checks of token_mixing(), for those that have it."""
        self._refuse_bidirectional("token_mixing()")
        check_mixer_input(f"{self._owner}.token_mixing", x, self.dim)
        self._check_gamma(gamma)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state."""
        raise NotImplementedError

    def _own_weight(self) -> Tensor:
        """A parameter whose device and dtype are the module's."""
        return self.out_proj.weight

    def init_state(
        self,
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        capacity: int | None = None,
    ) -> Tensor:
        """The empty state of `batch` sequences: zeros ``[batch, *state_shape]``.

        device and dtype default to the module's; the state is fp32, or fp64 for dtype float64.
        capacity (tokens to come) is ignored: the state has one size. Raises ValueError where the
        mixer is bidirectional.
        """
        self._refuse_bidirectional("init_state()")
        check_sizes(self._owner, batch, capacity)
        shape = (batch, *self.state_shape)
        return empty_state(self._own_weight(), *shape, device=device, dtype=dtype)

    def _check_state(self, state: object, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Raises ValueError unless `state` is one of x's sequences, as init_state() makes it."""
        shape = (sequence_count(x, cu_seqlens), *self.state_shape)
        dtype = wide_dtype(self._own_weight().dtype)
        check_state_tensor(f"{self._owner}: state", state, shape, dtype)

    def _refuse_bidirectional(self, what: str) -> None:
        if self.bidirectional:
            raise ValueError(
                f"{self._owner}: {what}: a bidirectional {self._owner} reads the whole sequence "
                "and has no state; expected bidirectional=False"
            )
