"""What an agent thinks of observations: the distribution of its actions, and their value.

    python docs/recipes/distributions.py runs/RUN  # of the first observation of an episode

RUN is a run of any script, with its recipes. In your program:

    import use
    from distributions import look
    script, args, envs, agent, _ = use.open_run("runs/RUN")
    policy, value = look(script, agent, obs, info, state)
    policy.log_prob(actions), policy.entropy()  # a distribution of torch

Choices are counted from 0; real-valued actions are those before they are clipped. The state is not
changed; agent.predict gives the next one. The recipe use_agent asks for this.
"""

import sys

import numpy as np
import torch
import use as driver
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from torch.distributions import Categorical, Independent, Normal


def flattened(space, obs):
    """One observation of a space or a batch, raw as environments return it, or flat, or a list of
    raw ones -> (N, n) in float32, and whether it was one. ValueError for anything else."""
    n = spaces.flatdim(space)
    array = isinstance(obs, np.ndarray)
    flat = array and obs.shape[-1:] == (n,)
    if isinstance(space, spaces.Discrete):  # (n,) are numbers of n environments
        flat = flat and obs.ndim == 2
    if flat or (array and isinstance(space, spaces.Box)):
        return np.float32(obs).reshape(-1, n), obs.shape in (space.shape, (n,))
    one = space.contains(obs)
    many = [obs] if one else obs
    if not isinstance(many, list):
        leaf = obs
        while isinstance(leaf, (dict, tuple)):
            leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
        batch = batch_space(space, len(leaf) if np.ndim(leaf) else 1)
        if not batch.contains(obs):
            raise ValueError(f"obs is neither an observation of {space} nor a batch of them")
        many = list(iterate(batch, obs))
    return np.float32([spaces.flatten(space, x) for x in many]), one


@torch.inference_mode()
def look(script, agent, obs, info=None, state=None):
    """obs (N, n) and state as predict takes them -> the distribution of actions (N, K), and the
    values (N,)."""
    obs, state, final = script.check_inputs(agent, obs, state, None)
    x = torch.as_tensor(obs)
    legal = []
    if hasattr(agent, "exists"):
        legal = [torch.as_tensor(script.legal_choices(agent.exists, info or {}, final))]
    if not hasattr(agent, "act"):  # rppo_lstm, rppo_gru_atari
        logp, value, _ = agent.step(x, *legal, state)
        return Independent(Categorical(logits=logp), 1), value
    h, *value, _ = agent.step(x, state)
    memory = getattr(agent.args, "memory", "lstm") == "lstm"
    if script.__name__ == "trpo":  # the critic reads observations
        seen = [agent.normalize(x), h] if memory else [agent.normalize(x)]
        value = [agent.critic(torch.cat(seen, -1)).squeeze(-1)]
    elif not memory:  # ppo1_mpi, whose critic has an encoder of its own
        value = [agent.critic(agent.critic_encoder(agent.normalize(x))).squeeze(-1)]
    if hasattr(agent, "policy"):
        policy = agent.policy(h, *legal)
    elif agent.box:
        policy = Independent(Normal(agent.actor(h), agent.log_std.exp()), 1)
    else:
        policy = Independent(Categorical(logits=agent.log_probs(h, *legal)), 1)
    return policy, value[0]


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        script, args, envs, agent, _ = driver.open_run(" ".join(sys.argv[1:]))
        obs, info = envs.reset(seed=args.seed)
        policy, value = look(script, agent, obs, info)
        print(f"value {value.item():.3f}, entropy {policy.entropy().item():.3f}")
        for name in policy.base_dist.arg_constraints:
            print(name, getattr(policy.base_dist, name).tolist())
