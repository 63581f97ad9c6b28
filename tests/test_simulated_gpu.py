"""--cuda without a GPU: on a simulated one no tensor of the CPU meets one of the GPU."""

import numpy as np
import pytest
import simulated
import torch
from conftest import MODULES

SCRIPTS = [script for script, module in MODULES.items() if "cuda" in vars(module.Args)]
TASKS = {
    "rppo_lstm": {"env_id": "CartPole-v1", "norm_obs": True, "separate_critic": True},
    "rppo_continuous": {"env_id": "Pendulum-v1", "use_sde": True},
    "trpo": {"env_id": "CartPole-v1", "memory": "lstm", "cg_max_steps": 3},
    "rppo_gru_atari": {"env_id": "ALE/Pong-v5"},
}
WAITS = {  # of a minibatch: numbers of steps that count (masks), indices, truth values
    "rppo_lstm": {"mask": 6, "copy": 0.5, "number": 2},
    "rppo_continuous": {"mask": 6, "copy": 0.5, "number": 2},
    "rppo_gru_atari": {"mask": 6, "copy": 1.5, "number": 2},
}


def train(script, folder, **flags):
    if script == "rppo_gru_atari":
        pytest.importorskip("ale_py")
    module = MODULES[script]
    small = {"num_envs": 4, "num_steps": 8, "hidden_size": 8, "total_timesteps": 1}
    small |= {"eval_episodes": 0, "torch_threads": 1, "runs_dir": str(folder)}
    if "encoder_size" in vars(module.Args):
        small["encoder_size"] = 8
    if script != "trpo":
        small |= {"num_minibatches": 2, "update_epochs": 1, "seq_len": 4}
    return module.train(module.Args(**small | TASKS[script] | flags))


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_update_stays_on_the_gpu(script, tmp_path):
    """An operation on tensors of both devices would raise. The weights are those of the CPU, but for
    rounding."""
    on_cpu = train(script, tmp_path)
    with simulated.gpu(MODULES[script]) as waits:
        agent = train(script, tmp_path, cuda=True)
    assert waits
    for (name, expected), found in zip(on_cpu.state_dict().items(), agent.state_dict().values()):
        assert isinstance(found, simulated.Elsewhere), name
        assert torch.allclose(found.here, expected, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("script", WAITS)
def test_how_often_a_minibatch_waits_for_the_gpu(script, tmp_path):
    """Six more minibatches wait so much more; docs/beyond.md says how often."""
    counts = []
    for epochs in 1, 4:
        with simulated.gpu(MODULES[script]) as waits:
            train(script, tmp_path, cuda=True, update_epochs=epochs)
        kinds = {kind for kind, _ in waits}
        counts.append({x: sum(n for (y, _), n in waits.items() if x == y) for x in kinds})
    more = {kind: (n - counts[0][kind]) / 6 for kind, n in counts[1].items()}
    assert more == WAITS[script]


def test_frames_are_sent_as_bytes(tmp_path, monkeypatch):
    """Each frame goes to the GPU twice: when the agent acts on it, and with the rollout."""
    pytest.importorskip("ale_py")
    sent = []
    as_tensor = simulated.Torch.as_tensor

    def recorded(self, x, device=None):
        sent.append((np.shape(x), x.dtype))
        return as_tensor(self, x, device)

    monkeypatch.setattr(simulated.Torch, "as_tensor", recorded)
    with simulated.gpu(MODULES["rppo_gru_atari"]):
        train("rppo_gru_atari", tmp_path, cuda=True)
    frames = [(shape, dtype) for shape, dtype in sent if shape[-2:] == (84, 84)]
    assert {dtype for _, dtype in frames} == {np.dtype(np.uint8)}
    assert sum(int(np.prod(shape[:-3])) for shape, _ in frames) == (2 * 8 + 1) * 4


def test_the_simulation_catches_what_a_gpu_refuses():
    module = MODULES["rppo_lstm"]
    with simulated.gpu(module):
        there, here = module.torch.as_tensor(np.ones(3), device=simulated.DEVICE), torch.ones(3)
        assert isinstance(there + 1, simulated.Elsewhere)
        assert (there * torch.tensor(2.0)).here.tolist() == [2, 2, 2]  # a number may be anywhere
        assert there[torch.tensor([0, 2])].here.tolist() == [1, 1]  # and so may an index
        for operation in torch.add, torch.dot, torch.minimum:
            with pytest.raises(RuntimeError, match="on the CPU and on the GPU"):
                operation(there, here.double())
        with pytest.raises(RuntimeError, match="on the CPU and on the GPU"):
            torch.stack([there, here.double()])
    assert module.torch is torch
