"""Returns over many seeds: what is trained (`suites`), training it (`returns`), and the tables and figures (`tables`).

The raw files that `returns` leaves hold every episode of every evaluation of every seed; the rest is made from them.
"""

from t3d.bench.returns import RESULTS, RUNS, train_suite
from t3d.bench.suites import SUITES, SuiteName, Task, tasks_of
from t3d.bench.tables import read_results, show, write_docs

__all__ = [
    "RESULTS",
    "RUNS",
    "SUITES",
    "SuiteName",
    "Task",
    "read_results",
    "show",
    "tasks_of",
    "train_suite",
    "write_docs",
]
