"""tidegate.hf: the models themselves, their files, padding, packing, checkpointing, PEFT."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.hf_models import MIXERS, causal_lm, config, left_padded
from torch import Tensor

from tidegate.models import CausalLM, SequenceClassifier

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs tidegate[hf]")
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from tidegate import hf  # noqa: E402

every_mixer = pytest.mark.parametrize("name", sorted(MIXERS))


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def ids_of(batch: int, time: int, seed: int = 2) -> Tensor:
    return torch.randint(1, 40, (batch, time), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every_mixer
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init_std", [None, 0.02])
def test_a_seed_gives_what_causal_lm_has(name: str, tied: bool, init_std: float | None) -> None:
    wanted = config(name, tie_word_embeddings=tied, init_std=init_std)
    torch.manual_seed(0)
    lm = CausalLM(wanted.lm_config()).eval()
    torch.manual_seed(0)
    model = hf.TidegateForCausalLM(wanted).eval()
    assert (model.lm_head.weight is model.model.embedding.weight) == tied
    ids = ids_of(2, 9)
    assert torch.equal(model(ids).logits, lm(ids).logits)
    loss = lm(ids, labels="next").loss
    torch.testing.assert_close(model(ids, labels=ids).loss, loss)


@every_mixer
@pytest.mark.parametrize("tied", [True, False])
def test_to_and_from_causal_lm_share_parameters(name: str, tied: bool) -> None:
    model = causal_lm(name, tie_word_embeddings=tied)
    lm = model.to_causal_lm()
    assert lm.embedding.weight is model.model.embedding.weight
    ids = ids_of(2, 9)
    close(lm(ids).logits, model(ids).logits)
    back = hf.TidegateForCausalLM.from_causal_lm(lm, eos_token_id=3)
    assert back.model.embedding.weight is lm.embedding.weight
    assert (back.lm_head.weight is back.model.embedding.weight) == tied
    assert back.config.eos_token_id == 3
    close(back(ids).logits, model(ids).logits)


def test_what_no_causal_lm_has_is_not_left_out() -> None:
    untied = causal_lm("hgrn2", tie_word_embeddings=False)
    untied.set_output_embeddings(torch.nn.Linear(16, 40))
    with pytest.raises(ValueError, match=r"to_causal_lm: .*they differ by lm_head\.bias"):
        untied.to_causal_lm()
    tied = causal_lm("hgrn2")
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach() * 2)
    with pytest.raises(ValueError, match=r"to_causal_lm: .*they differ by lm_head\.weight"):
        tied.to_causal_lm()
    away = causal_lm("hgrn2")
    away.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"loaded whole; got model\.norm\.weight, .*on the meta"):
        away.to_causal_lm()


@every_mixer
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(name: str, tied: bool, tmp_path: Path) -> None:
    model = causal_lm(name, tie_word_embeddings=tied).float()
    ids = ids_of(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is hf.TidegateForCausalLM
    assert (found.lm_head.weight is found.model.embedding.weight) == tied
    assert torch.equal(found(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).lm_config() == model.config.lm_config()
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is hf.TidegateModel
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(body(ids).last_hidden_state, hidden)


@pytest.mark.parametrize("name", ["lru", "hgrn", "rwkv4", "fox"])
def test_loading_in_bf16_keeps_phases_and_bounds(name: str, tmp_path: Path) -> None:
    model = causal_lm(name).float()
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = copy.deepcopy(model).bfloat16().state_dict()
    assert {n: t.dtype for n, t in found.state_dict().items()} == {
        n: t.dtype for n, t in wanted.items()
    }
    assert all(torch.equal(t, wanted[n]) for n, t in found.state_dict().items())


def test_missing_parameters_are_drawn(tmp_path: Path) -> None:
    """A classifier from a language model's file: the body as it is there, the head new."""
    model = causal_lm("hgrn2").float()
    model.save_pretrained(tmp_path)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(found) is hf.TidegateForSequenceClassification
    body = model.model.state_dict()
    assert all(torch.equal(t, body[n]) for n, t in found.model.state_dict().items())
    assert found.score.weight.abs().max() <= 16**-0.5
    assert found.score.weight.std() > 0.05
    tensors = model.model.state_dict()
    for lost in ("blocks.0.mixer.in_proj.weight", "lower_bounds.logits", "norm.weight"):
        del tensors[lost]
    partly = hf.TidegateModel.from_pretrained(None, config=model.config, state_dict=tensors)
    assert (partly.norm.weight == 1).all()
    assert (partly.lower_bounds.logits == 0).all()
    assert 0 < partly.blocks[0].mixer.in_proj.weight.abs().max() <= 0.25
    assert torch.equal(partly.norm.bias, model.model.norm.bias)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("hgrn", "in_proj.bias"),  # beside a weight that the file has
        ("gated-rnn", "in_proj.weight"),
        ("lru", "out_proj.weight"),  # whose start the mixer says
        ("fox-pro", "output_norm.weight"),
    ],
)
def test_what_a_file_has_stays_beside_what_is_drawn(name: str, lost: str, tmp_path: Path) -> None:
    lost = f"blocks.1.mixer.{lost}"
    wide = {"dim": 64, "mixer_options": {**MIXERS[name].get("mixer_options", {})}}
    torch.manual_seed(0)
    wanted = hf.TidegateModel(config(name, **wide))
    given = wanted.state_dict()
    drawn = given.pop(lost)
    found = hf.TidegateModel.from_pretrained(None, config=wanted.config, state_dict=given)
    found = found.state_dict()
    assert all(torch.equal(found[n], t) for n, t in given.items())
    torch.testing.assert_close(found[lost].std(), drawn.std(), rtol=0.3, atol=1e-6)
    torch.testing.assert_close(found[lost].mean(), drawn.mean(), rtol=0.05, atol=0.05)


@every_mixer
def test_padding_enters_nothing(name: str) -> None:
    model = causal_lm(name)
    ids, mask = left_padded(9, 4, 1)
    right, right_mask = ids.flip(1), mask.flip(1)
    for given, kept in ((ids, mask), (right, right_mask)):
        logits = model(given, attention_mask=kept).logits
        for row in range(3):
            real = kept[row].bool()
            close(logits[row, real], model(given[row][real][None]).logits[0])
        other = torch.where(kept.bool(), given, 7)
        close(model(other, attention_mask=kept).logits, logits)


@every_mixer
def test_packed_sequences_do_not_leak(name: str) -> None:
    model = causal_lm(name)
    ids = ids_of(1, 9)
    apart = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    close(model(ids, position_ids=positions).logits, apart)
    close(model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=5).logits, apart)
    close(model(ids, cu_seqlens=bounds).logits, apart)
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    close(model(ids, seq_idx=numbers).logits, apart)
    outputs = model(ids, position_ids=positions, use_cache=True)
    assert outputs.cache is None
    close(model(ids, position_ids=torch.arange(9)[None]).logits, model(ids).logits)
    two = ids_of(2, 6)
    rows = torch.tensor([[0, 1, 0, 1, 2, 3], [5, 6, 7, 0, 1, 2]])  # the second goes on from before
    logits = model(two, position_ids=rows).logits
    for row, cut in enumerate((2, 3)):
        parts = [model(two[row : row + 1, s]).logits for s in (slice(cut), slice(cut, None))]
        close(logits[row : row + 1], torch.cat(parts, 1))


@every_mixer
def test_packed_sequences_may_be_padded(name: str) -> None:
    """Padding before, between and after what is packed, a sequence of padding alone, two rows."""
    model = causal_lm(name)
    ids = ids_of(2, 9)
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 2, 2]])
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 1, 0]])
    logits = model(ids, seq_idx=numbers, attention_mask=mask).logits
    for row in range(2):
        for k in range(3):
            real = (numbers[row] == k) & mask[row].bool()
            if real.any():
                close(logits[row, real], model(ids[row, real][None]).logits[0])
    bounds = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    first = model(ids[:1], cu_seq_lens_q=bounds, attention_mask=mask[:1]).logits
    real = mask[0].bool()
    close(first[0, real], logits[0, real])


def test_packed_sequences_have_no_cache() -> None:
    model = causal_lm("hgrn2")
    cache = model(ids_of(1, 3), use_cache=True).cache
    with pytest.raises(ValueError, match="cache: expected none with packed sequences"):
        model(ids_of(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]), cache=cache)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a batch of 1; got 2"):
        model(ids_of(2, 4), cu_seq_lens_q=torch.tensor([0, 8]))


@every_mixer
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = causal_lm(name).train()
    ids, mask = left_padded(9, 4)
    gradients = []
    for on in (False, True):
        if on:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        outputs = model(ids, attention_mask=mask, labels=ids)
        outputs.loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert outputs.cache is None
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@every_mixer
def test_peft_finds_the_projections(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = causal_lm(name)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    ids = ids_of(2, 7)
    tuned(input_ids=ids, labels=ids).loss.backward()
    found = {n: p for n, p in tuned.named_parameters() if "lora_B" in n}
    assert any("mixer.in_proj" in n for n in found)
    assert any("glu.in_proj" in n for n in found)
    idle = [n for n, p in found.items() if p.grad is None or p.grad.abs().sum() == 0]
    assert idle == []
    with pytest.raises(ValueError, match=r"merge_and_unload\(\) first"):
        model.to_causal_lm()
    whole = tuned.eval().merge_and_unload()
    close(whole.to_causal_lm()(ids).logits, whole(ids).logits)


@every_mixer
def test_blocks_whose_weights_lie_on_disk(name: str, tmp_path: Path) -> None:
    """What accelerate brings to a block when it is called, also for a step with a cache."""
    pytest.importorskip("accelerate")
    model = causal_lm(name).float()
    model.save_pretrained(tmp_path / "model")
    parts = [n for n, m in model.named_modules() if n.count(".") == 1 and n != "model.blocks"]
    places = dict.fromkeys([*parts, "model.blocks.0", "lm_head"], "cpu") | {
        "model.blocks.1": "disk"
    }
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert any(p.is_meta for p in found.model.blocks[1].parameters())
    ids, mask = left_padded(6, 2, 4)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(found(ids, attention_mask=mask).logits, wanted)
    how = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(found.generate(ids, **how), model.generate(ids, **how))


def test_hidden_states() -> None:
    model = causal_lm("fox")
    ids, mask = left_padded(5, 3)
    found = model(ids, attention_mask=mask, output_hidden_states=True)
    assert [tuple(h.shape) for h in found.hidden_states] == [(2, 5, 16)] * 3
    close(model.lm_head(found.hidden_states[-1]), found.logits)
    step = model(ids[:, :1], cache=found.cache, output_hidden_states=True)
    assert len(step.hidden_states) == 3
    embedded = model.model.embedding(ids)
    close(model(inputs_embeds=embedded, attention_mask=mask).logits, found.logits)
    last = model(ids, attention_mask=mask, logits_to_keep=2).logits
    close(last, found.logits[:, -2:])


def test_embeddings_can_be_resized() -> None:
    for tied in (True, False):
        model = causal_lm("hgrn", tie_word_embeddings=tied)
        ids = ids_of(1, 5)
        before = model(ids).logits
        model.resize_token_embeddings(50)
        assert model.config.vocab_size == 50
        close(model(ids).logits[..., :40], before)
        assert (model.lm_head.weight is model.model.embedding.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init_std", [None, 0.1])
def test_rows_that_resizing_adds_are_drawn_as_the_first_were(
    tied: bool, init_std: float | None
) -> None:
    """Without mean_resizing a model has, in the new rows, what it would have had from the start."""
    torch.manual_seed(0)
    sizes = {"tie_word_embeddings": tied, "init_std": init_std}
    model = hf.TidegateForCausalLM(config("hgrn2", **sizes))
    kept = [p.detach().clone() for p in model.model.blocks.parameters()]
    model.resize_token_embeddings(4000, mean_resizing=False)
    wanted = hf.TidegateForCausalLM(config("hgrn2", **sizes, vocab_size=4000))
    for part in ("get_input_embeddings", "get_output_embeddings"):
        mine, theirs = (getattr(m, part)().weight[40:].std() for m in (model, wanted))
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.0)
    assert all(map(torch.equal, kept, model.model.blocks.parameters()))


@every_mixer
def test_classifier_pools_what_is_real(name: str) -> None:
    torch.manual_seed(0)
    model = hf.TidegateForSequenceClassification(config(name, num_labels=3)).double().eval()
    ids, mask = left_padded(9, 4, 1)
    logits = model(ids, attention_mask=mask).logits
    alone = [model(ids[r : r + 1, 9 - n :]).logits for r, n in enumerate((9, 4, 1))]
    close(logits, torch.cat(alone))
    close(model(ids).logits, logits)  # by pad_token_id
    packed = torch.cat([ids[r, 9 - n :] for r, n in enumerate((9, 4, 1))])[None]
    bounds = torch.tensor([0, 9, 13, 14])
    close(model(packed, cu_seq_lens_q=bounds).logits, logits)
    begin_anew = torch.cat([torch.arange(n) for n in (9, 4, 1)])[None]
    close(model(packed, position_ids=begin_anew).logits, logits)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 4, 1]))[None]
    close(model(packed, seq_idx=numbers).logits, logits)
    numbers = torch.arange(3)[:, None].expand(3, 9)
    for of_padding in (-1, 0):  # what the rows' padding, which is no sequence, is numbered
        numbered = torch.where(mask.bool(), numbers, of_padding)
        close(model(ids, attention_mask=mask, seq_idx=numbered).logits, logits)
    labels = torch.tensor([2, 0, 1])
    loss = model(ids, attention_mask=mask, labels=labels).loss
    close(loss, torch.nn.functional.cross_entropy(logits, labels))


def test_classifier_is_sequence_classifier() -> None:
    wanted = config("hgrn", tie_word_embeddings=False, num_labels=3)
    ours = SequenceClassifier(wanted.lm_config().replace(num_classes=3)).eval()
    model = hf.TidegateForSequenceClassification(wanted).eval()
    body = {n: t for n, t in ours.state_dict().items() if not n.startswith("head")}
    model.model.load_state_dict(body)
    model.score.load_state_dict(ours.head.state_dict())
    ids = ids_of(3, 8)
    lengths = torch.tensor([8, 3, 5])
    mask = (torch.arange(8) < lengths[:, None]).long()
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits, ours(ids, lengths=lengths).logits
    )


def test_configuration_refuses_what_lm_config_does() -> None:
    with pytest.raises(ValueError, match="LMConfig: mixer: 'mamba' is unknown"):
        hf.TidegateConfig(mixer="mamba")
    with pytest.raises(ValueError, match="dropout: expected 0 <= p < 1"):
        hf.TidegateConfig(dropout=1.5)
    given = hf.TidegateConfig(hidden_size=32, num_hidden_layers=3, mixer=["hgrn", "fox", "lru"])
    assert (given.dim, given.layers, given.hidden_size) == (32, 3, 32)
    assert given.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert hf.TidegateConfig.from_lm_config(given.lm_config()).to_dict() == given.to_dict()


def test_a_folder_of_causal_lm_is_not_read_as_one_of_transformers(tmp_path: Path) -> None:
    """Its head has another name there, and would be drawn, or tied to the embedding."""
    causal_lm("hgrn2", tie_word_embeddings=False).to_causal_lm().save(tmp_path)
    with pytest.raises(ValueError, match="tied: expected tie_word_embeddings.*tidegate convert"):
        hf.TidegateForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tied: expected tie_word_embeddings.*got tied=False"):
        hf.TidegateConfig(tied=False)


def test_errors_name_the_argument() -> None:
    model = causal_lm("hgrn")
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="Classification: expected either input_ids or inputs_emb"):
        hf.TidegateForSequenceClassification(config("hgrn"))()
    ids = ids_of(1, 4)
    for columns in (3, 5):
        with pytest.raises(ValueError, match=r"attention_mask: expected \[B=1, T=4\] of 1"):
            model(ids, attention_mask=torch.ones(1, columns))
    with pytest.raises(ValueError, match=r"seq_idx: expected \[B=1, T=4\]; got \(4,\)"):
        model(ids, seq_idx=torch.tensor([0, 0, 1, 1]))
    for given in ("cache", "past_key_values"):
        with pytest.raises(TypeError, match="cache: expected a Cache of transformers, .*got tuple"):
            model(ids, **{given: ((ids, ids), (ids, ids))})


def test_a_run_s_folder_is_not_written_over(tmp_path: Path) -> None:
    """Its config.json is the run's, which could not be resumed without."""
    (tmp_path / "config.json").write_text('{"model": {}, "train": {}}')
    message = r"TidegateForCausalLM.save_pretrained: .*: expected a folder for a model; got a run"
    model = causal_lm("hgrn")
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_importing_tidegate_imports_no_transformers() -> None:
    code = "import sys, tidegate; assert 'transformers' not in sys.modules; print('fine')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "fine\n"


def test_a_program_that_knows_only_transformers_loads_it(tmp_path: Path) -> None:
    """It loads by trust_remote_code, as lm_eval does; what is saved again is loaded again."""
    model = hf.TidegateForCausalLM(config("hgrn2", layers=1))
    model.save_pretrained(tmp_path / "one")
    code = f"""
import sys
from transformers import AutoModelForCausalLM
assert "tidegate" not in sys.modules
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "one")!r}, trust_remote_code=True)
assert type(model).__module__ == "tidegate.hf.model", type(model).__module__
model.save_pretrained({str(tmp_path / "two")!r})
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    names = [sorted(p.name for p in (tmp_path / f).iterdir()) for f in ("one", "two")]
    assert names[0] == names[1]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
