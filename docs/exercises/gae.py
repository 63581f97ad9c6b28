"""Exercise 1. Fill in compute_gae, then: python docs/exercises/gae.py"""

import numpy as np


def compute_gae(rewards, values, terminated, done, gamma: float, lam: float) -> np.ndarray:
    """Advantages (T, N). values is (T + 1, N), the rest (T, N); done is terminated or truncated.
    values[t + 1] is the value of what step t returned, be it an episode's last observation."""
    advantages = np.zeros_like(rewards)
    next_advantage = np.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        # YOUR CODE HERE: next_advantage, the advantage (N,) of step t
        advantages[t] = next_advantage
    return advantages


def check(compute_gae) -> list[str]:
    """What is wrong with it, compared with the sum of all later deltas; nothing, if all is right."""
    rng, wrong = np.random.default_rng(1), []
    T, N, gamma, lam = 12, 4, 0.9, 0.8
    rewards, values = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N))
    ends = rng.random((T, N)) < 0.3
    never = np.zeros((T, N), bool)
    for what, terminated, truncated in [
        ("nothing ends", never, never),
        ("episodes terminate", ends, never),
        ("episodes are truncated", never, ends),
    ]:
        done = terminated | truncated
        expected = np.zeros((T, N))
        for t, n in np.ndindex(T, N):
            weight = 1.0
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, n] else values[k + 1, n]
                expected[t, n] += weight * (rewards[k, n] + gamma * bootstrap - values[k, n])
                weight *= gamma * lam
                if done[k, n]:
                    break
        found = compute_gae(rewards.copy(), values.copy(), terminated, done, gamma, lam)
        if not np.allclose(found, expected):
            t, n = np.argwhere(~np.isclose(found, expected))[-1]
            wrong.append(
                f"where {what}, A[{t}, {n}] is {found[t, n]:.3f}, not {expected[t, n]:.3f}"
            )
    return wrong


if __name__ == "__main__":
    print("\n".join(check(compute_gae)) or "right")
