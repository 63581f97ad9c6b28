#!/usr/bin/env bash
# The first quarter of an hour with a GPU: are the scripts right there (pytest -m cuda), and how fast
# (benchmarks/gpu.py)? Ten minutes at most.
#
#   benchmarks/gpu.sh --wheels      before, with a package index: collects in .whl/, 4 MiB, what a
#                                   machine with torch, but without an index, lacks (Python 3.12)
#   benchmarks/gpu.sh [DIRECTORY [MINUTES]]   on that machine: writes logs and CSV files there, or to
#                                   runs/gpu; the speeds take 6.5 minutes, or so many
#   benchmarks/gpu.sh --dry         anywhere: the same programs, tiny, on the CPU
#
# If time is left, one whole training (published for PPO: a return of 128.9 after 10M steps):
#
#   python rppo_gru_atari.py --env-id ALE/Breakout-v5 --cuda --amp --num-envs 64
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --wheels ]; then
    python3 -m pip download --quiet --no-deps --only-binary=:all: -c constraints.txt \
        --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 -d .whl \
        gymnasium farama-notifications cloudpickle ale-py tyro docstring-parser typeguard \
        stable-baselines3 sb3-contrib
    ls -l .whl
    exit
fi

if [ "${1:-}" = --dry ]; then
    python3 -m pytest tests/test_cuda.py -m cuda --dry -p no:cacheprovider
    exec python3 benchmarks/gpu.py --dry
fi

out="${1:-runs/gpu}"
mkdir -p "$out"
if compgen -G ".whl/*.whl" >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .whl/*.whl
    export PYTHONPATH="$site"
fi
export PYTHONUNBUFFERED=1
status=0
timeout 180 python3 -m pytest tests/test_cuda.py -m cuda -n 6 -rP -p no:cacheprovider 2>&1 |
    tee "$out/tests.log" || status=1
python3 benchmarks/gpu.py --minutes "${2:-6.5}" --results "$out" 2>&1 | tee "$out/speed.log" || status=1
exit "$status"
