"""ppo1_mpi.py on several ranks. One job of three ranks carries the assertions about numbers: this
file is what each of its ranks runs. Two more jobs are about how a job ends."""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from support import MODULES, ROOT, assert_same, main, read, record

pytest.importorskip("mpi4py")
module = MODULES["ppo1_mpi"]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
PATH = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
PPO = dict(num_envs=2, learning_rate=0.03, ent_coef=0.02, vf_coef=0.7, clip_coef=0.1, seq_len=8,
           total_timesteps=250, num_steps=24, num_minibatches=2)  # fmt: skip


def mpiexec(count, *command, cwd, timeout=300):
    words = [str(MPIEXEC), "-prepend-rank", "-n", str(count), sys.executable, *map(str, command)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, cwd=cwd, env=PATH, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()  # mpiexec then ends all of its session: the ranks, too
        process.communicate()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


# --- What each rank of the job does ----------------------------------------------------------------


def union(comm, name, toy=None, tolerance=1e-9, **flags):
    """Trains on the ranks; rank 0 compares all of them with one process that has all rollouts."""
    from test_train import agree

    seen = record("ppo1_mpi", ".", comm=comm, run_name=name, toy=toy, **{**PPO, **flags})
    seen.agent.args = None  # what can't be sent
    agent, seen.agent = seen.agent, seen.agent.action_space
    everyone = comm.gather(seen)
    for first, last in comm.allgather((seen.first, seen.last)):
        assert_same(first, seen.first)  # ranks are equal bit for bit
        assert_same(last, seen.last)
    if comm.rank == 0:
        for other in everyone:
            other.agent = agent  # for its action space
        assert len({str(x.steps[0]) for x in everyone}) == comm.size  # each has its own episodes
        assert len({x.rng.numpy().tobytes() for x in everyone}) == comm.size  # and noise
        for other in everyone[1:]:
            other.result = None
        return agree("ppo1_mpi", everyone, tolerance)


def job_two_ranks(comm):
    union(comm.Split(int(comm.rank < 2), comm.rank), f"two{comm.rank // 2}")


def job_three_ranks_with_memory_and_statistics(comm):
    union(comm, "three", memory="lstm", norm_obs=True)


def job_real_actions(comm):
    union(comm, "box", toy={"actions": "box"}, norm_obs=False)


def job_an_early_stop_is_everyones(comm):
    """Each rank has another KL; one that left the loop alone would leave the others waiting."""
    expected = union(comm, "stop", target_kl=0.004, update_epochs=9, anneal_lr=False)
    if comm.rank == 0:
        lengths = [[len(rows) for _, rows, _ in log] for log in expected.logs]
        assert lengths[0] == lengths[1] == lengths[2] and min(lengths[0]) < 18


def job_a_rank_on_which_no_step_counts(comm):
    """Minibatches of two steps, both of them final on some ranks: gradient and metrics are 0."""
    flags = dict(num_envs=1, num_steps=4, seq_len=1, total_timesteps=60)
    expected = union(comm, "empty", toy={"length": 1}, **flags)
    if comm.rank == 0:
        rows = [[not any(row) for _, rows, _ in log for row in rows] for log in expected.logs]
        assert any(any(row) and not all(row) for row in zip(*rows))


def job_a_rank_out_of_step_is_found_by_one_bit(comm):
    """-0 is not 0. A NaN is equal to itself."""
    said = []
    for zero in 0.0, -0.0 if comm.rank == 1 else 0.0:
        agent = torch.nn.ParameterList(
            torch.tensor(x) for x in (1.0, float("nan"), zero)
        ).requires_grad_(False)
        try:
            module.check_synced(agent, comm)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    expected = "the weights of rank 1 are not those of rank 0" if comm.rank == 1 else ""
    assert said == ["", expected]


def job_a_resumed_job_is_the_one_never_stopped(comm):
    """Bit for bit; and another number of ranks continues it, too."""
    clock = {"actions": "discrete", "clock": True, "length": 23}
    flags = dict(env_id="support:Toy-v0", env_kwargs=json.dumps(clock), num_steps=24, seq_len=8,
                 num_minibatches=3, eval_episodes=0, memory="lstm", hidden_size=8)  # fmt: skip
    total = 4 * 23 * comm.size
    save = module.Run.save

    class Run(module.Run):
        def log(self, *inputs):
            super().log(*inputs)
            if self.step == total // 2 and self.comm.rank == 0:
                kept = self.dir
                self.dir = Path(str(kept).replace("whole", "half"))
                self.dir.mkdir(exist_ok=True)
                save(self)
                self.dir = kept

    patched, module.Run = module.Run, Run
    try:
        module.train(module.Args(run_name="whole", total_timesteps=total, **flags))
    finally:
        module.Run = patched
    comm.barrier()
    saved = read("runs/half")
    assert saved["step"] == total // 2 and len(saved["rng"]) == comm.size
    assert len({x.numpy().tobytes() for x in saved["rng"]}) == comm.size
    module.train(module.Args(**{**saved["args"], "resume": "runs/half"}))
    comm.barrier()
    for part in "agent", "optimizer", "rng", "step", "returns":
        assert_same(read("runs/half")[part], read("runs/whole")[part])
    two = comm.Split(int(comm.rank < 2), comm.rank)
    if comm.rank < 2:
        world, module.world = module.world, lambda: two
        module.train(
            module.Args(**{**saved["args"], "resume": "runs/half", "total_timesteps": 2 * total})
        )
        module.world = world
        two.barrier()
        assert read("runs/half")["step"] >= 2 * total and len(read("runs/half")["rng"]) == 2


JOBS = {
    name.removeprefix("job_"): f for name, f in list(globals().items()) if name.startswith("job_")
}


def run_jobs() -> None:
    """On each rank: all jobs. The first that fails anywhere ends them all: ranks are out of step."""
    comm = module.world()
    for name, job in JOBS.items():
        try:
            job(comm)
        except Exception:
            print(
                f"rank {comm.rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True
            )
            comm.Abort(1)


# --- The tests -------------------------------------------------------------------------------------


def test_ranks_are_one_process_with_the_union_of_their_rollouts(tmp_path):
    """All jobs above, each on all of its ranks."""
    done = mpiexec(3, __file__, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_fault_of_one_rank_ends_the_job_with_its_traceback(tmp_path):
    """Rank 1's simulator explodes while the others wait for its gradient."""
    code = """
import json, sys, time
from pathlib import Path
import support, ppo1_mpi as module
fault = {"fault": "raise"} if module.world().rank == 1 else {}
class Toy(support.Toy):
    def __init__(self):
        super().__init__(**fault)
    def step(self, action):
        if self.life == 39 and fault:
            Path("fault").touch()
        return super().step(action)
support.gym.register("Rank1-v0", Toy)
sys.argv[0] = module.__file__
module.main()"""
    flags = (
        "--env-id Rank1-v0 --num-steps 32 --total-timesteps 3000 --run-name a --no-preset".split()
    )
    done = mpiexec(3, "-c", code, *flags, cwd=tmp_path)
    assert time.time() - (tmp_path / "fault").stat().st_mtime < 20
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "[1] Traceback" in done.stderr and "RuntimeError: the simulator exploded" in done.stderr
    advice = f"to continue: mpiexec -n 3 python {ROOT}/ppo1_mpi.py --resume {tmp_path}/runs/a"
    assert advice in done.stderr
    assert module.load(tmp_path / "runs/a")["step"] == 0


def test_wrong_flags_are_answered_once(tmp_path):
    done = mpiexec(2, ROOT / "ppo1_mpi.py", "--num-minibatches", "7", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: --num-minibatches: must divide the 256 sequences") == 1
    assert not (tmp_path / "runs").exists()


def test_without_mpi_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    code, out, err = main(tmp_path, "ppo1_mpi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("; pip install mpi4py mpich\n")


if __name__ == "__main__":
    run_jobs()
