"""Every kind of file that T3D writes, damaged at random, and what becomes of it when it is read.

    python tests/damaged.py 600          so many flips, cuts, holes and additions for each kind of file

Nothing may be read as another value without a word, nothing may end in a traceback, and nothing may take a second.
`tests/test_damage.py` runs a smaller version.
"""

import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from killed import SMALL

import t3d
from t3d import api, trainer
from t3d.display import Display

KNOBS = {**SMALL, "steps": 300, "seeds": (3, 5), "buffer_size": 200}
KINDS = {
    "config.json": "config.json",
    "a policy's card (.json)": "policies/*.json",
    "policies": "policies/*.safetensors",
    "newest manifest": "checkpoints/step-300/manifest.json",
    "older manifest": "checkpoints/step-280/manifest.json",
    "newest state": "checkpoints/step-300/state.safetensors",
    "segments": "replay/*.safetensors",
    "parity": "replay/*.parity",
    "metrics.jsonl": "metrics.jsonl",
    "T3D.save": "agent.safetensors",
}
OUTCOMES = ("refused", "repaired", "passed over", "not needed", "SILENT", "TRACEBACK", "SLOW")


def make_folder(path):
    """A finished run, with a file of T3D.save in it."""
    t3d.train("Pendulum-v1", out=path, **KNOBS)
    torch.manual_seed(0)
    t3d.T3D(3, 1, 2.0, hidden=(8, 8)).save("agent", path)


def damage(path, draw):
    """One flipped bit, or a stretch of bytes that are cut off, lost, zeroed or added."""
    content = bytearray(path.read_bytes())
    at, length = draw.randrange(len(content)), draw.choice((1, 10, 5000))
    how = draw.choice(("flip", "flip", "flip", "cut", "zero", "lose", "add"))
    if how == "flip":
        content[at] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "zero":
        content[at : at + length] = bytes(len(content[at : at + length]))
    elif how == "lose":
        del content[at : at + length]
    else:
        content[at:at] = draw.randbytes(length)
    path.write_bytes(content)
    return how


def values_of(path, said):
    """Everything that can be read of a run folder, by what reads it; a sentence where that is refused."""
    restored = []

    def restore(state, *arguments):
        missed = RESTORE(state, *arguments)
        saved = {name: tensor.numpy().tobytes() for name, tensor in state.state_dict().items()}
        memory = state.learner.memory
        restored.append((saved, memory.rows[:, : int(memory.length[0])].numpy().tobytes()))
        return missed

    def agent():
        torch.manual_seed(1)
        one = t3d.T3D(3, 1, 2.0, hidden=(8, 8))
        one.load("agent", path)
        return {name: tensor.numpy().tobytes() for name, tensor in one._saved().items()}

    def policies():
        found = [t3d.load(path, seed, which) for seed in KNOBS["seeds"] for which in ("best", "last")]
        return [({k: t.numpy().tobytes() for k, t in one.parameters.items()}, one.card) for one in found]

    def resumed():
        t3d.resume(path)
        return restored

    trainer.restore = restore
    Display.say = lambda self, text: said.append(text)
    readers = {
        "config": lambda: t3d.Run.open(path).config,
        "metrics": lambda: t3d.Run.open(path).metrics,
        "policies": policies,
        "agent": agent,
        "resume": resumed,
    }
    values = {}
    try:
        for name, read in readers.items():
            try:
                values[name] = read()
            except t3d.T3DError as error:
                said.append(f"refused: {error}")
    finally:
        trainer.restore, Display.say = RESTORE, SAY
    return values


RESTORE, SAY = trainer.restore, Display.say


def outcome(values, whole, said):
    text = " ".join(said)
    if "refused: " in text:
        return "refused"
    if "skipped" in text:
        return "passed over"
    if values != whole:
        return "SILENT" if not said else "repaired"
    return "repaired" if "repaired" in text or "again" in text else "not needed"


def trials(each, seed=0, kinds=KINDS):
    """A table: for each kind of file, how often which outcome came."""
    draw, table = random.Random(seed), {}
    # The figures of a run are not tested here.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(api, "draw", lambda run, say: None):
        source = Path(folder) / "source"
        make_folder(source)
        spare = Path(folder) / "spare"
        shutil.copytree(source, spare)
        usual: list[str] = []
        whole = values_of(spare, usual)
        assert whole["resume"]  # what was restored is compared too
        for kind in kinds:
            table[kind] = dict.fromkeys(OUTCOMES, 0)
            for number in range(each):
                copy = Path(folder) / "copy"
                shutil.copytree(source, copy)
                path = draw.choice(sorted(copy.glob(KINDS[kind])))
                how, said = damage(path, draw), []
                begin = time.perf_counter()
                try:
                    what = outcome(values_of_copy(copy, said), whole, without_paths(said, usual))
                except Exception as problem:
                    what = "TRACEBACK"
                    print(f"{kind} {number} {how} {path.name}: {type(problem).__name__}: {problem}")
                if what == "SILENT":
                    print(f"{kind} {number} {how} {path.name}: silent")
                table[kind][what] += 1
                table[kind]["SLOW"] += time.perf_counter() - begin > 1
                shutil.rmtree(copy)
    return table


def values_of_copy(copy, said):
    with contextlib.redirect_stdout(io.StringIO()):
        return values_of(copy, said)


def without_paths(said, usual):
    """What is said beyond what is always said of a whole folder."""
    ordinary = {line.partition(": ")[2] for line in usual}
    return [line for line in said if line.partition(": ")[2] not in ordinary]


def main(each):
    torch.set_num_threads(1)
    begin = time.perf_counter()
    table = trials(each)
    print(f"{'':<26}" + "".join(f"{name:>13}" for name in OUTCOMES))
    for kind, counts in table.items():
        print(f"{kind:<26}" + "".join(f"{counts[name]:>13}" for name in OUTCOMES))
    bad = sum(counts[name] for counts in table.values() for name in ("SILENT", "TRACEBACK", "SLOW"))
    print(f"{each * len(table):,} damaged files in {time.perf_counter() - begin:.0f} s, {bad} of them wrong")
    return int(bad > 0)


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main(int(sys.argv[1])))
