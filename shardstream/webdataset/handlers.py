"""Handlers of exceptions, for ``handler=`` of a stage: True goes on with the next item, False ends the stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from webdataset.handlers import ignore_and_continue, ignore_and_stop, reraise_exception

from shardstream.errors import OptionError

Handler = Callable[[Exception], Any]
"""Exception -> whether the stage goes on."""


class UnsafeError(OptionError):
    """Something that could run code or commands, and is refused; no handler skips it."""


def warn_and_continue(exn: Exception) -> bool:
    """Warn and go on with the next item."""
    warnings.warn(repr(exn), stacklevel=2)
    return True


def warn_and_stop(exn: Exception) -> bool:
    """Warn and end the stage."""
    warnings.warn(repr(exn), stacklevel=2)
    return False


def goes_on(exn: Exception, handler: Handler) -> bool:
    """Return whether a stage continues after an exception.

    Raises:
        OptionError: If the exception is one: it is an error of the program, and skipping it would lose every sample.
    """
    if isinstance(exn, OptionError):
        raise exn
    return bool(handler(exn))
