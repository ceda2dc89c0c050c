"""The words after `atoll compare`."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.arguments import TrainArguments, parse_train
from atoll.config import UserError

SHORTHANDS = {"balance": "balance.kind", "residual": "model.residual", "experts": "model.num_experts", "quantization": "model.quantization"}

USAGE = """\
usage: atoll compare CONFIG --vary SETTING=VALUE,VALUE,... [--vary ...] [--seeds N]
                     [--minutes N | --steps N] [--out DIR] [--json] [--group.name VALUE ...]

Train CONFIG (a preset, a TOML file, or a folder with weights) once with each value and each seed,
all on the same samples in the same order, as ordinary runs in DIR, and write compare.html, plots/
and compare.json there.
Stopped or killed, the same command goes on where it was; finished runs are not trained again.

  --vary          a setting and its values: balance=quantile,sign,aux,capacity,none
                  residual=plain,block,full   optim.lr=0.01,0.02
                  (values that hold commas are parted by ;)
                  given twice, every value of one meets every value of the other
  --seeds N       seeds of every value: of the samples' order, the weights and the texts sampled
                  (default 3)
  --minutes N     for the whole comparison; all runs get the same number of steps
  --steps N       steps of each run (default: what CONFIG says, its minutes being those of one run)
  --out DIR       folder of the comparison (default: runs/compare-NAME-SETTING)
  --json          print compare.json

Every other setting goes as in atoll train, for all runs. Checkpoints of a finished run are removed;
--train.export true keeps its model.
"""


@dataclass(frozen=True)
class Vary:
    """One setting and the values it takes, as text."""

    key: str
    values: tuple[str, ...]


@dataclass
class CompareArguments:
    """What follows `atoll compare`."""

    train: TrainArguments
    vary: list[Vary] = field(default_factory=list)
    seeds: int = 3
    steps: str | None = None
    json: bool = False


def parse(words: list[str]) -> CompareArguments:
    """Read the words. Raises `UserError`, one line, for any mistake."""
    own: dict[str, list[str]] = {"vary": [], "seeds": [], "steps": []}
    rest, json, words = [], False, list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--json":
            json = True
        elif word.startswith("--") and name == "resume":
            raise UserError("--resume: give the same command again instead; what is finished stays, what was cut short goes on")
        elif word.startswith("--") and name in own:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise UserError(f"--{name}: a value is expected, as --{name} VALUE")
                value = words.pop(0)
            own[name].append(value)
        else:
            rest.append(word)
    for name in ("seeds", "steps"):
        if len(own[name]) > 1:
            raise UserError(f"--{name}: given twice")
    asked = CompareArguments(parse_train(rest), [parse_vary(text) for text in own["vary"]], json=json)
    asked.seeds = _count("seeds", own["seeds"][0]) if own["seeds"] else asked.seeds
    asked.steps = str(_count("steps", own["steps"][0])) if own["steps"] else None
    _check(asked)
    return asked


def _check(asked: CompareArguments) -> None:
    if asked.train.config is None:
        raise UserError("compare: a CONFIG is expected, as in: atoll compare tiny --vary balance=quantile,sign --seeds 3")
    if not asked.vary:
        raise UserError("compare: --vary SETTING=VALUE,VALUE is expected, as --vary balance=quantile,sign,aux,capacity,none")
    keys = [v.key for v in asked.vary]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--vary {key}: given twice; put all values into one")
        if key in asked.train.overrides:
            raise UserError(f"--{key}: is varied already; leave it out")
        if key.startswith("train.") and key.removeprefix("train.") in ("steps", "minutes", "epochs", "seed"):
            raise UserError(f"--vary {key}: runs of a comparison have the same steps and seeds; use --steps, --minutes or --seeds")
    if asked.steps is not None and asked.train.minutes is not None:
        raise UserError(f"--steps {asked.steps}: does not go with --minutes; give one of the two")


def parse_vary(text: str) -> Vary:
    """`balance=quantile,sign` → the setting's full name and its values. Raises `UserError`."""
    key, equals, values = text.partition("=")
    key = SHORTHANDS.get(key.strip(), key.strip())
    parts = tuple(part.strip() for part in values.split(";" if ";" in values else ",") if part.strip())
    if not equals or not parts:
        raise UserError(f"--vary {text}: a setting and its values are expected, as balance=quantile,sign")
    if "." not in key:
        raise UserError(f"--vary {key}: settings are written group.name, or one of {', '.join(SHORTHANDS)}")
    if repeated := next((part for part in parts if parts.count(part) > 1), None):
        raise UserError(f"--vary {key}: {repeated!r} is given twice")
    return Vary(key, parts)


def _count(name: str, text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise UserError(f"--{name} {text}: a whole number from 1 is expected")
    return number
