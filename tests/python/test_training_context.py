"""What a model makes of its context: loss by position, the needle test, attention maps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_cases import write_text

from tidegate import cli
from tidegate.models import CausalLM, LMConfig
from tidegate.training import UserError, forget_gates
from tidegate.training.evaluate import context_for, evaluate
from tidegate.training.maps import head_maps
from tidegate.training.needle import (
    ANSWER,
    NEEDLE,
    QUESTION,
    TASK,
    _answers_hit,
    needle_prompt,
    needle_test,
)
from tidegate.training.per_token import PerToken, per_token_loss
from tidegate.training.pieces import logits_in_pieces
from tidegate.training.tokenizers import ByteTokenizer

pytestmark = [pytest.mark.xdist_group("training_context"), pytest.mark.usefixtures("one_thread")]

MIXERS = {
    "hgrn": {"complex": False},
    "transformer": {"num_heads": 2, "window": 7},
    "fox-pro": {"num_heads": 2},
}
by_mixer = pytest.mark.parametrize("mixer", MIXERS)


def small(mixer: str, **changes) -> CausalLM:
    torch.manual_seed(0)
    config = LMConfig(
        mixer=mixer, vocab_size=256, dim=16, layers=2, mixer_options=MIXERS[mixer], tied=False
    )
    model = CausalLM(config.replace(**changes), dtype=torch.float64)
    with torch.no_grad():
        model.head.weight.mul_(20.0)
    return model


@by_mixer
@pytest.mark.parametrize("piece", [1, 5, 23, 100])
def test_pieces_equal_the_whole(mixer, piece):
    model = small(mixer)
    ids = torch.randint(0, 256, (2, 23))
    parts = list(logits_in_pieces(model, ids, piece=piece))
    assert [start for start, _ in parts] == list(range(0, 23, piece))
    wanted = model(ids).logits.float()
    torch.testing.assert_close(
        torch.cat([p for _, p in parts], dim=1), wanted, rtol=1e-5, atol=1e-5
    )


@by_mixer
def test_loss_by_position(mixer):
    """Equation 15 by hand, over windows that do not overlap."""
    model = small(mixer)
    tokens = np.random.default_rng(0).integers(0, 256, 161).astype(np.uint8)
    found = per_token_loss(model, tokens, length=20, sequences=5, batch=2, trained=8)
    assert found.sequences == 5
    losses = []
    for start in np.linspace(0, 7 * 20, 5).astype(int):
        row = torch.from_numpy(tokens[start : start + 21].astype(np.int64))
        logits = model(row[None, :-1]).logits[0]
        losses.append(F.cross_entropy(logits, row[1:], reduction="none").detach())
    wanted = torch.stack(losses).mean(0).numpy()
    np.testing.assert_allclose(found.losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.perplexities[6], np.exp(wanted[:7].mean()), rtol=1e-5)
    np.testing.assert_allclose(found.smoothed(5)[10], wanted[8:13].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.smoothed(5)[0], wanted[:3].mean(), rtol=1e-5)


def test_loss_by_position_refuses(tmp_path):
    model, tokens = small("hgrn"), np.zeros(30, np.uint8)
    with pytest.raises(UserError, match="length: expected at most 29, .*; got 30"):
        per_token_loss(model, tokens, length=30)
    with pytest.raises(UserError, match="sequences: expected 1 or more, got 0"):
        per_token_loss(model, tokens, length=3, sequences=0)
    assert per_token_loss(model, tokens, length=29).sequences == 1


def test_numbers_by_position_are_written(tmp_path):
    losses = np.linspace(3.0, 1.0, 100)
    files = PerToken(losses, 7, trained=50).write(tmp_path / "new")
    lines = files[0].read_text().splitlines()
    assert lines[0] == "position,loss,perplexity"
    assert len(lines) == 101
    position, loss, perplexity = lines[64].split(",")
    assert int(position) == 64
    assert float(loss) == pytest.approx(losses[63], abs=1e-6)
    assert float(perplexity) == pytest.approx(np.exp(losses[:64].mean()), rel=1e-5)
    values = json.loads(files[1].read_text())
    assert values["sequences"] == 7
    assert values["trained_context"] == 50
    assert list(values["perplexity"]) == ["1", "2", "4", "8", "16", "32", "64", "100"]
    again = PerToken.read(tmp_path / "new")
    np.testing.assert_allclose(again.losses, losses, atol=1e-6)
    assert (again.sequences, again.trained) == (7, 50)
    with pytest.raises(UserError, match=r"no numbers of eval --per-token"):
        PerToken.read(tmp_path)


class Oracle(torch.nn.Module):
    """Says after each byte what followed the last time that the 40 bytes up to it were seen, at
    most `reach` bytes ago; a model that answers exactly where it should."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.blocks = torch.nn.ModuleList()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids, state=None):
        whole = ids if state is None else torch.cat([state, ids], dim=1)
        logits = torch.zeros(*ids.shape, 256)
        for row, out in zip(whole.tolist(), logits, strict=True):
            text = bytes(row)
            for i in range(len(out)):
                end = len(text) - len(out) + i + 1
                at = text.rfind(text[max(0, end - 40) : end], max(0, end - self.reach), end - 1)
                if at >= 0 and end >= 40:
                    out[i, text[at + 40]] = 1.0
        return SimpleNamespace(logits=logits, state=whole)


def haystack(size: int = 3000) -> np.ndarray:
    return np.random.default_rng(0).integers(97, 122, size).astype(np.uint8)


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_needle_stands_where_it_should(depth):
    text = haystack()
    ids, answer = needle_prompt(text, ByteTokenizer(), length=800, depth=depth, start=11)
    prompt = bytes(ids.astype(np.uint8))
    assert len(ids) == 800
    assert answer == len(ANSWER)
    assert prompt.endswith(TASK + QUESTION + ANSWER)
    at = prompt.index(NEEDLE)
    room = 800 - len(NEEDLE + TASK + QUESTION + ANSWER)
    assert at == round(depth * room)
    around = prompt[:at] + prompt[at + len(NEEDLE) : -len(TASK + QUESTION + ANSWER)]
    assert around == bytes(text[11 : 11 + room])


def test_needle_scores_show_how_far_a_model_sees():
    scores = needle_test(
        Oracle(reach=700),
        haystack(),
        ByteTokenizer(),
        lengths=[600, 1500],
        depths=[0.0, 0.5, 1.0],
        samples=2,
        trained=600,
    )
    assert scores.exact.tolist() == [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    assert (scores.tokens[:, 0] == 1.0).all()
    assert (scores.tokens[:2, 1] < 1.0).all()


@by_mixer
def test_an_untrained_model_finds_nothing(mixer):
    scores = needle_test(
        small(mixer), haystack(), ByteTokenizer(), lengths=[500], depths=[0.2], samples=1
    )
    assert scores.exact.tolist() == [[0.0]]


def test_an_answer_that_matches_is_what_greedy_decoding_gives():
    """The score of one pass says what generating the answer would."""
    model = small("fox-pro")
    prompt = torch.randint(0, 256, (1, 40))
    made = model.generate(prompt, 9, temperature=0.0)
    assert _answers_hit(model, made, 9, "fp32").all()
    made[0, 44] = (made[0, 44] + 1) % 256
    assert _answers_hit(model, made, 9, "fp32")[0, :5].tolist() == [True] * 4 + [False]


def test_needle_refuses():
    model, text = small("hgrn"), haystack(700)
    least = len(NEEDLE + TASK + QUESTION + ANSWER) + 1
    cases = {
        f"lengths: expected {least} or more, .*; got 100": {"lengths": [100]},
        f"lengths: expected at most {699 + least}, by the text's 700 tokens": {"lengths": [9000]},
        "depths: expected numbers from 0 to 1": {"depths": [1.5]},
        "samples: expected 1 or more, got 0": {"samples": 0},
        "at least one length and one depth": {"lengths": []},
    }
    for message, changes in cases.items():
        given = {"lengths": [500], "depths": [0.5], **changes}
        with pytest.raises(UserError, match=f"needle: .*{message}"):
            needle_test(model, text, ByteTokenizer(), **given)


@pytest.mark.parametrize(("pixels", "bounded"), [(64, False), (7, True), (1, False)])
def test_maps_are_the_largest_of_each_tile(pixels, bounded):
    options = {"num_heads": 4, "num_kv_heads": 2, "window": 9, "lower_bound": bounded}
    model = small("fox-pro", mixer_options=options)
    gammas = model.gammas()
    ids = torch.randint(0, 256, (26,))
    (found,) = head_maps(model, ids, [2], [4], pixels=pixels)
    x = model._embed(ids[None])
    x, _ = model.blocks[0](x, gamma=gammas[0])
    mixer = model.blocks[1].mixer
    q, k, log_f = mixer.attention_operands(model.blocks[1].mixer_norm(x), gammas[1])
    f = log_f[0, :, 3].exp()
    forget, scores = torch.zeros(26, 26).double(), torch.full((26, 26), -torch.inf).double()
    for i in range(26):
        for j in range(i + 1):
            forget[i, j] = f[j + 1 : i + 1].prod()
            if i - j < 9:
                score = q[0, i, 3] @ k[0, j, 1] / 2.0
                scores[i, j] = score + forget[i, j].log()
    tile = -(-26 // pixels)
    count = -(-26 // tile)
    assert found.tile == tile
    for mine, whole in ((found.forget, forget), (found.attention, scores.softmax(-1))):
        padded = F.pad(whole, (0, count * tile - 26, 0, count * tile - 26)).detach()
        wanted = padded.view(count, tile, count, tile).amax((1, 3)).numpy()
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


def test_maps_of_attention_have_no_gates():
    model = small("transformer")
    (found,) = head_maps(model, torch.randint(0, 256, (9,)), [1], [2])
    assert found.forget is None
    np.testing.assert_allclose(found.attention.sum(1), np.ones(9), rtol=1e-5)
    for layers, heads, message in (
        ([3], [1], "layers: expected numbers from 1 to 2, got 3"),
        ([1], [0], "heads: expected numbers from 1 to 2, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            head_maps(model, torch.zeros(3, dtype=torch.int64), layers, heads)
    with pytest.raises(UserError, match="expected layers of softmax attention; layer 1 is HGRU"):
        head_maps(small("hgrn"), torch.zeros(3, dtype=torch.int64), [1], [1])


@torch.no_grad()
def test_maps_of_long_texts_fit():
    """8192 tokens: the whole matrix would be a quarter of a gigabyte."""
    model = small("fox-pro", layers=1, mixer_options={"num_heads": 1, "window": 3}).float()
    (found,) = head_maps(model, torch.randint(0, 256, (8192,)), [1], [1])
    assert found.forget.shape == found.attention.shape == (512, 512)
    assert (found.attention.diagonal() > 0).all()


@pytest.mark.parametrize("mixer", ["transformer", "fox-pro"])
def test_attention_is_scored_over_its_training_context(mixer):
    model = small(mixer)
    tokens = np.random.default_rng(0).integers(0, 256, 257).astype(np.uint8)
    assert context_for(model, 64) == 64
    assert context_for(small("hgrn"), 64) == 512
    score = evaluate(
        model,
        tokens,
        valid_bytes=None,
        device=torch.device("cpu"),
        context=context_for(model, 64),
        rows=1,
    )
    rows = torch.from_numpy(tokens[:256].astype(np.int64)).view(4, 64)
    asked = torch.from_numpy(tokens[1:].astype(np.int64))
    wanted = F.cross_entropy(model(rows).logits.flatten(0, 1), asked)
    assert score.nats == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("bounded", [False, True])
def test_forget_gates_by_layer(bounded):
    """What the histograms of a run are drawn from."""
    options = {"num_heads": 2, "lower_bound": bounded}
    model = small("fox-pro", mixer_options=options, lower_bound="decreasing")
    ids = torch.randint(0, 256, (2, 9))
    gates = forget_gates(model, ids)
    assert {layer: g.shape for layer, g in gates.items()} == {0: (2, 18), 1: (2, 18)}
    x = model.blocks[0].mixer_norm(model._embed(ids))
    log_f = model.blocks[0].mixer.log_gate(x, model.gammas()[0])
    assert (gates[0].min() > 0.5) == bounded
    wanted = log_f.exp().flatten(0, 1).T.detach().numpy()
    np.testing.assert_allclose(gates[0], wanted, rtol=1e-5)


# The command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a small model with forgetting attention."""
    folder = tmp_path_factory.mktemp("context")
    text = write_text(folder / "text.txt")
    flags = ["--mixer=fox-pro", "--dim=16", "--layers=2", "--set=mixer_options.num_heads=2"]
    flags += ["--batch-size=4", "--context=16", "--precision=fp32", "--device=cpu", "--threads=1"]
    out = folder / "run"
    assert cli.main(["train", str(text), *flags, "--steps=5", "--quiet", "--out", str(out)]) == 0
    return out


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_eval_per_token(trained, tmp_path, capsys):
    flags = ["--per-token", "--device=cpu", "--precision=fp32", "--sequences=3"]
    assert cli.main(["eval", str(trained), *flags]) == 0
    out = capsys.readouterr().out
    assert "at 16 tokens: L " in out
    assert "at 64 tokens: L " in out  # four times the training context
    assert is_png(trained / "per_token.png")
    assert len((trained / "per_token.csv").read_text().splitlines()) == 65
    other = write_text(tmp_path / "other.txt", 500, seed=3)
    flags += ["--length", "300", "--out", str(tmp_path / "there")]
    assert cli.main(["eval", str(trained / "model"), str(other), *flags]) == 0
    assert json.loads((tmp_path / "there" / "per_token.json").read_text())["sequences"] == 1


def test_eval_needle(trained, tmp_path, capsys):
    flags = ["--needle", "--length", "500", "700", "--depths=2", "--samples=1", "--device=cpu"]
    assert cli.main(["eval", str(trained), *flags, "--out", str(tmp_path)]) == 0
    assert "700 tokens: exact match 0.00%, answer tokens" in capsys.readouterr().out
    values = json.loads((tmp_path / "needle.json").read_text())
    assert values["lengths"] == [500, 700]
    assert values["depths"] == [0.0, 1.0]
    assert np.shape(values["exact_match"]) == (2, 2)
    assert is_png(tmp_path / "needle.png")


def test_plot_maps(trained, capsys):
    flags = ["--layers", "2", "1", "--heads=2", "--tokens=40", "--device=cpu"]
    assert cli.main(["plot", "attention", str(trained), *flags]) == 0
    assert capsys.readouterr().out.strip() == str(trained / "attention_maps.png")
    assert is_png(trained / "attention_maps.png")
    assert cli.main(["plot", "attention", str(trained), "--device=cpu"]) == 0


def test_bad_input_is_one_line(trained, capsys):
    cases = {
        "expected one with --per-token, got [3, 4]": ["eval", "--per-token", "--length", "3", "4"],
        "length: expected at most": ["eval", "--per-token", "--length", "999999"],
        "needle: lengths: expected": ["eval", "--needle", "--length", "20"],
        "--length: expected with --per-token or --needle only, got it with neither": [
            *["eval", "--length", "128"]
        ],
        "--depths: expected with --needle only": ["eval", "--per-token", "--depths=3"],
        "--sequences: expected with --per-token only": ["eval", "--needle", "--sequences=3"],
        "--json: expected with neither --per-token nor": ["eval", "--per-token", "--json"],
        "plot: layers: expected numbers from 1 to 2, got 3": ["plot", "--layers=3"],
        "plot: tokens: expected 1 to": ["plot", "--tokens=0"],
    }
    for message, (command, *flags) in cases.items():
        what = ["attention"] if command == "plot" else []
        assert cli.main([command, *what, str(trained), *flags, "--device=cpu"]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.strip().splitlines()
        assert message in line
        assert captured.out == ""


@pytest.mark.parametrize(
    ("trained", "said"),
    [(256, "(all beyond training)"), (600, "(right of the line: beyond training)"), (700, "")],
)
def test_needle_plots_say_what_is_beyond_training(trained, said, monkeypatch, tmp_path):
    """And a long title is in the picture, however few the lengths."""
    from tidegate import plots_context
    from tidegate.training.needle import NeedleScores

    kept = []
    monkeypatch.setattr(plots_context, "_save", lambda figure, path: kept.append(figure))
    scores = NeedleScores((500, 700), (0.0, 1.0), np.zeros((2, 2)), np.ones((2, 2)), 1, trained)
    title = "Needle test: HGRN2 + TRANSFORMER-PRO, 360.2M parameters"
    plots_context.plot_needle(scores, tmp_path / "needle.png", title=title)
    (figure,) = kept
    figure.canvas.draw()
    axes = figure.axes[0]
    assert axes.get_xlabel() == "\n".join(["length, tokens", *([said] if said else [])])
    assert len(axes.lines) == ("line" in said)
    assert figure.get_suptitle() == title
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1
