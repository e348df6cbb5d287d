"""Files are written whole or not at all."""

import os
import stat

import pytest
import torch
from killed import SMALL

import t3d
from t3d import T3DError, files


def test_a_file_is_written_aside_and_flushed(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), real_fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a, **b: (events.append("replace"), real_replace(*a, **b)))
    files.write_bytes(tmp_path / "a", b"1")
    assert events == ["fsync", "replace", "fsync"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(T3DError, match="No space left"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_files_are_readable_by_others(tmp_path):
    old = os.umask(0o022)
    try:
        files.write_bytes(tmp_path / "a.safetensors", files.seal({"x": torch.ones(2)}, {}))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o644
    assert files.unseal(files.read_bytes(tmp_path / "a.safetensors"), tmp_path)[0]["x"].tolist() == [1, 1]


def test_a_system_without_the_calls_trains_and_says_which_promises_are_off(tmp_path, monkeypatch, capsys):
    """As on Windows: paths instead of open folders, and no flock."""
    monkeypatch.setattr(files, "RELATIVE", False)
    monkeypatch.setattr(files, "fcntl", None)
    run = t3d.train("Pendulum-v1", out=tmp_path / "run", **{**SMALL, "steps": 150, "progress": True})
    said = capsys.readouterr().out
    assert "use run folders of people you trust only" in said and "no flock" in said
    t3d.resume(run, steps=160, progress=False)
    (run.path / "replay").rename(tmp_path / "replay")
    (run.path / "replay").symlink_to(tmp_path / "replay")
    with pytest.raises(t3d.T3DError, match="is a link"):
        t3d.resume(run, steps=170, progress=False)
    monkeypatch.undo()
    assert not files.promises_off()
