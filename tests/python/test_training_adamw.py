"""AdamW's step against its equations in float64, and what is not imported for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tidegate.training.adamw import Adam, AdamW
from tidegate.training.masters import MasterWeights

raw = torch.ops.tidegate
RATE, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-8, 0.1
# One weight, less than four, a chunk's end, many chunks; the last does not begin at 16 bytes.
SIZES = (1, 3, 64, 2047, 2048, 2049, 100_000, 5000)


def drawn(device: str) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(size + 1, generator=rng).to(device) for size in SIZES]
    return [
        nn.Parameter(t[1:] if size == SIZES[-1] else t[:-1])
        for t, size in zip(made, SIZES, strict=True)
    ]


def gradients(step: int, parameters: list[nn.Parameter]) -> None:
    rng = torch.Generator().manual_seed(step + 1)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=rng).to(p)
    if step == 1:
        parameters[2].grad = None


def exact(steps: int) -> list[Tensor]:
    """The weights after so many steps, in float64, parameter by parameter."""
    parameters = [p.detach().double() for p in drawn("cpu")]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    counts = [0] * len(parameters)
    for step in range(steps):
        given = drawn("cpu")
        gradients(step, given)
        for i, (p, (m, v)) in enumerate(zip(parameters, moments, strict=True)):
            if given[i].grad is None:
                continue
            counts[i] += 1
            g = given[i].grad.double()
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            p.mul_(1 - RATE * DECAY)
            top, below = m / (1 - BETAS[0] ** counts[i]), v / (1 - BETAS[1] ** counts[i])
            p.sub_(RATE * top / (below.sqrt() + EPS))
    return parameters


def run(cls: type, device: str, steps: int, **options: object) -> list[nn.Parameter]:
    parameters = drawn(device)
    given = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "fused": True}
    optimizer = cls(parameters, **(given | options))
    for step in range(steps):
        gradients(step, parameters)
        optimizer.step()
    return parameters


def error(found: list[nn.Parameter], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((p.detach().cpu().double() - w).abs().max()) for p, w in pairs)


def test_steps_are_the_equations(device: str) -> None:
    wanted = exact(5)
    ours, theirs = (error(run(cls, device, 5), wanted) for cls in (AdamW, torch.optim.AdamW))
    assert ours <= 2 * theirs + 1e-6


def test_a_rate_on_the_device_and_another_form_of_adam(device: str) -> None:
    rate = torch.tensor(RATE, device=device)
    capturable = device == "cuda"
    one = run(AdamW, device, 3, lr=rate, capturable=capturable)
    for left, right in zip(one, run(AdamW, device, 3), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    for cls, theirs in ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)):
        for options in ({"amsgrad": True}, {"maximize": True}):
            pairs = run(cls, device, 3, **options), run(theirs, device, 3, **options)
            assert all(map(torch.equal, *pairs))


def test_states_go_on_from_files_of_torch(device: str) -> None:
    theirs = torch.optim.AdamW(drawn(device), lr=RATE, fused=True)
    ours = AdamW(drawn(device), lr=RATE, fused=True)
    for optimizer in (theirs, ours):
        gradients(0, optimizer.param_groups[0]["params"])
        optimizer.step()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert ours.step(lambda: torch.tensor(2.0)) == 2


def operands(device: str) -> dict[str, list[Tensor]]:
    names = ("parameters", "gradients", "means", "squares")
    made = {name: [torch.ones(3, device=device), torch.ones(2, 2, device=device)] for name in names}
    rounded = [t.bfloat16() for t in made["parameters"]]
    return made | {"steps": [torch.ones((), device=device)] * 2, "rounded": rounded}


NUMBERS = (None, RATE, *BETAS, DECAY, EPS)


def test_what_is_overwritten_is_noticed(device: str) -> None:
    given = operands(device)
    with torch.no_grad():
        raw.adamw_(*given.values(), *NUMBERS)
    versions = {name: [t._version for t in list_] for name, list_ in given.items()}
    assert {name for name, numbers in versions.items() if all(numbers)} == {
        "parameters",
        "means",
        "squares",
        "rounded",
    }
    for left, right in zip(given["parameters"], given["rounded"], strict=True):
        assert torch.equal(left.bfloat16(), right)
    with pytest.raises(RuntimeError, match=r"^adamw_: a step is not differentiated: call it under"):
        raw.adamw_(*given.values(), *NUMBERS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "means",
            torch.ones(4),
            "adamw_: means[0] must be like parameters[0], float32 [3] on cpu, got",
        ),
        (
            "parameters",
            torch.ones(3).bfloat16(),
            "adamw_: parameters must be float32 on one device",
        ),
        ("steps", torch.ones(2), "adamw_: steps[0] must be one float32 number on cpu"),
    ],
)
def test_errors(name: str, value: Tensor, message: str) -> None:
    given = operands("cpu")
    given[name][0] = value
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        raw.adamw_(*given.values(), *NUMBERS)
    given = operands("cpu")
    given["squares"].pop()
    with torch.no_grad(), pytest.raises(RuntimeError, match="squares must have as many tensors as"):
        raw.adamw_(*given.values(), *NUMBERS)


def test_masters_step_by_the_gradients_of_their_weights(device: str) -> None:
    """In one pass, to the same bits as by wide copies of the gradients."""
    stepped = []
    for takes in (False, True):
        model = nn.ParameterList(drawn(device))
        optimizer = MasterWeights(model, AdamW(list(model), lr=RATE, fused=True))
        for step in range(3):
            gradients(step, optimizer.weights)
            if takes:
                optimizer.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
        for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
            assert torch.equal(weight, master.bfloat16())
        stepped.append(optimizer.masters)
    assert all(map(torch.equal, *stepped))


def test_a_first_loss_waits_for_no_compiler() -> None:
    """torch._dynamo and sympy take seconds to import, and a run needs neither."""
    program = (
        "import sys, torch\n"
        "from tidegate.models import CausalLM, LMConfig\n"
        "from tidegate.training import build_optimizer\n"
        "model = CausalLM(LMConfig(mixer='hgrn2', vocab_size=19, dim=32, layers=1))\n"
        "optimizer = build_optimizer(model, 'adamw', lr=1e-3)\n"
        "model.recompute = 'blocks'\n"
        "model(torch.arange(9)[None], 'next').loss\n"
        "model.recompute = 'none'\n"
        "loss = model(torch.arange(9)[None], 'next').loss\n"
        "loss.backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "print(*{'torch._dynamo', 'sympy', 'triton'} & set(sys.modules))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ""
