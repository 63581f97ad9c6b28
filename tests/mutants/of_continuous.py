"""Deliberate bugs of rppo_continuous.py: (what it is, the text, the bug, a test file that must fail)."""

AGENT = "test_agent.py"
ROLL = "test_rollout.py"
RUN = "test_run.py"
BOX = "test_continuous.py"

MUTANTS = [
    # Gaussian actions, gSDE, statistics of observations
    ("gSDE's noise trains the LSTM", "(h.detach() ** 2 @", "(h**2 @", BOX),
    ("gSDE adds standard deviations, not variances", "(h.detach() ** 2 @ std**2 + 1e-6).sqrt()", "h.detach().abs() @ std", BOX),
    ("gSDE's variance has no floor", " + 1e-6).sqrt()", ").sqrt()", BOX),
    ("noise is drawn once a rollout", "if t == 0 or every > 0 and t % every == 0:", "if t == 0:", BOX),
    ("noise of the rollout before", "if t == 0 or every > 0 and t % every == 0:", "if run.step + t == 0 or every > 0 and t % every == 0:", BOX),
    ("sde_sample_freq without gSDE", "args.sde_sample_freq if args.use_sde else 1", "args.sde_sample_freq", BOX),
    ("all environments get one noise", "noise = torch.randn(num_envs, *self.log_std.shape)", "noise = torch.randn(self.log_std.shape).repeat(num_envs, *[1] * self.log_std.dim())", BOX),
    ("noise of standard deviation 1", "noise.to(self.log_std.device) * self.log_std.exp()", "noise.to(self.log_std.device)", BOX),
    ("the noise's size is not learned", "nn.Parameter(torch.full(shape, args.log_std_init))", "nn.Buffer(torch.full(shape, args.log_std_init))", BOX),
    ("log_std_init is ignored", "torch.full(shape, args.log_std_init)", "torch.zeros(shape)", BOX),
    ("the clipped action is stored", "actions[t] = agent.act(h[t], noise)", "actions[t] = agent.act(h[t], noise).clamp(-1, 1)", BOX),
    ("actions are not clipped", "array.clip(space.low, space.high)", "array", BOX),
    ("discrete actions are taken", "check(not discrete,", "check(True,", BOX),
    ("whole numbers are taken", "np.issubdtype(space.dtype, np.floating)", "True", BOX),
    ("predict explores", "self.actor(h) if deterministic else self.act(", "self.act(h, self.sample_noise(len(h))) if deterministic else self.act(", BOX),
    ("observations are not clipped to 10", ".clamp(-10, 10)", "", BOX),
    ("variance for standard deviation", "(self.obs_stats.var + 1e-8).sqrt()", "(self.obs_stats.var + 1e-8)", BOX),
    ("statistics count final steps", "tensor(obs[:T][valid])", "tensor(obs[:T]).flatten(0, 1)", BOX),
    ("statistics change before the update", "        # Update, in minibatches", "        agent.obs_stats.mean += 1\n        # Update, in minibatches", BOX),
    ("a rollout of final steps only makes them NaN", "if args.norm_obs and valid.any():", "if args.norm_obs:", ROLL),
    ("old log-probabilities of other noise", "old_logprob = agent.policy(h).log_prob(actions)", "old_logprob = agent.policy(h).log_prob(agent.actor(h))", BOX),
    ("final steps are trained on", "counts = ~s_final[:, batch]", "counts = ~s_final[:, batch] | True", ROLL),
    ("a rollout forgets its first step's final flag", "obs[0], final[0] = obs[T], final[T]", "obs[0] = obs[T]", ROLL),
    ("the state is not reset after a final step", "                if final[t].any():", "                if False:", ROLL),
    ("the critic reads the actor's LSTM", "critic_h = self.critic_lstm(x, state[2:], final)", "critic_h = h", BOX),
    ("the value loss lost its half", "0.5 * (value - return_)", "1.0 * (value - return_)", ROLL),
    ("values are one step late", "returns = advantages + v[:T]", "returns = advantages + v[1:]", ROLL),
    ("advantages are not normalised", "advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)", "advantage = advantage - advantage.mean()", ROLL),
    ("the learning rate stays", "if args.anneal_lr else 1", "if not args.anneal_lr else 1", ROLL),
    ("target_kl is ignored", "if kl > 1.5 * args.target_kl:", "if kl > 1e9 * args.target_kl:", ROLL),
    ("sequences begin with other states", "s_states = states.transpose(0, 1).flatten(1, 2)", "s_states = states.flip(0).transpose(0, 1).flatten(1, 2)", ROLL),
    ("all epochs have one order", "torch.cat([torch.randperm(S) for _ in range(args.update_epochs)])", "torch.randperm(S).repeat(args.update_epochs)", ROLL),
    ("the control has long sequences", "L = 1 if args.ablate_memory else args.seq_len or T", "L = args.seq_len or T", ROLL),
    ("the control keeps its state", "torch.zeros_like(state) if self.args.ablate_memory else next_state", "next_state", ROLL),
    ("losses are logged under each other's names", '("policy_loss", "value_loss", "entropy", "approx_kl")', '("value_loss", "policy_loss", "entropy", "approx_kl")', ROLL),
    ("Adam's epsilon is torch's default", "eps=1e-5, ", "", RUN),
    ("a resumed run plays the first episodes again", "seed=args.seed + run.step", "seed=args.seed", RUN),
    ("the actor's first weights are as large as others", ", std=0.01)", ")", AGENT),
    ("the critic's last layer begins too large", ", std=1.0)", ")", AGENT),
    ("statistics of observations can be switched off in a resumed run", '    "norm_obs", "use_sde",\n', '    "use_sde",\n', RUN),
]  # fmt: skip
