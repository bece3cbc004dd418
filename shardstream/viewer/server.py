"""Run the server of the page until it is interrupted."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from shardstream.process_memory import tune_worker_process
from shardstream.viewer.app import Viewer, build_app
from shardstream.viewer.guard import TOKEN, Address, Guard, allowed_names
from shardstream.viewer.session import ViewOptions

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
