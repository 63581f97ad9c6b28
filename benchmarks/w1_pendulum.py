"""W1 with Gaussian actions: training speed of rppo_continuous.py and sb3-contrib's RecurrentPPO on the same work.

    taskset -c 0 python benchmarks/w1_pendulum.py              # needs the extra `peers`; several minutes
    taskset -c 0 python benchmarks/w1_pendulum.py --repeats 1 --sections plain  # a short one

Pendulum-v1, 8 environments x 128 steps, 4 epochs, 4 minibatches of 2 environments' whole rollouts, encoder 64 tanh, one
LSTM 128 shared by actor and critic. Sections: `plain`; `normalised`, with running normalisation of observations and
rewards on both sides; `gsde`, that with gSDE and new noise every 4 steps. Ours and the peer run in turn. SPS are
environment steps a second of training; the first iteration is left out for both.
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
    sections: tuple[str, ...] = ("plain", "normalised", "gsde")  # which of them
    iterations: int = 12  # of ours a repeat; sb3-contrib gets 3
    out: str | None = None  # file for the figures (JSON)


def ours(section: str, iterations: int) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("rppo_continuous", ROOT / "rppo_continuous.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rppo_continuous"] = module
    spec.loader.exec_module(module)
    norm, sde = section != "plain", section == "gsde"
    with tempfile.TemporaryDirectory() as folder:
        args = module.Args(
            env_id="Pendulum-v1", num_envs=8, num_steps=128, num_minibatches=4, update_epochs=4, encoder_sizes=(64,),
            hidden_size=128, norm_obs=norm, norm_reward=norm, use_sde=sde, sde_sample_freq=4, torch_threads=1,
            runs_dir=folder, run_name="w1", checkpoint_every=10**6, total_timesteps=int(1024 * iterations * 0.97),
        )  # fmt: skip
        module.train(args)
        result = json.loads(Path(folder, "w1", "result.json").read_text())
    count = iterations - 1
    return {"sps": result["sps"], "rollout_ms": 1e3 * result["rollout_seconds"] / count,
            "update_ms": 1e3 * result["update_seconds"] / count}  # fmt: skip


def peer(section: str) -> dict[str, float]:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecNormalize

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 64)
            self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh())

        def forward(self, obs):
            return self.net(obs)

    torch.set_num_threads(1)
    envs = make_vec_env("Pendulum-v1", 8, seed=1)
    kwargs = {"features_extractor_class": Encoder, "lstm_hidden_size": 128, "shared_lstm": True,
              "enable_critic_lstm": False, "net_arch": []}  # fmt: skip
    model = RecurrentPPO(
        "MlpLstmPolicy", VecNormalize(envs) if section != "plain" else envs, n_steps=128, batch_size=256, n_epochs=4,
        learning_rate=1e-3, use_sde=section == "gsde", sde_sample_freq=4, seed=1, device="cpu", policy_kwargs=kwargs,
    )  # fmt: skip
    model.learn(1024)
    started, rows = time.perf_counter(), 1024 * 3
    model.learn(rows)
    return {"sps": rows / (time.perf_counter() - started)}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    figures: dict = {"machine": machine(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for section in options.sections:
        runs: dict[str, list[dict]] = {"ours": [], "sb3-contrib": []}
        for _ in range(options.repeats):
            runs["ours"].append(ours(section, options.iterations))
            runs["sb3-contrib"].append(peer(section))
        medians = {name: statistics.median(r["sps"] for r in rs) for name, rs in runs.items()}
        ratio = medians["ours"] / medians["sb3-contrib"]
        figures[section] = {"median_sps": medians, "ratio_of_medians": ratio, "runs": runs}
        print(f"{section}: ours {medians['ours']:,.0f} SPS, sb3-contrib {medians['sb3-contrib']:,.0f}, {ratio:.1f} x  {runs}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
