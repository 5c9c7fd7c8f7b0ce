"""Rule `word`: words of no technical meaning here, in names, docstrings, comments, messages and documents."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BANNED_WORDS = (
    "tell|tells|telling|told",
    "judge|judges|judged|judging|judgement|judgment",
    "room|rooms",
    "floor|floors",
    "home|homes",
    r"stand|standing|stood|stands(?! for\b)",
    "speak|speaks|speaking|spoken|speaker|speakers",
    "hear|hears|heard|hearing",
    "farewell|farewells|anew|mend|mends|mended|whosever",
    "to the bit",
    "go on|goes on|going on|gone on|went on",
    "lack|lacks|lacked|lacking",
    "beside",
    "(?:is|are|was|were|be) none of|none of them",
    "nobody|somebody",
    "ask for|asks for|asked for|asking for|ask of|asked of",
    "deal|deals|dealing|dealt",
    "the way back",
    "lie|lies|lain|lying",
    r"what (?:it|they|he|this rank|a rank|each rank|the rank|others?) (?:holds?|has|have|had)",
    "alone|at once|of its own|of their own|of his own|those of|said of|has not it",
    "behind",
    r"(?<!its )(?<!their )(?<!your )(?<!our )(?<!his )(?<!my )(?<!'s )(?<!s' )(?<!whose )own",
)
WORDS = re.compile(rf"(?<![\w$])(?:{'|'.join(BANNED_WORDS)})(?!\w)", re.IGNORECASE)
NAME_WORDS = frozenset(
    """
    tell tells telling told judge judges judged judging room rooms floor floors home stand stands standing stood
    speak speaks speaker hear hears heard farewell anew mend mends mended lack lacks lacking beside whosever nobody
    somebody dealt deal deals lie lies lying own
    """.split()  # noqa: SIM905
)
WHOLE_NAMES = frozenset({"one", "found"})

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    # (a pattern around the word, why it is right there)
    (r"llm[- ]?(?:as[- ]a[- ])?judges?|llm_judge\w*", "LLM as a judge is the field's term"),
    (r"judge(?:'s)? (?:model|prompt|template|rubric|score|reply|engine|url)s?|judges? model", "parts of an LLM judge"),
    (r"reward\.judge\b[.\w]*", "the configuration section of an LLM judge"),
    (r"(?:math|torch|np|numpy|jnp)\.floor|floor\(|floor[_ -]div\w*|floor of the quotient", "rounding down"),
    (
        r"\$home|(?-i:\bHOME\b)|path\.home|home (?:directory|folder)|/home/|\"home\"|'home'",
        "the user's directory, the key",
    ),
    (
        r"behind (?:a|an|the|its|their|your) (?:\w+ )?(?:prox\w+|firewall|gateway|balancer|network|endpoint|url)",
        "places",
    ),
    (r"stand-?alone", "an adjective of its own meaning"),
    (r"rounding_mode", "an argument of torch.div"),
)
EXCEPTION = re.compile("|".join(pattern for pattern, _ in EXCEPTIONS), re.IGNORECASE)
# Inside a module about the LLM judge the word needs no "LLM" before it.
JUDGE_FILES = re.compile(r"llm_judge")


@dataclass(frozen=True)
class Violation:
    file: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def banned(text: str, file: Path) -> list[str]:
    """Banned words of a text, less those that an exception covers."""
    return [match.group() for match in _banned_matches(text, file)]


def _banned_matches(text: str, file: Path) -> list[re.Match[str]]:
    matches = [match for match in WORDS.finditer(text) if not _is_judge(match.group(), file)]
    covered = [match.span() for match in EXCEPTION.finditer(text)] if matches else []
    return [match for match in matches if not any(a <= match.start() and match.end() <= b for a, b in covered)]


def _is_judge(word: str, file: Path) -> bool:
    return word.lower().startswith("judge") and bool(JUDGE_FILES.search(file.name))


def banned_name(name: str, file: Path) -> bool:
    return _is_banned(name, bool(JUDGE_FILES.search(file.name)))


@functools.cache  # most names are in many places
def _is_banned(name: str, is_about_judges: bool) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]
    if "llm" in words or is_about_judges:
        words = [word for word in words if not word.startswith("judge")]
    if "floor" in words and "div" in " ".join(words):
        words.remove("floor")
    return name.strip("_") in WHOLE_NAMES or not NAME_WORDS.isdisjoint(words)


def check_words(file: Path, text: str, nodes: Sequence[ast.AST]) -> Iterator[Violation]:
    if banned_name(file.stem, file):
        yield Violation(file, 1, "word", f"the module's name {file.stem}")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for word in banned(token.string, file):
                yield Violation(file, token.start[0], "word", f'"{word}" in: {token.string[:120]}')
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _check_string(file, node)
        for name, line in _defined(node):
            if banned_name(name, file):
                yield Violation(file, line, "word", f"the name {name}")


def _check_string(file: Path, node: ast.Constant) -> Iterator[Violation]:
    # A phrase may run over the end of a line, whose indentation is not part of it.
    folded = re.sub(r"\n *", "\n", node.value)
    for match in _banned_matches(folded.replace("\n", " "), file):
        line = node.lineno + folded[: match.start()].count("\n")
        excerpt = folded[max(0, match.start() - 50) : match.end() + 50].replace("\n", " ").strip()
        yield Violation(file, line, "word", f'"{match.group()}" in: {excerpt}')


def _defined(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname, node.lineno
