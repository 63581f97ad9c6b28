"""The oracle: the networks, PPO and TRPO of all five scripts written out by hand, in float64.

Everything is plain and slow: one cell a time step, sums as the papers write them, Adam in five
lines. `train` gets what was played (support.record), the first weights and the state of the random
numbers; it answers with the actions, gradients, weights and metrics that must follow.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def dense(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def lstm_cell(w: Weights, name: str, x: Tensor, state: Tensor) -> Tensor:
    """x (N, F), state (2, N, H): h and c -> the next state (Hochreiter & Schmidhuber 1997)."""
    h, c = state
    gates = x @ w[f"{name}.weight_ih"].T + w[f"{name}.bias_ih"]
    gates = gates + h @ w[f"{name}.weight_hh"].T + w[f"{name}.bias_hh"]
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return torch.stack([o.sigmoid() * c.tanh(), c])


def gru_cell(w: Weights, name: str, x: Tensor, state: Tensor) -> Tensor:
    """x (N, F), state (1, N, H) -> the next state (Cho et al. 2014, torch's variant)."""
    h = state[0]
    r, z, n = (x @ w[f"{name}.weight_ih"].T + w[f"{name}.bias_ih"]).chunk(3, -1)
    hr, hz, hn = (h @ w[f"{name}.weight_hh"].T + w[f"{name}.bias_hh"]).chunk(3, -1)
    z = (z + hz).sigmoid()
    n = (n + (r + hr).sigmoid() * hn).tanh()
    return ((1 - z) * n + z * h)[None]


def loop(step: Callable, x: Tensor, state: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """What a recurrence with resets is: step(x[t], state) -> (h, state), and a state of zero after
    a final step. x (T, N, ...), state (rows, N, ...), final (T, N) -> h (T, N, H), the last state."""
    outputs = []
    for t in range(len(x)):
        h, state = step(x[t], state)
        outputs.append(h)
        keep = (~final[t]).reshape(1, -1, *[1] * (state.dim() - 2))
        state = torch.where(keep, state, torch.zeros_like(state))
    return torch.stack(outputs), state


def assert_is_the_loop(memory, final: Tensor) -> list[Tensor]:
    """A memory of 5 inputs, in float64, replays what its step plays: outputs and gradients, which
    are returned, from a state that an episode might have after some steps."""
    x = torch.randn(*final.shape, 5, dtype=torch.float64, requires_grad=True)
    state = memory.initial_state(final.shape[1])
    assert not state.any()
    with torch.no_grad():
        for row in torch.randn(3, *x.shape[1:], dtype=x.dtype):
            _, state = memory.step(row, state)
    state.requires_grad_()
    replayed, played = (
        memory(x, state, final)[~final],
        loop(memory.step, x, state, final)[0][~final],
    )
    weight = torch.randn_like(played)
    inputs = [x, state, *memory.parameters()]
    ours, theirs = (torch.autograd.grad((h * weight).sum(), inputs) for h in (replayed, played))
    assert torch.allclose(replayed, played, rtol=0, atol=1e-12)
    assert all((a - b).abs().max() <= 1e-10 for a, b in zip(ours, theirs))
    assert not ours[0][final].any()  # a final step's input moves nothing
    return ours


def gae(rewards, values, terminated, done, gamma: float, lam: float) -> np.ndarray:
    """Schulman et al. 2016, eq. 16: A_t = sum_k (gamma lambda)^(k - t) delta_k within an episode."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, n] else values[k + 1, n]
                delta = rewards[k, n] + gamma * bootstrap - values[k, n]
                advantages[t, n] += (gamma * lam) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


def log_softmax(x: Tensor) -> Tensor:
    return x - x.exp().sum(-1, keepdim=True).log()


class Adam:
    """Kingma & Ba 2015, algorithm 1, with an epsilon of 1e-5."""

    def __init__(self, w: Weights):
        self.w, self.t = w, 0
        self.m = {name: torch.zeros_like(x) for name, x in w.items()}
        self.v = {name: torch.zeros_like(x) for name, x in w.items()}

    def step(self, gradients: Weights, lr: float) -> None:
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.999**self.t)
            with torch.no_grad():
                self.w[name] -= lr * m / (v.sqrt() + 1e-5)


class Network:
    """A script's agent, as functions of its weights."""

    def __init__(self, script: str, args, w: Weights):
        self.script, self.args, self.w = script, args, w
        self.memory = getattr(args, "memory", "lstm") == "lstm"
        self.box = "log_std" in w or script == "rppo_continuous"
        self.sde = getattr(args, "use_sde", False)
        self.two = script == "ppo1_mpi"  # networks that share nothing

    def state(self, N: int) -> Tensor:
        rows = {"rppo_gru_atari": 1, "ppo1_mpi": 4}.get(self.script, 2) if self.memory else 0
        return torch.zeros(rows, N, self.args.hidden_size if rows else 0, dtype=torch.float64)

    def encode(self, name: str, x: Tensor) -> Tensor:
        if self.script == "rppo_gru_atari":
            x = x / 255
            for layer, stride in ("0", 4), ("2", 2), ("4", 1):
                kernel, bias = (self.w[f"encoder.cnn.{layer}.{k}"] for k in ("weight", "bias"))
                x = torch.nn.functional.conv2d(x, kernel, bias, stride).relu()
            return dense(self.w, "encoder.cnn.7", x.flatten(1)).relu()
        x = dense(self.w, f"{name}.0", x).tanh()
        if self.script in ("trpo", "ppo1_mpi"):
            x = dense(self.w, f"{name}.2", x).tanh()
        return x

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, ...) -> h (N, F), value (N,), the next state."""
        h = self.encode("encoder", obs)
        if self.two:
            critic_h = self.encode("critic_encoder", obs)
        if self.memory:
            if self.script == "rppo_gru_atari":
                state = gru_cell(self.w, "gru.cell", h, state)
            elif self.two:
                critic = lstm_cell(self.w, "critic_lstm.cell", critic_h, state[2:])
                state = torch.cat([lstm_cell(self.w, "lstm.cell", h, state[:2]), critic])
                critic_h = state[2]
            else:
                state = lstm_cell(self.w, "lstm.cell", h, state)
            h = state[0]
        if self.script == "trpo":
            x = torch.cat([obs, h.detach()], -1) if self.memory else obs
            value = dense(self.w, "critic.4", self.encode("critic", x))
        else:
            value = dense(self.w, "critic", critic_h if self.two else h)
        if getattr(self.args, "ablate_memory", False):
            state = torch.zeros_like(state)
        return h, value[..., 0], state

    def unroll(self, obs: Tensor, state: Tensor, final: Tensor):
        """obs (T, N, ...) -> h (T, N, F), values (T, N), the states before each step."""
        hs, values, states = [], [], []
        for t in range(len(obs)):
            states.append(state)
            h, value, state = self.step(obs[t], state)
            hs.append(h)
            values.append(value)
            state = torch.where(final[t][:, None], torch.zeros_like(state), state)
        return torch.stack(hs), torch.stack(values), states

    def deviation(self, h: Tensor) -> Tensor:
        """Of the noise in an action, (..., K)."""
        std = self.w["log_std"].exp()
        return (
            (h.detach() ** 2 @ std**2 + 1e-6).sqrt() if self.sde else std.expand(*h.shape[:-1], -1)
        )

    def log_prob(self, h: Tensor, actions: Tensor) -> Tensor:
        out = dense(self.w, "actor", h)
        if not self.box:
            return log_softmax(out).gather(-1, actions[..., None])[..., 0]
        std = self.deviation(h)
        density = -(((actions - out) / std) ** 2) / 2 - std.log() - math.log(2 * math.pi) / 2
        return density.sum(-1)

    def entropy(self, h: Tensor) -> Tensor:
        if self.box:
            return (self.deviation(h).log() + (1 + math.log(2 * math.pi)) / 2).sum(-1)
        log_pi = log_softmax(dense(self.w, "actor", h))
        return -(log_pi.exp() * log_pi).sum(-1)

    def kl(self, h: Tensor, old: tuple[Tensor, Tensor]) -> Tensor:
        """KL(old || this), old as `parameters` gave it, summed over an action's components."""
        new, before = dense(self.w, "actor", h), old[0]
        if not self.box:
            p = log_softmax(before)
            return (p.exp() * (p - log_softmax(new))).sum(-1)
        s, r = old[1], self.deviation(h)
        return ((r / s).log() + (s**2 + (before - new) ** 2) / (2 * r**2) - 0.5).sum(-1)

    def act(self, h: Tensor, generator: torch.Generator, noise: Tensor | None) -> Tensor:
        out = dense(self.w, "actor", h)
        if self.sde:
            return out + torch.einsum("nh,nhk->nk", h, noise)
        if self.box:
            return out + noise
        race = torch.empty(out.shape, dtype=torch.float64).exponential_(generator=generator)
        return (log_softmax(out).exp() / race).argmax(-1)


class Rank:
    """What one process played, one rollout after the other."""

    def __init__(self, seen, args):
        self.T, self.N, self.args = args.num_steps, args.num_envs, args
        actions, obs, *arrays = (np.stack(x) for x in zip(*seen.steps))
        self.sent = actions
        self.rewards, self.terminated, self.truncated, self.lives = arrays
        self.obs = np.concatenate([seen.reset[0][None], obs])
        ends = self.terminated | self.truncated
        self.final = np.concatenate([np.zeros((1, self.N), bool), ends])
        self.lives = np.concatenate([seen.reset[1][None], self.lives])
        self.generator = torch.Generator()
        self.generator.set_state(seen.rng)
        self.running = np.zeros(self.N)  # discounted sums
        self.state: Tensor = torch.zeros(0)
        self.acted: list = []

    def rollout(self, i: int) -> SimpleNamespace:
        start, end = i * self.T, (i + 1) * self.T
        terminated = self.terminated[start:end].copy()
        if getattr(self.args, "terminal_on_life_loss", False):
            terminated |= self.lives[start + 1 : end + 1] < self.lives[start:end]
        rewards = self.rewards[start:end].astype(np.float64)
        rewards[self.final[start:end]] = 0.0
        return SimpleNamespace(
            obs=torch.from_numpy(self.obs[start : end + 1]).double(),
            final=torch.from_numpy(self.final[start : end + 1]),
            valid=torch.from_numpy(~self.final[start:end]),
            rewards=rewards, terminated=terminated,
            done=terminated | self.truncated[start:end],
        )  # fmt: skip


def train(script: str, ranks: list) -> SimpleNamespace:
    """The training that follows from what the ranks played (one, but for ppo1_mpi)."""
    args, total = ranks[0].args, ranks[0].args.total_timesteps
    w = {k: x.double().clone().requires_grad_() for k, x in ranks[0].first.items()}
    net, adam = (
        Network(script, args, w),
        Adam({k: x for k, x in w.items() if moved_by_adam(script, k)}),
    )
    players = [Rank(seen, args) for seen in ranks]
    for player in players:
        player.state = net.state(args.num_envs)
    memoryless = getattr(args, "ablate_memory", False) or (script == "ppo1_mpi" and not net.memory)
    T = args.num_steps
    L = 1 if memoryless else getattr(args, "seq_len", 0) or T
    rows: list[np.ndarray] = []  # observations that count
    sums: list[float] = []  # discounted sums of rewards that count
    out = SimpleNamespace(updates=[], logs=[[] for _ in ranks], w=w, net=net, actions=players,
                          epochs=[], rows=rows, sums=sums, step=0, ratios=[])  # fmt: skip
    for i in range(len(players[0].sent) // T):
        data = []
        fresh: list[np.ndarray] = []
        for player in players:
            x = player.rollout(i)
            fresh.append(x.obs[:T][x.valid].numpy())
            if getattr(args, "norm_obs", False):
                seen = np.concatenate(rows) if rows else np.array([[-1.0], [1.0]])
                x.obs = (x.obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
                x.obs = x.obs.clamp(-10, 10)
            with torch.no_grad():
                hs, values, x.states = net.unroll(x.obs, player.state, x.final)
                player.state = x.states[T]
                x.actions = act(net, args, hs[:T], player.generator)
                player.acted.append(x.actions)
                x.old_logprob = net.log_prob(hs[:T], x.actions)
            x.h, x.v = hs, values.numpy()
            if getattr(args, "norm_reward", False):
                for t in range(T):
                    player.running = args.gamma * player.running + x.rewards[t]
                    sums.extend(player.running[x.valid[t].numpy()])
                    player.running[x.done[t]] = 0.0
                x.rewards /= np.sqrt(np.var(sums) + 1e-8)
            if getattr(args, "clip_rewards", False):
                x.rewards = np.sign(x.rewards)
            ends = x.terminated, x.done
            x.advantages = gae(x.rewards, x.v, *ends, args.gamma, args.gae_lambda)
            x.returns = torch.from_numpy(x.advantages + x.v[:T])
            x.advantages = torch.from_numpy(x.advantages)
            if script == "ppo1_mpi" and x.valid.any():
                x.advantages = normalized(x.advantages, x.advantages[x.valid])
            data.append(x)
        if script == "trpo":
            metrics = [trpo(net, args, adam, data[0], players[0].generator, out)]
        else:
            metrics = ppo(net, args, adam, data, players, L, out)
        rows.extend(fresh)
        out.step += sum(int(x.valid.sum()) for x in data)
        for log, x, row in zip(out.logs, data, metrics):
            r, v = x.returns[x.valid].numpy(), x.v[:T][x.valid.numpy()]
            explained = 1 - np.var(r - v) / (np.var(r) + 1e-8) if len(r) else np.nan
            log.append((out.step, row, explained))
    assert out.step >= total
    return out


def moved_by_adam(script: str, name: str) -> bool:
    return script != "trpo" or name.startswith("critic")


def act(net: Network, args, hs: Tensor, generator: torch.Generator) -> Tensor:
    """The actions of a rollout, (T, N) or (T, N, K), not clipped."""
    if net.script in ("trpo", "ppo1_mpi"):  # whose noise is drawn at the rollout's start
        out = dense(net.w, "actor", hs)
        noise = torch.empty(out.shape, dtype=torch.float64)
        if net.box:
            return out + noise.normal_(generator=generator) * net.w["log_std"].exp()
        return (log_softmax(out).exp() / noise.exponential_(generator=generator)).argmax(-1)
    every = 1
    if net.sde:
        every = len(hs) if args.sde_sample_freq == -1 else args.sde_sample_freq
    actions, noise = [], None
    for t, h in enumerate(hs):
        if net.script == "rppo_continuous" and t % every == 0:
            shape = len(h), *net.w["log_std"].shape
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            noise = noise * net.w["log_std"].exp()
        actions.append(net.act(h, generator, noise))
    return torch.stack(actions)


def normalized(x: Tensor, of: Tensor) -> Tensor:
    return (x - of.mean()) / (((of - of.mean()) ** 2).mean().sqrt() + 1e-8)


def ppo(net: Network, args, adam: Adam, data: list, players: list, L: int, out) -> list:
    """An update in minibatches of whole sequences -> for each rank a list of METRICS."""
    T, N, R = args.num_steps, args.num_envs, len(data)
    S = N * T // L
    left = 1 - out.step / args.total_timesteps if args.anneal_lr else 1
    clip = args.clip_coef * (left if net.two else 1)
    metrics: list[list] = [[] for _ in data]
    for _ in range(args.update_epochs):
        orders = [torch.randperm(S, generator=player.generator) for player in players]
        out.epochs.append(orders)
        for batches in zip(*(order.view(args.num_minibatches, -1) for order in orders)):
            loss, rows = torch.zeros((), dtype=torch.float64), []
            for x, batch in zip(data, batches):
                first, n = batch // N * L, batch % N  # where its sequences begin
                t = first + torch.arange(L)[:, None]  # (L, B)
                final = x.final[t, n]
                if final.all():
                    rows.append([0.0] * 5)
                    continue
                state = torch.stack([x.states[a][:, b] for a, b in zip(first, n)], 1)
                h, value, _ = net.unroll(x.obs[t, n], state, final)
                h, value, t, n = h[~final], value[~final], t[~final], n.expand(L, -1)[~final]
                advantage = x.advantages[t, n]
                if not net.two:
                    advantage = normalized(advantage, advantage)
                ratio = (net.log_prob(h, x.actions[t, n]) - x.old_logprob[t, n]).exp()
                if not metrics[0]:
                    out.ratios.append(ratio.detach())
                clipped = ratio.clamp(1 - clip, 1 + clip)
                policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                value_loss = ((value - x.returns[t, n]) ** 2).mean() / 2
                entropy = net.entropy(h).mean()
                kl = (ratio - 1 - ratio.log()).mean()
                outside = ((ratio - 1).abs() > clip).double().mean()
                loss = (
                    loss + (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy) / R
                )
                rows.append([y.item() for y in (policy_loss, value_loss, entropy, kl, outside)])
            if not loss.requires_grad and not net.two:
                continue  # every step of the minibatch is final
            gradients = {k: torch.zeros_like(p) for k, p in net.w.items()}
            if loss.requires_grad:
                found = torch.autograd.grad(loss, [*net.w.values()], allow_unused=True)
                gradients |= {k: g for k, g in zip(net.w, found) if g is not None}
            norm = sum((g**2).sum() for g in gradients.values()).sqrt()
            for of_rank, row in zip(metrics, rows):
                of_rank.append([*row, norm.item() if any(row) else 0.0])
            if hasattr(args, "max_grad_norm"):
                factor = min(1.0, args.max_grad_norm / (norm.item() + 1e-6))
                gradients = {k: factor * g for k, g in gradients.items()}
            if sum(row[3] for row in rows) / R > 1.5 * (args.target_kl or float("inf")):
                return metrics
            weights = {k: p.detach().clone() for k, p in net.w.items()}
            out.updates.append((left * args.learning_rate, weights, gradients))
            adam.step(gradients, left * args.learning_rate)
    return metrics


def fisher(net: Network, x, chosen: Tensor, names: list[str]) -> Tensor:
    """E[d log pi / d theta (d log pi / d theta)'], (P, P): J' M J, where J is the derivative of
    logits or means, and M the Fisher matrix of the distribution in them."""
    T = len(x.final) - 1

    def outputs(*parameters):
        moved = Network(net.script, net.args, {**net.w, **dict(zip(names, parameters))})
        h, _, _ = moved.unroll(x.obs[:T], x.states[0], x.final[:T])
        return dense(moved.w, "actor", h[chosen])

    parameters = tuple(net.w[name].detach() for name in names)
    pieces = torch.autograd.functional.jacobian(outputs, parameters, vectorize=True)
    J = torch.cat([piece.flatten(2) for piece in pieces], -1)  # (M, A, P)
    out = outputs(*parameters)
    if net.box:
        inner = torch.diag(net.w["log_std"].detach() ** 0 / net.w["log_std"].exp() ** 2)
        inner = inner.expand(len(J), -1, -1)
    else:
        p = log_softmax(out).exp()
        inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    F = torch.einsum("map,mab,mbq->pq", J, inner, J) / len(J)
    if net.box:  # of log_std: 2
        start = sum(net.w[name].numel() for name in names[: names.index("log_std")])
        i = torch.arange(start, start + len(net.w["log_std"]))
        F[i, i] += 2.0
    return F.detach()


def conjugate_gradient(A: Tensor, b: Tensor, steps: int) -> Tensor:
    """Hestenes & Stiefel 1952, until the squared residual is below 1e-10."""
    x, r = torch.zeros_like(b), b.clone()
    p = r
    for _ in range(steps):
        if r @ r < 1e-10:
            break
        alpha = (r @ r) / (p @ A @ p)
        x, new = x + alpha * p, r - alpha * (A @ p)
        p = new + (new @ new) / (r @ r) * p
        r = new
    return x


def trpo(net: Network, args, adam: Adam, x, generator: torch.Generator, out) -> list:
    """One step of the policy, and the critic's passes -> METRICS."""
    T, valid = args.num_steps, x.valid
    names = [name for name in net.w if not name.startswith("critic")]
    actions = x.actions[valid]
    advantage = normalized(x.advantages[valid], x.advantages[valid])
    h = x.h[:T][valid]
    with torch.no_grad():
        old = dense(net.w, "actor", h), net.deviation(h) if net.box else None
        old_logprob, entropy = net.log_prob(h, actions), net.entropy(h).mean().item()
    inputs = torch.cat([x.obs, x.h], -1) if net.memory else x.obs
    inputs = inputs[:T][valid]

    def replay():
        hs, _, _ = net.unroll(x.obs[:T], x.states[0], x.final[:T])
        return hs[valid]

    objective = (net.log_prob(replay(), actions) * advantage).mean()  # the policy gradient
    found = torch.autograd.grad(objective, [net.w[name] for name in names])
    g = torch.cat([piece.flatten() for piece in found])
    nth = torch.zeros(args.num_envs, dtype=torch.long)  # steps that count, of each environment
    chosen = torch.zeros_like(valid)
    for t in range(T):
        chosen[t] = valid[t] & (nth % args.sub_sampling_factor == 0)
        nth += valid[t]
    F = fisher(net, x, chosen, names)
    F += args.cg_damping * torch.eye(len(F), dtype=torch.float64)
    direction = conjugate_gradient(F, g, args.cg_max_steps)
    full = (2 * args.target_kl / (direction @ F @ direction)).sqrt() * direction
    theta = torch.cat([net.w[name].detach().flatten() for name in names])
    row = [0.0, 0.0, 0.0, 0.0]
    for i in range(args.line_search_max_iter + 1):
        fraction = args.line_search_shrinking_factor**i
        if i == args.line_search_max_iter:
            fraction = 0.0
        with torch.no_grad():
            point = theta + fraction * full
            for name, piece in zip(names, point.split([net.w[k].numel() for k in names])):
                net.w[name].copy_(piece.view_as(net.w[name]))
            h = replay()
            kl = net.kl(h, old).mean().item()
            gain = ((net.log_prob(h, actions) - old_logprob).exp() - 1) * advantage
        if fraction and kl < args.target_kl and gain.mean() > 0:
            row = [kl, gain.mean().item(), fraction * (g @ full).item(), fraction]
            break
    returns, losses = x.returns[valid], []
    critic = {k: p for k, p in net.w.items() if k.startswith("critic")}
    for _ in range(args.n_critic_updates):
        for batch in torch.randperm(len(inputs), generator=generator).split(args.batch_size):
            value = dense(net.w, "critic.4", net.encode("critic", inputs[batch]))[:, 0]
            loss = ((value - returns[batch]) ** 2).mean()
            gradients = dict(zip(critic, torch.autograd.grad(loss, [*critic.values()])))
            weights = {k: p.detach().clone() for k, p in net.w.items()}
            out.updates.append((args.learning_rate, weights, gradients))
            adam.step(gradients, args.learning_rate)
            losses.append(loss.item())
    return [[*row, entropy, float(np.mean(losses))]]
