"""Compares T3D's environments with those of `gymnasium.make`, bit for bit."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from t3d.envs.batch import EnvBatch
from t3d.envs.factory import EnvFactory
from t3d.envs.slots import Raised, calling, close_env
from t3d.errors import T3DError
from t3d.layout import Layout, flatten


def first_difference(factory: EnvFactory, steps: int, count: int = 3) -> tuple[str, int]:
    """Play random actions in both. Return where they first differ (or ""), and the number of episodes that ended."""
    envs = factory.batch(count, _episode_seed)
    reference: list[gymnasium.Env[Any, Any]] = []
    try:
        reference += [factory.one() for _ in range(count)]
        difference, ends = calling(lambda: _compare(envs, reference, steps))
        return difference, ends
    except Raised as problem:
        if isinstance(problem.__cause__, T3DError):
            raise problem.__cause__ from None
        raise T3DError(f"{factory.name} cannot be compared: {problem}") from problem
    finally:
        envs.close()
        for env in reference:
            close_env(env)


def _compare(envs: EnvBatch, reference: "list[gymnasium.Env[Any, Any]]", steps: int) -> tuple[str, int]:
    episodes, ends = [0] * envs.count, 0
    obs = envs.reset()
    if not all(_same(obs[i], env.reset(seed=_episode_seed(i, 0))[0], envs.layout) for i, env in enumerate(reference)):
        return "the first observation", ends
    generator = np.random.default_rng(0)
    for step in range(1, steps + 1):
        actions = generator.uniform(-1, 1, (envs.count, envs.actions.dim)).astype(np.float32)
        result, env_actions = envs.step(actions), envs.actions.to_env(actions)
        for i, env in enumerate(reference):
            final_obs, reward, terminated, truncated, _ = env.step(env_actions[i])
            same = _same(result.final_obs[i], final_obs, envs.layout) and result.reward[i] == reward
            same &= result.terminated[i] == terminated and result.truncated[i] == truncated
            if terminated or truncated:
                ends, episodes[i] = ends + 1, episodes[i] + 1
                final_obs, _ = env.reset(seed=_episode_seed(i, episodes[i]))
            if not (same and _same(result.obs[i], final_obs, envs.layout)):
                return f"step {step} of environment {i}", ends
    return "", ends


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
