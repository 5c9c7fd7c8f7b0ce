"""Reading of the configuration from a file and overrides, with errors that name the key and the remedy.

A `UserError` is one line, so it names the first problem only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from verl_mg.config.keys import key_problem
from verl_mg.config.section import RecipeConfig
from verl_mg.config.tree import Config, tree_for
from verl_mg.errors import UserError


def load_config(path: str | Path | None, overrides: list[str], algorithm: type[RecipeConfig]) -> Config:
    """Reads a YAML file, applies overrides `a.b=c`, whose values are YAML too, and validates the result."""
    tree = read_tree(Path(path)) if path is not None else {}
    for override in overrides:
        apply_override(tree, override)
    return validate_config(tree, path or "overrides", algorithm)


def validate_config(tree: dict[str, Any], origin: str | Path, algorithm: type[RecipeConfig]) -> Config:
    """Returns the configuration of a tree of plain values; a `UserError` names `origin`, the key and the remedy."""
    config = tree_for(algorithm)
    # Keys first: a missing or invalid value is often a misspelled key.
    if problem := _not_plain(tree) or key_problem(tree, config):
        raise UserError(f"{origin}: {problem}")
    try:
        return config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from None


def dump_config(config: Config) -> str:
    """Returns the whole configuration as YAML, defaults included."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def read_tree(path: Path) -> dict[str, Any]:
    """Returns the contents of a YAML file, not yet validated; UserError where it is not a mapping."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Give the path of a YAML file.") from None
    except Exception as error:  # yaml passes on what numbers, dates and deep nesting raise
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise UserError(f"{path}{line}: not valid YAML ({reason}). Fix the syntax.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a mapping. Write sections such as `model:` and `data:`.")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets the value of an override `a.b=c` in a tree of plain values, in place."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"{override!r}: not an override. Write section.key=value, such as actor.layout=tp2.")
    try:
        value = _typed(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: {error}.") from None
    except Exception:  # of many kinds, as in `read_tree`
        raise UserError(f"override {override!r}: the value is not valid YAML. Quote it.") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:  # `actor:` without keys is null in YAML
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent!r} is a value, not a section. Write its other keys too.")
        node = child
    node[last] = value


_TILDE = re.compile(r"~[\w.-]*/")


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those that people write: 010 is not 8, 1:30 not 90, 1e5 a number, a date is a text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(None, None, f"the key {twice[0]} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes texts that a `_Loader` takes for numbers in quotes."""


_DIGITS = r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?"
_WORDS = ("true", "false", "yes", "no", "on", "off")
for _tag, _form, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "|".join(f"{word}|{word.title()}|{word.upper()}" for word in _WORDS), list("tTfFyYnNoO")),
    ("int", r"[-+]?(0|[1-9][\d_]*)|0x[\da-fA-F]+", list("-+0123456789")),
    ("float", rf"{_DIGITS}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})$"), _first)


def _typed(text: str) -> Any:
    """Returns the value of an override: lists, mappings and quoted texts as YAML, everything else as it was typed.

    ValueError where a part of it would be dropped, as after a number sign, or where it is no value.
    """
    if text.lstrip()[:1] in ("[", "{", "'", '"'):
        end = 0
        for token in yaml.scan(text):
            # Between tokens are only spaces, commas of the scanner's own, or a comment.
            if text[end : token.start_mark.index].strip():
                raise ValueError("YAML drops what follows # there. Quote the text that contains it")
            end = token.end_mark.index
        return yaml.load(text, _Loader)
    if text in ("", "~"):
        raise ValueError("not a value. Write null, \"''\" for an empty text, or a whole path")
    loader = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text.strip(), (True, False)), text.strip())
    return text if not text.strip() or node.tag.endswith(("str", "merge")) else loader.construct_object(node)


def _not_plain(value: Any, key: str = "", above: tuple[Any, ...] = ()) -> str:
    """Returns what is wrong with the first value that neither paths nor files can represent, or ""."""
    if isinstance(value, bytes):
        return f"{key}: binary value. Write text."
    if isinstance(value, str) and ("\0" in value or value != value.encode("utf-8", "ignore").decode()):
        return f"{key}: {value!r} contains NUL or half a character. Remove it."
    if isinstance(value, str) and _TILDE.match(value):
        return f"{key}: {value!r} is not expanded, and would be a folder of this name. Write the whole path."
    if any(value is outer for outer in above):  # YAML's aliases allow cycles, on which the recursion would not end
        return f"{key}: contains itself. Write out the value of the alias."
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple | set):
        inner = enumerate(value)
    for name, part in inner:
        part_key = f"{key}.{name}" if key else str(name)
        if problem := _not_plain(name, part_key) or _not_plain(part, part_key, (*above, value)):
            return problem
    return ""


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{key}: missing. Write it in the file or as {key}=VALUE."
    if problem["type"] in ("string_type", "path_type") and isinstance(problem["input"], int | float):
        return f"{key}: {problem['input']!r} is invalid. Write a text, in quotes where it looks like a number or yes."
    if problem["type"] == "model_type":
        return f"{key}: {problem['input']!r} is not a section. Write a mapping of keys."
    message = problem["msg"].removeprefix("Value error, ").removesuffix(".")
    if message.startswith("Input should"):
        return f"{key}: {problem['input']!r} is invalid. Write {_expected(message)}."
    return f"{key}: {problem['input']!r} is invalid: {message[0].lower()}{message[1:]}."


def _expected(message: str) -> str:
    """Returns what pydantic's message `Input should be ...` expects: `a value greater than 0`."""
    expected = message.removeprefix("Input should ").removeprefix("be ")
    if not expected.startswith("'"):  # it lists no values
        # What follows the comma is why the text could not be parsed.
        expected = expected.partition(",")[0]
    return f"a value {expected}" if expected.startswith(("greater", "less")) else expected
