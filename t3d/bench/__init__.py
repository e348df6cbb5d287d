"""Benchmarks of returns over many seeds: tasks (`suites`), training (`returns`), tables (`tables`), `figures`.

`returns` writes a result file per task with every episode of every evaluation of every seed. Tables and figures are
made from these files.
"""

from t3d.bench.suites import SuiteName, Task, tasks_of
from t3d.bench.tables import read_results, write_docs

__all__ = ["SuiteName", "Task", "read_results", "tasks_of", "write_docs"]
