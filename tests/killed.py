"""Processes that are killed at random instants, and what is left of their runs.

    python tests/killed.py 100               kill -9 on four tasks, eager and compiled
    python tests/killed.py --instants 1000   the same on Pendulum-v1 alone, again and again
    python tests/killed.py --signals 50      SIGTERM and SIGINT
    python tests/killed.py --gpu 20          kill -9 on a GPU, recorded, in TF32 and bfloat16

`tests/test_resume.py` runs smaller versions of the last two.
"""

import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import t3d
from t3d import files
from t3d.trainer import Trainer

KNOBS = {"hidden": (8, 8), "batch_size": 8, "eval_episodes": 1, "device": "cpu", "threads": 1, "random_steps": 20}
KNOBS["accelerate"] = "eager"
SMALL = {**KNOBS, "log_every": 50, "eval_every": 120, "checkpoint_every": "70", "progress": False}


def rows_of(path):
    """metrics.jsonl without what depends on the clock or on the rows before."""
    rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row.keys() - {"steps_per_second", "chain", "n"}} for row in rows]


def end_of(path, capacity=10**9):
    """All that a run ended with: the state, the rows of the memory in their order, the metrics, the policies."""
    newest = max((Path(path) / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = files.read_json(newest / "manifest.json")
    state = {name: t.numpy().tobytes() for name, t in load_file(newest / manifest["state_file"]).items()}
    memory = {}
    for part in manifest["segments"]:
        for seed, rows in load_file(Path(path) / "replay" / part["file"]).items():
            memory[seed] = torch.cat([memory.get(seed, rows[:0]), rows])
    memory = {seed: rows[-capacity:].numpy().tobytes() for seed, rows in memory.items()}
    policies = {file.name: file.read_bytes() for file in sorted((Path(path) / "policies").glob("*.safetensors"))}
    return manifest["step"], state, memory, rows_of(path), policies


def in_a_process(work):
    """Do `work` in a copy of this process: what it imported is there already."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()
        os._exit(0)
    except SystemExit as leaving:
        os._exit(int(leaving.code or 0))
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(99)


REACHED = mmap.mmap(-1, 8)  # the step that a process had reached, for the one that killed it
STEP = Trainer.step


def go(env, path, **settings):
    """Start or resume, as somebody does who finds the folder."""

    def step(self):
        rows = STEP(self)
        REACHED[:] = self.state.step.to_bytes(8, "little")
        return rows

    Trainer.step = step
    if (path / "config.json").exists():
        t3d.resume(path, progress=False)
    else:
        shutil.rmtree(path, ignore_errors=True)
        t3d.train(env, out=path, **settings)


def die_in_a_save(operations):
    """Die at the so-many-th thing that is done to a file."""
    left = [operations]

    def counted(function):
        def call(*arguments, **more):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)

        return call

    for name in ("open", "write", "fsync", "posix_fallocate", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def killed_again_and_again(env, path, kills, seconds, **settings):
    """kill -9, half of them inside a save, until there were enough and the run is through; how many there were."""
    done = 0
    while True:
        inside = done % 2 == 0 and done < kills

        def work(inside=inside):
            if inside:
                die_in_a_save(random.randrange(60))
            go(env, path, **settings)

        before = newest_of(path)
        REACHED[:] = bytes(8)
        pid = in_a_process(work)
        if done < kills and not inside:
            time.sleep(random.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert newest_of(path) >= before  # no checkpoint that was there is lost
        redone = int.from_bytes(REACHED[:], "little") - max(newest_of(path), 0)
        assert redone <= int(settings["checkpoint_every"])
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return done
        done += 1


def newest_of(path):
    """The step of the newest checkpoint that has its manifest."""
    found = (path / "checkpoints").glob("step-*/manifest.json") if (path / "checkpoints").exists() else ()
    return max((int(file.parent.name.removeprefix("step-")) for file in found), default=-1)


def signals(times):
    """SIGTERM and SIGINT in turn: saved and ended within a second or so, each time further on."""
    settings = {**SMALL, "steps": 1_000_000, "checkpoint_every": "600s"}
    with tempfile.TemporaryDirectory() as folder:
        path, slowest = Path(folder) / "run", 0.0
        for turn in range(times):
            number, code = ((signal.SIGTERM, 143), (signal.SIGINT, 130))[turn % 2]
            before = newest_of(path)
            REACHED[:] = bytes(8)
            pid = in_a_process(lambda: go("Pendulum-v1", path, **settings))
            while not any(REACHED[:]):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.7))
            asked = time.monotonic()
            os.kill(pid, number)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert ended == code, f"{ended} instead of {code}"
            slowest = max(slowest, time.monotonic() - asked)
            assert newest_of(path) > before
        assert slowest < 30  # on a machine that does other work too
        print(f"{times} signals: saved and ended each time, after {slowest:.2f} s at most")


def instants(kills):
    settings = {**SMALL, "steps": 400, "checkpoint_every": "25"}
    with tempfile.TemporaryDirectory() as folder:
        whole = end_of(t3d.train("Pendulum-v1", out=Path(folder) / "whole", **settings).path)
        total = runs = 0
        while total < kills:
            path = Path(folder) / str(runs)
            total += killed_again_and_again("Pendulum-v1", path, min(kills, 40), 0.6, **settings)
            assert end_of(path) == whole
            shutil.rmtree(path)
            runs += 1
        print(f"{total} kills in {runs} runs: every run loadable each time, no checkpoint lost, the end bit for bit")


def stranger(path):
    """Somebody who may read the run but not write."""
    os.setuid(65534)
    for attempt in (lambda: t3d.resume(path, steps=200), lambda: t3d.train("Pendulum-v1", 100, out=path / "inside")):
        try:
            attempt()
        except t3d.T3DError as error:
            assert "Permission denied" in str(error)
        else:
            raise AssertionError("it was written")


def cases(kills, tasks):
    """Every task killed its share of times, and compared with the same run left alone."""
    each, total = -(-kills // len(tasks)), 0
    for env, settings in tasks:
        with tempfile.TemporaryDirectory() as folder:
            settings = {**SMALL, "steps": 1500, "checkpoint_every": "100", "eval_every": 500, **settings}
            start, done, same = time.monotonic(), 0, True
            whole = Path(folder) / "whole"
            killed_again_and_again(env, whole, 0, 0, **settings)  # in a process too: a GPU is not for two
            seconds = time.monotonic() - start
            while done < each and same:
                path = Path(folder) / f"killed {done}"
                done += killed_again_and_again(env, path, each - done, seconds, **settings)
                same = end_of(path) == end_of(whole)
            total += done
            how = ", ".join(
                f"{name} {settings[name]}"
                for name in ("num_envs", "async_eval", "accelerate", "precision")
                if name in settings
            )
            print(f"{env:<16}{how:<48}{done:4} kills   {'bit for bit' if same else 'DIFFERENT'}", flush=True)
            assert same
    print(f"{total} kills in all")


def everywhere(kills):
    envs = ("Pendulum-v1", "HalfCheetah-v5", "Ant-v5", "Hopper-v5")
    ways = ({"num_envs": 1}, {"num_envs": 4, "async_eval": "on"})
    modes = [{**way, "accelerate": mode} for way in ways for mode in ("eager", "compile")]
    cases(kills, [(env, mode) for env in envs for mode in modes])


def gpu(kills):
    mode = {"device": "cuda", "accelerate": "graph", "seeds": 2, "hidden": (64, 64), "batch_size": 64, "steps": 6000}
    precisions = [{**mode, "precision": precision, "checkpoint_every": "500"} for precision in ("tf32", "bf16")]
    cases(kills, [(env, precision) for env in ("HalfCheetah-v5", "Hopper-v5") for precision in precisions])


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {"--instants": (instants, int), "--signals": (signals, int), "--gpu": (gpu, int)}
    commands["--stranger"] = stranger, Path
    if sys.argv[1] in commands:
        command, kind = commands[sys.argv[1]]
        command(kind(sys.argv[2]))
    else:
        everywhere(int(sys.argv[1]))
