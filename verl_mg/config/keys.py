"""Keys of the configuration: which exist, and which is nearest to an unknown one.

actor.lr                   unknown; the key of this name within the section:  actor.optimizer.lr
actor.layuot               unknown; a similar name in the section:            actor.layout
data.train.math.wieght     unknown; NAME stands for math:                     data.train.math.weight
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

NAME = "NAME"
"""Placeholder for names that the user chooses, such as the sources of `data.train`."""


def subsection(annotation: Any) -> tuple[str, type[BaseModel]] | None:
    """Returns the section that a field's type contains, after the part of the key before it; None without a section.

    ("", GuardConfig) for `GuardConfig`, ("NAME.", SourceConfig) for `Path | dict[str, SourceConfig]`.
    """
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return "", kind
        if get_origin(kind) is dict and (inner := subsection(get_args(kind)[1])):
            return f"{NAME}.{inner[0]}", inner[1]
    return None


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns all dotted keys of a section, subsections included, with NAME for names that the user chooses."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        # The key of a section is a key too: an override may give a whole mapping.
        if inner := subsection(field.annotation):
            keys += known_keys(inner[1], f"{prefix}{name}.{inner[0]}")
    return keys


def key_problem(tree: Mapping[str, Any], config: type[BaseModel]) -> str:
    """Returns what is wrong with the first unknown key, with the remedy; "" if all keys are known."""
    return next((f"{key}: unknown key. {_remedy(key, config)}" for key in _unknown(tree, config)), "")


def _unknown(tree: Any, section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields unknown keys. Values of a wrong type are left to validation."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        key = f"{prefix}{name}"
        if name not in section.model_fields:
            yield key
        elif inner := subsection(section.model_fields[name].annotation):
            by_name, kind = inner
            if not by_name:
                yield from _unknown(value, kind, f"{key}.")
            elif isinstance(value, Mapping):
                for chosen, part in value.items():
                    yield from _unknown(part, kind, f"{key}.{chosen}.")


def _remedy(key: str, config: type[BaseModel]) -> str:
    """Returns the nearest key, sought in the section first and then in the whole tree, or all keys of the section."""
    # In this order: the name below the section, a similar one in it, the name elsewhere, a similar key anywhere.
    known = known_keys(config)
    parent, _, name = key.rpartition(".")
    generic = _generic(parent, known)
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == generic}
    similar = [siblings[match] for match in difflib.get_close_matches(name, siblings, 1)]
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    within = [k for k in elsewhere if k.startswith(f"{parent}.")]
    others = [k for k in known if not key.startswith(f"{k}.")]
    if nearest := within or similar or elsewhere or difflib.get_close_matches(key, others, 1):
        return f"Did you mean {nearest[0].replace(generic, parent, 1) if generic else nearest[0]}?"
    return f"{parent or 'The top level'} has the keys {', '.join(siblings)}."


def _generic(parent: str, known: list[str]) -> str:
    """Returns a section's key with NAME for the names that the user chose, as in `data.train.NAME`."""
    parts = parent.split(".")
    for i in range(len(parts)):
        candidate = ".".join([*parts[:i], NAME, *parts[i + 1 :]])
        if any(k.startswith(f"{candidate}.") for k in known):
            return candidate
    return parent
