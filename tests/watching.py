"""The fixture `watch`: calls a script's `train`, and keeps what happened in it."""

import copy
import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

SMALL = {"encoder_size": 8, "hidden_size": 8, "num_minibatches": 3, "eval_episodes": 0}
RECORDS = "steps", "resets", "env", "gae", "replays", "losses", "updates", "logs"


def copied(values) -> list:
    return [x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x) for x in values]


def watched_agent(agent_class, seen, dtype):
    """A subclass that records `step` and `evaluate_actions`, whose biases begin away from 0."""

    class Watched(agent_class):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
            seen.agent = self
            seen.first = copy.deepcopy(self)

        def step(self, obs, *others):
            outputs = super().step(obs.to(dtype), *others)
            seen.steps.append((copied((obs, *others)), copied(outputs)))
            return outputs

        def evaluate_actions(self, obs, *others):
            outputs = super().evaluate_actions(obs.to(dtype), *others)
            record = copied((obs, *others)), copied(x.detach() for x in outputs)
            seen.replays.append((*record, len(seen.gae) - 1))
            return outputs

    return Watched


def watched_envs(make_envs, seen):
    """A `make_envs` whose environments record `reset` and `step`."""

    def make(*inputs):
        envs = make_envs(*inputs)
        reset, step = envs.reset, envs.step

        def watched_reset(**options):
            outputs = reset(**options)
            seen.resets.append(copied(outputs))
            return outputs

        def watched_step(action):
            seen.env.append(copied((action, *step(action))))
            return copied(seen.env[-1][1:])

        envs.reset = watched_reset
        envs.step = watched_step
        return envs

    return make


def recording(function, record):
    """The function, which calls record with a copy of its inputs and with its output."""

    def recorded(*inputs):
        inputs_before = copied(inputs)
        output = function(*inputs)
        record(inputs_before, output)
        return output

    return recorded


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Calls a script's `train` and returns what happened in it, as copies, in the order of calls:

    steps     inputs and outputs of Agent.step
    resets    obs and info of envs.reset; env: action, obs, rewards, terminated, truncated, info
    gae       inputs and output of compute_gae
    replays   inputs and outputs of Agent.evaluate_actions, each with the number of the rollout
    losses    inputs of ppo_loss
    updates   learning rate, weights and gradients before each step of the optimiser
    logs      what Run.log got: steps, losses by name
    first     the agent before it has learned, its biases moved away from 0; result: result.json
    """

    def train(script: str, env_id: str, dtype=torch.float32, **flags) -> SimpleNamespace:
        module = importlib.import_module(script)
        seen = SimpleNamespace(**{name: [] for name in RECORDS})

        def before_update(optimizer, *_):
            parameters = dict(seen.agent.named_parameters())
            weights = {name: p.detach().clone() for name, p in parameters.items()}
            gradients = {name: p.grad.clone() for name, p in parameters.items()}
            seen.updates.append((optimizer.param_groups[0]["lr"], weights, gradients))

        def log(run, steps, losses):
            named = [dict(zip(module.LOSSES, x.tolist(), strict=True)) for x in losses]
            seen.logs.append((steps, named))
            real_log(run, steps, losses)

        run_name = f"watched {len([*tmp_path.iterdir()])}"
        given = {**SMALL, "runs_dir": str(tmp_path), "run_name": run_name, **flags}
        seen.args = module.Args(env_id=env_id, **given)
        real_log = module.Run.log
        hook = register_optimizer_step_pre_hook(before_update)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(module, "Agent", watched_agent(module.Agent, seen, dtype))
                patch.setattr(module, "make_envs", watched_envs(module.make_envs, seen))
                patch.setattr(module.Run, "log", log)
                gae = recording(
                    module.compute_gae,
                    lambda inputs, output: seen.gae.append((inputs, output.copy())),
                )
                loss = recording(module.ppo_loss, lambda inputs, _: seen.losses.append(inputs))
                patch.setattr(module, "compute_gae", gae)
                patch.setattr(module, "ppo_loss", loss)
                module.train(seen.args)
        finally:
            torch.set_default_dtype(default)
            hook.remove()
        seen.result = json.loads((tmp_path / run_name / "result.json").read_text())
        return seen

    return train
