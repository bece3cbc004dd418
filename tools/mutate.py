"""Mutate one module and list the mutants that no test detects.

    python tools/mutate.py shardstream/order/epoch_plan.py tests/order/test_epoch_plan.py tests/order/test_partition.py --sample 40

Each mutant is one edit of the syntax tree: a comparison, operator, constant or condition is exchanged, a statement is removed. The
tests run on a copy of the working tree, in a process forked from one that has torch and the clients imported already, and stop at
the first failure. An undetected mutant is printed as a diff: either a test is missing, or the edit changes nothing.
The operators are those of mutmut and cosmic-ray; these import torch again for each mutant, or cannot follow tests into processes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("shardstream", "tests", "tools", "examples", "docs", "README.md", "pyproject.toml")
WARM = ("torch", "numpy", "s3fs", "PIL.Image")
SHOWN_LINES = 12

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Div: ast.Mult,
}  # fmt: skip
EDITED = (
    ast.Compare, ast.BinOp, ast.AugAssign, ast.BoolOp, ast.Constant, ast.If, ast.While, ast.IfExp,
    ast.Return, ast.Expr,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One edited version of a module."""

    line: int
    edit: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order in which `ast.walk` meets them."""
    tree = ast.parse(source)
    skipped = _not_run(tree)
    for number, node in enumerate(ast.walk(tree)):
        if number in skipped or not isinstance(node, EDITED):
            continue
        for edit in (_exchange, _remove):
            changed = ast.parse(source)
            edited = list(ast.walk(changed))[number]
            said = edit(edited)
            if said:
                mutated = ast.unparse(ast.fix_missing_locations(changed))
                yield Mutant(line=getattr(node, "lineno", 0), edit=said, source=mutated)


def _not_run(tree: ast.Module) -> set[int]:
    """Return the nodes in annotations, docstrings, error messages and type-checking blocks."""
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            roots.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            roots += [*([node.returns] if node.returns else []), *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            roots += [*node.decorator_list, *node.bases]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            roots.append(node)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            roots.append(node.exc)
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or isinstance(
            node, ast.JoinedStr
        ):
            roots.append(node)
    return {numbers[id(inner)] for root in roots for inner in ast.walk(root)}


def _exchange(node: ast.AST) -> str:
    """Exchange a part of a node, in place; return a description of the change, if any."""
    if isinstance(node, ast.Compare):
        old = node.ops[0]
        node.ops[0] = COMPARISONS[type(old)]()
        return f"{type(old).__name__} -> {type(node.ops[0]).__name__}"
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        old_operator = node.op
        node.op = OPERATORS[type(old_operator)]()
        return f"{type(old_operator).__name__} -> {type(node.op).__name__}"
    if isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return "and <-> or"
    if isinstance(node, ast.Constant):
        return _exchange_constant(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        return "condition negated"
    if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        node.value = ast.Constant(None)
        return "return None"
    return ""


def _remove(node: ast.AST) -> str:
    """Remove a call statement or a conditional block, in place; return a description of the change, if any."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        node.value = ast.Constant(None)
        return "call removed"
    if isinstance(node, ast.If):
        node.test = ast.Constant(False)
        return "condition never"
    return ""


def _exchange_constant(node: ast.Constant) -> str:
    value = node.value
    if isinstance(value, bool):
        node.value = not value
    elif isinstance(value, int | float):
        node.value = value + 1
    else:
        return ""
    return f"{value} -> {node.value}"


class Bench:
    """A copy of the working tree in which one module is replaced by mutants."""

    def __init__(self, folder: Path, module: str, tests: list[str]) -> None:
        self._tree = folder / "tree"
        self._tree.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, self._tree / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, self._tree / name)
        self._module, self._tests = self._tree / module, tests

    def run(self, source: str, timeout_s: float) -> str:
        """Return "survived", "killed" or "timeout"."""
        self._module.write_text(source, encoding="utf-8")
        pid = os.fork()
        if pid == 0:
            try:
                self._child()
            finally:
                traceback.print_exc()
                os._exit(70)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _kill_group(pid)  # remaining processes
                return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            time.sleep(0.02)
        _kill_group(pid)
        os.waitpid(pid, 0)
        return "timeout"

    def _child(self) -> None:
        os.setpgid(0, 0)
        os.chdir(self._tree)
        sys.path.insert(0, str(self._tree))
        os.environ |= {"PYTHONPATH": str(self._tree), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        out = os.open(self._tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import pytest  # noqa: PLC0415

        options = [
            "-x",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "--hypothesis-seed=0",
            "-m",
            "slow or not slow",
        ]
        code = pytest.main([*options, *self._tests])
        sys.stdout.flush()
        os._exit(int(code))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def show(original: str, mutant: Mutant) -> str:
    """Return the lines in which a mutant differs."""
    plain = ast.unparse(ast.parse(original)).splitlines()
    lines = difflib.unified_diff(plain, mutant.source.splitlines(), lineterm="", n=2)
    return "\n".join(list(lines)[3 : 3 + SHOWN_LINES])


def main() -> None:
    """Run the tests on each mutant and print the undetected ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument(
        "--sample", type=int, help="as many mutants, drawn by --seed; all by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--line", type=int, nargs="+", help="only mutants of these lines")
    arguments = parser.parse_args()
    source = (ROOT / arguments.module).read_text(encoding="utf-8")
    found = list(mutants(source))
    chosen = [one for one in found if arguments.line is None or one.line in arguments.line]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)
        chosen.sort(key=lambda one: one.line)
    for name in WARM:
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.module, arguments.tests)
        begun = time.monotonic()
        if bench.run(source, 900) != "survived":
            sys.exit("the tests fail without any change:\n" + (Path(folder) / "output").read_text())
        limit_s = 20 + 2 * (time.monotonic() - begun)
        killed = 0
        for number, mutant in enumerate(chosen, start=1):
            outcome = bench.run(mutant.source, limit_s)
            killed += outcome != "survived"
            if outcome != "killed":
                where = f"{arguments.module}:{mutant.line}"
                print(
                    f"{number}: {outcome}: {where}: {mutant.edit}\n{show(source, mutant)}\n",
                    flush=True,
                )
    share = killed / max(1, len(chosen))
    print(
        f"{arguments.module}: {killed} of {len(chosen)} mutants killed ({share:.1%}), {len(found)} exist"
    )


if __name__ == "__main__":
    main()
