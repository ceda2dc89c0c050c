"""The server's process: a folder is loaded, a socket bound, requests answered until a signal, then drained."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn

from atoll.config import UserError
from atoll.data.chat import marker_ids
from atoll.data.tokenizer import Tokenizer, check_fits
from atoll.hub.load import load_tokenizer
from atoll.infer.engine import Engine, EngineSettings
from atoll.model import Model, load
from atoll.serve.app import create_app
from atoll.serve.errors import ApiError
from atoll.serve.runner import Runner
from atoll.serve.service import Service, in_thread
from atoll.serve.settings import ServerSettings


def keys_of_environment() -> dict[str, Any]:
    """`keys` and `admin_key` of the settings: ATOLL_API_KEY (several with commas between) and ATOLL_ADMIN_KEY. Words of a command are
    seen by every user of a machine, its environment is not. Raises `UserError` for a variable that holds no key."""
    given = os.environ.get("ATOLL_API_KEY", "")
    keys = tuple(key.strip() for key in given.split(",") if key.strip())
    if given and not keys:
        raise UserError("ATOLL_API_KEY: no key is in it; give one, or unset it to serve without")
    return {"keys": keys, "admin_key": os.environ.get("ATOLL_ADMIN_KEY", "").strip() or None}


def serve(folder: Path, settings: ServerSettings, engine: EngineSettings, dtype: torch.dtype | None, device: str) -> None:
    """Serve the model in `folder` until SIGTERM or SIGINT. Raises `UserError`, one line, before anything is bound or loaded if it can."""
    settings.check()
    listening = bind(settings)
    with listening:
        port = listening.getsockname()[1]
        settings = dataclasses.replace(settings, port=port)
        model, tokenizer = load(folder, dtype=dtype, device=device), load_tokenizer(folder)
        check_fits(tokenizer, model.config, "tokenizer.json")
        marker_ids(tokenizer)
        made = Engine(model, settings=dataclasses.replace(engine, max_length=settings.max_model_len))
        reload = Reload(folder, model, tokenizer, made)
        app = create_app(lambda: Service(model.config, tokenizer, made, settings, reload), settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"serving {settings.name} on http://{host}:{port}/ (a chat page; the API's base is http://{host}:{port}/v1)", flush=True)
        if settings.keys and not settings.hosts and settings.host in ("0.0.0.0", "::"):
            print("any Host name is answered, with a key; --hosts narrows that", file=sys.stderr)
        server = Server(app, settings)
        asyncio.run(server.serve(sockets=[listening]))


def bind(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise UserError(
            f"host {settings.host}, port {settings.port}: {error.strerror or error}; give others with --host and --port"
        ) from error
    return made


class Server(uvicorn.Server):
    """uvicorn's, but a first signal drains: what runs goes on for `settings.drain` seconds, what is new gets 503. A second one stops it."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        quiet = {"log_level": "warning", "access_log": False, "server_header": False, "proxy_headers": False}
        super().__init__(uvicorn.Config(app, lifespan="on", ws="none", timeout_graceful_shutdown=5, **quiet))
        self._app, self._seconds = app, settings.drain
        self._draining: asyncio.Task[None] | None = None
        self._asked = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until drained."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal has come."""
        if self._asked:
            self.should_exit = self.force_exit = True
        self._asked = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        async def drained() -> None:
            if self.started:
                await self._app.service.runner.drain(self._seconds)
            self.should_exit = True

        self._draining = self._draining or asyncio.ensure_future(drained())


class Reload:
    """Reads the folder's weights again, beside the serving, and puts them in between two steps. Shapes and tokenizer must be the same.

    A folder that cannot be read whole leaves the weights that are there. While it is read, a second copy of the weights is in host memory.
    """

    def __init__(self, folder: Path, model: Model, tokenizer: Tokenizer, engine: Any) -> None:
        self.folder, self.model, self.tokenizer, self.engine = folder, model, tokenizer, engine
        self.version = 0
        self._lock = asyncio.Lock()

    async def __call__(self, runner: Runner) -> int:
        """The new version. Raises `ApiError`: 400 for a folder that cannot be read, 409 for a different model."""
        async with self._lock:
            fresh = await in_thread(self._read)
            await runner.between_steps(lambda: self._put(fresh))
        logging.getLogger("atoll.serve").info("weights of version %d", self.version)
        return self.version

    def _read(self) -> Model:
        fresh = load(self.folder, dtype=next(self.model.parameters()).dtype, device="cpu")
        if fresh.config != self.model.config or load_tokenizer(self.folder).fingerprint != self.tokenizer.fingerprint:
            raise ApiError(409, "the folder holds another model by now: start the server again")
        return fresh

    def _put(self, fresh: Model) -> None:
        self.model.load_state_dict(fresh.state_dict())
        self.version += 1
        self.engine.set_version(self.version)
