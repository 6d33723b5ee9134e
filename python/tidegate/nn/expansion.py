"""Parameter-efficient state expansions of HGRN1 (HGRN2's paper, section 3.1 and Table 2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._sharding import fill
from ._common import check_positive, normal_, uniform_

EXPANSIONS = ("naive", "lr", "glt", "glti", "krp", "kp")


class StateExpansion(nn.Module):
    """Takes x from d to n * d channels, once for each of P quantities (Qin et al., "HGRN2: Gated
    Linear RNNs with State Expansion", arXiv 2404.07904, Table 2).

    For a quantity, with i one of n groups and j one of d channels (parameters, for all P, with
    the sizes that Table 2 prints)::

        naive  y[i,j] = sum_k W[i,j,k] x[k]                    weight [P, n, d, d]
        lr     y[i,j] = sum_r B[i,j,r] sum_k A[r,k] x[k]       down [P, r, d], up [P, n, d, r]
        glt    y[i,j] = sum_e W[i,j,e] x[i,e], x as [n, d/n]   weight [P, n, d, d/n]
        glti   y[m,j] = sum_i M[i,m] glt[i,j]                  weight, mix [P, n, n]
        krp    y[i,j] = U[i,j] (W x)[j]                        weight [P, d, d], scale [P, n, d]
        kp     y[i,j] = u[i] (W x)[j]                          weight [P, d, d], scale [P, n]

    and a ``bias`` ``[P, n, d]`` where asked for. Table 2 has no W in krp; the parameter counts of
    Table 3 have it.

    Shapes: x ``[..., d]`` -> ``[P, ..., n*d]``. The constructor leaves the parameters
    uninitialised, as `make_linear` does. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        kind: str,
        dim: int,
        expand: int,
        *,
        parts: int,
        rank: int | None = None,
        bias: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if kind in ("glt", "glti") and dim % expand:
            raise ValueError(
                f"HGRU: expand: expected a divisor of dim={dim} with expansion={kind!r}; "
                f"got {expand}"
            )
        rank = max(1, dim // (expand + 1)) if rank is None else rank
        check_positive("HGRU", "rank", rank)
        self.kind, self.dim, self.expand, self.parts = kind, dim, expand, parts
        shapes: dict[str, tuple[int, ...]] = {
            "naive": {"weight": (expand, dim, dim)},
            "lr": {"down": (rank, dim), "up": (expand, dim, rank)},
            "glt": {"weight": (expand, dim, dim // expand)},
            "glti": {"weight": (expand, dim, dim // expand), "mix": (expand, expand)},
            "krp": {"weight": (dim, dim), "scale": (expand, dim)},
            "kp": {"weight": (dim, dim), "scale": (expand,)},
        }[kind]
        if bias:
            shapes["bias"] = (expand, dim)
        else:
            self.register_parameter("bias", None)
        for name, shape in shapes.items():
            empty = torch.empty(parts, *shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))

    def reset_parameters(self, draw_bias: Callable[[Tensor], None] | None = None) -> None:
        """In the order of the parameters above: weight, down, up uniform on +-1/sqrt(fan in), mix
        and scale normal (n^-1/2 and 1: ones would keep the groups alike for ever), bias uniform on
        +-1/sqrt(d), or by `draw_bias`."""
        for name, p in self.named_parameters(recurse=False):
            if name == "bias" and draw_bias is not None:
                fill(p.detach(), draw_bias)
            elif name in ("mix", "scale"):
                normal_(p, self.expand**-0.5 if name == "mix" else 1.0)
            else:
                uniform_(p, 1.0 / math.sqrt(self.dim if name == "bias" else p.size(-1)))

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., d]`` -> ``[P, ..., n*d]``."""
        if self.kind == "naive":
            rows = F.linear(x, self.weight.flatten(0, 2))
            y = rows.unflatten(-1, (self.parts, self.expand, self.dim)).movedim(-3, 0)
        elif self.kind == "lr":
            low = F.linear(x, self.down.flatten(0, 1)).unflatten(-1, (self.parts, -1))
            y = torch.einsum("...pr,pidr->p...id", low, self.up)
        elif self.kind in ("glt", "glti"):
            groups = x.unflatten(-1, (self.expand, -1))
            y = torch.einsum("...ie,pide->p...id", groups, self.weight)
            if self.kind == "glti":
                y = torch.einsum("p...id,pim->p...md", y, self.mix)
        else:
            one = F.linear(x, self.weight.flatten(0, 1)).unflatten(-1, (self.parts, self.dim))
            letters = "...pd,pid->p...id" if self.kind == "krp" else "...pd,pi->p...id"
            y = torch.einsum(letters, one, self.scale)
        if self.bias is not None:
            y = y + self.bias.view(self.parts, *([1] * (x.dim() - 1)), self.expand, self.dim)
        return y.flatten(-2)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, dim={self.dim}, expand={self.expand}, parts={self.parts}"
