"""ppo1_mpi.py: ranks against one rank with their union, statistics, schedules, failures, resume, imitation."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CONTINUOUS_ACTIONS, DISCRETE_ACTIONS, MODULES, OBSERVATION_SPACES, ROOT
from gymnasium import spaces
from ranks import CASES, build, union_update

pytest.importorskip("mpi4py")
module = MODULES["ppo1_mpi"]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
SCRIPT = str(ROOT / "ppo1_mpi.py")
CART = "--env-id CartPole-v1 --num-steps 64 --num-minibatches 2 --encoder-sizes 16".split()
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def mpiexec(ranks, *command, cwd, timeout=120):
    """Runs a command on so many ranks, from its words."""
    words = [str(MPIEXEC), "-n", str(ranks), sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What one job of 3 ranks found out: tests/ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    done = mpiexec(3, ROOT / "tests" / "ranks.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(3)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("memory,box", CASES)
def test_ranks_are_one_rank_with_the_union_of_their_rollouts(count, memory, box, job):
    for dtype, tolerance in (torch.float32, 1e-6), (torch.float64, 1e-12):
        gradient, weights = union_update(count, memory, box, dtype)
        first = job[0][f"{count} {memory} {box} {dtype}"]
        for result in job[:count]:
            ours, theirs = result[f"{count} {memory} {box} {dtype}"]
            assert gradient.abs().max() > 1e-2
            assert (ours - gradient).abs().max() <= tolerance
            assert (theirs - weights).abs().max() <= tolerance  # after 10 updates
            assert torch.equal(theirs, first[1])  # to the bit


@pytest.mark.parametrize("count", [1, 3])
def test_statistics_and_gradients_are_numpys_of_the_gathered_data(count, job):
    results = [result[f"statistics {count}"] for result in job[:count]]
    rows = np.concatenate([result["rows"].numpy() for result in results])
    number, total, squares = 1e-2 + len(rows), rows.sum(0), 1e-2 + (rows**2).sum(0)
    std = np.sqrt(np.maximum(squares / number - (total / number) ** 2, 1e-2))
    for result in results:
        assert np.abs(result["average"].numpy() - np.mean([r["local"].numpy() for r in results], 0)).max() <= 1e-12
        for name, expected in ("sum", total), ("squares", squares), ("count", number):
            assert np.abs(result[name].numpy() / expected - 1).max() <= 1e-12
        assert np.allclose(result["mean"], total / number, rtol=1e-6) and np.allclose(result["std"], std, rtol=1e-5)
        assert all(torch.equal(result[name], results[0][name]) for name in ("sum", "squares", "count", "mean", "std"))
    assert std[1] == pytest.approx(0.1) and abs(std[2] / 30 - 1) < 0.2  # the least one; a usual one


def test_schedules():
    progress = 0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1
    expected = {
        "constant": (1, 1, 1, 1, 1, 1, 1, 1),
        "linear": (1, 0.9, 0.75, 0.7, 0.5, 0.25, 0.1, 0),
        "middle_drop": (1, 0.9, 0.75, 0.075, 0.075, 0.075, 0.075, 0.075),
        "double_linear_con": (1, 0.8, 0.5, 0.4, 0.125, 0.125, 0.125, 0.125),
        "double_middle_drop": (1, 0.9, 0.75, 0.075, 0.075, 0.075, 0.125, 0.125),
    }
    assert module.SCHEDULES.keys() == expected.keys()
    for name, values in expected.items():
        assert [module.SCHEDULES[name](p) for p in progress] == pytest.approx(values, abs=1e-15), name


def test_the_schedule_multiplies_stepsize_and_clip(tmp_path, monkeypatch):
    """At the second of two iterations a linear schedule halves both."""
    monkeypatch.chdir(tmp_path)
    seen, loss = [], module.ppo_loss

    def spy(*inputs):
        seen.append(inputs[-1])
        return loss(*inputs)

    monkeypatch.setattr(module, "ppo_loss", spy)
    flags = [*CART, "--env-id", "Pendulum-v1", "--total-timesteps", "128", "--run-name", "a"]
    module.main(flags)
    assert seen == pytest.approx([0.2] * 8 + [0.1] * 8)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs/a")).Reload().Scalars("charts/learning_rate")
    assert [e.value for e in events] == pytest.approx([1e-3, 5e-4])


def test_flattened_parameters_are_the_agents():
    agent = build("lstm", CONTINUOUS_ACTIONS["box"])
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    flat, gradient = module.flatten_parameters(agent)
    assert all(torch.equal(p, before[name]) for name, p in agent.named_parameters())
    assert len(gradient) == len(flat) + 5 and len(flat) == sum(p.numel() for p in before.values())
    flat.add_(1.0)
    assert all(torch.equal(p, before[name] + 1) for name, p in agent.named_parameters())
    sum(p.sum() for p in agent.parameters()).backward()
    assert (gradient[:-5] == 1).all() and (gradient[-5:] == 0).all()
    agent.load_state_dict({**agent.state_dict(), **before})  # a resumed run's weights go into the same vector
    assert torch.equal(flat, torch.cat([p.flatten() for p in before.values()]))


def test_a_rank_out_of_step_is_found(job):
    """One bit of one weight of rank 1: every rank stops, with its number. A NaN is equal to itself, -0 not to 0."""
    assert {result["out of step"] for result in job} == {"the weights of rank 1 are no longer those of rank 0"}


def die(*_):
    """In place of an allreduce."""
    Path("fault").touch()
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyRank(gym.Env):
    """Episodes of 10 steps; on rank 1 something happens in the 100th step of its life: row 44 of iteration 1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how="", render_mode=None):
        self.how, self.life, self.steps = how, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.life, self.steps = self.life + 1, self.steps + 1
        obs, reward = self.np_random.uniform(-1, 1, 2).astype(np.float32), 1.0
        if self.life >= 100 and os.environ.get("PMI_RANK") == "1":
            module_of_train = sys.modules["__main__"]
            if self.how == "kill":
                module_of_train.average = module_of_train.average if Path("fault").exists() else die
                return obs, reward, False, self.steps == 10, {}
            if not Path("fault").exists():
                Path("fault").touch()  # its time is when the fault began
            if self.how == "raise":
                raise ValueError("the simulator exploded")
            if self.how == "defect":
                module_of_train.compute_gae = None  # so that something fails that is no environment
            obs = obs * np.nan if self.how == "nan" else obs
            reward = 1e38 if self.how == "overflow" else reward  # finite, but not its square
        return obs, reward, False, self.steps == 10, {}


for how in "raise", "nan", "overflow", "defect", "kill":
    gym.register(f"Rank1{how.title()}-v0", FaultyRank, kwargs={"how": how})


@pytest.mark.parametrize("how,words,speaker", [
    ("raise", "the simulator exploded') in row 44 of iteration 1", 1),
    pytest.param("nan", "observation is not finite in row 45 of environment 0 of iteration 1", 1, marks=pytest.mark.slow),
    pytest.param("overflow", "the loss or a gradient is not finite in iteration 1, on rank 1", 0, marks=pytest.mark.slow),
    pytest.param("defect", "TypeError: 'NoneType' object is not callable", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_fault_of_one_rank_ends_the_job_with_that_ranks_message(how, words, speaker, tmp_path):
    flags = [*CART, "--env-id", f"test_mpi:Rank1{how.title()}-v0", "--run-name", "a", "--checkpoint-every", "1"]
    done = mpiexec(3, SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode == 1 and time.time() - (tmp_path / "fault").stat().st_mtime < 10
    spoken = [line for line in done.stderr.replace("\r", "\n").split("\n") if "rank" in line and "Abort" not in line]
    assert len([line for line in spoken if line.startswith("rank ")]) == 1, done.stderr
    assert f"rank {speaker}: " in done.stderr and words in done.stderr, done.stderr
    assert "go on with: mpiexec -n 3 python" in done.stderr and "--resume runs/a" in done.stderr
    assert module.load(str(tmp_path / "runs/a"))["run"]["iteration"] == 1  # the last good one


@pytest.mark.slow
def test_wrong_flags_are_answered_once(tmp_path):
    for words, message in ("--num-minibatches 7", "must divide the 256 rows"), ("--nonsense 7", "Unrecognized options: "):
        done = mpiexec(3, SCRIPT, *words.split(), cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def children(pid):
    """Every process below pid."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in found] + [q for p in found for q in children(p)]


def test_kill_9_of_one_rank_in_the_middle_of_an_update_ends_the_job_and_the_checkpoint_goes_on(tmp_path):
    """Rank 1 is killed where the others wait for its gradient, in the first minibatch of iteration 1."""
    flags = [*CART, "--env-id", "test_mpi:Rank1Kill-v0", "--checkpoint-every", 1, "--total-timesteps", 600]
    words = [str(MPIEXEC), "-n", "3", sys.executable, SCRIPT, *map(str, flags), "--run-name", "a"]
    log = open(tmp_path / "log", "w")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log, env=ENVIRONMENT)
    while not (tmp_path / "fault").exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        below = children(process.pid)
        time.sleep(0.05)
    assert process.wait(timeout=10) != 0 and time.time() - (tmp_path / "fault").stat().st_mtime < 10
    assert len(below) >= 3  # the ranks, of which none is left
    assert all(not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in below)
    saved = module.load(str(tmp_path / "runs/a/checkpoint.pt"))
    assert all(x.isfinite().all() for x in saved["agent"].values()) and len(saved["rng"]) == 3
    assert saved["run"]["iteration"] == 1
    done = mpiexec(3, SCRIPT, "--resume", "runs/a", cwd=tmp_path)  # the file `fault` spares it now
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["global_step"] >= 600


@pytest.mark.parametrize("memory", ["none", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_resumed_job_is_the_one_never_stopped(memory, tmp_path):
    """Bit for bit with 2 ranks; with another number of ranks it goes on, and says that it is not the same."""
    flags = [*CART, "--memory", memory, "--hidden-size", 8, "--checkpoint-every", 4, "--total-timesteps", 1200]
    done = mpiexec(2, SCRIPT, *flags, "--run-name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "a"
    result = json.loads((run_dir / "result.json").read_text())
    assert 1200 <= result["global_step"] < 1200 + 2 * 64  # of both ranks, and rank 0 alone speaks
    assert done.stdout.count("runs/a: ") == 1 and len(list(run_dir.glob("events*"))) == 1
    whole = module.load(str(run_dir))["agent"]
    checkpoint = (run_dir / "checkpoint.pt").read_bytes()  # of the middle of the run
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert saved["run"]["iteration"] == 8 and len(saved["rng"]) == 2 and not torch.equal(*saved["rng"])
    done = mpiexec(2, SCRIPT, "--resume", "runs/a", cwd=tmp_path)
    assert done.returncode == 0 and "ranks wrote" not in done.stdout
    resumed = module.load(str(run_dir))["agent"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    (run_dir / "checkpoint.pt").write_bytes(checkpoint)
    done = mpiexec(3, SCRIPT, "--resume", "runs/a", cwd=tmp_path)
    assert done.returncode == 0 and "2 ranks wrote the checkpoint, 3 go on" in done.stdout
    assert json.loads((run_dir / "result.json").read_text())["global_step"] >= 1200


@pytest.mark.slow
def test_an_update_that_stops_early_stops_on_every_rank(tmp_path):
    """Each rank has another KL; one that broke out of the loop on its own would leave the others in an allreduce."""
    flags = [*CART, "--total-timesteps", 1200, "--target-kl", 1e-5, "--checkpoint-every", 8, "--run-name", "a"]
    done = mpiexec(2, SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = torch.load(tmp_path / "runs/a/checkpoint.pt", weights_only=True)["run"]
    assert run["iteration"] == 8 < run["updates"] < 8 * 8  # of 8 minibatches an iteration some were left out


@pytest.mark.slow
def test_without_mpi4py_it_is_one_rank_and_under_mpiexec_it_says_what_to_install(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, SCRIPT, *CART, "--total-timesteps", "100", "--run-name", "a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    under = subprocess.run([str(MPIEXEC), "-n", "1", *command], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert under.returncode == 2 and "pip install mpi4py mpich" in under.stderr
    # The ranks of another MPI's mpiexec would each be alone and write the same files.
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "4"}
    other = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert other.returncode == 2 and "4 ranks were started by another MPI" in other.stderr


@pytest.mark.parametrize("actions", [*DISCRETE_ACTIONS, *CONTINUOUS_ACTIONS])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_action_probability_is_that_of_torch_distributions(actions, memory):
    space = {**DISCRETE_ACTIONS, **CONTINUOUS_ACTIONS}[actions]
    agent = build(memory, space)
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32)
    taken = np.stack([space.sample() for _ in range(5)])
    rows = [torch.from_numpy(obs)]
    with torch.no_grad():
        latent = agent.encode(rows)[0]
        latent = agent.memories[0].step(latent, agent.initial_state(5)[:2])[0] if memory == "lstm" else latent
        logits = agent.actor(latent)
    shown, likelihood = agent.action_probability(obs), agent.action_probability(obs, taken)
    action = torch.from_numpy(taken.reshape(5, -1))
    if agent.box:
        reference = torch.distributions.Normal(logits, agent.log_std.exp())
        assert np.allclose(shown[0], reference.mean.numpy(), atol=1e-6) and np.allclose(shown[1], reference.stddev.detach())
        expected = reference.log_prob(action).sum(-1).exp()
    elif agent.binary:
        reference = torch.distributions.Bernoulli(logits=logits)
        assert np.allclose(shown, reference.probs.numpy(), atol=1e-6)
        expected = reference.log_prob(action.float()).sum(-1).exp()
    else:
        parts = logits.unflatten(-1, agent.exists.shape).unbind(-2)
        references = [torch.distributions.Categorical(logits=x[:, : sum(e)]) for x, e in zip(parts, agent.exists)]
        for ours, reference in zip(shown if actions == "multidiscrete" else [shown], references):
            assert np.allclose(ours, reference.probs.numpy(), atol=1e-6) and np.allclose(ours.sum(-1), 1)
        choices = (action - getattr(space, "start", 0)).unbind(-1)
        expected = math.prod(reference.log_prob(a).exp() for reference, a in zip(references, choices))
    assert np.allclose(likelihood, expected.detach().numpy(), rtol=1e-4, atol=1e-12)
    single = agent.action_probability(obs[2], taken[2])
    assert single.shape == () and np.allclose(single, likelihood[2], rtol=1e-4)
    if actions == "discrete":
        assert agent.action_probability(obs[2]).shape == (3,)


@pytest.mark.parametrize("actions", [*DISCRETE_ACTIONS, *CONTINUOUS_ACTIONS])
def test_logprob_and_entropy(actions):
    """In float64 against torch.distributions, and to_env and from_env are each other's inverse."""
    space = {**DISCRETE_ACTIONS, **CONTINUOUS_ACTIONS}[actions]
    agent = build("none", space).double()
    torch.manual_seed(0)
    latent = torch.randn(6, 8, dtype=torch.float64)
    head, logits = agent.head(latent), agent.actor(latent)
    action = agent.sample(head)
    if agent.box:
        reference = torch.distributions.Independent(torch.distributions.Normal(logits, agent.log_std.exp()), 1)
        expected = reference.log_prob(action), reference.entropy()
    elif agent.binary:
        reference = torch.distributions.Independent(torch.distributions.Bernoulli(logits=logits), 1)
        expected = reference.log_prob(action.double()), reference.entropy()
    else:
        parts = logits.unflatten(-1, agent.exists.shape).unbind(-2)
        references = [torch.distributions.Categorical(logits=x[:, : sum(e)]) for x, e in zip(parts, agent.exists)]
        expected = [sum(d.log_prob(a) for d, a in zip(references, action.unbind(-1))), sum(d.entropy() for d in references)]
    assert (agent.log_prob(head, action) - expected[0]).abs().max() <= 1e-12
    assert (agent.entropy(head) - expected[1]).abs().max() <= 1e-12
    env_action = agent.to_env(action.detach())
    assert all(space.contains(a) for a in env_action)
    if not agent.box:
        assert torch.equal(agent.from_env(env_action), action)
    assert np.allclose(agent.to_env(agent.from_env(env_action)), env_action)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("actions", ["multidiscrete", "box"])
def test_the_row_policy_is_the_agents_also_after_an_update(activation, actions):
    torch.manual_seed(0)
    space = {**DISCRETE_ACTIONS, **CONTINUOUS_ACTIONS}[actions]
    args = module.Args(activation=activation, encoder_sizes=(16, 8))
    agent = module.Agent(OBSERVATION_SPACES["vector"], space, args)
    flat, _ = module.flatten_parameters(agent)
    policy = module.RowPolicy(agent)
    for _ in range(2):
        obs = torch.randn(4, 3)
        ours, theirs = torch.from_numpy(policy(obs.numpy())), agent.actor(agent.encode([obs])[0])
        assert ours.dtype == torch.float32 and (ours - theirs).abs().max() <= 1e-6 * (1 + theirs.abs().max())
        with torch.no_grad():
            flat.add_(torch.randn_like(flat) * 0.3)
        agent.obs_stats.update(torch.randn(50, 3) * 3 + 1, module.OneRank())


def test_policy_and_value_function_share_no_parameter_but_a_cnn():
    for memory in "none", "lstm":
        for observations, shared in ("vector", False), ("image CHW", True):
            agent = build(memory, observation_space=OBSERVATION_SPACES[observations])
            obs = [torch.from_numpy(x)[None] for x in agent.observe(agent.observation_space.sample()[None], {})]
            final = torch.zeros(1, 1, dtype=torch.bool)
            value = agent.evaluate_actions(obs, agent.initial_state(1), final, torch.zeros(1, 1, 1, dtype=torch.long))[2]
            value.sum().backward()
            reached = {name for name, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
            assert any(name.startswith("critic") for name in reached)
            assert not any(name.startswith(("actor", "memories.0")) for name in reached)
            assert any(name.startswith("encoders.0") for name in reached) == shared


def expert_file(path, episodes=3, steps=20, **changes):
    """A made-up expert of CartPole, in the documented format."""
    generator = np.random.default_rng(0)
    rows = episodes * steps
    arrays = {
        "obs": generator.normal(size=(rows, 4)).astype(np.float32), "actions": generator.integers(0, 2, rows),
        "rewards": np.ones(rows), "episode_returns": np.full(episodes, float(steps)),
        "episode_starts": np.arange(rows) % steps == 0,
    } | changes  # fmt: skip
    np.savez(path, **{name: x for name, x in arrays.items() if x is not None})


@pytest.mark.parametrize("changes,words", [
    ({"actions": None}, "it has no actions"),
    ({"rewards": None, "episode_starts": None}, "it has no episode_starts, rewards"),
    ({"obs": np.zeros((60, 3), np.float32)}, "its obs are (60, 3), not 60 (2 at least) of Box"),
    ({"actions": np.zeros(59, int)}, "its actions are (59,)"),
    ({"actions": np.full(60, 2)}, "its actions are not all in Discrete(2)"),
    ({"obs": np.full((60, 4), np.nan, np.float32)}, "its obs are not all in Box"),
    ({"obs": np.array([object()] * 60)}, "allow_pickle"),
], ids=range(7))  # fmt: skip
def test_a_wrong_expert_file_is_answered_in_one_line(changes, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    expert_file("expert.npz", **changes)
    with pytest.raises(SystemExit) as stop:
        module.main(["--pretrain", "expert.npz", "--total-timesteps", "64"])
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and "--pretrain expert.npz: " in stderr and words in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_record_writes_the_episodes_that_play_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module.main([*CART, "--total-timesteps", "64", "--run-name", "a"])
    module.main(["--play", "runs/a", "--eval-episodes", "4", "--record", "expert.npz"])
    returns = [float(line.split()[-1]) for line in capsys.readouterr().out.split("\n") if line.startswith("episode ")]
    with np.load("expert.npz") as file:
        obs, actions, rewards, starts = (file[name] for name in ("obs", "actions", "rewards", "episode_starts"))
        assert file["episode_returns"].tolist() == returns and len(returns) == 4
    first = np.flatnonzero(starts)
    assert [x.sum() for x in np.split(rewards, first[1:])] == returns and first[0] == 0
    assert len(obs) == len(actions) == sum(returns)
    # Replayed in the simulator, each action leads from its observation to the next.
    envs = module.make_envs(module.Args(), 1)
    shown, _ = envs.reset(seed=1)
    for t in range(first[1]):
        assert np.array_equal(shown[0], obs[t])
        shown, *_ = envs.step(actions[t : t + 1])


def cloned(space, act, rows=2000, epochs=100):
    """An agent that imitates act (M, 3) -> (M, ...), and how often, or how nearly, it does so on new rows."""
    agent = build("none", space)
    generator = np.random.default_rng(0)
    obs, new = generator.uniform(-1, 1, (2, rows, 3)).astype(np.float32)
    module.pretrain(agent, obs, act(obs), epochs)
    return agent.predict(new, deterministic=True)[0], act(new)


def test_behaviour_cloning_learns_every_kind_of_action():
    ours, theirs = cloned(spaces.Discrete(2, start=-1), lambda x: (x[:, 0] > x[:, 1]) - 1)
    assert (ours == theirs).mean() > 0.9
    ours, theirs = cloned(spaces.MultiDiscrete([2, 3]), lambda x: np.stack([x[:, 0] > 0, 1 + (x[:, 1] > 0)], 1))
    assert (ours == theirs).mean() > 0.9
    ours, theirs = cloned(spaces.MultiBinary(2), lambda x: (x[:, :2] > 0).astype(np.int8))
    assert (ours == theirs).mean() > 0.9
    ours, theirs = cloned(spaces.Box(-1, 1, (2,), np.float32), lambda x: 0.5 * x[:, :2])
    assert np.abs(ours - theirs).mean() < 0.15


def test_presets_by_name_and_by_environment():
    for flags, expected in [
        ("--env-id Hopper-v5", {"num_steps": 2048, "num_minibatches": 32, "update_epochs": 10, "learning_rate": 3e-4,
                                "ent_coef": 0.0, "clip_coef": 0.2, "schedule": "linear", "total_timesteps": 10**6}),
        ("--env-id Humanoid-v5", {"reward_scale": 0.1, "clip_coef": 0.1, "learning_rate": 1e-4, "schedule": "constant",
                                  "total_timesteps": 50_000_000}),
        ("--env-id ALE/Pong-v5", {"total_timesteps": 10**7, "num_steps": 256, "ent_coef": 0.01, "clip_reward": True}),
        ("--env-id Pendulum-v1 --preset mujoco --update-epochs 3", {"num_steps": 2048, "update_epochs": 3}),
        ("--env-id Hopper-v5 --preset none", {"num_steps": 256, "learning_rate": 1e-3, "num_minibatches": 4,
                                              "update_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95}),
        ("--env-id CartPole-v1", {"total_timesteps": 25_000, "norm_obs": False, "pretrain_epochs": 30, "num_steps": 256}),
        ("--env-id CartPole-v1 --preset none", {"norm_obs": True, "pretrain_epochs": 10, "learning_rate": 1e-3}),
        ("--env-id CartPoleNoVel-v1", {"memory": "lstm", "mask_velocity": True, "env_id": "CartPole-v1"}),
    ]:  # fmt: skip
        args = vars(module.parse_args(flags.split()))
        assert {name: args[name] for name in expected} == expected, flags


def test_cartpole_is_learnt_with_the_defaults_in_25000_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module.main("--env-id CartPole-v1 --run-name a --eval-episodes 10".split())
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["eval_mean_return"] >= 200


class Controller:
    """An expert of CartPole whose every episode is 500 steps: it pushes towards where the pole falls."""

    def predict(self, obs, state=None, episode_start=None, deterministic=False, info=None):
        return (obs @ [0.05, 0.2, 1.0, 0.5] > 0).astype(int), None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_episodes_of_an_expert_make_another_before_any_reinforcement_learning(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = module.Recorder(module.make_envs(module.Args(), 1))
    assert module.evaluate(Controller(), recorder, 20, seed=0) == [500.0] * 20
    recorder.save("expert.npz")
    flags = "--env-id CartPole-v1 --pretrain expert.npz --total-timesteps 0 --run-name cloned --eval-episodes 20"
    module.main([*flags.split(), "--seed", str(seed)])
    assert json.loads((tmp_path / "runs/cloned/result.json").read_text())["eval_mean_return"] >= 475
