"""rppo_gru_atari.py: the GRU's reset, games, scores and lives, frames, bfloat16, evaluation, processes."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if __name__ != "__main__":
    import launch
    from conftest import MODULES, ROOT

    pytest.importorskip("ale_py")
    rppo = MODULES["rppo_gru_atari"]


def make_args(**flags):
    small = dict(
        env_id="ALE/Breakout-v5", num_envs=4, num_steps=48, num_minibatches=2, hidden_size=16
    )
    small |= dict(update_epochs=1, total_timesteps=100, torch_threads=1, eval_episodes=0)
    return rppo.Args(**small | flags)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Trains; returns what the games gave (T, N, ...), compute_gae's inputs, each replay's inputs and
    outputs, ppo_loss's inputs, and result.json."""

    def run(**flags):
        games, gae, replays, losses = [], [], [], []
        run.logged = []
        make_envs, compute_gae, ppo_loss = rppo.make_envs, rppo.compute_gae, rppo.ppo_loss
        evaluate_actions, log = rppo.Agent.evaluate_actions, rppo.Run.log

        def watched_envs(*inputs):
            envs = make_envs(*inputs)
            step = envs.step

            def watched_step(action):
                outputs = step(action)
                games.append([np.copy(x) for x in (*outputs[:4], outputs[4]["lives"])])
                return outputs

            envs.step = watched_step
            return envs

        def watched_gae(*inputs):
            gae.append([np.copy(x) for x in inputs[:4]])
            return compute_gae(*inputs)

        def watched_replay(*inputs):
            outputs = evaluate_actions(*inputs)
            replays.append((*inputs[1:], *(x.detach() for x in outputs)))
            return outputs

        def watched_loss(*inputs):
            losses.append([x.detach() for x in inputs[:3]])
            return ppo_loss(*inputs)

        def watched_log(self, steps, means):
            run.logged += [dict(zip(rppo.LOSSES, x.tolist(), strict=True)) for x in means]
            log(self, steps, means)

        monkeypatch.setattr(rppo.Run, "log", watched_log)
        monkeypatch.setattr(rppo, "make_envs", watched_envs)
        monkeypatch.setattr(rppo, "compute_gae", watched_gae)
        monkeypatch.setattr(rppo, "ppo_loss", watched_loss)
        monkeypatch.setattr(rppo.Agent, "evaluate_actions", watched_replay)
        run.agent = rppo.train(make_args(**flags, runs_dir=str(tmp_path), run_name="a"))
        result = json.loads((tmp_path / "a/result.json").read_text())
        return [np.stack(x) for x in zip(*games)], gae, replays, losses, result

    return run


# --- The recurrence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan")])
def test_the_fused_gru_is_the_loop(garbage):
    """Outputs and gradients, by every weight, input and the first state; what a final step holds is
    nobody's business."""
    torch.manual_seed(0)
    gru = rppo.ResetGRU(5, 7).double()
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    final = torch.rand(20, 6) < 0.25
    final[0, 0] = final[-1, 1] = final[3, 2] = final[4, 2] = True
    x = torch.randn(20, 6, 5, dtype=torch.float64).masked_fill(final[..., None], garbage)
    x, state = x.requires_grad_(), torch.randn(1, 6, 7, dtype=torch.float64, requires_grad=True)
    loss_weights, inputs = torch.randn(20, 6, 7).double(), [x, state, *gru.parameters()]

    def gradients(h):
        return torch.autograd.grad((h * loss_weights)[~final].sum(), inputs)

    hs, h = [], state
    for t in range(20):
        h = gru.step(x[t].where(~final[t][:, None], 0.0), h)
        hs.append(h[0])
        h = h.where(~final[t][:, None], 0.0)
    expected, fused = torch.stack(hs), gru(x, state, final)
    assert (fused - expected)[~final].abs().max() <= 1e-12
    assert (fused[final] == 0).all()
    for a, b in zip(gradients(fused), gradients(expected)):
        assert b.abs().max() > 0.1 and (a - b).abs().max() <= 1e-10


def test_the_gru_refuses_other_shapes():
    """One ValueError that names the argument and both shapes; torch.gru takes one of them in silence."""
    gru = rppo.ResetGRU(3, 4)
    x, state, final = torch.zeros(5, 2, 3), torch.zeros(1, 2, 4), torch.zeros(5, 2)
    assert gru(x, state, final).shape == (5, 2, 4)  # flags may be numbers
    for name, wrong in (
        ("x", (x[..., :2], state, final)),
        ("state", (x, state[:, :1], final)),
        ("state", (x, state[..., :3], final)),
        ("state", (x, torch.zeros(2, 2, 4), final)),
        ("state", (x, (state, state), final)),
        ("state", (x[:, :1], state, final[:, :1])),  # would be broadcast
        ("final", (x, state, final[:, :1])),
        ("final", (x, state, final[0])),
    ):
        with pytest.raises(ValueError, match=f"^{name} is .* must have the shape"):
            gru(*wrong)


@pytest.mark.parametrize("separate", [False, True])
def test_the_first_minibatch_has_what_the_rollout_computed(watch, short_games, separate):
    """Before a weight has moved, across ends of games and of sequences."""
    short_games(80)
    flags = dict(seq_len=16, num_minibatches=1, separate_critic=separate)
    _, gae, replays, losses, _ = watch(**flags)
    (logprob, old_logprob, _), (_, _, final, _, _, _, value) = losses[0], replays[0]
    assert value.shape == logprob.shape == ((~final).sum(),)
    assert final.shape == (16, 12) and 4 <= final.sum() <= 12
    assert (logprob - old_logprob).abs().max() <= 1e-5
    sequences = gae[0][1][:-1].reshape(3, 16, 4).transpose(1, 0, 2).reshape(16, 12)
    acted = {round(float(v), 4) for v in sequences.ravel()}
    assert len(acted) > 100 and {round(float(v), 4) for v in value} - acted == set()


@pytest.mark.parametrize("ablate", [False, True])
def test_values_and_entropies_of_a_rollout_are_a_loops(ablate, watch, short_games):
    """Those of final steps and of step T, which bootstrap, have the state that the GRU has there;
    afterwards it is zero. Without memory it always is, and sequences are of one step."""
    short_games(80)
    (frames, _, terminated, truncated, _), gae, replays, *_ = watch(
        ablate_memory=ablate, num_minibatches=1
    )
    args = make_args(ablate_memory=ablate)
    envs = rppo.make_envs(args, 4)
    torch.manual_seed(args.seed)
    agent, first = rppo.Agent(envs, args), envs.reset(seed=args.seed)[0]
    final = np.concatenate([np.zeros((1, 4), bool), (terminated | truncated)[:48]])
    state, entropies = agent.initial_state(4), []
    assert final[1:48].any()
    with torch.no_grad():
        for t, (obs, ends) in enumerate(zip([first, *frames[:48]], torch.from_numpy(final))):
            logp, value, state = agent.step(torch.from_numpy(obs), state)
            assert (value - torch.from_numpy(gae[0][1][t])).abs().max() <= 1e-5
            assert state.any() != ablate
            state = state.where(~ends[:, None], 0.0)
            if t < 48:
                policy = torch.distributions.Categorical(logits=logp.squeeze(1))
                entropies.extend(policy.entropy()[~ends].tolist())
    obs, state, ends, _, _, entropy, _ = replays[0]
    assert obs.shape[:2] == ((1, 192) if ablate else (48, 4))
    if ablate:
        assert not state.any()
    assert ends.any() and np.abs(np.sort(entropy) - np.sort(entropies)).max() <= 1e-5 < min(
        entropies
    )


@pytest.mark.parametrize("max_grad_norm", [0.01, 1e9])
def test_gradients_are_those_of_ppos_loss(max_grad_norm, watch, short_games):
    """Of every minibatch, from the weights and sequences that it had."""
    short_games(80)
    updates = []

    def before(optimizer, *_):
        weights = optimizer.param_groups[0]["params"]
        copies = [x.detach().clone() for x in weights], [x.grad.clone() for x in weights]
        updates.append((optimizer.param_groups[0]["lr"], *copies))
        assert optimizer.param_groups[0]["eps"] == 1e-5

    hook = register_optimizer_step_pre_hook(before)
    flags = dict(update_epochs=2, ent_coef=0.02, vf_coef=0.7, learning_rate=1e-2, clip_coef=0.02)
    try:
        (frames, *_), gae, replays, losses, _ = watch(
            **flags, max_grad_norm=max_grad_norm, total_timesteps=300
        )
    finally:
        hook.remove()
    assert len(updates) == len(replays) == len(losses) == 8 and len(gae) == 2
    agent, step, clipped, batches = watch.agent, 0, 0, []
    for number, (lr, weights, gradients) in enumerate(updates):
        obs, state, final, actions, *_ = replays[number]
        played = frames[48 * (number // 4) :]
        n = [
            next(n for n in range(4) if np.array_equal(obs[1:, m], played[:47, n])) for m in (0, 1)
        ]
        batches.append(n)
        raw = rppo.compute_gae(*gae[number // 4], 0.99, 0.95)
        returns = torch.from_numpy((raw + gae[number // 4][1][:-1])[:, n])[~final]
        advantage = torch.from_numpy(raw[:, n])[~final]
        advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
        with torch.no_grad():
            for parameter, weight in zip(agent.parameters(), weights):
                parameter.copy_(weight)
        logprob, entropy, value = agent.evaluate_actions(obs, state, final, actions)
        ratio = (logprob - losses[number][1]).exp()
        clipped += ((ratio - 1).abs() > 0.02).sum().item()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage).mean()
        value_loss = 0.5 * (value - returns).square().mean()
        loss = 0.7 * value_loss - surrogate - 0.02 * entropy.mean()
        kl = (ratio - 1 - ratio.log()).mean()
        means = dict(policy_loss=-surrogate, value_loss=value_loss)
        means |= dict(entropy=entropy.mean(), approx_kl=kl)
        logged = {name: mean.item() for name, mean in means.items()}
        assert watch.logged[number] == pytest.approx(logged, rel=1e-4, abs=1e-6)
        expected = torch.autograd.grad(loss, [*agent.parameters()])
        norm = torch.stack([x.norm() for x in expected]).norm().item()
        scale = min(1.0, max_grad_norm / norm)
        for gradient, x in zip(gradients, expected):
            assert (gradient - scale * x).abs().max() <= 1e-4 * gradient.abs().max() + 1e-6
        assert lr == pytest.approx(1e-2 * (1 - step / 300), rel=1e-12)
        if number == 3:
            step = 192 - sum(final.sum().item() for _, _, final, *_ in replays[:2])
    assert clipped > 20 and 150 < step < 192 and norm > 0.02
    assert all(sorted(a + b) == [0, 1, 2, 3] for a, b in zip(batches[::2], batches[1::2]))
    epochs = list(zip(batches[::2], batches[1::2]))
    assert epochs[::2] != epochs[1::2]  # each is shuffled anew, though two may be alike by chance


# --- Games ------------------------------------------------------------------------------------------


def test_truncated_games_scores_and_the_sign_of_rewards(watch, short_games):
    short_games(400)
    (frames, rewards, terminated, truncated, _), gae, replays, _, result = watch(
        env_id="ALE/SpaceInvaders-v5", num_steps=210, num_minibatches=1
    )
    done = terminated | truncated
    final = np.concatenate([np.zeros((1, 4), bool), done[:-1]])
    assert done.sum() == 8 == truncated.sum() and rewards.max() > 1
    learned, _, got_terminated, got_done = gae[0]
    assert np.array_equal(learned, np.sign(rewards)) and not rewards[final].any()
    assert np.array_equal(got_done, done) and np.array_equal(got_terminated, terminated)
    assert result["global_step"] == 840 - final.sum()
    scores, score = [], np.zeros(4)
    for t in range(210):
        score += rewards[t]
        scores += [*score[done[t]]]
        score[done[t]] = 0
    assert result["returns"] == scores and max(scores) > 8
    obs, _, got_final, *_ = replays[0]
    assert obs.dtype == torch.uint8
    for m in range(4):  # the minibatch has the environments in a random order
        n = next(n for n in range(4) if np.array_equal(obs[1:, m], frames[:-1, n]))
        assert np.array_equal(got_final[:, m], final[:, n])


@pytest.mark.parametrize("flag", [True, False])
def test_a_lost_life_ends_the_return_and_nothing_else(watch, flag, short_games):
    short_games(360)
    (_, _, terminated, truncated, lives), gae, replays, _, result = watch(
        terminal_on_life_loss=flag, num_steps=110
    )
    lost = lives < np.concatenate([np.full((1, 4), 5), lives[:-1]])
    ended = terminated | truncated
    assert lost.sum() >= 8 and ended.sum() == 4 and not (lost & ended).all()
    assert np.array_equal(gae[0][2], terminated | lost & flag)
    assert np.array_equal(gae[0][3], ended | lost & flag)
    assert sum(final.sum().item() for _, _, final, *_ in replays) == 4 == len(result["returns"])
    assert result["global_step"] == 440 - 4


def test_frames_are_stacked_from_the_oldest_to_the_newest():
    for mode in None, "rgb_array":
        envs = rppo.make_envs(make_args(frame_stack=4), 1, mode)
        assert envs.single_observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        obs, _ = envs.reset(seed=1)
        assert (
            not obs[0, :2].any() and obs[0, 3].any()
        )  # no frames before the first, or before FIRE
        moved = 0
        for t in range(20):
            before = np.copy(obs)
            obs = envs.step(np.array([2 + t % 2]))[0]
            assert np.array_equal(obs[0, :3], before[0, 1:])
            moved += not np.array_equal(obs[0, 3], obs[0, 2])
        assert moved > 10
        envs.close()


def test_games_that_are_shown_are_those_of_training():
    """To one grey level, from the same emulator frame on."""
    native, shown = (
        rppo.make_envs(make_args(env_id="ALE/Freeway-v5"), 1, mode) for mode in (None, "rgb_array")
    )
    assert shown.single_observation_space == native.single_observation_space
    _, info = native.reset(seed=3)
    for seed in range(1000):  # until it has waited as long as the native game
        _, start = shown.reset(seed=seed)
        if start["episode_frame_number"][0] == info["episode_frame_number"][0]:
            break
    generator, worst, frames = np.random.default_rng(0), [], set()
    for _ in range(60):
        action = generator.integers(3, size=1)
        (a, r, *_), (b, s, *_) = native.step(action), shown.step(action)
        worst.append(np.abs(a.astype(int) - b).max())
        frames.add(b.tobytes())
        assert r[0] == s[0]
    assert max(worst) <= 1 and len(frames) == 60


@pytest.mark.parametrize("mode", [None, "rgb_array"])
@pytest.mark.parametrize("env_id,said", [
    ("Pong-v5", "not a game like ALE/Pong-v5"), ("ale_py:ALE/Pong-v5", "not a game like"),
    ("ALE/Nope-v5", "doesn't exist"), ("ALE/Pong-v4", "deprecated"), ("ALE/Pong-v5:x", "unpack"),
])  # fmt: skip
def test_what_is_no_game_is_refused_in_one_line(env_id, said, mode):
    with pytest.raises(rppo.ArgumentError, match=f"^--env-id {env_id}: .*{said}"):
        rppo.make_envs(make_args(env_id=env_id), 1, mode)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(rppo.ArgumentError, match=r'ale_py.* \(pip install "\.\[atari\]"\)'):
        rppo.make_envs(make_args(), 1)


@pytest.mark.parametrize("mode", [None, "rgb_array"])
def test_a_game_begins_with_fire(mode):
    """Breakout's ball waits for it: a player who does nothing loses one life of five."""
    envs = rppo.make_envs(make_args(), 1, mode)
    envs.reset(seed=1)
    lives = [envs.step(np.zeros(1, int))[4]["lives"][0] for _ in range(100)]
    assert lives[0] == 5 and lives[-1] == 4


# --- The network ------------------------------------------------------------------------------------


def test_amp_is_close_to_float32_and_leaves_the_gru_and_the_losses_in_it():
    envs = rppo.make_envs(make_args(), 1)
    torch.manual_seed(0)
    obs = torch.randint(0, 256, (12, 3, 1, 84, 84), dtype=torch.uint8)
    actions, final = torch.randint(4, (12, 3, 1)), torch.zeros(12, 3, dtype=torch.bool)
    final[5, 1] = True
    results, gradients = [], []
    for amp in False, True:
        torch.manual_seed(1)
        agent = rppo.Agent(envs, make_args(amp=amp, hidden_size=32))
        dtypes = []
        agent.gru.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
        outputs = agent.evaluate_actions(obs, agent.initial_state(3), final, actions)
        assert {x.shape for x in outputs} == {(35,)}  # of 36 steps
        assert dtypes == [torch.float32] and {x.dtype for x in outputs} == {torch.float32}
        (outputs[0] + outputs[2]).square().sum().backward()
        results.append(torch.stack(outputs).detach())
        gradients.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
    difference = (results[0] - results[1]).abs().max()
    assert 0 < difference <= 0.02 * results[0].abs().max()
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) >= 0.999


@pytest.mark.parametrize("separate", [False, True])
def test_predict_takes_the_likeliest_and_carries_the_state(separate):
    args = make_args(separate_critic=separate)
    envs = rppo.make_envs(args, 4)
    torch.manual_seed(0)
    agent = rppo.Agent(envs, args)
    state, h = None, agent.initial_state(4)
    for seed in range(6):
        obs = np.random.default_rng(seed).integers(0, 256, (4, 1, 84, 84), np.uint8)
        before = state
        action, state = agent.predict(obs, {}, before)
        with torch.no_grad():
            logp, _, h = agent.step(torch.from_numpy(obs), h)
        assert torch.equal(state, h) and np.array_equal(action, logp.squeeze(1).argmax(-1))
    assert before is not None and (state - before).abs().max() > 1e-3
    drawn = [agent.predict(obs, {}, before, deterministic=False)[0] for _ in range(50)]
    assert np.unique(drawn).tolist() == [0, 1, 2, 3]


def test_predict_says_what_it_needs_and_resets_after_final_steps():
    args = make_args(frame_stack=2)
    agent = rppo.Agent(rppo.make_envs(args, 3), args)
    obs = np.random.default_rng(0).integers(0, 256, (3, 2, 84, 84), np.uint8)
    for wrong in obs[0], obs[:, :1], obs[..., :83], obs / 255, {"x": obs}, np.uint8(0), None:
        with pytest.raises(
            ValueError, match=r"obs must be uint8 \(N, C, 84, 84\): take obs\[None\]"
        ):
            agent.predict(wrong)
    _, state = agent.predict(torch.from_numpy(obs))
    for wrong in state[:, :1], state[..., 1:], torch.cat([state, state]), (state, state):
        with pytest.raises(ValueError, match=r"state is .* must have the shape \(1, 3, 16\)"):
            agent.predict(obs, state=wrong)
    with pytest.raises(ValueError, match=r"final is .* must have the shape \(3,\)"):
        agent.predict(obs, final=np.zeros(2, bool))
    _, kept = agent.predict(obs, state=state)
    _, after = agent.predict(obs, state=state, final=np.array([False, True, False]))
    assert torch.equal(after[:, ::2], kept[:, ::2]) and kept.any(-1).all() and not after[:, 1].any()


def test_the_cnn_is_that_of_the_paper():
    """Mnih et al. 2015: 32 8x8 stride 4, 64 4x4 stride 2, 64 3x3, 512; of pixels from 0 to 1."""
    torch.manual_seed(0)
    encoder = rppo.NatureCNN(2, False)
    frames = torch.randint(0, 256, (3, 5, 2, 84, 84), dtype=torch.uint8)
    x, weights = frames.flatten(0, 1).float() / 255, list(encoder.parameters())
    for stride, W, b in zip((4, 2, 1), weights[0::2], weights[1::2]):
        x = torch.nn.functional.conv2d(x, W, b, stride).relu()
    x = torch.nn.functional.linear(x.flatten(1), weights[6].flatten(1), weights[7]).relu()
    assert x.shape == (15, 512) and [len(b) for b in weights[1::2]] == [32, 64, 64, 512]
    assert (encoder(frames).flatten(0, 1) - x).abs().max() <= 1e-5 * x.abs().max()
    for W in weights[::2]:  # orthogonal, times sqrt(2)
        rows = W.flatten(1)
        assert (rows @ rows.T - 2 * torch.eye(len(rows))).abs().max() <= 1e-4


# --- Evaluation -------------------------------------------------------------------------------------


def fickle(agent):
    """The agent, with actions that depend on frames and state, and not always the same one."""
    with torch.no_grad():
        agent.actor.weight.normal_(std=3)
        agent.actor.bias.zero_()
    return agent


def never_fires(agent):
    """The agent, with one action: none."""
    with torch.no_grad():
        agent.actor.bias[0] = 1e6
    return agent


@pytest.mark.parametrize("separate", [False, True])
def test_an_evaluation_is_each_of_its_games_alone(separate):
    """Game i of N side by side has the seed seed + i and is what one environment of that seed plays."""
    args = make_args(env_id="ALE/SpaceInvaders-v5", separate_critic=separate)
    envs = rppo.make_envs(args, 4, None, 500)
    torch.manual_seed(0)
    agent = fickle(rppo.Agent(envs, args))
    batches = []
    predict = agent.predict
    agent.predict = lambda obs, *others: batches.append(len(obs)) or predict(obs, *others)
    returns = rppo.evaluate(agent, envs, 11)
    assert set(batches) == {4} and len(returns) == 4 and len(set(returns)) > 1
    for i in range(4):
        alone = rppo.make_envs(args, 1, None, 500)
        (obs, _), state, score, done = alone.reset(seed=11 + i), None, 0.0, False
        while not done:
            action, state = predict(obs, None, state)
            obs, reward, terminated, truncated, _ = alone.step(action)
            score += reward[0]
            done = terminated[0] or truncated[0]
        assert returns[i] == score
        alone.close()


@pytest.mark.parametrize("mode", [None, "rgb_array"])
def test_a_game_that_stands_still_is_cut(mode):
    """Breakout's ball waits for FIRE after a lost life, and this agent never fires."""
    args = make_args()
    envs = rppo.make_envs(args, 2, mode, 800)
    agent = never_fires(rppo.Agent(envs, args))
    assert rppo.evaluate(agent, envs, 1) == [0, 0]
    assert all(190 <= length <= 200 for length in envs.length_queue)


def test_an_evaluation_cuts_games_and_training_does_not(tmp_path, monkeypatch, resets):
    """After five minutes of 60 frames a second, as Mnih et al. (2015) do; ale_py's limit is half an hour."""
    assert rppo.EVAL_FRAMES == 5 * 60 * 60 == 18_000
    frames, make_vec, predict = [], gym.make_vec, rppo.Agent.predict

    def watched(*inputs, **options):
        frames.append((inputs[1], options["max_num_frames_per_episode"]))
        return make_vec(*inputs, **options)

    def counted(self, obs, *others):
        played.append(len(obs))
        return predict(self, obs, *others)

    played: list = []
    monkeypatch.setattr(gym, "make_vec", watched)
    monkeypatch.setattr(rppo.Agent, "predict", counted)
    monkeypatch.setattr(rppo, "EVAL_FRAMES", 400)
    flags = dict(num_steps=8, total_timesteps=32, seed=7, eval_episodes=3)
    rppo.train(make_args(**flags, runs_dir=str(tmp_path), run_name="a"))
    assert frames == [(4, 108_000), (3, 400)] and resets == [7, 7]
    assert 90 <= len(played) <= 100 and set(played) == {3}
    evaluation = json.loads((tmp_path / "a/result.json").read_text())["evaluation"]
    assert len(evaluation) == 3 and all(score >= 0 for score in evaluation)


@pytest.mark.parametrize("render", ["none", "video"])
def test_play_cuts_games_of_consecutive_seeds(render, tmp_path, monkeypatch, capsys, resets):
    rppo.train(make_args(num_steps=8, total_timesteps=32, runs_dir=str(tmp_path), run_name="a"))
    monkeypatch.setattr(rppo, "EVAL_FRAMES", 120)
    acted, predict = [], rppo.Agent.predict

    def counted(self, obs, *others):
        acted.append(len(obs))
        return predict(self, obs, *others)

    monkeypatch.setattr(rppo.Agent, "predict", counted)
    resets.clear()
    capsys.readouterr()
    flags = f"--play {tmp_path}/a --eval-episodes 2 --seed 5 --render {render}".split()
    monkeypatch.setattr(sys, "argv", ["rppo_gru_atari.py", *flags])
    rppo.main()
    assert resets == ([5] if render == "none" else [5, 6])
    games = 1 if render == "none" else 2  # one after the other, or side by side
    assert 20 * games <= len(acted) <= 32 * games  # 120 frames, four a step, less the no-ops
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and all(line.startswith("return ") for line in printed)
    videos = [*tmp_path.glob("a/videos/*.mp4")]
    assert len(videos) == (0 if render == "none" else 2)


@pytest.mark.slow
def test_an_agent_that_never_fires_is_evaluated_in_three_minutes():
    """Ten whole games on one core, in seconds of processor time."""
    args = rppo.Args(env_id="ALE/Breakout-v5")
    envs = rppo.make_envs(args, 10, None, rppo.EVAL_FRAMES)
    agent = never_fires(rppo.Agent(envs, args))
    began = time.process_time()
    assert rppo.evaluate(agent, envs, 1) == [0] * 10
    assert time.process_time() - began < 180
    assert [*envs.length_queue] == [4_500] * 10


# --- Warnings, and what another launcher left in the environment ------------------------------------


@pytest.mark.parametrize("mkldnn,has,warned", [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_amp_warns_where_the_processor_has_no_bfloat16(mkldnn, has, warned, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rppo.check_args(make_args())
        rppo.check_args(make_args(amp=True, cuda=True))
        assert caught == []
        rppo.check_args(make_args(amp=True))
    assert [str(x.message).split(":")[0] for x in caught] == ["--amp"] * warned


def test_the_first_process_alone_warns(monkeypatch):
    monkeypatch.setattr(rppo, "train", lambda args: None)
    monkeypatch.setattr(sys, "argv", ["rppo_gru_atari.py"])
    for rank, expected in (0, "warning: so it is\n"), (1, ""):
        monkeypatch.setattr(warnings, "formatwarning", None)  # and as it was, afterwards
        monkeypatch.setattr(rppo, "RANK", rank)
        rppo.main()
        assert warnings.formatwarning("so it is", UserWarning, "file", 1) == expected


TINY = "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --hidden-size 8 " \
       "--total-timesteps 32 --torch-threads 1 --eval-episodes 0 --run-name a".split()  # fmt: skip


def test_a_rank_that_is_left_over_is_one_process_that_writes(tmp_path):
    """As in the shell of a cluster: RANK, and no WORLD_SIZE. Without a progress bar, as TQDM_DISABLE asks
    (tqdm reads it when it is imported, so this is a process of its own)."""
    env = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(ROOT / "rppo_gru_atari.py"), *TINY]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "runs/a: return" in done.stdout
    assert rppo.load(tmp_path / "runs/a")["step"] >= 32
    assert (tmp_path / "runs/a/result.json").exists()


@pytest.mark.parametrize("left", ["WORLD_SIZE=2", "WORLD_SIZE=2 RANK=1", "WORLD_SIZE=0",
    "WORLD_SIZE=2 RANK=2 MASTER_ADDR=localhost MASTER_PORT=29500"])  # fmt: skip
def test_processes_that_torchrun_did_not_start_are_refused(left, run_script, tmp_path):
    env = dict(x.split("=") for x in left.split())
    done = run_script("rppo_gru_atari", *TINY, env=env, check=2)
    assert done.lines == [f"error: WORLD_SIZE is {env['WORLD_SIZE']}: start with torchrun"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags,said", [
    (["--num-envz", "2"], "Unrecognized options: --num-envz"),
    (["--num-envs", "3"], "error: --num-envs: 2 processes must divide it"),
    (["--play", "none", "--render", "none"], "error: none is not the directory of a run"),
])  # fmt: skip
def test_torchrun_says_once_what_is_wrong(flags, said, tmp_path):
    command = [*TORCHRUN, str(ROOT / "rppo_gru_atari.py"), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr


# --- Processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags,expected",
    [
        (dict(num_envs=5), "--num-envs: 2 processes must divide it"),
        (dict(num_minibatches=4), "--num-minibatches: must divide the 2 sequences"),
        (dict(cuda=True), "--cuda: too few GPUs"),
        (dict(sticky_actions=1.5), "--sticky-actions 1.5: must be from 0 to 1"),
    ],
)
def test_arguments_that_two_processes_cannot_share(flags, expected, monkeypatch):
    """The second one finds no GPU where there is one."""
    monkeypatch.setattr(rppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(rppo, "LOCAL_RANK", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(rppo.ArgumentError, match=expected):
        rppo.check_args(make_args(**flags))
    rppo.check_args(make_args())


def test_local_rank_is_for_the_device_only(monkeypatch):
    """Process 7 of all is the fourth of its machine."""
    monkeypatch.setattr(rppo, "RANK", 7)
    monkeypatch.setattr(rppo, "LOCAL_RANK", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = []
    monkeypatch.setattr(rppo.Agent, "to", lambda self, device: devices.append(device) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rppo.train(make_args(cuda=True))
    assert devices == [torch.device("cuda", 3)]


COMMON = "--env-id ALE/Breakout-v5 --num-envs 4 --num-steps 160 --num-minibatches 1 --hidden-size 16 " \
         "--update-epochs 2 --total-timesteps 1000 --torch-threads 1 --eval-episodes 0".split()  # fmt: skip


def worker(name: str, flags: list[str]) -> None:
    """Runs in each process: trains by a rule that reads the frame, so that one process and two play
    the same games, and leaves weights, gradients before clipping, losses, noise and environments' seeds."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ["LOCAL_RANK"] = "0"  # as on machines with one process each
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import rppo_gru_atari as rppo

    seen: dict = {key: [] for key in ("gradients", "losses", "seeds", "noise", "finals", "counts")}
    clip, gae, loss = torch.nn.utils.clip_grad_norm_, rppo.compute_gae, rppo.ppo_loss
    sample, make_envs, log = rppo.sample, rppo.make_envs, rppo.Run.log
    step, build = rppo.Agent.step, rppo.Agent.__init__

    def other_weights(self, *inputs):
        """As where the machines of a job round differently."""
        build(self, *inputs)
        if rank == 1:
            self.load_state_dict({key: x + 0.01 for key, x in self.state_dict().items()})

    def watched_clip(parameters, *rest):
        parameters = list(parameters)
        seen["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, *rest)

    def watched_gae(rewards, values, terminated, done, *rest):
        seen["finals"].append(int(done.sum()))
        return gae(rewards, values, terminated, done, *rest)

    def watched_log(self, steps, losses):
        seen["losses"] += losses
        log(self, steps, losses)

    def watched_step(self, obs, state):
        seen["rule"] = obs.flatten(1).sum(1)[:, None] % self.action_space.n
        return step(self, obs, state)

    def rule(logp):
        seen["noise"].append(sample(logp)[:, 0])  # of which nothing depends
        return seen["rule"]

    def watched_envs(args, num_envs):
        # The first game of four ends in the first rollout by itself, all others in the second.
        envs = make_envs(args, num_envs, None, 656)
        reset = envs.reset

        def watched_reset(seed):
            seen["seeds"].append(seed)
            return reset(seed=seed)

        def empty_step(_):
            """Every other time step of the second process is final, of the first one none."""
            obs, truncated = np.zeros((2, 1, 84, 84), np.uint8), np.full(2, next(ends))
            return obs, np.ones(2), np.zeros(2, bool), truncated, {}

        ends = itertools.cycle([rank == 1, False])
        envs.reset = watched_reset
        if name == "empty":
            envs.step = empty_step
        return envs

    def watched_loss(logprob, *rest):
        """In kl, rank 0 takes its policy for far from the old one from the third minibatch on, rank 1 never."""
        seen["counts"].append(len(logprob))
        policy_loss, kl = loss(logprob, *rest)
        far = len(seen["counts"]) > 2 and rank == 0
        return policy_loss, torch.full_like(kl, float(far)) if name == "kl" else kl

    torch.nn.utils.clip_grad_norm_ = watched_clip
    rppo.compute_gae = watched_gae
    rppo.ppo_loss = watched_loss
    rppo.sample = rule
    rppo.make_envs = watched_envs
    rppo.Run.log = watched_log
    rppo.Agent.step = watched_step
    rppo.Agent.__init__ = other_weights
    sys.argv = ["rppo_gru_atari.py", *flags]
    agent = rppo.train(rppo.parse_args())
    seen["weights"] = torch.cat([p.detach().flatten() for p in agent.parameters()])
    seen["losses"], seen["gradients"] = torch.stack(seen["losses"]), torch.stack(seen["gradients"])
    seen["noise"] = torch.stack(seen["noise"])
    torch.save({key: seen[key] for key in seen if key != "rule"}, f"{name}{rank}of{world}.pt")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def together(folder, processes: int, name: str, *flags):
    """What the processes of one job saw, started with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = [name, *COMMON, "--run-name", f"{name}{processes}", *flags]
    job = []
    for rank in range(processes):
        env = {"RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": "localhost", "MASTER_PORT": port}  # fmt: skip
        job.append(
            launch.start(__file__, words, folder, folder / f"{name}{rank}of{processes}", env)
        )
    try:
        for process in job:
            assert process.wait(400).returncode == 0, process.stderr[-3000:]
    finally:
        for process in job:
            if process.returncode is None:
                process.kill()
    return [torch.load(folder / f"{name}{rank}of{processes}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return folder, *together(folder, 1, "same"), *together(folder, 2, "same")


def test_two_processes_take_the_gradient_of_one(runs):
    """On the same time steps, of which the two have unequal numbers that count; all that is logged agrees."""
    folder, one, a, b = runs
    assert a["counts"][0] != b["counts"][0] and a["counts"][0] + b["counts"][0] == one["counts"][0]
    assert a["finals"][1] > 0 < b["finals"][1]
    assert one["gradients"][0].abs().max() > 1e-3
    assert (one["gradients"][0] - a["gradients"][0]).abs().max() <= 1e-6
    assert (one["losses"][0] - a["losses"][0]).abs().max() <= 1e-6
    results = [json.loads((folder / f"runs/same{n}/result.json").read_text()) for n in (1, 2)]
    assert results[0]["global_step"] == results[1]["global_step"]
    assert sorted(results[0]["returns"]) == sorted(results[1]["returns"])
    assert len(results[0]["returns"]) == sum(one["finals"]) == sum(a["finals"] + b["finals"]) > 4


def test_both_keep_the_same_weights_bit_for_bit(runs):
    """Those of the first process, whatever the second one drew."""
    _, one, a, b = runs
    assert len(a["losses"]) == 4 and torch.equal(a["losses"], b["losses"])
    assert torch.equal(a["gradients"], b["gradients"]) and torch.equal(a["weights"], b["weights"])
    # Adam divides by the gradient's size, so rounding grows: one process is near, and not the same.
    assert (one["weights"] - a["weights"]).abs().mean() <= 1e-5 < 1e-4 < one["weights"].abs().mean()


def test_processes_have_environments_and_noise_of_their_own(runs):
    """By RANK: LOCAL_RANK is 0 in both. Environment n of all has the seed seed + n."""
    folder, one, a, b = runs
    assert one["seeds"][0] == 1 and a["seeds"][0] == 1 and b["seeds"][0] == 3
    assert (a["noise"] != b["noise"]).float().mean() > 0.5
    saved = torch.load(folder / "runs/same2/agent.pt", weights_only=True)
    assert len(saved["rng"]) == 2 and not torch.equal(*saved["rng"])
    assert len([*(folder / "runs/same2").glob("events*")]) == 1  # the first process alone writes


def test_one_process_continues_a_run_of_two(runs, tmp_path):
    """Twice alike, though not with the random numbers of the two."""
    folder, *_ = runs
    before = rppo.load(folder / "runs/same2")
    ends = []
    for name in "ab":
        run_dir = shutil.copytree(folder / "runs/same2", tmp_path / name)
        flags = {"resume": str(run_dir), "total_timesteps": 2000}
        rppo.train(rppo.Args(**before["args"] | flags))
        ends.append(rppo.load(run_dir))
        assert before["step"] < 2000 <= ends[-1]["step"] and len(ends[-1]["rng"]) == 1
    for name, x in before["agent"].items():
        assert torch.equal(ends[0]["agent"][name], ends[1]["agent"][name])
        assert not torch.equal(ends[0]["agent"][name], x)


@pytest.mark.parametrize("processes", [2, 3])
def test_each_process_resumes_with_its_own_random_numbers(runs, monkeypatch, processes):
    """The last of two or of three; two have saved theirs."""
    folder, *_ = runs
    saved = rppo.load(folder / "runs/same2")
    monkeypatch.setattr(rppo, "WORLD_SIZE", processes)
    monkeypatch.setattr(rppo, "RANK", processes - 1)
    args = rppo.Args(**saved["args"] | {"resume": str(folder / "runs/same2")})
    envs = rppo.make_envs(args, 2)
    agent = rppo.Agent(envs, args)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    run = rppo.Run(args, envs, agent, optimizer)
    state = torch.get_rng_state()
    torch.manual_seed(args.seed + 10_000 * processes + saved["step"])
    assert torch.equal(state, saved["rng"][1] if processes == 2 else torch.get_rng_state())
    loaded, expected = optimizer.state_dict()["state"], saved["optimizer"]["state"]
    assert loaded.keys() == expected.keys() == set(range(len([*agent.parameters()])))
    for name, x in expected.items():
        assert torch.equal(loaded[name]["exp_avg"], x["exp_avg"]) and x["exp_avg"].any()
    assert run.step == saved["step"] > 1000 and len(run.returns) == 0 < len(saved["returns"])


@pytest.fixture
def resets(monkeypatch):
    """The seeds that games are reset with from here on."""
    seeds, make_envs = [], rppo.make_envs

    def watched(*inputs):
        envs = make_envs(*inputs)
        reset = envs.reset

        def watched_reset(seed, **options):
            seeds.append(seed)
            return reset(seed=seed, **options)

        envs.reset = watched_reset
        return envs

    monkeypatch.setattr(rppo, "make_envs", watched)
    return seeds


def test_a_resumed_run_plays_other_games_with_the_same_network(tmp_path, monkeypatch, resets):
    args = make_args(num_steps=8, total_timesteps=32, seed=7, runs_dir=str(tmp_path), run_name="a")
    rppo.train(args)
    args.resume, args.total_timesteps = str(tmp_path / "a"), 64
    rppo.train(args)
    assert resets == [7, 7 + 32]
    for flags in (
        ["--env-id", "ALE/Pong-v5"],
        ["--frame-stack", "4"],
        ["--hidden-size", "17"],
        ["--separate-critic"],
        ["--ablate-memory"],
    ):
        monkeypatch.setattr(sys, "argv", ["rppo_gru_atari.py", "--resume", args.resume, *flags])
        with pytest.raises(rppo.ArgumentError, match=f"{flags[0]}: .* has "):
            rppo.parse_args()


@pytest.mark.parametrize("count,how", [(1, "python"), (3, "torchrun --nproc-per-node 3")])
def test_main_says_how_a_run_goes_on(count, how, monkeypatch, capsys, tmp_path):
    """Quoted for a shell. All but the first wait, so that it speaks for all where all fail alike."""

    def fail(args):
        rppo.Run.latest = run_dir
        raise ZeroDivisionError

    def interrupt(args):
        raise KeyboardInterrupt

    run_dir = tmp_path / "my runs"
    run_dir.mkdir()
    (run_dir / "agent.pt").touch()
    slept: list = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(rppo.Run, "latest", None)  # and as it was afterwards
    monkeypatch.setattr(rppo, "train", fail)
    monkeypatch.setattr(rppo, "WORLD_SIZE", count)
    monkeypatch.setattr(sys, "argv", ["rppo_gru_atari.py"])
    for name in "RANK", "MASTER_ADDR", "MASTER_PORT":
        monkeypatch.setenv(name, "0")
    for rank in range(min(count, 2)):
        monkeypatch.setattr(rppo, "RANK", rank)
        with pytest.raises(SystemExit, match="1"):
            rppo.main()
        assert len(slept) == rank
        advice = f"to continue: {how} rppo_gru_atari.py --resume '{run_dir}'"
        assert capsys.readouterr().err.splitlines()[-1] == advice
    monkeypatch.setattr(rppo, "train", lambda args: sys.exit())  # a game that leaves is an error
    with pytest.raises(SystemExit, match="1"):
        rppo.main()
    assert "SystemExit" in capsys.readouterr().err
    del slept[min(count, 2) - 1 :]
    monkeypatch.setattr(rppo, "train", interrupt)
    for rank in range(min(count, 2)):  # Ctrl-C reaches all: nobody waits, and the first one speaks
        monkeypatch.setattr(rppo, "RANK", rank)
        with pytest.raises(SystemExit, match="130"):
            rppo.main()
        assert capsys.readouterr().err == (f"\n{advice}\n" if rank == 0 else "")
    assert len(slept) == min(count, 2) - 1
    (run_dir / "agent.pt").unlink()  # nothing was saved
    monkeypatch.setattr(rppo, "RANK", 0)
    with pytest.raises(SystemExit, match="130"):
        rppo.main()
    assert capsys.readouterr().err == ""


def test_target_kl_stops_both_together(tmp_path):
    """By the mean over both, though one would have stopped alone and the other not."""
    a, b = together(
        tmp_path, 2, "kl", *"--target-kl 0.1 --update-epochs 5 --total-timesteps 600".split()
    )
    assert torch.equal(a["losses"], b["losses"]) and torch.equal(a["weights"], b["weights"])
    kl = a["losses"][:, 3]
    assert len(kl) == 3 and (kl[:2] == 0).all() and 0.15 < kl[2] < 1 and len(a["gradients"]) == 2


def test_a_process_without_a_step_that_counts_takes_part(tmp_path):
    """Rollouts of one step, of which every other one is final in the second process."""
    flags = "--num-steps 1 --update-epochs 2 --total-timesteps 12".split()
    a, b = together(tmp_path, 2, "empty", *flags)
    assert a["counts"] == [2] * 8 and b["counts"] == [2, 2, 0, 0, 2, 2, 0, 0]
    assert a["losses"].isfinite().all() and torch.equal(a["weights"], b["weights"])
    assert a["weights"].isfinite().all() and a["gradients"].abs().amax(1).min() > 1e-4
    assert json.loads((tmp_path / "runs/empty2/result.json").read_text())["global_step"] == 12


def test_a_killed_process_ends_the_job_which_can_be_resumed(tmp_path):
    script = str(ROOT / "rppo_gru_atari.py")
    flags = [*COMMON, "--num-steps", "32", "--total-timesteps", "1000000", "--run-name", "a"]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([*TORCHRUN, script, *flags], cwd=tmp_path, stdout=log, stderr=log)
    file, end = tmp_path / "runs/a/agent.pt", time.time() + 120
    while not file.exists() and time.time() < end:
        time.sleep(0.1)
    time.sleep(3)
    pids = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert len(pids) == 2 and job.poll() is None, (tmp_path / "log").read_text()[-2000:]
    os.kill(int(pids[1]), 9)
    assert job.wait(10) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    step = rppo.load(tmp_path / "runs/a")["step"]
    resume = [*TORCHRUN, script, "--resume", "runs/a", "--total-timesteps", str(step + 200)]
    done = subprocess.run(resume, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert rppo.load(tmp_path / "runs/a")["step"] >= step + 200


THREADS = """
from pathlib import Path

import rppo_gru_atari as rppo

rppo.train(rppo.parse_args())
tasks = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(rppo.RANK, len(tasks) > 0, sum("gloo" in task for task in tasks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_no_thread_of_the_process_group_outlives_training(tmp_path):
    """A thread that still held a tensor when Python ended aborted 4 of 145 short runs. The processes
    must be new: Adam imports torch._dynamo, and if it does so after the group began, the threads stay."""
    (tmp_path / "threads.py").write_text(THREADS)
    words = [*TORCHRUN, "threads.py", *COMMON, "--eval-episodes", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"0 True 0", "1 True 0"} <= {*done.stdout.splitlines()}


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2:])
