"""Show datasets, samples, batches and timings in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.display import Shown, batch_html, dataset_html, sample_html

if TYPE_CHECKING:
    from shardstream.pipeline import Pipeline
    from shardstream.samples import Numbers, Samples

_SAMPLES_SHOWN = 24
_NAMES_SHOWN, _NAME_CHARACTERS = 40, 80


class SampleView(dict[str, Any]):
    """A sample that a notebook shows as a table; else a plain dict."""

    def _repr_html_(self) -> str:
        return sample_html(self)


def show(value: Any) -> Shown:
    """Return an object that a notebook shows: a dataset, a sample, or a batch with its pictures.

    Datasets, ``loader.stats()`` and the samples of ``dataset.by_number()`` show themselves; batches are plain dicts and tuples, which do not.

    Args:
        value: A dataset, a sample (a dict with ``__key__``), or a batch as a loader returns it.
    """
    if _is_sample(value):
        return Shown(sample_html(value), "<sample>")
    return _shown_by_itself(value) or Shown(batch_html(value), "<batch>")


def _is_sample(value: Any) -> bool:
    try:
        return isinstance(value, Mapping) and isinstance(value.get("__key__"), str)
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return False


def _shown_by_itself(value: Any) -> Shown | None:
    """Return what a value shows of itself; None if it does not, or cannot."""
    if isinstance(value, type):  # its method would need an object
        return None
    try:
        page, text = value._repr_html_(), repr(value)
    except Exception:  # noqa: BLE001  (most values have no such method)
        return None
    return Shown(page, text) if isinstance(page, str) else None


def samples_html(title: str, samples: Samples, numbers: Numbers | range, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have numbers.

    Args:
        title: Name of its class.
        samples: All samples.
        numbers: Numbers of the samples of the dataset.
        pipeline: Its steps.
    """
    facts = {
        "samples": f"{len(numbers):,}",
        "shards": f"{samples.num_shards:,}",
        "size": f"{samples.total_bytes / 1e6:,.1f} MB",
        "fields": _listed(samples.fields or ()) or "unknown before a sample is read",
        "steps": " > ".join(pipeline.steps) or "none",
    }
    return dataset_html(title, facts, _spread(samples, numbers))


def stream_html(title: str, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have no numbers."""
    hint = "unknown: run 'shardstream index' once to count and show samples"
    return dataset_html(title, {"samples": hint, "steps": " > ".join(pipeline.steps) or "none"}, ())


def _listed(names: Sequence[str]) -> str:
    shown = [name[:_NAME_CHARACTERS] for name in names[:_NAMES_SHOWN]]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _spread(samples: Samples, numbers: Numbers | range) -> Iterator[tuple[int, object]]:
    """Yield samples from equal distances, as stored, with their places; an error of the store in place of one."""
    count = min(len(numbers), _SAMPLES_SHOWN)
    places = [n * len(numbers) // count for n in range(count)]
    chosen = np.array([numbers[place] for place in places], dtype=np.int64)
    fetcher = samples.open_fetcher()
    try:
        unique, inverse = np.unique(chosen, return_inverse=True)
        found = fetcher.samples(unique)
        for place, at in zip(places, inverse.tolist(), strict=True):
            yield place, found[at]
    except Exception as error:  # noqa: BLE001  (a notebook shows what is wrong)
        yield 0, error
    finally:
        fetcher.close()
