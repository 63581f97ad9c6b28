"""W3: training speed of trpo.py and sb3-contrib's TRPO on HalfCheetah-v5, in turn, in one run.

    taskset -c 0 python benchmarks/w3_trpo.py              # needs the extras `mujoco` and `peers`; minutes
    taskset -c 0 python benchmarks/w3_trpo.py --repeats 1 --iterations 3 --envs 1

sb3-contrib's defaults for both: 2048 steps a rollout in each environment, critic minibatches of 128 rows, 15 steps of
conjugate gradient, 10 passes of the critic, 64-64 tanh, nothing normalised but advantages. SPS are environment steps a
second of training; the first iteration is left out for both. `--rollout-envs` measures the rollout alone, for ours.
`--clock cpu` counts processor seconds of the (single-threaded) process, for a machine that others use, too. Medians,
ratios, and every repeat are printed and saved.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import machine  # noqa: E402


@dataclass
class Options:
    repeats: int = 3  # of each system, in turn
    iterations: int = 6  # timed ones of a repeat
    envs: tuple[int, ...] = (1, 2)  # numbers of environments to compare at
    rollout_envs: int = 8  # environments of ours whose rollout is timed; 0: not
    clock: Literal["wall", "cpu"] = "wall"  # which seconds
    out: str | None = None  # file for the figures (JSON)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ours(num_envs: int, iterations: int, clock: str) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("trpo", ROOT / "trpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trpo"] = module
    spec.loader.exec_module(module)
    module.time = SimpleNamespace(perf_counter=CLOCKS[clock], time=time.time, time_ns=time.time_ns)
    with tempfile.TemporaryDirectory() as folder:
        args = module.Args(env_id="HalfCheetah-v5", num_envs=num_envs, norm_obs=False, norm_reward=False,
                           torch_threads=1, runs_dir=folder, run_name="w3", checkpoint_every=10**6)  # fmt: skip
        args.total_timesteps = int(2048 * num_envs * (iterations + 1) * 0.97)
        module.train(args)
        result = json.loads(Path(folder, "w3", "result.json").read_text())
    steps = result["sps"] * (result["rollout_seconds"] + result["update_seconds"])
    return {"sps": result["sps"], "rollout_sps": steps / result["rollout_seconds"],
            "rollout_ms": 1e3 * result["rollout_seconds"] / iterations,
            "update_ms": 1e3 * result["update_seconds"] / iterations}  # fmt: skip


def peer(num_envs: int, iterations: int, clock: str) -> dict[str, float]:
    from sb3_contrib import TRPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    envs = make_vec_env("HalfCheetah-v5", num_envs, seed=1)
    model, seconds = TRPO("MlpPolicy", envs, seed=1, device="cpu"), []
    update = model.train

    def timed() -> None:
        started = CLOCKS[clock]()
        update()
        seconds.append(CLOCKS[clock]() - started)

    model.train = timed  # type: ignore[method-assign]
    model.learn(2048 * num_envs)
    started = CLOCKS[clock]()
    model.learn(2048 * num_envs * iterations)
    total = CLOCKS[clock]() - started
    return {"sps": 2048 * num_envs * iterations / total, "update_ms": 1e3 * sum(seconds[1:]) / iterations,
            "rollout_ms": 1e3 * (total - sum(seconds[1:])) / iterations}  # fmt: skip


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    figures: dict = {"machine": machine(), "clock": options.clock, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for num_envs in options.envs:
        runs: dict[str, list[dict]] = {"ours": [], "sb3-contrib": []}
        for _ in range(options.repeats):
            for name, system in (("ours", ours), ("sb3-contrib", peer)):
                runs[name].append(system(num_envs, options.iterations, options.clock))
        medians = {name: statistics.median(r["sps"] for r in rs) for name, rs in runs.items()}
        ratio = medians["ours"] / medians["sb3-contrib"]
        figures[f"{num_envs} environments"] = {"median_sps": medians, "ratio": ratio, "runs": runs}
        for name, sps in medians.items():
            print(f"{num_envs} environments  {name:12} {sps:8,.0f} SPS   {runs[name]}", flush=True)
        print(f"{num_envs} environments  ratio {ratio:.2f}", flush=True)
    if options.rollout_envs:
        timed = (ours(options.rollout_envs, options.iterations, options.clock) for _ in range(options.repeats))
        rollouts = [run["rollout_sps"] for run in timed]
        figures[f"rollout, {options.rollout_envs} environments"] = rollouts
        print(f"rollout of {options.rollout_envs} environments: {statistics.median(rollouts):,.0f} SPS", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
