"""A trained agent for any runtime: one step as an ONNX graph, the state in and out.

    python docs/recipes/export_onnx.py runs/RUN agent.onnx  # needs: pip install ".[onnx]"

RUN is a run of any script, with its recipes. Inputs: obs, (1, n) of float32 or a game's (1, C, 84,
84) of uint8; legal (1, K, A) of bool, without action masks agent.exists[None] (not for games, nor
for rppo_continuous); state, zeros where an episode starts, of the shape of agent.initial_state(1).
Outputs: the most probable choices, counted from 0, or real-valued actions within their bounds,
(1, K), and the state for the next step.
"""

import sys

import numpy as np
import torch
import use as driver
from gymnasium import spaces


class Step(torch.nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.agent = agent
        space = agent.action_space
        self.box = isinstance(space, spaces.Box)
        if self.box:
            self.low = torch.from_numpy(np.float32(space.low.ravel()))
            self.high = torch.from_numpy(np.float32(space.high.ravel()))

    def forward(self, *inputs):
        if not hasattr(self.agent, "act"):
            logp, _, next_state = self.agent.step(*inputs)
            return logp.argmax(-1), next_state
        h, *_, next_state = self.agent.step(inputs[0], inputs[-1])
        if self.box:
            return self.agent.actor(h).clamp(self.low, self.high), next_state
        return self.agent.log_probs(h, inputs[1]).argmax(-1), next_state


def export(run_dir: str, file: str) -> None:
    script, args, envs, agent, _ = driver.open_run(run_dir)
    script.check(not getattr(args, "squash_output", False), "--squash-output: cannot be exported")
    obs = torch.from_numpy(envs.single_observation_space.sample()[None])
    inputs = {"obs": obs if obs.dtype == torch.uint8 else obs.float()}
    if hasattr(agent, "exists"):
        inputs["legal"] = torch.from_numpy(agent.exists)[None]
    inputs["state"] = agent.initial_state(1)
    names = {"input_names": [*inputs], "output_names": ["choices", "next_state"]}
    torch.onnx.export(Step(agent), tuple(inputs.values()), file, dynamo=True, **names)


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3:
            raise ValueError("usage: export_onnx.py runs/RUN agent.onnx")
        export(*sys.argv[1:])
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        print(f'error: {error}; pip install ".[onnx]"', file=sys.stderr)
        sys.exit(2)
