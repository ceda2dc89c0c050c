"""`atoll chat`: commands, stopping an answer, and a conversation whose sampled ids stay as they were."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conversations import TOKENIZER
from serving import Scripted, small_engine, small_model, written

from atoll.config import UserError
from atoll.infer.request import Sampling
from atoll.serve.terminal import Terminal, printable

SRC = Path(__file__).parents[2] / "src"


def talk(engine, lines, **options):
    """What the terminal shows when these lines are typed. A line that is an exception is raised."""
    shown, left = [], iter(lines)

    def read():
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    terminal = Terminal(engine, TOKENIZER, read=read, write=shown.append, **options)
    terminal.talk()
    return "".join(shown), terminal


def scripted(message):
    engine = Scripted(lambda request: written(message))
    engine.model = small_model()
    return engine


def test_an_answer_is_shown_with_its_thoughts_and_calls():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    shown, _ = talk(scripted({"reasoning": "hm", "content": "Hello.", "tool_calls": [call]}), ["hi"])
    assert shown == '(thinks) hm\nHello.\n(calls add) {"a":1}\n\n'


def test_commands():
    engine = scripted({"content": "ok"})
    shown, terminal = talk(engine, ["/help", "hi", "/system Be brief.", "yo", "/nothing", "  ", "/reset", "again", "/exit", "never read"])
    assert "Ctrl-C stops" in shown
    assert "/nothing: no such command" in shown
    prompts = [TOKENIZER.decode(r.prompt, skip_special=True) for r in engine.requests]
    assert len(prompts) == 3
    assert "Be brief." not in prompts[0]
    assert "Be brief." in prompts[1]
    assert "hi" not in prompts[1].replace("think", "")
    assert "Be brief." in prompts[2]
    assert "yo" not in prompts[2]
    assert [m["role"] for m in terminal.messages] == ["user", "assistant"]


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on():
    engine = scripted({"content": "a b c d e f"})
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    shown, terminal = talk(engine, ["hi", KeyboardInterrupt(), "more"])
    assert shown.count("(stopped)") == 1
    assert engine.cancelled == [0]
    first, second = (r.prompt for r in engine.requests)
    assert second[: len(first)] == first
    assert len(terminal.messages) == 4


def test_a_message_that_is_too_long_is_said_and_forgotten():
    shown, terminal = talk(small_engine(), ["x" * 3000], tokens=100)
    assert "over max_length" in shown
    assert terminal.messages == []


def test_every_turn_begins_with_the_ids_of_the_one_before():
    engine = small_engine()
    prompts, submit = [], engine.submit

    def noted(request):
        prompts.append(request.prompt)
        return submit(request)

    engine.submit = noted
    _, terminal = talk(engine, ["one", "two", "three"], tokens=30, sampling=Sampling(seed=3))
    assert len(prompts) == 3
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
    assert engine.stats()["prefix_hits"] >= 1
    _, same = talk(small_engine(), ["one", "two", "three"], tokens=30, sampling=Sampling(seed=3))
    assert same.messages == terminal.messages


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "a\rb", "\x9b1m", "‮x"])
def test_a_model_cannot_steer_the_terminal(text):
    assert not any(c in printable(text) for c in "\x1b\x07\r\x9b‮")
    assert printable("é中😀\n\tz") == "é中😀\n\tz"


def test_nor_can_the_name_of_a_tool_it_calls():
    call = {"id": "1", "type": "function", "function": {"name": "\x1b[2Jfind", "arguments": '{"a": "\\u001b[1m"}'}}
    shown, _ = talk(scripted({"content": "", "tool_calls": [call]}), ["x"])
    assert "(calls \ufffd[2Jfind) " in shown
    assert "\x1b" not in shown


def test_sampling_that_cannot_be_is_refused_before_anything_is_asked(tmp_path):
    folder = small_model().save_pretrained(tmp_path / "small", TOKENIZER)
    for wrong, said in (
        (Sampling(temperature=-1.0), "temperature = -1.0"),
        (Sampling(top_k=0), "top_k = 0"),
        (Sampling(seed=2**64), "seed ="),
    ):
        with pytest.raises(UserError, match=said):
            Terminal.open(folder, "", 8, wrong, True)


def test_the_verb_reads_from_a_pipe(tmp_path):
    folder = small_model().save_pretrained(tmp_path / "small", TOKENIZER)
    variables = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "atoll", "chat", str(folder), "--tokens", "8", "--seed", "1", "--temperature", "0"]
    done = subprocess.run(command, input="hello\n/exit\n", capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "(thinks)" in done.stdout
