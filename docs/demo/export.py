"""Writes agent.json, what cartpole.js plays: an agent's weights, a probe, and recorded episodes.

    python rppo_lstm.py --env-id CartPole-v1 --mask-velocity --seed 3 --run-name demo
    python docs/demo/export.py runs/demo

Weights are rounded to 16 bits and the critic is left out, so that the file stays small. Everything
below is measured with the rounded weights. The probe is a linear map from h, the LSTM's output, to
the hidden velocities. It is fitted while random pushes disturb the pole, as a reader's will.
"""

import base64
import json
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import rppo_lstm as script  # noqa: E402

AGENT = Path(__file__).with_name("agent.json")
VELOCITIES = [1, 3]  # of an observation: the cart's and the pole's
PUSH = 0.5  # what a push adds to the pole's angular velocity, in rad/s, as in cartpole.js


def encode(weight: torch.Tensor) -> dict:
    """float32 (any shape) -> multiples of a power of two that fit into 16 bits, in base64."""
    step = 2.0 ** math.ceil(math.log2(weight.abs().max().item() / (2**15 - 1)))
    multiples = (weight / step).round().to(torch.int16).numpy().astype("<i2")
    return {
        "shape": list(weight.shape), "step": step,
        "data": base64.b64encode(multiples.tobytes()).decode(),
    }  # fmt: skip


def decode(weight: dict) -> torch.Tensor:
    multiples = np.frombuffer(base64.b64decode(weight["data"]), "<i2").astype(np.float32)
    return torch.from_numpy(multiples * np.float32(weight["step"])).reshape(weight["shape"])


def make_agent(weights: dict) -> script.Agent:
    """The agent of agent.json, in PyTorch. Its critic is untrained."""
    args = script.Args(mask_velocity=True)
    agent = script.Agent(script.make_envs(args, 1), args)
    decoded = {name: decode(weight) for name, weight in weights.items()}
    agent.load_state_dict(decoded, strict=False)
    return agent


def masked(obs: np.ndarray) -> np.ndarray:
    """obs (N, 4) -> the same without velocities, as make_envs does it for --mask-velocity."""
    return np.where(np.isin(np.arange(4), VELOCITIES), 0, obs)


def record(agent: script.Agent, seed: int) -> dict:
    """An episode in Gymnasium's CartPole-v1: its first state, its actions, and its last state."""
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=seed)
    start = env.unwrapped.state.tolist()
    actions: list[int] = []
    lstm_state, over = None, False
    while not over:
        action, lstm_state = agent.predict(masked(obs[None]), lstm_state)
        actions.append(int(action[0]))
        obs, _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    end = env.unwrapped.state.tolist()
    return {"start": start, "actions": "".join(map(str, actions)), "end": end}


def disturbed(agent: script.Agent, num_envs: int, steps: int = 500, seed: int = 0):
    """Episodes with a random push at one step in 50 -> h (T, N, H), the true velocities
    (T, N, 2), and which time steps (T, N) belong to the first episode of each environment."""
    rng = np.random.default_rng(seed)
    envs = gym.make_vec("CartPole-v1", num_envs, "vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    lstm_state = None
    first = np.ones(num_envs, bool)
    seen = []
    for _ in range(steps):
        action, lstm_state = agent.predict(masked(obs), lstm_state)
        seen.append((lstm_state[0].numpy(), obs[:, VELOCITIES], first.copy()))
        obs, _, terminated, truncated, _ = envs.step(action)
        first &= ~(terminated | truncated)
        push = rng.choice([-PUSH, PUSH], num_envs) * (rng.random(num_envs) < 1 / 50)
        envs.unwrapped.state[3] += push
        obs[:, 3] += push
    return [np.stack(values) for values in zip(*seen)]


def fit_probe(agent: script.Agent, num_envs: int = 40, ridge: float = 0.01) -> dict:
    """Ridge regression on half of the episodes, as in the recipe look_inside; R^2 on the others.
    order: the units, from the one that falls most with the pole's velocity to that which rises."""
    h, y, first = disturbed(agent, num_envs)
    h, y = h.astype(np.float64), y.astype(np.float64)
    fit, test = first.copy(), first.copy()
    fit[:, num_envs // 2 :] = False
    test[:, : num_envs // 2] = False
    mean_h, mean_y = h[fit].mean(0), y[fit].mean(0)
    centred = h[fit] - mean_h
    gram = centred.T @ centred
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    weight = np.linalg.solve(gram, centred.T @ (y[fit] - mean_y)).T  # (2, H)
    bias = mean_y - weight @ mean_h
    error = y[test] - (h[test] @ weight.T + bias)
    r2 = 1 - (error**2).sum(0) / ((y[test] - y[test].mean(0)) ** 2).sum(0)
    correlation = centred.T @ (y[fit] - mean_y)[:, 1] / centred.std(0)
    return {
        "weight": weight.round(5).tolist(), "bias": bias.round(5).tolist(),
        "r2": r2.round(3).tolist(), "order": correlation.argsort().tolist(),
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    saved = script.load(sys.argv[1])
    weights = {
        name: encode(weight)
        for name, weight in saved["agent"].items()
        if name.startswith(("encoder.", "lstm.", "actor."))
    }
    agent = make_agent(weights)
    probe = fit_probe(agent)
    episodes = [record(agent, seed) for seed in range(3)]
    names = "env_id", "mask_velocity", "seed", "total_timesteps"
    run = {name: saved["args"][name] for name in names}
    contents = {"run": run, "weights": weights, "probe": probe, "episodes": episodes}
    AGENT.write_text(json.dumps(contents, allow_nan=False) + "\n")
    print(f"{AGENT.stat().st_size / 1000:.0f} kB; R^2 {probe['r2']}")
    print("steps of the episodes:", *(len(episode["actions"]) for episode in episodes))


if __name__ == "__main__":
    main()
