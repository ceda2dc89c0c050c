"""The chat page in headless Chromium: what a person does there, and what hostile text does not do."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import browser
import pytest
from conversations import TOKENIZER
from serving import Scripted, served, written

pytestmark = pytest.mark.skipif(browser.binary() is None, reason="no Chromium on this machine: apt-get install chromium")

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title = "taken"</script>&lt;b&gt;</div><b>bold</b>'
ADD = {"function": {"name": "add<i>", "arguments": {"a": 2, "note": "<u>&"}}}
PICTURES = os.environ.get("ATOLL_PICTURES")  # a folder to keep screenshots in, for a look at them


class Likely(Scripted):
    """A scripted engine that gives other tokens beside each."""

    def step(self):
        out = []
        for step in super().step():
            if step.id is None:
                out.append(step)
                continue
            value = -0.05 - 0.7 * (step.id * 7 % 5)
            top = ((step.id, value), (20 + step.id % 50, value - 1), (90, value - 2))
            out.append(dataclasses.replace(step, logprob=value, top=top))
        return out


def script(request):
    said = TOKENIZER.decode(request.prompt, skip_special=True)
    if "hostile" in said.rpartition("user")[2]:
        return written({"reasoning": HOSTILE, "content": HOSTILE})
    if 'role="tool"' in said:
        return written({"reasoning": "", "content": "The tool says so."})
    if "tool please" in said:
        return written({"reasoning": "It is a sum.", "content": "I ask.", "tool_calls": [ADD]})
    if "long" in said:
        return written({"reasoning": "", "content": "on and " * 290})
    return written({"reasoning": "A greeting; I greet back.", "content": "Grüß dich! 😀\n\nTwo lines."})


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with served(Likely(script, pace=0.003), name="small", keys=("a-secret-key",)) as s:
        made = browser.Browser(tmp_path_factory.mktemp("chromium"))
        made.server = s
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def fresh(page):
    """The page newly opened, the key given."""
    page.console.clear()
    page.requests.clear()
    page.scheme("light")
    page.open(page.server.url + "/")
    page.type("#key", "a-secret-key")
    page.run("document.querySelector('#key').dispatchEvent(new Event('change'))")
    page.until("document.querySelector('#model').textContent.includes('small')")
    return page


def keep(page, name):
    if PICTURES:
        page.picture(Path(PICTURES) / f"{name}.png")


def say(page, text):
    page.type("#text", text)
    page.press("Enter")
    page.until("document.querySelector('#stop').hidden && !document.querySelector('.busy')")


def text(page, place):
    return page.run(f"[...document.querySelectorAll({place!r})].map(e => e.textContent)")


def test_without_a_key_the_page_says_so(page):
    page.open(page.server.url + "/")
    page.until("document.querySelector('#model').textContent.includes('API key')")


def test_a_message_is_answered_in_a_stream(fresh):
    say(fresh, "hello")
    assert text(fresh, ".user") == ["hello"]
    assert text(fresh, ".answer > .content") == ["Grüß dich! 😀\n\nTwo lines."]
    assert text(fresh, ".thoughts div") == ["A greeting; I greet back."]
    assert "tokens" in text(fresh, ".foot")[0]
    say(fresh, "and again")
    assert len(text(fresh, ".answer")) == 2
    assert fresh.server.service.metrics.history.values[(("message", "exact"),)] >= 1  # the first answer's ids were put in place
    keep(fresh, "light")
    fresh.scheme("dark")
    keep(fresh, "dark")
    assert [u for u in fresh.requests if not u.startswith((fresh.server.url, "data:"))] == []
    assert [line for line in fresh.console if "401" not in line] == []


def test_stop_ends_an_answer_and_the_server_knows(fresh, monkeypatch):
    monkeypatch.setattr(fresh.server.engine, "pace", 0.02)
    before = len(fresh.server.engine.cancelled)
    fresh.run("document.querySelector('#max_tokens').value = 1900")
    fresh.type("#text", "long")
    fresh.press("Enter")
    fresh.until("document.querySelector('.answer > .content')?.textContent.length > 20")
    keep(fresh, "streaming")
    fresh.click("#stop")
    fresh.until("document.querySelector('#stop').hidden")
    assert "stopped" in text(fresh, ".foot")[0]
    fresh.server.until(lambda: fresh.server.service.runner.live == 0)
    assert len(fresh.server.engine.cancelled) == before + 1
    say(fresh, "hello")
    assert len(text(fresh, ".answer")) == 2


def test_what_a_model_writes_is_text_and_never_markup(fresh):
    fresh.run("document.querySelector('#probabilities').click()")
    for _ in range(2):
        say(fresh, "hostile " + HOSTILE)
        fresh.run("document.querySelector('#probabilities').click()")
    assert text(fresh, ".answer > .content") == [HOSTILE] * 2
    assert text(fresh, ".thoughts div") == [HOSTILE] * 2
    assert text(fresh, ".user") == ["hostile " + HOSTILE] * 2
    assert fresh.run("document.querySelectorAll('#log img, #log script, #log b, #log i, #log u').length") == 0
    assert fresh.run("document.title") == "Atoll"


def test_a_script_that_got_in_would_not_run(fresh):
    """Even if something were written as markup, the policy forbids it to run or to fetch."""
    fresh.run("document.querySelector('#log').innerHTML = '<img src=\"https://example.invalid/x\" onerror=\"document.title=1\">'")
    fresh.run("document.head.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 2'}))")
    fresh.until("true")
    assert fresh.run("document.title") == "Atoll"
    assert any("Content Security Policy" in line for line in fresh.console)


def test_a_tool_call_is_shown_and_its_result_sent_back(fresh):
    fresh.run("document.querySelector('#tools').value = JSON.stringify([{type: 'function', function: {name: 'add<i>', parameters: {}}}])")
    say(fresh, "tool please")
    assert text(fresh, ".call b") == ["add<i>"]
    assert text(fresh, ".call pre") == ['{"a":2,"note":"<u>&"}']
    keep(fresh, "tool")
    fresh.type(".call textarea", "<b>4</b>")
    fresh.click(".results")
    fresh.until("document.querySelectorAll('.answer').length === 2 && !document.querySelector('.busy')")
    assert text(fresh, ".result") == ["<b>4</b>"]
    assert text(fresh, ".answer > .content")[1] == "The tool says so."
    assert "<b>4</b>" in TOKENIZER.decode(fresh.server.engine.requests[-1].prompt)


def test_probabilities_of_tokens_are_shown(fresh):
    fresh.run("document.querySelector('#probabilities').click()")
    say(fresh, "hello")
    assert "".join(text(fresh, ".content .token")) == "Grüß dich! 😀\n\nTwo lines."
    assert len({tuple(c.split()) for c in fresh.run("[...document.querySelectorAll('.token')].map(e => e.className)")}) > 2
    fresh.move(*fresh.middle(".content .token", 3))
    fresh.until("!document.querySelector('#likely').hidden")
    assert len(text(fresh, "#likely tr")) == 3
    assert len(text(fresh, "#likely .chosen")) == 1
    keep(fresh, "probabilities")
    fresh.scheme("dark")
    keep(fresh, "probabilities-dark")


def test_errors_are_shown_and_the_message_can_be_sent_again(fresh):
    fresh.run("document.querySelector('#temperature').value = -3")
    say(fresh, "hello")
    assert "temperature" in text(fresh, ".error")[0]
    fresh.run("document.querySelector('#temperature').value = 1")
    fresh.run("document.querySelector('#tools').value = '{'")
    say(fresh, "hello")
    assert "Tools" in text(fresh, ".error")[1]
    fresh.run("document.querySelector('#tools').value = ''")
    say(fresh, "hello")
    assert len(text(fresh, ".answer")) == 1


def test_sampling_controls_reach_the_engine(fresh):
    for name, value in (("temperature", 0.3), ("top_p", 0.5), ("top_k", 7), ("min_p", 0.1), ("seed", 11), ("max_tokens", 33)):
        fresh.run(f"document.querySelector('#{name}').value = {value}")
    fresh.run("document.querySelector('#thinking').click()")
    fresh.type("#system", "Be brief.")
    say(fresh, "hello")
    request = fresh.server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.3, 0.5, 7, 0.1, 11)
    assert request.max_tokens == 33
    said = TOKENIZER.decode(request.prompt)
    assert "Be brief." in said
    assert said.endswith("<|open|>response<|sep|>")


def test_the_page_fits_a_narrow_window(fresh):
    fresh.send("Emulation.setDeviceMetricsOverride", width=390, height=780, deviceScaleFactor=1, mobile=True)
    try:
        say(fresh, "hello")
        assert fresh.run("document.documentElement.scrollWidth") <= 390
        keep(fresh, "narrow")
        fresh.click("#show")
        assert fresh.run("getComputedStyle(document.querySelector('aside')).display") == "block"
        keep(fresh, "narrow-settings")
    finally:
        fresh.send("Emulation.clearDeviceMetricsOverride")


def test_a_new_chat_forgets_the_old(fresh):
    say(fresh, "hello")
    fresh.click("#reset")
    assert text(fresh, ".answer") == []
    say(fresh, "again")
    assert "hello" not in TOKENIZER.decode(fresh.server.engine.requests[-1].prompt)
