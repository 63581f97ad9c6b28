"""use.py, and the recipes whose numbers must be exact: masks, several choices, data-parallel training,
inputs, populations."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from recipe_tools import FOLDER, SMALL, build, driver, first_ratios, needs, run, sampled
from support import MODULES, ROOT
from torch.distributions import Categorical

MASKED = {"rppo_lstm": {}, "trpo": dict(memory="lstm"), "ppo1_mpi": dict(memory="lstm")}


# --- use.py ----------------------------------------------------------------------------------------


WIDE = """
from __future__ import annotations
from dataclasses import dataclass
def use(script):
    @dataclass
    class Args(script.Args):
        shift: float = -1.5  # may be negative
    script.Args = Args
    script.WIDE = True
"""


def test_a_changed_copy_and_its_recipe_are_found_by_path(tmp_path, monkeypatch):
    """Other files of the same names come first on PYTHONPATH, and the run is opened from elsewhere."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    text = (ROOT / "rppo_lstm.py").read_text().replace("std=0.01)", "std=0.02)")
    (mine / "copied.py").write_text(text)
    (mine / "wide.py").write_text(WIDE)
    (other / "wide.py").write_text("def use(script): raise RuntimeError('the wrong file')\n")
    (other / "copied.py").write_text("raise RuntimeError('the wrong file')\n")
    monkeypatch.syspath_prepend(str(other))
    monkeypatch.chdir(mine)
    script = driver.fresh("copied.py", "wide")
    assert (script.kind, script.SCRIPT, script.WIDE) == ("rppo_lstm", "rppo_lstm+wide", True)
    agent, run_dir = run(script, tmp_path, shift=-2.0)
    monkeypatch.chdir(other)
    again, args, _, opened, _ = driver.open_run(run_dir)
    assert Path(again.__file__) == mine / "copied.py" and again.WIDE and args.shift == -2.0
    assert torch.equal(opened.actor.weight, agent.actor.weight)
    assert MODULES["rppo_lstm"].SCRIPT == "rppo_lstm" and "copied" not in sys.modules
    (mine / "copied.py").unlink()  # the file of that name here is not a script
    with pytest.raises(RuntimeError, match="the wrong file"):
        driver.open_run(run_dir)
    (other / "copied.py").unlink()
    with pytest.raises(ValueError, match="there is no file .*copied.py"):
        driver.open_run(run_dir)


@pytest.mark.parametrize(
    "words, says",
    [
        (["rppo_lstm", "nothing"], "no recipe 'nothing' in docs/recipes and its folders"),
        (["nowhere/mine.py"], "there is no file"),
        (["rppo_lstm", "images,", "--seed", "2"], "separate recipes by commas"),
        (["rppo_lstm", "images", "more"], "more: what is it?"),
        (["--play", "runs/none"], "runs/none is not the directory of a run"),
    ],
)
def test_what_use_py_refuses_is_one_line(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["use.py", *words])
    with pytest.raises(SystemExit, match="2"):
        driver.main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0]


def test_random_numbers_within_change_none_afterwards():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    script = driver.fresh("rppo_lstm")
    script.seed_everything(1)
    wanted = [draw(), draw()]
    script.seed_everything(1)
    first = draw()
    with driver.same_random_numbers():
        draw()
    assert [first, draw()] == wanted


# --- Action masks and several choices --------------------------------------------------------------


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("masks, components", [("always", ()), ("step", ()), ("sometimes", (3, 2))])
def test_masked_runs_play_nothing_illegal(name, masks, components, tmp_path):
    """The environment raises an error where they do. Evaluation and training both."""
    needs(name)
    recipes = ["action_masks", *(["multi_discrete"] if components else [])]
    script = driver.fresh(name, *recipes)
    kwargs = json.dumps({"masks": masks, "components": components})
    agent, _ = run(script, tmp_path, env_id="Masked-v0", env_kwargs=kwargs, **MASKED[name])
    assert all(p.isfinite().all() for p in agent.parameters())


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_allows_everything_changes_nothing(name, tmp_path):
    needs(name)
    flags = dict(env_id="Masked-v0", eval_episodes=0, norm_obs=True, **MASKED[name])
    masked, _ = run(
        driver.fresh(name, "action_masks"), tmp_path, env_kwargs='{"masks": "ones"}', **flags
    )
    script = driver.fresh(name)
    make_envs = script.make_envs

    class NoMask(driver.Wrapper):
        def reset(self, **options):
            return self.env.reset(**options)[0], {}

    script.make_envs = lambda *inputs: NoMask(make_envs(*inputs))
    plain, _ = run(script, tmp_path, env_kwargs='{"masks": "ones"}', **flags)
    for key, value in plain.state_dict().items():
        assert (masked.state_dict()[key] - value).abs().max() < 1e-5, key


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_masked_probabilities_are_the_plain_ones_divided_among_the_legal(name, memory):
    """In the update; values are those of an agent that sees no mask, and so are statistics."""
    needs(name)
    flags = dict(hidden_size=6, encoder_size=4, norm_obs=True)
    flags |= dict(memory=memory) if name != "rppo_lstm" else {}
    script, plain_script = driver.fresh(name, "action_masks"), driver.fresh(name)
    space, A, L, B = spaces.Discrete(4), 4, 6, 5
    unmasked = SimpleNamespace(
        single_action_space=space, single_observation_space=spaces.Box(-1, 1, (3,))
    )
    envs = SimpleNamespace(exists=np.ones((1, A), bool), unmasked=unmasked)
    masked = script.Agent(envs, script.Args(**flags)).double()
    plain = build(plain_script, space, **flags).double()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    masked.load_state_dict(plain.state_dict())
    rows, legal = torch.randn(L, B, 3).double(), torch.rand(L, B, A) < 0.5
    legal[..., 2] = True
    seen = torch.cat([rows, legal.double()], -1)
    masked.obs_stats.update(seen.flatten(0, 1))
    plain.obs_stats.update(rows.flatten(0, 1))
    final = torch.zeros(L, B, dtype=torch.bool)
    final[2, 1] = True

    def probabilities(agent, obs):
        """Of each choice (M, A), and the values, where evaluate_actions has some."""
        state = agent.initial_state(B).double()
        if name == "trpo":
            return agent(agent.normalize(obs), state, final, ~final).probs, torch.zeros(())
        each = [torch.full((L, B), choice) for choice in range(A)]
        rows = [agent.evaluate_actions(obs, state, final, actions) for actions in each]
        return torch.stack([logprob.exp() for logprob, _, _ in rows], -1), rows[0][2]

    found, values = probabilities(masked, seen)
    wanted, plain_values = probabilities(plain, rows)
    wanted = wanted * legal[~final]
    assert (found - wanted / wanted.sum(-1, keepdim=True)).abs().max() < 1e-12
    assert (values - plain_values).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["rppo_lstm", "ppo1_mpi"])
def test_masks_in_the_update_are_those_of_acting(name, tmp_path):
    needs(name)
    script = driver.fresh(name, "action_masks")
    assert first_ratios(script, tmp_path, env_id="Masked-v0", **MASKED[name]) < 1e-5


@pytest.mark.parametrize(
    "mask, says",
    [
        ([0, -np.inf, 0], "must have a 0 or a 1 for each of the 3 choices"),
        ([0, 2], "must have a 0 or a 1 for each of the 3 choices"),
        ([1, 2, 0], "must have a 0 or a 1 for each of the 3 choices"),
        ([0, 0, 0], "leaves no choice"),
    ],
)
def test_masks_that_cannot_be_one_are_named(mask, says):
    script = driver.fresh("rppo_lstm", "action_masks")
    envs = script.make_envs(script.Args(env_id="Masked-v0"), 2)
    envs.reset(seed=1)
    info = {"action_mask": np.array([np.ones(3), mask], object)}
    with pytest.raises(script.ArgumentError, match=says):
        envs.legal(info, np.zeros(2, bool))
    legal = envs.legal(info, np.array([False, True]))  # a final step's mask is not read
    assert legal.all()
    info["_action_mask"] = np.array([True, False])  # nor one that an environment did not send
    assert envs.legal(info, np.zeros(2, bool)).all()


def test_masks_travel_with_every_other_input(tmp_path):
    """Behind the columns of other recipes; the networks are theirs."""
    script = driver.fresh(
        "rppo_lstm", "action_masks", "multi_discrete", "previous_action", "stacked_lstm", "networks"
    )
    kwargs = json.dumps({"masks": "sometimes", "components": [3, 2]})
    flags = dict(env_id="Masked-v0", env_kwargs=kwargs, critic="separate", layers_after="8")
    agent, _ = run(script, tmp_path, **flags)
    assert agent.encoder[0].in_features == 3 + 5 + 1  # observation, one-hot action, reward
    script = driver.fresh("trpo", "action_masks", "multi_discrete", "images")
    agent, _ = run(script, tmp_path, env_id="Signs-v0", memory="lstm")
    assert agent.pixels.sum() == 36 * 40 and len(agent.pixels) == 36 * 40 + 1


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([2, 4, 3], start=[0, -1, 5]), spaces.MultiBinary([2, 2])]
)
@pytest.mark.parametrize("name", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_several_choices_are_independent_categoricals(name, space):
    needs(name)
    script = driver.fresh(name, "multi_discrete")
    args = script.Args(**SMALL[name], env_id=sampled(space))
    agent = script.Agent(script.make_envs(args, 1), args)
    nvec = driver.choices(space)
    K, A = len(nvec), nvec.max()
    torch.manual_seed(1)
    torch.nn.init.normal_(agent.actor.weight)
    h = torch.randn(7, agent.actor.in_features)
    logits = (h @ agent.actor.weight.T + agent.actor.bias).unflatten(-1, (K, A))
    each = [Categorical(logits=logits[:, k, :n]) for k, n in enumerate(nvec)]
    actions = torch.stack([one.sample() for one in each], -1)
    logprob = sum(one.log_prob(actions[:, k]) for k, one in enumerate(each))
    wanted = logprob, sum(one.entropy() for one in each)
    if name == "rppo_lstm":
        log_pi = agent.actor(h).log_softmax(-1)
        found = script.select(log_pi, actions), script.entropy(log_pi)
        drawn = torch.stack([script.sample(log_pi) for _ in range(300)])
    else:
        policy = agent.policy(h)
        found = policy.log_prob(actions), policy.entropy()
        drawn = torch.stack([agent.act(h, agent.sample_noise(7)) for _ in range(300)])
    for x, y in zip(found, wanted):
        assert (x - y).abs().max() < 1e-5
    assert (drawn.amax((0, 1)) < torch.as_tensor(nvec)).all()
    sent = script.to_env(actions, agent.action_space)
    assert sent.shape == (7, *space.shape) and all(space.contains(action) for action in sent)
    assert np.array_equal(sent.reshape(7, K) - np.ravel(getattr(space, "start", 0)), actions)


# --- Data-parallel training ------------------------------------------------------------------------

DP = dict(num_envs=4, num_steps=24, eval_episodes=0, env_id="Masked-v0", env_kwargs='{"masks": "ones"}',
          hidden_size=6, encoder_size=8, norm_obs=True)  # fmt: skip
CASES = {
    "rppo_lstm": dict(num_minibatches=1, update_epochs=3, target_kl=0.05),
    "rppo_continuous": dict(num_minibatches=1, update_epochs=3, env_id="Pendulum-v1", env_kwargs="{}"),
    "trpo": dict(memory="lstm", batch_size=1000, n_critic_updates=3, sub_sampling_factor=2),
}  # fmt: skip
if importlib.util.find_spec("ale_py"):
    CASES["rppo_gru_atari"] = dict(
        num_minibatches=1, update_epochs=2, num_steps=10, total_timesteps=60, env_id="ALE/Pong-v5",
        env_kwargs="{}",
    )  # fmt: skip


def parallel_script(name: str, *recipes):
    """A script that takes actions in turn, in float64: one process and two play the same games."""
    script = driver.fresh(name, *recipes)
    make_envs = script.make_envs

    class Here(driver.Wrapper):
        """Environment n of all has the seed seed + n; nothing else depends on the process."""

        def reset(self, *, seed=None, **options):
            rank = script.world().rank if hasattr(script, "world") else 0
            obs, info = self.env.reset(seed=123 + rank * self.num_envs, **options)
            return obs, {key: x for key, x in info.items() if key == "lives"}

    class Agent(script.Agent):
        def normalize(self, obs):
            return super().normalize(obs.double())

    script.Agent = script.Agent if name == "rppo_gru_atari" else Agent
    script.make_envs = lambda *inputs, **options: Here(make_envs(*inputs, **options))
    script.calls = 0

    def in_turn(log_pi):
        script.calls += 1
        return torch.full(log_pi.shape[:-1], script.calls % log_pi.shape[-1])

    if hasattr(script, "sample"):
        script.sample = in_turn
    if name == "trpo":
        Agent.act = lambda self, h, noise: in_turn(self.actor(h))
    if name == "rppo_continuous":
        Agent.sample_noise = lambda self, n: self.log_std.exp() * torch.ones(n, 1)
    return script


def job(folder: str) -> None:
    """What both processes of the job do; the first compares with a single process."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name, flags in CASES.items():
        flags = {**DP, "total_timesteps": 300, **flags, "runs_dir": folder}
        flags = {key: x for key, x in flags.items() if hasattr(MODULES[name].Args, key)}
        script = parallel_script(name, "data_parallel")
        agent = script.train(script.Args(**flags, run_name=f"{name} 2"))
        saved = script.load(f"{folder}/{name} 2")
        if rank == 0:
            alone = parallel_script(name)
            single = alone.train(alone.Args(**flags, run_name=f"{name} 1"))
            for key, value in single.state_dict().items():
                error = (agent.state_dict()[key] - value).abs().max() / value.abs().max().clamp(1)
                assert error < 1e-9, (name, key, error)
            assert saved["args"]["num_envs"] == 4 and len(saved["rngs"]) == 2
            assert not torch.equal(*saved["rngs"])
            one = alone.load(f"{folder}/{name} 1")
            assert saved["step"] == one["step"] and len(saved["returns"]) == len(one["returns"])
        weights = script.world().allgather(agent.state_dict())
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    resumed = []
    for copy in "ab":  # the same file, resumed twice
        script = parallel_script("rppo_lstm", "data_parallel")
        flags = {**DP, **CASES["rppo_lstm"], "total_timesteps": 600, "runs_dir": folder}
        if rank == 0:
            os.makedirs(f"{folder}/{copy}")
            os.link(f"{folder}/rppo_lstm 2/agent.pt", f"{folder}/{copy}/agent.pt")
        script.world().bcast(0)
        agent = script.train(script.Args(**flags, resume=f"{folder}/{copy}"))
        resumed.append(agent.state_dict())
    assert all(torch.equal(resumed[0][key], resumed[1][key]) for key in resumed[0])
    gradient_of_the_union(rank)
    if rank == 0:
        Path(folder, "done").touch()


def gradient_of_the_union(rank: int) -> None:
    """In float64, of unequal parts; then of a minibatch in which one process has no step."""
    script, alone = driver.fresh("rppo_lstm", "data_parallel"), driver.fresh("rppo_lstm")
    world = script.world()
    torch.manual_seed(5)
    L, B = 8, 6
    obs, advantage = torch.randn(L, B, 3).double(), torch.randn(L, B).double()
    actions, old = torch.randint(0, 3, (L, B)), torch.randn(L, B).double() - 1
    for ends in 0.3, 1.0:
        final = torch.rand(L, B) < 0.3
        final[:, 4:] |= torch.rand(L, 2) < ends  # those of the second process
        part = slice(0, 4) if rank == 0 else slice(4, 6)
        gradients = []
        for module, columns in (script, part), (alone, slice(0, 6)):
            torch.manual_seed(6)
            agent = build(module, spaces.Discrete(3)).double()
            if module is script:
                world.watch(agent)
            valid = ~final[:, columns]
            inputs = (x[:, columns] for x in (final, actions))
            state = agent.initial_state(len(valid[0])).double()
            logprob, entropy, value = agent.evaluate_actions(obs[:, columns], state, *inputs)
            normal = module.normalize_advantage(advantage[:, columns][valid])
            loss, _, _ = module.ppo_loss(logprob, old[:, columns][valid], normal, 0.2)
            loss = loss + value.square().mean() - 0.01 * entropy.mean()
            loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
        assert (gradients[0] - gradients[1]).abs().max() < 1e-12 * gradients[1].abs().max()


def torchrun(*words, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    env["PYTHONPATH"] = str(ROOT / "tests")
    return subprocess.run(
        [*command, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def test_two_processes_are_one(tmp_path):
    """Weights after training, the gradient of a minibatch to 1e-12, what is resumed: see `job`."""
    done = torchrun(__file__, tmp_path, cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "done").exists(), done.stderr[-3000:]
    for name in CASES:
        files = [file.name for file in (tmp_path / f"{name} 2").iterdir()]
        assert len([x for x in files if x.startswith("events")]) == 1 and len(files) == 3


def test_an_error_of_two_processes_is_said_once(tmp_path):
    use = FOLDER / "use.py"
    done = torchrun(use, "rppo_lstm", "data_parallel", "--num-envs", "3", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: --num-envs: must be divisible by 2 processes") == 1


# --- Inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, flag, first, certain",
    [
        ((3, 84, 84), "auto", True, True),
        ((84, 84, 3), "auto", False, True),
        ((7, 7, 3), "auto", False, True),
        ((12, 8, 8), "auto", True, False),
        ((64, 64, 12), "auto", False, False),
        ((12, 8, 8), "last", False, True),
    ],
)
def test_the_channels_of_an_image(shape, flag, first, certain):
    channels_first = driver.recipe("images").channels_first
    assert channels_first(shape, flag) == (first, certain)


def frames_of(observations, **flags):
    """The recipe images on observations of a space -> script, args, environments."""
    script = driver.fresh("rppo_lstm", "images")
    args = script.Args(env_id=sampled(spaces.Discrete(2), observations), **flags)
    return script, args, script.make_envs(args, 1)


def test_frames_are_grey_small_and_stacked():
    space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    _, _, envs = frames_of(space, grey=True, resize=4, image_stack=2)
    seen = [envs.reset(seed=1)[0], *(envs.step([0])[0] for _ in range(2))]
    space.seed(1)
    raw = [space.sample() for _ in range(3)]
    grey = [x @ np.array([0.299, 0.587, 0.114]) for x in raw]
    small = [x.reshape(4, 2, 4, 2).mean((1, 3)) for x in grey]
    for t, (before, now) in enumerate([(0, 0), (0, 1), (1, 2)]):
        wanted = np.stack([small[before], small[now]])
        assert np.abs(seen[t].reshape(2, 4, 4) - wanted).max() < 1e-3


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_bytes_and_floats_give_the_same_features(kind):
    """The same picture, in 0 to 255 or in 0 to 1."""
    high = 255 if kind == np.uint8 else 1
    script, args, envs = frames_of(spaces.Box(0, high, (40, 44, 3), kind))
    torch.manual_seed(1)
    eyes = script.Agent(envs, args).encoder[0]
    picture = np.random.default_rng(1).integers(0, 256, (40, 44, 3)).astype(np.float64)
    rows = envs.transformed((picture * high / 255).reshape(1, -1))
    x = torch.from_numpy(picture / 255).movedim(-1, 0)[None].float()
    assert (eyes.cnns[0](x) - eyes(torch.from_numpy(rows))).abs().max() < 1e-4


def test_an_unsafe_guess_is_said_once_and_pixels_are_needed(capsys):
    script, args, envs = frames_of(spaces.Box(0, 255, (12, 8, 8), np.uint8))
    assert envs.entries == [(12, 8, 8)]
    assert capsys.readouterr().out.count("--channels") == 1
    for space, says in [
        (spaces.Box(-1, 1, (5,)), "images: the observation has none"),
        (spaces.Box(0, 255, (9, 9, 3), np.uint8), "--cnn-kernels 8,4,3: an image is too small"),
    ]:
        with pytest.raises(ValueError, match=says):
            script, args, envs = frames_of(space)
            script.Agent(envs, args)


def test_the_previous_action_is_what_was_played(tmp_path):
    """InPlace multiplies it by ten afterwards, and pays it."""
    script = driver.fresh("rppo_continuous", "previous_action", "frame_stack")
    envs = script.make_envs(script.Args(env_id="InPlace-v0", frames=2), 3)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (3, 8) and not obs[:, 2:4].any()
    before = obs[:, 4:]
    for t in range(1, 12):
        actions = np.random.default_rng(t).uniform(-1, 1, (3, 1)).astype(np.float32)
        played = actions.copy()
        obs, rewards, _, ended, _ = envs.step(actions)
        fresh = t == 11  # the step that only resets
        wanted = np.zeros((3, 2)) if fresh else np.hstack([played, rewards[:, None]])
        assert np.allclose(obs[:, 6:], wanted) and (fresh or np.allclose(rewards, played[:, 0]))
        assert np.array_equal(obs[:, :4], obs[:, 4:] if fresh else before)
        before = obs[:, 4:]


# --- Populations -----------------------------------------------------------------------------------


def test_a_generation_is_scored_on_the_same_new_episodes(tmp_path, monkeypatch):
    """Members and generations have seeds of their own to train with."""
    evolve, population = driver.recipe("evolve"), driver.recipe("population")
    seen = []

    def train_all(runs, processes):
        seen.append([dict(zip(words[::2], words[1::2])) for words in runs.values()])
        return [float(len(seen) + i) for i in range(len(runs))]

    monkeypatch.setattr(population, "train_all", train_all)
    options = SimpleNamespace(
        seed=7, members=3, generations=4, processes=1, evolve=True, tournament=2
    )
    best = evolve.evolve(options, [], ["learning_rate", "hidden_size"], tmp_path)
    assert best == tmp_path / "3-2" and len(seen) == 4
    members = [member for generation in seen for member in generation]
    assert len({member["--seed"] for member in members}) == 12
    episodes = [{member["--eval-seed"] for member in generation} for generation in seen]
    assert [len(seeds) for seeds in episodes] == [1] * 4 and len(set.union(*episodes)) == 4
    assert all(1e-4 <= float(member["--learning_rate"]) <= 1e-2 for member in members)
    assert seen[1][0]["--learning_rate"] == seen[0][2]["--learning_rate"]


def test_evaluations_of_one_eval_seed_play_the_same_episodes(tmp_path):
    script = driver.fresh("rppo_lstm", "evolve")
    seeds = []
    make_envs = script.make_envs

    def watched(*inputs):
        envs = make_envs(*inputs)
        reset = envs.reset
        envs.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
        return envs

    script.make_envs = watched
    for seed in 1, 2:
        run(script, tmp_path, seed=seed, eval_seed=9)
    assert seeds[1] == seeds[3] != seeds[0] != seeds[2]


def test_a_population_trains_and_says_what_fails(tmp_path, monkeypatch, capsys):
    population = driver.recipe("population")
    words = ["rppo_lstm", "--env-id", "CartPole-v1", "--total-timesteps", "300", "--num-envs", "2"]
    words += ["--num-steps", "32", "--num-minibatches", "2", "--eval-episodes", "2"]
    monkeypatch.chdir(tmp_path)
    population.main("1", *words)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/runs/population/1: return ")
    with pytest.raises(ValueError, match="exists"):
        population.main("1", *words)
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(ValueError, match="return: --gamma, --gae-lambda: must not be above 1"):
        population.main("1", *words, "--gamma", "2.0")
    runs = {tmp_path / "1": [*words, "--no-flag"], tmp_path / "2": words}
    assert population.train_all(runs)[0] == -np.inf
    assert capsys.readouterr().err == f"{tmp_path}/1 failed: Unrecognized options: --no-flag\n"


def test_an_offspring_differs_in_one_gene_within_its_range():
    evolve = driver.recipe("evolve")
    names = evolve.names_of(driver.fresh("rppo_lstm", "networks", "warm_start"))
    assert {"learning_rate", "layers_before", "activation", "init_noise"} <= {*names}
    assert "encoder_size" not in names  # --layers-before replaces it
    changed = set()
    genes = evolve.kept({name: evolve.draw(name) for name in names})
    for _ in range(400):
        child = evolve.mutate(genes)
        differs = [name for name in names if child[name] != evolve.kept(genes)[name]]
        assert len(differs) <= 1
        changed |= {*differs}
        for name, (low, high, _) in evolve.NUMBERS.items():
            assert name not in child or low <= child[name] <= high
        units = [int(x) for x in child["layers_after"].split(",")]
        assert 1 <= len(units) <= 3 and all(32 <= x <= 128 for x in units)
        genes = evolve.kept(child)
    assert changed == {*names}


def test_evolution_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Two generations of two members, here in one process; the best is a run like any other."""
    population = driver.recipe("population")

    def train(folder, words):
        monkeypatch.setattr(sys, "argv", ["use.py", *words, "--runs-dir", str(folder.parent),
                                          "--run-name", folder.name])  # fmt: skip
        driver.main()

    monkeypatch.setattr(population, "train", train)
    monkeypatch.chdir(tmp_path)
    flags = "--members 2 --generations 2 --steps 200 --processes 1 --num-envs 2 --num-steps 32"
    words = ["evolve.py", "rppo_lstm", *flags.split(), "--num-minibatches", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--eval-episodes", "2", "--env-id", "CartPole-v1"])
    driver.recipe("evolve").main()
    assert "generation 1: " in capsys.readouterr().out
    script, args, _, _, saved = driver.open_run(tmp_path / "runs/evolve/best")
    assert script.SCRIPT == "rppo_lstm+warm_start+evolve" and saved["step"] >= 200
    assert args.init_from.split("/")[-1] in ("0-0", "0-1") and args.eval_seed == 2


def test_warm_start_takes_weights_and_their_corners(tmp_path):
    script = driver.fresh("rppo_lstm", "warm_start")
    old, run_dir = run(script, tmp_path, env_id="CartPole-v1", norm_obs=True)
    flags = dict(env_id="CartPole-v1", init_from=str(run_dir), total_timesteps=1, learning_rate=0.0)
    same, _ = run(script, tmp_path, **flags)
    for key, value in same.named_parameters():
        assert torch.equal(value, old.state_dict()[key]), key
    assert same.obs_stats.count == old.obs_stats.count > 0
    noisy, _ = run(script, tmp_path, **flags, init_noise=0.1)
    moved = torch.cat([(x - y).flatten() for x, y in zip(noisy.parameters(), same.parameters())])
    assert moved.std().item() == pytest.approx(0.1, rel=0.1)
    large, _ = run(script, tmp_path, **flags, encoder_size=16, overlap=True)
    assert torch.equal(large.encoder[0].weight[:8], old.encoder[0].weight)
    assert torch.equal(large.actor.weight, old.actor.weight)
    with pytest.raises(ValueError, match="try --overlap"):
        run(script, tmp_path, **flags, encoder_size=16)
    # Weights keep their names where action masks come along.
    masked = driver.fresh("rppo_lstm", "warm_start", "action_masks")
    again, _ = run(masked, tmp_path, **flags)
    assert torch.equal(again.actor.weight, old.actor.weight)


if __name__ == "__main__":
    job(sys.argv[1])
