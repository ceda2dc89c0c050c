"""Who may ask: hosts, origins, keys; how much and how long a request may be."""

from __future__ import annotations

import socket
import time

import httpx
import pytest
from serving import Scripted, served, written

from atoll.config import UserError
from atoll.serve.process import keys_of_environment
from atoll.serve.settings import ServerSettings

SAY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def engine():
    return Scripted(lambda request: written({"content": "hi"}))


@pytest.fixture(scope="module")
def plain():
    with served(engine()) as s:
        yield s


@pytest.fixture(scope="module")
def keyed():
    with served(engine(), keys=("first-key", "second-key"), admin_key="admin-key-1", hosts=("models.example",)) as s:
        yield s


def get(s, path="/v1/models", key=None, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(s.url + path, headers=given | ({"Authorization": f"Bearer {key}"} if key else {}))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "[::1",
        "127.0.0.2",
        "localhost:80@evil.example",
        "[::1].evil.example",
        "127.0.0.1:x",
    ],
)
def test_a_rebound_name_is_refused(plain, host):
    answer = get(plain, Host=host)
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:8000", "LOCALHOST:80"])
def test_names_of_the_loopback_are_served(plain, host):
    assert get(plain, Host=host).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost", "https://127.0.0.1:1", "file://"])
def test_pages_of_other_sites_are_refused(plain, origin):
    assert get(plain, Origin=origin).status_code == 403
    asked = httpx.post(plain.url + "/v1/chat/completions", json=SAY, headers={"Origin": origin})
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers


def test_the_own_page_is_served(plain):
    assert get(plain, Origin=plain.url).status_code == 200


def test_names_that_were_given_are_served_and_no_others(keyed):
    assert get(keyed, key="first-key", Host="models.example:443").status_code == 200
    assert get(keyed, key="first-key", Host="other.example").status_code == 403


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/v1/nothing"])
def test_everything_but_page_and_health_needs_a_key(keyed, path):
    for key in (None, "wrong-key", "first-ke", "first-key1", "admin-key-1"):
        answer = get(keyed, path, key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert get(keyed, path, "second-key").status_code in (200, 404)
    assert [get(keyed, open_path).status_code for open_path in ("/", "/health")] == [200, 200]


def test_a_key_is_read_as_bearer_alone(keyed):
    for given in ("first-key", "Basic first-key", "Bearer", "Bearer first-key second-key"):
        assert get(keyed, Authorization=given).status_code == 401
    assert get(keyed, Authorization="bearer first-key").status_code == 200


def test_each_key_has_a_prefix_cache_of_its_own(keyed):
    salts = []
    for key in ("first-key", "second-key", "first-key"):
        httpx.post(keyed.url + "/v1/chat/completions", json=SAY, headers={"Authorization": f"Bearer {key}"}).raise_for_status()
        salts.append(keyed.engine.requests[-1].salt)
    assert salts[0] == salts[2] != salts[1]
    assert "key" not in salts[0]  # the key itself is nowhere kept
    body = SAY | {"cache_salt": "mine"}
    httpx.post(keyed.url + "/v1/chat/completions", json=body, headers={"Authorization": "Bearer first-key"}).raise_for_status()
    assert keyed.engine.requests[-1].salt not in salts


def test_pause_and_reload_need_their_own_key(plain, keyed):
    for path in ("/admin/pause", "/admin/resume", "/admin/reload"):
        assert httpx.post(plain.url + path).status_code == 403
        for key in ("first-key", "wrong-key"):
            assert httpx.post(keyed.url + path, headers={"Authorization": f"Bearer {key}"}).status_code == 401


def test_pause_holds_answers_and_resume_lets_them_go(keyed):
    def admin(path):
        return httpx.post(keyed.url + path, headers={"Authorization": "Bearer admin-key-1"})

    assert admin("/admin/pause").json() == {"status": "paused"}
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(keyed.url + "/v1/chat/completions", json=SAY, headers={"Authorization": "Bearer first-key"}, timeout=0.5)
        assert get(keyed, "/health").json() == {"status": "paused"}
    finally:
        assert admin("/admin/resume").status_code == 200
    answer = httpx.post(keyed.url + "/v1/chat/completions", json=SAY, headers={"Authorization": "Bearer first-key"})
    assert answer.status_code == 200
    keyed.until(lambda: keyed.service.runner.live == 0)


def test_a_body_without_end_is_cut_off():
    with served(engine(), max_body=10_000, body_timeout=0.5) as s:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", s.settings.port)) as slow:
            slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
            started = time.monotonic()
            assert b" 408 " in slow.recv(100)
            assert time.monotonic() - started < 10
        with socket.create_connection(("127.0.0.1", s.settings.port)) as large:
            large.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(3):
                large.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            assert b" 413 " in large.recv(100)
        assert httpx.get(s.url + "/health").status_code == 200


def test_the_page_may_do_nothing_but_talk_to_its_server(plain):
    page = get(plain, "/")
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_bound_to_the_network_without_a_key():
    for host in ("0.0.0.0", "192.168.1.5", "::", "models.example"):
        with pytest.raises(UserError, match="ATOLL_API_KEY"):
            ServerSettings(host=host).check()
        ServerSettings(host=host, keys=("a-long-key",)).check()
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerSettings(host=host).check()


@pytest.mark.parametrize("limits", [{"drain": float("nan")}, {"drain": -1.0}, {"body_timeout": 0.0}, {"timeout": float("nan")}])
def test_times_that_never_end_or_never_were_are_refused(limits):
    name = next(iter(limits)).replace("_", "-")
    with pytest.raises(UserError, match=f"^{name} = "):
        ServerSettings(**limits).check()
    ServerSettings(drain=0.0).check()


@pytest.mark.parametrize(
    "keys",
    [
        {"keys": ("short",)},
        {"keys": ("has\nnewline",)},
        {"keys": (" begins-with-space",)},
        {"admin_key": "ends-with-space "},
        {"admin_key": "x"},
        {"keys": ("same-key-1",), "admin_key": "same-key-1"},
    ],
)
def test_keys_that_are_none_are_refused(keys):
    with pytest.raises(UserError, match="ATOLL_"):
        ServerSettings(**keys).check()


def test_a_variable_without_a_key_in_it_does_not_open_the_server(monkeypatch):
    monkeypatch.setenv("ATOLL_ADMIN_KEY", " admin-key-1 ")
    for given, keys in (("", ()), (" one-long-key , ", ("one-long-key",))):
        monkeypatch.setenv("ATOLL_API_KEY", given)
        assert keys_of_environment() == {"keys": keys, "admin_key": "admin-key-1"}
    for given in (",", "  ", " , "):
        monkeypatch.setenv("ATOLL_API_KEY", given)
        with pytest.raises(UserError, match="ATOLL_API_KEY: no key is in it"):
            keys_of_environment()
