"""What new users run into: streams, files, types and environments that are not as they should be.

Each test is a fault that somebody met, here or in another project.
"""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, having, toy_for
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from test_run import RUNS, SHORT, assert_refused, main, read, toy, trained

BOX = {"rppo_continuous", "trpo", "ppo1_mpi"}  # scripts that have Box actions
CHOICES = [script for script in RUNS if script != "rppo_continuous"]
everywhere = pytest.mark.parametrize("script", RUNS)
# main, parse_args and Run have one text in all but ppo1_mpi.py, which tests/sync.py holds
each_text = pytest.mark.parametrize("script", ["rppo_lstm", "ppo1_mpi"])


class Odd(gym.Env):
    """Ten steps of zeros; what a subclass changes is the fault."""

    observation_space: spaces.Space = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def observe(self):
        return np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 10, self.info()

    def info(self):
        return {}


def register(name: str, script: str, **attributes) -> str:
    """Registers an Odd environment with actions that the script has -> its flags."""
    if script == "rppo_continuous":
        attributes.setdefault("action_space", spaces.Box(-1, 1, (1,), np.float32))
    gym.register(f"{name}-v0", type(name, (Odd,), attributes), disable_env_checker=True)
    return f"--env-id {name}-v0 --no-mask-velocity"


def short(script: str, *flags) -> str:
    rest = "--total-timesteps 150 --eval-episodes 1 --run-name a"
    return " ".join([SHORT[script], rest, *flags])


def said(folder, script: str, *flags) -> tuple[int, str, list[str]]:
    """Runs a script as a process of its own -> exit code, output, warnings and errors."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *" ".join(map(str, flags)).split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    lines = done.stderr.replace("\r", "\n").splitlines()
    return done.returncode, done.stdout, [x for x in lines if x.startswith(("warning", "error"))]


# Types that a program gives


@everywhere
def test_a_path_as_an_argument_is_a_string_in_the_file(script, tmp_path, monkeypatch):
    """Continuing by Run.latest, a Path, overwrote a good agent.pt by one that never loaded again."""
    module = MODULES[script]
    trained(tmp_path, script, short(script))
    saved = read(tmp_path / "runs/a")["args"]
    monkeypatch.chdir(tmp_path)
    args = module.Args(**{**saved, "resume": Path("runs/a"), "total_timesteps": np.int64(400)})
    module.train(args)
    again = module.load(Path("runs/a"))
    assert again["step"] >= 400
    assert again["args"]["resume"] == "runs/a" and type(again["args"]["total_timesteps"]) is int
    new = module.Args(**{**saved, "runs_dir": tmp_path / "my runs", "run_name": "b"})
    module.train(new)
    assert read(tmp_path / "my runs/b")["args"]["runs_dir"] == str(tmp_path / "my runs")


@everywhere
@pytest.mark.parametrize(
    "name, value",
    [("total_timesteps", "2000"), ("gamma", "0.9"), ("seed", 1.5), ("seed", None),
     ("norm_obs", "False"), ("env_id", 3), ("num_envs", [4]), ("total_timesteps", np.inf),
     ("gamma", np.nan), ("env_id", ""), ("torch_threads", 100_000)],
)  # fmt: skip
def test_a_wrong_type_is_refused_before_any_work(script, name, value, tmp_path):
    module = MODULES[script]
    with pytest.raises(module.ArgumentError, match=f"^--{name.replace('_', '-')} .*: must be"):
        module.train(module.Args(**{"runs_dir": str(tmp_path), name: value}))
    assert list(tmp_path.iterdir()) == []


@everywhere
def test_numpys_types_are_pythons_in_the_file(script, tmp_path):
    module = MODULES[script]
    given = dict(
        total_timesteps=3e2, seed=np.int32(2), gamma=np.float32(0.5), norm_obs=np.bool_(False),
        env_id=np.str_(toy_for(script)), runs_dir=tmp_path, run_name="a", eval_episodes=0,
        num_steps=32,
    )  # fmt: skip
    module.train(module.Args(**given))
    args = module.load(tmp_path / "a")["args"]
    types = {name: type(value) for name, value in args.items() if name in given}
    assert set(types.values()) == {int, float, bool, str} and args["norm_obs"] is False


@everywhere
def test_more_attributes_of_args_are_not_kept(script, tmp_path):
    """A note of one's own was written into agent.pt, which then never loaded again."""
    module = MODULES[script]
    args = module.Args(**trained(tmp_path, script, short(script))["args"])
    args.note = "mine"
    args.run_name = "b"
    args.runs_dir = str(tmp_path)
    module.train(args)
    assert "note" not in module.load(tmp_path / "b")["args"] and args.note == "mine"


# Runs and their files


@everywhere
def test_an_empty_name_of_a_run_is_refused(script, tmp_path):
    """--play "$RUN" without such a variable began to train."""
    module = MODULES[script]
    for flag in "play", "resume", "run_name":
        with pytest.raises(
            module.ArgumentError, match=f"^--{flag.replace('_', '-')} '': must be a str"
        ):
            module.train(module.Args(**{flag: "", "runs_dir": str(tmp_path)}))
    assert_refused(main(tmp_path, script, "--play="), "--play '': must be a str")
    assert list(tmp_path.iterdir()) == []


@everywhere
def test_a_path_that_is_too_long_is_no_run(script, tmp_path):
    for flag in "--play", "--resume":
        words = "is not the directory of a run: it has no agent.pt"
        assert_refused(main(tmp_path, script, f"{flag} {'x' * 300}"), words)


@everywhere
def test_a_run_without_evaluations_can_be_played(script, tmp_path):
    trained(tmp_path, script, short(script, "--eval-episodes 0"))
    code, out, _ = main(tmp_path, script, "--play runs/a --render none")
    assert code == 0 and out.count("return ") == 10


@everywhere
def test_a_close_that_fails_costs_no_training(script, tmp_path):
    flags = register(f"Close{script}", script, close=lambda self: 1 / 0)
    code, _, err = main(tmp_path, script, short(script, flags, "--eval-episodes 0"))
    assert code == 1 and "ZeroDivisionError" in err
    assert read(tmp_path / "runs/a")["step"] >= 150
    assert (tmp_path / "runs/a/result.json").exists()


@pytest.mark.parametrize("script", [x for x in RUNS if x != "trpo"])
def test_a_sequence_as_long_as_the_rollout_stays_that(script, tmp_path):
    """--seq-len 0 is T, whatever T a run is resumed with."""
    extra = "--memory lstm" if script == "ppo1_mpi" else ""
    trained(tmp_path, script, short(script, "--seq-len 0 --num-minibatches 1", extra))
    lengths, module = [], MODULES[script]
    to_sequences = module.to_sequences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_sequences", lambda x, L: lengths.append(L) or to_sequences(x, L))
        flags = "--resume runs/a --total-timesteps 1200 --num-steps"
        for T in 64, 24:
            code, _, err = main(
                tmp_path, script, f"{flags} {T}".replace("1200", f"{1200 - 10 * T}")
            )
            assert code == 0, err
            assert {*lengths} == {T} and read(tmp_path / "runs/a")["args"]["seq_len"] == 0
            lengths.clear()
    assert_refused(
        main(tmp_path, script, f"{short(script, extra)} --run-name b --seq-len 7"),
        "--seq-len 7: must divide --num-steps 32",
    )


@everywhere
def test_runs_of_one_second_have_folders_of_their_own(script, tmp_path):
    flags = f"{SHORT[script]} --total-timesteps 60 --eval-episodes 0"
    for _ in range(3):
        code, _, err = main(tmp_path, script, flags)
        assert code == 0, err
    assert len(list((tmp_path / "runs").iterdir())) == 3


@each_text
def test_a_folder_with_a_space_can_be_pasted(script, tmp_path, start_script):
    flags = f"{toy(script, 'Clock')} --total-timesteps 100000000 --run-name a".split()
    folder = tmp_path / "my drive"
    folder.mkdir()
    process = start_script(script, *flags, cwd=folder, env={"PYTHONPATH": str(ROOT / "tests")})
    process.wait_for(folder / "runs/a/agent.pt")
    process.kill(signal.SIGINT)
    assert process.wait(60).returncode == 130
    [line] = [line for line in process.lines if line.startswith("to continue: ")]
    words = shlex.split(line.removeprefix("to continue: "))
    assert words[-2:] == ["--resume", str(folder / "runs/a")]


@everywhere
@pytest.mark.parametrize("saved", [True, False])
def test_ctrl_c_as_a_run_begins_offers_what_is_saved(script, saved, tmp_path, monkeypatch):
    """The command was known only after the bar was drawn: Ctrl-C just before that lost it."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if saved:
        monkeypatch.setattr(MODULES[script], "tqdm", interrupt)
    else:
        monkeypatch.setattr(os, "fsync", interrupt)
    code, _, err = main(tmp_path, script, short(script))
    assert code == 130 and (tmp_path / "runs/a/agent.pt").exists() == saved
    assert (f"--resume {tmp_path}/runs/a" in err) == saved, err


@everywhere
def test_what_is_no_run_is_said(script, tmp_path):
    trained(tmp_path, script, short(script))
    for flags in "--play runs/a/agent.pt", "--resume runs/a/agent.pt", "--play nope":
        run = flags.split()[1]
        line = f"error: {run} is not the directory of a run: it has no agent.pt"
        assert_refused(main(tmp_path, script, flags), line)
    assert_refused(main(tmp_path, script, "--play runs/a --seed -1"), "--seed -1: must be from 0")


@everywhere
def test_versions_are_kept_and_another_is_said(script, tmp_path):
    saved = trained(tmp_path, script, short(script))
    expected = f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
    assert saved["versions"].startswith(expected)
    assert f"gymnasium {gym.__version__}, numpy {np.__version__}" in saved["versions"]
    torch.save({**saved, "versions": "torch 1.0"}, tmp_path / "runs/a/agent.pt")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        MODULES[script].load(tmp_path / "runs/a")
    [warning] = [str(x.message) for x in raised]
    assert "was written by torch 1.0, and read by Python" in warning


# Streams


@each_text
@pytest.mark.parametrize("streams", ["2>&-", "| true", ">&-", ">/dev/full"])
def test_a_stream_that_is_closed_or_full_fails_no_run(script, streams, tmp_path):
    flags = short(script)
    command = f"{sys.executable} {ROOT}/{script}.py {flags} {streams}"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert {"agent.pt", "result.json"} < {file.name for file in (tmp_path / "runs/a").iterdir()}


@each_text
def test_a_run_whose_bar_cannot_be_drawn_can_be_resumed(script, tmp_path):
    command = f"{sys.executable} {ROOT}/{script}.py"
    stopped = f"{command} {short(script)} 2>/dev/full"
    assert subprocess.run(stopped, shell=True, cwd=tmp_path).returncode == 1
    subprocess.run([*command.split(), "--resume", "runs/a"], cwd=tmp_path, check=True)
    assert read(tmp_path / "runs/a")["step"] >= 150


PLAY = "--play runs/a --render none"


@pytest.mark.parametrize("script,flags", [
    ("rppo_lstm", "--help"), ("rppo_gru_atari", "--help"), ("ppo1_mpi", "--help"),
    ("rppo_lstm", PLAY), ("ppo1_mpi", PLAY),
])  # fmt: skip
def test_help_and_returns_that_nobody_reads_end_quietly(script, flags, tmp_path):
    """As `--help | head`, which fails where Python writes at once, and `--play | head`, where it
    does not."""
    command = f"{sys.executable} {ROOT}/{script}.py"
    if flags == PLAY:
        subprocess.run([*command.split(), *short(script).split()], cwd=tmp_path, check=True)
    unbuffered = "1" if flags == "--help" else ""
    env = {**os.environ, "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": unbuffered}
    shell = ["bash", "-o", "pipefail", "-c", f"{command} {flags} | true"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", "")


@each_text
def test_a_name_that_the_stream_cannot_write_fails_no_run(script, tmp_path):
    command = [sys.executable, str(ROOT / f"{script}.py"), *short(script).split()]
    command += ["--runs-dir", "größe"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "größe/a/result.json").exists()


@each_text
def test_no_bar_where_tqdm_is_told_so(script, tmp_path):
    command = [sys.executable, str(ROOT / f"{script}.py"), *short(script).split()]
    env = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "") and ": return " in done.stdout


@each_text
def test_help_without_docstrings(script, tmp_path):
    command = [sys.executable, "-OO", str(ROOT / f"{script}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--env-id" in done.stdout, done.stderr


@everywhere
def test_the_last_line_has_three_digits_of_a_small_return(script, tmp_path, monkeypatch):
    flags = register(f"Small{script}", script, step=small_step)
    _, out, _ = main(tmp_path, script, short(script, flags))
    assert ": return 0.91," in out


def small_step(self, action):
    self.t += 1
    return self.observe(), 0.091, False, self.t == 10, {}


# Seeds


def draw(self):
    return np.array([np.random.uniform(-1, 1), random.uniform(-1, 1)], np.float32)


@everywhere
def test_generators_that_environments_share_are_seeded(script, tmp_path):
    flags = register(f"Draws{script}", script, observe=draw)
    weights = []
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        np.random.seed(len(weights))  # what ran before does not matter
        random.seed(len(weights))
        saved = trained(tmp_path, script, short(script, flags, f"--seed {seed} --run-name {name}"))
        weights.append(saved["agent"]["critic.weight" if "critic.weight" in saved["agent"] else
                                      "actor.weight"])  # fmt: skip
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# Environments


@everywhere
def test_an_info_called_episode(script, tmp_path):
    info = {"episode": 3, "statistics": 3}  # the names that Gymnasium and this project have used
    flags = register(f"Episode{script}", script, info=lambda self: info)
    saved = trained(tmp_path, script, short(script, flags))
    assert saved["returns"] and set(saved["returns"]) == {10.0}


@everywhere
def test_nan_stops_before_the_agent_acts_on_it(script, tmp_path):
    seen = []

    def observe(self):
        return np.full(2, np.nan if self.t == 5 else 0, np.float32)

    def step(self, action):
        seen.append(np.isfinite(action).all())
        return Odd.step(self, action)

    flags = register(f"NaN{script}", script, observe=observe, step=step)
    code, _, err = main(tmp_path, script, short(script, flags))
    assert code == 1 and "FloatingPointError: obs[0, 0] is nan" in err
    assert all(seen) and len(seen) <= 5 * 4


@pytest.mark.parametrize("script", sorted(BOX))
@pytest.mark.parametrize("low, high, warned", [(300, 500, True), (-2, 2, False), (0, 1e-3, True)])
def test_actions_far_from_what_a_policy_begins_with(script, low, high, warned, tmp_path):
    space = spaces.Box(low, high, (1,), np.float32)
    flags = register(f"Far{low}{high}{script}".replace(".", ""), script, action_space=space)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        trained(tmp_path, script, short(script, flags))
    lines = [str(x.message) for x in raised if "RescaleAction" in str(x.message)]
    assert bool(lines) == warned


@everywhere
def test_observations_that_float32_cannot_hold(script, tmp_path):
    flags = register(f"Time{script}", script, observe=lambda self: np.float32([5e8 + self.t, 0]))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        trained(tmp_path, script, short(script, flags))
    assert any("obs above 2**24" in str(x.message) for x in raised)


@everywhere
def test_a_number_too_large_for_float32_is_named_before_it_is_infinite(script):
    """Seen in rppo_lstm.py: "after step 0, ...policy_loss is nan", of an observation of 1e300."""
    finite = MODULES[script].finite
    with pytest.raises(FloatingPointError, match=r"^obs\[1, 0\] is 1e\+300$"):
        finite("obs", np.array([[0, 1], [1e300, 0]]))
    with pytest.warns(UserWarning, match="obs above"):
        assert finite("obs", np.array([1e38]))[0] == 1e38


@everywhere
@pytest.mark.parametrize("space", [
    spaces.Box(0, 5, (2,), np.int32), spaces.Tuple([spaces.Discrete(2)]),
    spaces.Dict(a=spaces.Discrete(2)),
], ids=lambda space: type(space).__name__)  # fmt: skip
def test_actions_that_no_script_has(script, space, tmp_path):
    flags = register(f"Whole{type(space).__name__}{script}", script, action_space=space)
    assert_refused(main(tmp_path, script, short(script, flags)), "use MultiDiscrete")


class Masker(gym.Wrapper):
    """As sb3-contrib's ActionMasker."""

    def action_masks(self):
        return [True, False]


@everywhere
@pytest.mark.parametrize("name,attributes,word", [
    ("Pixels", dict(observation_space=spaces.Box(0, 255, (32, 32, 3), np.uint8)), "images"),
    ("Inside", dict(observation_space=spaces.Dict(x=spaces.Box(-1, 1, (2,)),
                    action_mask=spaces.MultiBinary(2))), 'info["action_mask"]'),
    ("Method", dict(observation_space=spaces.Box(-1, 1, (2,)),
                    action_masks=lambda self: [True, False]), 'info["action_mask"]'),
    ("Wrapper", dict(observation_space=spaces.Box(-1, 1, (2,))), 'info["action_mask"]'),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_pixels_and_masks_that_are_not_in_info_are_said_once(
    script, name, attributes, word, tmp_path
):
    flags = register(f"{name}{script}", script, **attributes,
                     observe=lambda self: self.observation_space.sample())  # fmt: skip
    if name == "Wrapper":
        spec = gym.spec(f"{name}{script}-v0")
        make = spec.entry_point
        spec.entry_point = lambda: Masker(make())
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("default")
        trained(tmp_path, script, short(script, flags, f"--run-name {name}"))
    assert len([x for x in raised if word in str(x.message)]) == 1


class Handles(CartPoleVectorEnv):
    """A simulator of its own, whose attribute `envs` holds no environments of Gymnasium."""

    envs = ("a handle", "another")


@pytest.mark.parametrize("script", having("legal_choices"))
def test_a_vector_environment_may_call_what_it_likes_envs(script, tmp_path):
    gym.register(f"CartPole-Handles{script}-v0", vector_entry_point=Handles, max_episode_steps=50)
    flags = f"--env-id CartPole-Handles{script}-v0 --num-envs 2"
    assert trained(tmp_path, script, short(script, flags, "--eval-episodes 2"))["step"] >= 150


@pytest.mark.parametrize("script", having("legal_choices"))
def test_a_mask_of_another_size(script, tmp_path):
    info = {"action_mask": np.ones(4, np.int8)}
    flags = register(f"Four{script}", script, info=lambda self: info)
    code, _, err = main(tmp_path, script, short(script, flags))
    assert code == 1 and "action_mask is (4,), and must have the shape (2,)" in err


@pytest.mark.parametrize("script", having("legal_choices"))
def test_a_mask_does_not_concern_real_numbers(script, tmp_path):
    """Of a Box it was read as if each number were a choice."""
    if script not in BOX:
        pytest.skip("choices only")
    box = spaces.Box(-1, 1, (2,), np.float32)
    info = {"action_mask": np.array([1, 0], np.int8)}
    flags = register(f"Real{script}", script, info=lambda self: info, action_space=box)
    assert trained(tmp_path, script, short(script, flags))["step"] >= 150


@everywhere
def test_entry_points_that_are_missing_or_need_an_argument(script, tmp_path):
    gym.register(f"Missing{script}-v0", "test_users:Nothing")
    assert_refused(main(tmp_path, script, f"--env-id Missing{script}-v0"), "Nothing")
    gym.register(f"Needs{script}-v0", needs)
    assert_refused(main(tmp_path, script, f"--env-id Needs{script}-v0"), "size")
    for env_id in "TMaze-v0", "./my_module.py:TMaze-v0", ":TMaze-v0":
        assert_refused(main(tmp_path, script, f"--env-id {env_id}"), "my_module:MyEnv-v0")


def needs(size):
    raise AssertionError(size)


@everywhere
def test_an_environments_own_error_keeps_its_traceback(script, tmp_path):
    gym.register(f"Raises{script}-v0", raises)
    code, _, err = main(tmp_path, script, f"--env-id Raises{script}-v0")
    assert code == 1 and "in raises" in err and "AttributeError: my own" in err


def raises():
    raise AttributeError("my own")


@everywhere
def test_so_does_one_whose_file_has_gymnasium_in_its_name(script, tmp_path, monkeypatch):
    """As the package gymnasium_env of Gymnasium's tutorial, or in an environment named so."""
    folder = tmp_path / "gymnasium/gymnasium_env"
    folder.mkdir(parents=True)
    (folder / f"odd_{script}.py").write_text("def make(**options):\n    {}['missing level']\n")
    monkeypatch.syspath_prepend(str(folder))
    gym.register(f"InGymnasium{script}-v0", f"odd_{script}:make")
    code, _, err = main(tmp_path, script, f"--env-id InGymnasium{script}-v0")
    assert code == 1 and "in make" in err and "KeyError: 'missing level'" in err


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    result = main(tmp_path, "rppo_lstm", "--env-id LunarLander-v3")
    assert_refused(result, 'pip install ".[atari,box2d,minigrid,mujoco]"')


# Functions that are pasted into other code


@everywhere
def test_final_may_have_any_type_that_says_yes_or_no(script):
    """Of uint8 it reset no state: ~1 is 254, which is true."""
    module = MODULES[script]
    memory = {"memory": "lstm"} if hasattr(module.Args, "memory") else {}
    args = module.Args(env_id=toy_for(script), **memory)
    agent = module.Agent(module.make_envs(args, 1), args)
    obs = np.zeros((3, *agent.obs_stats.mean.shape), np.float32)
    state = torch.ones_like(agent.initial_state(3))
    for final in ([0, 1, 0], np.array([0, 1, 0], np.uint8), np.array([0.0, 1.0, 0.0]),
                  torch.tensor([False, True, False]), torch.tensor([0, 1, 0])):  # fmt: skip
        _, after = agent.predict(obs, {}, state, final)
        assert (after != 0).flatten(2).any(-1).all(0).tolist() == [True, False, True]


@pytest.mark.parametrize("script", having("ResetLSTM"))
def test_shapes_that_crash_or_broadcast_are_refused(script):
    """With a state of another size torch.lstm ends the process, or reads other memory."""
    module = MODULES[script]
    lstm = module.ResetLSTM(4, 16)
    x, state, final = torch.zeros(5, 8, 4), torch.zeros(2, 8, 16), torch.zeros(5, 8).bool()
    wrong = [
        (x, state[:, :1], final), (x, torch.zeros(2, 9, 16), final), (x[..., :3], state, final),
        (x, torch.zeros(2, 8, 8), final), (x, state[:1], final), (x, state, final[:1]),
        (x, state, final[:, :1]), (x, state, final[..., None]), (x, (state[0], state[1]), final),
    ]  # fmt: skip
    for inputs in wrong:
        with pytest.raises(ValueError, match="and must have the shape"):
            lstm(*inputs)
    with pytest.raises(ValueError, match=r"state is .*\(2, 1, 16\).* shape \(2, 8, 16\)"):
        lstm(x, state[:, :1], final)
    final[2, 3] = True
    x = torch.randn(5, 8, 4)
    assert torch.equal(lstm(x, state, final.float()), lstm(x, state, final))  # 0 and 1 will do


@pytest.mark.parametrize("script", having("compute_gae", "discounted_sums"))
def test_functions_on_arrays_refuse_what_would_broadcast(script):
    module = MODULES[script]
    rewards, done = np.zeros((5, 3), np.float32), np.zeros((5, 3), bool)
    values = np.zeros((6, 3), np.float32)
    module.compute_gae(rewards, values, done, done, 0.9, 0.9)
    for inputs in (
        (rewards, values[:, :1], done, done), (rewards, values[:5], done, done),
        (rewards, values, done[:1], done), (rewards, values, done, done[:, :1]),
        (rewards, values[..., None], done, done),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="and must have the shape"):
            module.compute_gae(*inputs, 0.9, 0.9)
    for wrong in done[:1], done[:, :1]:
        with pytest.raises(ValueError, match="done is .* and must have the shape"):
            module.discounted_sums(rewards, wrong, np.zeros(3), 0.9)


@pytest.mark.parametrize("script", having("discounted_sums"))
def test_whole_rewards_are_not_truncated(script):
    sums = MODULES[script].discounted_sums(
        np.array([[1], [1], [2]]), np.array([[False], [True], [False]]), np.zeros(1), 0.5
    )
    assert sums.ravel().tolist() == [1, 1.5, 2]


@pytest.mark.parametrize("script", having("RunningMeanStd"))
def test_statistics_refuse_rows_that_would_broadcast(script):
    stats = MODULES[script].RunningMeanStd((3,))
    for wrong in torch.ones(5), torch.ones(5, 1), torch.ones(5, 2, 3), torch.ones(3, 5):
        with pytest.raises(ValueError, match=r"rows is .* must have the shape \(\d, 3\)"):
            stats.update(wrong)
    assert stats.count == 0
    returns = MODULES[script].RunningMeanStd(())
    with pytest.raises(ValueError, match=r"rows is \(5, 1\), and must have the shape \(5,\)"):
        returns.update(torch.ones(5, 1))


@pytest.mark.parametrize("script", having("ppo_loss"))
def test_the_loss_refuses_what_would_broadcast(script):
    loss = MODULES[script].ppo_loss
    M = torch.zeros(6)
    for inputs in (M, M[:1], M), (M, M, M[:, None]), (M[:, None], M, M):
        with pytest.raises(ValueError, match="and must have the shape"):
            loss(*inputs, 0.2)


@everywhere
def test_missing_packages_are_named_where_they_are_listed(script, tmp_path):
    """Without Gymnasium Python shows the line that imports it, which says what to install."""
    file = ROOT / f"{script}.py"
    command = [sys.executable, "-S", str(file)]  # -S: without installed packages
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'gymnasium'\n")
    [numbers] = re.findall(r"pip install what lines? (3|3 and 4) lists?\n", done.stderr)
    lines = file.read_text().splitlines()
    header = lines[: lines.index("# ///", 1)]
    assert lines[2].startswith('# dependencies = ["torch') and "gymnasium[" in lines[2]
    assert len(header) == int(numbers[-1])
