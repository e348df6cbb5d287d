"""Gymnasium's MuJoCo tasks as functions of N simulations: observation, reward and end, bit for bit as there.

Each does, for all N at once, the operations of Gymnasium's class in their order, because a sum in another order rounds
differently; the numbers in the rewards are read from Gymnasium's own environment. `t3d doctor` compares the two, and so
does a test.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from t3d.envs.batch import Flags, Floats

Array = NDArray[np.float64]
FLOAT32 = np.dtype(np.float32)


class Simulations(Protocol):
    """N simulations of one model, as the tasks see them: live arrays with a leading axis N."""

    env: Any  # Gymnasium's own environment, unwrapped: its model and its numbers
    count: int
    dt: float
    qpos: Array
    qvel: Array
    ctrl: Array

    def bind(self, field: str) -> Array:
        """A field of MjData, live: (N, …)."""
        ...

    def clock(self) -> Array:
        """(N,) simulated seconds."""
        ...

    def total_time(self) -> float:
        """All clocks added up."""
        ...

    def contact_forces(self) -> Array:
        """(N, bodies, 6) `cfrc_ext`."""
        ...

    def step(self, ids: NDArray[np.int32] | None) -> None: ...

    def place(self, i: int, qpos: Array, qvel: Array) -> None:
        """What Gymnasium's `reset` and `set_state` do, for one of them."""
        ...


class Task:
    """Observation, reward and end of one kind of task."""

    ends = True  # whether it ever terminates

    def __init__(self, sims: Simulations) -> None:
        self.sims, self.env = sims, sims.env
        self.qpos, self.qvel = sims.qpos, sims.qvel

    def body(self, name: str | int) -> Array:
        """(N, 3) positions of a body, live."""
        return self.sims.bind("xpos")[:, self.env.model.body(name).id]

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
        self.weight, self.effort = self.env._forward_reward_weight, self.env._ctrl_cost_weight
        self.dt: Any = sims.dt
        if sims.count > 1:  # beside arrays a number of Python's is made into one at every use
            self.weight, self.effort = np.array(self.weight), np.array(self.effort, np.float32)
            self.dt = np.array(self.dt)

    def before(self) -> Any:
        # A number costs less than an array of one; NumPy's own, to be of float64 in what follows.
        return self.x[0] if self.sims.count == 1 else self.x.copy()

    def obs(self) -> Floats:
        return join([self.seen, self.qvel])

    def forward_reward(self, before: Any) -> Any:
        now = self.x[0] if self.sims.count == 1 else self.x
        return self.weight * ((now - before) / self.dt)

    def control_cost(self, action: Floats) -> Any:
        # For a single one over all axes: the sum is a number then, too.
        return self.effort * np.add.reduce(action * action, None if self.sims.count == 1 else 1)

    def reward(self, action: Floats, before: Array) -> Array:
        reward = self.forward_reward(before) - self.control_cost(action)
        return reward if self.sims.count > 1 else np.array([reward])


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
        self.x = self.body(self.env._main_body)[:, 0]
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
        forward = (self.before() - before) / self.sims.dt * self.env._forward_reward_weight
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
        self.tip, self.thing, self.goal = (self.body(name) for name in ("tips_arm", "object", "goal"))

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
    return np.concatenate(parts, 1, None, dtype=FLOAT32, casting="same_kind")


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
