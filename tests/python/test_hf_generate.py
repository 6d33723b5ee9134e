"""tidegate.hf: generate(), and the cache in transformers' own terms."""

from __future__ import annotations

import pytest
import torch
from support.hf_models import MIXERS, causal_lm, left_padded
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs tidegate[hf]")
from transformers import DynamicCache, StaticCache  # noqa: E402

from tidegate import hf  # noqa: E402

every_mixer = pytest.mark.parametrize("name", sorted(MIXERS))
LENGTHS = (6, 2, 4)
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 9},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled-beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


def new_tokens(model, ids: Tensor, mask: Tensor | None = None, **how) -> Tensor:
    """What generate() adds, of up to 6 tokens."""
    torch.manual_seed(5)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **how)
    return found[:, ids.shape[1] :]


@every_mixer
@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_cache_changes_nothing(name: str, way: str) -> None:
    """Padded rows, each way to choose tokens: with a cache what is chosen without one."""
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    with_cache = new_tokens(model, ids, mask, use_cache=True, **WAYS[way])
    without = new_tokens(model, ids, mask, use_cache=False, **WAYS[way])
    assert torch.equal(with_cache, without)


@every_mixer
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_padding_changes_nothing(name: str, way: str) -> None:
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    together = new_tokens(model, ids, mask, **WAYS[way])
    for row, length in enumerate(LENGTHS):
        alone = new_tokens(model, ids[row : row + 1, -length:], **WAYS[way])
        assert torch.equal(together[row : row + 1, : alone.shape[1]], alone)


@every_mixer
def test_greedy_is_what_causal_lm_generates(name: str) -> None:
    model = causal_lm(name)
    ids, _ = left_padded(5, 5)
    ours = model.to_causal_lm().generate(ids, 6, temperature=0)
    assert torch.equal(ours[:, 5:], new_tokens(model, ids, do_sample=False))


@every_mixer
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_can_be_the_prompt(name: str, with_ids: bool) -> None:
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    wanted = new_tokens(model, ids, mask, do_sample=False)
    how = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    if with_ids:
        how["input_ids"] = ids
    found = model.generate(inputs_embeds=model.model.embedding(ids).detach(), **how)
    assert torch.equal(found[:, -6:], wanted)


@every_mixer
def test_prompt_tuning_generates(name: str) -> None:
    """PEFT's virtual tokens, which its masks cover, too, come before padding."""
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=16, num_attention_heads=1
    )
    model = peft.get_peft_model(causal_lm(name), settings).double()
    ids, mask = left_padded(*LENGTHS)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(input_ids=ids, **how)
    assert torch.equal(with_cache, model.generate(input_ids=ids, use_cache=False, **how))


def test_rows_end_on_their_own() -> None:
    model = causal_lm("hgrn2")
    ids, mask = left_padded(*LENGTHS)
    free = new_tokens(model, ids, mask, do_sample=False)
    eos = int(free[0, 2])
    ended = new_tokens(model, ids, mask, do_sample=False, eos_token_id=eos)
    for row, wanted in zip(ended, free, strict=True):
        stop = wanted.tolist().index(eos) + 1 if eos in wanted else 6
        assert torch.equal(row[:stop], wanted[:stop])
        assert (row[stop:] == 0).all()


@every_mixer
@pytest.mark.parametrize("chunks", [(3, 3), (1, 5), (2, 1, 1, 2)])
def test_a_prompt_can_come_in_pieces(name: str, chunks: tuple[int, ...]) -> None:
    """Prefill, prefill on top of it, and steps, with rows that are padding in whole pieces."""
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    whole = model(ids, attention_mask=mask).logits
    cache = None
    for grad in (False, True):
        cache, begin = DynamicCache(), 0
        with torch.set_grad_enabled(grad):
            for size in chunks:
                end = begin + size
                piece = model(
                    ids[:, begin:end], attention_mask=mask[:, :end], cache=cache, use_cache=True
                ).logits
                real = mask[:, begin:end].bool()
                torch.testing.assert_close(
                    piece[real], whole[:, begin:end][real], rtol=1e-9, atol=1e-9
                )
                begin = end
        assert cache.get_seq_length() == 6
    chunked = new_tokens(model, ids, mask, do_sample=False, prefill_chunk_size=2)
    assert torch.equal(chunked, new_tokens(model, ids, mask, do_sample=False))


@every_mixer
def test_a_conversation_goes_on_from_its_cache(name: str) -> None:
    """The second turn gives generate() the whole text and the cache of the first."""
    model = causal_lm(name)
    ids, _ = left_padded(5)
    cache = DynamicCache()
    torch.manual_seed(5)
    first = model.generate(
        ids, cache=cache, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    assert cache.get_seq_length() == 8  # the last token was chosen and not read
    longer = torch.cat([first.sequences, ids], 1)
    again = model.generate(longer, cache=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, model.generate(longer, max_new_tokens=4, do_sample=False))


@every_mixer
def test_a_prompt_read_in_inference_mode_is_gone_on_from_outside(name: str) -> None:
    """Each part of a state can then be written: by steps, after reset(), under autograd."""
    model = causal_lm(name)
    ids, _ = left_padded(5)
    longer = torch.cat([ids, torch.tensor([[3]])], 1)
    caches = []
    with torch.inference_mode():
        for _ in range(3):
            caches.append(DynamicCache())
            model(ids, cache=caches[-1], use_cache=True)
    wanted = model.generate(longer, max_new_tokens=4, do_sample=False)
    assert torch.equal(
        model.generate(longer, cache=caches[0], max_new_tokens=4, do_sample=False), wanted
    )
    caches[1].reset()
    assert torch.equal(
        model.generate(longer, cache=caches[1], max_new_tokens=4, do_sample=False), wanted
    )
    found = model(longer[:, 5:], cache=caches[2]).logits
    found.sum().backward()
    torch.testing.assert_close(found, model(longer).logits[:, 5:], rtol=1e-9, atol=1e-9)


@every_mixer
def test_static_cache(name: str) -> None:
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    wanted = new_tokens(model, ids, mask, do_sample=False)
    found = new_tokens(model, ids, mask, do_sample=False, cache_implementation="static")
    assert torch.equal(found, wanted)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(ids, attention_mask=mask, cache=cache)
    sizes = [layer.get_max_length() for layer in cache.layers]
    grows = [kind == "full_attention" for kind in model.config.layer_types]
    assert sizes == [12 if g else -1 for g in grows]


@every_mixer
def test_rows_can_be_chosen_and_forgotten(name: str) -> None:
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    nexts = torch.tensor([[3], [4], [5]])

    def after(rows: Tensor) -> Tensor:
        """Logits after the token `nexts`, of rows of the batch."""
        longer = torch.cat([ids, nexts], 1)[rows]
        full = torch.cat([mask, torch.ones_like(nexts)], 1)[rows]
        return model(longer, attention_mask=full).logits[:, -1:]

    def filled() -> DynamicCache:
        cache = DynamicCache()
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
        return cache

    with torch.no_grad():
        for how, rows in (
            (lambda c: c.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ):
            cache, chosen = filled(), torch.tensor(rows)
            how(cache)
            assert cache.batch_size == len(rows)
            found = model(nexts[chosen], cache=cache).logits
            torch.testing.assert_close(found, after(chosen), rtol=1e-9, atol=1e-9)
        cache = filled()
        cache.reset()
        assert cache.get_seq_length() == 0
        begun = model(ids, attention_mask=mask, cache=cache).logits[:, -1]
        wanted = model(ids, attention_mask=mask).logits[:, -1]
        torch.testing.assert_close(begun, wanted, rtol=1e-9, atol=1e-9)


@every_mixer
def test_a_mask_of_the_past_agrees_with_what_was_read(name: str) -> None:
    """Padding that was left out may be named again or not; a token that was read cannot be hidden,
    whatever has become of the rows since."""
    model = causal_lm(name)
    ids, mask = left_padded(*LENGTHS)
    nexts = torch.tensor([[3], [4], [5]])
    one = torch.ones_like(nexts)
    with torch.no_grad():
        wanted = model(torch.cat([ids, nexts], 1), attention_mask=torch.cat([mask, one], 1))
        for past in (mask, torch.ones_like(mask), mask[:, :0]):
            cache = model(ids, attention_mask=mask, use_cache=True).cache
            found = model(nexts, attention_mask=torch.cat([past, one], 1), cache=cache).logits
            torch.testing.assert_close(found, wanted.logits[:, -1:], rtol=1e-9, atol=1e-9)
        order = torch.tensor([2, 0, 0])
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        cache.reorder_cache(order)
        past = mask[order]
        model(nexts, attention_mask=torch.cat([past, one], 1), cache=cache)
        past = torch.cat([past, one], 1)
        past[1, 3] = 0
        with pytest.raises(ValueError, match=r"attention_mask: .*a state does not forget it; got"):
            model(nexts, attention_mask=torch.cat([past, one], 1), cache=cache)
        with pytest.raises(ValueError, match=r"expected \[B=3, T=1 or past \+ T=8\].*got \(3, 7\)"):
            model(nexts, attention_mask=past, cache=cache)
        cache.reset()
        model(ids, attention_mask=mask.flip(0), cache=cache)
        model(nexts, attention_mask=torch.cat([mask.flip(0), one], 1), cache=cache)


def test_attention_can_take_tokens_back() -> None:
    model = causal_lm("fox")
    ids, mask = left_padded(*LENGTHS)
    with torch.no_grad():
        cache = DynamicCache()
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
        for token in (7, 8):
            model(torch.full((3, 1), token), cache=cache)
        assert cache.is_croppable
        cache.crop(-2)
        assert cache.get_seq_length() == 6
        last = torch.full((3, 1), 9)
        full = torch.cat([mask, torch.ones(3, 1)], 1)
        found = model(last, cache=cache, attention_mask=full).logits[:, 0]
        wanted = model(torch.cat([ids, last], 1), attention_mask=full).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["hgrn2", "hybrid", "fox-pro"])
def test_what_cannot_be_taken_back_raises(name: str) -> None:
    model = causal_lm(name)
    cache = model(left_padded(4)[0], use_cache=True).cache
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"StateLayer: crop\(\)"):
        cache.crop(-1)


def test_errors_of_a_cache() -> None:
    model, other = causal_lm("hgrn2"), causal_lm("fox", layers=3)
    cache = other(left_padded(4)[0], use_cache=True).cache
    ids = left_padded(3)[0]
    with pytest.raises(ValueError, match="cache: expected an empty one or this model's, of 2 lay"):
        model(ids, cache=cache)
    filled = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="use_cache: expected True with a cache; got False"):
        model(ids, cache=filled, use_cache=False)
    with pytest.raises(NotImplementedError, match=r"RecurrentStateLayer: update\(\)"):
        filled.update(ids, ids, 0)
    assert model(ids).cache is not None
    assert model.train()(ids).cache is None


def test_recurrent_states_stay_where_they_are() -> None:
    """Their addresses, which CUDA graphs of a step know; in transformers' kind of layer."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    model = causal_lm("hgrn2")
    cache = DynamicCache()
    with torch.no_grad():
        model(left_padded(4)[0], cache=cache, use_cache=True)
        places = [layer.recurrent_states[0].data_ptr() for layer in cache.layers]
        for token in (3, 4):
            model(torch.tensor([[token]]), cache=cache)
        cache.reset()
        model(left_padded(4)[0], cache=cache)
    assert places == [layer.recurrent_states[0].data_ptr() for layer in cache.layers]
    assert all(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    assert all(isinstance(layer, hf.RecurrentStateLayer) for layer in cache.layers)
    assert cache.is_compileable
    assert cache.has_previous_state()


def test_a_gradient_flows_through_a_cache() -> None:
    model = causal_lm("hgrn2").train()
    ids, _ = left_padded(4)
    cache = model(ids, use_cache=True).cache
    out = model(ids[:, :1], cache=cache, use_cache=True).logits.sum()
    out.backward()
    whole = causal_lm("hgrn2").train()
    whole(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1].sum().backward()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-9)


def test_old_name_of_the_cache() -> None:
    model = causal_lm("hgrn")
    ids, _ = left_padded(5)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    found = model(ids[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits[:, 4:], rtol=1e-9, atol=1e-9)
