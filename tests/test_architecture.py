"""Test the rooms of the package: allowed imports, no circles, and sizes of modules and functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import shardstream
from tests.not_again import WITH_SERVERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardstream"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py"))
CLIENTS = sorted(path for folder in ("tools", "examples") for path in (ROOT / folder).rglob("*.py"))

# Lowest first. A room imports its own modules, the base and the rooms named here; errors import nothing.
BASE = ("errors", "process", "distributed")
READING = (
    "format",
    "codecs",
    "order",
    "storage",
    "samples",
    "fetch",
    "catalog",
    "pipeline",
    "display",
    "loader",
)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "process": ("errors",),
    "distributed": ("errors",),
    "format": BASE,
    "codecs": (*BASE, "format"),
    "order": BASE,
    "storage": (*BASE, "format"),
    "samples": (*BASE, "format", "order", "storage"),
    "fetch": (*BASE, "format", "storage", "samples"),
    "catalog": (*BASE, "format", "storage", "samples", "fetch"),
    "versions": (*BASE, "format", "storage", "samples", "fetch", "catalog"),
    "pipeline": (*BASE, "format", "codecs", "order", "storage", "samples", "fetch", "catalog"),
    "display": (*BASE, "format", "codecs", "samples", "pipeline"),
    "loader": (
        *BASE,
        "format",
        "codecs",
        "order",
        "storage",
        "samples",
        "fetch",
        "catalog",
        "pipeline",
        "display",
        "tasks",
        "packing",  # to read tables that are joined
        "tables",
    ),
    "tasks": BASE,
    "packing": (
        *BASE,
        "format",
        "codecs",
        "order",
        "storage",
        "samples",
        "fetch",
        "catalog",
        "pipeline",  # `reshard` writes the samples of a dataset with its steps
        "tasks",
        "versions",  # to append, compact and replace fields
    ),
    "tables": (
        *BASE,
        "format",
        "codecs",
        "storage",
        "samples",
        "fetch",
        "catalog",
        "pipeline",
        "packing",
    ),
    "integrations": (*BASE, *READING),
    "ray": (*BASE, *READING, "tasks", "packing"),
    "webdataset": (*BASE, *READING, "tasks", "packing"),
    "testing": (*BASE, *READING, "tasks", "packing", "versions"),
    "__init__": (*BASE, *READING, "tasks", "packing", "versions", "ray"),
    "viewer": (
        *BASE,
        "format",
        "codecs",
        "order",
        "storage",
        "samples",
        "fetch",
        "catalog",
        "pipeline",
        "display",
    ),
    "cli": ("__init__", *BASE, *READING, "tasks", "packing", "versions", "ray", "viewer"),
    "__main__": ("cli",),
}
ROOMS = sorted(  # integrations are separate modules: each imports another framework
    path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "integrations"
)
PUBLIC_ROOMS = ("webdataset",)  # users write `import shardstream.webdataset as wds`
MODULE_LINES = 600
FUNCTION_LINES = 60
HOMES = {
    "fsspec": ("storage/",),
    "s3fs": ("storage/",),
    "botocore": ("storage/s3_request.py",),
    "obstore": (),
    # Imported by name in codecs/, when they are needed.
    **dict.fromkeys(
        ("soundfile", "soxr", "torchcodec", "av", "msgpack", "cbor2", "safetensors"), ()
    ),
    "huggingface_hub": ("storage/fsspec_clients.py",),
    "accelerate": ("loader/accelerate.py",),
    "transformers": ("integrations/hf.py",),
    "torch": (
        "integrations/hf.py",
        "loader/accelerate.py",
        "loader/batch_transfer.py",
        "loader/epochs.py",
        "loader/worker_pool.py",
        "loader/workers.py",
        "loader/map_dataset.py",
        "loader/checkpoint.py",
        "loader/dataset.py",
        "loader/loader.py",
        "loader/collation.py",
        "loader/device_transfer.py",
        "loader/steps.py",
        "ray/read_dataset.py",
        "webdataset/",
    ),
    "ray": ("ray/",),
    "webdataset": ("webdataset/",),
    "starlette": ("viewer/server.py",),
    "uvicorn": ("viewer/server.py",),
}
NEVER_IMPORTED = ("subprocess", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
# `batch_transfer` unpickles messages of its own workers, `testing` its own pickles.
MAY_PICKLE = ("loader/batch_transfer.py", "testing.py")
NEVER_CALLED = ("eval", "exec", "compile", "__import__", "os.system", "os.popen")


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped() -> Iterator[None]:
    yield
    parse.cache_clear()  # 180 MB


def for_each(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check of many files, which names all that fail: a test for each file would cost more than its check."""

    def test_of(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            errors = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    error.add_note(str(path))
                    errors.append(error)
            if errors:
                raise ExceptionGroup(check.__name__, errors)

        return test

    return test_of


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(module: str) -> str:
    """Return the room that contains ``shardstream.x.y``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def own_part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, *, for_types: bool = True) -> Iterator[str]:
    """Yield the modules that a module imports, anywhere in it."""
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        node = waiting.pop()
        if is_type_checking(node) and not for_types:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            folder = ROOT.joinpath(*module.split("."))
            for alias in node.names:
                file = folder / f"{alias.name}.py"
                is_module = file.is_file() or file.with_suffix("").is_dir()
                yield f"{module}.{alias.name}" if is_module else module


def dotted_names(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)


@for_each(MODULES)
def test_module_imports_only_rooms_that_its_room_may_import(path: Path) -> None:
    mine = own_part(path)
    assert mine in MAY_IMPORT, f"{mine} is no room: name it in MAY_IMPORT"
    for module in imports(path):
        if module.partition(".")[0] == "shardstream":
            theirs = part_of(module)
            assert theirs in (mine, *MAY_IMPORT[mine]), f"{name_of(path)} imports {module}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_there_are_no_import_circles() -> None:
    modules = {module_name(path): path for path in MODULES}
    found = {
        # `retry`, `find_tars` and `listed_shards` import others only for types.
        name: {one for one in imports(path, for_types=False) if one in modules and one != name}
        for name, path in modules.items()
    }
    order = TopologicalSorter(found)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@cache
def exports(room: str) -> frozenset[str]:
    """Return the names that a room exports: those in ``__all__``, and those imported as themselves (``from m import A as A``)."""
    found = set[str]()
    for node in ast.walk(parse(PACKAGE / room / "__init__.py")):  # also those imported for types
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names if alias.asname == alias.name)
    return frozenset(found)


@cache
def imported_from_rooms(path: Path) -> list[tuple[str, str]]:
    """Return ``shardstream.room`` or ``shardstream.room.module`` with each name that a file imports from it."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(one.name, "") for one in node.names if one.name.startswith("shardstream.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardstream."):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@cache
def texts_with_programs() -> str:
    """Return the pages and tests: tests contain programs as strings."""
    pages = [*(ROOT / "docs").glob("*.md"), *TESTS]
    return "".join(page.read_text(encoding="utf-8") for page in pages)


@for_each([*MODULES, *TESTS, *CLIENTS])
def test_other_rooms_and_tests_import_only_exported_names(path: Path) -> None:
    own = own_part(path) if path.is_relative_to(PACKAGE) else ""
    for module, name in imported_from_rooms(path):
        room = part_of(module)
        if room == own or room not in ROOMS or (not name and room in PUBLIC_ROOMS):
            continue
        assert module == f"shardstream.{room}", (
            f"{path.name}: import {name} from shardstream.{room}"
        )
        assert name in exports(room), f"{path.name}: shardstream.{room} does not export {name}"


def test_rooms_export_only_names_used_elsewhere() -> None:
    used = {
        (part_of(module), name)
        for path in [*MODULES, *TESTS, *CLIENTS]
        for module, name in imported_from_rooms(path)
        if module.count(".") == 1 and not path.is_relative_to(PACKAGE / part_of(module))
    }
    used |= {(home, name) for name, home in vars(shardstream)["_LAZY"].items()}
    text = texts_with_programs()
    for room, names in re.findall(r"from shardstream\.(\w+) import ([\w, ]+)", text):
        used |= {(room, name) for name in names.split(", ")}
    used.update(re.findall(r"\bss\.(\w+)\.(\w+)", text))
    exported = {(room, name) for room in ROOMS for name in exports(room)}
    assert {one for one in exported - used if one[0] != "webdataset"} == set()  # webdataset's names
    missing = [
        (room, name)
        for room, name in sorted(exported)
        if not hasattr(import_module(f"shardstream.{room}"), name)
    ]
    assert not missing


@for_each(TESTS)
def test_tests_replace_no_private_name(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".setattr", ".delattr")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            texts = [name for name in names if isinstance(name, str)]
            private = [
                name for name in texts if any(part.startswith("_") for part in name.split("."))
            ]
            assert not private, f"{path.name}:{node.lineno} replaces {private}"


@for_each(MODULES)
def test_fsspec_and_torch_are_imported_only_in_their_rooms(path: Path) -> None:
    for module in imports(path, for_types=False):
        homes = HOMES.get(module.split(".")[0])
        assert homes is None or name_of(path).startswith(homes), (
            f"{name_of(path)} imports {module}; its home: {homes}"
        )


@for_each(MODULES)
def test_environment_is_read_only_in_five_modules(path: Path) -> None:
    read = {name for name in dotted_names(path) if name in ("os.environ", "os.getenv", "os.putenv")}
    homes = (
        "distributed.py",
        "catalog/doctor.py",
        "storage/s3_request.py",
        "ray/executor.py",
        "webdataset/utils.py",
    )
    assert not read or name_of(path) in homes, f"{name_of(path)} reads {read}"


@for_each(MODULES)
def test_data_never_runs_as_code(path: Path) -> None:
    for module in imports(path):
        may = module == "pickle" and name_of(path).startswith(MAY_PICKLE)
        assert may or module.split(".")[0] not in NEVER_IMPORTED, f"{name_of(path)}: {module}"
    called = {
        ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)
    }
    assert not called.intersection(NEVER_CALLED), f"{name_of(path)}: {called & {*NEVER_CALLED}}"
    # numpy unpickles object arrays and torch any file, unless an argument forbids it
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "torch.load"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = options.get("allow_pickle") == "False" or options.get("weights_only") == "True"
            assert safe, f"{name_of(path)}:{node.lineno}: load without a word on pickles"


@for_each([*MODULES, *CLIENTS])
def test_modules_and_functions_stay_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MODULE_LINES, f"{num_lines} lines: two subjects in one file?"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            assert count <= FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name}: {count} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_tools_and_examples_use_public_names_only() -> None:
    private = [
        module
        for path in CLIENTS
        for module in imports(path)
        if module.startswith("shardstream.") and any(p.startswith("_") for p in module.split("."))
    ]
    assert not private


def test_every_folder_of_the_package_is_shallow() -> None:
    deeper = ("packing/sources", "packing/shards", "packing/job")
    for path in MODULES:
        folder = path.relative_to(PACKAGE).parent.as_posix()
        assert "/" not in folder or folder in deeper, path


@pytest.mark.parametrize("room", [*ROOMS, "integrations"])
def test_readme_of_a_room_names_its_files_and_what_it_may_import(room: str) -> None:
    text = (PACKAGE / room / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", text))
    modules = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert modules <= named
    assert f"May import: {', '.join(f'`{one}`' for one in MAY_IMPORT[room])}." in text


def test_importing_the_package_does_not_import_torch_or_clients() -> None:
    heavy = (
        "torch",
        "s3fs",
        "obstore",
        "botocore",
        "boto3",
        "aiohttp",
        "PIL",
        "webdataset",
        "pyarrow",
        "ray",
        "typer",
    )
    code = f"import sys, shardstream\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_helpers_that_look_for_programs_are_run_again_in_ci() -> None:
    """The second run of CI leaves out tests that a machine without servers has passed, but not those of these modules."""
    looks = re.compile(r"shutil\.which|SERVERS_PATH|environ.*CI\b")
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in helpers
        if looks.search(path.read_text(encoding="utf-8"))
    }
    assert found - {"tests.conftest", "tests.not_again"} <= WITH_SERVERS
    assert "tests.servers" in found
