"""Faults: environments that fail, numbers that are not finite, Ctrl-C, kill -9, full disks, damaged
files, two runs of one name."""

import os
import random
import re
import resource
import signal
import time

import pytest
from conftest import MODULES
from test_run import RUNS, SHORT, STEPS, TESTS, assert_same, main, read, scalars, toy, trained

TWENTY = pytest.param(20, marks=pytest.mark.slow)


@pytest.fixture
def saves_often(monkeypatch):
    """Makes a script save after every iteration, as if 60 seconds had passed."""
    return lambda script: monkeypatch.setattr(MODULES[script].Run, "saved", ALWAYS, raising=False)


ALWAYS = property(lambda self: -100.0, lambda self, now: None)
OFTEN = "import {0} as s\ns.Run.saved = property(lambda self: -100.0, lambda self, now: None)\ns.main()\n"


def finite(run_dir) -> bool:
    return all(x.isfinite().all() for x in read(run_dir)["agent"].values())


CASES = {  # what FAULT does in the environment of index 2, and what is said of it
    "init": "RuntimeError: the simulator exploded in __init__",
    "reset": "RuntimeError: the simulator exploded in reset",
    "step": "RuntimeError: the simulator\nexploded in step",
    "assert": 'assert self.fault != "assert"',
    "exit": "EOFError",
    "leave": "SystemExit",  # without our care: exit code 0, and not a word
    "obs": "FloatingPointError: obs[2, 1] is nan",
    "reward": "FloatingPointError: rewards[2] is nan",
    "infinite": "FloatingPointError: rewards[2] is -inf",
}


@pytest.mark.parametrize("mode", ["", "--async-envs"])
@pytest.mark.parametrize("fault", CASES)
@pytest.mark.parametrize("script", RUNS)
def test_environments_that_fail(script, fault, mode, tmp_path, start_script):
    """The user's own traceback, how to continue, exit code 1, within 20 seconds; then it does."""
    if fault == "exit" and not mode:
        pytest.skip("it would be the training's own process")
    if fault == "leave" and mode:
        pytest.skip("as exit: the process of an environment ends")
    flags = [*toy(script, "Faulty").split(), "--run-name", "a", *mode.split()]
    done = start_script(script, *flags, env={**TESTS, "FAULT": fault}).wait(20)
    assert done.returncode == 1 and done.stdout == "" and CASES[fault] in done.stderr, done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    if fault in ("init", "reset", "step", "assert"):
        assert re.search(r'envs\.py", line \d+, in ', done.stderr), done.stderr
    advice = [line for line in done.lines if "--resume" in line]
    if fault == "init":
        assert advice == [] and not (tmp_path / "runs").exists()
        return
    assert len(advice) == 1 and advice[0].endswith(f".py --resume {tmp_path}/runs/a"), done.stderr
    assert fault == "exit" or done.lines[-1] == advice[0]  # Gymnasium adds a warning there
    assert finite(tmp_path / "runs/a") and read(tmp_path / "runs/a")["step"] == 0
    if not mode:  # the environment is mended
        assert trained(tmp_path, script, "--resume runs/a --total-timesteps 200")["step"] >= 200


@pytest.mark.parametrize("script", RUNS)
def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch, saves_often):
    """A reward of 1e30 in the second iteration: its square is infinite in float32."""
    saves_often(script)
    monkeypatch.setenv("FAULT", "huge")
    raw = "--no-norm-reward" if hasattr(MODULES[script].Args, "norm_reward") else ""
    flags = f"{toy(script, 'Faulty')} {raw} --run-name a --total-timesteps {4 * STEPS}"
    code, _, err = main(tmp_path, script, flags)
    assert code == 1 and f"after step {STEPS}, " in err, err
    assert re.search(r"FloatingPointError: .*'value_loss'.*\[[15]\] is inf\n", err), err
    assert read(tmp_path / "runs/a")["step"] == STEPS and finite(tmp_path / "runs/a")


@pytest.mark.parametrize("script", RUNS)
def test_observations_outside_their_space_are_warned_of(script, tmp_path, run_script):
    done = run_script(script, *toy(script, "Outside").split(), check=1, env=TESTS)
    assert "is not within the observation space" in done.stderr and "IndexError" in done.stderr


@pytest.mark.parametrize("mode", ["", "--async-envs"])
@pytest.mark.parametrize("script", RUNS)
def test_control_c(script, mode, tmp_path, start_script):
    process = start_script(script, *SHORT[script].split(), "--run-name", "a", *mode.split())
    process.wait_for(tmp_path / "runs/a/agent.pt")
    time.sleep(0.5)
    workers, started = process.children, time.time()
    process.kill(signal.SIGINT, group=True)  # as a terminal does
    process.wait(20)
    assert process.returncode == 130 and time.time() - started < 5
    own, *rest = process.lines
    assert own.endswith(f".py --resume {tmp_path}/runs/a"), process.stderr
    after = "\n".join(rest)  # with async environments Gymnasium may say that they were busy
    busy = "WARN: Calling `close` while waiting", "gymnasium/vector/async_vector_env.py"
    assert after == "" or mode and any(words in after for words in busy), after
    assert f"{script}.py" not in after, after  # no traceback of ours
    assert len(workers) >= (4 if mode else 0)
    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)


@pytest.mark.parametrize("count", [1, TWENTY])
@pytest.mark.parametrize("script", RUNS)
def test_kill_9_and_resume_is_the_run_never_stopped(script, count, tmp_path, start_script):
    """A run that saves after every iteration, killed at random moments on its way."""
    total = STEPS * (80 if count == 1 else 300)
    flags = f"{toy(script, 'Clock')} --total-timesteps {total} --run-name"
    whole = trained(tmp_path, script, flags, "whole")
    (tmp_path / f"{script}_often.py").write_text(OFTEN.format(script))
    often = tmp_path / f"{script}_often"
    env = {"PYTHONPATH": f"{MODULES[script].__file__.rsplit('/', 1)[0]}:{TESTS['PYTHONPATH']}"}
    run_dir, file = tmp_path / "runs/killed", tmp_path / "runs/killed/agent.pt"
    generator, step, written, kills = random.Random(os.getpid()), 0, None, 0
    next_flags = f"{flags} killed"
    while kills < count:
        process = start_script(often, *next_flags.split(), env=env)
        while not file.exists() or file.stat().st_mtime_ns == written:
            assert process.returncode is None, process.stderr
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 0.6))
        process.kill()
        process.wait()
        assert process.returncode == -9, "the run is too short for so many kills"
        kills, written = kills + 1, file.stat().st_mtime_ns
        saved = MODULES[script].load(run_dir)
        assert saved["step"] >= step
        step = saved["step"]
        logged = list(scalars(run_dir).get("charts/SPS", []))
        # No point is lost before the file's step, and the file is never an iteration older.
        assert logged in (
            [*range(STEPS, step + 1, STEPS)],
            [*range(STEPS, step + STEPS + 1, STEPS)],
        )
        next_flags = "--resume runs/killed"
    start_script(often, *next_flags.split(), env=env).wait()
    end = read(run_dir)
    for part in "agent", "optimizer", "rng", "step", "returns":
        assert_same(end[part], whole[part])
    assert list(scalars(run_dir)["losses/entropy"]) == [*range(STEPS, total + 1, STEPS)]
    print(f"{script}: {kills} kills, the last at step {step} of {total}")


@pytest.mark.parametrize("script", RUNS)
def test_a_full_disk_leaves_the_last_good_file(script, tmp_path, monkeypatch, saves_often):
    """The third save fails half way."""
    saves_often(script)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            os.ftruncate(descriptor, 100)
            raise OSError(28, "No space left on device")
        real(descriptor)

    flags = f"{toy(script, 'Clock')} --total-timesteps {4 * STEPS} --run-name"
    whole = trained(tmp_path, script, flags, "whole")
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, out, err = main(tmp_path, script, flags, "a")
    assert code == 1 and out == "" and "OSError: [Errno 28] No space left" in err, err
    assert MODULES[script].load(tmp_path / "runs/a")["step"] == STEPS  # the second
    assert_same(trained(tmp_path, script, "--resume runs/a")["agent"], whole["agent"])


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_disk_that_is_full_at_a_random_byte(script, tmp_path, start_script):
    """Files may have so many bytes only; what is called agent.pt loads."""
    (tmp_path / f"{script}_often.py").write_text(OFTEN.format(script))
    env = {"PYTHONPATH": f"{MODULES[script].__file__.rsplit('/', 1)[0]}:{TESTS['PYTHONPATH']}"}
    flags = f"{toy(script, 'Clock')} --hidden-size 1 --encoder-size 1".split()
    trained(tmp_path, script, *flags, "--total-timesteps 200 --run-name whole")
    size, generator = (tmp_path / "runs/whole/agent.pt").stat().st_size, random.Random(0)
    steps = []
    for number in range(20):  # in agent.pt, or in TensorBoard's growing events
        most = generator.randrange(4000, size) if number % 4 else 2 * size
        limits = {resource.RLIMIT_FSIZE: most}
        process = start_script(
            tmp_path / f"{script}_often", *flags, "--run-name", number, env=env, limits=limits
        )
        process.wait(60)
        assert process.returncode == 1 and "File too large" in process.stderr, process.stderr
        file = tmp_path / f"runs/{number}/agent.pt"
        steps.append(MODULES[script].load(file.parent)["step"] if file.exists() else None)
        assert most < size or steps[-1] >= STEPS
    assert {None, 0} < set(steps)  # before the first save, in the second, which has Adam's moments


def corruptions(data: bytes, count: int):
    """Flipped bits, cut tails, holes of zeros, overwritten and exchanged pieces."""
    generator = random.Random(count)
    for number in range(count):
        bad = bytearray(data)
        at, size = generator.randrange(len(bad)), generator.randrange(1, 200)
        piece = slice(at, min(at + size, len(bad)))
        if number % 5 == 0:
            bad[at] ^= 1 << generator.randrange(8)
        elif number % 5 == 1:
            del bad[at:]
        elif number % 5 == 2:
            bad[piece] = bytes(piece.stop - at)
        elif number % 5 == 3:
            bad[piece] = generator.randbytes(piece.stop - at)
        else:
            other = generator.randrange(len(bad))
            bad[at], bad[other] = bad[other], bad[at]
        yield bytes(bad)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", RUNS)
def test_a_damaged_file_is_refused_or_loads_right(script, count, tmp_path):
    """Never wrong weights or arguments, and never another error than the one line's."""
    module = MODULES[script]
    trained(tmp_path, script, SHORT[script], "--total-timesteps 100 --run-name a --eval-episodes 1")
    file = tmp_path / "runs/a/agent.pt"
    data, good, refused = file.read_bytes(), module.load(file.parent), 0
    for bad in corruptions(data, count):
        file.write_bytes(bad)
        try:
            contents = module.load(file.parent)
        except module.ArgumentError as error:
            refused += 1
            assert str(file) in str(error)
        else:
            assert_same(contents["agent"], good["agent"])
            assert contents["args"] == good["args"] and contents["step"] == good["step"]
    assert refused > 0.6 * count


@pytest.mark.parametrize("count", [1, TWENTY])
@pytest.mark.parametrize("script", RUNS)
def test_of_two_runs_with_one_name_one_wins(script, count, tmp_path, start_script):
    """Started at the same moment with other seeds: one trains as if alone, the other says why not."""
    flags = f"{SHORT[script]} --total-timesteps 200 --eval-episodes 1"
    alone = [
        trained(tmp_path, script, flags, f"--seed {seed} --run-name {seed}") for seed in (1, 2)
    ]
    for number in range(count):
        pair = [
            start_script(script, *flags.split(), "--seed", seed, "--run-name", f"pair{number}")
            for seed in (1, 2)
        ]
        codes = [process.wait().returncode for process in pair]
        assert sorted(codes) == [0, 2], [process.stderr for process in pair]
        [line] = pair[codes.index(2)].lines
        assert line.startswith("error: ") and line.endswith("(--resume continues a run)")
        assert f"runs/pair{number}'" in line
        winner = read(tmp_path / f"runs/pair{number}")
        assert_same(winner["agent"], alone[codes.index(0)]["agent"])
        assert_same(winner["rng"], alone[codes.index(0)]["rng"])
