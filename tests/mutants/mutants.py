"""Deliberate bugs of the kinds that peers fell into: (script, what it is, the text, the bug, the tests that must fail).

The tests are a pytest file and a -k expression. `python tests/mutants/run.py` tries them all, each in its own copy.
"""

L, C, G, M, T = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "ppo1_mpi", "trpo"
GAE, REC, AGENT, RUN = "test_mathematics.py", "test_recurrence.py", "test_agent.py", "test_run.py"
CONTINUOUS = "test_continuous.py"

MUTANTS = [
    # Advantages and returns
    (L, "truncation treated as termination", "values[1:].where(~terminated, 0.0)", "values[1:].where(~done, 0.0)", GAE, "gae_is"),
    (L, "the trace crosses an episode's end", "carried.where(~done[t], 0.0)", "carried", GAE, "gae_is"),
    (L, "the trace crosses a truncation", "carried.where(~done[t], 0.0)", "carried.where(~terminated[t], 0.0)", GAE, "gae_is"),
    (L, "done is off by one", "carried.where(~done[t], 0.0)", "carried.where(~done[t - 1], 0.0)", GAE, "gae_is"),
    (L, "a nan survives a termination", "values[1:].where(~terminated, 0.0)", "values[1:] * ~terminated", GAE, "nan"),
    (L, "lambda is forgotten", "gamma * lam * carried", "gamma * carried", GAE, "gae_is"),
    (L, "the return accumulator ignores truncations", "gamma * sums[t].where(~done[t], 0.0)", "gamma * sums[t]", GAE, "return_statistics"),
    (L, "the accumulator loses the terminal reward", "sums[t] = rewards[t] + carried", "sums[t] = (rewards[t] + carried).where(~done[t], 0.0)", GAE, "return_statistics"),
    (L, "the variance of merged batches lacks the means' part", " + delta**2 * self.count * n / total", "", GAE, "running_mean"),
    # The loss
    (L, "padding or final rows count in the loss", "(x * weight).sum() / weight.sum().clamp(min=1e-8)", "x.mean()", GAE, "equation_7"),
    (L, "max for min in the surrogate", "surrogate = torch.min(", "surrogate = torch.max(", GAE, "equation_7"),
    (L, "the clip range is one-sided", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(max=1 + clip_coef)", GAE, "equation_7"),
    (L, "the KL estimator is k1", "weighted_mean(ratio - 1 - log_ratio, weight)", "weighted_mean(-log_ratio, weight)", GAE, "equation_7"),
    (L, "the value loss lost its half", "return 0.5 * weighted_mean(error, weight)", "return weighted_mean(error, weight)", GAE, "value_loss"),
    (L, "min for max in the clipped value loss", "error = torch.max(error,", "error = torch.min(error,", GAE, "value_loss"),
    (L, "advantage statistics include final rows", "centred = advantages - weighted_mean(advantages, weight)", "centred = advantages - advantages.mean()", GAE, "normalize"),
    (L, "the unbiased deviation, nan for one row", "(weighted_mean(centred**2, weight).sqrt() + 1e-8)", "(centred.std() + 1e-8)", GAE, "normalize"),
    # The recurrence
    (L, "the token leaves the forget gate open", "torch.tensor([1.0, 1.0, 0.0, 1.0])", "torch.tensor([1.0, 0.0, 0.0, 1.0])", REC, "fused"),
    (L, "the token leaves the input gate open", "torch.tensor([1.0, 1.0, 0.0, 1.0])", "torch.tensor([0.0, 1.0, 0.0, 1.0])", REC, "fused"),
    (L, "the final observation leaks", "torch.cat([x * alive, token], -1)", "torch.cat([x, token], -1)", REC, "zero"),
    (L, "a token too weak", "C = 1e4", "C = 1e1", REC, "zero"),
    (L, "replay from zeros instead of the stored state", "(h[None], c[None])", "(h[None] * 0, c[None] * 0)", REC, "fused"),
    (L, "h and c exchanged", "(h[None], c[None])", "(c[None], h[None])", REC, "fused"),
    (L, "the second layer is not reset", "x = torch.cat([x * alive, token], -1)", "x = torch.cat([x * alive, token * (cell is self.cells[0])], -1)", REC, "fused"),
    (L, "the state is not reset after a final row", "return state.where(~final[:, None], 0.0) if self.args.reset_state else state", "return state", "test_rollout.py", "rows_states"),
    (L, "reshape instead of movedim: (T, N) read as (N, T)", "states[which, :, env].movedim(0, 1)", "states[which, :, env].reshape(len(states[0]), len(env), -1)", "test_sequences.py", "every_cut"),
    # The agent
    (L, "illegal actions only masked in acting", "logprobs = self.log_probs(policy, obs)\n        entropy", "logprobs = self.log_probs(policy, obs[:1])\n        entropy", AGENT, "mask"),
    (L, "components that do not exist can be chosen", "logits if self.exists.all() else logits.masked_fill(self.missing, self.ILLEGAL)", "logits", AGENT, "space"),
    (L, "the start of a Discrete space is forgotten", 'getattr(self.action_space, "start", 0)', "0", AGENT, "space"),
    (L, "Bernoulli logits the wrong way round", "F.pad(logits.unsqueeze(-1), (1, 0))", "F.pad(logits.unsqueeze(-1), (0, 1))", AGENT, "distributions"),
    (L, "a detached critic that is not", '"detached": policy.detach()', '"detached": policy', AGENT, "detached"),
    (L, "sampling without noise", "torch.empty_like(logprobs).exponential_()", "torch.ones_like(logprobs)", AGENT, "race"),
    # The run
    (L, "overlapping rows count k times", "valid / copies", "valid / 1.0", "test_sequences.py", "every_cut"),
    (L, "final rows are trained on", "valid, done = ~b_final[:T],", "valid, done = ~b_final[:T] | True,", "test_rollout.py", "weight_zero"),
    (L, "the final flag is set one row late", "final[t + 1] = terminated[t] | truncated[t]", "final[t + 1] = terminated[t - 1] | truncated[t - 1]", "test_rollout.py", "rows_states"),
    (L, "the tail of the rollout is dropped", ", num_steps - seq_len]", "][: num_steps // seq_len]", GAE, "no_row"),
    (L, "resuming forgets the optimiser", '        optimizer.load_state_dict(saved["optimizer"])\n', "", RUN, "kill"),
    (L, "resuming forgets the random numbers", '        torch.set_rng_state(saved["rng"][0])\n', "", RUN, "kill"),
    (L, "environments restart from the same seed at every checkpoint only when resumed", 'SeedSequence([args.seed, run["iteration"]])', 'SeedSequence([args.seed, fresh])', RUN, "kill"),
    (L, "a checkpoint is written in place", 'with open(path.with_suffix(".tmp"), "wb")', 'with open(path, "wb")', RUN, "full_disk"),
    (L, "checkpoints run code", "weights_only=True", "weights_only=False", RUN, "checkpoints"),
    (L, "a nan reward trains on", '("reward", rewards)', '("reward", rewards[:0])', RUN, "faults"),
    (L, "truncation bootstrapped after the state was zeroed", "actions[t], logprobs[t], values[t], state = agent.act(row, state)", "actions[t], logprobs[t], values[t], state = agent.act(row, agent.next_state(state, torch.from_numpy(final[t])))", "test_rollout.py", "rows_states"),
    (L, "velocities of the wrong entries", '"CartPole": [1, 3]', '"CartPole": [0, 2]', "test_envs.py", "poc or velocity"),
    # Gaussian actions, gSDE, running normalisation
    (C, "the clipped action is stored", "action = mean + std * torch.randn_like(mean)", "action = (mean + std * torch.randn_like(mean)).clamp(-2, 2)", CONTINUOUS, "unclipped"),
    (C, "the action is played unclipped", "array.clip(self.low, self.high)", "array", CONTINUOUS, "clipped_or_rescaled"),
    (C, "squashed and not rescaled to the bounds", "self.low + (np.tanh(array) + 1) / 2 * (self.high - self.low)", "np.tanh(array)", CONTINUOUS, "clipped_or_rescaled"),
    (C, "no correction for the tanh", "        logprob = logprob - (1 - action.tanh() ** 2 + 1e-6).log()\n", "        pass\n", CONTINUOUS, "distributions or baselines3"),
    (C, "entropy without its constant", "0.5 * math.log(2 * math.pi * math.e)", "0.5 * math.log(2 * math.pi)", CONTINUOUS, "distributions"),
    (C, "the mean of log-probabilities over components", "return logprob.sum(-1)", "return logprob.mean(-1)", CONTINUOUS, "distributions"),
    (C, "gSDE's features are not detached", "sde_deviation(features.detach(),", "sde_deviation(features,", CONTINUOUS, "baselines3"),
    (C, "one noise matrix for all environments", "torch.randn(num_envs, len(sigma), self.low.size, device=sigma.device) * sigma", "(torch.randn(1, len(sigma), self.low.size) * sigma).expand(num_envs, -1, -1)", CONTINUOUS, "until"),
    (C, "new noise at every step", "t % args.sde_sample_freq == 0", "t % args.sde_sample_freq >= 0", CONTINUOUS, "drawn_at"),
    (C, "expln without its 1", "log1p() + 1", "log1p()", CONTINUOUS, "baselines3"),
    (C, "deviations summed, not variances", "(features**2 @ sigma**2 + 1e-6).sqrt()", "(features.abs() @ sigma + 1e-6)", CONTINUOUS, "baselines3"),
    (C, "statistics updated before the loss", "        losses, minibatches = [], ", "        agent.obs_stats.update(b_obs[0][:T][valid])\n        losses, minibatches = [], ", CONTINUOUS, "old_log"),
    (C, "statistics count final rows", "b_obs[0][:T][valid]", "b_obs[0][:T].flatten(0, 1)", CONTINUOUS, "numpys"),
    (C, "statistics count a rollout's last row twice", "b_obs[0][:T][valid]", "b_obs[0].flatten(0, 1)", CONTINUOUS, "numpys"),
    (C, "observations are not clipped", "vector.clamp(-10, 10)", "vector", CONTINUOUS, "every_row"),
    (C, "statistics are not saved", 'self.register_buffer(name, torch.full(shape, value, dtype=torch.float64))', 'self.register_buffer(name, torch.full(shape, value, dtype=torch.float64), persistent=False)', CONTINUOUS, "numpys or resumed"),
    # The GRU, Atari, data parallelism
    (G, "the token leaves the update gate open", "torch.tensor([1.0, 1.0, 0.0]).repeat", "torch.tensor([1.0, 0.0, 0.0]).repeat", REC, "fused"),
    (G, "the reset gate is left open, so its bias speaks", "torch.tensor([1.0, 1.0, 0.0]).repeat", "torch.tensor([0.0, 1.0, 0.0]).repeat", REC, "fused"),
    (G, "the input's bias survives the reset", "x = torch.cat([x * alive, alive, token], -1)", "x = torch.cat([x * alive, torch.ones_like(alive), token], -1)", REC, "fused"),
    (G, "a lost life is a final row", "final[t + 1] = terminated[t] | truncated[t]\n", "final[t + 1] = terminated[t] | truncated[t] | (info['lives'] < lives)\n", "test_atari.py", "life"),
    (G, "a lost life does not end the return", 'terminated[t] |= info["lives"] < lives', 'terminated[t] |= info["lives"] < 0', "test_atari.py", "life"),
    (G, "the clipped reward is logged for the score", "episode_return += rewards[t]", "episode_return += np.sign(rewards[t])", "test_atari.py", "scores"),
    (G, "rewards are not clipped", "b_rewards = b_rewards.sign()", "b_rewards = b_rewards * 1.0", "test_atari.py", "scores"),
    (G, "gradients are averaged without regard to the rows of each process", " * share).backward()", " * 1.0).backward()", "test_atari.py", "processes_take"),
    # TRPO
    (T, "the KL is averaged over action dimensions", "+ (std**2 + (mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).sum(-1)", "+ (std**2 + (mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).mean(-1)", "test_trpo.py", "kl_log"),
    (T, "the KL is the other way round", "(old[0].exp() * (old[0] - new[0]))", "(new[0].exp() * (new[0] - old[0]))", "test_trpo.py", "kl_log"),
    (T, "the Fisher matrix of the deviation lacks its 2", "2 * tangent[1] / dist[1] ** 2", "tangent[1] / dist[1] ** 2", "test_trpo.py", "fisher_vector"),
    (T, "no damping", " + damping * v", "", "test_trpo.py", "fisher_vector or one_whole"),
    (T, "the step is twice too long", "(2 * args.target_kl / curvature).sqrt()", "(8 * args.target_kl / curvature).sqrt()", "test_trpo.py", "natural or one_whole"),
    (T, "conjugate directions forget the past", "direction = residual + norm / previous * direction", "direction = residual", "test_trpo.py", "dense"),
    (T, "a step that makes things worse is accepted", "if kl < target_kl and 0 < improvement < float(\"inf\"):", "if kl < target_kl:", "test_trpo.py", "line_search or as_before"),
    (T, "the trust region is ignored", "if kl < target_kl and 0 < improvement < float(\"inf\"):", "if 0 < improvement < float(\"inf\"):", "test_trpo.py", "line_search"),
    # PPO1 over MPI
    (M, "gradients are summed and not averaged", "    mean /= comm.size\n", "", "test_mpi.py", "union or gathered"),
    (M, "statistics of one rank", "comm.Allreduce(local.numpy(), total.numpy())", "total.copy_(local)", "test_mpi.py", "gathered"),
    (M, "the schedule moves the stepsize alone", "clip_coef = args.learning_rate * multiplier, args.clip_coef * multiplier", "clip_coef = args.learning_rate * multiplier, args.clip_coef", "test_mpi.py", "schedule_multiplies"),
    (M, "middle_drop drops to the wrong step", "1 - p if 1 - p >= 0.75 else 0.075,", "1 - p if 1 - p >= 0.75 else 0.75,", "test_mpi.py", "test_schedules"),
    (M, "ranks are never compared", "if not all(synced):", "if False:", "test_mpi.py", "out_of_step"),
    (M, "steps of one rank are counted", "steps, returned, lengths = (sum(column[1:], column[0]) for column in zip(*gathered))", "steps, returned, lengths = gathered[0]", "test_mpi.py", "a_resumed_job_is_the_one_never_stopped"),
    (M, "every rank has the same seed", "rank_seed = args.seed + 10_000 * rank", "rank_seed = args.seed", "test_mpi.py", "resumed or seed"),
]  # fmt: skip
