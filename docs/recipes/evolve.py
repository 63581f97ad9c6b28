"""Evolving hyperparameters: Ray Tune's population based training, over runs of rppo_lstm.py.

    python docs/recipes/evolve.py --env-id CartPole-v1 --mask-velocity  # pip install ".[tune]"
    python docs/recipes/evolve.py fixed --env-id CartPole-v1 --mask-velocity  # without evolution

MEMBERS runs, each with its own hyperparameters, train for GENERATIONS of STEPS steps. After each,
the worst quarter go on with weights and hyperparameters of one of the best, these times 0.8 or 1.2
(Jaderberg et al. 2017, arXiv:1711.09846). Flags for these, the seed and steps have no effect. On
several machines that share --runs-dir: `ray start`, then this. Measured: the members' mean after
60,000 steps is 500, 478, 468 (fixed 437, 287, 218), after 100,000 always 500 (500, 384, 312).
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm

MEMBERS, GENERATIONS, STEPS = 4, 5, 20_000
DRAWS = {"learning_rate": (1e-4, 1e-2), "clip_coef": (0.05, 0.4), "ent_coef": (1e-4, 1e-1)}


def member(config: dict, script: str, flags: list) -> None:
    """Trains from the last checkpoint, its own or another's. A killed generation begins again."""
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        run, done = Path(folder, "run"), 0
        if checkpoint := tune.get_checkpoint():
            with checkpoint.as_directory() as saved:
                shutil.copytree(saved, run)
            done = json.loads((run / "result.json").read_text())["global_step"] // STEPS
        for generation in range(done + 1, GENERATIONS + 1):
            begin = [*flags, "--no-anneal-lr", "--runs-dir", folder, "--run-name", "run"]
            command = [sys.executable, script, *(["--resume", run] if run.exists() else begin)]
            for name, value in {**config, "total_timesteps": generation * STEPS}.items():
                command += [f"--{name}", str(value)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            result = json.loads((run / "result.json").read_text())
            score = {"score": float(np.mean(result["evaluation"]))}
            tune.report(score, checkpoint=tune.Checkpoint.from_directory(run))


def main(evolve: bool) -> None:
    from ray import tune

    args = rppo_lstm.parse_args()
    rppo_lstm.check_args(args)
    rppo_lstm.check(not args.resume and not args.play, "--resume, --play: only of rppo_lstm.py")
    draws = {name: tune.loguniform(*ends) for name, ends in DRAWS.items()}
    pbt = tune.schedulers.PopulationBasedTraining("training_iteration", perturbation_interval=1,
              synch=True, hyperparam_mutations=draws, resample_probability=0)  # fmt: skip
    folder = Path(args.runs_dir, args.run_name or "evolve").resolve()
    rppo_lstm.check(not folder.exists(), f"{folder} exists: another --run-name, please")
    tuner = tune.Tuner(
        tune.with_parameters(member, script=rppo_lstm.__file__, flags=sys.argv[1:]),
        param_space={**draws, "seed": tune.randint(0, 10**6)},
        tune_config=tune.TuneConfig("max", "score", None, pbt if evolve else None, MEMBERS),
        run_config=tune.RunConfig("ray", str(folder), failure_config=tune.FailureConfig(3)),
    )
    best = tuner.fit().get_best_result()
    shutil.copytree(best.checkpoint.path, folder / "best")
    print(f"{folder}/best: return {best.metrics['score']:.1f} with {best.config}")


if __name__ == "__main__":
    fixed = sys.argv[1:2] == ["fixed"]
    del sys.argv[1 : 1 + fixed]
    try:
        main(not fixed)
    except (rppo_lstm.ArgumentError, ModuleNotFoundError) as error:
        hint = '; pip install ".[tune]"' if isinstance(error, ModuleNotFoundError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
