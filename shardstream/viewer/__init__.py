"""Look at a dataset in a browser: ``shardstream view``. Pure functions decide, a thin server shows. No file here imports torch.

A request passes through these files:

    server          listen, print the address, open the browser
    guard           refuse requests of other pages, ask for the token, headers of responses
    app             routes: the only file that knows Starlette
    session         the dataset that is open; answers the questions of the page
    samples         samples by number and range reads, or the first ones of data without an index
    selection       samples by condition, class and key; histograms counts the values of columns
    page            samples -> cards and details; their pictures are made in the room ``display``
    user_decode     call the user's function
    epoch_view      order, topology and step -> what each rank reads; a saved state -> what comes next
    bad_list        reports of bad samples -> numbers of samples
    static/         the page: HTML, CSS and JavaScript, as they are sent
"""

from typing import TYPE_CHECKING, Any

from shardstream.viewer.epoch_view import Training, read_state, view_epoch
from shardstream.viewer.guard import Address, Guard
from shardstream.viewer.session import Session, ViewOptions
from shardstream.viewer.user_decode import load_function

if TYPE_CHECKING:
    from shardstream.viewer.server import serve

__all__ = [
    "Address",
    "Guard",
    "Session",
    "Training",
    "ViewOptions",
    "load_function",
    "read_state",
    "serve",
    "view_epoch",
]


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardstream.viewer.server import serve  # noqa: PLC0415  (Starlette and uvicorn are an extra)

    return serve
