"""What does a memory hold? Hidden velocities, or earlier observations, read by regression.

    python docs/recipes/after/look_inside.py runs/RUN

RUN is a run of any script with a memory, and with recipes; its observations are vectors. The agent
plays 40 episodes. A linear map is fitted from h, the output of its memory, to the velocities that
--mask-velocity hides or, in other tasks, to the observations of the steps before. It is fitted on
half of the episodes and tested on the others: R^2 is 1 if h has all of it, and 0 if the mean is as
good a guess. Where velocities are hidden, RUN/memory.png shows a held-out episode, and matplotlib
is needed (pip install matplotlib). Where a critic has a memory of its own, h is the actor's.
Actions are the most probable ones: the velocity depends on the last action, which the
agent can foresee only if nothing is drawn at random.
"""

import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver

BACK = 12  # steps, at most
NAMES = {
    "CartPole": ["cart's velocity", "pole's angular velocity"], "MountainCar": ["velocity"],
    "Pendulum": ["angular velocity"],
    "LunarLander": ["horizontal velocity", "vertical velocity", "angular velocity"],
}  # fmt: skip


def play(script, args, agent, episodes: int = 40):
    """The first episode of each of N environments -> obs (T, N, n), actions (T, N, ...), and steps
    (T, N), which belong to these episodes."""
    envs = script.make_envs(args, episodes)
    script.seed_everything(args.seed)
    obs, _ = envs.reset(seed=episodes_seed(script, args))
    state = None
    final = np.zeros(episodes, bool)
    ended = np.zeros(episodes, bool)
    steps = []
    while not ended.all() and len(steps) < 1000:  # some never end
        action, state = agent.predict(obs, state, final)
        steps.append((obs.copy(), action.copy(), ~ended))  # environments may write into both
        ended = ended | final
        obs, _, terminated, truncated, _ = envs.step(action)
        final = terminated | truncated
    envs.close()
    return [np.stack(values) for values in zip(*steps)]


def episodes_seed(script, args) -> int:
    """Of episodes that are neither training's nor the evaluation's."""
    return script.env_seed(args.seed, script.EVALUATION, 1)


def velocities(script, args, actions) -> dict:
    """The same episodes in environments that hide nothing: name -> what is hidden (T, N, 1)."""
    envs = gym.make_vec(args.env_id, actions.shape[1], **json.loads(args.env_kwargs))
    obs = [envs.reset(seed=episodes_seed(script, args))[0].copy()]
    obs += [envs.step(action)[0].copy() for action in actions[:-1]]
    envs.close()
    task = args.env_id.split("-")[0].removesuffix("Continuous")
    return {
        name: np.stack(obs)[..., number : number + 1]
        for name, number in zip(NAMES[task], script.VELOCITIES[task])
    }


def remember(agent, obs):
    """Observations from the start of episodes (T, N, n) -> h (T, N, H)."""
    memory = getattr(agent, driver.memories(agent)[0])
    step = memory.step
    state = None
    seen = []

    def watched(*inputs):
        h, state = step(*inputs)
        seen.append(h)
        return h, state

    memory.step = watched  # for ablated agents, whose state is zero after a step
    for row in obs:
        _, state = agent.predict(row, state)
    del memory.step
    return torch.stack(seen)[..., : agent.args.hidden_size].double().numpy()  # the actor's


def decode(h, y, steps, back: int = 0, ridge: float = 0.01):
    """Ridge regression from h (T, N, H) to y (T, N, K) of `back` steps before, in the steps (T, N)
    of half of the environments -> what is read from h (T - back, N, K), and R^2, the share of the
    variance that it explains in the other half. A ridge of 0.01 fits as if each unit of h had noise
    of a tenth of the units' standard deviation: a trace too weak to be used does not count."""
    h, y = h[back:], y[: len(y) - back]
    steps = steps[back:]
    held_out = steps & (np.arange(steps.shape[1]) >= steps.shape[1] // 2)
    x, target = h[steps & ~held_out], y[steps & ~held_out]
    centred = x - x.mean(0)
    gram = centred.T @ centred
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    weights = np.linalg.lstsq(gram, centred.T @ (target - target.mean(0)))[0]
    guess = (h - x.mean(0)) @ weights + target.mean(0)
    error = (y - guess)[held_out]
    return guess, 1 - (error**2).sum() / ((y[held_out] - y[held_out].mean(0)) ** 2).sum()


def look(run_dir):
    """Prints what the memory of a run's agent holds; returns a picture if velocities are hidden."""
    script, args, envs, agent, _ = driver.open_run(run_dir)
    script.check(driver.memories(agent), f"{run_dir}: the agent has no memory")
    space = envs.single_observation_space
    script.check(len(space.shape) == 1, f"{run_dir}: look_inside does not read pictures")
    obs, actions, steps = play(script, args, agent)
    h = remember(agent, obs)
    if not getattr(args, "mask_velocity", False):
        for k in range(BACK):
            if steps[k:].sum() > h.shape[-1]:  # enough to fit
                print(f"{k} steps back: R^2 {decode(h, obs, steps, k)[1]:.3f}")
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    hidden = velocities(script, args, actions)
    axes = figure.subplots(len(hidden), sharex=True, squeeze=False)[:, 0]
    shown = slice(0, min(steps[:, -1].sum(), 200)), -1  # a held-out episode
    for axis, (name, y) in zip(axes, hidden.items()):
        guess, r2 = decode(h, y, steps)
        print(f"{name}: R^2 {r2:.3f}")
        axis.plot(y[shown], label="true, hidden from the agent")
        axis.plot(guess[shown], "--", label="read from its memory")
        axis.set_title(f"{name}: R² {r2:.3f}")
    axes[0].legend()
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    with driver.one_line_errors(__doc__):
        run_dir = " ".join(sys.argv[1:])
        picture = look(run_dir)
        if picture is not None:
            picture.savefig(Path(run_dir, "memory.png"))
