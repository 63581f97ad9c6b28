"""Data-parallel training: the environments split over processes, on one machine or several.

    torchrun --nproc-per-node 2 docs/recipes/use.py rppo_gru_atari data_parallel --num-envs 8
    torchrun --nproc-per-node 4 docs/recipes/use.py trpo data_parallel --num-envs 16 --cuda

Each process plays its part of the --num-envs environments, and a minibatch is one minibatch of each
process. All means are over the steps of all processes, exactly: a process with M_r of the M steps
weights its gradient by M_r / M, and the sum of these is the gradient that a single process would
have computed. All processes take the same step, so their weights stay equal. Messages go through
gloo, between GPUs through nccl. Process 0 logs, evaluates and saves. If you resume with as many
processes, the run goes on bit for bit; it goes on with another number, too.
"""

import atexit
import os
import shlex
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor


class World:
    """The processes that torchrun started, with mpi4py's names; or this process alone."""

    def __init__(self):
        self.size = int(os.environ.get("WORLD_SIZE") or 1)
        self.rank = int(os.environ["RANK"]) if self.size > 1 else 0
        self.local_rank = int(os.environ["LOCAL_RANK"]) if self.size > 1 else 0  # of its machine
        self.share = 1.0  # M_r / M, of the steps whose mean was taken last
        self.shares = []  # of each minibatch since the last log
        if self.size > 1 and not dist.is_initialized():
            gpus = torch.cuda.device_count()
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
            atexit.register(dist.destroy_process_group)
            if gpus:
                torch.cuda.set_device(self.local_rank % gpus)  # --cuda means this one

    def exchange(self, message, *inputs) -> None:
        if self.size == 1:
            return
        try:
            message(*inputs)
        except RuntimeError:  # another process failed, and says why; torchrun ends this one
            time.sleep(20)
            raise

    def allgather(self, x) -> list:
        everyones = [x] * self.size
        self.exchange(dist.all_gather_object, everyones, x)
        return everyones

    def bcast(self, x):
        return self.allgather(x)[0]

    def sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.exchange(dist.all_reduce, total)
        return total

    def mean(self, x: Tensor, share: float) -> Tensor:
        """x is a mean over this process's steps, this share of all -> the mean over all."""
        return self.sum(x * share if share > 0 else torch.zeros_like(x))  # of no step it is NaN

    def watch(self, agent) -> None:
        """From now on the end of every backward pass averages all gradients, in one message."""
        waiting = []
        engine = torch.autograd.Variable._execution_engine  # DistributedDataParallel uses it, too

        def average():
            waiting.clear()
            gradients = [p.grad for p in agent.parameters() if p.grad is not None]
            flat = self.mean(torch.cat([x.flatten() for x in gradients]), self.share)
            for x, mean in zip(gradients, flat.split([x.numel() for x in gradients])):
                x.copy_(mean.view_as(x))

        def has_gradient(parameter):
            if not waiting:
                engine.queue_callback(average)
            waiting.append(parameter)

        for parameter in agent.parameters():
            parameter.register_post_accumulate_grad_hook(has_gradient)

    def set_share(self, steps: int) -> None:
        self.share = steps / self.sum(torch.tensor(float(steps), dtype=torch.float64)).item()

    def moments(self, x: Tensor) -> Tensor:
        """x (M_r,) -> mean and variance of the M numbers of all processes; sets the share."""
        x = x.double()
        table = x.new_zeros(self.size, 3)
        if len(x):
            table[self.rank] = torch.stack([x.new_tensor(len(x)), x.mean(), x.var(correction=0)])
        counts, means, variances = self.sum(table).unbind(1)
        shares = counts / counts.sum()
        mean = shares @ means
        self.share = shares[self.rank].item()
        return torch.stack([mean, shares @ (variances + (means - mean) ** 2)])


def use(script):
    script.check(script.kind != "ppo1_mpi", "data_parallel: ppo1_mpi is parallel with mpiexec")
    size = os.environ.get("WORLD_SIZE") or "1"
    started = size == "1" or {"RANK", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()
    script.check(started, f"data_parallel: WORLD_SIZE is {size}: start with torchrun")
    world = World()
    script.world = lambda: world
    share_means(script, world)
    if script.kind == "trpo":
        share_trust_region(script, world)
    share_run(script, world)
    share_command_line(script, world)


def share_means(script, world) -> None:
    """What train calls to take a mean, to count, or to decide for all processes alike."""
    minibatches, too_far, count_steps = (
        getattr(script, name, None) for name in ("minibatches", "too_far", "count_steps")
    )

    def normalize_advantage(advantage):
        mean, var = world.moments(advantage).to(advantage.dtype)
        world.shares.append(world.share)
        return (advantage - mean) / (var.sqrt() + 1e-8)

    def explained_variance(value, return_):
        _, unexplained = world.moments(torch.as_tensor(return_ - value))
        _, variance = world.moments(torch.as_tensor(return_))
        return float(1 - unexplained / (variance + 1e-8))

    def union_minibatches(final, args):
        """A minibatch is left out if all of its steps are final in every process."""
        for batch in minibatches(torch.zeros_like(final), args):
            if world.sum((~final[:, batch]).sum()) > 0:
                yield batch

    script.normalize_advantage = normalize_advantage
    script.explained_variance = explained_variance
    script.minibatches = union_minibatches
    script.count_steps = lambda valid: int(world.sum(torch.tensor(count_steps(valid))))
    script.too_far = lambda kl, target_kl: too_far(world.mean(kl, world.share), target_kl)
    if hasattr(script, "RunningMeanStd"):

        class UnionMeanStd(script.RunningMeanStd):
            def update(self, rows):
                everyones = world.allgather(rows.cpu())
                super().update(torch.cat(everyones).to(rows.device))

        script.RunningMeanStd = UnionMeanStd


def share_trust_region(script, world) -> None:
    """trpo: the gradients, the Fisher-vector products, the line search and the critic's fit."""
    kl_divergence, surrogate = script.kl_divergence, script.surrogate
    flat_gradient, kl_and_improvement = script.flat_gradient, script.kl_and_improvement

    def kl_of_steps(p, q):
        kl = kl_divergence(p, q)
        world.set_share(len(kl))
        return kl

    def surrogate_of_steps(new, old, actions, advantage):
        world.set_share(len(advantage))
        return surrogate(new, old, actions, advantage)

    def union_gradient(y, parameters, **options):
        """Not of one that is to be differentiated again: its gradient, F v, is averaged instead."""
        gradient = flat_gradient(y, parameters, **options)
        return gradient if "create_graph" in options else world.mean(gradient, world.share)

    def union_kl_and_improvement(*inputs):
        mine = torch.tensor(kl_and_improvement(*inputs), dtype=torch.float64)
        return world.mean(mine, world.share).tolist()

    def fit_critic(critic, args, optimizer, inputs, returns):
        """As many minibatches in each process, which have batch_size steps together."""
        count = ceil(world.sum(torch.tensor(len(inputs))).item() / args.batch_size)
        losses = []
        for _ in range(args.n_critic_updates):
            for batch in torch.randperm(len(inputs)).to(inputs.device).tensor_split(count):
                world.set_share(len(batch))
                loss = nn.functional.mse_loss(critic(inputs[batch]).squeeze(-1), returns[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(world.mean(loss.detach(), world.share))
        return torch.stack(losses).mean().item()

    script.kl_divergence, script.surrogate = kl_of_steps, surrogate_of_steps
    script.flat_gradient = union_gradient
    script.kl_and_improvement = union_kl_and_improvement
    script.fit_critic = fit_critic


class Silent:
    """Takes every call: the log of all processes but process 0."""

    def __init__(self, *inputs, **options):
        pass

    def __getattr__(self, name):
        return lambda *inputs, **options: None


def share_run(script, world) -> None:
    """One run directory, which process 0 writes. The others resume what it has saved."""
    env_seed = script.env_seed
    script.env_seed = lambda *key: env_seed(*key, world.rank)  # that of rank 0 is as without
    if world.rank > 0:
        script.SummaryWriter = Silent
        script.tqdm = partial(script.tqdm, disable=True)

    class Run(script.Run):
        def __init__(self, args, envs, agent, optimizer):
            self.rngs = []
            here = args
            args = replace(here, num_envs=here.num_envs * world.size)  # of all processes
            if world.rank == 0:
                super().__init__(args, envs, agent, optimizer)
            directory = world.bcast(str(self.dir) if world.rank == 0 else None)
            if world.rank > 0:
                args = replace(args, resume=directory, track=False)
                super().__init__(args, envs, agent, optimizer)
            if hasattr(self, "knobs"):  # of recipes that change what train reads
                self.knobs = here
            world.watch(agent)

        def restore(self, saved):
            super().restore(saved)
            rngs = saved.get("rngs", [])
            if world.rank > 0:
                torch.manual_seed(script.env_seed(self.args.seed, self.step))
                self.returns.clear()  # process 0 has those of all
                self.lengths.clear()
            if len(rngs) == world.size:
                torch.set_rng_state(rngs[world.rank])

        def log(self, metrics, explained_variance):
            rows = [torch.nan_to_num(row) * s for row, s in zip(metrics, world.shares, strict=True)]
            world.shares.clear()
            self.rngs = world.allgather(torch.get_rng_state())
            for queue in (self.returns, self.lengths):
                everyones = world.allgather(list(queue))
                queue.clear()
                if world.rank == 0:
                    queue.extend(x for each in everyones for x in each)
            super().log(list(world.sum(torch.stack(rows))), explained_variance)

        def contents(self):
            return {**super().contents(), "rngs": self.rngs}

        def save(self):
            if world.rank == 0:
                super().save()
            else:
                self.saved = time.perf_counter()

        def finish(self):
            if world.rank == 0:
                super().finish()

    script.Run = Run


def share_command_line(script, world) -> None:
    """Process 0 reads the flags; of several processes that fail alike, it alone says so."""
    parse_args, train = script.parse_args, script.train

    def parse_and_share():
        flags = None
        try:
            if world.rank == 0:
                args = parse_args()
                script.check(not args.play or world.size == 1, "--play: start one process")
                flags = asdict(args)
        finally:
            flags = world.bcast(flags)
        if flags is None:
            sys.exit()  # process 0 has said why, or has shown the help
        return script.Args(**flags)

    def train_part(args):
        try:
            fits = args.num_envs % world.size == 0
            script.check(fits, f"--num-envs: must be divisible by {world.size} processes")
            enough = not args.cuda or world.local_rank < torch.cuda.device_count()
            script.check(enough, "--cuda: fewer GPUs than processes")
            return train(replace(args, num_envs=args.num_envs // world.size))
        except KeyboardInterrupt:
            if world.rank > 0:
                script.Run.latest = None  # nothing more to say
            raise
        except Exception:
            if world.rank > 0:
                time.sleep(8)  # where all fail alike, torchrun ends the others first
            raise

    if world.size > 1:  # main's line that says how to continue
        started = ["torchrun", "--nproc-per-node", str(world.size)]
        script.shlex = SimpleNamespace(join=lambda words: shlex.join([*started, *words[1:]]))
    script.parse_args = parse_and_share
    script.train = train_part
