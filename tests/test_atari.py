"""rppo_gru_atari.py's games. Its train is compared with the oracle in test_train.py, on toy frames."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import MODULES, assert_same, main, read

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
module = MODULES["rppo_gru_atari"]
SHORT = "--env-id ALE/Breakout-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1"
SHORT += " --hidden-size 8 --torch-threads 1 --total-timesteps 48"


def asked(monkeypatch) -> list[dict]:
    """The options that gym.make_vec gets from here on."""
    seen, make_vec = [], gym.make_vec

    def make(env_id, num_envs, **options):
        seen.append({"env_id": env_id, "num_envs": num_envs, **options})
        return make_vec(env_id, num_envs, **options)

    monkeypatch.setattr(gym, "make_vec", make)
    return seen


def test_training_and_evaluation_play_the_game_that_flags_ask_for(monkeypatch, tmp_path):
    """Scores are not clipped, actions not sticky; an evaluation's games are cut after five minutes."""
    seen = asked(monkeypatch)
    monkeypatch.setattr(module, "EVAL_FRAMES", 300)
    code, out, err = main(
        tmp_path, "rppo_gru_atari", SHORT, "--frame-stack 2 --eval-episodes 3 --run-name a"
    )
    assert code == 0, err
    training, evaluation = seen
    for options in seen:
        assert options["env_id"] == "ale_py:ALE/Breakout-v5" and options["stack_num"] == 2
        assert options["repeat_action_probability"] == 0.0 and options["reward_clipping"] is False
    assert training["num_envs"] == 2 and training["max_num_frames_per_episode"] == 108_000
    assert evaluation["num_envs"] == 3 and evaluation["max_num_frames_per_episode"] == 300
    code, out, err = main(
        tmp_path, "rppo_gru_atari", "--play runs/a --render none --eval-episodes 2"
    )
    assert code == 0 and out.count("return ") == 2, err
    assert seen[2]["max_num_frames_per_episode"] == 300 and seen[2]["stack_num"] == 2


def test_a_game_seen_in_two_ways_is_one_game():
    """ale_py's vector environment trains; --play shows Gymnasium's preprocessing. Both press FIRE."""
    args = module.Args(env_id="ALE/Breakout-v5", frame_stack=3)
    fast, shown = module.make_envs(args, 1), module.make_envs(args, 1, "rgb_array")
    obs = [envs.reset(seed=3)[0] for envs in (fast, shown)]
    for envs, x in zip((fast, shown), obs):
        assert x.shape == (1, 3, 84, 84) and x.dtype == np.uint8
        assert not x[0, :2].any() and x[0, 2].any()  # the frames before the first are zero
        assert envs.single_action_space.n == 4
    ball = [[], []]
    for i, envs in enumerate((fast, shown)):
        for _ in range(25):
            x, reward, *_ = envs.step(np.zeros(1, int))
            ball[i].append(x[0, -1].astype(int))
        assert (
            np.abs(np.diff(ball[i], axis=0)).max() > 50
        )  # the ball flies: somebody has pressed FIRE
    fast.close()
    shown.close()


def test_sticky_actions_and_scores(monkeypatch):
    seen = asked(monkeypatch)
    module.make_envs(module.Args(sticky_actions=0.25, env_kwargs='{"noop_max": 7}'), 1).close()
    assert seen[0]["repeat_action_probability"] == 0.25 and seen[0]["noop_max"] == 7


def test_two_resumes_are_equal(tmp_path):
    code, _, err = main(tmp_path, "rppo_gru_atari", SHORT, "--run-name a --eval-episodes 0")
    assert code == 0, err
    good, results = (tmp_path / "runs/a/agent.pt").read_bytes(), []
    for _ in range(2):
        (tmp_path / "runs/a/agent.pt").write_bytes(good)
        code, _, err = main(tmp_path, "rppo_gru_atari", "--resume runs/a --total-timesteps 96")
        assert code == 0, err
        results.append(read(tmp_path / "runs/a"))
    for part in "agent", "optimizer", "rng", "step":
        assert_same(results[0][part], results[1][part])
    assert results[0]["step"] >= 96 and results[0]["args"]["env_id"] == "ALE/Breakout-v5"
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["global_step"] >= 96


@pytest.mark.parametrize("flags,expected", [
    ("--env-id CartPole-v1", "--env-id CartPole-v1: not a game like ALE/Pong-v5"),
    ("--env-id ALE/Nope-v5", "--env-id ALE/Nope-v5 --env-kwargs {}: "),
    ("--seq-len 5", "--seq-len 5: must divide --num-steps 8"),
    ("--resume nowhere", "nowhere/agent.pt can't be used"),
])  # fmt: skip
def test_wrong_input_is_one_line(flags, expected, tmp_path):
    code, out, err = main(tmp_path, "rppo_gru_atari", SHORT, flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and expected in err, err
    assert not list(tmp_path.iterdir())


def test_amp_computes_the_cnn_in_bfloat16_and_nothing_else():
    """Features differ by its rounding; they come back as float32."""
    torch.manual_seed(0)
    exact, amp = module.NatureCNN(1, False), module.NatureCNN(1, True)
    amp.load_state_dict(exact.state_dict())
    obs = torch.randint(256, (2, 3, 1, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        x, y = exact(obs), amp(obs)
    assert x.shape == y.shape == (2, 3, 512) and y.dtype == torch.float32
    assert 0 < (x - y).abs().max() <= 0.05 * x.abs().max()
