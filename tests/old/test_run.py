"""The reliability contract: seeds, kill and resume, wrong input, faults during a run, what a run leaves."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import MODULES, ROOT

# A short real run of each script: the flags that make it short.
SHORT = {
    "rppo_lstm": "--env-id CartPole-v1 --mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 16",
    "rppo_continuous": "--env-id Pendulum-v1 --mask-velocity --preset none --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 16",
    "rppo_gru_atari": "--env-id ALE/Pong-v5 --amp --torch-threads 1 --max-episode-frames 160 --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 16 --update-epochs 1",
    "trpo": "--env-id CartPole-v1 --mask-velocity --memory lstm --num-envs 4 --num-steps 32 --hidden-size 16 --cg-max-steps 5 --n-critic-updates 3",
    "ppo1_mpi": "--env-id CartPole-v1 --mask-velocity --preset none --memory lstm --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 16",
}
RUNS = list(SHORT)
# Of 1500 steps of it: at least so many episodes, and returns between these.
LEAVES = {"rppo_lstm": (11, 8, 500), "rppo_continuous": (4, -2000, 0), "rppo_gru_atari": (20, -3, 3), "trpo": (11, 8, 500), "ppo1_mpi": (11, 8, 500)}
TESTS = {"PYTHONPATH": str(ROOT / "tests")}


def weights(run_dir):
    return torch.load(run_dir / "agent.pt", weights_only=True)["agent"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("script", RUNS)
def test_what_a_run_leaves(script, run_script, tmp_path):
    flags = f"{SHORT[script]} --total-timesteps 1500 --run-name a --eval-episodes 3 --eval-every 1000 --checkpoint-every 99".split()
    done = run_script(script, *flags)
    run_dir = tmp_path / "runs" / "a"
    result = json.loads((run_dir / "result.json").read_text())
    assert set(result) >= {
        "global_step", "wall_seconds", "sps", "rollout_seconds", "update_seconds", "episodes", "mean_return_100",
        "eval_mean_return", "eval_std_return",
    }  # fmt: skip
    assert 1500 <= result["global_step"] < 1500 + 4 * 32
    episodes, low, high = LEAVES[script]
    assert result["episodes"] >= episodes
    assert low < result["mean_return_100"] < high and low <= result["eval_mean_return"] <= high
    seconds = result["rollout_seconds"] + result["update_seconds"]  # of all iterations but the first
    assert 0.5 * result["global_step"] / seconds < result["sps"] <= result["global_step"] / seconds
    assert done.stdout.count("\n") == 1 + ("preset" in done.stdout) and done.lines == []
    assert json.loads((run_dir / "args.json").read_text())["num_envs"] == 4
    assert (run_dir / "checkpoint.pt").exists() and not list(run_dir.glob("*.tmp"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    ppo = {"losses/policy_loss", "losses/approx_kl", "losses/clipfrac"}
    own = {"trpo": {"losses/kl", "losses/improvement", "losses/expected_improvement", "losses/step_fraction",
                    "losses/line_search_success"}}  # fmt: skip
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate",
            "charts/eval_return", "losses/value_loss", "losses/entropy", "losses/explained_variance",
            *own.get(script, ppo)} <= set(events.Tags()["scalars"])  # fmt: skip
    assert len(events.Scalars("charts/eval_return")) == 1
    # A second run of that name must not touch the first.
    again = run_script(script, *flags, check=2)
    assert "--run-name a" in again.stderr and again.stderr.count("\n") == 1


@pytest.mark.parametrize("script", RUNS)
def test_same_seed_same_weights_other_seed_others(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = MODULES[script]
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        module.main([*SHORT[script].split(), "--total-timesteps", "700", "--seed", str(seed), "--run-name", name])
    a, b, c = (weights(tmp_path / "runs" / name) for name in "abc")
    assert same(a, b) and not same(a, c)


@pytest.mark.parametrize("script", RUNS)
def test_kill_at_a_random_moment_then_resume_is_the_run_never_stopped(script, tmp_path, run_script, start_script):
    steps = 1500 if "atari" in script else 6000
    flags = f"{SHORT[script]} --total-timesteps {steps} --checkpoint-every 7".split()
    run_script(script, *flags, "--run-name", "whole")
    process = start_script(script, *flags, "--run-name", "killed")
    checkpoint = tmp_path / "runs/killed/checkpoint.pt"
    process.wait_for(checkpoint)
    while MODULES[script].load(str(checkpoint))["run"]["iteration"] == 0:  # the first one has nothing to forget yet
        time.sleep(0.02)
    time.sleep(random.Random(os.getpid()).uniform(0.0, 1.0))
    process.kill()
    process.wait()
    run_script(script, "--resume", "runs/killed")
    assert same(weights(tmp_path / "runs" / "whole"), weights(tmp_path / "runs" / "killed"))


@pytest.mark.parametrize("script", RUNS)
@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_signals_end_a_run_with_one_line(script, tmp_path, number, code, vectorization, start_script):
    process = start_script(script, *SHORT[script].split(), "--run-name", "a", "--vectorization", vectorization)
    process.wait_for(tmp_path / "runs/a/checkpoint.pt")
    time.sleep(0.3)
    started = time.time()
    process.kill(number, group=number == signal.SIGINT)  # as a terminal does
    process.wait(20)
    assert process.returncode == code and time.time() - started < 5
    assert len(process.lines) == 1, process.stderr
    assert "--resume runs/a" in process.lines[0] and "runs/a/checkpoint.pt" in process.lines[0]


WRONG = {
    "rppo_lstm": [
        ("--env-id Nope-v1", "--env-id Nope-v1: Environment `Nope` doesn't exist"),
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id Pendulum-v1", "rppo_continuous.py"),
        ("--env-id nomodule:Nope-v1", "nomodule"),
        ("--num-envs 6", "--num-minibatches 4: must divide the 6 sequences"),
        ("--seq-len 48", "--seq-len 48: must divide --num-steps 128"),
        ("--num-envs 0", "--num-envs 0: must be"),
        ("--num-steps -1", "--num-steps -1: must be"),
        ("--hidden-size 0", "--hidden-size 0"),
        ("--encoder-sizes 64 0", "--encoder-sizes"),
        ("--gamma 1.5", "--gamma 1.5: must be at most 1"),
        ("--learning-rate nan", "--learning-rate nan: must be a finite number"),
        ("--clip-coef -0.2", "--clip-coef -0.2: must be"),
        ("--seed -3", "--seed -3"),
        ("--mask-velocity --env-id Acrobot-v1", "--mask-velocity: Acrobot"),
        ("--runs-dir file/x", "--runs-dir file/x"),
        ("--resume nowhere", "nowhere"),
        ("--play nowhere.pt", "nowhere.pt"),
        ("--init-from file", "file"),
    ],
    "rppo_gru_atari": [
        ("--env-id CartPole-v1", "--env-id CartPole-v1: not an Atari game like ALE/Pong-v5; use rppo_lstm.py"),
        ("--env-id ALE/Nope-v5", "--env-id ALE/Nope-v5: Environment `Nope` doesn't exist"),
        ("--env-id ALE/Pong-v9", "versioned environments: [ `v5` ]"),
        ("--num-envs 6", "--num-minibatches 4: must divide the 6 sequences"),
        ("--frame-stack 0", "--frame-stack 0: must be a finite number, at least 1"),
        ("--sticky-actions 1.5", "--sticky-actions 1.5: must be at most 1"),
        ("--max-episode-frames 0", "--max-episode-frames 0"),
        ("--learning-rate nan", "--learning-rate nan: must be a finite number"),
        ("--runs-dir file/x", "--runs-dir file/x"),
        ("--resume nowhere", "nowhere"),
    ],
    "rppo_continuous": [
        ("--env-id Nope-v1", "--env-id Nope-v1: Environment `Nope` doesn't exist"),
        ("--env-id CartPole-v1", "rppo_lstm.py"),
        ("--log-std-init -30", "--log-std-init -30.0: must be a finite number, at least -20"),
        ("--sde-sample-freq -2", "--sde-sample-freq -2: must be a finite number, at least -1"),
        ("--num-envs 6", "--num-minibatches 4: must divide the 6 sequences"),
        ("--learning-rate nan", "--learning-rate nan: must be a finite number"),
        ("--mask-velocity --env-id Acrobot-v1", "--mask-velocity: Acrobot"),
        ("--resume nowhere", "nowhere"),
    ],
    "trpo": [
        ("--env-id Nope-v1", "--env-id Nope-v1: Environment `Nope` doesn't exist"),
        ("--env-id CartPole-v1 --use-sde", "--use-sde True: CartPole-v1 has the actions Discrete(2)"),
        ("--target-kl -0.1", "--target-kl -0.1: must be a finite number"),
        ("--cg-max-steps 0", "--cg-max-steps 0: must be a finite number, at least 1"),
        ("--line-search-shrinking-factor 1.5", "--line-search-shrinking-factor 1.5: must be at most 1"),
        ("--batch-size 0", "--batch-size 0: must be"),
        ("--cg-damping nan", "--cg-damping nan: must be a finite number"),
        ("--mask-velocity --env-id Acrobot-v1", "--mask-velocity: Acrobot"),
        ("--resume nowhere", "nowhere"),
    ],
    "ppo1_mpi": [
        ("--env-id Nope-v1", "--env-id Nope-v1: Environment `Nope` doesn't exist"),
        ("--num-minibatches 7", "--num-minibatches 7: must divide the 256 rows of a rank's rollout"),
        ("--memory lstm --num-minibatches 3", "--num-minibatches 3: must divide the 16 sequences of a rank's rollout"),
        ("--memory lstm --seq-len 48", "--seq-len 48: must divide --num-steps 256"),
        ("--memory lstm --pretrain file", "--pretrain file: imitates row by row; needs --memory none"),
        ("--record file", "--record file: records what --play shows"),
        ("--pretrain file", "--pretrain file: "),
        ("--pretrain nowhere.npz", "--pretrain nowhere.npz: "),
        ("--num-steps 0", "--num-steps 0: must be"),
        ("--gamma 1.5", "--gamma 1.5: must be at most 1"),
        ("--reward-scale nan", "--reward-scale nan: must be a finite number"),
        ("--mask-velocity --env-id Acrobot-v1", "--mask-velocity: Acrobot"),
        ("--runs-dir file/x", "--runs-dir file/x"),
        ("--resume nowhere", "nowhere"),
        ("--play nowhere.pt", "nowhere.pt"),
        ("--init-from file", "file"),
    ],
}


@pytest.mark.parametrize("script,flags,expected", [(s, *case) for s in WRONG for case in WRONG[s]])
def test_wrong_input_is_one_line_and_exit_code_2_before_any_work(script, flags, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a checkpoint")
    with pytest.raises(SystemExit) as stop:
        MODULES[script].main(flags.split())
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert expected in stderr and stderr.count("\n") == 1, stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", RUNS)
@pytest.mark.parametrize("package,env_id", [("minigrid", "MiniGrid-MemoryS9-v0"), ("ale_py", "ALE/Pong-v5")])
def test_a_missing_extra_is_named_with_its_pip_command(script, package, env_id, tmp_path, monkeypatch, capsys):
    if script == "rppo_gru_atari" and package != "ale_py":
        pytest.skip("it has Atari games only")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:
        MODULES[script].main(["--env-id", env_id])
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and f"pip install {package.replace('_', '-')}" in stderr and stderr.count("\n") == 1


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("script", RUNS)
def test_checkpoints_that_cannot_be_used(script, tmp_path, monkeypatch, capsys):
    """Truncated, flipped, hostile, another script's, another environment's, another shape's: one line, no code run."""
    monkeypatch.chdir(tmp_path)
    module = MODULES[script]
    module.main([*SHORT[script].split(), "--total-timesteps", "200", "--run-name", "good"])
    good = (tmp_path / "runs/good/agent.pt").read_bytes()
    contents = torch.load(tmp_path / "runs/good/agent.pt", weights_only=True)

    def refused(name, expected, *flags):
        with pytest.raises(SystemExit) as stop:
            module.main([*SHORT[script].split(), "--total-timesteps", "200", *flags])
        stderr = capsys.readouterr().err
        assert stop.value.code == 2 and stderr.count("\n") == 1 and expected in stderr, (name, stderr)

    capsys.readouterr()
    (tmp_path / "bad.pt").write_bytes(good[: len(good) // 2])
    refused("truncated", "bad.pt", "--init-from", "bad.pt")
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 16
    (tmp_path / "bad.pt").write_bytes(flipped)
    refused("flipped", "bad.pt", "--init-from", "bad.pt")
    torch.save({**contents, "agent": Evil()}, tmp_path / "bad.pt")
    refused("hostile", "bad.pt", "--init-from", "bad.pt")
    assert not (tmp_path / "evil").exists()
    torch.save({**contents, "script": "another"}, tmp_path / "bad.pt")
    refused("another script", "another.py wrote it", "--init-from", "bad.pt")
    refused("another shape", "runs/good", "--init-from", "runs/good", "--hidden-size", "24")
    refused("another environment", "--env-id Acrobot-v1", "--resume", "runs/good", "--env-id", "Acrobot-v1",
            *(["--no-mask-velocity"] if "mask" in SHORT[script] else []))  # fmt: skip
    module.main([*SHORT[script].split(), "--total-timesteps", "200", "--run-name", "warm", "--init-from", "runs/good"])


@pytest.mark.parametrize("script", RUNS)
@pytest.mark.parametrize("fault", ["Raise", "Exit", "NanObservation", "NanReward"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_faults_during_a_run(script, fault, vectorization, run_script, tmp_path):
    if (fault, vectorization) == ("Exit", "sync"):
        pytest.skip("that environment ends the whole process")
    if script == "rppo_gru_atari":
        pytest.skip("it has Atari games only; test_atari.py makes them fail")
    flags = SHORT[script].split()[3 if "mask" in SHORT[script] else 2 :]
    prefix = "Box" if script in ("rppo_continuous", "trpo", "ppo1_mpi") else ""
    done = run_script(script, "--env-id", f"test_envs:{prefix}Faulty{fault}-v0", *flags, "--run-name", "a",
                      "--checkpoint-every", "2", "--vectorization", vectorization, check=1, env=TESTS)  # fmt: skip
    words = {"Raise": "exploded", "Exit": "EOFError", "NanObservation": "observation", "NanReward": "reward"}
    assert len(done.lines) == 1, done.stderr
    assert words[fault] in done.lines[0] and "iteration" in done.lines[0] and "--resume runs/a" in done.lines[0]
    checkpoint = torch.load(tmp_path / "runs/a/checkpoint.pt", weights_only=True)
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize("script", RUNS)
def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        MODULES[script].main([*SHORT[script].split(), "--learning-rate", "1e30", "--run-name", "a"])
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert stop.value.code == 1 and "not finite in iteration" in last and "--resume runs/a" in last


@pytest.mark.parametrize("script", RUNS)
def test_a_full_disk_leaves_the_last_good_checkpoint(script, tmp_path, monkeypatch, capsys):
    """The second checkpoint fails half way, as it does on a full disk."""
    monkeypatch.chdir(tmp_path)
    module, calls = MODULES[script], []
    real = os.fsync

    def full(fd):
        calls.append(fd)
        if len(calls) == 2:
            os.ftruncate(fd, 100)
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as stop:
        module.main([*SHORT[script].split(), "--checkpoint-every", "2", "--run-name", "a"])
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert stop.value.code == 1 and "No space left" in last and "--resume runs/a" in last
    assert module.load("runs/a")["run"]["iteration"] == 0


@pytest.mark.parametrize("script", RUNS)
def test_a_script_alone_in_an_empty_folder_trains_and_asks_for_no_network(script, tmp_path):
    (tmp_path / "alone.py").write_text((ROOT / f"{script}.py").read_text())
    blocker = "import socket\ndef refuse(*a, **k): raise OSError('network')\nsocket.socket.connect = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    command = [sys.executable, "alone.py", *SHORT[script].split(), "--total-timesteps", "300", "--run-name", "a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert "# /// script" in (tmp_path / "alone.py").read_text()[:200]


@pytest.mark.parametrize("script", RUNS)
def test_help_shows_every_flag_with_the_dataclass_default_or_the_presets(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    module = MODULES[script]
    presets = {name: preset for name, preset in getattr(module, "PRESETS", {}).items() if "-v" in name}
    cases = [(["--env-id", name], preset) for name, preset in presets.items()]
    cases += [(["--preset", "none"], {})] if presets else [([], {})]
    for flags, preset in cases:
        with pytest.raises(SystemExit) as stop:
            module.main([*flags, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0
        for field in module.Args.__dataclass_fields__.values():
            flag = f"--{field.name.replace('_', '-')}"
            shown = re.search(rf"^\W  ?{flag}[ ,].*?\(default: (.*?)\)\W*\n", text, re.S | re.M)
            assert shown, flag
            if field.name not in ("env_id", "mask_velocity"):  # which name the preset
                value = preset.get(field.name, field.default)
                expected = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                assert shown[1] == expected, (flags, flag, shown[0])


@pytest.mark.parametrize("script", RUNS)
def test_every_argument_is_read(script):
    source = (ROOT / f"{script}.py").read_text()
    for field in MODULES[script].Args.__dataclass_fields__:
        assert f"args.{field}" in source or f"early.{field}" in source, field


@pytest.mark.parametrize("script", RUNS)
def test_track_works_offline(script, run_script, tmp_path):
    pytest.importorskip("wandb")
    flags = f"{SHORT[script]} --total-timesteps 200 --run-name a --track".split()
    run_script(script, *flags, env={"WANDB_MODE": "offline"})
    assert list((tmp_path / "runs/a/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("script", RUNS)
def test_play_prints_returns_and_films(script, run_script, tmp_path):
    run_script(script, *f"{SHORT[script]} --total-timesteps 300 --run-name a".split())
    shown = run_script(script, "--play", "runs/a", "--eval-episodes", "2", env={"SDL_VIDEODRIVER": "dummy"})
    assert shown.stdout.count("return") == 2
    pytest.importorskip("moviepy")
    filmed = run_script(script, "--play", "runs/a", "--eval-episodes", "2", "--capture-video")
    assert filmed.stdout == shown.stdout  # same seed, same episodes
    assert len(list((tmp_path / "runs/a/videos").glob("*.mp4"))) == 2


@pytest.mark.parametrize("script", ["rppo_gru_atari"])
def test_the_rank_of_torchrun_is_not_the_local_rank(script, monkeypatch):
    """The second process of the second machine of two."""
    module, joined = MODULES[script], []
    for name, value in ("RANK", 3), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *inputs, **options: joined.append(inputs))
    rank, world, device = module.join_processes(module.Args())
    assert (rank, world, device.type) == (3, 4, "cpu") and joined == [("gloo",)]
