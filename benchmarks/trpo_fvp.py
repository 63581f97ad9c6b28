"""The Fisher-vector product of trpo.py beside other forms of it: processor time and error of one product.

    taskset -c 0 python benchmarks/trpo_fvp.py

A Gaussian policy of 17 observations and 6 actions, 2048 rows, float32: 64-64 tanh, and 64 tanh + LSTM 64 over 8
environments x 256 rows with resets. Errors are against the product in float64 by differentiating the mean KL twice,
through a cell call a row where there is an LSTM. Medians of 15.
"""

import importlib.util
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from torch.func import jvp

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("trpo", ROOT / "trpo.py")
assert spec is not None and spec.loader is not None
trpo = sys.modules["trpo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trpo)


def loop(memory, x, state, final):
    """The definition of ResetLSTM.forward, which can be differentiated twice."""
    rows = []
    for t in range(len(x)):
        row, state = memory.step(x[t], state)
        rows.append(row)
        state = state.where(~final[t][:, None], 0.0)
    return torch.stack(rows)


def mean_kl(policy, old, weight, theta):
    return trpo.weighted_mean(trpo.kl_divergence(old, policy(theta)), weight)


def twice(policy, theta, old, weight):
    """v -> the mean KL differentiated twice; the first derivative is kept."""
    gradient = torch.autograd.grad(mean_kl(policy, old, weight, theta), theta, create_graph=True)[0]
    return lambda v: torch.autograd.grad(gradient @ v, theta, retain_graph=True)[0]


def difference_of_gradients(policy, theta, old, weight, v):
    eps = 1e-2 / v.norm()
    ends = [(theta + sign * eps * v).detach().requires_grad_() for sign in (1, -1)]
    up, down = (torch.autograd.grad(mean_kl(policy, old, weight, x), x)[0] for x in ends)
    return (up - down) / (2 * eps)


def forward_mode(policy, theta, dist, weight, v):
    _, changes = jvp(policy, (theta.detach(),), (v,))
    rows = (weight / weight.sum())[..., None]
    cotangent = [x * rows for x in trpo.fisher_metric(tuple(x.detach() for x in dist), changes)]
    return torch.autograd.grad(dist, theta, cotangent, retain_graph=True)[0]


def main() -> None:
    torch.set_num_threads(1)
    for memory, T, N in ("none", 2048, 1), ("lstm", 256, 8):
        torch.manual_seed(0)
        sizes = (64, 64) if memory == "none" else (64,)
        args = trpo.Args(memory=memory, encoder_sizes=sizes, norm_obs=False)
        box = spaces.Box(-1, 1, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
        agent, final = trpo.Agent(*box, args), torch.rand(T, N) < 0.02
        obs, state, weight = torch.randn(T, N, 17), torch.randn_like(agent.initial_state(N)) * 0.1, (~final).float()
        theta = torch.nn.utils.parameters_to_vector(agent.policy_parameters().values()).detach()
        v = torch.randn_like(theta)
        v /= v.norm()
        fused = trpo.ResetLSTM.forward
        trpo.ResetLSTM.forward = loop
        policy = partial(agent.double().policy, obs=[obs.double()], state=state.double(), final=final)
        exact = theta.double().requires_grad_()
        expected = twice(policy, exact, tuple(x.detach() for x in policy(exact)), weight.double())(v.double())
        policy, theta = partial(agent.float().policy, obs=[obs], state=state, final=final), theta.requires_grad_()
        old = tuple(x.detach() for x in policy(theta))
        forms = {"differentiated twice": twice(policy, theta, old, weight)}
        trpo.ResetLSTM.forward = fused
        dist = policy(theta)
        forms["difference of the KL's gradient"] = partial(difference_of_gradients, policy, theta, old, weight)
        if memory == "none":
            forms["J' M J, forward mode for J"] = partial(forward_mode, policy, theta, dist, weight)
        forms["J' M J, difference for J (trpo.py)"] = partial(
            trpo.fisher_vector_product, policy, theta, dist, weight, 0.0
        )
        for name, form in forms.items():
            trpo.ResetLSTM.forward = loop if "twice" in name else fused
            error = ((form(v).double() - expected).norm() / expected.norm()).item()
            seconds = []
            for _ in range(15):
                started = time.process_time()
                form(v)
                seconds.append(time.process_time() - started)
            print(f"memory {memory:4}  {name:36} {1e3 * statistics.median(seconds):7.2f} ms   error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
