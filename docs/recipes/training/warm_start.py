"""Starting from another run's weights: a new run, with new random numbers and a new optimiser.

    python docs/recipes/use.py rppo_lstm warm_start --init-from runs/RUN --env-id CartPole-v1
    python docs/recipes/use.py trpo warm_start --init-from runs/RUN --overlap --encoder-size 128

RUN may have other recipes, and may come from another script: weights are matched by name and shape.
All must match, unless you say --overlap: then weights of other shapes are copied as far as they
overlap, and what RUN does not have starts afresh. Running statistics come along. --init-noise adds
noise to the weights, as evolution does. --init-from may also be a file of weights by name, which you
have changed yourself:

    weights = torch.load("runs/RUN/agent.pt", weights_only=True)["agent"]
    torch.save(weights, "weights.pt")  # then --init-from weights.pt
"""

from dataclasses import dataclass
from pathlib import Path

import torch


def overlapping(new: dict, old: dict) -> dict:
    """The tensors of new, with the corners that they have in common with old's of old's values."""
    result = {name: x.clone() for name, x in new.items()}
    for name, x in result.items():
        other = old.get(name)
        if other is not None and other.dim() == x.dim():
            corner = tuple(slice(min(sizes)) for sizes in zip(x.shape, other.shape))
            x[corner] = other[corner]
    return result


def use(script):
    @dataclass
    class Args(script.Args):
        init_from: str | None = None  # a run, or a file of weights, to begin with
        overlap: bool = False  # weights of other shapes are copied as far as they overlap
        init_noise: float = 0.0  # standard deviation of noise that is added to all these weights

    class WarmAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            if args.resume or args.play or not args.init_from:
                return
            file = Path(args.init_from)
            file = file if file.is_file() else file / "agent.pt"
            try:
                weights = torch.load(file, map_location="cpu", weights_only=True)
                weights = weights.get("agent", weights)  # a run's file has more
                if args.overlap:
                    weights = overlapping(self.state_dict(), weights)
                self.load_state_dict(weights)
            except Exception as error:  # a damaged file can raise anything
                text = f"--init-from: {file} can't be used: {error!r:.200}"
                if isinstance(error, RuntimeError) and not args.overlap:  # of other shapes
                    text += "; try --overlap"
                raise script.ArgumentError(text) from error
            if args.init_noise > 0:
                for weight in self.parameters():
                    weight.data.add_(args.init_noise * torch.randn_like(weight))

    script.Args = Args
    script.Agent = WarmAgent
