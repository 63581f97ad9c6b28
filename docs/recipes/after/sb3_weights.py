"""An agent of sb3-contrib's RecurrentPPO as a run here, and a run as such an agent.

    python docs/recipes/after/sb3_weights.py model.zip CartPole-v1 runs/RUN  # pip install ".[peers]"
    python docs/recipes/after/sb3_weights.py model.zip CartPole-v1 runs/RUN vecnormalize.pkl
    python docs/recipes/use.py --play runs/RUN                               # or --resume
    python docs/recipes/after/sb3_weights.py runs/RUN model.zip              # the way back

There: an MlpLstmPolicy of any number and size of layers, with any of its three kinds of critic, with
or without gSDE, for vectors and Discrete or Box actions, with or without VecNormalize. Here: a run
of rppo_lstm or rppo_continuous, with the recipes networks, stacked_lstm and sde where they are
needed. On the way back, what comes before the LSTM, the normalisation and the encoder, becomes the
model's features_extractor_class, which is in the zip file, too. The optimiser's state isn't taken
along, either way. A run that goes on has the model's losses, rates (a schedule's first value) and
epochs, but rollouts and minibatches of this project's: they're flags of --resume. Of models that can't
be converted you are told why.
"""

import json
import sys
from pathlib import Path

import gymnasium as gym
import torch
import torch.nn as nn
from gymnasium import spaces

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver


def flags_of(script, policy) -> dict:
    """The flags of the recipes for a policy's layers."""
    nets = policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net
    sizes = [[x.out_features for x in net if hasattr(x, "out_features")] for net in nets]
    after, critic_after = (",".join(map(str, units)) or "none" for units in sizes)
    critic = "separate" if policy.lstm_critic else "memoryless"
    if policy.shared_lstm:
        critic = "detached"
    activations = driver.recipe("networks").ACTIVATIONS
    names = [name for name, x in activations.items() if x is policy.activation_fn]
    script.check(names, f"{policy.activation_fn.__name__}: not one of {', '.join(activations)}")
    return dict(
        hidden_size=policy.lstm_actor.hidden_size, critic=critic, activation=names[0],
        layers_before="none", layers_after=after, critic_layers_after=critic_after,
    )  # fmt: skip


def check_model(script, model) -> None:
    """ArgumentError, which names it, for what isn't converted."""
    policy, obs, actions = model.policy, model.observation_space, model.action_space
    images = isinstance(obs, spaces.Box) and len(obs.shape) == 3
    kind = type(policy.features_extractor).__name__
    script.check(not images, f"observations {obs}: stable-baselines3 divides images by 255")
    script.check(kind == "FlattenExtractor", f"{kind}: only vectors, without a network before")
    known = isinstance(actions, (spaces.Discrete, spaces.Box))
    script.check(known, f"actions {actions}: only Discrete and Box")
    memory = policy.lstm_actor
    script.check(isinstance(memory, nn.LSTM) and memory.bias, f"{memory}: only an LSTM with biases")


def pairs(agent, policy):
    """Each weight of an agent, with a policy's at the same place."""
    memory, heads = agent.lstm, policy.mlp_extractor
    parts = [(memory, [policy.lstm_actor])]
    if hasattr(memory, "critic"):  # the recipe networks' two memories
        critic = policy.lstm_critic if policy.lstm_critic is not None else policy.critic
        parts = [(memory.actor, [policy.lstm_actor]), (memory.critic, [critic])]
    parts.append((agent.actor, [heads.policy_net, policy.action_net]))
    parts.append((agent.critic, [heads.value_net, policy.value_net]))
    for ours, theirs in parts:
        weights = [weight for module in theirs for weight in module.parameters()]
        yield from zip(ours.parameters(), weights, strict=True)
    if hasattr(agent, "log_std"):
        yield agent.log_std, policy.log_std


def read_statistics(file: str) -> dict:
    """VecNormalize's, of an agent's return_stats and obs_stats, if they are normalised."""
    import pickle

    with open(file, "rb") as stored:
        normalize = pickle.load(stored)
    if (normalize.clip_obs, normalize.epsilon) != (10.0, 1e-8):
        raise ValueError(f"{file}: clip_obs must be 10, and epsilon 1e-8")
    found = {"return_stats": normalize.ret_rms} if normalize.norm_reward else {}
    return found | ({"obs_stats": normalize.obs_rms} if normalize.norm_obs else {})


def hyperparameters(model) -> dict:
    return dict(
        learning_rate=model.lr_schedule(1.0), anneal_lr=False, clip_coef=model.clip_range(1.0),
        gamma=model.gamma, gae_lambda=model.gae_lambda, update_epochs=model.n_epochs,
        ent_coef=model.ent_coef, vf_coef=2 * model.vf_coef, max_grad_norm=model.max_grad_norm,
        target_kl=model.target_kl,
    )  # fmt: skip


def convert(file: str, env_id: str, run_dir: str, statistics: str = "") -> None:
    """Writes the run directory."""
    from sb3_contrib import RecurrentPPO

    try:
        model = RecurrentPPO.load(file, device="cpu")
    except AttributeError as error:  # a model of TRPO has no lstm_actor
        raise ValueError(f"{file} isn't RecurrentPPO's: {error}") from error
    policy = model.policy
    stats = read_statistics(statistics) if statistics else {}
    box = isinstance(model.action_space, spaces.Box)
    layers = policy.lstm_actor.num_layers
    needed = {"networks": True, "stacked_lstm": layers > 1, "sde": box}
    recipes = [name for name, needs in needed.items() if needs]
    script = driver.fresh("rppo_continuous" if box else "rppo_lstm", *recipes)
    check_model(script, model)
    flags = flags_of(script, policy)
    if layers > 1:
        flags["recurrent_layers"] = ",".join(["lstm"] * layers)
    if policy.use_sde:
        sde = policy.action_dist
        flags.update(use_sde=True, sde_sample_freq=model.sde_sample_freq)
        flags.update(full_std=sde.full_std, use_expln=sde.use_expln)
    squashed = "stable-baselines3 squashes these actions: add the recipe squash by hand"
    script.check(not getattr(policy, "squash_output", False), squashed)
    path = Path(run_dir)
    flags.update(env_id=env_id, runs_dir=str(path.parent), run_name=path.name)
    flags.update(norm_obs="obs_stats" in stats, norm_reward="return_stats" in stats)
    flags.update(hyperparameters(model))
    args = script.Args(**flags)
    envs = script.make_envs(args, 1)
    same = envs.single_action_space == model.action_space
    script.check(same, f"{env_id} has actions {envs.single_action_space}: {model.action_space}")
    agent = script.Agent(envs, args)
    with torch.no_grad():
        for ours, theirs in pairs(agent, policy):
            ours.copy_(theirs)
        for name, theirs in stats.items():
            for number in "mean", "var", "count":
                getattr(getattr(agent, name), number).copy_(
                    torch.as_tensor(getattr(theirs, number))
                )
    run = script.Run(args, envs, agent, torch.optim.Adam(agent.parameters(), eps=1e-5))
    run.bar.close()
    run.writer.close()


def extractor_class(agent):
    """A class, which the zip file holds, of what comes before the LSTM."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    norm_obs = agent.args.norm_obs
    encoder = agent.encoder
    mean, std = agent.obs_stats.mean, (agent.obs_stats.var + 1e-8).sqrt()
    size = encoder(torch.zeros(1, len(mean))).shape[-1]

    class Before(BaseFeaturesExtractor):
        def __init__(self, observation_space):
            super().__init__(observation_space, size)
            self.encoder = encoder

        def forward(self, obs):
            obs = obs.flatten(1)
            if norm_obs:
                obs = ((obs - mean) / std).clamp(-10, 10).float()
            return self.encoder(obs)

    return Before


def convert_back(run_dir: str, file: str) -> None:
    """Writes the zip file."""
    from sb3_contrib import RecurrentPPO

    script, args, envs, agent, _ = driver.open_run(run_dir)
    others = {*script.recipes} - {"networks", "stacked_lstm", "sde"}
    script.check(not others, f"the recipe {', '.join(others)} has no counterpart there")
    lstm = script.kind in ("rppo_lstm", "rppo_continuous") and not args.ablate_memory
    script.check(lstm, f"{script.kind}: only rppo_lstm and rppo_continuous, with a memory")
    layers = getattr(args, "recurrent_layers", "lstm").split(",")
    script.check({*layers} == {"lstm"}, f"--recurrent-layers {args}: only lstm")
    shared = getattr(args, "layers_shared", "none")
    script.check(shared == "none", "--layers-shared: there is no such thing there")
    share = getattr(args, "share_encoder", True)
    script.check(share, "--no-share-encoder: there is no such thing there")
    after = getattr(args, "layers_after", "none")
    after = after, getattr(args, "critic_layers_after", None) or after
    units = [[] if x == "none" else driver.numbers(script, "layers", x) for x in after]
    critic = getattr(args, "critic", "shared")
    options = dict(
        net_arch=dict(pi=units[0], vf=units[1]), lstm_hidden_size=args.hidden_size,
        activation_fn=driver.recipe("networks").ACTIVATIONS[getattr(args, "activation", "tanh")],
        n_lstm_layers=len(layers), shared_lstm=critic in ("shared", "detached"),
        enable_critic_lstm=critic == "separate", features_extractor_class=extractor_class(agent),
    )  # fmt: skip
    model_options = dict(gamma=args.gamma, gae_lambda=args.gae_lambda, device="cpu")
    if getattr(args, "use_sde", False):
        options.update(full_std=getattr(args, "full_std", True))
        options.update(use_expln=getattr(args, "use_expln", False))
        model_options.update(use_sde=True, sde_sample_freq=args.sde_sample_freq)
    env = gym.make(args.env_id, **json.loads(args.env_kwargs))
    model = RecurrentPPO("MlpLstmPolicy", env, policy_kwargs=options, **model_options)
    with torch.no_grad():
        for ours, theirs in pairs(agent, model.policy):
            theirs.copy_(ours)
    model.policy.features_extractor.load_state_dict(
        extractor_class(agent)(env.observation_space).state_dict()
    )
    model.save(file)


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        words = sys.argv[1:]
        if len(words) not in (2, 3, 4):
            raise ValueError(
                "usage: sb3_weights.py model.zip ENV_ID runs/RUN, or runs/RUN model.zip"
            )
        try:
            convert_back(*words) if len(words) == 2 else convert(*words)
        except ModuleNotFoundError as error:
            raise ValueError(f'{error}; pip install ".[peers]"') from error
