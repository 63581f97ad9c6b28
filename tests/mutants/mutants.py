"""Deliberate bugs of the kinds that peers fell into: (script, what it is, the text, the bug, the tests that must fail).

The tests are a pytest file and a -k expression. `python tests/mutants/run.py` tries them all, each in its own copy.
"""

L, C, G, M, T = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "ppo1_mpi", "trpo"
GAE, REC, AGENT, RUN = "test_mathematics.py", "test_recurrence.py", "test_agent.py", "test_run.py"

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
    (L, "the token shuts the wrong gates", "torch.tensor([1.0, 1.0, 0.0, 1.0])", "torch.tensor([1.0, 1.0, 1.0, 0.0])", REC, "zero"),
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
]  # fmt: skip
