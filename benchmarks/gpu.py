"""Training speed on a GPU, in eight minutes: everything to measure when a GPU is at hand.

    python benchmarks/gpu.py                # all sections, the most important figures first
    python benchmarks/gpu.py atari parts    # some sections
    python benchmarks/gpu.py --dry          # all of it, tiny, on the CPU; writes nothing here

atari   rppo_gru_atari.py at Breakout with 8, 64 and 256 environments: on the GPU in float32 (whose
        products have TF32's 10 bits in cuDNN, as torch has it) and with --amp, and on all cores
parts   where an iteration with 64 environments goes, in milliseconds: the games, transfers to the
        GPU, acting, and the CNN, the GRU and Adam in all minibatches. Each part is timed alone,
        waiting for the GPU; "the rest" is what an iteration takes beyond their sum, and is negative
        where they overlap. A rollout's transfer from pinned memory is listed for comparison
lstm    rppo_lstm.py at CartPole, in Gymnasium's own vector form, with 64, 512 and 4,096
        environments and 128 and 512 units, on the GPU and on all cores
resets  the fused reset beside a loop, segments, padding and packing: benchmarks/resets.py on CUDA
peers   sb3-contrib's RecurrentPPO on the GPU with 64 games of Breakout, if it is installed

Our scripts train in this process by the function that the command line calls, for some seconds and
at least two iterations; the first does not count. Rows go to results/throughput.csv, named after the
card and the processor, and those of resets to results/resets.csv. What no longer fits into --minutes
is left out, and named.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import NamedTuple

import numpy as np
import resets
import torch
import tyro
from learning import RESULTS, ROOT, append, commit, machine, read
from throughput import FIELDS, make_games

sys.path.insert(0, str(ROOT))
import rppo_gru_atari  # noqa: E402
import rppo_lstm  # noqa: E402

SECTIONS = ["atari", "parts", "lstm", "resets", "peers"]
ATARI = "--env-id ALE/Breakout-v5"
CARTPOLE = "--env-id CartPole-v1"
TARGETS = {  # environment steps a second of --amp with 64 environments
    6_800: "LeanRL's feed-forward PPO on an H100",
    20_000: "our goal",
}
WAYS = {  # of benchmarks/resets.py
    "ours", "no resets", "loop of cells", "loop of calls", "segments", "padded", "packed",
}  # fmt: skip
REPEATS = 3  # of each part


class Sizes(NamedTuple):
    """What differs between a measurement and a dry run."""

    device: str
    seconds: float  # of a training
    num_steps: int  # of a rollout
    games: list[int]
    carts: list[int]
    units: list[int]
    resets: dict

    def flags(self, system: str) -> str:
        """Of a training: how long a rollout is, and where "--cuda --amp", say, or "CPU" trains."""
        common = f"--num-steps {self.num_steps}"
        if self.device == "cpu":
            return f"{common} --torch-threads 1 --update-epochs 1"
        if "CPU" in system:
            return f"{common} --torch-threads 0"
        return f"{common} {system}"


FULL = Sizes(
    device="cuda", seconds=6, num_steps=128, games=[64, 8, 256], carts=[64, 512, 4096],
    units=[128, 512],
    resets=dict(batches=[16, 256], hidden=[128, 512], rates=[0.0, 0.01, 0.1], rounds=5,
                steps=128, features=64),
)  # fmt: skip
DRY = Sizes(
    device="cpu", seconds=0, num_steps=4, games=[4], carts=[4, 8], units=[8],
    resets=dict(batches=[3], hidden=[8], rates=[0.0, 0.1], rounds=1, steps=12, features=5),
)  # fmt: skip


class Job(NamedTuple):
    """One thing to measure: its section, what is said of it, and how long it takes, about."""

    section: str
    name: str
    seconds: float
    run: Callable[[], None]


def train_for(module: ModuleType, flags: str, seconds: float) -> tuple[int, list[float]]:
    """Trains a script until so many seconds have passed, and for two iterations at least -> the
    steps of an iteration, and the steps a second of each but the first."""
    args = tyro.cli(module.Args, args=shlex.split(flags))
    timed: list[tuple[int, float]] = []
    began = time.perf_counter()

    class Limited(module.Run):  # type: ignore[name-defined]
        def log(self, steps, losses):
            super().log(steps, losses)
            timed.append(self.timed[-1])
            if len(timed) > 1 and time.perf_counter() - began > seconds:
                self.args.total_timesteps = self.step

    run_class = module.Run
    deterministic = torch.backends.cudnn.deterministic
    threads = torch.get_num_threads()
    sink = io.StringIO()  # the progress bar
    module.Run = Limited
    try:
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
                args.runs_dir = folder
                args.eval_episodes = 0
                args.total_timesteps = 10**9
                module.train(args)
    finally:
        module.Run = run_class
        torch.backends.cudnn.deterministic = deterministic
        torch.set_num_threads(threads)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return timed[0][0], [steps / took for steps, took in timed[1:]]


@contextlib.contextmanager
def games_kept():
    """Games of one number are started once, in a tenth of a second each, and then only reset."""
    make_envs = rppo_gru_atari.make_envs
    kept = {}

    def make_or_take(args, num_envs):
        if num_envs not in kept:
            kept[num_envs] = make_envs(args, num_envs)
            kept[num_envs].close = lambda: None
        return kept[num_envs]

    rppo_gru_atari.make_envs = make_or_take
    try:
        yield
    finally:
        rppo_gru_atari.make_envs = make_envs
        for envs in kept.values():
            type(envs).close(envs)


def milliseconds(work: Callable[[], object], device: str) -> list[float]:
    """Of REPEATS calls, after one that is not counted; the GPU is waited for."""
    took = []
    for _ in range(1 + REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(1000 * (time.perf_counter() - began))
    return took[1:]


def parts(num_envs: int, amp: bool, sizes: Sizes) -> dict[str, list[float]]:
    """The milliseconds of each part of an iteration of rppo_gru_atari.py with its defaults."""
    module = rppo_gru_atari
    system = "--cuda --amp" if amp else "--cuda"
    flags = f"{ATARI} --num-envs {num_envs} {sizes.flags(system)}"
    args = tyro.cli(module.Args, args=shlex.split(flags))
    device, T = sizes.device, sizes.num_steps
    updates = args.update_epochs * args.num_minibatches
    B = num_envs // args.num_minibatches  # whole rollouts
    torch.manual_seed(1)
    envs = module.make_envs(args, num_envs)
    agent = module.Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    obs = np.zeros((T, num_envs, 1, 84, 84), np.uint8)
    obs[:] = envs.reset(seed=1)[0]
    pinned = torch.from_numpy(obs)
    if device == "cuda":
        pinned = pinned.pin_memory()
    random = np.random.default_rng(1)
    actions = random.integers(0, envs.single_action_space.n, (T, num_envs))
    rollout = torch.as_tensor(obs, device=device)
    state = agent.initial_state(num_envs)
    frames = rollout[:, :B].clone()
    features = torch.rand(T, B, 512, device=device, requires_grad=True)
    final = torch.rand(T, B, device=device) < 0.002

    def games():
        for t in range(T):
            envs.step(actions[t])

    def transfer_of_steps():
        for t in range(T):
            torch.as_tensor(obs[t], device=device)

    @torch.inference_mode()
    def acting():
        for t in range(T):
            logp, _, _ = agent.step(rollout[t], state)
            module.to_env(module.sample(logp), envs.single_action_space)

    def cnn():
        for _ in range(updates):
            agent.encoder(frames).sum().backward()

    def gru():
        for _ in range(updates):
            agent.gru(features, state[:, :B].contiguous(), final).sum().backward()

    def adam():
        for _ in range(updates):
            torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

    for parameter in agent.parameters():
        parameter.grad = torch.zeros_like(parameter)
    works = {
        "games": games,
        "transfer of each step": transfer_of_steps,
        "acting": acting,
        "transfer of the rollout": lambda: torch.as_tensor(obs, device=device),
        "CNN": cnn,
        "GRU": gru,
        "gradient norm and Adam": adam,
    }
    found = {name: milliseconds(work, device) for name, work in works.items()}
    steps, sps = train_for(module, flags, sizes.seconds)
    iteration = 1000 * steps / median(sps)
    found["the rest"] = [iteration - sum(median(took) for took in found.values())]
    found["iteration"] = [iteration]
    from_pinned = milliseconds(lambda: pinned.to(device, non_blocking=True), device)
    found["the rollout from pinned memory, instead"] = from_pinned
    envs.close()
    return found


def contrib(num_envs: int, sizes: Sizes) -> tuple[int, list[float]]:
    """sb3-contrib's RecurrentPPO with our hyperparameters -> as train_for, of one iteration."""
    from ale_py import AtariVectorEnv
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback

    starts = []  # of rollouts

    class Clock(BaseCallback):
        def _on_rollout_start(self):
            starts.append(time.perf_counter())

        def _on_step(self):
            return True

    games = make_games(num_envs)
    games.envs = AtariVectorEnv("breakout", num_envs, stack_num=1, autoreset_mode="SameStep")
    steps = sizes.num_steps * num_envs
    shared = dict(lstm_hidden_size=128, shared_lstm=True, enable_critic_lstm=False, net_arch=[])
    model = RecurrentPPO(
        "CnnLstmPolicy", games, n_steps=sizes.num_steps, batch_size=steps // 4, n_epochs=4,
        learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, seed=1, device=sizes.device,
        policy_kwargs=shared,
    )  # fmt: skip
    model.learn(2 * steps, Clock())
    return steps, [steps / (time.perf_counter() - starts[1])]


class Report:
    """Prints figures, and appends them to throughput.csv."""

    def __init__(self, results: Path, device: str):
        self.path = results / "throughput.csv"
        card = torch.cuda.get_device_name() if device == "cuda" else "no card"
        self.about = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
        self.about["machine"] = f"{card}; {machine()}"
        self.note = f"torch {torch.__version__}"
        self.medians: dict[tuple[str, str, str], float] = {}

    def add(self, section, work, system, steps, figures, unit="SPS") -> None:
        """The figures are steps a second, or milliseconds where the unit says so."""
        low, middle, high = min(figures), median(figures), max(figures)
        self.medians[section, work, system] = middle
        print(f"{section:10}  {work:28}  {system:40} {middle:10,.1f} {unit} "
              f"({low:,.1f} to {high:,.1f})", flush=True)  # fmt: skip
        row = dict(self.about, section=section, work=work, system=system, steps=steps)
        row |= {"sps": " ".join(f"{x:.4g}" for x in figures), "note": f"{self.note}, {unit}"}
        row |= {"median": f"{middle:.4g}", "min": f"{low:.4g}", "max": f"{high:.4g}"}
        append(self.path, FIELDS, [row])


def training(report, sizes, section, work, system, module, flags) -> Callable[[], None]:
    """A job's `run`: trains, and reports."""

    def run() -> None:
        steps, sps = train_for(module, flags, sizes.seconds)
        report.add(section, work, f"ours, {system}", steps * len(sps), sps)

    return run


def atari_jobs(report: Report, sizes: Sizes) -> list[Job]:
    jobs = []
    for num_envs in sizes.games:
        work = f"{num_envs} games"
        for system in ("--cuda --amp", "--cuda", "CPU"):
            flags = f"{ATARI} --num-envs {num_envs} {sizes.flags(system)}"
            run = training(report, sizes, "gpu-atari", work, system, rppo_gru_atari, flags)
            seconds = 8 + 0.03 * num_envs
            if system == "--cuda --amp":  # starts the games
                seconds += 0.17 * num_envs
            if system == "CPU":  # two iterations of 128 steps at 2,000 steps a second
                seconds += 2 * 128 * num_envs / 2000
            jobs.append(Job("atari", f"{work}, {system}", seconds, run))
    return jobs


def parts_jobs(report: Report, sizes: Sizes) -> list[Job]:
    num_envs = sizes.games[0]
    jobs = []
    for name, amp in (("--amp", True), ("float32", False)):
        work = f"{num_envs} games, {name}"

        def run(work=work, amp=amp) -> None:
            steps = sizes.num_steps * num_envs
            for part, took in parts(num_envs, amp, sizes).items():
                report.add("gpu-parts", work, part, steps, took, "milliseconds an iteration")

        jobs.append(Job("parts", work, 16, run))
    return jobs


def lstm_jobs(report: Report, sizes: Sizes) -> list[Job]:
    """On the CPU without 4,096 environments of 512 units, which take half a minute an iteration."""
    jobs = []
    for system in ("--cuda", "CPU"):
        for num_envs in sizes.carts:
            for hidden in sizes.units:
                if system == "CPU" and num_envs * hidden > 10**6:
                    continue
                work = f"{num_envs} CartPoles, {hidden} units"
                flags = f"{CARTPOLE} --num-envs {num_envs} --hidden-size {hidden}"
                flags += f" {sizes.flags(system)}"
                run = training(report, sizes, "gpu-lstm", work, system, rppo_lstm, flags)
                jobs.append(Job("lstm", f"{work}, {system}", 10, run))
    return jobs


def resets_jobs(results: Path, sizes: Sizes) -> list[Job]:
    jobs = []
    for cell in resets.CELLS:

        def run(cell=cell) -> None:
            options = argparse.Namespace(cells=[cell], device=sizes.device, results=results)
            options.ways = [way for way in resets.WAYS if way.name in WAYS]
            vars(options).update(sizes.resets)
            resets.measure(options)
            wrong = resets.failures(read(results / "resets.csv"))
            if wrong:
                raise RuntimeError("not exact: " + "; ".join(wrong))

        jobs.append(Job("resets", f"{cell}: the fused reset beside other ways", 30, run))
    return jobs


def peers_jobs(report: Report, sizes: Sizes) -> list[Job]:
    num_envs = sizes.games[0]

    def run() -> None:
        if importlib.util.find_spec("sb3_contrib") is None:
            print("left out: sb3-contrib, which is not installed")
            return
        steps, sps = contrib(num_envs, sizes)
        report.add("gpu-atari", f"{num_envs} games", "sb3-contrib", steps, sps)

    return [Job("peers", f"{num_envs} games, sb3-contrib", 40, run)]


def in_order(jobs: list[Job], sections: list[str]) -> list[Job]:
    """Of these sections, the GPU's figures before those that they are compared with."""
    chosen = [job for job in jobs if job.section in sections]
    return sorted(chosen, key=lambda job: "CPU" in job.name)


def run_all(jobs: list[Job], minutes: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Runs the jobs that fit into the time -> how many failed. One that fails ends no other."""
    began = clock()
    failed = 0
    for job in jobs:
        if clock() - began + job.seconds > 60 * minutes:
            print(f"left out: {job.name} (about {job.seconds:.0f} s, and no time is left)")
            continue
        try:
            job.run()
        except Exception as error:  # out of memory, say
            failed += 1
            print(f"failed: {job.name}: {type(error).__name__}: {error}", flush=True)
    return failed


def verdicts(medians: dict[tuple[str, str, str], float]) -> list[str]:
    """What --amp with 64 games reaches of TARGETS; nothing where it was not measured."""
    reached = medians.get(("gpu-atari", "64 games", "ours, --cuda --amp"))
    if reached is None:
        return []
    said = []
    for target, whose in TARGETS.items():
        word = "reached" if reached >= target else "missed"
        said.append(f"{word}: {target:,} steps a second, {whose} ({reached:,.0f})")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8, help="all of it ends within these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU; writes nothing here")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(SECTIONS)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --dry runs everything, tiny, on the CPU")
    sizes = FULL
    if options.dry:
        sizes = DRY
        torch.set_num_threads(1)
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler says when it starts
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) if options.dry else options.results
        report = Report(results, sizes.device)
        print(f"{report.about['machine']}, {report.note}", flush=True)
        jobs = atari_jobs(report, sizes) + parts_jobs(report, sizes) + lstm_jobs(report, sizes)
        jobs += resets_jobs(results, sizes) + peers_jobs(report, sizes)
        with games_kept():
            failed = run_all(in_order(jobs, options.sections or SECTIONS), options.minutes)
    for line in verdicts(report.medians):
        print(line)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
