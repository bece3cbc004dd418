"""Pass the epoch of a map-style dataset on to the datasets chained from it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet


class EpochChain:
    """Base of datasets that follow `set_epoch` of the dataset that they were chained from.

    A dataset holds its parent, so that the parents find it as long as it is used.
    """

    _parent: EpochChain | None = None
    _children: WeakSet[EpochChain] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the children."""
        for child in list(self._children or ()):
            child.set_epoch(epoch)

    def follow_epoch(self, parent: EpochChain) -> None:
        """Follow later calls of the parent's `set_epoch`."""
        if parent._children is None:
            parent._children = WeakSet()
        self._parent = parent
        parent._children.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parent": None, "_children": None}
