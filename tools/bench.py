"""Benchmark shardstream against its peers on the same bytes, with medians, spread and hardware limits.

    python tools/bench.py [--quick] [--only ROW] [--json FILE] [--plot FILE.png]
    python tools/bench.py --render FILE.json

Peers: --peers-env DIR, or pip install -e ".[s3,bench]" -c constraints.txt; missing peers and servers are reported. docs/benchmarks-method.md has the method.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tests.servers

from benchmarks import plot, report, rows, runner
from benchmarks.environments import make_environments
from benchmarks.setting import Setting
from benchmarks.sizes import FULL, QUICK, TINY, Sizes
from benchmarks.work import Work


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small data, one repetition, two peers, what is at stake",
    )
    parser.add_argument("--tiny", action="store_true", help="smallest data: does it run at all?")
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="this row (again for more), e.g. s3-slow"
    )
    parser.add_argument("--contestants", metavar="A,B", help="these only, and limits")
    parser.add_argument(
        "--repetitions", type=int, metavar="N", help="of each contestant, where there is a target"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep the data here for the next run"
    )
    parser.add_argument("--latency-ms", type=int, default=30, help="to the first byte, of s3-slow")
    parser.add_argument(
        "--rate", type=int, default=80_000_000, help="bytes/s a connection, of s3-slow"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="Python of a peer that has an environment of its own",
    )
    parser.add_argument(
        "--peers-env",
        type=Path,
        metavar="DIR",
        help="make environments of the peers here, unless they are there",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every repetition, after each setting"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table")
    parser.add_argument(
        "--render",
        type=Path,
        metavar="FILE.json",
        help="print an earlier run in Markdown; measure nothing",
    )
    return parser.parse_args()


def choose(arguments: argparse.Namespace) -> tuple[Sizes, list[Setting]]:
    """Return the settings to measure.

    Raises:
        SystemExit: If there is no such row.
    """
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    if arguments.repetitions:
        sizes = replace(sizes, repetitions=arguments.repetitions)
    settings = list(rows.settings(sizes))
    names = list(dict.fromkeys(setting.row for setting in settings))
    for name in arguments.only or ():
        if name not in names:
            raise SystemExit(f"no row {name!r}; there are: {', '.join(names)}")
    settings = [setting for setting in settings if setting.row in (arguments.only or names)]
    if arguments.quick and not arguments.contestants:
        settings = list(rows.shortened(settings))
    if arguments.contestants:
        wanted = arguments.contestants.split(",")
        settings = [
            replace(
                setting,
                contestants=tuple(n for n in setting.contestants if n.partition("+")[0] in wanted),
            )
            for setting in settings
        ]
    return sizes, settings


def measure(arguments: argparse.Namespace, console: Console) -> runner.Document:
    """Run the chosen settings and print each when it is done."""
    sizes, settings = choose(arguments)
    with tempfile.TemporaryDirectory(prefix="shardstream-bench-") as temporary:
        folder = arguments.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        work = Work(
            folder.resolve(),
            latency_ms=arguments.latency_ms,
            rate=arguments.rate,
            interpreters=(make_environments(arguments.peers_env) if arguments.peers_env else {})
            | dict(entry.split("=", 1) for entry in arguments.python),
        )
        try:
            with console.status("") as status:
                return runner.run(
                    settings,
                    sizes,
                    work,
                    say=status.update,
                    done=lambda document: show(document, arguments.json, console),
                )
        finally:
            work.close()


def show(document: runner.Document, path: Path | None, console: Console) -> None:
    """Write what was measured so far, and print the last setting."""
    if path is not None:
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(path)
    report.print_setting(document["settings"][-1], console)


def main() -> None:
    """Measure and print, or render an earlier measurement."""
    arguments = parse_arguments()
    if arguments.render:
        document = json.loads(arguments.render.read_text())
        print(report.markdown(document), end="")
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        document = measure(arguments, console)
        console.print(
            f"{document['machine']}\n{report.noise(document)}\n{document['versions']}\n{document['seconds']:.0f} s in all"
        )
    if arguments.plot:
        plot.draw(document, arguments.plot)


if __name__ == "__main__":
    main()
