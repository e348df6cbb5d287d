"""A run that is stopped or killed anywhere and resumed is the run that nobody disturbed, bit for bit.

python tests/test_resume.py 100               kill -9 at random instants, on four tasks, eager and compiled
python tests/test_resume.py --instants 1000   the same on Pendulum-v1 alone, again and again
python tests/test_resume.py --signals 50      SIGTERM and SIGINT
"""

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from scripted import Scripted

import t3d
from t3d import files, states, training
from t3d.accelerate import accelerate
from t3d.config import Config, settle
from t3d.display import Display
from t3d.envs import open_source
from t3d.evaluation import Evaluator
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run

KNOBS = {"hidden": (8, 8), "batch_size": 8, "eval_episodes": 1, "device": "cpu", "threads": 1, "random_steps": 20}
KNOBS["accelerate"] = "eager"
SMALL = {**KNOBS, "log_every": 50, "eval_every": 120, "checkpoint_every": "70", "progress": False}


def rows_of(path):
    """metrics.jsonl without the one number that depends on the clock."""
    rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "steps_per_second"} for row in rows]


def end_of(path, capacity=10**9):
    """All that a run ended with: the state, the rows of the memory in their order, the metrics, the policies."""
    newest = max((Path(path) / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = files.read_json(newest / "manifest.json")
    state = {name: t.numpy().tobytes() for name, t in files.read_tensors(newest / manifest["state_file"]).items()}
    memory = {}
    for part in manifest["segments"]:
        for seed, rows in files.read_tensors(Path(path) / part["file"]).items():
            memory[seed] = torch.cat([memory.get(seed, rows[:0]), rows])
    memory = {seed: rows[-capacity:].numpy().tobytes() for seed, rows in memory.items()}
    policies = {file.name: file.read_bytes() for file in sorted((Path(path) / "policies").glob("*.safetensors"))}
    return manifest["step"], state, memory, rows_of(path), policies


class Interrupted:
    """Says stop once, after it was asked so many times."""

    def __init__(self, after):
        self.left = after

    def __call__(self):
        self.left -= 1
        return self.left < 0


def begin(env, seeds, **knobs):
    config = settle(
        Config(**{**KNOBS, "log_every": 50, "eval_every": 120, "steps": 300, **knobs}), "td3", "x", len(seeds)
    )
    return states.begin(open_source(env), list(seeds), config), config


def play(path, env, seeds, stops, forget=None, **knobs):
    """A run in one process that is stopped and taken up again; `forget` names one number that is not restored."""
    for after in (*stops, 10**9):
        state, config = begin(env, seeds, **knobs)
        run = Run(path)
        with (
            closing(state.envs),
            closing(Evaluator(open_source(env), state.seeds, config.eval_episodes)) as evaluator,
            closing(Checkpoints(run.path, {})) as checkpoints,
        ):
            found, _ = checkpoints.newest()
            if found is None:
                run.begin({})
            else:
                given = checkpoints.load(found, state.memory)
                if forget:
                    given[forget] = fresh(states.saved(state), given, forget)
                states.restore(state, given, found.folder)
            verbs = accelerate(state.agent, state.memory, state.sums, config)
            display = Display(config.steps, state.seeds, quiet=True)
            training.run(state, verbs, evaluator, config, run, display, checkpoints, Interrupted(after))
    return end_of(path, config.buffer_size)


def fresh(live, given, name):
    """A number as a new run has it; where that is the same by chance, another one."""
    if live[name].shape == given[name].shape and not torch.equal(live[name], given[name]):
        return live[name].clone()
    return torch.zeros_like(given[name]) if given[name].any() else torch.ones_like(given[name])


CASES = {
    "a step at a time": {},
    "three environments, three steps": {"num_envs": 3, "n_step": 3},
    "whole episodes": {"update_after": "episode"},
    "half an update a step": {"updates_per_step": 0.5, "buffer_size": 100},
    "beside the environments": {"overlap": "on", "updates_per_step": 1.5},
}


ON_GPU = {"device": "cuda", "accelerate": "graph", "overlap": "on"}
if torch.cuda.is_available():
    CASES |= {"a GPU": ON_GPU, "a GPU, in bfloat16": {**ON_GPU, "precision": "bf16", "n_step": 3, "num_envs": 2}}


@pytest.mark.parametrize("knobs", CASES.values(), ids=CASES)
def test_stopped_and_resumed_is_undisturbed(knobs, tmp_path):
    whole = play(tmp_path / "whole", "Pendulum-v1", (3, 5), (), **knobs)
    # Counted in questions "stop?": in the middle of updates, of an evaluation, between steps.
    # With 1, twice in the same step.
    stops = (333,) if "device" in knobs else (150, 333, 1, 1, 501, 700)  # on a GPU each start takes its time
    parts = play(tmp_path / "parts", "Pendulum-v1", (3, 5), stops, **knobs)
    assert whole == parts


def test_a_second_checkpoint_of_a_step_leaves_the_first_as_it_was(tmp_path):
    state, _ = begin("Pendulum-v1", (3,))
    (tmp_path / "metrics.jsonl").touch()
    with closing(state.envs), closing(Checkpoints(tmp_path, {})) as checkpoints:
        checkpoints.save(0, states.saved(state), state.memory)
        checkpoints.wait()
        first = (tmp_path / "checkpoints" / "step-0" / "state.safetensors").read_bytes()
        state.obs += 1
        checkpoints.save(0, states.saved(state), state.memory)
        checkpoints.wait()
        assert (tmp_path / "checkpoints" / "step-0" / "state.safetensors").read_bytes() == first
        found, _ = checkpoints.newest()
        assert found.state_file == "state-2.safetensors"


def names_of_state():
    state, _ = begin("Pendulum-v1", (3,), n_step=3)
    state.envs.close()
    return sorted(states.saved(state))


@pytest.mark.parametrize("name", names_of_state())
def test_every_number_of_the_state_is_needed(name, tmp_path):
    knobs = {"n_step": 3, "num_envs": 2, "steps": 240, "updates_per_step": 0.5}
    if name == "earned":
        knobs["update_after"] = "episode"  # otherwise it follows from the step
    whole = play(tmp_path / "whole", "Pendulum-v1", (3,), (), **knobs)
    if name in ("seeds", "memory.stored"):
        # The first is told from the run, the second from the segments: both are checked, not taken.
        pytest.skip("it is known from elsewhere too")
    try:
        parts = play(tmp_path / "parts", "Pendulum-v1", (3,), (300,), forget=name, **knobs)
    except (t3d.T3DError, IndexError, RuntimeError):
        return  # noticed even before the end
    assert whole != parts


@pytest.mark.parametrize("env", ["HalfCheetah-v5", "Ant-v5", "Hopper-v5", "Humanoid-v5"])
def test_mujoco_tasks_come_back_to_where_they_were(env, tmp_path):
    pytest.importorskip("mujoco")
    knobs = {"num_envs": 2, "steps": 120, "eval_every": 1000}
    whole = play(tmp_path / "whole", env, (0,), (), **knobs)
    assert whole == play(tmp_path / "parts", env, (0,), (90, 1100), **knobs)


def test_an_environment_that_does_not_come_back_is_cut(tmp_path, capsys):
    path = tmp_path / "run"
    run = t3d.train(Scripted, 150, out=path, **SMALL)  # whose episodes depend on how many there were before
    with pytest.raises(t3d.T3DError, match="no file can bring back"):
        t3d.resume(run, steps=300, progress=False)
    t3d.resume(run, steps=300, env=Scripted)
    assert "1 of 1 environments did not come back" in capsys.readouterr().out
    step, _, _, rows, _ = end_of(path)
    assert step == 300 and [row["step"] for row in rows if row["kind"] == "training"] == [50, 100, 150, 200, 250, 300]


def test_a_finished_run_has_nothing_to_do_and_can_be_made_longer(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **SMALL)
    before = end_of(run.path)
    t3d.resume(run.path)
    assert "is finished: all 150 steps" in capsys.readouterr().out and end_of(run.path) == before
    t3d.resume(run.path, steps=300, progress=False)
    whole = t3d.train("Pendulum-v1", 300, out=tmp_path / "whole", **SMALL)
    step, state, memory, *_ = end_of(run.path)
    assert (step, state["agent.actor.w1"]) == (300, end_of(whole.path)[1]["agent.actor.w1"])
    assert memory == end_of(whole.path)[2]
    with pytest.raises(t3d.T3DError, match="longer, not shorter"):
        t3d.resume(run.path, steps=200)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 300, out=tmp_path / "run", **SMALL)
    whole = end_of(run.path)
    newest = run.path / "checkpoints" / "step-300"
    files_of_it = (newest / "state.safetensors", newest / "manifest.json", run.path / "replay" / "step-300.safetensors")
    for file in files_of_it:
        good = file.read_bytes()
        for place in (0, len(good) // 2, len(good) - 2):
            copy = tmp_path / f"{file.name}-{place}"
            shutil.copytree(run.path, copy)
            bad = bytearray(good)
            bad[place] ^= 0x10
            (copy / file.relative_to(run.path)).write_bytes(bad)
            t3d.resume(copy)
            said = capsys.readouterr().out
            assert file.name in said and "skipped" in said and "checkpoint is of step 280" in said, said
            assert end_of(copy) == whole


def test_before_the_first_checkpoint_it_starts_again(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **SMALL)
    whole = end_of(run.path)
    for folder in ("checkpoints", "replay"):
        shutil.rmtree(run.path / folder)
    t3d.resume(run.path)
    assert "holds no checkpoint yet" in capsys.readouterr().out and end_of(run.path) == whole


def test_one_folder_has_one_writer(tmp_path):
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **SMALL)
    with run.lock(), pytest.raises(t3d.T3DError, match=rf"is being written by process {os.getpid()} on "):
        t3d.resume(run.path, steps=200)
    t3d.resume(run.path, steps=160, progress=False)


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_whole(tmp_path, monkeypatch):
    real, calls = os.posix_fallocate, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(t3d.T3DError, match="No space left on device"):
        t3d.train("Pendulum-v1", 1000, out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    t3d.resume(tmp_path / "run", progress=False)
    whole = t3d.train("Pendulum-v1", 1000, out=tmp_path / "whole", **SMALL)
    assert end_of(tmp_path / "run") == end_of(whole.path)


def test_what_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("t3d.limits.free_memory", lambda device: 10**6)
    with pytest.raises(t3d.T3DError, match=r"needs 3.35 GiB and 0.00 GiB are free .*: --buffer-size \d+ fits"):
        t3d.train("Pendulum-v1", 100_000_000, out=tmp_path / "run", buffer_size=90_000_000, **KNOBS)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- processes


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


def go(env, path, **knobs):
    """Start or resume, as somebody does who finds the folder."""

    def advance(self, step, lost=0):
        REACHED[:] = step.to_bytes(8, "little")

    Display.advance = advance
    if (path / "config.json").exists():
        t3d.resume(path, progress=False)
    else:
        shutil.rmtree(path, ignore_errors=True)
        t3d.train(env, out=path, **knobs)


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

    os.fsync, os.posix_fallocate, os.open = counted(os.fsync), counted(os.posix_fallocate), counted(os.open)
    Path.replace, Path.unlink, Path.mkdir = counted(Path.replace), counted(Path.unlink), counted(Path.mkdir)


def killed_again_and_again(env, path, kills, seconds, **knobs):
    """kill -9, half of them inside a save, until there were enough and the run is through; how many there were."""
    done = 0
    while True:
        inside = done % 2 == 0 and done < kills

        def work(inside=inside):
            if inside:
                die_in_a_save(random.randrange(60))
            go(env, path, **knobs)

        before = newest_of(path)
        REACHED[:] = bytes(8)
        pid = in_a_process(work)
        if done < kills and not inside:
            time.sleep(random.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert newest_of(path) >= before  # no checkpoint that was there is lost
        redone = int.from_bytes(REACHED[:], "little") - max(newest_of(path), 0)
        assert redone <= int(knobs["checkpoint_every"])
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return done
        done += 1


def newest_of(path):
    """The step of the newest checkpoint that has its manifest."""
    found = (path / "checkpoints").glob("step-*/manifest.json") if (path / "checkpoints").exists() else ()
    return max((int(file.parent.name.removeprefix("step-")) for file in found), default=-1)


def script(*arguments):
    """This file in a process of its own, which has no threads yet and can be copied safely."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_at_random_instants():
    script("--instants", 12)


def test_a_signal_saves_and_ends():
    script("--signals", 4)


def test_a_small_disk_that_fills_up(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    knobs = {**SMALL, "steps": 1500, "checkpoint_every": "100"}
    try:
        with pytest.raises(t3d.T3DError, match="No space left on device"):
            t3d.train("Pendulum-v1", out=disk / "run", **{**knobs, "hidden": (32, 32)})
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        t3d.resume(disk / "run", progress=False)
        whole = t3d.train("Pendulum-v1", out=tmp_path / "whole", **{**knobs, "hidden": (32, 32)})
        assert end_of(disk / "run") == end_of(whole.path)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_a_folder_that_may_not_be_written(tmp_path):
    run = t3d.train("Pendulum-v1", 100, out=tmp_path / "run", **SMALL)
    for folder in (run.path, *run.path.parents):
        with suppress(PermissionError):
            folder.chmod(0o755)

    before = end_of(run.path)
    script("--stranger", run.path)
    assert end_of(run.path) == before


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


def signals(times):
    """SIGTERM and SIGINT in turn: saved and ended within five seconds, each time further on."""
    knobs = {**SMALL, "steps": 1_000_000, "checkpoint_every": "600s"}
    with tempfile.TemporaryDirectory() as folder:
        path, slowest = Path(folder) / "run", 0.0
        for turn in range(times):
            number, code = ((signal.SIGTERM, 143), (signal.SIGINT, 130))[turn % 2]
            before = newest_of(path)
            REACHED[:] = bytes(8)
            pid = in_a_process(lambda: go("Pendulum-v1", path, **knobs))
            while not any(REACHED[:]):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.7))
            asked = time.monotonic()
            os.kill(pid, number)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert ended == code, f"{ended} instead of {code}"
            slowest = max(slowest, time.monotonic() - asked)
            assert newest_of(path) > before
        assert slowest < 5
        print(f"{times} signals: saved and ended each time, after {slowest:.2f} s at most")


def instants(kills):
    knobs = {**SMALL, "steps": 400, "checkpoint_every": "25"}
    with tempfile.TemporaryDirectory() as folder:
        whole = end_of(t3d.train("Pendulum-v1", out=Path(folder) / "whole", **knobs).path)
        total = runs = 0
        while total < kills:
            path = Path(folder) / str(runs)
            total += killed_again_and_again("Pendulum-v1", path, min(kills, 40), 0.6, **knobs)
            assert end_of(path) == whole
            shutil.rmtree(path)
            runs += 1
        print(f"{total} kills in {runs} runs: every run loadable each time, no checkpoint lost, the end bit for bit")


def main(kills=100):
    cases = [
        (env, {"num_envs": envs, "accelerate": mode})
        for env in ("Pendulum-v1", "HalfCheetah-v5", "Ant-v5", "Hopper-v5")
        for envs in (1, 4)
        for mode in ("eager", "compile")
    ]
    each, total = -(-kills // len(cases)), 0
    for env, knobs in cases:
        with tempfile.TemporaryDirectory() as folder:
            knobs = {**SMALL, "steps": 1500, "checkpoint_every": "100", "eval_every": 500, **knobs}
            start, done, same = time.monotonic(), 0, True
            whole = t3d.train(env, out=Path(folder) / "whole", **knobs)
            seconds = time.monotonic() - start
            while done < each and same:
                path = Path(folder) / f"killed {done}"
                done += killed_again_and_again(env, path, each - done, seconds, **knobs)
                same = end_of(path) == end_of(whole.path)
            total += done
            how = f"{knobs['num_envs']} environments, {knobs['accelerate']}"
            print(f"{env:<16}{how:<26}{done:4} kills   {'bit for bit' if same else 'DIFFERENT'}", flush=True)
            assert same
    print(f"{total} kills in all")


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {"--instants": (instants, int), "--signals": (signals, int), "--stranger": (stranger, Path)}
    if sys.argv[1] in commands:
        command, kind = commands[sys.argv[1]]
        command(kind(sys.argv[2]))
    else:
        main(int(sys.argv[1]))
