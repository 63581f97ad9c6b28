"""Does replay repeat acting? Stops a run in its first update if not.

    python docs/recipes/use.py rppo_lstm check_replay,min_gru --env-id CartPole-v1 --mask-velocity

Before the first gradient step of an update the replay must give the log-probabilities with which
the agent acted: the first minibatch's log ratios are 0, up to rounding. A memory without its reset,
sequences that start from other states, swapped axes and statistics that are updated too early all
show here, though the agent learns in spite of them. A mistake that acting and replay share doesn't:
docs/probes has environments that show it. On a GPU replay is in full float32, not in cuDNN's TF32.
"""

import torch

LARGEST = 1e-3  # rounding gives some 1e-6, in long sequences 1e-5


def use(script):
    script.check(script.kind != "trpo", "check_replay: trpo keeps no log-probabilities of acting")
    torch.backends.cudnn.allow_tf32 = False
    minibatches, ppo_loss = script.minibatches, script.ppo_loss
    first = False

    def checked_minibatches(*inputs):
        nonlocal first
        first = True  # of this update
        yield from minibatches(*inputs)

    def checked_loss(logprob, old_logprob, *inputs):
        nonlocal first
        if first and len(logprob):
            worst = (logprob - old_logprob).abs().max().item()
            message = f"check_replay: the largest first log ratio is {worst:.2g}, and must be 0"
            script.check(worst < LARGEST, f"{message}: replay doesn't repeat acting")
            first = False
        return ppo_loss(logprob, old_logprob, *inputs)

    script.minibatches = checked_minibatches
    script.ppo_loss = checked_loss
