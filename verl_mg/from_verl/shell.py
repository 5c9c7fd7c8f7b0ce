"""The arguments of verl's trainer in a script of bash, without running it: assignments, arrays, defaults, arithmetic.

    n=$((4 * 2))                        {"n": ["8"]}
    ROLLOUT=(rollout.n=$n "a=$HOME/b")  {"ROLLOUT": ["rollout.n=8", "a=/root/b"]}
    python3 -m verl.trainer.main_ppo "${ROLLOUT[@]}" "$@"

What an `if`, a `case` or a loop assigns depends on the run: an argument that contains it is an error.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from verl_mg.errors import UserError

TRAINERS = re.compile(r"(verl\.trainer\.|recipe\.dapo\.(src\.)?)main_(ppo|dapo)(_sync)?")
OPENS, CLOSES = {"if", "case", "for", "while"}, {"fi", "esac", "done"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
REDIRECTION = re.compile(r"(?:\d*|&)[<>]+(.*)")
ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::\d+)?\})")
"""The arguments of the script itself, in place of which there are overrides."""
UNKNOWN = "\0"
"""Part of a word in place of text that depends on the run."""
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


def trainer_arguments(path: Path, overrides: list[str]) -> list[str]:
    """Returns the arguments of verl's trainer, then the overrides; UserError without a trainer."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Give a script, or a YAML file.") from None
    script = _Script()
    for statement in _statements(text):
        words = script.run(statement)
        place = next((i for i, word in enumerate(words) if TRAINERS.fullmatch(word)), None)
        if place is not None:
            replaced = {word.lstrip("+").split("=")[0] for word in overrides}
            arguments = [
                word for word in _arguments(words[place + 1 :]) if word.lstrip("+").split("=")[0] not in replaced
            ]
            undecided = [word.lstrip("+").split("=")[0] for word in arguments if UNKNOWN in word]
            if undecided:
                missing = " ".join(f"{key.replace(UNKNOWN, '...')}=VALUE" for key in undecided)
                raise UserError(f"{path}: {undecided[0]}: depends on the run of the script. Add {missing}.")
            return arguments + overrides
    raise UserError(f"{path}: no command `python -m verl.trainer.main_ppo KEY=VALUE ...`. Give the script that has it.")


def _arguments(words: list[str]) -> Iterator[str]:
    """The words of a command without its redirections, such as `2>&1` or `> log`."""
    following = iter(words)
    for word in following:
        if redirection := REDIRECTION.fullmatch(word):
            if not redirection[1]:
                next(following, None)
        else:
            yield word


def _statements(text: str) -> list[str]:
    """The commands of a script, each with its continued lines and what its quotes and brackets span."""
    statements, start, quote, depth, i = [], 0, "", 0, 0
    text = text.replace("\\\n", " ")
    while i < len(text):
        letter = text[i]
        if quote:
            if letter == "\\" and quote == '"':
                i += 1
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter == "\\":
            i += 1
        elif letter == "#" and (i == 0 or text[i - 1] in " \t\n;("):
            end = text.find("\n", i)
            end = len(text) if end < 0 else end
            text = text[:i] + text[end:]
            continue
        elif letter in "({":
            depth += 1
        elif letter in ")}":
            depth = max(depth - 1, 0)
        elif letter == "&" and ">" in (text[i - 1 : i], text[i + 1 : i + 2]):  # of a redirection
            pass
        elif (letter in "\n;&|" and not depth) or (letter == "\n" and text[start:i].count("(") == 0):
            statements.append(text[start:i])
            start, depth = i + 1, 0
        i += 1
    return [*statements, text[start:]]


class _Script:
    def __init__(self) -> None:
        self._variables: dict[str, list[str]] = {"HOME": [os.environ.get("HOME", "~")], "PWD": [os.getcwd()]}
        self._blocks = 0

    def run(self, statement: str) -> list[str]:
        """Assigns, or returns the words of a command."""
        raw = statement.strip()
        while (first := re.split(r"\s", raw, maxsplit=1)[0]) in OPENS | CLOSES | {"then", "else", "elif", "do", "in"}:
            self._blocks += (first in OPENS) - (first in CLOSES)
            raw = raw[len(first) :].strip()
            if first in ("case", "for"):
                raw = re.split(r"\sin\s|$", raw, maxsplit=1)[-1].strip()
        if self._blocks and (pattern := re.match(r"[^\s()=]+\)\s*", raw)):  # of a case
            raw = raw[pattern.end() :]
        raw = re.sub(r"^(export|declare|local|readonly)\s+(-\w+\s+)*", "", raw)
        listed = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=\((.*)\)", raw, re.DOTALL)
        if listed:
            self._assign(listed[1], self._words(listed[3]), self._variables.get(listed[1], []) if listed[2] else [])
            return []
        # Values are not split into words, unlike the arguments of a command.
        assignments = [ASSIGNMENT.fullmatch(word) for word in self._words(raw, splits=False)]
        if not all(assignments):
            return self._words(raw)
        for assigned in filter(None, assignments):
            first, *others = (self._variables.get(assigned[1]) or [""]) if assigned[2] else [""]
            self._assign(assigned[1], [first + assigned[3], *others])
        return []

    def _assign(self, name: str, words: list[str], before: list[str] | None = None) -> None:
        self._variables[name] = [UNKNOWN] if self._blocks else [*(before or []), *words]

    def _words(self, raw: str, splits: bool = True) -> list[str]:
        """The words of a text; where it splits, variables without quotes may be several words, or none."""
        words: list[str] = []
        word: str | None = None
        i = 0
        while i < len(raw):
            letter = raw[i]
            if letter.isspace():
                if word is not None:
                    words.append(word)
                word = None
                i += 1
            elif letter == "'":
                end = raw.find("'", i + 1)
                end = len(raw) if end < 0 else end
                word, i = (word or "") + raw[i + 1 : end], end + 1
            elif letter == '"':
                end = i + 1
                while end < len(raw) and raw[end] != '"':
                    end += 2 if raw[end] == "\\" else 1
                inner, i = raw[i + 1 : end], end + 1
                if whole := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner):
                    words += self._variables.get(whole[1], [])
                elif not ARGUMENTS.fullmatch(inner):
                    word = (word or "") + self._expanded(inner)
            elif letter == "\\" and i + 1 < len(raw):
                word, i = (word or "") + raw[i + 1], i + 2
            else:
                end = i
                while end < len(raw) and not raw[end].isspace() and raw[end] not in "'\"\\":
                    end = _closing(raw, end) if raw.startswith(("${", "$("), end) else end + 1
                part, i = raw[i:end], end
                if ARGUMENTS.fullmatch(part):
                    continue
                whole = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", part)
                value = " ".join(self._variables.get(whole[1], [])) if whole else self._expanded(part)
                first, *others = re.split(r"\s+", value) if splits else [value]
                word = (word or "") + first if first else word
                for further in others:
                    words += [] if word is None else [word]
                    word = further or None
        return words if word is None else [*words, word]

    def _expanded(self, text: str) -> str:
        out, i = "", 0
        while i < len(text):
            if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in '$"\\`':
                out, i = out + text[i + 1], i + 2
            elif text.startswith("$((", i):
                end = _closing(text, i)
                out, i = out + self._number(text[i + 3 : end - 2]), end
            elif text.startswith("${", i):
                end = _closing(text, i)
                out, i = out + self._value(text[i + 2 : end - 1]), end
            elif text.startswith("$(", i) or text[i] == "`":
                end = _closing(text, i) if text[i] == "$" else text.find("`", i + 1) + 1 or len(text)
                out, i = out + UNKNOWN, end
            elif name := re.match(r"\$([A-Za-z_]\w*|[0-9#?!$@*-])", text[i:]):
                out, i = out + self._value(name[1]), i + len(name[0])
            else:
                out, i = out + text[i], i + 1
        return out

    def _value(self, inside: str) -> str:
        """The value of `name`, or of `name:-default`."""
        parts = re.fullmatch(r"(\w+)(?::?-(.*))?", inside, re.DOTALL)
        if parts is None:
            return UNKNOWN
        value = next(iter(self._variables.get(parts[1], [])), "")  # of an array, its first word
        if value or parts[2] is None:
            return value if parts[1] in self._variables else UNKNOWN
        return " ".join(self._words(parts[2]))

    def _number(self, text: str) -> str:
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: self._value(name[1]), text)
        try:
            return str(_computed(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return UNKNOWN


def _closing(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start` + 1."""
    depth = 0
    for i in range(start + 1, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if not depth:
            return i + 1
    return len(text)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(ast.dump(node))
