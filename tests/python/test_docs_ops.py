"""docs/ops: every public op has a page with every argument and with the errors that the op raises.

A page is about the op that it is called after, about the steps and initialisers whose calls it
shows, or both. Their examples run in test_readme.py.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tidegate import ops, reference

PAGES = Path(__file__).resolve().parents[2] / "docs" / "ops"
SECTIONS = [
    "What it computes",
    "Gradients",
    "Errors",
    "Cost",
    "Example",
    "Reference",
    "Where it lives",
]
by_op = pytest.mark.parametrize("name", reference.__all__)
# Pages of ops that have no reference of their own.
OTHER_PAGES = ["forgetting_attention_step", "init"]
by_page = pytest.mark.parametrize("name", [*reference.__all__, *OTHER_PAGES])


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text("utf-8")


def documented(name: str) -> dict[str, set[str]]:
    """The ops that a page is about, and the arguments that it names of each: those of the op that
    it is called after stand in a table, others in a call, `hgru_step(c, f, ...)`."""
    text = page(name)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = {
        op: set(re.findall(r"\w+", arguments))
        for op, arguments in re.findall(r"`(\w+)\(([\w, ]*)\)`", prose)
    }
    for table in re.findall(r"^\| argument \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        rows = table.splitlines()
        found[name] = {word for row in rows for word in re.findall(r"`(\w+)`", row[:60])}
    return found


@by_op
def test_page_has_its_sections(name: str) -> None:
    text = page(name)
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert "\nSource: " in text


@by_page
def test_page_is_called_after_its_op(name: str) -> None:
    assert page(name).startswith(f"# {name}\n")


def test_every_op_has_a_page_with_every_argument() -> None:
    found = [documented(path.stem) for path in PAGES.glob("*.md")]
    for name in ops.__all__:
        named = [of_page[name] for of_page in found if name in of_page]
        assert named, f"{name}: no page in docs/ops is about it"
        missing = set(inspect.signature(getattr(ops, name)).parameters) - set.union(*named)
        assert not missing, f"{name}: its page does not name {missing}"


@by_op
def test_page_shows_the_reference_as_it_is(name: str) -> None:
    """The functions of reference.py that the page's block has, but for their docstrings."""
    text = Path(reference.__file__).read_text("utf-8")
    lines = text.splitlines()
    sources = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            said = function.body[0]
            body = lines[said.end_lineno : function.end_lineno]
            code = [*lines[function.lineno - 1 : said.lineno - 1], *body]
            sources[function.name] = "\n".join(code)
    (block,) = re.findall(r"^```py\n(.*?)^```$", page(name), re.M | re.S)
    shown = re.findall(r"^def (\w+)", block, re.M)
    assert shown[0] == name
    assert block == "\n\n\n".join(sources[function] for function in shown) + "\n"


def test_index_lists_every_page() -> None:
    rows = re.findall(r"^\| `([\w*]+)` \|.*\[(\w+)\]\((\w+)\.md\) \|$", page("index"), re.M)
    ops_of_rows, titles, pages = zip(*rows, strict=True)
    assert [op.removesuffix("_*_") for op in ops_of_rows] == list(titles) == list(pages)
    assert sorted(pages) == sorted([*reference.__all__, *OTHER_PAGES])
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *pages}


X, HEADS = torch.zeros(2, 7, 4), torch.zeros(2, 7, 2, 4)
DECAYS = torch.zeros(4)
LABELS = torch.zeros(2, 7, dtype=torch.int64)
WIDE = torch.zeros(1, 1, 1, 257)


def step_over(
    cache: torch.Tensor,
    gates: torch.dtype = torch.float32,
    lengths: torch.dtype = torch.int32,
    prune: float | None = None,
) -> torch.Tensor:
    """The last token of `cache`, as keys, values and query."""
    counts = torch.full(cache.shape[:1], cache.shape[1], dtype=lengths)
    held = torch.zeros(cache.shape[:-1], dtype=gates)
    return ops.forgetting_attention_step(cache[:, -1], cache, cache, held, counts, prune=prune)


# What each row of the pages' tables of errors speaks of.
MISTAKES: dict[str, list[Callable[[], object]]] = {
    "linear_scan": [
        lambda: ops.linear_scan(X, torch.zeros(2, 7, 5)),
        lambda: ops.linear_scan(X, X.half()),
        lambda: ops.linear_scan(X, DECAYS, cu_seqlens=torch.tensor([0, 7])),
    ],
    "hgru": [
        lambda: ops.hgru(X, X, theta=DECAYS),
        lambda: ops.hgru(X, X, activation="relu"),
        lambda: ops.hgru_step(X[:, 0].requires_grad_(), X[:, 0], state=torch.zeros(2, 4)),
    ],
    "lru_scan": [lambda: ops.lru_scan(X, DECAYS.half(), None, DECAYS.half())],
    "gated_linear_attention": [
        lambda: ops.gated_linear_attention(HEADS, HEADS, HEADS, torch.zeros(2, 7, 2, 3)),
        lambda: ops.gated_linear_attention(HEADS, HEADS, HEADS, HEADS.double()),
    ],
    "hgrn2": [
        lambda: ops.hgrn2(HEADS, HEADS, HEADS, DECAYS),
        lambda: ops.hgrn2(HEADS, HEADS, HEADS, q_activation="relu"),
    ],
    "forgetting_attention": [
        lambda: ops.forgetting_attention(HEADS, HEADS[:, :5], HEADS[:, :5], torch.zeros(2, 5, 2)),
        lambda: ops.forgetting_attention(HEADS, HEADS, HEADS, torch.zeros(2, 7, 1)),
        lambda: ops.forgetting_attention(HEADS, HEADS, HEADS, torch.zeros(2, 7, 2), window=0),
        lambda: ops.forgetting_attention(HEADS, HEADS, HEADS, torch.zeros(2, 7, 2), prune=1),
        lambda: ops.forgetting_attention(WIDE, WIDE, WIDE, torch.zeros(1, 1, 1)),
    ],
    "forgetting_attention_step": [
        lambda: step_over(HEADS.bfloat16(), gates=torch.bfloat16),
        lambda: step_over(HEADS, lengths=torch.int64),
        lambda: step_over(HEADS, prune=1e-3),
        lambda: step_over(HEADS, prune=1),
        lambda: step_over(WIDE),
    ],
    "wkv4": [lambda: ops.wkv4(DECAYS, torch.zeros(3), X, X)],
    "gated_rnn": [lambda: ops.gated_rnn(X, X, torch.zeros(4, 3))],
    "norm": [
        lambda: ops.norm(X, torch.zeros(2, 4)),
        lambda: ops.norm(X, gate=X, dtype=torch.bfloat16),
        lambda: ops.norm(X, kind="batch"),
    ],
    "add_norm": [
        lambda: ops.add_norm(X, X[..., :3]),
        lambda: ops.add_norm(X, X.half()),
    ],
    "glu": [
        lambda: ops.glu(torch.zeros(2, 7)),
        lambda: ops.glu(X, "gelu"),
    ],
    "linear_cross_entropy": [
        lambda: ops.linear_cross_entropy(X, torch.zeros(9, 3), LABELS),
        lambda: ops.linear_cross_entropy(X, torch.zeros(9, 4), LABELS, reduction="max"),
        lambda: ops.linear_cross_entropy(X, torch.zeros(9, 4), LABELS + 9),
    ],
    "rotary": [
        lambda: ops.rotary(HEADS, torch.zeros(1, 7, 3), torch.zeros(1, 7, 3)),
        lambda: ops.rotary(HEADS, torch.zeros(1, 7, 2).half(), torch.zeros(1, 7, 2).half()),
    ],
    "init": [
        lambda: ops.init_uniform_(X, 1, 0),
        lambda: ops.init_normal_(X, 0, -1),
        lambda: ops.init_constant_(LABELS, 0),
        lambda: ops.init_chrono_(X, 1),
        lambda: ops.init_gumbel_softmax_(X, 1, 0, 1),
        lambda: ops.init_gumbel_softmax_(X, 2, 0, 0),
        lambda: ops.init_lru_nu_log_(X, 0.9, 0.5),
        lambda: ops.init_lru_theta_log_(X, 0),
        lambda: ops.init_lru_gamma_log_(DECAYS, torch.zeros(3)),
        lambda: ops.init_long_(torch.zeros(2, 3), 1, 10),
        lambda: ops.init_long_(DECAYS, 0, 10),
        lambda: ops.init_rope_theta_(torch.zeros(2, 3)),
    ],
}


@by_page
def test_errors_are_what_the_op_says(name: str) -> None:
    """Row by row; a message that the page cuts short ends in three dots."""
    (table,) = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page(name), re.M)
    said = [re.match(r"\| `(.*?)` \|", row)[1].replace("\\|", "|") for row in table.splitlines()]
    for message, mistake in zip(said, MISTAKES[name], strict=True):
        with pytest.raises(RuntimeError) as raised:
            mistake()
        found = str(raised.value).splitlines()[0]
        whole = not message.endswith("...")
        assert found == message if whole else found.startswith(message.removesuffix(" ..."))


def test_index_quotes_double_backward_s_error() -> None:
    x = torch.zeros(2, 7, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.hgru(x, x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as raised:
        grad.sum().backward()
    assert f"`{str(raised.value).splitlines()[0]}`" in page("index").replace("\n", " ")
