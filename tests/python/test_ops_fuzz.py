"""A short run of the fuzz driver with fixed seeds (tests/fuzz.py runs longer ones)."""

from __future__ import annotations

import pytest
import torch
from fuzz import check_seed, judge_again, random_case
from fuzz_attention import random_call
from support import attention_batches, error_rule
from support import forgetting_attention_cases as attention_cases


@pytest.mark.parametrize("block", range(6))
def test_fixed_seeds(block: int, device: str) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        check_seed(seed, device)


def test_a_seed_always_draws_the_same_case() -> None:
    assert random_case(77) == random_case(77)
    assert len({random_case(seed) for seed in range(50)}) == 50


def test_calls_of_attention_judged_together_are_judged_as_each_alone(device: str) -> None:
    """Errors are the same numbers, and a wrong result is found in the call that has it."""
    calls = [case for seed in range(1, 25) if (case := random_call(seed)).queries < 40]
    batch = attention_batches.Batch(device)
    for case in calls:
        batch.add(case)
    for case, found in zip(calls, batch.judge(), strict=True):
        alone = attention_cases.verdicts(case, device, backward=True) if device == "cpu" else {}
        for name, verdict in alone.items():
            for measure, same in zip(found[name].measures, verdict.measures, strict=False):
                assert measure.error == pytest.approx(same.error, rel=1e-6, abs=1e-12)
                assert measure.floor == pytest.approx(same.floor)
    wrong = len(calls) // 2
    assert calls[wrong].queries > 0
    batch.found[wrong]["dlog_f"][:, -1] += 0.1
    failed = [i for i, found in enumerate(batch.judge()) if not found["dlog_f"].excess < 5]
    assert failed == [wrong]


def test_a_lucky_yardstick_is_not_held_against_a_result() -> None:
    """Two queries, one gate that counts: this draw's yardstick happens to have hardly an error."""

    def verdict(error: float, yardstick: float) -> error_rule.Verdict:
        measure = error_rule.Measure(error, yardstick, 1e-7, 1.0)
        return error_rule.Verdict(measure.excess, "", (measure, measure))

    first = verdict(1.3e-3, 5e-5)
    assert not first
    assert error_rule.hold_over(first, [verdict(5e-4, 4e-4)] * 12)
    assert not error_rule.hold_over(first, [verdict(1e-3, 4e-4)] * 12)  # wrong every time
    assert not error_rule.hold_over(verdict(1.0, 5e-5), [verdict(5e-4, 4e-4)] * 12)  # far off once
    once = verdict(1.0, 5e-5)
    with pytest.raises(AssertionError, match="over 12 other draws"):  # though it is right again
        judge_again(random_case(0), {"h": once}, lambda _: {"h": verdict(4e-4, 4e-4)}, "")
    # One draw of which the yardstick knew nothing does not carry eleven that are beyond.
    assert not error_rule.hold_over(first, [verdict(1e-3, 4e-4)] * 11 + [verdict(1e-4, 1e-2)])
    assert not error_rule.hold_over(first, [verdict(1e-3, 4e-4)] * 11 + [verdict(1.0, torch.inf)])
    # Errors that differ by chance alone hold, but surely so only where they are many.
    even = [verdict(2e-3, 4e-4), verdict(4e-4, 2e-3)] * 2
    assert error_rule.hold_over(first, even)
    assert not error_rule.hold_over(first, even, surely=True)
    assert error_rule.hold_over(first, even * 40, surely=True)
    wide = error_rule.judge(torch.ones(3).double(), torch.ones(3), torch.ones(3))
    assert not error_rule.hold_over(wide, [wide] * 12)  # of another dtype every time
    everything = error_rule.judge(torch.full((3,), torch.nan), torch.ones(3), torch.ones(3))
    assert everything.excess == torch.inf
