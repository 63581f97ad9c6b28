"""Learning curves: one script, one set of flags, several seeds -> benchmarks/results/NAME.json.

    python benchmarks/learning.py --script rppo_lstm --name cartpole_novel --seeds 10 -- --env-id CartPoleNoVel-v1

Runs one seed after the other as a user would, from the shell. Resumable: a finished seed is kept, a killed one goes on
from its checkpoint, so the same command can be given until all are done. Each seed's final agent plays --eval-episodes
deterministic episodes. The results hold every seed's evaluation and curve, failed runs included, and the command,
commit, machine, versions and hyperparameters that produced them.
"""

import importlib.util
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Options:
    script: str  # its name without .py
    name: str  # of the result
    seeds: int = 5  # seeds 1 to this
    eval_episodes: int = 20  # deterministic episodes of each final agent
    runs_dir: str = "runs/learning"  # where the run directories are kept


def machine() -> str:
    """The processor's name and the number of cores."""
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in x]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def curve(run_dir: Path, points: int = 60) -> list[list[float]]:
    """[step, mean return of the episodes that ended since the last point] of a run, at most `points` of them."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return []
    scalars = events.Scalars("charts/episodic_return")
    groups = np.array_split(np.array([[s.step, s.value] for s in scalars]), min(points, len(scalars)))
    return [[int(g[-1, 0]), round(float(g[:, 1].mean()), 3)] for g in groups]


def interval(scores: np.ndarray, samples: int = 20_000) -> dict[str, float]:
    """The interquartile mean over seeds with its 95 % bootstrap interval (Agarwal et al. 2021, for one task)."""
    def iqm(x):
        x = np.sort(x, -1)
        cut = x.shape[-1] // 4
        return x[..., cut : x.shape[-1] - cut].mean(-1)
    resampled = np.random.default_rng(0).choice(scores, (samples, len(scores)))
    low, high = np.percentile(iqm(resampled), [2.5, 97.5])
    return {"iqm": float(iqm(scores)), "low": float(low), "high": float(high)}


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, flags = tyro.cli(Options, args=sys.argv[1:split], description=__doc__), sys.argv[split + 1 :]
    spec = importlib.util.spec_from_file_location(options.script, ROOT / f"{options.script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[options.script] = module
    spec.loader.exec_module(module)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    result = {
        "script": f"{options.script}.py", "flags": " ".join(flags), "commit": commit.strip(), "machine": machine(),
        "versions": {"torch": torch.__version__, "gymnasium": gym.__version__}, "eval_episodes": options.eval_episodes,
        "date": time.strftime("%Y-%m-%d"), "seeds": {},
    }  # fmt: skip
    target = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    for seed in range(1, options.seeds + 1):
        run_dir = Path(options.runs_dir, options.name, f"seed{seed}")
        command = [sys.executable, str(ROOT / f"{options.script}.py")]
        if (run_dir / "checkpoint.pt").exists():
            command += ["--resume", str(run_dir)]
        else:
            command += [*flags, "--seed", str(seed), "--runs-dir", str(run_dir.parent), "--run-name", run_dir.name]
        started = time.time()
        if not (run_dir / "shell_seconds").exists():  # written behind a run that has ended
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                result["seeds"][seed] = {"failed": done.stderr.strip().split("\n")[-1]}
                continue
            (run_dir / "shell_seconds").write_text(f"{time.time() - started:.1f}")
        args = module.Args(**module.load(str(run_dir))["args"])
        envs = module.make_envs(args, min(args.num_envs, options.eval_episodes))
        agent = module.Agent(envs.single_observation_space, envs.single_action_space, args)
        module.load(str(run_dir), agent)
        returns = module.evaluate(agent, envs, options.eval_episodes, 1_000_000 * seed)  # no two agents share starts
        run = json.loads((run_dir / "result.json").read_text())
        result["seeds"][seed] = {
            "eval_mean": round(float(np.mean(returns)), 3), "eval_std": round(float(np.std(returns)), 3),
            "positive": float(np.mean(np.array(returns) > 0)), "mean_return_100": run["mean_return_100"],
            "global_step": run["global_step"], "sps": round(run["sps"]),
            "shell_seconds": float((run_dir / "shell_seconds").read_text()), "curve": curve(run_dir),
        }  # fmt: skip
        defaults = vars(module.Args())
        result["changed_from_plain_defaults"] = {
            k: v for k, v in vars(args).items() if v != defaults[k] and k not in ("seed", "run_name", "runs_dir")
        }
        print(options.name, seed, {k: v for k, v in result["seeds"][seed].items() if k != "curve"}, flush=True)
        scores = np.array([s["eval_mean"] for s in result["seeds"].values() if "eval_mean" in s])
        result["eval"] = interval(scores)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
