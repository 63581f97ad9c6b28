"""Faults in random places and at random moments: corrupt files, kills, full disks, environments, two runs of one name.

`FAULTS=faults.json pytest -m "" tests/test_faults.py` writes how many of each were tried and survived.
"""

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from conftest import MODULES
from test_run import RUNS, SHORT, TESTS, same, weights

TWENTY = pytest.param(20, marks=pytest.mark.slow)


@pytest.fixture
def note():
    """Writes a figure into the file that FAULTS names, if any: of `tried` faults so many ended as they should."""

    def write(script: str, fault: str, tried: int, survived: int) -> None:
        print(f"{script}: {fault}: {survived} of {tried}")
        if "FAULTS" in os.environ:
            with open(os.environ["FAULTS"], "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # pytest's workers share it
                file.seek(0)
                figures = json.loads(file.read() or "{}")
                if tried >= figures.setdefault(fault, {}).get(script, {"tried": 0})["tried"]:  # not the quick suite's one
                    figures[fault][script] = {"tried": tried, "survived": survived, "lost": tried - survived}
                file.truncate(0)
                file.write(json.dumps(figures, indent=1, sort_keys=True))
        assert survived == tried

    return write


def corruptions(data: bytes, count: int, seed: int):
    """Flipped bits, cut tails, holes of zeros, overwritten and exchanged pieces."""
    generator = random.Random(seed)
    for number in range(count):
        bad = bytearray(data)
        at, size = generator.randrange(len(bad)), generator.randrange(1, 200)
        kind = number % 5
        if kind == 0:
            bad[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del bad[at:]
        elif kind == 2:
            bad[at : at + size] = bytes(len(bad[at : at + size]))
        elif kind == 3:
            bad[at : at + size] = generator.randbytes(len(bad[at : at + size]))
        else:
            other = generator.randrange(len(bad))
            bad[at], bad[other] = bad[other], bad[at]
        yield bytes(bad)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", RUNS)
def test_a_corrupt_checkpoint_is_refused_or_loads_right(script, count, tmp_path, monkeypatch, note):
    """Never wrong weights, and never another error than the one line's."""
    monkeypatch.chdir(tmp_path)
    module = MODULES[script]
    module.main([*SHORT[script].split(), "--total-timesteps", "200", "--run-name", "a"])
    path = tmp_path / "runs" / "a" / "agent.pt"
    data, good = path.read_bytes(), module.load("runs/a")
    refused, right = 0, 0
    for bad in corruptions(data, count, count):
        path.write_bytes(bad)
        try:
            contents = module.load("runs/a")
        except module.ArgumentError as error:
            refused += "\n" not in str(error)
        else:
            right += same(contents["agent"], good["agent"]) and contents["args"] == good["args"]
    assert refused > 0.6 * count
    note(script, "corrupt file", count, refused + right)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("script", RUNS)
def test_twenty_stops_and_resumes_end_as_the_run_never_stopped(script, number, tmp_path, run_script, start_script, note):
    """One run, killed or terminated at 20 random moments on its way: the same weights at its end, bit for bit."""
    steps, every = (1500, 1) if "atari" in script else (12_000, 2)
    flags = f"{SHORT[script]} --total-timesteps {steps} --checkpoint-every {every}".split()
    run_script(script, *flags, "--run-name", "whole")
    seconds = json.loads((tmp_path / "runs/whole/result.json").read_text())["wall_seconds"]
    generator, checkpoint, good = random.Random(0), tmp_path / "runs/stopped/checkpoint.pt", 0
    next_flags, before = [*flags, "--run-name", "stopped"], None
    for _ in range(20):
        process = start_script(script, *next_flags)
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:  # the first thing that a run writes
            assert process.returncode is None, process.stderr
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, seconds / 20))
        process.kill(number)
        process.wait(20)
        loads = MODULES[script].load(str(checkpoint))["run"]["iteration"] % every == 0
        ended = process.returncode == -9 if number == signal.SIGKILL else (
            process.returncode == 143 and len(process.lines) == 1 and "--resume runs/stopped" in process.lines[0]
        )  # fmt: skip
        good += loads and ended
        next_flags, before = ["--resume", "runs/stopped"], checkpoint.stat().st_mtime_ns
    run_script(script, *next_flags)
    equal = same(weights(tmp_path / "runs/whole"), weights(tmp_path / "runs/stopped"))
    note(script, "kill -9 and resume" if number == signal.SIGKILL else "SIGTERM and resume", 20, good if equal else 0)


@pytest.mark.parametrize("count", [1, TWENTY])
@pytest.mark.parametrize("script", RUNS)
def test_a_disk_that_is_full_at_a_random_byte(script, count, tmp_path, run_script, start_script, note):
    """Files may have so many bytes only: the run ends with one line, and what it leaves under a file's name loads."""
    flags = [*SHORT[script].split(), "--checkpoint-every", 2, "--hidden-size", 1]  # small checkpoints
    flags += [] if "atari" in script else ["--encoder-sizes", 1]
    run_script(script, *flags, "--total-timesteps", 200, "--run-name", "whole")
    size = (tmp_path / "runs/whole/checkpoint.pt").stat().st_size
    generator, good = random.Random(count), 0
    for number in range(1, count + 1):  # in a checkpoint, or, where these are small, in TensorBoard's growing events
        most = generator.randrange(4000, size) if number % 10 or size > 10**6 else size + 500
        process = start_script(script, *flags, "--run-name", number, limits={resource.RLIMIT_FSIZE: most})
        process.wait(120)
        assert process.returncode == 1 and len(process.lines) == 1, process.stderr
        assert "File too large" in process.lines[0]
        left = [file for name in ("agent.pt", "checkpoint.pt") if (file := tmp_path / f"runs/{number}/{name}").exists()]
        assert ("--resume" in process.lines[0]) == bool(left)
        good += all(MODULES[script].load(str(file))["script"] == script for file in left)
    note(script, "full disk", count, good)


@pytest.mark.parametrize("script", RUNS)
def test_runs_dirs_that_cannot_be_written(script, tmp_path, monkeypatch, capsys, run_script, start_script, note):
    """Below a file, in a file system that takes no files, and a run directory that is moved away."""
    (tmp_path / "file").write_text("")
    good = 0
    monkeypatch.chdir(tmp_path)
    for runs_dir in "file/runs", "/proc/runs":
        with pytest.raises(SystemExit) as stop:
            MODULES[script].main([*SHORT[script].split(), "--runs-dir", runs_dir])
        stderr = capsys.readouterr().err
        good += stop.value.code == 2 and f"--runs-dir {runs_dir}: " in stderr and stderr.count("\n") == 1
    process = start_script(script, *SHORT[script].split(), "--run-name", "a", "--checkpoint-every", 2)
    process.wait_for(tmp_path / "runs/a/checkpoint.pt")
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    process.wait(60)
    assert process.returncode == 1 and len(process.lines) == 1 and "No such file" in process.lines[0], process.stderr
    good += MODULES[script].load(str(tmp_path / "elsewhere/a/checkpoint.pt"))["script"] == script
    note(script, "no place to write", 3, good)


@pytest.mark.parametrize("count", [1, TWENTY])
@pytest.mark.parametrize("script", [script for script in RUNS if "atari" not in script])
def test_environments_that_fail_at_a_random_step(script, count, tmp_path, start_script, note):
    """They raise, return NaN or end their process: one line within seconds, and a checkpoint of finite weights."""
    generator, good = random.Random(count), 0
    flags = SHORT[script].split()[3 if "mask" in SHORT[script] else 2 :]
    prefix = "Box" if script in ("rppo_continuous", "trpo", "ppo1_mpi") else ""
    words = {"Raise": "exploded", "NanObservation": "observation is not finite", "NanReward": "reward is not finite", "Exit": "EOFError"}
    for number in range(count):
        fault = list(words)[number % 4]
        environment = {**TESTS, "FAULT_AT": str(generator.randrange(1, 400))}
        process = start_script(script, "--env-id", f"test_envs:{prefix}Faulty{fault}-v0", *flags, "--run-name", number,
                               "--checkpoint-every", 2, "--vectorization", "async" if number % 4 == 3 or number % 3 else "sync",
                               env=environment).wait(60)  # fmt: skip
        assert process.returncode == 1 and len(process.lines) == 1, process.stderr
        assert words[fault] in process.lines[0] and f"--resume runs/{number}" in process.lines[0]
        saved = torch.load(tmp_path / f"runs/{number}/checkpoint.pt", weights_only=True)
        good += all(x.isfinite().all() for x in saved["agent"].values())
    note(script, "environment fails", count, int(good))


@pytest.mark.parametrize("count", [1, TWENTY])
def test_games_that_raise_at_a_random_step(count, tmp_path, monkeypatch, capsys, note):
    """rppo_gru_atari has one native environment for all games; its step raises."""
    from ale_py import AtariVectorEnv

    module, real, good = MODULES["rppo_gru_atari"], AtariVectorEnv.step, 0
    monkeypatch.chdir(tmp_path)
    for number in range(count):
        steps, at = [], random.Random(number + count).randrange(1, 100)

        def step(self, actions, steps=steps, at=at):
            steps.append(actions)
            if len(steps) == at:
                raise RuntimeError("the emulator\nexploded")
            return real(self, actions)

        monkeypatch.setattr(AtariVectorEnv, "step", step)
        with pytest.raises(SystemExit) as stop:
            module.main([*SHORT["rppo_gru_atari"].split(), "--run-name", str(number), "--checkpoint-every", "1"])
        line = capsys.readouterr().err.strip().split("\n")[-1]
        iteration, row = divmod(at - 1, 32)
        assert f"row {row} of iteration {iteration}" in line and "exploded" in line
        good += stop.value.code == 1 and module.load(f"runs/{number}")["run"]["iteration"] == iteration
    note("rppo_gru_atari", "environment fails", count, good)


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in RUNS if "atari" not in script])
def test_an_async_worker_killed_at_a_random_moment(script, tmp_path, start_script, note):
    """kill -9 of an environment's process: the run ends with one line of its own (Gymnasium's other workers may add theirs)."""
    generator, good = random.Random(0), 0
    for number in range(10):
        process = start_script(script, *SHORT[script].split(), "--run-name", number, "--vectorization", "async")
        process.wait_for(tmp_path / f"runs/{number}/checkpoint.pt")
        time.sleep(generator.uniform(0, 0.5))
        os.kill(generator.choice(process.children), signal.SIGKILL)
        started = time.time()
        process.wait(30)
        own = [line for line in process.lines if line.startswith("error: the environment raised")]
        assert process.returncode == 1 and len(own) == 1 and process.lines[0] == own[0], process.stderr
        good += time.time() - started < 10 and f"--resume runs/{number}" in own[0]
    note(script, "async worker killed", 10, good)


@pytest.mark.parametrize("count", [1, TWENTY])
@pytest.mark.parametrize("script", RUNS)
def test_of_two_runs_with_one_name_one_wins(script, count, tmp_path, run_script, start_script, note):
    """Started at the same moment with other seeds: one trains as if it were alone, the other says why it cannot."""
    flags, good = f"{SHORT[script]} --total-timesteps 200".split(), 0
    for seed in 1, 2:
        run_script(script, *flags, "--seed", seed, "--run-name", f"alone{seed}")
    for number in range(count):
        pair = [start_script(script, *flags, "--seed", seed, "--run-name", number) for seed in (1, 2)]
        codes = [process.wait().returncode for process in pair]
        assert sorted(codes) == [0, 2], [process.stderr for process in pair]
        winner = codes.index(0)
        assert pair[1 - winner].lines == [
            f"error: --run-name {number}: runs/{number} exists; --resume continues it"
        ], pair[1 - winner].stderr
        good += same(weights(tmp_path / f"runs/{number}"), weights(tmp_path / f"runs/alone{winner + 1}"))
    note(script, "two runs of one name", count, good)
