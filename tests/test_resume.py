"""A run that is stopped or killed anywhere and resumed is the run that nobody disturbed, bit for bit."""

import os
import shutil
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from counter import Counter
from killed import KNOBS, SMALL, end_of
from scripted import Dot, Reach, Scripted

import t3d
from t3d.config import Config, resolve
from t3d.display import Display
from t3d.envs import env_factory
from t3d.evaluate.async_evaluator import make_evaluator
from t3d.learners import make_learner
from t3d.recorder import Recorder
from t3d.run_state import RunSetup, create_state, most_state, restore
from t3d.runs import checkpoints as checkpoints_room
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run
from t3d.runs.parity import parity, repaired
from t3d.trainer import Trainer


class Interrupted:
    """Says stop after it was asked so many times, and from then on."""

    asked = 0  # by all runs

    def __init__(self, after):
        self.left = after

    @property
    def requested(self):
        Interrupted.asked += 1
        self.left -= 1
        return self.left < 0


MINIMAL = {"env": "x", "env_args": {}, "preset": "td3"}  # what config.json needs to be one


def begin(env, seeds, **settings):
    config = resolve(
        Config(**{**KNOBS, "log_every": 50, "eval_every": 120, "steps": 300, **settings}), "td3", "x", len(seeds)
    )
    setup = RunSetup(env_factory(env).seen(config.pixels, config.frame_stack), list(seeds), config)
    return create_state(setup), setup


def play(path, env, seeds, stops, forget=None, **settings):
    """A run in one process that is stopped and taken up again; `forget` names one number that is not restored."""
    for after in (*stops, 10**9):
        state, setup = begin(env, seeds, **settings)
        config, memory, networks = setup.config, state.learner.memory, state.learner.agent.networks
        run = Run(path)
        path.mkdir(exist_ok=True)
        if not (path / "config.json").exists():
            run.begin({**MINIMAL, "seeds": list(seeds)})
        with (
            closing(state),
            closing(make_evaluator(setup.factory, state.seeds, config, networks)) as evaluator,
            closing(Checkpoints(run, {})) as checkpoints,
        ):
            found = checkpoints.newest(memory, most_state(state))
            if found is not None:
                given = checkpoints.load(found, memory)
                if forget:
                    assert given[forget].numel()  # there is something to forget
                    given[forget] = fresh(state.state_dict(), given, forget)
                restore(state, given, path, config)
            recorder = Recorder(run, checkpoints, Display(config.steps, state.seeds, quiet=True), config)
            trainer = Trainer(state, make_learner(state.learner, config), config, evaluator, recorder)
            trainer.run(Interrupted(after))
    return end_of(path, config.buffer_size)


def fresh(live, given, name):
    """A number as a new run has it; where that is the same by chance, another one."""
    if name in live and live[name].shape == given[name].shape and not torch.equal(live[name], given[name]):
        return live[name].clone()
    return torch.zeros_like(given[name]) if given[name].any() else torch.ones_like(given[name])


CASES = {
    "a step at a time": {},
    "three environments, three steps": {"num_envs": 3, "n_step": 3},
    "whole episodes": {"train_freq": "episode"},
    "half an update a step": {"updates_per_step": 0.5, "buffer_size": 100},
    "beside the environments": {"overlap": "on", "updates_per_step": 1.5},
    "normalised, one critic": {"normalize_obs": "on", "reward_scale": 0.1, "critics": 1, "num_envs": 2},
    "normalised layers": {"critic_norm": "layer", "train_freq": "episode"},
    "evaluations beside training": {"async_eval": "on", "normalize_obs": "on", "eval_values": "on", "gamma": 0.9},
}


ON_GPU = {"device": "cuda", "accelerate": "graph", "overlap": "on"}
if torch.cuda.is_available():
    CASES |= {
        "a GPU": {**ON_GPU, "async_eval": "on"},
        "a GPU, in bfloat16": {**ON_GPU, "precision": "bf16", "n_step": 3, "num_envs": 2},
    }


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_stopped_and_resumed_is_undisturbed(settings, tmp_path):
    whole = play(tmp_path / "whole", "Pendulum-v1", (3, 5), (), **settings)
    # Counted in questions "stop?": in the middle of updates, of an evaluation, between steps.
    # With 1, twice in the same step.
    stops = (237,) if "device" in settings else (150, 333, 1, 1, 501, 700)  # on a GPU each start takes its time
    parts = play(tmp_path / "parts", "Pendulum-v1", (3, 5), stops, **settings)
    assert whole == parts


class Late:
    """A learner that stores transitions no sooner than it must, as one on a GPU does."""

    def __init__(self, learner):
        self.learner, self.waiting = learner, None

    def flush(self):
        if self.waiting is not None:
            self.learner.store(self.waiting)
            self.waiting = None

    def store(self, rows):
        self.flush()
        self.waiting = rows

    def act(self, obs, step):
        self.flush()
        return self.learner.act(obs, step)

    def update(self, k, policy_step):
        self.flush()
        self.learner.update(k, policy_step)


def test_episodes_under_way_are_relabelled_as_if_nothing_had_happened(tmp_path):
    settings = {"her": 3, "num_envs": 2, "normalize_obs": "on"}
    whole = play(tmp_path / "whole", Reach, (3, 5), (), **settings)
    assert whole == play(tmp_path / "parts", Reach, (3, 5), (150, 333, 1, 405), **settings)


@pytest.mark.parametrize("buffer_size", [40, 1000])
@pytest.mark.parametrize("encoder", ["critic", "separate"])
def test_frames_are_kept_as_rows_are(encoder, buffer_size, tmp_path):
    # With room for 40 rows, frames are overwritten too, and with them rows that need them.
    settings = {"num_envs": 2, "n_step": 2, "normalize_obs": "on", "steps": 200, "updates_per_step": 0.3}
    settings |= {"encoder": encoder, "buffer_size": buffer_size, "augment": "on"}
    whole = play(tmp_path / "whole", Dot, (3, 5), (), **settings)
    assert whole == play(tmp_path / "parts", Dot, (3, 5), (50, 63, 1, 105), **settings)


def test_old_segments_are_put_together(tmp_path, monkeypatch):
    settings = {"checkpoint_every": "20", "num_envs": 2, "updates_per_step": 0.2}
    whole = play(tmp_path / "whole", Dot, (3, 5), (), **settings)
    monkeypatch.setattr(checkpoints_room, "MOST_SEGMENTS", 4)
    assert whole == play(tmp_path / "parts", Dot, (3, 5), (40, 60), **settings)
    assert len(list((tmp_path / "parts" / "replay").glob("*.safetensors"))) <= 7
    monkeypatch.setattr(checkpoints_room, "LARGE", 20_000)  # not so many bytes at once
    assert whole == play(tmp_path / "small", Dot, (3, 5), (40, 60), **settings)
    assert len(list((tmp_path / "small" / "replay").glob("*.safetensors"))) > 7


def test_what_waits_to_be_stored_is_saved_too(tmp_path, monkeypatch):
    settings = {"overlap": "on"}
    whole = play(tmp_path / "whole", "Pendulum-v1", (3, 5), (), **settings)
    make = make_learner
    monkeypatch.setattr(sys.modules[__name__], "make_learner", lambda *arguments: Late(make(*arguments)))
    assert whole == play(tmp_path / "parts", "Pendulum-v1", (3, 5), (237, 31), **settings)


def test_a_second_checkpoint_of_a_step_leaves_the_first_as_it_was(tmp_path):
    state, _ = begin("Pendulum-v1", (3,))
    run = Run(tmp_path)
    run.begin({**MINIMAL, "seeds": [3]})
    memory = state.learner.memory
    with closing(state), closing(Checkpoints(run, {})) as checkpoints:
        checkpoints.save(0, state.state_dict(), memory)
        checkpoints.wait()
        first = (tmp_path / "checkpoints" / "step-0" / "state.safetensors").read_bytes()
        state.collector.obs += 1
        checkpoints.save(0, state.state_dict(), memory)
        checkpoints.wait()
        assert (tmp_path / "checkpoints" / "step-0" / "state.safetensors").read_bytes() == first
        found = checkpoints.newest(memory, most_state(state))
        assert found.state_file == "state-2.safetensors"


def names_of_state():
    names = set()
    for env in ("Pendulum-v1", Dot):
        state, _ = begin(env, (3,), n_step=3, normalize_obs="on")
        state.close()
        names |= {name for name in state.state_dict() if "encoder" not in name or env != Dot}
    pending = {"actor.w1", "critic.w1", "scaling.shift", "scaling.scale"}
    return sorted(names | {f"pending_eval.{name}" for name in pending})


UNDISTURBED = {}  # what runs come to that are not stopped: the same for most of the names


@pytest.fixture
def no_processes(monkeypatch):
    """Asynchronous evaluations run in this process: subprocesses take their time to start, and give the same."""

    def refuse(*_, **__):
        raise OSError

    monkeypatch.setattr("t3d.evaluate.async_evaluator.with_pipe", refuse)


@pytest.mark.filterwarnings("ignore:the evaluation subprocess is not available")
@pytest.mark.parametrize("beside", ["on", "off"])
def test_rows_keep_their_order_wherever_a_run_is_stopped(beside, tmp_path, no_processes):
    settings = {"async_eval": beside, "steps": 16, "eval_every": 6, "log_every": 4, "random_steps": 6}
    before = Interrupted.asked
    whole = play(tmp_path / "whole", Counter, (3,), (), **settings)
    asked = Interrupted.asked - before
    assert asked > 60
    for after in range(0, asked, 1 if beside == "on" else 4):
        assert play(tmp_path / str(after), Counter, (3,), (after,), **settings) == whole, after


@pytest.mark.filterwarnings("ignore:the evaluation subprocess is not available")
@pytest.mark.parametrize("name", names_of_state())
def test_every_number_of_the_state_is_needed(name, tmp_path, no_processes):
    settings = {"n_step": 3, "num_envs": 2, "steps": 240, "updates_per_step": 0.5, "normalize_obs": "on"}
    env, stop = "Pendulum-v1", 300
    if name == "update_credit":
        settings["train_freq"] = "episode"  # otherwise it follows from the step
    if name.startswith("pending_eval."):
        settings |= {"async_eval": "on", "eval_values": "on", "gamma": 0.9}
    if name == "collector.transitions.steps":
        env, stop, settings = Reach, 172, {**settings, "n_step": 1, "her": 2}  # in the middle of an episode
    if name.startswith("learner.memory.frames."):
        env, settings = Dot, {**settings, "buffer_size": 40}
    if name in ("seeds", "learner.memory.stored", "learner.memory.frames.stored", "learner.memory.frames.modulus"):
        # The first is told from the run, the next two from the segments: they are checked, not taken. The last is for
        # runs that are made longer.
        pytest.skip("it is known from elsewhere too")
    case = (env, *sorted(settings.items()))
    if case not in UNDISTURBED:
        UNDISTURBED[case] = play(tmp_path / "whole", env, (3,), (), **settings)
    try:
        parts = play(tmp_path / "parts", env, (3,), (stop,), forget=name, **settings)
    except (t3d.T3DError, IndexError, RuntimeError):
        return  # noticed even before the end
    assert UNDISTURBED[case] != parts


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        (None, "collector.actions.steps is missing"),
        (torch.zeros(()), "collector.actions.steps has the shape"),
        (torch.zeros(4, 1, 2, 9), "collector.actions.steps has the shape"),
    ],
)
def test_a_state_of_another_shape_is_refused_with_a_sentence(saved, sentence, tmp_path):
    state, setup = begin("Pendulum-v1", (3,), num_envs=2)
    with closing(state):
        given = {name: tensor.clone() for name, tensor in state.state_dict().items()}
        del given["collector.actions.steps"]
        given |= {} if saved is None else {"collector.actions.steps": saved}
        with pytest.raises(t3d.T3DError, match=sentence):
            restore(state, given, tmp_path, setup.config)


@pytest.mark.parametrize("env", ["HalfCheetah-v5", "Ant-v5", "Hopper-v5", "Humanoid-v5"])
def test_mujoco_tasks_come_back_to_where_they_were(env, tmp_path):
    pytest.importorskip("mujoco")
    settings = {"num_envs": 2, "steps": 120, "eval_every": 1000}
    whole = play(tmp_path / "whole", env, (0,), (), **settings)
    assert whole == play(tmp_path / "parts", env, (0,), (90, 1100), **settings)


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
    assert (step, state["learner.agent.actor.w1"]) == (300, end_of(whole.path)[1]["learner.agent.actor.w1"])
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
            if file.parent.name == "replay":
                assert file.name in said and "repaired" in said and "checkpoint is of step 300" in said, said
            else:
                assert file.name in said and "skipped" in said and "checkpoint is of step 280" in said, said
            assert end_of(copy) == whole


@pytest.mark.parametrize("where", [5, -5])
def test_a_damaged_segment_that_every_checkpoint_needs_is_repaired(where, tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 300, out=tmp_path / "run", **SMALL)
    whole = end_of(run.path)
    segment = run.path / "replay" / "step-70.safetensors"
    content = bytearray(segment.read_bytes())
    content[where] ^= 1
    segment.write_bytes(content)
    t3d.resume(run.path, steps=301)
    said = capsys.readouterr().out
    assert f"{segment} does not match its checksum: it is damaged. It was repaired from {segment.name}.parity." in said
    assert "checkpoint is of step 300" in said
    assert end_of(run.path)[2]["0"].startswith(whole[2]["0"])


def test_parity_mends_one_block_of_a_group_and_no_more():
    source = np.random.default_rng(0)
    for size in (1, 4096, 300_000, 900_001):
        content = source.bytes(size)
        beside = parity(content)
        assert repaired(content, beside) == content and len(beside) < size / 50 + 5000
        for begin in source.integers(0, size, 5):
            broken = bytearray(content)
            broken[begin : begin + 3000] = bytes(len(broken[begin : begin + 3000]))  # may lie in two blocks
            fixed = repaired(bytes(broken), beside)
            assert fixed == content or size <= 64 * 4096  # a small file has one group: two blocks are too many
    broken = bytearray(content)
    broken[0], broken[4096 * 4] = broken[0] ^ 1, broken[4096 * 4] ^ 1  # blocks of one group
    assert repaired(bytes(broken), beside) != content and repaired(content, b"short") == content


def test_where_every_checkpoint_is_damaged_nothing_is_started_over(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 60, out=tmp_path / "run", **{**SMALL, "checkpoint_every": "600s"})
    before = run.path.joinpath("metrics.jsonl").read_bytes()
    for step in (0, 60):
        state = run.path / "checkpoints" / f"step-{step}" / "state.safetensors"
        state.write_bytes(b"x" + state.read_bytes()[1:])
    with pytest.raises(t3d.T3DError, match=r"no checkpoint of .* is whole: .* t3d evaluate"):
        t3d.resume(run.path, steps=100)
    said = capsys.readouterr().out
    assert all(f"step-{step}/state.safetensors" in said for step in (0, 60))
    assert run.path.joinpath("metrics.jsonl").read_bytes() == before


def test_before_the_first_checkpoint_it_starts_again(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **SMALL)
    whole = end_of(run.path)
    for folder in ("checkpoints", "replay"):
        shutil.rmtree(run.path / folder)
    (run.path / "metrics.jsonl").write_bytes(b"")  # the first checkpoint is older than the first row
    t3d.resume(run.path)
    assert "holds no checkpoint yet" in capsys.readouterr().out and end_of(run.path) == whole


def test_one_folder_has_one_writer(tmp_path):
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **SMALL)
    with run.lock(), pytest.raises(t3d.T3DError, match=rf"is locked by process {os.getpid()} on "):
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


# ---------------------------------------------------------------------------------------------- processes


def script(*arguments):
    """tests/killed.py in a process of its own, which has no threads yet and can be copied safely."""
    command = [sys.executable, Path(__file__).parent / "killed.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
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
    settings = {**SMALL, "steps": 1500, "checkpoint_every": "100"}
    try:
        with pytest.raises(t3d.T3DError, match="No space left on device"):
            t3d.train("Pendulum-v1", out=disk / "run", **{**settings, "hidden": (32, 32)})
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        t3d.resume(disk / "run", progress=False)
        whole = t3d.train("Pendulum-v1", out=tmp_path / "whole", **{**settings, "hidden": (32, 32)})
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
