"""tidegate.lm_eval: the harness's three questions, its command, and `tidegate eval --tasks`."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tidegate.cli import main
from tidegate.models import CausalLM, LMConfig
from tidegate.training.errors import UserError
from tidegate.training.tokenizers import ByteTokenizer
from tidegate.training.trained import Trained

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-hf.txt)")

from tidegate.lm_eval import TidegateLM  # noqa: E402
from tidegate.lm_eval import model as ours  # noqa: E402

pytestmark = pytest.mark.xdist_group("lm_eval")

MIXERS = ("hgrn2", "fox", "rwkv4")
TASK = """
task: tide_choice
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
ROLLING = """
task: tide_text
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: byte_perplexity
"""
WRITING = """
task: tide_writing
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""


def request(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def make(mixer: str = "hgrn2", **options: object) -> TidegateLM:
    torch.manual_seed(1)
    config = LMConfig(mixer, vocab_size=256, dim=32, layers=2, init_std=0.3)
    trained = Trained(CausalLM(config).eval(), ByteTokenizer(), None)
    return TidegateLM(trained=trained, precision="fp32", **options)


def expected(lm: TidegateLM, context: str, continuation: str) -> tuple[float, bool]:
    """log p of the continuation, from one whole forward pass."""
    ids = torch.tensor([[*context.encode(), *continuation.encode()]])
    with torch.no_grad():
        logs = F.log_softmax(lm.model(ids[:, :-1]).logits.double(), -1)[0]
    n = len(continuation.encode())
    target = ids[0, -n:]
    picked = logs[-n:].gather(1, target[:, None]).sum()
    return float(picked), bool((logs[-n:].argmax(-1) == target).all())


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("batch_size", ["auto", 2])
def test_loglikelihood(mixer: str, batch_size: object) -> None:
    lm = make(mixer, batch_size=batch_size)
    pairs = [("the tide", " turns"), ("a", "b"), ("", "at noon"), ("the moon pulls", " the sea")]
    found = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        wanted = expected(lm, context or "\n", continuation)
        assert score == pytest.approx(wanted[0], abs=1e-3)
        assert greedy == wanted[1]


def test_a_text_that_begins_with_a_line_end_is_scored_from_there() -> None:
    """A line end stands before every text, and is no mark of its beginning where it is its own."""
    lm = make()
    for text in ("\nat noon", "\n"):
        (answer,) = lm.loglikelihood([request("", text)], disable_tqdm=True)
        assert answer[0] == pytest.approx(expected(lm, "\n", text)[0], abs=1e-3)
        assert lm.loglikelihood_rolling([request(text)], disable_tqdm=True) == [answer[0]]
    (marked,) = make(prefix_token_id=2).loglikelihood([request("", "\x02a")], disable_tqdm=True)
    assert marked[0] == pytest.approx(expected(lm, "\x02", "a")[0], abs=1e-3)


def test_loglikelihood_says_what_is_likeliest() -> None:
    lm = make()
    with torch.no_grad():
        best = lm.model(torch.tensor([list(b"the tide")])).logits[0, -1].argmax()
    text = bytes([int(best) & 127]).decode()
    (answer,) = lm.loglikelihood([request("the tide", text)], disable_tqdm=True)
    assert answer[1] == (int(best) < 128)


def test_max_length_cuts_contexts_from_the_left() -> None:
    lm = make(max_length=6)
    (cut,) = lm.loglikelihood([request("abcdefgh", "xyz")], disable_tqdm=True)
    assert cut[0] == pytest.approx(expected(lm, "efgh", "xyz")[0], abs=1e-4)


def test_a_continuation_beyond_max_length_is_refused() -> None:
    """Its first tokens would be left out of the score."""
    lm = make(max_length=3)
    (whole,) = lm.loglikelihood([request("abc", "xyz")], disable_tqdm=True)
    assert whole[0] == pytest.approx(expected(lm, "c", "xyz")[0], abs=1e-4)
    with pytest.raises(UserError, match="max_length: expected 4 or more, .* got 3"):
        lm.loglikelihood([request("a", "b"), request("abc", "wxyz")], disable_tqdm=True)


def test_a_context_of_white_space_is_scored_with_the_continuation() -> None:
    """lm_eval moves it there, and the context is what comes before any text."""
    lm = make()
    pairs = [(" ", "turns"), (" \n ", "a"), (" ", "")]
    found = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        wanted = expected(lm, "\n", context + continuation)
        assert score == pytest.approx(wanted[0], abs=1e-3)
        assert greedy == wanted[1]


def test_max_length_cuts_what_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are cut to as many tokens as it says: to continue them, all of them are read."""
    lm = make(max_length=6)
    read = []
    prefill = CausalLM.prefill
    monkeypatch.setattr(
        CausalLM, "prefill", lambda m, ids, *a, **k: (read.append(ids), prefill(m, ids, *a, **k))[1]
    )
    lm.generate_until([request("abcdefgh", {"until": [], "max_gen_toks": 2})], disable_tqdm=True)
    assert read[0].tolist() == [list(b"cdefgh")]


def test_an_empty_continuation_is_certain() -> None:
    for pairs in (
        [("the tide", "")],
        [("the tide", ""), ("a", "b")],
        [("a", ""), ("b", "")],
        [("", "")],
        [("", ""), ("a", "b"), ("", "")],
    ):
        found = make().loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
        for (_, continuation), answer in zip(pairs, found, strict=True):
            assert (answer == (0.0, True)) == (continuation == "")


@pytest.mark.parametrize("mixer", MIXERS)
def test_rolling_carries_the_state(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 16 tokens, of which none is read twice, are what one pass over the text gives."""
    monkeypatch.setattr(ours, "PIECE", 16)
    lm = make(mixer)
    text = "the tide turns twice a day, and nobody asks it to."
    read = []
    embed = CausalLM._embed
    monkeypatch.setattr(
        CausalLM, "_embed", lambda m, ids: (read.append(ids.numel()), embed(m, ids))[1]
    )
    scores = lm.loglikelihood_rolling([request(t) for t in (text, "short", "")], disable_tqdm=True)
    assert sum(read) == len(text) + len("short")
    assert scores[2] == 0.0
    for score, t in zip(scores, (text, "short"), strict=False):
        assert score == pytest.approx(expected(lm, "\n", t)[0], abs=1e-3)


def test_rolling_equals_the_sliding_window_where_both_are_defined() -> None:
    """lm_eval's windows, of which a text no longer than the window has one."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    lm = make()
    text = "the tide turns twice a day"
    windows = get_rolling_token_windows(lm.tok_encode(text), lm.prefix_token_id, 64, 1)
    pairs = [make_disjoint_window(window) for window in windows]
    sliding = sum(s for s, _ in lm._loglikelihood_tokens([(None, *p) for p in pairs], True))
    (score,) = lm.loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert score == pytest.approx(sliding, abs=1e-4)


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate_until(mixer: str) -> None:
    """Contexts of unequal lengths in one batch; the text ends before a stop, or after enough."""
    lm = make(mixer)
    contexts = ["the tide", "a", "the moon pulls the sea"]
    arguments = {"until": [], "max_gen_toks": 12}
    whole = lm.generate_until([request(c, arguments) for c in contexts], disable_tqdm=True)
    for context, text in zip(contexts, whole, strict=True):
        ids = torch.tensor([list(context.encode())])
        alone = lm.model.generate(ids, 12, temperature=0.0)[0, ids.size(1) :]
        assert text == bytes(alone.tolist()).decode(errors="replace")
    stop = whole[0][3:5]
    stopped = {"until": [stop], "max_gen_toks": 12}
    (text,) = lm.generate_until([request(contexts[0], stopped)], disable_tqdm=True)
    assert text == whole[0][: whole[0].index(stop)]


def test_a_repetition_penalty_acts_without_draws() -> None:
    lm = make()
    ids = torch.tensor([list(b"the tide")])
    arguments = {"until": [], "max_gen_toks": 12, "do_sample": False, "repetition_penalty": 2.0}
    (text,) = lm.generate_until([request("the tide", arguments)], disable_tqdm=True)
    plain, wanted = (
        bytes(lm.model.generate(ids, 12, temperature=0.0, repetition_penalty=p)[0, 8:].tolist())
        for p in (1.0, 2.0)
    )
    assert text == wanted.decode(errors="replace") != plain.decode(errors="replace")


def test_draws_are_drawn_where_a_task_asks_for_them() -> None:
    lm = make()
    arguments = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.5, "seed": 3}
    one, two = (
        lm.generate_until([request("the tide", arguments)], disable_tqdm=True)[0] for _ in range(2)
    )
    greedy = {"until": [], "max_gen_toks": 16}
    assert one == two != lm.generate_until([request("the tide", greedy)], disable_tqdm=True)[0]


def test_a_number_of_tokens_has_lm_eval_s_names() -> None:
    lm = make()
    asked = [{"until": [], name: 5} for name in ours._COUNTS]
    asked.append({"until": [], "max_gen_toks": 5, "max_tokens": 9, "num_beams": 1})
    found = lm.generate_until([request("the tide", a) for a in asked], disable_tqdm=True)
    ids = lm.model.generate(torch.tensor([list(b"the tide")]), 5, temperature=0.0)[0, 8:]
    assert found == [bytes(ids.tolist()).decode(errors="replace")] * 5


def test_generation_arguments_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before each task's are known to be right."""
    lm = make()
    monkeypatch.setattr(CausalLM, "prefill", lambda *_, **__: pytest.fail("it wrote"))
    fine = request("the tide", {"until": [], "max_gen_toks": 2})
    for given, message in (
        (
            {"length_penalty": 2.0, "typical_p": 0.3},
            "expected until, .*; got length_pen.*, typical",
        ),
        ({"num_beams": 4}, "num_beams: expected 1, got 4"),
        ({"max_tokens": "few"}, "max_tokens: expected 0 or more, got 'few'"),
    ):
        with pytest.raises(UserError, match=f"lm_eval: generation_kwargs: {message}"):
            lm.generate_until([fine, request("the tide", given)], disable_tqdm=True)


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lm_eval: max_length: expected 1 or more, got 0"):
        make(max_length=0)
    with pytest.raises(UserError, match="lm_eval: path: expected a run folder or a saved model"):
        TidegateLM()
    with pytest.raises(UserError, match="batch_size: expected auto or 1 or more, got 'many'"):
        make(batch_size="many")
    for given, shown in ((999, "999"), (-1, "-1"), ("x", "'x'")):
        with pytest.raises(UserError, match=f"prefix_token_id: expected 0 to 255, got {shown}"):
            make(prefix_token_id=given)
    with pytest.raises(UserError, match="max_gen_toks: expected 0 or more, got -1"):
        make(max_gen_toks=-1)
    with pytest.raises(UserError, match="precision: expected one of auto, fp32, .*got 'bf61'"):
        TidegateLM(trained=Trained(make().model, ByteTokenizer(), None), precision="bf61")
    config = LMConfig("hgrn2", vocab_size=300, dim=32, layers=1)
    CausalLM(config).save(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer"):
        TidegateLM(str(tmp_path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and one with three tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    make().model.save(folder / "model")
    documents = [
        {"question": "the tide turns", "choices": [" twice", " thrice"], "answer": i % 2}
        for i in range(3)
    ]
    data = folder / "tide.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), "utf-8")
    (folder / "tasks").mkdir()
    for name, task in (("choice", TASK), ("text", ROLLING), ("writing", WRITING)):
        (folder / "tasks" / f"{name}.yaml").write_text(task.format(data=data), "utf-8")
    return folder


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_eval_tasks_of_the_command_line(
    saved: Path,
    offline: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    tasks = ["--tasks", "tide_choice,tide_text,tide_writing"]
    where = ["--include-path", str(saved / "tasks"), "--device", "cpu", "--precision", "fp32"]
    assert main(["eval", str(saved / "model"), *tasks, *where, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    lm = make()
    right = 0
    for i in range(3):
        scores = [expected(lm, "the tide turns", c)[0] for c in (" twice", " thrice")]
        right += int(scores[1] > scores[0]) == i % 2
    assert results["tide_choice"]["acc,none"] == pytest.approx(right / 3)
    nats = -expected(lm, "\n", "the tide turns")[0] / len("the tide turns")
    assert results["tide_text"]["byte_perplexity,none"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert set(results) == {"tide_choice", "tide_text", "tide_writing"}


@pytest.fixture
def own_tasks_only(monkeypatch: pytest.MonkeyPatch, offline: dict[str, str]) -> None:
    """Without the tasks that come with lm_eval, which take ten seconds to read through."""
    init = lm_eval.tasks.TaskManager.__init__

    def without_defaults(self: object, *args: object, **more: object) -> None:
        init(self, *args, **{**more, "include_defaults": False})

    monkeypatch.setattr(lm_eval.tasks.TaskManager, "__init__", without_defaults)
    for name, value in offline.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("own_tasks_only")
def test_eval_tasks_says_which_task_is_unknown(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(saved / "model"), "--tasks", "tide_nowhere"]) == 2
    assert "eval: tasks: lm_eval knows no tide_nowhere" in capsys.readouterr().err


@pytest.mark.usefixtures("own_tasks_only")
@pytest.mark.parametrize("kind", ["tidegate", "hf"])
def test_the_harness_s_own_command(
    kind: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--model tidegate and --model hf give the same numbers."""
    folder = saved / "model"
    arguments = f"path={folder},precision=fp32"
    if kind == "hf":
        pytest.importorskip("transformers")
        arguments = f"pretrained={_as_transformers(folder, tmp_path / 'hf')},dtype=float32"
    command = ["lm_eval", "--model", kind, "--model_args", arguments]
    command += ["--tasks", "tide_choice,tide_text", "--include_path", str(saved / "tasks")]
    command += ["--device", "cpu", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_module("tidegate.lm_eval", run_name="__main__")
    (written,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(written.read_text("utf-8"))["results"]
    nats = -expected(make(), "\n", "the tide turns")[0] / len("the tide turns")
    perplexity = results["tide_text"]["byte_perplexity,none"]
    assert perplexity == pytest.approx(math.exp(nats), rel=1e-3)


def _as_transformers(folder: Path, out: Path) -> Path:
    """The model and a byte tokenizer as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tidegate.hf import TidegateForCausalLM

    TidegateForCausalLM.from_causal_lm(CausalLM.load(folder)).save_pretrained(out)
    alphabet = _byte_alphabet()
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    line_end = alphabet[10]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=line_end, eos_token=line_end, pad_token=line_end
    )
    wrapped.save_pretrained(out)
    return out


def _byte_alphabet() -> list[str]:
    """The characters that byte-level BPE writes bytes as, by byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]
