"""Look at a dataset in a browser: ``shardstream view``. Pure functions decide, a thin server shows. No file here imports torch."""

from typing import TYPE_CHECKING, Any

from shardstream.viewer.epoch_view import Stored, Training, read_state, view_epoch
from shardstream.viewer.guard import Address, Guard
from shardstream.viewer.session import Choice, Session, ViewOptions
from shardstream.viewer.user_functions import load_function, open_source

if TYPE_CHECKING:
    from shardstream.viewer.server import serve

__all__ = [
    "Address",
    "Choice",
    "Guard",
    "Session",
    "Stored",
    "Training",
    "ViewOptions",
    "load_function",
    "open_source",
    "read_state",
    "serve",
    "view_epoch",
]


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardstream.viewer.server import serve  # noqa: PLC0415  (Starlette and uvicorn are an extra)

    return serve
