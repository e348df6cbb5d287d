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
