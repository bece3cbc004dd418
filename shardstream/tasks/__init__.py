"""Run shard tasks in this thread, in processes, or in any ``concurrent.futures`` pool.

executor        the protocols `Task` and `Executor`; `LocalExecutor` and `FuturesExecutor`
process_pool    worker processes that end with their parent and ignore Ctrl-C
"""

from shardstream.tasks.executor import JSON, Executor, FuturesExecutor, LocalExecutor, Task
from shardstream.tasks.process_pool import ProcessPool

__all__ = [
    "JSON",
    "Executor",
    "FuturesExecutor",
    "LocalExecutor",
    "ProcessPool",
    "Task",
]
