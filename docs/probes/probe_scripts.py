"""The scripts of this project: python docs/probes/probe_scripts.py rppo_lstm [SEED]

rppo_lstm, rppo_continuous, trpo or ppo1_mpi, or the path of a changed copy. rppo_gru_atari takes
Atari's frames alone.
"""

import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path

from probes import ALL, BOX, check

ROOT = Path(__file__).resolve().parents[2]
FLAGS = dict(num_steps=16, hidden_size=32, encoder_size=32, learning_rate=4e-3, eval_episodes=0)
SCRIPTS = {
    "rppo_lstm": FLAGS | dict(num_envs=64),
    "rppo_continuous": FLAGS | dict(num_envs=64, norm_obs=False),
    # Smaller rollouts and larger steps, of which TRPO gets 39 within 20,000 time steps
    "trpo": FLAGS | dict(
        num_envs=32, memory="lstm", norm_obs=False, target_kl=0.04, n_critic_updates=30,
        learning_rate=2e-3,
    ),
    "ppo1_mpi": FLAGS | dict(num_envs=64, memory="lstm", norm_obs=False),
}  # fmt: skip


def load(file: Path):
    spec = importlib.util.spec_from_file_location(f"probed_{file.stem}", file)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer(script, flags: dict):
    def train(env_id, steps, seed):
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, quiet[0], quiet[1]:
            run = dict(env_id=env_id, total_timesteps=steps, seed=seed, runs_dir=folder)
            agent = script.train(script.Args(**run, **flags))
        state = None

        def act(obs, final):
            nonlocal state
            actions, state = agent.predict(obs, state, final)
            return actions

        return act

    return train


if __name__ == "__main__":
    name, seed = sys.argv[1].removesuffix(".py"), int((sys.argv[2:] or ["1"])[0])
    script = load(ROOT / f"{name}.py" if name in SCRIPTS else Path(f"{name}.py"))
    kind = next(kind for kind in SCRIPTS if script.SCRIPT.startswith(kind))
    check(trainer(script, SCRIPTS[kind]), BOX if kind == "rppo_continuous" else ALL, seed)
