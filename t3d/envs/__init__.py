"""Environments: one contract for every suite, an adapter a file. Nothing outside knows which suite it talks to.

A batch of N environments is stepped together with actions in [−1, 1]:

    obs = batch.reset()                                   (N, O) float32
    moved = batch.step(actions)                           actions (N, A)
    moved.obs          (N, O)  what to act on next: after an episode's end the first of the next one
    moved.reward       (N,)    float64
    moved.terminated   (N,)    the task ended: nothing follows, the value of what follows is 0
    moved.truncated    (N,)    a time limit cut the episode: the value of what follows counts
    moved.final_obs    (N, O)  the true observation after the action, also where the episode ended
    moved.valid        (N,)    false where the row is no transition and must not be stored

Episode e of environment i starts from the seed that `episode_seed(i, e)` gives, so what an environment does
is a function of its seeds and its actions. Observations and rewards that are not finite are refused.
"""

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EnvBatch, StepResult
from t3d.envs.factory import EnvFactory, Maker, env_factory, refuse_paths

__all__ = ["ActionRange", "EnvBatch", "EnvFactory", "Maker", "StepResult", "env_factory", "refuse_paths"]
