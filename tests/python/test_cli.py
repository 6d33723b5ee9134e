"""The command line: every command once, its messages, its exit status."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from training_cases import FLAGS, tidegate, write_text

from tidegate import _library, cli
from tidegate.cli.train import set_field
from tidegate.models import LMConfig, SequenceClassifier
from tidegate.training import stdlib_corpus

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run folder that `tidegate train` wrote."""
    out = tmp_path_factory.mktemp("trained") / "run"
    status = cli.main(
        ["train", str(text), *FLAGS, "--steps=20", "--eval-every=10", "--out", str(out), "--quiet"]
    )
    assert status == 0
    return out


def fails(capsys: pytest.CaptureFixture, *arguments: str | Path) -> str:
    """The one line that a command fails with."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert captured.out == ""
    assert line.startswith("tidegate: ")
    return line


def test_train_writes_a_run_folder(trained):
    names = {path.name for path in trained.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoint.pt", "model"} <= names
    for name in ("loss.png", "forget_gates.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG")


def test_train_says_what_it_does(tmp_path, text, capsys):
    result = tidegate("train", text, *FLAGS, "--steps=3", "--out", tmp_path / "run")
    assert "hgrn, 2 layers of 16, 9,600 parameters, fp32 on cpu" in result.stderr
    assert "bits/byte" in result.stdout
    assert cli.main(["train", "--out", str(tmp_path / "run")]) == 0
    again = capsys.readouterr()
    assert "is finished at step 3" in again.err
    assert again.out == result.stdout


def test_flags_left_out_keep_the_runs_values(trained, capsys):
    assert cli.main(["train", "--out", str(trained), "--quiet"]) == 0
    assert "is finished at step 20" in capsys.readouterr().err


def test_eval_prints_the_score_of_the_run(trained, capsys):
    assert cli.main(["eval", str(trained), "--precision=fp32", "--device=cpu", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    final = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert score["bits_per_byte"] == pytest.approx(final["bits_per_byte"], rel=1e-5)
    assert score["tokens"] == final["valid_tokens"]


def test_eval_scores_all_of_another_text(trained, tmp_path, capsys):
    other = write_text(tmp_path / "other.txt", 4001, seed=3)
    assert cli.main(["eval", str(trained), str(other), "--device=cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4000
    assert cli.main(["eval", str(trained / "model"), str(other), "--device=cpu"]) == 0
    assert "bits/byte" in capsys.readouterr().out


def test_generate_goes_on_from_the_prompt(trained, capsys):
    flags = ["--prompt=def gate", "--tokens=20", "--device=cpu"]
    assert cli.main(["generate", str(trained), *flags]) == 0
    one = capsys.readouterr().out
    assert one.startswith("def gate")
    assert cli.main(["generate", str(trained / "model"), *flags]) == 0
    assert capsys.readouterr().out == one
    assert cli.main(["generate", str(trained), *flags, "--seed=2"]) == 0
    assert capsys.readouterr().out != one


def test_a_prompt_of_any_bytes(trained, capsys):
    """Python hands over a byte that is not UTF-8 as half a surrogate pair."""
    assert cli.main(["generate", str(trained), "--prompt=caf\udce9", "--tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("caf\ufffd")


def test_generate_from_a_process_of_its_own(trained):
    result = tidegate("generate", trained, "--prompt=self", "--tokens=8", "--temperature=0")
    assert result.stdout.startswith("self")


def test_plot_draws_again(trained, capsys):
    (trained / "loss.png").unlink()
    assert cli.main(["plot", str(trained), "--device=cpu"]) == 0
    assert capsys.readouterr().out.split() == [
        str(trained / "loss.png"),
        str(trained / "forget_gates.png"),
    ]
    assert (trained / "loss.png").exists()


def test_bpe_runs_keep_their_tokenizer(tmp_path, text, capsys):
    out = str(tmp_path / "run")
    flags = ["--tokenizer=bpe:300", "--steps=4", "--quiet", "--out", out]
    assert cli.main(["train", str(text), *FLAGS, *flags]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["vocab_size"] == config["data"]["vocab_size"] <= 300
    capsys.readouterr()
    assert cli.main(["generate", out, "--prompt=def", "--tokens=5", "--device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert cli.main(["eval", out, "--device=cpu", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert score["bits_per_byte"] < score["nats_per_token"]


def test_export_refuses_a_run_s_folder(trained, tmp_path, capsys):
    """Its config.json would be the model's, and the run could not be resumed."""
    before = (trained / "config.json").read_bytes()
    lacking = tmp_path / "lacking"  # a run that has not come to its first checkpoint
    lacking.mkdir()
    (lacking / "config.json").write_bytes(before)
    for target in (trained, lacking):
        line = fails(capsys, "export", trained, target)
        assert f"export: out: {target}: expected a folder for a model; got a run" in line
        assert (target / "config.json").read_bytes() == before
        assert not (target / "model.safetensors").exists()
    assert cli.main(["train", "--out", str(trained), "--quiet"]) == 0


def test_an_exported_folder_has_nothing_of_the_model_before(trained, text, tmp_path, capsys):
    learnt, out = tmp_path / "run", tmp_path / "out"
    flags = ["--tokenizer=bpe:300", "--steps=2", "--quiet", "--out", str(learnt)]
    assert cli.main(["train", str(text), *FLAGS, *flags]) == 0
    assert cli.main(["export", str(learnt), str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (learnt / "tokenizer.json").read_bytes()
    (out / "converted_from.json").write_text("{}")
    assert cli.main(["export", str(trained), str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert cli.main(["generate", str(out), "--tokens=2", "--device=cpu"]) == 0
    # What somebody put into the run's own model/, the run replaces when it is called again.
    own = shutil.copytree(trained, tmp_path / "own")
    shutil.copyfile(learnt / "tokenizer.json", own / "model" / "tokenizer.json")
    assert cli.main(["train", "--out", str(own), "--quiet"]) == 0
    assert not (own / "model" / "tokenizer.json").exists()
    # Its own folder may have one by now: it reads bytes all the same.
    shutil.copyfile(learnt / "tokenizer.json", own / "tokenizer.json")
    assert cli.main(["export", str(own), str(out)]) == 0
    assert not (out / "tokenizer.json").exists()
    capsys.readouterr()


def test_another_tokenizer_is_another_configuration(trained, capsys):
    line = fails(capsys, "train", "--out", trained, "--tokenizer=bpe:300")
    assert "holds a run of another configuration (" in line
    assert "tokenizer: 'bytes', now 'bpe:300'" in line


def test_a_classifier_s_folder_is_said_to_be_one(tmp_path, text, capsys):
    config = LMConfig("hgrn", dim=16, layers=1, vocab_size=256, num_classes=3)
    SequenceClassifier(config).save(tmp_path / "model")
    said = f"{tmp_path / 'model'} holds a classifier; expected a language model"
    for command in (["eval", text], ["generate"]):
        line = fails(capsys, command[0], tmp_path / "model", *command[1:], "--device=cpu")
        assert line.endswith(said)
    assert fails(capsys, "convert", tmp_path / "model", tmp_path / "out").endswith(said)
    begins = ["--init-from", tmp_path / "model", "--out", tmp_path / "run"]
    assert fails(capsys, "train", text, *FLAGS, *begins).endswith(said)


def test_runs_on_token_ids_have_no_text(tmp_path, capsys):
    import numpy as np

    ids = np.random.default_rng(0).integers(0, 50, 3000).astype(np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    out = str(tmp_path / "run")
    assert (
        cli.main(["train", str(tmp_path / "ids.npy"), *FLAGS, "--steps=3", "--quiet", "--out", out])
        == 0
    )
    capsys.readouterr()
    assert "trained without text; it has no tokenizer" in fails(capsys, "generate", out)
    assert cli.main(["eval", out, "--device=cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] is None


def test_info_names_versions_and_kernels(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("tidegate", "torch", "cpu kernels", "cuda"):
        assert word in out


@pytest.fixture
def info_of(monkeypatch, capsys):
    """Runs `tidegate info` as if the build and the machine were others; what it says of CUDA."""

    def run(cuda: str, architectures: str, devices: list[tuple[str, tuple[int, int]]]) -> list[str]:
        built = {**_library.build_info(), "cuda": cuda, "architectures": architectures}
        monkeypatch.setattr(_library, "build_info", lambda: built)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: devices[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: devices[index][1])
        assert cli.main(["info"]) == 0
        lines = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("cuda kernels"))
        return lines[start:]

    return run


BUILT = ("nvcc 13.0.88", "sm_80 sm_90a compute_80")


def test_info_says_why_cuda_was_not_built(info_of):
    """Whatever devices there are."""
    why = "no nvcc in CUDACXX, CUDA_HOME or PATH (torch's CUDA is 13.0)"
    assert info_of(f"off: {why}", "", [("NVIDIA H200", (9, 0))]) == [
        "cuda kernels   not built",
        f"               not used: {why}",
    ]


@pytest.mark.parametrize(
    ("torch_cuda", "why"),
    [("13.0", "torch sees no CUDA device"), (None, "torch has no CUDA")],
)
def test_info_says_why_no_device_is_used(info_of, monkeypatch, torch_cuda, why):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    assert info_of(*BUILT, []) == [
        "cuda kernels   built for sm_80 sm_90a compute_80 by nvcc 13.0.88",
        f"               not used: {why}",
    ]


@pytest.mark.parametrize(
    ("capability", "is_used"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)]
)
def test_info_says_which_devices_are_too_old(info_of, capability, is_used):
    lines = info_of(*BUILT, [("NVIDIA X", capability)])
    said = f"NVIDIA X, compute capability {capability[0]}.{capability[1]}"
    why = "" if is_used else ": not used: the kernels need 8.0 or later"
    assert lines[1:] == [f"cuda:0         {said}{why}"]


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_info_says_which_device_has_its_kernels_compiled_at_first_use(info_of, capability):
    (_, line) = info_of(BUILT[0], "sm_90a compute_80", [("NVIDIA X", capability)])
    assert ("compiles kernels at first use" in line) == (capability[0] == 8)


def test_info_names_every_device(info_of):
    lines = info_of(*BUILT, [("NVIDIA H200", (9, 0)), ("V100", (7, 0))])
    assert lines[1:] == [
        "cuda:0         NVIDIA H200, compute capability 9.0",
        "cuda:1         V100, compute capability 7.0: not used: the kernels need 8.0 or later",
    ]


def test_bench_without_binaries_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tidegate._library.library_dir", lambda: tmp_path / "lib")
    assert "bench: no benchmark binary in" in fails(capsys, "bench")
    assert "bench: no benchmark binary in" in fails(capsys, "bench", "--models", "--size", "tiny")


def test_bench_hands_flags_on_to_the_models_program(tmp_path, capfd, monkeypatch):
    program = tmp_path / "bin" / "bench_models"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "given $*"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr("tidegate._library.library_dir", lambda: tmp_path / "lib")
    assert cli.main(["bench", "--models", "--size", "tiny", "--mixers", "fox,lru"]) == 3
    assert capfd.readouterr().out == "given --size tiny --mixers fox,lru\n"
    assert "bench: built without Google Benchmark" in fails(capfd, "bench")


def test_demo_in_short(tmp_path, capsys, monkeypatch):
    # A little of the standard library: scoring all of it takes a minute on a busy machine.
    text = Path(argparse.__file__).read_bytes()
    monkeypatch.setattr(stdlib_corpus, "load_stdlib", lambda: ([text], [text[:5000]]))
    out = tmp_path / "demo"
    assert cli.main(["demo", "--minutes=0.01", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for word in ("A sample", "order-2 byte model", "bz2 -9", "HGRN after", "bytes/s"):
        assert word in printed
    assert {"loss.png", "forget_gates.png", "config.json", "metrics.jsonl", "checkpoint.pt"} <= {
        path.name for path in out.iterdir()
    }


def test_recipes_and_presets_are_checked_by_name(tmp_path, text, capsys):
    out = str(tmp_path / "run")
    line = fails(capsys, "train", text, "--recipe=cake", "--out", out)
    assert (
        "recipe: expected one of hgrn-wikitext103, copying, mqar, fox-757m, fox-360m, demo, got"
        in line
    )
    line = fails(capsys, "train", text, "--preset=cake", "--out", out)
    assert "preset: expected one of hgrn-44m" in line
    line = fails(capsys, "train", text, "--preset=hgrn-vit-tiny", "--out", out)
    assert "hgrn-vit-tiny is an image model" in line
    assert not Path(out).exists()


def test_bad_input_is_one_line(tmp_path, text, trained, capsys):
    out = str(tmp_path / "run")
    for recipe in ([], ["--recipe=fox-360m"]):
        line = fails(capsys, "train", "--out", out, *recipe)
        assert "train: name a text file or folder" in line
        assert not Path(out).exists()
    for name, *given in (
        ("betas", "2", "3"),
        ("eps", "-1"),
        ("warmup-steps", "-3"),
        ("floor", "3"),
        ("minutes", "0"),
    ):
        line = fails(capsys, "train", text, "--out", out, f"--{name}", *given)
        assert line.startswith(f"tidegate: train: {name}: expected ")
        assert not Path(out).exists()
    line = fails(capsys, "demo", "--out", out, "--minutes", "-1")
    assert line == "tidegate: demo: minutes: expected more than 0, got -1"
    gone = tmp_path / "gone.txt"
    assert f"{gone}: no such file or folder" in fails(capsys, "train", gone, "--out", out)
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "the file is empty" in fails(capsys, "train", empty, "--out", out)
    short = write_text(tmp_path / "short.txt", 50)
    assert "is too short" in fails(capsys, "train", short, "--out", out)
    under_a_file = text / "run"
    line = fails(capsys, "train", text, "--out", under_a_file)
    assert "cannot write to the run folder" in line
    assert "another configuration" in fails(capsys, "train", "--dim=8", "--out", trained)
    assert "set: expected FIELD=JSON" in fails(capsys, "train", text, "--set=x", "--out", out)
    line = fails(capsys, "train", text, "--device=tpu", "--out", out)
    assert "device: expected cpu, cuda or cuda:N, got 'tpu'" in line
    assert "no such run folder" in fails(capsys, "eval", tmp_path / "nowhere")
    assert "saved model, which has no text of its own" in fails(capsys, "eval", trained / "model")
    assert "neither a run folder" in fails(capsys, "generate", tmp_path)
    assert "is not a run folder" in fails(capsys, "plot", tmp_path)
    line = fails(capsys, "generate", trained, "--device=cpu", "--temperature=-1")
    assert "temperature: expected >= 0" in line


def test_bad_flags_exit_with_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--steps=many"])
    assert caught.value.code == 2
    assert "invalid int value" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in ("train", "eval", "generate", "plot", "bench", "info", "demo"):
        assert name in out


def test_help_names_every_recipe_and_task(capsys):
    from tidegate.training import recipes
    from tidegate.training.tasks import TASKS

    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    words = re.findall(r"[a-z0-9-]+", re.sub(r"-\n\s+", "-", capsys.readouterr().out))
    assert {*recipes(), *TASKS} <= set(words)


def test_another_mixer_than_the_recipes_has_its_own_options(tmp_path, text):
    """The demo's preset sets an option that only HGRN has."""
    flags = ["--recipe=demo", "--mixer=hgrn2", "--dim=16", "--layers=1", "--steps=2", "--quiet"]
    flags += ["--batch-size=2", "--context=16", "--set=mixer_options.expand_ratio=8"]
    assert cli.main(["train", str(text), "--out", str(tmp_path / "run"), *flags]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert (config["mixer"], config["mixer_options"]) == ("hgrn2", {"expand_ratio": 8})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("False", False),
        ("true", True),
        ("None", None),
        ("null", None),
        ("3", 3),
        ("ugi", "ugi"),
        ("[" * 5000, "[" * 5000),
    ],
    ids=lambda v: str(v)[:9],
)
def test_set_takes_the_words_of_json_and_of_python(word, value):
    model: dict = {}
    set_field(model, f"mixer_options.x={word}")
    set_field(model, f"norm={word}")
    assert model == {"mixer_options": {"x": value}, "norm": value}
    assert type(model["norm"]) is type(value)


def test_set_refuses_what_a_field_or_option_does_not_take(capsys, text, tmp_path):
    for given, message in (
        (["mixer_options.kv_shift=no"], "kv_shift: expected True or False; got 'no'"),
        (["mixer_options.kv_shift=1"], "kv_shift: expected True or False; got 1"),
        (["tied=maybe"], "tied: expected True or False; got 'maybe'"),
        (["norm_eps=NaN"], "norm_eps: expected a number; got 'NaN'"),
        (["layers=1000000000"], "layers: expected at most 100000; got 1000000000"),
        (["mixer_options=3", "mixer_options.window=4"], "expected mixer_options to be an object"),
        (["mixer_options=3"], "train: mixer_options: expected an object of options, got 3"),
        (["mixer_options=null"], "train: mixer_options: expected an object of options, got None"),
    ):
        words = [f"--set={word}" for word in given]
        line = fails(
            capsys, "train", text, "--mixer=transformer", *words, "--out", tmp_path / "run"
        )
        assert message in line


def test_numbers_beyond_what_there_is_are_one_line(capsys, trained, tmp_path):
    """They were tracebacks; so was a model of ours read as transformers'."""
    line = fails(capsys, "generate", trained, f"--tokens={10**21}")
    assert "CausalLM.generate: max_new_tokens: expected an integer of 64 bits; got 1000" in line
    model = trained / "model"
    for size in ("nan", "inf", "-1", "0"):
        line = fails(capsys, "convert", model, tmp_path / "out", f"--shard-gb={size}")
        assert f"convert: shard-gb: expected more than 0, got {size}" in line
    line = fails(capsys, "convert", model, tmp_path / "out", "--from=hf", "--to=fla")
    assert "convert: config.json: model_type: expected 'tidegate'; got ''" in line


def test_files_that_are_not_utf8_are_named(capsys, trained, tmp_path):
    """All files but metrics.jsonl, whose lines are left out one by one."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "config.json").write_bytes((run / "config.json").read_bytes() + b"\xff")
    assert f"{run / 'config.json'}: not UTF-8 text: byte " in fails(capsys, "eval", run)
    model = tmp_path / "model"
    shutil.copytree(trained / "model", model)
    (model / "config.json").write_bytes(b"\xff")
    assert f"{model / 'config.json'}: not UTF-8 text: byte 0" in fails(capsys, "generate", model)


def test_deeply_nested_files_are_refused(capsys, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for text, name in (("[" * 100_000, "config.json"), ("[" * 100_000 + "\n{}", "metrics.jsonl")):
        before = (run / name).read_text()
        (run / name).write_text(text)
        assert str(run / name) in fails(capsys, "plot", run)
        (run / name).write_text(before)
