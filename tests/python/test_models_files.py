"""`tidegate.models`: folders that save() writes and load() reads."""

from __future__ import annotations

import pytest
import torch
from test_models import SMALL, VARIANTS, make

from tidegate.models import CausalLM


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_save_and_load(config, tmp_path):
    ids = torch.randint(0, 11, (3, 10), generator=torch.Generator().manual_seed(1))
    model = make(config, dtype=torch.float32)
    model.save(tmp_path / "a" / "b")
    loaded = CausalLM.load(tmp_path / "a" / "b")
    assert loaded.config == config
    assert not loaded.training
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.train()(ids, "next").loss.backward()
    model.save(tmp_path / "a" / "b")
    names = sorted(p.name for p in (tmp_path / "a" / "b").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_load_refuses(tmp_path):
    make(SMALL).save(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        CausalLM.load(tmp_path)
    weights.write_bytes(whole)
    config.write_text(SMALL.replace(dim=10).to_json())
    with pytest.raises(ValueError, match=r"expected \(.*10.*\) by the configuration; got \("):
        CausalLM.load(tmp_path)
    config.write_text(SMALL.replace(layers=2).to_json())
    with pytest.raises(ValueError, match="tensor 'blocks.2.* has no place in the config"):
        CausalLM.load(tmp_path)
    config.write_text(SMALL.replace(tied=False).to_json())
    with pytest.raises(ValueError, match="no tensor 'head.weight', which the configuration"):
        CausalLM.load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors: no such file"):
        CausalLM.load(tmp_path)


def test_interrupted_save_keeps_the_old(tmp_path, monkeypatch):
    model = make(SMALL)
    model.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make(SMALL, seed=2).save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
