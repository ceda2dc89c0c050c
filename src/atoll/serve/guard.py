"""What stands before every endpoint: Host, Origin, key, size and time of a request. Plain ASGI, so that bodies are counted as they come."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from typing import Any

from atoll.serve.errors import ApiError
from atoll.serve.settings import ServerSettings, is_loopback

OPEN = ("/", "/health")  # no key is asked for: nothing of model or clients is in them
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """An ASGI application around another, which only sees requests that may be.

    * `Host` must be the loopback's or one of the settings' names: a page of another site whose name was rebound to this address is refused.
    * `Origin`, where a browser sends one, must be this very server's.
    * `Authorization: Bearer KEY` is compared in constant time with every key; /admin takes the admin key alone.
    * The body may not be larger than `max_body`, nor take longer than `body_timeout`.
    """

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on, or answer it with an error."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._address(headers)
            scope.setdefault("state", {})["salt"] = self._key(scope["path"], headers)
            body = await asyncio.wait_for(self._body(headers, receive), self.settings.body_timeout)
        except TimeoutError:
            await refuse(send, ApiError(408, f"the request's body took longer than {self.settings.body_timeout:g} seconds"))
        except ApiError as error:
            await refuse(send, error)
        else:
            await self.app(scope, _replay(body, receive), send)

    def _address(self, headers: dict[str, str]) -> None:
        s, host = self.settings, headers.get("host", "")
        allowed = {*LOOPBACK, *(name.lower() for name in s.hosts), *([s.host.lower()] if is_loopback(s.host) else [])}
        if (s.hosts or not s.keys or is_loopback(s.host)) and _name(host) not in allowed:
            raise ApiError(403, f"Host {host!r} is not served here; name it with --hosts if it is yours")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise ApiError(403, f"Origin {origin!r}: pages of other sites may not use this server")

    def _key(self, path: str, headers: dict[str, str]) -> str:
        """The salt of the caller's prefix cache. Raises `ApiError` for a key that is missing or wrong."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        admin = path == "/admin" or path.startswith("/admin/")
        if admin and self.settings.admin_key is None:
            raise ApiError(403, "reload and pause are off; start the server with ATOLL_ADMIN_KEY set")
        known = (self.settings.admin_key or "",) if admin else self.settings.keys
        if not known or (path in OPEN and not admin):
            return ""
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in known]  # all of them: no early end to time
        if not any(matches):
            raise ApiError(401, "a valid key is expected, as Authorization: Bearer KEY", code="invalid_api_key")
        return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()

    async def _body(self, headers: dict[str, str], receive: Any) -> bytes:
        limit, parts, size = self.settings.max_body, [], 0
        length = headers.get("content-length", "0")
        too_large = ApiError(413, f"the request is larger than {limit:,} bytes")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                raise ApiError(400, "the request ended early")
            size += len(message.get("body", b""))
            if size > limit:
                raise too_large
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)


def _name(host: str) -> str:
    """A Host header without its port, in small letters; as it is where it is no name and port."""
    found = re.fullmatch(r"(\[[0-9a-f:.]*\]|[^\[\]:]*)(:[0-9]*)?", host.lower())
    return found[1] if found else host


def _replay(body: bytes, receive: Any) -> Any:
    given = False

    async def again() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


async def refuse(send: Any, error: ApiError) -> None:
    """Send `error` as a whole response."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
