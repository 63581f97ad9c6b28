"""An agent of sb3-contrib's RecurrentPPO as a run here, to be played or trained further.

    python docs/recipes/sb3_weights.py model.zip CartPole-v1 runs/RUN  # pip install ".[peers]"
    python docs/recipes/use.py --play runs/RUN                         # or --resume, with flags

The model is an MlpLstmPolicy of any number and size of layers, with any of its three kinds of
critic and with or without gSDE. The run is one of rppo_lstm, or of rppo_continuous, with the
recipes that have the same layers: networks, and stacked_lstm or sde where it needs them.
Observations are vectors that no VecNormalize has changed. The optimiser's state is not taken along.
"""

import sys
from pathlib import Path

import torch
import use as driver
from activations import ACTIVATIONS


def flags_of(policy) -> dict:
    """The flags of the recipes for a policy's layers."""
    nets = policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net
    sizes = [[x.out_features for x in net if hasattr(x, "out_features")] for net in nets]
    after, critic_after = (",".join(map(str, units)) or "none" for units in sizes)
    critic = "separate" if policy.lstm_critic else "memoryless"
    if policy.shared_lstm:
        critic = "detached"
    [activation] = [name for name, x in ACTIVATIONS.items() if x is policy.activation_fn]
    return dict(
        hidden_size=policy.lstm_actor.hidden_size, critic=critic, activation=activation,
        layers_before="none", layers_after=after, critic_layers_after=critic_after, norm_obs=False,
    )  # fmt: skip


def copy(ours, *theirs) -> None:
    """Weights, in the order in which both have them."""
    pairs = zip(ours.parameters(), (p for part in theirs for p in part.parameters()), strict=True)
    with torch.no_grad():
        for weight, other in pairs:
            weight.copy_(other)


def convert(file: str, env_id: str, run_dir: str) -> None:
    """Writes the run directory."""
    from sb3_contrib import RecurrentPPO

    model = RecurrentPPO.load(file, device="cpu")
    policy = model.policy
    box = hasattr(model.action_space, "low") and model.action_space.dtype.kind == "f"
    layers = policy.lstm_actor.num_layers
    needed = {"networks": True, "stacked_lstm": layers > 1, "sde": policy.use_sde}
    recipes = [name for name, needs in needed.items() if needs]
    script = driver.fresh("rppo_continuous" if box else "rppo_lstm", *recipes)
    flags = flags_of(policy)
    if layers > 1:
        flags["recurrent_layers"] = ",".join(["lstm"] * layers)
    if policy.use_sde:
        sde = policy.action_dist
        flags.update(use_sde=True, sde_sample_freq=model.sde_sample_freq)
        flags.update(full_std=sde.full_std, use_expln=sde.use_expln)
        flags.update(squash_output=policy.squash_output)
    path = Path(run_dir)
    flags.update(env_id=env_id, runs_dir=str(path.parent), run_name=path.name)
    args = script.Args(gamma=model.gamma, gae_lambda=model.gae_lambda, **flags)
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    copy(agent.lstm, policy.lstm_actor)
    if policy.lstm_critic:
        copy(agent.critic_lstm, policy.lstm_critic)
    elif not policy.shared_lstm:
        copy(agent.critic_lstm, policy.critic)
    copy(agent.actor, policy.mlp_extractor.policy_net, policy.action_net)
    copy(agent.critic, policy.mlp_extractor.value_net, policy.value_net)
    if box:
        agent.log_std.data.copy_(policy.log_std)
    run = script.Run(args, envs, agent, torch.optim.Adam(agent.parameters(), eps=1e-5))
    run.bar.close()
    run.writer.close()


if __name__ == "__main__":
    try:
        if len(sys.argv) != 4:
            raise ValueError("usage: sb3_weights.py model.zip ENV_ID runs/RUN")
        convert(*sys.argv[1:])
    except Exception as error:  # no such file, another kind of model, no sb3-contrib
        hint = '; pip install ".[peers]"' if isinstance(error, ModuleNotFoundError) else ""
        print("error:", *str(error).split(), hint, file=sys.stderr)
        sys.exit(2)
