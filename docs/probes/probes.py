"""Probes: nine small environments that tell whether a recurrent PPO is right.

    python probes.py                       # lists the probes
    from probes import check, check_memory # see docs/probes.md

Usual tasks are learned in spite of a mistake. Each of these has a score that a correct agent reaches
within 20,000 to 60,000 steps, and other scores that certain mistakes reach. The file needs
Gymnasium, NumPy and tqdm, and torch only for check_memory: copy it.

Train with rollouts of 16 time steps, in sequences of 16 or 8, and with as many environments as you
like: Recall asks for what was shown 5 steps before, Rollout for what was shown in another rollout.

There are two kinds of reward. An action is -1, 0 or 1 (0, 1, 2 of a Discrete(3)), or a number
between -1 and 1 (of a Box). Where a probe asks for an answer of -1 or 1,

    bet    pays 1 - (action - answer)^2 / 2: 1 for the answer, -1 for its opposite, 0.5 for 0. If
           you can't know the answer, 0 is best.
    guess  pays action * answer: 1, -1, and 0 for 0. If you can't know, nothing is better.

So the score tells an agent that knows (1) from one that learned in training that it can't know
(0.5), and from one that knew in training, but acts without knowing (0 on average). Where a probe
asks whether to stay or to leave, an action above 0 leaves, and the score is the share of right
decisions.

Seeds: reset(seed) fixes an episode and those that follow.
"""

import traceback
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tqdm import tqdm


class Probe(gym.Env):
    """What all probes share. `needs`: probes that must be right before this one can tell anything,
    since their mistakes change its score, too. `right`: the scores of a correct agent, one for each
    kind of question. `wrong`: of each mistake."""

    size = 1  # numbers in an observation
    steps = 20_000  # to train for
    needs: tuple[str, ...] = ()
    right: tuple[float, ...] = (1,)
    wrong: dict[str, tuple[float, ...]] = {}

    def __init__(self, box: bool = False):
        self.box = box
        self.observation_space = spaces.Box(-1, 1, (self.size,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return np.array(self.show(), np.float32), {}

    def step(self, action):
        a = float(np.reshape(action, -1)[0]) if self.box else int(action) - 1
        self.scored = None  # (which question, points)
        reward, terminated, truncated = self.play(a)
        self.t += 1
        return np.array(self.show(), np.float32), reward, bool(terminated), bool(truncated), {}

    def begin(self) -> None:
        """Of an episode."""

    def show(self) -> list:
        """The observation of step t; of the final one, too."""
        raise NotImplementedError

    def play(self, a: float):
        """reward, terminated, truncated."""
        raise NotImplementedError

    def happens(self, probability: float) -> bool:
        return self.np_random.random() < probability

    def bit(self) -> int:
        return 1 if self.happens(0.5) else -1

    def bet(self, a: float, answer: int, question: int | None = None) -> float:
        return self.score(1 - (a - answer) ** 2 / 2, question)

    def guess(self, a: float, answer: int, question: int | None = None) -> float:
        return self.score(a * answer, question)

    def score(self, points: float, question: int | None) -> float:
        if question is not None:
            self.scored = question, points
        return points

    def stay_or_leave(self, a: float):
        """The first decision of an episode, in which only half of those who want to leave can, so
        that the critic goes on learning what staying is worth. Later ones don't count. Leaving pays
        0.5, and ends the episode. Staying pays 1, then terminates with probability 1/4, and is
        truncated with 1/2: it is worth about 4, at least 1, and little if the truncated half is."""
        if self.question is not None:
            self.scored, self.question = (self.question, float(a <= 0)), None
            if a > 0 and self.happens(0.5):
                return 0.5, True, False
        u = self.np_random.random()
        return 1.0, u < 0.25, 0.25 <= u < 0.75


class Now(Probe):
    """Shows a bit at each step, and asks for it.

    Right: 1.
    The update sees another observation than the one that was acted on, of one step before or after:
    0.5. The policy that it improves can't know the bit, and learns to answer 0.
    Nothing is learned yet, and actions are random: 1/6.
    """

    wrong = {"observations off by one": (0.5,), "nothing learned": (1 / 6,)}

    def show(self):
        self.now = self.bit()
        return [self.now]

    def play(self, a):
        return self.bet(a, self.now, 0), self.t == 6, False


class Previous(Probe):
    """Shows a bit at each step, and asks for the one of the step before; for 1 at the first step.

    Right: 1. A state that was stored is enough for it, without a gradient through time.
    Time and environments are swapped in the update's sequences, or they are mixed up otherwise:
    0.5. Replay can't know what this environment showed one step before.
    The state is lost between the steps of an evaluation: 0. Each step looks like a first one, whose
    answer is 1.
    """

    needs = ("Now",)
    wrong = {"sequences don't follow time": (0.5,), "state lost in evaluation": (0,)}

    def begin(self):
        self.now = 1

    def show(self):
        self.before, self.now = self.now, self.bit()
        return [self.now]

    def play(self, a):
        return self.bet(a, self.before, 0 if self.t else None), self.t == 6, False


class Leak(Probe):
    """Asks for what only the previous episode has shown: at the first step for its last bit or for
    its early bit, at the second step for its early bit again.

    Right: 0.5 of each question, since nobody can know.
    No reset: 1, 1, 1.
    Reset one step late, after the first step, which knows all, or early, before the final
    observation is read, which shows the last bit: 1, 0.5 to 1, 0.5.
    The same in training alone: 0 in place of 1. The agent acts as if it knew.
    """

    size = 5
    steps = 60_000
    needs = ("Previous",)
    right = (0.5, 0.5, 0.5)
    wrong = {
        "no reset": (1, 1, 1),
        "reset one step late or early": (1, 0.75, 0.5),
        "no reset in training": (0, 0, 0),
        "reset one step late or early in training": (0, 0.25, 0.5),
    }

    def __init__(self, box: bool = False):
        super().__init__(box)
        self.bits = 1, 1  # early, last

    def begin(self):
        self.old, self.bits = self.bits, (self.bit(), self.bit())
        self.asks_early = self.happens(0.5)

    def show(self):
        early, last = self.bits
        first = self.t == 0
        asks = first and not self.asks_early, first and self.asks_early, self.t == 1
        return [*asks, early * (self.t in (1, 2, 3)), last * (self.t >= 3)]  # the final step is 4

    def play(self, a):
        early, last = self.old
        if self.t == 0:
            reward = self.bet(a, early, 1) if self.asks_early else self.bet(a, last, 0)
        else:
            reward = self.bet(a, early, 2) if self.t == 1 else 0.0
        return reward, self.t == 3, False


class Latch(Probe):
    """Shows 1 in 30 % of the steps after the first, else 0. The answer is -1 once there was a 1 in
    the episode, and 1 before. An episode ends after each step with probability 0.35, and nothing
    shows it. The first question is asked two steps and more after the last 1, the second before
    the first 1.

    Right: 1, 1.
    No reset on replay: -1, 1, or 0.5 of the first question. In replay an old 1 says little, since it
    has most likely been in an episode before, so the policy learns not to trust it.
    No reset in evaluation: 1, and at most 0.5: the 1 of an old episode is trusted.
    """

    needs = ("Leak",)
    right = (1, 1)
    wrong = {"no reset on replay": (-0.5, 1), "no reset in evaluation": (1, 0)}

    def begin(self):
        self.age = None  # steps since the last 1

    def show(self):
        one = self.t > 0 and self.happens(0.3)
        if one:
            self.age = 0
        elif self.age is not None:
            self.age += 1
        return [one]

    def play(self, a):
        if self.age is None:
            reward = self.bet(a, 1, 1)
        else:
            reward = self.bet(a, -1, 0 if self.age >= 2 else None)
        return reward, self.happens(0.35), False


class Recall(Probe):
    """Shows a bit at each step, marks that of the second step as the cue, and asks for it 5 steps
    later. Five more bits mean nothing.

    Right: 1. (The first step is not the cue: a late reset would forget it.)
    Gradients don't flow back through 5 steps, because single steps are shuffled, the state is
    detached at each step, or sequences are shorter: below 0.6. With short sequences it's a setting,
    not a mistake. A forget gate that starts half open learns it late, and so does an agent without
    resets, in whose state earlier cues remain. Without the five bits, a memory whose weights nobody
    trained holds the cue often enough to read it.
    """

    size = 8
    needs = ("Leak", "Latch")
    steps = 30_000
    lag = 5
    wrong = {"gradient stops too early": (0,)}

    def begin(self):
        self.cue = self.bit()

    def show(self):
        cued = self.t == 1
        noise = [self.bit() for _ in range(5)]
        return [cued, self.cue if cued else self.bit(), self.t == 1 + self.lag, *noise]

    def play(self, a):
        asked = self.t == 1 + self.lag
        return (self.guess(a, self.cue, 0) if asked else 0.0), asked, False


class Rollout(Probe):
    """Shows a cue at the first two steps and asks at each step: for the cue until step 16, later
    for its opposite. No rollout of 16 steps has both the cue and a late question. The first score
    is of early questions from step 8 on, the second of late ones.

    Right: 1, 1. The early questions teach the agent to keep the cue; the state that it has at the
    start of another rollout teaches it the late answer.
    The state is lost at the end of a rollout: 1, and about -1. In training no late question was
    asked of an agent that knew the cue, so in evaluation it answers as if it were early.
    Sequences begin with another state than acting's, a zero one or that of another environment: 1,
    and about 0. In replay the cue says nothing about the late answer.
    A first score far below 1: nothing is wrong with the state, but the agent hasn't learned to keep
    a cue for 17 steps. A forget gate that starts half open is slow at it. Late answers are learned
    last, so 1 and about 0 may also mean too few steps: train longer before you look for a mistake.
    """

    size = 3
    needs = ("Recall", "Latch")
    steps = 60_000
    right = (1, 1)
    lag = 17
    wrong = {
        "state lost at the rollout's end": (1, -1),
        "sequences begin with another state": (1, 0),
    }

    def begin(self):
        self.cue = self.bit()

    def show(self):
        early = self.t < self.lag
        return [self.cue * (self.t < 2), early, not early]

    def play(self, a):
        if self.t < self.lag:
            return self.guess(a, self.cue, 0 if self.t >= 8 else None), False, False
        return self.guess(a, -self.cue, 1), self.t == self.lag + 7, False


class Limit(Probe):
    """Shows the same at each step. Leaving pays 2 and terminates; staying pays 1, and the episode is
    truncated with probability 3/4. The discount factor must be at least 0.8.

    Right: 1, staying: 1 / (1 - gamma) with what is cut off.
    Truncation taken for termination: 0. Staying seems to be worth 4/3.
    """

    wrong = {"truncation taken for termination": (0,)}

    def show(self):
        return [1]

    def play(self, a):
        self.scored = 0, float(a <= 0)
        return (2.0, True, False) if a > 0 else (1.0, False, self.happens(0.75))


class FinalStep(Probe):
    """Half of the episodes begin with a step that costs 20 whatever one does. Then: stay or leave?
    What is shown doesn't tell a final step from another.

    Right: 1, staying.
    Final steps are trained on (autoreset NEXT_STEP), so that their value is that of the next
    episode's start; or the final observation is lost and the next episode's first one is in its
    place (SAME_STEP): 0. A truncated episode seems to end badly.
    """

    size = 2
    wrong = {"final steps trained on, or final observation lost": (0,)}

    def begin(self):
        self.costs = self.happens(0.5)
        self.question = None if self.costs else 0

    def show(self):
        costs = self.costs and self.t == 0
        return [costs, not costs]

    def play(self, a):
        if self.costs and self.t == 0:
            return -20.0, False, False
        return self.stay_or_leave(a)


class FinalValue(Probe):
    """Three kinds of episodes: two have a single step, which pays 4 or costs 4. The one that costs
    shows zeros. The third shows what it is at its first step, then zeros, and asks: stay or leave?

    Right: 1, staying.
    The value of a final observation is computed with a zero state, or with the next episode's: 0.
    Zeros without a past mean the episode that costs, so a truncated episode seems to end badly.
    """

    size = 2
    needs = ("Latch", "Rollout", "Limit")
    wrong = {"final value from a zero state": (0,)}

    def begin(self):
        self.kind = int(self.np_random.integers(3))
        self.question = 0

    def show(self):
        first = self.t == 0
        return [self.kind == 0 and first, self.kind == 1 and first]

    def play(self, a):
        if self.kind > 0:
            return (4.0 if self.kind == 1 else -4.0), True, False
        return self.stay_or_leave(a)


PROBES = {
    probe.__name__: probe
    for probe in (Now, Previous, Leak, Latch, Recall, Rollout, Limit, FinalStep, FinalValue)
}
for _name, _probe in PROBES.items():
    for _id, _box in (f"probes:{_name}-v0", False), (f"probes:{_name}Box-v0", True):
        _id = _id.removeprefix("probes:")
        if _id not in gym.registry:
            gym.register(_id, _probe, kwargs={"box": _box}, disable_env_checker=True)

ALL = tuple(f"probes:{name}-v0" for name in PROBES)  # Discrete(3)
BOX = tuple(f"probes:{name}Box-v0" for name in PROBES)


class Row(NamedTuple):
    probe: str  # its id
    score: float  # the mean over its kinds of questions; NaN if there is none
    right: bool
    mistake: str | None  # the one that the scores fit
    note: str  # the scores, one for each kind of question, or why there are none


def check(train, probes=ALL, seed: int = 1) -> list[Row]:
    """Trains somebody's agent on each probe, lets it act, prints a table, and returns its rows.

    train(env_id, steps, seed) trains, with environments gym.make(env_id), and returns act(obs,
    final): obs (N, n) of N environments; final (N,), which of them are the last of an episode (None
    in the first call); it returns N actions as the environment takes them, for a final observation
    any. When the next call comes, those that were final are at a new episode's first observation.
    act should take the most probable actions.
    """
    rows: list[Row] = []
    with tqdm(probes, unit="probe") as bar:
        for env_id in bar:
            bar.set_description(str(env_id))
            try:
                rows.append(judge(train, env_id, seed, rows))
            except Exception as error:  # of whatever kind: it's somebody else's code
                traceback.print_exc()
                rows.append(Row(str(env_id), np.nan, False, None, f"{error!r}"[:200]))
            bar.write(line(rows[-1]))
    return rows


def judge(train, env_id: str, seed: int, rows: list[Row]) -> Row:
    name = str(env_id).removeprefix("probes:").removesuffix("-v0").removesuffix("Box")
    if name not in PROBES or env_id not in ALL + BOX:
        return Row(str(env_id), np.nan, False, None, f"unknown: there are {', '.join(PROBES)}")
    probe = PROBES[name]
    box = env_id in BOX
    wrong = [row.probe for row in rows if not row.right]
    for needed in probe.needs:
        needed_id = f"probes:{needed}{'Box' * box}-v0"
        if needed_id in wrong:
            return Row(env_id, np.nan, False, None, f"not tried: {needed} must be right first")
    act = train(env_id, probe.steps, seed)
    if not callable(act):
        raise TypeError(f"train returned {act!r:.80}, which can't be called")
    scores = play(act, [probe(box) for _ in range(32)], seed)
    note = ", ".join(f"{score:.2f}" for score in scores)
    return Row(env_id, float(np.mean(scores)), *verdict(probe, scores), note)


def verdict(probe, scores) -> tuple[bool, str | None]:
    """right, mistake: the nearest of those that the probe knows, if one is near."""

    def distance(expected) -> np.ndarray:
        return np.abs(np.subtract(scores, expected))

    # Right agents were at most 0.12 away, those with a mistake of the probe's kind at least 0.4.
    if distance(probe.right).max() <= 0.25:
        return True, None
    nearest = min(probe.wrong, key=lambda mistake: distance(probe.wrong[mistake]).mean())
    return False, nearest if distance(probe.wrong[nearest]).max() <= 0.6 else None


def play(act, envs, seed: int = 1, steps: int = 128) -> list[float]:
    """The mean points of each kind of question, in N environments with autoreset NEXT_STEP."""
    N = len(envs)
    obs = np.stack([env.reset(seed=1000 * seed + i)[0] for i, env in enumerate(envs)])
    ended = np.zeros(N, bool)
    points: list[list[float]] = [[] for _ in envs[0].right]
    for t in range(steps):
        actions = np.asarray(act(obs.copy(), ended.copy() if t else None))
        if len(actions) != N:
            raise ValueError(f"act returned {len(actions)} actions for {N} environments")
        for i, env in enumerate(envs):
            if ended[i]:
                obs[i], _ = env.reset()
                ended[i] = False
                continue
            obs[i], _, terminated, truncated, _ = env.step(actions[i])
            ended[i] = terminated or truncated
            if env.scored:
                question, score = env.scored
                points[question].append(score)
    return [float(np.mean(x)) for x in points]


def line(row: Row) -> str:
    verdict = "right" if row.right else row.mistake or ("-" if np.isnan(row.score) else "wrong")
    return f"{row.probe:22} {verdict:45} {row.note}"


def check_memory(memory, input_size: int, hidden_size: int) -> None:
    """AssertionError, which says what is wrong, unless a memory keeps its contract:

    step(x (N, F), state) -> h (N, H), the next state
    forward(x (L, B, F), state, final (L, B)) -> h (L, B, H), where the state is zero after a final
        step; the output of a final step itself may be anything
    initial_state(N) -> zeros (rows, N, ...)
    """
    import torch

    def close(a, b) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    L, B, cut = 7, 3, 3
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(L, B, input_size, generator=generator)
    final = torch.zeros(L, B, dtype=torch.bool)
    final[cut, 0] = final[0, 1] = final[L - 1, 1] = True
    zero = memory.initial_state(B)
    assert not zero.any(), "initial_state isn't zero"
    assert zero.ndim >= 2 and zero.shape[1] == B, (
        f"initial_state is {tuple(zero.shape)}, not (rows, N, ...)"
    )
    state = zero
    with torch.no_grad():
        for _ in range(3):  # to a state that isn't zero
            h, state = memory.step(torch.randn(B, input_size, generator=generator), state)
            assert h.shape == (B, hidden_size), f"step returns h {tuple(h.shape)}, not (N, H)"
            shapes = f"{tuple(zero.shape)} -> {tuple(state.shape)}"
            assert state.shape == zero.shape, f"step changes the state's shape: {shapes}"

    # Replay is acting: step by step, zero after a final step
    acting, hs = state, []
    with torch.no_grad():
        for t in range(L):
            h, acting = memory.step(x[t], acting)
            hs.append(h)
            acting = acting.clone()
            acting[:, final[t]] = 0
    valid = ~final
    none = torch.zeros_like(final)
    with torch.no_grad():
        replayed = memory(x, state, final)
        assert replayed.shape == (L, B, hidden_size), (
            f"forward returns {tuple(replayed.shape)}, not (L, B, H)"
        )
        start = memory(x[:1], state, none[:1])
        assert close(start[0], hs[0]), "forward's first step isn't step's"
        before = close(replayed[: cut + 1, 2], torch.stack(hs)[: cut + 1, 2])
        assert before, "forward isn't step repeated, even where no episode ends"
        assert close(replayed[valid], torch.stack(hs)[valid]), (
            "forward doesn't reset after a final step"
        )

        # However large it was, nothing passes
        large = x.clone()
        large[: cut + 1, 0] = 1e6
        changed = memory(large, state, final)
        after = close(changed[cut + 1 :, 0], replayed[cut + 1 :, 0])
        assert after, "what was before a reset changes what is after it"
        assert close(changed[:, 2], replayed[:, 2]), "one environment changes another"

    # No gradient passes a reset; it does pass from step to step
    inputs, first = x.clone().requires_grad_(), state.clone().requires_grad_()
    memory(inputs, first, final)[cut + 1 :, 0].square().sum().backward()
    assert not inputs.grad[: cut + 1].any(), "a gradient passes over a reset"
    assert first.grad is None or not first.grad.any(), "a gradient passes over a reset to the state"
    memory.zero_grad()
    inputs = x.clone().requires_grad_()
    memory(inputs, state, final)[L - 1, 2].square().sum().backward()
    assert inputs.grad[L - 2, 2].any(), "no gradient flows through time"
    memory.zero_grad()


if __name__ == "__main__":
    for name, probe in PROBES.items():
        print(f"probes:{name}-v0, probes:{name}Box-v0")
        print(f"    {probe.__doc__.strip()}\n")
