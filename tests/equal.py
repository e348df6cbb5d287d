"""Trains small configurations in two checkouts and compares every number that they write.

    python tests/equal.py BASE                 BASE is another checkout, as made by `git worktree add BASE COMMIT`
    python tests/equal.py BASE --only pixels
    python tests/equal.py BASE --keep DIR      keep what BASE writes in DIR, and use it again the next time

Compares the rows of metrics.jsonl, the policies, the tensors of the last checkpoint, and the rows of the replay buffer,
value by value. Clock fields, versions and hashes are left aside. `RENAMED` maps the names that BASE uses to ours.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from safetensors.torch import load_file

SMALL = {
    "steps": 400,
    "random_steps": 40,
    "hidden": (16, 16),
    "batch_size": 16,
    "eval_every": 200,
    "eval_episodes": 2,
    "log_every": 100,
    "checkpoint_every": "150",
    "device": "cpu",
    "threads": 1,
    "accelerate": "eager",
}
PENDULUM = {"env": "Pendulum-v1"}

# What BASE calls an option, a row's field, a card's field, or the beginning of a tensor's name.
RENAMED_OPTIONS = {"relabel": "her", "eval_beside": "async_eval"}
RENAMED_FIELDS = {"came": "discounted_return", "expected": "q_predicted"}
RENAMED_TENSORS = {
    "earned$": "update_credit",
    "history$": "collector.transitions.steps",
    "played$": "collector.actions.steps",
    "steps_under_way\\.": "collector.n_step.",
    "envs\\.episodes$": "collector.episodes",
    "(obs|episode_return|episode_length|fingerprint|env_errors)$": r"collector.\1",
    "(agent|memory|sums)\\.": r"learner.\1.",
    "playing\\.normalizer\\.": "pending_eval.scaling.",
    "playing\\.": "pending_eval.",
    r"learner\.memory\.(count|mean|squares)$": r"learner.memory.statistics.\1",
    r"learner\.memory\.framed$": "learner.memory.frames.stored",
    r"learner\.memory\.(recent|lost|modulus)$": r"learner.memory.frames.\1",
    r"(.*\.)?eye\.": r"\1encoder.",
    "eye_": "encoder_",
}
ASIDE = {"steps_per_second", "chain", "n", "run", "format", "algorithm"}


class Goals(gymnasium.Env):
    """A point on a line that is to reach a goal; observations are a Dict, as those of goal tasks are."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self):
        box = spaces.Box(-2, 2, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = spaces.Box(-0.2, 0.3, (1,), np.float32)

    def _obs(self):
        place = self.place.astype(np.float32)
        return {"observation": place, "achieved_goal": place, "desired_goal": self.goal}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = np.zeros(1), self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._obs(), {}

    def compute_reward(self, achieved, desired, info):
        return -float(np.abs(achieved - desired).sum() > 0.1)

    def step(self, action):
        self.place = np.clip(self.place + action, -2, 2)
        obs = self._obs()
        return obs, self.compute_reward(obs["achieved_goal"], self.goal, {}), False, False, {}


class Interrupted(PendulumEnv):
    """Pendulum that sends Ctrl-C to its process in its 157th step, the first time."""

    steps, done = 0, False

    def step(self, action):
        Interrupted.steps += 1
        if Interrupted.steps == 157 and not Interrupted.done:
            Interrupted.done = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class OwnNetwork(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(inputs, 12), torch.nn.SiLU(), torch.nn.LayerNorm(12), torch.nn.Linear(12, outputs)
        )

    def forward(self, x):
        return self.layers(x)


gymnasium.register("GoalLine-v0", Goals, max_episode_steps=30)
gymnasium.register("Interrupted-v0", Interrupted, max_episode_steps=200)

CASES = {
    "pendulum": PENDULUM,
    "pendulum-compiled": {**PENDULUM, "accelerate": "compile"},
    "halfcheetah-3-seeds": {"env": "HalfCheetah-v5", "seeds": 3},
    "halfcheetah-compiled": {"env": "HalfCheetah-v5", "seeds": 2, "accelerate": "compile", "threads": 2},
    "hopper-4-envs-3-step": {"env": "Hopper-v5", "num_envs": 4, "n_step": 3},
    "workers": {**PENDULUM, "workers": 2, "num_envs": 2},
    "vector-env": {"env": lambda: gymnasium.make_vec("Pendulum-v1", num_envs=2)},
    "documents": {**PENDULUM, "preset": "documents", "seeds": 2, "hidden": (16, 16), "random_steps": 200, "steps": 800},
    "paper-hopper": {"env": "Hopper-v5", "preset": "paper", "seeds": 2, "hidden": (16, 16), "random_steps": 100},
    "hindsight": {"env": "GoalLine-v0", "her": 4, "buffer_size": 900},
    "pixels": {**PENDULUM, "pixels": 16, "steps": 300, "seeds": 2, "buffer_size": 150, "frame_stack": 2},
    "pixels-separate": {**PENDULUM, "pixels": 16, "steps": 200, "encoder": "separate", "n_step": 2, "num_envs": 2},
    "normalized": {"env": "HalfCheetah-v5", "normalize_obs": "on", "seeds": 2},
    "layer-norm": {**PENDULUM, "critic_norm": "layer"},
    "one-critic": {**PENDULUM, "critics": 1, "reward_scale": 0.1},
    "own-network": {**PENDULUM, "network": OwnNetwork, "seeds": 2},
    "async-eval": {"env": "Hopper-v5", "async_eval": "on", "eval_values": "on", "seeds": 2},
    "overlap": {"env": "Hopper-v5", "overlap": "on", "updates_per_step": 0.5},
    "interrupted": {"env": "Interrupted-v0", "seeds": 2},
    "longer": {**PENDULUM, "steps": 200},
}


def run(name, out):
    """Train one configuration with the t3d that PYTHONPATH leads to."""
    import dataclasses

    import t3d
    from t3d.config import Config

    known = {field.name for field in dataclasses.fields(Config)} | {"env", "seeds", "preset", "network"}
    before = {new: old for old, new in RENAMED_OPTIONS.items()}
    options = {key if key in known else before[key]: value for key, value in {**SMALL, **CASES[name]}.items()}
    env = options.pop("env")
    env = env() if callable(env) and not isinstance(env, type) else env
    try:
        t3d.train(env, out=out, progress=False, **options)
    except KeyboardInterrupt:
        assert name == "interrupted"
        t3d.resume(out, progress=False)
    if name == "longer":
        t3d.resume(out, steps=400, progress=False)


def renamed(names, name):
    """The name that we use for what BASE calls `name`."""
    for old, new in names.items():
        name = re.sub(rf"^{old}", new, name)
    return name


def written(path, base):
    """Every number of a run folder by a name."""
    fields, tensors = (RENAMED_FIELDS, RENAMED_TENSORS) if base else ({}, {})
    found = {}
    for i, line in enumerate((path / "metrics.jsonl").read_text().splitlines()):
        for key, value in json.loads(line).items():
            found[f"metrics row {i} {fields.get(key, key)}"] = None if key in ASIDE else value
    for file in sorted((path / "policies").glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            found[f"{file.name} {renamed(tensors, key)}"] = tensor.numpy().tobytes()
        for key, value in json.loads(file.with_suffix(".json").read_text()).items():
            value = json.loads(json.dumps(value).replace('"picture"', '"image"')) if base else value
            found[f"{file.name} card {fields.get(key, key)}"] = None if key in ASIDE else value
    newest = max((path / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = json.loads((newest / "manifest.json").read_text())
    for key, tensor in load_file(newest / manifest["state_file"]).items():
        found[f"{newest.name} {renamed(tensors, key)}"] = tensor.numpy().tobytes()
    for part in manifest["segments"]:
        for ring, rows in load_file(path / "replay" / part["file"]).items():
            name = f"replay {ring}"
            found[name] = found.get(name, b"") + rows.numpy().tobytes()
    return found


def start(checkout, name, out):
    environment = {**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--run", name, str(out)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent
    )


def compare(name, base, folder, kept):
    """The names of what differs, and how many values were compared."""
    checkouts = {kept / f"{name}-base": base, folder / f"{name}-ours": Path(__file__).resolve().parent.parent}
    processes = {out: start(path, name, out) for out, path in checkouts.items() if not out.exists()}
    for out, process in processes.items():
        text, _ = process.communicate()
        if process.returncode:
            return [f"failed in {out.name}: {text.strip()}"], 0
    one, two = (written(out, path is base) for out, path in checkouts.items())
    alone = [f"only in base: {key}" for key in one.keys() - two.keys()]
    alone += [f"only in ours: {key}" for key in two.keys() - one.keys()]
    return alone + [f"differs: {key}" for key in one.keys() & two.keys() if one[key] != two[key]], len(one)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    unequal = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            different, count = compare(
                name, arguments.base.resolve(), Path(folder), (arguments.keep or Path(folder)).resolve()
            )
            unequal += bool(different)
            print(f"{name:<24}{f'equal ({count} values)' if not different else 'DIFFERENT'}", flush=True)
            for line in sorted(different)[:12]:
                print(f"    {line}")
    return int(unequal > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            run(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
