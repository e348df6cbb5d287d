"""Run folders from strangers: nothing outside them is touched, nothing in them runs, and faults are sentences."""

import hashlib
import json
import os
import resource
import shutil
import socket
import time
from pathlib import Path

import crafted
import pytest
import torch
from killed import SMALL

import t3d
from t3d import T3DError, files
from t3d.cli import main
from t3d.runs.folder import Run
from t3d.trainer import Trainer

KNOBS = {**SMALL, "steps": 150}
pytestmark = pytest.mark.filterwarnings("ignore::t3d.errors.T3DWarning")  # of images that cannot be drawn there


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return t3d.train("Pendulum-v1", out=tmp_path_factory.mktemp("source") / "run", **KNOBS).path


@pytest.fixture
def run(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path):
    """A folder outside of the run, with names in it that T3D's own files have."""
    folder = tmp_path / "home"
    for name in ("step-0.safetensors", "step-999.safetensors", "best-seed-0.safetensors", ".bashrc", "manifest.json"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name} of somebody")
    (folder / "step-999").mkdir()
    (folder / "step-999" / "state.safetensors").write_text("precious")
    return folder


def tree(folder):
    """Everything in a folder: names, kinds and contents."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def use(run):
    """All that somebody would do with a run folder; the sentences that came of it."""
    said = []
    for call in (
        lambda: t3d.load(run),
        lambda: t3d.Run.open(run).metrics,
        lambda: t3d.resume(run, steps=200),
        lambda: t3d.resume(run, steps=230),
        lambda: t3d.train("Pendulum-v1", out=run, **KNOBS),
    ):
        try:
            call()
        except T3DError as error:
            said.append(str(error))
    return said


NAMES = [
    "checkpoints", "replay", "policies", "report", "errors", ".lock", "metrics.jsonl", "config.json",
    "checkpoints/step-150", "checkpoints/step-150/manifest.json", "checkpoints/step-150/state.safetensors",
    "checkpoints/step-140", "checkpoints/step-140/manifest.json", "checkpoints/step-160", "checkpoints/step-200",
    "replay/step-70.safetensors", "replay/step-70.safetensors.parity", "replay/step-150.safetensors",
    "replay/step-200.safetensors", "policies/best-seed-0.safetensors", "policies/best-seed-0.json",
    "report/learning-curve.png", ".config.json.part", ".metrics.jsonl.part", "policies/.last-seed-0.safetensors.part",
    "replay/.step-200.safetensors.part", "replay/.step-160.safetensors.part", "report/.learning-curve.png.part",
    "checkpoints/step-200/.state.safetensors.part", "checkpoints/step-200/.manifest.json.part",
]  # fmt: skip


def in_place_of(path, make):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)


LINKS = [(name, target) for name in NAMES for target in ([".bashrc", "new"] if "." in name else ["", "step-999"])]


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_no_link_is_followed(name, target, run, victim):
    before = tree(victim)
    in_place_of(run / name, lambda path: path.symlink_to(victim / target))
    use(run)
    assert tree(victim) == before


@pytest.mark.parametrize("name", [name for name in NAMES if Path(name).suffix or name == ".lock"])
def test_what_a_hard_link_shares_stays_as_it_was(name, run, victim):
    before = tree(victim)
    in_place_of(run / name, lambda path: path.hardlink_to(victim / ".bashrc"))
    use(run)
    assert tree(victim) == before


def test_a_backup_in_hard_links_stays_as_it_was(run, tmp_path):
    shutil.copytree(run, tmp_path / "backup", copy_function=os.link)
    (tmp_path / "backup" / ".lock").unlink()
    before = tree(tmp_path / "backup")
    t3d.resume(run, steps=200, progress=False)
    assert tree(tmp_path / "backup") == before


def test_a_swap_between_two_looks_changes_nothing_outside(run, victim, monkeypatch):
    """A folder that becomes a link while the run goes on."""
    before, real = tree(victim), os.fsync

    def swapped(descriptor):
        for name in ("replay", "checkpoints", "policies"):
            if not (run / name).is_symlink():
                (run / name).rename(run / f"{name}-before")
                (run / name).symlink_to(victim)
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", swapped)
    with pytest.raises(T3DError, match="link"):
        t3d.resume(run, steps=300, progress=False)
    assert tree(victim) == before


def bind(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


KINDS = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "sparse terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "nothing": lambda path: None,
    "empty file": Path.touch,
    "device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),  # /dev/zero: it never ends
    "socket": bind,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in NAMES if "." in name])
def test_odd_files_are_sentences_and_quick(name, kind, run, monkeypatch):
    if kind == "device" and os.geteuid():
        pytest.skip("only root makes devices")
    monkeypatch.chdir(run)  # the name of a socket may not be long
    in_place_of(Path(name), KINDS[kind])
    memory, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for call in (
        lambda: t3d.load(run),
        lambda: t3d.Run.open(run).metrics,
        lambda: t3d.resume(run, progress=False),
        lambda: t3d.resume(run, steps=160, progress=False),
    ):
        begin = time.process_time()
        try:
            call()
        except T3DError as error:
            assert "\n" not in str(error)
        slowest = max(slowest, time.process_time() - begin)
    assert slowest < 1.5  # with 10 steps of training in it
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # kilobytes


def test_foreign_files_stay_where_they_are(run):
    foreign = ["replay/notes.txt", "replay/step-1.safetensors.bak", "replay/x/step-1.safetensors", "checkpoints/a.txt"]
    foreign += ["checkpoints/step-999/mine.txt", "checkpoints/step-01/state.safetensors", "policies/mine.safetensors"]
    foreign += ["replay/.notes.part", "notes.txt", "checkpoints/best/manifest.json", "replay/Step-5.safetensors"]
    for name in foreign:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    t3d.resume(run, steps=400, progress=False)
    t3d.resume(run, steps=600, progress=False)
    assert [name for name in foreign if not (run / name).exists() or (run / name).read_text() != "mine"] == []
    assert sorted(path.name for path in (run / "checkpoints").glob("step-???")) == ["step-560", "step-600", "step-999"]


def at(values, *keys):
    for key in keys[:-1]:
        values = values[key]
    return values, keys[-1]


def change_of(*keys, to):
    def change(values):
        part, key = at(values, *keys)
        part[key] = to

    return change


MANIFESTS = {
    "first of text": change_of("segments", 0, "first", to=["a"]),
    "first beyond last": change_of("segments", 0, "first", to=[2**40]),
    "negative": change_of("segments", 0, "first", to=[-5]),
    "too many rings": change_of("segments", 0, "last", to=[1, 2, 3]),
    "no segments": change_of("segments", to=[]),
    "segments that are none": change_of("segments", to={"file": 3}),
    "many segments": lambda values: values.update(segments=values["segments"] * 20_000),
    "another folder's segment": change_of("segments", 0, "file", to="../../home/step-999.safetensors"),
    "an absolute segment": change_of("segments", 0, "file", to="/etc/passwd"),
    "a segment's name with a zero": change_of("segments", 0, "file", to="step-0\0.safetensors"),
    "no rows": change_of("segments", 0, "last", to=[0]),
    "terabytes": change_of("segments", 0, "size", to=2**45),
    "a state elsewhere": change_of("state_file", to="../../../home/.bashrc"),
    "a state of terabytes": change_of("state", "size", to=2**45),
    "a state without a hash": change_of("state", "sha256", to=None),
    "another step": change_of("step", to=7),
    "a step of text": change_of("step", to="150"),
    "a true step": change_of("step", to=True),
    "huge capacities": change_of("capacities", to=[2**62]),
    "capacities of text": change_of("capacities", to="abc"),
    "no metrics": change_of("metrics", to=None),
    "metrics with more": change_of("metrics", "rows", to=10**15),
    "unknown fields": change_of("extra", to=1),
    "about nothing": change_of("about", to=[]),
    "format 99": change_of("format", to=99),
    "deep": change_of("about", "x", to=json.loads("[" * 500 + "]" * 500)),
    "a segment twice": lambda values: values["segments"].append(values["segments"][0]),
    "another run": change_of("run", to="0123456789abcdef"),
    "no run": lambda values: {name: value for name, value in values.items() if name != "run"},
    "a run that is a list": change_of("run", to=[1]),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_crafted_manifests_are_sentences(case, run, victim, capsys):
    before = tree(victim)
    crafted.older_checkpoints_removed(run)
    crafted.manifest(run, MANIFESTS[case])
    begin = time.process_time()
    with pytest.raises(T3DError):
        t3d.resume(run, steps=200)
    assert time.process_time() - begin < 1
    if case != "no segments":  # it is noticed only where the state says how many rows there are
        assert "The checkpoint of step 150 is skipped." in capsys.readouterr().out
    assert tree(victim) == before


def test_a_manifest_with_nan_for_a_step(run, capsys):
    path = crafted.newest(run) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 150', '"step": NaN'))
    t3d.resume(run)
    assert "NaN is not a number" in capsys.readouterr().out


def filled(name, value, dtype=None):
    def change(state):
        tensor = state[name]
        state[name] = torch.full_like(tensor, value, dtype=dtype or tensor.dtype)

    return change


ACTOR, LENGTH, ACTIONS = "learner.agent.actor.w1", "collector.episode_length", "collector.actions.steps"
STATES = {
    "an episode of 10^15 steps": filled(LENGTH, 10**15),
    "a negative step": filled("step", -1),
    "an endless step": filled("step", 2**60),
    "NaN in the actor": filled(ACTOR, float("nan")),
    "infinity in a target": filled("learner.agent.target_critic.w2", float("inf")),
    "infinity in Adam": filled("learner.agent.critic_adam.v.w2", float("inf")),
    "negative updates": filled("updates", -1),
    "negative episodes": filled("collector.episodes", -3),
    "more waiting than n": filled("collector.n_step.pending", 1000),
    "other seeds": filled("seeds", 9),
    "other rows": filled("learner.memory.stored", 3),
    "weights of another type": lambda state: state.update({ACTOR: state[ACTOR].to(torch.int32)}),
    "counts of another type": filled(LENGTH, 1, torch.float64),
    "half weights": filled(ACTOR, 0.5, torch.float16),
    "a byte for weights": filled(ACTOR, 1, torch.uint8),
    "bfloat16": filled(ACTOR, 1, torch.bfloat16),
    "weights of another shape": lambda state: state.update({ACTOR: torch.zeros(1, 3, 9)}),
    "a name too many": lambda state: state.update(extra=torch.zeros(3)),
    "a name too few": lambda state: state.pop("collector.obs"),
    "a tape of another shape": lambda state: state.update({ACTIONS: torch.zeros(5, 9)}),
    "a tape that is too short": lambda state: state.update({ACTIONS: state[ACTIONS][:3]}),
    "a tape of nothing, endless": lambda state: state.update({ACTIONS: torch.zeros(10**13, 0, 1, 1)}),
    "a tape without an end": lambda state: state.update({ACTIONS: torch.zeros(0, 1, 1, 1)}),
    "another step": filled("step", 140),
    "counts beyond 2^53": filled("updates", 2**60),
    "a longer episode than there is": lambda state: state.update(
        {LENGTH: torch.full_like(state[LENGTH], 201), ACTIONS: torch.zeros(201, 1, 1, 1)}
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_crafted_states_are_sentences(case, run):
    crafted.older_checkpoints_removed(run)
    crafted.state(run, STATES[case])
    begin = time.process_time()
    with pytest.raises(T3DError) as refused:
        t3d.resume(run, steps=200, progress=False)
    assert time.process_time() - begin < 1 and "\n" not in str(refused.value)


CONFIGS = {
    "huge networks": {"hidden": [65536, 65536]},
    "many layers": {"hidden": [8] * 100_000},
    "a huge seed": {"seeds": [2**70]},
    "many seeds": {"seeds": list(range(10_000)), "eval_episodes": 10_000},
    "many environments": {"num_envs": 100_000},
    "a huge number": {"steps": 10**400},
    "a negative number": {"steps": -1},
    "huge images": {"pixels": 4096, "frame_stack": 64},
    "an environment of megabytes": {"env": "x" * 10**6},
    "an environment of another type": {"env": ["Pendulum-v1"]},
    "a module": {"env": "antigravity:Pendulum-v1"},
    "a path": {"env_args": {"xml_file": "/etc/passwd"}},
    "a path in a list": {"env_args": {"a": [{"b": "..\\x"}]}},
    "a file": {"env_args": {"xml_file": "robot.xml"}},
    "a hidden file": {"env_args": {"xml_file": ".x-"}},
    "a file in this folder": {"env_args": {"xml_file": "tests"}},
    "a number that takes for ever": {"env_args": {"frame_skip": 2_000_000_000}},
    "a number in a list": {"env_args": {"a": [1, [10**12]]}},
    "parts": {"versions": [{}] * 250_000},
    "a time with a return": {"checkpoint_every": "\r60s"},
    "a module in arguments": {"env": "Pendulum-v1", "env_args": {"env_id": "antigravity:X-v0"}},
    "arguments of text": {"env_args": "abc"},
    "a network of another type": {"network": {"a": 1}},
    "a callable of another type": {"callable": "yes"},
    "real of another type": {"real_env": "yes"},
    "an unknown setting": {"__class__": "x"},
    "a time of text": {"checkpoint_every": "nans"},
    "a device of text": {"device": "cuda:0; rm"},
}


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("case", CONFIGS)
def test_crafted_configs_are_sentences(case, checkpoint, run, capsys):
    crafted.config(run, **CONFIGS[case])
    if not checkpoint:
        shutil.rmtree(run / "checkpoints")
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for command in ("resume", "evaluate"):
        if case == "huge networks" and command == "evaluate":
            continue  # the networks are in the policies, and those are ordinary
        with pytest.raises(SystemExit) as left:
            main([command, str(run)])
        err = capsys.readouterr().err
        assert left.value.code == 2 and err.startswith("t3d: ") and err.count("\n") == 1 and len(err) < 1000, err
    assert time.process_time() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"a":' * 100_000, "{" + '"a": 1,' * 10, "9" * 5000, '{"steps": 1e999}', '{"a": Infinity}', "\0",
        '"\ud800"'.encode("utf-8", "surrogatepass").decode("latin1"), "[" * 500 + "]" * 500, "null", "true",
    ],
)  # fmt: skip
def test_strange_json_is_a_sentence(text, run, capsys):
    for path in (run / "config.json", crafted.newest(run) / "manifest.json"):
        path.write_text(text)
    with pytest.raises(T3DError):
        t3d.resume(run, progress=False)


ROWS = {
    "a mean of text": change_of(0, "mean", to="high"),
    "a step of text": change_of(0, "step", to="0"),
    "a huge step": change_of(0, "step", to=10**300),
    "a negative seed": change_of(0, "seed", to=-1),
    "returns of text": change_of(0, "returns", to=["1"]),
    "lengths of text": change_of(0, "lengths", to=["1"]),
    "no returns": change_of(0, "returns", to=[]),
    "a field in a field": change_of(0, "extra", to={"a": 1}),
    "no kind": lambda rows: rows[0].pop("kind"),
    "another number": change_of(0, "n", to=7),
    "numbers that are true": change_of(0, "n", to=False),
    "a huge whole number": change_of(0, "mean", to=10**400),
    "huge returns": change_of(0, "returns", to=[10**400]),
    "negative lengths": change_of(0, "lengths", to=[-1]),
}


@pytest.mark.parametrize("case", ROWS)
def test_crafted_rows_of_metrics_are_named(case, run):
    crafted.metrics(run, ROWS[case])
    with pytest.raises(T3DError, match=r"metrics\.jsonl, line 1, is not a row of metrics: "):
        t3d.Run.open(run).metrics  # noqa: B018
    with pytest.raises(T3DError):
        t3d.resume(run, steps=200, progress=False)


def test_rows_that_do_not_fit_each_other_do_not_stop_a_run(run):
    def change(rows):
        evaluations = [row for row in rows if row["kind"] == "evaluation"]
        evaluations[-1]["returns"], evaluations[-1]["lengths"] = [1.0, 2.0, 1e308], [1, 2, 3]
        evaluations[-1]["mean"] = 1e308

    crafted.metrics(run, change)
    t3d.resume(run, steps=200, progress=False)


def test_unusual_types_in_a_segment_are_a_sentence(run, capsys):
    crafted.older_checkpoints_removed(run)
    path = run / "replay" / "step-70.safetensors"
    for kind in ("F8_E4M3", "F4", "C64", "BOOL", "F64"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["0"]["dtype"] = kind
        text = json.dumps(header).encode().ljust(size)
        copy = path.with_name("copy")
        copy.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        with pytest.raises(T3DError):
            files.unpack(copy.read_bytes(), copy) if kind in ("F4", "F64") else refuse_segment(run, copy)


def refuse_segment(run, copy):
    from t3d.runs import checkpoints
    from t3d.runs.manifest import read_manifest

    segment = read_manifest(files.Folder.open(crafted.newest(run)), 150, 2**20, Run(run).identity).segments[0]
    ring = type("Ring", (), {"rows": torch.zeros(200, 10)})
    checkpoints._refuse_other_rows(copy, files.unpack(copy.read_bytes(), copy), segment, [ring])


def raw(header, size, spare=0):
    """A safetensors file with any header, and so many bytes behind it."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size + spare)


SEALED = {"t3d": json.dumps({"sha256": "0" * 64})}
TENSORS = {
    **{kind: raw({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, size]}, "__metadata__": SEALED}, size)
       for kind, size in (("F8_E4M3", 2), ("F8_E5M2", 2), ("F4", 1), ("BF16", 4), ("F16", 4), ("C64", 16), ("I8", 2))},
    "longer than it says": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4, 100),
    "shorter than it says": raw({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, 4),
    "offsets of text": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "x"]}}, 4),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [1]}}, 4),
    "negative offsets": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, 4),
    "offsets that overlap": raw({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, 4),
    "huge shapes of nothing": raw({"a": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, 0),
    "a part that is a number": raw({"a": 7}, 0),
    "a header that is a list": raw([], 0),
    "a header beyond its end": (2**40).to_bytes(8, "little") + bytes(100),
    "a deep header": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "metadata that is a list": raw({"__metadata__": []}, 0),
    "metadata of megabytes": raw({"__metadata__": {"t3d": "x" * 10**6}}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_strange_tensors_are_sentences(case, run):
    agent = t3d.T3D(3, 1, 2.0, hidden=(8, 8))
    before = agent._saved()
    content = TENSORS[case].replace(b"0" * 64, hashlib.sha256(TENSORS[case]).hexdigest().encode(), 1)
    for path, call in (
        (run / "policies" / "best-seed-0.safetensors", lambda: t3d.load(run)),
        (run / "mine.safetensors", lambda: t3d.load(run / "mine.safetensors")),
        (run / "agent.safetensors", lambda: agent.load("agent", run)),
    ):
        path.write_bytes(content)
        begin = time.process_time()
        with pytest.raises(T3DError) as refused:
            call()
        assert "\n" not in str(refused.value) and time.process_time() - begin < 1
    assert all(torch.equal(before[name], tensor) for name, tensor in agent._saved().items())


@pytest.mark.parametrize("header", ["", "whole"])
def test_a_sparse_policy_takes_no_memory(header, run):
    path = run / "policies" / "best-seed-0.safetensors"
    content = path.read_bytes() if header else b""
    path.write_bytes(content)
    os.truncate(path, 250 * 2**20)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(T3DError):
        t3d.load(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000


def test_a_tensor_of_many_dimensions_is_refused_at_once(run):
    path = run / "policies" / "best-seed-0.safetensors"
    path.write_bytes(raw({"a": {"dtype": "F32", "shape": [1] * 250_000, "data_offsets": [0, 4]}}, 4))
    begin = time.process_time()
    with pytest.raises(T3DError, match=r"dimensions|header does not fit"):
        t3d.load(run)
    with pytest.raises(T3DError, match="dimensions"):
        files.unpack(path.read_bytes(), path)
    assert time.process_time() - begin < 1


def sparse(path, size):
    """Its content at both ends, and a hole between."""
    with path.open("r+b") as file:
        file.truncate(size)


def test_sparse_files_are_refused_before_they_are_read(run):
    policy = t3d.load(run)
    policy.parameters["w1"] = torch.zeros(1, 3, 4_000_000)
    header = policy.to_bytes()[:2000]
    path = run / "policies" / "best-seed-0.safetensors"
    size = 8 + int.from_bytes(header[:8], "little") + sum(t.nbytes for t in policy.parameters.values())
    path.write_bytes(header)
    sparse(path, size)
    for call in (
        lambda: t3d.load(run),
        lambda: t3d.load(path),
        lambda: files.Folder.open(path.parent).sha256(path.name),
    ):
        with pytest.raises(T3DError, match="is a sparse file"):
            call()
    path.write_bytes(bytes(10_000_000))  # zeros that are there
    assert files.Folder.open(path.parent).sha256(path.name)


def test_files_of_two_runs_are_not_mixed(run, tmp_path):
    other = t3d.train("Pendulum-v1", out=tmp_path / "other", **{**KNOBS, "gamma": 0.5}).path
    policy = run / "policies" / "best-seed-0.safetensors"
    before = policy.read_bytes()
    policy.write_bytes((other / "policies" / policy.name).read_bytes())
    with pytest.raises(T3DError, match="policy of a different run"):
        t3d.load(run)
    policy.write_bytes(before)
    shutil.copy(other / "config.json", run / "config.json")
    with pytest.raises(T3DError, match="a different run"):
        t3d.load(run)
    with pytest.raises(T3DError, match=r"no checkpoint of .* is whole"):
        t3d.resume(run, steps=200, progress=False)


def test_rows_of_seeds_that_a_run_does_not_have(run):
    def change(rows):
        rows[0]["seed"] = 77

    crafted.metrics(run, change)
    with pytest.raises(T3DError, match="has a row of seed 77"):
        t3d.Run.open(run).metrics  # noqa: B018


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return t3d.train("Pendulum-v1", out=tmp_path_factory.mktemp("pair") / "run", seeds=2, **KNOBS)


CARDS = {
    "other layers": {"hidden": (16, 16)},
    "more layers": {"hidden": (8, 8, 8)},
    "other observations": {"env": "MountainCarContinuous-v0"},
    "normalised": {"normalize_obs": "on"},
}


@pytest.mark.parametrize("case", CARDS)
def test_policies_that_do_not_fit_each_other(case, pair, tmp_path, capsys):
    shutil.copytree(pair.path, tmp_path / "run")
    settings = {**KNOBS, "env": "Pendulum-v1", **CARDS[case]}
    stranger = t3d.train(out=tmp_path / "other", seeds=[1], **{**settings, "steps": 60})
    policy = stranger.policy(1)
    object.__setattr__(policy.card, "run", pair.identity)
    Run(tmp_path / "run").write("policies", "best-seed-1.safetensors", policy.to_bytes())
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert left.value.code == 2 and "the policy of seed 1 does not fit the others" in err and err.count("\n") == 1


@pytest.mark.parametrize("change", [{"returns": {}, "lengths": {}}, {"hidden": {}}, {"run": 7}, {"lengths": None}])
def test_cards_of_other_types_are_sentences(change, run):
    policy = t3d.load(run)
    for name, value in change.items():
        object.__setattr__(policy.card, name, value)
    Run(run).write("policies", "best-seed-0.safetensors", policy.to_bytes())
    with pytest.raises(T3DError, match="does not describe its weights"):
        t3d.load(run)


def test_a_run_folder_that_is_replaced_is_noticed(tmp_path, victim, monkeypatch):
    path, before, step = tmp_path / "run", tree(victim), Trainer.step

    def swapped(self):
        if self.state.step == 60:
            path.rename(tmp_path / "moved")
            path.symlink_to(victim)
        return step(self)

    monkeypatch.setattr(Trainer, "step", swapped)
    with pytest.raises(T3DError, match="is a different folder than before: it was moved or replaced"):
        t3d.train("Pendulum-v1", out=path, **KNOBS)
    assert tree(victim) == before


def test_seeds_that_are_not_asked_for_take_no_memory(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("t3d.cli.MOST_FILLED", 100)
    with pytest.raises(SystemExit):
        main(["evaluate", str(pair.path), "--seed", "0"])
    assert "too many to play one of them" in capsys.readouterr().err


def test_evaluate_starts_no_more_processes_than_cores(pair, tmp_path, monkeypatch):
    path, started, evaluator = tmp_path / "run", [], t3d.cli.Evaluator
    t3d.train("Pendulum-v1", out=path, workers=40, **{**KNOBS, "eval_every": 0, "steps": 30})
    monkeypatch.setattr(t3d.cli, "Evaluator", lambda f, s, c: started.append(c.workers) or evaluator(f, s, c))
    main(["evaluate", str(path), "--episodes", "1"])
    assert started == [min(40, t3d.limits.cores())]


def test_what_t3d_load_may_not_take(tmp_path):
    agent = t3d.T3D(3, 1, 2.0, hidden=(8,))
    for name, value in (("actor.w1", 1e300), ("actor_adam.count", 2**60), ("critic_adam.count", -1)):
        given = {k: t.clone() for k, t in agent._saved().items()}
        dtype = torch.float64 if given[name].is_floating_point() else given[name].dtype
        given[name] = torch.full_like(given[name], value, dtype=dtype)
        (tmp_path / "agent.safetensors").write_bytes(files.seal(given, {"format": "1"}))
        with pytest.raises(T3DError, match=name):
            agent.load("agent", tmp_path)


BENCH = {
    "steps of text": change_of("steps", to=["1"]),
    "steps that are none": change_of("steps", to=3),
    "no steps": change_of("steps", to=[]),
    "an interval of text": change_of("config", "eval_every", to="5"),
    "hardware that is a list": change_of("hardware", to=[]),
    "versions that are a list": change_of("versions", to=[]),
    "cores of text": change_of("hardware", "cores", to=[2]),
    "a time of text": change_of("wall_seconds", to="long"),
    "a huge time": change_of("wall_seconds", to=10**400),
    "an environment of numbers": change_of("env", to=7),
    "another variant": change_of("variant", to="x"),
    "20,000 seeds": lambda values: values.update(returns=values["returns"][:1] * 20_000),
    "no returns": change_of("returns", to=None),
}


@pytest.fixture(scope="module")
def result():
    folder = Path(__file__).parent.parent / "benchmarks" / "results" / "returns"
    return json.loads((folder / "quick-Pendulum-v1.json").read_text())


@pytest.mark.parametrize("case", BENCH)
def test_strange_results_are_sentences(case, result, tmp_path, capsys):
    values = json.loads(json.dumps(result))
    BENCH[case](values)
    (tmp_path / "quick-Pendulum-v1.json").write_text(json.dumps(values))
    begin = time.process_time()
    with pytest.raises(SystemExit) as left:
        main(["bench", "table", "--results", str(tmp_path)])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith("t3d: ") and err.count("\n") == 1 and time.process_time() - begin < 1


def test_links_to_results_are_not_followed(result, tmp_path, capsys):
    (tmp_path / "elsewhere.json").write_text(json.dumps(result))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "quick-Pendulum-v1.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(SystemExit):
        main(["bench", "table", "--results", str(tmp_path / "results")])
    assert "is a link" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- what reaches the terminal


def test_sentences_are_short(run, capsys):
    crafted.config(run, format="x" * 900_000)
    with pytest.raises(SystemExit):
        main(["evaluate", str(run)])
    assert len(capsys.readouterr().err) < 2500


def test_a_run_shows_itself_in_plain_text(run):
    crafted.config(run, env="\x1b]0;x\x07")
    assert repr(t3d.Run.open(run)).isprintable()


def test_braces_in_the_name_of_a_run_that_is_in_use(source, tmp_path):
    shutil.copytree(source, tmp_path / "run-{best}")
    run = Run(tmp_path / "run-{best}")
    with run.lock(), pytest.raises(T3DError, match=r"run-\{best\} is locked by process"):
        Run(run.path).lock()


ESCAPES = [
    "\x1b]0;title\x07",
    "\x1b[31mred",
    "a\rb",
    "\x9b31m",
    "two\nlines",
    "\u202egnp.exe",
    "\u2028",
    "[bold]x[/bold]",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_names_from_files_cannot_steer_a_terminal(text, run, capsys):
    for change in ({"env": text}, {"preset": text}, {text: 1}, {"hidden": text}, {"env_args": {text: "/x"}}):
        before = (run / "config.json").read_bytes()
        crafted.config(run, **change)
        for command in ("resume", "evaluate"):
            with pytest.raises(SystemExit):
                main([command, str(run)])
        (run / "config.json").write_bytes(before)
    crafted.manifest(run, lambda values: values["about"].update(device=text))
    (run / ".lock").write_text(text)
    with Run(run).lock():
        (run / ".lock").write_text(text)
        with pytest.raises(SystemExit):
            main(["resume", str(run)])
    main(["resume", str(run)])
    out, err = capsys.readouterr()
    shown = (out + err).replace("\n", "")
    assert all(character.isprintable() for character in shown), ascii(shown)
    if text.startswith("["):
        assert text in out + err  # markup is text


@pytest.mark.parametrize("name", ["[red]run[/red]", "[/]", "[link=x]y[/link]", "a b", "-run", ":smile:"])
def test_markup_in_the_name_of_a_run_is_text(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", "Pendulum-v1", "--steps", "60", "--hidden", "8", "--eval-episodes", "1", f"--out={name}"])
    out = capsys.readouterr().out
    assert f"run folder: {name}" in out and f"Learning curve: {name}/report" in out
