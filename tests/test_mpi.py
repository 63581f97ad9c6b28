"""ppo1_mpi.py: ranks against one process with the union of their rollouts, failures, resuming."""

import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, toy
from gymnasium import spaces
from torch.distributions import Categorical, Normal

pytest.importorskip("mpi4py")
import ranks  # noqa: E402

module = importlib.import_module("ppo1_mpi")
MPIEXEC, SCRIPT = Path(sys.executable).parent / "mpiexec", ROOT / "ppo1_mpi.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
CLOCK = "--env-id envs:Clock-v0 --num-steps 32 --num-minibatches 2 --encoder-size 8 --eval-episodes 0 --run-name a".split()


def mpiexec(count, *command, cwd, env=(), timeout=120, options=()):
    """Runs a command of Python on so many ranks, from its words."""
    words = [str(MPIEXEC), *options, "-n", str(count), sys.executable, *map(str, command)]
    env = {**ENVIRONMENT, **dict(env)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, cwd=cwd, env=env, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec then ends all of its session: the ranks, too
        process.communicate()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def seconds_since_the_fault(folder) -> float:
    """Since ranks.Rank1 did what FAULT says."""
    return time.time() - (folder / "fault").stat().st_mtime


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What the ranks of one job of 3 saw: tests/ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    done = mpiexec(3, ROOT / "tests" / "ranks.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    made = sorted(path.name for path in (folder / "runs").iterdir())
    splits = [
        (count, first) for count in (1, 2, 3) for first in (True, False) if first or count < 3
    ]
    assert made == sorted(
        f"{case} {count} {first}" for case in ranks.CASES for count, first in splits
    )
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(3)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", ranks.CASES)
def test_ranks_are_one_process_with_the_union_of_their_rollouts(case, count, job):
    """Weights and statistics after training, to 1e-12, from plain autograd and Adam on the mean of the ranks' losses;
    on the ranks they are equal bit for bit. Old log-probabilities are those of the agent that acted, and the first
    minibatch of a rollout gives them, and the values, again."""
    environment, flags = ranks.CASES[case]
    results = [job[rank][f"{case} {count}"] for rank in range(count)]
    args = module.Args(
        env_id=toy(**environment), **{"total_timesteps": 50 * count, **ranks.FLAGS, **flags}
    )
    agent = module.Agent(module.make_envs(args, 1), args).double()
    agent.load_state_dict(results[0]["first"])
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    T, updates, empty = args.num_steps, args.update_epochs * args.num_minibatches, 0
    steps = results[0]["steps"]  # of all ranks
    assert len(steps) >= 2 and {len(seen["replays"]) for seen in results} == {len(steps) * updates}
    assert all(seen["steps"] == steps for seen in results)
    # Rank 0 saves: first, last, and by its clock, on which little time has passed.
    assert [seen["saves"] for seen in results] == [[0, sum(steps)], *[[]] * (count - 1)]
    final = torch.zeros(count, dtype=torch.bool)  # of each rank's next first step
    epochs: list[list] = []  # where the sequences of each begin
    rows_seen: list[torch.Tensor] = []  # all observations that count, of all ranks
    for i, before in enumerate([0, *np.cumsum(steps)[:-1]]):
        progress = before / args.total_timesteps if args.schedule == "linear" else 0
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)
        data, rows, order = [], [], []
        for rank, seen in enumerate(results):
            values, done, advantages = (x[..., 0] for x in seen["gae"][i])
            first, last = i * (T + 1), (i + 1) * (T + 1) - 1
            obs = torch.cat(seen["obs"][first:last])
            acting = torch.cat(seen["values"][first : last + 1])
            assert (values - acting).abs().max() <= 1e-12
            if i + 1 < len(steps):  # the step that bootstraps is the first of the next rollout
                for x in seen["obs"], seen["states"]:
                    assert torch.equal(x[last], x[last + 1])
            finals = torch.cat([final[rank : rank + 1], done[:-1]])
            final[rank], valid = done[-1], ~finals
            rows.append(obs[valid])
            std, mean = torch.std_mean(advantages[valid], correction=0)
            acted = torch.cat(seen["acted"][i * T : (i + 1) * T])
            data.append(
                (
                    obs,
                    finals,
                    values,
                    acted,
                    (advantages - mean) / (std + 1e-8),
                    advantages + values[:T],
                )
            )
        for u in range(i * updates, (i + 1) * updates):
            loss, means = torch.zeros((), dtype=torch.float64), np.zeros(4)
            for seen, (obs, finals, values, *targets) in zip(results, data):
                inputs = seen["replays"][u]
                t = (inputs[0].unsqueeze(-2) == obs).all(-1).int().argmax(-1)  # (L, B)
                assert torch.equal(obs[t], inputs[0]) and torch.equal(finals[t], inputs[3])
                for name, replayed in ("legal", inputs[1]), ("actions", inputs[4]):
                    played = torch.cat(seen[name][i * T : (i + 1) * T])
                    assert torch.equal(played[t], replayed)
                if args.ablate_memory:
                    assert len(t) == 1 and not inputs[2].any()
                counts = ~finals[t]
                order.extend(t[0].tolist())
                old_logprob, advantage, return_ = (x[t][counts] for x in targets)
                clip_coef = args.clip_coef * (1 - progress)
                for ours, expected in zip(seen["losses"][u], (old_logprob, advantage, clip_coef)):
                    assert np.abs(np.asarray(ours) - np.asarray(expected)).max(initial=0) <= 1e-12
                empty += not counts.any()
                if counts.any():
                    logprob, entropy, value = agent.evaluate_actions(*inputs)
                    if u == i * updates:
                        assert (logprob - old_logprob).abs().max() <= 1e-12
                        assert (value - values[t][counts]).abs().max() <= 1e-12
                    ratio = (logprob - old_logprob).exp()
                    surrogate = torch.min(
                        ratio * advantage, ratio.clip(1 - clip_coef, 1 + clip_coef) * advantage
                    )
                    value_loss = 0.5 * (value - return_) ** 2
                    figures = -surrogate, value_loss, entropy, ratio - 1 - ratio.log()
                    means += [x.mean().item() / count for x in figures]
                    loss = (
                        loss
                        + (-surrogate - args.ent_coef * entropy + args.vf_coef * value_loss).mean()
                        / count
                    )
            names = "policy_loss", "value_loss", "entropy", "approx_kl"
            for seen in results:  # all ranks log the means over the ranks
                assert seen["logged"][u] == pytest.approx(dict(zip(names, means)), abs=1e-10)
            for parameter in agent.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        epochs += np.reshape(order, (args.update_epochs, -1)).tolist()
        x = torch.cat(rows)
        assert len(x) == steps[i]
        rows_seen.append(x)
        everything = torch.cat(rows_seen)
        agent.obs_stats.mean = everything.mean(0)
        agent.obs_stats.var = everything.var(0, correction=0)
        agent.obs_stats.count += len(x)
    assert (empty > 0) == (case == "nothing counts")
    assert all(sorted(a) == sorted(b) for a, b in zip(epochs[::2], epochs[1::2]))
    assert epochs[::2] != epochs[1::2]  # each is shuffled anew, though two may be alike by chance
    for name, expected in agent.state_dict().items():
        ours = [seen["last"][name] for seen in results]
        assert (ours[0] - expected).abs().max() <= 1e-12 * max(1, expected.abs().max()), name
        assert all(torch.equal(x, ours[0]) for x in ours)
        assert torch.equal(results[-1]["first"][name], results[0]["first"][name])  # rank 0's
        moved = (ours[0] - results[0]["first"][name]).abs().max()
        still = case == "nothing counts" or case == "ablated" and name.endswith("weight_hh")
        assert moved > 1e-4 or still


@pytest.mark.parametrize("case", ["masks", "masks lstm"])
def test_no_rank_makes_an_illegal_choice(case, job):
    """Masks are of each rank's own environment, and come and go between steps."""
    seen_legal = []
    for results in (job[rank][f"{case} 2"] for rank in range(2)):
        legal, actions = torch.cat(results["legal"]), torch.cat(results["actions"])
        assert legal.gather(-1, actions[..., None]).all()
        exists = torch.tensor([[True, True, True], [True, True, False]])
        masked = (legal != exists).any(-1).any(-1)
        assert 0.2 < masked.double().mean() < 0.8 and not (legal & ~exists).any()
        # Of the steps that allow all, some have a choice that others forbid.
        assert all(len(actions[~masked, k].unique()) == n for k, n in enumerate((3, 2)))
        seen_legal.append(legal)
    assert not torch.equal(*seen_legal)


def test_each_rank_draws_other_numbers(job):
    obs = [torch.cat(seen["box 3"]["obs"])[:20] for seen in job]
    assert not any(torch.isin(obs[a], obs[b]).any() for a, b in ((0, 1), (0, 2), (1, 2)))
    acted = [torch.cat(seen["nothing counts 3"]["acted"])[:8] for seen in job]
    assert not torch.equal(acted[0], acted[1])


def test_a_rank_out_of_step_is_found(job):
    """By one bit of one weight: -0 is not 0. A NaN is equal to itself."""
    assert [results["out of step"] for results in job] == [
        "in step",
        "the weights of rank 1 are not those of rank 0",
        "in step",
    ]


def test_an_offset_does_not_hide_a_cue():
    """Sums that begin at 0, as in baselines, made a cue of 1e-5 of what lies 1e5 from 0."""
    agent = module.Agent(module.make_envs(module.Args(), 1), module.Args())
    rows = torch.randn(1000, 4, dtype=torch.float64) + 1e5
    agent.obs_stats.update(rows)
    ours = agent.normalize(rows)
    assert (ours.mean(0).abs() < 1e-6).all() and ((ours.std(0) - 1).abs() < 1e-2).all()


def agent_for(space, **flags):
    """An agent with random weights and biases, in float64."""
    args = module.Args(env_id=toy(action_space=space), encoder_size=8, norm_obs=False, **flags)
    torch.manual_seed(4)
    agent = module.Agent(module.make_envs(args, 1), args).double()
    with torch.no_grad():
        for parameter in agent.parameters():  # a missing choice's bias stays -1e9
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent


@pytest.mark.parametrize("sizes", [[4], [2, 4, 3]])
def test_choices_are_drawn_with_their_probabilities(sizes):
    """Log-probability and entropy are torch's; a choice that does not exist is never made; predict's is the likeliest."""
    space = spaces.MultiDiscrete(sizes) if len(sizes) > 1 else spaces.Discrete(sizes[0])
    agent, obs = agent_for(space), torch.rand(1, 3, dtype=torch.float64)
    with torch.no_grad():
        logits = agent.actor(agent.encoder(obs))[0].unflatten(-1, agent.exists.shape)
        parts = [Categorical(logits=x[:n]) for x, n in zip(logits, sizes)]
        features = agent.encoder(obs.expand(20_000, 3))
        legal = torch.from_numpy(agent.exists).expand(20_000, -1, -1)
        drawn = agent.act(features, legal)
        logprob, entropy = agent.logprob_entropy(features, legal, drawn)
    assert (logprob - sum(p.log_prob(a) for p, a in zip(parts, drawn.T))).abs().max() <= 1e-12
    assert (entropy - sum(p.entropy() for p in parts)).abs().max() <= 1e-12
    for part, a in zip(parts, drawn.T):
        share = a.bincount(minlength=len(part.probs)) / len(a)
        assert len(share) == len(part.probs) and (share - part.probs).abs().max() < 0.02
    action, _ = agent.float().predict(obs.numpy(), {}, None)
    assert action.ravel().tolist() == [int(p.probs.argmax()) for p in parts]


def test_numbers_are_drawn_from_the_gaussian():
    agent, obs = agent_for(spaces.Box(-9, 9, (2,))), torch.rand(1, 3, dtype=torch.float64)
    with torch.no_grad():
        mean, std = agent.actor(agent.encoder(obs))[0], agent.log_std.exp()
        features = agent.encoder(obs.expand(20_000, 3))
        legal = torch.from_numpy(agent.exists).expand(20_000, -1, -1)
        drawn = agent.act(features, legal)
        logprob, entropy = agent.logprob_entropy(features, legal, drawn)
    normal = Normal(mean, std)
    assert (logprob - normal.log_prob(drawn).sum(-1)).abs().max() <= 1e-12
    assert (entropy - normal.entropy().sum()).abs().max() <= 1e-12
    assert (drawn.mean(0) - mean).abs().max() < 0.03 * std.max()
    assert (drawn.std(0) / std - 1).abs().max() < 0.03
    assert np.allclose(agent.float().predict(obs.numpy(), {}, None)[0], mean, atol=1e-6)


def test_predict_carries_the_state():
    """Of both LSTMs, and none at an episode's start. What is deterministic draws no numbers."""
    agent = agent_for(spaces.Box(-9, 9, (2,)), memory="lstm").float()
    obs, state, h, seen = torch.rand(4, 3), None, agent.initial_state(4), []
    random = torch.get_rng_state()
    for _ in range(3):
        action, state = agent.predict(obs.numpy(), {}, state)
        assert torch.equal(torch.get_rng_state(), random)
        with torch.no_grad():
            features, _, h = agent.step(obs, h)
            assert np.allclose(action, agent.actor(features), atol=1e-6)
        assert torch.equal(state, h) and state.shape == (4, 4, agent.args.hidden_size)
        seen.append(action)
    assert np.abs(seen[2] - seen[0]).min() > 1e-4


def test_each_step_has_its_own_noise(tmp_path, monkeypatch):
    """With one action for all observations, the draws of the steps still differ."""
    seen, sample = [], module.sample

    def recorded(logp):
        seen.append(torch.get_rng_state())
        return sample(logp)

    monkeypatch.setattr(module, "sample", recorded)
    module.train(
        module.Args(env_id=toy(), runs_dir=str(tmp_path), total_timesteps=300, eval_episodes=0)
    )
    assert len(seen) == 512 and len({x.numpy().tobytes() for x in seen}) == 512


@pytest.mark.parametrize("flags,said", [
    (dict(memory="gru"), "--memory gru: must be none or lstm"),
    (dict(schedule="cosine"), "--schedule: must be linear or constant"),
])  # fmt: skip
def test_an_unknown_choice_in_a_program(flags, said):
    """In the shell tyro refuses it."""
    with pytest.raises(module.ArgumentError, match=said):
        module.check_args(module.Args(**flags))


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_a_rollout_without_a_step_that_counts_trains_without_a_warning(memory, tmp_path):
    """One environment, one step: every second rollout is nothing but a final step."""
    args = module.Args(env_id=toy(length=1), runs_dir=str(tmp_path), total_timesteps=10,
                       num_steps=1, seq_len=1, num_minibatches=1, memory=memory, eval_episodes=0)  # fmt: skip
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        agent = module.train(args)
    assert [str(warning.message) for warning in raised] == []
    assert all(x.isfinite().all() for x in agent.state_dict().values())
    assert agent.obs_stats.count == 10


@pytest.mark.parametrize("masks", ["always", "step", "sometimes"])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_masks_are_obeyed(masks, memory, tmp_path):
    """The toy refuses what is illegal; so does the evaluation's."""
    space = spaces.MultiDiscrete([2, 3], start=[1, -4])
    args = module.Args(env_id=toy(masks=masks, action_space=space), runs_dir=str(tmp_path),
                       total_timesteps=300, memory=memory, eval_episodes=3)  # fmt: skip
    agent = module.train(args)
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


@pytest.mark.parametrize("fault,words,speaker", [
    ("raise", "RuntimeError: the simulator exploded", 1),
    ("leave", "SystemExit", 1),
    pytest.param("nan", "FloatingPointError: rewards[0] is nan", 1, marks=pytest.mark.slow),
    ("overflow", "FloatingPointError: after step 279, ", 0),  # finite, but not its square
])  # fmt: skip
def test_a_fault_of_one_rank_ends_the_job_with_that_ranks_traceback(
    fault, words, speaker, tmp_path
):
    words_of_script = [*CLOCK, "--env-id", "ranks:Rank1-v0"]
    done = mpiexec(
        3, SCRIPT, *words_of_script, cwd=tmp_path, env={"FAULT": fault}, options=["-prepend-rank"]
    )
    assert done.returncode == 1 and seconds_since_the_fault(tmp_path) < 10
    assert done.stderr.count("Traceback") == 1 and words in done.stderr, done.stderr
    assert f"[{speaker}] Traceback" in done.stderr, done.stderr
    assert (
        f"to continue: mpiexec -n 3 python {SCRIPT} --resume {tmp_path / 'runs/a'}" in done.stderr
    )


def test_kill_9_of_a_rank_ends_the_job_and_its_file_can_be_continued(tmp_path):
    flags = [*CLOCK, "--env-id", "ranks:Rank1-v0", "--total-timesteps", 600]
    done = mpiexec(3, SCRIPT, *flags, cwd=tmp_path, env={"FAULT": "kill"})
    assert done.returncode not in (0, 1, 2) and seconds_since_the_fault(tmp_path) < 10, done.stderr
    assert len(module.load(tmp_path / "runs/a")["rng"]) == 3
    done = mpiexec(3, SCRIPT, "--resume", "runs/a", cwd=tmp_path, env={"FAULT": ""})
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["global_step"] >= 600


@pytest.mark.parametrize("memory", ["none", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_resumed_job_is_the_one_never_stopped(memory, tmp_path):
    """Bit for bit with 2 ranks; another number of ranks can continue it, too."""
    flags = [*CLOCK, "--memory", memory, "--hidden-size", 8, "--no-norm-obs"]
    flags += ["--schedule", "constant"]
    for name, steps in ("a", 620), ("b", 310):
        done = mpiexec(
            2, SCRIPT, *flags, "--total-timesteps", steps, "--run-name", name, cwd=tmp_path
        )
        assert done.returncode == 0 and done.stdout.count(f"runs/{name}: ") == 1, done.stderr
    saved = module.load(tmp_path / "runs/b")
    assert saved["step"] == 310 and len(saved["rng"]) == 2 and not torch.equal(*saved["rng"])
    whole = module.load(tmp_path / "runs/a")
    done = mpiexec(2, SCRIPT, "--resume", "runs/b", "--total-timesteps", 620, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = module.load(tmp_path / "runs/b")
    assert resumed["step"] == whole["step"] == 620 and len(resumed["returns"]) == 20
    assert all(torch.equal(whole["agent"][key], x) for key, x in resumed["agent"].items())
    assert all(torch.equal(a, b) for a, b in zip(whole["rng"], resumed["rng"]))
    done = mpiexec(3, SCRIPT, "--resume", "runs/b", "--total-timesteps", 700, cwd=tmp_path)
    assert done.returncode == 0 and module.load(tmp_path / "runs/b")["step"] == 713
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]


def test_an_update_that_stops_early_stops_on_every_rank(tmp_path):
    """Each rank has another KL; one that broke out of the loop alone would leave the others in an allreduce."""
    flags = [*CLOCK, "--total-timesteps", 620, "--target-kl", 1e-7]
    done = mpiexec(2, SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = module.load(tmp_path / "runs/a")["optimizer"]["state"][0]
    assert 10 <= state["step"] < 10 * 8  # of 8 minibatches an iteration some were left out


def test_a_job_whose_ranks_drift_apart_ends(tmp_path):
    code = """
import sys
import ppo1_mpi as module
average, sys.argv[0] = module.average, module.__file__
module.average = lambda x, comm: (average(x, comm), x.add_(1e-3 * comm.rank))
module.main()"""
    done = mpiexec(2, "-c", code, *CLOCK, cwd=tmp_path)
    assert done.returncode == 1 and "the weights of rank 1 are not those of rank 0" in done.stderr


def test_a_warning_is_printed_once(tmp_path):
    """By rank 0; every rank sees the same space."""
    code = """
import sys
import envs, gymnasium as gym, numpy as np
import ppo1_mpi as module
class Far(envs.Clock):
    action_space = gym.spaces.Box(300, 500, (1,), np.float32)
gym.register("Far-v0", Far)
sys.argv[0] = module.__file__
module.main()"""
    flags = [*CLOCK, "--env-id", "Far-v0", "--total-timesteps", 60]
    done = mpiexec(2, "-c", code, *flags, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("RescaleAction") == 1, done.stderr


@pytest.mark.parametrize("flags,message", [
    ("--num-minibatches 7", "error: --num-minibatches: must divide the 256 sequences"),
    pytest.param("--nonsense 7", "Unrecognized options: --nonsense, 7", marks=pytest.mark.slow),
])  # fmt: skip
def test_wrong_flags_are_answered_once(flags, message, tmp_path):
    done = mpiexec(3, SCRIPT, *flags.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_without_mpi4py_it_says_what_to_install(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')")
    command = [sys.executable, str(SCRIPT)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr == "error: No module named mpi4py; pip install mpi4py mpich\n"


@pytest.mark.slow
def test_cartpole_is_learnt_in_25000_steps(tmp_path):
    done = mpiexec(1, SCRIPT, "--seed", 1001, "--run-name", "a", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert np.mean(json.loads((tmp_path / "runs/a/result.json").read_text())["evaluation"]) >= 200
