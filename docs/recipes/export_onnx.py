"""A trained agent for any runtime: one step as an ONNX graph, the state in and out.

    python docs/recipes/export_onnx.py runs/RUN agent.onnx   # needs: pip install ".[onnx]"

RUN is of rppo_lstm.py or rppo_gru_atari.py. Inputs: obs, (1, n) of float32 or a game's (1, C, 84,
84) of uint8; legal (1, K, A) of bool, not for games, true everywhere without action masks; state,
(2, 1, H) of an LSTM, (1, 1, H) of a GRU, twice as many rows with a separate critic, zeros where an
episode starts. Outputs: the most probable choices (1, K), and the state for the next step. Tested:
each of 1,000 actions in onnxruntime is the agent's own, the states fed back, and the states are
equal to 1e-5.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_gru_atari
import rppo_lstm


class Step(torch.nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, *inputs):
        logp, _, next_state = self.agent.step(*inputs)
        return logp.argmax(-1), next_state


def main(run_dir: str, file: str) -> None:
    try:
        script, saved = rppo_lstm, rppo_lstm.load(run_dir)
    except rppo_lstm.ArgumentError as error:
        if "rppo_gru_atari.py wrote it" not in str(error):
            raise
        script, saved = rppo_gru_atari, rppo_gru_atari.load(run_dir)
    args = script.Args(**saved["args"])
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args).eval()
    script.load(run_dir, agent)
    inputs = {"obs": torch.from_numpy(envs.single_observation_space.sample()[None])}
    if script is rppo_lstm:
        inputs["obs"] = inputs["obs"].float()
        inputs["legal"] = torch.from_numpy(agent.exists)[None]
    inputs["state"] = agent.initial_state(1)
    names = {"input_names": [*inputs], "output_names": ["choices", "next_state"]}
    torch.onnx.export(Step(agent), tuple(inputs.values()), file, dynamo=True, **names)


if __name__ == "__main__":
    try:
        rppo_lstm.check(len(sys.argv) == 3, "say: export_onnx.py runs/RUN agent.onnx")
        main(*sys.argv[1:])
    except (rppo_lstm.ArgumentError, rppo_gru_atari.ArgumentError, OSError) as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        print(f'error: {error}; pip install ".[onnx]"', file=sys.stderr)
        sys.exit(2)
