"""What `tidegate train` does with what a newcomer types: defaults, names, weights to begin with."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from training_cases import FLAGS, write_text

from tidegate import cli
from tidegate.models import CausalLM, LMConfig, mixers, presets
from tidegate.training import TrainConfig, load_trained, recipes, report
from tidegate.training.tasks import TASKS

pytestmark = pytest.mark.xdist_group("cli newcomer")
TINY = ["--dim=16", "--layers=1", "--batch-size=2", "--context=16", "--device=cpu", "--threads=1"]
TINY += ["--precision=fp32", "--quiet"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def train(out: Path, data: Path | str, *flags: str) -> dict:
    """Trains in a new folder; what its config.json says."""
    assert cli.main(["train", str(data), *TINY, "--steps=2", "--out", str(out), *flags]) == 0
    return json.loads((out / "config.json").read_text())


def fails(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line that a command fails with."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_lists_have_every_name(capsys):
    named = {"mixers": mixers(), "presets": presets(), "recipes": recipes(), "tasks": TASKS}
    for what, expected in named.items():
        assert cli.main(["list", what]) == 0
        rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert [name for name, _ in rows] == list(expected)
        assert all(about for _, about in rows)


def test_help_shows_defaults_and_names(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in (*mixers(), *presets(), *recipes()):
        assert re.search(rf"[ ,]{re.escape(name)}[ ,]", said), name
    for flag, value in (
        ("--mixer MIXER", LMConfig().mixer),
        ("--dim DIM", LMConfig().dim),
        ("--lr LR", TrainConfig.lr),
        ("--betas BETAS BETAS", "0.9 0.98"),
        ("--schedule SCHEDULE", TrainConfig.schedule),
        ("--steps STEPS", "1000, without --minutes"),
        ("--eval-tokens EVAL_TOKENS", TrainConfig.eval_tokens),
    ):
        about = said[said.rindex(f"{flag} ") :]
        assert re.search(r"\(default: ([^)]*)\)", about).group(1) == str(value), flag


def test_the_command_and_the_library_have_one_default_model(tmp_path, text):
    config = train(tmp_path / "run", text)["model"]
    assert config == LMConfig(dim=16, layers=1).to_dict()


def test_a_presets_vocabulary_is_that_of_the_text(tmp_path, text):
    """50,265 rows of which bytes use 256 would be five sixths of a small model."""
    size = train(tmp_path / "bytes", text, "--preset=hgrn-44m")["model"]["vocab_size"]
    assert size == 256
    flags = ("--preset=hgrn-44m", "--tokenizer=bpe:300")
    config = train(tmp_path / "bpe", text, *flags)
    assert config["model"]["vocab_size"] == config["data"]["vocab_size"] <= 300
    assert train(tmp_path / "bpe", text, *flags) == config  # the same command goes on with it
    flags = ("--preset=hgrn-44m", "--vocab-size=1000")
    assert train(tmp_path / "asked", text, *flags)["model"]["vocab_size"] == 1000


def test_a_cuda_graph_on_a_cpu_is_refused(tmp_path, text, capsys):
    out = tmp_path / "run"
    line = fails(capsys, "train", text, *TINY, "--cuda-graph", "--out", out)
    assert "cuda-graph: expected a CUDA device, which steps are replayed on, got cpu" in line
    assert not out.exists()


def test_a_recipe_that_asks_for_cuda_graphs_says_so_on_a_cpu(tmp_path, capsys):
    flags = ["--steps=1", "--dim=16", "--layers=1", "--set=mixer_options.expand_ratio=16"]
    flags += ["--task-option=length=32", "--task-option=vocabulary=16", "--batch-size=2"]
    flags += ["--task-option=train_examples=8", "--device=cpu", "--quiet", "--threads=1"]
    assert cli.main(["train", "--recipe=mqar", *flags, "--out", str(tmp_path / "run")]) == 0
    assert "without a CUDA device no step is replayed" in capsys.readouterr().err


def test_runs_validate_on_the_way(tmp_path, text):
    """Without it loss.png would have a point where a curve belongs."""

    def kinds(folder: Path) -> list[tuple[str, int]]:
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(row["kind"], row["step"]) for row in rows if row["kind"] != "train"]

    train(tmp_path / "run", text, "--steps=20", "--eval-tokens=64")
    assert kinds(tmp_path / "run") == [("valid", n) for n in range(2, 20, 2)] + [("final", 20)]
    train(tmp_path / "end", text, "--steps=20", "--eval-every=0")
    assert kinds(tmp_path / "end") == [("final", 20)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run with a tokenizer, and its model/."""
    out = tmp_path_factory.mktemp("begun") / "run"
    train(out, text, "--tokenizer=bpe:300")
    return out


@pytest.mark.parametrize("place", [".", "model"])
def test_a_run_begins_with_the_weights_of_another(tmp_path, text, begun, place, capsys):
    source, out = begun / place, tmp_path / "run"
    flags = ["--init-from", str(source), "--lr=1e-30", "--weight-decay=0"]
    values = train(out, text, *flags)
    assert f"it begins with the weights of {source.resolve()}" in capsys.readouterr().err
    given, found = load_trained(str(source)), load_trained(str(out))
    assert found.model.config == given.model.config
    assert (out / "tokenizer.json").read_bytes() == (begun / "tokenizer.json").read_bytes()
    for name, t in given.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], t, msg=name)
    assert values["train"]["init_from"] == str(source.resolve())
    assert train(out, text, *flags) == values  # started again
    assert train(out, text) == values


def test_a_run_outlives_the_weights_that_it_began_with(tmp_path, text, capsys):
    """Gates are drawn without those before training where nobody knows them any more."""
    source, out = tmp_path / "begun", tmp_path / "run"
    train(source, text)
    flags = ["--init-from", str(source), "--lr=1e-30"]
    values = train(out, text, *flags)
    assert "drawn without" not in capsys.readouterr().err
    assert train(out, text, "--steps=3")["initial_weights"] == values["initial_weights"]

    def drawn() -> str:
        """What is said while the gates are drawn."""
        (out / "forget_gates.png").unlink()
        capsys.readouterr()
        assert cli.main(["plot", "gates", str(out), "--device=cpu"]) == 0
        assert (out / "forget_gates.png").exists()
        return capsys.readouterr().err

    assert drawn() == ""
    train(source, text, "--steps=4")  # it goes on, and holds other weights
    other = f"init-from: {source} holds other weights than the run began with"
    assert drawn() == f"forget_gates.png: drawn without the gates before training: {other}\n"
    (config := out / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if k != "initial_weights"})
    )
    assert drawn() == ""  # a run of an earlier version, which noted nothing
    shutil.rmtree(source)
    assert f"{source}: no such folder" in drawn()
    train(out, text, "--steps=5")
    assert f"{source}: no such folder" in capsys.readouterr().err
    values["initial_weights"] = "x"
    config.write_text(json.dumps(values))
    assert "initial_weights: expected an integer" in fails(capsys, "plot", out)


def test_a_run_ends_well_whose_text_is_gone(tmp_path, monkeypatch, capsys):
    """Its losses are drawn without it, and the gates, which are looked at on it, are not."""
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    scored = report.finish

    def finish(run):
        text.unlink()
        return scored(run)

    monkeypatch.setattr(report, "finish", finish)
    train(out, text)
    said = capsys.readouterr()
    assert said.out.startswith("validation: ")
    assert re.search(r"forget_gates.png: not drawn: .*text.txt: no such file", said.err)
    assert (out / "loss.png").exists()
    assert not (out / "forget_gates.png").exists()
    assert "no such file" in fails(capsys, "plot", "gates", out)


def test_a_run_begins_with_a_checkpoint_from_elsewhere(tmp_path, text):
    from tidegate.convert import convert

    model = CausalLM(
        LMConfig("transformer", dim=16, layers=1, norm="rms", glu_activation="silu", tied=False)
    )
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="fla")
    flags = ["--init-from", str(tmp_path / "theirs"), "--lr=1e-30", "--weight-decay=0"]
    train(tmp_path / "run", text, *flags, "--tokenizer=bytes")
    found = load_trained(str(tmp_path / "run")).model.state_dict()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(found[name], t, msg=name)


def test_one_option_of_the_mixer_keeps_the_others(tmp_path, text):
    """--set mixer_options.x=... over the configuration that --init-from names, or a run's own."""
    options = {"num_heads": 2, "gate_temperature": 8.0}
    config = LMConfig("gla", dim=16, layers=1, vocab_size=256, mixer_options=options)
    CausalLM(config).save(tmp_path / "begun")
    begins = [f"--init-from={tmp_path / 'begun'}", "--set=mixer_options.gate_temperature=4.0"]
    wanted = {"num_heads": 2, "gate_temperature": 4.0}
    assert train(tmp_path / "run", text, *begins)["model"]["mixer_options"] == wanted
    again = train(tmp_path / "run", text, "--set=mixer_options.gate_temperature=4.0")
    assert again["model"]["mixer_options"] == wanted


def test_weights_that_do_not_fit_are_refused(tmp_path, text, begun, capsys):
    out = tmp_path / "run"
    command = ["train", text, *FLAGS, "--quiet", "--out", out, "--init-from"]
    assert "init-from: " in (line := fails(capsys, *command, tmp_path / "none"))
    assert line.endswith("none: no such folder")
    assert "config.json: no such file" in fails(capsys, *command, tmp_path)
    line = fails(capsys, "train", text, "--dim=32", "--out", out, "--init-from", begun)
    assert "does not fit the model: " in line
    CausalLM(LMConfig(dim=16, layers=1, vocab_size=300)).save(tmp_path / "bare")
    line = fails(capsys, "train", text, "--out", out, "--init-from", tmp_path / "bare")
    assert "has no tokenizer.json, and its vocabulary is 300, not that of bytes" in line
    assert not out.exists()


GOOGLE = """#!{python}
import json, re, sys
given = dict(word.removeprefix("--benchmark_").split("=", 1) for word in sys.argv[1:])
names = [n for n in {names} if re.search(given.get("filter", "."), n)]
if not names:
    print("Failed to match any benchmarks against regex", file=sys.stderr)
    sys.exit(1 if "{kind}" == "strict" else 0)
if "list_tests" in given:
    print("\\n".join(names))
    sys.exit()
print("\\n".join(f"{{n}} 3 us" for n in names))
rows = [{{"name": n, "real_time": 3.0, "time_unit": "us"}} for n in names]
with open(given["out"], "w") as file:
    json.dump({{"context": {{"host_name": "here"}}, "benchmarks": rows}}, file)
"""


@pytest.fixture
def programs(request, tmp_path, monkeypatch) -> Path:
    """A build tree with benchmark programs that measure nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    found = {"bench_kernels": ["scan/cpu", "gla/cpu"], "bench_ops": ["ops/cpu/hgru"]}
    scripts = {
        name: GOOGLE.format(
            python=sys.executable, names=names, kind=getattr(request, "param", "strict")
        )
        for name, names in found.items()
    }
    scripts["bench_models"] = '#!/bin/sh\necho models/fox\necho "given $*"\n'
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setattr("tidegate._library.library_dir", lambda: tmp_path / "lib")
    return tmp_path


def test_bench_lists_filters_and_writes(programs, capfd, monkeypatch):
    monkeypatch.chdir(programs)
    assert cli.main(["bench", "--list"]) == 0
    listed = capfd.readouterr().out.split()
    assert listed[:4] == ["scan/cpu", "gla/cpu", "ops/cpu/hgru", "models/fox"]
    assert cli.main(["bench", "--list", "hgru"]) == 0
    assert capfd.readouterr().out.split() == ["ops/cpu/hgru"]
    assert cli.main(["bench", "cpu", "--json=out.json", "--plot=out.svg"]) == 0
    said = capfd.readouterr()
    assert "3 benchmarks, about 4 s" in said.err
    assert "== bench_kernels" in said.out
    record = json.loads(Path("out.json").read_text())
    assert [b["name"] for b in record["benchmarks"]] == ["scan/cpu", "gla/cpu", "ops/cpu/hgru"]
    assert Path("out.svg").read_text().startswith("<?xml")
    assert cli.main(["bench", "hgru"]) == 0
    assert "bench_kernels" not in capfd.readouterr().out


# Old and new versions of Google Benchmark end in these two ways.
@pytest.mark.parametrize("programs", ["lax", "strict"], indirect=True)
def test_a_filter_that_matches_nothing_fails(programs, capsys):
    line = fails(capsys, "bench", "mamba")
    assert "bench: filter: expected part of a benchmark's name" in line
    assert "got 'mamba', which none has" in line
    assert "got 'mamba'" in fails(capsys, "bench", "--list", "mamba")


def test_bench_of_models_draws_what_it_measured(programs, capfd):
    row = {"mixer": "fox", "context": 256, "batch": 2, "decode": {"tokens_per_s": 5.0}}
    row |= {"train": {"tokens_per_s": 9.0, "peak_bytes": 2**30}}
    record = {"rows": [row], "machine": {"name": "a CPU"}, "size": "tiny", "precision": "fp32"}
    record["fla"] = {"version": "0.6.0", "rows": [row]}
    (programs / "record.json").write_text(json.dumps({**record, "tokens": 512}))
    script = f'#!/bin/sh\necho "given $*"\ncp {programs}/record.json "${{@: -1}}"\n'
    (programs / "bin" / "bench_models").write_text(script.replace("/bin/sh", "/bin/bash"))
    picture, kept = programs / "models.png", programs / "kept.json"
    assert cli.main(["bench", "--models", "--dim", "8", "--no-fla", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capfd.readouterr().out
    assert out.startswith("given --dim 8 --json ")
    assert cli.main(["bench", "--models", f"--plot={picture}", "--json", str(kept)]) == 0
    assert capfd.readouterr().out.startswith(f"given --json {kept}\n")
    assert cli.main(["bench", "--models", "--plot"]) == 2
