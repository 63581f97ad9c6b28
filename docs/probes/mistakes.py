"""Does each mistake show, under its name, and nothing else? rppo_lstm.py with one mistake at a time.

    python docs/probes/mistakes.py                       # all mistakes, seeds 1 to 5; mistakes.csv
    python docs/probes/mistakes.py --seeds 1 "no reset"  # one of them
    python docs/probes/mistakes.py right --seeds 1:30    # the script as it is

A run that has rows in mistakes.csv is not repeated: delete them for that.
"""

import argparse
import csv
import sys
import time
import types
from pathlib import Path

import torch
from probe_scripts import ROOT, SCRIPTS, trainer
from probes import ALL, Row, check

TABLE = Path(__file__).with_name("mistakes.csv")
FIELDS = ["change", "seed", *Row._fields, "cpu_seconds"]

SHAPES = "        cell = self.cell\n        L, B = x.shape[:2]\n"


def loop(before: str = "", after: str = "") -> tuple[str, str]:
    """The replay as a loop, with a reset before or after a step."""
    lines = ["hs = []", "for t in range(L):"]
    lines += [f"    {before}"] if before else []
    lines += ["    h, state = self.step(x[t], state)", "    hs.append(h)"]
    lines += [f"    {after}"] if after else []
    lines += ["return torch.stack(hs)"]
    return SHAPES, SHAPES + "".join(f"        {line}\n" for line in lines)


REPLAY = "        x = torch.where(final.unsqueeze(-1), self.reset, x)\n"
STEP = "                log_pi, values[t], lstm_state = agent.step(tensor(obs[t]), lstm_state)\n"
RESET = "                lstm_state = reset_state(lstm_state, final[t])  # the next episode begins empty\n"
LAST = "            _, values[T], _ = agent.step(tensor(obs[T]), lstm_state)\n"
ZERO_LAST = LAST.replace("lstm_state)", "reset_state(lstm_state, final[T]))")
NEVER = "    if not final.any():\n"
ROLLOUT = "        log_pis = []\n"
STORED = "s_state = lstm_states.transpose(0, 1).flatten(1, 2)"
CUT = """    x = x.unflatten(0, (-1, L))  # (T / L, L, N, ...)
    return x.transpose(0, 1).flatten(1, 2)
"""
PREDICT = "        log_pi, _, lstm_state = self.step(obs, lstm_state)\n"
S_OBS = "s_obs = to_sequences(tensor(obs[:T]), L)"

# A mistake's name: the changes of the text; the probe of its kind; the name that it gives
MISTAKES: dict[str, tuple[list[tuple[str, str]], str | None, str | None]] = {
    "right": ([], None, None),
    "acts on the previous observation": (
        [(S_OBS, "s_obs = to_sequences(tensor(np.concatenate([obs[:1], obs[: T - 1]])), L)")],
        "Now", "observations off by one",
    ),
    "acts on the next observation": (
        [(S_OBS, "s_obs = to_sequences(tensor(obs[1:]), L)")],
        "Now", "observations off by one",
    ),
    "axes swapped": (
        [(CUT, "    return x.reshape(-1, L, *x.shape[2:]).transpose(0, 1)\n")],
        "Previous", "sequences don't follow time",
    ),
    "evaluation without state": (
        [(PREDICT, PREDICT.replace("lstm_state =", "_ ="))],
        "Previous", "state lost in evaluation",
    ),
    "single steps shuffled": (
        [("L = 1 if args.ablate_memory else args.seq_len or T", "L = 1")],
        "Recall", "gradient stops too early",
    ),
    "no reset": ([(REPLAY, ""), (NEVER, "    if True:\n")], "Leak", "no reset"),
    "no reset in training": ([(REPLAY, ""), (RESET, "")], "Leak", "no reset in training"),
    "reset one step late in training": (
        [
            loop(after="if t: state = torch.where(final[t - 1][:, None], 0.0, state)"),
            (ROLLOUT, ROLLOUT + "        before = last if run.step else final[0]\n"),
            (RESET, RESET.replace("final[t]", "final[t - 1] if t else before")),
            ("        obs[0] = obs[T]\n", "        last = final[T - 1].copy()\n        obs[0] = obs[T]\n"),
        ],
        "Leak", "reset one step late or early in training",
    ),
    "reset one step early in training": (
        [
            loop(before="state = torch.where(final[t][:, None], 0.0, state)"),
            (RESET, ""),
            (STEP, RESET + STEP),
            (LAST, ZERO_LAST),
        ],
        "Leak", "reset one step late or early in training",
    ),
    "no reset on replay": ([(REPLAY, "")], "Latch", "no reset on replay"),
    "state lost between rollouts": (
        [(ROLLOUT, f"{ROLLOUT}        lstm_state = agent.initial_state(N)\n")],
        "Rollout", "state lost at the rollout's end",
    ),
    "replay from a zero state": (
        [(STORED, f"{STORED} * 0")], "Rollout", "sequences begin with another state",
    ),
    "replay from another environment's state": (
        [(STORED, f"{STORED}.roll(1, 1)")],
        "Rollout", "sequences begin with another state",
    ),
    "truncation as termination": (
        [("np.where(terminated, 0, values[1:])", "np.where(done, 0, values[1:])")],
        "Limit", "truncation taken for termination",
    ),
    "final steps trained on": (
        [
            loop(after="state = torch.where(final[t][:, None], 0.0, state)"),
            ("        valid = ~final[:T]  # the steps that count\n", "        valid = np.ones_like(final[:T])\n"),
            ("            batch_valid = ~s_final[:, batch]", "            batch_valid = torch.ones_like(s_final[:, batch])"),
            ("        valid = ~final\n", "        valid = torch.ones_like(final)\n"),
        ],
        "FinalStep", "final steps trained on, or final observation lost",
    ),
    "final value from a zero state": (
        [
            (STEP, "                values[t] = agent.step(tensor(obs[t]), reset_state(lstm_state, final[t]))[1]\n"
             + STEP.replace("values[t]", "_")),
            (LAST, ZERO_LAST),
        ],
        "FinalValue", "final value from a zero state",
    ),
}  # fmt: skip


def changed(mistake: str):
    """rppo_lstm.py with a mistake, as a module."""
    file = ROOT / "rppo_lstm.py"
    text = file.read_text()
    for old, new in MISTAKES[mistake][0]:
        if text.count(old) != 1:
            raise ValueError(f"{mistake}: in rppo_lstm.py {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    module = types.ModuleType(mistake)
    module.__file__ = str(file)
    sys.modules[mistake] = module
    exec(compile(text, mistake, "exec"), module.__dict__)
    return module


def read() -> list[dict]:
    return list(csv.DictReader(TABLE.open())) if TABLE.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mistakes", nargs="*", metavar="MISTAKE", help=", ".join(MISTAKES))
    parser.add_argument("--seeds", default="1:5", help="1:5, or one")
    parser.add_argument("--own", action="store_true", help="only the probe of a mistake's kind")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    for seed in range(int(first), int(last or first) + 1):
        for mistake in options.mistakes or MISTAKES:
            _, own, _ = MISTAKES[mistake]
            known = {(row["change"], row["seed"], row["probe"]) for row in read()}
            probes = [f"probes:{own}-v0"] if options.own and own else ALL
            if all((mistake, str(seed), probe) in known for probe in probes):
                continue
            print(f"{mistake}, seed {seed}")
            torch.set_num_threads(1)
            seconds: dict[str, float] = {}
            train = trainer(changed(mistake), SCRIPTS["rppo_lstm"])

            def timed(env_id, steps, seed):
                began = time.process_time()
                act = train(env_id, steps, seed)
                seconds[env_id] = time.process_time() - began
                return act

            rows = check(timed, probes, seed)  # those known, too: others need them to be right
            rows = [row for row in rows if (mistake, str(seed), row.probe) not in known]
            new = not TABLE.exists()
            with TABLE.open("a", newline="") as file:
                table = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if new:
                    table.writeheader()
                for row in rows:
                    score, spent = f"{row.score:.3f}", f"{seconds.get(row.probe, 0):.1f}"
                    mine = dict(change=mistake, seed=seed, cpu_seconds=spent)
                    table.writerow(mine | row._asdict() | dict(score=score))


if __name__ == "__main__":
    main()
