from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.cli import command_tree, describe_options, main
from shardstream.errors import ShardError
from tests.small_tars import make_dataset
from tests.static_server import serve_files

COMMANDS = ("pack", "reshard", "merge", "index", "verify", "ls", "cat")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert f"\n    shardstream {command} " in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_proposes_commands(shell: str) -> None:
    line = "shardstream ve"
    asked = {
        "_SHARDSTREAM_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,  # bash
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": line,  # zsh and fish
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-m", "shardstream"],
        env=os.environ | asked, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "verify" in done.stdout
    assert "pack" not in done.stdout


def test_help_shows_no_types_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("pack", "ls", "view"):
        assert main([command, "--help"]) == 0
        assert "list[" not in capsys.readouterr().out


def test_docstrings_describe_all_options_and_no_others() -> None:
    for name, command in command_tree().commands.items():
        described = describe_options(command.callback.__doc__)
        assert described.keys() <= {parameter.name for parameter in command.params}, name
        assert all(parameter.help for parameter in command.params if parameter.name != "help")


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardstream ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["verify"], "Missing argument 'URL"),
        (["verify", "x", "--threads", "0"], "--threads"),
        (["ls", "x", "--option", "secret"], "KEY=VALUE"),
        (["ls", "x.tar", "--option", "foo=bar"], "files of this machine have no options"),
        (["reshard", "x", "y", "--option", "foo=bar"], "files of this machine have no options"),
        (["cat", "x", "--number", "1", "--key", "a"], "not both"),
        (["cat", "x", "--output", "f"], "--output needs --field"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_options_reach_remote_shards_of_a_local_manifest(tmp_path: Path) -> None:
    paths = make_dataset(tmp_path / "tars")
    option = ["--option", "retry_timeout_s=3"]
    with serve_files(tmp_path) as served:
        tars = [f"{served.url}/tars/{path.name}" for path in paths]
        ss.index(tars, to=tmp_path / "mine")
        for command in ("ls", "cat", "verify"):
            assert main([command, str(tmp_path / "mine"), *option]) == 0
        manifest = str(tmp_path / "mine" / "index.json")
        assert main(["reshard", manifest, str(tmp_path / "new"), *option]) == 0


def test_error_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "/no/[bold]such\x1b[31m\nplace"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "/no/[bold]such\\x1b[31m\\nplace" in captured.err
    assert captured.out == ""


def test_debug_shows_the_traceback_at_any_position(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "ls", "/no/such"], ["ls", "/no/such", "--debug"]):
        assert main(arguments) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ShardError("x", shard="a", offset=1), 1)]
)
def test_exit_code_depends_on_the_exception_of_a_command(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("shardstream.catalog.list_shards", fail)
    assert main(["ls", "x"]) == code


def test_closed_output_pipe_prints_no_traceback(tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    code = (
        f"import sys; from shardstream.cli import main; sys.exit(main(['ls', {str(tmp_path)!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_start_imports_no_heavy_packages() -> None:
    code = (
        "import sys, shardstream.cli\n"
        "print(*{'torch', 'numpy', 'fsspec', 'PIL', 's3fs', 'rich.console'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.usefixtures("s3_env")
def test_storage_errors_name_a_remedy(
    bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", f"{bucket}/nothing/"]) == 1
    assert "not found" in capsys.readouterr().err
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert main(["ls", f"{bucket}/", "--option", "endpoint_url=http://127.0.0.1:9"]) == 1
    assert "the server cannot be reached; check AWS_ENDPOINT_URL" in capsys.readouterr().err


@pytest.mark.usefixtures("ceph", "s3_env")
def test_wrong_credentials_are_named(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", f"{bucket}/", "--option", "key=wrong", "--option", "secret=wrong"]) == 1
    assert "access refused; check the credentials" in capsys.readouterr().err


def test_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardstream", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: shardstream" in done.stdout
