"""Command-line words to settings: dotted overrides for `train`, plain functions for the other verbs, one-line errors for all."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from atoll.config import ALIASES, Config, ModelConfig, StageConfig, UserError, describe, load_config, override, presets

OWN_FLAGS = ("resume", "minutes", "out")


@dataclass
class TrainArguments:
    """What follows `atoll train`."""

    config: str | None = None  # preset, TOML file, or folder with weights
    overrides: dict[str, str] = field(default_factory=dict)  # dotted key → text
    resume: str | None = None
    minutes: str | None = None
    out: str | None = None


def parse_train(words: list[str]) -> TrainArguments:
    """`CONFIG --a.b value --a.b=value --resume RUN --minutes N --out DIR` in any order. Raises `UserError`."""
    args, rest = TrainArguments(), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if word.startswith("-"):
                raise UserError(f"{word}: no such flag; settings are written --group.name value, see atoll train --help")
            if args.config is not None:
                raise UserError(f"{word!r}: one CONFIG is expected, and {args.config!r} stands there already")
            args.config = word
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{name}: a value is expected, as --{name} VALUE")
            value = rest.pop(0)
        _put(args, name, value)
    return args


def _put(args: TrainArguments, name: str, value: str) -> None:
    if name in OWN_FLAGS:
        if getattr(args, name) is not None:
            raise UserError(f"--{name}: given twice")
        setattr(args, name, value)
    elif "." not in name:
        near = _near(name)
        hint = f"did you mean --{near}?" if near else "settings are written --group.name value"
        raise UserError(f"--{name}: no such flag; {hint}")
    elif name in args.overrides:
        raise UserError(f"--{name}: given twice")
    else:
        args.overrides[name] = value


def _near(name: str) -> str | None:
    """The flag that a name without a dot may mean: the setting so called in its group, or one spelt alike."""
    groups = {f.name: type(getattr(Config(), f.name)) for f in dataclasses.fields(Config) if f.name != "stages"}
    inside = {f.name: f"{group}.{f.name}" for group, cls in groups.items() for f in dataclasses.fields(cls)}
    inside |= {name: name for name in OWN_FLAGS}
    near = difflib.get_close_matches(name, inside, 1, 0.6)
    return inside[near[0]] if near else None


# ---------------------------------------------------------------- the other verbs


def call(verb: Callable[..., Any], words: list[str], prog: str) -> Any:
    """Call `verb` with `words` read by its signature, or print its help. A mistake is a one-line `UserError`."""
    if {"-h", "--help"} & set(words):
        print(verb_help(verb, prog))
        return None
    import tyro

    _known_flags(verb, words, prog)
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            ready = tyro.cli(_later(verb), args=words, prog=prog)
    except SystemExit:
        _refuse(heard.getvalue(), prog)
    return ready()


def _known_flags(verb: Callable[..., Any], words: list[str], prog: str) -> None:
    """Refuse a flag the verb does not have, with the nearest it has."""
    flags = ["--help", *("--" + name.replace("_", "-") for name in inspect.signature(verb).parameters)]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in [*flags, "--", *("--no-" + f[2:] for f in flags)]:
            near = difflib.get_close_matches(flag, flags, 1)
            raise UserError(f"{flag}: no such flag; " + (f"did you mean {near[0]}?" if near else f"see {prog} --help"))


def _later(verb: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """`verb` with the same signature, but giving the call to make: the words are read first, the work is done outside."""

    @functools.wraps(verb)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(verb, *args, **kwargs)

    return bind


def _refuse(box: str, prog: str) -> NoReturn:
    """The parser's message, a framed paragraph, as one line of ours."""
    rows = [re.sub(r"[╭╮╰╯│─]+|-{4,}", " ", line).strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    frame = [row for row in rows[1:] if row]  # the first row is the frame's title
    text = re.split(r"\s(?:Argument helptext:|For full helptext)", " ".join(frame))[0]
    text = re.sub(r"\s+", " ", text).strip()
    for pattern, ours in PARSER_SAYS.items():
        if found := re.match(pattern, text):
            text = ours(*found.groups())
            break
    raise UserError(f"{text}; see {prog} --help")


def _one_of(value: str, name: str, choices: str) -> str:
    words = sorted(set(re.findall(r"'([^']*)'", choices)) - {"None"})
    return f"{name} = {value}: {'one of ' * (len(words) > 1)}{', '.join(words)} is expected"


# What the parser says, and how we say it.
PARSER_SAYS: dict[str, Callable[..., str]] = {
    r"Missing from [^:]*: ?(\S+)": "{} is missing".format,
    r"Missing value for argument '(\S+)'": "{}: a value is expected".format,
    r"Unrecognized options: (.*)": "{}: more than is expected; a text of several words is put in quotes".format,
    r"Error parsing --(\S+): invalid literal for int\(\)[^:]*: (.*)": "{} = {}: a whole number is expected".format,
    r"Error parsing --(\S+): could not convert string to float: (.*)": "{} = {}: a number is expected".format,
    r"invalid choice (.*) for argument '-*(\S+)'\. Expected one of (.*)": _one_of,
    r"Error parsing -*(\S+): (.*)": "{}: {}".format,
}


# ---------------------------------------------------------------- help


def verb_help(verb: Callable[..., Any], prog: str, width: int = 100) -> str:
    """Usage, purpose, and every word and flag of `verb` with its default and meaning, read from its signature and docstring."""
    hints = typing.get_type_hints(verb, include_extras=True)
    purpose, _, listed = inspect.cleandoc(verb.__doc__ or "").partition("\n\nArgs:\n")
    meanings = dict(re.findall(r"^ +(\w+): (.+)$", listed, re.M))
    usage, cells = [f"usage: {prog}"], []
    for name, given in inspect.signature(verb).parameters.items():
        metavar = next((m.metavar for m in getattr(hints[name], "__metadata__", ()) if getattr(m, "metavar", None)), None)
        required, meaning = given.default is inspect.Parameter.empty, meanings.get(name, "") + _choices(hints[name])
        if metavar:
            usage.append(metavar if required else f"[{metavar}]")
            cells.append((metavar, "", meaning))
        else:
            flag = ("[no-]" if given.default is True else "") + name.replace("_", "-")
            usage.append(f"[--{flag}]" if isinstance(given.default, bool) else f"[--{flag} {name.split('_')[-1].upper()}]")
            cells.append((f"--{flag}", _shown(given.default), meaning))
    whole = " ".join(word.replace(" ", "\xa0") for word in usage)
    head = textwrap.fill(whole, width, subsequent_indent=" " * (len(usage[0]) + 1), break_on_hyphens=False).replace("\xa0", " ")
    return "\n".join([head, "", *textwrap.wrap(purpose, width), "", *_aligned(cells, width)])


def _choices(hint: Any) -> str:
    """The words that a setting may be, as " (situ or silu)"; empty where it is free."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union, typing.Annotated):
        return next((found for part in typing.get_args(hint) if (found := _choices(part))), "")
    words = [str(word) for word in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []
    return f" ({', '.join(words[:-1])} or {words[-1]})" if len(words) > 1 else ""


TRAIN_USAGE = """\
usage: atoll train CONFIG [--group.name VALUE ...] [--minutes N] [--out DIR]
       atoll train --resume RUN [--group.name VALUE ...]

CONFIG is a TOML file, a run or hub folder whose weights are trained further (docs/chat.md), or a preset:
{presets}.

  --minutes N     train for N minutes in all, whatever the config says
  --out DIR       run folder (default: runs/NAME, or the next free runs/NAME-2, ...)
  --resume RUN    go on from the newest checkpoint in RUN

Every setting, with its value in {name} and its meaning. A value of none switches off what may be absent.
"""


def train_help(config: Config, name: str, presets: list[str], width: int = 120) -> str:
    """Usage and every setting of `config`, aligned: flag, value, meaning."""
    lines = [TRAIN_USAGE.format(presets=", ".join(presets), name=name)]
    for group in dataclasses.fields(config):
        value = getattr(config, group.name)
        if group.name == "stages":
            for i, stage in enumerate(value):
                lines += [f"[stages.{i}]", *_rows(stage, f"stages.{i}.", describe(StageConfig), width), ""]
        else:
            lines += _group_help(group.name, value, width)
    return "\n".join(lines).rstrip() + "\n"


def _group_help(name: str, group: Any, width: int) -> list[str]:
    """The settings of a group, then of the groups within it."""
    settings = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    inner = {key: value for key, value in settings.items() if dataclasses.is_dataclass(value)}
    lines = [f"[{name}]", *_rows(group, f"{name}.", describe(type(group)), width), ""]
    return lines + [line for key, value in inner.items() for line in _group_help(f"{name}.{key}", value, width)]


def _rows(group: Any, prefix: str, meanings: dict[str, str], width: int) -> list[str]:
    plain = {f.name: getattr(group, f.name) for f in dataclasses.fields(group) if not dataclasses.is_dataclass(getattr(group, f.name))}
    hints = typing.get_type_hints(type(group))
    cells = [(f"--{prefix}{name}", _shown(value), meanings.get(name, "") + _choices(hints[name])) for name, value in plain.items()]
    return _aligned(cells, width)


def _aligned(cells: list[tuple[str, str, str]], width: int) -> list[str]:
    """Rows of flag, value and meaning, the meaning wrapped in its own column."""
    flags, values = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    indent = 2 + flags + 2 + values + 2
    rows = []
    for flag, value, meaning in cells:
        head = f"  {flag:<{flags}}  {value:<{values}}  "
        rows.append(textwrap.fill(meaning, max(width, indent + 30), initial_indent=head, subsequent_indent=" " * indent))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or '""'
    if isinstance(value, float) and value >= 1e6:
        return f"{value:,.0f}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- folders


def plan_run(args: TrainArguments) -> tuple[Config, Path]:
    """The config and the folder of the run that `args` ask for. Raises `UserError`."""
    if args.resume is not None:
        if args.config or args.out or args.minutes:
            extra = f"CONFIG {args.config!r}" if args.config else "--out" if args.out else "--minutes"
            raise UserError(f"--resume {args.resume}: {extra} does not go with it; a resumed run keeps its folder, config and schedule")
        folder = run_folder(args.resume)
        return load_config(folder / "config.toml", args.overrides), folder
    if args.config is None:
        raise UserError(f"train: a CONFIG is expected: a TOML file or one of {', '.join(presets())}; for instance atoll train tiny")
    overrides: dict[str, Any] = dict(args.overrides)
    if args.minutes is not None:
        clash = next((key for key in ("train.minutes", "train.steps") if key in overrides), None)
        if clash:
            raise UserError(f"--minutes {args.minutes}: does not go with --{clash}; give one of the two")
        overrides |= {"train.minutes": args.minutes, "train.steps": "none", "train.epochs": "none"}
    config = start_config(args.config, overrides)
    if args.out is None and (number := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"--out is missing: {number} processes must agree on the run's folder, and find it again after a restart")
    name = Path(args.config).stem + ("-chat" if config.data.kind == "chat" and Path(args.config).is_dir() else "")
    return config, Path(args.out).expanduser() if args.out else free_folder(Path("runs"), name)


def start_config(name: str, overrides: dict[str, Any]) -> Config:
    """The settings under a preset, a TOML file, or a folder with weights to start from. Raises `UserError`."""
    if ("/" not in name and name in (*presets(), *ALIASES)) or not Path(name).expanduser().is_dir():
        return load_config(name, overrides)
    from atoll.train.initial import settings

    shape = next((key for key in overrides if key.startswith("model.")), None)
    if shape:
        raise UserError(f"--{shape}: does not go with {name!r}; the model's shapes are those of its weights")
    return override(settings(name, str(overrides.get("data.kind")) == "chat"), overrides)


def model_settings(name: str) -> ModelConfig:
    """The shapes of a preset, a TOML file, a run, or a folder in the hub's layout. Raises `UserError`."""
    folder = Path(name).expanduser()
    if ("/" not in name and name in (*presets(), *ALIASES)) or not folder.is_dir():
        return load_config(name).model
    if (folder / "config.toml").is_file():
        return load_config(folder / "config.toml").model
    from atoll.hub.load import read_config

    return read_config(folder)


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first of `name-2`, `name-3`, ... that is not there yet."""
    number, folder = 1, parent / name
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def run_folder(run: str) -> Path:
    """The existing folder of a run. Raises `UserError`."""
    folder = Path(run).expanduser()
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, known, 1)
        raise UserError(f"run = {run!r}: no such folder" + (f"; did you mean {str(folder.parent / near[0])!r}?" if near else ""))
    if not (folder / "config.toml").is_file():
        raise UserError(f"run = {run!r}: no config.toml there; give the folder that atoll train wrote")
    return folder


def model_folder(run: str) -> Path:
    """The folder in the hub's layout that `run` is or holds. Raises `UserError`."""
    folder = Path(run).expanduser()
    if not (folder / "config.json").is_file():
        folder = run_folder(run) / "model"
        if not (folder / "config.json").is_file():
            raise UserError(f"run = {run!r}: no model/ there yet; finish it with atoll train --resume {run}")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: no tokenizer.json; text cannot be read without it")
    return folder


def model_name(folder: Path) -> str:
    """What a model is called: its folder's name, or its run's where that is `model`."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def need(extra: str, *packages: str) -> None:
    """Raises `UserError` where a package of `atoll[extra]` is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not installed; pip install 'atoll[{extra}]'")


def show(result: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> None:
    """Print `result` for a program or for a person."""
    print(json.dumps(result) if as_json else render(result).rstrip("\n"))


def say(line: str) -> None:
    """Print one line of progress, apart from results."""
    print(line, file=sys.stderr, flush=True)


def event_writer() -> Callable[[Any], None]:
    """A function that prints the events of an assistant's message (`atoll.infer.parsed.Event`) as they come, each kind on its own line."""
    last = ""

    def show(event: Any) -> None:
        nonlocal last
        if event.kind == "call" or event.kind not in (last, "arguments"):
            heads = {"thinking": "(thinks) ", "content": "", "call": f"(calls {event.name}) ", "end": ""}
            write_model(("\n" if last else "") + heads[event.kind])
        write_model(event.text)
        last = event.kind

    return show


def write_model(text: str) -> None:
    """Print a piece of what a model wrote: to a terminal without what would steer it, to a file or a pipe as it is."""
    from atoll.infer.stream import printable

    write(printable(text) if sys.stdout.isatty() else text)


def write(text: str) -> None:
    """Print a piece of text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
