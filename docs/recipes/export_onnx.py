"""A trained agent for any runtime: one step as an ONNX graph, the LSTM's state in and out.

    python docs/recipes/export_onnx.py runs/RUN agent.onnx   # needs: pip install ".[onnx]"

Inputs: obs (1, n), float32; legal (1, K, A), bool, true everywhere without action masks; state
(2, 1, H), zeros where an episode starts. Outputs: the most probable choices (1, K), and the state
for the next step.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import rppo_lstm


class Step(torch.nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, obs, legal, state):
        logp, _, next_state = self.agent.step(obs, legal, state)
        return logp.argmax(-1), next_state


def main(run_dir: str, file: str) -> None:
    args = rppo_lstm.Args(**rppo_lstm.load(run_dir)["args"])
    agent = rppo_lstm.Agent(rppo_lstm.make_envs(args, 1), args).eval()
    rppo_lstm.load(run_dir, agent)
    inputs = agent.encoder[0].in_features
    example = torch.zeros(1, inputs), torch.from_numpy(agent.exists)[None], agent.initial_state(1)
    names = {"input_names": ["obs", "legal", "state"], "output_names": ["choices", "next_state"]}
    torch.onnx.export(Step(agent), example, file, dynamo=True, **names)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/recipes/export_onnx.py runs/RUN agent.onnx")
    try:
        main(*sys.argv[1:])
    except rppo_lstm.ArgumentError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f'error: {error}; pip install ".[onnx]"')
