"""The pages: their Python examples run, their C++ example is examples/cpp, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidegate.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def prose(page: Path) -> str:
    """The page without its fenced blocks: `f[name](x)` in code is no link, and `# x` no heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(ROOT / name, "python")])
def test_python_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of a page, as one script; they leave no files."""
    monkeypatch.chdir(tmp_path)
    script = "\n".join(blocks(ROOT / name, "python"))
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
    if name == "README.md":
        assert "the tide turns twice a day" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_readme_has_both_examples() -> None:
    assert "tidegate.nn.HGRU" in "".join(blocks(ROOT / "README.md", "python"))
    # test_packaging.py builds and runs this program against the installed library.
    program = (ROOT / "examples" / "cpp" / "main.cpp").read_text("utf-8")
    first = "#include <tidegate/tidegate.h>\n"  # what stands above it is for readers of the file
    shown = [block[block.index(first) :] for block in blocks(ROOT / "README.md", "cpp")]
    assert shown == [program[program.index(first) :]]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page if path == "" else page.parent / path
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}: no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_pages_name_exist(name: str) -> None:
    """`src/ops/hgru.cpp` and its like, as far as they are written as paths from the root."""
    text = (ROOT / name).read_text("utf-8")
    folders = "benchmarks|cmake|docs|examples|include|kernels|python|scripts|src|tests|third_party"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{name}: {path}"


def test_readme_marks_where_figures_go() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    begin, end = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
    assert text.count(begin) == text.count(end) == 1
    assert text.index(begin) < text.index(end)


def test_commands_of_the_pages_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page in PAGES:
        named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", page.read_text("utf-8"), re.M)
        for target in {a or b for a, b in named}:
            assert target in targets, f"{page.name}: make {target}"


def test_help_lists_the_commands_that_pages_use() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    known = build_parser().format_help()
    for command in set(re.findall(r"^tidegate ([a-z]+) ", text, re.M)):
        assert re.search(rf"^\s+{command}\s", known, re.M), command
