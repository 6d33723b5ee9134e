"""Lists the longest function bodies of the CUDA sources: kernels shall read as their pseudo-code.

    python scripts/kernel_bodies.py [--above 60] [FOLDER]

A body's length is the number of lines between its braces. Split one that is above 60 into phases
with names, as its neighbours do, and compare the machine code (scripts/compare_sass.py): where the
compiler makes other code of the parts, the body stays whole. Ends with 1 where one is above.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# What may hold braces that open nothing: comments, strings, characters, the preprocessor's lines.
NO_CODE = re.compile(
    r"//[^\n]*"
    r"|/\*(?:[^*]|\*(?!/))*\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])'"
    r"|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*",
    re.MULTILINE,
)
# What stands between a function's arguments and its brace.
FUNCTION = re.compile(r"\)\s*(?:const|noexcept|override|->[^;]*|:[^;]*)*\s*$")
TYPE = re.compile(r"(?:template\s*<[^{}]*>\s*)?(?:class|struct|namespace|enum|union|extern)\b")
NAME = re.compile(r"(\w+)\s*\(")
ATTRIBUTES = {"__launch_bounds__", "__maxnreg__", "__align__", "alignas", "requires"}


def bodies(source: str) -> Iterator[tuple[int, int, str]]:
    """Lines between the braces, line of the opening one, and name of every function; lambdas and
    loops belong to the function around them."""
    code = NO_CODE.sub(lambda match: "\n" * match.group().count("\n"), source)
    opened: list[tuple[str, int]] = []  # function or "", line
    statement, line, depth = "", 1, 0
    for character in code:
        line += character == "\n"
        if character == "{":
            head = statement.strip()
            is_function = depth == 0 and FUNCTION.search(head) and not TYPE.match(head)
            names = [n for n in NAME.findall(head) if n not in ATTRIBUTES] if is_function else []
            opened.append((names[0] if names else "", line))
            depth += bool(names)
            statement = ""
        elif character == "}":
            name, first = opened.pop()
            depth -= bool(name)
            if name:
                yield line - first - 1, first, name
            statement = ""
        else:
            statement = "" if character == ";" else statement + character


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("kernels"))
    parser.add_argument("--above", type=int, default=60, help="lines that a body may have")
    options = parser.parse_args()
    found = [
        (lines, f"{path}:{first}", name)
        for path in sorted(options.folder.rglob("*.cu*"))
        for lines, first, name in bodies(path.read_text(encoding="utf-8"))
        if lines > options.above
    ]
    for lines, place, name in sorted(found, reverse=True):
        print(f"{lines:4} {place} {name}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
