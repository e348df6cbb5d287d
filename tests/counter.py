"""An environment for worker processes; it imports little, so that a worker starts fast."""

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Observation (episode seed, time); ends after ten steps. Told to, it dies, hangs or raises."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, trouble=""):
        self.trouble = trouble

    def reset(self, *, seed=None, options=None):
        self.seed, self.time = seed, 0
        if self.trouble == "dies in reset":
            os._exit(3)
        return np.array([seed % 1000, 0.0]), {}

    def step(self, action):
        self.time += 1
        if action[0] > 0.99:
            self.make_trouble()
        return np.array([self.seed % 1000, self.time]), float(self.time), self.time == 10, False, {}

    def make_trouble(self):
        if self.trouble == "dies":
            os._exit(3)
        if self.trouble == "hangs":
            time.sleep(60)
        if self.trouble == "raises":
            raise ZeroDivisionError("so told")


def fate(uid):
    """How long episode `uid` lasts, whether it terminates, and when its process dies if it does."""
    draw = np.random.default_rng(int(uid))
    length = int(draw.integers(1, 12))
    return length, bool(draw.random() < 0.5), int(draw.integers(1, length + 1)) if draw.random() < 0.02 else 0


class Ids(gymnasium.Env):
    """The observation is (episode's id in two parts, time), the reward 2^−time: every transition can be told."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, mortal=False):
        self.mortal, self.base, self.episode = mortal, 0, 0

    def reset(self, *, seed=None, options=None):
        if seed is None:
            self.episode += 1  # a vector environment that begins anew by itself gives no seed
        else:
            self.base, self.episode = seed, 0
        self.uid, self.time = 100_000 * self.base + self.episode, 0
        self.length, self.terminates, self.death = fate(self.uid)
        return self.obs(), {}

    def obs(self):
        return np.array([self.uid >> 20, self.uid & 0xFFFFF, self.time], np.float64)  # each exact in float32

    def step(self, action):
        self.time += 1
        if self.mortal and self.time == self.death:
            os._exit(9)
        over = self.time == self.length
        reward = 2.0**-self.time
        return self.obs(), reward, over and self.terminates, over and not self.terminates, {}


class Mortal(Counter):
    """In the episodes of some seeds, at their fourth step, its process ends, or hangs, so many times."""

    def __init__(self, folder="", victims=(), deaths=1, how="exit"):
        super().__init__()
        self.folder, self.victims, self.deaths, self.how = folder, victims, deaths, how

    def step(self, action):
        if self.time == 3 and self.seed in self.victims:
            died = len([name for name in os.listdir(self.folder) if name.startswith(f"{self.seed}-")])  # noqa: PTH208
            if died < self.deaths:
                open(f"{self.folder}/{self.seed}-{died}", "w").close()  # noqa: PTH123
                self.die()
        return super().step(action)

    def die(self):
        if self.how == "exit":
            os._exit(0)
        if self.how == "sys.exit":
            raise SystemExit(0)
        time.sleep(60)
