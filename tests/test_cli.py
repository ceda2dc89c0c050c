"""The command: what it says, what it refuses, how it ends."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import atoll
from atoll import arguments, cli
from atoll.config import Config, UserError, load_config, presets, to_toml

SOURCE = str(Path(atoll.__file__).parents[1])


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """`atoll.train.run` replaced by one that notes what it was asked."""
    calls = []
    room = types.ModuleType("atoll.train")
    room.run = lambda config, out, resume=False, started=None: calls.append((config, out, resume))  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "atoll.train", room)
    return calls


def command(*words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True, env=env, timeout=120)


def refusal(capsys, *words: str) -> str:
    """The one line on stderr, with nothing on stdout and exit code 2."""
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atoll: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert not any(c in err for c in "╭│╰"), err
    return err


# ---------------------------------------------------------------- help


def test_help_is_quick_and_does_not_load_torch():
    script = "import sys; from atoll.cli import main; code = main(['--help']); assert 'torch' not in sys.modules; sys.exit(code)"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    taken = []
    for _ in range(3):  # the best of three, in processor time: a busy machine may halt any one
        before = os.times()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert min(taken) < 0.8


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb not in cli.WORDY])  # those read their words themselves
def test_every_verb_explains_its_words(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: atoll {verb} ")
    assert max(map(len, out.splitlines())) <= 100
    rows = {words[0]: words[1:] for line in out.splitlines() if line.startswith("  ") and (words := line.split())}
    for name, given in inspect.signature(cli.VERBS[verb]).parameters.items():
        flag = name.replace("_", "-")
        row = next(rows[head] for head in (f"--{flag}", f"--[no-]{flag}", flag.upper()) if head in rows)
        assert len(row) > 2, name  # a default, and a meaning of more than one word
        if given.default is not given.empty and f"--{flag}" in rows:
            assert row[0] in ("none", str(given.default).lower(), f"{given.default:,.0f}" if isinstance(given.default, float) else "")


def test_help_names_the_words_a_setting_may_be(capsys):
    assert cli.main(["export", "--help"]) == 0
    assert "(float32 or bfloat16)" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["train", "--help"]) == 0
    assert "(none, mxfp4 or mxfp4+mxfp8)" in " ".join(capsys.readouterr().out.split())


def test_help_of_train_shows_every_setting_with_value_and_meaning(capsys):
    assert cli.main(["train", "mini", "--help"]) == 0
    out = capsys.readouterr().out
    rows = {words[0]: words[1:] for line in out.splitlines() if (words := line.split()) and "." in words[0] and words[0].startswith("--")}
    config = load_config("mini")
    for group in vars(config):
        value = getattr(config, group)
        for i, part in enumerate(value if group == "stages" else [value]):
            prefix = f"stages.{i}" if group == "stages" else group
            for name, setting in vars(part).items():
                row = rows[f"--{prefix}.{name}"]
                assert len(row) > 2, name  # a value, and a meaning of more than one word
                assert isinstance(setting, (tuple, str)) or row[0] == ("none" if setting is None else str(setting).lower())
    assert max(map(len, out.splitlines())) <= 140


def test_no_words_and_version(capsys):
    assert cli.main([]) == 0
    assert "usage: atoll" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"atoll {atoll.__version__}\n"


# ---------------------------------------------------------------- train's words


def test_settings_in_both_spellings_reach_the_run(trained):
    words = ["train", "--model.num_experts=32", "tiny", "--stages.1.length", "4096", "--optim.min_lr", "0.1", "--train.steps", "7"]
    assert cli.main([*words, "--out", "here"]) == 0
    ((config, out, resume),) = trained
    assert (config.model.num_experts, config.stages[1].length, config.optim.min_lr, config.train.steps) == (32, 4096, 0.1, 7)
    assert (out, resume) == (Path("here"), False)


def test_a_negative_number_is_a_value(trained):
    assert cli.main(["train", "tiny", "--model.gate_lower_bound", "-2.5"]) == 0
    assert trained[0][0].model.gate_lower_bound == -2.5


def test_minutes_set_the_budget_and_drop_the_steps(trained):
    Path("my.toml").write_text('preset = "tiny"\n[train]\nsteps = 5\n')
    assert cli.main(["train", "my.toml", "--minutes", "60"]) == 0
    config, out, _ = trained[0]
    assert (config.train.minutes, config.train.steps) == (60.0, None)
    assert out == Path("runs/my")


def test_default_folders_do_not_collide(trained):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny-2").mkdir()
    cli.main(["train", "tiny"])
    assert trained[0][1] == Path("runs/tiny-3")


def test_resume_reads_the_runs_own_config(trained):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.toml").write_text(to_toml(load_config("tiny", {"train.steps": 11})))
    assert cli.main(["train", "--resume", "runs/x", "--train.threads", "2"]) == 0
    config, out, resume = trained[0]
    assert (config.train.steps, config.train.threads, out, resume) == (11, 2, Path("runs/x"), True)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian tiny", ["trian", "did you mean train?"]),
        ("xyzzy", ["xyzzy", "train, sample, chat, serve, eval, compare, report, plan, audit, export, import"]),
        ("train", ["CONFIG", "tiny"]),
        ("train tinny", ["tinny", "did you mean 'tiny'"]),
        ("train no/such.toml", ["no/such.toml", "no such preset or file"]),
        ("train tiny mini", ["'mini'", "'tiny'"]),
        ("train tiny --model.hiden_size 4", ["model.hiden_size", "did you mean model.hidden_size?"]),
        ("train tiny --modle.hidden_size 4", ["modle", "did you mean model?"]),
        ("train tiny --hidden_size 4", ["--hidden_size", "did you mean --model.hidden_size?"]),
        ("train tiny --minuts 4", ["--minuts", "did you mean --minutes?"]),
        ("train tiny -x", ["-x"]),
        ("train tiny --data.source", ["--data.source", "VALUE"]),
        ("train tiny --data.source --train.steps 3", ["--data.source", "VALUE"]),
        ("train tiny --train.steps 3 --train.steps 4", ["--train.steps", "twice"]),
        ("train tiny --out a --out b", ["--out", "twice"]),
        ("train tiny --train.steps many", ["train.steps", "many", "whole number"]),
        ("train tiny --train.steps 0", ["train.steps", "0", "above 0"]),
        ("train tiny --minutes -1", ["train.minutes", "-1", "above 0"]),
        ("train tiny --minutes 3 --train.steps 4", ["--minutes", "--train.steps"]),
        ("train tiny --model.num_experts_per_token 896", ["model.num_experts_per_token", "896", "below num_experts"]),
        ("train tiny --model.gate_lower_bound -50", ["model.gate_lower_bound", "-50"]),
        ("train tiny --stages.1.length 100", ["stages.1.length", "100", "must grow"]),
        ("train tiny --stages.7.length 100", ["stages.7", "0 to 1"]),
        ("train tiny --stages.0.share 0.9", ["stages.share", "add up to 1"]),
        ("train --resume nowhere", ["nowhere", "no such folder"]),
        ("train tiny --resume nowhere", ["--resume", "CONFIG"]),
        ("train --resume nowhere --out x", ["--resume", "--out"]),
        ("train --resume nowhere --minutes 3", ["--resume", "--minutes"]),
        ("train --resume .", ["config.toml"]),
        ("sample", ["RUN is missing", "atoll sample --help"]),
        ("sample nowhere text", ["nowhere", "no such folder"]),
        ("sample . text", ["config.toml"]),
        ("sample . text --tokens many", ["tokens = 'many'", "a whole number is expected", "atoll sample --help"]),
        ("sample . text --tokes 3", ["--tokes", "did you mean --tokens?"]),
        ("report . more", ["more", "quotes"]),
        ("sample . text --temperature warm", ["temperature = 'warm'", "a number is expected"]),
        ("sample . text --tokens", ["--tokens", "a value is expected"]),
        ("export . x --dtype float16", ["dtype = 'float16'", "one of bfloat16, float32 is expected"]),
        ("plan .", ["no config.json"]),
        ("eval", ["RUN is missing"]),
        ("eval nowhere", ["nowhere"]),
        ("report nowhere", ["nowhere"]),
        ("plan", ["NAME is missing"]),
        ("plan tinny", ["tinny", "did you mean 'tiny'"]),
        ("plan tiny --jsn", ["--jsn", "did you mean --json?"]),
    ],
)
def test_mistakes_are_one_line(words, says, capsys, trained):
    message = refusal(capsys, *words.split(" "))
    assert all(part in message for part in says), message
    assert trained == []
    assert list(Path().iterdir()) == []


def test_a_near_run_is_suggested(capsys):
    Path("runs/tiny-2").mkdir(parents=True)
    assert "did you mean 'runs/tiny-2'?" in refusal(capsys, "report", "runs/tiny_2")


def test_unfinished_and_textless_runs_say_what_to_do(capsys):
    Path("x").mkdir()
    Path("x/config.toml").write_text(to_toml(Config()))
    assert "atoll train --resume x" in refusal(capsys, "sample", "x", "def")
    Path("x/model").mkdir()
    Path("x/model/config.json").write_text("{}")
    assert "tokenizer.json" in refusal(capsys, "sample", "x", "def")


@pytest.mark.parametrize(
    "content", ["model = 3", "[model]\nhidden = 3", "[model", "[[stages]]\nlength = 1\n[[stages]]\nlength = 1", "\x00"]
)
def test_broken_toml_files(content, capsys):
    Path("my.toml").write_text(content)
    refusal(capsys, "train", "my.toml")


def test_a_mistake_in_a_real_process():
    done = command("train", "tiny", "--model.hiden_size", "4")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "atoll: model.hiden_size: no such setting; did you mean model.hidden_size?\n"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("two\nlines"), 2, "atoll: two lines\n"),
        (OSError(28, "No space left on device", "/x/y"), 2, "atoll: /x/y: No space left on device; mend that and start again\n"),
        (KeyboardInterrupt(), 130, "atoll: interrupted\n"),
    ],
)
def test_endings(error, code, says, monkeypatch, capsys):
    def fail(_words):
        raise error

    monkeypatch.setattr(cli, "train", fail)
    assert cli.main(["train", "tiny"]) == code
    assert capsys.readouterr().err == says


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    def fail(_words):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "train", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "tiny"])


def test_a_reader_that_goes_away_ends_it_quietly():
    env = {**os.environ, "PYTHONPATH": SOURCE}
    line = f"{sys.executable} -m atoll train --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 when all was written before the reader left


# ---------------------------------------------------------------- the verbs


def test_plan_prints_text_or_json(capsys):
    assert cli.main(["plan", "tiny"]) == 0
    assert "total" in capsys.readouterr().out
    assert cli.main(["plan", "tiny", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 40e6 < plan["total"] < 43e6
    assert plan["built"]["agrees"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with an untrained model and a tokenizer of its own."""
    from atoll.data.tokenizer import train_tokenizer
    from atoll.hub.export import save
    from atoll.model import Model

    folder = tmp_path_factory.mktemp("run")
    source = folder / "text"
    source.mkdir()
    for i in range(40):
        (source / f"{i}.txt").write_text(f"def parse_{i}(line):\n    return line.split('{i}')\n" * 20)
    small = {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48,
        "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
    }  # fmt: skip
    changes = {f"model.{k}": v for k, v in small.items()}
    changes |= {"data.source": str(source), "data.heldout": 0.2, "data.cache": str(folder / "cache")}
    config = load_config("tiny", changes)
    (folder / "config.toml").write_text(to_toml(config))
    tokenizer = train_tokenizer([p.read_text() for p in source.iterdir()], config.model)
    tokenizer.save(folder / "tokenizer.json")
    save(Model(config.model), folder / "model", tokenizer)
    return folder


@pytest.mark.parametrize("part", ["", "model"])
def test_sample_continues_text_and_repeats_by_seed(run, part, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main(["sample", str(run / part), "def parse", "--tokens", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def parse")
    assert texts[0].endswith("\n")
    assert len(texts[0]) > len("def parse\n")


def test_sample_takes_several_prompts_and_answers_programs(run, capsys):
    assert cli.main(["sample", str(run), "def parse", "class A", "--tokens", "9", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert [a["prompt"] for a in (first, second)] == ["def parse", "class A"]
    assert all(len(a["ids"]) == len(a["logprobs"]) <= 9 and max(a["logprobs"]) <= 0 for a in (first, second))
    assert {first["finish"], second["finish"]} <= {"stop", "length"}
    assert cli.main(["sample", str(run), "def parse", "class A", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == f"def parse{first['text']}\n----\nclass A{second['text']}\n"
    assert cli.main(["sample", str(run), "def parse", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == f"def parse{first['text']}\n"  # alone and streamed: the same seed, the same text
    assert cli.main(["sample", str(run), "class A", "--tokens", "9", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["ids"] == second["ids"]


def test_plan_reads_a_run_and_a_hub_folder(run, capsys):
    totals = []
    for name in (run, run / "model", run / "config.toml"):
        assert cli.main(["plan", str(name), "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["total"])
    assert totals[0] == totals[1] == totals[2]


def test_sample_refuses_a_damaged_model_and_a_foreign_tokenizer(run, tmp_path, capsys):
    folder = shutil.copytree(run / "model", tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "not a whole safetensors file" in refusal(capsys, "sample", str(folder), "x")
    shutil.copy(run / "model" / "model.safetensors", weights)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|open|>", "<|shut|>"))
    assert "not the tokenizer" in refusal(capsys, "sample", str(folder), "x")
    for flag, value in (("temperature", "-1"), ("top_p", "2"), ("top_k", "0"), ("tokens", "-3")):
        assert flag in refusal(capsys, "sample", str(run), "x", f"--{flag.replace('_', '-')}", value)
        assert flag.replace("tokens", "max_tokens") in refusal(capsys, "sample", str(run), "x", "y", f"--{flag.replace('_', '-')}", value)


def test_eval_measures_the_held_out_files(run, capsys):
    assert cli.main(["eval", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] > 0
    assert result["bytes"] > 0
    assert 0 < result["xz"] < 8
    assert 1 < result["bits_per_byte"] < 20  # an untrained model knows nothing
    assert cli.main(["eval", str(run)]) == 0
    text = capsys.readouterr().out
    assert f"{result['bits_per_byte']:.4f}" in text


def test_presets_are_all_readable_from_the_command(capsys):
    for name in presets():
        assert cli.main(["train", name, "--help"]) == 0
        assert f"in {name} and" in capsys.readouterr().out


def test_near_settings():
    assert arguments._near("lr") == "optim.lr"
    assert arguments._near("zzzzzz") is None
