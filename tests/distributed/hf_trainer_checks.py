"""Checks with the Hugging Face Trainer, each run by every rank of a job (see trainers_job.py)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import shardstream as ss
from shardstream.integrations.hf import LoaderStateCallback, TrainerLoader
from tests.distributed.trainers_job import document_block
from tests.small_datasets import grouped

SHORT_DOCUMENT = 3  # tokens of the shortest document of `packed_rows`


class Net(torch.nn.Module):
    """A model that records its training samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ARG002  (asked for by name)
        if self.training:
            self.seen.append(ids.tolist())
        return {"loss": self.layer(ids[:, None].float()).mean(), "logits": ids}


class StopAfter(TrainerCallback):  # type: ignore[misc]  # of no known type
    """A callback that saves a checkpoint and ends the training, like a preempted job."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self.steps:
            control.should_save = control.should_training_stop = True


class LoaderTrainer(Trainer):  # type: ignore[misc]  # of no known type
    """The Trainer of docs/trainers.md."""

    def __init__(self, *args: Any, loader: Any, **kwargs: Any) -> None:
        self.loader = loader
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(eval_dataset)


def dataset(folder: str, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(folder, **grouped(microbatch=4, **options)).decode().map(_as_inputs)


def _as_inputs(sample: dict[str, Any]) -> dict[str, Any]:
    return {"ids": int(sample["cls"]), "labels": int(sample["cls"])}


def _has_odd_number(sample: dict[str, Any]) -> bool:
    return bool(sample["ids"] % 2)


def _arguments(out: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "logging_strategy": "no",
    }
    return TrainingArguments(
        output_dir=str(out), use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", remove_unused_columns=False, **(defaults | options),
    )  # fmt: skip


def _train(trainer: Trainer, stop: int | None, *, resume: bool) -> list[list[int]]:
    if stop is not None:
        trainer.add_callback(StopAfter(stop))
        trainer.callback_handler.callbacks.reverse()  # before the callback that saves the loader's state
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.seen  # type: ignore[no-any-return]


def _with_dataset(
    folder: str, out: Path, stop: int | None = None, *, resume: bool = False, **options: Any
) -> list[list[int]]:
    """Train on a `ShardDataset`."""
    trainer = Trainer(
        Net(), _arguments(out, **options), train_dataset=dataset(folder, shuffle=True)
    )
    return _train(trainer, stop, resume=resume)


def _with_loader(
    loader: ss.ShardLoader,
    out: Path,
    stop: int | None = None,
    *,
    resume: bool = False,
    **options: Any,
) -> list[list[int]]:
    """Train on a `ShardLoader`."""
    arguments, callbacks = _arguments(out, **options), [LoaderStateCallback()]
    trainer = LoaderTrainer(Net(), arguments, loader=TrainerLoader(loader), callbacks=callbacks)
    return _train(trainer, stop, resume=resume)


def epochs_of_dataset(folder: str, out: Path) -> Any:
    """Samples of three epochs of training on a `ShardDataset`."""
    epochs = [
        _with_dataset(
            folder,
            out,
            num_train_epochs=3,
            gradient_accumulation_steps=1,
            dataloader_num_workers=workers,
        )
        for workers in (0, 1)
    ]
    return [
        [seen[n * len(seen) // 3 : (n + 1) * len(seen) // 3] for n in range(3)] for seen in epochs
    ]


def trained_on_datasets(folder: str, out: Path) -> Any:
    """Samples of two epochs in one run, and in two runs; the Trainer splits the dataset."""
    found = {}
    for name, dispatch in (("rank 0 reads", None), ("each rank reads", False)):
        config: dict[str, Any] = {"accelerator_config": {"dispatch_batches": dispatch}}
        whole = _with_dataset(folder, out / name, **config)
        stop = (len(whole) // 2 + 5) // 2  # in the second epoch
        seen = _with_dataset(folder, out / name, stop, **config)
        seen += _with_dataset(folder, out / name, resume=True, **config)
        found[name] = {"whole": whole, "seen": seen}
    return found


def trained_on_loaders(folder: str, out: Path) -> Any:
    """The same with a `ShardLoader`, and with batches twice as large after the stop."""

    def loader(batch_size: int = 8, num_workers: int = 0) -> ss.ShardLoader:
        shuffled = dataset(folder, shuffle=True, lanes=8)
        return ss.ShardLoader(shuffled, batch_size, num_workers=num_workers)

    whole = _with_loader(loader(), out)
    stop = (len(whole) // 2 + 5) // 2
    before = _with_loader(loader(num_workers=1), out, stop)
    return {
        "whole": whole,
        "same": before + _with_loader(loader(num_workers=1), out, resume=True),
        "no skip": before + _with_loader(loader(), out, resume=True, ignore_data_skip=True),
        "larger": before
        + _with_loader(loader(16), out, resume=True, gradient_accumulation_steps=1),
    }


def trained_where_counts_change(folder: str, out: Path) -> Any:
    """A pipeline with a position per rank: only odd samples, shuffled again."""

    def loader() -> ss.ShardLoader:
        odd = dataset(folder, shuffle=True).select(_has_odd_number).shuffle(16)
        return ss.ShardLoader(odd.with_length(8 * 8), 8, num_workers=1)

    whole = _with_loader(loader(), out)
    stop = 1 if len(whole) < 10 else 5
    seen = _with_loader(loader(), out, stop)
    return {"whole": whole, "seen": seen + _with_loader(loader(), out, resume=True)}


def readme(folder: str, out: Path) -> Any:
    """Samples that the code of docs/trainers.md trains on, resumed after the first step."""
    loader = ss.ShardLoader(dataset(folder, shuffle=True), 8)
    _with_loader(loader, out, 1)
    names: dict[str, Any] = {"model": Net(), "args": _arguments(out, num_train_epochs=1)}
    names |= {"train_loader": loader, "eval_loader": ss.ShardLoader(dataset(folder), 8)}
    exec(document_block("docs/trainers.md", "hf_train.py"), names)  # noqa: S102  (our own docs)
    evaluated = names["trainer"].evaluate()
    return {"seen": names["model"].seen, "loss": evaluated["eval_loss"]}


def packed_rows(folder: str, out: Path) -> Any:
    """Losses of a step on packed rows, and of their documents one by one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, initializer_range=0.5,
        )
    )  # fmt: skip
    rows = (
        ss.ShardDataset(folder, shuffle=True)
        .decode()
        .map(_as_document)
        .pack_sequences(
            "ids", 16, lengths=[SHORT_DOCUMENT + n % 5 for n in range(102)], labels=True
        )
        .map(_as_model_inputs)
    )
    mine = next(iter(ss.ShardLoader(rows, 4)))
    batches: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(batches, mine)
    with torch.no_grad():
        losses = [
            model(input_ids=ids, labels=ids, use_cache=False).loss.item()
            for ids in _documents(batches)
            for _ in range(ids.shape[1] - 1)  # a loss for each token after the first
        ]
        cached, masked = (
            model(**mine, **options).loss.item()
            for options in ({}, {"attention_mask": torch.ones_like(mine["input_ids"])})
        )
        apart = model(**mine, use_cache=False).loss.item()
    arguments = _arguments(
        out, max_steps=1, gradient_accumulation_steps=1, logging_strategy="steps", logging_steps=1
    )
    callbacks = [LoaderStateCallback()]
    trainer = LoaderTrainer(
        model, arguments, loader=TrainerLoader(ss.ShardLoader(rows, 4)), callbacks=callbacks
    )
    trainer.train()
    logged = trainer.state.log_history[0]["loss"]
    return {
        "logged": logged,
        "alone": float(np.mean(losses)),
        "apart": apart,
        "joined": [cached, masked],
    }


def _as_document(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["cls"])
    return {"ids": np.arange(number, number + SHORT_DOCUMENT + number % 5)}


def _as_model_inputs(row: dict[str, Any]) -> dict[str, Any]:
    """Name the fields of a packed row as the models of transformers do."""
    return {"input_ids": row["ids"], "labels": row["labels"], "position_ids": row["positions"]}


def _documents(batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the documents of packed rows, each as a batch of one."""
    found = []
    for batch in batches:
        for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            starts = (positions == 0).nonzero().flatten().tolist()
            found += [ids[None, a:b] for a, b in pairwise([*starts, len(ids)])]
    return [ids for ids in found if ids.shape[1] > 1]


def evaluated(folder: str, out: Path) -> Any:
    """Samples that metrics are computed on."""
    metrics: list[list[int]] = []

    def compute(prediction: Any) -> dict[str, float]:
        metrics.append(np.asarray(prediction.predictions).tolist())
        return {}

    for given in (ss.ShardLoader(dataset(folder), 8), dataset(folder)):
        kind = LoaderTrainer if isinstance(given, ss.ShardLoader) else Trainer
        extra = {"loader": None} if kind is LoaderTrainer else {}
        trainer = kind(Net(), _arguments(out), compute_metrics=compute, **extra)
        trainer.evaluate(given)
    return metrics


def refusals(folder: str, out: Path) -> Any:
    """Errors of configurations in which a training would get wrong samples."""

    def loader(batch_size: int = 8, device: str | None = None) -> ss.ShardLoader:
        return ss.ShardLoader(dataset(folder, shuffle=True), batch_size, device=device)

    def attempt(trainer: Trainer, *, resume: bool = True) -> str:
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ss.ShardStreamError as error:
            return str(error)
        return "nothing"

    def trainer(given: Any, *callbacks: Any) -> Trainer:
        return LoaderTrainer(Net(), _arguments(out), loader=given, callbacks=list(callbacks))

    _with_loader(loader(), out, 2)
    return {
        "no callback": attempt(trainer(TrainerLoader(loader()))),
        "bare loader": attempt(trainer(loader())),
        "callback on a bare loader": attempt(
            trainer(loader(), LoaderStateCallback()), resume=False
        ),
        "other batches": attempt(trainer(TrainerLoader(loader(16)), LoaderStateCallback())),
        "other device": attempt(
            trainer(TrainerLoader(loader(device="meta")), LoaderStateCallback()), resume=False
        ),
    }


# Check -> the numbers of ranks that it runs on.
CHECKS = {
    epochs_of_dataset: (1, 2),
    trained_on_datasets: (1, 2),
    trained_on_loaders: (1, 2),
    trained_where_counts_change: (2,),
    readme: (2,),
    packed_rows: (1, 2),
    evaluated: (2,),
    refusals: (1,),
}
