"""Faults at random moments: corrupted files, kills. The counts are printed; `-m slow` runs the long ones."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch
from conftest import MODULES, ROOT
from test_run import RUNS, SHORT, same, weights


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
        yield kind, bytes(bad)


@pytest.mark.parametrize("script", RUNS)
def test_a_corrupt_checkpoint_is_refused_or_loads_right(script, tmp_path, monkeypatch):
    """500 corruptions (60 of a large file): never wrong weights, never another error than the one line's."""
    monkeypatch.chdir(tmp_path)
    module = MODULES[script]
    module.main([*SHORT[script].split(), "--total-timesteps", "200", "--run-name", "a"])
    path = tmp_path / "runs" / "a" / "agent.pt"
    data, good = path.read_bytes(), module.load("runs/a")
    refused, loaded, count = 0, 0, 500 if len(data) < 2**20 else 60
    for kind, bad in corruptions(data, count, 0):
        path.write_bytes(bad)
        try:
            contents = module.load("runs/a")
        except module.ArgumentError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            loaded += 1
            assert same(contents["agent"], good["agent"]) and contents["args"] == good["args"], kind
    print(f"{script}: {count} corruptions, {refused} refused, {loaded} loaded right")
    assert refused > 0.6 * count


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_twenty_kills_and_resumes(script, tmp_path, run_script):
    """One run, killed at 20 random moments on its way, ends with the weights of a run that was never stopped."""
    flags = f"{SHORT[script]} --total-timesteps 12000 --checkpoint-every 3".split()
    run_script(script, *flags, "--run-name", "whole")
    generator, command = random.Random(0), [sys.executable, str(ROOT / f"{script}.py")]
    next_flags, kills = [*flags, "--run-name", "killed"], 0
    for _ in range(20):
        process = subprocess.Popen([*command, *next_flags], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(generator.uniform(1.5, 6.0))
        process.kill()
        process.communicate()
        kills += 1
        if (tmp_path / "runs/killed/checkpoint.pt").exists():
            next_flags = ["--resume", "runs/killed"]
        elif (tmp_path / "runs/killed").exists():  # killed between making the folder and the first checkpoint
            os.rename(tmp_path / "runs/killed", tmp_path / f"runs/early{kills}")
    run_script(script, *next_flags)
    assert same(weights(tmp_path / "runs/whole"), weights(tmp_path / "runs/killed"))
    checkpoint = torch.load(tmp_path / "runs/killed/checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["global_step"] > 0
