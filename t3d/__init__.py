"""T3D: Twin Delayed Deep Deterministic policy gradient, in fifteen steps.

    run = t3d.train("Pendulum-v1", steps=10_000, seeds=3)
    policy = t3d.load(run)
    action = policy(obs)

`ReplayBuffer`, `Actor`, `Critic` and `T3D` are the documents' interface to the same algorithm.
"""

from t3d.algorithm import variant
from t3d.api import load, resume, train
from t3d.custom_network import Network
from t3d.documents import T3D, Actor, Critic, ReplayBuffer
from t3d.errors import T3DError
from t3d.policy import Policy
from t3d.runs.folder import Run

__all__ = [
    "T3D",
    "Actor",
    "Critic",
    "Network",
    "Policy",
    "ReplayBuffer",
    "Run",
    "T3DError",
    "load",
    "resume",
    "train",
    "variant",
]
__version__ = "0.2.0"
