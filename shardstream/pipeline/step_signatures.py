"""Describe steps and functions as text that is equal in every process, for states to compare."""

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

_NOT_COMPARED = ("threads", "purpose")  # these change neither items nor their order
_OURS = __name__.partition(".")[0]
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LONGEST = 200  # characters of one value


def describe(step: object) -> str:
    """Return the name of a step (a dataclass) with the options that differ from their defaults.

    A field ``name`` replaces the name of the first function. Fields with ``compare=False`` are left out.

    >>> from shardstream.pipeline.stream_steps import Shuffle
    >>> describe(Shuffle(window=50))
    'Shuffle(window=50)'
    """
    try:
        return _described(step)
    except RecursionError:  # the step refers to itself
        return _type_name(type(step))


def _described(step: object) -> str:
    options = {
        field.name: value
        for field in fields(step)  # type: ignore[arg-type]  # a dataclass
        # A field may be set at the first call only.
        if (value := getattr(step, field.name, field.default)) is not field.default
        and field.compare
        and field.name not in _NOT_COMPARED
        and not field.name.startswith("_")
        and not _is_default(value, field.default)
    }
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

    The code of a lambda is part of its name, as are plain arguments of a `functools.partial`, plain default arguments and plain
    fields of a dataclass. Variables of a closure are not: they may differ between runs.

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
        return f"{function_name(owner)}.{function.__name__}{_defaults(function)}"
    name = getattr(function, "__qualname__", None)
    if name is None:
        return _described(function) if is_dataclass(function) else _type_name(type(function))
    qualified = _qualified(getattr(function, "__module__", None), name)
    inner = inspect.unwrap(function)  # type: ignore[arg-type]  # is callable
    code = getattr(inner, "__code__", None)
    if name.endswith("<lambda>") and isinstance(code, CodeType):
        qualified += f"#{_digest(code)}"
    return qualified + _defaults(inner)


def _defaults(function: object) -> str:
    """Return the default arguments of a function; none for this package's own, which may change between versions."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or _is_ours(getattr(function, "__module__", None)):
        return ""
    values = getattr(function, "__defaults__", None) or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = dict(zip(names, values, strict=True)) | (
        getattr(function, "__kwdefaults__", None) or {}
    )
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in defaults.items())
    return f"({shown})" if shown else ""


def _is_default(value: object, default: object) -> bool:
    """Return True if an option is at its default; such options are left out, so that new options do not change names."""
    return value is default or (
        isinstance(value, _PLAIN) and (type(value), value) == (type(default), default)
    )


def _type_name(kind: type) -> str:
    return _qualified(kind.__module__, kind.__qualname__)


def _qualified(module: str | None, name: str) -> str:
    """Return a qualified name that does not depend on the process or on this package's module layout."""
    if module is None or _is_ours(module):
        return name
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"  # the latter in a spawned worker


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == _OURS


def _shown(value: Any) -> str:
    """Return shortened text for an option's value; an object that is not plain gives its type."""
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
    return _described(value) if is_dataclass(value) else _type_name(type(value))


def _digest(code: CodeType) -> str:
    """Return 8 hex digits that change with the code of a lambda, for one version of Python."""
    constants = [
        _digest(one) if isinstance(one, CodeType)
        # The order of a set of strings differs between processes.
        else repr(sorted(map(repr, one))) if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return _hash("\0".join([code.co_code.hex(), *code.co_names, *code.co_freevars, *constants]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
