"""Token-mixing matrices against the ops: state or output = matrix times what enters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from training_cases import FLAGS, write_text

from tidegate import cli, ops
from tidegate.nn import HGRU, HGRU2, LRU, SLRU, GatedLinearAttention, GatedLinearRNN
from tidegate.nn._token_mixing import elementwise_mixing, head_mixing

pytestmark = pytest.mark.xdist_group("token_mixing")

TIME = 19


def check(mixing: torch.Tensor, entering: torch.Tensor, found: torch.Tensor) -> None:
    """mixing ``[B, H, T, T]``; entering, found ``[B, T, H, V]``: one is the other's image."""
    assert torch.equal(mixing, mixing.tril())
    wanted = torch.einsum("bhts,bshv->bthv", mixing, entering.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", [None, 0.7])
@pytest.mark.parametrize("options", [{}, {"complex": False}, {"input_gate": "free"}], ids=str)
def test_hgru(options, gamma):
    """Whose channels get the same input, so that their mean is the mean matrix's image."""
    torch.manual_seed(0)
    options = {"complex": False, **options}
    mixer = HGRU(6, **options)
    x = torch.randn(2, TIME, 6)
    bound = None if gamma is None else torch.full((mixer.channels,), gamma)
    parts = mixer._project(x)
    c = parts["c"][..., :1].expand(2, TIME, mixer.channels)
    h, _ = mixer._recur({**parts, "c": c}, bound, None, 0, None)
    check(
        mixer.token_mixing(x, bound), F.silu(c[..., :1, None]), h.mean(-1)[..., None, None].detach()
    )


def test_complex_states_show_the_modulus():
    torch.manual_seed(0)
    mixer = HGRU(4, complex=True)
    x = torch.randn(1, TIME, 4)
    turned = mixer.token_mixing(x)
    with torch.no_grad():
        mixer.theta.zero_()
    assert torch.equal(mixer.token_mixing(x), turned)
    c = torch.ones(1, TIME, 8)  # of a state that does not turn, the real half is the sum of weights
    h, _ = ops.hgru(c, mixer._project(x)["f"], theta=torch.zeros(4), activation="none")
    check(turned, torch.ones(1, TIME, 1, 1), h[..., :4].mean(-1)[..., None, None].detach())


@pytest.mark.parametrize("gamma", [None, 0.9])
@pytest.mark.parametrize("preset", ["paper", "fla"])
def test_hgru2(preset, gamma):
    torch.manual_seed(0)
    mixer = HGRU2(12, 3, preset=preset)
    x = torch.randn(2, TIME, 12)
    bound = None if gamma is None else torch.full((12,), gamma)
    q, f, v = mixer._project(x)
    o, _ = mixer._recur((q, f, v), mixer._split_gamma(bound), None, False, None)
    entering = {"none": v, "silu": F.silu(v)}[mixer.v_activation]
    check(mixer.token_mixing(x, bound), entering, o.detach())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", ["vector", "scalar"])
@pytest.mark.parametrize("gamma", [None, 0.7])
def test_gated_linear_attention(gate, normalize, gamma):
    torch.manual_seed(0)
    options = {"normalize": True, "feature_map": "elu+1"} if normalize else {}
    options |= {"gate": gate, "lower_bound": gamma is not None}
    mixer = GatedLinearAttention(16, 2, norm="rms_no_weight", output_gate=False, **options)
    bound = None if gamma is None else torch.full((mixer.gamma_size,), gamma)
    seen = {}
    mixer.norm.register_forward_hook(lambda _m, given, _o: seen.update(o=given[0]))
    x = torch.randn(2, TIME, 16)
    mixer(x, gamma=bound)
    v = mixer._project(x)["v"].unflatten(-1, (2, -1))
    check(mixer.token_mixing(x, bound), v, seen["o"].detach())


def test_gated_linear_rnn():
    torch.manual_seed(0)
    mixer = GatedLinearRNN(5)
    x = torch.randn(1, TIME, 5)
    z, entering = mixer.in_proj(x).chunk(2, -1)
    entering = entering[..., :1].expand_as(z)
    h, _ = ops.hgru(entering, z, activation="none")
    check(mixer.token_mixing(x), entering[..., :1, None], h.mean(-1)[..., None, None].detach())


@pytest.mark.parametrize(("gate", "gamma"), [(None, None), ("data", None), ("data", 0.99)])
def test_lru(gate, gamma):
    """Whose phases are zero and whose channels get the same input, as in test_hgru."""
    torch.manual_seed(0)
    mixer = LRU(6, gate=gate, lower_bound=gamma is not None)
    bound = None if gamma is None else torch.full((6,), gamma)
    x = torch.randn(2, TIME, 6)
    turned = mixer.token_mixing(x, bound)
    with torch.no_grad():
        mixer.theta_log.fill_(-torch.inf)
        mixer.in_proj.weight.copy_(mixer.in_proj.weight[:1].expand_as(mixer.in_proj.weight))
    assert torch.equal(mixer.token_mixing(x, bound), turned)
    h, _ = mixer._scan(x, None, bound, None)
    entering = mixer.in_proj(x)[..., :1, None]
    check(turned, entering.detach(), h[..., : mixer.state].mean(-1)[..., None, None].detach())


def test_slru():
    torch.manual_seed(0)
    mixer = SLRU(6)
    x = torch.randn(2, TIME, 6)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(mixer.in_proj.weight[:1].expand_as(mixer.in_proj.weight))
    h, _ = mixer._scan(x, None, None, None)
    entering = mixer.in_proj(x)[..., :1, None]
    check(mixer.token_mixing(x), entering.detach(), h.mean(-1)[..., None, None].detach())


def test_gates_that_are_shut_or_open():
    decay = torch.tensor([0.5, 0.0, 1.0, 1.0, 0.5]).view(1, 5, 1)
    mixing = elementwise_mixing(decay, torch.ones_like(decay))[0, 0]
    wanted = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert mixing[:4].tolist() == wanted
    assert mixing[4].tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 1], rel=1e-9)
    one = torch.ones(1, 5, 1, 1)
    torch.testing.assert_close(head_mixing(one, one, decay.log()[..., None])[0, 0], mixing)


def test_no_tokens():
    assert HGRU(4, complex=False).token_mixing(torch.zeros(2, 0, 4)).shape == (2, 1, 0, 0)
    assert HGRU2(4, 2).token_mixing(torch.zeros(2, 0, 4)).shape == (2, 2, 0, 0)


def test_bidirectional_mixers_have_none():
    with pytest.raises(ValueError, match=r"HGRU: token_mixing\(\): a bidirectional HGRU reads"):
        HGRU(4, bidirectional=True).token_mixing(torch.zeros(1, 2, 4))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run a mixer, by name."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    flags = [f for f in FLAGS if not f.startswith("--set")]
    made = {}
    options = {
        "gated-linear-rnn": [],
        "gated-rnn": [],
        "hgrn": [],
        "slru": [],
        "hgrn2": ["expand_ratio=4"],
        "transformer": ["num_heads=2"],
        "gla": ["num_heads=2"],
        "lru": ["gate=data"],
        "fox": ["num_heads=2"],
    }
    for mixer, given in options.items():
        made[mixer] = folder / mixer
        more = [f"--set=mixer_options.{option}" for option in given]
        arguments = ["train", str(text), *flags, "--mixer", mixer, "--steps=10", "--quiet", *more]
        assert cli.main([*arguments, "--out", str(made[mixer])]) == 0
    return made


@pytest.mark.parametrize("mixer", ["gated-linear-rnn", "hgrn", "hgrn2", "gla", "lru", "slru"])
@pytest.mark.parametrize("more", [[], ["--layers", "2", "--tokens=9"]], ids=str)
def test_plot_token_mixing(runs, mixer, more, capsys):
    assert cli.main(["plot", "token-mixing", str(runs[mixer]), "--device=cpu", *more]) == 0
    path = runs[mixer] / "token_mixing.png"
    assert capsys.readouterr().out.split() == [str(path)]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mixer", ["hgrn2", "gla", "lru", "fox"])
def test_plot_gates(runs, mixer, capsys):
    path = runs[mixer] / "forget_gates.png"
    path.unlink()
    assert cli.main(["plot", "gates", str(runs[mixer]), "--device=cpu"]) == 0
    assert capsys.readouterr().out.split() == [str(path)]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_gates_that_read_the_state(runs, capsys):
    assert cli.main(["plot", "gates", str(runs["gated-rnn"]), "--device=cpu"]) == 0
    drawn = [runs["gated-rnn"] / name for name in ("forget_gates.png", "gate_parts.png")]
    assert capsys.readouterr().out.split() == [str(path) for path in drawn]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_plot_gates_of_layers_that_differ(tmp_path, monkeypatch):
    """Layers keep their numbers and their own bounds: one without a data-dependent gate (the first,
    whose gate has a bound, and the third), one without a bound (the fourth)."""
    import json

    from tidegate import plots
    from tidegate.training import forget_gates, load_trained

    fields = {
        "mixer": ["fox", "gla", "transformer", "lru", "hgrn"],
        "layer_options": [
            {"num_heads": 16, "gate": "independent", "lower_bound": True},
            {"num_heads": 2, "key_dim": 16, "lower_bound": True},
            {"num_heads": 2},
            {"gate": "data"},
        ],
        "lower_bound": "decreasing",
    }
    flags = [f for f in FLAGS if not f.startswith(("--set", "--layers"))]
    flags += ["--layers=5", *(f"--set={name}={json.dumps(f)}" for name, f in fields.items())]
    text, run = write_text(tmp_path / "text.txt"), tmp_path / "run"
    assert cli.main(["train", str(text), "--steps=2", "--quiet", *flags, "--out", str(run)]) == 0
    model = load_trained(str(run), "cpu").model
    gates = forget_gates(model, torch.randint(0, 256, (2, 9)))
    assert {layer: gate.shape for layer, gate in gates.items()} == dict.fromkeys(
        [1, 3, 4], (16, 18)
    )

    figures, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda *given: (figures.append(given[0]), save(*given)))
    assert cli.main(["plot", "gates", str(run), "--device=cpu"]) == 0
    panels = [axes for axes in figures[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left").split("\n")[0] for axes in panels] == [
        "layer 2",
        "layer 4",
        "layer 5",
    ]
    dotted = [[line for line in axes.lines if line.get_linestyle() == ":"] for axes in panels]
    assert [len(lines) for lines in dotted] == [1, 0, 1]
    for lines, layer in ((dotted[0], 1), (dotted[2], 4)):
        assert lines[0].get_xdata()[0] == pytest.approx(model.gammas()[layer].mean().item())
    assert dotted[0][0].get_xdata()[0] > dotted[2][0].get_xdata()[0] + 0.1
    named = [label.get_text() for label in figures[0].legends[0].get_texts()]
    assert named == ["untrained", "median", "mean lower bound", "trained"]


def test_the_legend_names_what_any_panel_shows(tmp_path, monkeypatch):
    """Also what the first panel lacks."""
    from tidegate import plots

    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, _: figures.append(figure))
    values = torch.rand(3, 5).numpy()
    plots.plot_forget_gates({2: values, 7: values}, tmp_path / "gates.png", bounds={7: 0.25})
    named = [label.get_text() for label in figures[0].legends[0].get_texts()]
    assert named == ["median", "trained", "mean lower bound"]


def test_gate_parts_add_up(runs):
    """To the gates, sequence by sequence; the first token's state gives nothing."""
    from tidegate.training import forget_gates, gate_parts, load_trained

    model = load_trained(str(runs["gated-rnn"]), "cpu").model
    ids = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))
    gates = forget_gates(model, ids)
    parts = gate_parts(model, ids)
    assert sorted(parts) == [0, 1]
    for layer, (from_input, from_state) in parts.items():
        total = torch.from_numpy(from_input + from_state).sigmoid().flatten(0, 1).T
        torch.testing.assert_close(total, torch.from_numpy(gates[layer]))
        assert (from_state[:, 0] == 0).all()
        assert abs(from_state[:, 1:]).max() > 0


OPTIONS = {
    "gla": {"num_heads": 2},
    "lru": {"gate": "data"},
    "fox": {"num_heads": 2},
}


@pytest.mark.parametrize(
    "mixer", ["gated-rnn", "gated-linear-rnn", "hgrn", "hgrn2", "gla", "lru", "fox"]
)
def test_gates_of_padded_rows_are_those_of_each_row(mixer):
    """A classifier packs them; a gate that reads the state must not see the row before."""
    from tidegate.models import LMConfig, SequenceClassifier
    from tidegate.training import forget_gates, gate_parts

    torch.manual_seed(0)
    options = {"mixer_options": OPTIONS.get(mixer, {})}
    config = LMConfig(mixer=mixer, vocab_size=9, dim=12, layers=2, num_classes=3, **options)
    model = SequenceClassifier(config)
    ids, lengths = torch.randint(9, (3, 7)), torch.tensor([7, 0, 4])
    rows = [ids[:1], ids[2:, :4]]
    together = forget_gates(model, ids, lengths)
    each = [forget_gates(model, row) for row in rows]
    for layer, gates in together.items():
        alone = torch.cat([torch.from_numpy(g[layer]) for g in each], 1)
        torch.testing.assert_close(torch.from_numpy(gates), alone)
    assert len(together) == 2
    each_parts = [gate_parts(model, row) for row in rows]
    for layer, parts in gate_parts(model, ids, lengths).items():
        for kind, part in enumerate(parts):
            alone = torch.cat([torch.from_numpy(p[layer][kind]) for p in each_parts], 1)
            torch.testing.assert_close(torch.from_numpy(part), alone)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("gla", {"num_heads": 2}),
        ("gla", {"num_heads": 2, "gate": "scalar"}),
        ("lru", OPTIONS["lru"]),
        ("gla", {"num_heads": 2, "lower_bound": True}),
        ("lru", {"gate": "data", "lower_bound": True}),
    ],
)
@torch.no_grad()
def test_gates_are_what_the_state_fades_by(mixer, options):
    """A token whose input to the state is shut off leaves the state times its gate."""
    from tidegate.models import CausalLM, LMConfig
    from tidegate.training import forget_gates

    torch.manual_seed(0)
    mode = {"lower_bound": "independent"}
    config = LMConfig(mixer=mixer, mixer_options=options, vocab_size=9, dim=8, layers=1, **mode)
    model = CausalLM(config)
    unit, gamma = model.blocks[0].mixer, model.gammas()[0]
    # For GLA these are the keys' rows of in_proj, for LRU all of it.
    rows = slice(unit.key_dim, 2 * unit.key_dim) if mixer == "gla" else slice(None)
    unit.in_proj.weight[rows] = 0
    ids = torch.tensor([[3]])
    state = unit.init_state(1)
    state.copy_(torch.rand(state.shape))
    x = model.blocks[0].mixer_norm(model._embed(ids))
    _, after = unit(x, state, gamma=gamma)
    gate = torch.from_numpy(forget_gates(model, ids)[0])[:, 0]
    if mixer == "gla":
        fades = (after / state)[0]
        wanted = gate.view(2, -1, 1).expand_as(fades)
    else:
        fades = torch.complex(*after.chunk(2, 1)).abs() / torch.complex(*state.chunk(2, 1)).abs()
        wanted = gate[None]
    torch.testing.assert_close(fades, wanted)


def test_the_untrained_model_is_the_runs_own(runs):
    import json

    from tidegate.models import CausalLM
    from tidegate.training import load_trained
    from tidegate.training.trained import initial_model

    values = json.loads((runs["hgrn2"] / "config.json").read_text())
    before = torch.get_rng_state()
    one, two = (initial_model(values, CausalLM).state_dict() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    trained = load_trained(str(runs["hgrn2"]), "cpu").model.state_dict()
    moved = [(one[name] - trained[name]).abs().max().item() for name in one if one[name].numel()]
    assert 0 < max(moved) < 0.2  # ten steps of 3e-3 away


def test_what_cannot_be_drawn(runs, tmp_path, capsys):
    def fails(*arguments: str) -> str:
        assert cli.main(["plot", *arguments, "--device=cpu"]) == 2
        return capsys.readouterr().err

    attention = str(runs["transformer"])
    assert "plot: no layer of" in fails("gates", attention)
    assert "transformer has no token-mixing matrix in layer 1" in fails("token-mixing", attention)
    hgrn2 = str(runs["hgrn2"])
    assert "layers: expected numbers from 1 to 2, got 3" in fails(
        "token-mixing", hgrn2, "--layers", "3"
    )
    for tokens in (1, 999_999):
        line = fails("token-mixing", hgrn2, f"--tokens={tokens}")
        assert f"plot: tokens: expected 2 to 1999, got {tokens}" in line
    assert "holds no checkpoint.pt" in fails("gates", str(tmp_path))


BOTH = "expected with token-mixing and attention only"


@pytest.mark.parametrize(
    ("what", "flags", "message"),
    [
        ("run", ["--layers", "1"], f"--layers: {BOTH}, got it with run"),
        ("run", ["--heads", "1"], "--heads: expected with attention only, got it with run"),
        ("gates", ["--tokens=5"], f"--tokens: {BOTH}, got it with gates"),
        ("gates", ["--layers", "1"], f"--layers: {BOTH}, got it with gates"),
        ("token-mixing", ["--heads", "2"], "--heads: expected with attention only, got it with"),
        ("gates", ["--no-baselines"], "--no-baselines: expected with run only, got it with gates"),
    ],
)
def test_options_of_another_picture_are_refused(runs, what, flags, message, capsys):
    assert cli.main(["plot", what, str(runs["hgrn2"]), *flags, "--device=cpu"]) == 2
    assert message in capsys.readouterr().err


def test_tokens_have_a_limit(runs, monkeypatch, capsys):
    from tidegate.training import report

    monkeypatch.setattr(report, "MIXING_LIMIT", 300)
    arguments = ["plot", "token-mixing", str(runs["hgrn2"]), "--device=cpu"]
    assert cli.main([*arguments, "--tokens=301"]) == 2
    assert "plot: tokens: expected 2 to 300, got 301" in capsys.readouterr().err
    assert cli.main([*arguments, "--tokens=300"]) == 0


def test_tiles_keep_the_largest_weight():
    from tidegate.models import CausalLM, LMConfig
    from tidegate.training import token_mixing

    torch.manual_seed(0)
    config = LMConfig(mixer="hgrn2", mixer_options={"num_heads": 3}, vocab_size=9, dim=6, layers=2)
    model, ids = CausalLM(config), torch.randint(9, (1, 23))
    (whole, _), (tiled, _) = (
        token_mixing(model, ids, **options).values() for options in ({}, {"heads": 2, "pixels": 8})
    )
    assert tiled.shape == (2, 8, 8)
    for head, row, column in ((0, 0, 0), (1, 5, 3), (0, 7, 7), (1, 2, 4)):
        tile = whole[head, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        assert tiled[head, row, column] == abs(tile).max()
    (same, _) = token_mixing(model, ids, pixels=23).values()
    assert (same == abs(whole)).all()


def test_a_picture_of_many_tokens_is_small(runs, monkeypatch, capsys):
    """What is kept for the picture does not grow with the tokens."""
    from tidegate import plots

    drawn = {}

    def keep(matrices, path, **options):
        drawn.update(options, shapes={m.shape for m in matrices.values()})

    monkeypatch.setattr(plots, "plot_token_mixing", keep)
    arguments = ["plot", "token-mixing", str(runs["hgrn2"]), "--device=cpu", "--tokens=1500"]
    assert cli.main(arguments) == 0
    (shape,) = drawn["shapes"]
    assert shape[0] <= drawn["heads"] == 4
    assert shape[1:] == (500, 500)
    assert drawn["tokens"] == 1500
