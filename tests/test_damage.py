"""Damage to a run folder, while nobody looks and while a run goes on: it is said, and mended where it can be."""

import json
import os
import shutil
from pathlib import Path

import damaged
import pytest
from killed import SMALL, end_of

import t3d
from t3d import T3DError
from t3d.cli import main
from t3d.runs import checkpoints
from t3d.runs.folder import Run
from t3d.runs.metrics import Metrics
from t3d.trainer import Trainer

KNOBS = {**SMALL, "steps": 300}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return t3d.train("Pendulum-v1", out=tmp_path_factory.mktemp("source") / "run", **KNOBS).path


@pytest.fixture
def run(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


def test_no_damage_is_silent():
    table = damaged.trials(each=8)
    assert sum(counts[name] for counts in table.values() for name in ("SILENT", "TRACEBACK")) == 0
    assert table["segments"]["repaired"] and table["newest state"]["passed over"] == 8
    assert table["policies"]["refused"] == table["config.json"]["refused"] == table["T3D.save"]["refused"] == 8
    assert table["a policy's card (.json)"]["not needed"] == 8


# ------------------------------------------------------------------------------------------------- at rest


@pytest.mark.parametrize("change", [lambda b: b + b"more", lambda b: b[:-1], lambda b: b[:-1000], lambda b: b[:3]])
def test_a_segment_of_another_length_is_repaired(change, run, capsys):
    whole, segment = end_of(run), run / "replay" / "step-140.safetensors"
    content = segment.read_bytes()
    segment.write_bytes(change(content))
    t3d.resume(run, steps=310)
    said = capsys.readouterr().out
    assert "It was repaired from step-140.safetensors.parity." in said and "checkpoint is of step 300" in said
    assert segment.read_bytes() == content and end_of(run)[2]["0"].startswith(whole[2]["0"])


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:-1] + b"!", None])
def test_a_damaged_parity_is_written_again(change, run, capsys):
    beside = run / "replay" / "step-140.safetensors.parity"
    good = beside.read_bytes()
    beside.unlink() if change is None else beside.write_bytes(change(good))
    t3d.resume(run)
    assert f"{beside}" in capsys.readouterr().out and beside.read_bytes() == good


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"format": 5}'])
def test_a_damaged_older_manifest_stops_nothing(content, run, capsys):
    old = run / "checkpoints" / "step-280" / "manifest.json"
    old.write_bytes(content)
    t3d.resume(run, steps=600, progress=False)
    assert old.read_bytes() == content  # what cannot be read is left alone, and so is what it may speak of
    assert sorted(path.name for path in old.parent.parent.iterdir()) == ["step-280", "step-560", "step-600"]


def test_missing_folders_are_made_again(run):
    for name in ("policies", "report"):
        shutil.rmtree(run / name)
    t3d.resume(run, steps=400, progress=False)
    assert (run / "report" / "learning-curve.png").exists() and t3d.load(run, which="last").card.step == 400


def test_a_torn_row_is_named(run, capsys):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"n": 99, "kind": "epi')
    line = len((run / "metrics.jsonl").read_bytes().splitlines())
    with pytest.warns(t3d.errors.T3DWarning, match=f"line {line}, is cut off after 22 bytes: it is ignored"):
        rows = t3d.Run.open(run).metrics
    assert rows[-1]["step"] == 300
    t3d.resume(run, steps=310)
    assert f"line {line}, is cut off after 22 bytes" in capsys.readouterr().out
    assert t3d.Run.open(run).metrics[-1]["step"] == 310  # and no warning


@pytest.mark.parametrize("tail", [bytes(500), b"\n" * 9, b'{"n": 1}\n', b"\xff" * 2**21, b"{}\n[]\nnull\n"])
def test_damage_behind_the_newest_checkpoint_is_passed(tail, run, capsys):
    """As a power cut leaves it: the file has its length, and its end was never written."""
    before = end_of(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    t3d.resume(run)
    assert "is behind the newest checkpoint" in capsys.readouterr().out and end_of(run) == before


def test_rows_that_a_checkpoint_knows_may_not_be_missing(run, capsys):
    lines, whole = (run / "metrics.jsonl").read_bytes().splitlines(True), end_of(run)
    for rest in (lines[1:], lines[:3] + lines[4:], [lines[1], lines[0], *lines[2:]], []):
        (run / "metrics.jsonl").write_bytes(b"".join(rest))
        with pytest.raises(T3DError, match=r"metrics\.jsonl"):
            t3d.Run.open(run).metrics  # noqa: B018
        with pytest.raises(T3DError, match="no checkpoint"):
            t3d.resume(run, steps=400, progress=False)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    t3d.resume(run)  # the one before knows fewer
    assert "The checkpoint of step 300 is skipped." in capsys.readouterr().out and end_of(run) == whole


def test_a_config_that_was_changed_is_refused_where_it_is_used_as_it_is(run, tmp_path, capsys):
    path = run / "config.json"
    path.write_text(path.read_text().replace('"gamma": 0.99', '"gamma": 0.95'))
    for command in ("resume", "evaluate"):
        with pytest.raises(SystemExit):
            main([command, str(run)])
        assert "does not match its own checksum" in capsys.readouterr().err
    with pytest.raises(T3DError, match="does not match its own checksum"):
        t3d.load(run)
    main(["train", "--config", str(path), "--out", str(tmp_path / "new"), "--steps", "50"])  # settings to take
    assert t3d.Run.open(tmp_path / "new").config["gamma"] == 0.95


def test_more_steps_are_written_with_a_checksum(run):
    t3d.resume(run, steps=350, progress=False)
    assert t3d.Run.open(run).config["steps"] == 350
    t3d.resume(run, progress=False)


# ------------------------------------------------------------------------------- while a run is going on


def during(monkeypatch, step, change):
    """Do something to the folder when a run has come to a step."""
    one_step = Trainer.step

    def changed(self):
        if self.state.step == step:
            change()
        return one_step(self)

    monkeypatch.setattr(Trainer, "step", changed)


def test_a_segment_lost_during_a_run_is_said_and_written_again(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    during(monkeypatch, 200, (path / "replay" / "step-70.safetensors").unlink)
    t3d.train("Pendulum-v1", out=path, **{**KNOBS, "progress": True})
    said = capsys.readouterr().out
    assert "step-70.safetensors was removed or changed during the run" in said
    monkeypatch.undo()
    whole = t3d.train("Pendulum-v1", 400, out=tmp_path / "whole", **SMALL)
    t3d.resume(path, steps=400, progress=False)
    assert end_of(path)[1:3] == end_of(whole.path)[1:3]


def truncate(path):
    os.truncate(path, 100)


def replace(path):
    path.rename(path.with_name("old"))
    path.write_text("another\n")


@pytest.mark.parametrize("change", [Path.unlink, truncate, replace])
def test_metrics_lost_during_a_run_are_said_and_written_again(change, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    during(monkeypatch, 200, lambda: change(path / "metrics.jsonl"))
    t3d.train("Pendulum-v1", out=path, **{**KNOBS, "progress": True})
    assert "metrics.jsonl was removed or changed during the run" in capsys.readouterr().out
    monkeypatch.undo()
    whole = t3d.train("Pendulum-v1", out=tmp_path / "whole", **KNOBS)
    assert end_of(path) == end_of(whole.path)


def test_so_they_are_after_a_resume(run, monkeypatch, tmp_path, capsys):
    during(monkeypatch, 350, (run / "metrics.jsonl").unlink)
    t3d.resume(run, steps=400)
    assert "metrics.jsonl was removed" in capsys.readouterr().out
    monkeypatch.undo()
    whole = t3d.train("Pendulum-v1", 400, out=tmp_path / "whole", **SMALL)
    assert end_of(run)[3][-1] == end_of(whole.path)[3][-1] and t3d.Run.open(run).metrics


def test_folders_lost_during_a_run_are_made_again(tmp_path, monkeypatch):
    path = tmp_path / "run"
    during(monkeypatch, 200, lambda: [shutil.rmtree(path / name) for name in ("policies", "report")])
    t3d.train("Pendulum-v1", out=path, **KNOBS)
    assert t3d.load(path, which="last").card.step == 300 and (path / "report" / "learning-curve.png").exists()


def test_a_checkpoint_removed_during_a_run_is_no_reason_to_stop(tmp_path, monkeypatch):
    path = tmp_path / "run"
    during(monkeypatch, 200, lambda: shutil.rmtree(path / "checkpoints"))
    t3d.train("Pendulum-v1", out=path, **KNOBS)
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-210", "step-280", "step-300"][-2:]


# -------------------------------------------------------------------------------------- interrupted writes


class Interrupted(BaseException):
    """In the place of a kill: nothing after it is done."""


def interrupted_at(monkeypatch, number):
    """Let the so-many-th operation on files be the last one."""
    left = [number]

    def counted(function):
        def call(*arguments, **more):
            left[0] -= 1
            if left[0] < 0:
                raise Interrupted
            return function(*arguments, **more)

        return call

    for name in ("open", "fsync", "posix_fallocate", "replace", "unlink", "mkdir", "write"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


def test_a_policy_is_the_new_one_or_the_one_before(run):
    folder, before = Run.open(run), t3d.load(run, which="last")
    new = t3d.load(run, which="last")
    new.parameters["b1"] = new.parameters["b1"] + 1
    object.__setattr__(new.card, "step", 301)
    old, files = before.to_bytes(), {path: path.read_bytes() for path in (run / "policies").iterdir()}
    seen = set()
    for number in range(100):
        with pytest.MonkeyPatch.context() as patch:
            interrupted_at(patch, number)
            try:
                folder.save_policy(new, "last")
                whole = True
            except Interrupted:
                whole = False
        found = t3d.load(run, which="last").to_bytes()
        assert found in (old, new.to_bytes())
        seen.add(found)
        if whole:
            break
        for path, content in files.items():
            path.write_bytes(content)
    assert whole and len(seen) == 2 and number > 8
    assert json.loads((run / "policies" / "last-seed-0.json").read_text())["step"] == 301


def test_a_folder_killed_before_it_was_a_run_is_accepted(tmp_path):
    config = t3d.train("Pendulum-v1", out=tmp_path / "source", **KNOBS).config
    for number in range(100):
        path = tmp_path / str(number)
        path.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            interrupted_at(patch, number)
            try:
                run = Run(path)
                with run.lock():
                    run.begin(config)
            except Interrupted:
                pass
            finally:
                run.log.close()
        if (path / "config.json").exists():
            break
        t3d.train("Pendulum-v1", 30, out=path, **{**SMALL, "checkpoint_every": "600s"})
    assert number > 8


def test_a_folder_with_anything_else_is_not(tmp_path):
    for name in ("notes.txt", "metrics.jsonl", "policies/mine", ".bashrc"):
        path = tmp_path / name.replace("/", "-")
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("mine")
        with pytest.raises(T3DError, match="already holds files"):
            t3d.train("Pendulum-v1", out=path, **KNOBS)
        assert (path / name).read_text() == "mine"


def test_rows_are_numbered_and_chained(tmp_path):
    log = Metrics(tmp_path)
    log.begin()
    log.append([{"kind": "x", "step": step, "seed": 0} for step in range(5)])
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(True)
    assert [json.loads(line)["n"] for line in lines] == [*range(5)]
    for damaged_lines in (lines[1:], lines[:2] + lines[3:], [lines[0], lines[2], lines[1], *lines[3:]], lines[:2] * 2):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(damaged_lines))
        with pytest.raises(T3DError, match=r"line \d: the checksum does not match"):
            Metrics(tmp_path).rows()


def test_segments_are_put_together_only_as_they_were_written(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "MOST_SEGMENTS", 3)
    during(monkeypatch, 301, lambda: (run / "replay" / "step-70.safetensors").write_bytes(
        b"x" + (run / "replay" / "step-70.safetensors").read_bytes()[1:]))  # fmt: skip
    with pytest.raises(T3DError, match=r"step-70\.safetensors does not match its checksum"):
        t3d.resume(run, steps=400, progress=False)
    monkeypatch.undo()
    t3d.resume(run, steps=400, progress=False)  # mended from its parity
