"""Decoder, a running batch whose sequences come and go: beside generate(), its slots, samples,
prefixes, caches and errors. How its tokens reach their reader: test_models_decoder_tokens.py;
generate() itself: test_models_generate.py."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.generating_models import CONFIGS, SAMPLED, VOCAB, alone, make, prompts, tokens_of

from tidegate.models import CausalLM, Decoder, LMConfig

FEW = ["hgrn2", "rwkv4", "fox-pro-grouped", "transformer-window", "mixed"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_come_and_go(name, device):
    """Each gets the tokens that it gets alone, and that generate() gives it, whatever enters or
    leaves beside it."""
    model = make(name, device=device)
    options = (SAMPLED, {"temperature": 0.0}, {"seed": 1}, SAMPLED, {"seed": 2, "top_k": 3})
    asks = list(zip(prompts(3, 11, 1, 6, 8), (9, 30, 14, 3, 12), options, strict=True))
    wanted = [alone(model, prompt, count, **options) for prompt, count, options in asks]
    decoder = Decoder(model, 3, capacity=8, prompt_chunk=4)
    owner: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in asks]
    waiting = list(range(len(asks)))
    while waiting or decoder.active:
        while waiting and decoder.taken < 3:
            one = waiting.pop(0)
            prompt, count, options = asks[one]
            slot = decoder.add(prompt.to(device), max_new_tokens=count, **options)
            owner[slot] = one
        for token in decoder.steps(2):
            found[owner[token.slot]].append(token)
            if token.is_last:
                decoder.remove(token.slot)
    assert found == wanted
    assert decoder.taken == 0
    prompt, count, options = asks[0]
    made = model.generate(prompt[None].to(device), count, **options)
    assert made[0, 3:].tolist() == wanted[0]


def trained_bounds(model: CausalLM, optimizer: type[torch.optim.Optimizer], **options) -> None:
    logits = model.lower_bounds.logits
    logits.grad = 3 * torch.randn_like(logits)
    optimizer([logits], lr=1.0, **options).step()


def test_a_decoder_follows_lower_bounds_trained_in_place(device, tmp_path):
    """After its steps have been captured; the other weights are read as they are anyway. torch's
    fused optimisers do not count versions, so sequences that begin have the bounds made anew."""
    model = make("hgrn2", device=device)
    prompt = prompts(6)[0]
    options = {"max_new_tokens": 12, "temperature": 0.0}
    decoder = Decoder(model, 2, log_probs=True)

    def drawn(of: Decoder) -> list[tuple[int, float]]:
        return [(int(token), token.log_prob) for token in of.steps(3)]

    slot = decoder.add(prompt, **options)
    decoder.steps(3)
    decoder.save_prefix(slot, tmp_path / "prefix")
    trained_bounds(model, torch.optim.SGD)
    fresh = Decoder(copy.deepcopy(model), 2, log_probs=True)
    fresh.load_prefix(tmp_path / "prefix", **options)
    assert drawn(decoder) == drawn(fresh)
    decoder.remove(slot)
    trained_bounds(model, torch.optim.AdamW, fused=True)
    fresh = Decoder(copy.deepcopy(model), 2, log_probs=True)
    for one in (decoder, fresh):
        one.add(prompt, **options)
    assert drawn(decoder) == drawn(fresh)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_that_are_written_now_and_then_have_the_same_bits(dtype, device):
    """Several steps at once, of which only the last one writes states, and one by one."""
    if device == "cpu":
        pytest.skip("the CPU writes every state")
    torch.manual_seed(2)
    config = LMConfig(
        mixer="hgrn2", vocab_size=64, dim=1024, layers=2, mixer_options={"num_heads": 8}
    )
    model = CausalLM(config).to(device, dtype).eval()
    ids = torch.randint(0, 64, (64, 5))
    found = []
    for steps in (1, 23):
        decoder = Decoder(model, 64, log_probs=True)
        decoder.add_all(list(ids), max_new_tokens=23, seed=4)
        tokens = []
        while decoder.active:
            tokens += [(t.slot, int(t), t.log_prob) for t in decoder.steps(steps)]
        found.append(sorted(tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FEW)
def test_removed_sequences_leave_the_others_as_they_are(name, device):
    model = make(name, device=device)
    first, second, third = prompts(5, 2, 9)
    wanted = [alone(model, p, 20, temperature=0.0) for p in (second, third)]
    decoder = Decoder(model, 3)
    slots = decoder.add_all([first, second, third], temperature=0.0, max_new_tokens=20)
    start = [t for t in decoder.steps(4) if t.slot != slots[0]]
    decoder.remove(slots[0])
    rest = [*start, *decoder.steps(16)]
    for slot, tokens in zip(slots[1:], wanted, strict=True):
        assert [t for t in rest if t.slot == slot] == tokens


@pytest.mark.parametrize("name", FEW)
def test_samples_of_one_prompt(name, device):
    """The state is copied: as many prompts read one by one would give the same."""
    model = make(name, device=device)
    (prompt,) = prompts(7)
    decoder = Decoder(model, 4)
    slots = decoder.add_samples(prompt, 4, seed=6, max_new_tokens=15)
    found = tokens_of(decoder, 5)
    wanted = model.generate(prompt.expand(4, 7).to(device), 15, seed=6)
    assert [found[slot] for slot in slots] == wanted[:, 7:].tolist()
    assert len({tuple(row) for row in found.values()}) > 1


def test_samples_of_a_stream_are_streams_from_there_on():
    model = make("hgrn2")
    (prompt,) = prompts(7)
    decoder = Decoder(model, 3)
    slots = decoder.add_samples(prompt, 3, seed=5, stream=1, max_new_tokens=15)
    found = tokens_of(decoder)
    for stream, slot in enumerate(slots, start=1):
        assert found[slot] == alone(model, prompt, 15, seed=5, stream=stream)


def test_logits_of_another_dtype_leave_the_others_as_they_are(tmp_path):
    """A prefix that the model in bf16 has read, whose states are fp32 as well."""
    model = make("hgrn2").float()
    narrow = Decoder(copy.deepcopy(model).bfloat16(), 1)
    first, second = prompts(5, 7)
    narrow.save_prefix(narrow.add(first), tmp_path / "prefix")
    decoder = Decoder(model, 2)
    slot = decoder.add(second, temperature=0.0, max_new_tokens=12)
    head = decoder.steps(3)
    decoder.load_prefix(tmp_path / "prefix", max_new_tokens=2)
    assert head + tokens_of(decoder)[slot] == alone(model, second, 12, temperature=0.0)


def test_many_slots_have_no_less_room_for_a_sequence():
    """Addresses are reserved for every slot's tokens, however many slots there are."""
    model = make("fox")
    first, second = prompts(40, 40)
    found = []
    for slots in (2, 1 << 14):
        decoder = Decoder(model, slots, capacity=8)
        for prompt in (first, second):
            decoder.add(prompt, temperature=0.0, max_new_tokens=20)
        found.append(tokens_of(decoder))
    assert found[0] == found[1]


def test_samples_share_stops_that_can_be_read_once():
    model = make("hgrn2")
    (prompt,) = prompts(7)
    found = []
    for of in (list, iter):
        decoder = Decoder(model, 3, decode=lambda ids: "".join(f"<{i}>" for i in ids))
        stops = {"stop_ids": of(range(8)), "stop_strings": of(["<9>", "<11>"])}
        decoder.add_samples(prompt, 3, seed=1, temperature=3.0, max_new_tokens=60, **stops)
        found.append(tokens_of(decoder, 60))
    assert found[0] == found[1]
    assert all(len(tokens) < 60 for tokens in found[0].values())


def test_samples_are_all_or_none(monkeypatch):
    decoder = Decoder(make("hgrn2"), 3)
    fork, forked = decoder.fork, []

    def failing(slot, **options):
        if forked:
            raise RuntimeError("out of memory")
        forked.append(fork(slot, **options))
        return forked[0]

    monkeypatch.setattr(decoder, "fork", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.add_samples(prompts(3)[0], 3)
    assert (decoder.taken, decoder.active) == (0, 0)


@pytest.mark.parametrize("name", FEW)
def test_a_fork_goes_on_from_where_the_other_is(name):
    model = make(name)
    (prompt,) = prompts(7)
    decoder = Decoder(model, 2)
    slot = decoder.add(prompt, temperature=0.0, max_new_tokens=12)
    head = decoder.steps(5)
    other = decoder.fork(slot, temperature=0.0, max_new_tokens=7)
    found = tokens_of(decoder)
    assert found[slot] == found[other]
    assert head + found[slot] == alone(model, prompt, 12, temperature=0.0)


def test_a_fork_with_a_penalty_knows_what_was_read():
    model = make("hgrn2")
    (prompt,) = prompts(7)
    decoder = Decoder(model, 2)
    slot = decoder.add(prompt, temperature=0.0, max_new_tokens=20)
    other = decoder.fork(slot, temperature=0.0, repetition_penalty=3.0, max_new_tokens=20)
    found = tokens_of(decoder)
    assert found[other] == alone(model, prompt, 20, temperature=0.0, repetition_penalty=3.0)
    assert found[slot] == alone(model, prompt, 20, temperature=0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_states_are_as_good_as_reading(name, device, tmp_path):
    model = make(name, device=device)
    prefix, more = prompts(9, 4)
    decoder = Decoder(model, 3)
    decoder.save_prefix(decoder.add(prefix), tmp_path / "prefix")
    there = Decoder(model, 2)
    options = {**SAMPLED, "max_new_tokens": 12}
    one = there.load_prefix(tmp_path / "prefix", more, **options)
    two = there.load_prefix(tmp_path / "prefix", **options)
    found = tokens_of(there)
    whole = torch.cat([prefix, more])
    assert found[one] == alone(model, whole, 12, **SAMPLED)
    assert found[two] == alone(model, prefix, 12, **SAMPLED)


def test_log_probs(device):
    """They are those of the logits as they are, whatever the temperature and the filters."""
    model = make("fox", device=device)
    (prompt,) = prompts(5)
    decoder = Decoder(model, 1, log_probs=True)
    decoder.add(prompt, max_new_tokens=10, temperature=0.5, top_k=4, seed=1)
    tokens = decoder.steps(10)
    ids = torch.cat([prompt, torch.tensor(tokens)]).to(device)
    logits = model(ids[None]).logits[0, 4:-1].log_softmax(-1)
    wanted = logits.gather(1, ids[5:, None])[:, 0]
    found = torch.tensor([t.log_prob for t in tokens], dtype=torch.float64)
    torch.testing.assert_close(found, wanted.detach().cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 8192])
@pytest.mark.parametrize("name", FEW)
def test_prompts_in_chunks(name, chunk):
    model = make(name)
    asked = prompts(10, 4, 1, 2)
    decoder = Decoder(model, 4, prompt_chunk=chunk)
    slots = decoder.add_all(asked, temperature=0.0, max_new_tokens=8)
    found = tokens_of(decoder)
    for slot, prompt in zip(slots, asked, strict=True):
        assert found[slot] == alone(model, prompt, 8, temperature=0.0)


@pytest.mark.parametrize("name", ["fox", "fox-pruned", "transformer-window", "transformer"])
def test_caches_grow(name, device):
    """Beyond their first capacity, in a batch whose sequences are of unequal length."""
    model = make(name, device=device)
    asked = prompts(3, 40)
    decoder = Decoder(model, 2, capacity=16)
    slots = decoder.add_all(asked, temperature=0.0, max_new_tokens=330)
    found = tokens_of(decoder, 32)
    ids = torch.nn.utils.rnn.pad_sequence(asked, batch_first=True).to(device)
    wanted = model.generate(ids, 330, temperature=0.0, lengths=torch.tensor([3, 40]))
    assert found[slots[0]] == wanted[0, 3:333].tolist()
    assert found[slots[1]] == wanted[1, 40:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hgrn", *FEW])
def test_invariant_batches(name, dtype, device):
    """Alone or in company, the same bits."""
    model = make(name, dtype, device)
    asked = prompts(3, 5, 2, 9, 4, 1)
    options = {"max_new_tokens": 12, "seed": 1, "temperature": 0.9}

    def log_probs(company: list[torch.Tensor]) -> list[tuple[int, float]]:
        decoder = Decoder(model, 6, capacity=32, log_probs=True, invariant=True)
        decoder.add_all(company[:-1], max_new_tokens=7)
        slot = decoder.add(company[-1], **options)
        tokens = []
        while decoder.active:
            tokens += decoder.steps(3)
        return [(int(t), t.log_prob) for t in tokens if t.slot == slot]

    assert log_probs(asked[:1]) == log_probs([*asked[1:], asked[0]])


def test_an_invariant_decoders_capacity_is_a_limit():
    decoder = Decoder(make("fox"), 2, capacity=8, invariant=True)
    decoder.add(prompts(5)[0])
    with pytest.raises(
        ValueError, match="Decoder.step: capacity: expected at least 9 tokens .*; got 8"
    ):
        decoder.steps(4)
    with pytest.raises(
        ValueError, match="Decoder.add: capacity: expected at least 9 tokens .*; got 8"
    ):
        decoder.add(prompts(9)[0])
    assert len(decoder.steps(3)) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, p: d.add([]), "Decoder.add: prompt: expected at least one token; got none"),
        (lambda d, p: d.add("text"), "Decoder.add: prompt: expected ids, a tensor or a list; got"),
        (
            lambda d, p: d.add([1, VOCAB]),
            f"expected ids from 0 to below vocab_size={VOCAB}; got 37",
        ),
        (lambda d, p: d.add(p.float()), r"prompt: expected int32 or int64 \[length\]; got Float"),
        (
            lambda d, p: d.add(p, temperature=-1.0),
            "Decoder.add: temperature: expected >= 0; got -1",
        ),
        (lambda d, p: d.add(p, top_p=0.0), r"Decoder.add: top_p: expected in \(0, 1\]; got 0.0"),
        (lambda d, p: d.add(p, min_p=2.0), r"Decoder.add: min_p: expected in \[0, 1\]; got 2.0"),
        (lambda d, p: d.add(p, repetition_penalty=0.0), "repetition_penalty: expected > 0; got 0"),
        (
            lambda d, p: d.add(p, temperature="0.5"),
            "Decoder.add: temperature: expected a number >= 0; got '0.5'",
        ),
        (
            lambda d, p: d.add(p, max_new_tokens=0),
            "max_new_tokens: expected an integer >= 1; got 0",
        ),
        (lambda d, p: d.add(p, stop_ids=range(9)), "stop_ids: expected at most 8, .*; got 9"),
        (lambda d, p: d.add(p, stop_strings=["x"]), "stop_strings: expected a Decoder with decode"),
        (lambda d, p: d.add(3), "Decoder.add: prompt: expected ids, a tensor or a list; got 3"),
        (lambda d, p: d.add([1, "x"]), "Decoder.add: prompt: expected an integer; got 'x'"),
        (lambda d, p: d.add([10**30]), "Decoder.add: prompt: expected an integer of 64 bits"),
        (lambda d, p: d.add_all(None), "Decoder.add_all: prompts: expected a list; got None"),
        (lambda d, p: d.add(p, best=1), "Decoder.add: unknown option 'best'"),
        (lambda d, p: d.add_all([p] * 3), "expected 3 free of the 2 slots; got 2: remove"),
        (lambda d, p: [d.add(p) for _ in range(3)], "expected 1 free of the 2 slots; got 0"),
        (lambda d, p: d.add_samples(p, 0), "samples: expected an integer >= 1; got 0"),
        (lambda d, p: d.add_samples(p, 3), "samples: expected at most 2, .*; got 3"),
        (lambda d, p: [d.remove(d.add(p)), d.remove(0)], "Decoder.remove: slot: expected one .* 0"),
        (lambda d, p: d.remove(5), "Decoder.remove: slot: expected one that add.* gave .*; got 5"),
        (lambda d, p: d.fork(0), "Decoder.fork: slot: expected one that add.*; got 0"),
        (
            lambda d, p: [d.add(p, max_new_tokens=1), d.step(), d.fork(0)],
            "Decoder.fork: slot: expected a sequence that goes on; got 0, which has ended",
        ),
        (lambda d, p: d.steps(0), "Decoder.steps: count: expected an integer >= 1; got 0"),
        (
            lambda d, p: [d.add(p), next(d.stream(p))],
            "Decoder.stream: expected no other sequence that goes on; got 1",
        ),
    ],
)
def test_bad_calls(call, message):
    decoder = Decoder(make("hgrn2"), 2)
    with pytest.raises(ValueError, match=message):
        call(decoder, prompts(3)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "Decoder: max_batch: expected an integer >= 1; got 0"),
        ({"capacity": 0}, "Decoder: capacity: expected an integer >= 1; got 0"),
        ({"invariant": "yes"}, "Decoder: invariant: expected True or False; got 'yes'"),
        ({"log_probs": 1}, "Decoder: log_probs: expected True or False; got 1"),
        ({"decode": 3}, "Decoder: decode: expected a function or None; got 3"),
        ({"prompt_chunk": 0}, "Decoder: prompt_chunk: expected an integer >= 1; got 0"),
        (
            {"max_batch": 1000, "capacity": 10**10},
            "Decoder: capacity: expected states of 1000 sequences that fit the .* bytes that are "
            "free; got 10000000000 tokens a sequence, which need",
        ),
        ({"capacity": 2**62}, f"Decoder: capacity: expected .* free; got {2**62} tokens a seq"),
        (
            {"max_batch": 2**62},
            f"Decoder: max_batch: expected states of {2**62} sequences that fit the .* bytes that "
            f"are free; got {2**62}, which need",
        ),
        (
            {"max_stop_ids": 10**12},
            "Decoder: max_stop_ids: expected .* free; got 1000000000000 ids a sequence, which need",
        ),
        ({"max_stop_ids": 2**62}, f"Decoder: max_stop_ids: expected .* free; got {2**62} ids"),
    ],
)
def test_bad_decoders(options, message):
    with pytest.raises(ValueError, match=message):
        Decoder(make("fox"), **{"max_batch": 2, **options})


def test_states_of_another_model(tmp_path):
    decoder = Decoder(make("hgrn2"), 1)
    decoder.save_prefix(decoder.add(prompts(3)[0]), tmp_path / "prefix")
    torch.manual_seed(0)
    wider = CausalLM(LMConfig(mixer="hgrn2", vocab_size=VOCAB, dim=64, layers=2))
    saved = load_file(tmp_path / "prefix")
    message = r"load_prefix: saved: expected the prefix of a model with dim = 64; got one with \d+$"
    with pytest.raises(ValueError, match=message):
        Decoder(wider, 1).load_prefix(tmp_path / "prefix")
    # Where nothing says it, shapes and dtypes are compared.
    del saved["config"]
    save_file(saved, tmp_path / "prefix")
    with pytest.raises(ValueError, match=r"saved: 'layers.0.0': expected float32 .* got float64"):
        Decoder(wider, 1).load_prefix(tmp_path / "prefix")
    saved = load_file(tmp_path / "prefix")
    save_file({**saved, "tokens": saved["tokens"] + VOCAB}, tmp_path / "ids")
    with pytest.raises(ValueError, match="saved: 'tokens': expected ids from 0 to below"):
        Decoder(make("hgrn2"), 1).load_prefix(tmp_path / "ids")
    deeper = make("fox")
    keeper = Decoder(deeper, 2)
    keeper.save_prefix(keeper.add(prompts(3)[0]), tmp_path / "kept")
    saved = load_file(tmp_path / "kept")
    for place, wrong, message in ((3, 4, "from 0 to 3, the tokens"), (4, 9, "from 3 to 3, the")):
        name = f"layers.0.{place}"
        save_file({**saved, name: torch.full_like(saved[name], wrong)}, tmp_path / "wrong")
        with pytest.raises(ValueError, match=f"saved: '{name}': expected {message}"):
            keeper.load_prefix(tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"Decoder.load_prefix: saved: "):
        Decoder(deeper, 1).load_prefix(tmp_path / "prefix")
    with pytest.raises(FileNotFoundError, match="no such file"):
        decoder.load_prefix(tmp_path / "nothing")
