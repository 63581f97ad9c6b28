"""CUDA graphs: kernels that are always launched in the same order are recorded once, and then launched
by one call.

    python docs/recipes/use.py rppo_lstm cuda_graphs --env-id CartPole-v1 --num-envs 64 --cuda

Around a small network a GPU mostly waits for Python. Here a time step's network is one graph, and so
are a minibatch's replay and its gradients (torch.cuda.make_graphed_callables). They hold the kernels of
eager PyTorch, so what is computed stays the same. The losses, the clipping of gradients and the optimiser
aren't recorded: which steps count differs from minibatch to minibatch, and a graph's shapes are fixed.

A graph knows where the weights are: don't move or copy the agent while it trains. Without --cuda
nothing is recorded. That the numbers stay the same is tested on the CPU, with recordings played by hand;
on a GPU the recipe hasn't been run yet.
"""

import sys

import torch
import use as driver


@torch.inference_mode(False)  # or the graph's memory could only be written in inference mode
@torch.no_grad()
def record(function, inputs):
    """function(*inputs) -> tensors, recorded -> a function of such inputs that launches the graph."""
    static = [x.clone() for x in inputs]  # a graph reads and writes the same memory each time
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # first calls allocate and choose kernels
        for _ in range(3):
            function(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*static)

    def launch(*inputs):
        for old, new in zip(static, inputs):
            old.copy_(new)
        graph.replay()
        return [x.clone() for x in outputs]

    return launch


def record_with_gradients(module, inputs):
    """The same, of a module whose parameters get gradients."""
    static = tuple(x.clone() for x in inputs)
    return torch.cuda.make_graphed_callables(module, static, allow_unused_input=True)


def on_gpu(obs) -> bool:
    return obs.is_cuda


class Final:
    """In the place of final (L, B) in evaluate_actions, which then leaves no step out. The memory is
    given final itself."""

    def __init__(self, final):
        self.final = final

    def __invert__(self):
        return slice(None)


def unpack_final(memory, inputs):
    x, state, final = inputs
    return x, state, final.final if isinstance(final, Final) else final


class Replay(torch.nn.Module):
    """Of an agent's evaluate_actions what has a fixed shape: (L, B) logprobs, entropies and values."""

    def __init__(self, agent, evaluate_actions):
        super().__init__()
        self.agent, self.evaluate_actions = agent, evaluate_actions

    def forward(self, obs, state, final, actions):
        return self.evaluate_actions(obs, state, Final(final), actions)


def use(script):
    script.check(script.kind.startswith("rppo"), f"cuda_graphs: not for {script.kind}")

    class Agent(script.Agent):
        def __init__(self, envs, args):
            fits = not getattr(args, "amp", False)
            script.check(fits, "cuda_graphs: not with --amp")
            super().__init__(envs, args)
            self.recorded = {}  # step and replay
            for name in driver.memories(self):
                getattr(self, name).register_forward_pre_hook(unpack_final)
            if hasattr(self, "obs_stats"):
                driver.change(self.obs_stats, update=self.update_in_place)

        def update_in_place(self, update, rows):
            """The new statistics in the old ones' memory, which graphs read."""
            old = dict(self.obs_stats.named_buffers())
            update(rows)
            for name, buffer in old.items():
                setattr(self.obs_stats, name, buffer.copy_(getattr(self.obs_stats, name)))

        def step(self, obs, state):
            if not on_gpu(obs) or len(obs) != self.args.num_envs:
                return super().step(obs, state)
            if "step" not in self.recorded:
                self.recorded["step"] = record(super().step, (obs, state))
            return self.recorded["step"](obs, state)

        def evaluate_actions(self, *inputs):
            if not on_gpu(inputs[0]):
                return super().evaluate_actions(*inputs)
            if "replay" not in self.recorded:
                replay = Replay(self, super().evaluate_actions)
                self.recorded["replay"] = record_with_gradients(replay, inputs)
            valid = ~inputs[2]
            return tuple(x[valid] for x in self.recorded["replay"](*inputs))

    class Run(script.Run):
        def __init__(self, args, *others):
            super().__init__(args, *others)
            if not args.cuda:
                print("cuda_graphs: without --cuda nothing is recorded", file=sys.stderr)

    script.Agent, script.Run = Agent, Run
