"""``shardstream doctor``: findings about the machine, and about a dataset and its store."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.cli import main


def _pack(folder: str, count: int = 20, **options: Any) -> None:
    with ss.ShardWriter(folder, max_samples=10, **options) as writer:
        for number in range(count):
            writer.write({"__key__": f"k{number:03d}", "txt": str(number)})


def _findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *arguments, "--json", "--seconds", "0.2"])
    found = json.loads(capsys.readouterr().out)
    return code, {one["subject"]: one for one in found}


def test_the_machine_is_examined_without_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _findings(capsys)
    assert code == 0
    assert {"Python", "packages", "CPU cores", "open files", "environment"} <= set(found)
    assert "torch" in found["packages"]["text"]


def test_a_local_dataset_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _pack(f"{tmp_path}/d/")
    code, found = _findings(capsys, f"{tmp_path}/d/")
    assert code == 0
    assert found["manifest"]["text"].startswith("2 shards, 20 samples")
    assert found["first sample"]["text"].startswith("'k000' with txt")
    assert "MB/s" in found["bandwidth"]["text"]
    assert {one["level"] for one in found.values()} <= {"ok", "warning"}


def test_shards_without_manifest_and_index_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _pack(f"{tmp_path}/d/")
    for name in os.listdir(tmp_path / "d"):
        if not name.endswith(".tar"):
            (tmp_path / "d" / name).unlink()
    code, found = _findings(capsys, f"{tmp_path}/d/")
    assert code == 0
    assert found["shards"]["level"] == found["index"]["level"] == "warning"
    assert "shardstream index" in found["index"]["cure"]


def test_a_store_on_s3_is_examined(
    bucket: str, s3_env: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pack(f"{bucket}/d/")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    code, found = _findings(capsys, f"{bucket}/d/")
    assert code == 0
    assert found["clock"]["level"] == "ok"
    assert "latency" in found
    assert "AWS_SECRET_ACCESS_KEY is set" in found["environment"]["text"]
    assert not secret or all(secret not in one["text"] for one in found.values())

    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, found = _findings(capsys)
    assert found["environment"]["level"] == "warning"


def test_a_missing_dataset_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _findings(capsys, f"{tmp_path}/nothing/")
    assert code == 1
    assert found["dataset"]["level"] == "error"
    assert "not found" in found["dataset"]["text"]


def test_findings_are_lines_with_cures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hidden@127.0.0.1:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    Python: 3.") for line in lines)
    warning = next(n for n, line in enumerate(lines) if line.startswith("WARN  environment"))
    assert "AWS_ENDPOINT_URL=http://127.0.0.1:9000" in lines[warning]
    assert lines[warning + 1].strip().startswith("-> set both")
    assert "hidden" not in "".join(lines)


@pytest.mark.parametrize(
    "url", ["http://user:hidden@127.0.0.1:9/d/", "http://127.0.0.1:9/a b/", "http://127.0.0.1:9/"]
)
def test_a_server_that_cannot_be_asked_is_an_error_not_a_traceback(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", url, "--json", "--seconds", "0.1", "--option", "retry_timeout_s=1"])
    printed = capsys.readouterr()
    found = {one["subject"]: one for one in json.loads(printed.out)}
    assert code == 1
    assert found["dataset"]["level"] == "error"
    assert "clock" not in found
    assert "Traceback" not in printed.err
    assert "hidden" not in printed.out + printed.err
