"""A directive that shows public C++ headers: every documented declaration and its comment.

    ```{cpp-headers} ops
    ```

shows `include/tidegate/ops/*.h`. It takes the place of doxygen, which pip cannot install, and of
breathe: a comment of three slashes and the declaration after it are all that our headers use, and
the pages show both as they stand. Members of a struct are listed under it.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from header_comments import Declaration, declarations
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

INCLUDE = Path(__file__).resolve().parents[2] / "include"

# "gamma: [D] lower bounds" or "k, v: like q": an argument of a comment's list.
_ITEM = re.compile(r"^[a-z]\w*(, [a-z]\w*)*:\s")


def _comment_nodes(comment: list[str]) -> list[nodes.Node]:
    """Paragraphs, indented lines as they stand, and lists of arguments."""
    found: list[nodes.Node] = []
    block: list[str] = []
    kind = "paragraph"

    def flush() -> None:
        nonlocal block
        if not block:
            return
        if kind == "literal":
            found.append(nodes.literal_block("", "\n".join(block), language="text"))
        elif kind == "item":
            if not found or not isinstance(found[-1], nodes.bullet_list):
                found.append(nodes.bullet_list())
            text = " ".join(part.strip() for part in block)
            name, _, rest = text.partition(":")
            said = nodes.Text(f": {rest.strip()}")
            argument = nodes.paragraph("", "", nodes.literal("", name), said)
            found[-1] += nodes.list_item("", argument)
        else:
            found.append(nodes.paragraph("", " ".join(block)))
        block = []

    for line in comment:
        indented = line.startswith("  ")
        if not line.strip():
            flush()
            kind = "paragraph"
            continue
        if _ITEM.match(line):
            flush()
            kind = "item"
        elif not block:
            kind = "literal" if indented else "paragraph"
        elif kind == "item" and not indented:
            flush()
            kind = "paragraph"
        block.append(line)
    flush()
    return found


class CppHeaders(SphinxDirective):
    """Shows the headers of one folder of include/tidegate; see the module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for header in sorted((INCLUDE / "tidegate" / self.arguments[0]).glob("*.h")):
            self.env.note_dependency(str(header))
            declared = declarations(header)
            if declared:
                found.append(self._header(header, declared))
        if not found:
            raise self.error(f"no documented header in include/tidegate/{self.arguments[0]}")
        return found

    def _header(self, header: Path, declared: list[Declaration]) -> nodes.section:
        path = header.relative_to(INCLUDE).as_posix()
        section = nodes.section("", nodes.title(path, f"<{path}>"), ids=[nodes.make_id(path)])
        for one in declared:
            name = one.name()
            below = nodes.section("", nodes.title(name, name))
            below["ids"] = [nodes.make_id(f"{header.stem} {name} {len(section)}")]
            below += nodes.literal_block("", one.code, language="cpp")
            below += _comment_nodes(one.comment)
            for member in one.members:
                below += nodes.literal_block("", member.code, language="cpp")
                below += nodes.block_quote("", *_comment_nodes(member.comment))
            section += below
        return section


def setup(app: Sphinx) -> dict[str, object]:
    app.add_directive("cpp-headers", CppHeaders)
    return {"parallel_read_safe": True}
