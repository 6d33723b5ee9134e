"""Says whether two builds hold the same machine code for every kernel, names aside.

    python scripts/compare_sass.py BEFORE AFTER [--arch sm_90a]

BEFORE and AFTER are each an object, a cubin, a shared library, or a folder, of which all objects
(*.cu.o) below it count. Every kernel of both is disassembled with cuobjdump, of the CUDA toolkit or
of the triton that came with torch (run this with the Python of .venv then), and reduced to its
instructions and their encodings, without symbol names. The two builds agree when they hold the same
bodies the same number of times for each architecture. So a change that only renames kernels, moves
them between files or into another namespace shows no difference, and any changed instruction,
register or scheduling hint does. Ends with 1 where something differs, and names it.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# `        /*0010*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */`, and the
# second half of the encoding alone on the next line.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?);\s+/\* (?P<code>0x[0-9a-f]+) \*/")
SECOND_HALF = re.compile(r"^\s+/\* (?P<code>0x[0-9a-f]+) \*/")
SYMBOL = re.compile(r"`\(.*?\)|`\w+|\b_Z\w+")


class Kernel(NamedTuple):
    arch: str
    digest: str
    instructions: int
    name: str


def cuobjdump() -> str:
    """The disassembler: on PATH, in the toolkit, or in triton's wheel."""
    candidates = [shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folder = Path(triton.submodule_search_locations[0])
        candidates.append(str(folder / "backends/nvidia/bin/cuobjdump"))
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit("compare_sass: no cuobjdump on PATH, in /usr/local/cuda or beside triton")


def objects(path: Path) -> list[Path]:
    """The files that a command-line argument stands for."""
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*.cu.o"))
    if not found:
        sys.exit(f"compare_sass: no *.cu.o below {path}")
    return found


def kernels(path: Path, arch: str | None) -> list[Kernel]:
    """The kernels of one file, in the order in which cuobjdump prints them."""
    command = [cuobjdump(), "--dump-sass", *(["-arch", arch] if arch else []), str(path)]
    found: list[Kernel] = []
    current_arch, name, count = "", "", 0
    digest = hashlib.sha256()

    def finish() -> None:
        if name and count:
            found.append(Kernel(current_arch, digest.hexdigest(), count, name))

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := INSTRUCTION.match(line):
                text = SYMBOL.sub("SYMBOL", match["text"])
                # What the linker fills in is part of an encoding: there the text alone counts.
                relocated = "SYMBOL" in text or "c[0x4]" in text
                digest.update((text if relocated else text + match["code"]).encode())
                count += 1
            elif match := SECOND_HALF.match(line):
                digest.update(match["code"].encode())
            elif "Function :" in line:
                finish()
                name, count, digest = line.split(":", 1)[1].strip(), 0, hashlib.sha256()
            elif line.startswith("\tcode for"):
                finish()
                current_arch, name = line.split()[-1], ""
        finish()
    if process.returncode != 0:
        sys.exit(f"compare_sass: cuobjdump failed on {path}")
    return found


def demangled(names: list[str]) -> list[str]:
    """C++ names, without the parameters of functions."""
    if not names:
        return []
    text = subprocess.run(["c++filt", "-p", *names], capture_output=True, text=True, check=False)
    lines = text.stdout.splitlines()
    return lines if len(lines) == len(names) else names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--arch", help="this architecture alone, such as sm_90a")
    arguments = parser.parse_args()

    sides = []
    for path in (arguments.before, arguments.after):
        if not path.exists():
            sys.exit(f"compare_sass: {path} does not exist")
        bodies: dict[tuple[str, str], list[Kernel]] = collections.defaultdict(list)
        for file in objects(path):
            for kernel in kernels(file, arguments.arch):
                bodies[kernel.arch, kernel.digest].append(kernel)
        sides.append(bodies)
    before, after = sides
    total = sum(len(same) for same in before.values())
    if total == 0:
        sys.exit(f"compare_sass: no kernel in {arguments.before}")

    differing = 0
    for label, here, there in (("only before", before, after), ("only after", after, before)):
        extra = [kernel for key, same in here.items() for kernel in same[len(there.get(key, [])) :]]
        differing += len(extra)
        for kernel, name in zip(extra, demangled([k.name for k in extra]), strict=True):
            print(f"{label}: {kernel.arch} {kernel.instructions:6} instructions  {name}")
    print(
        f"{total} kernels before, {sum(len(same) for same in after.values())} after: "
        + (f"{differing} without a counterpart" if differing else "the same machine code")
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
