"""The same short training again and again, in one process: python tests/repeat.py --runs 2000

Each of the five scripts (trpo.py and ppo1_mpi.py also with an LSTM) trains on a toy without chance,
from one seed, and the weights at the end must be the same bit for bit. Weights that differ are
counted and kept beside the first ones, as DIR/SCRIPT-RUN.pt and DIR/SCRIPT-0.pt. Ends with exit
code 1 if there are any.
"""

import argparse
import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
SMALL = dict(num_envs=2, num_steps=16, num_minibatches=2, hidden_size=8, encoder_size=8)
CASES = {
    "rppo_lstm": ("rppo_lstm", "envs:Clock-v0", SMALL),
    "rppo_continuous": ("rppo_continuous", "envs:BoxClock-v0", SMALL),
    "rppo_gru_atari": (
        "rppo_gru_atari", "ALE/Pong-v5",
        dict(num_envs=2, num_steps=4, num_minibatches=2, hidden_size=8, update_epochs=1, torch_threads=1),
    ),
    "trpo": ("trpo", "envs:Clock-v0", dict(num_envs=2, num_steps=16, encoder_size=8)),
    "trpo-lstm": (
        "trpo", "envs:Clock-v0",
        dict(num_envs=2, num_steps=16, encoder_size=8, hidden_size=8, memory="lstm"),
    ),
    "ppo1_mpi": ("ppo1_mpi", "envs:Clock-v0", dict(num_steps=32, encoder_size=8)),
    "ppo1_mpi-lstm": (
        "ppo1_mpi", "envs:Clock-v0",
        dict(num_steps=32, num_minibatches=2, encoder_size=8, hidden_size=8, memory="lstm"),
    ),
}  # fmt: skip


def weights(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """Those after one short training."""
    name, env_id, flags = CASES[case]
    script = importlib.import_module(name)
    steps = 3 * flags["num_steps"] * flags.get("num_envs", 1) - 10  # three rollouts
    args = script.Args(
        env_id=env_id, total_timesteps=steps, eval_episodes=0, runs_dir=str(folder), **flags
    )
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        with contextlib.redirect_stderr(null):
            agent = script.train(args)
    shutil.rmtree(folder, ignore_errors=True)
    return {key: value.clone() for key, value in agent.state_dict().items()}


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=2000, help="of each case")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dir", type=Path, default=Path("differ"), help="for weights that differ")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp())
    differ = 0
    for case in options.cases:
        began = time.time()
        first = weights(case, folder / "runs")
        found = 0
        for number in range(1, options.runs):
            again = weights(case, folder / "runs")
            if all(torch.equal(first[key], again[key]) for key in first):
                continue
            found += 1
            options.dir.mkdir(parents=True, exist_ok=True)
            torch.save(first, options.dir / f"{case}-0.pt")
            torch.save(again, options.dir / f"{case}-{number}.pt")
        seconds = time.time() - began
        print(f"{case}: {options.runs} runs, {found} differ, {seconds:.0f} s", flush=True)
        differ += found
    shutil.rmtree(folder, ignore_errors=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
