"""Schedules of the learning rate, the clip range and the entropy bonus.

    python docs/recipes/schedules.py --clip-coef-schedule linear --learning-rate-final 1e-5
    python docs/recipes/schedules.py --ent-coef-schedule polynomial --schedule-power 2
    python docs/recipes/schedules.py ppo1_mpi --learning-rate-schedule double_middle_drop
    python docs/recipes/schedules.py --learning-rate-schedule my_module:warm_up

With p, the progress from 0 to 1, a value is final + (initial - final) factor(p). The initial value
is the script's flag, such as --clip-coef. factor is one of FACTORS, or a function of yours: it
takes p and returns a number. Values are set after every iteration; agent.pt keeps initial ones.
"""

import importlib
from dataclasses import dataclass

import use as driver


def double_middle_drop(p):  # it rises at the end, as in stable-baselines
    if p <= 0.25:
        return 1 - p
    return 0.075 if p <= 0.75 else 0.125


FACTORS = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "middle_drop": lambda p: 1 - p if p <= 0.25 else 0.075,
    "double_linear_con": lambda p: max(1 - 2 * p, 0.125),
    "double_middle_drop": double_middle_drop,
}


def factor(script, name: str, power: float):
    """The function of a name in FACTORS, of a polynomial, or of module:function."""
    if name == "polynomial":
        return lambda p: (1 - p) ** power
    module, _, function = name.partition(":")
    try:
        return FACTORS.get(name) or getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = f"must be one of {', '.join(FACTORS)}, polynomial, or module:function"
        raise script.ArgumentError(f"schedule {name!r}: {error}; {known}") from error


def use(script):
    @dataclass
    class Args(script.Args):
        learning_rate_schedule: str | None = None  # linear, ... or module:function; None: unchanged
        clip_coef_schedule: str | None = None  # the same for --clip-coef
        ent_coef_schedule: str | None = None  # the same for --ent-coef
        learning_rate_final: float = 0.0  # the value where the factor is 0
        clip_coef_final: float = 0.0  # the same for --clip-coef
        ent_coef_final: float = 0.0  # the same for --ent-coef
        schedule_power: float = 1.0  # of a polynomial
        schedule_steps: int = 0  # environment steps after which p is 1; 0: all

    class Scheduled(script.Run):
        def __init__(self, args, *inputs):
            usual = {}  # what the script does itself
            if hasattr(args, "schedule"):
                usual = {"learning_rate": args.schedule, "clip_coef": args.schedule}
                args.schedule = "constant"
            elif getattr(args, "anneal_lr", False):
                usual = {"learning_rate": "linear"}
                args.anneal_lr = False
            self.initial, self.factors = {}, {}
            for name in "learning_rate", "clip_coef", "ent_coef":
                flag = f"{name}_schedule"
                kind = getattr(args, flag) or usual.get(name, "constant")
                if kind != "constant":
                    option = "--" + flag.replace("_", "-")
                    script.check(hasattr(args, name), f"{option}: {script.__name__} has no {name}")
                    setattr(args, flag, kind)
                    self.initial[name] = getattr(args, name)
                    self.factors[name] = factor(script, kind, args.schedule_power)
            super().__init__(args, *inputs)
            self.schedule()

        def schedule(self):
            """Sets the values of the next iteration."""
            p = min(self.step / (self.args.schedule_steps or self.args.total_timesteps), 1)
            for name, initial in self.initial.items():
                final = getattr(self.args, f"{name}_final")
                setattr(self.args, name, final + (initial - final) * self.factors[name](p))
            self.optimizer.param_groups[0]["lr"] = self.args.learning_rate  # trpo sets it once

        def log(self, *inputs):
            super().log(*inputs)
            self.schedule()

        def save(self):
            vars(self.args).update(self.initial)
            super().save()
            self.schedule()

    script.Args, script.Run = Args, Scheduled


if __name__ == "__main__":
    driver.main("schedules")
