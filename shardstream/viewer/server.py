"""Serve the page and answer its requests: the only module that knows Starlette and uvicorn. Everything is decided elsewhere."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardstream.display import Picture, played_type
from shardstream.errors import (
    ChangedError,
    OptionError,
    ShardStreamError,
    StorageError,
    describe_error,
    get_logger,
)
from shardstream.process import tune_worker_process
from shardstream.viewer.epoch_view import parse_whole
from shardstream.viewer.guard import (
    DOWNLOAD_POLICY,
    HEADERS,
    PAGE_POLICY,
    TOKEN,
    Address,
    Guard,
    allowed_names,
    download_name,
    parse_range,
)
from shardstream.viewer.page import message_of
from shardstream.viewer.session import MAX_PAGE, PAGE_SAMPLES, Choice, Session, ViewOptions

_log = get_logger(__name__)

_STATIC = Path(__file__).parent / "static"
_MAX_BODY_BYTES = 4 << 20
_MEDIA_BYTES = 4 << 20  # of one response to a player
_THUMBNAIL, _PICTURE = 256, 2048  # maximum of both sides, in pixels
_RENDERERS = 8  # threads of a page of thumbnails: they wait for the store, too

Answer = Callable[[Session, Request], Any]


class Viewer:
    """The dataset that is open, and how it is opened again.

    Args:
        options: What is shown.
    """

    def __init__(self, options: ViewOptions) -> None:
        self.options = options
        self.session = Session(options)
        self._lock = threading.Lock()

    def reload(self) -> Session:
        """Open the dataset again: it was replaced, or the store is back.

        Raises:
            ShardStreamError: If that fails; the dataset stays as it was.
        """
        with self._lock:
            self.session = Session(self.options)
            return self.session


class GuardedApp:
    """Refuse what `Guard` refuses, ask for the token, and set the headers of all responses.

    Args:
        app: Answers what is left.
        guard: The rules.
        once: Tokens that are accepted once: the browser that is opened gets one, as other users of the machine see its arguments.
    """

    def __init__(self, app: ASGIApp, guard: Guard, once: set[str]) -> None:
        self._app, self._guard, self._once = app, guard, once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        refusal = self._guard.refusal(request.method, dict(request.headers))
        answer: ASGIApp = self._app
        if refusal is not None:
            answer = PlainTextResponse(refusal, 403)
        elif request.url.path == "/" and TOKEN in request.query_params:
            answer = self._log_in(request.query_params[TOKEN])
        elif not self._guard.is_token(request.cookies.get(self._guard.cookie, "")):
            answer = PlainTextResponse(
                "Open the address that 'shardstream view' printed: it has a token.", 403
            )

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = HEADERS | {"content-security-policy": PAGE_POLICY}
                # A picture that a browser kept could be of a dataset that was replaced, or that had this port before.
                added |= {"cache-control": "no-store"}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in added.items()
                        if name.encode() not in present
                    ),
                ]
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _log_in(self, token: str) -> Response:
        is_first_use = token in self._once
        self._once.discard(token)
        if not is_first_use and not self._guard.is_token(token):
            return PlainTextResponse("The token of this address is wrong, or was used.", 403)
        response = RedirectResponse("/", 303)  # the token does not stay in the history
        response.set_cookie(
            self._guard.cookie, self._guard.token, httponly=True, samesite="strict", path="/"
        )
        return response


def build_app(viewer: Viewer, guard: Guard, once: set[str]) -> ASGIApp:
    """Return the application.

    Args:
        viewer: The dataset.
        guard: The rules of its server.
        once: As in `GuardedApp`.
    """
    json_routes: dict[str, Answer] = {
        "/api/dataset": lambda session, _: session.dataset(),
        "/api/page": _page,
        "/api/sample/{number:int}": lambda session, request: session.details(_number(request)),
        "/api/histograms": lambda session, _: session.histograms(),
        "/api/bad": lambda session, _: session.bad(),
        "/api/epoch": _epoch,
    }
    byte_routes: dict[str, Callable[[Session, Request], Response]] = {
        "/api/thumbnails": _thumbnails,
        "/thumb/{number:int}/{place:int}": _thumbnail,
        "/picture/{number:int}/{place:int}": _picture,
        "/decoded/{number:int}": _decoded,
        "/media/{number:int}/{place:int}": _media,
        "/raw/{number:int}/{place:int}": _raw,
        "/subset.npy": _subset,
    }

    def of_json(answer: Answer) -> Callable[[Request], Response]:
        return lambda request: _answered(lambda: _json(answer(viewer.session, request)))

    def of_bytes(answer: Callable[[Session, Request], Response]) -> Callable[[Request], Response]:
        return lambda request: _answered(lambda: answer(viewer.session, request))

    async def state(request: Request) -> Response:
        body = await _body(request)
        return await run_in_threadpool(_answered, lambda: _json(_resume(viewer.session, body)))

    def reload(_: Request) -> Response:
        return _answered(lambda: _json(viewer.reload().dataset()))

    routes = [
        Route("/", lambda _: FileResponse(_STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=_STATIC)),
        *(Route(path, of_json(answer)) for path, answer in json_routes.items()),
        *(Route(path, of_bytes(answer)) for path, answer in byte_routes.items()),
        Route("/api/state", state, methods=["POST"]),
        Route("/api/reload", reload, methods=["POST"]),
    ]
    return GuardedApp(Starlette(routes=routes), guard, once)


def _page(session: Session, request: Request) -> Any:
    values = request.query_params
    return session.page(
        _whole(values, "first", 0),
        _whole(values, "count", PAGE_SAMPLES),
        _choice(values),
        at=_whole(values, "at", 0) if values.get("at") else None,
    )


def _choice(values: Mapping[str, str]) -> Choice:
    sort = values.get("sort", "")
    return Choice(
        where=values.get("where", "").strip(),
        key=values.get("key", "").strip(),
        sort=sort,
        descending=bool(sort and values.get("descending")),
    )


def _subset(session: Session, request: Request) -> Response:
    return _download(session.subset(_choice(request.query_params)), "subset.npy")


def _epoch(session: Session, request: Request) -> Any:
    values = dict(request.query_params)
    where = values.pop("where", "").strip()
    return session.epoch(values, where)


def _resume(session: Session, body: Mapping[str, Any]) -> Any:
    values = {str(name): str(value) for name, value in dict(body.get("values", {})).items()}
    return session.resume(str(body.get("state", "")), values, str(body.get("where", "")).strip())


def _thumbnails(session: Session, request: Request) -> Response:
    """Send the pictures of cards, a line for each as soon as it is made: ``[number, {"type", "data", ...}]``, or its text or error.

    One response, because fifty take a browser twice the CPU time.
    """
    numbers = _numbers(request)
    is_plain = bool(request.query_params.get("plain"))

    def line(number: int) -> bytes:
        card = _answered(lambda: _json(_card_picture(session, number, is_plain=is_plain)))
        return b"[%d,%s]\n" % (number, card.body)

    return StreamingResponse(_in_threads(line, numbers), media_type="application/x-ndjson")


def _card_picture(session: Session, number: int, *, is_plain: bool) -> dict[str, Any]:
    found = session.card_picture(number, _THUMBNAIL)
    if isinstance(found, str):
        return {"text": found}
    if is_plain:
        return _inline(found)
    layers = session.card_layers(number, _THUMBNAIL)
    masks = [{"name": name} | _inline(mask) for name, mask in layers.pop("masks", ())]
    return _inline(found) | layers | ({"masks": masks} if masks else {})


def _inline(picture: Picture) -> dict[str, str]:
    return {"type": picture.media_type, "data": base64.b64encode(picture.data).decode()}


def _in_threads(function: Callable[[int], bytes], numbers: Sequence[int]) -> Iterator[bytes]:
    """Yield the results of a function in the order in which they are done; several at a time."""
    pool = ThreadPoolExecutor(_RENDERERS, thread_name_prefix="shardstream-view-card")
    waiting = {pool.submit(function, number) for number in numbers}
    try:
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield b"".join(one.result() for one in done)
    finally:  # the page was left
        pool.shutdown(wait=False, cancel_futures=True)


def _thumbnail(session: Session, request: Request) -> Response:
    return _picture(session, request, _THUMBNAIL)


def _picture(session: Session, request: Request, side: int = _PICTURE) -> Response:
    overlay = request.query_params.get("overlay") == "1"
    place = request.path_params["place"]
    return _shown(session.picture(_number(request), place, side, overlay=overlay))


def _decoded(session: Session, request: Request) -> Response:
    if session.options.decode is None:
        raise OptionError("the viewer was started without --decode")
    found = session.decoded_picture(_number(request), request.query_params.get("name"), _PICTURE)
    return _json({"text": found}, 415) if isinstance(found, str) else _shown(found)


def _media(session: Session, request: Request) -> Response:
    """Send a sound or video to a player, in parts."""
    sample, name, size = session.part(_number(request), request.path_params["place"])
    media_type = played_type(name)
    if media_type is None:
        raise OptionError(f"{name}: browsers play no field of this type; download it")
    wanted = parse_range(request.headers.get("range"), size, _MEDIA_BYTES)
    headers = {"accept-ranges": "bytes"}
    if wanted is None:
        data = session.samples.read_field(sample, name)
        return Response(data, media_type=media_type, headers=headers)
    start, end = wanted
    if start >= end:
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    data = session.samples.read_part(sample, name, start, end)
    headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return Response(data, 206, media_type=media_type, headers=headers)


def _raw(session: Session, request: Request) -> Response:
    """Send the bytes of a field as a file to keep, never as something to open here."""
    sample, name, _ = session.part(_number(request), request.path_params["place"])
    data = session.samples.read_field(sample, name)
    return _download(data, download_name(sample.key, name))


def _download(data: bytes, file_name: str) -> Response:
    return Response(
        data,
        media_type="application/octet-stream",
        headers={
            "content-disposition": f'attachment; filename="{file_name}"',
            "content-security-policy": DOWNLOAD_POLICY,
        },
    )


def _shown(picture: Picture) -> Response:
    return Response(picture.data, media_type=picture.media_type)


def _answered(answer: Callable[[], Response]) -> Response:
    """Return an answer, or its error as JSON."""
    try:
        return answer()
    except ShardStreamError as error:
        status = 400 if isinstance(error, OptionError) else 422
        status = 502 if isinstance(error, StorageError) else status
        status = 409 if isinstance(error, ChangedError) else status
        return _json({"error": str(error), "kind": type(error).__name__}, status)
    except (ValueError, OSError, ImportError, MemoryError) as error:  # of decoders
        return _json({"error": message_of(error), "kind": "DecodeError"}, 422)
    except Exception as error:  # noqa: BLE001  (the server goes on, and the page shows it)
        _log.exception("a request failed")
        return _json({"error": describe_error(error), "kind": "Error"}, 500)


def _json(value: Any, status: int = 200) -> Response:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # names that are not UTF-8
        data = json.dumps(value, default=str).encode()
    return Response(data, status, media_type="application/json")


async def _body(request: Request) -> Mapping[str, Any]:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(request: Request) -> int:
    number: int = request.path_params["number"]
    return number


def _numbers(request: Request) -> list[int]:
    text = request.query_params.get("numbers", "")
    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError as error:
        raise OptionError(f"numbers must be whole numbers, not {text[:40]!r}") from error
    if len(numbers) > MAX_PAGE:
        raise OptionError(f"{len(numbers)} numbers; a page has up to {MAX_PAGE}")
    return numbers


def _whole(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    return parse_whole(name, text) if text.strip() else default


_TOKEN_BYTES = 24
_CLOSE_S = 2


def serve(options: ViewOptions, address: Address, say: Callable[[str], None]) -> None:
    """Open a dataset and serve its page until the process is interrupted.

    Args:
        options: What is shown.
        address: Where the server listens.
        say: Called with the address of the page when it can be opened.

    Raises:
        ShardStreamError: If the dataset cannot be opened.
        OSError: If the port is taken.
    """
    tune_worker_process()  # else each thread keeps the memory of the largest picture that it drew
    viewer = Viewer(options)
    warming = threading.Thread(
        target=viewer.session.warm_up, name="shardstream-view-warm", daemon=True
    )
    warming.start()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, address.port), family=family) as listening:
        # Else each response waits 40 ms for an acknowledgement: asyncio sets this for sockets of its own only.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listening.getsockname()[1]
        guard = Guard(
            token=secrets.token_urlsafe(_TOKEN_BYTES),
            port=port,
            names=allowed_names(address.host, socket.gethostname()),
        )
        once: set[str] = set()
        name = f"[{address.host}]" if ":" in address.host else address.host
        if address.host in ("0.0.0.0", "::"):  # noqa: S104  (compared with)
            name = socket.gethostname()
        page = f"http://{name}:{port}/?{TOKEN}="
        config = uvicorn.Config(
            build_app(viewer, guard, once),
            log_level="warning",
            access_log=False,  # it would hold the token
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        say(page + guard.token)
        if address.opens_browser:
            once.add(secrets.token_urlsafe(_TOKEN_BYTES))
            _open_browser(page + next(iter(once)))
        uvicorn.Server(config).run(sockets=[listening])


def _open_browser(url: str) -> None:
    """Open a window of the user's browser; a browser inside the terminal would take the terminal over."""
    try:
        controller = webbrowser.get()
    except webbrowser.Error:
        return
    if type(controller) is not webbrowser.GenericBrowser:
        threading.Thread(target=controller.open, args=(url,), daemon=True).start()
