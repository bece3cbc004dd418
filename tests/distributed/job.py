"""The program of test_ranks.py: a training on several ranks that records the samples of each rank at each step.

Every rank appends a line of JSON a step to ``ids-<rank>.jsonl``; rank 0 saves ``checkpoint.pt`` every few steps.
Started by torchrun, or with ``--ranks N``: then it forks the ranks itself once torch is imported, which takes 3 CPU seconds a process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardstream as ss

warnings.filterwarnings("ignore", message="This DataLoader will create")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--workers-of-rank-1", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--remainder", default="pad")
    parser.add_argument("--on-error", default="raise")
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=-1)
    return parser.parse_args()


def make_loader(args: argparse.Namespace) -> ss.ShardLoader:
    dataset = ss.ShardDataset(
        args.url,
        shuffle=True,
        seed=1,
        order=ss.OrderOptions(
            lanes=args.lanes, microbatch=args.microbatch, remainder=args.remainder
        ),
        on_error=args.on_error,
    )
    columns = dataset.decode().to_tuple("cls")
    if dist.get_rank() == 1 and args.workers_of_rank_1 is not None:
        args.workers = args.workers_of_rank_1
    return ss.ShardLoader(
        columns,
        batch_size=args.batch_size,
        num_workers=args.workers,
        timeout=60 if args.workers else 0,
    )


def train(args: argparse.Namespace, log: TextIO) -> None:
    rank = dist.get_rank()
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    if not args.ranks:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = make_loader(args)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    step = 0
    for epoch in range(loader.epoch, args.epochs):
        loader.set_epoch(epoch)
        expected = loader.batches_left
        steps = 0
        for (ids,) in loader:
            if (rank, step) == (args.kill_rank, args.kill_step):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(ids[:, None].float()).mean().backward()  # DDP synchronises all ranks here
            if args.ranks:  # the same synchronisation as DDP, without 2 CPU seconds of imports
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            log.write(json.dumps({"epoch": epoch, "ids": ids.tolist()}) + "\n")
            log.flush()
            step, steps = step + 1, steps + 1
            if rank == 0 and step % args.save_every == 0:
                state = {"model": model.state_dict(), "loader": loader.state_dict()}
                torch.save(state, checkpoint.with_suffix(".part"))
                checkpoint.with_suffix(".part").replace(checkpoint)
        assert steps == expected, f"{steps} steps, batches_left said {expected}"


def run_rank(args: argparse.Namespace) -> NoReturn:
    dist.init_process_group("gloo")
    with (args.out / f"ids-{dist.get_rank()}.jsonl").open("w") as log:
        train(args, log)
    dist.barrier()
    dist.destroy_process_group()
    # DDP keeps gloo's threads alive past the group's end; one of them that lets go of a tensor while the interpreter
    # ends aborts the process now and then (PyTorch pull request 179291)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(args: argparse.Namespace) -> int:
    """Fork the ranks as torchrun would start them; when one fails, end the others and return its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks)}
    running = set()
    for rank in range(args.ranks):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(args)
            finally:  # only if it has failed
                traceback.print_exc()
                os._exit(1)
        running.add(pid)
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGTERM)
    return code


def main() -> None:
    args = arguments()
    if args.ranks:
        sys.exit(run_ranks(args))
    run_rank(args)


if __name__ == "__main__":
    main()
