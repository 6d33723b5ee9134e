"""CausalLM.generate() by the decoding engine: what the model's own steps give, captured or not,
with the parameters of now, in several threads."""

import contextlib
import copy
import threading

import pytest
import torch
from support.generating_models import CONFIGS, SAMPLED, make, prompts
from torch import nn

from tidegate.models import Decoder
from tidegate.models import generating as generating_module
from tidegate.models.engine import engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_is_what_the_models_own_steps_give(name, device, monkeypatch):
    """Greedy ids, prompts of unequal length; ids drawn by seed under every filter."""
    model = make(name, device=device)
    ids = torch.stack(prompts(7, 7, 7)).to(device)
    lengths = torch.tensor([3, 7, 1])
    assert engine_of(model) is not None
    greedy = model.generate(ids, 21, temperature=0.0, lengths=lengths)
    drawn = model.generate(ids, 21, **SAMPLED)
    again = model.generate(ids, 21, **SAMPLED)
    monkeypatch.setattr(generating_module, "engine_of", lambda model: None)
    assert torch.equal(greedy, model.generate(ids, 21, temperature=0.0, lengths=lengths))
    assert torch.equal(drawn, model.generate(ids, 21, **SAMPLED))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_residual_dtype_under_autocast(name, device, monkeypatch):
    """The engine, which generate() and a Decoder of before or after run on, has it, too."""
    model = make(name, torch.float32, device)
    (prompt,) = prompts(7)
    ids = prompt[None].to(device)
    decoder = Decoder(model, 1)
    with torch.autocast(device, torch.bfloat16):
        plain = model.generate(ids, 40, temperature=0.0)
        model.residual_dtype = torch.bfloat16
        decoder.add(prompt, temperature=0.0, max_new_tokens=40)
        decoded = decoder.steps(40)
        found = model.generate(ids, 40, temperature=0.0)
        assert decoded == found[0, 7:].tolist()
        monkeypatch.setattr(generating_module, "engine_of", lambda model: None)
        assert torch.equal(found, model.generate(ids, 40, temperature=0.0))
        model.residual_dtype = None
        assert torch.equal(plain, model.generate(ids, 40, temperature=0.0))


@pytest.mark.parametrize("dtype", ["bf16", torch.int8])
def test_a_residual_dtype_that_is_none(dtype):
    model = make("hgrn2")
    (prompt,) = prompts(3)
    decoder = Decoder(model, 1)
    model.residual_dtype = dtype
    for call in (lambda: model.generate(prompt[None], 2), lambda: decoder.add(prompt)):
        with pytest.raises(ValueError, match="^CausalLM: residual_dtype: expected a floating"):
            call()
    assert decoder.taken == 0


@pytest.mark.parametrize("eos", [-1, 37, 2**31, -(2**62)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_eos_that_is_no_id_of_the_vocabulary(dtype, eos, monkeypatch):
    model = make("hgrn2")
    message = f"^CausalLM.generate: eos: expected an id from 0 to below vocab_size=37; got {eos}$"
    ids = torch.zeros(1, 3, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, 2, eos=eos)
    with pytest.raises(ValueError, match=message):  # the library says the same
        engine_of(model).start(ids, None, 2, 0.0, None, None, None, 1.0, eos, 0)


@pytest.mark.parametrize("count", [10**14, 2**63 - 1])
def test_more_new_tokens_than_memory(count):
    message = "^CausalLM.generate: max_new_tokens: expected ids of 1 sequences that fit the .*; got"
    with pytest.raises(ValueError, match=f"{message} {count}$"):
        make("hgrn2").generate(torch.zeros(1, 3).long(), count)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_give_what_eager_ones_do(name, dtype, device, monkeypatch):
    if device == "cpu":
        pytest.skip("the CPU has no graphs")
    model = make(name, dtype, device)
    ids = torch.stack(prompts(9, 9, 9)).to(device)
    calls = ({"temperature": 0.0}, SAMPLED, {"seed": 8, "eos": 3})
    for batch in (1, 3):
        captured = [model.generate(ids[:batch], 40, **call) for call in calls]
        monkeypatch.setenv("TIDEGATE_CUDA_GRAPHS", "0")
        eager = [model.generate(ids[:batch], 40, **call) for call in calls]
        monkeypatch.delenv("TIDEGATE_CUDA_GRAPHS")
        for one, other in zip(captured, eager, strict=True):
            assert torch.equal(one, other)


def test_generate_sees_the_parameters_of_now(device):
    """Changed in place, given new memory, cast."""
    model = make("hgrn", device=device)
    ids = torch.stack(prompts(4, 4)).to(device)
    before = model.generate(ids, 30, temperature=0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.3)
    after = model.generate(ids, 30, temperature=0.0)
    assert not torch.equal(before, after)
    assert torch.equal(after, copy.deepcopy(model).generate(ids, 30, temperature=0.0))
    with torch.no_grad():
        model.lower_bounds.logits.add_(torch.randn_like(model.lower_bounds.logits))
    bounded = copy.deepcopy(model).generate(ids, 30, temperature=0.0)
    assert torch.equal(model.generate(ids, 30, temperature=0.0), bounded)
    half = model.float()
    assert torch.equal(
        half.generate(ids, 30, seed=1), copy.deepcopy(half).generate(ids, 30, seed=1)
    )


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def test_what_only_python_knows_is_computed_by_python(device):
    """A module of another class, a hook, a forward of one's own."""
    ids = torch.stack(prompts(5)).to(device)
    for change in (
        lambda m: setattr(m.blocks[0], "glu", Doubled(m.blocks[0].glu)),
        lambda m: m.blocks[0].glu.register_forward_hook(lambda module, args, y: 2 * y),
        lambda m: setattr(m.blocks[1].glu, "forward", lambda x: -x),
    ):
        model = make("hgrn2", device=device)
        plain = model.generate(ids, 25, temperature=0.0)
        change(model)
        assert engine_of(model) is None
        changed = model.generate(ids, 25, temperature=0.0)
        assert not torch.equal(plain, changed)
        with pytest.raises(ValueError, match="Decoder: model: expected a CausalLM as its config"):
            Decoder(model, 1)


def test_generate_under_inference_mode_and_in_threads(device):
    """Threads that capture steps, end others' caches and draw random numbers, all at once."""
    ids = torch.stack(prompts(6, 6)).to(device)
    for _ in range(1 if device == "cpu" else 10):  # new models, whose steps are captured anew
        model = make("fox", device=device)
        wanted = model.generate(ids, 20, seed=4)
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, 20, seed=4), wanted)
        assert torch.equal(model.generate(ids, 20, seed=4), wanted)
        found = []

        def generate(model=model, found=found) -> None:
            torch.rand(8, device=device)
            found.append(model.generate(ids, 20, seed=4))

        threads = [threading.Thread(target=generate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(torch.equal(one, wanted) for one in found)


@pytest.mark.gpu
def test_a_capture_that_another_thread_breaks_is_made_again(device):
    """Waiting for the device ends every capture on it."""
    if device == "cpu":
        pytest.skip("the CPU has no graphs")
    model = make("hgrn2", device=device)
    ids = torch.stack(prompts(6)).to(device)
    wanted = model.generate(ids, 20, seed=4)
    done = threading.Event()

    def wait_again_and_again() -> None:
        while not done.is_set():
            with contextlib.suppress(RuntimeError):  # refused while another thread captures
                torch.cuda.synchronize()

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        for _ in range(10):
            assert torch.equal(copy.deepcopy(model).generate(ids, 20, seed=4), wanted)
    finally:
        done.set()
        thread.join()


def test_a_seed_none_draws_from_torchs_generator():
    model = make("hgrn2")
    ids = torch.stack(prompts(3))
    torch.manual_seed(1)
    one = model.generate(ids, 20)
    two = model.generate(ids, 20)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, 20), one)
    assert not torch.equal(one, two)
