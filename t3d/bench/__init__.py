"""Returns over many seeds: what is trained (`suites`), training it (`returns`), the tables and figures (`tables`).

The raw files that `returns` leaves hold every episode of every evaluation of every seed; the rest is made from them.
"""

from t3d.bench.suites import SuiteName, Task, tasks_of
from t3d.bench.tables import read_results, write_docs

__all__ = ["SuiteName", "Task", "read_results", "tasks_of", "write_docs"]
