"""Deliberate bugs of rppo_lstm.py: (what it is, the text, the bug, a test file that must fail)."""

MATH = "test_mathematics.py"
REC = "test_recurrence.py"
AGENT = "test_agent.py"
ROLL = "test_rollout.py"
RUN = "test_run.py"
FAULTS = "test_faults.py"

MUTANTS = [
    # Advantages and returns
    ("truncation treated as termination", "np.where(terminated, 0, values[1:])", "np.where(done, 0, values[1:])", MATH),
    ("the trace crosses an episode's end", "np.where(done[t], 0, following)", "following", MATH),
    ("the trace crosses a truncation", "np.where(done[t], 0, following)", "np.where(terminated[t], 0, following)", MATH),
    ("done is off by one", "np.where(done[t], 0, following)", "np.where(done[t - 1], 0, following)", MATH),
    ("a nan survives a termination", "np.where(terminated, 0, values[1:])", "(1 - terminated) * values[1:]", MATH),
    ("lambda is forgotten", "gamma * lam * np.where", "gamma * np.where", MATH),
    ("the return accumulator ignores ends", "np.where(done[t], 0, gamma * sums[t])", "gamma * sums[t]", MATH),
    ("the accumulator loses the terminal reward", "sums[t] = rewards[t] + carried", "sums[t] = np.where(done[t], 0, rewards[t] + carried)", MATH),
    ("the accumulator starts afresh in each rollout", "sums[t] = rewards[t] + carried", "carried[:] = carried * (t > 0); sums[t] = rewards[t] + carried", MATH),
    ("merged variances lack the means' part", "        squares += delta**2 * self.count * n / total\n", "", MATH),
    ("statistics count final steps", "tensor(sums[valid])", "tensor(sums.ravel())", ROLL),
    # The loss
    ("max for min in the surrogate", "surrogate = torch.min(", "surrogate = torch.max(", MATH),
    ("the clip range is one-sided", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(max=1 + clip_coef)", MATH),
    ("the KL estimator is k1", "(ratio - 1 - log_ratio).mean()", "(-log_ratio).mean()", MATH),
    ("the value loss lost its half", "0.5 * (value - return_)", "1.0 * (value - return_)", ROLL),
    ("the entropy bonus has the wrong sign", "- args.ent_coef * entropy.mean()", "+ args.ent_coef * entropy.mean()", ROLL),
    ("advantages are not normalised", "advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)", "advantage = advantage - advantage.mean()", ROLL),
    ("the unbiased deviation, nan for one step", "advantage.std(correction=0)", "advantage.std()", ROLL),
    ("final steps are trained on", "counts = ~s_final[:, batch]", "counts = ~s_final[:, batch] | True", ROLL),
    ("values are one step late", "returns = advantages + v[:T]", "returns = advantages + v[1:]", ROLL),
    ("gradients are not clipped", "            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)\n", "", ROLL),
    ("the learning rate stays", "if args.anneal_lr else 1", "if not args.anneal_lr else 1", ROLL),
    ("target_kl is ignored", "if kl > 1.5 * args.target_kl:", "if kl > 1e9 * args.target_kl:", ROLL),
    # The recurrence
    ("the forget gate stays open", "[[1.0], [1.0], [0.0], [0.0]]", "[[1.0], [0.0], [0.0], [0.0]]", REC),
    ("the input gate stays open", "[[1.0], [1.0], [0.0], [0.0]]", "[[0.0], [1.0], [0.0], [0.0]]", REC),
    ("the final observation leaks", "x = torch.where(final.unsqueeze(-1), self.reset, x)", "x = x + final.unsqueeze(-1) * self.reset", REC),
    ("a reset too weak", "[-1e4]", "[-1e1]", REC),
    ("replay from zeros instead of the stored state", "x, (state[:1], state[1:]), weights", "x, (state[:1] * 0, state[1:] * 0), weights", REC),
    ("h and c exchanged", "x, (state[:1], state[1:]), weights", "x, (state[1:], state[:1]), weights", REC),
    ("the state is not reset after a final step", "                if final[t].any():", "                if False:", ROLL),
    ("a state of NaN survives a reset", "state = state.where(tensor(~final[t])[:, None], 0.0)", "state = state * tensor(~final[t])[:, None]", ROLL),
    ("truncation bootstrapped after the state was zeroed", "agent.step(tensor(obs[t]), tensor(legal[t]), state)\n                actions", "agent.step(tensor(obs[t]), tensor(legal[t]), state.where(tensor(~final[t])[:, None], 0.0))\n                actions", ROLL),
    ("(T, N) read as (N, T)", "s_states = states.transpose(0, 1).flatten(1, 2)", "s_states = states.reshape(states.shape[1], -1, states.shape[3])", ROLL),
    ("sequences of other environments", "(x.flatten(1, 2) for x in chunks)", "(x.transpose(1, 2).flatten(1, 2) for x in chunks)", ROLL),
    ("the final flag is set one step late", "final[t + 1] = terminated[t] | truncated[t]", "final[t + 1] = terminated[t - 1] | truncated[t - 1]", ROLL),
    ("a rollout forgets its first step's final flag", "obs[0], legal[0], final[0] = obs[T], legal[T], final[T]", "obs[0], legal[0] = obs[T], legal[T]", ROLL),
    # The agent
    ("illegal choices are only masked in acting", "logp = self.log_probs(h, legal)\n        logprob", "logp = self.log_probs(h, torch.ones_like(legal))\n        logprob", AGENT),
    ("components that do not exist can be chosen", "np.broadcast_to(exists, (len(final), *exists.shape)).copy()", "np.ones((len(final), *exists.shape), bool)", AGENT),
    ("the start of a Discrete space is forgotten", 'getattr(space, "start", 0)', "0", AGENT),
    ("a mask that nobody sent", 'info.get("_action_mask", True) & ~final', "~final", AGENT),
    ("the critic reads the actor's LSTM", "critic_h = self.critic_lstm(x, state[2:], final)", "critic_h = h", AGENT),
    ("sampling without noise", "torch.empty(logp.shape).exponential_()", "torch.ones(logp.shape)", MATH),
    ("the ablation keeps its memory", "torch.zeros_like(state) if self.args.ablate_memory else next_state", "next_state", AGENT),
    ("predict forgets", "state = self.initial_state(len(obs)) if state is None else state", "state = self.initial_state(len(obs))", AGENT),
    # The run
    ("final steps count as environment steps", "run.log(int(valid.sum())", "run.log(valid.size", ROLL),
    ("resuming forgets the optimiser", '            optimizer.load_state_dict(saved["optimizer"])\n', "", RUN),
    ("resuming forgets the random numbers", '            torch.set_rng_state(saved["rng"])\n', "", RUN),
    ("resuming forgets the steps", 'self.step, seconds = saved["step"], saved["seconds"]', 'self.step, seconds = 0, saved["seconds"]', RUN),
    ("agent.pt is written in place", 'with open(self.dir / "agent.tmp", "wb") as file:', 'with open(self.dir / "agent.pt", "wb") as file:', RUN),
    ("agent.pt runs code", "weights_only=True", "weights_only=False", RUN),
    ("flipped bits are not found", "opened.testzip() is None", "True", FAULTS),
    ("nonsense args are taken", "same or getattr(Args, name) is None", "True", RUN),
    ("a NaN reward trains on", '        check_finite("rewards", rewards)\n', "", FAULTS),
    ("no agent.pt before the first reset", "        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow\n        self.save()\n", "        self.timed: list[tuple[int, float]] = []\n        self.saved = time.time()\n", RUN),
    ("TensorBoard keeps points after the saved step", ", purge_step=self.step + 1", "", RUN),
    ("another task may be resumed", "for name in FIXED if run_dir else ():", "for name in ():", RUN),
    ("--resume decides what --play shows", "early.play or early.resume", "early.resume or early.play", RUN),
    ("a failed run goes on when the next should begin", "Path(args.resume or Path(args.runs_dir, name))", "Path(args.resume or Run.latest or Path(args.runs_dir, name))", RUN),
    ("two runs of a process share a record", 'reinit="finish_previous", ', "", RUN),
    ("a refused run reopens the record of its name", " and (args.resume or not self.dir.exists())", "", RUN),
    ("velocities of the wrong entries", '"CartPole": [1, 3]', '"CartPole": [0, 2]', AGENT),
    ("all epochs have one order", "torch.cat([torch.randperm(S) for _ in range(args.update_epochs)])", "torch.randperm(S).repeat(args.update_epochs)", ROLL),
    ("the control has long sequences", "L = 1 if args.ablate_memory else args.seq_len or T", "L = args.seq_len or T", ROLL),
    # What a run keeps and logs, first weights, and more
    ("losses are logged under each other's names", '("policy_loss", "value_loss", "entropy", "approx_kl")', '("value_loss", "policy_loss", "entropy", "approx_kl")', ROLL),
    ("Adam's epsilon is torch's default", "eps=1e-5, ", "", RUN),
    ("a resumed run plays the first episodes again", "seed=args.seed + run.step", "seed=args.seed", RUN),
    ("the actor's first weights are as large as others", ", std=0.01)", ")", AGENT),
    ("the critic's last layer begins too large", ", std=1.0)", ")", AGENT),
]  # fmt: skip
