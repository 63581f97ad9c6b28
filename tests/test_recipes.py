"""Every recipe on every script: it trains, is written down, goes on, and acts the same when it is
opened again; what makes no sense is refused in one line. What each does is in test_recipes_numbers.

    pytest tests/test_recipes.py -m "slow or not slow"  # all pairs of recipes, too
"""

from dataclasses import asdict, replace

import pytest
import torch
from recipe_tools import driver, needs, reopened, run
from support import SCRIPTS

# L rppo_lstm, C rppo_continuous, G rppo_gru_atari, T trpo, P ppo1_mpi
LETTERS = dict(zip("LCGTP", SCRIPTS))
SCHEDULES = {"learning_rate_schedule": "middle_drop", "adam_eps": 1e-7}
# Of each recipe the scripts that it is for, and flags with which it does something.
RECIPES: dict = {
    "envpool_tasks": ("LCTP", {}),
    "poc_memory": ("LTP", {"env_id": "PocMemory-v0"}),
    "minigrid_memory": ("LTP", {"env_id": "MemoryS7-v0"}),
    "memory_gym_tasks": ("LCTP", {}),
    "ppo1": ("LCTP", {"reward_scale": 0.1}),
    "images": ("LCTP", {}),
    "previous_action": ("LCTP", {}),
    "frame_stack": ("LCTP", {}),
    "feedforward": ("LCG", {}),
    "long_memory": ("LCTP", {}),
    "min_gru": ("LCGTP", {}),
    "lru": ("LCGTP", {}),
    "attention": ("LCGTP", {"attention_steps": 5, "attention_heads": 2}),
    "stacked_lstm": ("LCGTP", {"recurrent_layers": "lstm,gru"}),
    "networks": ("LCGTP", {"layers_before": "8", "layers_after": "8", "activation": "elu"}),
    "sde": ("CT", {"use_sde": True, "sde_sample_freq": 4, "env_id": "Pendulum-v1"}),
    "squash": ("CT", {"squash_output": True, "env_id": "Pendulum-v1"}),
    "multi_discrete": ("LGTP", {}),
    "action_masks": ("LTP", {}),
    "warm_start": ("LCGTP", {}),
    "imitation": ("LCGTP", {}),
    "carry_state": ("LCGTP", {}),
    "recompute": ("LCGP", {"seq_len": 2}),
    "overlap": ("LCGP", {"seq_len": 2, "overlap_len": 4}),
    "losses": ("LCGP", {"clip_value": "max"}),
    "eval_limit": ("LCGTP", {"eval_steps": 9}),
    "schedules": ("LCGTP", SCHEDULES),
    "two_groups": ("G", {}),
    "cuda_graphs": ("LCG", {}),
    "keep_best": ("LCGTP", {"eval_every": 1}),
    "scalars": ("LCGTP", {"csv": True}),
    "callbacks": ("LCGTP", {"checkpoint_every": 1, "quiet": True}),
    "data_parallel": ("LCGT", {}),
    "evolve": ("LCGTP", {"eval_seed": 3}),
    "check_replay": ("LCGP", {}),
}
MEMORY = (
    "long_memory", "min_gru", "lru", "attention", "stacked_lstm", "carry_state", "overlap",
    "recompute",
)  # fmt: skip
PACKAGES = {
    "minigrid_memory": "minigrid", "memory_gym_tasks": "memory_gym", "envpool_tasks": "envpool"
}  # fmt: skip
# What a recipe refuses beside another one; both ways round.
NOT_WITH = [
    {"feedforward", "stacked_lstm"}, {"feedforward", "long_memory"}, {"feedforward", "carry_state"},
    {"frame_stack", "stacked_lstm"}, {"frame_stack", "long_memory"}, {"frame_stack", "carry_state"},
    {"frame_stack", "images"}, {"two_groups", "cuda_graphs"}, {"recompute", "overlap"},
]  # fmt: skip


def flags_of(letter: str, names, recipes=RECIPES) -> dict:
    flags = {"env_id": "Pendulum-v1" if letter == "C" else "CartPole-v1"}
    if letter == "G":
        flags = {"env_id": "ALE/Pong-v5"}
    if "memory_gym_tasks" in names:
        flags = {"env_id": "MortarMayhem-Grid-v0"}
    for name in names:
        own = recipes[name][1]
        flags |= {key: x for key, x in own.items() if letter != "G" or key != "env_id"}
    if "images" in names:
        box = letter == "C" or {"sde", "squash"} & {*names}
        flags |= {"env_id": "BoxSigns-v0" if box else "Colours-v0"}
    if letter in "TP" and {*names} & {*MEMORY}:
        flags["memory"] = "lstm"
    if "keep_best" in names:
        flags |= {"eval_episodes": 1}
    return flags


def trains(tmp_path, letter: str, names, more=None, recipes=RECIPES) -> None:
    """A rollout, then another one of the resumed run; more: flags, where a recipe has no other."""
    for name in names:
        pytest.importorskip(PACKAGES.get(name, "torch"))
    needs(LETTERS[letter])
    script = driver.fresh(LETTERS[letter], *names)
    if letter == "G":
        script.EVAL_FRAMES = 100
    flags = {"eval_episodes": 0, "total_timesteps": 1, **(more or {})}
    flags |= flags_of(letter, names, recipes)
    agent, run_dir = run(script, tmp_path, **flags)
    script, args, again, saved = reopened(run_dir)
    assert saved["script"].split("+")[0] == LETTERS[letter]
    assert {*saved["script"].split("+")[1:]} == {*names}
    assert {key: saved["args"][key] for key in flags} == flags
    weights = again.state_dict()
    for key, x in agent.state_dict().items():
        assert torch.equal(x, weights[key]) and x.isfinite().all(), key
    wish = replace(args, resume=str(run_dir), total_timesteps=saved["step"] + 1)
    before = asdict(wish)
    agent = script.train(wish)
    assert asdict(wish) == before  # what the user asked for, after the run as before it
    later = script.load(run_dir)
    assert later["step"] > saved["step"]
    assert later["args"] == {**saved["args"], "total_timesteps": saved["step"] + 1}
    assert any(not torch.equal(x, weights[key]) for key, x in agent.state_dict().items())


def test_every_recipe_is_here():
    assert {*driver.known_recipes()} == {*RECIPES}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("letter", "LCTP")
def test_a_recipe_trains_and_resumes(tmp_path, letter, name):
    if letter in RECIPES[name][0]:
        trains(tmp_path, letter, [name])


@pytest.mark.parametrize("name", ["networks", "two_groups"])
def test_a_recipe_trains_and_resumes_on_atari(tmp_path, name):
    trains(tmp_path, "G", [name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_it_makes_no_sense(name):
    for letter in {*LETTERS} - {*RECIPES[name][0]}:
        with pytest.raises(ValueError, match=f"^{name}: ") as refused:
            driver.fresh(LETTERS[letter], name)
        assert "\n" not in str(refused.value)


PAIRS = [
    ("L", "networks stacked_lstm"), ("L", "images networks"), ("L", "overlap losses"),
    ("L", "schedules callbacks"), ("L", "attention previous_action"), ("L", "frame_stack networks"),
    ("C", "sde networks"), ("C", "squash overlap"), ("T", "networks sde"), ("T", "min_gru images"),
    ("P", "lru keep_best"), ("P", "ppo1 scalars"),
]  # fmt: skip


@pytest.mark.parametrize("letter, pair", PAIRS)
def test_pairs(tmp_path, letter, pair):
    trains(tmp_path, letter, pair.split())


@pytest.mark.parametrize("pair", NOT_WITH, ids=lambda pair: " ".join(sorted(pair)))
def test_pairs_that_make_no_sense_are_refused_in_one_line(pair):
    name = "rppo_gru_atari" if "two_groups" in pair else "rppo_lstm"
    needs(name)
    with pytest.raises(ValueError, match=": .*with ") as refused:
        driver.fresh(name, *pair)
    assert type(refused.value).__name__ == "ArgumentError" and "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("letter", "LCTPG")
@pytest.mark.parametrize("first", RECIPES)
def test_all_pairs(tmp_path, letter, first):
    for second in [*RECIPES][[*RECIPES].index(first) + 1 :]:
        fits = letter in RECIPES[first][0] and letter in RECIPES[second][0]
        tasks = {"poc_memory", "ppo1", "images", *PACKAGES}
        apart = [{first, second} <= tasks, {first, second} in NOT_WITH]
        apart += [first in ("sde", "squash") and second in ("multi_discrete", "action_masks")]
        if fits and not any(apart):
            folder = tmp_path / second
            folder.mkdir()
            try:
                trains(folder, letter, [first, second])
            except BaseException as error:
                error.add_note(f"{LETTERS[letter]}: {first}, {second}")
                raise
