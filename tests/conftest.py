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
def gpu_that_obeys_at_once(monkeypatch):
    """Stands in for a GPU that records: what it is told to do it does at once, on the CPU."""

    class Recording:
        def __init__(self, work):
            self.replay = work

    class Mark:
        def set(self):
            pass

        wait = set

    monkeypatch.setattr("t3d.learners.cudagraph.recorded", Recording)
    monkeypatch.setattr("t3d.learners.cudagraph.Mark", Mark)
    monkeypatch.setattr("t3d.learners.cudagraph.ON_GPU", {})
