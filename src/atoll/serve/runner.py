"""One thread owns the engine; the event loop hands it work through a queue and gets every sequence's steps back as a stream."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from atoll.infer.request import Request, Step
from atoll.serve.errors import ApiError

log = logging.getLogger("atoll.serve")
PATIENCE = 3  # failures in a row after which the engine is given up
RETRY = 2  # seconds a client is told to wait where the queue is full
GONE = "the engine has failed and answers nothing until the server is started again"


class Stream:
    """The steps of one request's sequences as they come, as (index of the request, step). Belongs to the event loop.

    Iterating ends when every sequence has ended. Raises `ApiError` 504 at `deadline` (the loop's time).
    """

    def __init__(self, requests: Sequence[Request], deadline: float) -> None:
        self.requests, self.deadline = requests, deadline
        self.numbers: list[int] = []  # the engine's, once it has taken them
        self.open = set(range(len(requests)))
        self._steps: asyncio.Queue[tuple[int, Step]] = asyncio.Queue()

    def put(self, index: int, step: Step) -> None:
        """Add what the engine gave."""
        self._steps.put_nowait((index, step))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Step]]:
        while self.open:
            left = self.deadline - asyncio.get_running_loop().time()
            try:
                index, step = await asyncio.wait_for(self._steps.get(), left) if self._steps.empty() else self._steps.get_nowait()
            except TimeoutError as error:
                raise ApiError(504, "the answer took longer than the server allows", code="timeout") from error
            if step.finish is not None:
                self.open.discard(index)
            yield index, step


class Runner:
    """The engine's thread and what the event loop may ask of it. All methods but `_thread` and what it calls run in the event loop.

    A sequence counts as `live` from `submit` until the engine's last step of it has arrived; `max_live` bounds how many are.
    """

    def __init__(self, engine: Any, max_live: int) -> None:
        self.engine, self.max_live = engine, max_live
        self.live = 0
        self.paused = self.draining = self.failed = False
        self._streams: dict[int, tuple[Stream, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._held: set[int] = set()  # the engine's unfinished sequences; the thread's own, as is:
        self._failures = 0  # steps in a row
        self._loop = asyncio.get_running_loop()
        self._worker = threading.Thread(target=self._thread, name="engine", daemon=True)
        self._worker.start()

    # ---------------------------------------------------------------- asked in the event loop

    async def submit(self, requests: Sequence[Request], timeout: float) -> Stream:
        """The stream of `requests`, all of them taken or none.

        Raises `ApiError`: 503 when the server is about to stop, 429 when the queue is full; and `UserError` for what the engine refuses.
        """
        if len(requests) > self.max_live:
            raise ApiError(400, f"{len(requests)} answers in one request: at most {self.max_live} are served at once", "n")
        self.check_room(len(requests))
        stream = Stream(requests, self._loop.time() + timeout)
        taken: asyncio.Future[None] = self._loop.create_future()
        self._count(len(requests))
        self._calls.put(lambda: self._take(stream, taken))
        await taken
        return stream

    def check_room(self, more: int = 1) -> None:
        """Raises `ApiError` 503 or 429 where `more` sequences would not be taken now."""
        if self.failed:
            raise ApiError(503, GONE)
        if self.draining:
            raise ApiError(503, "the server is stopping", code="shutting_down", retry_after=RETRY)
        if self.live + more > self.max_live:
            message = f"{self.live} answers are under way, {self.max_live} at most; try again"
            raise ApiError(429, message, code="queue_full", retry_after=RETRY)

    def cancel(self, stream: Stream, index: int | None = None) -> None:
        """Stop all its sequences, or one; their last steps still come. Those that have ended are passed over."""
        numbers = stream.numbers if index is None else stream.numbers[index : index + 1]
        if held := [n for n in numbers if n in self._streams]:
            self._calls.put(lambda: self._cancel(held))

    async def between_steps(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, called in the engine's thread while no step is under way."""
        done: asyncio.Future[Any] = self._loop.create_future()

        def call() -> None:
            try:
                result = work()
            except Exception as error:
                self._tell(_settle, done, None, error)
            else:
                self._tell(_settle, done, result, None)

        self._calls.put(call)
        return await done

    def pause(self, paused: bool = True) -> None:
        """Hold everything as it is; requests still queue. Or go on."""
        self.paused = paused
        self._calls.put(lambda: None)  # wakes the thread

    async def drain(self, seconds: float) -> None:
        """Take nothing new, wait for what runs, and cancel what is left after `seconds`."""
        self.draining = True
        self.pause(False)
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("%d answers are cut off after %g seconds of draining", self.live, seconds)
            self._calls.put(lambda: self._cancel(list(self._held)))

    async def close(self) -> None:
        """Stop the thread after its step."""
        self.draining = True
        self._calls.put(None)
        await asyncio.to_thread(self._worker.join, 10)

    # ---------------------------------------------------------------- the engine's thread

    def _thread(self) -> None:
        try:
            while self._listen():
                if not (self.paused or self.failed):
                    self._step()
        except Exception as error:  # the loop itself: nobody is left to step
            log.exception("the engine's thread failed")
            self._tell(self._fail, list(self._held), str(error), True)

    def _step(self) -> None:
        """A turn. One that fails ends the sequences under way, and the engine goes on without them; after some in a row it is given up."""
        try:
            steps = self.engine.step()
        except Exception as error:
            self._failures += 1
            log.exception("the engine failed in a step")
            lost = list(self._held)
            self._held.clear()
            for number in lost:
                self.engine.cancel(number)
            self._tell(self._fail, lost, f"{type(error).__name__}: {error}", self._failures >= PATIENCE)
            return
        steps = [step for step in steps if step.sequence in self._held]
        if steps:
            self._failures = 0
            self._held.difference_update(step.sequence for step in steps if step.finish is not None)
            self._tell(self._deliver, steps)

    def _listen(self) -> bool:
        """Do what the event loop asked for, waiting for it while there is nothing to step. False: stop."""
        while True:
            wait = self.paused or self.failed or self.engine.idle()
            try:
                call = self._calls.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _take(self, stream: Stream, taken: asyncio.Future[None]) -> None:
        numbers: list[int] = []
        try:
            for request in stream.requests:
                numbers.append(self.engine.submit(request))
        except Exception as error:
            self._held.update(numbers)
            self._cancel(numbers)
            self._tell(self._refused, stream, numbers, taken, error)
            return
        self._held.update(numbers)
        self._tell(self._accepted, stream, numbers, taken)

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._held:
                self.engine.cancel(number)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("the event loop has ended before the engine")

    # ---------------------------------------------------------------- told to the event loop

    def _accepted(self, stream: Stream, numbers: list[int], taken: asyncio.Future[None]) -> None:
        stream.numbers = numbers
        self._streams.update({number: (stream, i) for i, number in enumerate(numbers)})
        if taken.cancelled():  # the client went away before its request was taken
            self.cancel(stream)
        else:
            taken.set_result(None)

    def _refused(self, stream: Stream, numbers: list[int], taken: asyncio.Future[None], error: Exception) -> None:
        self._streams.update({number: (stream, i) for i, number in enumerate(numbers)})  # until their last steps come
        self._count(len(numbers) - len(stream.requests))
        _settle(taken, None, error)

    def _deliver(self, steps: list[Step]) -> None:
        for step in steps:
            stream, index = self._streams[step.sequence]
            stream.put(index, step)
            if step.finish is not None:
                del self._streams[step.sequence]
                self._count(-1)

    def _fail(self, numbers: list[int], reason: str, for_good: bool) -> None:
        self.failed |= for_good
        self._deliver([Step(number, None, finish="error", error=reason) for number in numbers])

    def _count(self, change: int) -> None:
        self.live += change
        if self.live:
            self._idle.clear()
        else:
            self._idle.set()


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
