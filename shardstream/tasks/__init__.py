"""Run shard tasks in this thread, in processes, or in any ``concurrent.futures`` pool."""

from shardstream.tasks.executor import (
    JSON,
    Executor,
    FuturesExecutor,
    LocalExecutor,
    Parts,
    ProcessPool,
    RetryCount,
    Task,
    forget,
    keep,
    run_task,
)

__all__ = [
    "JSON",
    "Executor",
    "FuturesExecutor",
    "LocalExecutor",
    "Parts",
    "ProcessPool",
    "RetryCount",
    "Task",
    "forget",
    "keep",
    "run_task",
]
