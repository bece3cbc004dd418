"""Print the dependencies of the package but torch, whose default build has gigabytes."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*(name for name in project["dependencies"] if not name.startswith("torch")))
