import os
import sys
from pathlib import Path

# One thread for each test process, and for the processes that it starts: set before PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Mark what tests/slow.txt lists: a file, a test, or a test with its parameters."""
    slow = set(Path(__file__).with_name("slow.txt").read_text().splitlines())
    for item in items:
        test = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        if not slow.isdisjoint({item.path.name, test, test.partition("[")[0]}):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # no process waits for a slow one at the end


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """A stand-in for CUDA graphs: a replay runs the captured work at once, on the CPU."""

    class Graph:
        def __init__(self, work):
            self.replay = work

    class Event:
        def record(self):
            pass

        wait = record

    monkeypatch.setattr("t3d.learners.cudagraph.capture", Graph)
    monkeypatch.setattr("t3d.learners.cudagraph.StreamEvent", Event)
    monkeypatch.setattr("t3d.learners.cudagraph.ON_GPU", {})
