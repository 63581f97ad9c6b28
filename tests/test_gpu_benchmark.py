"""benchmarks/gpu.py: what is measured, in which order, within the time, and where the rows go."""

import sys
import time

import pytest
import torch
from conftest import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/tools")]
import gpu  # noqa: E402


@pytest.fixture
def report(tmp_path):
    return gpu.Report(tmp_path, "cpu")


def all_jobs(report, sizes, tmp_path) -> list[gpu.Job]:
    jobs = gpu.atari_jobs(report, sizes) + gpu.parts_jobs(report, sizes)
    jobs += gpu.lstm_jobs(report, sizes) + gpu.resets_jobs(tmp_path, sizes)
    return jobs + gpu.peers_jobs(report, sizes)


def test_a_training_ends_when_its_seconds_have_passed():
    """Two iterations at least, the first not counted; the script is left as it was."""
    run_class = gpu.rppo_lstm.Run
    flags = "--num-envs 4 --num-steps 8 --hidden-size 8 --update-epochs 1 --torch-threads 1"
    began = time.perf_counter()
    steps, sps = gpu.train_for(gpu.rppo_lstm, flags, 0)
    took = time.perf_counter() - began
    assert 28 <= steps <= 32 and len(sps) == 1 and sps[0] > steps / took
    _, longer = gpu.train_for(gpu.rppo_lstm, flags, 1.0)
    assert len(longer) > 1
    assert gpu.rppo_lstm.Run is run_class
    with pytest.raises(gpu.rppo_lstm.ArgumentError):
        gpu.train_for(gpu.rppo_lstm, "--num-minibatches 3", 0)
    assert gpu.rppo_lstm.Run is run_class


def test_all_that_is_asked_for_fits_into_eight_minutes(report, tmp_path):
    """The GPU's figures come before those that they are compared with, the goal's first."""
    jobs = gpu.in_order(all_jobs(report, gpu.FULL, tmp_path), gpu.SECTIONS)
    names = [job.name for job in jobs]
    assert sum(job.seconds for job in jobs) <= 480
    assert names[0] == "64 games, --cuda --amp"
    on_cpu = [i for i, name in enumerate(names) if "CPU" in name]
    assert max(i for i, name in enumerate(names) if "--cuda" in name) < min(on_cpu)
    for games in 8, 64, 256:
        assert {f"{games} games, {x}" for x in ("--cuda --amp", "--cuda", "CPU")} <= {*names}
    carts = {f"{n} CartPoles, {h} units, --cuda" for n in (64, 512, 4096) for h in (128, 512)}
    assert carts <= {*names} and "4096 CartPoles, 512 units, CPU" not in names
    only = gpu.in_order(jobs, ["resets"])
    assert [job.section for job in only] == ["resets", "resets"]


def test_flags_say_where_a_training_runs():
    assert gpu.FULL.flags("--cuda --amp") == "--num-steps 128 --cuda --amp"
    assert gpu.FULL.flags("CPU") == "--num-steps 128 --torch-threads 0"
    assert "--cuda" not in gpu.DRY.flags("--cuda --amp")


def test_what_no_longer_fits_is_named_and_a_failure_ends_nothing(capsys):
    now = [0.0]
    done = []

    def job(name: str, seconds: float, takes: float, error: Exception | None = None):
        def run():
            now[0] += takes
            done.append(name)
            if error:
                raise error

        return gpu.Job("atari", name, seconds, run)

    jobs = [
        job("one", 10, 30),
        job("two", 10, 10, RuntimeError("CUDA out of memory")),
        job("three", 25, 25),
        job("four", 20, 5),
    ]
    assert gpu.run_all(jobs, 1.0, lambda: now[0]) == 1
    assert done == ["one", "two", "four"]
    said = capsys.readouterr().out
    assert "failed: two: RuntimeError: CUDA out of memory" in said
    assert "left out: three (about 25 s" in said


def test_rows_have_the_columns_of_throughput(report, tmp_path, capsys):
    report.add("gpu-atari", "64 games", "ours, --cuda --amp", 16_384, [6000.0, 9000.0, 7000.0])
    [row] = gpu.read(tmp_path / "throughput.csv")
    assert list(row) == gpu.FIELDS
    assert (row["sps"], row["median"], row["min"], row["max"]) == (
        "6000 9000 7000",
        "7000",
        "6000",
        "9000",
    )
    assert row["machine"].startswith("no card; ") and torch.__version__ in row["note"]
    said = gpu.verdicts(report.medians)
    assert said[0].startswith("reached: 6,800 ") and said[1].startswith("missed: 20,000 ")
    assert gpu.verdicts({}) == []


def test_the_parts_of_an_iteration_sum_to_it():
    pytest.importorskip("ale_py")
    torch.manual_seed(0)
    found = gpu.parts(4, False, gpu.DRY)
    assert {"games", "acting", "CNN", "GRU", "the rest", "iteration"} <= {*found}
    assert all(len(found[name]) == gpu.REPEATS for name in ("games", "CNN", "GRU"))
    middle = {name: sorted(took)[len(took) // 2] for name, took in found.items()}
    whole = middle.pop("iteration")
    middle.pop("the rollout from pinned memory, instead")
    assert sum(middle.values()) == pytest.approx(whole)
    assert min(middle["games"], middle["CNN"], middle["GRU"]) > 0


@pytest.mark.parametrize("flags, said", [
    ("", "torch finds no GPU; --dry runs everything"),
    ("--dry atary", "atary: must be one of atari, parts, lstm, resets, peers"),
])  # fmt: skip
def test_a_wrong_start_is_one_line(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_dry_run_writes_nothing_here(monkeypatch, capsys):
    before = {path: path.read_bytes() for path in (ROOT / "benchmarks/results").iterdir()}
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "lstm"])
    gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("gpu-lstm ") for line in lines) == 4
    assert before == {path: path.read_bytes() for path in (ROOT / "benchmarks/results").iterdir()}


def test_games_are_started_once_and_then_reset():
    pytest.importorskip("ale_py")
    args = gpu.rppo_gru_atari.Args(env_id="ALE/Breakout-v5")
    make_envs = gpu.rppo_gru_atari.make_envs
    with gpu.games_kept():
        envs = gpu.rppo_gru_atari.make_envs(args, 2)
        first = envs.reset(seed=1)[0]
        envs.step(envs.action_space.sample())
        envs.close()
        again = gpu.rppo_gru_atari.make_envs(args, 2)
        assert again is envs and (again.reset(seed=1)[0] == first).all()
        assert gpu.rppo_gru_atari.make_envs(args, 1) is not envs
    assert gpu.rppo_gru_atari.make_envs is make_envs


def test_a_page_shows_the_machine_that_was_measured_last(tmp_path, monkeypatch):
    """Works in the order of their sizes; the latest row of each; a system that was not measured
    leaves its place empty."""
    pytest.importorskip("matplotlib")
    import fill

    monkeypatch.setattr(fill.plot, "RESULTS", tmp_path)
    common = {"commit": "abc", "section": "gpu-atari"}
    measured = [
        ("old card", "64 games", "ours, --cuda", 1),
        ("new card", "64 games", "ours, --cuda", 2),
        ("new card", "8 games", "ours, --cuda", 3),
        ("new card", "64 games", "sb3-contrib", 4.4),
        ("new card", "64 games", "ours, --cuda", 5000),
    ]
    names = "machine", "work", "system", "median"
    rows = [common | dict(zip(names, values)) for values in measured]
    gpu.append(tmp_path / "throughput.csv", gpu.FIELDS, rows)
    lines = fill.gpu("atari").split("\n")
    assert lines[0] == "| steps a second | --cuda | sb3-contrib |"
    assert lines[2:4] == ["| 8 games | 3 |  |", "| 64 games | 5,000 | 4 |"]
    assert lines[5] == "Machine: new card. Commit: abc."

    about = {"commit": "abc", "cell": "gru", "batch": "16", "hidden": "8", "rate": "0.01"}
    measured = [
        ("EPYC, 2 cores", "ours", 9, 1),
        ("old card", "ours", 8, 1),
        ("new card", "ours", 2, 1),
        ("new card", "padded", 5, 2.51),
    ]
    names = "processor", "way", "ms", "over_ours"
    rows = [about | dict(zip(names, values)) for values in measured]
    gpu.append(tmp_path / "resets.csv", gpu.resets.FIELDS, rows)
    lines = fill.gpu("resets").split("\n")
    assert lines[0] == "| cell, sequences, units | fused reset | padded |"
    assert lines[2:] == [
        "| GRU, 16, 8 | 2.0 ms | 2.5 |",
        "",
        "Machine: new card. Commit: abc.",
        "{.measured}",
    ]
