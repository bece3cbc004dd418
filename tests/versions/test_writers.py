"""Writers that go on to append are listed until they are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import OptionError
from shardstream.testing import make_shards


def sample(number: int) -> dict[str, object]:
    return {"__key__": f"{number:06d}", "cls": number}


def write_and_fail(url: str, number: int, tokens: list[str]) -> None:
    with ss.ShardWriter(url, append=True, publish_s=0) as writer:
        writer.write(sample(20 + number))
        tokens.append(open_tokens(url)[-1])
        raise ZeroDivisionError


def open_tokens(url: str) -> list[str]:
    writers = ss.versions.log(url)[0].writers
    assert all(isinstance(one, ss.versions.OpenWriter) for one in writers)
    return [one.token for one in writers]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_shards(tmp_path / "data", samples=map(sample, range(10)), per_shard=5)


def test_a_writer_is_listed_from_its_opening_to_its_end(url: str) -> None:
    with ss.ShardWriter(url, append=True, publish_s=3600) as timed:
        (first,) = open_tokens(url)
        assert ss.ShardDataset(url).versions == (1,)  # no samples have changed
        with ss.ShardWriter(url, append=True) as other:
            assert open_tokens(url) == [first]
            other.write(sample(100))
            other.publish()
            assert len(open_tokens(url)) == 2
            other.write(sample(101))
        assert open_tokens(url) == [first]
        with ss.ShardWriter(url, append=True) as plain:
            plain.write(sample(102))
        ss.delete(url, numbers=[0])
        assert open_tokens(url) == [first]
        timed.write(sample(103))
    assert open_tokens(url) == []
    assert [int(one["cls"]) for one in ss.ShardDataset(url)] == [*range(1, 10), *range(100, 104)]


def test_a_writer_without_samples_ends(url: str) -> None:
    with ss.ShardWriter(url, append=True, publish_s=1):
        assert open_tokens(url)
    assert ss.ShardDataset(url).versions == (1,)
    writer = ss.ShardWriter(url, append=True)
    writer.publish()
    assert open_tokens(url)
    writer.write(sample(11))
    writer.publish()
    writer.close()  # nothing is new
    assert open_tokens(url) == []


def test_a_writer_that_failed_is_closed_by_command(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: list[str] = []
    for number in range(3):
        with pytest.raises(ZeroDivisionError):
            write_and_fail(url, number, tokens)
    assert open_tokens(url) == tokens
    assert main(["log", url]) == 0
    assert f"open writer: {tokens[1]} of " in capsys.readouterr().out
    assert main(["close", url, "--writer", tokens[1]]) == 0
    assert tokens[1] in capsys.readouterr().out
    assert open_tokens(url) == [tokens[0], tokens[2]]
    with pytest.raises(OptionError, match=f"no open writer is 'x'; open writers: {tokens[0]}"):
        ss.versions.close_writers(url, "x")
    assert [one.token for one in ss.versions.close_writers(url)] == [tokens[0], tokens[2]]
    assert len(ss.ShardDataset(url)) == 13  # what they have published stays
    assert ss.versions.close_writers(url) == []
    assert main(["close", url]) == 0
    assert "no writer is open" in capsys.readouterr().out
