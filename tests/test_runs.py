"""What a run leaves, seeds, exact resumption, wrong input, faults, --play, --track.

Run, load, evaluate, main are one text in rppo_lstm.py, rppo_continuous.py and trpo.py, and another
in ppo1_mpi.py: the tests run over the first and the last, and over more where that is cheap.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import (
    MODULES,
    ROOT,
    SCRIPTS,
    SHORT,
    assert_same,
    main,
    read,
    scalars,
    shown,
    toy_flags,
    trained,
)

TEXTS = "rppo_lstm", "ppo1_mpi"
RUNS = [*SHORT]
PATH = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
T, STEPS = 32, 4 * 31  # of an iteration in the clock, where one step in 32 is final
lstm = MODULES["rppo_lstm"]


def clock(script: str, **options) -> list[str]:
    """Episodes of 31 steps, so that a rollout of 32 has exactly one; nothing in it is random."""
    return toy_flags(script, clock=True, length=31, **options)


def result(run_dir) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def assert_refused(run: tuple, expected: str) -> None:
    """One line, which names what is wrong, and exit code 2."""
    code, out, err = run
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


# --- What a run leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize("script", TEXTS)
def test_what_a_run_leaves(script, tmp_path, monkeypatch):
    """By a clock on which an iteration takes 31 seconds, while somebody sets the date back."""
    module, now, saves = MODULES[script], [1000.0], []

    class Run(module.Run):
        def log(self, *inputs):
            now[0] += 31
            super().log(*inputs)

        def save(self):
            super().save()
            saves.append(self.step)

    fake = SimpleNamespace(
        perf_counter=lambda: now[0], time=lambda: 9e9 - 3600 * now[0], sleep=time.sleep
    )
    monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(module, "Run", Run)
    flags = f"--total-timesteps {8 * STEPS} --eval-episodes 3 --torch-threads 0"
    code, out, err = main(tmp_path, script, *clock(script), flags)
    assert code == 0 and shown(err) == [], err
    [run_dir] = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith(f"support-Toy-v0__{script}__1__")
    [events] = run_dir.glob("events.out.tfevents.*")
    assert {file.name for file in run_dir.iterdir()} == {"agent.pt", "result.json", events.name}
    ended = result(run_dir)
    assert ended.keys() == {"args", "global_step", "sps", "returns"}
    assert ended["global_step"] == 8 * STEPS and ended["sps"] == pytest.approx(STEPS / 31)
    assert ended["args"]["total_timesteps"] == 8 * STEPS and ended["args"]["seed"] == 1
    evaluation, *others = ended["returns"]
    assert others == [evaluation] * 2
    assert out.splitlines()[-1] == f"{run_dir}: return {evaluation:.5g}, 4 steps a second"
    found = scalars(run_dir)
    assert found.pop("charts/evaluation") == {8 * STEPS: pytest.approx(evaluation)}
    names = {f"losses/{name}" for name in module.METRICS} | {"losses/explained_variance"}
    names |= {f"charts/{x}" for x in ("episodic_return", "episodic_length", "SPS", "learning_rate")}
    assert found.keys() == names
    assert all(list(points) == [STEPS * i for i in range(1, 9)] for points in found.values())
    assert set(found["charts/episodic_length"].values()) == {31}
    assert [*found["charts/SPS"].values()] == pytest.approx([STEPS / 31] * 8)
    # At the start, then whenever more than 60 seconds have passed, and at the end.
    assert saves == [STEPS * i for i in (0, 2, 4, 6, 8, 8)]
    saved = read(run_dir)
    assert saved["step"] == 8 * STEPS and saved["lengths"] == [31] * 32
    assert (saved["script"], saved["version"]) == (script, module.VERSION)
    assert saved["file"] == str(ROOT / f"{script}.py")
    assert found["charts/episodic_return"][8 * STEPS] == pytest.approx(np.mean(saved["returns"]))
    assert saved["optimizer"]["param_groups"][0]["eps"] == 1e-5


@pytest.mark.parametrize("script", TEXTS)
def test_returns_are_those_of_the_last_100_episodes(script, tmp_path):
    """Environment i of the vector gets 1 + i a step, for 5, 6, 7 or 5 steps; a resumed run goes on."""
    flags = [*SHORT[script], "--env-id support:Vector-v0 --run-name a --eval-episodes 0"]
    first = trained(tmp_path, script, *flags)
    # In the order in which they end: 5 after 5 steps, 20 too, 12 after 6, 21 after 7.
    assert first["returns"][:4] == [5, 20, 12, 21] and first["lengths"][:4] == [5, 5, 6, 7]
    assert result(tmp_path / "runs/a")["returns"] == first["returns"]
    n = len(first["returns"])
    again = trained(tmp_path, script, "--resume runs/a --total-timesteps 400")
    assert n < len(again["returns"]) < 100 and again["returns"][:n] == first["returns"]
    again = trained(tmp_path, script, "--resume runs/a --total-timesteps 2000")
    assert len(again["returns"]) == 100


@pytest.mark.parametrize("script", TEXTS)
def test_the_evaluation_is_one_episode_of_each_environment(script, tmp_path):
    """The first ones, with a state that is carried on and reset, as an agent that writes it down sees."""
    module, seen = MODULES[script], []

    class Agent:
        def predict(self, obs, state, final, deterministic):
            seen.append((state, None if final is None else final.copy(), deterministic))
            return np.zeros(len(obs), int), len(seen)

    for flags in "bool", "uint8", "int64":
        envs = module.make_envs(
            module.Args(env_id="Vector-v0", env_kwargs=json.dumps({"flags": flags})), 3
        )
        seen.clear()
        assert module.evaluate(Agent(), envs, 1, True) == [5, 12, 21]
        states, finals, deterministic = zip(*seen)
        assert states == (None, 1, 2, 3, 4, 5, 6) and all(deterministic) and finals[0] is None
        assert np.stack(finals[5:]).tolist() == [[True, False, False], [False, True, False]]
        assert finals[5].dtype == bool
    args = module.Args(env_id="Toy-v0", env_kwargs='{"actions": "discrete"}')
    envs, found = module.make_envs(args, 8), {}
    envs.reset(seed=1)
    while len(found) < 8:  # episodes of 1 to some 20 steps
        _, _, terminated, truncated, info = envs.step(np.zeros(8, int))
        for i in np.flatnonzero(terminated | truncated):
            found.setdefault(i, info["run_statistics"]["r"][i])
    assert module.evaluate(Agent(), module.make_envs(args, 8), 1) == [found[i] for i in range(8)]


def test_losses_are_logged_under_their_names(tmp_path):
    """Of rewards that aren't divided the value loss is large; the first surrogate is about 0."""
    flags = "--env-id support:Vector-v0 --no-norm-reward --run-name a --eval-episodes 0"
    trained(tmp_path, "rppo_lstm", *SHORT["rppo_lstm"], flags)
    logged = {tag: min(x.items())[1] for tag, x in scalars(tmp_path / "runs/a").items()}
    assert abs(logged["losses/policy_loss"]) < 0.1 and logged["losses/value_loss"] > 1
    assert logged["losses/entropy"] == pytest.approx(np.log(2), abs=0.01)
    assert 0 <= logged["losses/approx_kl"] < 0.1 and 0 <= logged["losses/clipfrac"] < 1
    assert logged["losses/grad_norm"] > logged["losses/value_loss"] / 10


def test_the_evaluation_takes_the_seed_and_sampled_actions_on_demand():
    """Its episodes are all different, and the same each time."""
    starts = []

    class Agent:
        def predict(self, obs, *_):
            starts.append(obs.copy())
            raise StopIteration

    for seed in 1, 1, 100:
        envs = lstm.make_envs(lstm.Args(env_id="Acrobot-v1"), 10)
        with pytest.raises(StopIteration):
            lstm.evaluate(Agent(), envs, seed)
    assert len(np.unique(starts[0], axis=0)) == 10
    assert np.array_equal(starts[0], starts[1]) and not np.isin(starts[0], starts[2]).any()
    clock = '{"clock": true, "length": 20}'
    args = lstm.Args(env_id="Toy-v0", env_kwargs=clock, hidden_size=8)
    agent = lstm.Agent(lstm.make_envs(args, 1), args)
    certain, sampled = (
        lstm.evaluate(agent, lstm.make_envs(args, 4), 1, deterministic)
        for deterministic in (True, False)
    )
    assert len(set(certain)) == 1 < len(set(sampled))


# --- Seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Acrobot-v1"])
def test_no_two_seeds_share_an_episode(env_id):
    """Seeds 1 to 50, eight environments in training and ten in the evaluation: 900 starts."""
    env, numbers = gym.make(env_id), set()
    for seed in range(1, 51):
        for first, count in (lstm.env_seed(seed, 0), 8), (lstm.env_seed(seed, lstm.EVALUATION), 10):
            for i in range(count):
                env.reset(seed=first + i)
                numbers.add(env.unwrapped.np_random.integers(2**62))
    assert len(numbers) == 900


@pytest.mark.parametrize("script", RUNS)
def test_the_same_seed_gives_the_same_weights(script, tmp_path):
    """Also where the environment draws nothing, and weights and actions alone are random."""
    runs = []
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        flags = f"--seed {seed} --run-name {name} --eval-episodes 1"
        runs.append(trained(tmp_path, script, *clock(script), flags))
    assert_same(runs[0]["agent"], runs[1]["agent"])
    different = [not torch.equal(x, runs[2]["agent"][name]) for name, x in runs[0]["agent"].items()]
    assert sum(different) >= len(different) / 2


def test_every_generator_is_seeded():
    draws = []
    for seed in 5, 5, 2**32 + 6:  # NumPy takes none so large
        lstm.seed_everything(seed)
        draws.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert draws[0] == draws[1] and not set(draws[0]) & set(draws[2])


@pytest.mark.parametrize("script", TEXTS)
def test_training_and_its_continuation_play_other_episodes(script, tmp_path, monkeypatch):
    module, seeds = MODULES[script], []
    make_envs = module.make_envs

    def watched(*inputs):
        envs = make_envs(*inputs)
        reset = envs.reset
        envs.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
        return envs

    monkeypatch.setattr(module, "make_envs", watched)
    step = trained(tmp_path, script, *clock(script), "--run-name a --seed 7")["step"]
    trained(tmp_path, script, "--resume runs/a --total-timesteps 500 --eval-episodes 0")
    rank = [0] if script == "ppo1_mpi" else []
    evaluation = module.env_seed(7, module.EVALUATION)
    assert seeds == [module.env_seed(7, 0, *rank), evaluation, module.env_seed(7, step, *rank)]


# --- Resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", RUNS)
def test_two_resumes_are_equal_and_equal_the_run_never_stopped(script, tmp_path, monkeypatch):
    """Bit for bit: weights, optimiser, statistics, random numbers, returns, evaluation, and the log,
    of which a killed run has more than its agent.pt knows."""
    module, logged = MODULES[script], []
    flags = [*clock(script), f"--total-timesteps {6 * STEPS}"]
    whole = trained(tmp_path, script, *flags, "--run-name whole")

    class Run(module.Run):
        def log(self, *inputs):
            super().log(*inputs)
            logged.append(self.step)
            if len(logged) == 3:
                self.save()
                shutil.copy(self.dir / "agent.pt", tmp_path)
            if len(logged) == 4:  # a run killed here has logged more than its file knows
                self.writer.flush()
                for name in "half", "other":
                    shutil.copytree(self.dir, self.dir.parent / name)
                    shutil.copy(tmp_path / "agent.pt", self.dir.parent / name)

    with monkeypatch.context() as patch:
        patch.setattr(module, "Run", Run)
        trained(tmp_path, script, *flags, "--run-name saved")
    time.sleep(1)  # TensorBoard orders a run's files by the second of their birth
    assert read(tmp_path / "runs/half")["step"] == 3 * STEPS
    half, other = (trained(tmp_path, script, f"--resume runs/{name}") for name in ("half", "other"))
    for part in "agent", "optimizer", "rng", "step", "returns", "lengths":
        assert_same(half[part], other[part])
        assert_same(half[part], whole[part])
    assert result(tmp_path / "runs/half")["returns"] == result(tmp_path / "runs/whole")["returns"]
    points, expected = scalars(tmp_path / "runs/half"), scalars(tmp_path / "runs/whole")
    del points["charts/SPS"], expected["charts/SPS"]
    assert points == expected
    assert whole["args"]["resume"] is half["args"]["resume"] is None  # Args(**args) is a new run


@pytest.mark.parametrize("script", TEXTS)
def test_what_a_resumed_run_may_change(script, tmp_path):
    before = trained(tmp_path, script, *clock(script), "--run-name a")
    (tmp_path / "link").symlink_to("runs")  # the folder is given in two ways
    flags = "--learning-rate 0 --total-timesteps 500 --num-envs 2 --num-minibatches 1"
    after = trained(tmp_path, script, "--resume link/a", flags)
    assert after["step"] >= 500 and after["args"]["num_envs"] == 2
    assert after["args"]["learning_rate"] == 0.0  # which shows that flags given now win:
    for name, weight in before["agent"].items():
        assert "stats" in name or torch.equal(weight, after["agent"][name])
    file = tmp_path / "runs/a/agent.pt"
    good = file.read_bytes()
    for flag in "--hidden-size 9", "--encoder-size 9":
        refused = main(tmp_path, script, "--resume runs/a --total-timesteps 900", flag)
        assert_refused(refused, "size mismatch")
        assert file.read_bytes() == good
    refused = main(tmp_path, script, "--resume runs/a")
    assert_refused(refused, f"nothing to do, the run has {after['step']} steps")
    (tmp_path / "runs/a/result.json").unlink()  # a run that was killed in its evaluation ends it
    assert trained(tmp_path, script, "--resume runs/a")["step"] == after["step"]
    assert (tmp_path / "runs/a/result.json").exists()


@pytest.mark.parametrize("script", TEXTS)
def test_files_that_cannot_be_used(script, tmp_path):
    """Damaged, hostile, another script's: one line, no code run, and the file left as it is."""
    trained(tmp_path, script, *clock(script), "--run-name a --eval-episodes 0")
    file = tmp_path / "runs/a/agent.pt"
    good, saved = file.read_bytes(), read(tmp_path / "runs/a")

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    def refused(expected: str):
        bad = file.read_bytes()
        for flag in "--resume runs/a", "--play runs/a --render none":
            assert_refused(main(tmp_path, script, flag), expected)
        assert file.read_bytes() == bad

    for bad in good[: len(good) // 2], good[:-1], bytes(len(good)), b"", b"nonsense\n" * 999:
        file.write_bytes(bad)
        refused("runs/a/agent.pt can't be used: ")
    torch.save({**saved, "agent": Evil()}, file)
    refused("runs/a/agent.pt can't be used: ")
    assert not (tmp_path / "evil").exists()
    torch.save({**saved, "script": "another"}, file)
    refused(f"another wrote it, not {script}")
    few = {name: x for name, x in saved["agent"].items() if name != "actor.weight"}
    torch.save({**saved, "agent": few, "step": 0}, file)
    refused("actor.weight")
    file.unlink()
    for flag in "--resume runs/a", "--play runs/a":
        assert_refused(main(tmp_path, script, flag), "runs/a/agent.pt can't be used: ")
    file.write_bytes(good)
    trained(tmp_path, script, "--resume runs/a --total-timesteps 500")


@pytest.mark.parametrize("script", TEXTS)
def test_a_full_disk_leaves_the_last_good_file(script, tmp_path, monkeypatch):
    """The third save fails half way; the run continues as if it had not."""
    module, calls = MODULES[script], []
    always = property(lambda _: -100.0, lambda *_: None)
    monkeypatch.setattr(module.Run, "saved", always, raising=False)
    flags = [*clock(script), f"--total-timesteps {4 * STEPS}"]
    whole = trained(tmp_path, script, *flags, "--run-name whole")
    save = torch.save

    def full(contents, path, **options):
        if isinstance(path, Path):
            calls.append(path)
            if len(calls) == 3:
                path.write_bytes(b"half of it")
                raise OSError(28, "No space left on device")
        save(contents, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        code, _, err = main(tmp_path, script, *flags, "--run-name a")
    assert code == 1 and "OSError: [Errno 28] No space left" in err, err
    assert module.load(tmp_path / "runs/a")["step"] == STEPS  # the second
    assert_same(trained(tmp_path, script, "--resume runs/a")["agent"], whole["agent"])


OFTEN = """
import rppo_lstm
rppo_lstm.Run.saved = property(lambda self: -100.0, lambda self, now: None)
rppo_lstm.main()
"""


@pytest.fixture
def start(tmp_path):
    """Starts Python in the test's folder, which gets a file stderr; what still runs afterwards is
    killed."""
    running = []

    def started(*words):
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=tmp_path, env=PATH, start_new_session=True,
            stderr=open(tmp_path / "stderr", "w"),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.wait()


def wait_for(file: Path, process, than=None) -> None:
    """Until a file is there, newer than that one; the process must not end before."""
    while not file.exists() or file.stat().st_mtime_ns == than:
        assert process.poll() is None, "the run is too short"
        time.sleep(0.005)


def test_kill_9_and_resume_is_the_run_never_stopped(tmp_path, start):
    """A run that saves after every iteration, killed at random moments; agent.pt always loads."""
    flags = [*clock("rppo_lstm"), "--total-timesteps", str(STEPS * 60), "--eval-episodes", "0"]
    whole = trained(tmp_path, "rppo_lstm", *flags, "--run-name whole")
    file, written, step = tmp_path / "runs/killed/agent.pt", None, 0
    following = [*flags, "--run-name", "killed"]
    for _ in range(2):
        process = start("-c", OFTEN, *following)
        wait_for(file, process, than=written)
        time.sleep(random.uniform(0.0, 0.2))
        process.kill()
        assert process.wait() == -9, "the run is too short"
        time.sleep(1)  # TensorBoard orders a run's files by the second of their birth
        written, before = file.stat().st_mtime_ns, step
        step = lstm.load(file.parent)["step"]
        assert step >= before
        following = ["--resume", "runs/killed"]
    end = trained(tmp_path, "rppo_lstm", "--resume runs/killed")
    for part in "agent", "optimizer", "rng", "step", "returns":
        assert_same(end[part], whole[part])
    assert [*scalars(tmp_path / "runs/killed")["losses/entropy"]] == [
        *range(STEPS, STEPS * 60 + 1, STEPS)
    ]


def test_control_c(tmp_path, start):
    """Exit code 130, one line that continues the run, and no process left of an environment."""
    flags = [*clock("rppo_lstm"), "--run-name", "a", "--async-envs", "--total-timesteps", "9999999"]
    process = start(ROOT / "rppo_lstm.py", *flags)
    wait_for(tmp_path / "runs/a/agent.pt", process)
    time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(15) == 130
    said = (tmp_path / "stderr").read_text()
    assert f"\nto continue: python {ROOT}/rppo_lstm.py --resume {tmp_path}/runs/a\n" in said
    assert 'rppo_lstm.py"' not in said, said  # no traceback of ours
    assert len(children) >= 4
    end = time.time() + 10
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.time() < end
        time.sleep(0.1)


# --- Faults ----------------------------------------------------------------------------------------


FAULTS = {  # what happens in step 40 of every environment's life; what is said
    "raise": "RuntimeError: the simulator exploded",
    "obs": "FloatingPointError: obs[9, 0, 1] is nan",
    "reward": "FloatingPointError: rewards[8, 0] is nan",
    "infinite": "FloatingPointError: rewards[8, 0] is inf",
}


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_says_where_and_how_to_continue(script, fault, tmp_path):
    """Step 40 of a life is time step 8 of the second rollout: one step of the first was a reset."""
    code, _, err = main(tmp_path, script, *clock(script, fault=fault), "--run-name a")
    assert code == 1 and "Traceback" in err and FAULTS[fault] in err, err
    if fault == "raise":
        assert re.search(r'support\.py", line \d+, in step', err), err  # the user's own traceback
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[-1].startswith("to continue: ")
    assert lines[-1].endswith(f"{script}.py --resume {tmp_path}/runs/a")
    saved = read(tmp_path / "runs/a")
    assert saved["step"] == 0 and all(x.isfinite().all() for x in saved["agent"].values())
    saved["args"]["env_kwargs"] = saved["args"]["env_kwargs"].replace(fault, "")  # it is mended
    torch.save(saved, tmp_path / "runs/a/agent.pt")
    assert trained(tmp_path, script, "--resume runs/a")["step"] >= 300


@pytest.mark.parametrize("script", TEXTS)
def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path):
    """A reward of 1e30: its square is infinite in float32. What agent.pt holds is finite."""
    raw = "--no-norm-reward" if hasattr(MODULES[script].Args, "norm_reward") else ""
    code, _, err = main(tmp_path, script, *clock(script, fault="huge"), "--run-name a", raw)
    assert code == 1 and "FloatingPointError: after step 248, (" in err and "value_loss" in err, err
    saved = read(tmp_path / "runs/a")
    assert saved["step"] == 0 and all(x.isfinite().all() for x in saved["agent"].values())


def test_an_environment_that_cannot_be_made_keeps_its_traceback(tmp_path):
    code, _, err = main(tmp_path, "rppo_lstm", *clock("rppo_lstm", fault="init"))
    assert code == 1 and "RuntimeError: the simulator exploded" in err and "to continue" not in err
    assert not (tmp_path / "runs").exists()


WRONG = [  # flags after those of a short run, and what the line says
    ("--env-id Nope-v1", "--env-id Nope-v1 --env-kwargs {}: Environment `Nope` doesn't exist"),
    ("--env-id nomodule:Nope-v1", "No module named 'nomodule'"),
    ("--env-kwargs {", "--env-id support:Toy-v0 --env-kwargs {: Expecting property name"),
    ("--mask-velocity", "--mask-velocity: support:Toy is not one of ['CartPole'"),
    ("--num-steps 0", "--num-steps 0: must be positive"),
    ("--learning-rate nan", "--learning-rate nan: must not be negative, nor NaN"),
    ("--gamma 1.01", "--gamma, --gae-lambda: must not be above 1"),
    ("--seed -1", "--seed -1: must not be negative"),
    ("--run-name taken", "/taken exists; --resume continues it"),
    ("--resume nowhere", "nowhere/agent.pt can't be used: "),
    ("--play nowhere", "nowhere/agent.pt can't be used: "),
]
SEQUENCES = [
    ("--seq-len 24", "--seq-len 24: must divide --num-steps 32"),
    ("--seq-len 32 --num-minibatches 3", "--num-minibatches: must divide the 4 sequences"),
    ("--ablate-memory --num-minibatches 128", "minibatches of one step can't move the policy"),
]
OWN = {
    "rppo_lstm": [*SEQUENCES, ("--env-id Pendulum-v1", "use rppo_continuous.py")],
    "rppo_continuous": [
        ("--env-id CartPole-v1", "use rppo_lstm.py"),
        ("--sde-sample-freq 0", "--sde-sample-freq 0: must be -1 or positive"),
    ],
    "trpo": [("--line-search-shrinking-factor 0", "--line-search-shrinking-factor 0.0: must be")],
    "ppo1_mpi": SEQUENCES[:2],
}
VECTOR = "--env-id support:Vector-v0 --env-kwargs "
VECTORS = [
    (VECTOR + '{"same_step":true}', "its autoreset mode is not NEXT_STEP"),
    (VECTOR + '{"one":true}', "makes 1 environments"),
]


@pytest.mark.parametrize("script,flags,expected",
    [(s, *case) for s in RUNS for case in (WRONG if s in TEXTS else []) + OWN[s]]
    + [("rppo_lstm", *case) for case in VECTORS])  # fmt: skip
def test_wrong_input_is_one_line_and_exit_code_2_before_any_work(script, flags, expected, tmp_path):
    (tmp_path / "runs/taken").mkdir(parents=True)
    (tmp_path / "runs/taken/agent.pt").touch()
    toy = ["--env-id", "support:Toy-v0", "--env-kwargs", "{}"]
    if script == "rppo_continuous" or "--env-kwargs" in flags or "--env-id" in flags:
        toy = ["--env-id", "Pendulum-v1"] if script == "rppo_continuous" else toy[:2]
    before = sorted(tmp_path.rglob("*"))
    assert_refused(main(tmp_path, script, *SHORT[script], *toy, flags), expected)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_numbers_that_cannot_work_are_refused(script):
    """In a program, too; and YAML makes a string of 1e-3."""
    module = MODULES[script]
    wrong = {"num_envs": 0, "num_steps": -1, "learning_rate": float("nan"), "gamma": 1.5,
             "gae_lambda": -0.1, "hidden_size": 0, "seed": -1, "total_timesteps": 0}  # fmt: skip
    for name, value in [*wrong.items(), ("learning_rate", "1e-3"), ("num_envs", "8")]:
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(module.ArgumentError, match=flag):
            module.check_args(module.Args(**{name: value}))
    module.check_args(module.Args())
    if "cuda" in vars(module.Args) and not torch.cuda.is_available():
        with pytest.raises(module.ArgumentError, match="--cuda: torch finds no GPU"):
            module.check_args(module.Args(cuda=True))


# --- What environments do --------------------------------------------------------------------------


def test_rewards_of_a_reset_and_one_dictionary_for_all_steps_change_nothing(tmp_path):
    """A reward that is sent with a reset is no episode's: weights, statistics, returns are the same."""
    runs = []
    for kwargs in {}, {"at_reset": 1000.0}, {"same_info": True}, {"flags": "uint8"}:
        flags = ["--env-id", "support:Vector-v0", "--env-kwargs", json.dumps(kwargs)]
        name = f"--run-name run{len(runs)} --norm-obs"
        runs.append(trained(tmp_path, "rppo_lstm", *SHORT["rppo_lstm"], *flags, name))
    for run in runs[1:]:
        assert_same(run["agent"], runs[0]["agent"])
        assert run["returns"] == runs[0]["returns"]


def test_an_environment_may_use_autograd(tmp_path):
    """train steps it outside inference mode."""
    flags = [*SHORT["rppo_lstm"], "--env-id support:Autograd-v0"]
    assert trained(tmp_path, "rppo_lstm", *flags)["step"] >= 300


@pytest.mark.parametrize("mode", ["", "--async-envs"])
def test_environments_take_their_own_arguments(mode, tmp_path):
    """--env-kwargs; one environment of each process sees the same."""
    flags = [*SHORT["rppo_lstm"], f"--run-name a --eval-episodes 0 {mode}"]
    if mode:
        flags += ["--total-timesteps 64"]
    flags += ["--env-id", "support:Toy-v0", "--env-kwargs", '{"length": 3, "actions": "from -1"}']
    assert set(trained(tmp_path, "rppo_lstm", *flags)["lengths"]) == {3}


@pytest.mark.parametrize("env_id,hidden", [
    ("CartPole-v1", [1, 3]), ("MountainCar-v0", [1]), ("Acrobot-v1", None),
    ("LunarLander-v3", [2, 3, 5]),
])  # fmt: skip
def test_hidden_velocities_are_zero_and_nothing_else_is(env_id, hidden):
    if "Lunar" in env_id:
        pytest.importorskip("Box2D")
    args = lstm.Args(env_id=env_id, mask_velocity=True)
    if hidden is None:
        with pytest.raises(lstm.ArgumentError):
            lstm.make_envs(args, 2)
        return
    envs = lstm.make_envs(args, 2)
    obs = [envs.reset(seed=1)[0]] + [envs.step(envs.action_space.sample())[0] for _ in range(9)]
    moved = np.abs(obs).max((0, 1)) > 0
    assert not moved[hidden].any() and np.delete(moved, hidden)[:2].all()
    args.mask_velocity = False
    envs = lstm.make_envs(args, 2)
    seen, _ = envs.reset(seed=1)
    assert np.array_equal(np.delete(seen, hidden, 1), np.delete(obs[0], hidden, 1))
    assert envs.step(envs.action_space.sample())[0][:, hidden].any()


@pytest.mark.parametrize("script", ["rppo_continuous", "trpo", "ppo1_mpi"])
def test_a_preset_is_said_and_is_what_a_program_gets(script, tmp_path, monkeypatch, capsys):
    module = MODULES[script]
    for (env_id, masked), values in module.PRESETS.items():
        flags = ["--env-id", env_id, "--mask-velocity" if masked else "--no-mask-velocity"]
        monkeypatch.setattr(sys, "argv", [script, *flags, "--seed", "3", "--gamma", "0.5"])
        args = module.parse_args()
        assert args == module.preset(env_id, masked, seed=3, gamma=0.5)
        wanted = {**values, "seed": 3, "gamma": 0.5}
        assert args == module.Args(env_id=env_id, mask_velocity=masked, **wanted)
        assert capsys.readouterr().out == f"preset, where no flag says otherwise: {values}\n"
        monkeypatch.setattr(sys, "argv", [script, *flags, "--no-preset"])
        args = module.parse_args()
        assert args == module.Args(env_id=env_id, mask_velocity=masked, preset=False)
        assert capsys.readouterr().out == ""
    assert module.preset("Nope-v0") == module.Args(env_id="Nope-v0")


# --- play, track, alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("script", TEXTS)
def test_play_shows_the_episodes_of_the_evaluation_first(script, tmp_path):
    flags = toy_flags(script, length=9)
    trained(tmp_path, script, *flags, "--run-name a --eval-episodes 3")
    code, out, err = main(tmp_path, script, "--play runs/a --render none")
    returns = [float(line.removeprefix("return ")) for line in out.splitlines()]
    assert (
        code == 0 and len(returns) == 3 and returns[0] == result(tmp_path / "runs/a")["returns"][0]
    ), err


def test_play_makes_a_video(tmp_path):
    pytest.importorskip("moviepy")
    trained(tmp_path, "rppo_lstm", *SHORT["rppo_lstm"], "--env-id CartPole-v1 --run-name a")
    code, out, err = main(tmp_path, "rppo_lstm", "--play runs/a --render video --eval-episodes 1")
    assert code == 0 and out.splitlines()[-1].startswith("return "), err
    [file] = (tmp_path / "runs/a/videos").glob("*.mp4")
    assert file.stat().st_size > 1000


TRACKED = """
from rppo_lstm import Args, train
flags = dict(num_steps=32, eval_episodes=1, track=True)
train(Args(runs_dir="b", run_name="seed1", total_timesteps=512, **flags))
train(Args(resume="a/seed1", total_timesteps=1024, **flags))
"""


def test_weights_and_biases_gets_every_scalar_of_each_run(tmp_path):
    """Offline. Two runs of one name in one process are two there; a resumed one continues its own."""
    pytest.importorskip("wandb")
    flags = "--num-steps 32 --eval-episodes 1 --total-timesteps 512 --runs-dir a --run-name seed1"
    before = trained(tmp_path, "rppo_lstm", flags)
    torch.save({**before, "wandb_id": "of-a"}, tmp_path / "a/seed1/agent.pt")
    env = {**PATH, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run([sys.executable, "-c", TRACKED], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "wandb").glob("offline-run-*")]) == 2
    for name, first_step in ("a", before["step"] + 1), ("b", 0):
        run_id = read(tmp_path / name / "seed1")["wandb_id"]
        assert (run_id == "of-a") == (name == "a")
        [folder] = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}")
        sent, expected = wandb_history(folder), scalars(tmp_path / name / "seed1")
        assert len(expected) >= 12
        for tag, points in expected.items():
            new = {step: x for step, x in points.items() if step >= first_step}
            assert sent[tag] == pytest.approx(new) and new, tag


def wandb_history(folder) -> dict:
    """The rows of an offline record, as {name: {global_step: value}}."""
    import struct

    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    data, at, whole, found = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record, whole = Record.FromString(whole), b""
            row = {
                x.key or ".".join(x.nested_key): json.loads(x.value_json)
                for x in record.history.item
            }
            for name in row:
                if "/" in name:
                    found.setdefault(name, {})[row["global_step"]] = row[name]
    return found


def test_a_script_alone_in_an_empty_folder_trains_without_a_network(tmp_path):
    shutil.copy(ROOT / "rppo_lstm.py", tmp_path / "alone.py")
    blocker = "import socket\ndef refuse(*a, **k): raise OSError('network')\nsocket.socket.connect = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    flags = "--env-id CartPole-v1 --total-timesteps 300 --num-steps 32 --run-name a".split()
    done = subprocess.run([sys.executable, "alone.py", *flags], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": "."})  # fmt: skip
    assert done.returncode == 0 and shown(done.stderr) == [], done.stderr
    assert "100%" in done.stderr and read(tmp_path / "runs/a")["step"] >= 300
