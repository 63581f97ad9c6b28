"""The scripts on a GPU. Without one the tests are skipped; --dry runs them on the CPU instead.

pytest -m cuda -n0         # on a machine with a GPU
pytest -m cuda -n0 --dry   # anywhere: what the GPU will run runs at all
"""

import json
import sys

import pytest
import torch
import tyro
from support import MODULES, ROOT, awkward_ends, main

pytestmark = pytest.mark.cuda

CELLS = [("rppo_lstm", "ResetLSTM"), ("rppo_gru_atari", "ResetGRU")]
SMALL = "--num-envs 4 --num-steps 32 --hidden-size 16 --encoder-size 16 --eval-episodes 1"
PPO = f"{SMALL} --num-minibatches 2"
RUNS = {
    "rppo_lstm": f"{PPO} --env-id CartPole-v1 --mask-velocity --norm-obs --seq-len 8",
    "rppo_continuous": f"{PPO} --env-id Pendulum-v1 --no-preset --use-sde --sde-sample-freq 4",
    "trpo": f"{SMALL} --env-id CartPole-v1 --no-preset --memory lstm",
    "rppo_gru_atari": "--num-envs 2 --num-steps 16 --num-minibatches 1 --eval-episodes 0",
}


@pytest.fixture
def device(request) -> str:
    if request.config.getoption("--dry"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; --dry runs the test on the CPU")
    return "cuda"


@pytest.mark.parametrize("script, cell", CELLS)
def test_replay_equals_the_loop(script, cell, device):
    """cuDNN's kernels, too, reset exactly: outputs and gradients in float64."""
    module = MODULES[script]
    torch.manual_seed(1)
    memory = getattr(module, cell)(5, 7).double().to(device)
    _, _, final = awkward_ends()
    final = final[:-1].to(device)
    x = torch.randn(*final.shape, 5, dtype=torch.float64, device=device)
    first = torch.randn_like(memory.initial_state(final.shape[1]))
    state, outputs = first, []
    for t in range(len(x)):
        h, state = memory.step(x[t], state)
        outputs.append(h)
        state = module.reset_state(state, final[t])
    loop, replay = torch.stack(outputs)[~final], memory(x, first, final)[~final]
    assert (loop - replay).abs().max() <= 1e-11
    weights = torch.randn_like(loop)
    for a, b in zip(
        torch.autograd.grad((loop * weights).sum(), [*memory.parameters()]),
        torch.autograd.grad((replay * weights).sum(), [*memory.parameters()]),
    ):
        assert (a - b).abs().max() <= 1e-10


@pytest.mark.parametrize("script", RUNS)
def test_a_run_begins_as_on_the_cpu_and_goes_on(script, device, tmp_path):
    """The first update has the CPU's weights to 1e-3, for the CPU draws all that is sampled; two
    resumes are the same, bit for bit."""
    cuda = "--cuda" if device == "cuda" else ""
    steps = 24 if script == "rppo_gru_atari" else 100
    weights = {}
    for name, flag in (("cpu", ""), ("gpu", cuda)):
        flags = f"{RUNS[script]} --total-timesteps {steps} --run-name {name} {flag}"
        code, _, err = main(tmp_path, script, flags)
        assert code == 0, err
        saved = torch.load(tmp_path / f"runs/{name}/agent.pt", map_location="cpu")
        weights[name] = saved["agent"]
    for name, x in weights["cpu"].items():
        assert (x - weights["gpu"][name]).abs().max() <= 1e-3, name

    good, after = (tmp_path / "runs/gpu/agent.pt").read_bytes(), []
    for _ in range(2):
        (tmp_path / "runs/gpu/agent.pt").write_bytes(good)
        code, _, err = main(tmp_path, script, f"--resume runs/gpu --total-timesteps {3 * steps}")
        assert code == 0, err
        after.append(torch.load(tmp_path / "runs/gpu/agent.pt", map_location="cpu")["agent"])
    assert all(torch.equal(x, after[1][name]) for name, x in after[0].items())
    assert json.loads((tmp_path / "runs/gpu/result.json").read_text())["args"]["cuda"] == bool(cuda)


@pytest.mark.parametrize(
    "script, others",
    [
        ("rppo_lstm", ""),
        ("rppo_continuous", ""),
        ("rppo_gru_atari", ""),
        ("rppo_lstm", "attention"),
    ],
)
def test_cuda_graphs_learn_as_without_them(script, others, device, tmp_path):
    """Over three rollouts, with episodes that end, and an evaluation of as many environments."""
    sys.path.append(str(ROOT / "docs/recipes"))
    import use

    agents = []
    for names in [], ["cuda_graphs"]:
        module = use.fresh(script, *names, *others.split())
        args = tyro.cli(module.Args, args=f"{RUNS[script]} --total-timesteps 300".split())
        if script == "rppo_gru_atari":
            args.total_timesteps = 60
        else:
            args.eval_episodes = args.num_envs
        args.cuda, args.runs_dir, args.run_name = device == "cuda", str(tmp_path), f"{names}"
        agents.append(module.train(args))
    for a, b in zip(*(agent.parameters() for agent in agents)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
