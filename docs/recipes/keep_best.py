"""Evaluating during training, and keeping the best agent: a subclass of Run.

    python docs/recipes/keep_best.py rppo_lstm --env-id CartPole-v1 --mask-velocity  # any script
    mpiexec -n 2 python docs/recipes/keep_best.py ppo1_mpi --env-id CartPole-v1
    torchrun --nproc-per-node 2 docs/recipes/keep_best.py rppo_gru_atari
    python rppo_lstm.py --play runs/RUN/best --capture-video

Every EVERY environment steps the agent plays --eval-episodes deterministic episodes, whose mean
goes to TensorBoard as charts/eval_return. The best agent is kept in the run's directory under
best/. Of several processes the first does so, and the others wait for it. Learning is not touched:
the run ends with the same weights as one without this recipe.
"""

import importlib
import shutil
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent / "../.."))
SCRIPTS = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"
EVERY = 20_000


def use(script):
    """Gives the script a Run that keeps the best agent."""

    class KeepBest(script.Run):
        def __init__(self, args, *inputs):
            script.check(args.eval_episodes > 0, "--eval-episodes 0: no return to choose by")
            super().__init__(args, *inputs)

        def log(self, *inputs):
            before = self.step // EVERY
            super().log(*inputs)
            if self.step // EVERY == before:
                return
            ranks = getattr(self, "comm", None)  # of ppo1_mpi, where saving needs all of them
            rank = ranks.rank if ranks else getattr(script, "RANK", 0)
            if ranks or rank == 0:
                self.save()
            if rank == 0:
                self.keep(self.dir / "best" / "return.txt")
            self.logged = time.time()  # so that charts/SPS is of training

        def keep(self, file):
            """Evaluates, and keeps the best so far, that of a resumed run included."""
            envs = script.make_envs(self.args, 1)
            score = np.mean([*script.evaluate(self.agent, envs, self.args)])
            self.writer.add_scalar("charts/eval_return", score, self.step)
            if score > float(file.read_text() if file.exists() else "-inf"):
                file.parent.mkdir(exist_ok=True)
                shutil.copy(self.dir / "agent.pt", file.parent)
                file.write_text(str(score))

    script.Run = KeepBest


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SCRIPTS:
        script = importlib.import_module(sys.argv[1])
        use(script)
        sys.argv[:2] = [" ".join(sys.argv[:2])]  # the command that goes on after Ctrl-C
        script.main()
    else:
        print(f"error: first say one of {', '.join(SCRIPTS)}, then its flags", file=sys.stderr)
        sys.exit(2)
