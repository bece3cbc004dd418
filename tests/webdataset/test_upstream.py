"""webdataset's own tests, with ``import webdataset`` meaning ``shardstream.webdataset``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.webdataset import upstream

PIPE = "a `pipe:` URL is refused"
PICKLE = "a pickle is refused"
REFUSED = {
    "test_compat::test_cache_dir": "no `__local_path__` of remote shards",
    "test_compat::test_dataset_eof": PIPE,
    "test_compat::test_dataset_eof_handler": PIPE,
    "test_compat::test_dataset_pipe_cat": PIPE,
    "test_compat::test_lmdb_cached": "LMDB of pickles is refused",
    "test_gopen::test_pipe": PIPE,
    "test_pipeline::test_dataset_eof": PIPE,
    "test_pipeline::test_dataset_eof_handler": PIPE,
    "test_pipeline::test_pipe": PIPE,
    "test_security::TestEnforceSecurity::test_autodecode_integration_with_security": PICKLE,
    "test_security::TestEnforceSecurity::test_pickle_loads_allowed_when_security_disabled": PICKLE,
    "test_security::TestEnforceSecurity::test_pipe_url_allowed_when_security_disabled": PIPE,
    "test_writer::test_writer3": PICKLE,
    "test_writer::test_writer_pipe": PIPE,
}
PASSED = {
    "cache": 5, "compat": 33, "decode": 3, "filters": 32, "gopen": 1, "handlers": 1, "loaders": 6, "mix": 3, "pipeline": 52,
    "security": 13, "shardlists": 14, "shuffles": 4, "utils": 3, "writer": 5,
}  # fmt: skip
PAGE = Path(upstream.ROOT) / "docs" / "webdataset.md"
RESULTS = Path(upstream.ROOT) / "docs" / "decisions" / "webdataset.md"


@pytest.mark.slow
def test_only_tests_of_what_is_refused_fail(tmp_path: Path) -> None:
    tests = upstream.download(tmp_path)
    if tests is None:
        pytest.skip(f"the source package of webdataset {upstream.VERSION} cannot be fetched")
    folder = tmp_path / "suite"
    upstream.prepare(tests, folder)
    results = upstream.run(folder)
    failed = {name: text for name, text in results.items() if text != "passed"}
    unexpected = {name: text for name, text in failed.items() if name not in REFUSED}
    assert not unexpected
    assert failed.keys() == REFUSED.keys()
    passed = Counter(
        name.split("::")[0].removeprefix("test_") for name in results.keys() - failed.keys()
    )
    assert passed == PASSED


@pytest.mark.slow
def test_page_lists_the_tests_that_fail_and_the_counts() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in RESULTS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    reasons = {
        row[0].strip("`"): row[1] for row in rows if len(row) == 2 and row[0].startswith("`test_")
    }
    missing = {name.removeprefix("test_security::TestEnforceSecurity::") for name in REFUSED}
    assert {name.rpartition("::")[2] for name in reasons} == {
        name.rpartition("::")[2] for name in missing
    }
    assert all(reasons[name] for name in reasons)
    counts = {row[0]: row[1] for row in rows if len(row) == 3 and row[0] in PASSED}
    assert counts.keys() == PASSED.keys()
    for name, passed in PASSED.items():
        total = passed + sum(test.startswith(f"test_{name}::") for test in REFUSED)
        assert counts[name] == f"{passed} of {total}"


@pytest.mark.slow
def test_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    program = "\n".join(blocks)
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, timeout=120)
