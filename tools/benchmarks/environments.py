"""Environments of the peers, whose packages fit neither shardstream's nor each other."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent
_MOSAICML = "bench-mosaicml"
_EXTRAS = {
    "bench": [
        path.stem
        for path in (_ROOT / "tools" / "benchmarks" / "peers").glob("[a-z]*.py")
        if path.stem not in {"shardstream", "mosaicml"}
    ],
    _MOSAICML: ["mosaicml"],
}


def make_environments(folder: Path) -> dict[str, str]:
    """Return the Python of each peer, of environments that are made where they are missing.

    They see the packages of this one, so that pip keeps its torch for CPU.

    Raises:
        CalledProcessError: If pip cannot install what an extra names.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    for extra, peers in _EXTRAS.items():
        place = (folder / extra).absolute()
        if not (place / "bin" / "python").exists():
            _make(place, project["optional-dependencies"][extra])
        found |= dict.fromkeys(peers, str(place / "bin" / "python"))
    return found


def _make(place: Path, requirements: list[str]) -> None:
    constraints = ["-c", str(_ROOT / "constraints.txt")]
    try:
        venv.create(place, with_pip=True)
        (packages,) = place.glob("lib/*/site-packages")
        seen = sysconfig.get_path("purelib")
        (packages / "seen.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
        subprocess.run(  # noqa: S603
            [place / "bin" / "python", "-m", "pip", "install", "-q", *constraints, *requirements],
            check=True,
        )
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # a later run starts again
        raise
