"""Deliberate bugs, of the kinds that peers fell into: (script, what it is, the text, the bug, a test file that must fail).

`python tests/mutants/run.py [SCRIPT ...]` tries them all, each in a copy of the repository.
"""

L = "rppo_lstm"
MATH, REC, AGENT, ROLL, RUN, FAULTS = (
    f"test_{name}.py" for name in ("mathematics", "recurrence", "agent", "rollout", "run", "faults")
)

MUTANTS = [
    # Advantages and returns
    (L, "truncation treated as termination", "np.where(terminated, 0, values[1:])", "np.where(done, 0, values[1:])", MATH),
    (L, "the trace crosses an episode's end", "np.where(done[t], 0, following)", "following", MATH),
    (L, "the trace crosses a truncation", "np.where(done[t], 0, following)", "np.where(terminated[t], 0, following)", MATH),
    (L, "done is off by one", "np.where(done[t], 0, following)", "np.where(done[t - 1], 0, following)", MATH),
    (L, "a nan survives a termination", "np.where(terminated, 0, values[1:])", "(1 - terminated) * values[1:]", MATH),
    (L, "lambda is forgotten", "gamma * lam * np.where", "gamma * np.where", MATH),
    (L, "the return accumulator ignores ends", "np.where(done[t], 0, gamma * sums[t])", "gamma * sums[t]", MATH),
    (L, "the accumulator loses the terminal reward", "sums[t] = rewards[t] + carried", "sums[t] = np.where(done[t], 0, rewards[t] + carried)", MATH),
    (L, "the accumulator starts afresh in each rollout", "sums[t] = rewards[t] + carried", "carried[:] = carried * (t > 0); sums[t] = rewards[t] + carried", MATH),
    (L, "merged variances lack the means' part", "        squares += delta**2 * self.count * n / total\n", "", MATH),
    (L, "statistics count final steps", "tensor(sums[valid])", "tensor(sums.ravel())", ROLL),
    # The loss
    (L, "max for min in the surrogate", "surrogate = torch.min(", "surrogate = torch.max(", MATH),
    (L, "the clip range is one-sided", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(max=1 + clip_coef)", MATH),
    (L, "the KL estimator is k1", "(ratio - 1 - log_ratio).mean()", "(-log_ratio).mean()", MATH),
    (L, "the value loss lost its half", "0.5 * (value - return_)", "1.0 * (value - return_)", ROLL),
    (L, "the entropy bonus has the wrong sign", "- args.ent_coef * entropy.mean()", "+ args.ent_coef * entropy.mean()", ROLL),
    (L, "advantages are not normalised", "advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)", "advantage = advantage - advantage.mean()", ROLL),
    (L, "the unbiased deviation, nan for one step", "advantage.std(correction=0)", "advantage.std()", ROLL),
    (L, "final steps are trained on", "counts = ~s_final[:, batch]", "counts = ~s_final[:, batch] | True", ROLL),
    (L, "values are one step late", "returns = advantages + v[:T]", "returns = advantages + v[1:]", ROLL),
    (L, "gradients are not clipped", "            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)\n", "", ROLL),
    (L, "the learning rate stays", "if args.anneal_lr else 1", "if not args.anneal_lr else 1", ROLL),
    (L, "target_kl is ignored", "if kl > 1.5 * args.target_kl:", "if kl > 1e9 * args.target_kl:", ROLL),
    # The recurrence
    (L, "the forget gate stays open", "[[1.0], [1.0], [0.0], [0.0]]", "[[1.0], [0.0], [0.0], [0.0]]", REC),
    (L, "the input gate stays open", "[[1.0], [1.0], [0.0], [0.0]]", "[[0.0], [1.0], [0.0], [0.0]]", REC),
    (L, "the final observation leaks", "x = torch.where(final.unsqueeze(-1), self.reset, x)", "x = x + final.unsqueeze(-1) * self.reset", REC),
    (L, "a reset too weak", "[-1e4]", "[-1e1]", REC),
    (L, "replay from zeros instead of the stored state", "x, (state[:1], state[1:]), weights", "x, (state[:1] * 0, state[1:] * 0), weights", REC),
    (L, "h and c exchanged", "x, (state[:1], state[1:]), weights", "x, (state[1:], state[:1]), weights", REC),
    (L, "the state is not reset after a final step", "                if final[t].any():", "                if False:", ROLL),
    (L, "a state of NaN survives a reset", "state = state.where(tensor(~final[t])[:, None], 0.0)", "state = state * tensor(~final[t])[:, None]", ROLL),
    (L, "truncation bootstrapped after the state was zeroed", "agent.step(tensor(obs[t]), tensor(legal[t]), state)\n                actions", "agent.step(tensor(obs[t]), tensor(legal[t]), state.where(tensor(~final[t])[:, None], 0.0))\n                actions", ROLL),
    (L, "(T, N) read as (N, T)", "s_states = states.transpose(0, 1).flatten(1, 2)", "s_states = states.reshape(states.shape[1], -1, states.shape[3])", ROLL),
    (L, "sequences of other environments", "(x.flatten(1, 2) for x in chunks)", "(x.transpose(1, 2).flatten(1, 2) for x in chunks)", ROLL),
    (L, "the final flag is set one step late", "final[t + 1] = terminated[t] | truncated[t]", "final[t + 1] = terminated[t - 1] | truncated[t - 1]", ROLL),
    (L, "a rollout forgets its first step's final flag", "obs[0], legal[0], final[0] = obs[T], legal[T], final[T]", "obs[0], legal[0] = obs[T], legal[T]", ROLL),
    # The agent
    (L, "illegal choices are only masked in acting", "logp = self.log_probs(h, legal)\n        logprob", "logp = self.log_probs(h, torch.ones_like(legal))\n        logprob", AGENT),
    (L, "components that do not exist can be chosen", "np.broadcast_to(exists, (len(final), *exists.shape)).copy()", "np.ones((len(final), *exists.shape), bool)", AGENT),
    (L, "the start of a Discrete space is forgotten", 'getattr(space, "start", 0)', "0", AGENT),
    (L, "a mask that nobody sent", 'info.get("_action_mask", True) & ~final', "~final", AGENT),
    (L, "the critic reads the actor's LSTM", "critic_h = self.critic_lstm(x, state[2:], final)", "critic_h = h", AGENT),
    (L, "sampling without noise", "torch.empty(logp.shape).exponential_()", "torch.ones(logp.shape)", MATH),
    (L, "the ablation keeps its memory", "torch.zeros_like(state) if self.args.ablate_memory else next_state", "next_state", AGENT),
    (L, "predict forgets", "state = self.initial_state(len(obs)) if state is None else state", "state = self.initial_state(len(obs))", AGENT),
    # The run
    (L, "final steps count as environment steps", "run.log(int(valid.sum())", "run.log(valid.size", ROLL),
    (L, "resuming forgets the optimiser", '            optimizer.load_state_dict(saved["optimizer"])\n', "", RUN),
    (L, "resuming forgets the random numbers", '            torch.set_rng_state(saved["rng"])\n', "", RUN),
    (L, "resuming forgets the steps", 'self.step, seconds = saved["step"], saved["seconds"]', 'self.step, seconds = 0, saved["seconds"]', RUN),
    (L, "agent.pt is written in place", 'with open(self.dir / "agent.tmp", "wb") as file:', 'with open(self.dir / "agent.pt", "wb") as file:', RUN),
    (L, "agent.pt runs code", "weights_only=True", "weights_only=False", RUN),
    (L, "flipped bits are not found", "zipfile.ZipFile(opened).testzip() is None", "True", FAULTS),
    (L, "nonsense args are taken", "same or getattr(Args, name) is None", "True", RUN),
    (L, "a NaN reward trains on", '        check_finite("rewards", rewards)\n', "", FAULTS),
    (L, "no agent.pt before the first reset", "        self.timed: list[tuple[int, float]] = []  # steps and seconds of each iteration\n        self.save()\n", "        self.timed: list[tuple[int, float]] = []\n        self.saved = time.time()\n", RUN),
    (L, "TensorBoard keeps points after the saved step", ", purge_step=self.step + 1", "", RUN),
    (L, "another task may be resumed", "for name in FIXED if run_dir else ():", "for name in ():", RUN),
    (L, "velocities of the wrong entries", '"CartPole": [1, 3]', '"CartPole": [0, 2]', AGENT),
]  # fmt: skip
