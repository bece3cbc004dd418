"""What people see of samples: pictures, kinds of fields, HTML for notebooks. No file here imports torch.

field_kinds     names of fields -> how they are shown
pictures        field bytes and arrays -> small pictures, always encoded again
notebook        datasets, samples, batches and timings as HTML without scripts
"""

from shardstream.display.notebook import (
    Bars,
    Shown,
    bars_html,
    batch_html,
    dataset_html,
    sample_html,
)

__all__ = [
    "Bars",
    "Shown",
    "bars_html",
    "batch_html",
    "dataset_html",
    "sample_html",
]
