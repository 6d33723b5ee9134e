"""The residual block all models are stacked from, and what the models share."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..nn import GLU, LowerBounds
from ..nn._common import (
    add_norm,
    check_choice,
    constant_,
    dtype_name,
    is_autocast,
    make_norm,
    normal_,
    reset_norm,
    with_memory,
)
from ..nn._recompute import recomputing
from ._files import read_tensors, read_text, write_atomically, write_tensors
from ._inputs import IGNORED
from ._json import parse_json
from .config import LMConfig
from .registry import make_mixer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_CHECKPOINT, _CHECKPOINTS = "checkpoint.pt", "checkpoints/step-*"  # of a run folder
# Outside torch.compile: torch's own wrapper, made for it, imports all of it at the first call.
_checkpoint = inspect.unwrap(checkpoint)
RECOMPUTE = ("none", "norms", "blocks")


class Output(NamedTuple):
    """What a model returns: logits (of a language model with labels only where they were asked
    for, else None); the mean loss, when labels were given; one state a layer (None for
    classifiers)."""

    logits: Tensor | None
    loss: Tensor | None
    state: tuple[Any, ...] | None


class Block(nn.Module):
    """Pre-norm residual block (HGRN, Figure 1): ``x += mixer(norm(x)); x += GLU(norm(x))``.

    config: of one layer (`LMConfig.of_layer`, where layers differ). Children: mixer_norm, mixer,
    glu_norm, glu; dropout after mixer and GLU.
    """

    def __init__(self, config: LMConfig, *, device=None, dtype=None) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.mixer_norm = make_norm(config.norm, config.dim, config.norm_eps, **where)
        self.mixer = make_mixer(config, **where)
        self.glu_norm = make_norm(config.norm, config.dim, config.norm_eps, **where)
        self.glu = GLU(
            config.dim,
            hidden=config.glu_hidden,
            activation=config.glu_activation,
            bias=config.glu_bias,
            **where,
        )
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """mixer_norm, mixer, glu_norm, glu, in this order."""
        reset_norm(self.mixer_norm)
        self.mixer.reset_parameters()
        reset_norm(self.glu_norm)
        self.glu.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor | None, Tensor],
        state: Any = None,
        *,
        gamma: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Any]:
        """x ``[B, T, dim]`` -> the same, and the mixer's state.

        x may be a pair ``(added, residual)``, tensors whose sum it is (added: None for zero). So is
        what comes back then: the sum is made with the norm that follows it, in one pass.
        """
        is_pair = not isinstance(x, Tensor)
        h, x = add_norm(self.mixer_norm, *(x if is_pair else (None, x)))
        y, state = self.mixer(h, state=state, gamma=gamma, cu_seqlens=cu_seqlens)
        h, x = add_norm(self.glu_norm, self.dropout(y), x)
        added = self.dropout(self.glu(h))
        return (added, x) if is_pair else x + added, state

    def step(self, x: Tensor, state: Any, gamma: Tensor | None = None) -> Tensor:
        """One token: x ``[B, dim]`` -> the same; the mixer's state is updated in place."""
        h, x = add_norm(self.glu_norm, self.mixer.step(self.mixer_norm(x), state, gamma), x)
        return x + self.glu(h)


class Model(nn.Module):
    """What CausalLM and the classifiers share: blocks, lower bounds, final norm, files.

    Children: lower_bounds (None where no mixer has a bound or the mode is "none"), blocks,
    norm. Children are made on the meta device, and given memory and numbers by _materialise(), so
    that each number is drawn once, in reset_parameters()'s order.

    Two attributes say how a model trains, and are no part of what is saved; they may be set at any
    time. `recompute`: what is not kept for the backward pass but computed again in it: "none";
    "norms", the results of norms and the products of GLUs; "blocks", all that blocks compute but
    their inputs (docs/training_memory.md has the bytes). `residual_dtype`: that of the
    residual stream inside autocast; None, and outside of it, is that of the embedding.
    """

    residual_dtype: torch.dtype | None = None
    _recompute = "none"
    _is_language_model = False

    def __init__(self, config: LMConfig, *, dtype=None) -> None:
        super().__init__()
        self.config = config
        where = {"device": "meta", "dtype": dtype}
        layers = range(config.layers)
        self.blocks = nn.ModuleList(Block(config.of_layer(k), **where) for k in layers)
        self.lower_bounds = self._make_lower_bounds(**where)
        final_norm = config.norm if config.final_norm is None else config.final_norm
        self.norm = make_norm(final_norm, config.dim, config.norm_eps, **where)
        self.dropout = nn.Dropout(config.dropout)

    def _make_lower_bounds(self, **where: Any) -> LowerBounds | None:
        """One row a layer, of which layers whose mixers take no bound leave theirs unused."""
        config, mixers = self.config, [block.mixer for block in self.blocks]
        widths = sorted({mixer.gamma_size for mixer in mixers if mixer.takes_gamma})
        if config.lower_bound == "none" or not widths:
            if any(mixer.needs_gamma for mixer in mixers):
                raise ValueError(
                    "LMConfig: lower_bound: expected 'cumulative', 'independent' or 'decreasing' "
                    "with forget_gate='bound', whose forget gate is the bound; got 'none'"
                )
            return None
        if len(widths) > 1:
            raise ValueError(
                "LMConfig: lower_bound: expected 'none', or mixers whose bounds have one width; "
                f"got widths {', '.join(map(str, widths))}"
            )
        return LowerBounds(config.layers, widths[0], mode=config.lower_bound, **where)

    def _materialise(self, device: Any) -> None:
        """Moves the finished model to `device` and draws its parameters."""
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            with_memory(self, device)
        self.reset_parameters()

    def _reset_blocks(self) -> None:
        """lower_bounds, the blocks, the final norm, in this order."""
        if self.lower_bounds is not None:
            self.lower_bounds.reset_parameters()
        for block in self.blocks:
            block.reset_parameters()
        reset_norm(self.norm)

    def _reset_matrices(self) -> None:
        """With `init_std`, draws the matrices of projections, embedding, patches and head anew, in
        the order of the parameters, and their biases are zero; then, layer by layer, the biases
        whose start an option of the mixer says (gate_init, theta="data"). What a state expansion
        multiplies by, `scale` and `mix`, keeps its own start: around zero, nothing would pass."""
        std = self.config.init_std
        if std is None:
            return
        for name, p in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            if not (owner.endswith("_proj") or owner in ("embedding", "patch", "head")):
                continue
            if kind == "bias":
                constant_(p, 0.0)
            elif kind not in ("scale", "mix"):
                normal_(p, std)
        for block in self.blocks:
            if hasattr(block.mixer, "reset_chosen_biases"):
                block.mixer.reset_chosen_biases()

    @property
    def recompute(self) -> str:
        """What the backward pass computes again: "none", "norms" or "blocks"."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: str) -> None:
        check_choice(type(self).__name__, "recompute", value, RECOMPUTE)
        self._recompute = value

    def gammas(self) -> tuple[Tensor | None, ...]:
        """Every layer's lower bound ``[S]``, or None."""
        if self.lower_bounds is None:
            return (None,) * len(self.blocks)
        rows = zip(self.blocks, self.lower_bounds().unbind(0), strict=True)
        return tuple(row if block.mixer.takes_gamma else None for block, row in rows)

    def _as_residual(self, x: Tensor) -> Tensor:
        """An embedding, as the residual stream begins with it."""
        if self.residual_dtype is not None and is_autocast(x):
            return x.to(self.residual_dtype)
        return x

    def _run(
        self, x: Tensor, state: tuple[Any, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """All blocks and the final norm over x ``[B, T, dim]``."""
        if state is None:
            state = (None,) * len(self.blocks)
        elif len(state) != len(self.blocks):
            raise ValueError(
                f"{type(self).__name__}: state: expected one state for each of the "
                f"{len(self.blocks)} layers; got {len(state)}"
            )
        x = self.dropout(self._as_residual(x))
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        # Sums go to the norm of the next block, unless blocks are compiled one by one: of the first
        # there is nothing to add, for which it would have a graph of its own. Where a block's input
        # is all that is kept of it, a sum is less than what it is the sum of.
        is_compiled = any(block._compiled_call_impl is not None for block in self.blocks)
        is_sum = is_compiled or recompute == "blocks"
        x = x if is_sum else (None, x)
        states = []
        with self._recomputing_norms(recompute, is_compiled):
            for block, gamma, s in zip(self.blocks, self.gammas(), state, strict=True):
                # Caches of tokens are written in place, which must not happen twice.
                run = self._again if recompute == "blocks" and s is None else _once
                x, s = run(block, x, s, gamma=gamma, cu_seqlens=cu_seqlens)
                states.append(s)
            x = self.norm(x) if is_sum else add_norm(self.norm, *x)[0]
        return x, tuple(states)

    def _recomputing_norms(
        self, recompute: str, is_compiled: bool
    ) -> contextlib.AbstractContextManager:
        if recompute != "norms":
            return contextlib.nullcontext()
        if is_compiled or torch.compiler.is_compiling():
            raise ValueError(
                f"{type(self).__name__}: recompute: expected 'none' or 'blocks' under "
                "torch.compile, which decides itself what it keeps; got 'norms'"
            )
        return recomputing()

    def _again(self, block: nn.Module, x: Tensor, state: Any, **given: Any) -> tuple[Tensor, Any]:
        """The block, whose activations are computed again in the backward pass."""
        # Looking at the generators for nothing takes time, and CUDA graphs do not allow it.
        is_random = self.training and any(map(draws, block.modules()))
        run = checkpoint if torch.compiler.is_compiling() else _checkpoint
        return run(block, x, state, use_reentrant=False, preserve_rng_state=is_random, **given)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        metadata: dict[str, str] | None = None,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Writes config.json and model.safetensors into `directory` (made when missing); metadata:
        what the latter says of itself, beside its format and its checksum. state_dict: whole
        tensors to write in place of the model's own, for a model whose parameters are sharded.

        Each file is written beside its place and renamed into it, so an interrupted save leaves
        the earlier one. Raises ValueError for parameters that are sharded, and for a run folder,
        whose config.json would be lost, and with it the run.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        refuse_sharded(f"{type(self).__name__}.save", tensors.items(), "save(..., state_dict=them)")
        directory = Path(directory)
        refuse_run(f"{type(self).__name__}.save", directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
        write_tensors(directory / WEIGHTS_FILE, tensors, {"format": "pt", **(metadata or {})})
        write_atomically(directory / CONFIG_FILE, self.config.to_json().encode())

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, device: Any = None) -> Any:
        """The model saved in `directory`, in the dtypes it was saved in, on `device` (default:
        CPU), in evaluation mode as far as dropout: call train() to train on.

        Raises FileNotFoundError when a file is missing, ValueError (one line) when it is
        truncated, damaged as far as its checksum tells, or of another configuration.
        """
        directory = Path(directory)
        _refuse_other_folders(cls.__name__, directory)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{cls.__name__}.load: {directory / name}: no such file")
        config = LMConfig.from_json(read_text(directory / CONFIG_FILE))
        tensors = read_tensors(directory / WEIGHTS_FILE, device)
        if cls._is_language_model:
            refuse_classifier(directory, config, tensors)
        model = cls(config, device="meta")
        load_exactly(model, tensors, str(directory / WEIGHTS_FILE))
        return model.eval()


def holds_run(directory: Path) -> bool:
    """Whether it is a run's folder: it holds checkpoints, or the config.json of a run that has not
    come to its first one."""
    if _has_checkpoint(directory):
        return True
    try:
        values = parse_json(read_text(directory / CONFIG_FILE))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"train", "model"} <= values.keys()


def refuse_run(owner: str, directory: Path) -> None:
    """Raises ValueError for a run folder, which a model is about to be written into."""
    if holds_run(directory):
        raise ValueError(
            f"{owner}: {directory}: expected a folder for a model; got a run, whose {CONFIG_FILE} "
            f"would be lost: its model has its place in {directory / 'model'}, where "
            "tidegate.training.export_trained() writes it"
        )


def _has_checkpoint(directory: Path) -> bool:
    """Whether one process or several left a checkpoint there."""
    return (directory / _CHECKPOINT).is_file() or any(directory.glob(_CHECKPOINTS))


def _refuse_other_folders(owner: str, directory: Path) -> None:
    """Raises ValueError, naming the call that reads it, for a run folder and for a checkpoint of
    transformers or of another library."""
    if _has_checkpoint(directory):
        raise ValueError(
            f"{owner}.load: {directory}: expected a folder that save() wrote; got a run: its model "
            f"is in {directory / 'model'}, and tidegate.training.load_trained() reads its last "
            "checkpoint"
        )
    try:
        values = parse_json(read_text(directory / CONFIG_FILE))
    except (OSError, ValueError):
        return  # what is missing or broken is said by who reads it
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind == "tidegate":
        raise ValueError(
            f"{owner}.load: {directory}: expected a folder that save() wrote; got one of "
            "transformers: tidegate.hf.TidegateForCausalLM.from_pretrained() reads it"
        )
    if kind is not None or (isinstance(values, dict) and "architectures" in values):
        raise ValueError(
            f"{owner}.load: {directory}: expected a folder that save() wrote; got a checkpoint of "
            f"another library (model_type {kind!r}): `tidegate convert` or tidegate.models.loaders "
            "reads it, if it is one that tidegate knows"
        )


def refuse_classifier(directory: Path, config: LMConfig, tensors: Iterable[str]) -> None:
    """Raises ValueError where the configuration and the names of the tensors in a folder are a
    classifier's, whose head has a bias, before they are read as a language model's."""
    if config.num_classes is not None and "head.bias" in tensors:
        raise ValueError(f"{directory} holds a classifier; expected a language model")


def refuse_sharded(owner: str, tensors: Iterable[tuple[str, Tensor]], then: str) -> None:
    """Raises ValueError, naming the remedy and what is to be done then, for a tensor that is
    sharded (DTensor), as FSDP2 makes them."""
    for name, t in tensors:
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"{owner}: {name}: expected a whole tensor; got a sharded one (DTensor): gather "
                "them on every rank by get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint."
                f"state_dict, then, on rank 0, {then}"
            )


def draws(module: nn.Module) -> bool:
    """Whether it draws numbers in training."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or getattr(module, "gumbel_gate", None) is not None


def _once(block: nn.Module, *given: Any, **named: Any) -> tuple[Any, Any]:
    return block(*given, **named)


def load_exactly(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Makes `tensors` the model's parameters; ValueError, naming the first that does not fit,
    when names or shapes are those of another configuration."""
    own = model.state_dict()
    for name in own:
        if name not in tensors:
            raise ValueError(f"{source}: no tensor {name!r}, which the configuration asks for")
    for name, given in tensors.items():
        if name not in own:
            raise ValueError(f"{source}: tensor {name!r} has no place in the configuration")
        if given.shape != own[name].shape:
            raise ValueError(
                f"{source}: {name!r}: expected {tuple(own[name].shape)} by the configuration; "
                f"got {tuple(given.shape)}"
            )
        if not given.is_floating_point():
            kind = dtype_name(given.dtype)
            raise ValueError(f"{source}: {name!r}: expected a floating-point dtype; got {kind}")
    model.load_state_dict(tensors, strict=True, assign=True)


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Mean of -log p(label) over the labels that are not -100; zero when there is none. The other
    two mean what they mean to `tidegate.ops.linear_cross_entropy`, for logits that exist."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logits, labels = logits.flatten(0, -2), labels.flatten().long()
    how = {"ignore_index": IGNORED, "label_smoothing": label_smoothing, "reduction": "sum"}
    total = F.cross_entropy(logits, labels, **how)
    kept = labels != IGNORED
    if z_loss:
        total = total + z_loss * logits.logsumexp(-1).square().where(kept, 0.0).sum()
    return total / kept.sum().clamp(min=1)


def embedding_std(config: LMConfig) -> float:
    """Spread of the embedding at the start: dim^-1/2 where it is scaled up by dim^1/2 and also
    is the head; 0.02 where it is not."""
    return 1.0 / math.sqrt(config.dim) if config.tied else 0.02
