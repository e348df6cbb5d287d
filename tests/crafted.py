"""Run folders that somebody made by hand, with checksums that fit: checksums are for damage, and keep nobody out."""

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file

from t3d import files
from t3d.runs.metrics import Mark, _chain


def newest(run):
    return max((Path(run) / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("step-")))


def older_checkpoints_removed(run):
    """Only the newest checkpoint stays, so that there is none to fall back on."""
    for folder in (Path(run) / "checkpoints").iterdir():
        if folder != newest(run):
            (folder / "manifest.json").unlink()


def manifest(run, change):
    """The newest manifest as `change` returns it, with its own checksum put right."""
    path = newest(run) / "manifest.json"
    values = json.loads(path.read_text())
    values.pop("sha256")
    values = change(values) or values
    path.write_text(json.dumps(files.with_sum(values)))


def written(path):
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def state(run, change):
    """The newest state as `change` leaves it, and its manifest put right."""
    path = newest(run) / json.loads((newest(run) / "manifest.json").read_text())["state_file"]
    tensors = load_file(path)
    change(tensors)
    path.write_bytes(files.pack(tensors))
    manifest(run, lambda values: values.update(state=written(path)))


def config(run, **changes):
    """config.json with other values and its checksum put right."""
    path = Path(run) / "config.json"
    values = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"} | changes
    path.write_text(json.dumps(files.with_sum(values)))


def metrics(run, change):
    """metrics.jsonl with rows that `change` leaves, numbered and chained anew, and the newest manifest put right."""
    path, mark, lines = Path(run) / "metrics.jsonl", Mark(), b""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    for row in rows:
        row.pop("chain", None)
        text = json.dumps(row).encode()
        chain = _chain(mark.chain, text)
        line = text[:-1] + f', "chain": "{chain}"}}\n'.encode()
        lines, mark = lines + line, Mark(mark.size + len(line), mark.rows + 1, chain)
    path.write_bytes(lines)
    manifest(run, lambda values: values.update(metrics=vars(mark)))
