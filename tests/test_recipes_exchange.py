"""Recipes that carry agents to and fro: ONNX, sb3-contrib, experts, warm starts, programs, evolution."""

import json
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from recipe_tools import FOLDER, driver, needs, run
from torch.distributions import Normal


def loud(agent):
    """Weights that make actions depend on observations and on memory, and numbers no larger in a CNN
    than in a small network: there float32 would lose the digits that are compared."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in agent.parameters():
            inputs = weight[0].numel()
            weight.add_(0.3 * min(1, (32 / inputs) ** 0.5) * torch.randn_like(weight))


def rewritten(script, agent, run_dir):
    saved = script.load(run_dir)
    torch.save({**saved, "agent": agent.state_dict()}, run_dir / "agent.pt")


EXPORTED = [
    ("rppo_lstm", "networks", dict(mask_velocity=True, layers_after="8", critic="separate")),
    ("rppo_continuous", "stacked_lstm", {}),
    ("rppo_gru_atari", "", {}),
    ("trpo", "", dict(memory="lstm")),
    ("ppo1_mpi", "", {}),
]


@pytest.mark.parametrize("name, recipes, flags", EXPORTED, ids=[x[0] for x in EXPORTED])
def test_export_onnx_threads_the_state(tmp_path, name, recipes, flags):
    """Every action of 1,000 steps is the agent's, the states fed back."""
    needs(name)
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    import export_onnx

    script = driver.fresh(name, *recipes.split())
    agent, run_dir = run(script, tmp_path, eval_episodes=0, **flags)
    loud(agent)
    rewritten(script, agent, run_dir)
    file = str(tmp_path / "agent.onnx")
    export_onnx.export(str(run_dir), file)
    session = runtime.InferenceSession(file)
    space = script.make_envs(agent.args, 1).single_observation_space
    space.seed(0)
    state = agent.initial_state(1)
    exported = state.numpy()
    steps = 100 if name == "rppo_gru_atari" else 1000
    seen = set()
    for _ in range(steps):
        obs = space.sample()[None]
        obs = obs if obs.dtype == np.uint8 else np.float32(np.clip(obs, -2, 2))
        action, state = agent.predict(obs, {}, state)
        inputs = {"obs": obs, "state": exported}
        if hasattr(agent, "exists"):
            inputs["legal"] = agent.exists[None]
        known = {x.name for x in session.get_inputs()}
        choices, exported = session.run(None, {k: x for k, x in inputs.items() if k in known})
        assert np.allclose(choices.ravel(), np.ravel(action), atol=1e-4)
        assert np.allclose(exported, state.numpy(), atol=1e-4)
        seen.add(np.round(np.ravel(action)[0], 2))
    assert len(seen) > 1


POLICIES = {
    "separate": dict(),
    "detached": dict(shared_lstm=True, enable_critic_lstm=False),
    "memoryless": dict(enable_critic_lstm=False),
    "layers": dict(
        net_arch=dict(pi=[24], vf=[8, 12]), activation_fn=torch.nn.ReLU, n_lstm_layers=2
    ),
    "none": dict(net_arch=[]),
    "sde": dict(net_arch=[12], use_sde=True, full_std=False, use_expln=True),
    "box": dict(net_arch=[12, 10]),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_sb3_weights_act_as_their_model_does(tmp_path, kind):
    """Actions, values and densities over episodes, to 1e-5; the run trains on."""
    sb3 = pytest.importorskip("sb3_contrib")
    import sb3_weights
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    env_id = "Pendulum-v1" if kind in ("sde", "box") else "CartPole-v1"
    settings = dict(POLICIES[kind])
    use_sde = settings.pop("use_sde", False)
    model = sb3.RecurrentPPO(
        "MlpLstmPolicy", env_id, n_steps=32, batch_size=32, seed=1, use_sde=use_sde, device="cpu",
        policy_kwargs=dict(lstm_hidden_size=16, **settings),
    )  # fmt: skip
    policy = model.policy
    loud(policy)
    model.save(tmp_path / "model.zip")
    command = [sys.executable, str(FOLDER / "sb3_weights.py"), "model.zip", env_id, "runs/a"]
    if kind == "separate":
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    else:
        for script in "rppo_lstm", "rppo_continuous":
            sys.modules.pop(script, None)
        sb3_weights.convert(str(tmp_path / "model.zip"), env_id, str(tmp_path / "runs/a"))
    script, args, envs, agent, _ = driver.open_run(tmp_path / "runs/a")
    zeros = torch.zeros(settings.get("n_lstm_layers", 1), 1, 16)
    new_episode = RNNStates((zeros, zeros), (zeros, zeros)), torch.ones(1)
    (theirs, start), state = new_episode, agent.initial_state(1)
    obs, info = envs.reset(seed=3)
    legal = [torch.from_numpy(agent.exists)[None]] if hasattr(agent, "exists") else []
    values = []
    for step in range(60):
        x = torch.as_tensor(obs, dtype=torch.float)
        with torch.no_grad():
            expected, *others, theirs = policy.forward(x, theirs, start, deterministic=True)
            out, value, following = agent.step(x, *legal, state)
            if legal:
                logprob, choice = out[0, 0].max(-1)
                assert choice == expected[0]
            else:
                logprob = agent.policy(out).log_prob(agent.actor(out))
                assert (agent.actor(out) - expected).abs().max() < 1e-5
        for ours, other in zip((value, logprob), others, strict=True):
            assert ours.item() == pytest.approx(other.item(), rel=1e-5, abs=1e-5)
        values.append(value.item())
        action, state = agent.predict(obs, info, state)
        assert torch.equal(state, following)
        start = torch.zeros(1)
        obs, _, terminated, truncated, info = envs.step(action)
        if terminated[0] or truncated[0]:
            obs, info = envs.reset(seed=step)
            (theirs, start), state = new_episode, agent.initial_state(1)
    assert np.std(values) > 0.01
    if kind in ("sde", "box"):
        h = torch.randn(5, 16)
        u = torch.randn(5, 1)
        other = policy._get_action_dist_from_latent(policy.mlp_extractor.forward_actor(h))
        assert torch.allclose(agent.policy(h).log_prob(u), other.log_prob(u), atol=1e-5)
    flags = {**vars(args), "resume": str(tmp_path / "runs/a"), "total_timesteps": 64, "num_envs": 1}
    flags |= dict(num_steps=32, num_minibatches=1, eval_episodes=0)
    script.train(script.Args(**flags))
    assert script.load(tmp_path / "runs/a")["step"] >= 60


def test_sb3_weights_refuse_what_is_no_model(run_script, tmp_path):
    pytest.importorskip("sb3_contrib")
    words = "none.zip", "CartPole-v1", "runs/b"
    refused = run_script("docs/recipes/sb3_weights", *words, check=2)
    assert len(refused.lines) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name, own", [("ppo1_mpi", {}), ("rppo_lstm", {}), ("rppo_continuous", {}),
                                       ("trpo", {"memory": "lstm"})])  # fmt: skip
def test_imitation_makes_the_experts_actions_more_probable(tmp_path, name, own):
    """The file is what was played; every script's clone, with memory or without, learns from it."""
    needs(name)
    import imitation
    import record

    box = name == "rppo_continuous"
    expert_script = driver.fresh(name)
    flags = dict(env_id="Pendulum-v1" if box else "CartPole-v1", eval_episodes=0)
    expert, run_dir = run(expert_script, tmp_path, **flags, **own)
    loud(expert)
    rewritten(expert_script, expert, run_dir)
    file = str(tmp_path / "expert.npz")
    record.record(str(run_dir), file, 4 if box else 12)
    data = dict(np.load(file))
    starts = np.flatnonzero(data["episode_starts"])
    assert np.allclose(np.add.reduceat(data["rewards"], starts), data["episode_returns"], rtol=1e-4)
    env = gym.make(flags["env_id"])
    seed = expert.args.seed
    for n, start in enumerate(starts):
        obs, _ = env.reset(seed=seed + n)
        for row in range(start, [*starts[1:], len(data["obs"])][n]):
            assert np.allclose(obs, data["obs"][row], atol=1e-4)
            obs, *_ = env.step(data["actions"][row])
    script = driver.fresh(name, "imitation")
    losses = []
    for more in {}, dict(expert=file, clone_epochs=20, clone_learning_rate=5e-3):
        learnt = dict(flags, total_timesteps=40, learning_rate=0.0, **own)
        if name == "trpo":
            learnt["target_kl"] = 1e-12
        agent, _ = run(script, tmp_path, **learnt, **more)
        obs, actions, final = imitation.sequences(agent, file)
        inputs = [obs, agent.initial_state(obs.shape[1]), final]
        if hasattr(agent, "exists"):
            shape = *obs.shape[:2], *agent.exists.shape
            inputs.insert(1, torch.from_numpy(agent.exists).expand(shape))
        with torch.no_grad():
            if name == "trpo":
                inputs[0] = agent.normalize(obs)
                logprob = agent(*inputs).log_prob(actions[~final])
            else:
                logprob = agent.evaluate_actions(*inputs, actions)[0]
        losses.append(-logprob.mean().item())
        assert len(logprob) == len(data["obs"])
    least = 0.5 * np.log(2 * np.pi) if box else 0.0  # of a standard deviation of 1
    assert losses[1] - least < 0.8 * (losses[0] - least), losses
    with pytest.raises(script.ArgumentError, match="none.npz: "):
        run(script, tmp_path, expert="none.npz", **flags, **own)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "expert.npz").read_bytes()[:500])
    with pytest.raises(script.ArgumentError, match="cut.npz: "):
        run(script, tmp_path, expert=str(tmp_path / "cut.npz"), **flags, **own)


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_warm_start_begins_with_the_other_runs_weights(tmp_path, name):
    needs(name)
    plain = driver.fresh(name)
    old, source = run(plain, tmp_path, eval_episodes=0)
    script = driver.fresh(name, "warm_start")
    still = dict(learning_rate=0.0, init_from=str(source), eval_episodes=0, total_timesteps=40)
    if name == "trpo":
        still["target_kl"] = 1e-12
    agent, run_dir = run(script, tmp_path, **still)
    new = agent.state_dict()
    same = [
        torch.allclose(x, new[key], atol=1e-4)
        for key, x in old.state_dict().items()
        if "stats" not in key
    ]
    assert all(same) and len(same) >= 8 and script.load(run_dir)["step"] < 100
    with pytest.raises(script.ArgumentError, match="size mismatch|try --overlap"):
        run(script, tmp_path, **{**still, "encoder_size": 12})
    wide, _ = run(script, tmp_path, **{**still, "encoder_size": 12, "overlap": True})
    first = old.encoder[0].weight
    corner = wide.encoder[0].weight[:8]
    assert torch.allclose(corner, first, atol=1e-4) and len(wide.encoder[0].weight) == 12


@pytest.mark.parametrize("name, flags", [
    ("rppo_lstm", dict(mask_velocity=True)), ("rppo_continuous", dict(use_sde=True)),
    ("trpo", {}), ("trpo", dict(memory="lstm")), ("ppo1_mpi", {}),
    ("ppo1_mpi", dict(memory="lstm", env_id="Pendulum-v1")), ("rppo_gru_atari", {}),
])  # fmt: skip
def test_use_agent_acts_as_evaluation_does(tmp_path, name, flags):
    """One observation or many, raw or flat; probabilities add up; the memory threads itself."""
    needs(name)
    from use_agent import Policy

    script = driver.fresh(name)
    agent, run_dir = run(script, tmp_path, eval_episodes=0, **flags)
    loud(agent)
    rewritten(script, agent, run_dir)
    policy = Policy(run_dir)
    pixels = name == "rppo_gru_atari"
    single = gym.make(agent.args.env_id) if not pixels else None
    envs = script.make_envs(agent.args, 1)
    obs, info = envs.reset(seed=5)
    raw = single.reset(seed=5)[0] if single else obs[0]
    state = None
    for _ in range(8):
        expected, state = agent.predict(obs, info, state)
        value = policy.value(raw)
        if isinstance(policy.action_space, gym.spaces.Box):
            means, stds = policy.probabilities(raw)
            normal = Normal(torch.from_numpy(means), torch.from_numpy(stds))
            density = normal.log_prob(torch.from_numpy(means)).sum().exp().item()
            assert policy.density(raw, means)[0] == pytest.approx(density, rel=1e-4)
        else:
            shares = policy.probabilities(raw)
            assert shares.sum(-1) == pytest.approx(1) and shares[0, 0].argmax() == expected[0]
            assert policy.density(raw, expected)[0] == pytest.approx(shares[0, 0].max(), rel=1e-4)
        assert np.isfinite(value).all() and value.shape == (1,)
        action = policy.act(raw)
        assert np.allclose(action, expected[0]) and np.shape(action) == policy.action_space.shape
        assert torch.equal(policy.state, state)
        obs, _, _, _, info = envs.step(expected)
        raw = single.step(action)[0] if single else obs[0]
    policy.reset()
    many = policy.act(np.stack([obs[0]] * 3), final=np.array([False, True, False]))
    assert len(many) == 3 and not policy.state[:, 1].any()


def test_use_agent_takes_a_dict(tmp_path):
    from use_agent import Policy

    script = driver.fresh("rppo_lstm", "images")
    flags = dict(env_id="Signs-v0", eval_episodes=1, grey=True, image_size=40)
    agent, run_dir = run(script, tmp_path, **flags)
    policy = Policy(run_dir)
    env, envs = gym.make("Signs-v0"), script.make_envs(agent.args, 1)
    raw, (obs, _) = env.reset(seed=2)[0], envs.reset(seed=2)
    expected, _ = agent.predict(obs)
    assert np.array_equal(policy.act(raw), expected[0])
    policy.reset()
    assert policy.act([raw, raw]).shape == (2, 2)


def test_programs_of_an_agent_print_what_it_thinks_and_does(run_script, tmp_path):
    """use_agent.py plays the evaluation's episode; distributions.py has what `look` has."""
    from distributions import look

    _, run_dir = run(driver.fresh("rppo_continuous", "sde"), tmp_path, eval_episodes=1)
    played = run_script("docs/recipes/use_agent", run_dir).stdout.split()
    [expected] = json.loads((run_dir / "result.json").read_text())["evaluation"]
    assert played[0] == "return" and float(played[1]) == pytest.approx(expected, rel=1e-4)
    script, args, envs, agent, _ = driver.open_run(run_dir)
    policy, value = look(script, agent, envs.reset(seed=args.seed)[0])
    first, *others = run_script("docs/recipes/distributions", run_dir).stdout.splitlines()
    assert first == f"value {value.item():.3f}, entropy {policy.entropy().item():.3f}"
    assert {line.split()[0] for line in others} == {"loc", "scale"}
    refused = run_script("docs/recipes/use_agent", tmp_path, check=2)
    assert len(refused.lines) == 1 and "is not the directory of a run" in refused.stderr


def test_population_trains_seeds_side_by_side(run_script, tmp_path):
    small = "--num-envs 2 --num-steps 32 --num-minibatches 2 --total-timesteps 64".split()
    words = "rppo_lstm", "networks", "--layers-after", 4, *small, "--eval-episodes", 1
    done = run_script("docs/recipes/population", 2, *words)
    said = {}
    for line in done.stdout.splitlines():
        folder, mean = line.split(": return ")
        said[folder] = float(mean)
    folder = tmp_path / "runs/population"
    assert [*said] == [f"{folder}/1", f"{folder}/2"]
    for n, mean in enumerate(said.values(), 1):
        script, args, *_ = driver.open_run(folder / str(n))
        result = json.loads((folder / str(n) / "result.json").read_text())
        assert args.seed == n and args.layers_after == "4"
        assert mean == pytest.approx(result["evaluation"][0], rel=1e-4)
    for words, says in {
        (2, "rppo_lstm"): "exists: choose another --runs-dir",
        ("rppo_lstm",): "usage: population.py NUMBER SCRIPT",
        (1, "rppo_lstm", "--num-envs", 0, "--runs-dir", "b"): "--num-envs 0: must be from 1",
    }.items():
        refused = run_script("docs/recipes/population", *words, check=2)
        assert len(refused.lines) == 1 and says in refused.stderr


@pytest.mark.parametrize("words", ["rppo_lstm", "trpo"])
def test_evolve_keeps_the_best_and_repeats_the_killed(tmp_path, monkeypatch, words):
    """The best of all generations is kept; the elite goes on unchanged; a killed run is repeated."""
    import evolve
    import population
    from genes import names_of

    calls, real = [], subprocess.run

    def running(command, **options):
        calls.append(command)
        folder = ROOT / command[command.index("--runs-dir") + 1]
        folder = folder / command[command.index("--run-name") + 1]
        if len(calls) == 2:
            return subprocess.CompletedProcess(command, -9, "", "")
        script = driver.fresh(words, *command[3].split(","))
        monkeypatch.setattr(sys, "argv", command[1:2] + command[4:])
        script.train(script.parse_args())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(population.subprocess, "run", running)
    small = "--num-envs 2 --num-steps 32 --eval-episodes 2 --members 3 --generations 2 --steps 100"
    small += " --num-minibatches 2" if words == "rppo_lstm" else ""
    flags = [words, *small.split(), "--processes", "1", "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["evolve.py", *flags])
    evolve.main()
    assert real is not running and len(calls) == 7
    folder = tmp_path / "evolve"
    scores = {x.name: evolve.score(x) for x in folder.iterdir() if x.name != "best"}
    assert len(scores) == 6 and evolve.score(folder / "best") == max(scores.values())
    first = {name: s for name, s in scores.items() if name.startswith("0")}
    elite = max(sorted(first), key=first.get)
    script = driver.open_run(folder / elite)[0]
    old, new = (script.load(folder / name)["args"] for name in (elite, "1-0"))
    monkeypatch.setattr(sys, "argv", ["evolve.py", *flags])
    genes = names_of(script)
    assert {g: old[g] for g in genes} == {g: new[g] for g in genes}
    assert new["init_from"] == str(folder / elite) and len(genes) >= 3
    with pytest.raises(ValueError, match="exists: choose another --runs-dir"):
        evolve.main()


def test_evolve_mutates_one_gene_within_its_range(monkeypatch):
    """Numbers, sizes, numbers of layers, activations; noise for one generation only."""
    import genes

    monkeypatch.setattr(sys, "argv", ["evolve.py", "--ent-coef", "0.01"])
    names = genes.names_of(driver.fresh("rppo_lstm", "images", "networks", "warm_start"))
    assert {*names} == {"learning_rate", "clip_coef", "target_kl", "hidden_size", "layers_before",
                        "layers_after", "cnn_channels", "activation", "init_noise"}  # fmt: skip
    others = genes.names_of(driver.fresh("rppo_lstm", "minigrid_memory", "warm_start"))
    assert "cnn_channels" not in others  # of one convolution, and genes are of three
    parent = genes.kept({name: genes.draw(name) for name in names})
    assert parent["init_noise"] == 0.0
    seen = {name: set() for name in names}
    for _ in range(2000):
        child = genes.mutate(parent)
        changed = [name for name in names if child[name] != genes.kept(parent)[name]]
        assert len(changed) <= 1
        for name, value in child.items():
            seen[name].add(value)
            assert type(value) is type(parent[name])
        for name in {*names} & {*genes.NUMBERS}:
            low, high, _ = genes.NUMBERS[name]
            assert low <= child[name] <= high
        for name, (low, high, (fewest, most)) in genes.SIZES.items():
            sizes = [int(size) for size in child[name].split(",")]
            assert fewest <= len(sizes) <= most and low <= min(sizes) <= max(sizes) <= high
        parent = child
    assert {len(value.split(",")) for value in seen["layers_before"]} == {1, 2, 3}
    assert {len(value.split(",")) for value in seen["cnn_channels"]} == {3}
    assert seen["activation"] == {"tanh", "relu", "elu", "gelu", "silu"}
    assert seen["init_noise"] == {0.0, 0.01, 0.03, 0.1}
    assert seen["hidden_size"] == {32, 64, 128, 256}
    assert {genes.draw("encoder_size") for _ in range(50)} == {32, 64, 128}


def test_warm_start_adds_noise_to_the_weights(tmp_path):
    old, source = run(driver.fresh("rppo_lstm"), tmp_path, eval_episodes=0)
    script = driver.fresh("rppo_lstm", "warm_start")
    flags = dict(learning_rate=0.0, total_timesteps=40, eval_episodes=0, init_from=str(source))
    new, run_dir = run(script, tmp_path, init_noise=0.1, **flags)
    noise = torch.cat([(x - y).flatten() for x, y in zip(new.parameters(), old.parameters())])
    assert noise.std().item() == pytest.approx(0.1, rel=0.15) and abs(noise.mean()) < 0.01
    shutil.rmtree(source)  # a run needs its source no more
    *_, again, _ = driver.open_run(run_dir)
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), new.parameters()))
