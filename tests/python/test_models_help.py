"""What a newcomer does to models and meets a sentence that says which call was meant."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from training_cases import environment

from tidegate.convert import convert
from tidegate.models import CausalLM, LMConfig, loaders, presets

SMALL = LMConfig("transformer", dim=16, layers=1, vocab_size=11, norm="rms", tied=False)
SMALL = SMALL.replace(glu_activation="silu")


def test_a_preset_that_is_not_there_names_those_near():
    with pytest.raises(KeyError) as caught:
        presets()["hgrn-44M"]
    assert str(caught.value).startswith("presets: expected 'hgrn-44m' or ")
    assert str(caught.value).endswith("; got 'hgrn-44M'")
    with pytest.raises(KeyError, match=r"presets: expected one of hgrn-44m, .*; got 'gpt'"):
        presets()["gpt"]
    assert "gpt" not in presets()
    assert presets().get("gpt") is None


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[CausalLM, Path]:
    """A model, and its checkpoint in flash-linear-attention's form."""
    model = CausalLM(SMALL)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="fla")
    return model, tmp_path / "theirs"


def test_loaders_take_folders_modules_and_configuration_objects(theirs):
    model, folder = theirs
    config = json.loads((folder / "config.json").read_text())

    class Configuration:  # as transformers' are
        def to_dict(self) -> dict:
            return dict(config)

    class Model(torch.nn.Module):
        config = Configuration()

        def state_dict(self, *_args, **_keywords) -> dict:
            return tensors()

    def tensors() -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors")

    for arguments in (
        (folder,),
        (str(folder),),
        (Model(),),
        (config, tensors()),
        (Configuration(), tensors()),
        (folder, tensors()),
        (config, Model()),
        (folder / "config.json", tensors()),
    ):
        found = loaders.causal_lm_from_fla(*arguments)
        for name, t in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], t), name
    assert loaders.config_from_fla(folder) == loaders.config_from_fla(Configuration())
    with pytest.raises(ValueError, match=r"config_from_fla: config: expected a folder, .* a int"):
        loaders.config_from_fla(3)
    with pytest.raises(ValueError, match=r"state_dict: expected tensors by name or a module"):
        loaders.causal_lm_from_fla(config, [1])
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
        loaders.causal_lm_from_fla(folder.parent)


def test_load_says_which_call_reads_another_folder(theirs, tmp_path):
    _, folder = theirs
    with pytest.raises(ValueError, match=r"model_type 'transformer'.*`tidegate convert` or"):
        CausalLM.load(folder)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "tidegate"}')
    with pytest.raises(ValueError, match=r"tidegate.hf.TidegateForCausalLM.from_pretrained"):
        CausalLM.load(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").touch()
    message = r"got a run: its model is in .*model, and tidegate.training.load_trained\(\)"
    with pytest.raises(ValueError, match=message):
        CausalLM.load(tmp_path / "run")
    (tmp_path / "several" / "checkpoints" / "step-4").mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        CausalLM.load(tmp_path / "several")


@pytest.mark.parametrize("kind", ["one process", "several", "without a checkpoint"])
def test_save_refuses_a_run_s_folder(kind, tmp_path):
    """Its config.json is the run's, which could not be resumed without."""
    if kind == "one process":
        (tmp_path / "checkpoint.pt").touch()
    elif kind == "several":
        (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    else:
        (tmp_path / "config.json").write_text('{"model": {}, "train": {}}')
    before = sorted(p.name for p in tmp_path.iterdir())
    model = CausalLM(LMConfig("hgrn", dim=8, layers=1, vocab_size=11))
    message = r"CausalLM.save: .*: expected a folder for a model; got a run, .* in .*model, where"
    with pytest.raises(ValueError, match=message):
        model.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    model.save(tmp_path / "model")
    model.save(tmp_path / "model")


SHARDED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tidegate.models import CausalLM, LMConfig
import tidegate

tidegate.models.loaders.causal_lm_from_fla  # is reached without an import of its own
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = CausalLM(LMConfig("hgrn", dim=8, layers=1, vocab_size=11))
whole = {name: t.clone() for name, t in model.state_dict().items()}
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
for call in (lambda: model.save(sys.argv[1]), lambda: model.generate(torch.zeros(1, 2).long(), 2)):
    try:
        call()
    except ValueError as error:
        print(error)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
model.save(sys.argv[1], state_dict=get_model_state_dict(model, options=options))
found = CausalLM.load(sys.argv[1]).state_dict()
assert all(torch.equal(found[name], t) for name, t in whole.items())
dist.destroy_process_group()
"""


@pytest.mark.xdist_group("ranks")
def test_a_sharded_model_names_the_remedy(tmp_path, ranks):
    command = [ranks.python, "-c", SHARDED, tmp_path / "model"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    save, generate = result.stdout.splitlines()
    message = r"CausalLM\.(save|generate): \S+: expected a whole tensor; got a sharded one"
    for said in (save, generate):
        assert re.search(message, said)
        assert "get_model_state_dict" in said
