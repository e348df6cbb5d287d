"""Gymnasium's MuJoCo tasks on `mujoco.batch`: N simulations on a pool of threads, bit for bit what Gymnasium does.

Gymnasium makes one environment, for the model, the numbers in the rewards and every reset; only stepping is done
here. A task below gives observation, reward and termination for all N at once, with the operations and in the order
of Gymnasium's class, because a sum in another order rounds differently. `t3d doctor` compares the two, and so does a
test.
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
        import mujoco
        from mujoco.batch import Batch

        self.env = env  # Gymnasium's own environment, unwrapped: its model and its numbers
        self.dt = float(env.dt)
        self._batch = Batch(env.model, count, threads, persistent=True)
        self.qpos: Array = self._batch.bind("qpos")
        self.qvel: Array = self._batch.bind("qvel")
        self.ctrl: Array = self._batch.bind("ctrl")
        self.clock: Array = self._batch.bind("time").reshape(-1)
        self._scratch = mujoco.MjData(env.model)
        self._forces = np.zeros((count, *self._scratch.cfrc_ext.shape))
        self._add_forces = mujoco.mj_rnePostConstraint

    def total_time(self) -> float:
        """All clocks added up."""
        return self.clock.item() if len(self.clock) == 1 else float(np.add.reduce(self.clock))

    def bind(self, field: str) -> Array:
        return self._batch.bind(field)

    def body(self, name: str | int) -> Array:
        """(N, 3) positions of a body."""
        return self._batch.bind("xpos")[:, self.env.model.body(name).id]

    def contact_forces(self) -> Array:
        """(N, bodies, 6) `cfrc_ext`, which a batch does not compute: one by one, from each simulation's whole data."""
        for i in range(len(self._forces)):
            self._batch.get_data(i, self._scratch)
            self._add_forces(self.env.model, self._scratch)
            self._forces[i] = self._scratch.cfrc_ext
        return self._forces

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

    ends = True  # whether it ever terminates

    def __init__(self, sims: Simulations) -> None:
        self.sims, self.env = sims, sims.env
        self.qpos, self.qvel = sims.qpos, sims.qvel

    def before(self) -> Any:
        """What the reward needs to know from before the step."""
        return None

    def obs(self) -> Floats:
        return join([self.qpos, self.qvel])

    def reward(self, action: Floats, before: Any) -> Array:
        raise NotImplementedError

    def terminated(self) -> Flags:
        raise NotImplementedError


class HalfCheetah(Task):
    """Forward is good, effort costs."""

    ends = False
    unseen = 1  # positions that are not observed

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.x = self.qpos[:, 0]
        self.seen = self.qpos[:, self.unseen :]

    def before(self) -> Array:
        return self.x.copy()

    def obs(self) -> Floats:
        return join([self.seen, self.qvel])

    def forward_reward(self, before: Array) -> Array:
        velocity: Array = self.x - before
        velocity /= self.sims.dt
        return velocity if self.env._forward_reward_weight == 1 else self.env._forward_reward_weight * velocity

    def control_cost(self, action: Floats) -> NDArray[Any]:
        return self.env._ctrl_cost_weight * np.add.reduce(action * action, 1)

    def reward(self, action: Floats, before: Array) -> Array:
        reward = self.forward_reward(before)
        reward -= self.control_cost(action)
        return reward


class Swimmer(HalfCheetah):
    unseen = 2


class Walker2d(HalfCheetah):
    """And staying upright is good."""

    ends = True

    def obs(self) -> Floats:
        return join([self.seen, np.clip(self.qvel, -10, 10)])

    def healthy(self) -> Flags:
        z, angle = self.qpos[:, 1], self.qpos[:, 2]
        low_z, high_z = self.env._healthy_z_range
        low_angle, high_angle = self.env._healthy_angle_range
        return (low_z < z) & (z < high_z) & (low_angle < angle) & (angle < high_angle)

    def reward(self, action: Floats, before: Array) -> Array:
        alive = self.healthy() * self.env._healthy_reward
        return self.forward_reward(before) + alive - self.control_cost(action)

    def terminated(self) -> Flags:
        return ~self.healthy() & self.env._terminate_when_unhealthy


class Hopper(Walker2d):
    def healthy(self) -> Flags:
        state = np.concatenate([self.qpos[:, 2:], self.qvel], 1)
        low, high = self.env._healthy_state_range
        return super().healthy() & np.logical_and(low < state, state < high).all(1)


class Ant(Walker2d):
    """And the ground's pushes are felt, and cost."""

    unseen = 2

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.x = sims.body(self.env._main_body)[:, 0]
        self.forces = np.zeros(0)

    def obs(self) -> Floats:
        # Read here and used in the reward too: a step asks for the observation first.
        self.forces = np.clip(self.sims.contact_forces(), *self.env._contact_force_range)
        return join([self.seen, self.qvel, self.forces[:, 1:].reshape(len(self.x), -1)])

    def healthy(self) -> Flags:
        low, high = self.env._healthy_z_range
        finite = np.isfinite(self.qpos).all(1) & np.isfinite(self.qvel).all(1)
        return finite & (low <= self.qpos[:, 2]) & (self.qpos[:, 2] <= high)

    def reward(self, action: Floats, before: Array) -> Array:
        forward = (self.x - before) / self.sims.dt * self.env._forward_reward_weight
        alive = self.healthy() * self.env._healthy_reward
        contact = self.env._contact_cost_weight * total(np.square(self.forces))
        return forward + alive - (self.control_cost(action) + contact)


class HumanoidStandup(Task):
    """Height is good, effort and impacts cost."""

    ends = False

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.inertia, self.velocity = sims.bind("cinert"), sims.bind("cvel")
        self.actuator = sims.bind("qfrc_actuator")
        self.forces = np.zeros(0)

    def obs(self) -> Floats:
        self.forces = self.sims.contact_forces()
        bodies = (part[:, 1:].reshape(len(part), -1) for part in (self.inertia, self.velocity))
        contact = self.forces[:, 1:].reshape(len(self.forces), -1)
        return join([self.qpos[:, 2:], self.qvel, *bodies, self.actuator[:, 6:], contact])

    def control_cost(self) -> Array:
        return self.env._ctrl_cost_weight * np.square(self.sims.ctrl).sum(1)

    def reward(self, action: Floats, before: Any) -> Array:
        up = (self.qpos[:, 2] - 0) / self.env.model.opt.timestep
        impact = self.env._impact_cost_weight * total(np.square(self.forces))
        return up - self.control_cost() - np.clip(impact, *self.env._impact_cost_range) + 1


class Humanoid(HumanoidStandup):
    """Walking: forward and upright are good."""

    ends = True

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.centers, self.masses = sims.bind("xipos"), self.env.model.body_mass

    def before(self) -> Array:
        """x of the centre of mass; with `einsum`, one by one, as Gymnasium adds it up."""
        sums = [np.einsum("b,bj->j", self.masses, center) for center in self.centers]
        return (np.array(sums) / self.masses.sum())[:, 0]

    def healthy(self) -> Flags:
        low, high = self.env._healthy_z_range
        return (low < self.qpos[:, 2]) & (self.qpos[:, 2] < high)

    def reward(self, action: Floats, before: Array) -> Array:
        forward = self.env._forward_reward_weight * ((self.before() - before) / self.sims.dt)
        contact = self.env._contact_cost_weight * total(np.square(self.forces))
        costs = self.control_cost() + np.clip(contact, *self.env._contact_cost_range)
        return forward + self.healthy() * self.env._healthy_reward - costs

    def terminated(self) -> Flags:
        return ~self.healthy() & self.env._terminate_when_unhealthy


class Reacher(Task):
    ends = False

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.tip, self.goal = sims.body("fingertip"), sims.body("target")

    def obs(self) -> Floats:
        theta, away = self.qpos[:, :2], self.tip - self.goal
        parts = [np.cos(theta), np.sin(theta), self.qpos[:, 2:], self.qvel[:, :2], away[:, :2]]
        return join(parts)

    def reward(self, action: Floats, before: Any) -> Array:
        near = -lengths(self.tip - self.goal) * self.env._reward_dist_weight
        return near + -np.square(action).sum(1) * self.env._reward_control_weight


class Pusher(Task):
    ends = False

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.tip, self.thing, self.goal = (sims.body(name) for name in ("tips_arm", "object", "goal"))

    def obs(self) -> Floats:
        return join([self.qpos[:, :7], self.qvel[:, :7], self.tip, self.thing, self.goal])

    def reward(self, action: Floats, before: Any) -> Array:
        near = -lengths(self.thing - self.tip) * self.env._reward_near_weight
        dist = -lengths(self.thing - self.goal) * self.env._reward_dist_weight
        return dist + -np.square(action).sum(1) * self.env._reward_control_weight + near


class InvertedPendulum(Task):
    def terminated(self) -> Flags:
        finite = np.isfinite(self.qpos).all(1) & np.isfinite(self.qvel).all(1)
        return ~finite | (np.abs(self.qpos[:, 1]) > 0.2)

    def reward(self, action: Floats, before: Any) -> Array:
        return (~self.terminated()).astype(np.float64)


class InvertedDoublePendulum(Task):
    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.tip, self.force = sims.bind("site_xpos")[:, 0], sims.bind("qfrc_constraint")

    def obs(self) -> Floats:
        angles = self.qpos[:, 1:]
        clipped = [np.clip(self.qvel, -10, 10), np.clip(self.force, -10, 10)[:, :1]]
        return join([self.qpos[:, :1], np.sin(angles), np.cos(angles), *clipped])

    def terminated(self) -> Flags:
        return self.tip[:, 2] <= 1

    def reward(self, action: Floats, before: Any) -> Array:
        rows = zip(self.tip[:, 0], self.tip[:, 2], *self.qvel[:, 1:3].T, self.terminated(), strict=True)
        return np.array([self._reward(*row) for row in rows])

    def _reward(self, x: Any, y: Any, v1: Any, v2: Any, over: Any) -> Any:
        # One by one: a NumPy scalar's ** 2 calls pow, an array's does not, and the last bit may differ.
        distance = 0.01 * x**2 + (y - 2) ** 2
        speed = 1e-3 * v1**2 + 5e-3 * v2**2
        return self.env._healthy_reward * int(not over) - distance - speed


def join(parts: list[Array]) -> Floats:
    """Parts of an observation side by side, in float32."""
    return np.concatenate(parts, 1, dtype=np.float32, casting="same_kind")


def lengths(vectors: Array) -> Array:
    """`np.linalg.norm` of each: along an axis it would add up in another order."""
    return np.array([np.linalg.norm(vector) for vector in vectors])


def total(tables: Array) -> Array:
    """`np.sum` of each table of (N, rows, columns), in the order of its memory."""
    return tables.reshape(len(tables), -1).sum(1)


TASKS: dict[str, Callable[[Simulations], Task]] = {
    f"{task.__name__}-v5": task
    for task in (
        Ant,
        HalfCheetah,
        Hopper,
        Humanoid,
        HumanoidStandup,
        InvertedDoublePendulum,
        InvertedPendulum,
        Pusher,
        Reacher,
        Swimmer,
        Walker2d,
    )
}


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
        self._episode, self._began = np.full(count, -1), np.zeros(count, np.int64)
        self._now = 0  # steps so far; an episode's length is this less the step it began at
        self._soonest = 0  # when the first episode under way reaches its limit
        self._all_began = 0  # the steps they began at, added up
        self._obs = np.zeros((count, self.obs_dim), np.float32)
        # What most steps answer: nobody ended, everybody moved. Shared, so nobody may write to them.
        self._no, self._yes = np.zeros(count, bool), np.ones(count, bool)
        self._no.flags.writeable = self._yes.flags.writeable = False

    def reset(self) -> Floats:
        for i in range(self.count):
            self._reset_one(i)
        self._count_steps()
        return self._obs.copy()

    @property
    def _length(self) -> NDArray[np.int64]:
        return self._now - self._began

    def _count_steps(self) -> None:
        self._soonest, self._all_began = int(self._began.min()) + self._limit, int(self._began.sum())

    def _reset_one(self, i: int) -> None:
        self._episode[i] += 1
        self._began[i] = self._now
        obs, _ = self._env.reset(seed=self._episode_seed(i, int(self._episode[i])))
        data = self._sims.env.data
        self._sims.place(i, data.qpos, data.qvel)
        self._obs[i] = obs

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        sims, task = self._sims, self._task
        played: Floats = self.actions.to_env(actions)
        before = task.before()
        sims.ctrl[...] = played
        sims.step(None if active is None else np.flatnonzero(active).astype(np.int32))
        self._now += 1
        if active is not None:
            self._began[~active] += 1  # they stand still
        obs = task.obs()
        reward = task.reward(played, before)
        terminated = task.terminated() if task.ends else self._no
        if active is None:
            # Is anything out of the ordinary? One look for all of them, because most steps are not.
            on_time = sims.total_time() > (self._now * self.count - self._all_began - 0.5) * sims.dt
            if self._now < self._soonest and on_time and not (task.ends and np.count_nonzero(terminated)):
                refuse_unlearnable(self._where, obs)  # the reward is made of the same numbers
                self._obs = obs
                return Moved(obs, reward, self._no, self._no, obs, self._yes)
        return self._ended(obs, reward, terminated, self._yes if active is None else active)

    def _ended(self, obs: Floats, reward: Array, terminated: Flags, active: Flags) -> Moved:
        """The rest of a step in which some episodes end, some simulation broke down, or not all were to move."""
        # A simulation that goes bad begins anew by itself, and its clock with it.
        broke_down = active & (self._sims.clock < (self._length - 0.5) * self._sims.dt)
        self.cut += int(broke_down.sum())
        valid = active & ~broke_down
        final_obs = np.where(valid[:, None], obs, self._obs)
        reward = np.where(valid, reward, 0.0)
        terminated = terminated & valid
        truncated = (self._length >= self._limit) & active | broke_down
        refuse_unlearnable(self._where, final_obs, reward)
        self._obs = final_obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            self._reset_one(int(i))
        self._count_steps()
        return Moved(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"

    def close(self) -> None:
        self._env.close()
