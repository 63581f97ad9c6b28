"""Training speed: environment steps a second (SPS), beside other libraries and other checkouts.

    python benchmarks/speed.py w1 w3                       # results/throughput.csv
    python benchmarks/speed.py w1 w1-pendulum w2 w3 w4 --against ../f77c437  # is ours slower now?
    python benchmarks/speed.py gpu-games gpu-atari gpu-lstm  # where there is a GPU: some ten minutes
    python benchmarks/speed.py w1 w3 --dry                 # the first work of each, tiny

w1           CartPole, LSTM 128 shared by actor and critic, 4 epochs, 4 minibatches of whole
             rollouts, beside sb3-contrib and skrl; then sb3-contrib's defaults: the critic has its
             own LSTM, hidden 256, 10 epochs, 128 steps a minibatch (our layer of 64 is before the
             LSTM, its two after it)
w1-pendulum  the first of these with Gaussian actions and running normalisation on both sides
w2           Breakout, one grey 84 x 84 frame, Nature CNN 512, GRU (rppo_gru_atari.py) or LSTM 128; a
             run with --amp takes some eight minutes on a CPU without bfloat16
w3           HalfCheetah, TRPO with sb3-contrib's defaults
w4           CartPole, PPO1's defaults beside a loop after Spinning Up's PPO (spinning_up.py), which
             makes 80 passes where ppo1_mpi.py makes 4; two ranks collect twice the steps of one (weak
             scaling)
w4-passes    the same work on both sides: 4,000 steps of all ranks, and then 80 passes over them
             (Spinning Up's policy may stop before)
scaling      the first of these, with 1 to 1,024 environments and sequences of 32 steps; with 32 to
             512 units, and with sequences of 8 to 128 steps; and what a product of two matrices
             of 1,024 x 1,024 float32 numbers reaches on this core
gpu-games    ale_py's games alone, at random actions, on the threads and in the groups that it names
gpu-atari    Breakout with 8, 64 and 256 games, on the GPU, with --amp, in two groups, and on all
             cores
gpu-lstm     CartPole with 8 to 4,096 environments, 128 and 512 units, on the GPU, with CUDA graphs (128
             units), and on all cores
speedrun     seconds to a return: 475 on CartPole without velocities; 18 on Pong, on the GPU

Each run is a process of its own, one torch thread on the first core that this process may use (MPI: a
core for each rank; gpu-* and speedrun: all cores). Systems take turns, every second time in the
opposite order. All train for as many steps, since the cost of padding falls as episodes grow; the
first iteration does not count. --against runs this project's script of both checkouts (git archive
COMMIT | tar -x -C ../COMMIT makes one), and prints the median of the ratios of neighbouring runs, by
the clock and, which other processes hardly disturb, by the processor's time.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import rows
from rows import RESULTS, ROOT, SPEED

WORK = "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 --hidden-size 128"
LSTM = "rppo_lstm --env-id CartPole-v1"
DEFAULTS = """rppo_lstm networks --critic separate --env-id CartPole-v1 --num-envs 8 --num-steps 128
    --num-minibatches 8 --update-epochs 10 --hidden-size 256 --learning-rate 3e-4"""
PENDULUM = "rppo_continuous --env-id Pendulum-v1"
BREAKOUT = "rppo_gru_atari --env-id ALE/Breakout-v5"
PONG = "rppo_gru_atari --env-id ALE/Pong-v5 --cuda --learning-rate 1e-3 --num-envs 64"
TRPO = """trpo --env-id HalfCheetah-v5 --num-steps 2048 --no-norm-obs --no-norm-reward
    --target-kl 0.01 --cg-max-steps 15 --cg-damping 0.1 --n-critic-updates 10 --batch-size 128"""
PPO1 = "ppo1_mpi --env-id CartPole-v1 --num-steps 256 --num-minibatches 4 --update-epochs 4"
PASSES = "ppo1_mpi --env-id CartPole-v1 --num-minibatches 1 --update-epochs 80"
SPINNING_UP = "after Spinning Up"
# Section and work: environment steps, and what to run of each system
WORKS: dict[tuple[str, str], tuple[int, dict[str, str]]] = {
    ("w1", "8 environments"): (32_768, {
        "ours": f"{LSTM} {WORK}", "sb3-contrib": "peer speed CartPole-v1", "skrl": "skrl"}),
    ("w1", "64 environments"): (131_072, {"ours": f"{LSTM} {WORK} --num-envs 64"}),
    ("w1", "sb3-contrib's defaults"): (8_192, {
        "ours, whole rollouts": DEFAULTS, "ours, sequences of 16": f"{DEFAULTS} --seq-len 16",
        "sb3-contrib": "peer speed-defaults CartPole-v1"}),
    ("w1-pendulum", "8 environments"): (32_768, {
        "ours": f"{PENDULUM} {WORK}", "sb3-contrib": "peer speed-pendulum Pendulum-v1"}),
    ("w2", "8 environments"): (8_192, {
        "ours": f"{BREAKOUT} {WORK}", "ours, --amp": f"{BREAKOUT} {WORK} --amp",
        "sb3-contrib": "peer speed-atari ALE/Breakout-v5"}),
    ("w3", "1 environment"): (16_384, {
        "ours": f"{TRPO} --num-envs 1", "sb3-contrib": "peer speed-trpo HalfCheetah-v5"}),
    ("w3", "2 environments"): (32_768, {
        "ours": f"{TRPO} --num-envs 2", "sb3-contrib": "peer speed-trpo-2 HalfCheetah-v5"}),
    ("w4", "1 rank"): (24_000, {
        "ours": f"mpiexec 1 {PPO1}", SPINNING_UP: "mpiexec 1 spinning_up"}),
    ("w4", "2 ranks"): (48_000, {
        "ours": f"mpiexec 2 {PPO1}", SPINNING_UP: "mpiexec 2 spinning_up"}),
    ("w4-passes", "1 rank"): (24_000, {
        "ours": f"mpiexec 1 {PASSES} --num-steps 4000", SPINNING_UP: "mpiexec 1 spinning_up"}),
    ("w4-passes", "2 ranks"): (24_000, {
        "ours": f"mpiexec 2 {PASSES} --num-steps 2000", SPINNING_UP: "mpiexec 2 spinning_up"}),
    ("scaling", "GFLOP/s of a product of matrices"): (200, {"ours": "product"}),
    ("speedrun", "475 on CartPole without velocities"): (200_000, {
        "ours": f"until 475 {LSTM} --mask-velocity"}),
    ("speedrun", "18 on Pong"): (10_000_000, {"ours, --cuda": f"until 18 {PONG}"}),
}  # fmt: skip
for what, values, flag in (  # 8 environments where nothing else is said
    ("environments", [2**i for i in range(11)], "--seq-len 32 --num-envs"),
    ("units", [32, 64, 128, 256, 512], "--hidden-size"),
    ("steps a sequence", [8, 16, 32, 64, 128], "--seq-len"),
):
    for value in values:
        steps = 5 * 128 * (max(8, value) if what == "environments" else 8)
        WORKS["scaling", f"{value} {what}"] = steps, {"ours": f"{LSTM} {WORK} {flag} {value}"}
for work, games, groups, threads in (
    ("1 game", 1, 1, [1]), ("64 games", 64, 1, [8, 12, 15, 16]),
    ("2 groups of 32", 64, 2, [8, 16]),
):  # fmt: skip
    of = {f"{n} threads": f"games {games} {groups} {n}" for n in threads}
    WORKS["gpu-games", work] = 0, of
ON = {"--cuda --amp": "--cuda --amp", "--cuda": "--cuda", "CPU": "--torch-threads 0"}
for games in 64, 8, 256:
    devices = [*ON][: 2 if games == 256 else 3]  # where an iteration takes half a minute on the CPU
    of = {f"ours, {on}": f"{BREAKOUT} --num-envs {games} {ON[on]}" for on in devices}
    groups = BREAKOUT.replace(" ", " two_groups ", 1)
    of["ours, two groups, --cuda"] = f"{groups} --num-envs {games} --cuda"
    WORKS["gpu-atari", f"{games} games"] = 0, of
for carts in 8, 64, 512, 4096:
    for units in 128, 512:
        flags = f"{LSTM} --num-envs {carts} --num-steps 128 --hidden-size {units}"
        devices = [*ON][1 : 2 if carts * units >= 10**6 else 3]
        of = {f"ours, {on}": f"{flags} {ON[on]}" for on in devices}
        if units == 128:
            of["ours, CUDA graphs"] = flags.replace(" ", " cuda_graphs ", 1) + " --cuda"
        WORKS["gpu-lstm", f"{carts} CartPoles, {units} units"] = 0, of
SECONDS = 6  # of a training on a GPU, and of a machine with one; two iterations at least
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Enough(Exception):
    """So many seconds have passed, or the return has been reached."""


def train(root: Path, command: str, steps: int, seconds: float, until: float | None) -> list[float]:
    """One of the scripts -> SPS of its iterations but the first, by the clock and by the
    processor's time; or the seconds until the last 100 episodes have a mean return."""
    names, flags = rows.split(command)
    script = rows.load_script(names[0], names[1:], root)
    log = script.Run.log
    ended = []  # iterations: step, clock, processor

    def watched(run, *inputs):
        log(run, *inputs)
        ended.append((run.step, time.perf_counter(), time.process_time()))
        if until is not None and run.returns and np.mean(run.returns) >= until:
            raise Enough
        if seconds and len(ended) > 2 and ended[-1][1] - ended[0][1] > seconds:
            raise Enough

    script.Run.log = watched
    began = np.array([0, time.perf_counter(), time.process_time()])
    flags += ["--total-timesteps", str(steps or 10**9), "--seed", "1", "--eval-episodes", "0"]
    if "--torch-threads" not in flags:
        flags += ["--torch-threads", "1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Enough),
    ):
        script.train(rows.parse(script, [*flags, "--runs-dir", folder]))
    script.Run.log = log
    if until is not None:
        return (np.array(ended[-1]) - began)[1:].tolist()
    done, *times = np.subtract(ended[-1], ended[0])
    return [done / x for x in times]


def play(games: int, groups: int, threads: int, seconds: float) -> float:
    """Steps a second of ale_py's games at random actions. With two groups, one is sent its actions
    before the other's observations are awaited."""
    from ale_py import AtariVectorEnv

    size = games // groups
    made = [AtariVectorEnv("breakout", size, num_threads=threads // groups) for _ in range(groups)]
    actions = np.random.default_rng(1).integers(0, made[0].single_action_space.n, (1000, size))
    for envs in made:
        envs.reset(seed=1)
        envs.send(actions[0])
    began = time.perf_counter()
    played = 0
    while time.perf_counter() - began < seconds:
        for envs in made:
            envs.recv()
            envs.send(actions[played % 1000])
        played += 1
    return played * games / (time.perf_counter() - began)


def product(repeats: int) -> float:
    """GFLOP/s of torch's float32 product of two matrices of 1,024 x 1,024 numbers."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.rand(2, 1024, 1024)
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return repeats * 2 * 1024**3 / (time.perf_counter() - began) / 1e9


def child(root: str, command: str, steps: int, seconds: float) -> list[float]:
    """What one run measures: SPS, by the clock and, of a script, by the processor's time."""
    kind, *words = command.split()
    if kind in ("peer", "skrl"):
        import peers

        return [peers.speed(*words, steps) if kind == "peer" else peers.skrl_speed(steps)]
    if kind == "product":
        return [product(steps)]
    if kind == "games":
        return [play(*map(int, words), seconds)]
    until = float(words.pop(0)) if kind == "until" else None
    return train(Path(root), " ".join(words) if until else command, steps, seconds, until)


def measure(command: str, steps: int, root: Path, seconds: float, pinned: bool) -> list[float]:
    """What child, or spinning_up.py, measures in a process of its own, or in several."""
    words, launcher = command.split(), []
    if words[0] == "mpiexec":
        mpiexec = Path(sys.executable).with_name("mpiexec")
        launcher = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", words[1]]
        words = words[2:]
    if CORES:  # which the processes started from here inherit
        os.sched_setaffinity(0, CORES[: int((launcher or [1])[-1])] if pinned else CORES)
    run = [*launcher, sys.executable, __file__, "--child", str(root), " ".join(words)]
    run += [str(steps), str(seconds)]
    if words[0] == "spinning_up":
        run = [*launcher, sys.executable, str(ROOT / "benchmarks/spinning_up.py"), str(steps)]
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(run, capture_output=True, text=True, env=quiet)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    return [float(x) for x in done.stdout.strip().splitlines()[-1].split()]


def tiny(command: str) -> tuple[str, int]:
    """The same on a CPU, in a moment: the command and its steps."""
    for long, short in (
        ("--cuda", ""), ("--amp", ""), ("--torch-threads 0", ""), ("games 64", "games 2"),
        ("until 18", "until -30"),
    ):  # fmt: skip
        command = command.replace(long, short)
    if "--env-id" not in command:
        return command, 2 if command == "product" else 4096  # two iterations of any peer
    envs = "" if "ppo1_mpi" in command else "--num-envs 4"
    return f"{command} --num-steps 8 {envs}", 128


def is_plain(name: str, command: str) -> bool:
    """One of our scripts without recipes, which another checkout has, too."""
    alone = command.startswith("mpiexec") or len(rows.split(command)[0]) == 1
    return name.startswith("ours") and alone


def compare(section: str, work: str, options) -> None:
    """Runs the systems of a work in turn, in each checkout."""
    steps, systems = WORKS[section, work]
    roots = [ROOT]
    if options.against:
        roots.append(options.against.resolve())
        systems = {name: command for name, command in systems.items() if is_plain(name, command)}
    seconds = (0.5 if options.dry else SECONDS) * section.startswith("gpu")
    pinned = not section.startswith(("gpu", "speedrun"))
    figures = {(name, root): [] for name in systems for root in roots}
    for i in range(1 if options.dry else options.repeats):
        for (name, root), found in [*figures.items()][:: -1 if i % 2 else 1]:
            what = tiny(systems[name]) if options.dry else (systems[name], steps)
            try:
                found.append(measure(*what, root, seconds, pinned))
            except RuntimeError as error:  # an older checkout may not know a flag
                print(f"{section}, {work}, {name}: {error}", file=sys.stderr)
                if options.dry:
                    sys.exit(1)
    report(section, work, {key: found for key, found in figures.items() if found}, options)


def report(section: str, work: str, figures: dict[tuple[str, Path], list], options) -> None:
    """Prints medians and ratios, and writes the rows."""
    steps, systems = WORKS[section, work]
    clocks = {key: [x[0] for x in found] for key, found in figures.items()}
    peers = [key for key in clocks if not key[0].startswith("ours")]
    for (name, root), clock in clocks.items():
        low, middle, high = min(clock), median(clock), max(clock)
        system = name if root == ROOT else f"{name}, {root.name}"
        line = f"{section:11}  {work:28}  {system:24} {middle:10,.1f} ({low:,.1f} to {high:,.1f})"
        if peers and not section.startswith("gpu"):
            line += f" {middle / median(clocks[peers[0]]):6.2f} x {peers[0][0]}"
        for of, other in figures:
            if of == name and root == ROOT != other:
                ratios = [np.divide(*pair) for pair in zip(figures[name, ROOT], figures[of, other])]
                by_clock, by_processor = np.median(ratios, 0)
                line += f"  {by_clock:.3f} x {other.name}, {by_processor:.3f} by the processor"
        print(line, flush=True)
        if options.dry:
            continue
        scripts = [f"{x}.py" for x in systems[name].split() if (root / f"{x}.py").exists()]
        machine = f"{options.device}; {rows.machine()}" if options.device else rows.machine()
        row = {
            "date": time.strftime("%Y-%m-%d"), "machine": machine, "section": section,
            "commit": rows.commit(root, *(scripts or ["benchmarks/*.py"])) or root.name,
            "work": work, "system": system, "steps": steps,
            "sps": " ".join(f"{x:.4g}" for x in clock),
            "median": f"{middle:.4g}", "min": f"{low:.4g}", "max": f"{high:.4g}",
            "note": "compared with another checkout" if options.against else "",
        }  # fmt: skip
        rows.append(options.results / "throughput.csv", SPEED, [row])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        root, command, steps, seconds = sys.argv[2:]
        figures = child(root, command, int(steps), float(seconds))
        if os.environ.get("PMI_RANK", "0") == "0":  # mpiexec sets it
            print(*figures)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=dict.fromkeys(of for of, _ in WORKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare ours with ours")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    parser.add_argument("--dry", action="store_true", help="each once, tiny, without GPU or file")
    options = parser.parse_args()
    options.device = ""
    if not options.dry and any(section.startswith("gpu") for section in options.sections):
        import torch

        options.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    done = set()
    for section, work in WORKS:
        if section in options.sections and not (options.dry and section in done):
            compare(section, work, options)
            done.add(section)


if __name__ == "__main__":
    main()
