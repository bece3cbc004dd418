"""Times of ``shardstream view`` as a person feels them: start, a page, the pictures of a page in a browser, an epoch view."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import shardstream
from benchmarks.case import Case, Result
from benchmarks.processes import cpu_s

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAGE_SAMPLES = 50
_REQUESTS, _SHOWN, _STARTS = 30, 9, 5
_RANKS = 64
_SHOWS_S = 20.0
_COMPLETE = (
    "[...document.querySelectorAll('.card img')].filter(one => one.complete && one.naturalWidth)"
)


def measure(case: Case) -> Result:
    """Time a viewer of the case's data; all figures are medians."""
    began = time.perf_counter()
    starts = [_time_start(case) for _ in range(_STARTS)]
    with _viewer(case) as page:
        _get(page, "/api/page")
        pages = [_timed(lambda: _get(page, _random_page(case))) for _ in range(_REQUESTS)]
        epochs = [_timed(lambda: _get(page, _random_epoch())) for _ in range(_REQUESTS)]
        extra = {
            "start_s": statistics.median(starts),
            "page_ms": 1000 * statistics.median(pages),
            "epoch_ms": 1000 * statistics.median(epochs),
        }
        for name, found in _time_pictures(page, case).items():
            extra[name] = 1000 * statistics.median(found)
    return Result(seconds=time.perf_counter() - began, cpu_s=cpu_s(), extra=extra)


@contextmanager
def _viewer(case: Case) -> Iterator[str]:
    """Start a viewer; yields the address of its page, with the token."""
    command = [sys.executable, "-m", "shardstream", "view", case.location, "--no-browser"]
    root = str(Path(shardstream.__file__).parent.parent)
    process = subprocess.Popen(  # noqa: S603  (the viewer of this checkout)
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    try:
        yield (process.stdout.readline() if process.stdout else "").strip()
    finally:
        process.terminate()
        process.wait(30)


def _time_start(case: Case) -> float:
    """Return the seconds from the start of the command to its first page."""
    began = time.perf_counter()
    with _viewer(case) as page:
        _get(page, "/api/page")
        return time.perf_counter() - began


def _get(page: str, path: str) -> bytes:
    parts = urlsplit(page)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=60)
    token = parts.query.removeprefix("token=")
    connection.request("GET", path, headers={"cookie": f"shardstream-{parts.port}={token}"})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {body[:200]!r}")
    return body


def _random_page(case: Case) -> str:
    first = random.randrange(max(1, case.samples - PAGE_SAMPLES))
    return f"/api/page?first={first}&count={PAGE_SAMPLES}"


def _random_epoch() -> str:
    numbers = f"epoch={random.randrange(1000)}&seed={random.randrange(1000)}"
    return f"/api/epoch?{numbers}&ranks={_RANKS}&workers=4&batch_size=8&step=0"


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _time_pictures(page: str, case: Case) -> dict[str, list[float]]:
    """Return the seconds from opening the address, and from a click on "next", until all pictures of a page are painted, in Chromium.

    Returns:
        "opened_ms" and "shown_ms"; nothing if Chromium is not installed, or the data have no second page.
    """
    path = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415  (no part of the package)
    except ImportError:
        return {}
    if path is None or case.samples < 2 * PAGE_SAMPLES:
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = [_open(browser.new_page(), page) for _ in range(_SHOWN)]
        shown = browser.new_page()
        shown.goto(page)
        pages = random.sample(
            range(1, case.samples // PAGE_SAMPLES), k=min(_SHOWN, case.samples // PAGE_SAMPLES - 1)
        )
        turned = [_turn_to(shown, number * PAGE_SAMPLES) for number in pages]
        browser.close()
    return {"opened_ms": opened, "shown_ms": turned}


def _open(tab: Page, page: str) -> float:
    """Open the address in a new tab without a cache."""
    began = time.perf_counter()
    tab.goto(page, wait_until="commit")
    tab.evaluate(_PAINT, ["", 0, PAGE_SAMPLES, _SHOWS_S])
    took = time.perf_counter() - began
    tab.close()
    return took


def _turn_to(tab: Page, first: int) -> float:
    """Turn to the page that begins with a sample from the page before it."""
    tab.fill("#number", str(first - 1))
    tab.press("#number", "Enter")
    tab.wait_for_selector(f"[data-number='{first - 1}']")
    tab.wait_for_load_state("networkidle")
    tab.keyboard.press("Escape")
    took: float = tab.evaluate(_PAINT, ["next", first, PAGE_SAMPLES, _SHOWS_S])
    return took


_PAINT = """async ([button, number, count, limit]) => {
    const began = performance.now();
    const nextFrame = () => new Promise(requestAnimationFrame);
    const isShown = () => document.querySelector(`[data-number='${number}']`) !== null && COMPLETE.length >= count;
    document.getElementById(button)?.click();
    while (!isShown()) {
        if (performance.now() - began > 1000 * limit) throw new Error('the pictures are not shown');
        await nextFrame();
    }
    await nextFrame();
    await nextFrame();  // the frame with the pictures was drawn before
    return (performance.now() - began) / 1000;
}""".replace("COMPLETE", _COMPLETE)
