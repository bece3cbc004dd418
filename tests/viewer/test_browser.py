"""The page in a real browser: Chromium, headless, over local shards and over S3."""

from __future__ import annotations

import base64
import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.display import Picture
from shardstream.packing import index
from shardstream.viewer import Session, ViewOptions
from tests.codecs.videos import video_file
from tests.servers import S3Server, ShapedS3, signal_server
from tests.small_datasets import FEW_CORES, loader, numbered
from tests.small_tars import flip, make_dataset, tar_bytes
from tests.viewer import datasets
from tests.viewer.viewers import RunningViewer, chromium_or_skip, running_viewer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(FEW_CORES)]
TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium_or_skip()
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened(browser: Browser, viewer: RunningViewer, **options: Any) -> Iterator[Page]:
    """Open the page; at the end no script failed and no policy was violated."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None,
    )
    page.goto(viewer.url)
    page.wait_for_selector("#grid[aria-busy=false]")
    yield page
    context.close()
    assert problems == []


def shown_numbers(page: Page) -> list[int]:
    return [int(one.get_attribute("data-number") or "") for one in page.query_selector_all(".card")]


def until(page: Page, expression: str) -> None:
    """Wait until an expression is true; the page's policy refuses Playwright's own ``wait_for_function``."""
    end_s = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, f"never true: {expression}"
        page.wait_for_timeout(50)


def wait_for_pictures(page: Page, count: int) -> None:
    shown = "[...document.querySelectorAll('.card img')].filter(one => one.complete && one.naturalWidth)"
    until(page, f"{shown}.length >= {count}")


def test_a_person_looks_through_pictures(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path, 120)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        wait_for_pictures(page, 50)
        assert "token" not in page.url
        assert shown_numbers(page) == [*range(50)]
        page.click("#next")
        page.click("#last")  # while the pictures before are on their way
        page.wait_for_selector("[data-number='119']")
        assert shown_numbers(page) == [*range(100, 120)]
        wait_for_pictures(page, 20)
        session = Session(ViewOptions(urls=(folder,), storage_options={}))
        for number in range(100, 120):
            picture = session.card_picture(number, 256)
            assert isinstance(picture, Picture)
            source = page.get_attribute(f"[data-number='{number}'] img:not(.overlay)", "src")
            data = base64.b64encode(picture.data).decode()
            assert source == f"data:image/jpeg;base64,{data}"
        page.fill("#number", "77")
        page.press("#number", "Enter")
        page.wait_for_selector("#details h2")
        sample = ss.ShardDataset(folder).by_number()[77]
        assert page.inner_text("#details h2") == f"77 · {sample['__key__']}"
        assert page.inner_text("#details .command pre") == f"shardstream cat {folder} --number 77"
        assert page.locator("#details svg rect").count() == 1
        assert page.inner_text("#details .box-label") == "square"
        assert page.inner_text("[data-number='77'] .box-label") == "square"
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('#details h2').textContent.startsWith('78 ')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#details", state="hidden")


def choose(page: Page, where: str) -> None:
    page.fill("#where", where)
    page.press("#where", "Enter")


def test_filters_choose_samples_and_name_their_mistakes(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path, 120)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        page.fill("#class", "3 dot")
        page.click("#filters button[type=submit]")
        page.wait_for_selector("#clear:visible")
        assert shown_numbers(page) == [*range(3, 120, 4)]
        page.fill("#where", "cls = 1 AND light > 9999")
        page.fill("#class", "")
        page.press("#where", "Enter")
        page.wait_for_selector("text=No sample fulfils the condition")
        choose(page, "what = 1")
        page.wait_for_selector("#banner:has-text('Columns: cls, width, light')")
        page.click("[data-view=histograms]")
        page.wait_for_selector("#banner", state="hidden")
        page.click("[data-view=samples]")
        page.click("#clear")
        page.fill("#key", "000042")
        page.press("#key", "Enter")
        until(page, "document.querySelectorAll('.card').length === 1")
        assert shown_numbers(page) == [42]


ADDRESS = "#where=cls+%3C+3&sort=cls&count=20&first=20&sample=88"


def until_open(page: Page, number: int) -> None:
    """Wait until the details show a sample."""
    start = f"startsWith('{number} ')"
    until(page, f"document.querySelector('#details h2')?.textContent.{start}")


def test_the_address_holds_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    expected = [*range(80, 120, 4), *range(1, 41, 4)]
    folder = datasets.pictures(tmp_path, 120)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        choose(page, "cls < 3")
        page.wait_for_selector("#range:has-text('of 90')")
        page.select_option("#count", "20")
        page.select_option("#sort", "cls")
        page.wait_for_selector("[data-number='4']")
        page.click("#next")
        page.wait_for_selector("#range:has-text('20 to 39 of 90')")
        page.click(".card:nth-child(3)")
        until_open(page, 88)
        assert page.url.partition("/#")[2] == ADDRESS[1:]
        page.click("#next")  # the details follow the page
        until_open(page, 41)
        page.go_back()
        until_open(page, 88)
        assert shown_numbers(page) == expected
        page.reload()
        until_open(page, 88)
        assert shown_numbers(page) == expected
        assert page.input_value("#where") == "cls < 3"
        until(page, "document.querySelector('#sort').value === 'cls'")
        choose(page, "cls = 3")  # and the filter
        until_open(page, 3)


def test_a_link_opens_what_its_address_says(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path, 120)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        root = page.url.partition("#")[0]
        page.goto(root + ADDRESS)
        until_open(page, 88)
        page.goto(root + ADDRESS.replace("sample=88", "sample=7"))  # its class is 3
        page.wait_for_selector("#banner:has-text('sample 7 is not among the 90')")
        page.wait_for_selector("#details", state="hidden")
        page.goto(root + "#count=500")  # more than a page has: the next one would leave samples out
        until(page, "location.hash === '#count=200'")
        page.goto(root + "#view=histograms&first=-1&count=x&what=1")
        page.wait_for_selector("text=Exact: all 120 samples")
        page.go_back()
        page.wait_for_selector("#samples:visible")


def test_a_selection_is_saved(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path / "data", 60)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        assert page.is_hidden("#save")
        page.fill("#class", "dot")
        page.click("#filters button[type=submit]")
        with page.expect_download() as found:
            page.click("#save:has-text('15 numbers')")
        found.value.save_as(tmp_path / "subset.npy")
    keys = [
        one["__key__"]
        for one in ss.ShardDataset(folder, subset=tmp_path / "subset.npy").by_number()
    ]
    assert keys == [one["__key__"] for one in ss.ShardDataset(folder, where="cls = 3").by_number()]


def test_a_bar_of_a_histogram_shows_its_samples(browser: Browser, tmp_path: Path) -> None:
    with running_viewer(datasets.pictures(tmp_path, 60)) as viewer, opened(browser, viewer) as page:
        page.click("[data-view=histograms]")
        page.wait_for_selector("text=Exact: all 60 samples")
        page.click("[data-column=cls] button:nth-of-type(2)")
        page.wait_for_selector("#clear:visible")
        assert shown_numbers(page) == [*range(1, 60, 4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_view_is_what_loaders_yield(
    browser: Browser, tmp_path: Path, workers: int
) -> None:
    folder = numbered(tmp_path, 203, columns="cls")
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "lanes": 8, "microbatch": 8}
    made = loader(folder, 8, num_workers=workers, placement=ss.Placement(1, 2), **options)
    batches: Any = iter(made)
    taken = list(islice(batches, 3))
    # Workers that a fork left running would keep the pipe of the browser's driver open.
    with closing(batches), running_viewer(folder) as viewer, opened(browser, viewer) as page:
        page.click("[data-view=epoch]")
        page.wait_for_selector("[data-rank='1']")
        page.click("summary:has-text('microbatch')")
        for name, value in {"ranks": 2, "workers": workers, "seed": 5, "batch_size": 8, "lanes": 8, "microbatch": 8}.items():  # fmt: skip
            page.fill(f"[data-training='0'] input[name={name}]", str(value))
        page.click("[data-training='0'] button[type=submit]")
        until(page, "document.querySelectorAll('[data-rank]').length === 2")
        page.fill("[aria-label=step] >> nth=0", "2")
        page.press("[aria-label=step] >> nth=0", "Enter")
        page.wait_for_selector("dd:has-text('2 (0 to 12)')")
        assert numbers_of(page, 1) == taken[2]["cls"].tolist()
        page.click("summary:has-text('saved state')")
        page.fill("textarea", json.dumps(made.state_dict()))
        page.click("text=Continue from this state")
        page.wait_for_selector("text=counted from the state")
        assert numbers_of(page, 1) == next(batches)["cls"].tolist()
        page.fill("textarea", json.dumps(made.state_dict()).replace('"seed": 5', '"seed": 6'))
        page.click("text=Continue from this state")
        page.wait_for_selector("#banner:has-text('damaged or was edited')")


def numbers_of(page: Page, rank: int) -> list[int]:
    buttons = page.query_selector_all(f"[data-training='0'] [data-rank='{rank}'] button")
    return [int(one.inner_text()) for one in buttons]


def test_two_topologies_are_compared(browser: Browser, tmp_path: Path) -> None:
    with running_viewer(numbered(tmp_path, 400)) as viewer, opened(browser, viewer) as page:
        page.click("[data-view=epoch]")
        page.wait_for_selector("[data-rank='3']")
        page.click("text=Compare with another topology")
        page.wait_for_selector("#verdict:has-text('samples in common at this step')")
        for side, ranks, batch in ((0, 2, 16), (1, 4, 8)):
            page.click(f"[data-training='{side}'] summary:has-text('microbatch')")
            for name, value in {"ranks": ranks, "batch_size": batch, "microbatch": 8, "lanes": 32}.items():  # fmt: skip
                page.fill(f"[data-training='{side}'] input[name={name}]", str(value))
            page.click(f"[data-training='{side}'] button[type=submit]")
        page.wait_for_selector("#verdict:has-text('The same 32 samples at this step')")


def test_no_script_of_the_data_runs(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.hostile(tmp_path / "data")
    report = tmp_path / "bad.jsonl"
    entry = dict.fromkeys(("shard", "offset", "number", "key", "field", "epoch", "rank", "worker"))
    report.write_text(json.dumps(entry | {"error": datasets.MARKUP, "message": datasets.MARKUP}))
    asked: list[str] = []
    with running_viewer(folder, "--bad", str(report)) as viewer, opened(browser, viewer) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: asked.append(f"pwned: {dialog.message}"))
        assert page.inner_text(".tag") == datasets.MARKUP
        for number in range(6):
            page.click(f"[data-number='{number}']")
            until(
                page, f"document.querySelector('#details h2')?.textContent.startsWith('{number} ')"
            )
            page.wait_for_load_state("networkidle")
        for view in ("histograms", "epoch", "bad"):
            page.click(f"[data-view={view}]")
            page.wait_for_load_state("networkidle")
        page.wait_for_selector("#bad td")
        assert page.locator("td", has_text="<script>").count() == 2
        for path in ("/raw/0/0", "/media/4/0", "/thumb/1/0", "/raw/5/0"):
            link = page.context.new_page()
            try:
                link.goto(f"http://127.0.0.1:{viewer.port}{path}")
            except Exception as error:  # noqa: BLE001  (a download is no page)
                assert "Download is starting" in str(error)  # noqa: PT017
            assert link.evaluate("window.pwned") is None
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("document.scripts.length") == 1
    assert not [url for url in asked if "pwned" in url]


def test_a_page_elsewhere_cannot_read_the_data(browser: Browser, tmp_path: Path) -> None:
    from tests.static_server import serve_files  # noqa: PLC0415

    folder = datasets.pictures(tmp_path / "data", 4)
    (tmp_path / "web").mkdir()
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        address = f"http://127.0.0.1:{viewer.port}"
        (tmp_path / "web" / "evil.html").write_text(
            f"<title>evil</title><img id=a src='{address}/thumb/0/0'><iframe src='{address}/'></iframe>"
        )
        with serve_files(tmp_path / "web") as web:
            elsewhere = page.context.new_page()  # its console says that frames are refused
            elsewhere.goto(f"{web.url}/evil.html")
            elsewhere.wait_for_load_state("networkidle")
            assert elsewhere.evaluate("document.getElementById('a').naturalWidth") == 0
            said = elsewhere.evaluate(
                f"fetch('{address}/api/dataset', {{credentials: 'include'}}).then(a => a.text(), String)"
            )
            assert "samples" not in said
            frames = [frame for frame in elsewhere.frames if frame is not elsewhere.main_frame]
            assert all("shardstream" not in frame.content() for frame in frames)


def test_sound_video_arrays_and_text_are_shown(browser: Browser, tmp_path: Path) -> None:
    datasets.kinds(tmp_path / "kinds")
    with ss.ShardWriter(str(tmp_path / "film" / "{shard:06d}.tar")) as writer:
        writer.write(
            {"__key__": "film", "mp4": video_file(), "webm": video_file("webm", codec="libvpx-vp9")}
        )
    with running_viewer(str(tmp_path / "kinds")) as viewer, opened(browser, viewer) as page:
        wait_for_pictures(page, 5)
        page.click("[data-number='0']")
        page.wait_for_selector("audio")
        page.evaluate("document.querySelector('audio').play()")
        until(page, "document.querySelector('audio').currentTime > 0.1")
        page.click("[data-number='1']")
        page.wait_for_selector("dd:has-text('float32')")
        page.click("[data-number='5']")
        page.wait_for_selector("#details pre:has-text('grüße')")
    with running_viewer(str(tmp_path / "film")) as viewer, opened(browser, viewer) as page:
        wait_for_pictures(page, 1)
        page.click("[data-number='0']")
        page.wait_for_selector("video")
        page.evaluate("document.querySelectorAll('video')[1].play()")
        until(page, "document.querySelectorAll('video')[1].currentTime > 0.1")


def test_a_broken_sample_is_red_with_its_message(browser: Browser, tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    index(str(tmp_path), sha256=False)
    offset = int(np.fromfile(tmp_path / "train-000000.tar.idx", "<u8")[2])
    flip(tmp_path / "train-000000.tar", offset + 100)
    with running_viewer(str(tmp_path)) as viewer, opened(browser, viewer) as page:
        assert page.locator(".card.broken").count() == 1
        assert "checksum" in page.inner_text(".card.broken .problem")
        page.click(".card.broken")
        page.wait_for_selector("#details .problem:has-text('checksum')")


def test_a_picture_that_cannot_be_decoded_is_red_with_its_message(
    browser: Browser, tmp_path: Path
) -> None:
    with ss.ShardWriter(str(tmp_path / "{shard:06d}.tar")) as writer:
        writer.write(
            {"__key__": "cut", "jpg": datasets.encoded(datasets.drawing(0)[0], "JPEG")[:900]}
        )
    with running_viewer(str(tmp_path)) as viewer, opened(browser, viewer) as page:
        page.wait_for_selector(".card.broken .problem:has-text('truncated')")


@pytest.mark.parametrize("count", [0, 1])
def test_none_or_one_sample(browser: Browser, tmp_path: Path, count: int) -> None:
    if count:
        datasets.pictures(tmp_path, 1)
    else:
        (tmp_path / "a.tar").write_bytes(tar_bytes([]))
    with running_viewer(str(tmp_path)) as viewer, opened(browser, viewer) as page:
        assert len(shown_numbers(page)) == count
        if count:
            wait_for_pictures(page, 1)
            assert page.is_disabled("#next") and page.is_disabled("#previous")  # noqa: PT018
        else:
            page.wait_for_selector("text=This dataset has no samples.")
        page.click("[data-view=epoch]")
        page.wait_for_selector("[data-rank='0']" if count else "#banner:has-text('no samples')")


def test_a_stopped_server_is_said_in_the_page(browser: Browser, tmp_path: Path) -> None:
    with running_viewer(datasets.pictures(tmp_path, 60)) as viewer, opened(browser, viewer) as page:
        viewer.process.send_signal(signal.SIGINT)
        viewer.process.wait(30)
        page.click("#next")
        page.wait_for_selector("#banner:has-text('The server does not answer')")


def test_a_replaced_dataset_can_be_reloaded(browser: Browser, tmp_path: Path) -> None:
    folder = datasets.pictures(tmp_path, 100)
    with running_viewer(folder) as viewer, opened(browser, viewer) as page:
        for file in tmp_path.iterdir():
            file.unlink()
        datasets.pictures(tmp_path, 70)
        page.click("#next")
        page.wait_for_selector("#banner:has-text('Reload the dataset')")
        page.click("#banner-action")
        page.wait_for_selector("#counts:has-text('70 samples')")


def test_over_s3_by_ranges(browser: Browser, s3: S3Server, s3_env: None, bucket: str) -> None:
    datasets.pictures(f"{bucket}/shapes", 120)
    with (
        running_viewer(f"{bucket}/shapes", environment=s3.environment) as viewer,
        opened(browser, viewer) as page,
    ):
        wait_for_pictures(page, 50)
        page.click("#last")
        page.wait_for_selector("[data-number='119']")
        page.click("[data-number='101']")
        page.wait_for_selector("#details h2:has-text('shape-000101')")
        page.click("[data-view=histograms]")
        page.wait_for_selector("text=Exact: all 120 samples")


def test_without_an_index_over_s3(
    browser: Browser, s3: S3Server, s3_env: None, bucket: str
) -> None:
    datasets.pictures(f"{bucket}/shapes", 60)
    name = bucket.removeprefix("s3://")
    client = s3.client()
    for one in client.list_objects_v2(Bucket=name)["Contents"]:
        if not one["Key"].endswith(".tar"):
            client.delete_object(Bucket=name, Key=one["Key"])
    client.close()
    with (
        running_viewer(f"{bucket}/shapes", environment=s3.environment) as viewer,
        opened(browser, viewer) as page,
    ):
        page.wait_for_selector("#hint:has-text('shardstream index')")
        wait_for_pictures(page, 50)


def test_a_store_that_is_down_is_said_in_the_page(
    browser: Browser, shaped_s3: ShapedS3, bucket: str
) -> None:
    datasets_env = shaped_s3.plain.environment
    options = {"storage_options": shaped_s3.plain.storage_options}
    datasets.pictures(f"{bucket}/shapes", 120, **options)
    with (
        running_viewer(f"{bucket}/shapes", environment=datasets_env) as viewer,
        opened(browser, viewer) as page,
    ):
        signal_server(shaped_s3.workdir, "nginx", signal.SIGKILL)
        page.click("#last")
        page.wait_for_selector("#banner:has-text('Try again')", timeout=60_000)
