"""How much of a gradient step comes from the policy's loss, with rewards divided by the standard
deviation of returns, and with raw rewards? Trains masked CartPole for 30,000 steps, both ways with three seeds.

    python benchmarks/reward_scale.py benchmarks/results/reward-scale.csv  # which docs/tools/drawings.py draws
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rppo_lstm

PPO_LOSS, CLIP = rppo_lstm.ppo_loss, torch.nn.utils.clip_grad_norm_
SEEDS = 1, 2, 3
SETTINGS = {  # all that matter, so that presets may change
    "num_steps": 128, "num_envs": 8, "num_minibatches": 4, "update_epochs": 10, "gamma": 0.99,
    "learning_rate": 2e-3, "anneal_lr": False, "max_grad_norm": 0.5, "vf_coef": 0.5,
}  # fmt: skip


def norms(
    norm_reward: bool, seed: int, runs_dir: str, steps: int = 30_000
) -> list[list[tuple[float, float, float]]]:
    """For each minibatch of each iteration: the norms of the policy loss's and of the value loss's
    gradient in the shared encoder and LSTM, before clipping, and the factor of clipping."""
    found: list = []
    agents: list = []

    class Agent(rppo_lstm.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            agents.append(self)

    def shared():
        return [*agents[0].encoder.parameters(), *agents[0].lstm.parameters()]

    def ppo_loss(*inputs):
        loss, kl = PPO_LOSS(*inputs)
        of_policy.append(torch.autograd.grad(loss, shared(), retain_graph=True))
        return loss, kl

    def clip(parameters, most):
        policy = torch.cat([g.flatten() for g in of_policy.pop()])
        both = torch.cat([p.grad.flatten() for p in shared()])
        total = CLIP(parameters, most)
        factor = min(1.0, most / (total.item() + 1e-6))
        found[-1].append((policy.norm().item(), (both - policy).norm().item(), factor))
        return total

    def compute_gae(*inputs):  # once an iteration
        found.append([])
        return gae(*inputs)

    of_policy: list = []
    gae, original = rppo_lstm.compute_gae, rppo_lstm.Agent
    rppo_lstm.compute_gae, rppo_lstm.ppo_loss, rppo_lstm.Agent = compute_gae, ppo_loss, Agent
    torch.nn.utils.clip_grad_norm_ = clip  # type: ignore[assignment]
    try:
        rppo_lstm.train(rppo_lstm.Args(
            env_id="CartPole-v1", mask_velocity=True, norm_reward=norm_reward, seed=seed,
            runs_dir=runs_dir, run_name=f"{norm_reward} {seed}", eval_episodes=0,
            total_timesteps=steps, **SETTINGS,
        ))  # fmt: skip
    finally:
        rppo_lstm.compute_gae, rppo_lstm.ppo_loss, rppo_lstm.Agent = gae, PPO_LOSS, original
        torch.nn.utils.clip_grad_norm_ = CLIP
    return found


def main(out: str) -> None:
    rows = []
    for norm_reward in True, False:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                found = norms(norm_reward, seed, folder)
                result = json.loads(Path(folder, f"{norm_reward} {seed}/result.json").read_text())
            for iteration, minibatches in enumerate(found, 1):
                before = torch.tensor(minibatches)  # policy, value, factor
                policy, value = (before[:, :2] * before[:, 2:]).mean(0).tolist()  # after clipping
                rows.append({
                    "norm_reward": norm_reward, "seed": seed, "iteration": iteration,
                    "policy": f"{policy:.4g}", "value": f"{value:.4g}",
                    "return_100": f"{sum(result['returns']) / len(result['returns']):.1f}",
                })  # fmt: skip
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/reward_scale.py OUT.csv")
    main(sys.argv[1])
