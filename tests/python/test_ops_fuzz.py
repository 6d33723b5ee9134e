"""A short run of the fuzz driver with fixed seeds (tests/fuzz.py runs longer ones)."""

from __future__ import annotations

import pytest
from fuzz import check_seed, random_case


@pytest.mark.parametrize("block", range(6))
def test_fixed_seeds(block: int, device: str) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        check_seed(seed, device)


def test_a_seed_always_draws_the_same_case() -> None:
    assert random_case(77) == random_case(77)
    assert len({random_case(seed) for seed in range(50)}) == 50
