"""Gymnasium's MuJoCo tasks for N simulations: observation, reward and termination, bit-identical to Gymnasium.

Each class performs the operations of Gymnasium's class in the same order, because a sum in another order rounds
differently. The constants of the rewards come from Gymnasium's environment. `t3d doctor` and a test compare both.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from t3d.envs.batch import Flags, Floats

Array = NDArray[np.float64]
FLOAT32 = np.dtype(np.float32)


class Simulations(Protocol):
    """N simulations of one model: views of their data with a leading axis N."""

    env: Any  # Gymnasium's environment, unwrapped: the model and the constants
    count: int
    dt: float
    qpos: Array
    qvel: Array
    ctrl: Array

    def bind(self, field: str) -> Array:
        """A view (N, …) of a field of MjData."""
        ...

    def times(self) -> Array:
        """(N,) the simulated seconds."""
        ...

    def total_time(self) -> float:
        """The sum of `times`."""
        ...

    def contact_forces(self) -> Array:
        """(N, bodies, 6) `cfrc_ext`."""
        ...

    def step(self, ids: NDArray[np.int32] | None) -> None: ...

    def set_state(self, i: int, qpos: Array, qvel: Array) -> None:
        """Reset simulation i to a state, as Gymnasium's `reset` and `set_state` do."""
        ...


class Task:
    """Observation, reward and termination of a task."""

    ends = True  # whether it can terminate

    def __init__(self, sims: Simulations) -> None:
        self.sims, self.env = sims, sims.env
        self.qpos, self.qvel = sims.qpos, sims.qvel

    def body(self, name: str | int) -> Array:
        """A view (N, 3) of the positions of a body."""
        return self.sims.bind("xpos")[:, self.env.model.body(name).id]

    def before(self) -> Any:
        """The values from before the step that the reward needs."""
        return None

    def obs(self) -> Floats:
        return join([self.qpos, self.qvel])

    def reward(self, action: Floats, before: Any) -> Array:
        raise NotImplementedError

    def terminated(self) -> Flags:
        raise NotImplementedError


class HalfCheetah(Task):
    """Rewards forward speed; penalizes control."""

    ends = False
    hidden = 1  # leading positions that are not observed

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.x = self.qpos[:, 0]
        self.observed = self.qpos[:, self.hidden :]
        self.forward_weight, self.control_weight = self.env._forward_reward_weight, self.env._ctrl_cost_weight
        self.dt: Any = sims.dt
        if sims.count > 1:  # NumPy would convert a Python number at every use
            self.forward_weight = np.array(self.forward_weight)
            self.control_weight = np.array(self.control_weight, np.float32)
            self.dt = np.array(self.dt)

    def before(self) -> Any:
        # A scalar is faster than an array of one element; a NumPy scalar keeps float64.
        return self.x[0] if self.sims.count == 1 else self.x.copy()

    def obs(self) -> Floats:
        return join([self.observed, self.qvel])

    def forward_reward(self, before: Any) -> Any:
        now = self.x[0] if self.sims.count == 1 else self.x
        return self.forward_weight * ((now - before) / self.dt)

    def control_cost(self, action: Floats) -> Any:
        # With one simulation, sum over all axes: the result is a scalar.
        return self.control_weight * np.add.reduce(action * action, None if self.sims.count == 1 else 1)

    def reward(self, action: Floats, before: Array) -> Array:
        reward = self.forward_reward(before) - self.control_cost(action)
        return reward if self.sims.count > 1 else np.array([reward])


class Swimmer(HalfCheetah):
    hidden = 2


class Walker2d(HalfCheetah):
    """Also rewards staying upright."""

    ends = True

    def obs(self) -> Floats:
        return join([self.observed, np.clip(self.qvel, -10, 10)])

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
    """Also observes contact forces and penalizes them."""

    hidden = 2

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.x = self.body(self.env._main_body)[:, 0]
        self.forces = np.zeros(0)

    def obs(self) -> Floats:
        # Also used by `reward`: a step computes the observation first.
        self.forces = np.clip(self.sims.contact_forces(), *self.env._contact_force_range)
        return join([self.observed, self.qvel, self.forces[:, 1:].reshape(len(self.x), -1)])

    def healthy(self) -> Flags:
        low, high = self.env._healthy_z_range
        finite = np.isfinite(self.qpos).all(1) & np.isfinite(self.qvel).all(1)
        return finite & (low <= self.qpos[:, 2]) & (self.qpos[:, 2] <= high)

    def reward(self, action: Floats, before: Array) -> Array:
        forward = (self.before() - before) / self.sims.dt * self.env._forward_reward_weight
        alive = self.healthy() * self.env._healthy_reward
        contact = self.env._contact_cost_weight * sums(np.square(self.forces))
        return forward + alive - (self.control_cost(action) + contact)


class HumanoidStandup(Task):
    """Rewards height; penalizes control and impacts."""

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
        impact = self.env._impact_cost_weight * sums(np.square(self.forces))
        return up - self.control_cost() - np.clip(impact, *self.env._impact_cost_range) + 1


class Humanoid(HumanoidStandup):
    """Rewards forward speed and staying upright."""

    ends = True

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.centers, self.masses = sims.bind("xipos"), self.env.model.body_mass

    def before(self) -> Array:
        """x of the centre of mass, summed with `einsum` one by one, as in Gymnasium."""
        moments = [np.einsum("b,bj->j", self.masses, center) for center in self.centers]
        return (np.array(moments) / self.masses.sum())[:, 0]

    def healthy(self) -> Flags:
        low, high = self.env._healthy_z_range
        return (low < self.qpos[:, 2]) & (self.qpos[:, 2] < high)

    def reward(self, action: Floats, before: Array) -> Array:
        forward = self.env._forward_reward_weight * ((self.before() - before) / self.sims.dt)
        contact = self.env._contact_cost_weight * sums(np.square(self.forces))
        costs = self.control_cost() + np.clip(contact, *self.env._contact_cost_range)
        return forward + self.healthy() * self.env._healthy_reward - costs

    def terminated(self) -> Flags:
        return ~self.healthy() & self.env._terminate_when_unhealthy


class Reacher(Task):
    ends = False

    def __init__(self, sims: Simulations) -> None:
        super().__init__(sims)
        self.tip, self.goal = self.body("fingertip"), self.body("target")

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
        self.tip, self.object, self.goal = (self.body(name) for name in ("tips_arm", "object", "goal"))

    def obs(self) -> Floats:
        return join([self.qpos[:, :7], self.qvel[:, :7], self.tip, self.object, self.goal])

    def reward(self, action: Floats, before: Any) -> Array:
        near = -lengths(self.object - self.tip) * self.env._reward_near_weight
        dist = -lengths(self.object - self.goal) * self.env._reward_dist_weight
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
        # One by one: ** 2 calls pow for a NumPy scalar but not for an array, and the last bit can differ.
        distance = 0.01 * x**2 + (y - 2) ** 2
        speed = 1e-3 * v1**2 + 5e-3 * v2**2
        return self.env._healthy_reward * int(not over) - distance - speed


def join(parts: list[Array]) -> Floats:
    """Concatenate the parts of an observation in float32."""
    return np.concatenate(parts, 1, None, dtype=FLOAT32, casting="same_kind")


def lengths(vectors: Array) -> Array:
    """`np.linalg.norm` of each vector; with an axis it would sum in another order."""
    return np.array([np.linalg.norm(vector) for vector in vectors])


def sums(matrices: Array) -> Array:
    """`np.sum` of each matrix in (N, rows, columns), in memory order."""
    return matrices.reshape(len(matrices), -1).sum(1)


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
