"""`atoll serve` as its own process: what it says, what it refuses, how it ends, and how weights are read again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from conversations import TOKENIZER
from serving import CLOSE, served, small_engine, small_model

from atoll.infer.request import Request, Sampling
from atoll.model import load
from atoll.serve.process import Reload

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in the hub's layout with its tokenizer."""
    return small_model().save_pretrained(tmp_path_factory.mktemp("served") / "small", TOKENIZER)


def start(folder, *words, **environment):
    """A server's process and its address, when it answers."""
    variables = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "atoll", "serve", str(folder), "--port", "0", "--max-model-len", "2048", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.stderr.read()
    url = line.split(" on ")[1].split("/ ")[0]
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            httpx.get(url + "/health").raise_for_status()
            return process, url
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


def refused(folder, *words, **environment):
    """What `atoll serve` says when it does not start."""
    variables = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    command = [sys.executable, "-m", "atoll", "serve", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


LONG = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 400,
    "seed": 1,
    "logit_bias": {"3": -100, "1": -100, str(CLOSE): -100},
}


def test_sigterm_lets_running_answers_finish_and_new_ones_elsewhere(folder):
    process, url = start(folder, "--name", "small")
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "small"
    answer = {}

    def ask():
        answer["whole"] = httpx.post(url + "/v1/chat/completions", json=LONG, timeout=60)

    asking = threading.Thread(target=ask)
    asking.start()
    while "atoll_live_sequences 1" not in httpx.get(url + "/metrics").text:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    while (health := httpx.get(url + "/health")).status_code == 200:
        time.sleep(0.005)
    assert health.json() == {"status": "stopping"}
    late = httpx.post(url + "/v1/chat/completions", json=LONG)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
    assert int(late.headers["retry-after"]) > 0
    asking.join(60)
    assert answer["whole"].status_code == 200
    assert answer["whole"].json()["usage"]["completion_tokens"] == 400
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


def test_draining_has_a_limit_and_a_stream_is_told(folder):
    process, url = start(folder, "--drain", "0.2")
    with httpx.stream("POST", url + "/v1/chat/completions", json=LONG | {"stream": True, "max_tokens": 2000}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "shutting_down"
    assert process.wait(20) == 0


def test_a_second_signal_ends_it_at_once(folder):
    process, url = start(folder, "--drain", "500")
    with httpx.stream("POST", url + "/v1/chat/completions", json=LONG | {"stream": True, "max_tokens": 2000}, timeout=60) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def test_keys_come_from_the_environment(folder):
    process, url = start(folder, ATOLL_API_KEY="one-long-key, another-key", ATOLL_ADMIN_KEY="admin-key-1")
    try:
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer another-key"}).status_code == 200
        reloaded = httpx.post(url + "/admin/reload", headers={"Authorization": "Bearer admin-key-1"}, timeout=60)
        assert reloaded.json() == {"status": "ok", "version": 1}
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_what_cannot_be_served_is_said_in_one_line(folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in refused(folder, "--port", str(taken.getsockname()[1]))
    assert "ATOLL_API_KEY" in refused(folder, "--host", "0.0.0.0", ATOLL_API_KEY="")
    assert "at least 8" in refused(folder, ATOLL_API_KEY="short")
    assert "no such folder" in refused(tmp_path / "nothing")
    assert "max-model-len = 0" in refused(folder, "--max-model-len", "0")
    assert "slots" in refused(folder, "--slots", "0", "--port", "0")


# ---------------------------------------------------------------- weights read again


def answers(model):
    return small_engine(model).run([Request([0, 20, 30], 12, Sampling(temperature=0))])[0].ids


def test_new_weights_take_the_place_of_the_old_between_steps(folder):
    model, other = load(folder), small_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    there = folder.parent / "changing"
    small_model().save_pretrained(there, TOKENIZER)
    engine = small_engine(model)
    with served(engine, reload=Reload(there, model, TOKENIZER, engine), admin_key="admin-key-1") as s:

        def generate():
            body = {"token_ids": [0, 20, 30], "sampling_params": {"max_tokens": 12, "temperature": 0, "ignore_eos": True}}
            return httpx.post(s.url + "/inference/v1/generate", json=body).json()["choices"][0]

        def reload():
            return httpx.post(s.url + "/admin/reload", headers={"Authorization": "Bearer admin-key-1"}, timeout=60)

        assert generate()["token_ids"] == answers(small_model())
        other.save_pretrained(there, TOKENIZER)
        assert reload().json() == {"status": "ok", "version": 1}
        new = generate()
        assert new["token_ids"] == answers(other) != answers(small_model())
        assert new["weight_versions"] == [1] * 12

        (there / "model.safetensors").write_bytes(b"damaged")
        broken = reload()
        assert broken.status_code == 400
        assert generate()["token_ids"] == answers(other)  # what could not be read changed nothing

        small_model(num_hidden_layers=5).save_pretrained(there, TOKENIZER)
        assert reload().status_code == 409
        assert generate()["token_ids"] == answers(other)


def test_reload_waits_for_the_step_under_way():
    """The weights never change while the engine computes with them."""
    model = small_model()
    engine, inside, seen = small_engine(model), threading.Event(), []
    step = engine.step

    def slow():
        inside.set()
        time.sleep(0.05)
        out = step()
        inside.clear()
        return out

    engine.step = slow

    class Watched(Reload):
        def _read(self):
            return small_model()

        def _put(self, fresh):
            seen.append(inside.is_set())
            super()._put(fresh)

    async def run():
        from atoll.serve.runner import Runner

        runner = Runner(engine, 4)
        stream = await runner.submit([Request([1, 2], 6)], 60)
        reload = Watched(Path("."), model, TOKENIZER, engine)
        versions = [await reload(runner), await reload(runner)]
        steps = [s async for _, s in stream]
        await runner.close()
        return versions, [s.version for s in steps]

    versions, sampled = asyncio.run(run())
    assert versions == [1, 2]
    assert seen == [False, False]
    assert sampled == sorted(sampled)
    assert sampled[-1] == 2
