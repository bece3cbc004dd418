"""Show datasets, samples, batches and timings in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.catalog import Catalog
from shardstream.display import Shown, batch_html, dataset_html, sample_html
from shardstream.fetch import open_batch_fetcher

if TYPE_CHECKING:
    from shardstream.catalog import Numbers
    from shardstream.pipeline import Pipeline

_SAMPLES_SHOWN = 24


class SampleView(dict[str, Any]):
    """A sample that a notebook shows as a table; else a plain dict."""

    def _repr_html_(self) -> str:
        return sample_html(self)


def show(value: Any) -> Shown:
    """Return an object that a notebook shows: a dataset, a sample, or a batch with its pictures.

    Datasets, ``loader.stats()`` and the samples of a `ShardMapDataset` show themselves; batches are plain dicts and tuples, which do not.

    Args:
        value: A dataset, a sample (a dict with ``__key__``), or a batch as a loader returns it.
    """
    shows_itself = getattr(value, "_repr_html_", None)
    if shows_itself is not None:
        return Shown(shows_itself(), repr(value))
    is_sample = isinstance(value, Mapping) and isinstance(value.get("__key__"), str)
    kind = "sample" if is_sample else "batch"
    return Shown(sample_html(value) if is_sample else batch_html(value), f"<{kind}>")


def catalog_html(title: str, catalog: Catalog, numbers: Numbers | range, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have numbers.

    Args:
        title: Name of its class.
        catalog: All samples.
        numbers: Numbers of the samples of the dataset.
        pipeline: Its steps.
    """
    facts = {
        "samples": f"{len(numbers):,}",
        "shards": f"{catalog.num_shards:,}",
        "size": f"{catalog.total_bytes / 1e6:,.1f} MB",
        "fields": ", ".join(catalog.fields or ()) or "unknown before a sample is read",
        "steps": " > ".join(pipeline.steps) or "none",
    }
    return dataset_html(title, facts, _spread(catalog, numbers))


def stream_html(title: str, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have no numbers."""
    hint = "unknown: run 'shardstream index' once to count and show samples"
    return dataset_html(title, {"samples": hint, "steps": " > ".join(pipeline.steps) or "none"}, ())


def _spread(catalog: Catalog, numbers: Numbers | range) -> Iterator[tuple[int, object]]:
    """Yield samples from equal distances, as stored, with their places; an error of the store in place of one."""
    count = min(len(numbers), _SAMPLES_SHOWN)
    places = [n * len(numbers) // count for n in range(count)]
    chosen = np.array([numbers[place] for place in places], dtype=np.int64)
    fetcher = open_batch_fetcher(catalog)
    try:
        unique, inverse = np.unique(chosen, return_inverse=True)
        found = fetcher.samples(unique)
        for place, at in zip(places, inverse.tolist(), strict=True):
            yield place, found[at]
    except Exception as error:  # noqa: BLE001  (a notebook shows what is wrong)
        yield 0, error
    finally:
        fetcher.close()
