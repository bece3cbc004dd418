"""Text for steps and functions that is the same in every process, for states to compare."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from types import CodeType, MethodType
from typing import Any

_NOT_COMPARED = ("threads", "purpose")  # they change neither items nor their order
_OURS = (__name__.partition(".")[0], "builtins")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LONGEST = 200  # characters of one value


def describe(step: object) -> str:
    """Return the name of a step (a dataclass) with those of its options that are not as by default.

    A field ``name`` stands for the name of the first function.

    >>> from shardstream.read.stream import Shuffle
    >>> describe(Shuffle(window=50))
    'Shuffle(window=50)'
    """
    options = {
        field.name: getattr(step, field.name)
        for field in fields(step)  # type: ignore[arg-type]  # a dataclass
        if field.name not in _NOT_COMPARED
        and not field.name.startswith("_")
        and not _is_default(getattr(step, field.name), field.default)
    }
    for name in [name for name in options if name.endswith("table")]:
        # Of decoders: this package's own may be others in its next version.
        decoders = options.pop(name) or {}
        given = {field: one for field, one in decoders.items() if _module_root(one) not in _OURS}
        options |= {name: given} if given else {}
    own_name, version = options.pop("name", None), options.pop("version", None)
    first = next((name for name, value in options.items() if callable(value)), None)
    shown = [
        f"{name}={own_name if name == first and own_name is not None else _shown(value)}"
        for name, value in options.items()
    ]
    shown += [] if version is None else [f"version={version}"]
    return f"{_type_name(type(step))}({', '.join(shown)})"


def function_name(function: object) -> str:
    """Return the module and qualified name of a function, method, class or callable object.

    The code of a lambda is a part of its name, as are plain arguments of a `functools.partial` and plain fields of a dataclass.
    What a function closes over is not: it may differ from run to run.

    >>> function_name(len), function_name(partial(round, ndigits=2))
    ('builtins.len', 'partial(builtins.round, ndigits=2)')
    """
    if isinstance(function, partial):
        arguments = [_shown(value) for value in function.args]
        arguments += [f"{name}={_shown(value)}" for name, value in function.keywords.items()]
        return f"partial({', '.join([function_name(function.func), *arguments])})"
    if isinstance(function, itemgetter | attrgetter | methodcaller):
        return repr(function)
    if isinstance(function, MethodType):
        owner = function.__self__
        return f"{function_name(owner)}.{function.__name__}"
    name = getattr(function, "__qualname__", None)
    if name is None:
        return describe(function) if is_dataclass(function) else _type_name(type(function))
    qualified = _qualified(getattr(function, "__module__", None), name)
    code = getattr(inspect.unwrap(function), "__code__", None)  # type: ignore[arg-type]  # is callable
    if name.endswith("<lambda>") and isinstance(code, CodeType):
        return f"{qualified}#{_digest(code)}"
    return qualified


def _is_default(value: object, default: object) -> bool:
    """Tell whether an option need not be named: so one that a later version adds changes no name."""
    return value is default or (
        isinstance(value, _PLAIN) and (type(value), value) == (type(default), default)
    )


def _module_root(function: object) -> str:
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _type_name(kind: type) -> str:
    return _qualified(kind.__module__, kind.__qualname__)


def _qualified(module: str | None, name: str) -> str:
    """Return a qualified name that does not depend on the process or on where this package keeps its own modules."""
    if module is None or module.partition(".")[0] == _OURS[0]:
        return name
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"  # of a spawned worker


def _shown(value: Any) -> str:
    """Return text for an option's value, shortened; of an object that is not plain its type."""
    text = _text(value)
    return text if len(text) <= _LONGEST else f"{text[:40]}…#{_hash(text)}"


def _text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if callable(value):
        return function_name(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(_shown, value))) + "}"
    if isinstance(value, Sequence):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return describe(value) if is_dataclass(value) else _type_name(type(value))


def _digest(code: CodeType) -> str:
    """Return 8 hex digits that change with what a lambda does, on one version of Python."""
    constants = [
        _digest(one) if isinstance(one, CodeType)
        # The order of a set of texts differs from process to process.
        else repr(sorted(map(repr, one))) if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return _hash("\0".join([code.co_code.hex(), *code.co_names, *code.co_freevars, *constants]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
