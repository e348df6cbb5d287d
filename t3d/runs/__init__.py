"""The run folder: what a run was asked to do, what it measured, what it learned.

config.json                        every setting, none left open; `t3d train --config` takes it
metrics.jsonl                      a row for each event, appended
policies/best-seed-K.safetensors   the actor at its best evaluation, and the .json that describes it
policies/last-seed-K.safetensors   the actor at the latest one
report/learning-curve.png          every seed and the mean
"""

from t3d.runs.folder import Run, claim

__all__ = ["Run", "claim"]
