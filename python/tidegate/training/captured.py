"""A training step replayed from a CUDA graph: one launch where there were hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_EAGER_CALLS = 3  # libraries and the optimiser allocate what they keep in the first ones


class CapturedStep:
    """Calls ``step(*inputs)``; from the fourth call on it is replayed from a CUDA graph.

    step: takes tensors and returns tensors. What else it reads or changes must be tensors that stay
    where they are (parameters, an optimiser made with capturable=True, learning rates as tensors),
    and it may not wait for the device. Every call counts: capturing runs nothing.

    Inputs must keep shape and dtype; they may be on the CPU. The results are the caller's own.

    stream: to capture on, one of its own by default. Steps that are replayed at the same time need
    different ones, as cuBLAS keeps a workspace a stream; torch's own streams are only 32.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._step = step
        self._device = device
        self._stream = torch.cuda.Stream(device) if stream is None else stream
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Makes one step, at first eagerly, then from the graph."""
        if self._graph is None:
            if self._calls < _EAGER_CALLS:
                self._calls += 1
                return self._eagerly(inputs)
            self._capture(inputs)
        for kept, given in zip(self._inputs, inputs, strict=True):
            if kept.shape != given.shape or kept.dtype != given.dtype:
                raise ValueError(
                    f"CapturedStep: inputs: expected {kept.dtype} {tuple(kept.shape)} as at first, "
                    f"got {given.dtype} {tuple(given.shape)}"
                )
            kept.copy_(given)
        self._graph.replay()
        return tuple(value.clone() for value in self._outputs)

    def _eagerly(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A call on the stream that is captured later, where gradients accumulate then too."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._step(*(given.to(self._device) for given in inputs))
        current.wait_stream(self._stream)
        for value in outputs:
            value.record_stream(current)
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(
            torch.empty_like(given, device=self._device).copy_(given) for given in inputs
        )
        graph = torch.cuda.CUDAGraph()
        # In the other mode, what no capture bears is refused to all threads: those that load data.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = self._step(*self._inputs)
        self._graph = graph
