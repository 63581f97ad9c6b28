"""What each recipe of networks, memory, tasks, training and logging does, in numbers."""

import csv
import importlib
import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import reference
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from recipe_tools import build, driver, first_ratios, needs, reopened, returns, run
from support import awkward_ends, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

CHOICES, REAL = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)
ENVS = {"rppo_continuous": "Pendulum-v1"}  # of the others: CartPole-v1
PPO = ["rppo_lstm", "rppo_continuous", "ppo1_mpi"]
VECTORS = [*PPO, "trpo"]


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(x, b[key]) for key, x in a.items())


# Memories
def memory(kind: str):
    """From 5 inputs to 8 units."""
    if kind == "min_gru":
        return driver.recipe(kind).MinGRU(5, 8)
    if kind == "lru":
        return driver.recipe(kind).LRU(5, 8)
    if kind.startswith("attention"):
        return driver.recipe("attention").Attention(5, 8, K=int(kind[9:]), heads=2)
    script = driver.fresh("rppo_lstm", "stacked_lstm")
    script.building = script.Args(recurrent_layers=kind)
    return script.ResetLSTM(5, 8)


KINDS = ["min_gru", "lru", "attention2", "attention7", "attention40", "lstm,gru", "gru,lru,min_gru"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_replays_what_the_loop_over_its_steps_plays(kind):
    """Outputs and gradients, from a state in the middle of an episode, whatever ends."""
    torch.manual_seed(0)
    reference.assert_is_the_loop(memory(kind).double(), awkward_ends()[2][:-1])


@pytest.mark.parametrize("name", ["rppo_lstm", "ppo1_mpi"])
@pytest.mark.parametrize("recipe", ["min_gru", "lru", "attention", "stacked_lstm", "carry_state"])
def test_training_replays_what_was_played(tmp_path, name, recipe):
    needs(name)
    script = driver.fresh(name, recipe)
    flags = {"memory": "lstm"} if name == "ppo1_mpi" else {}
    flags |= {"env_id": ENVS.get(name, "CartPole-v1"), "num_steps": 64, "seq_len": 16}
    assert first_ratios(script, tmp_path, **flags) < 1e-5


def test_attention_reads_the_last_steps_of_the_episode_and_no_more():
    cell = driver.recipe("attention").Attention(5, 8, K=4, heads=2)
    final = torch.zeros(10, 1, dtype=torch.bool)
    x, state = torch.randn(10, 1, 5), cell.initial_state(1)
    base = cell(x, state, final)
    moved = x.clone()
    moved[3] += 1
    changed = (cell(moved, state, final) - base).abs().amax((1, 2)) > 1e-6
    assert changed.tolist() == [3 <= t <= 6 for t in range(10)]
    final[4] = True
    changed = (cell(moved, state, final) - cell(x, state, final)).abs().amax((1, 2)) > 1e-6
    assert changed[5:].any().item() is False and changed[3].item()


def test_carry_state_goes_on_where_an_episode_ends():
    script = driver.fresh("rppo_lstm", "carry_state")
    agent = build(script, CHOICES).double()
    final = awkward_ends()[2][:-1]
    x = torch.randn(*final.shape, 4, dtype=torch.float64)
    state = agent.initial_state(final.shape[1]).double()
    expected = reference.loop(agent.lstm.step, x, state, torch.zeros_like(final))[0]
    assert (agent.lstm(x, state, final) - expected).abs().max() < 1e-10
    kept = torch.randn(2, 3, 6)
    assert script.reset_state(kept, np.ones(3, bool)) is kept


def test_feedforward_remembers_nothing():
    script = driver.fresh("rppo_continuous", "feedforward")
    agent = build(script, REAL)
    assert agent.initial_state(4).shape == (1, 4, 0) and script.Args().seq_len == 1
    assert {preset["seq_len"] for preset in script.PRESETS.values()} == {1}
    x, final = torch.randn(6, 4, 4), torch.zeros(6, 4, dtype=torch.bool)
    other = torch.cat([torch.randn(5, 4, 4), x[5:]])
    state = agent.initial_state(4)
    assert torch.equal(agent.lstm(x, state, final)[5], agent.lstm(other, state, final)[5])


def test_long_memory_lets_half_of_the_gradient_through_31_steps():
    torch.manual_seed(0)
    script = driver.fresh("rppo_lstm", "long_memory")
    cell = build(script, CHOICES, hidden_size=512).lstm.cell
    keeps = cell.bias_ih.detach().chunk(4)[1].sigmoid() ** 31
    n = np.random.default_rng(0).uniform(1, 127, 100_000)
    assert keeps.mean().item() == pytest.approx(((1 - 1 / (n + 1)) ** 31).mean(), abs=0.05)
    assert 0.45 < keeps.mean() < 0.65  # a bias of 1: 6e-5


# Networks
@pytest.mark.parametrize("name", VECTORS)
def test_networks_build_what_the_flags_say(name):
    needs(name)
    script = driver.fresh(name, "networks")
    space = CHOICES if name == "rppo_lstm" else REAL
    flags = dict(layers_before="9,7", layers_after="5", critic_layers_after="4", activation="elu")
    agent = build(script, space, **flags)

    def widths(module):
        return [x.out_features for x in module if isinstance(x, nn.Linear)]

    assert widths(agent.encoder) == [9, 7] and widths(agent.actor)[:-1] == [5]
    assert widths(agent.critic) == ([9, 7, 4, 1] if name == "trpo" else [4, 1])
    assert sum(isinstance(x, nn.ELU) for x in agent.encoder) == 2
    assert not any(isinstance(x, nn.Tanh) for x in agent.modules())
    for flag, value in {"layers_before": "wide", "activation": "step"}.items():
        with pytest.raises(script.ArgumentError):
            build(script, space, **{flag: value})
    torch.manual_seed(0)
    weight = build(script, space, orthogonal=False, layers_before="32,32").encoder[2].weight
    assert not torch.allclose(weight @ weight.T, 2 * torch.eye(32), atol=0.1)
    assert weight.abs().max() <= 32**-0.5  # torch's: uniform, 1 / sqrt(inputs)


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous"])
@pytest.mark.parametrize("recipes", ["networks", "networks feedforward", "networks attention"])
@pytest.mark.parametrize("critic", ["shared", "detached", "separate", "memoryless"])
@pytest.mark.parametrize("share", [True, False])
def test_critics_learn_and_remember_what_they_should(name, recipes, critic, share):
    """Which gradients the value has, whether it depends on the past, and replay as it was played."""
    script = driver.fresh(name, *recipes.split())
    space = CHOICES if name == "rppo_lstm" else REAL
    flags = dict(critic=critic, share_encoder=share, norm_obs=False, hidden_size=8)
    if not share and critic in ("shared", "detached"):
        with pytest.raises(script.ArgumentError, match="--critic separate"):
            build(script, space, **flags)
        return
    agent = build(script, space, **flags)
    T, N = 6, 4
    obs, state = torch.randn(T, N, 3), agent.initial_state(N)
    final = torch.zeros(T, N, dtype=torch.bool)
    actions = torch.zeros(T, N, dtype=torch.long) if space is CHOICES else torch.zeros(T, N, 2)

    def value(obs):
        return agent.evaluate_actions(obs, state, final, actions)[2].view(T, N)

    value(obs).sum().backward()
    moved = {key for key, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
    mine = {key for key, _ in agent.named_parameters() if key.startswith(("lstm", "encoder"))}
    if critic in ("separate", "memoryless"):
        own = {key for key in mine if key.startswith("lstm.critic")}
        assert own <= moved
        mine -= own
    encoder = {key for key in mine if "encoder" in key}
    learns = {"shared": mine, "detached": set(), "separate": encoder, "memoryless": encoder}
    assert moved & mine == (learns[critic] if share else set())
    past = obs.clone()
    past[0] += 1
    remembers = (value(obs)[-1] - value(past)[-1]).abs().max() > 1e-6
    assert remembers == (critic != "memoryless" and "feedforward" not in recipes)
    following = state
    for t in range(T):
        _, played, following = agent.step(obs[t], following)
        assert (played - value(obs)[t]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["rppo_continuous", "trpo"])
@pytest.mark.parametrize("full_std", [True, False])
@pytest.mark.parametrize("squash", [True, False])
def test_sde_has_stable_baselines3s_densities(name, full_std, squash):
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    script = driver.fresh(name, "sde", "networks", "squash")
    flags = dict(use_sde=True, full_std=full_std, use_expln=True, squash_output=squash)
    agent = build(script, REAL, layers_after="5", layers_before="6", **flags)
    theirs = distributions.StateDependentNoiseDistribution(
        2, full_std=full_std, use_expln=True, squash_output=squash, epsilon=1e-6
    )
    theirs.proba_distribution_net(5, -2.0, 5)
    h, u = torch.randn(7, 6), torch.randn(7, 2)
    latent = agent.features(h)
    theirs.proba_distribution(agent.actor(h), agent.log_std, latent)
    policy = agent.policy(h)
    assert (policy.log_prob(u) - theirs.log_prob(u.tanh() if squash else u)).abs().max() < 1e-4
    assert torch.allclose(agent.std(), theirs.get_std(agent.log_std), atol=1e-6)
    torch.manual_seed(0)
    spread = (latent[:1, None] @ agent.sample_noise(20_000))[:, 0].std(0)
    assert torch.allclose(spread, policy.base_dist.stddev[0], rtol=0.05)


def test_sde_in_trpo_keeps_its_noise(tmp_path):
    """For a rollout or --sde-sample-freq steps, whatever is evaluated in between."""
    for freq, firsts in {-1: [32], 8: [8, 16, 24, 32, 40, 48, 56]}.items():
        script, acting = driver.fresh("trpo", "sde", "keep_best"), []

        class Agent(script.Agent):
            predicting = False

            def act(self, h, noise, acting=acting):
                if not self.predicting:
                    acting.append(noise)
                return super().act(h, noise)

            def predict(self, *inputs):
                self.predicting = True
                found = super().predict(*inputs)
                self.predicting = False
                return found

        script.Agent = Agent
        flags = dict(env_id="Pendulum-v1", use_sde=True, total_timesteps=128, eval_every=64)
        run(script, tmp_path, sde_sample_freq=freq, deterministic=False, eval_episodes=1, **flags)
        new = [i for i in range(1, len(acting)) if acting[i] is not acting[i - 1]]
        assert new == firsts


@pytest.mark.parametrize("name", ["rppo_continuous", "trpo"])
def test_squash_has_the_density_of_squashed_actions(name):
    """Over all actions between the bounds it integrates to 1; the entropy is its own estimate."""
    torch.manual_seed(0)
    script = driver.fresh(name, "squash")
    one = spaces.Box(-3, 1, (1,), np.float32)
    agent = build(script, one, squash_output=True, norm_obs=False)
    policy = agent.policy(torch.randn(1, agent.actor.in_features))
    u = torch.linspace(-9, 9, 20_001, dtype=torch.float64)  # action tanh(u)
    logprob = policy.log_prob(u[:, None]).double()
    weight = logprob.exp() * (1 - u.tanh() ** 2)  # the density of tanh(u), times d tanh(u) / du
    assert torch.trapezoid(weight, u).item() == pytest.approx(1, abs=2e-3)
    entropy = -torch.trapezoid(weight * logprob, u).item()
    drawn = torch.stack([policy.entropy() for _ in range(4000)])
    assert drawn.mean().item() == pytest.approx(entropy, abs=4 * drawn.std().item() / 4000**0.5)
    sent = script.to_env(torch.tensor([[0.0], [99.0], [-99.0]]), agent.action_space)
    assert np.allclose(sent, [[-1], [1], [-3]])
    with pytest.raises(script.ArgumentError, match="must have bounds"):
        build(script, spaces.Box(-np.inf, np.inf, (1,), np.float32), squash_output=True)


# Training
def test_overlapping_sequences_hold_every_step_with_its_weight():
    overlap = driver.recipe("overlap")
    T, N = 12, 2
    rollout = torch.arange(T * N).view(T, N)
    for stride, length in (3, 6), (1, 4), (4, 4), (2, 5):
        steps = overlap.cut(rollout, stride, length)
        assert steps.shape == (length, T // stride * N)
        starts = [t * N + n for t in range(0, T, stride) for n in range(N)]
        final = overlap.cut(torch.zeros(T, N, dtype=torch.bool), stride, length)
        for i in range(length):
            following = [x + i * N for x in starts]
            assert final[i].tolist() == [x >= T * N for x in following]
            assert steps[i][~final[i]].tolist() == [x for x in following if x < T * N]
        weight = overlap.weights(T, stride, length).T.repeat_interleave(N, 1)
        sums = torch.zeros(T * N).index_add(0, steps[~final], weight[~final])
        assert torch.allclose(sums, torch.ones(T * N))  # of every step, once


@pytest.mark.parametrize("name", PPO)
def test_overlap_keeps_the_objective(tmp_path, name):
    """Without a memory the gradient is that of sequences that don't overlap; with one, replay
    begins at the states that were stored: the first ratio is 1."""
    needs(name)
    gradients = []
    flags = dict(env_id=ENVS.get(name, "CartPole-v1"), total_timesteps=1, num_minibatches=1)
    for recipes, own in ([], {}), (["overlap"], {"overlap_len": 8}):
        memory = "min_gru" if name == "ppo1_mpi" else "feedforward"
        script = driver.fresh(name, memory, *recipes)
        if name == "ppo1_mpi":  # a memory whose units forget at once, for it has no feedforward
            cell = driver.recipe("min_gru").MinGRU

            class Forgets(cell):
                def __init__(self, *sizes):
                    super().__init__(*sizes)
                    self.gate.bias.data.fill_(99.0)

            script.ResetLSTM = Forgets
        script.too_far = lambda *inputs: True  # ends the update before its first step
        agent, _ = run(script, tmp_path, num_steps=32, seq_len=4, eval_episodes=0, **flags, **own)
        gradients.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
    plain, weighed = gradients
    assert (plain - weighed).norm() < 1e-4 * plain.norm() and plain.norm() > 0
    script = driver.fresh(name, "overlap")
    flags |= {"memory": "lstm"} if name == "ppo1_mpi" else {}
    assert first_ratios(script, tmp_path, num_steps=32, seq_len=1, overlap_len=16, **flags) < 1e-5


def test_value_clipping_in_both_forms():
    clipped = driver.recipe("losses").clipped
    value, old, return_ = torch.tensor([[1.0, 1.5, 0.0, 1.1], [1.0] * 4, [2.0, 2.0, 2.0, 1.0]])
    inside = clipped(value, old, return_, 0.2, "inside")
    assert torch.allclose(inside, torch.tensor([1.0, 1.2, 0.8, 1.1]))
    larger = (clipped(value, old, return_, 0.2, "max") - return_) ** 2
    expected = torch.maximum((value - return_) ** 2, (inside - return_) ** 2)
    assert torch.equal(larger, expected)


def test_losses_reach_training(tmp_path):
    """The value loss of every minibatch is the clipped one; advantages stay as they are."""
    script = driver.fresh("rppo_lstm", "losses")
    rows, logs = [], script.Run.log
    script.Run.log = lambda run, metrics, *x: (rows.extend(metrics), logs(run, metrics, *x))
    flags = dict(env_id="CartPole-v1", total_timesteps=1, eval_episodes=0, clip_value="inside")
    run(script, tmp_path, clip_value_coef=1e-9, update_epochs=8, learning_rate=0.1, **flags)
    losses = [row[1].item() for row in rows]  # V can't move: each epoch has the first one's loss
    assert sum(losses[:2]) == pytest.approx(sum(losses[-2:]), rel=1e-4)
    x = torch.randn(5)
    agent = build(script, CHOICES, norm_advantage=False)
    assert torch.equal(script.normalize_advantage(x), x)
    agent = build(script, CHOICES)
    assert agent.args.norm_advantage and script.normalize_advantage(x).mean().abs() < 1e-6


FACTORS = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "polynomial": lambda p: (1 - p) ** 2,
    "middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075,
    "double_linear_con": lambda p: 1 - 2 * p if 1 - 2 * p >= 0.125 else 0.125,
    "double_middle_drop": lambda p: 1 - p if p <= 0.25 else 0.075 if p <= 0.75 else 0.125,
}


@pytest.mark.parametrize("kind", FACTORS)
def test_schedules_equal_the_formulas(tmp_path, kind):
    """Of each value its own length and power; agent.pt has what the user said."""
    script = driver.fresh("rppo_lstm", "schedules")
    runs, seen, minibatches = [], [], script.minibatches

    class Run(script.Run):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            runs.append(self)

    def batches(final, args):
        [run] = runs
        lr = run.optimizer.param_groups[0]["lr"]
        seen.append((run.step, lr, args.clip_coef, args.ent_coef))
        return minibatches(final, args)

    script.Run, script.minibatches = Run, batches
    flags = dict(learning_rate=0.01, learning_rate_final=0.001, learning_rate_schedule=kind)
    flags |= dict(learning_rate_power=2.0, clip_coef=0.3, clip_coef_schedule=kind)
    flags |= dict(clip_coef_power=2.0, clip_coef_steps=300, ent_coef=0.1, ent_coef_final=0.02)
    flags |= dict(env_id="CartPole-v1", total_timesteps=600, eval_episodes=0)
    args = {**flags, "adam_beta2": 0.9, "weight_decay": 0.02}
    agent, run_dir = run(script, tmp_path, **args)
    assert len(seen) >= 9
    for step, lr, clip, entropy in seen:
        assert lr == pytest.approx(0.001 + 0.009 * FACTORS[kind](step / 600))
        assert clip == pytest.approx(0.3 * FACTORS[kind](min(step / 300, 1)))
        assert entropy == 0.1
    [group] = runs[0].optimizer.param_groups
    assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.9, 0.9), 0.02, 1e-5)
    assert group["decoupled_weight_decay"]
    saved = script.load(run_dir)["args"]
    assert all(saved[key] == x for key, x in args.items()) and saved["anneal_lr"]


def test_the_memory_learns_at_a_rate_of_its_own(tmp_path):
    """Adam's first step moves each weight by its learning rate; a resumed run keeps both."""
    script = driver.fresh("rppo_lstm", "schedules")
    flags = dict(env_id="CartPole-v1", total_timesteps=1, eval_episodes=0, anneal_lr=False)
    flags |= dict(learning_rate=0.01, memory_lr=0.1, num_minibatches=1, update_epochs=1)
    first = {}

    class Agent(script.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            first.update({name: x.detach().clone() for name, x in self.named_parameters()})

    script.Agent = Agent
    agent, run_dir = run(script, tmp_path, **flags)
    for name, x in agent.named_parameters():
        moved = (x - first[name]).abs().max().item()
        assert moved == pytest.approx(0.001 if name.startswith("lstm.") else 0.01, rel=0.02), name
    groups = script.load(run_dir)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.01, 0.001])
    script.train(replace(agent.args, resume=str(run_dir), total_timesteps=100))


def test_recomputed_states_are_those_of_exercise_8(tmp_path, monkeypatch):
    """The same weights after four rollouts, with episodes that end, in four epochs of each."""
    monkeypatch.syspath_prepend(driver.ROOT / "docs/exercises")
    exercises = importlib.import_module("train")
    flags = dict(env_id="CartPole-v1", num_steps=32, seq_len=8, learning_rate=0.01, eval_episodes=0)
    theirs = exercises.load("recompute", str(tmp_path))
    theirs.kind = "rppo_lstm"
    agents = [run(x, tmp_path, total_timesteps=500, **flags)[0]
              for x in (theirs, driver.fresh("rppo_lstm", "recompute"))]  # fmt: skip
    stale, _ = run(driver.fresh("rppo_lstm"), tmp_path, total_timesteps=500, **flags)
    ours, exercise, plain = (
        nn.utils.parameters_to_vector(agent.parameters()) for agent in [agents[1], agents[0], stale]
    )
    assert (ours - exercise).abs().max() < 1e-5 < 1e-3 < (ours - plain).abs().max()


@pytest.mark.parametrize("name", VECTORS)
def test_without_flags_schedules_and_keep_best_and_callbacks_change_nothing(tmp_path, name):
    """Bit for bit, even where the environment draws from numpy's and Python's generators."""
    needs(name)
    agents = []
    for recipes in [], ["schedules", "keep_best", "callbacks", "scalars", "eval_limit"]:
        script = driver.fresh(name, *recipes)
        env_id = "BoxGlobals-v0" if name == "rppo_continuous" else "Globals-v0"
        flags = dict(env_id=env_id, total_timesteps=400, deterministic=False)
        flags |= {"eval_every": 50, "film_every": 0} if recipes else {}
        agents.append(run(script, tmp_path, **flags)[0])
    assert same_weights(*agents)


def test_eval_limit_cuts_evaluations(tmp_path):
    script = driver.fresh("rppo_lstm", "eval_limit")
    _, run_dir = run(script, tmp_path, env_id="Endless-v0", eval_steps=7)
    assert returns(run_dir) == [7, 7]
    reopened(run_dir)


@pytest.mark.parametrize("name", ["rppo_lstm", "ppo1_mpi"])
def test_keep_best_keeps_the_best_and_stops(tmp_path, name):
    needs(name)
    script = driver.fresh(name, "keep_best")
    scores = iter([3.0, 9.0, 5.0, 20.0, 1.0])
    evaluate = script.evaluate
    script.evaluate = lambda *x: [next(scores)] * 2 if x[2] != final else evaluate(*x)
    final = script.env_seed(1, script.EVALUATION)
    flags = dict(env_id="CartPole-v1", total_timesteps=10_000, eval_every=1, stop_at_eval=20.0)
    _, run_dir = run(script, tmp_path, **flags)
    logged = scalars(run_dir)["charts/eval_return"]
    assert [*logged.values()] == [3, 9, 5, 20]
    assert (run_dir / "best/return.txt").read_text() == "20.0"
    best = script.load(run_dir / "best")
    assert best["step"] == [*logged][3] == script.load(run_dir)["step"]
    assert best["args"]["total_timesteps"] == 10_000  # what the user asked for


# Logging
def test_scalars_write_rows(tmp_path):
    script = driver.fresh("rppo_continuous", "scalars")
    flags = dict(env_id="Pendulum-v1", total_timesteps=384, eval_episodes=0, log_every=2)
    flags |= dict(csv=True, json=True, table=True)
    agent, run_dir = run(script, tmp_path, **flags)
    rows = list(csv.DictReader(open(run_dir / "progress.csv")))
    logged = scalars(run_dir)
    assert [int(row["step"]) for row in rows] == [128, 256, 384]
    for name in "losses/value_loss", "losses/explained_variance", "charts/action_std":
        assert [float(row[name]) for row in rows] == pytest.approx([*logged[name].values()], 1e-5)
    assert {float(row["charts/minibatches"]) for row in rows} == {8}
    script.train(replace(agent.args, resume=str(run_dir), total_timesteps=512))
    rows = list(csv.DictReader(open(run_dir / "progress.csv")))
    assert [int(row["step"]) for row in rows] == [128, 256, 384, 512]
    lines = [json.loads(line) for line in (run_dir / "progress.json").read_text().splitlines()]
    assert [line["losses/entropy"] for line in lines] == [float(r["losses/entropy"]) for r in rows]


@pytest.mark.parametrize("name", ["rppo_lstm", "ppo1_mpi"])
def test_callbacks_stop_and_keep_checkpoints(tmp_path, name):
    needs(name)
    script = driver.fresh(name, "callbacks")
    flags = dict(env_id="Globals-v0", total_timesteps=20_000, eval_episodes=0, num_envs=4)
    _, run_dir = run(script, tmp_path, stop_at_return=-99.0, checkpoint_every=500, **flags)
    saved = script.load(run_dir)
    assert len(saved["returns"]) == 100 and 1000 <= saved["step"] < 1200
    assert saved["args"]["total_timesteps"] == 20_000
    steps = sorted(int(folder.name) for folder in (run_dir / "checkpoints").iterdir())
    assert [step // 500 for step in steps] == [1, 2]
    assert all(script.load(run_dir / "checkpoints" / str(step))["step"] == step for step in steps)


def test_callbacks_write_histograms_and_films(tmp_path):
    """Which change nothing in what is learned."""
    pytest.importorskip("moviepy")
    script = driver.fresh("rppo_lstm", "callbacks")
    flags = dict(env_id="CartPole-v1", total_timesteps=300)
    plain, _ = run(script, tmp_path, **flags)
    agent, run_dir = run(script, tmp_path, histograms_every=200, film_every=200, **flags)
    assert same_weights(agent, plain)
    assert {*EventAccumulator(str(run_dir)).Reload().Tags()["histograms"]} == {
        name for name, _ in agent.named_parameters()
    }
    [film] = run_dir.glob("films/*/*.mp4")
    assert 200 <= int(film.parent.name) < 300 and film.stat().st_size > 1000


# Tasks
def test_poc_memory():
    """Its rules, its optimum (1.2 in 7 steps), and Gymnasium's own checker."""
    env, returns, starts, sides = driver.recipe("poc_memory").PocMemory(), [], set(), set()
    for seed in range(400):
        obs, _ = env.reset(seed=seed)
        goals, position, total, steps, done = obs[[0, 2]], obs[1], 0.0, 0, False
        starts.add(round(float(position), 1))
        sides.add(tuple(goals))
        while not done:
            obs, reward, done, truncated, _ = env.step(int(goals[1] > 0))
            total, steps = total + reward, steps + 1
            if steps <= 2:  # frozen, visible, free
                assert reward == 0.0 and obs[1] == position and np.array_equal(obs[[0, 2]], goals)
            elif not done:
                assert reward == pytest.approx(-0.1) and np.array_equal(obs[[0, 2]], [0, 0])
        assert reward == pytest.approx(1.6) and abs(obs[1]) == 1.0 and not truncated
        returns.append((total, steps))
    assert starts == {-0.4, -0.2, 0.0, 0.2, 0.4} and sides == {(-1, 1), (1, -1)}
    assert np.mean(returns, 0) == pytest.approx([1.2, 7], abs=0.15)
    check_env(driver.recipe("poc_memory").PocMemory(), skip_render_check=True)


def test_minigrid_memory_shows_nine_cells_and_pays_who_remembers():
    """A policy by hand: look at the object, walk, look to the left, go where its like is."""
    pytest.importorskip("minigrid")
    scale = driver.recipe("minigrid_memory").SCALE
    returns, left, forward = [], 0, 2
    env = gym.make("MemoryS9-v0")
    assert env.action_space.n == 3

    def objects(obs):
        return {*obs.reshape(9, 5).argmax(1)} & {3, 4}  # key, ball

    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        assert np.array_equal(np.unique(obs), [0, scale]) and obs.sum() == 9 * scale
        cue, to_start = objects(obs), env.unwrapped.agent_pos[0] - 1
        for action in [left] * 2 + [forward] * to_start + [left] * 2 + [forward] * 6:
            obs, *_ = env.step(action)
            cue = objects(obs) or cue  # near the end the others are in sight
        obs, *_ = env.step(left)
        assert len(cue) == len(objects(obs)) == 1
        for action in [forward] if objects(obs) == cue else [left, left, forward]:
            _, reward, terminated, _, _ = env.step(action)
        assert terminated
        returns.append(reward)
    assert np.mean(returns) > 0.926


@pytest.mark.parametrize("pixels", [False, True])
def test_minigrid_memory_tells_a_key_from_a_ball(pixels):
    """What the LSTM reads of them differs by 5 or 6 in pixels, by 3 in symbols; its kernels are
    not trained, and its forget gates begin nearly open."""
    pytest.importorskip("minigrid")
    torch.manual_seed(0)
    script = driver.fresh("rppo_lstm", "minigrid_memory", *["images"] * pixels)
    args = script.Args()
    assert args.env_id == "MemoryS9-v0" and args.num_envs == 16
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    features = {}
    for seed in range(50):  # the agent beside the object, which it sees after turning left
        envs.reset(seed=seed)
        grid = envs.unwrapped.envs[0].unwrapped
        for _ in range(2):
            obs, *_ = envs.step(np.zeros(1, np.int64))
        if grid.agent_pos[0] == 1:
            kind = grid.grid.get(1, grid.height // 2 - 1).type
            features[kind] = agent.encoder(torch.from_numpy(obs).float())[0]
    apart = (features["key"] - features["ball"]).norm().item()
    assert 4 < apart < 7 if pixels else 2 < apart < 4
    assert not [key for key, _ in agent.named_parameters() if "cnns" in key]
    assert agent.lstm.cell.bias_ih.detach().chunk(4)[1].mean() == pytest.approx(2, abs=0.01)


def test_memory_gym_tasks_have_their_parameters(tmp_path):
    pytest.importorskip("memory_gym")
    script = driver.fresh("rppo_lstm", "memory_gym_tasks")
    flags = dict(env_id="MortarMayhem-Grid-v0", task='{"command_count": [4]}', total_timesteps=64)
    _, run_dir = run(script, tmp_path, eval_episodes=1, seed_pool=3, **flags)
    script, args, _, _ = reopened(run_dir)
    envs = script.make_envs(args, 1)
    envs.reset(seed=0)
    assert envs.unwrapped.envs[0].unwrapped.reset_params["command_count"] == [4]


def test_envpool_plays_gymnasiums_pendulum():
    """The same physics, time limit, final step and order of an episode's rows; seeds are reset's."""
    pytest.importorskip("envpool")
    script = driver.fresh("rppo_continuous", "envpool_tasks")
    args = script.Args(env_id="Pendulum-v1")
    envs = script.make_envs(args, 3)
    first, other = (envs.reset(seed=seed)[0].copy() for seed in (7, 8))
    obs, _ = envs.reset(seed=7)
    assert np.array_equal(obs, first) and not np.isclose(obs, other).any()
    theirs = gym.make("Pendulum-v1").unwrapped
    theirs.reset()
    rng = np.random.default_rng(0)
    for t in range(1, 402):
        theirs.state = np.array([np.arctan2(obs[0, 1], obs[0, 0]), obs[0, 2]])
        actions = rng.uniform(-2, 2, (3, 1)).astype(np.float32)
        expected, reward, *_ = theirs.step(actions[0])
        obs, rewards, terminated, truncated, _ = (np.copy(x) for x in envs.step(actions))
        assert not terminated.any() and truncated.all() == truncated.any() == (t in (200, 401))
        if t == 201:  # the action at a final step is ignored
            assert not rewards.any() and not np.allclose(obs[0], expected, atol=1e-3)
        else:
            assert obs[0] == pytest.approx(expected, abs=1e-5)
            assert rewards[0] == pytest.approx(reward, abs=1e-4)
    with pytest.raises(script.ArgumentError, match="EnvPool"):
        script.make_envs(script.Args(env_id="Nope-v1"), 1)


def test_envpools_memory_maze_is_minigrids():
    """All that is seen and paid in a maze of EnvPool is so in one of MiniGrid's mazes."""
    pytest.importorskip("envpool")
    pytest.importorskip("minigrid")
    script = driver.fresh("rppo_lstm", "minigrid_memory", "envpool_tasks")
    table = driver.recipe("minigrid_memory").TABLE
    envs = script.make_envs(script.Args(), 2)
    actions = np.random.default_rng(1).choice(3, 405, p=[0.2, 0.2, 0.6])
    mazes = [gym.make("MiniGrid-MemoryS9-v0", disable_env_checker=True) for _ in range(60)]
    paid = []
    for seed in range(6):
        played = [(*envs.reset(seed=seed)[0][1], 0.0, False, False)]
        while not any(played[-1][-2:]):
            obs, *ends, _ = envs.step(np.full(2, actions[len(played) - 1]))
            played.append((*obs[1], *(x[1] for x in ends)))
        paid.append(played[-1][-3])

        def is_this(env, number) -> bool:
            obs, ends = env.reset(seed=number)[0], (0.0, False, False)
            for expected, action in zip(played, [*actions, 0]):
                seen = table[obs["image"][2:5, 4:, 0]].ravel()
                if not np.allclose((*seen, *ends), expected):
                    return False
                obs, *ends, _ = env.step(action)
            return True

        assert any(is_this(env, number) for number, env in enumerate(mazes))
    assert 0 < np.count_nonzero(paid) < 6  # the right object, and the wrong one


def test_ppo1_scales_rewards_and_not_returns():
    needs("ppo1_mpi")
    script = driver.fresh("ppo1_mpi", "ppo1")
    envs = script.make_envs(script.Args(env_id="CartPole-v1", reward_scale=0.1), 1)
    envs.reset(seed=0)
    rewards, done = [], False
    while not done:
        _, reward, terminated, truncated, info = envs.step(np.zeros(1, int))
        rewards.append(reward[0])
        done = terminated[0] or truncated[0]
    assert np.allclose(rewards, 0.1)
    assert info["run_statistics"]["r"][0] == len(rewards) == envs.return_queue[0]
    humanoid = script.preset("Humanoid-v5")
    assert (humanoid.reward_scale, humanoid.anneal_lr, humanoid.clip_coef) == (0.1, False, 0.1)
    assert humanoid.num_steps / humanoid.num_minibatches == 64  # baselines' optim_batchsize


def test_two_groups_learn_as_one(tmp_path, monkeypatch):
    """One group plays two sequences at once, where actions are drawn for each half in turn: the same
    weights, over episodes of ten steps and three rollouts."""
    needs("rppo_gru_atari")
    make_vec = gym.make_vec

    def make_short(*inputs, **options):
        return make_vec(*inputs, **{**options, "max_num_frames_per_episode": 40})

    def in_halves(log_pi):
        return torch.cat([sample(half) for half in log_pi.chunk(2)])

    monkeypatch.setattr(gym, "make_vec", make_short)
    agents = []
    for names in [], ["two_groups"]:
        script = driver.fresh("rppo_gru_atari", *names)
        if not names:
            sample, script.sample = script.sample, in_halves
        flags = dict(env_id="ALE/Breakout-v5", num_envs=4, num_steps=16, total_timesteps=150)
        agent, run_dir = run(script, tmp_path, **flags)
        assert script.load(run_dir)["lengths"] == [10] * 16
        agents.append(agent)
    for a, b in zip(*(agent.parameters() for agent in agents)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_ppo1_plays_games_as_rppo_gru_atari_does(tmp_path):
    needs("ppo1_mpi")
    needs("rppo_gru_atari")
    script = driver.fresh("ppo1_mpi", "ppo1")
    args = script.preset("ALE/Pong-v5", num_steps=8, num_minibatches=1, update_epochs=1)
    args.total_timesteps, args.runs_dir, args.eval_episodes = 8, str(tmp_path), 0
    assert args.frame_stack == 4 and not args.norm_obs
    agent = script.train(args)
    cnn = [module for module in agent.modules() if isinstance(module, nn.Conv2d)]
    assert len(cnn) == 3 and cnn[0].in_channels == 4  # one, which policy and critic share
    assert cnn[0].weight.grad.any()
    atari = driver.fresh("rppo_gru_atari")
    theirs = atari.make_envs(atari.Args(frame_stack=4), 2)
    ours = script.make_envs(args, 2)
    (x, _), (y, _) = theirs.reset(seed=0), ours.reset(seed=0)
    for _ in range(60):
        assert np.array_equal(x.reshape(2, -1), y)
        x, rewards, *_ = theirs.step(np.full(2, 3))
        y, signs, *_ = ours.step(np.full(2, 3))
        assert np.array_equal(np.sign(rewards), signs)


@pytest.mark.parametrize(
    "name, others",
    [
        ("rppo_lstm", ""), ("rppo_continuous", ""), ("rppo_gru_atari", ""),
        ("rppo_lstm", "losses overlap"), ("rppo_lstm", "carry_state"),
    ],
)  # fmt: skip
def test_what_cuda_graphs_records_learns_the_same(tmp_path, monkeypatch, name, others):
    """A graph, played by hand: the operations that were recorded, on the memory that they had."""
    needs(name)
    agents = []
    for names in [], ["cuda_graphs"]:
        script = driver.fresh(name, *names, *others.split())
        flags = {"clip_value": "max"} if "losses" in others else {}
        if name == "rppo_gru_atari":
            flags |= {"env_id": "ALE/Breakout-v5", "seq_len": 2}
        else:
            flags |= {"env_id": ENVS.get(name, "CartPole-v1"), "seq_len": 8, "eval_episodes": 4}
        if names:
            recipe, traced = driver.recipe("cuda_graphs"), []

            def trace(function, inputs):
                traced.append(function)
                with torch.inference_mode(False), torch.enable_grad():
                    inputs = [x.clone() for x in inputs]
                    return make_fx(lambda *x: function(*x))(*inputs)

            monkeypatch.setattr(recipe, "on_gpu", lambda obs: True)
            monkeypatch.setattr(recipe, "record", trace)
            monkeypatch.setattr(recipe, "record_with_gradients", trace)
        agents.append(run(script, tmp_path, **flags)[0])
    assert len(traced) == 2
    for a, b in zip(*(agent.parameters() for agent in agents)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
