"""Where a run's weights begin: random, or those of a run or hub folder, whose shapes and tokenizer then come with them.

`settings` is what `atoll train FOLDER` starts from. Fine-tuning moves a model a little way: a tenth of the peak rates it was trained
with (the same again where it was fine-tuned before), three times round the conversations, and the routers' balancing biases kept as
they are. Quantile balancing would set them anew from each small batch of few topics, and spread over all experts what belongs to some;
`balance.kind = "quantile"` has it anyway.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from atoll.config import BalanceConfig, Config, DataConfig, UserError, load_config

RATE = 0.1  # of the peak learning rates the weights were trained with
WARMUP = 0.03
EPOCHS = 3.0
QUESTION = "Hello! Who are you?"  # what the samples of a chat run answer


def settings(name: str, chat: bool) -> Config:
    """Settings for a run that starts from the weights in `name`: a run's folder, or one in the hub's layout. Raises `UserError`."""
    from atoll.hub.load import read_config

    folder = weights_folder(name).resolve()
    run = folder.parent / "config.toml"
    base = load_config(run) if folder.name == "model" and run.is_file() else Config()
    o, rate = base.optim, RATE if base.train.init is None else 1.0
    optim = dataclasses.replace(o, lr=o.lr * rate, adam_lr=o.adam_lr * rate, router_lr=o.router_lr * rate, warmup=WARMUP)
    train = dataclasses.replace(base.train, init=str(folder), steps=None, epochs=None, minutes=5.0)
    data, balance = base.data, base.balance
    if chat:  # kind and source are the user's to name; until they are, these are valid as they stand
        data = DataConfig(cache=data.cache, seed=data.seed)
        balance = BalanceConfig(kind="none")
        train = dataclasses.replace(train, epochs=EPOCHS, minutes=None, sample_prompt=QUESTION)
    data = dataclasses.replace(data, tokenizer=str(folder / "tokenizer.json"))
    stages = (dataclasses.replace(base.stages[-1], share=1.0),)
    return dataclasses.replace(base, model=read_config(folder), optim=optim, train=train, data=data, balance=balance, stages=stages)


def adopt(config: Config) -> Config:
    """`config` with the shapes and the tokenizer of the weights that `train.init` names. Raises `UserError`."""
    if config.train.init is None:
        return config
    from atoll.hub.load import load_tokenizer, read_config

    folder = weights_folder(config.train.init).resolve()
    path = folder / "tokenizer.json"
    own = load_tokenizer(folder)
    given = config.data.tokenizer
    if given != "train" and Path(given).expanduser().resolve() != path:
        from atoll.data.tokenizer import load_tokenizer as read

        if read(given).fingerprint != own.fingerprint:
            raise UserError(f"data.tokenizer = {given!r}: not the tokenizer of train.init = {config.train.init!r}; leave it out")
    data = dataclasses.replace(config.data, tokenizer=str(path))
    train = dataclasses.replace(config.train, init=str(folder))
    return dataclasses.replace(config, model=read_config(folder), data=data, train=train)


def fill(model: Any, name: str) -> None:
    """Put the weights of a run or hub folder into `model`, converted to its types. Raises `UserError` when they do not fit."""
    from atoll.hub.load import load_into

    load_into(model, weights_folder(name))


def weights_folder(name: str) -> Path:
    """The folder in the hub's layout that `name` is or holds as `model/`. Raises `UserError`."""
    folder = Path(name).expanduser()
    for place in (folder, folder / "model"):
        if (place / "config.json").is_file():
            return place
    if (folder / "config.toml").is_file():
        raise UserError(f"train.init = {name!r}: a run without model/; finish it with atoll train --resume {name}")
    raise UserError(f"train.init = {name!r}: no config.json there; give a run's folder, or one in the hub's layout")
