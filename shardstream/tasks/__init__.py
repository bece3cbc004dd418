"""Run shard tasks in this thread, in processes, or in any ``concurrent.futures`` pool."""

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
