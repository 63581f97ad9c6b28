"""Adam's other hyperparameters: epsilon, betas, and the weight decay that makes it AdamW.

    python docs/recipes/adam.py rppo_lstm --weight-decay 0.01          # AdamW
    python docs/recipes/adam.py ppo1_mpi --adam-eps 1e-8 --adam-beta2 0.99

The scripts have Adam with an epsilon of 1e-5, and no weight decay. Decay is decoupled from the
gradient (Loshchilov & Hutter 2019, arXiv:1711.05101). In trpo the optimiser is the critic's.
"""

from dataclasses import dataclass

import use as driver


def use(script):
    @dataclass
    class Args(script.Args):
        adam_eps: float = 1e-5  # Adam's epsilon
        adam_beta1: float = 0.9  # decay rate of the mean of gradients
        adam_beta2: float = 0.999  # decay rate of the mean of their squares
        weight_decay: float = 0.0  # AdamW's

    class AdamRun(script.Run):
        def __init__(self, args, envs, agent, optimizer):
            fits = 0 <= args.adam_beta1 < 1 and 0 <= args.adam_beta2 < 1
            script.check(fits, "--adam-beta1, --adam-beta2: must be from 0 to less than 1")
            super().__init__(args, envs, agent, optimizer)
            optimizer.param_groups[0].update(
                eps=args.adam_eps, betas=(args.adam_beta1, args.adam_beta2),
                weight_decay=args.weight_decay, decoupled_weight_decay=True,
            )  # fmt: skip

    script.Args = Args
    script.Run = AdamRun


if __name__ == "__main__":
    driver.main("adam")
