"""flash-linear-attention's models beside ours: `tidegate bench --models` where fla is installed."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import require_cuda

from tidegate import bench_fla


class _Model(torch.nn.Module):
    """A language model of fla's names: an embedding, layers, and a loss from ids."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        dim, wide = config.hidden_size, config.intermediate_size
        self.embedding = torch.nn.Embedding(config.vocab_size, dim)
        layers = [torch.nn.Linear(dim, wide, bias=False) for _ in range(config.num_hidden_layers)]
        self.layers = torch.nn.ModuleList(layers)


def _record(parameters: int, **more) -> dict:
    train = {"tokens_per_s": 10.0, "peak_bytes": 2**20}
    row = {"mixer": "hgrn2", "context": 16, "batch": 2, "layers": 2, "parameters": parameters}
    record = {"machine": {"device": "cuda"}, "dim": 256, "vocab_size": 64, "precision": "bf16"}
    return record | {"decode_tokens": 3, "rows": [row | {"train": train}]} | more


@pytest.mark.parametrize("wide", [64, 320, 960])
def test_a_model_of_fla_has_as_many_parameters_as_ours(monkeypatch, wide):
    module = ModuleType("fla.models")
    module.HGRN2Config, module.HGRN2ForCausalLM = SimpleNamespace, _Model
    monkeypatch.setitem(sys.modules, "fla.models", module)
    record = _record(64 * 256 + 2 * 256 * wide + 5000)
    model = bench_fla._model(record, record["rows"][0], "meta")
    assert model.config.intermediate_size == wide
    assert (model.config.num_heads, model.config.hidden_size) == (2, 256)


def test_runs_on_a_cpu_and_of_other_mixers_stay_as_they_are(tmp_path):
    path = tmp_path / "models.json"
    for record in (_record(1, machine={"device": "cpu"}), _record(1, rows=[{"mixer": "lru"}])):
        path.write_text(json.dumps(record))
        assert bench_fla.add_fla(path) == 0
        assert json.loads(path.read_text()) == record


@pytest.mark.gpu
def test_every_model_of_fla_trains_and_decodes(tmp_path, capsys):
    require_cuda()
    for name in ("fla", "transformers"):
        pytest.importorskip(name)
    path = tmp_path / "models.json"
    record = _record(600_000)
    row = record["rows"][0] | {"decode": {"token_ms": 1.0}}
    # fla's GLA has no kernel for heads this narrow on every card; the others do.
    record["rows"] = [row | {"mixer": mixer, "context": 64} for mixer in ("hgrn", "hgrn2", "fox")]
    path.write_text(json.dumps(record))
    assert bench_fla.add_fla(path) == 0, capsys.readouterr().out
    found = json.loads(path.read_text())["fla"]["rows"]
    assert [row["mixer"] for row in found] == ["hgrn", "hgrn2", "fox"]
    for row in found:
        assert row["train"]["last_loss"] < row["train"]["first_loss"]
        assert row["train"]["peak_bytes"] > 4 * row["parameters"]
        assert row["decode"]["tokens_per_s"] > 0
        assert row["decode"]["speed_of_ours"] > 0
        assert row["parameters"] == pytest.approx(600_000, rel=0.2)


@pytest.mark.gpu
def test_a_model_that_fails_is_a_row_with_its_error(tmp_path, monkeypatch):
    require_cuda()
    for name in ("fla", "transformers"):
        pytest.importorskip(name)
    monkeypatch.setattr(bench_fla, "_train", lambda *_: 1 / 0)
    path = tmp_path / "models.json"
    path.write_text(json.dumps(_record(600_000)))
    assert bench_fla.add_fla(path) == 1
    (row,) = json.loads(path.read_text())["fla"]["rows"]
    assert row["errors"] == ["ZeroDivisionError: division by zero"]
