from __future__ import annotations

import pickle
import traceback

import pytest

from shardstream import errors
from shardstream.errors import (
    AccessDeniedError,
    NotFoundError,
    OptionError,
    ShardError,
    ShardStreamError,
    redact,
)

ALL_ERRORS = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, ShardStreamError)
    ),
    key=lambda kind: kind.__name__,
)
SIGNED = "https://me:hunter2@host/b/a.tar?X-Amz-Signature=1f3&X-Amz-Credential=k"


def test_docstring_shows_the_class_tree() -> None:
    drawn: list[tuple[int, str, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if line.strip(" │├└─").split(" ", 1)[0].endswith("Error") and line.startswith("    "):
            name = line.strip(" │├└─").split(" ", 1)[0]
            depth = line.index(name)
            parent = next((n for d, n, _ in reversed(drawn) if d < depth), "Exception")
            drawn.append((depth, name, parent))
    assert {name: parent for _, name, parent in drawn} == {
        kind.__name__: kind.__bases__[0].__name__ for kind in ALL_ERRORS
    }


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_error_can_be_rebuilt_from_its_message_alone(kind: type[ShardStreamError]) -> None:
    # torch's loader does: exception_type(message)
    error = kind("wrong", shard="s3://b/a.tar", offset=512, key="0001", field="jpg")
    message = "wrong [in s3://b/a.tar, at byte 512, sample '0001', field 'jpg']"
    assert str(error) == message
    assert str(kind(str(error))) == message


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_pickled_error_keeps_its_location(kind: type[ShardStreamError]) -> None:
    error = kind("wrong", shard="s3://b/a.tar", offset=0, key="", field="jpg")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    assert type(again) is kind
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert (again.offset, again.key) == (0, "")


def test_only_known_locations_are_shown() -> None:
    assert str(ShardError("wrong")) == "wrong"
    assert str(ShardError("wrong", offset=0)) == "wrong [at byte 0]"


@pytest.mark.parametrize(
    ("kind", "python"), [(NotFoundError, FileNotFoundError), (AccessDeniedError, PermissionError)]
)
def test_errors_inherit_from_matching_builtin_types(
    kind: type[ShardStreamError], python: type[OSError]
) -> None:
    with pytest.raises(python, match=r"^wrong \[in s3://b/a\]$") as raised:
        raise kind("wrong", shard="s3://b/a")
    assert type(OSError(raised.value.errno, "x")) is python


def test_option_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no such option"):
        raise OptionError("no such option")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SIGNED, "https://host/b/a.tar?…"),
        ("s3://key:secret@b/a.tar", "s3://b/a.tar"),
        ("simplecache::https://u:p@h/a.tar?sig=1", "simplecache::https://h/a.tar?…"),
        ("s3://b/a.tar", "s3://b/a.tar"),
        ("/data/a b?.tar", "/data/a b?.tar"),
        ("a.tar", "a.tar"),
        ("", ""),
        ("https://u:p@h/a?x=1 https://u:p@h/b?y=2", "https://h/a?… https://h/b?…"),
        ("FileNotFoundError('https://h/a?x=1')", "FileNotFoundError('https://h/a?…')"),
    ],
)
def test_secrets_in_urls_are_redacted(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_signed_url_is_in_no_message_and_no_attribute() -> None:
    error = ShardError("wrong", shard=SIGNED)
    shown_text = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    assert "hunter2" not in shown_text
    assert "1f3" not in shown_text


def test_error_has_problem_location_and_remedy() -> None:
    error = ShardError("cut; in half", remedy="write it again", shard="a.tar", offset=512)
    assert str(error) == "cut; in half; write it again [in a.tar, at byte 512]"
    assert (error.what, error.remedy, error.where) == (
        "cut; in half",
        "write it again",
        "in a.tar, at byte 512",
    )
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.what, again.remedy) == (str(error), error.what, error.remedy)
    plain = OptionError("no such thing")
    assert (str(plain), plain.what, plain.remedy, plain.where) == (
        "no such thing",
        "no such thing",
        "",
        "",
    )
