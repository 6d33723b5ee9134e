"""wheel_version.py FOLDER cpu|cuda: gives an unpacked wheel the local version of what it fits.

0.1.0 becomes 0.1.0+cu130torch2.11, or 0.1.0+cputorch2.11 without CUDA kernels: pip then lists which
one is installed, and an index can hold them side by side.
"""

import json
import re
import sys
from pathlib import Path


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    info = json.loads((folder / "tidegate/lib/build_info.json").read_text("utf-8"))
    if bool(info["architectures"]) != (kind == "cuda"):
        sys.exit(f"tidegate: the {kind} wheel was built with {info['cuda']!r}")
    variant = info["torch_variant"] if kind == "cuda" else "cpu"
    version = f"{info['version']}+{variant}torch{'.'.join(info['torch'].split('.')[:2])}"
    (old,) = folder.glob("tidegate-*.dist-info")
    metadata = old / "METADATA"
    text = re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text("utf-8"), flags=re.M)
    metadata.write_text(text, "utf-8")
    old.rename(folder / f"tidegate-{version}.dist-info")
    folder.rename(folder.with_name(f"tidegate-{version}"))
    print(f"tidegate: {version}")


if __name__ == "__main__":
    main()
