"""What went wrong once, and what other libraries have: one test for each."""

import json
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from recipe_tools import build, driver, run


def test_a_squashed_action_is_within_its_bounds():
    """tanh of a large number is 1, and rounding can put the action beyond the bound: no float32
    between -1 and 1 is stretched to exactly 0.1."""
    script = driver.fresh("rppo_continuous", "squash")
    space = spaces.Box(-1.0, 0.1, (1,))
    agent = build(script, space, squash_output=True)
    actions = torch.tensor([[-50.0], [0.0], [50.0]])
    played = script.to_env(actions, agent.action_space)
    assert all(space.contains(action) for action in played)
    assert played[:, 0] == pytest.approx([-1, -0.45, 0.1])


# --- schedules: another optimiser ------------------------------------------------------------------


def test_an_optimiser_of_torch_takes_adams_place(tmp_path):
    """SGD's step is the learning rate times the clipped gradient; RMSprop resumes with its state."""
    script = driver.fresh("rppo_lstm", "schedules")
    flags = dict(num_minibatches=1, update_epochs=1, total_timesteps=1, env_id="CartPole-v1")
    flags |= dict(learning_rate=0.1, max_grad_norm=0.01, eval_episodes=0)
    weights = {}
    for momentum in 0.0, 0.5:
        kwargs = json.dumps({"momentum": momentum})
        agent, run_dir = run(script, tmp_path, **flags, optimizer="SGD", optimizer_kwargs=kwargs)
        weights[momentum] = torch.nn.utils.parameters_to_vector(agent.parameters())
    script.seed_everything(1)
    envs = script.make_envs(script.Args(), 4)
    first = script.Agent(envs, agent.args)
    moved = weights[0.0] - torch.nn.utils.parameters_to_vector(first.parameters())
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert torch.equal(weights[0.0], weights[0.5])  # momentum changes no first step
    agent, run_dir = run(script, tmp_path, **flags, optimizer="RMSprop")
    saved = script.load(run_dir)
    assert [*saved["optimizer"]["state"][0]] == ["step", "square_avg"]
    args = script.Args(**{**saved["args"], "resume": str(run_dir), "total_timesteps": 100})
    script.train(args)
    assert script.load(run_dir)["optimizer"]["state"][0]["step"] == 2
    with pytest.raises(script.ArgumentError, match="--optimizer Nothing"):
        run(script, tmp_path, **flags, optimizer="Nothing")


# --- scalars: JSON ---------------------------------------------------------------------------------


def test_json_has_each_step_once(tmp_path):
    script = driver.fresh("rppo_lstm", "scalars")
    agent, run_dir = run(script, tmp_path, total_timesteps=192, eval_episodes=0, json=True)
    file = run_dir / "progress.json"
    with open(file, "a") as killed:  # a run that was killed after its last save
        killed.write('{"step": 999, "x": 1}\n{"step": 10')
    script.train(
        script.Args(
            **{**script.load(run_dir)["args"], "resume": str(run_dir), "total_timesteps": 250}
        )
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted({*steps}) and steps[-1] == script.load(run_dir)["step"] < 999
    assert all(np.isfinite(row["losses/value_loss"]) for row in rows)


# --- warm_start: weights of one's own --------------------------------------------------------------


def test_a_run_begins_with_weights_from_a_file(tmp_path):
    script = driver.fresh("ppo1_mpi", "warm_start")
    agent = build(script, spaces.Discrete(2))
    weights = {name: x + 1 for name, x in agent.state_dict().items()}
    torch.save(weights, tmp_path / "weights.pt")
    again = build(script, spaces.Discrete(2), init_from=str(tmp_path / "weights.pt"))
    assert all(torch.equal(x, weights[name]) for name, x in again.state_dict().items())


# --- images: layers after each CNN, and before the vectors -----------------------------------------


def test_images_and_vectors_have_layers_of_their_own():
    """The vectors' layers don't see the image, nor the image's the vectors."""
    script = driver.fresh("trpo", "images")
    obs = spaces.Dict(
        a=spaces.Box(-1, 1, (2,)), b=spaces.Box(0, 1, (1, 9, 9)), c=spaces.Discrete(3)
    )
    args = script.Args(image_layers="7,5", vector_layers="6", cnn_channels="4", cnn_kernels="8",
                       cnn_strides="4")  # fmt: skip
    module = driver.recipe("images")
    parts = [obs["a"], obs["b"], obs["c"]]
    frames = SimpleNamespace(entries=[(2,), (1, 9, 9), (3,)], images=[1], parts=parts)
    eyes = module.Eyes(script, frames, args)
    x = torch.randn(4, 2 + 81 + 3 + 1)  # the last number is another recipe's
    features = eyes(x)
    assert features.shape == (4, 5 + 6 + 1) and eyes.features == 11
    image, vector = x.clone(), x.clone()
    image[:, 2:83] += 1
    vector[:, :2] += 1
    assert torch.equal(eyes(image)[:, 5:], features[:, 5:])
    assert torch.equal(eyes(vector)[:, :5], features[:, :5])
    assert torch.equal(features[:, 11], x[:, 86])


# --- evolve: genes of one's own --------------------------------------------------------------------


def test_genes_and_their_ranges_are_the_users(monkeypatch):
    evolve = driver.recipe("evolve")
    monkeypatch.setattr(evolve, "NUMBERS", dict(evolve.NUMBERS))
    script = driver.fresh("rppo_lstm", "networks")
    words = '{"num_steps": [64, 512], "gamma": [0.9, 0.99, 0.5, 1.5], "activation": []}'
    names = evolve.set_genes(script, words)
    assert names == ["num_steps", "gamma", "activation"]
    random.seed(1)
    drawn = [{name: evolve.draw(name) for name in names} for _ in range(50)]
    assert {genes["num_steps"] for genes in drawn} == {64, 128, 256, 512}
    assert all(0.9 <= genes["gamma"] <= 0.99 for genes in drawn)
    start = {"num_steps": 128, "gamma": 0.95, "activation": "tanh"}
    children = [evolve.mutate(start) for _ in range(100)]
    assert {genes["num_steps"] for genes in children} == {64, 128, 256}
    assert {genes["gamma"] for genes in children} == {0.9, 0.95, 0.99}
    for wrong in '{"nothing": [1, 2]}', '{"gamma": 1}', "{", '{"gae_lambda": []}':
        with pytest.raises(script.ArgumentError, match="--genes"):
            evolve.set_genes(script, wrong)


# --- minigrid_memory: a larger maze than the one trained in ----------------------------------------


@pytest.mark.parametrize("env_id", ["MemoryS17Random-v0", "MemoryS17RandomPixels-v0"])
def test_a_larger_maze_has_the_same_spaces(env_id):
    pytest.importorskip("minigrid")
    driver.recipe("minigrid_memory")
    small, large = gym.make(env_id.replace("17Random", "9")), gym.make(env_id)
    assert large.unwrapped.width == 17 and large.action_space == small.action_space
    assert large.observation_space == small.observation_space
    obs, _ = large.reset(seed=1)
    assert large.observation_space.contains(obs)
