#!/usr/bin/env python3
"""Real text for training runs: the Python standard library and documentation packages of Debian.

    python benchmarks/text_corpus.py corpus.tar.xz

Downloads the packages (`apt-get download`, unpacked, not installed) and writes one text file a
document: the standard library's sources, texts and reStructuredText as they are (Sphinx ships its
sources), HTML as the text that it shows. Copies, and documents below 1 kB, are left out.
`unpack(archive, folder)` is the way back, to a folder that `tidegate train FOLDER --packed` reads.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from tidegate.training.stdlib_corpus import load_stdlib

PACKAGES = (
    "cmake-doc",
    "debian-policy",
    "debian-reference-en",
    "developers-reference",
    "git-doc",
    "linux-doc-6.1",
    "octave-doc",
    "perl-doc",
    "postgresql-doc-15",
    "python-django-doc",
    "python-pandas-doc",
    "python-sqlalchemy-doc",
    "python-sympy-doc",
    "python3.11-doc",
    "sphinx-doc",
    "sqlite3-doc",
    "vim-doc",
    "zsh-doc",
)
SMALLEST = 1000  # bytes of a document
_TEXTS = (".rst", ".txt", ".pod")
_BLOCKS = re.compile(
    "address|article|blockquote|br|caption|dd|div|dl|dt|fieldset|figure|form|h[1-6]|hr|li|main|ol|p|"
    "pre|section|table|td|th|tr|ul"
).fullmatch
_HIDDEN = {"head", "script", "style", "nav", "header", "footer", "button", "select", "svg"}
_COMMON = 0.2  # lines in more than this part of a package's pages are navigation


class _Text(HTMLParser):
    """The text that a page shows, a line a block; what stands in <pre> keeps its line ends."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden: list[str] = []
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif _BLOCKS(tag):
            self.parts.append("\n")
            self._verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif _BLOCKS(tag):
            self.parts.append("\n")
            self._verbatim -= tag == "pre" and self._verbatim > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))


def page_lines(page: str) -> list[str]:
    """The lines of an HTML page's text; empty ones stand alone."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    lines = [line if line.startswith("  ") else line.lstrip() for line in lines]
    return [line for n, line in enumerate(lines) if line or (n and lines[n - 1])]


def package_documents(root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, text) of the documents below a folder: its texts, or, where it has none of 10 kB in
    all, its HTML pages without the lines that many of them share."""
    texts = dict(_texts(root))
    if sum(map(len, texts.values())) >= 10_000:
        yield from texts.items()
        return
    pages = {
        path.relative_to(root).as_posix(): page_lines(_decoded(path.read_bytes()))
        for path in sorted(root.rglob("*.html"))
        if path.is_file() and not path.is_symlink()
    }
    seen = Counter(line for lines in pages.values() for line in set(lines) if line)
    often = max(3, _COMMON * len(pages))
    for name, lines in pages.items():
        text = "\n".join(line for line in lines if seen[line] <= often)
        yield name, text.strip().encode() + b"\n"


def _texts(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        name = path.name.removesuffix(".gz")
        if not name.endswith(_TEXTS) or not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        yield path.relative_to(root).as_posix(), content


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def is_prose(text: bytes) -> bool:
    """Whether somebody might read it: UTF-8, large enough, lines of a readable length, no table of
    numbers."""
    try:
        characters = text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if len(text) < SMALLEST or len(text) > 400 * (1 + text.count(b"\n")):
        return False
    letters = sum(map(str.isalpha, characters))
    return letters >= 0.45 * len(characters) and "\0" not in characters


def distinct(documents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The documents without those whose words an earlier one has."""
    seen = set()
    for name, text in documents:
        digest = hashlib.sha256(b" ".join(text.split())).digest()
        if digest not in seen:
            seen.add(digest)
            yield name, text


def gather(packages: Iterable[str], folder: Path) -> Iterator[tuple[str, bytes]]:
    """The standard library's files, then the packages', which are downloaded into `folder`."""
    train, valid = load_stdlib()
    for number, text in enumerate(train + valid):
        yield f"python/{number:04}.py", text
    for package in packages:
        root = folder / package
        if not root.is_dir():
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
            (archive,) = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg", "-x", archive, root], check=True)
        for name, text in package_documents(root):
            yield f"{package}/{name}", text


def write(path: Path, documents: Iterable[tuple[str, bytes]]) -> dict[str, tuple[int, int]]:
    """A .tar.xz of the documents; their number and bytes by package."""
    counts: dict[str, tuple[int, int]] = {}
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name, text in documents:
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
            count, size = counts.get(name.partition("/")[0], (0, 0))
            counts[name.partition("/")[0]] = (count + 1, size + len(text))
    return counts


def unpack(path: Path, folder: Path) -> None:
    """The documents of a .tar.xz as files below `folder`."""
    with tarfile.open(path, "r:xz") as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the .tar.xz to write")
    parser.add_argument("--packages", nargs="*", default=PACKAGES)
    parser.add_argument("--downloads", type=Path, help="folder that keeps the packages")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.downloads or Path(scratch)
        found = ((n, t) for n, t in gather(arguments.packages, folder) if is_prose(t))
        counts = write(arguments.out, distinct(found))
    for name, (count, size) in counts.items():
        print(f"{name:24} {count:6} documents {size / 1e6:8.1f} MB", file=sys.stderr)
    size = sum(size for _, size in counts.values())
    packed = arguments.out.stat().st_size
    print(f"{size / 1e6:.1f} MB of text, {packed / 1e6:.1f} MB packed", file=sys.stderr)


if __name__ == "__main__":
    main()
