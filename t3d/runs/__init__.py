"""The run folder: the settings, metrics, policies and checkpoints of a run.

config.json                        every setting, resolved; `t3d train --config` reads it
metrics.jsonl                      one appended row per event
policies/best-seed-K.safetensors   the actor at its best evaluation, with a .json that describes it
policies/last-seed-K.safetensors   the actor at the last evaluation
report/learning-curve.png          the returns of every seed and their mean
checkpoints/, replay/              the state of the run, for `t3d resume`
"""

from t3d.runs.folder import Run, claim

__all__ = ["Run", "claim"]
