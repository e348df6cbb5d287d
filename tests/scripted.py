"""Environments made for tests: one whose numbers say which transition they belong to, and the probes."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Scripted(gymnasium.Env):
    """Episode e lasts 3 + e % 4 steps; even episodes terminate, odd ones are truncated.

    The observation is (episode, time), the reward 100 · episode + time, so each transition can be told.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 5.0], np.float32))

    def __init__(self):
        self.episode = -1
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.time = 0
        return self._obs(), {}

    def step(self, action):
        self.actions.append(action)
        self.time += 1
        over = self.time == 3 + self.episode % 4
        even = self.episode % 2 == 0
        return self._obs(), 100.0 * self.episode + self.time, over and even, over and not even, {}

    def _obs(self):
        return np.array([self.episode, self.time], np.float64)


class Probe(gymnasium.Env):
    """The smallest tasks whose values are known in advance, one thing to learn in each."""

    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.first()
        return self.obs, {}

    def first(self):
        return np.zeros(1, np.float32)

    def random_sign(self):
        return np.array([self.np_random.choice([-1.0, 1.0])], np.float32)


class ConstantReward(Probe):
    """One step, reward 1: Q = 1. If it fails, the critic loss or its optimizer is broken."""

    def step(self, action):
        return self.obs, 1.0, True, False, {}


class RewardFromObservation(Probe):
    """One step, reward = observation = ±1: Q = observation. If it fails, the critic does not see its input."""

    def first(self):
        return self.random_sign()

    def step(self, action):
        return self.obs, float(self.obs[0]), True, False, {}


class TwoSteps(Probe):
    """Reward 0 at observation 0, then 1 at observation 1: Q(0) = discount. If it fails, step 9 is broken."""

    def step(self, action):
        if self.obs[0] == 0:
            self.obs = np.ones(1, np.float32)
            return self.obs, 0.0, False, False, {}
        return self.obs, 1.0, True, False, {}


class RewardFromAction(Probe):
    """One step, reward −(action − 1)²: the actor goes to 1. If it fails, step 13 is broken."""

    def step(self, action):
        return self.obs, -float((action[0] - 1) ** 2), True, False, {}


class RewardFromBoth(Probe):
    """One step, reward −(action − observation)²: the actor follows what it sees."""

    def first(self):
        return self.random_sign()

    def step(self, action):
        return self.obs, -float((action[0] - self.obs[0]) ** 2), True, False, {}


class Reach(gymnasium.Env):
    """A point on a plane is to go to a goal, and is told of nothing but whether it is there."""

    limit = 15

    def __init__(self):
        box = gymnasium.spaces.Box(-1, 1, (2,))
        parts = {"observation": box, "achieved_goal": box, "desired_goal": box}
        self.observation_space = gymnasium.spaces.Dict(parts)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = np.zeros(2, np.float32), self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.time = 0
        return self._seen(), {}

    def _seen(self):
        return {"observation": self.at.copy(), "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return float(np.linalg.norm(achieved_goal - desired_goal) < 0.1) - 1

    def step(self, action):
        self.at = np.clip(self.at + 0.2 * np.asarray(action, np.float32), -1, 1)
        self.time += 1
        return self._seen(), self.compute_reward(self.at, self.goal, {}), False, self.time >= self.limit, {}


class Shown(gymnasium.Env):
    """Episodes last `lengths` in turn, and are truncated; pixels say which copy, episode and step is seen.

    With `numbers` it observes a dict: the image, and the step again as a number.
    """

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    copies = 0

    def __init__(self, lengths=(3, 5, 4), side=8, numbers=False):
        self.lengths, self.side, self.numbers = lengths, side, numbers
        Shown.copies += 1
        self.copy, self.episode = Shown.copies % 200, -1
        image = spaces.Box(0, 255, (side, side, 1), np.uint8)
        number = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"camera": image, "clock": number}) if numbers else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action):
        self.time += 1
        over = self.time >= self.lengths[(self.episode + self.copy) % len(self.lengths)]
        return self._seen(), float(self.time), False, over, {}

    def _seen(self):
        image = np.zeros((self.side, self.side, 1), np.uint8)
        image[0, :4, 0] = self.copy, self.episode % 256, self.time % 256, self.time // 256
        return {"camera": image, "clock": np.array([self.time], np.float32)} if self.numbers else image


class Lamp(gymnasium.Env):
    """One step: the left or the right half of the image is lit, and the action is to be −1 or 1."""

    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    observation_space = spaces.Box(0, 255, (12, 12, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.choice([-1, 1]))
        return self.lit(self.side), {}

    def lit(self, side):
        image = np.zeros((12, 12, 3), np.uint8)
        image[:, 6 if side > 0 else 0 : 12 if side > 0 else 6] = 255
        return image

    def step(self, action):
        return self.lit(self.side), -float((action[0] - self.side) ** 2), True, False, {}


class Sweep(Lamp):
    """Two steps: one half is lit, then all. In the second, the action is to be the first one's side: needs a stack."""

    def reset(self, *, seed=None, options=None):
        self.first = True
        return super().reset(seed=seed)

    def step(self, action):
        everything = np.full((12, 12, 3), 255, np.uint8)
        if self.first:
            self.first = False
            return everything, 0.0, False, False, {}
        return everything, -float((action[0] - self.side) ** 2), True, False, {}


class Dot(gymnasium.Env):
    """A dot that the action moves, seen in a image, with a number beside it; episodes of 1 to 20 steps."""

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (12, 12, 3), np.uint8), "speed": spaces.Box(-9, 9, (1,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.at, self.speed = int(self.np_random.integers(1, 21)), self.np_random.uniform(0, 12), 0.0
        return self._seen(), {}

    def step(self, action):
        self.speed = float(action[0])
        self.at, self.left = (self.at + self.speed) % 12, self.left - 1
        return self._seen(), -abs(self.at - 6), False, self.left <= 0, {}

    def _seen(self):
        image = np.zeros((12, 12, 3), np.uint8)
        image[:, int(self.at)] = 255, self.left, 60
        return {"camera": image, "speed": np.array([self.speed], np.float32)}
