"""Is the path that a task takes the same as `gymnasium.make`, bit for bit, on this machine and with these versions?"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from t3d.envs.factory import EnvFactory
from t3d.layout import Layout, flatten


def first_difference(source: EnvFactory, steps: int, count: int = 3) -> tuple[str, int]:
    """Random actions on both: where they first differ, or nothing; and how many episodes ended on the way."""
    envs = source.batch(count, _episode_seed)
    theirs, episodes, ends = [source.one() for _ in range(count)], [0] * count, 0
    try:
        obs = envs.reset()
        if not all(_same(obs[i], env.reset(seed=_episode_seed(i, 0))[0], envs.layout) for i, env in enumerate(theirs)):
            return "the first observation", ends
        draw = np.random.default_rng(0)
        for step in range(1, steps + 1):
            actions = draw.uniform(-1, 1, (count, envs.actions.dim)).astype(np.float32)
            moved, played = envs.step(actions), envs.actions.to_env(actions)
            for i, env in enumerate(theirs):
                last, reward, terminated, truncated, _ = env.step(played[i])
                same = _same(moved.final_obs[i], last, envs.layout) and moved.reward[i] == reward
                same &= moved.terminated[i] == terminated and moved.truncated[i] == truncated
                if terminated or truncated:
                    ends, episodes[i] = ends + 1, episodes[i] + 1
                    last, _ = env.reset(seed=_episode_seed(i, episodes[i]))
                if not (same and _same(moved.obs[i], last, envs.layout)):
                    return f"step {step} of environment {i}", ends
        return "", ends
    finally:
        envs.close()
        for env in theirs:
            env.close()


def _episode_seed(env: int, episode: int) -> int:
    return 1000 * env + episode


def _same(row: NDArray[np.float32], obs: Any, layout: Layout) -> bool:
    return np.array_equal(row, flatten(layout, obs).astype(np.float32))


def mujoco_tasks() -> list[str]:
    """The newest version of each of Gymnasium's MuJoCo tasks."""
    return sorted(
        name
        for name, spec in gymnasium.registry.items()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco") and name.endswith("-v5")
    )
