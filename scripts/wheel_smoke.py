"""What an installed wheel must do, in the environment that it was installed in: import quickly, run
ops and models, train, bring its command and its C++ package. One line a check; exit status 1 with
the first that fails."""

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

MOST_SECONDS = 0.5  # from `import torch` to the first op's result

CODE = """
import time
import torch
torch.ones(2).sum()
begin = time.perf_counter()
import tidegate
x = torch.ones(1, 3, 4)
tidegate.ops.hgru(x, x)
print(time.perf_counter() - begin)
"""


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"tidegate: {command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_import() -> str:
    seconds = min(float(run(sys.executable, "-c", CODE)) for _ in range(5))
    if seconds > MOST_SECONDS:
        sys.exit(f"tidegate: {seconds:.2f} s from importing torch to the first op")
    return f"import to first op: {seconds:.2f} s over importing torch"


def check_models() -> str:
    import torch

    import tidegate

    devices = ["cpu"] + ["cuda"] * (
        torch.cuda.is_available() and bool(tidegate._library.build_info()["architectures"])
    )
    for device in devices:
        for mixer in tidegate.models.mixers():
            config = tidegate.models.LMConfig(mixer, vocab_size=64, dim=64, layers=2)
            model = tidegate.models.CausalLM(config, device=device)
            ids = torch.randint(64, (2, 17), device=device)
            model(ids, labels="next").loss.backward()
            assert model.generate(ids, 3, temperature=0.0).shape == (2, 20)
    return f"{len(tidegate.models.mixers())} mixers train and generate on {' and '.join(devices)}"


def check_command() -> str:
    scripts = Path(sysconfig.get_path("scripts"))
    run(scripts / "tidegate", "info")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "tide.txt"
        text.write_text("the tide turns twice a day. " * 200, encoding="utf-8")
        small = ["--dim", 32, "--layers", 1, "--context", 32, "--batch-size", 4, "--steps", 4]
        out = Path(folder) / "run"
        run(scripts / "tidegate", "train", text, "--out", out, "--quiet", "--device", "cpu", *small)
        run(scripts / "tidegate", "generate", out, "--tokens", 4, "--device", "cpu")
    return "tidegate info, train and generate"


def check_bench() -> str:
    scripts = Path(sysconfig.get_path("scripts"))
    run(scripts / "tidegate", "bench", "--models", "--help")
    return "tidegate bench --models finds its program"


def check_cpp_package() -> str:
    import tidegate

    prefix = Path(tidegate.cmake_prefix_path)
    for name in ("lib/cmake/tidegate/tidegate-config.cmake", "include/tidegate/tidegate.h"):
        if not (prefix / name).is_file():
            sys.exit(f"tidegate: {prefix / name} is not there")
    return f"C++ package in {prefix}"


def main() -> None:
    begin = time.perf_counter()
    for check in (check_import, check_models, check_command, check_bench, check_cpp_package):
        print(f"tidegate: {check()}", flush=True)
    print(f"tidegate: the wheel works ({time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
