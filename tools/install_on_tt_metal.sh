#!/usr/bin/env bash
# Puts vLLM's empty target and this plugin into an environment that has TT-Metal's ttnn, torch and numpy, and changes
# none of those three: every package is installed under constraints that hold them where they are.
#
#   tools/install_on_tt_metal.sh [--dry-run] [PYTHON]     PYTHON: of that environment; default: the active python3
set -euo pipefail

VLLM=0.33.0
MEMBERS=(tt-registry tt-scheduler tt-sampling elastic-ep tt-vllm-plugin)
# What vLLM's build asks for, beyond the torch that is there.
BUILD_TOOLS=(cmake ninja packaging setuptools setuptools-scm setuptools-rust wheel)

say() { echo "install: $*" >&2; }
die() { say "$*"; exit 1; }

dry_run=
[[ ${1:-} == --dry-run ]] && { dry_run=1; shift; }
python=$(command -v "${1:-python3}") || die "no ${1:-python3}: activate the environment of TT-Metal, or name its python"
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
    printf '+ %s\n' "$*"
    [[ -n $dry_run ]] || "$@"
}

# Versions as NAME==VERSION; a name that is missing is left out.
held() {
    "$python" - <<'PYTHON'
import importlib.metadata as metadata
for name in ("torch", "numpy", "ttnn"):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
PYTHON
}

# What vLLM's empty target asks for. Its OpenCV would bring numpy 2, and torch stays.
wanted_by_vllm() {
    "$python" - <<'PYTHON'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm"):
    if "extra ==" not in line and not re.match(r"(opencv-python-headless|torch)\b", line):
        print(line)
PYTHON
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || die "$python is older than 3.12, which the plugin needs"
before=$(held)
for name in torch numpy; do
    grep -q "^$name==" <<<"$before" || die "$python has no $name: this script goes into an environment that TT-Metal made"
done
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ttnn") is None)' ||
    die "$python cannot find ttnn: build or install TT-Metal first"
say "kept as they are: ${before//$'\n'/, }"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ echo "$before"; echo "opencv-python-headless<4.12"; } >"$work/held.txt"

if "$python" -m pip --version >/dev/null 2>&1; then
    install=("$python" -m pip install)
else
    install=("$(command -v uv)" pip install --python "$python") || die "$python has no pip, and no uv is on PATH"
fi
install+=(--constraint "$work/held.txt")

run "${install[@]}" "${BUILD_TOOLS[@]}"
run env VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$VLLM" \
    "${install[@]}" --no-build-isolation --no-deps --no-binary vllm "vllm==$VLLM"
[[ -n $dry_run ]] || wanted_by_vllm >"$work/vllm.txt"
run "${install[@]}" --requirement "$work/vllm.txt" "opencv-python-headless<4.12"
run "${install[@]}" "${MEMBERS[@]/#/./packages/}"

[[ -n $dry_run ]] && exit
after=$(held)
[[ $after == "$before" ]] || die "changed against its word: $(diff <(echo "$before") <(echo "$after") | grep '^[<>]' | xargs)"
say "done; what would happen now:"
exec "$python" -m vllm_tt_plugin doctor
