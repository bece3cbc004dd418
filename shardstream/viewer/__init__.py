"""Look at a dataset in a browser: ``shardstream view``. Pure functions decide, a thin server shows. No file here imports torch."""

from typing import TYPE_CHECKING, Any

from shardstream.viewer.epoch_view import Stored as Stored
from shardstream.viewer.epoch_view import Training as Training
from shardstream.viewer.epoch_view import open_source as open_source
from shardstream.viewer.epoch_view import read_state as read_state
from shardstream.viewer.epoch_view import view_epoch as view_epoch
from shardstream.viewer.guard import Address as Address
from shardstream.viewer.guard import Guard as Guard
from shardstream.viewer.session import Choice as Choice
from shardstream.viewer.session import Session as Session
from shardstream.viewer.session import ViewOptions as ViewOptions

if TYPE_CHECKING:
    from shardstream.viewer.server import serve as serve


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardstream.viewer.server import serve  # noqa: PLC0415  (Starlette and uvicorn are an extra)

    return serve
