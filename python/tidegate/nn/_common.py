"""What the modules share: seeded initialisation, norms, parameters that stay fp32."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from .. import ops
from ._recompute import is_recomputing, remember

# What options can be, and limits: the C++ library is built with the same file.
_CHOICES = json.loads(Path(__file__).with_name("choices.json").read_text(encoding="utf-8"))
NORMS = tuple(_CHOICES["norms"])
NORMS_OR_NONE = tuple(_CHOICES["norms_or_none"])
LOWER_BOUND_MODES = tuple(_CHOICES["lower_bound_modes"])
GLU_ACTIVATIONS = tuple(_CHOICES["glu_activations"])
HGRN2_ACTIVATIONS = tuple(_CHOICES["hgrn2_activations"])
OUTPUT_ACTIVATIONS = tuple(_CHOICES["output_activations"])
# Channels of a key or a value that gated_linear_attention and hgrn2 take.
MAX_HEAD_DIM: int = _CHOICES["max_head_dim"]
# Channels of a head that forgetting_attention takes.
MAX_ATTENTION_HEAD_DIM: int = _CHOICES["max_attention_head_dim"]
# What a configuration may ask for: far above what any machine holds, and low enough that products
# of sizes fit 64 bits, and that a loop over the layers ends.
MAX_LAYERS: int = _CHOICES["max_layers"]
MAX_WIDTH: int = _CHOICES["max_width"]
MAX_VOCAB_SIZE: int = _CHOICES["max_vocab_size"]
MAX_IMAGE_CHANNELS: int = _CHOICES["max_image_channels"]
MAX_PATCH_SIZE: int = _CHOICES["max_patch_size"]
# The largest integer that any option of a mixer may be.
MAX_OPTION: int = _CHOICES["max_option"]
# How deep lists and objects may lie in one another in JSON that is read.
MAX_JSON_DEPTH: int = _CHOICES["max_json_depth"]
# A step of attention prunes on a GPU where a cache has at least so many bytes of keys: below that,
# looking for what to read takes longer than reading all of it.
LEAST_PRUNED_BYTES: int = _CHOICES["least_pruned_bytes"]
_HALF = (torch.bfloat16, torch.float16)


def check_choice(owner: str, option: str, value: object, allowed: Sequence[object]) -> None:
    """Raises ValueError naming module, option, the allowed values and the one given."""
    if value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{owner}: {option}: expected one of {names}; got {value!r}")


def check_positive(owner: str, option: str, value: object) -> None:
    """Raises ValueError unless `value` is an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}: {option}: expected a positive integer; got {value!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """What errors call it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def is_number(value: object) -> bool:
    """Whether it is a number: True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a number, neither infinite nor NaN, that a float can hold."""
    return is_number(value) and abs(value) <= sys.float_info.max


def number_text(value: object) -> str:
    """What errors call a value that should have been another number: -1 for -1.0, as in C++."""
    return f"{value:g}" if is_finite(value) else repr(value)


def kind_of(value: object) -> str:
    """What errors call a value of another type than expected: None, "a tensor", "a float"."""
    if value is None:
        return "None"
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_switch(owner: str, option: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {option}: expected True or False; got {value!r}")


def check_switches(owner: str, can_be_none: bool = False, **values: object) -> None:
    """check_switch() of several options: a string is not taken for True, nor 1."""
    for option, value in values.items():
        if not (can_be_none and value is None):
            check_switch(owner, option, value)


def check_mixer_input(
    owner: str, x: Tensor, dim: int, time: bool = True, weight: Tensor | None = None
) -> None:
    """Raises ValueError unless x is ``[B, T, dim]``, or ``[B, dim]`` for one token, and, without
    autocast, which casts all but fp64, of the dtype of `weight`."""
    shape = f"[B, T, dim={dim}]" if time else f"[B, dim={dim}]"
    if not isinstance(x, Tensor):
        raise ValueError(f"{owner}: x: expected a tensor {shape}; got a {type(x).__name__}")
    if x.dim() != 2 + time or x.size(-1) != dim:
        raise ValueError(f"{owner}: x: expected {shape}; got {tuple(x.shape)}")
    if weight is None or x.dtype == weight.dtype:
        return
    if not _is_cast(x, weight):
        wanted, given = dtype_name(weight.dtype), dtype_name(x.dtype)
        raise ValueError(f"{owner}: x: expected {wanted}, as the module's weights; got {given}")


def _is_cast(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast gives x and `weight` one dtype: it casts all but fp64."""
    wide = torch.float64 in (x.dtype, weight.dtype) or not x.is_floating_point()
    return not wide and torch.is_autocast_enabled(x.device.type)


def refuse_gamma(owner: str, gamma: Tensor | None, why: str = "") -> None:
    """Raises ValueError where a lower bound is given to a mixer that takes none."""
    if gamma is not None:
        raise ValueError(f"{owner}: gamma: expected None{why}; got {kind_of(gamma)}")


def check_gamma(owner: str, gamma: Tensor | None, axis: str, size: int, weight: Tensor) -> None:
    """Raises ValueError unless gamma, where it is given, is ``[size]``, called `axis`, and float32
    or of the dtype of `weight`; under autocast, which casts all but fp64, of any 16-bit type."""
    if gamma is None:
        return
    if not isinstance(gamma, Tensor):
        given = kind_of(gamma)
        raise ValueError(f"{owner}: gamma: expected a tensor [{axis}={size}]; got {given}")
    if gamma.dim() != 1 or gamma.size(0) != size:
        raise ValueError(f"{owner}: gamma: expected [{axis}={size}]; got {tuple(gamma.shape)}")
    if gamma.dtype in (torch.float32, weight.dtype):
        return
    if not _is_cast(gamma, weight):
        own = "" if weight.dtype == torch.float32 else f" or {dtype_name(weight.dtype)}"
        raise ValueError(f"{owner}: gamma: expected float32{own}; got {dtype_name(gamma.dtype)}")


class Linear(nn.Linear):
    """torch.nn.Linear, its parameters and their names.

    What autocast does to fp32 weights on a GPU, the op `linear` does here: their gradient stays in
    the fp32 in which it is summed, where autocast would round it and then widen it again in a pass
    of its own. Under torch.compile it is torch's own, which fuses the two, and where all modules
    are listened to: torch's FlopCounterMode does so, and knows torch's products by their names.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in_features]`` -> ``[..., out_features]``."""
        if (
            x.is_cuda
            and is_autocast(x)
            and type(self.weight) is nn.Parameter
            and self.weight.dtype == torch.float32
            and is_recording()
            and not are_all_listened_to()
        ):
            return ops.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def is_recording() -> bool:
    """Whether gradients are recorded, and not by torch.compile, which decides itself what is kept
    for the backward pass."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def are_all_listened_to() -> bool:
    """Whether somebody listens to the calls of every module, by torch's global hooks."""
    return bool(_modules._has_any_global_hook())


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of this module does more than its class says: a hook of its own sees what goes
    in or comes out, or accelerate has put a `forward` of its own there."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_listened_to(module: nn.Module) -> bool:
    """Whether a call of this module does more than its class says, or a hook, one of its own or of
    all modules, sees the call or its gradients: no other code may then do the module's work."""
    hooks = module._backward_hooks or module._backward_pre_hooks
    return is_hooked(module) or bool(hooks) or are_all_listened_to()


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether it is of one of these very classes, with parameters that are its own whole tensors
    and nobody listening to its calls: then one op may do its work together with a neighbour's."""
    return (
        type(module) in classes
        and not is_listened_to(module)
        and all(p is None or type(p) is nn.Parameter for p in module._parameters.values())
    )


def can_project(linear: nn.Module, x: Tensor) -> bool:
    """Whether an op that makes rows like x and multiplies them by the weight of `linear` does what
    the two apart would, but for what is kept between them."""
    if not (is_plain(linear, Linear) and is_recording()):
        return False
    return linear.weight.dtype == x.dtype or (
        is_autocast(x) and linear.weight.dtype == torch.float32
    )


def make_linear(
    in_features: int, rows: int | Sequence[int], bias: bool, device=None, dtype=None
) -> Linear:
    """A `Linear` with uninitialised weights: its owner's reset_parameters() draws them,
    so that constructing a module draws each number exactly once, in the documented order.

    rows: out_features, or those of each of several matrices that lie one below the other in the
    weight. They stay with the projection as `stacked_rows`: an optimiser that looks at matrices as
    a whole, Muon, has to take them one by one.
    """
    stacked = [rows] if isinstance(rows, int) else list(rows)
    device = torch.get_default_device() if device is None else torch.device(device)
    linear = Linear(in_features, sum(stacked), bias=bias, device="meta", dtype=dtype)
    linear.stacked_rows = stacked
    return linear if device.type == "meta" else with_memory(linear, device)


def with_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """``module.to_empty(device=device)`` of a module on the meta device that nobody has used yet;
    what was one parameter or buffer of several modules stays one.

    New parameters take the places of the others. torch's own way swaps the two instead where its
    FakeTensorMode is on, and fails; and what it imports at the first call (sympy and its symbolic
    shapes) takes most of a second.
    """
    made: dict[Tensor, Tensor] = {}

    def with_own_memory(t: Tensor) -> Tensor:
        if t not in made:
            empty = torch.empty(t.shape, dtype=t.dtype, device=device)
            is_parameter = isinstance(t, nn.Parameter)
            made[t] = nn.Parameter(empty, t.requires_grad) if is_parameter else empty
        return made[t]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, t in tensors.items():
                if t is not None:
                    tensors[name] = with_own_memory(t)
    return module


def stacked_rows(linear: nn.Linear) -> list[int]:
    """The rows of each matrix that its weight stacks; one matrix where nothing was said."""
    return list(getattr(linear, "stacked_rows", [linear.out_features]))


def is_its_weight(linear: nn.Module) -> bool:
    """Whether a call of this linear layer does nothing but multiply by its weight, and nobody
    misses it. An adapter in its place (PEFT's LoRA) adds to that, hooks may change it or wait for
    its gradients, and accelerate brings the weight."""
    return type(linear) in (nn.Linear, Linear) and not is_listened_to(linear)


def weight_of(linear: nn.Module, device: torch.device) -> Tensor:
    """The matrix that a linear layer without a bias multiplies by, on `device`; where a call does
    more than that, what it makes of unit vectors."""
    weight = linear.weight
    if is_its_weight(linear):
        return weight
    return linear(torch.eye(weight.size(1), dtype=weight.dtype, device=device)).T


def is_autocast(x: Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


class Norm(nn.Module):
    """What torch's norms become here: one pass by the op `norm`, with the gate before or after it
    where one is given, or by `add_norm`, with the residual connection before it.

    Under autocast the result is in autocast's dtype, since products follow; what is normed, x or
    the residual stream, is not rounded before.
    """

    _kind: str

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        *,
        activation: str = "silu",
        gate_first: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x ``[..., dim]`` -> the same; with a residual: also the sum of the two."""
        weight, bias = self._parameters_for(x)
        if residual is not None:
            if not self._fits(x, residual):
                x = residual + x
                return self(x), x
            y, total = ops.add_norm(x, residual, weight, bias, kind=self._kind, eps=self.eps)
            if is_recomputing():
                self._remember(y, total, weight, bias)
            return y, total
        if weight is not None and weight.dtype != x.dtype and not is_autocast(x):
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        if gate is not None:
            gate = gate.to(x.dtype)
        how = {"gate_activation": activation, "gate_first": gate_first}
        y = ops.norm(x, weight, bias, gate, kind=self._kind, eps=self.eps, **how)
        # Where autocast casts x beside a gate, the op keeps the copy, not x.
        if is_recomputing() and (gate is None or x.dtype == y.dtype):
            self._remember(y, x, weight, bias, gate, **how)
        return y

    def _remember(self, y: Tensor, *inputs: Tensor | None, **how: Any) -> None:
        """Says how y follows from x, weight, bias and gate, in y's dtype, autocast or not."""
        kind, eps, dtype, device = self._kind, self.eps, y.dtype, y.device.type

        def make(*again: Tensor | None) -> Tensor:
            with torch.autocast(device, enabled=False):
                return ops.norm(*again, kind=kind, eps=eps, dtype=dtype, **how)

        remember(y, inputs, make)

    def _parameters_for(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as the op takes them beside x ``[..., dim]``."""
        return self.weight, getattr(self, "bias", None)

    def _fits(self, x: Tensor, residual: Tensor) -> bool:
        """Whether add_norm returns what torch's own sum and norm would."""
        if is_autocast(x):
            return True
        same = self.weight is None or self.weight.dtype == x.dtype
        return same and residual.dtype in (x.dtype, wide_dtype(x.dtype))


class LayerNorm(Norm, nn.LayerNorm):
    """torch.nn.LayerNorm, its parameters and their names; see `Norm`."""

    _kind = "layer"


class RMSNorm(Norm, nn.RMSNorm):
    """torch.nn.RMSNorm, its parameter and its name; see `Norm`."""

    _kind = "rms"


def add_norm(norm: nn.Module, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """norm(residual + x) and the sum; in one pass where `norm` can. None: nothing is added."""
    if x is None:
        return norm(residual), residual
    if isinstance(norm, Norm):
        return norm(x, residual=residual)
    residual = residual + x
    return norm(residual), residual


def gated_norm(
    norm: nn.Module, x: Tensor, gate: Tensor | None, activation: str, gate_first: bool = False
) -> Tensor:
    """norm(x) * act(gate), or norm(act(gate) * x), gate like x; in one pass where `norm` can.
    Without a gate: norm(x)."""
    if gate is None:
        return norm(x)
    if isinstance(norm, Norm):
        return norm(x, gate, activation=activation, gate_first=gate_first)
    gate = torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate)
    return norm(gate * x) if gate_first else norm(x) * gate


def norm_and_project(
    norm: nn.Module,
    linear: nn.Module,
    x: Tensor,
    gate: Tensor | None = None,
    activation: str = "silu",
    gate_first: bool = False,
) -> Tensor:
    """linear(gated_norm(norm, x, ...)); of which x and the gate are kept for the backward pass, and
    not what the norm makes of them, where both modules are as they are made here."""
    is_one_dtype = getattr(norm, "weight", None) is None or norm.weight.dtype == x.dtype
    if (
        is_plain(norm, LayerNorm, RMSNorm)
        and can_project(linear, x)
        and (is_one_dtype or is_autocast(x))
    ):
        weight, bias = norm._parameters_for(x)
        gate = None if gate is None else gate.to(x.dtype)
        how = {"gate_activation": activation, "gate_first": gate_first}
        kind, eps = norm._kind, norm.eps
        return ops.norm_linear(
            x, linear.weight, linear.bias, weight, bias, gate, kind=kind, eps=eps, **how
        )
    return linear(gated_norm(norm, x, gate, activation, gate_first))


def check_eps(owner: str, option: str, eps: object) -> None:
    """Raises ValueError for an epsilon that no norm can add."""
    if not (is_finite(eps) and eps >= 0):
        raise ValueError(f"{owner}: {option}: expected 0 or more; got {number_text(eps)}")


def make_norm(kind: str, dim: int, eps: float, device=None, dtype=None) -> nn.Module:
    """The norm called `kind`: "layer" (weight and bias), "rms" (weight), "rms_no_weight" or "none"
    (x itself). Its owner has checked eps, which its option names."""
    check_choice("norm", "kind", kind, NORMS_OR_NONE)
    if kind == "none":
        return nn.Identity()
    if kind == "layer":
        return LayerNorm(dim, eps=eps, device=device, dtype=dtype)
    affine = kind == "rms"
    return RMSNorm(dim, eps=eps, elementwise_affine=affine, device=device, dtype=dtype)


def uniform_(p: Tensor, bound: float) -> None:
    """p uniform on +-bound."""
    ops.init_uniform_(p, -bound, bound)


def normal_(p: Tensor, std: float) -> None:
    """p normal around zero."""
    ops.init_normal_(p, 0.0, std)


def constant_(p: Tensor, value: float) -> None:
    """p = value."""
    ops.init_constant_(p, value)


def rope_theta_(t: Tensor, channels: int) -> None:
    """Every row of `channels` values of a plain t: theta_j = 10000^(-2j/channels)."""
    for row in t.view(-1, channels):
        ops.init_rope_theta_(row)


def reset_linear(linear: nn.Linear) -> None:
    """Weight, then bias, uniform on +-1/sqrt(in_features) (torch.nn.Linear's own distribution)."""
    bound = 1.0 / math.sqrt(linear.in_features)
    uniform_(linear.weight, bound)
    if linear.bias is not None:
        uniform_(linear.bias, bound)


def reset_norm(norm: nn.Module) -> None:
    """Weight one, bias zero, where the norm has them."""
    if getattr(norm, "weight", None) is not None:
        constant_(norm.weight, 1.0)
    if getattr(norm, "bias", None) is not None:
        constant_(norm.bias, 0.0)


def wide_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of phases, bounds and states in a module of `dtype`: fp64 for fp64, else fp32."""
    dtype = dtype or torch.get_default_dtype()
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in fp32, or as it is when it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def bounded_gate(logits: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """lambda = gamma + (1 - gamma) * sigmoid(logits), and 1 - lambda, in the logits' type.

    sigmoid(-logits), not 1 - sigmoid(logits): the latter loses its digits when the gate is open. An
    open gate likewise: next to one, the sum above is off by roundings that every step repeats.
    """
    decay, rest = torch.sigmoid(logits), torch.sigmoid(-logits)
    if gamma is None:
        return decay, rest
    rest = (1 - gamma) * rest
    return torch.where(logits < 0, gamma + (1 - gamma) * decay, 1 - rest), rest


def bounded_decay(log_decay: Tensor, gamma: Tensor | None) -> Tensor:
    """gamma + (1 - gamma) * exp(log_decay), for log_decay <= 0: bounded_gate() of gates that are no
    sigmoid, with the same care."""
    if gamma is None:
        return log_decay.exp()
    kept, lost = _kept_and_lost(log_decay, gamma)
    return torch.where(lost <= 0.5, 1 - lost, kept)


def bounded_log_gate(log_gate: Tensor, gamma: Tensor | None) -> Tensor:
    """log(gamma + (1 - gamma) * exp(log_gate)), for log_gate <= 0.

    With its digits next to zero, where they are what is lost a step, and with finite gradients: the
    branch that is not taken is kept away from where its derivative has none.
    """
    if gamma is None:
        return log_gate
    kept, lost = _kept_and_lost(log_gate, gamma)
    tiny = torch.finfo(kept.dtype).tiny
    # Where the sum underflows, gamma is as good as zero, and what is left is the gate without it.
    shut = torch.where(kept < tiny, log_gate, kept.clamp_min(tiny).log())
    return torch.where(lost <= 0.5, torch.log1p(-lost.clamp_max(0.5)), shut)


def _kept_and_lost(log_decay: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """f = gamma + (1 - gamma) * exp(log_decay) and 1 - f, each exact where it is the smaller."""
    decay = log_decay.exp()
    # What expm1 has for a derivative, 1 + expm1, has no digits left where the gate is shut.
    rest = torch.where(log_decay < -1, 1 - decay, -torch.expm1(log_decay))
    return gamma + (1 - gamma) * decay, (1 - gamma) * rest


class KeepsFloat32(nn.Module):
    """A module whose tensors named in `_float32_names` never become bf16 or fp16.

    `module.bfloat16()`, `.half()` and `.to(dtype)` make them fp32 (devices and fp64 are followed):
    a phase or a lower bound next to one rounded to eight bits is another model.
    """

    _float32_names: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        kept = {}
        for name in self._float32_names:
            p = getattr(self, name, None)
            if p is not None:
                kept[name] = (p.data, None if p.grad is None else p.grad.data)
        super()._apply(fn, recurse)
        for name, (data, grad) in kept.items():
            p = getattr(self, name)
            if p.dtype in _HALF and data.dtype not in _HALF:
                p.data = data.to(p.device, torch.float32)
                if grad is not None:
                    p.grad = grad.to(p.device, torch.float32)
        return self
