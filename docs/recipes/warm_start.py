"""Starting from another run's weights: a new run, with new random numbers and a new optimiser.

    python docs/recipes/warm_start.py runs/RUN --env-id CartPole-v1  # and any flag of rppo_lstm.py

The network's flags (--hidden-size and the like) must be those of RUN; observations and actions
must have the same shapes. The statistics that rewards are divided by come along. Measured on
CartPole without velocities, seeds 1 to 3, from a run of seed 1: the mean return of the last 100
episodes passes 475 after 4,088, 4,088 and 12,264 steps. Without the weights it is 439 to 458 at the
end, after 100,000 steps.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("error: say warm_start.py runs/RUN, then flags of rppo_lstm.py", file=sys.stderr)
        sys.exit(2)
    source = sys.argv[1]
    sys.argv[:2] = [" ".join(sys.argv[:2])]  # the command that goes on after Ctrl-C

    class WarmAgent(rppo_lstm.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            rppo_lstm.load(source, self)

    rppo_lstm.Agent = WarmAgent
    rppo_lstm.main()
