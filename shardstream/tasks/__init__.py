"""Run shard tasks in this thread, in processes, or in any ``concurrent.futures`` pool.

executor        the protocols `Task` and `Executor`; `LocalExecutor`, `FuturesExecutor` and `Parts`
process_pool    worker processes that end with their parent and ignore Ctrl-C
"""

from shardstream.tasks.executor import (
    JSON,
    Executor,
    FuturesExecutor,
    LocalExecutor,
    Parts,
    RetryCount,
    Task,
    run_task,
)
from shardstream.tasks.process_pool import ProcessPool

__all__ = [
    "JSON",
    "Executor",
    "FuturesExecutor",
    "LocalExecutor",
    "Parts",
    "ProcessPool",
    "RetryCount",
    "Task",
    "run_task",
]
