#!/usr/bin/env bash
# Where there is a GPU: are the scripts right there (pytest -m cuda), and how fast (speed.py)?
#
#   benchmarks/gpu.sh --wheels      before, with a package index: collects in .whl/ what a machine
#                                   with torch, but without an index, lacks (Python 3.12)
#   benchmarks/gpu.sh [DIRECTORY]   there: logs and CSV rows go to it, or to runs/gpu
#   benchmarks/gpu.sh --dry         anywhere: the same programs, tiny, on the CPU
set -euo pipefail
cd "$(dirname "$0")/.."
sections="gpu-games gpu-atari gpu-lstm speedrun"

if [ "${1:-}" = --wheels ]; then
    python3 -m pip download --quiet --no-deps --only-binary=:all: -c constraints.txt \
        --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 -d .whl \
        gymnasium farama-notifications cloudpickle ale-py tyro docstring-parser typeguard
    exit
fi
if [ "${1:-}" = --dry ]; then
    python3 -m pytest tests/test_cuda.py -m cuda --dry -p no:cacheprovider
    exec python3 benchmarks/speed.py $sections --dry
fi
out="${1:-runs/gpu}"
mkdir -p "$out"
if compgen -G ".whl/*.whl" >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .whl/*.whl
    export PYTHONPATH="$site"
fi
export PYTHONUNBUFFERED=1
timeout 180 python3 -m pytest tests/test_cuda.py -m cuda -n 6 -rP 2>&1 | tee "$out/tests.log" || true
for section in $sections; do # what comes first matters most, if the time runs out
    timeout 240 python3 benchmarks/speed.py "$section" --repeats 1 --results "$out" 2>&1 |
        tee -a "$out/speed.log" || true
done
