"""Call functions that draw from global generators, with the randomness of a sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import get_worker_info

from shardstream.errors import OptionError


@dataclass(frozen=True, slots=True)
class SeededFunction:
    """Seed the global generators of torch (CPU), NumPy and Python from the sample's, call a function, and restore them.

    torchvision's transforms draw from torch's. Other threads of the process must not draw while the function runs.
    """

    function: Callable[[Any], Any]

    @property
    def __wrapped__(self) -> Callable[[Any], Any]:
        return self.function

    def __call__(self, item: Any, generator: np.random.Generator) -> Any:
        """Return ``function(item)``.

        Raises:
            OptionError: In a worker that is a thread.
        """
        if getattr(get_worker_info(), "worker_method", "") == "thread":
            raise OptionError(
                "rng='torch' seeds generators that all threads of the process share; use worker_method='multiprocessing', or "
                "rng=True, with which the function gets a generator of its own"
            )
        torch_seed, python_seed, numpy_seed = generator.integers(1 << 63, size=3).tolist()
        python_state = random.getstate()
        bit_generator = mtrand.get_bit_generator()
        # The generator is exchanged, as set_state takes 0.15 ms; that forgets the second number of a pair of Gaussians.
        numpy_state: Any = np.random.get_state(legacy=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                torch_seed
            )  # torch.manual_seed would seed GPUs, too
            mtrand.set_bit_generator(np.random.MT19937(numpy_seed))
            random.seed(python_seed)
            try:
                return self.function(item)
            finally:
                mtrand.set_bit_generator(bit_generator)
                if numpy_state["has_gauss"]:
                    np.random.set_state(numpy_state)
                random.setstate(python_state)
