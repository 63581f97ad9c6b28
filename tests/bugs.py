"""More than a hundred ways to get recurrent PPO wrong, each with the test that must notice.

    python tests/bugs.py            # tries them all, two at a time, in some minutes
    python tests/bugs.py gsde lstm  # those whose script or title has one of the words

Many of them were found in well-known implementations. Each is a change within one block of a script
(docs/tools/blocks.py); one process imports everything once, and forks for each bug. Ends with exit
code 1 if one survives.
"""

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent


class Bug(NamedTuple):
    title: str
    script: str
    block: str
    old: str
    new: str
    test: str


def number(name: str) -> str:
    return f"test_numbers.py::test_{name}"


def run(name: str) -> str:
    return f"test_runs.py::test_{name}"


def train(case: str) -> str:
    """A case of the comparison with the algorithm written out."""
    return f"test_train.py::test_train_is_the_algorithm_written_out[{case}]"


LSTM, CONTINUOUS, ATARI = "rppo_lstm", "rppo_continuous", "rppo_gru_atari"
TRPO, MPI = "trpo", "ppo1_mpi"
LOOP = "test_recurrence.py::test_outputs_and_gradients_are_the_loops"
EXACTLY_ZERO = (
    "test_recurrence.py::test_after_a_final_step_the_state_is_exactly_zero_and_no_gradient_passes"
)
RANKS = "test_mpi.py::test_ranks_are_one_process_with_the_union_of_their_rollouts"
GAMES = "test_atari.py::test_training_and_evaluation_play_the_game_that_flags_ask_for"
SEEDS = "test_runs.py::test_no_two_seeds_share_an_episode[Pendulum-v1]"
NUMBERS = "test_runs.py::test_numbers_that_cannot_work_are_refused[rppo_lstm]"
RESUMED = "test_runs.py::test_two_resumes_are_equal_and_equal_the_run_never_stopped[{}]"
STOPPED = "test_trpo.py::test_parameters_are_as_before_where_no_step_is_accepted"

BUGS = [
    # Advantages
    Bug("a time limit counts as an end", LSTM, "compute_gae", "np.where(terminated, 0, values[1:])", "np.where(done, 0, values[1:])", number("gae_is_equation_16")),
    Bug("advantages flow across an episode's end", LSTM, "compute_gae", "np.where(done[t], 0, next_advantage)", "next_advantage", number("gae_is_equation_16")),
    Bug("advantages flow across a time limit", LSTM, "compute_gae", "np.where(done[t], 0, next_advantage)", "np.where(terminated[t], 0, next_advantage)", number("gae_is_equation_16")),
    Bug("the done flag is off by one", LSTM, "compute_gae", "np.where(done[t], 0, next_advantage)", "np.where(done[t - 1], 0, next_advantage)", number("gae_is_equation_16")),
    Bug("0 times NaN is NaN", LSTM, "compute_gae", "np.where(terminated, 0, values[1:])", "(1 - terminated) * values[1:]", number("gae_ignores_a_nan_behind_a_termination")),
    Bug("lambda is forgotten", LSTM, "compute_gae", "gamma * lam * np", "gamma * np", number("gae_is_equation_16")),
    Bug("the return is bootstrapped with the value of the same step", LSTM, "compute_gae", "values[1:]) - values[:-1]", "values[:-1]) - values[:-1]", number("gae_is_equation_16")),
    Bug("returns are the advantages plus the next step's values", LSTM, "train", "returns = advantages + v[:T]", "returns = advantages + v[1:]", train("lstm")),
    Bug("the last value belongs to the observation before", LSTM, "train", "agent.step(tensor(obs[T]), lstm_state)", "agent.step(tensor(obs[T - 1]), lstm_state)", train("lstm")),
    Bug("the last value begins with an empty memory", LSTM, "train", "agent.step(tensor(obs[T]), lstm_state)", "agent.step(tensor(obs[T]), 0 * lstm_state)", train("lstm")),
    Bug("a time limit is bootstrapped after the memory was emptied", LSTM, "train", "agent.step(tensor(obs[t]), lstm_state)", "agent.step(tensor(obs[t]), reset_state(lstm_state, final[t]))", train("lstm")),
    # The loss
    Bug("the surrogate takes the larger of the two", LSTM, "ppo_loss", "torch.min(", "torch.max(", number("ppo_loss_is_equation_7")),
    Bug("the ratio is clipped on one side", LSTM, "ppo_loss", "clamp(1 - clip_coef, 1 + clip_coef)", "clamp(max=1 + clip_coef)", number("ppo_loss_is_equation_7")),
    Bug("the surrogate isn't clipped", LSTM, "ppo_loss", "clipped * advantage)", "ratio * advantage)", number("ppo_loss_is_equation_7")),
    Bug("the KL estimate can be negative", LSTM, "ppo_loss", "(ratio - 1 - log_ratio).mean()", "(-log_ratio).mean()", number("ppo_loss_is_equation_7")),
    Bug("the ratio compares the new policy with itself", LSTM, "train", "old_logprob = s_old_logprob[:, batch][batch_valid]", "old_logprob = logprob.detach()", train("lstm")),
    Bug("the value loss has lost its half", LSTM, "train", "0.5 * (value - return_)", "1.0 * (value - return_)", train("lstm")),
    Bug("entropy is punished", LSTM, "train", "- args.ent_coef", "+ args.ent_coef", train("lstm")),
    Bug("entropy has the wrong sign", LSTM, "entropy", "-(log_pi", "(log_pi", number("the_distribution_of_actions")),
    Bug("advantages aren't scaled", LSTM, "normalize_advantage", "(advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)", "advantage - advantage.mean()", number("normalised_advantages_have_mean_0_and_deviation_1")),
    Bug("one step's advantage becomes NaN", LSTM, "normalize_advantage", "std(correction=0)", "std()", number("normalised_advantages_have_mean_0_and_deviation_1")),
    Bug("steps without an action are trained on", LSTM, "train", "to_sequences(tensor(final[:T]), L)", "to_sequences(tensor(final[:T] & False), L)", train("lstm")),
    Bug("gradients of minibatches add up", LSTM, "train", "            optimizer.zero_grad()\n", "", train("lstm")),
    Bug("gradients aren't clipped", LSTM, "train", "agent.parameters(), args.max_grad_norm", "agent.parameters(), np.inf", train("lstm")),
    Bug("the learning rate stays as it is", LSTM, "train", "if args.anneal_lr else 1", "if not args.anneal_lr else 1", train("lstm")),
    Bug("the learning rate falls by iterations, not by steps", LSTM, "train", "1 - run.step / args", "1 - T * N * (run.step // (T * N)) / args", train("lstm")),
    Bug("Adam keeps torch's epsilon", LSTM, "train", "eps=1e-5, ", "", train("lstm")),
    Bug("target_kl does nothing", LSTM, "too_far", "1.5 * target_kl", "1e9 * target_kl", train("lstm, stopped early")),
    Bug("the step that went too far is taken", LSTM, "train", "            if too_far(", "            optimizer.step()\n            if too_far(", train("lstm, stopped early")),
    Bug("all epochs go through one order", LSTM, "minibatches", "    for _ in range(args.update_epochs):\n        shuffled = torch.randperm(final.shape[1]).to(final.device)\n", "    shuffled = torch.randperm(final.shape[1]).to(final.device)\n    for _ in range(args.update_epochs):\n", number("minibatches_are_shuffled_anew_and_hold_each_sequence_once[rppo_lstm]")),
    Bug("minibatches aren't shuffled", LSTM, "minibatches", "torch.randperm", "torch.arange", number("minibatches_are_shuffled_anew_and_hold_each_sequence_once[rppo_lstm]")),
    Bug("a minibatch of final steps alone makes NaN", LSTM, "minibatches", "if not final[:, batch].all():", "if True:", "test_train.py::test_one_environment_of_one_step_trains[rppo_lstm]"),
    Bug("losses are logged under each other's names", LSTM, "METRICS", '"policy_loss", "value_loss"', '"value_loss", "policy_loss"', run("losses_are_logged_under_their_names")),
    # The memory
    Bug("the forget gate stays open in a reset", LSTM, "ResetLSTM", "[[1.0], [1.0], [0.0], [0.0]]", "[[1.0], [0.0], [0.0], [0.0]]", LOOP),
    Bug("the input gate stays open in a reset", LSTM, "ResetLSTM", "[[1.0], [1.0], [0.0], [0.0]]", "[[0.0], [1.0], [0.0], [0.0]]", LOOP),
    Bug("a reset is too weak", LSTM, "ResetLSTM", "[-1e4]", "[-1e1]", EXACTLY_ZERO),
    Bug("the episode's last observation leaks into the next", LSTM, "ResetLSTM", "x = torch.where(final.unsqueeze(-1), self.reset, x)", "x = x + final.unsqueeze(-1) * self.reset", EXACTLY_ZERO),
    Bug("replay begins with an empty memory", LSTM, "ResetLSTM", "x, (state[:1], state[1:]), [", "x, (0 * state[:1], 0 * state[1:]), [", LOOP),
    Bug("h and c are exchanged", LSTM, "ResetLSTM", "x, (state[:1], state[1:]), [", "x, (state[1:], state[:1]), [", LOOP),
    Bug("a state of another size is read, whatever lies there", LSTM, "ResetLSTM", "state.shape == (2, B, cell.hidden_size)", "True", "test_recurrence.py::test_shapes_that_would_broadcast_or_crash_are_refused[ResetLSTM]"),
    Bug("the forget gate begins half open", LSTM, "ResetLSTM", "nn.init.ones_(self.cell.bias_ih", "nn.init.zeros_(self.cell.bias_ih", number("first_weights[rppo_lstm]")),
    Bug("the memory isn't emptied while playing", LSTM, "train", "lstm_state = reset_state(lstm_state, final[t])", "pass", train("lstm")),
    Bug("an end in one environment empties all memories", LSTM, "reset_state", "state[:, torch.as_tensor(final, device=state.device)] = 0.0", "state[:] = 0.0", "test_recurrence.py::test_reset_state_zeroes_final_environments_of_any_state"),
    Bug("a reset changes the caller's state", LSTM, "reset_state", "state = state.clone()", "pass", "test_recurrence.py::test_reset_state_zeroes_final_environments_of_any_state"),
    Bug("a reset keeps a NaN alive", LSTM, "reset_state", "= 0.0", "*= 0.0", "test_train.py::test_a_nan_in_the_state_does_not_survive_an_episodes_end"),
    Bug("the final flag comes one step late", LSTM, "train", "final[t + 1] = terminated[t] | truncated[t]", "final[t + 1] = terminated[t - 1] | truncated[t - 1]", train("lstm")),
    Bug("a rollout forgets that it begins with a final step", LSTM, "train", "        final[0] = final[T]\n", "", train("lstm")),
    Bug("a rollout begins with the first observation of the last", LSTM, "train", "        obs[0] = obs[T]\n", "", train("lstm")),
    Bug("each rollout begins with an empty memory", LSTM, "train", "        log_pis = []\n", "        log_pis = []\n        lstm_state = agent.initial_state(N)\n", train("lstm")),
    Bug("sequences begin with each other's states", LSTM, "train", "lstm_states.transpose(0, 1)", "lstm_states.flip(0).transpose(0, 1)", train("lstm")),
    Bug("(T, N) is read as (N, T)", LSTM, "train", "lstm_states.transpose(0, 1).flatten(1, 2)", "lstm_states.reshape(len(lstm_state), -1, *lstm_state.shape[2:])", train("lstm")),
    Bug("sequences mix environments", LSTM, "to_sequences", "x.transpose(0, 1).flatten(1, 2)", "x.transpose(0, 1).transpose(1, 2).flatten(1, 2)", number("sequences_are_pieces_of_one_environment")),
    Bug("the control has a memory while playing", LSTM, "Agent.step", "if self.args.ablate_memory:", "if False:", number("the_control_keeps_no_state[rppo_lstm]")),
    Bug("the control is trained with a memory", LSTM, "train", "L = 1 if args.ablate_memory else args.seq_len or T", "L = args.seq_len or T", train("lstm, the control")),
    Bug("the GRU's update gate stays open in a reset", ATARI, "ResetGRU", "[[1.0], [1.0], [0.0]]", "[[1.0], [0.0], [0.0]]", LOOP),
    Bug("the GRU's reset gate stays open in a reset", ATARI, "ResetGRU", "[[1.0], [1.0], [0.0]]", "[[0.0], [1.0], [0.0]]", LOOP),
    Bug("the GRU's input biases act in a reset", ATARI, "ResetGRU", "[0.0] * input_size + [0.0, -1e4]", "[0.0] * input_size + [1.0, -1e4]", LOOP),
    # Actions
    Bug("the least likely action wins the race", LSTM, "sample", "/ noise.to(log_pi.device)", "* noise.to(log_pi.device)", number("the_distribution_of_actions")),
    Bug("sampling has no noise", LSTM, "sample", "torch.empty(log_pi.shape).exponential_()", "torch.ones(log_pi.shape)", number("the_distribution_of_actions")),
    Bug("an action space that begins at -1 is taken to begin at 0", LSTM, "to_env", " + space.start", "", "test_train.py::test_actions_are_those_of_their_space[rppo_lstm-from -1]"),
    Bug("the first policy isn't near uniform", LSTM, "Agent.__init__", ", std=0.01)", ")", number("first_weights[rppo_lstm]")),
    Bug("the critic's first outputs are too large", LSTM, "Agent.__init__", ", std=1.0)", ")", number("first_weights[rppo_lstm]")),
    Bug("the clipped action is trained on", CONTINUOUS, "train", "actions[t] = agent.act(h, noise)", "actions[t] = agent.act(h, noise).clamp(-1, 1)", train("gaussian")),
    Bug("actions leave their bounds", CONTINUOUS, "to_env", ".clip(space.low, space.high)", "", "test_train.py::test_actions_are_those_of_their_space[rppo_continuous-matrix]"),
    Bug("log-probabilities of another action", CONTINUOUS, "train", "policy(torch.stack(hs)).log_prob(actions)", "policy(torch.stack(hs)).log_prob(actions.clamp(-1, 1))", train("gaussian")),
    Bug("the noise's size isn't learned", CONTINUOUS, "Agent.__init__", "nn.Parameter(torch.full(shape, args.log_std_init))", "torch.full(shape, args.log_std_init)", train("gaussian")),
    Bug("log_std_init does nothing", CONTINUOUS, "Agent.__init__", "torch.full(shape, args.log_std_init)", "torch.zeros(shape)", number("the_noise_begins_as_large_as_log_std_init_says[rppo_continuous]")),
    Bug("noise has a standard deviation of 1", CONTINUOUS, "Agent.sample_noise", " * self.log_std.exp()", "", train("gaussian")),
    Bug("all environments share their noise", CONTINUOUS, "Agent.sample_noise", "torch.randn(num_envs, *self.log_std.shape)", "torch.randn(1, *self.log_std.shape).repeat(num_envs, *[1] * self.log_std.dim())", train("gsde")),
    Bug("gSDE's noise trains the LSTM", CONTINUOUS, "Agent.policy", "h.detach() ** 2", "h**2", train("gsde")),
    Bug("gSDE adds deviations, not variances", CONTINUOUS, "Agent.policy", "(h.detach() ** 2 @ std**2 + 1e-6).sqrt()", "h.detach().abs() @ std + 1e-3", train("gsde")),
    Bug("gSDE's noise doesn't depend on the state", CONTINUOUS, "Agent.act", "(h[:, None] @ noise)[:, 0]", "noise.sum(1)", train("gsde")),
    Bug("gSDE draws new noise in each step", CONTINUOUS, "train", "T if args.sde_sample_freq == -1", "1 if args.sde_sample_freq == -1", train("gsde")),
    Bug("gSDE keeps its noise for a whole rollout", CONTINUOUS, "train", "t % noise_steps == 0", "t == 0", train("gsde, new noise")),
    # Statistics
    Bug("merged variances forget that means differ", LSTM, "RunningMeanStd", "        squares += delta**2 * self.count * M / total  # about the common mean\n", "", number("running_mean_std_is_numpys_however_rows_are_cut")),
    Bug("sums of rewards cross an episode's end", LSTM, "discounted_sums", "np.where(done[t], 0, gamma * sums[t])", "gamma * sums[t]", number("discounted_sums_are_a_plain_loops_also_cut_in_two")),
    Bug("sums of rewards begin anew in each rollout", LSTM, "train", "discounted_sums(rewards, done, unfinished,", "discounted_sums(rewards, done, 0 * unfinished,", train("lstm, normalised")),
    Bug("an episode's last reward isn't counted", LSTM, "discounted_sums", "sums[t] = rewards[t] + unfinished", "sums[t] = np.where(done[t], 0, rewards[t]) + unfinished", number("discounted_sums_are_a_plain_loops_also_cut_in_two")),
    Bug("rewards are divided by their own deviation", LSTM, "train", "tensor(sums[valid])", "tensor(rewards[valid])", train("lstm, normalised")),
    Bug("steps without an action enter the returns' statistics", LSTM, "train", "tensor(sums[valid])", "tensor(sums.ravel())", train("lstm, normalised")),
    Bug("a reward sent with a reset counts", LSTM, "train", "        rewards[~valid] = 0.0\n", "", run("rewards_of_a_reset_and_one_dictionary_for_all_steps_change_nothing")),
    Bug("last observations enter the statistics", LSTM, "train", "tensor(obs[:T][valid]))\n", "tensor(obs[:T]).flatten(0, 1))\n", train("lstm, normalised")),
    Bug("statistics change between acting and the update", LSTM, "train", "        # Update, in minibatches", "        if args.norm_obs:\n            agent.obs_stats.update(tensor(obs[:T][valid]))\n        # Update, in minibatches", train("lstm, normalised")),
    Bug("observations are divided by their variance", LSTM, "Agent.normalize", "(self.obs_stats.var + 1e-8).sqrt()", "(self.obs_stats.var + 1e-8)", number("observations_are_normalised_and_clipped")),
    Bug("an outlier isn't clipped", LSTM, "Agent.normalize", ".clamp(-10, 10)", "", number("observations_are_normalised_and_clipped")),
    Bug("replay sees observations that aren't normalised", LSTM, "Agent.evaluate_actions", "self.encoder(self.normalize(obs))", "self.encoder(obs.to(self.actor.weight))", train("lstm, normalised")),
    Bug("steps without an action count as steps", LSTM, "count_steps", "valid.sum()", "valid.size", train("lstm")),
    # Using the agent
    Bug("predict forgets", LSTM, "Agent.predict", "self.initial_state(len(obs)) if lstm_state is None else lstm_state", "self.initial_state(len(obs))", number("predict_carries_the_state_and_resets_it[lstm]")),
    Bug("predict carries its memory into the next episode", LSTM, "Agent.predict", "if final is not None:", "if False:", number("predict_carries_the_state_and_resets_it[lstm]")),
    Bug("predict always explores", LSTM, "Agent.predict", "log_pi.argmax(-1) if deterministic else sample(log_pi)", "sample(log_pi)", number("predict_carries_the_state_and_resets_it[lstm]")),
    Bug("predict never explores", CONTINUOUS, "Agent.predict", "self.actor(h) if deterministic else self.act(h, self.sample_noise(len(h)))", "self.actor(h)", number("predict_carries_the_state_and_resets_it[gsde]")),
    Bug("an evaluation forgets", LSTM, "evaluate", "action, agent_state = agent", "action, _ = agent", run("the_evaluation_is_one_episode_of_each_environment[rppo_lstm]")),
    Bug("an evaluation never empties the memory", LSTM, "evaluate", "obs, agent_state, final, deterministic", "obs, agent_state, None, deterministic", run("the_evaluation_is_one_episode_of_each_environment[rppo_lstm]")),
    Bug("a later episode replaces the first", LSTM, "evaluate", "ended = final & np.isnan(returns)", "ended = final", run("the_evaluation_is_one_episode_of_each_environment[rppo_lstm]")),
    Bug("all episodes of an evaluation begin alike", LSTM, "evaluate", "envs.reset(seed=seed)", "envs.reset(seed=[seed] * envs.num_envs)", run("the_evaluation_takes_the_seed_and_sampled_actions_on_demand")),
    # TRPO
    Bug("the KL's arguments are exchanged", TRPO, "kl_and_improvement", "kl_divergence(old, new)", "kl_divergence(new, old)", "test_trpo.py::test_kl_is_the_joint_one"),
    Bug("the surrogate's ratio isn't one", TRPO, "surrogate", "(new.log_prob(actions) - old.log_prob(actions)).exp()", "1 + new.log_prob(actions) - old.log_prob(actions)", "test_trpo.py::test_kl_is_the_joint_one"),
    Bug("the Fisher matrix isn't damped", TRPO, "fisher_vector_product", " + damping * v", "", "test_trpo.py::test_fisher_vector_product_is_the_hessian_of_the_mean_kl"),
    Bug("a difference looks to one side", TRPO, "fisher_vector_difference", "(theta + distance * v, theta - distance * v)", "(theta + 2 * distance * v, theta)", "test_trpo.py::test_fisher_vector_product_is_the_hessian_of_the_mean_kl"),
    Bug("a difference's distance grows with v", TRPO, "fisher_vector_difference", " / v.norm()", "", "test_trpo.py::test_fisher_vector_product_is_the_hessian_of_the_mean_kl"),
    Bug("a difference leaves the policy moved", TRPO, "fisher_vector_difference", "    nn.utils.vector_to_parameters(theta, parameters)\n", "", "test_trpo.py::test_product_through_the_fused_lstm_is_the_loop_differentiated_twice"),
    Bug("directions aren't conjugate", TRPO, "conjugate_gradient", "p = r + r @ r / r_dot * p", "p = r", "test_trpo.py::test_conjugate_gradient_is_a_dense_solve"),
    Bug("conjugate gradient follows negative curvature", TRPO, "conjugate_gradient", "0 < curvature < np.inf", "curvature < np.inf", "test_trpo.py::test_conjugate_gradient_is_safe"),
    Bug("the step is shorter than the trust region", TRPO, "trpo_step", "(2 * args.target_kl / curvature)", "(args.target_kl / curvature)", train("trpo")),
    Bug("no gradient makes 0 / 0", TRPO, "trpo_step", ".sqrt() if curvature > 0 else 0.0", ".sqrt()", STOPPED),
    Bug("the policy's step moves the critic", TRPO, "trpo_step", 'if not name.startswith("critic")', "", train("trpo")),
    Bug("the noise's size isn't learned by the step", TRPO, "trpo_step", 'startswith("critic")', 'startswith(("critic", "log_std"))', train("trpo, box")),
    Bug("sub-sampling leaves environments out", TRPO, "sub_sample", "(valid.cumsum(0) - 1)", "(valid.flatten().cumsum(0).view(valid.shape) - 1)", "test_trpo.py::test_every_kth_step_of_each_environment_is_in_the_fisher_matrix"),
    Bug("a step leaves the trust region", TRPO, "line_search", "kl < args.target_kl and ", "", "test_trpo.py::test_the_line_search_tries_the_whole_step_first_and_refuses_an_infinite_gain"),
    Bug("a step that gains nothing is taken", TRPO, "line_search", "0 < improvement", "0 <= improvement", "test_trpo.py::test_the_line_search_tries_the_whole_step_first_and_refuses_an_infinite_gain"),
    Bug("the whole step isn't tried", TRPO, "line_search", "args.line_search_shrinking_factor**i", "args.line_search_shrinking_factor ** (i + 1)", train("trpo")),
    Bug("a refused step stays", TRPO, "line_search", "    nn.utils.vector_to_parameters(theta, parameters)\n", "", STOPPED),
    Bug("recurrent replay begins with an empty memory", TRPO, "train", "lstm_state=first_state", "lstm_state=0 * first_state", train("trpo, lstm")),
    Bug("the critic passes once over the rollout", TRPO, "fit_critic", "range(args.n_critic_updates)", "range(1)", train("trpo")),
    # Ranks
    Bug("gradients are summed, not averaged", MPI, "average", "    x /= comm.size\n", "", RANKS),
    Bug("gradients stay each rank's own", MPI, "train", "            average(gradient, comm)\n", "", RANKS),
    Bug("a rank stops early on its own KL", MPI, "too_far", "average(kl.detach().clone(), comm)", "kl", RANKS),
    Bug("each rank begins with its own weights", MPI, "train", "        comm.Bcast(p.detach().numpy())", "        pass", RANKS),
    Bug("all ranks draw the same numbers", MPI, "train", "seed_everything(env_seed(args.seed, 0, comm.rank))", "seed_everything(env_seed(args.seed, 0))", RANKS),
    Bug("all ranks play the same episodes", MPI, "train", "env_seed(args.seed, run.step, comm.rank)", "env_seed(args.seed, run.step)", RANKS),
    Bug("gradients of minibatches add up on the ranks", MPI, "train", "            gradient.zero_()\n", "", train("ppo1")),
    Bug("a rank counts its own steps", MPI, "count_steps", "comm.allreduce(int(valid.sum()))", "int(valid.sum())", RANKS),
    Bug("statistics stay each rank's own", MPI, "train", "np.concatenate(comm.allgather(obs[:T][valid]))", "obs[:T][valid]", RANKS),
    Bug("the mean over no step is NaN", MPI, "train", "if not batch_valid.any():", "if False:", RANKS),
    Bug("ranks that drift apart go unnoticed", MPI, "check_synced", "numbers != comm.bcast(numbers)", "numbers != numbers", RANKS),
    Bug("all ranks resume with rank 0's random numbers", MPI, "Run.restore", 'saved["rng"][rank]', 'saved["rng"][0]', RANKS),
    Bug("advantages are normalised with steps that don't count", MPI, "train", "advantages - advantages[valid].mean()", "advantages - advantages.mean()", train("ppo1")),
    Bug("the clip range doesn't fall", MPI, "train", "remaining * args.clip_coef", "args.clip_coef", train("ppo1")),
    Bug("the critic reads the actor's LSTM", MPI, "Agent.evaluate_actions", "self.critic_lstm(self.critic_encoder(x), critic_state, final)", "h", train("ppo1, lstm")),
    # Games
    Bug("frames aren't scaled", ATARI, "NatureCNN", ".flatten(0, -4) / 255", ".flatten(0, -4) / 1", train("gru")),
    Bug("the agent learns from scores, unasked", ATARI, "train", "if args.clip_rewards:", "if False:", train("gru")),
    Bug("each lost life ends the return, unasked", ATARI, "train", "if args.terminal_on_life_loss:", "if True:", train("gru")),
    Bug("a life is lost once and for all", ATARI, "train", '                lives = info["lives"]\n', "", train("gru, lives and scores")),
    Bug("a lost life is taken for a final step", ATARI, "train", '                lives = info["lives"]\n', '                lives = info["lives"]\n                final[t + 1] |= terminated[t]\n', train("gru, lives and scores")),
    Bug("the log shows signs, not scores", ATARI, "make_envs", "reward_clipping=False", "reward_clipping=True", GAMES),
    Bug("only one frame is seen", ATARI, "make_envs", "stack_num=args.frame_stack", "stack_num=1", GAMES),
    Bug("an evaluation's game lasts half an hour", ATARI, "Run.finish", "self.args.eval_episodes, None, EVAL_FRAMES)", "self.args.eval_episodes)", GAMES),
    Bug("a game that is shown waits for FIRE", ATARI, "make_envs", "wrappers=[AtariPreprocessing, FireReset, stack]", "wrappers=[AtariPreprocessing, stack]", "test_atari.py::test_a_game_seen_in_two_ways_is_one_game"),
    # Runs
    Bug("seeds 1 and 2 share most episodes", LSTM, "env_seed", "int(np.random.SeedSequence(key).generate_state(1)[0] % 2**30)", "sum(key)", SEEDS),
    Bug("the evaluation plays the episodes of training", LSTM, "EVALUATION", "2**40", "0", SEEDS),
    Bug("a resumed run plays the first episodes again", LSTM, "train", "env_seed(args.seed, run.step)", "env_seed(args.seed, 0)", run("training_and_its_continuation_play_other_episodes[rppo_lstm]")),
    Bug("NumPy's generator isn't seeded", LSTM, "seed_everything", "    np.random.seed(seed % 2**32)  # some environments draw from it\n", "", run("every_generator_is_seeded")),
    Bug("resuming forgets the optimiser", LSTM, "Run.restore", '        self.optimizer.load_state_dict(saved["optimizer"])\n', "", RESUMED.format(LSTM)),
    Bug("resuming forgets the random numbers", LSTM, "Run.restore", '        torch.set_rng_state(saved["rng"])\n', "", RESUMED.format(LSTM)),
    Bug("TensorBoard keeps points from after the saved step", LSTM, "Run.__init__", ", purge_step=self.step + 1", "", RESUMED.format(LSTM)),
    Bug("Args of a resumed run make new runs resume it, too", LSTM, "Run.contents", "replace(self.args, resume=None, play=None, render=\"human\")", "self.args", RESUMED.format(LSTM)),
    Bug("the control's Args train the agent with sequences of one step", LSTM, "train", "    check_sequences(args, L)\n", "    check_sequences(args, L)\n    args.seq_len = L\n", train("lstm, the control")),
    Bug("agent.pt is written in place", LSTM, "Run.save", 'torch.save(self.contents(), self.dir / "agent.tmp")', 'torch.save(self.contents(), self.dir / "agent.pt"); torch.save(self.contents(), self.dir / "agent.tmp")', run("a_full_disk_leaves_the_last_good_file[rppo_lstm]")),
    Bug("agent.pt may run code", LSTM, "load", "weights_only=True", "weights_only=False", run("files_that_cannot_be_used[rppo_lstm]")),
    Bug("a run is saved at its end alone", LSTM, "Run.log", "> 60", "> 6e9", run("what_a_run_leaves[rppo_lstm]")),
    Bug("a second run overwrites the first", LSTM, "Run.__init__", "check(args.resume or not exists,", "check(True,", run("wrong_input_is_one_line_and_exit_code_2_before_any_work")),
    Bug("W&B takes a directory's name for a run's", LSTM, "Run.__init__", "id=self.wandb_id, name", "id=self.dir.name, name", run("weights_and_biases_gets_every_scalar_of_each_run")),
    Bug("two runs of a process share W&B's record", LSTM, "Run.__init__", 'reinit="finish_previous", ', "", run("weights_and_biases_gets_every_scalar_of_each_run")),
    Bug("NaN observations are trained on", LSTM, "train", '        check_finite("obs", obs)\n', "", run("a_fault_stops_the_run_says_where_and_how_to_continue[obs-rppo_lstm]")),
    Bug("NaN losses go on", LSTM, "Run.log", '        check_finite(f"after step {self.step}, {METRICS}", means)\n', "", run("a_loss_that_is_not_finite_stops_the_run[rppo_lstm]")),
    Bug("NaN is a learning rate", LSTM, "check_args", "value >= 0", "not value < 0", NUMBERS),
    Bug("Ctrl-C looks like an error", LSTM, "main", "sys.exit(130 if interrupted else 1)", "sys.exit(1)", run("control_c")),
    Bug("an environment that resets at once is taken", LSTM, "make_envs", "check(next_step,", "check(True,", run("wrong_input_is_one_line_and_exit_code_2_before_any_work")),
    Bug("one environment is broadcast to all", LSTM, "make_envs", "check(envs.num_envs == num_envs,", "check(True,", run("wrong_input_is_one_line_and_exit_code_2_before_any_work")),
    Bug("ends that are numbers are inverted bit by bit", LSTM, "Plain", "np.bool_(terminated), np.bool_(truncated)", "terminated, truncated", run("the_evaluation_is_one_episode_of_each_environment[rppo_lstm]")),
    Bug("positions are hidden instead of velocities", LSTM, "VELOCITIES", '"CartPole": [1, 3]', '"CartPole": [0, 2]', run("hidden_velocities_are_zero_and_nothing_else_is[CartPole-v1-hidden0]")),
    Bug("a preset wins over flags", CONTINUOUS, "preset", "**{**values, **flags}", "**{**flags, **values}", run("a_preset_is_said_and_is_what_a_program_gets[rppo_continuous]")),
]  # fmt: skip


def attempt(bug: Bug, folder: Path) -> int:
    """In a child process: pytest's exit code, of the test in a copy of the repository with the bug."""
    os.setsid()
    import pytest
    import support
    from blocks import patched

    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    root = folder / "root"
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TESTS, root / "tests", ignore=caches)
    shutil.copytree(support.ROOT / "docs/tools", root / "docs/tools", ignore=caches)
    for script in support.SCRIPTS:
        shutil.copy(support.ROOT / f"{script}.py", root)
    path = root / f"{bug.script}.py"
    for script, module in support.MODULES.items():
        module.__file__ = str(root / f"{script}.py")
    path.write_text(patched(path.read_text(), bug.block, bug.old, bug.new))
    if bug.script == LSTM:  # a block that others share is theirs, too
        import sync

        texts = {script: (root / f"{script}.py").read_text() for script in support.SCRIPTS}
        for script, text in sync.synced(texts).items():
            (root / f"{script}.py").write_text(text)
    for script, module in support.MODULES.items():
        text = (root / f"{script}.py").read_text()
        if text != (support.ROOT / f"{script}.py").read_text():
            exec(compile(text, module.__file__, "exec"), vars(module))
    support.ROOT = root
    sys.path[:] = [str(root), *sys.path]
    os.chdir(root)
    options = "-x -q -o addopts= -p no:cacheprovider -p no:xdist".split()
    place = ["-c", os.devnull, f"--rootdir={root}", f"tests/{bug.test}"]
    return int(pytest.main([*options, *place]))


def tried(bugs: list[Bug], at_once: int = 2, patience: float = 150) -> int:
    """Tries the bugs, prints what became of each -> how many nobody noticed."""
    waiting, running, unnoticed = bugs[::-1], {}, 0
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                bug = waiting.pop()
                place = Path(folder, str(len(waiting)))
                (place / "root").mkdir(parents=True)
                pid = os.fork()
                if pid == 0:
                    code = 3
                    try:
                        code = attempt(bug, place)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        sys.stdout.flush()
                        os._exit(code)
                running[pid] = bug, place, time.time()
            for pid, (bug, place, start) in [*running.items()]:
                done, status = os.waitpid(pid, os.WNOHANG)
                late = time.time() - start > patience
                if not done and not late:
                    continue
                if not done:  # a test can then end the ranks that it has started
                    os.kill(pid, signal.SIGINT)
                    time.sleep(5)
                with suppress(ProcessLookupError):  # what else it has started, too
                    os.killpg(pid, signal.SIGKILL)
                if not done:
                    os.waitpid(pid, 0)
                del running[pid]
                code = None if late else os.waitstatus_to_exitcode(status)
                seen = {None: "hangs", 0: "SURVIVED", 1: "caught"}.get(code, "BROKEN")
                seen = "caught" if code is not None and code < 0 else seen  # the process dies
                unnoticed += seen in ("SURVIVED", "BROKEN")
                took = time.time() - start
                print(f"{seen:9} {took:5.1f} s  {bug.script:15} {bug.title}", flush=True)
                if seen == "BROKEN":
                    print((place / "output").read_text()[-1500:])
                shutil.rmtree(place)
            time.sleep(0.02)
    minutes = (time.time() - began) / 60
    print(f"{len(bugs) - unnoticed} of {len(bugs)} caught, {minutes:.1f} minutes")
    return unnoticed


def main() -> int:
    words = sys.argv[1:] or [""]
    bugs = [bug for bug in BUGS if any(w in f"{bug.script} {bug.title}".lower() for w in words)]
    sys.path.insert(0, str(TESTS))
    for name in "support", "pytest", "hypothesis", "tensorboard", "torch._dynamo":
        importlib.import_module(name)
    return int(tried(bugs) > 0)


if __name__ == "__main__":
    sys.exit(main())
