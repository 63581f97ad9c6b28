"""W1: training speed of rppo_lstm.py and sb3-contrib's RecurrentPPO on the same work, in turn, in one run.

    taskset -c 0 python benchmarks/w1.py            # needs the extra `peers`; several minutes
    taskset -c 0 python benchmarks/w1.py --repeats 3 --sections matched

Sections: `matched` is CartPole-v1, 8 environments x 128 steps, 4 epochs, 4 minibatches of 2 environments' whole
rollouts, encoder 64 tanh, one LSTM 128 shared by actor and critic; `wide` is ours with 64 environments; `defaults` is
sb3-contrib's own: 8 environments, LSTM 256 for the actor and another for the critic, heads 64 64, 10 epochs,
minibatches of 128 rows, ours over whole rollouts and in sequences of 16. SPS are environment steps a second of
training; the first iteration is left out for both. Medians, ratios, and every repeat are printed and saved.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import machine  # noqa: E402


@dataclass
class Options:
    repeats: int = 3  # of each system, in turn
    sections: tuple[str, ...] = ("matched", "wide", "defaults")  # which of them
    iterations: int = 12  # of ours a repeat; sb3-contrib gets 3
    out: str | None = None  # file for the figures (JSON)


def ours(flags: dict, iterations: int) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("rppo_lstm", ROOT / "rppo_lstm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rppo_lstm"] = module
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        args = module.Args(**flags, torch_threads=1, runs_dir=folder, run_name="w1", checkpoint_every=10**6)
        args.total_timesteps = int(args.num_envs * args.num_steps * iterations * 0.97)
        module.train(args)
        result = json.loads(Path(folder, "w1", "result.json").read_text())
    count = iterations - 1
    return {"sps": result["sps"], "rollout_ms": 1e3 * result["rollout_seconds"] / count,
            "update_ms": 1e3 * result["update_seconds"] / count}  # fmt: skip


def peer(defaults: bool) -> dict[str, float]:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 64)
            self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh())

        def forward(self, obs):
            return self.net(obs)

    torch.set_num_threads(1)
    envs = make_vec_env("CartPole-v1", 8, seed=1)
    kwargs: dict = {} if defaults else {
        "batch_size": 256, "n_epochs": 4, "learning_rate": 1e-3, "policy_kwargs": {
            "features_extractor_class": Encoder, "lstm_hidden_size": 128, "shared_lstm": True,
            "enable_critic_lstm": False, "net_arch": []}}  # fmt: skip
    model = RecurrentPPO("MlpLstmPolicy", envs, n_steps=128, seed=1, device="cpu", **kwargs)
    model.learn(1024)
    started, rows = time.perf_counter(), 1024 * (1 if defaults else 3)
    model.learn(rows)
    return {"sps": rows / (time.perf_counter() - started)}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    matched = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "encoder_sizes": (64,),
               "hidden_size": 128, "critic": "shared"}  # fmt: skip
    defaults = {"num_envs": 8, "num_steps": 128, "num_minibatches": 8, "update_epochs": 10, "encoder_sizes": (),
                "hidden_size": 256, "critic": "separate", "head_sizes": (64, 64), "learning_rate": 3e-4}  # fmt: skip
    systems = {
        "matched": {"ours": lambda: ours(matched, options.iterations), "sb3-contrib": lambda: peer(False)},
        "wide": {"ours, 64 environments": lambda: ours({**matched, "num_envs": 64}, options.iterations)},
        "defaults": {
            "ours, whole rollouts": lambda: ours(defaults, 4),
            "ours, sequences of 16": lambda: ours({**defaults, "seq_len": 16}, 4),
            "sb3-contrib": lambda: peer(True),
        },
    }
    figures: dict = {"machine": machine(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for section in options.sections:
        runs: dict[str, list[dict]] = {name: [] for name in systems[section]}
        for _ in range(options.repeats):
            for name, system in systems[section].items():
                runs[name].append(system())
        medians = {name: statistics.median(r["sps"] for r in rs) for name, rs in runs.items()}
        figures[section] = {"median_sps": medians, "runs": runs}
        for name, sps in medians.items():
            ratio = f"  {sps / medians['sb3-contrib']:.1f} x sb3-contrib" if "sb3-contrib" in medians else ""
            print(f"{section:9} {name:24} {sps:9,.0f} SPS{ratio}   {runs[name]}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
