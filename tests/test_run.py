"""What a run leaves, seeds, exact resumption, wrong input, --play, --track, --help."""

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, SCRIPTS
from launch import shown

# A short run of each script; its environment is a real one. A script joins by its line here.
SHORT = {
    "rppo_lstm": "--env-id CartPole-v1 --mask-velocity --num-envs 4 --num-steps 32 --hidden-size 16 --num-minibatches 2 --update-epochs 2",
    "rppo_continuous": "--env-id Pendulum-v1 --mask-velocity --num-envs 4 --num-steps 32 --hidden-size 16 --num-minibatches 2 --update-epochs 2",
    "trpo": "--env-id CartPole-v1 --mask-velocity --num-envs 4 --num-steps 32 --hidden-size 16 --encoder-size 16 --n-critic-updates 2",
    "ppo1_mpi": "--env-id CartPole-v1 --mask-velocity --num-envs 4 --num-steps 32 --seq-len 16 --hidden-size 16 --encoder-size 16 --num-minibatches 2 --update-epochs 2",
}
RUNS = [script for script in SHORT if script in SCRIPTS]
TESTS = {"PYTHONPATH": str(ROOT / "tests")}
T = 32
STEPS = 4 * (T - 1)  # of an iteration with envs.Clock, where one time step is final


def toy(script: str, name: str) -> str:
    """The flags of a short run in an environment of envs.py."""
    box = "" if hasattr(MODULES[script], "num_choices") else "Box"
    return f"{SHORT[script]} --no-mask-velocity --env-id envs:{box}{name}-v0"


def main(folder, script: str, *flags):
    """main() with these flags in the folder -> exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *" ".join(map(str, flags)).split()])
        MODULES[script].Run.latest = None  # as in a new process
        try:
            MODULES[script].main()
        except SystemExit as stop:
            return stop.code, out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def trained(folder, script: str, *flags) -> dict:
    """A run to its end -> what its agent.pt holds."""
    code, out, err = main(folder, script, *flags)
    assert code == 0, err
    return read(out.split(":")[0])


def read(run_dir) -> dict:
    return torch.load(f"{run_dir}/agent.pt", weights_only=True)


def assert_same(a, b) -> None:
    """Bit for bit, through dictionaries and lists."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_refused(result, expected: str) -> None:
    """One line, which names what is wrong, and exit code 2."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


def scalars(run_dir) -> dict:
    """TensorBoard's scalars: {tag: {step: value}}. No step may come twice or out of order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    found = {
        tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert all(sorted(dict(points)) == [step for step, _ in points] for points in found.values())
    return {tag: dict(points) for tag, points in found.items()}


@pytest.mark.parametrize("script", RUNS)
def test_what_a_run_leaves(script, tmp_path, monkeypatch):
    """By a clock on which the first iteration takes 100 seconds and each of the others 31."""
    module, clock, saves, order = MODULES[script], [1000.0], [], []
    flush, replace = module.SummaryWriter.flush, os.replace

    class Run(module.Run):
        def log(self, *inputs):
            clock[0] += 31 if self.timed else 100
            super().log(*inputs)

        def save(self):
            super().save()
            saves.append(self.step)

    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr(module, "Run", Run)
    monkeypatch.setattr(
        module.SummaryWriter, "flush", lambda self: order.append("events") or flush(self)
    )

    def recorded(source, target):
        if str(target).startswith(str(tmp_path)):  # Python may write a compiled module so, too
            order.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    code, out, err = main(
        tmp_path, script, toy(script, "Clock"), "--total-timesteps", 8 * STEPS, "--eval-episodes 3"
    )
    assert code == 0 and shown(err) == [], err
    [run_dir] = (tmp_path / "runs").iterdir()
    env_id = re.search(r"envs:(\S+)", toy(script, "Clock"))[1]
    assert run_dir.name == f"envs-{env_id}__{script}__1__1000.000000"
    [events] = run_dir.glob("events.out.tfevents.*")
    assert {file.name for file in run_dir.iterdir()} == {"agent.pt", "result.json", events.name}
    result = json.loads((run_dir / "result.json").read_text())
    assert result.keys() == {"global_step", "seconds", "sps", "returns", "evaluation"}
    assert result["global_step"] == 8 * STEPS and result["seconds"] == 100 + 7 * 31
    assert result["sps"] == pytest.approx(STEPS / 31)  # without the first iteration
    assert len(result["returns"]) == 8 * 4 and len(result["evaluation"]) == 3
    assert all(-2 * T < x < 0 for x in result["returns"])
    assert len(set(result["evaluation"])) == 1  # deterministic episodes in a deterministic world
    assert out == f"{run_dir}: return {result['evaluation'][0]:.5g}, 4 steps a second\n"
    found = scalars(run_dir)
    steps = [STEPS * i for i in range(1, 9)]
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS"} < found.keys()
    assert {"losses/value_loss", "losses/entropy"} < found.keys()
    assert all(list(points) == steps for points in found.values())
    assert list(found["charts/SPS"].values()) == pytest.approx([STEPS / 100] + [STEPS / 31] * 7)
    assert set(found["charts/episodic_length"].values()) == {T - 1}
    assert found["charts/episodic_return"][steps[-1]] == pytest.approx(np.mean(result["returns"]))
    # At the start, then whenever more than 60 seconds have passed, and at the end.
    assert saves == [0, *(STEPS * i for i in (1, 3, 5, 7, 8))]
    assert order == ["events", "agent.pt"] * len(saves)  # else a kill in between loses points
    saved = read(run_dir)
    assert saved["step"] == 8 * STEPS and saved["returns"] == result["returns"]
    assert saved["optimizer"]["param_groups"][0]["eps"] == 1e-5


@pytest.mark.parametrize("script", RUNS)
def test_returns_are_those_of_the_last_100_episodes(script, tmp_path):
    """Those of the four environments in turn; a resumed run continues with them."""
    flags = toy(script, "Counting"), "--total-timesteps 300 --eval-episodes 0 --run-name a"
    first = trained(tmp_path, script, *flags)["returns"]
    last = int(first[-1])
    assert first == [n for n in range(last - 24, last + 1) for _ in range(4)] and last >= 30
    following = trained(tmp_path, script, "--resume runs/a --total-timesteps 400")["returns"]
    new = [n for n in range(1, int(following[-1]) + 1) for _ in range(4)]
    assert following == (first + new)[-100:] and 0 < len(new) < 100


@pytest.mark.parametrize("script", RUNS)
def test_same_seed_same_weights_other_seed_others(script, tmp_path):
    """In a real environment, and in one that draws nothing, where weights and actions do."""
    for env, flags in ("real", SHORT[script]), ("toy", toy(script, "Clock")):
        seeds = {"a": 1, "b": 1, "c": 2}
        a, b, c = (
            trained(
                tmp_path,
                script,
                flags,
                f"--total-timesteps 400 --seed {seed} --run-name {env}{name}",
            )
            for name, seed in seeds.items()
        )
        assert_same(a["agent"], b["agent"])
        different = [not torch.equal(x, c["agent"][name]) for name, x in a["agent"].items()]
        assert sum(different) >= len(different) / 2


@pytest.mark.parametrize("toy_env", [False, True])
@pytest.mark.parametrize("script", RUNS)
def test_resumed_runs_are_exact(script, toy_env, tmp_path, monkeypatch):
    """Two resumes of one file agree; where episodes end with rollouts, also with the run that was
    never stopped, and never saved on its way."""
    module = MODULES[script]
    flags = f"{toy(script, 'Clock') if toy_env else SHORT[script]} --total-timesteps {6 * STEPS}"
    whole = trained(tmp_path, script, flags, "--run-name whole")

    class Run(module.Run):
        def log(self, *inputs):
            super().log(*inputs)
            self.save()
            if len(self.timed) == 3:
                shutil.copy(self.dir / "agent.pt", tmp_path)
            if len(self.timed) == 4:  # a run killed here has logged more than its file knows
                for name in "half", "other":
                    shutil.copytree(self.dir, self.dir.parent / name)
                    shutil.copy(tmp_path / "agent.pt", self.dir.parent / name)

    with monkeypatch.context() as patch:
        patch.setattr(module, "Run", Run)
        saved = trained(tmp_path, script, flags, "--run-name saved")
    time.sleep(1)  # TensorBoard orders a run's files by the second of their birth
    half = read(tmp_path / "runs/half")
    assert 0 < half["step"] < whole["step"]
    runs = {"saved": saved, "half": None, "other": None}
    for name in "half", "other":
        runs[name] = trained(tmp_path, script, f"--resume runs/{name}")
        assert runs[name]["seconds"] > half["seconds"]
    pairs = [("half", "other"), *([("half", "saved")] if toy_env else [])]
    for run, like in [(saved, whole), *((runs[a], runs[b]) for a, b in pairs)]:
        for part in "agent", "optimizer", "rng", "step", "returns", "lengths":
            assert_same(run[part], like[part])
    if toy_env:
        results = [
            json.loads((tmp_path / f"runs/{name}/result.json").read_text())
            for name in ("half", "whole")
        ]
        assert results[0]["evaluation"] == results[1]["evaluation"]
        points, expected = scalars(tmp_path / "runs/half"), scalars(tmp_path / "runs/whole")
        del points["charts/SPS"], expected["charts/SPS"]
        assert points == expected


@pytest.mark.parametrize("script", RUNS)
def test_a_resumed_run_plays_other_episodes(script, tmp_path, monkeypatch):
    """Else a run that is killed each hour would see the same few starts again and again."""
    module, seeds = MODULES[script], []
    make_envs = module.make_envs

    def watched(*inputs):
        envs = make_envs(*inputs)
        reset = envs.reset
        envs.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
        return envs

    monkeypatch.setattr(module, "make_envs", watched)
    flags = "--total-timesteps 200 --run-name a --eval-episodes 0 --seed 7"
    step = trained(tmp_path, script, SHORT[script], flags)["step"]
    trained(tmp_path, script, "--resume runs/a --total-timesteps 400")
    assert seeds == [7, 7 + step] and step >= 200


@pytest.mark.parametrize("script", RUNS)
def test_what_a_resumed_run_may_change(script, tmp_path):
    module = MODULES[script]
    before = trained(
        tmp_path, script, SHORT[script], "--total-timesteps 200 --run-name a --eval-episodes 1"
    )
    fixed = "env_id mask_velocity encoder_size hidden_size separate_critic ablate_memory memory norm_obs use_sde "
    fixed += "log_std_init"
    memory = "none" if before["args"].get("memory") == "lstm" else "lstm"
    others = {"env_id": "Acrobot-v1", "memory": memory}
    for name in (name for name in fixed.split() if hasattr(module.Args, name)):
        value, shown = before["args"][name], name.replace("_", "-")
        if type(value) is bool:
            flag = f"--{'no-' * value}{name}"
        else:
            flag = f"--{name} {others.get(name) or value + 1}"
        refused = main(tmp_path, script, "--resume runs/a", flag)
        assert_refused(refused, f"--{shown}: runs/a has {value}")
    # A learning rate of 0 shows that it counts; the folder is given in three ways.
    (tmp_path / "link").symlink_to("runs")
    after = trained(
        tmp_path, script, "--resume link/a --learning-rate 0 --total-timesteps 500 --num-envs 2"
    )
    assert after["step"] >= 500 and (after["args"]["num_envs"], after["args"]["learning_rate"]) == (
        2,
        0.0,
    )
    for name, _ in module.Agent(
        module.make_envs(module.Args(**after["args"]), 1), module.Args(**after["args"])
    ).named_parameters():
        if script == "trpo" and not name.startswith("critic"):
            continue  # the policy's step has no learning rate
        assert torch.equal(before["agent"][name], after["agent"][name]), name
    again = trained(
        tmp_path / "runs/a", script, "--resume . --learning-rate 0.01 --total-timesteps 700"
    )
    assert again["step"] >= 700 and not (tmp_path / "runs/a/runs").exists()
    assert not torch.equal(again["agent"]["actor.weight"], after["agent"]["actor.weight"])
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["a"]
    (tmp_path / "dangling").symlink_to("made")
    trained(
        tmp_path, script, SHORT[script], "--total-timesteps 100 --runs-dir dangling --run-name b"
    )
    assert (tmp_path / "made/b/agent.pt").exists()


WRONG = [  # flags after those of a short run, and what the line says
    ("--env-id Nope-v1", "--env-id Nope-v1: Environment `Nope` doesn't exist"),
    ("--env-id CartPol-v1", "Did you mean: `CartPole`?"),
    ("--env-id nomodule:Nope-v1", "No module named 'nomodule'"),
    ("--env-id envs:SameStep-v0", "--env-id envs:SameStep-v0: autoreset is not in NEXT_STEP mode"),
    ("--env-id Acrobot-v1 --mask-velocity", "--mask-velocity: Acrobot is not one of CartPole"),
    ("--num-steps 0", "--num-steps 0: must be from 1"),
    ("--runs-dir file/x", "Not a directory"),
    ("--runs-dir link", "Not a directory"),
    ("--runs-dir /proc/x", "/proc/x"),
    ("--run-name taken", "runs/taken' (--resume continues a run)"),
    ("--track --run-name taken", "runs/taken' (--resume continues a run)"),  # nor a record of it
    ("--resume nowhere", "nowhere is not the directory of a run: it has no agent.pt"),
    ("--resume runs/taken", "runs/taken is not the directory of a run: it has no agent.pt"),
    ("--play nowhere", "nowhere is not the directory of a run: it has no agent.pt"),
]
OWN = {
    "rppo_continuous": [
        ("--env-id CartPole-v1", "rppo_lstm.py"),
        ("--log-std-init -30", "--log-std-init -30.0: must be from"),
        ("--sde-sample-freq -2", "--sde-sample-freq -2: must be from"),
    ],
    "rppo_lstm": [
        ("--env-id Pendulum-v1 --no-mask-velocity", "rppo_continuous.py"),
        ("--seq-len 24", "--seq-len 24: must divide --num-steps 32"),
        ("--num-minibatches 3", "--num-minibatches: must divide the 4 sequences"),
        ("--seq-len 8 --num-minibatches 5", "--num-minibatches: must divide the 16 sequences"),
    ],
    "trpo": [
        ("--log-std-init -30", "--log-std-init -30.0: must be from"),
        ("--target-kl -1", "--target-kl -1.0: must be from"),
        ("--line-search-shrinking-factor 1.5", "--line-search-shrinking-factor 1.5: must be from"),
        ("--sub-sampling-factor 0", "--sub-sampling-factor 0: must be from"),
    ],
    "ppo1_mpi": [
        ("--seq-len 24", "--seq-len 24: must divide --num-steps 32"),
        ("--num-minibatches 3", "--num-minibatches: must divide the 8 sequences"),
        ("--memory none --num-minibatches 3", "--num-minibatches: must divide the 128 sequences"),
        ("--vf-coef -1", "--vf-coef -1.0: must be from"),
    ],
}


@pytest.mark.parametrize(
    "script,flags,expected", [(s, *case) for s in RUNS for case in WRONG + OWN[s]]
)
def test_wrong_input_is_one_line_and_leaves_nothing(script, flags, expected, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file/x")  # it dangles, and its target cannot be made
    (tmp_path / "runs/taken").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert_refused(main(tmp_path, script, SHORT[script], flags), expected)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("script", RUNS)
def test_every_numeric_flag_has_a_range(script, tmp_path):
    module = MODULES[script]
    numbers = {
        name: default
        for name, default in vars(module.Args()).items()
        if type(default) in (int, float) and name not in ("log_std_init", "sde_sample_freq")
    }
    assert len(numbers) >= 15
    zero = {"seed", "seq_len", "eval_episodes", "torch_threads"}
    for name, default in numbers.items():
        bad = [
            -1,
            *([10**13] if default != np.inf else []),
            *([0] if type(default) is int and name not in zero else []),
        ]
        bad += [np.nan, *([np.inf] if default != np.inf else [])] if type(default) is float else []
        bad += [1.01] if name in ("gamma", "gae_lambda") else []
        for value in map(type(default), bad):
            shown = f"--{name.replace('_', '-')} {value}: must be from"
            with pytest.raises(module.ArgumentError, match=re.escape(shown)):
                module.check_args(module.Args(**{name: value}))
    for name in zero & numbers.keys():
        module.check_args(module.Args(**{name: 0}))
    assert_refused(main(tmp_path, script, "--learning-rate nan"), "--learning-rate nan: must be")
    for flags in "--num-envs many", "--nonsense 1":  # tyro's own words, in a box
        code, out, err = main(tmp_path, script, flags)
        assert code == 2 and flags.split()[0] in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", RUNS)
def test_numbers_become_what_their_flags_declare(script):
    """In a program 1 stands for 1.0, 3e5 for an integer, a number of NumPy's for one of Python's."""
    module = MODULES[script]
    given = dict(
        gamma=1, total_timesteps=3e5, num_steps=np.int64(64), learning_rate=np.float64(0.1)
    )
    args = module.Args(**given)
    module.check_args(args)
    for name, value in given.items():
        number = getattr(args, name)
        assert number == value and type(number) is type(getattr(module.Args, name))


@pytest.mark.parametrize("script", ["rppo_lstm", "rppo_continuous", "ppo1_mpi"])
def test_without_memory_a_sequence_is_a_step(script):
    module = MODULES[script]
    sizes = dict(num_envs=1, num_steps=128, seq_len=0, num_minibatches=8)
    sizes |= {"memory": "lstm"} if script == "ppo1_mpi" else {}
    with pytest.raises(module.ArgumentError, match="must divide the 1 sequences"):
        module.check_args(module.Args(**sizes))
    module.check_args(module.Args(**sizes, ablate_memory=True))


@pytest.mark.parametrize("script", RUNS)
def test_a_finished_run_is_only_evaluated_again(script, tmp_path):
    flags = "--total-timesteps 300 --run-name a --eval-episodes 1"
    before = trained(tmp_path, script, SHORT[script], flags)
    code, out, err = main(tmp_path, script, "--resume runs/a --eval-episodes 2")
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert code == 0 and "2/2" in err
    assert len(result["evaluation"]) == 2 and result["global_step"] == before["step"] >= 300
    assert result["sps"] == pytest.approx(result["global_step"] / result["seconds"])


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("script", RUNS)
def test_files_that_cannot_be_used(script, tmp_path):
    """Damaged, hostile, another script's, of arguments that are none: one line, and no code run."""
    trained(tmp_path, script, SHORT[script], "--total-timesteps 100 --run-name a --eval-episodes 1")
    file = tmp_path / "runs/a/agent.pt"
    good, saved = file.read_bytes(), read(tmp_path / "runs/a")

    def refused(expected: str, *flags):
        for flag in "--resume runs/a", "--play runs/a --render video":
            assert_refused(main(tmp_path, script, flag, *flags), expected)

    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 16]) + good[middle + 1 :]
    for bad in good[:middle], good[:-1], flipped, bytes(len(good)), b"", b"nonsense\n" * 999:
        file.write_bytes(bad)
        refused("runs/a/agent.pt cannot be used: ")
    evil_args = {**saved["args"], "seed": Evil()}
    for part in {"agent": Evil()}, {"args": evil_args}, {"step": os.getcwd}:
        torch.save({**saved, **part}, file)
        refused("runs/a/agent.pt cannot be used: UnpicklingError")
    torch.save(Evil(), file, _use_new_zipfile_serialization=False)
    refused("runs/a/agent.pt cannot be used: ")
    assert not (tmp_path / "evil").exists()

    def change(**values):
        torch.save({**saved, **values}, file)

    change(script="another")
    refused(f"another wrote it, not {script}")
    args = saved["args"]
    nonsense = dict(
        num_envs="4",
        gamma="0.9",
        mask_velocity=1,
        env_id=None,
        seed=1.5,
        runs_dir=["x"],
        learning_rate=torch.ones(2),
    )
    for name, value in nonsense.items():
        change(args={**args, name: value})
        refused(f"--{name.replace('_', '-')} ")
    for bad_args in {**args, "unknown": 1}, [1], None:
        change(args=bad_args)
        refused("runs/a/agent.pt cannot be used: ")
    older = {k: v for k, v in args.items() if k not in ("render", "seed")}
    change(args=older)  # of before these flags, which have their defaults then
    trained(tmp_path, script, "--resume runs/a --total-timesteps 100")
    change(args={**args, "env_id": "Nope-v1"})
    refused("Environment `Nope` doesn't exist")
    change(agent={name: x for name, x in saved["agent"].items() if name != "actor.weight"})
    refused("actor.weight")
    change(agent={**saved["agent"], "actor.weight": torch.zeros(3, 3)})
    refused("actor.weight")
    file.write_bytes(good)
    trained(tmp_path, script, "--resume runs/a --total-timesteps 200")


@pytest.mark.parametrize("script", RUNS)
def test_play(script, tmp_path, monkeypatch):
    spec = gym.spec("Pendulum-v1")
    gym.register("Pendulum-v40", spec.entry_point, max_episode_steps=40)  # a shorter film
    short = SHORT[script].replace("Pendulum-v1", "Pendulum-v40")
    flags = "--total-timesteps 200 --eval-episodes 2 --run-name"
    saved = trained(tmp_path, script, short, flags, "a --seed 5")
    trained(tmp_path, script, toy(script, "Clock"), flags, "toy")
    for name in "DISPLAY", "WAYLAND_DISPLAY":
        monkeypatch.delenv(name, raising=False)
    assert_refused(
        main(tmp_path, script, "--play runs/a"),
        "--play: there is no display; try --render video, or none",
    )
    trained(tmp_path, script, toy(script, "Blind"), flags, "blind")
    code, _, err = main(tmp_path, script, "--play runs/blind --render video")
    assert code == 2 and err.endswith("Blind-v0 has no rgb_array\n"), err
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "moviepy", None)
        assert_refused(
            main(tmp_path, script, "--play runs/a --render video"), "is not installed, run"
        )
    pytest.importorskip("moviepy")
    code, out, err = main(tmp_path, script, "--play runs/a --render video")
    evaluation = json.loads((tmp_path / "runs/a/result.json").read_text())["evaluation"]
    assert code == 0, err
    returns = re.findall(r"^return (\S+)$", out, re.M)
    assert len(returns) == 2
    films = sorted((tmp_path / "runs/a/videos").glob("*.mp4"))
    assert len(films) == 2 and all(film.stat().st_size > 1000 for film in films)
    assert main(tmp_path, script, "--resume runs/toy --play runs/a --render video")[1] == out
    _, out, _ = main(tmp_path, script, "--play runs/a --render none")  # the evaluation once more
    assert re.findall(r"^return (\S+)$", out, re.M) == [f"{x:.5g}" for x in evaluation]
    sampled = [main(tmp_path, script, "--play runs/a --render none --no-deterministic --seed", seed)[1]
               for seed in (1, 1, 2)]  # fmt: skip
    assert sampled[0] == sampled[1] != sampled[2]
    monkeypatch.setenv("DISPLAY", ":0")  # of SDL's dummy driver
    env_class, frames = type(gym.make(saved["args"]["env_id"]).unwrapped), []
    real = env_class.render
    monkeypatch.setattr(env_class, "render", lambda self: frames.append(self) or real(self))
    code, out, err = main(tmp_path, script, "--play runs/a")
    steps = 2 * 40 if "Pendulum" in short else sum(map(float, returns))
    assert len(frames) > steps > 2  # each was shown
    assert code == 0, err
    assert re.findall(r"^return (\S+)$", out, re.M) == returns

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(env_class, "render", stop)
    code, out, err = main(tmp_path, script, "--play runs/a")
    assert code == 130 and "to continue" not in err, err


@pytest.mark.parametrize("script", RUNS)
def test_train_again_is_another_run(script, tmp_path, monkeypatch):
    """A loop over seeds may use one Args object, also when a run of it has failed."""
    flags = [*SHORT[script].split(), *"--total-timesteps 200 --eval-episodes 0".split()]
    expected = trained(tmp_path, script, *flags, "--seed 2 --run-name alone")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    module = MODULES[script]
    args = module.parse_args()

    def fail(*_):
        raise FloatingPointError

    for args.seed in 0, 1, 2:
        args.run_name = f"seed {args.seed}"
        with (
            monkeypatch.context() as patch,
            nullcontext() if args.seed else pytest.raises(FloatingPointError),
        ):
            if args.seed == 0:
                patch.setattr(module.Run, "log", fail)
            module.train(args)
    assert_same(read("runs/seed 2")["agent"], expected["agent"])
    assert read("runs/seed 1")["args"]["seed"] == 1 and read("runs/seed 0")["step"] == 0


def history(folder) -> dict:
    """The scalars in Weights & Biases' file of an offline run, and the run itself: LevelDB's log
    format, pieces of records in blocks of 32 KiB, each after its checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    data, at, whole, found, run = file.read_bytes(), 7, b"", {}, None
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
            run = record.run if record.WhichOneof("record_type") == "run" else run
            row = {
                x.key or ".".join(x.nested_key): json.loads(x.value_json)
                for x in record.history.item
            }
            for name in row:
                if "/" in name:
                    found.setdefault(name, {})[row["global_step"]] = row[name]
    return {"scalars": found, "id": run.run_id, "project": run.project}


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["rppo_lstm", "ppo1_mpi"])  # one text in the others
def test_track_sends_every_scalar(script, resume, tmp_path):
    pytest.importorskip("wandb")
    env = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "memory",
        "WANDB_ERROR_REPORTING": "false",
    }
    starts = [
        f"{SHORT[script]} --track --run-name a --total-timesteps 500",
        "--resume runs/a --total-timesteps 1000",
    ]
    before = set()
    for flags in starts if resume else starts[:1]:
        command = [sys.executable, ROOT / f"{script}.py", *flags.split(), "--eval-episodes", "1"]
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=240)
        [folder] = set((tmp_path / "wandb").glob("offline-run-*")) - before
        sent = history(folder)
        expected = scalars(tmp_path / "runs/a")
        assert (sent["id"], sent["project"]) == ("a", "memory")
        first = min(sent["scalars"]["charts/SPS"])
        for name, points in expected.items():
            assert sent["scalars"][name] == pytest.approx(
                {s: x for s, x in points.items() if s >= first}
            )
        assert bool(before) == (first > 500)
        assert len(expected) >= (5 if "Pendulum" in SHORT[script] else 7)
        before.add(folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rppo_lstm"])
def test_each_of_two_runs_in_one_process_has_a_record(script, tmp_path):
    pytest.importorskip("wandb")
    program = (
        f"from {script} import Args, train\n"
        "args = Args(total_timesteps=512, num_steps=32, eval_episodes=0, track=True)\n"
        "for args.seed in 1, 2:\n"
        "    args.run_name = f'seed{args.seed}'\n"
        "    train(args)\n"
    )
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=240)
    for seed in 1, 2:
        [folder] = (tmp_path / "wandb").glob(f"offline-run-*-seed{seed}")
        sent, expected = history(folder)["scalars"], scalars(tmp_path / f"runs/seed{seed}")
        assert expected.keys() == {name for name in sent if "/" in name}
        assert all(sent[name] == pytest.approx(points) for name, points in expected.items())


@pytest.mark.parametrize("how", ["not installed", "not logged in"])
@pytest.mark.parametrize("script", RUNS)
def test_track_that_cannot_work_is_one_line(script, how, tmp_path, monkeypatch, run_script):
    pytest.importorskip("wandb")
    if how == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
        result = main(tmp_path, script, SHORT[script], "--track")
        assert_refused(result, "import of wandb halted")
        assert result[2].endswith("(for --track)\n")
    else:
        env = {
            "WANDB_API_KEY": "",
            "HOME": str(tmp_path),
            "WANDB_MODE": "online",
            "NETRC": str(tmp_path / "none"),
        }
        done = run_script(script, *SHORT[script].split(), "--track", check=2, env=env)
        assert_refused((done.returncode, done.stdout, done.stderr), "(for --track)")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", RUNS)
def test_a_script_alone_in_an_empty_folder_trains_without_a_network(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path / "alone.py")
    blocker = "import socket\ndef refuse(*a, **k): raise OSError('network')\nsocket.socket.connect = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    flags = f"{SHORT[script]} --total-timesteps 300 --run-name a".split()
    command = [sys.executable, "alone.py", *flags]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    assert done.returncode == 0 and shown(done.stderr) == [], done.stderr
    assert "100%" in done.stderr  # a bar that is full
    assert read(tmp_path / "runs/a")["step"] >= 300
    assert "# /// script" in (tmp_path / "alone.py").read_text()[:200]


@pytest.mark.parametrize("script", RUNS)
def test_help_shows_every_flag_with_its_default_or_the_presets(script, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    module = MODULES[script]
    for (env_id, masked), preset in {("Acrobot-v1", False): {}, **module.PRESETS}.items():
        flags = f"--env-id {env_id} {'--mask-velocity' if masked else ''}"
        code, text, _ = main(tmp_path, script, flags, "--help")
        assert code == 0
        for name, default in vars(module.Args()).items():
            line = re.search(
                rf"^\W*--{name.replace('_', '-')}[ ,].*?\(default: (.*?)\)", text, re.S | re.M
            )
            assert line, name
            if name not in ("env_id", "mask_velocity"):
                assert line[1] == str(preset.get(name, default)), (flags, name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_in_80_columns(script, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = main(tmp_path, script, "--help")
    assert code == 0 and text.count("\n") > 50
    assert not [line for line in text.split("\n") if len(line) > 80]
    # The first lines' commands do not wrap.
    assert len(re.findall(rf"^    .*{script}\.py.*# ", text, re.M)) >= 2


def test_repeat_counts_runs_that_differ(tmp_path, monkeypatch, capsys):
    import repeat

    words = f"--runs 4 --cases trpo --dir {tmp_path}".split()
    assert repeat.main(words) == 0 and "trpo: 4 runs, 0 differ" in capsys.readouterr().out
    one = {"w": torch.ones(2)}
    other = {"w": torch.tensor([1, 1 + 2**-23])}
    results = iter([one, one, other, one])
    monkeypatch.setattr(repeat, "weights", lambda *_: next(results))
    assert repeat.main(words) == 1 and "4 runs, 1 differ" in capsys.readouterr().out
    torch.testing.assert_close(torch.load(tmp_path / "trpo-2.pt"), other, rtol=0, atol=0)
