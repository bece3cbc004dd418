"""What people see of samples: pictures, kinds of fields, HTML for notebooks. No file here imports torch."""

from shardstream.display.field_kinds import (
    Kind,
    choose_thumbnail,
    extension,
    is_mask_array,
    kinds_of,
    played_type,
)
from shardstream.display.notebook import (
    Bars,
    Shown,
    bars_html,
    batch_html,
    dataset_html,
    sample_html,
)
from shardstream.display.pictures import (
    Picture,
    image_size,
    npz_statistics,
    render,
    render_value,
    statistics,
)

__all__ = [
    "Bars",
    "Kind",
    "Picture",
    "Shown",
    "bars_html",
    "batch_html",
    "choose_thumbnail",
    "dataset_html",
    "extension",
    "image_size",
    "is_mask_array",
    "kinds_of",
    "npz_statistics",
    "played_type",
    "render",
    "render_value",
    "sample_html",
    "statistics",
]
