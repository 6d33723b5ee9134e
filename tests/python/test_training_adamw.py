"""AdamW's step against its equations in float64, and what is not imported for it."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tidegate.training import adamw
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


@pytest.fixture
def by_op(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The op steps on the CPU, too; how many tensors each of its calls had."""
    monkeypatch.setattr(adamw, "_DEVICES", ("cpu", "cuda"))
    calls: list[int] = []
    step_some = AdamW._step_some

    def counted(self: AdamW, group: dict, parameters: list, *more: object) -> None:
        calls.append(len(parameters))
        step_some(self, group, parameters, *more)

    monkeypatch.setattr(AdamW, "_step_some", counted)
    return calls


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_a_differentiable_step_is_recorded(cls: type, device: str) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = cls([weight], lr=0.5, weight_decay=0.5, eps=1.0, differentiable=True)
    stepped = weight * 1  # no leaf: its step is part of a graph
    stepped.retain_grad()
    stepped.grad = torch.ones_like(weight)
    optimizer.param_groups[0]["params"] = [stepped]
    optimizer.step()
    (found,) = torch.autograd.grad(stepped.sum(), weight)
    # By the decay; or what it adds to the gradient g = 1.5 of a first step, g / (g + eps).
    kept = 0.75 if cls is AdamW else 1 - 0.5 * 0.5 / 2.5**2
    torch.testing.assert_close(found, torch.full_like(found, kept))


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (torch.tensor(0.9), torch.tensor(0.98)), "capturable": True},
        {"lr": torch.tensor(RATE, dtype=torch.float64)},
    ],
    ids=["betas", "lr"],
)
def test_numbers_in_tensors_that_the_op_does_not_read_are_torch_s(
    options: dict, by_op: list[int], device: str
) -> None:
    options = {
        k: tuple(t.to(device) for t in v) if isinstance(v, tuple) else v for k, v in options.items()
    }
    if device == "cpu" and "betas" in options:
        pytest.skip("capturable is for CUDA")
    parameters = [nn.Parameter(torch.ones(3, device=device))]
    parameters[0].grad = torch.ones(3, device=device)
    group = AdamW(parameters, **{"lr": RATE, "fused": True} | options).param_groups[0]
    assert not adamw._op_steps_group(group, {}, {})
    assert not by_op


def test_gradients_that_a_closure_makes_are_looked_at(
    by_op: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The op takes none that lie otherwise than their parameters."""
    by_torch: list[AdamW] = []
    monkeypatch.setattr(AdamW, "_step_by_torch", lambda self: by_torch.append(self))
    weight = nn.Parameter(torch.ones(3, 4, device=device))
    optimizer = AdamW([weight], lr=RATE, fused=True)
    weight.grad = torch.ones_like(weight)

    def closure() -> float:
        weight.grad = torch.ones(4, 3, device=device).t()
        return 2.0

    assert optimizer.step(closure) == 2
    assert by_torch == [optimizer]
    assert not by_op


def one_column(device: str, rows: int = 5) -> Tensor:
    """[rows, 1] with a stride of its own in the dimension of size one."""
    return torch.arange(1.0, rows + 1, device=device).as_strided((rows, 1), (1, rows))


def test_strides_of_dimensions_of_one_say_nothing(by_op: list[int], device: str) -> None:
    weight = nn.Parameter(torch.ones(5, 1, device=device))
    optimizer = AdamW([weight], lr=RATE, fused=True)
    weight.grad = one_column(device)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = one_column(device)
    optimizer.step()
    assert by_op.count(1) == 2
    given = [[torch.ones(5, 1, device=device)], *([one_column(device)] for _ in range(3))]
    rounded = [[one_column(device).bfloat16()]]
    with torch.no_grad():
        raw.adamw_(*given, [torch.ones((), device=device)], *rounded, *NUMBERS)
    assert torch.equal(rounded[0][0], given[0][0].bfloat16())


def test_moments_of_a_file_are_laid_out_as_their_weight(by_op: list[int], device: str) -> None:
    """Once; and the numbers are those of moments that never lay otherwise."""
    stepped = []
    for transposes in (False, True):
        weight = nn.Parameter(torch.ones(3, 4, device=device))
        optimizer = AdamW([weight], lr=RATE, fused=True)
        rng = torch.Generator().manual_seed(0)
        for _ in range(3):
            weight.grad = torch.randn(3, 4, generator=rng).to(device)
            optimizer.step()
            if transposes:
                states = optimizer.state_dict()
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = states["state"][0][name]
                    states["state"][0][name] = moment.t().contiguous().t()
                optimizer.load_state_dict(states)
        stepped.append(weight)
    assert torch.equal(*stepped)
    assert by_op.count(1) == 6


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


@pytest.mark.parametrize(
    "rate",
    [torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")],
    ids=["two", "float64", "elsewhere"],
)
def test_a_rate_that_the_kernel_cannot_read(rate: Tensor, device: str) -> None:
    rate = rate if rate.is_meta else rate.to(device)
    message = "^adamw_: lr_tensor must be one float32 number on " + device
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        raw.adamw_(*operands(device).values(), rate, *NUMBERS[1:])


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


def masters_of(device: str, **options: object) -> MasterWeights:
    model = nn.ParameterList(drawn(device))
    return MasterWeights(model, AdamW(list(model), lr=RATE, fused=True, **options))


@pytest.mark.parametrize("where", ["op", "torch"])
def test_a_loop_over_weights_may_leave_their_gradients(
    where: str, device: str, request: pytest.FixtureRequest
) -> None:
    if where == "op":
        request.getfixturevalue("by_op")
    optimizer = masters_of(device)
    for step in range(2):
        gradients(step, optimizer.weights)
        optimizer.step()
        assert all(weight.grad is None for weight in optimizer.weights)


def test_hooks_and_schedules_see_the_step_of_masters(by_op: list[int], device: str) -> None:
    optimizer = masters_of(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step)
        for step in range(2):
            gradients(step, optimizer.weights)
            optimizer.step()
            schedule.step()
    assert by_op
    with torch.profiler.profile(acc_events=True) as profile:
        gradients(2, optimizer.weights)
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}
    by_op.clear()
    heard: list[bool] = []

    def hook(stepped: torch.optim.Optimizer, *_: object) -> None:
        heard.append(all(p.grad is not None for p in stepped.param_groups[0]["params"]))

    handles = [
        optimizer.optimizer.register_step_pre_hook(hook),
        optimizer.optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ]
    for handle in handles:
        try:
            gradients(3, optimizer.weights)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            handle.remove()
    # Four hooks, then three, two, one.
    assert heard == [True] * 10
    gradients(4, optimizer.weights)
    optimizer.step()
    assert heard == [True] * 10


@pytest.mark.parametrize("largest", [0.5, 1e9, float("inf")])
def test_gradients_of_masters_are_clipped_where_they_are(
    largest: float, by_op: list[int], device: str
) -> None:
    """To the same norm and, but for the roundings of a factor and a product, the same numbers."""
    stepped = []
    for in_one_pass in (True, False):
        optimizer = masters_of(device, eps=1.0)  # so that the scale of gradients is seen
        gradients(0, optimizer.weights)
        if not in_one_pass:
            optimizer.take_gradients()
        norm = optimizer.clip_gradients(largest)
        assert norm.dtype == torch.float32
        assert in_one_pass == all(weight.grad is not None for weight in optimizer.weights)
        before = len(by_op)
        optimizer.step()
        assert len(by_op) > before
        stepped.append((norm, optimizer.masters))
    (norm, ours), (wanted, theirs) = stepped
    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
    start = drawn(device)
    for one, two, p in zip(ours, theirs, start, strict=True):
        if largest > 1:
            assert torch.equal(one, two)
        kept = 1 - RATE * 0.01  # by the decay
        torch.testing.assert_close(one - kept * p, two - kept * p, rtol=0.01, atol=1e-6)


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
