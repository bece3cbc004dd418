"""The AWS variables that we look at ourselves, where the S3 clients differ."""

from __future__ import annotations

import os
from collections.abc import Mapping


def aws_variables() -> Mapping[str, str]:
    """Return the variables AWS_… of this process that are not empty."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_") and value}
