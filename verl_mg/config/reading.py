"""From a file and overrides to the tree, with errors that say what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from verl_mg.config.section import ConfigSection
from verl_mg.config.tree import Config, tree_for
from verl_mg.errors import UserError


def load_config(path: str | Path | None, overrides: list[str], algorithm: type[ConfigSection]) -> Config:
    """Read a YAML file, apply `a.b=c` overrides (their values are YAML too), check everything.

    Raises UserError with one line that names the file or the override, the key, and the remedy.
    """
    tree = _read_yaml(Path(path)) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    return validate_config(tree, path or "overrides", algorithm)


def validate_config(tree: dict[str, Any], origin: str | Path, algorithm: type[ConfigSection]) -> Config:
    """The configuration of a tree of plain values; UserError that names `origin`, the key, and the remedy."""
    if problem := _not_plain(tree):
        raise UserError(f"{origin}: {problem}")
    kind = tree_for(algorithm)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error, kind)}") from None


def dump_config(config: Config) -> str:
    """The whole tree as YAML, defaults included: what the run was really started with."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except Exception as error:  # yaml lets through what numbers, dates and deep nesting raise
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the configuration must be a mapping of sections such as `model:` and `data:`")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r}: write section.key=value, such as actor.layout=tp2")
    try:
        value = yaml.safe_load(text)
    except Exception:  # as above
        raise UserError(f"override {override!r}: the value is not valid YAML; quote it") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent!r} is a value, not a section")
        node = child
    node[last] = value


def _not_plain(value: Any, key: str = "", above: tuple[Any, ...] = ()) -> str:
    """The first value that neither paths nor files can hold, and why; "" where there is none."""
    if isinstance(value, bytes):
        return f"{key!r} is binary; write text"
    if isinstance(value, str) and ("\0" in value or value != value.encode("utf-8", "ignore").decode()):
        return f"{key!r} is {value!r}: NUL and halves of characters are no text; leave them out"
    if any(value is one for one in above):
        return f"{key!r} holds itself; write out what the alias stands for"
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple | set):
        inner = enumerate(value)
    for name, one in inner:
        place = f"{key}.{name}" if key else str(name)
        if problem := _not_plain(name, place) or _not_plain(one, place, (*above, value)):
            return problem
    return ""


def _first_problem(error: ValidationError, kind: type[ConfigSection]) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_nearest(problem['loc'], kind)}"
    if problem["type"] == "missing":
        return f"{where!r} is missing; write it in the file or as {where}=VALUE"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where!r} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(location: tuple[int | str, ...], kind: type[ConfigSection]) -> str:
    """`; did you mean ...?` for an unknown key, looked for in its section first, then in the whole tree."""
    known = _known_keys(kind)
    whole = ".".join(map(str, location))
    parent, _, name = whole.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    beside = [siblings[close] for close in difflib.get_close_matches(name, siblings, 1)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    within = [key for key in elsewhere if key.startswith(f"{parent}.")]
    if best := within or beside or elsewhere or difflib.get_close_matches(whole, known, 1):
        return f"; did you mean {best[0]!r}?"
    return f"; {parent or 'the top level'} has {', '.join(siblings)}"


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys
