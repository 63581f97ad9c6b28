"""An agent of sb3-contrib's RecurrentPPO as one of rppo_lstm.py, to be played or trained further.

    python docs/recipes/sb3_weights.py model.zip CartPole-v1 runs/RUN  # pip install ".[peers]"
    python docs/recipes/sb3_weights.py --play runs/RUN                 # or --resume, with flags

The model is an MlpLstmPolicy with its default layers: an LSTM for the actor, one for the critic, of
any size, and two tanh layers of one width after each. Actions are discrete; observations are
vectors that no VecNormalize has changed. The optimiser's state is not taken along. Tested: every
action of 10 episodes is that of the model.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm


class Sb3Agent(rppo_lstm.Agent):
    """LSTMs that read observations, then heads of two tanh layers of args.encoder_size."""

    def __init__(self, envs, args):
        super().__init__(envs, args)
        inputs, E, H = self.encoder[0].in_features, args.encoder_size, args.hidden_size
        self.encoder = nn.Identity()
        self.lstm, self.critic_lstm = (rppo_lstm.ResetLSTM(inputs, H) for _ in range(2))
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(H, E), nn.Tanh(), nn.Linear(E, E), nn.Tanh(), nn.Linear(E, n))
            for n in (self.exists.size, 1)
        )

    def initial_state(self, num_envs):
        return self.actor[0].weight.new_zeros(4, num_envs, self.args.hidden_size)


def convert(file: str, env_id: str, run_dir: str) -> None:
    """Writes the run directory."""
    from sb3_contrib import RecurrentPPO

    model = RecurrentPPO.load(file, device="cpu")
    policy = model.policy
    rppo_lstm.check(policy.activation_fn is nn.Tanh, f"{file}: its layers are not of tanh")
    E, H = policy.mlp_extractor.latent_dim_pi, policy.lstm_actor.hidden_size
    path = Path(run_dir)
    flags = dict(env_id=env_id, runs_dir=str(path.parent), run_name=path.name, encoder_size=E,
                 hidden_size=H, separate_critic=True, gamma=model.gamma)  # fmt: skip
    args = rppo_lstm.Args(gae_lambda=model.gae_lambda, **flags)
    envs = rppo_lstm.make_envs(args, 1)
    agent = Sb3Agent(envs, args)
    parts = {
        agent.lstm.cell: policy.lstm_actor, agent.critic_lstm.cell: policy.lstm_critic,
        agent.actor: nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net),
        agent.critic: nn.Sequential(*policy.mlp_extractor.value_net, policy.value_net),
    }  # fmt: skip
    for ours, theirs in parts.items():
        weights = {name.removesuffix("_l0"): x for name, x in theirs.state_dict().items()}
        ours.load_state_dict(weights)
    run = rppo_lstm.Run(args, envs, agent, torch.optim.Adam(agent.parameters(), eps=1e-5))
    run.bar.close()
    run.writer.close()


if __name__ == "__main__":
    rppo_lstm.Agent = Sb3Agent
    if {"--play", "--resume", "--help"} & {flag.split("=")[0] for flag in sys.argv}:
        rppo_lstm.main()
    else:
        try:
            rppo_lstm.check(len(sys.argv) == 4, "say sb3_weights.py model.zip ENV_ID runs/RUN")
            convert(*sys.argv[1:])
        except Exception as error:  # no such file, another kind of model, no sb3-contrib
            hint = '; pip install ".[peers]"' if isinstance(error, ModuleNotFoundError) else ""
            print("error:", *str(error).split(), hint, file=sys.stderr)
            sys.exit(2)
