"""A trained agent for any runtime: one step as an ONNX graph, with the memory's state in and out.

    python docs/recipes/after/export_onnx.py runs/RUN agent.onnx  # needs: pip install ".[onnx]"

RUN is a run of any script, with its recipes. The file holds the weights, too. Inputs: obs, (1, n)
of float32, or a game's frames (1, C, 84, 84) of uint8; state, of the shape of
agent.initial_state(1), zeros where an episode starts. Outputs: action, the most probable choices,
counted from 0, or real numbers within their bounds; next_state.

The n numbers of an observation are those that the script's make_envs gives it: a Dict's entries in
the order of their names, a Tuple's in theirs, each flattened (a Discrete one-hot, an image of the
recipe images with its channels first), then what other recipes append, such as action masks.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver


class Step(torch.nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.agent = agent
        space = agent.action_space
        self.box = isinstance(space, spaces.Box)
        if self.box:
            self.low = torch.from_numpy(np.float32(space.low.ravel()))
            self.high = torch.from_numpy(np.float32(space.high.ravel()))

    def forward(self, obs, state):
        """As predict does it, without a sample and without NumPy."""
        out, *_, next_state = self.agent.step(obs, state)
        if hasattr(self.agent, "policy"):  # out is h, else log-probabilities
            out = self.agent.actor(out)
        return (out.clamp(self.low, self.high) if self.box else out.argmax(-1)), next_state


def export(run_dir: str, file: str) -> None:
    script, args, envs, agent, _ = driver.open_run(run_dir)
    script.check(not getattr(args, "squash_output", False), "--squash-output: can't be exported")
    dtype = torch.uint8 if script.kind == "rppo_gru_atari" else torch.float32
    obs = torch.from_numpy(envs.single_observation_space.sample()[None]).to(dtype)
    torch.onnx.export(
        Step(agent).eval(), (obs, agent.initial_state(1)), file, dynamo=True, external_data=False,
        input_names=["obs", "state"], output_names=["action", "next_state"],
    )  # fmt: skip


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        if len(sys.argv) != 3:
            raise ValueError("usage: export_onnx.py runs/RUN agent.onnx")
        try:
            export(*sys.argv[1:])
        except ModuleNotFoundError as error:
            raise ValueError(f'{error}; pip install ".[onnx]"') from error
