"""Deliberate bugs, of the kinds that peers fell into: (script, what it is, the text, the bug, a test file that must fail).

`python tests/mutants/run.py [SCRIPT ...]` tries them all, each in a copy of the repository.
"""

import of_atari
import of_continuous
import of_lstm
import of_ppo1
import of_trpo

MODULES = {
    "rppo_lstm": of_lstm, "rppo_continuous": of_continuous, "rppo_gru_atari": of_atari,
    "trpo": of_trpo, "ppo1_mpi": of_ppo1,
}  # fmt: skip
MUTANTS = [(script, *mutant) for script, module in MODULES.items() for mutant in module.MUTANTS]
