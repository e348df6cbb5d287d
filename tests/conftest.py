import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # small products; and two test processes do not fight for the cores


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
