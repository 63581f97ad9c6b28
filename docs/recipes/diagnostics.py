"""More in TensorBoard: explained variance, the clip fraction, and the run's flags as text.

    python docs/recipes/diagnostics.py --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py ppo1_mpi diagnostics,schedules --env-id CartPole-v1

losses/explained_variance is 1 - Var[return - value] / Var[return] over a rollout: 1 for a critic
that knows the returns, 0 for one that knows only their mean. losses/clipfrac is the share of steps
whose ratio is outside 1 - epsilon to 1 + epsilon, in all minibatches; trpo.py clips nothing and has
none. The names are CleanRL's. Under torchrun and mpiexec both are those of the first process.
"""

import json

import numpy as np
import use as driver


def explained_variance(values, returns) -> float:
    """NaN where all returns are equal, or there are none."""
    variance = np.var(returns) if len(returns) else 0
    return float(1 - np.var(returns - values) / variance) if variance > 0 else float("nan")


def use(script):
    compute_gae = script.compute_gae
    ppo_loss = getattr(script, "ppo_loss", None)

    class Diagnosed(script.Run):
        done = None  # (N,), which episodes the last rollout's last step ended
        explained = float("nan")
        clipped: list[float]  # the share of each minibatch

        def __init__(self, args, *inputs):
            super().__init__(args, *inputs)
            self.clipped = []
            script.current_run = self
            if driver.is_first(script):
                flags = json.dumps(vars(args), indent=4, default=str)
                self.writer.add_text("flags", "    " + flags.replace("\n", "\n    "))

        def log(self, steps, losses):
            super().log(steps, losses)
            if losses and driver.is_first(script):
                self.writer.add_scalar("losses/explained_variance", self.explained, self.step)
                if self.clipped:
                    share = np.mean(self.clipped)
                    self.writer.add_scalar("losses/clipfrac", share, self.step)
            self.clipped.clear()

    def gae(rewards, values, terminated, done, *factors):
        advantages = compute_gae(rewards, values, terminated, done, *factors)
        run = script.current_run
        first = np.zeros_like(done[0]) if run.done is None else run.done
        final = np.vstack([first, done[:-1]])  # these steps count nowhere
        run.done = done[-1].copy()
        v = values[:-1][~final]
        run.explained = explained_variance(v, v + advantages[~final])
        return advantages

    def loss(logprob, old_logprob, advantage, clip_coef):
        if len(logprob):  # a rank of ppo1_mpi.py may have no steps that count
            far = (logprob.detach() - old_logprob).exp().sub(1).abs() > clip_coef
            script.current_run.clipped.append(far.float().mean().item())
        return ppo_loss(logprob, old_logprob, advantage, clip_coef)

    script.compute_gae = gae
    script.Run = Diagnosed
    if ppo_loss:
        script.ppo_loss = loss


if __name__ == "__main__":
    driver.main("diagnostics")
