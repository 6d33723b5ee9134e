"""A short run of the fuzz driver with fixed seeds (tests/fuzz.py runs longer ones)."""

from __future__ import annotations

import pytest
import torch
from fuzz import check_seed, judge_again, random_case
from fuzz_attention import beyond, judge_draws, random_call
from support import attention_batches, error_rule
from support import forgetting_attention_cases as attention_cases
from support import forgetting_attention_oracle as attention_oracle
from support.forgetting_attention_cases import AttentionCase


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


def test_products_on_the_cpu_may_add_one_term_after_another() -> None:
    """233 channels: by torch's matmul alone, which adds up parts, dlog_f was beyond the rule."""
    case = random_call(242)
    by_parts, by_terms = (
        judge_draws(case, False, range(12), "cpu", one_by_one) for one_by_one in (False, True)
    )
    assert beyond(by_parts[0], by_parts)
    assert not beyond(by_terms[0], by_terms)


def cancelling(device: str) -> attention_batches.Batch:
    """Calls of one query that sees one key, whose score's terms add up to zero."""
    batch = attention_batches.Batch(device)
    for seed in range(40):
        case = AttentionCase(1, 1, 0, 1, 1, 240, torch.bfloat16, scale=0.3, seed=seed)
        inputs = attention_cases.make_inputs(case, device)
        for name, sign in (("q", 1), ("k", -1)):
            first, second = inputs[name].chunk(2, -1)
            second.copy_(first.flip(-1) * sign)
        batch.calls.append(case)
        batch.inputs.append(inputs)
        batch.found.append(attention_cases.run_inputs(case, inputs, backward=True))
    return batch


def test_an_lse_may_err_by_roundings_of_its_score_s_terms(device: str) -> None:
    """And by no more: four units of what they add up to, where a number alone decides, beside the
    yardstick's error; and by the same rule as the oracle has for single calls."""
    batch = cancelling(device)
    verdicts = [found["lse"] for found in batch.judge()]
    assert all(verdicts)
    allowed = [verdict.measures[1].allowed for verdict in verdicts]
    for inputs, verdict in zip(batch.inputs, verdicts, strict=True):
        terms = 0.3 * float((inputs["q"].double() * inputs["k"].double()).abs().sum())
        measure = verdict.measures[1]
        assert measure.size == pytest.approx(terms)
        assert measure.floor == pytest.approx(4 * 2**-23 * terms)
        assert measure.yardstick < 240 * 2**-24 * terms
    if device == "cpu":
        exact = attention_oracle.reference(**batch.inputs[0], scale=0.3, exact=True)
        assert float(exact["|lse|"]) == pytest.approx(verdicts[0].measures[1].size)
    # Three times as far off is beyond; so is one product of 240 left out, or a score whose
    # parts have been rounded to bf16.
    for found, bound in zip(batch.found, allowed, strict=True):
        found["lse"] += 3 * bound
    assert not any(found["lse"] for found in batch.judge())
    for inputs, found in zip(batch.inputs, batch.found, strict=True):
        products = inputs["q"].float() * inputs["k"].float()
        found["lse"] = 0.3 * products[..., 1:].sum(-1).transpose(1, 2)
    assert sum(not found["lse"] for found in batch.judge()) >= 38
    for inputs, found in zip(batch.inputs, batch.found, strict=True):
        products = inputs["q"].float() * inputs["k"].float()
        parts = [part.sum(-1).bfloat16().float() for part in products.split([100, 80, 60], -1)]
        found["lse"] = 0.3 * sum(parts).transpose(1, 2)
    assert sum(not found["lse"] for found in batch.judge()) >= 15  # of the rest roundings cancel


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
