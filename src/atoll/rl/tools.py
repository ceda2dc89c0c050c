"""An environment's public methods as tools: what a model is told of each, from its signature and its docstring.

The environment is a plain class, as TRL's `environment_factory` takes it: `reset(**row)` begins an episode, `get_reward()` ends it, every
other public method is a tool. A declaration has the form of OpenAI's API, which `atoll.data.chat.render` reads.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from atoll.config import UserError

OWN = ("reset", "get_reward")  # of the loop, not of the model
SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}
SECTION = re.compile(r"^(Args|Arguments|Returns?|Yields|Raises|Examples?|Notes?):\s*$")
ENTRY = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Name → method of every tool that an environment (a class or an object) has, in the order they were written."""
    kind = environment if isinstance(environment, type) else type(environment)
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__[:-1]):
        names |= dict.fromkeys(n for n, f in vars(base).items() if inspect.isfunction(f))
    return {n: getattr(environment, n) for n in names if not n.startswith("_") and n not in OWN}


def declarations(environment: Any) -> list[dict[str, Any]]:
    """The declarations of an environment's tools. Raises `UserError` for one that cannot be declared."""
    return [declaration(f) for f in tools_of(environment).values()]


def declaration(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "description", "parameters"}} of a function with types and a docstring.

    The docstring's first part is the description; its "Args:" says what each argument is. Raises `UserError` naming the function and the
    argument: without a type, without a description, of a type that JSON has not, or catching any number of values.
    """
    name = function.__name__
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.name != "self"]
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a name that the annotation means nothing by
        raise UserError(
            f"tool {name}: its types cannot be read ({error}); annotate with str, int, float, bool, list, dict, Literal"
        ) from None
    said, told = _docstring(inspect.getdoc(function) or "")
    if not said:
        raise UserError(f"tool {name}: has no docstring; say in its first line what it does")
    properties, required = {}, []
    for p in given:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise UserError(f"tool {name}: *{p.name} catches any number of values; name each argument")
        if p.name not in hints:
            raise UserError(f"tool {name}: {p.name} has no type; annotate it, as {p.name}: str")
        if p.name not in told:
            raise UserError(f"tool {name}: {p.name} is not described; add it under Args: in the docstring")
        properties[p.name] = {**schema_of(hints[p.name], f"tool {name}: {p.name}"), "description": told[p.name]}
        if p.default is p.empty:
            required.append(p.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}


def schema_of(hint: Any, where: str = "type") -> dict[str, Any]:
    """The JSON schema of a type. Raises `UserError`, which `where` begins, for one that JSON has not."""
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {**_union([schema_of(k, where) for k in dict.fromkeys(type(v) for v in inside)]), "enum": list(inside)}
    if origin in (typing.Union, types.UnionType):
        others = [t for t in inside if t is not type(None)]
        nullable = {"nullable": True} if len(others) < len(inside) else {}
        return {**_union([schema_of(t, where) for t in others]), **nullable}
    if origin in (list, Sequence):
        return {"type": "array", "items": schema_of(inside[0], where)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inside[1], where)}
    raise UserError(f"{where} has the type {hint!r}, which JSON has not; take str, int, float, bool, list, dict or Literal")


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    if all(list(s) == ["type"] for s in schemas):
        return {"type": sorted(s["type"] for s in schemas)}
    return {"anyOf": schemas}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and argument → what is said of it."""
    section, description = "", []
    told: dict[str, str] = {}
    last, depth = "", 0
    for line in text.splitlines():
        head = SECTION.match(line)
        if head:
            section, last = head[1], ""
        elif not section:
            description.append(line.strip())
        elif section.startswith("Arg") and line.strip():
            indent = len(line) - len(line.lstrip())
            entry = ENTRY.match(line.strip())
            if entry and (not last or indent <= depth):
                last, depth = entry[1].lstrip("*"), indent
                told[last] = entry[2]
            elif last:
                told[last] += " " + line.strip()
    return " ".join(part for part in description if part), {k: v.strip() for k, v in told.items() if v.strip()}
