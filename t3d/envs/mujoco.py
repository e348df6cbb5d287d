"""Gymnasium's MuJoCo tasks on `mujoco.batch`: N simulations on a pool of threads, bit for bit what Gymnasium does.

Gymnasium makes one environment, for the model, the numbers in the rewards and every reset; only stepping is done
here. A task below gives observation, reward and termination for all N at once, with the operations and in the order
of Gymnasium's class, because a sum in another order rounds differently. `benchmarks/environments.py --exact` compares
the two, and so does a test.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EpisodeSeed, Flags, Floats, Moved, refuse_unlearnable

Array = NDArray[np.float64]


class Simulations:
    """N simulations of one model, as the tasks see them: live arrays with a leading axis N."""

    def __init__(self, env: Any, count: int, threads: int) -> None:
        from mujoco.batch import Batch

        self.env = env  # Gymnasium's own environment, unwrapped: its model and its numbers
        self.dt = float(env.dt)
        self._batch = Batch(env.model, count, threads, persistent=True)
        self.qpos: Array = self._batch.bind("qpos")
        self.qvel: Array = self._batch.bind("qvel")
        self.ctrl: Array = self._batch.bind("ctrl")
        self.time: Array = self._batch.bind("time")
        self._bodies: dict[str, Array] = {}

    def bind(self, field: str) -> Array:
        return self._batch.bind(field)

    def body(self, name: str) -> Array:
        """(N, 3) positions of a body."""
        if name not in self._bodies:
            self._bodies[name] = self._batch.bind("xpos")[:, self.env.model.body(name).id]
        return self._bodies[name]

    def step(self, ids: NDArray[np.int32] | None) -> None:
        self._batch.step(ids, nstep=self.env.frame_skip)

    def place(self, i: int, qpos: Array, qvel: Array) -> None:
        """What Gymnasium's `reset` and `set_state` do, for one of them."""
        ids = np.array([i], np.int32)
        self._batch.reset(ids, stage=0)
        self.qpos[i], self.qvel[i] = qpos, qvel
        self._batch.forward(ids)


class Task:
    """Observation, reward and end of one kind of task."""

    def __init__(self, sims: Simulations) -> None:
        self.sims, self.env = sims, sims.env

    def before(self) -> Any:
        """What the reward needs to know from before the step."""
        return None

    def obs(self) -> Array:
        return np.concatenate([self.sims.qpos, self.sims.qvel], 1)

    def reward(self, action: Floats, before: Any, terminated: Flags) -> Array:
        raise NotImplementedError

    def terminated(self, obs: Array) -> Flags:
        return np.zeros(len(obs), bool)


class Runner(Task):
    """HalfCheetah and Swimmer: forward is good, effort costs."""

    hidden = 1  # positions that are not observed

    def before(self) -> Array:
        return self.sims.qpos[:, 0].copy()

    def obs(self) -> Array:
        return np.concatenate([self.sims.qpos[:, self.hidden :], self.sims.qvel], 1)

    def forward_reward(self, before: Array) -> Array:
        velocity: Array = (self.sims.qpos[:, 0] - before) / self.sims.dt
        return self.env._forward_reward_weight * velocity

    def control_cost(self, action: Floats) -> NDArray[Any]:
        return self.env._ctrl_cost_weight * np.square(action).sum(1)

    def reward(self, action: Floats, before: Array, terminated: Flags) -> Array:
        return self.forward_reward(before) - self.control_cost(action)


class Swimmer(Runner):
    hidden = 2


class Walker2d(Runner):
    """Walker2d and Hopper: and staying upright is good."""

    def obs(self) -> Array:
        return np.concatenate([self.sims.qpos[:, 1:], np.clip(self.sims.qvel, -10, 10)], 1)

    def healthy(self) -> Flags:
        z, angle = self.sims.qpos[:, 1], self.sims.qpos[:, 2]
        low_z, high_z = self.env._healthy_z_range
        low_angle, high_angle = self.env._healthy_angle_range
        return (low_z < z) & (z < high_z) & (low_angle < angle) & (angle < high_angle)

    def reward(self, action: Floats, before: Array, terminated: Flags) -> Array:
        alive = self.healthy() * self.env._healthy_reward
        return self.forward_reward(before) + alive - self.control_cost(action)

    def terminated(self, obs: Array) -> Flags:
        return ~self.healthy() & self.env._terminate_when_unhealthy


class Hopper(Walker2d):
    def healthy(self) -> Flags:
        state = np.concatenate([self.sims.qpos[:, 2:], self.sims.qvel], 1)
        low, high = self.env._healthy_state_range
        return super().healthy() & np.logical_and(low < state, state < high).all(1)


class Reacher(Task):
    def obs(self) -> Array:
        theta, qpos, qvel = self.sims.qpos[:, :2], self.sims.qpos, self.sims.qvel
        away = self.sims.body("fingertip") - self.sims.body("target")
        return np.concatenate([np.cos(theta), np.sin(theta), qpos[:, 2:], qvel[:, :2], away[:, :2]], 1)

    def reward(self, action: Floats, before: Any, terminated: Flags) -> Array:
        near = -lengths(self.sims.body("fingertip") - self.sims.body("target")) * self.env._reward_dist_weight
        return near + -np.square(action).sum(1) * self.env._reward_control_weight


class Pusher(Task):
    def obs(self) -> Array:
        sims = self.sims
        bodies = [sims.body("tips_arm"), sims.body("object"), sims.body("goal")]
        return np.concatenate([sims.qpos[:, :7], sims.qvel[:, :7], *bodies], 1)

    def reward(self, action: Floats, before: Any, terminated: Flags) -> Array:
        thing = self.sims.body("object")
        near = -lengths(thing - self.sims.body("tips_arm")) * self.env._reward_near_weight
        dist = -lengths(thing - self.sims.body("goal")) * self.env._reward_dist_weight
        ctrl = -np.square(action).sum(1) * self.env._reward_control_weight
        return dist + ctrl + near


class InvertedPendulum(Task):
    def terminated(self, obs: Array) -> Flags:
        return ~np.isfinite(obs).all(1) | (np.abs(obs[:, 1]) > 0.2)

    def reward(self, action: Floats, before: Any, terminated: Flags) -> Array:
        return (~terminated).astype(np.float64)


class InvertedDoublePendulum(Task):
    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.tip, self.force = sims.bind("site_xpos"), sims.bind("qfrc_constraint")

    def obs(self) -> Array:
        qpos, qvel = self.sims.qpos, self.sims.qvel
        clipped = [np.clip(qvel, -10, 10), np.clip(self.force, -10, 10)[:, :1]]
        return np.concatenate([qpos[:, :1], np.sin(qpos[:, 1:]), np.cos(qpos[:, 1:]), *clipped], 1)

    def terminated(self, obs: Array) -> Flags:
        return self.tip[:, 0, 2] <= 1

    def reward(self, action: Floats, before: Any, terminated: Flags) -> Array:
        rows = zip(self.tip[:, 0, 0], self.tip[:, 0, 2], *self.sims.qvel[:, 1:3].T, terminated, strict=True)
        return np.array([self._reward(*row) for row in rows])

    def _reward(self, x: Any, y: Any, v1: Any, v2: Any, over: Any) -> Any:
        # One by one: a NumPy scalar's ** 2 calls pow, an array's does not, and the last bit may differ.
        distance = 0.01 * x**2 + (y - 2) ** 2
        speed = 1e-3 * v1**2 + 5e-3 * v2**2
        return self.env._healthy_reward * int(not over) - distance - speed


def lengths(vectors: Array) -> Array:
    """`np.linalg.norm` of each: along an axis it would add up in another order."""
    return np.array([np.linalg.norm(vector) for vector in vectors])


TASKS: dict[str, Callable[[Simulations], Task]] = {
    "HalfCheetah-v5": Runner,
    "Hopper-v5": Hopper,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
    "InvertedPendulum-v5": InvertedPendulum,
    "Pusher-v5": Pusher,
    "Reacher-v5": Reacher,
    "Swimmer-v5": Swimmer,
    "Walker2d-v5": Walker2d,
}

# They observe contact forces (cfrc_ext), which a batch does not compute: Gymnasium's own class, on threads.
THREADED = ("Ant-v5", "Humanoid-v5", "HumanoidStandup-v5")


class MujocoBatch:
    """N copies of a MuJoCo task, stepped together."""

    lost = 0

    def __init__(
        self, name: str, env: "gymnasium.Env[Any, Any]", count: int, episode_seed: EpisodeSeed, threads: int
    ) -> None:
        assert env.spec is not None and env.spec.max_episode_steps is not None
        self.name, self.count, self.cut = name, count, 0
        self.obs_shape = env.observation_space.shape or ()
        self.obs_dim = self.obs_shape[0]
        self.actions = ActionRange.of(env.action_space, name)
        self._env, self._limit, self._episode_seed = env, env.spec.max_episode_steps, episode_seed
        self._sims = Simulations(env.unwrapped, count, threads)
        self._task = TASKS[env.spec.id](self._sims)
        self._episode, self._length = np.full(count, -1), np.zeros(count, np.int64)
        self._obs = np.zeros((count, self.obs_dim), np.float32)

    def reset(self) -> Floats:
        for i in range(self.count):
            self._reset_one(i)
        return self._obs.copy()

    def _reset_one(self, i: int) -> None:
        self._episode[i] += 1
        self._length[i] = 0
        obs, _ = self._env.reset(seed=self._episode_seed(i, int(self._episode[i])))
        data = self._sims.env.data
        self._sims.place(i, data.qpos, data.qvel)
        self._obs[i] = obs

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        sims = self._sims
        to_env: Floats = self.actions.to_env(np.asarray(actions))
        valid = np.ones(self.count, bool) if active is None else active.copy()
        ids = None if active is None else np.flatnonzero(active).astype(np.int32)
        before, clock = self._task.before(), sims.time.reshape(-1).copy()
        sims.ctrl[:] = to_env
        sims.step(ids)
        self._length += valid
        obs = self._task.obs()
        terminated = self._task.terminated(obs) & valid
        reward: Array = np.where(valid, self._task.reward(to_env, before, terminated), 0.0)
        truncated = (self._length >= self._limit) & valid
        final_obs: Floats = np.where(valid[:, None], obs, self._obs).astype(np.float32)
        # A simulation that went bad begins anew by itself, and its clock with it.
        broke_down = valid & (sims.time.reshape(-1) < clock + 0.5 * sims.dt)
        if broke_down.any():
            self.cut += int(broke_down.sum())
            final_obs[broke_down], reward[broke_down] = self._obs[broke_down], 0.0
            terminated &= ~broke_down
            truncated |= broke_down
            valid &= ~broke_down
        refuse_unlearnable(self._where, final_obs, reward)
        self._obs[:] = final_obs
        for i in np.flatnonzero(terminated | truncated):
            self._reset_one(int(i))
        return Moved(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"

    def close(self) -> None:
        self._env.close()
