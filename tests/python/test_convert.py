"""`tidegate convert`: other implementations' folders into ours and back, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import test_models_loaders as hgrn
import test_models_loaders_attention as attention
import test_models_loaders_hgrn2 as hgrn2
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidegate.cli import main
from tidegate.convert import convert, format_of, read_weights
from tidegate.models import CausalLM, LMConfig, loaders


def with_layers(state: dict, layers: int, make) -> dict[str, Tensor]:
    for k in range(layers):
        state |= make(f"model.layers.{k}.attn.")
    return state


def hgru2_state() -> dict[str, Tensor]:
    dim = hgrn2.DIM
    state = {"model.embed_tokens.weight": hgrn2.rand(13, dim)}
    state["model.lower_bounds"] = hgrn2.rand(3, dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    for k in range(3):
        p = f"model.layers.{k}."
        state |= hgrn2.hgru2_pytorch_state(False, False, f"{p}token_mixer.")
        for name, shape in (("l1", (10, dim)), ("l2", (10, dim)), ("l3", (dim, 10))):
            state[f"{p}channel_mixer.{name}.weight"] = hgrn2.rand(*shape)
    return state


def cases() -> dict[str, tuple[str, dict, dict, object]]:
    """For each name: format, config.json, state dict, and the loader that the model must equal."""
    torch.manual_seed(0)
    fla, fox = loaders.causal_lm_from_fla, loaders.causal_lm_from_forgetting_transformer
    config = {
        "model_type": "hgrn", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 13,
        "intermediate_size": 6, "norm_eps": 1e-6,
    }  # fmt: skip
    found = {}
    for name, changes in (("hgrn", {}), ("hgrn-tied", {"tie_word_embeddings": True})):
        found[name] = ("fla", config | changes, hgrn.fla_state(config | changes), fla)
    for given in (hgrn2.HGRN2, hgrn2.GLA):
        found[given["model_type"]] = ("fla", given, hgrn2.fla_state(given), fla)
    for k, changes in enumerate(attention.FLA_CASES):
        given = {**attention.FLA, **changes}
        state = with_layers(
            attention.frame_state(), 2, lambda p, c=given: attention.fla_layer_state(c, p)
        )
        found[f"fla-attention-{k}"] = ("fla", given, state, fla)
    for name, changes in attention.RELEASED_CASES.items():
        given = {**attention.RELEASED, **changes}
        state = with_layers(
            attention.frame_state(merged=True),
            2,
            lambda p, c=given: attention.released_layer_state(c, p),
        )
        found[f"fox-{name}"] = ("fox", given, state, fox)
    hgru2 = loaders.causal_lm_from_hgru2_pytorch
    found["hgru2-pytorch"] = ("hgru2-pytorch", dict(hgrn2.PUBLISHED), hgru2_state(), hgru2)
    return found


CASES = cases()


def folder(path: Path, config: dict, state: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.clone().contiguous() for name, t in state.items()}, path / "model.safetensors"
    )
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_there_and_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, config, state, load = CASES[name]
    state = {n: t.to(dtype) for n, t in state.items()}
    config = {**config, "bos_token_id": 5}
    source = folder(tmp_path / "theirs", config, state)
    (source / "tokenizer.json").write_text("{}")
    assert format_of(config) == kind
    convert(source, tmp_path / "ours")
    ours = CausalLM.load(tmp_path / "ours")
    wanted = load(config, state)
    assert ours.config == wanted.config
    for n, t in wanted.state_dict().items():
        assert torch.equal(ours.state_dict()[n], t), n
        assert ours.state_dict()[n].dtype == t.dtype, n
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
    convert(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(state)
    for n, t in state.items():
        assert back[n].dtype == t.dtype, n
        assert torch.equal(back[n], t), n


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("fla", {"mixer": "hgrn", "mixer_options": {"preset": "fla"}}),
        ("fla", {"mixer": "hgrn2", "mixer_options": {"preset": "fla", "num_heads": 2}}),
        ("fla", {"mixer": "gla", "mixer_options": {"num_heads": 2}, "lower_bound": "none"}),
        ("fla", {"mixer": "fox", "mixer_options": {"num_heads": 2, "qk_norm_shared": False}}),
        (
            "fox",  # whose norms of queries and keys have an epsilon of their own
            {
                "mixer": "fox-pro",
                "mixer_options": {"num_heads": 2, "qk_norm_eps": 1e-5},
                "norm_eps": 1e-6,
            },
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else v["mixer"],
)
def test_a_model_trained_here_goes_there(kind: str, config: dict, tmp_path: Path) -> None:
    sizes = {"dim": 16, "layers": 2, "vocab_size": 13, "norm": "rms", "glu_activation": "silu"}
    lm = CausalLM(LMConfig(**sizes, scale_embedding=False, **config)).eval()
    lm.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to=kind, shard_bytes=2000)
    shards = list((tmp_path / "theirs").glob("model-*.safetensors"))
    assert len(shards) > 1
    given = json.loads((tmp_path / "theirs" / "config.json").read_text())
    load = loaders.causal_lm_from_fla
    load = load if kind == "fla" else loaders.causal_lm_from_forgetting_transformer
    ids = torch.randint(0, 13, (2, 7))
    found = load(given, read_weights(tmp_path / "theirs"))
    torch.testing.assert_close(found(ids).logits, lm(ids).logits)
    convert(tmp_path / "theirs", tmp_path / "again", given=kind)
    torch.testing.assert_close(CausalLM.load(tmp_path / "again")(ids).logits, lm(ids).logits)


def test_pickled_weights(tmp_path: Path) -> None:
    _, config, state, load = CASES["hgrn"]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    torch.save(state, tmp_path / "theirs" / "pytorch_model.bin")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ids = torch.randint(0, 13, (2, 7))
    found = CausalLM.load(tmp_path / "ours")(ids).logits
    torch.testing.assert_close(found, load(config, state)(ids).logits)


def test_all_wrong_names_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    _, config, state, _ = CASES["hgrn"]
    state = dict(state)
    for lost in ("model.norm.weight", "model.layers.1.attn.i_proj.weight"):
        del state[lost]
    state |= {"one.weight": torch.ones(2), "two.weight": torch.ones(2)}
    source = folder(tmp_path / "theirs", config, state)
    wanted = (
        "no tensor model.layers.1.attn.i_proj.weight, model.norm.weight; "
        "no place for one.weight, two.weight"
    )
    with pytest.raises(ValueError, match=wanted):
        convert(source, tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]


def test_what_the_other_format_cannot_say_raises(tmp_path: Path) -> None:
    lm = CausalLM(LMConfig(mixer="hgrn", dim=16, layers=1, vocab_size=13))
    lm.save(tmp_path / "ours")
    with pytest.raises(ValueError, match="has no equal there"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="fla")
    with pytest.raises(ValueError, match="mixer: expected one of hgrn2; got 'hgrn'"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="hgru2-pytorch")
    with pytest.raises(FileExistsError, match="expected an empty or new folder"):
        convert(tmp_path / "ours", tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]
    with pytest.raises(ValueError, match="RWKV-4's language models have no counterpart"):
        format_of({"model_type": "rwkv"})
    with pytest.raises(ValueError, match="model_type: expected a model of tidegate, hf"):
        format_of({"model_type": "llama"})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, config, state, _ = CASES["hgrn"]
    source = folder(tmp_path / "theirs", config, state)
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    assert "(fla) ->" in capsys.readouterr().out
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 2
    assert "expected an empty or new folder" in capsys.readouterr().err


def test_ours_has_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, config, state, _ = CASES["hgrn"]
    source = folder(tmp_path / "theirs", config, state)
    for to in ([], ["--to=tidegate"]):
        command = ["convert", str(source), str(tmp_path / "ours"), *to, "--shard-gb=1e-9"]
        assert main(command) == 2
        line = capsys.readouterr().err
        assert "shard-gb: expected with hf, fla, fox, hgru2-pytorch only, got it with tide" in line
        assert not (tmp_path / "ours").exists()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs tidegate[hf]")
@pytest.mark.parametrize("name", ["hgrn", "hgrn-tied"])
def test_transformers_layout(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tidegate import hf

    _, config, state, load = CASES[name]
    source = folder(tmp_path / "theirs", config, {n: t.float() for n, t in state.items()})
    convert(source, tmp_path / "hf", to="hf")
    ids = torch.randint(0, 13, (2, 7))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert isinstance(found, hf.TidegateForCausalLM)
    wanted = load(config, {n: t.float() for n, t in state.items()})(ids).logits
    torch.testing.assert_close(found(ids).logits, wanted)
    convert(tmp_path / "hf", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[n], t.float()) for n, t in state.items())


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs tidegate[hf]")
def test_how_to_generate_comes_along(tmp_path: Path) -> None:
    """Whichever way a model goes, transformers knows where its texts end, and how it is sampled."""
    from transformers import AutoConfig, GenerationConfig

    _, config, state, _ = CASES["hgrn"]
    tokens = {"bos_token_id": 5, "eos_token_id": 7, "pad_token_id": 0}
    source = folder(tmp_path / "fla", {**config, **tokens}, state)
    GenerationConfig(**tokens, do_sample=True, temperature=0.7).save_pretrained(source)
    route = ("hf", "tidegate", "hf", "hf", "fla", "hf")
    for k, to in enumerate(route):
        convert(source, source := tmp_path / f"{k}-{to}", to=to)
        how = GenerationConfig.from_pretrained(source)
        assert (how.eos_token_id, how.temperature) == (7, 0.7), source
        if to == "tidegate":
            continue
        given = json.loads((source / "config.json").read_text())
        assert {name: given[name] for name in tokens} == tokens, source
    assert AutoConfig.from_pretrained(source).eos_token_id == 7
    # A model that was transformers' from the start keeps them, too, without the second file.
    for name in ("converted_from.json", "generation_config.json"):
        (source / name).unlink()
    convert(source, tmp_path / "ours", to="tidegate")
    assert not (tmp_path / "ours" / "generation_config.json").exists()
    convert(tmp_path / "ours", tmp_path / "back")
    assert GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == 7
