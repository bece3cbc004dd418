"""Run the checks of test_trainers.py on one rank or on two, forked from one process that has imported the framework.

Prints a JSON object: for each check and number of ranks, what each rank returned.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

Check = Callable[[str, Path], Any]


def document_block(document: str, name: str) -> Any:
    """Return the compiled block of a document that begins with this file name."""
    text = Path(__file__).parents[2].joinpath(document).read_text()
    found = re.search(rf"^```python\n(# {name}\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return compile(found[1], name, "exec")


def run_rank(check: Check, folder: str, out: Path, rank: int, world_size: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    store = f"file://{out}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        result = check(folder, out)
    except BaseException:  # noqa: BLE001  (the test shows it)
        result = traceback.format_exc()
        sys.stderr.write(result)
    (out / f"rank-{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way (see job.py)


def run_check(check: Check, folder: str, out: Path, world_size: int) -> list[Any]:
    out.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    arguments = [(check, folder, out, rank, world_size) for rank in range(world_size)]
    ranks = [context.Process(target=run_rank, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def main(checks: str, folder: str, out: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    module = importlib.import_module(f"tests.distributed.{checks}")
    logging.disable(logging.WARNING)
    results = {
        check.__name__: {
            world_size: run_check(
                check, folder, Path(out) / f"{check.__name__}-{world_size}", world_size
            )
            for world_size in world_sizes
        }
        for check, world_sizes in module.CHECKS.items()
    }
    Path(out, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
