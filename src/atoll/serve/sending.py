"""Answers on their way out: JSON, server-sent events, and a watch on clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

from atoll.serve.errors import ApiError

log = logging.getLogger("atoll.serve")
T = TypeVar("T")
FAILED = ApiError(500, "the server failed; its log says why")


def dumped(value: Any) -> bytes:
    """JSON of `value`, in ASCII: half a character in a text cannot break it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumped(content)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. Raises `ClientGone` then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events: each value of `events` as JSON, then [DONE]. An error on the way is the last event.

    `close` is called at the end, however it comes, a client that went away before the first event included.
    """

    def __init__(self, events: AsyncIterator[Any], close: Callable[[], object]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._pump(send))
        except (ClientGone, OSError):
            log.debug("a client went away")
        finally:
            self._close()

    async def _pump(self, send: Any) -> None:
        async def event(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})

        try:
            async for value in self._events:
                await event(dumped(value))
        except ApiError as error:
            await event(dumped(error.body()))
        except Exception:
            log.exception("a stream failed")
            await event(dumped(FAILED.body()))
        await event(b"[DONE]", more=False)
