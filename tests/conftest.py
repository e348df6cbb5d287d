import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # small products; and two test processes do not fight for the cores


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
