"""rppo_gru_atari.py: games, rows, scores, lives, frames that stay bytes, bfloat16, and processes that agree."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

if __name__ != "__main__":
    from conftest import MODULES, ROOT

    pytest.importorskip("ale_py")
    rppo = MODULES["rppo_gru_atari"]


def args(**flags):
    flags = {"num_envs": 4, "num_steps": 48, "num_minibatches": 2, "update_epochs": 1, "hidden_size": 16,
             "total_timesteps": 100, "torch_threads": 1, **flags}  # fmt: skip
    return rppo.Args(**{"env_id": "ALE/Breakout-v5", **flags})


class Recorder:
    """A vector environment that writes down what passes through it."""

    def __init__(self, envs):
        self.envs, self.seeds, self.rows = envs, [], []

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def reset(self, seed):
        self.seeds.append(seed)
        return self.envs.reset(seed=seed)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.envs.step(action)
        self.rows.append((reward.copy(), terminated.copy(), truncated.copy(), info["lives"].copy(), obs.copy()))
        return obs, reward, terminated, truncated, info


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Trains, and returns what the environments gave, what compute_gae and the update got, and the result."""

    def run(**flags):
        recorders, gae, updates, make_envs = [], [], [], rppo.make_envs
        compute_gae, evaluate_actions = rppo.compute_gae, rppo.Agent.evaluate_actions

        def watched_envs(*inputs):
            recorders.append(Recorder(make_envs(*inputs)))
            return recorders[-1]

        def watched_gae(rewards, values, terminated, done, *rest):
            gae.append((rewards.clone(), values.clone(), terminated.clone(), done.clone()))
            return compute_gae(rewards, values, terminated, done, *rest)

        def watched_update(self, obs, state, final, action):
            outputs = evaluate_actions(self, obs, state, final, action)
            updates.append((obs, state, final, action, *(x.detach() for x in outputs)))
            return outputs

        monkeypatch.setattr(rppo, "make_envs", watched_envs)
        monkeypatch.setattr(rppo, "compute_gae", watched_gae)
        monkeypatch.setattr(rppo.Agent, "evaluate_actions", watched_update)
        rppo.train(args(**flags, runs_dir=str(tmp_path), run_name="a"))
        result = json.loads((tmp_path / "a/result.json").read_text())
        rows = [np.stack(x) for x in zip(*recorders[0].rows)]
        return *rows, gae, updates, result

    return run


# --- Environments -------------------------------------------------------------------------------------------


def test_a_truncated_game_has_a_final_row_and_then_a_new_one():
    """Of 400 emulator frames, four a step."""
    envs = rppo.make_envs(args(max_episode_frames=400), 2)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    envs.reset(seed=1)
    for t in range(102):
        obs, reward, terminated, truncated, info = envs.step(np.zeros(2, int))
        assert not terminated.any() and truncated.all() == (t == 99)
        if t == 100:  # the action was ignored: this is the first row of a game
            assert (info["lives"] == 5).all() and (info["episode_frame_number"] < 40).all() and not reward.any()


def test_fire_starts_the_game_and_sticky_actions_are_a_flag():
    """Breakout's ball never moves before FIRE: a player who does nothing loses lives only if a reset fires."""
    trajectories = []
    for seed, sticky in (1, 0.0), (1, 0.0), (1, 0.25):
        envs = rppo.make_envs(args(sticky_actions=sticky), 1)
        envs.reset(seed=seed)
        generator, lives = np.random.default_rng(0), []
        frames = []
        for _ in range(60):
            obs, *_, info = envs.step(generator.integers(4, size=1) if sticky or len(trajectories) else np.zeros(1, int))
            lives.append(info["lives"][0])
            frames.append(obs.copy())
        if not trajectories:
            assert lives[0] == 5 and lives[-1] < 5
        trajectories.append(np.stack(frames))
    assert not np.array_equal(trajectories[1], trajectories[2])


def test_another_environment_does_not_change_the_training_one():
    """All of ale_py's vector environments share one metadata dict."""
    from ale_py import AtariVectorEnv

    envs = rppo.make_envs(args(), 2)
    AtariVectorEnv("pong", 1, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    assert rppo.make_envs(args(), 1).metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("env_id,frame_stack", [("ALE/Breakout-v5", 1), ("ALE/Pong-v5", 4), ("ALE/SpaceInvaders-v5", 2)])
def test_frames_from_python_are_those_of_ale_py(env_id, frame_stack):
    """What --play shows is what the agent was trained on, to the rounding of one grey level."""
    flags = args(env_id=env_id, frame_stack=frame_stack)
    native, python = rppo.make_envs(flags, 1), rppo.make_env(flags, None, None)
    assert python.observation_space == native.single_observation_space
    obs, info = native.reset(seed=3)
    for attempt in range(400):  # until the random number of idle frames is that of the native game
        first, start = python.reset(seed=None if attempt else 0)
        if start["episode_frame_number"] == info["episode_frame_number"][0]:
            break
    generator = np.random.default_rng(0)
    worst, scores = [np.abs(first.astype(int) - obs[0]).max()], np.zeros(2)
    for _ in range(120):
        action = generator.integers(native.single_action_space.n)
        obs, rewards, terminated, *_ = native.step(np.array([action]))
        frames, reward, ended, *_ = python.step(action)
        scores += rewards[0], reward
        assert terminated[0] == ended
        if ended:
            break
        worst.append(np.abs(frames.astype(int) - obs[0]).max())
    assert max(worst) <= 1 and len(worst) > 50 and scores[0] == scores[1]


def test_area_weights():
    weights = rppo.area_weights(210)
    assert weights.shape == (84, 210) and np.abs(weights.sum(1) - 1).max() <= 1e-12
    assert np.allclose(weights[0, :4], [0.4, 0.4, 0.2, 0.0]) and np.abs(weights.sum(0) - 0.4).max() <= 1e-12


# --- Rows, scores and lives ---------------------------------------------------------------------------------


def test_rows_scores_and_learning_rewards(watched):
    """Truncations: final rows follow them, count as nothing, and the game's score is not the clipped reward."""
    reward, terminated, truncated, _, frames, gae, updates, result = watched(
        env_id="ALE/SpaceInvaders-v5", max_episode_frames=400, num_steps=210, num_minibatches=1
    )
    done = terminated | truncated
    final = np.concatenate([np.zeros((1, 4), bool), done[:-1]])
    assert done.sum() == 8 and reward.max() > 1
    rewards, values, got_terminated, got_done = gae[0]
    assert np.array_equal(rewards.numpy(), np.sign(reward)) and not reward[final].any()
    assert np.array_equal(got_done.numpy(), done) and np.array_equal(got_terminated.numpy(), terminated)
    assert result["global_step"] == 840 - final.sum() and result["episodes"] == done.sum()
    scores = [reward[: t + 1, n][final[: t + 1, n].cumsum() == final[: t + 1, n].sum()].sum() for t, n in np.argwhere(done)]
    assert result["mean_return_100"] == pytest.approx(np.mean(scores)) and max(scores) > 1
    obs, _, got_final, *_ = updates[0]
    for m in range(4):  # the minibatch has the environments in a random order
        n = next(n for n in range(4) if np.array_equal(obs[1:, m].numpy(), frames[:-1, n]))
        assert np.array_equal(got_final[:, m].numpy(), final[:, n])


def test_losing_a_life_ends_the_return_and_nothing_else(watched):
    """Breakout: `terminated` where a life went, but a final row, and a state of zeros, only behind a game's end."""
    states, real = [], rppo.Agent.next_state
    rppo.Agent.next_state = lambda self, state, final: states.append(final) or real(self, state, final)
    try:
        _, terminated, truncated, lives, _, gae, updates, result = watched(
            terminal_on_life_loss=True, num_steps=110, max_episode_frames=360
        )
    finally:
        rppo.Agent.next_state = real
    before = np.concatenate([np.full((1, 4), 5), lives[:-1]])
    lost, ended = lives < before, terminated | truncated
    assert lost.sum() >= 8 and ended.sum() == 4 and not (lost & ended).all()
    _, _, got_terminated, got_done = gae[0]
    assert np.array_equal(got_terminated.numpy(), terminated | lost)
    assert np.array_equal(got_done.numpy(), ended | lost)
    assert sum(final.sum().item() for _, _, final, *_ in updates) == 4 == sum(final.sum().item() for final in states)
    assert result["episodes"] == 4 and result["global_step"] == 440 - 4


def test_without_the_flag_a_life_is_no_news(watched):
    _, terminated, truncated, lives, _, gae, *_ = watched(num_steps=60)
    assert (lives[-1] < 5).any() and not gae[0][2].any() and not gae[0][3].any()


# --- Networks -----------------------------------------------------------------------------------------------


def test_frames_stay_bytes_until_the_encoder(watched):
    *_, updates, _ = watched(num_steps=16, total_timesteps=50)
    assert len(updates) == 2 and all(obs.dtype == torch.uint8 for obs, *_ in updates)


def test_the_first_ratio_is_one_over_real_games(watched):
    """Acting against replay, with games that end in the rollout."""
    logprobs, real = [], rppo.Agent.act
    rppo.Agent.act = lambda self, *inputs: logprobs.append(real(self, *inputs)) or logprobs[-1]
    try:
        *_, updates, _ = watched(num_steps=40, max_episode_frames=60, num_minibatches=1)
    finally:
        rppo.Agent.act = real
    _, _, final, action, logprob, _, value = updates[0]
    actions, old, values, _ = (torch.stack(x) for x in zip(*logprobs))
    order = [next(n for n in range(4) if torch.equal(action[:, m], actions[:, n])) for m in range(4)]
    assert final.sum() >= 4
    assert ((logprob - old[:, order]).exp() - 1)[~final].abs().max() <= 1e-5
    assert (value - values[:, order])[~final].abs().max() <= 1e-4


def test_the_first_minibatch_has_what_the_rollout_computed(tmp_path, monkeypatch):
    """Before anything has moved: old log-probabilities and values are those of the same rows, across games and sequences."""
    seen, real_policy, real_value = {}, rppo.ppo_loss, rppo.value_loss

    def watched_policy(logprob, old_logprob, advantages, weight, clip_coef):
        seen.setdefault("policy", [x.detach() for x in (logprob, old_logprob, advantages, weight)])
        return real_policy(logprob, old_logprob, advantages, weight, clip_coef)

    def watched_value(value, old_value, returns, weight, clip_coef):
        seen.setdefault("value", [x.detach() for x in (value, old_value, returns)])
        return real_value(value, old_value, returns, weight, clip_coef)

    monkeypatch.setattr(rppo, "ppo_loss", watched_policy)
    monkeypatch.setattr(rppo, "value_loss", watched_value)
    rppo.train(args(norm_adv="none", seq_len=16, num_minibatches=1, max_episode_frames=80, runs_dir=str(tmp_path), run_name="a"))
    (logprob, old_logprob, advantages, weight), (value, old_value, returns) = seen["policy"], seen["value"]
    counts = weight > 0
    assert weight.shape == (16, 12) and 4 <= (~counts).sum() <= 12
    assert (logprob - old_logprob)[counts].abs().max() <= 1e-5
    assert (value - old_value)[counts].abs().max() <= 1e-4 < old_value[counts].std()
    assert (returns - old_value - advantages)[counts].abs().max() <= 1e-5 < advantages[counts].std()


def test_the_encoder_is_the_plain_cnn_in_channels_last():
    """The other scripts' CNN, whose last layer is linear, from the same seed: weights, features and gradients."""
    torch.manual_seed(0)
    encoder = rppo.Encoder((2, 84, 84), amp=False)
    torch.manual_seed(0)
    plain = MODULES["rppo_lstm"].nature_cnn(2, 84, 84)
    weights = list(encoder.cnn.parameters())
    assert all(torch.equal(a.flatten(1) if a.ndim > 1 else a, b.flatten(1) if b.ndim > 1 else b)
               for a, b in zip(weights, plain.parameters(), strict=True))  # fmt: skip
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights if weight.ndim == 4)
    frames = torch.randint(0, 256, (3, 5, 2, 84, 84), dtype=torch.uint8)
    features = encoder(frames)
    expected = plain(frames.flatten(0, 1).float() / 255).unflatten(0, (3, 5))
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()
    features.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(weights, plain.parameters()):
        assert (a.grad.reshape(b.shape) - b.grad).abs().max() <= 1e-4 * b.grad.abs().max()


def test_amp_is_close_to_float32_and_leaves_memory_and_losses_in_it():
    space, actions = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8), gym.spaces.Discrete(4)
    obs = torch.randint(0, 256, (12, 3, 1, 84, 84), dtype=torch.uint8)
    final = torch.zeros(12, 3, dtype=torch.bool)
    final[5, 1] = True
    outputs, gradients = [], []
    for amp in False, True:
        torch.manual_seed(0)
        agent = rppo.Agent(space, actions, args(amp=amp, hidden_size=32))
        agent.memory.register_forward_pre_hook(lambda _, inputs: None if inputs[0].dtype == torch.float32 else pytest.fail("dtype"))
        action = torch.randint(4, (12, 3))
        logprob, entropy, value = agent.evaluate_actions(obs, agent.initial_state(3), final, action)
        assert logprob.dtype == entropy.dtype == value.dtype == torch.float32
        (logprob + value).square().sum().backward()
        outputs.append(torch.stack([logprob, entropy, value]).detach())
        gradients.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
    assert 0 < (outputs[0] - outputs[1])[:, ~final].abs().max() <= 0.02 * outputs[0].abs().max()
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert cosine >= 0.999


@pytest.mark.parametrize("critic", ["shared", "separate", "none"])
def test_an_update_makes_no_tensor_on_another_device(critic, monkeypatch):
    """On the meta device, which refuses operands on the CPU as a GPU does, but has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: torch.zeros(x.shape, dtype=x.dtype))  # for compute_gae
    space, actions = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8), gym.spaces.Discrete(4)
    with torch.device("meta"):
        obs, action = torch.zeros(9, 4, 1, 84, 84, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.long)
        final, values, rewards = torch.zeros(9, 4, dtype=torch.bool), torch.zeros(9, 4), torch.zeros(8, 4)
    agent = rppo.Agent(space, actions, args(critic=critic, hidden_size=8)).to("meta")
    state = agent.initial_state(4)
    *outputs, state = agent.act(obs[0], state)
    state = agent.next_state(state, final[0])
    advantages, weight = rppo.compute_gae(rewards, values, final[:8], final[1:], 0.99, 0.95), 1.0 * ~final[:8]
    logprob, entropy, value = agent.evaluate_actions(obs[:8], state, final[:8], action)
    loss, *_ = rppo.ppo_loss(logprob, rewards, rppo.normalize(advantages, weight), weight, 0.1)
    (loss + rppo.value_loss(value, values[:8], advantages, weight, 0.1) - rppo.weighted_mean(entropy, weight)).backward()
    assert {x.device.type for x in [*outputs, state, *(p.grad for p in agent.parameters())]} == {"meta"}


def test_normalize_and_moments_are_numpys():
    generator = np.random.default_rng(0)
    x, weight = generator.normal(50, 3, (7, 5)), generator.integers(0, 3, (7, 5)) / 2
    mean, var = rppo.mean_and_var(torch.from_numpy(x), torch.from_numpy(weight))
    assert mean.item() == pytest.approx(np.average(x, weights=weight), abs=1e-11)
    assert var.item() == pytest.approx(np.average((x - mean.item()) ** 2, weights=weight), abs=1e-9)


# --- Faults and arguments -----------------------------------------------------------------------------------


def test_a_game_that_raises_ends_the_run_with_one_line(tmp_path, monkeypatch, capsys):
    from ale_py import AtariVectorEnv

    calls, real = [], AtariVectorEnv.step

    def step(self, actions):
        calls.append(actions)
        if len(calls) == 40:
            raise RuntimeError("the emulator\nexploded")
        return real(self, actions)

    monkeypatch.setattr(AtariVectorEnv, "step", step)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        rppo.main("--num-envs 2 --num-steps 16 --num-minibatches 1 --update-epochs 1 --run-name a --checkpoint-every 1".split())
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert stop.value.code == 1 and "exploded" in last and "row 7 of iteration 2" in last and "--resume runs/a" in last
    assert rppo.load("runs/a")["run"]["iteration"] == 2


@pytest.mark.parametrize("flags,expected", [
    ("--num-envs 5", "--num-envs 5: must be a multiple of the 2 processes that torchrun started"),
    ("--num-envs 4", "--num-minibatches 4: must divide the 2 sequences of --num-envs 4 in each of 2 processes"),
])  # fmt: skip
def test_environments_that_processes_cannot_share(flags, expected, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        rppo.main(flags.split())
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and expected in stderr and stderr.count("\n") == 1, stderr


def test_every_process_needs_a_gpu_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        rppo.main(["--cuda"])
    assert stop.value.code == 2 and "--cuda True: torch finds 1 GPUs here" in capsys.readouterr().err


# --- Processes ----------------------------------------------------------------------------------------------

# Each process plays Breakout by a rule that reads the frame, so that one process and two see the same rows.
COMMON = "--env-id ALE/Breakout-v5 --num-envs 4 --num-steps 160 --num-minibatches 1 --update-epochs 5 --hidden-size 16 " \
         "--total-timesteps 1000 --torch-threads 1 --checkpoint-every 1".split()  # fmt: skip


def worker(name: str, flags: list[str]) -> None:
    """Runs in each process: trains, and leaves the weights, gradients before clipping, seeds and losses."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import rppo_gru_atari as rppo

    gradients, seeds, losses, finals = [], [], [], []
    clip, sum_gradients, gae = torch.nn.utils.clip_grad_norm_, rppo.sum_gradients, rppo.compute_gae

    def act(self, obs, state):
        logprobs, value, state = self.step(obs, state)
        action = obs.flatten(1).sum(1) % logprobs.shape[-1]
        return action, logprobs.gather(-1, action[:, None])[:, 0], value, state

    def watched_clip(parameters, *rest):
        parameters = list(parameters)
        if not gradients:
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, *rest)

    def watched_sum(agent, statistics):
        losses.append(sum_gradients(agent, statistics))
        return losses[-1]

    def watched_gae(rewards, values, terminated, done, *rest):
        finals.append(int(done.sum()))
        return gae(rewards, values, terminated, done, *rest)

    def unequal_kl(*inputs):
        """Rank 0 takes its policy for far from the old one from the third minibatch on, rank 1 never."""
        loss, kl, clipped = ppo_loss(*inputs)
        return loss, torch.full_like(kl, float(len(losses) >= 2 and os.environ["RANK"] == "0")), clipped

    ppo_loss = rppo.ppo_loss
    if name == "kl":
        rppo.ppo_loss = unequal_kl
    rppo.Agent.act, torch.nn.utils.clip_grad_norm_ = act, watched_clip
    rppo.sum_gradients, rppo.compute_gae = watched_sum, watched_gae
    manual_seed = torch.manual_seed
    torch.manual_seed = lambda seed: seeds.append(seed) or manual_seed(seed)
    args = rppo.parse_args(flags)
    agent = rppo.train(args)
    torch.save({"weights": torch.cat([p.detach().flatten() for p in agent.parameters()]), "gradients": gradients,
                "seeds": seeds, "losses": torch.stack(losses), "finals": finals}, f"{name}{os.environ.get('RANK', '')}.pt")


def launch(folder, processes: int, name: str, flags: list[str]):
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *start, __file__, name, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{name}{rank if processes > 1 else ''}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    one = launch(folder, 1, "one", [*COMMON, "--run-name", "one"])
    two = launch(folder, 2, "two", [*COMMON, "--run-name", "two"])
    return folder, *one, *two


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_of_freed_activations_is_kept():
    """100 tensors of 8 MiB, five at a time: their 10,240 pages are faulted in once, not 20 times."""
    code = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import resource, rppo_gru_atari, torch
kept = [torch.ones(2**21) for _ in range(5)]
kept, before = None, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): kept = [torch.ones(2**21) for _ in range(5)]; kept = None
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 10_240


def test_two_processes_take_the_gradient_of_one(runs):
    """On the same rows, of which the two have unequal numbers that count; and all that is logged agrees."""
    folder, one, a, b = runs
    assert a["finals"][0] != b["finals"][0] and a["finals"][0] + b["finals"][0] == one["finals"][0]
    assert one["gradients"][0].abs().max() > 1e-3
    assert (one["gradients"][0] - a["gradients"][0]).abs().max() <= 1e-6
    assert (one["losses"][0] - a["losses"][0]).abs().max() <= 1e-6
    results = [json.loads((folder / f"runs/{name}/result.json").read_text()) for name in ("one", "two")]
    assert results[0]["global_step"] == results[1]["global_step"] and results[0]["episodes"] == results[1]["episodes"] >= 2
    assert results[0]["mean_return_100"] == pytest.approx(results[1]["mean_return_100"])


def test_ten_updates_later_both_ranks_have_the_same_weights_bit_for_bit(runs):
    _, one, a, b = runs
    assert len(a["losses"]) == 10 and torch.equal(a["losses"], b["losses"])
    assert torch.equal(a["weights"], b["weights"])
    # Adam divides by the gradient's size, so rounding grows: by then one process is near, and not the same.
    assert (one["weights"] - a["weights"]).abs().mean() <= 1e-5 < 1e-4 < one["weights"].abs().mean()


def test_processes_have_random_numbers_of_their_own(runs):
    _, one, a, b = runs
    assert a["seeds"][0] == b["seeds"][0] == one["seeds"][0] == 1  # the initial weights
    assert a["seeds"][1] != b["seeds"][1]


def test_two_processes_resume_bit_for_bit(runs, monkeypatch, capsys):
    """From the checkpoint of iteration 1 of 2, as after a kill."""
    folder, _, a, _ = runs
    (folder / "runs/two/agent.pt").unlink()
    saved = torch.load(folder / "runs/two/checkpoint.pt", weights_only=True)
    assert saved["run"]["iteration"] == 1 and len(saved["rng"]) == 2
    assert not torch.equal(saved["rng"][0][0], saved["rng"][1][0])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        rppo.main(["--resume", "runs/two"])
    assert stop.value.code == 2 and "its processes were 2, not 1" in capsys.readouterr().err
    again, other = launch(folder, 2, "again", ["--resume", "runs/two"])
    assert torch.equal(again["weights"], a["weights"]) and torch.equal(other["weights"], a["weights"])


@pytest.mark.slow
def test_target_kl_stops_both_ranks_together(tmp_path):
    """By the KL over the rows of both, though one of them would have stopped alone and the other not."""
    flags = [*COMMON, "--update-epochs", "4", "--total-timesteps", "1200", "--run-name", "a", "--target-kl", "0.1"]
    a, b = launch(tmp_path, 2, "kl", flags)
    assert torch.equal(a["losses"], b["losses"]) and torch.equal(a["weights"], b["weights"])
    kl = a["losses"][:, 3]
    assert len(kl) == 3 + 1 and (kl[:2] == 0).all() and (kl[2:] > 0.15).all() and (kl < 1).all()


@pytest.mark.slow
def test_a_dead_rank_ends_the_job(tmp_path):
    """Rank 1 dies in its second iteration; the job ends, in far less than the timeout, and names the checkpoint."""
    code = f"import sys, os; sys.path.insert(0, {str(ROOT)!r}); import rppo_gru_atari as r; gae, calls = r.compute_gae, []\n" \
           "def dying(*x):\n calls.append(0)\n if len(calls) == 2 and os.environ['RANK'] == '1': os._exit(9)\n return gae(*x)\n" \
           "r.compute_gae = dying; r.main()"  # fmt: skip
    (tmp_path / "dying.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "dying.py", *COMMON, "--run-name", "a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "--resume runs/a" in done.stderr
    assert "another process is gone" in done.stderr or "terminated" in done.stderr  # torchrun may be the first to see it


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2:])
