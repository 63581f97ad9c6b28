"""AgileRL's RecurrentPPO: python docs/probes/probe_agilerl.py [NEXT_STEP or SAME_STEP] [SEED]"""

import sys

import gymnasium as gym
import torch
from agilerl.algorithms import RecurrentPPO
from agilerl.rollouts import collect_rollouts_recurrent
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import TransformReward
from probes import ALL, check

N, T, H = 64, 16, 32


def trainer(mode: AutoresetMode):
    def train(env_id, steps, seed):
        torch.manual_seed(seed)
        envs = gym.make_vec(env_id, N, "sync", vector_kwargs=dict(autoreset_mode=mode))
        envs = TransformReward(envs, lambda r: r / (20 if "Final" in env_id else 1))
        envs.reset(seed=seed)
        encoder = dict(hidden_state_size=H, max_layers=2, min_hidden_state_size=16)
        agent = RecurrentPPO(
            envs.single_observation_space, envs.single_action_space, num_envs=N, learn_step=N * T,
            max_seq_len=T, batch_size=64, lr=4e-3, net_config=dict(encoder_config=encoder),
        )  # fmt: skip
        rollout = [None] * 4
        for update in range(steps // (N * T)):
            names = "last_obs", "last_done", "last_scores", "last_info"
            _, *rollout = collect_rollouts_recurrent(agent, envs, **dict(zip(names, rollout)))
            agent.learn()
            for group in agent.optimizer.optimizer.param_groups:
                group["lr"] = 4e-3 * (1 - (update + 1) / (steps // (N * T)))
        state = None

        def act(obs, final):
            nonlocal state
            state = state or agent.get_initial_hidden_state(len(obs))
            with torch.no_grad():
                latent, state = agent.actor.extract_features(torch.tensor(obs), hidden_state=state)
                agent.actor.forward_head(latent)
            keep = torch.ones(len(obs)) if final is None else torch.tensor(~final).float()
            state = {name: part * keep[:, None] for name, part in state.items()}
            return agent.actor.head_net.dist.logits.argmax(-1).numpy()

        return act

    return train


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    mode, *seed = sys.argv[1:] or ["NEXT_STEP"]
    check(trainer(AutoresetMode[mode]), ALL, int(seed[0]) if seed else 1)
