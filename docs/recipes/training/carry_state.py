"""A memory that outlives its episode: no reset at an episode's end, neither on replay.

    python docs/recipes/use.py rppo_lstm carry_state --env-id my_module:MyEnv-v0

As reset_hidden_state: False in recurrent-ppo-truncated-bptt: where episodes are short and alike,
the memory may as well go on. The final step is read like any other, and what is learned in one
episode can be used in the next, as in meta-learning (Duan et al. 2016, arXiv:1611.02779; add the
recipe previous_action). The first episode still begins empty, and so does an evaluation.
"""

import torch
import use as driver


def use(script):
    script.check("feedforward" not in script.recipes, "carry_state: not with feedforward")

    def without_end(memory, inputs):
        x, state, final = inputs
        return x, state, torch.zeros_like(final)

    class Carrying(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            names = driver.memories(self)
            script.check(names, "carry_state: needs --memory lstm")
            for name in names:
                getattr(self, name).register_forward_pre_hook(without_end)

    script.Agent = Carrying
    script.reset_state = lambda state, final: state
