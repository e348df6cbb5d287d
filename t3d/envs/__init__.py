"""Environments: one interface for all suites, one adapter per file. Code outside is independent of the suite.

A batch steps N environments together, with actions in [−1, 1]:

    obs = batch.reset()                                   (N, O) float32
    result = batch.step(actions)                          actions (N, A)
    result.obs         (N, O)  the observation to act on; after an episode's end, the first of the next episode
    result.reward      (N,)    float64
    result.terminated  (N,)    the task ended: the next state has value 0
    result.truncated   (N,)    a time limit ended the episode: the next state keeps its value
    result.final_obs   (N, O)  the observation after the action, also at an episode's end
    result.valid       (N,)    False where the row is not a transition and must not be stored

Episode e of environment i is reset with the seed `episode_seed(i, e)`, so seeds and actions determine all results.
Observations and rewards that are not finite raise EnvError.
"""

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EnvBatch, StepResult
from t3d.envs.factory import EnvFactory, Maker, env_factory, refuse_paths

__all__ = ["ActionRange", "EnvBatch", "EnvFactory", "Maker", "StepResult", "env_factory", "refuse_paths"]
