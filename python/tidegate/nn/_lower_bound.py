"""What the mixers share that take HGRN's lower bound by an option."""

from __future__ import annotations

from torch import Tensor

from ._common import check_gamma, refuse_gamma


class OptionalLowerBound:
    """A token mixer whose option `lower_bound` says whether its forget gate takes a gamma.

    Goes before the other base classes. A class of its own keeps the option as `lower_bound`, and
    says by `_gamma_axis` which attribute has gamma's width: errors call it by that name.
    """

    needs_gamma = False
    lower_bound: bool
    _owner: str
    _gamma_axis: str

    @property
    def takes_gamma(self) -> bool:
        """Whether the forget gate has a lower bound."""
        return self.lower_bound

    @property
    def gamma_size(self) -> int:
        """Width of the lower bound."""
        return getattr(self, self._gamma_axis)

    def _check_gamma(self, gamma: Tensor | None) -> None:
        if not self.lower_bound:
            refuse_gamma(self._owner, gamma, " with lower_bound=False")
        check_gamma(self._owner, gamma, self._gamma_axis, self.gamma_size, self.in_proj.weight)
