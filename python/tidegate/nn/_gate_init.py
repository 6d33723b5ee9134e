"""The options `gate_init` and `gumbel_gate` of the gated modules."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from . import init
from ._common import is_finite, widen

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_SPEC = re.compile(
    rf"(standard|ugi)|(chrono):(\d{{1,9}})|(gumbel-softmax)(?::(-?{_NUMBER}):({_NUMBER}))?"
)


class GateInit(NamedTuple):
    """What `gate_init` asks for."""

    kind: str
    t_max: int
    alpha: float
    tau: float

    def draw(self, t: Tensor, dim: int) -> None:
        """Writes the bias t ``[S]`` of a gate that reads `dim` channels."""
        if self.kind == "standard":
            init.standard_(t, dim)
        elif self.kind == "chrono":
            init.chrono_(t, self.t_max)
        else:
            init.gumbel_softmax_(t, alpha=self.alpha, tau=self.tau)


def parse_gate_init(owner: str, text: object, channels: int, also: str = "") -> GateInit:
    """What `text` means for a gate of `channels` channels; ValueError naming what is expected,
    `also` before the rest."""
    match = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if match:
        t_max = int(match[3]) if match[2] else 2
        alpha, tau = (float(match[5]), float(match[6])) if match[5] else (0.0, 0.5)
        kind = match[1] or match[2] or match[4]
        if kind == "ugi":
            tau = 1.0
        if t_max >= 2 and tau > 0:
            if kind in ("ugi", "gumbel-softmax") and channels < 2:
                raise ValueError(
                    f"{owner}: gate_init: expected 2 or more channels with {text!r}, which spreads "
                    f"them over (1/d, 1 - 1/d); got {channels}"
                )
            return GateInit(kind, t_max, alpha, tau)
    raise ValueError(
        f"{owner}: gate_init: expected {also}'standard', 'ugi', 'chrono:T_max' with T_max of 2 or "
        f"more, or 'gumbel-softmax:alpha:tau' with tau above 0; got {text!r}"
    )


def check_gumbel_gate(owner: str, tau: object) -> None:
    """Raises ValueError unless tau is None or a finite number above zero."""
    if tau is not None and not (is_finite(tau) and tau > 0):
        raise ValueError(f"{owner}: gumbel_gate: expected a number above 0; got {tau!r}")


def check_gate_options(
    owner: str,
    has_data: bool,
    needed: str,
    gate_init: object,
    gumbel_gate: object,
    channels: int,
) -> None:
    """Checks both options of a gate, which depends on the data if `has_data`; else None alone fits.
    needed: what makes it so, ``gate='data'``."""
    for option, given in (("gate_init", gate_init), ("gumbel_gate", gumbel_gate)):
        if given is not None and not has_data:
            raise ValueError(
                f"{owner}: {option}: expected None unless {needed}, whose logits it changes; "
                f"got {given!r}"
            )
    if gate_init is not None:
        parse_gate_init(owner, gate_init, channels)
    check_gumbel_gate(owner, gumbel_gate)


def gumbel_gate(f: Tensor, tau: float) -> Tensor:
    """Gate logits f with fresh logistic noise a step and element: ``(f + logit u) / tau``, u
    uniform on (0, 1), from the default generator of f's device (Li et al. 2018, arXiv
    1806.02988)."""
    # Uniform numbers are multiples of 2^-24 below one: zero stands for what is half as small.
    u = torch.rand(f.shape, device=f.device, dtype=torch.float32).clamp(min=2.0**-25)
    return ((widen(f) + (u.log() - (-u).log1p())) / tau).to(f.dtype)
