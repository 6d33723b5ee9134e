"""How tokens are drawn: the engine's kernel beside the definition, and the shares it draws."""

import numpy as np
import pytest
import torch
from support import sampling_oracle as oracle

from tidegate.models.sampling import Sampler, SamplingOptions

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.7, "top_p": 0.95},
}


def sampler(rows: int, vocab: int, device: torch.device, prompt=None, **settings) -> Sampler:
    ids = torch.zeros(rows, 1, dtype=torch.int64) if prompt is None else prompt
    return Sampler(SamplingOptions(**settings), ids.to(device), None, vocab)


def test_philox_is_the_published_one():
    """The known answers of Random123."""
    assert oracle.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert oracle.philox((ones << 32) | ones, (ones,) * 4) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


@pytest.mark.parametrize("vocab", [1, 3, 31, 257, 1001])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draws_are_those_of_the_definition(settings, vocab, device):
    """Row by row and token by token, with what the row has seen; float32 and float64."""
    rows, count = 4, 3
    torch.manual_seed(vocab)
    logits = 3 * torch.randn(count, rows, vocab, dtype=torch.float64)
    prompt = torch.randint(0, vocab, (rows, 2))
    for dtype in (torch.float32, torch.float64):
        draws = sampler(rows, vocab, device, prompt, seed=(7 << 40) + 5, **settings)
        seen = np.zeros((rows, vocab), dtype=bool)
        seen[np.arange(rows)[:, None], prompt.numpy()] = True
        for drawn in range(count):
            found = draws(logits[drawn].to(device, dtype)).tolist()
            wanted = [
                oracle.draw(
                    logits[drawn, b].to(dtype).numpy(),
                    seed=(7 << 40) + 5,
                    stream=b,
                    drawn=drawn,
                    seen=seen[b],
                    **settings,
                )
                for b in range(rows)
            ]
            assert found == wanted
            seen[np.arange(rows), found] = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits(dtype, device):
    logits = torch.randn(5, 100).to(device, dtype)
    one = sampler(5, 100, device, seed=3)(logits)
    assert torch.equal(one, sampler(5, 100, device, seed=3)(logits.float()))


def test_a_rows_draws_do_not_depend_on_the_others(device):
    logits = torch.randn(6, 50).to(device)
    whole = sampler(6, 50, device, seed=9, top_p=0.9)(logits)
    assert torch.equal(sampler(3, 50, device, seed=9, top_p=0.9)(logits[:3]), whole[:3])
    assert torch.equal(sampler(6, 50, device, seed=9, top_p=0.9)(logits[:, :50]), whole)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_filters_leave_the_right_tokens_in_their_shares(settings, left, device):
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 4000
    drawn = sampler(rows, 4, device, seed=0, **settings)(shares.log().expand(rows, 4).to(device))
    assert set(drawn.tolist()) == left
    found = torch.bincount(drawn.cpu(), minlength=4) / rows
    wanted = torch.zeros(4)
    for token in left:
        wanted[token] = shares[token]
    torch.testing.assert_close(found, wanted / wanted.sum(), rtol=0, atol=0.03)


def test_tokens_without_a_chance_are_never_drawn(device):
    """-inf and NaN; a row of nothing else takes the first token."""
    logits = torch.full((500, 7), float("-inf"))
    logits[:, 3], logits[:, 5], logits[:, 6] = 0.0, 0.0, float("nan")
    found = sampler(500, 7, device, seed=1, top_p=0.99)(logits.to(device))
    assert set(found.tolist()) == {3, 5}
    nothing = torch.full((2, 7), float("-inf")).to(device)
    assert sampler(2, 7, device, seed=1)(nothing).tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_cuda_draws_what_the_cpu_draws(settings, device):
    """All draws agree but one that the last digit of a logarithm decides."""
    if device == "cpu":
        pytest.skip("compares CUDA with the CPU")
    logits = 2 * torch.randn(256, 50257)
    here = sampler(256, 50257, torch.device("cpu"), seed=2, **settings)(logits)
    there = sampler(256, 50257, device, seed=2, **settings)(logits.to(device)).cpu()
    assert (here == there).float().mean() > 0.98
