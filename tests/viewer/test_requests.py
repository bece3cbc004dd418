"""The server of the page: who is answered, with which headers, and its command."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.cli import load_function, main
from shardstream.display import Picture
from shardstream.viewer import Guard, Session, ViewOptions
from tests.viewer import datasets
from tests.viewer.viewers import ROOT, RunningViewer, running_viewer

GUARD = Guard(token="secret", port=80, names=frozenset({"localhost"}))  # noqa: S106


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningViewer]:
    folder = tmp_path_factory.mktemp("hostile")
    datasets.hostile(folder)
    with running_viewer(str(folder)) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"host": "127.0.0.1:80"}, None),
        ({"host": "localhost:80", "sec-fetch-site": "same-origin"}, None),
        ({"host": "[::1]:80", "sec-fetch-site": "none"}, None),
        ({"host": "127.0.0.1:80", "origin": "http://127.0.0.1:80"}, None),
        ({"host": "evil.example:80"}, "not called"),
        ({"host": "127.0.0.1.evil.example:80"}, "not called"),
        ({"host": "localhost:81"}, "not called"),
        ({"host": "localhost"}, "not called"),
        ({"host": "user@localhost:80"}, "not called"),
        ({"host": "localhost:x"}, "not called"),
        ({}, "not called"),
        ({"host": "localhost:80", "sec-fetch-site": "cross-site"}, "another page"),
        ({"host": "localhost:80", "sec-fetch-site": "same-site"}, "another page"),
        ({"host": "localhost:80", "origin": "null"}, "another page"),
        ({"host": "localhost:80", "origin": "http://localhost:81"}, "another page"),
        ({"host": "localhost:80", "origin": "https://evil.example"}, "another page"),
    ],
)
def test_only_requests_of_the_own_page_are_answered(
    headers: dict[str, str], reason: str | None
) -> None:
    found = GUARD.refusal("GET", headers)
    assert (found is None) if reason is None else (reason in (found or ""))


def test_changes_need_json() -> None:
    headers = {"host": "localhost:80"}
    assert GUARD.refusal("POST", headers | {"content-type": "application/json"}) is None
    assert GUARD.refusal("POST", headers | {"content-type": "text/plain"}) is not None
    assert GUARD.refusal("DELETE", headers) is not None


def test_without_the_token_nothing_is_shown(viewer: RunningViewer) -> None:
    wrong = {"cookie": f"shardstream-{viewer.port}=wrong"}
    for path in ("/", "/?token=wrong", "/api/dataset", "/static/viewer.js", "/thumb/0/0", "/none"):
        for headers in ({}, wrong):
            answer = viewer.ask(path, headers=headers)
            assert answer.status == 403
            assert viewer.token.encode() not in answer.body
    foreign = viewer.cookie | {"sec-fetch-site": "cross-site"}
    assert viewer.ask("/api/dataset", headers=foreign).status == 403
    assert viewer.ask(f"/?token={viewer.token}", headers={"host": "evil.example"}).status == 403


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(viewer: RunningViewer) -> None:
    answer = viewer.log_in()
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie  # noqa: PT018


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/dataset",
        "/api/thumbnails?numbers=0",
        "/static/viewer.css",
        "/subset.npy",
        "/nothing",
        "/raw/0/0",
        "/media/4/0",
    ],
)
def test_every_response_has_the_headers(viewer: RunningViewer, path: str) -> None:
    headers = viewer.ask(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "server" not in headers
    assert headers["cache-control"] == "no-store"  # another dataset may have this address later


def test_fields_are_sent_as_downloads_only(viewer: RunningViewer) -> None:
    samples = viewer.get("/api/page")["samples"]
    for sample in samples:
        for place, name in enumerate(sample["fields"]):
            raw = viewer.ask(f"/raw/{sample['number']}/{place}")
            assert raw.headers["content-type"] == "application/octet-stream"
            assert raw.headers["content-disposition"].startswith("attachment; filename=")
            assert raw.headers["content-security-policy"].startswith("sandbox")
            media = viewer.ask(f"/media/{sample['number']}/{place}")
            is_played = name in ("mp3", "mp4")
            assert media.status == (200 if is_played else 400)
            if is_played:
                assert media.headers["content-type"] in ("audio/mpeg", "video/mp4")
            thumbnail = viewer.ask(f"/thumb/{sample['number']}/{place}")
            assert thumbnail.headers["content-type"] == "application/json"  # none is a picture
            assert thumbnail.status in (400, 422)
    cards = thumbnails(viewer, "/api/thumbnails?numbers=0,1,2,3,4,5")
    assert {number: [*found] for number, found in cards.items()} == {
        0: ["text"], 1: ["text"], 2: ["text"], 3: ["error", "kind"], 4: ["error", "kind"], 5: ["error", "kind"],
    }  # fmt: skip


def test_masks_and_boxes_of_cards_are_those_of_the_details(tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path, 3)
    session = Session(ViewOptions(urls=(folder,), storage_options={}))
    with running_viewer(folder) as running:
        found = thumbnails(running, "/api/thumbnails?numbers=2")[2]
        assert found["boxes"] == session.details(2)["boxes"]
        assert (found["width"], found["height"], found["problems"]) == (160, 160, [])
        mask = session.picture(
            2, session.details(2)["masks"].index("seg.png") + 1, 256, overlay=True
        )
        data = base64.b64encode(mask.data).decode()
        assert found["masks"] == [{"name": "seg.png", "type": "image/png", "data": data}]
        plain = thumbnails(running, "/api/thumbnails?numbers=2&plain=1")[2]
        assert plain == {"type": found["type"], "data": found["data"]}


def test_a_mask_that_cannot_be_decoded_is_named_on_its_card(tmp_path: Path) -> None:
    picture, mask, _ = datasets.drawing(0)
    sample = {
        "jpg": datasets.encoded(picture, "JPEG"),
        "seg.png": datasets.encoded(mask, "PNG")[:99],
        "json": b"{",
    }
    with ss.ShardWriter(str(tmp_path / "{shard:06d}.tar")) as writer:
        writer.write({"__key__": "cut", **sample})
    with running_viewer(str(tmp_path)) as running:
        found = thumbnails(running, "/api/thumbnails?numbers=0")[0]
    assert found["data"]
    assert [text.partition(":")[0] for text in found["problems"]] == ["seg.png", "json"]


def test_a_saved_selection_is_the_subset_that_a_dataset_reads(tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path / "data", 60)
    asked = "where=cls+IN+(1,+3)&sort=light&descending=1"
    with running_viewer(folder) as running:
        saved = running.ask(f"/subset.npy?{asked}")
        assert saved.headers["content-disposition"] == 'attachment; filename="subset.npy"'
        (tmp_path / "subset.npy").write_bytes(saved.body)
        shown = running.get(f"/api/page?{asked}&count=200")["samples"]
        keys = [
            one["__key__"]
            for one in ss.ShardDataset(folder, subset=tmp_path / "subset.npy").by_number()
        ]
        assert keys == [one["key"] for one in shown]
        assert len(keys) == 30
        refused = running.ask("/subset.npy?where=cls+=+9")
        assert (refused.status, refused.json["error"]) == (400, "no sample fulfils the condition")


@pytest.mark.parametrize("columns", ["__key__", None])
def test_a_search_that_found_too_many_keys_is_not_saved(
    tmp_path: Path, columns: str | None
) -> None:
    dest = str(tmp_path / "{shard:06d}.tar")
    with ss.ShardWriter(dest, max_samples=1000, columns=columns) as writer:
        for number in range(1001):
            writer.write({"__key__": f"k{number}", "txt": b"x"})
    with running_viewer(str(tmp_path)) as running:
        assert running.get("/api/page?key=k")["note"] == "the first 1,000 of 1,001"
        refused = running.ask("/subset.npy?key=k")
    assert refused.status == 400
    assert "not all samples with this key" in refused.json["error"]


def thumbnails(viewer: RunningViewer, path: str) -> dict[int, Any]:
    return dict(json.loads(line) for line in viewer.ask(path).body.splitlines())


def test_pictures_of_cards_come_in_one_response(tmp_path: Path) -> None:
    folder = datasets.kinds(tmp_path)
    session = Session(ViewOptions(urls=(folder,), storage_options={}))
    with running_viewer(folder) as running:
        found = thumbnails(running, "/api/thumbnails?numbers=7,2,5&plain=1")
        assert sorted(found) == [2, 5, 7]
        assert found[5] == {"text": ""}
        for number in (2, 7):
            picture = session.card_picture(number, 256)
            assert isinstance(picture, Picture)
            data = base64.b64encode(picture.data).decode()
            assert found[number] == {"type": "image/png", "data": data}
        assert thumbnails(running, "/api/thumbnails?numbers=8")[8]["kind"] == "OptionError"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/page?first=x", 400),
        ("/api/page?first=-5&count=-1", 200),
        ("/api/page?count=999999999", 200),
        ("/api/page?at=99", 400),
        ("/api/page?sort=cls", 400),
        ("/subset.npy?where=1", 400),
        ("/api/sample/99", 400),
        ("/thumb/0/99", 400),
        ("/api/thumbnails", 400),
        ("/api/thumbnails?numbers=0,x", 400),
        (f"/api/thumbnails?numbers={'0,' * 200}0", 400),
        ("/media/99/0", 400),
        ("/api/page?where=1", 400),
        ("/api/epoch?ranks=999999999", 400),
        ("/decoded/0", 400),
        ("/static/../viewer.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/api/state", 405),
    ],
)
def test_strange_requests_are_answered_clearly(
    viewer: RunningViewer, path: str, status: int
) -> None:
    assert viewer.ask(path).status == status


def test_players_get_the_parts_that_they_ask_for(tmp_path: Path) -> None:
    datasets.kinds(tmp_path)
    sound = ss.ShardDataset(str(tmp_path)).by_number()[0]["flac"]
    with running_viewer(str(tmp_path)) as running:
        whole = running.ask("/media/0/0")
        assert (whole.status, whole.body) == (200, sound)
        part = running.ask("/media/0/0", headers=running.cookie | {"range": "bytes=100-299"})
        assert (part.status, part.body) == (206, sound[100:300])
        assert part.headers["content-range"] == f"bytes 100-299/{len(sound)}"
        past = running.ask("/media/0/0", headers=running.cookie | {"range": "bytes=99999999-"})
        assert past.status == 416


def test_a_missing_dataset_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "/nowhere/at/all", "--no-browser"]) == 1
    assert "error: not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [("json", "module:function"), ("json:no", "no attribute"), ("no_such:f", "No module")],
)
def test_a_wrong_function_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        load_function(name, "--decode")


@pytest.mark.slow
def test_a_dataset_of_the_user_is_shown_by_the_command(tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path / "data", 60)
    (tmp_path / "train.py").write_text(
        "import shardstream as ss\n"
        f"def make(): return ss.ShardDataset({folder!r}, shuffle=True, seed=7, where='cls = 1')\n"
        "def changes(): return make().decode().shuffle(9)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with running_viewer(folder, "--dataset", "train:make", environment=environment) as running:
        found = running.get("/api/epoch?ranks=2&workers=1")
        assert (found["samples"], found["training"]["seed"]) == (15, 7)
        assert {n % 4 for rank in found["ranks"] for n in rank["numbers"]} == {1}
    command = [sys.executable, "-m", "shardstream", "view", folder, "--dataset", "train:changes"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert ended.returncode == 1
    assert "no step of it may change the number of samples" in ended.stderr.replace("\n", " ")


def test_the_process_does_not_import_torch(tmp_path: Path) -> None:
    datasets.kinds(tmp_path)
    code = f"""
import sys
from shardstream.viewer import Session, ViewOptions, serve
session = Session(ViewOptions(urls=({str(tmp_path)!r},), storage_options={{}}))
session.page(0, 50), session.histograms(), session.epoch({{}})
for number in range(8):
    session.details(number)
session.picture(0, 0, 64)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_a_missing_extra_is_one_clear_error(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["uvicorn"] = None
import importlib.util
from shardstream.cli import main
real = importlib.util.find_spec
sys.exit(main(["view", ".", "--no-browser"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert 'pip install ".[view]" in a clone' in done.stderr
    assert "Traceback" not in done.stderr
