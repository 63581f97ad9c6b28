"""W2: training speed of rppo_gru_atari.py and sb3-contrib's CnnLstmPolicy on the same work, in turn, in one run.

    taskset -c 0 python benchmarks/w2_atari.py            # needs the extras `atari` and `peers`; some five minutes
    taskset -c 0 python benchmarks/w2_atari.py --short    # two timed iterations
    python benchmarks/w2_atari.py --sections memory       # peak memory with 64 environments x 128 steps
    python benchmarks/w2_atari.py --sections cores        # two cores: as two threads, as two processes of torchrun

Breakout, 8 environments x 128 steps, 4 epochs, 4 minibatches of 2 environments' whole rollouts, one grey 84 x 84 frame,
Nature CNN 512 and one recurrent layer of 128 that actor and critic share. `per-step loop` is ours in float32 with the
memory replayed row by row, the state zeroed after final rows, and plain convolutions: the usual way to write it. The
peer plays the same ale_py vector environment as ours, which is faster than its own wrappers.

Each system is a process of its own, since rppo_gru_atari.py sets two things for its process that the peer would profit from,
too: which functions MKL takes, and what glibc does with freed memory. The processes train in turn, an iteration each, while
the others wait, so that a host whose speed changes changes it for all. SPS are environment steps a second of training; the
first round is left out. `cpu` is by the process's CPU time, which on a core that others use, too, says more.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import machine  # noqa: E402


@dataclass
class Options:
    iterations: int = 20  # timed iterations of each system, in turn; of each run of the cores section
    short: bool = False  # two iterations
    threads: int = 1  # torch threads of every system
    sections: tuple[str, ...] = ("speed",)  # speed, memory, cores
    out: str | None = None  # file for the figures (JSON)
    one: str | None = None  # used by the speed section, each of whose systems is a process of its own
    memory_of: str | None = None  # used by the memory section, likewise


def load_script():
    spec = importlib.util.spec_from_file_location("rppo_gru_atari", ROOT / "rppo_gru_atari.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rppo_gru_atari"] = module
    spec.loader.exec_module(module)
    return module


clocks = [0.0, 0.0]  # of the wall and of the process, when this turn began


def turn(steps: int) -> None:
    """Ends this process's turn, in which it took so many environment steps, and waits for its next one."""
    wall, cpu = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    print(json.dumps({"steps": steps, "wall": wall, "cpu": cpu}), flush=True)
    sys.stdin.readline() or sys.exit()
    clocks[:] = time.perf_counter(), time.process_time()


def ours(threads: int, loop: bool = False, **flags) -> None:
    module = load_script()

    def forward(self, x, state, final):
        outputs = []
        for row, end in zip(x, final):
            output, state = self.step(row, state)
            outputs.append(output)
            state = state * (~end[:, None])
        return torch.stack(outputs)

    compute_gae = module.compute_gae

    def ticking(rewards, values, terminated, done, *rest):  # once an iteration; a row after a done one is no step
        turn(int(rewards.numel() - done.sum()))
        return compute_gae(rewards, values, terminated, done, *rest)

    module.compute_gae = ticking
    if loop:
        module.ResetGRU.forward = forward
        module.ColumnConv2d = torch.nn.Conv2d
        channels_last = module.Encoder.__init__
        module.Encoder.__init__ = lambda self, *inputs: channels_last(self, *inputs) or setattr(
            self, "cnn", self.cnn.to(memory_format=torch.contiguous_format))
    module.train(module.Args(env_id="ALE/Breakout-v5", torch_threads=threads, runs_dir=tempfile.mkdtemp(),
                             checkpoint_every=10**6, **flags))  # fmt: skip


def peer(threads: int) -> None:
    from ale_py import AtariVectorEnv
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv

    class Games(VecEnv):
        """ale_py's vector environment as sb3's; its autoreset is that of sb3."""

        def __init__(self):
            self.envs = AtariVectorEnv("breakout", 8, stack_num=1, num_threads=threads, autoreset_mode="SameStep")
            super().__init__(8, self.envs.single_observation_space, self.envs.single_action_space)
            self.render_mode = None

        def reset(self):
            return self.envs.reset(seed=1)[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            obs, rewards, terminated, truncated, info = self.envs.step(self.actions)
            done, infos = terminated | truncated, [{} for _ in range(8)]
            for n in np.flatnonzero(done):
                infos[n] = {"terminal_observation": info["final_obs"][n], "TimeLimit.truncated": not terminated[n]}
            return obs, rewards.astype(np.float32), done, infos

        def close(self):
            self.envs.close()

        def get_attr(self, name, indices=None):
            return [None] * 8

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

        def env_method(self, name, *args, indices=None, **kwargs):
            raise NotImplementedError

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * 8

    class Turns(BaseCallback):
        def _on_rollout_end(self):
            turn(1024)

        def _on_step(self):
            return True

    torch.set_num_threads(threads)
    policy = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": []}
    model = RecurrentPPO("CnnLstmPolicy", Games(), n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4,
                         clip_range=0.1, ent_coef=0.01, seed=1, device="cpu", policy_kwargs=policy)  # fmt: skip
    model.learn(10**9, Turns())


SYSTEMS = {
    "ours, float32": ours,
    "ours, --amp": partial(ours, amp=True),
    "per-step loop": partial(ours, loop=True),
    "sb3-contrib": peer,
}


def speed(threads: int, iterations: int) -> dict[str, list[dict[str, float]]]:
    """Each system's turns, without its start and its first iteration."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for _ in range(iterations + 2):
            for name in SYSTEMS:
                if name not in processes:
                    processes[name] = subprocess.Popen(
                        [sys.executable, __file__, "--one", name, "--threads", str(threads)], stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "TMPDIR": folder},
                    )  # fmt: skip
                else:
                    print(file=processes[name].stdin, flush=True)
                line = next(line for line in processes[name].stdout if line.startswith('{"steps"'))
                turns[name].append(json.loads(line))
        for process in processes.values():
            process.kill()
            process.wait()
    return {name: of[2:] for name, of in turns.items()}


def from_shell(processes: int, threads: int, iterations: int, *flags: str) -> float:
    """Steps a second of wall time of the script on `processes * threads` cores, under torchrun if there are several."""
    cores = ",".join(map(str, range(processes * threads)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = ["taskset", "-c", cores, sys.executable, *launcher, str(ROOT / "rppo_gru_atari.py"), *flags,
                   "--env-id", "ALE/Breakout-v5", "--torch-threads", str(threads), "--runs-dir", folder, "--run-name", "w2",
                   "--checkpoint-every", "1000000", "--total-timesteps", str(int(1024 * (iterations + 0.5)))]  # fmt: skip
        subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        return json.loads(Path(folder, "w2", "result.json").read_text())["sps"]


def memory(threads: int) -> dict[str, float]:
    """Peak resident memory of a whole process that trains with 64 environments x 128 steps, and after its imports."""
    peak = {}
    for what in "imports", "float32", "amp":
        command = [sys.executable, __file__, "--memory-of", what, "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        peak[what] = float(done.stdout.split()[-1])
    return {**peak, "observations": 129 * 64 * 84 * 84 / 2**20}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.one:
        SYSTEMS[options.one](options.threads)
    if options.memory_of:
        module = load_script()
        if options.memory_of != "imports":
            with tempfile.TemporaryDirectory() as folder:
                module.train(module.Args(
                    env_id="ALE/Breakout-v5", num_envs=64, amp=options.memory_of == "amp", total_timesteps=1,
                    update_epochs=1, torch_threads=options.threads, runs_dir=folder, run_name="w2",
                ))  # fmt: skip
        # Not getrusage: its maximum is inherited from the process that started this one.
        peak = next(line for line in Path("/proc/self/status").read_text().split("\n") if line.startswith("VmHWM"))
        print(int(peak.split()[1]) / 2**10)
        return
    iterations = 2 if options.short else options.iterations
    figures: dict = {"machine": machine(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
                     "threads": options.threads, "iterations": iterations}  # fmt: skip
    if "speed" in options.sections:
        turns = speed(options.threads, iterations)
        seconds = {name: np.array([[t["wall"], t["cpu"]] for t in of]) for name, of in turns.items()}
        steps = {name: np.mean([t["steps"] for t in of]) for name, of in turns.items()}
        figures["speed"] = {"turns": turns, "sps": {}, "ratio": {}}
        for name, of in seconds.items():
            per_second = steps[name] / np.median(of, 0)
            ratios = steps[name] / of / (steps["sb3-contrib"] / seconds["sb3-contrib"])  # round by round
            low, ratio, high = np.percentile(ratios, [25, 50, 75], axis=0)
            figures["speed"]["sps"][name], figures["speed"]["ratio"][name] = per_second.tolist(), ratio.tolist()
            print(f"{name:14} {per_second[0]:5,.0f} steps/s, {ratio[0]:.2f} x sb3-contrib (quartiles {low[0]:.2f}, {high[0]:.2f}); "
                  f"cpu {per_second[1]:5,.0f}, {ratio[1]:.2f} ({low[1]:.2f}, {high[1]:.2f})", flush=True)  # fmt: skip
    if "cores" in options.sections:
        layouts = [(1, 1), (1, 2), (2, 1)]
        sps: dict[str, list[float]] = {}
        for _ in range(3):
            for flags in [], ["--amp"]:
                for layout in layouts:
                    name = "{} processes x {} threads {}".format(*layout, " ".join(flags)).strip()
                    sps.setdefault(name, []).append(from_shell(*layout, iterations, *flags))
        figures["cores"] = {"medians": {name: statistics.median(x) for name, x in sps.items()}, "runs": sps}
        for name, median in figures["cores"]["medians"].items():
            print(f"{name:32} {median:7,.0f}   {[round(x) for x in sps[name]]}", flush=True)
    if "memory" in options.sections:
        figures["memory_mib"] = memory(options.threads)
        print("peak memory, MiB:", {name: round(x) for name, x in figures["memory_mib"].items()})
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
