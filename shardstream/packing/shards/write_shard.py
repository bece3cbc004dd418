"""Write one shard and its index, outside a dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from shardstream.errors import OptionError, SampleError
from shardstream.packing.encode import encode_sample
from shardstream.packing.shards.part_writer import PartWriter, WriterOptions
from shardstream.storage import open_output_folder, parent_url


def write_shard(
    url: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write samples to one tar and its index ``NAME.tar.idx``; both appear when they are complete.

    For many shards use `ShardWriter`, which also writes a manifest.

    Args:
        url: The tar; its name ends in ".tar".
        samples: Dicts with ``__key__`` and fields, which are encoded as by `ShardWriter`.
        storage_options: As in `ShardDataset`.

    Returns:
        The number of samples.

    Raises:
        OptionError: If the name does not end in ".tar".
        SampleError: If a sample cannot be written, or there is none; then no file is written.
        StorageError: If a file cannot be written.
    """
    name = os.fspath(url)
    if not name.endswith(".tar"):
        raise OptionError(f"the name of a shard ends in .tar, not as {name!r}")
    folder = open_output_folder(parent_url(name), storage_options, None)
    limits = WriterOptions(max_samples=sys.maxsize, max_bytes=sys.maxsize)
    with closing(
        PartWriter(
            folder,
            limits,
            name=lambda _: name.rpartition("/")[2],
            check_owner=lambda: None,
            replaces=True,
        )
    ) as writer:
        for sample in samples:
            if not isinstance(sample.get("__key__"), str):
                raise SampleError("a sample needs a text '__key__'", shard=name)
            writer.write(sample["__key__"], encode_sample(sample))
        if not writer.nsamples:
            raise SampleError("there are no samples: an empty shard would be skipped in silence")
        writer.finish()
    folder.sync()
    return writer.nsamples
