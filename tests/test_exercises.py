"""The exercises of docs/exercises: each diff fits the script of today, and does what its page says."""

import csv
import json
import re
import sys

import gymnasium as gym
import launch
import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, awkward_ends, toy
from gymnasium import spaces

sys.path.insert(0, str(ROOT / "docs/exercises"))
import train as exercises  # noqa: E402

T, N = 24, 6
SIZES = dict(num_steps=T, num_envs=N, total_timesteps=2 * T * N, update_epochs=2)
SHORT = "--mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 8".split()
COMPARED = "lstm.cell.weight_hh", "lstm.cell.weight_ih", "actor.weight", "critic.weight"


@pytest.fixture
def changed(tmp_path_factory, monkeypatch):
    """Applies an exercise; returns the name under which `watch` finds the module."""

    def load(name):
        module = exercises.load(name, tmp_path_factory.mktemp(name))
        monkeypatch.setitem(MODULES, module.__name__, module)
        return module.__name__

    return load


class Steady(gym.Env):
    """Always the same observation, always a reward of 1; truncated with probability 0.2."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, bool(self.np_random.random() < 0.2), {}


gym.register("Steady-v0", Steady, disable_env_checker=True)


def ratios(seen):
    """Of the first minibatch of every update."""
    per_update = len(seen.losses) // len(seen.logs)
    return [(loss[0] - loss[1]).exp() for loss in seen.losses[::per_update]]


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_a_page_has_a_question_a_diff_a_command_a_hint_and_an_answer(name):
    page = exercises.EXERCISES[name]
    text = page.read_text()
    assert text.startswith(f"# {int(page.name[:2])}. ")
    parts = [
        "```diff\n",
        "**Predict.**",
        "```bash\n",
        "<summary>Hint</summary>",
        "<summary>Answer</summary>",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places) and all(text.count(part) == 1 for part in parts)
    assert f"python docs/exercises/train.py {name} --seeds 1:3 --env-id CartPole-v1" in text
    diff = text.split("```diff\n")[1].split("```")[0].splitlines()
    assert max(map(len, diff)) <= 101 and sum(line[:1] == "+" for line in diff) <= 23
    assert f"{{{{ exercise {name} }}}}" in text
    index = (ROOT / "docs/exercises.md").read_text()
    added = sum(line[:1] == "+" for line in diff)
    assert re.search(
        rf"\| {int(page.name[:2])} \| \[[^]]+\]\(exercises/{page.name}\) \| {added} \|", index
    )


def test_pages_are_numbered_and_a_diff_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    numbers = [int(page.name[:2]) for page in exercises.EXERCISES.values()]
    assert numbers == [*range(1, len(numbers) + 1)] and len(numbers) == 11
    for line in "-    no such line", "-            )":
        page = tmp_path / "01_wrong.md"
        page.write_text(f"```diff\n@@ train @@\n{line}\n+    x = 1\n```\n")
        monkeypatch.setitem(exercises.EXERCISES, "wrong", page)
        with pytest.raises(ValueError, match="wrong: in rppo_lstm.py"):
            exercises.changed("wrong")


def test_unchanged_is_the_script():
    assert exercises.changed("unchanged") == (ROOT / "rppo_lstm.py").read_text()


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_a_changed_script_trains_resumes_and_says_what_it_is(name, tmp_path, monkeypatch):
    """As benchmarks/learning.py starts, resumes and evaluates it: --resume has no name before it."""
    monkeypatch.chdir(tmp_path)
    first = [name, *SHORT, "--seq-len", "8", "--total-timesteps", "200", "--run-name", "run"]
    for flags in first, ["--resume", "runs/run", "--total-timesteps", "400", "--seed", "2"]:
        monkeypatch.setattr(sys, "argv", ["docs/exercises/train.py", *flags])
        exercises.main()
    saved = torch.load(tmp_path / "runs/run/agent.pt", weights_only=True)
    result = json.loads((tmp_path / "runs/run/result.json").read_text())
    assert saved["script"] == f"rppo_lstm_{name}" and saved["args"]["seed"] == 2
    assert 400 <= result["global_step"] == saved["step"] and len(result["evaluation"]) == 10


@pytest.mark.parametrize("flags,error", [
    (["lstm"], "error: lstm is not one of unchanged, no_bootstrap"),
    (["--resume", "x"], "error: x is not the directory of a run: it has no agent.pt"),
])  # fmt: skip
def test_wrong_names_and_runs_are_refused_in_one_line(flags, error, tmp_path):
    program = str(ROOT / "docs/exercises/train.py")
    done = launch.start(program, flags, tmp_path, tmp_path / "log").wait()
    assert done.returncode > 0 and done.lines[-1].startswith(error), done.stderr


def test_seeds_compare_with_the_script(tmp_path, monkeypatch, capsys):
    """A row for each run, which is not repeated; the page shows them."""
    small = [*SHORT, "--total-timesteps", "200", "--eval-episodes", "2"]
    flags = ["--env-id", "CartPole-v1", *small]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["train.py", "adamw", "--seeds", "3:3", "--out", "results.csv", *flags]
    )
    exercises.main()
    with open("results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["change"], row["seed"]) for row in rows] == [("unchanged", "3"), ("adamw", "3")]
    assert all(row["task"] == " ".join(flags) and float(row["eval_mean"]) >= 8 for row in rows)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 and "seed 3, adamw: return" in printed
    exercises.main()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(exercises, "RESULTS", tmp_path / "results.csv")
    lines = exercises.table("adamw").splitlines()
    for line, row in zip(lines[2:4], rows):
        assert line == f"| {row['change']} | {row['eval_mean']}, {row['return_100']} |"
    assert lines[0].endswith("| seed 3 |") and " ".join(flags) in lines[-1]
    assert exercises.table("gru").startswith("Not measured yet")


def test_all_takes_the_commands_of_the_pages(monkeypatch):
    compared = []
    monkeypatch.setattr(exercises, "compare", lambda *inputs: compared.append(inputs))
    monkeypatch.setattr(sys, "argv", ["train.py", "all", "--seeds", "1:2", "--eval-episodes", "20"])
    exercises.main()
    plain = "--env-id CartPole-v1 --mask-velocity".split()
    assert compared[0] == ("no_bootstrap", 1, None, [*plain, "--eval-episodes", "20"])
    assert compared[-1] == (
        "recompute",
        2,
        None,
        [*plain, "--seq-len", "32", "--eval-episodes", "20"],
    )
    assert [name for name, *_ in compared] == 2 * [*exercises.EXERCISES]


def test_figures_are_of_exercises_that_exist():
    rows = exercises.read(exercises.RESULTS)
    keys = [(row["task"], row["change"], row["seed"]) for row in rows]
    assert len({*keys}) == len(keys) and {key[1] for key in keys} <= {
        "unchanged",
        *exercises.EXERCISES,
    }
    assert all(8 <= float(row["eval_mean"]) <= 500 and row["commit"] for row in rows)
    questions = " ".join((ROOT / "docs/questions.md").read_text().split())
    single = [f"{float(row['eval_mean']):.0f}" for row in rows if row["change"] == "single_steps"]
    assert (
        "with sequences of one step, three seeds reach {}, {} and {}".format(*single) in questions
    )


@pytest.mark.parametrize("name,value", [("unchanged", 5.0), ("no_bootstrap", 1 / (1 - 0.8 * 0.8))])
def test_no_bootstrap(name, value, changed, watch):
    """A reward of 1 for ever is worth 1 / (1 - gamma) = 5. Cut with probability 0.2, and not
    bootstrapped, it is worth 1 / (1 - 0.8 gamma)."""
    seen = watch(changed(name), "Steady-v0", num_envs=8, num_steps=64, num_minibatches=4, gamma=0.8,
                 total_timesteps=12_000, learning_rate=0.01, norm_reward=False)  # fmt: skip
    (_, values, *_), _ = seen.gae[-1]
    assert abs(values.mean() - value) <= 0.3


def test_single_steps(changed, watch):
    """It is --seq-len 1 to the bit: one step at a time, each from its stored state."""
    ours, flag = (
        watch(changed("single_steps"), toy(), **SIZES),
        watch("rppo_lstm", toy(), seq_len=1, **SIZES),
    )
    whole = watch("rppo_lstm", toy(), **SIZES)
    assert {inputs[0].shape for inputs, *_ in ours.replays} == {(1, T * N // 3, 3)}
    assert all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(ours))
    for name in COMPARED:
        ours_, flag_, whole_ = (x.agent.get_parameter(name) for x in (ours, flag, whole))
        assert torch.equal(ours_, flag_) and not torch.equal(ours_, whole_)


@pytest.mark.parametrize("separate", [False, True])
def test_carry_state(separate, changed, watch):
    """The state after a final step is what the LSTM made of it, in acting and in replay; that of a
    separate critic, too."""
    seen = watch(changed("carry_state"), toy(), separate_critic=separate, **SIZES)
    ends = 0
    for before, after in zip(seen.steps[: T - 1], seen.steps[1:T]):
        assert torch.equal(after[0][-1], before[1][-1])
    for inputs, *_ in seen.replays:
        ends += inputs[3].sum()
    assert ends > 20 and all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(seen))
    inputs, outputs, _ = seen.replays[0]
    valid = ~inputs[3].T  # by environment
    obs = torch.stack([step[0] for step, _ in seen.steps[:T]], 1)  # (N, T, n)
    played = torch.stack([step[1] for _, step in seen.steps[:T]], 1)
    rows = [(obs[:, 0] == first).all(-1).nonzero().item() for first in inputs[0][0]]
    replayed = torch.zeros(T, len(rows)).masked_scatter(valid.T, outputs[2]).T
    assert (replayed - played[rows])[valid].abs().max() <= 1e-5
    reset = watch("rppo_lstm", toy(), **SIZES)
    assert any(
        not torch.equal(after[0][-1], before[1][-1])
        for before, after in zip(reset.steps[: T - 1], reset.steps[1:T])
    )


def test_adamw(changed, watch):
    """Weights without a gradient, those of the masked velocities, shrink as the page says."""
    for name in "adamw", "unchanged":
        seen = watch(changed(name), "CartPole-v1", mask_velocity=True, learning_rate=0.05, **SIZES)
        before, after = (agent.encoder[0].weight[:, [1, 3]] for agent in (seen.first, seen.agent))
        shrink = np.prod([1 - 0.01 * lr for lr, *_ in seen.updates]) if name == "adamw" else 1.0
        assert (after - shrink * before).abs().max() <= 1e-6 and len(seen.updates) >= 12
        assert (shrink < 0.996) == (name == "adamw")


@pytest.mark.parametrize("name", ["unchanged", "value_clipping"])
def test_value_clipping(name, changed, watch):
    """Of each step the larger error counts: of its value, or of its value held near the old one."""
    clip, differ = 0.02, 0
    seen = watch(changed(name), toy(), num_envs=1, num_steps=T, num_minibatches=1, total_timesteps=60,
                 update_epochs=8, clip_coef=clip, learning_rate=0.01)  # fmt: skip
    for number, (inputs, outputs, update) in enumerate(seen.replays):
        valid, value = ~inputs[3][:, 0], outputs[2]  # (T,), (M,)
        arrays, advantages = seen.gae[update]
        old = torch.from_numpy(arrays[1][:T, 0])[valid]
        target = old + torch.from_numpy(advantages[:, 0])[valid]
        plain = (value - target).square()
        held = (old + (value - old).clamp(-clip, clip) - target).square()
        expected = plain if name == "unchanged" else torch.max(plain, held)
        logged = seen.logs[update][1][number % 8]["value_loss"]
        assert logged == pytest.approx(0.5 * expected.mean().item(), rel=1e-4)
        differ += not torch.allclose(plain, torch.max(plain, held))
    assert differ >= 5


def test_final_steps(changed, watch):
    """Final steps count, replayed as they were played, and the critic learns gamma V of the next
    episode there: reward 0, and nothing ends."""
    seen = watch(changed("final_steps"), toy(), **SIZES)
    assert {len(loss[0]) for loss in seen.losses} == {T * N // 3}
    assert all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(seen))
    obs = torch.stack([inputs[0] for inputs, _ in seen.steps[:T]])  # (T, N, n)
    played = torch.stack([outputs[1] for _, outputs in seen.steps[:T]])
    inputs, outputs, _ = seen.replays[0]
    final, replayed = inputs[3], outputs[2].view(T, -1)
    assert final.sum() >= 4 and replayed[final].unique().numel() == final.sum()
    targets = 0
    for b in range(N // 3):  # a sequence is all steps of one environment
        n = (obs[0] == inputs[0][0, b]).all(-1).nonzero().item()
        assert (replayed[:, b] - played[:, n]).abs().max() <= 1e-5
        arrays, advantages = seen.gae[0]
        rewards, values = arrays[0][:, n], arrays[1][:, n]
        for t in final[:-1, b].nonzero()[:, 0].tolist():
            delta = 0.99 * values[t + 1] - values[t]
            expected = delta + 0.99 * 0.95 * advantages[t + 1, n]
            assert rewards[t] == 0 and advantages[t, n] == pytest.approx(expected, abs=1e-5)
            targets += 1
    assert targets >= 3
    fused = watch("rppo_lstm", toy(), **SIZES)  # where final steps do not count
    for inputs, outputs, _ in fused.replays:
        assert {len(x) for x in outputs} == {int((~inputs[3]).sum())} != {T * N // 3}


def test_two_layers(changed, watch):
    """Four rows of state; acting and replay are two LSTMs, one above the other."""
    seen = watch(changed("two_layers"), toy(), **SIZES)
    agent, (inputs, outputs) = seen.first, seen.steps[1]
    assert agent.initial_state(5).shape == (4, 5, 8) == (4, 5, agent.second.cell.hidden_size)
    obs, legal, state = inputs
    with torch.no_grad():
        h, c = agent.lstm.cell(agent.encoder(agent.normalize(obs)), (state[0], state[1]))
        h2, c2 = agent.second.cell(h, (state[2], state[3]))
        assert torch.allclose(
            torch.stack([h, c, h2, c2]).where(outputs[2] != 0, 0), outputs[2], atol=1e-6
        )
        assert torch.allclose(agent.critic(h2)[:, 0], outputs[1], atol=1e-6)
    assert all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(seen))


def test_gru(changed, watch):
    """One fused call is the loop with resets, gradients too, whatever the biases are."""
    module = MODULES[changed("gru")]
    torch.manual_seed(0)
    *_, final = awkward_ends(T, N)
    gru = module.ResetLSTM(5, 7).double()
    assert isinstance(gru.cell, torch.nn.GRUCell)
    for parameter in gru.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(T, N, 5, dtype=torch.double, requires_grad=True)
    start = torch.randn(1, N, 7, dtype=torch.double).repeat(2, 1, 1)
    state, loop = start, []
    for t in range(T):
        state = gru.step(x[t], state)
        loop.append(state[0])
        state = state.where(~final[t][:, None], 0.0)
    weights, found = torch.randn(T, N, 7, dtype=torch.double), []
    for h in gru(x, start, final[:T]), torch.stack(loop):
        valid = h[~final[:T]]
        loss = (valid * weights[~final[:T]]).sum()
        found.append([valid.detach(), *torch.autograd.grad(loss, [x, *gru.parameters()])])
    for fused, expected in zip(*found):
        assert (fused - expected).abs().max() <= 1e-10 and expected.abs().max() > 0.1
    seen = watch(module.__name__, toy(), **SIZES)
    assert all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(seen))


def test_overlap(changed, watch):
    """Sequences of 8 steps begin every 4 steps, with the states stored there: the first and the
    last 4 steps of a rollout count once in an epoch, the others twice."""
    seen = watch(changed("overlap"), toy(), **SIZES, seq_len=8)
    stored = torch.stack([inputs[-1] for inputs, _ in seen.steps[:T]])
    obs = torch.stack([inputs[0] for inputs, _ in seen.steps[:T]])
    counted, starts = torch.zeros(T), set()
    for inputs, *_ in seen.replays[:3]:  # an epoch
        assert inputs[0].shape == (8, 5 * N // 3, 3)
        for b in range(5 * N // 3):
            t, n = (obs == inputs[0][0, b]).all(-1).nonzero()[0].tolist()
            assert torch.equal(inputs[0][:, b], obs[t : t + 8, n])
            assert torch.equal(inputs[2][:, b], stored[t, :, n])
            counted[t : t + 8] += 1
            starts.add(t)
    assert starts == {0, 4, 8, 12, 16} and counted.tolist() == [N] * 4 + [2 * N] * 16 + [N] * 4
    assert all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios(seen))


def test_previous_action(changed, watch):
    """Observations end with the action before; zeros where an episode begins."""
    seen, begun = watch(changed("previous_action"), toy(), **SIZES), 0
    assert seen.resets[0][0].shape == (N, 6) and not seen.resets[0][0][:, 3:].any()
    done = np.zeros(N, bool)
    for action, obs, _, terminated, truncated, _ in seen.env:
        expected = np.eye(3)[action] * ~done[:, None]
        assert np.array_equal(obs[:, 3:], expected)
        begun, done = begun + done.sum(), terminated | truncated
    assert begun > 20 and seen.agent.encoder[0].in_features == 6


def test_recompute(changed, watch):
    """Every epoch starts its sequences from the states that the weights of that moment have."""
    seen = watch(changed("recompute"), toy(), **SIZES, seq_len=8)
    stored = torch.stack([y[0][-1] for y in seen.steps[:T]])
    obs, final = torch.stack([y[0][0] for y in seen.steps[:T]]), torch.zeros(T, N, dtype=torch.bool)
    for t, (_, _, _, terminated, truncated, _) in enumerate(seen.env[: T - 1]):
        final[t + 1] = torch.from_numpy(terminated | truncated)
    for number, (inputs, *_) in enumerate(seen.replays[:6]):
        epoch_start = seen.updates[number - number % 3][1]  # weights by name
        seen.first.load_state_dict(epoch_start, strict=False)
        now, states = stored[0], []
        for t in range(T):
            states.append(now)
            with torch.no_grad():
                x = seen.first.encoder(seen.first.normalize(obs[t]))
                now = seen.first.lstm.step(x, now).where(~final[t][:, None], 0.0)
        difference = 0.0
        for b in range(inputs[0].shape[1]):
            t, n = (obs == inputs[0][0, b]).all(-1).nonzero()[0].tolist()
            assert torch.allclose(inputs[2][:, b], states[t][:, n], atol=1e-6)
            difference += (inputs[2][:, b] - stored[t, :, n]).abs().max().item()
        assert (difference > 1e-4) == (number >= 3)


def test_seeds_in_the_wrong_order_train_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "gru", "--seeds", "3:1"])
    with pytest.raises(SystemExit) as refused:
        exercises.main()
    assert refused.value.code == 2 and "--seeds: 3:1 has no seed" in capsys.readouterr().err
