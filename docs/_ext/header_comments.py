"""Reads a C++ header of ours: its public declarations and their comments of three slashes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Declaration:
    """A documented declaration, and the documented members of a struct."""

    comment: list[str]
    code: str
    members: list[Declaration] = field(default_factory=list)

    def name(self) -> str:
        """A function's is before its parenthesis, a type's after its keyword."""
        argument = re.match(r"TORCH_(?:ARG|MODULE)\((?:.*, )?(\w+)\)", self.code)
        kind = re.search(r"\b(?:struct|class|enum class|enum|using)\s+(?:TIDEGATE_\w+\s+)?(\w+)",
                         self.code)  # fmt: skip
        space = re.match(r"namespace\s+([\w:]+)", self.code)
        function = re.search(r"([\w~]+|operator\W+)\s*\(", self.code)
        variable = re.search(r"(\w+)\s*(?:=.*|\{.*)?;?$", self.code, re.S)
        found = argument or space or kind or function or variable
        return found.group(1) if found else self.code


def declarations(header: Path) -> list[Declaration]:
    """The header's documented public declarations, in their order."""
    found: list[Declaration] = []
    undocumented: Declaration | None = None  # a type whose members may be documented
    comment: list[str] = []
    is_public = True
    lines = iter(header.read_text("utf-8").splitlines())
    for line in lines:
        text = line.strip()
        if text.startswith("///"):
            comment.append(text.removeprefix("///").removeprefix(" "))
            continue
        if access := re.match(r"\s+(public|protected|private):", line):
            is_public = access.group(1) == "public"
        if re.match(r"(struct|class)\s.*\{", line):
            is_public = True
            undocumented = None if comment else Declaration([], _declaration(line, lines))
        if not comment:
            continue
        documented = Declaration(comment, _declaration(line, lines))
        comment = []
        if not line.startswith(" "):
            found.append(documented)
        elif is_public:
            if undocumented is not None:
                found.append(undocumented)
                undocumented = None
            found[-1].members.append(documented)
    return found


def _declaration(line: str, lines: Iterator[str]) -> str:
    """The declaration from `line` on, up to the semicolon that ends it or its body's brace."""
    code = [line]
    while not re.search(r"[;{}]\s*(//.*)?$|\)\s*$", code[-1]) or _is_open("\n".join(code)):
        following = next(lines, None)
        if following is None:
            break
        code.append(following)
    indent = len(line) - len(line.lstrip())
    text = "\n".join(part[indent:] for part in code)
    body = r"\s*((?<!:):(?!:)\s*\w[^;]*)?\{\s*$"  # with a list of bases or initialisers
    return re.sub(body, "", text)


def _is_open(code: str) -> bool:
    return code.count("(") != code.count(")")
