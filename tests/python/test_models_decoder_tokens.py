"""How a Decoder's tokens reach their reader: one by one, several steps at once or as a stream,
up to a stop id or a stop string, also where the text for it cannot be made."""

import copy
import pickle

import pytest
from support.generating_models import VOCAB, alone, make, prompts, tokens_of

from tidegate.models import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_is_a_token_a_slot(device):
    """Tokens are integers, with what else is known of them, also once they are copied."""
    decoder = Decoder(make("hgrn2", device=device), max_batch=3, log_probs=True)
    slots = decoder.add_all(prompts(4, 6), max_new_tokens=3)
    assert decoder.max_batch == 3
    for step in range(3):
        tokens = decoder.step()
        assert set(tokens) == set(slots)
        for slot, token in tokens.items():
            assert isinstance(token, int)
            assert 0 <= token < VOCAB
            for one in (token, copy.deepcopy(token), pickle.loads(pickle.dumps(token))):
                assert (one, one.slot, one.is_last) == (token, slot, step == 2)
                assert one.log_prob == token.log_prob < 0
                wanted = f"DecodedToken({int(token)}, slot={slot}, log_prob={token.log_prob}"
                assert repr(one) == f"{wanted}, is_last={step == 2})"
                assert f"{one} {one:3d}" == f"{int(token)} {int(token):3d}"
    assert decoder.step() == {}


def test_a_sequence_ends_with_a_stop(device):
    model = make("hgrn2", device=device)
    (prompt,) = prompts(6)
    free = alone(model, prompt, 30, temperature=0.0)
    stop = free[11]
    end = free.index(stop) + 1
    decoder = Decoder(model, 2, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    by_id = decoder.add(prompt, temperature=0.0, stop_ids=[VOCAB - 1, stop])
    text = f"{free[4]}><{free[5]}>"
    by_text = decoder.add(prompt, temperature=0.0, stop_strings=["nowhere", text])
    found: dict[int, list] = {by_id: [], by_text: []}
    for token in decoder.steps(25):
        found[token.slot].append(token)
    assert found[by_id] == free[:end]
    assert [t.is_last for t in found[by_id]] == [False] * (end - 1) + [True]
    last = next(n for n in range(31) if text in "".join(f"<{i}>" for i in free[:n]))
    assert found[by_text] == free[:last]
    assert found[by_text][-1].is_last
    assert decoder.active == 0
    assert decoder.taken == 2
    for slot in (by_id, by_text):
        decoder.remove(slot)
    assert decoder.taken == 0


def test_stop_strings_in_text_with_bytes_that_are_none():
    """By errors="surrogateescape", as the command line reads a prompt of any bytes."""
    model = make("hgrn2")
    (prompt,) = prompts(6)
    free = alone(model, prompt, 12, temperature=0.0)
    last = next(n for n in range(1, 12) if len({*free[:n]} - {0}) > 3) - 1

    def decode(ids: list[int]) -> str:  # every other id begins what is never a character
        return bytes(i + 64 if i == free[last] else i + 192 for i in ids).decode(
            errors="surrogateescape"
        )

    decoder = Decoder(model, 1, decode=decode)
    slot = decoder.add(prompt, temperature=0.0, stop_strings=[chr(free[last] + 64)])
    assert tokens_of(decoder, 12)[slot] == free[: free.index(free[last]) + 1]


@pytest.mark.parametrize("count", [1, 5, 12])
def test_no_token_is_lost_where_a_text_cannot_be_made(count):
    """The error reaches the caller; the next calls have the tokens, as if nothing had been."""
    model = make("hgrn2")
    first, second = prompts(5, 6)
    drawn = {"temperature": 3.0, "seed": 1}
    wanted = [alone(model, p, 12, **drawn) for p in (first, second)]
    last = max(wanted[0].index(token) for token in wanted[0])
    assert last > 3
    calls = 0

    def decode(ids: list[int]) -> str:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 6):
            raise RuntimeError("no text")
        return "".join(chr(i + 64) for i in ids)

    decoder = Decoder(model, 2, decode=decode)
    stop = chr(wanted[0][last] + 64)
    slots = [
        decoder.add(first, **drawn, stop_strings=[stop]),
        decoder.add(second, **drawn, max_new_tokens=12),
    ]
    found: dict[int, list] = {slot: [] for slot in slots}
    errors = 0
    while decoder.active:
        try:
            for token in decoder.steps(count):
                found[token.slot].append(token)
        except RuntimeError:
            errors += 1
    assert errors == 3
    assert [found[slot] for slot in slots] == [wanted[0][: last + 1], wanted[1]]
    for tokens in found.values():
        assert [t.is_last for t in tokens] == [False] * (len(tokens) - 1) + [True]


def test_a_sequence_whose_text_cannot_be_made_leaves_the_others_alone():
    model = make("hgrn2")
    first, second = prompts(5, 6)

    def decode(ids: list[int]) -> str:
        raise RuntimeError("no text")

    decoder = Decoder(model, 2, decode=decode)
    bad = decoder.add(first, temperature=0.0, stop_strings=["x"])
    good = decoder.add(second, temperature=0.0, max_new_tokens=12)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no text"):
            decoder.steps(5)
    # Both sequences have gone on, and nobody has seen by which tokens.
    for call in (decoder.fork, lambda slot: decoder.save_prefix(slot, "never written")):
        with pytest.raises(ValueError, match="slot: expected a sequence whose tokens steps"):
            call(good)
    decoder.remove(bad)
    assert [decoder.add(first, temperature=0.0, max_new_tokens=1), decoder.step()[good]] == [
        bad,
        alone(model, second, 1, temperature=0.0)[0],
    ]
    tokens = [token for token in decoder.steps(20) if token.slot == good]
    while decoder.active:
        tokens += [token for token in decoder.steps(20) if token.slot == good]
    assert tokens == alone(model, second, 12, temperature=0.0)[1:]


def test_a_decode_that_makes_no_text():
    decoder = Decoder(make("hgrn2"), 1, decode=lambda ids: ids)
    decoder.add(prompts(5)[0], stop_strings=["x"])
    with pytest.raises(ValueError, match=r"Decoder: decode: expected text or bytes of it; got \["):
        decoder.step()


def test_streaming():
    model = make("hgrn2")
    (prompt,) = prompts(4)
    decoder = Decoder(model, 1)
    wanted = alone(model, prompt, 12, temperature=0.0)
    stream = decoder.stream(prompt.tolist(), max_new_tokens=12, temperature=0.0)
    assert [next(stream) for _ in range(3)] == wanted[:3]
    stream.close()
    assert decoder.taken == 0
    assert list(decoder.stream(prompt, max_new_tokens=12, temperature=0.0)) == wanted


def test_a_stream_whose_slot_is_freed_and_taken_by_the_reader():
    """As a reader of steps() does after a last token; so does one who has seen enough."""
    model = make("hgrn2")
    (prompt,) = prompts(4)
    wanted = alone(model, prompt, 6, temperature=0.0)
    for last in (5, 2):
        decoder = Decoder(model, 1)
        found = []
        for token in decoder.stream(prompt, max_new_tokens=6, temperature=0.0):
            found.append(token)
            if len(found) == last + 1:
                decoder.remove(token.slot)
                other = decoder.add(prompt, max_new_tokens=6, temperature=0.0)
        assert found == wanted[: last + 1]
        assert (other, decoder.active) == (0, 1)
        assert tokens_of(decoder)[other] == wanted


def test_a_stream_has_no_tokens_of_others():
    decoder = Decoder(make("hgrn2"), 2)
    (prompt,) = prompts(4)
    stream = decoder.stream(prompt, max_new_tokens=6)
    next(stream)
    other = decoder.add(prompt, max_new_tokens=6)
    with pytest.raises(ValueError, match="Decoder.stream: expected no other sequence .*; got 1"):
        next(stream)
    assert (decoder.taken, len(tokens_of(decoder)[other])) == (1, 6)
