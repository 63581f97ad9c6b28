"""Schedules and optimisers: how rates change over a run; Adam's other numbers, or not Adam.

    python docs/recipes/use.py rppo_lstm schedules --clip-coef-schedule linear
    python docs/recipes/use.py rppo_lstm schedules --ent-coef-schedule polynomial \\
        --ent-coef-final 1e-4 --ent-coef-power 2 --ent-coef-steps 300000
    python docs/recipes/use.py ppo1_mpi schedules --learning-rate-schedule double_middle_drop
    python docs/recipes/use.py rppo_lstm schedules --learning-rate-schedule my_module:warm_up
    python docs/recipes/use.py rppo_lstm schedules --weight-decay 0.01  # AdamW
    python docs/recipes/use.py rppo_continuous schedules --memory-lr 0.1 --env-id Hopper-v5
    python docs/recipes/use.py rppo_lstm schedules --optimizer RMSprop \\
        --optimizer-kwargs '{"alpha": 0.99, "eps": 1e-5}'

With p, the progress from 0 to 1, a value is final + (initial - final) factor(p). The initial value
is the script's flag, such as --clip-coef. factor is one of FACTORS, or a function of yours: it
takes p and returns a number. Without a schedule a value does what the script does. Adam's weight
decay is decoupled from the gradient (Loshchilov & Hutter 2019, arXiv:1711.05101). Another optimiser
is a class of torch.optim, or your own, module:Class; Adam's flags don't concern it. In trpo the
optimiser is the critic's. --memory-lr slows the memory alone, in which a step adds up over the whole
sequence (RESeL, Luo et al. 2024, arXiv:2405.15384).
"""

import importlib
import json
from dataclasses import dataclass

import use as driver

NAMES = "learning_rate", "clip_coef", "ent_coef"


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


def another(script, args, optimizer):
    """The optimiser that --optimizer names, of the same parameters."""
    module, _, name = args.optimizer.rpartition(":")
    try:
        kind = getattr(importlib.import_module(module or "torch.optim"), name)
        options = json.loads(args.optimizer_kwargs)
        return kind(optimizer.param_groups[0]["params"], lr=args.learning_rate, **options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        flags = f"--optimizer {args.optimizer} --optimizer-kwargs {args.optimizer_kwargs}"
        raise script.ArgumentError(f"{flags}: {error}") from error


def split(optimizer, weights) -> None:
    """Gives these weights a group of their own, the second."""
    [group] = optimizer.param_groups
    chosen = {id(weight) for weight in weights}
    second = [x for x in group["params"] if id(x) in chosen]
    group["params"] = [x for x in group["params"] if id(x) not in chosen]
    optimizer.add_param_group({**group, "params": second})


def use(script):
    driver.knobs(script)

    @dataclass
    class Args(script.Args):
        learning_rate_schedule: str | None = None  # linear, ... or module:function; None: unchanged
        learning_rate_final: float = 0.0  # the value where the factor is 0
        learning_rate_power: float = 1.0  # of a polynomial
        learning_rate_steps: int = 0  # environment steps after which p is 1; 0: all
        clip_coef_schedule: str | None = None  # the same four for --clip-coef
        clip_coef_final: float = 0.0
        clip_coef_power: float = 1.0
        clip_coef_steps: int = 0
        ent_coef_schedule: str | None = None  # the same four for --ent-coef
        ent_coef_final: float = 0.0
        ent_coef_power: float = 1.0
        ent_coef_steps: int = 0
        adam_eps: float = 1e-5  # Adam's epsilon
        adam_beta1: float = 0.9  # decay rate of the mean of gradients
        adam_beta2: float = 0.999  # decay rate of the mean of their squares
        weight_decay: float = 0.0  # AdamW's
        memory_lr: float = 1.0  # the memory's learning rate, as a share of the others'
        optimizer: str = "Adam"  # a class of torch.optim, or module:Class
        optimizer_kwargs: str = "{}"  # its arguments, in JSON

    class Scheduled(script.Run):
        def __init__(self, args, *inputs):
            betas = args.adam_beta1, args.adam_beta2
            fits = 0 <= min(betas) and max(betas) < 1
            script.check(fits, "--adam-beta1, --adam-beta2: must be from 0 to less than 1")
            annealed = []  # what the script itself lets fall
            if getattr(args, "anneal_lr", False):
                annealed = NAMES[:2] if script.kind == "ppo1_mpi" else NAMES[:1]
            self.factors = {}
            for name in NAMES:
                usual = "linear" if name in annealed else "constant"
                kind = getattr(args, f"{name}_schedule") or usual
                flag = f"--{name}_schedule".replace("_", "-")
                fits = kind == "constant" or hasattr(args, name)
                script.check(fits, f"{flag}: {script.kind} has no {name}")
                if hasattr(args, name):
                    self.factors[name] = factor(script, kind, getattr(args, f"{name}_power"))
            *_, agent, optimizer = inputs
            adam = (args.optimizer, args.optimizer_kwargs) == ("Adam", "{}")
            if not adam:  # train holds this object, so it becomes the other
                new = another(script, args, optimizer)
                optimizer.__class__, optimizer.__dict__ = type(new), new.__dict__
            if args.memory_lr != 1:
                memories = [getattr(agent, name) for name in driver.memories(agent)]
                fits = memories and script.kind != "trpo"
                script.check(fits, "--memory-lr: Adam trains no memory here")
                split(optimizer, [x for memory in memories for x in memory.parameters()])
            super().__init__(args, *inputs)
            self.knobs.anneal_lr = False
            for group in self.optimizer.param_groups if adam else ():
                group.update(
                    eps=args.adam_eps, betas=betas, weight_decay=args.weight_decay,
                    decoupled_weight_decay=True,
                )  # fmt: skip
            self.schedule()

        def schedule(self):
            """Sets the values of the next iteration."""
            for name, function in self.factors.items():
                initial, final, steps = (
                    getattr(self.args, name + part) for part in ("", "_final", "_steps")
                )
                p = min(self.step / (steps or self.args.total_timesteps), 1)
                setattr(self.knobs, name, final + (initial - final) * function(p))
            # Only trpo's train doesn't set the first at each iteration.
            for group, share in zip(self.optimizer.param_groups, (1, self.args.memory_lr)):
                group["lr"] = share * self.knobs.learning_rate

        def log(self, *inputs):
            super().log(*inputs)
            self.schedule()

    script.Args, script.Run = Args, Scheduled
