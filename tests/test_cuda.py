"""The scripts on a GPU. Without one all tests are skipped; --dry runs them on the CPU instead.

    pytest -m cuda -n0 -s          # on a machine with a GPU; -s shows the measured errors
    pytest -m cuda -n0 --dry       # anywhere: what runs on the GPU next time runs at all

A GPU has three arithmetics for float32. "float32" is IEEE's; with TF32 the factors of a product
have 10 bits after the point, which cuDNN's convolutions and recurrences use unless told otherwise;
--amp computes the CNN in bfloat16, with 7 bits.
"""

import copy
import json
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import MODULES, ROOT, awkward_ends, having
from gymnasium import spaces

pytestmark = pytest.mark.cuda

SCRIPTS = [script for script, module in MODULES.items() if "cuda" in vars(module.Args)]
CELLS = [(script, name) for name in ("ResetLSTM", "ResetGRU") for script in having(name)]
CELLS = [(script, name) for script, name in CELLS if script in SCRIPTS]
PRECISIONS = {  # the dtype, what its products are, the largest relative error
    "float64": (torch.float64, "ieee", 1e-11),
    "float32": (torch.float32, "ieee", 1e-4),
    "TF32": (torch.float32, "tf32", 1e-2),
}
COMPACTED = "RNN module weights are not part of single contiguous chunk of memory"
TASKS = {  # a small training: its environment and flags
    "rppo_lstm": {"env_id": "CartPole-v1", "encoder_size": 16, "norm_obs": True},
    "rppo_continuous": {"env_id": "Pendulum-v1", "encoder_size": 16, "use_sde": True},
    "trpo": {"env_id": "CartPole-v1", "encoder_size": 16, "memory": "lstm"},
    "rppo_gru_atari": {"env_id": "ALE/Pong-v5", "num_steps": 16, "update_epochs": 1},
}


@pytest.fixture
def device(request) -> str:
    """The GPU; the CPU in a dry run."""
    if request.config.getoption("--dry"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; --dry runs the test on the CPU")
    return "cuda"


@pytest.fixture
def set_products():
    """A function that sets how torch multiplies float32: "ieee" or "tf32"."""
    backends = torch.backends
    places = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    before = [place.fp32_precision for place in places]

    def set_to(products: str) -> None:
        for place in places:
            place.fp32_precision = products

    yield set_to
    for place, products in zip(places, before):
        place.fp32_precision = products


@pytest.fixture(params=PRECISIONS)
def precision(request, set_products):
    """Sets the default dtype and how products are computed -> name, dtype, tolerance."""
    dtype, products, tolerance = PRECISIONS[request.param]
    set_products(products)
    torch.set_default_dtype(dtype)
    yield request.param, dtype, tolerance
    torch.set_default_dtype(torch.float32)


def relative_error(found, expected) -> float:
    """The largest difference, divided by the largest number."""
    expected = expected.detach().double().cpu()
    return ((found.detach().double().cpu() - expected).abs().max() / expected.abs().max()).item()


# --- The recurrence ------------------------------------------------------------------------------


def make_cell(script: str, name: str, hidden: int):
    """Biases are 0 at first, which would hide an error in them."""
    torch.manual_seed(0)
    memory = getattr(MODULES[script], name)(64, hidden).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return memory


def loop(memory, x, state, final):
    """The definition: x (T, N, F), state (rows, N, H), final (T, N) -> h (T, N, H)."""
    outputs = []
    for t in range(len(x)):
        state = memory.step(x[t], state)
        outputs.append(state[0])
        state = state.where(~final[t][:, None], 0.0)
    return torch.stack(outputs)


def gradients(memory, h, inputs, weight):
    return torch.autograd.grad((h * weight).sum(), [*inputs, *memory.parameters()])


@pytest.mark.parametrize("hidden", [7, 128])
@pytest.mark.parametrize("script,name", CELLS)
def test_the_fused_recurrence_is_the_loop(script, name, hidden, device, precision):
    """Outputs and gradients beside the loop on the CPU in float64."""
    _, dtype, tolerance = precision
    rows = 2 if name == "ResetLSTM" else 1
    final = awkward_ends(T=64)[2][:-1]
    T, N = final.shape
    memory = make_cell(script, name, hidden)
    x = torch.randn(T, N, 64, dtype=torch.float64, requires_grad=True)
    state = torch.randn(rows, N, hidden, dtype=torch.float64, requires_grad=True)
    counts = ~final[..., None]  # no loss reads a final step
    weight = torch.randn(T, N, hidden, dtype=torch.float64) * counts
    expected_h = loop(memory, x, state, final)
    expected = gradients(memory, expected_h, [x, state], weight)

    memory = copy.deepcopy(memory).to(device, dtype)
    inputs = [v.detach().to(device, dtype).requires_grad_() for v in (x, state)]
    h = memory(*inputs, final.to(device))
    found = gradients(memory, h, inputs, weight.to(device, dtype))
    errors = [relative_error(h * counts.to(device), expected_h * counts)]
    errors += [relative_error(f, e) for f, e in zip(found, expected)]
    print(f"\n{name}, {hidden} units, {precision[0]}: largest relative error {max(errors):.1e}")
    assert max(errors) <= tolerance
    assert not found[0][final.to(device)].any()  # a final step's input moves nothing


@pytest.mark.parametrize("hidden", [16, 128])
@pytest.mark.parametrize("script,name", CELLS)
def test_a_reset_is_exactly_zero(script, name, hidden, device, precision):
    """h after a final step is 0. What came before changes no bit afterwards, and gets no gradient."""
    _, dtype, _ = precision
    rows = 2 if name == "ResetLSTM" else 1
    memory = make_cell(script, name, hidden).to(device, dtype)
    final = torch.zeros(12, 5, dtype=torch.bool, device=device)
    final[5] = True
    x = torch.randn(12, 5, 64).to(device, dtype)
    afterwards = []
    for last_input in (0.0, 1e7, -1e30, torch.inf, torch.nan):
        inputs = x.clone()
        inputs[:5] = torch.randn(5, 5, 64).to(device, dtype)
        inputs[5] = last_input
        inputs.requires_grad_()
        state = torch.randn(rows, 5, hidden).to(device, dtype).requires_grad_()
        h = memory(inputs, state, final)
        assert not h[5].any() and h[4].all()
        afterwards.append(h[6:])
        passed = torch.autograd.grad(h[6:].sum(), [inputs, state, *memory.parameters()])
        assert not passed[0][:6].any() and not passed[1].any() and passed[0][6:].any()
        assert all(gradient.isfinite().all() and gradient.any() for gradient in passed[2:])
    assert all(torch.equal(afterwards[0], others) for others in afterwards[1:])


@pytest.mark.parametrize("script,name", CELLS[:1] + CELLS[-1:])
def test_cudnn_says_only_that_it_compacts_the_weights(script, name, device):
    """cuDNN takes all weights as one block of memory. Ours are pieces: the input's weights get a
    constant column at every call, so there is no block that could stay. cuDNN makes one, a copy of
    F H numbers beside T N F H products, and torch says so once. Anything else would be news."""
    memory = make_cell(script, name, 32).float().to(device)
    x = torch.randn(8, 3, 64, device=device)
    state = torch.zeros(2 if name == "ResetLSTM" else 1, 3, 32, device=device)
    final = torch.zeros(8, 3, dtype=torch.bool, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        memory(x, state, final).sum().backward()
    expected = [COMPACTED] if device == "cuda" else []
    assert [str(warning.message)[: len(COMPACTED)] for warning in said] == expected


# --- The agent -----------------------------------------------------------------------------------


def make_agent(script: str, **flags):
    """An agent whose heads are away from their first weights, and observations (T, N, ...) for it."""
    module = MODULES[script]
    sizes = {"encoder_size": 16} if "encoder_size" in vars(module.Args) else {}
    args = module.Args(hidden_size=32, **sizes, **flags)
    observations = spaces.Box(-1, 1, (3,))
    actions = spaces.Discrete(3)
    if script == "rppo_gru_atari":
        observations = spaces.Box(0, 255, (1, 84, 84), np.uint8)
    if script == "rppo_continuous":
        actions = spaces.Box(-1, 1, (2,))
    envs = SimpleNamespace(single_observation_space=observations, single_action_space=actions)
    torch.manual_seed(1)
    agent = module.Agent(envs, args)
    with torch.no_grad():
        for layer in (agent.actor, *agent.children()):
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        agent.actor.weight.mul_(10)
    final = awkward_ends()[2][:-1]
    random = np.random.default_rng(0)
    if script == "rppo_gru_atari":
        obs = torch.from_numpy(random.integers(0, 256, (*final.shape, 1, 84, 84), np.uint8))
    else:
        obs = torch.from_numpy(random.uniform(-1, 1, (*final.shape, 3)))
    return agent, obs, final


@torch.no_grad()
def acted_and_replayed(agent, obs, final):
    """Plays as `train` does, then replays -> (logprob, value) of the steps that count, of both."""
    module = MODULES[agent.__module__]
    T, N = final.shape
    zeros = agent.initial_state(N)
    first_state = torch.randn(zeros.shape).to(zeros)
    state = first_state
    legal = torch.ones(N, 1, 3, dtype=torch.bool, device=obs.device)
    choices, logprobs, values = [], [], []
    for t in range(T):
        if agent.__module__ == "trpo":
            h, state = agent.step(obs[t], state)
            value = torch.zeros_like(h[:, 0])  # the critic is not replayed: it has h of acting
            choice = agent.act(h, legal, agent.sample_noise(N))
            logprob = agent.policy(h, legal).log_prob(choice)
        elif agent.__module__ == "rppo_continuous":
            h, value, state = agent.step(obs[t], state)
            choice = agent.act(h, agent.sample_noise(N))
            logprob = agent.policy(h).log_prob(choice)
        else:
            masks = [legal] if agent.__module__ == "rppo_lstm" else []
            logp, value, state = agent.step(obs[t], *masks, state)
            choice = module.sample(logp)
            logprob = module.log_prob(logp, choice)
        choices.append(choice)
        logprobs.append(logprob)
        values.append(value)
        state = state.where(~final[t][:, None], 0.0)
    choices = torch.stack(choices)
    acted = torch.stack(logprobs)[~final], torch.stack(values)[~final]
    masks = legal.expand(T, -1, -1, -1)
    if agent.__module__ == "trpo":
        policy = agent(agent.normalize(obs), masks, first_state, final)
        return acted, (policy.log_prob(choices[~final]), acted[1])
    masks = [masks] if agent.__module__ == "rppo_lstm" else []
    logprob, _, value = agent.evaluate_actions(obs, *masks, first_state, final, choices)
    return acted, (logprob, value)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_replay_repeats_acting(script, separate, device, precision):
    """Acting calls a cell, in cuBLAS, and replay cuDNN; with TF32 they differ by its rounding."""
    name, dtype, tolerance = precision
    flags = {"memory": "lstm"} if script == "trpo" else {"separate_critic": separate}
    agent, obs, final = make_agent(script, **flags)
    obs = obs.to(device) if obs.dtype == torch.uint8 else obs.to(device, dtype)
    agent.to(device, dtype)
    acted, replayed = acted_and_replayed(agent, obs, final.to(device))
    errors = [(a - b).abs().max().item() for a, b in zip(acted, replayed)]
    ratio = (replayed[0] - acted[0]).exp()
    print(f"\n{script}, {name}: log-probabilities {errors[0]:.1e}, values {errors[1]:.1e},"
          f" ratios {ratio.min():.4f} to {ratio.max():.4f}")  # fmt: skip
    assert acted[0].std() > 0.01
    assert max(errors) <= tolerance


def test_bfloat16_replays_as_it_acts(device):
    """--amp: ratios of the first minibatch stay well within the clip range, 0.9 to 1.1."""
    agent, obs, final = make_agent("rppo_gru_atari", amp=True)
    agent.to(device)
    acted, replayed = acted_and_replayed(agent, obs.to(device), final.to(device))
    distances = (replayed[0] - acted[0]).exp().sub(1).abs()
    print(f"\n--amp: ratios within {distances.max():.1e} of 1, mean {distances.mean():.1e}")
    assert distances.max() <= 0.05


@pytest.mark.parametrize("products", ["ieee", "tf32"])
def test_trpos_fisher_vector_product(products, device, set_products):
    """A difference of two gradients loses digits, and with TF32 more of them: in an emulation 3% of
    this product, against 0.004% in float32."""
    trpo = MODULES["trpo"]
    set_products(products)
    found = []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        agent, obs, final = make_agent("trpo", memory="lstm")
        agent.to(where, dtype)
        obs, final = obs.to(where, dtype), final.to(where)
        legal = torch.ones(*final.shape, 1, 3, dtype=torch.bool, device=where)
        state = agent.initial_state(final.shape[1])
        parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
        size = sum(p.numel() for p in parameters)
        v = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(where, dtype)

        def policy(agent=agent, inputs=(obs, legal, state, final)):
            return agent(*inputs)

        with torch.no_grad():
            old = policy()
        product = trpo.fisher_vector_difference(policy, old, parameters, 0.0, v)
        found.append(product.double().cpu())
    cosine = torch.cosine_similarity(found[0], found[1], dim=0).item()
    print(f"\ntrpo, {products}: the product's cosine to float64's is {cosine:.5f}")
    assert cosine >= (0.95 if products == "tf32" else 0.9999)


# --- Training ------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path, device):
    """Trains a script, small, on the device -> the agent; its run is tmp_path / name."""

    def run(script: str, name: str, where: str = device, **flags):
        module = MODULES[script]
        small = {"num_envs": 4, "num_steps": 32, "hidden_size": 16, "total_timesteps": 1}
        small |= {"eval_episodes": 0, "torch_threads": 1}
        if script != "trpo":
            small |= {"num_minibatches": 2, "update_epochs": 2, "seq_len": 16}
        paths = {"runs_dir": str(tmp_path), "run_name": name}
        args = module.Args(**small | TASKS[script] | paths | {"cuda": where == "cuda"} | flags)
        return module.train(args)

    return run


def needs(script: str) -> None:
    if script == "rppo_gru_atari":
        pytest.importorskip("ale_py")


def flat(agent) -> torch.Tensor:
    """All weights."""
    return torch.cat([p.detach().flatten().cpu() for p in agent.parameters()])


def statistics(agent) -> torch.Tensor:
    """All that the agent saves beside its weights: means, variances and counts."""
    weights = {name for name, _ in agent.named_parameters()}
    saved = [x.flatten().cpu() for name, x in agent.state_dict().items() if name not in weights]
    return torch.cat([torch.zeros(1), *saved])


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_update_is_that_of_the_cpu(script, train, device, monkeypatch):
    """A rollout and its whole update in float64, from the same weights and noise: all weights and
    statistics move as they do on the CPU."""
    needs(script)
    module = MODULES[script]

    class Double(module.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            first.append(flat(self))

        def normalize(self, obs):
            return super().normalize(obs.double())

    if not hasattr(module.Agent, "normalize"):
        del Double.normalize
    first: list[torch.Tensor] = []
    torch.set_default_dtype(torch.float64)
    try:
        monkeypatch.setattr(module, "Agent", Double)
        agents = [train(script, where, where=where) for where in dict.fromkeys(("cpu", device))]
    finally:
        torch.set_default_dtype(torch.float32)
    assert agents[-1].actor.weight.device.type == device
    moved = (flat(agents[0]) - first[0]).norm()
    error = ((flat(agents[0]) - flat(agents[-1])).norm() / moved).item()
    assert torch.equal(first[0], first[-1])
    assert torch.allclose(statistics(agents[0]), statistics(agents[-1]), rtol=1e-9)
    print(f"\n{script}: weights moved {moved:.3g}; the GPU's differ by {error:.1e} of it")
    assert moved > 1e-3
    assert error <= 1e-9


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_seed_gives_the_same_weights(script, train, device):
    needs(script)
    agents = [train(script, name, total_timesteps=150) for name in ("one", "two")]
    assert agents[0].actor.weight.device.type == device
    assert torch.equal(flat(agents[0]), flat(agents[1]))
    assert torch.equal(statistics(agents[0]), statistics(agents[1]))
    assert not torch.equal(flat(agents[0]), flat(train(script, "other", seed=2)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_continues_on_the_same_device_and_on_the_other(script, train, device, tmp_path):
    """Two resumes of one file give the same weights, bit for bit; a run of a GPU continues on a
    CPU, too."""
    needs(script)
    before = flat(train(script, "run"))
    step = json.loads((tmp_path / "run" / "result.json").read_text())["global_step"]
    after = []
    for name, where in (("a", device), ("b", device), ("c", "cpu")):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        options = {"resume": str(tmp_path / name), "total_timesteps": 2 * step}
        agent = train(script, name, where=where, **options)
        assert agent.actor.weight.device.type == where
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert 2 * step <= result["global_step"] < 2 * step + 4 * 32
        after.append(flat(agent))
    assert torch.equal(after[0], after[1])
    assert all((weights - before).norm() > 1e-3 for weights in after)


@pytest.mark.parametrize("script", SCRIPTS)
def test_play_on_a_cpu(script, train, run_script, tmp_path, monkeypatch, capsys):
    """agent.pt has the weights of the GPU, and --play needs none. Games are cut."""
    needs(script)
    agent = train(script, "run")
    saved = torch.load(tmp_path / "run" / "agent.pt", map_location="cpu", weights_only=True)
    weights = agent.state_dict()
    assert all(torch.equal(x, weights[name].cpu()) for name, x in saved["agent"].items())
    if script == "rppo_gru_atari":
        module = MODULES[script]
        monkeypatch.setattr(module, "EVAL_FRAMES", 200)
        flags = {"play": str(tmp_path / "run"), "render": "none", "eval_episodes": 1}
        capsys.readouterr()
        module.play(module.Args(**saved["args"] | flags))
        printed = capsys.readouterr().out
    else:
        flags = "--play", tmp_path / "run", "--render", "none", "--eval-episodes", 1
        printed = run_script(script, *flags, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert printed.startswith("return ") and len(printed.splitlines()) == 1


def test_a_group_of_one_process_changes_nothing(train, device):
    """The messages that torchrun's processes exchange, through nccl on a GPU, gloo on a CPU: sums
    over one process are its own numbers."""
    pytest.importorskip("ale_py")
    amp = device == "cuda"
    alone = flat(train("rppo_gru_atari", "alone", amp=amp))
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device))
        together = flat(train("rppo_gru_atari", "together", amp=amp))
    finally:
        dist.destroy_process_group()
    assert backend.name() == ("nccl" if device == "cuda" else "gloo")
    assert torch.equal(alone, together)


def test_torchrun_with_one_process(device, tmp_path):
    """As a user starts it; beside the progress bar it says nothing but cuDNN's remark."""
    pytest.importorskip("ale_py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    flags = """--env-id ALE/Pong-v5 --num-envs 4 --num-steps 16 --total-timesteps 64
        --torch-threads 1 --eval-episodes 0 --runs-dir . --run-name run""".split()
    flags += ["--cuda", "--amp"] if device == "cuda" else []
    command = [*start, str(ROOT / "rppo_gru_atari.py"), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["global_step"] == 64
    lines = [line for line in done.stderr.splitlines() if "warning" in line.lower()]
    assert all(COMPACTED in line for line in lines), lines


def synchronisations(work, device: str) -> list[str]:
    """Calls `work`; the lines of scripts at which the CPU waited for the GPU, as torch counts."""
    if device == "cpu":
        work()
        return []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in said if "synchroniz" in str(warning.message)]
    return [f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in waits]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "trpo"])
def test_where_a_minibatch_waits_for_the_gpu(script, train, device, monkeypatch):
    """Printed by line, of one minibatch. test_simulated_gpu.py does not count those of backward."""
    needs(script)
    module = MODULES[script]
    counts: list[int] = []
    minibatches = module.minibatches

    def counted(*inputs):
        for batch in minibatches(*inputs):
            counts.append(0)
            yield batch

    monkeypatch.setattr(module, "minibatches", counted)
    whole = synchronisations(lambda: train(script, "once", update_epochs=1), device)
    first = len(counts)
    more = synchronisations(lambda: train(script, "twice", update_epochs=3), device)
    difference = (len(more) - len(whole)) / (len(counts) - 2 * first)
    lines = {line: more.count(line) - whole.count(line) for line in sorted({*more})}
    repeated = {line: count / 4 for line, count in lines.items() if count}
    print(f"\n{script}: {difference:.1f} waits in a minibatch, {repeated}")
    assert len(counts) == 8 and first == 2
    assert difference <= 13  # measured: 11 and 12.5
