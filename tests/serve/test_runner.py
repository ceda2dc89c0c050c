"""The engine's thread and its streams: clients that go away, limits, failures, draining; nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import openai
import pytest
from serving import Scripted, served, written

from atoll.config import UserError
from atoll.infer.request import Request
from atoll.serve.errors import ApiError
from atoll.serve.runner import PATIENCE, Runner

ASK = [{"role": "user", "content": "x"}]
LONG = {"content": "on and " * 300}


def endless():
    return Scripted(lambda request: written(LONG), pace=0.002)


def hang_up(s, path, body, when):
    """Send a request by hand, wait until `when(socket)` returns, and close the connection."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", s.settings.port)) as client:
        client.sendall(head.encode() + raw)
        when(client)


def an_event(client):
    seen = b""
    while b"data: " not in seen:
        seen += client.recv(4096)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 900}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 900}}),
    ],
)
def test_a_client_that_goes_away_stops_its_answers(path, body):
    with served(endless()) as s:
        hang_up(s, path, body | {"stream": True}, an_event)
        s.until(lambda: s.service.runner.live == 0)
        started = len(s.engine.requests)
        assert len(s.engine.cancelled) == started > 0
        # Not streamed, nothing is sent before the end.
        hang_up(s, path, body, lambda client: s.until(lambda: s.service.runner.live > 0))
        s.until(lambda: s.service.runner.live == 0)
        assert len(s.engine.cancelled) == 2 * started
        assert s.engine.idle()


def test_an_answer_that_takes_too_long_is_cut_off():
    with served(endless(), timeout=0.4) as s:
        answer = httpx.post(s.url + "/v1/chat/completions", json={"messages": ASK})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        stream = httpx.post(s.url + "/v1/chat/completions", json={"messages": ASK, "stream": True})
        *_, error, done = [line for line in stream.text.split("\n\n") if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
        assert done == "data: [DONE]"
        s.until(lambda: s.service.runner.live == 0)


def test_a_stream_that_fails_raises_in_the_client():
    engine = endless()
    with served(engine) as s, openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(model="atoll", messages=ASK, stream=True)
        next(iter(stream))

        working = engine.step

        def fail_once():
            engine.step = working
            raise MemoryError("no more memory")

        engine.step = fail_once
        with pytest.raises(openai.APIError, match="no more memory"):
            list(stream)
        s.until(lambda: s.service.runner.live == 0)
        assert not s.service.runner.failed  # one bad turn is not the end
        engine.script = lambda request: written({"content": "hi"})
        assert client.chat.completions.create(model="atoll", messages=ASK).choices[0].message.content == "hi"


def test_an_engine_that_fails_again_and_again_is_given_up():
    engine = endless()
    with served(engine) as s:

        def fail():
            raise RuntimeError("broken")

        engine.step = fail
        statuses = [httpx.post(s.url + "/v1/chat/completions", json={"messages": ASK}).status_code for _ in range(PATIENCE + 2)]
        assert statuses[:1] == [500]
        assert statuses[-1] == 503
        assert httpx.get(s.url + "/health").status_code == 503
        assert s.service.runner.live == 0


# ---------------------------------------------------------------- alone, without HTTP


def run(test):
    """`await test(runner, engine)`."""

    async def inside():
        engine = endless()
        runner = Runner(engine, 4)
        try:
            await asyncio.wait_for(test(runner, engine), 30)
        finally:
            await runner.close()

    asyncio.run(inside())


REQUEST = Request([1, 2], 5)


def test_of_several_requests_all_are_taken_or_none():
    async def test(runner, engine):
        real, wrong = engine.submit, Request([3], 5)

        def submit(request):
            if request is wrong:
                raise UserError("wrong = 1: something else is expected")
            return real(request)

        engine.submit = submit
        with pytest.raises(UserError):
            await runner.submit([REQUEST, REQUEST, wrong], 10)
        while runner.live:
            await asyncio.sleep(0.01)
        assert engine.cancelled == [0, 1]
        with pytest.raises(ApiError):
            await runner.submit([REQUEST] * 5, 10)
        stream = await runner.submit([REQUEST] * 4, 10)
        with pytest.raises(ApiError) as full:
            await runner.submit([REQUEST], 10)
        assert full.value.status == 429
        assert [index async for index, step in stream if step.finish] == [0, 1, 2, 3]

    run(test)


def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing():
    async def test(runner, engine):
        engine.gate.clear()
        blocked = threading.Event()
        runner._calls.put(lambda: blocked.wait(5))  # the thread is busy: the request waits
        task = asyncio.create_task(runner.submit([REQUEST, REQUEST], 10))
        await asyncio.sleep(0.05)
        task.cancel()
        blocked.set()
        while runner.live:
            await asyncio.sleep(0.01)
        assert len(engine.cancelled) == 2

    run(test)


def test_draining_lets_what_runs_finish_and_takes_nothing_new():
    async def test(runner, engine):
        stream = await runner.submit([REQUEST], 10)
        drained = asyncio.create_task(runner.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as stopping:
            await runner.submit([REQUEST], 10)
        assert stopping.value.status == 503
        steps = [step async for _, step in stream]
        assert (len(steps), steps[-1].finish) == (5, "length")
        await drained
        assert runner.live == 0

    run(test)


def test_draining_ends_at_its_limit():
    async def test(runner, engine):
        stream = await runner.submit([Request([1], 500)], 100)
        await runner.drain(0.1)
        steps = [step async for _, step in stream]
        assert steps[-1].finish == "cancelled"

    run(test)


def test_work_between_steps_is_done_in_the_engines_thread():
    async def test(runner, engine):
        assert await runner.between_steps(lambda: threading.current_thread().name) == "engine"
        with pytest.raises(ZeroDivisionError):
            await runner.between_steps(lambda: 1 / 0)
        assert not runner.failed

    run(test)
