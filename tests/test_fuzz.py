"""Mutated configurations, data files, checkpoints and models: each run ends well, or in one line with exit code 2."""

import datetime
import io
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import BaseModel

from tests.helpers.damages import damages
from tests.helpers.launched import PATIENCE_S, ROOT, started
from tests.helpers.tiny_jobs import RECIPES, rewrite_sums
from verl_mg.config import tree_for
from verl_mg.errors import EXIT_CODE
from verl_mg.job.recipe import load_recipe
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.stores.folders import SUMS

MEMORY = 32 * 2**30
"""Bytes of address space: the system refuses more before the machine suffers."""
REWARD = "def digits(sample):\n    return float(sum(c.isdigit() for c in sample.response))\n"

# -- one run


def tiny_job(recipe: str) -> dict[str, Any]:
    """A configuration that runs in a second; its paths are relative to the folder that it runs in."""
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 30},
        "actor": {"tokens_per_micro_batch": 128, "optimizer": {"lr": 1e-3}},
        "job": {"output": "run", "iterations": 1, "console": False},
    }
    if recipe in ("sft", "dpo"):
        return tree | {"algorithm": {{"sft": "examples", "dpo": "pairs"}[recipe] + "_per_iteration": 2}}
    return tree | {
        "data": {**tree["data"], "test": "test.jsonl"},
        "rollout": {"max_new_tokens": 4, "max_running_requests": 8},
        "reward": {"function": "reward.py:digits"},
        "evaluation": {"every": 1, "prompts": 2},
        "algorithm": {"prompts_per_iteration": 2, "group_size": 2},
    }


def records() -> list[dict[str, Any]]:
    sums = [(a, b) for a in range(3) for b in range(4)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "chosen": str(a + b), "rejected": "c"} for a, b in sums]


@dataclass
class Runs:
    """Runs jobs in a folder that is made anew for each, and counts how they end."""

    inputs: Path
    folder: Path
    ends: Counter[int | None] = field(default_factory=Counter)

    def begin(self, inputs: Path | None = None) -> Path:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(inputs or self.inputs, self.folder)
        return self.folder

    def check(self, recipe: str, job: dict[str, Any] | bytes, *overrides: str) -> str:
        (self.folder / "job.yaml").write_bytes(job if isinstance(job, bytes) else yaml.safe_dump(job).encode())
        arguments = ["train", str(RECIPES / f"{recipe}.py"), "--config", "job.yaml", *overrides]
        code, out, err = run_command(arguments, self.folder)
        self.ends[code] += 1
        assert not problem(code, out, err), f"{problem(code, out, err)}\n{err[-6000:]}"
        return err

    def some_of_both(self, share: float) -> bool:
        """Whether at least that share ended well, and was refused."""
        return min(self.ends[0], self.ends[EXIT_CODE]) >= int(share * self.ends.total())


def run_command(arguments: list[str], folder: Path) -> tuple[int | None, str, str]:
    """`verl-mg ARGUMENTS` in a folder: exit code, None if it did not end, and its outputs."""
    before = ["prlimit", f"--as={MEMORY}"]
    command = ["-m", "verl_mg", *arguments]
    with started(command, before, cwd=folder, PYTHONPATH=str(ROOT)) as program:
        try:
            return program.ended()
        except subprocess.TimeoutExpired:
            return None, "", ""


def problem(code: int | None, out: str, err: str) -> str:
    """What is wrong with this end, "" where nothing is: code 0, or code 2 and one line that says why."""
    if code is None:
        return f"did not end in {PATIENCE_S} s"
    if "Traceback" in err + out or code not in (0, EXIT_CODE):
        return f"ended with code {code} and a traceback"
    errors = re.findall("^error: .+$", err, re.MULTILINE)
    if code == 0:
        return f"ended with code 0, and reported {errors[0]!r}" if errors else ""
    last = err.removesuffix("\n").rpartition("\n")[2]
    return "" if errors == [last] else f"ended with code 2, and the last line is no error or not the only one: {last!r}"


# -- configurations

TEXTS = (
    "", " ", "a", "no such thing", "π", "\ud800", "a\x00b", "two\nlines", "x" * 300, "%s", "{0}", "[", "{}", "*", "~",
    ".", "..", "model", "train.jsonl", "reward.py:digits", "reward.py:none", "json:loads", "/dev/null/x",
    "run/x.jsonl", "tp1", "tp2", "pp2-dp4", "cp2", "ep8", "tp999999999999", "tp0", "0", "0-3", "5-2", "1e-3", "nan",
    "cuda", "None", "http://127.0.0.1:9", "http://", "k3", "token-mean", "eval/reward", "float64",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, math.inf, math.nan, 2**31, 2**63, -(2**63), 10**30)
TEXT = st.sampled_from(TEXTS) | st.text(st.characters(exclude_characters="/"), max_size=8)
JUNK = st.recursive(
    st.sampled_from((None, True, False, *NUMBERS)) | TEXT | st.sampled_from((datetime.date(2026, 8, 1), b"\xff\x00")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)

SMALL: dict[str, int] = {
    "job.iterations": 2,
    "algorithm.prompts_per_iteration": 3,
    "algorithm.examples_per_iteration": 9,
    "algorithm.group_size": 3,
    "rollout.extra_prompts": 3,
    "algorithm.num_epochs": 3,
    "evaluation.samples": 3,
    "evaluation.prompts": 9,
    ".lora.rank": 9,
}
"""Ends of names of counts that are right however large, and only take so long, or so much memory: none is larger."""
APART: dict[str, tuple[Any, ...]] = {
    "rollout.engine": ("hf",),  # sglang: starts a server, in minutes
    "profile.iterations": ([], [1], [2], [1, 2]),
    "tracking.services": ([], ["nothing"]),  # services: on the network
}
"""Settings of which only these values are taken as plausible."""


def fields_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and types of all settings, sections and those of optional sections among them."""
    for name, reported in kind.model_fields.items():
        yield prefix + name, reported.annotation
        for one in (reported.annotation, *get_args(reported.annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from fields_of(one, f"{prefix}{name}.")


@cache
def settings_of(recipe: str) -> dict[str, Any]:
    return dict(fields_of(tree_for(load_recipe(RECIPES / f"{recipe}.py").config)))


def most(name: str) -> int | None:
    """The largest number that the setting may be given here; None where any will do."""
    return next((limit for end, limit in SMALL.items() if name.endswith(end)), None)


def plausible(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Values of the right type, if not always in its bounds."""
    if name in APART:
        return st.sampled_from(APART[name])
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from([1, 2, 3]) | st.integers(0, most(name) or 100)
    if kind is float:
        return st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 10.0])
    if kind in (str, Path):
        return TEXT
    if kind is type(None):
        return st.none()
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = {key: plausible(f"{name}.{key}", reported.annotation) for key, reported in kind.model_fields.items()}
        return st.fixed_dictionaries({}, optional=inner)
    if get_origin(kind) is list:
        return st.lists(plausible(name, get_args(kind)[0]), max_size=2)
    if get_origin(kind) is dict:
        return st.dictionaries(TEXT, plausible(name, get_args(kind)[1]), max_size=2)
    if get_origin(kind) is tuple:
        return st.tuples(*(plausible(name, one) for one in get_args(kind)))
    return st.one_of([plausible(name, one) for one in get_args(kind)] or [JUNK])


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, bytes]:
    """A recipe, and the text of a configuration with one to three mistakes or other settings."""
    recipe = draw(st.sampled_from(("grpo", "grpo", "ppo", "sft")))
    tree = tiny_job(recipe)
    for _ in range(draw(st.integers(1, 3))):
        change(draw, tree, settings_of(recipe))
    make_affordable(tree, recipe)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw(st.booleans())).encode("utf-8", "surrogatepass")
    mutations = (mutated_bytes(text, YAML_PIECES), with_a_line(text, YAML_LINES))
    return recipe, draw(st.one_of(*[st.just(text)] * 8, *mutations))


def change(draw: st.DrawFn, tree: dict[str, Any], known: dict[str, Any]) -> None:
    """Most often another value of the right type; else junk, a setting that does not exist, or one deleted."""
    sections: dict[str, list[str]] = {}  # each as often as any other, however many settings it has
    for name in sorted(known):
        sections.setdefault(name.partition(".")[0], []).append(name)
    name = draw(st.sampled_from(list(sections.values())).flatmap(st.sampled_from))
    kind = draw(st.sampled_from((*["plausible"] * 6, "junk", "unknown", "delete")))
    if kind == "delete":
        section = draw(st.sampled_from(sorted(tree))) if tree else ""
        inner = tree.get(section)
        key = draw(st.sampled_from((None, *inner))) if isinstance(inner, dict) else None
        (tree if key is None else inner).pop(section if key is None else key, None)
        return
    if kind == "unknown":
        name = draw(st.sampled_from((name + "s", name[:-1], name.upper())) | TEXT)
    put(tree, name, draw(plausible(name, known[name]) if kind == "plausible" else JUNK))


YAML_PIECES = (
    b"[", b"{", b"}", b": ", b"\n", b"\t", b"\r", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"&a ", b"*a",
    b"!", b"<<: *a", b"'", b'"', b"? ", b"#", b"---\n", b"...\n", b"%YAML 9.9\n", b"!!python/object:os.system ",
    b"!!binary ", b"!!int ", b"!!float ", b"!!bool ", b"!!timestamp ", b"!!set ",
)  # fmt: skip
YAML_LINES = (
    b"x: &a [*a]", b"x: &a {<<: *a}", b"x: &a {y: *a}", b"x: *a", b"x: " + b"[" * 3000 + b"]" * 3000,
    b"x: " + b"9" * 5000, b"x: 2026-99-99", b"x: !!int a", b"x: !!bool a", b"x: !!timestamp a", b"x: !!binary /w==",
    b"=: =", b"? [a]\n: b", b"1: 2", b"job: {iterations: 1}", b"x: !!python/name:os.system",
    b"x: 0001-01-01 00:00:00 +23:59", b"\xff", b"x: '\xed\xa0\x80'",
)  # fmt: skip


@st.composite
def mutated_bytes(draw: st.DrawFn, text: bytes, pieces: tuple[bytes, ...]) -> bytes:
    """One to three pieces put in, cut out or turned over."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 20)))
        kind = draw(st.sampled_from(("put", "replace", "cut", "end")))
        if kind == "end":
            text = text[:start]
        else:
            piece = b"" if kind == "cut" else draw(st.sampled_from(pieces))
            text = text[:start] + piece + text[start if kind == "put" else stop :]
    return text


@st.composite
def with_a_line(draw: st.DrawFn, text: bytes, lines: tuple[bytes, ...]) -> bytes:
    line = draw(st.sampled_from(lines)) + b"\n"
    return line + text if draw(st.booleans()) else text + line


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a.b=c; a value where a section is needed is replaced."""
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[last] = value


def make_affordable(tree: dict[str, Any], recipe: str) -> None:
    """Counts that only take long are small, and none is left to a large default."""
    for name in settings_of(recipe):
        limit, last = most(name), name.rpartition(".")[2]
        section, usual = (section_of(each, name) for each in (tree, tiny_job(recipe)))
        if limit is None or section is None:
            continue
        if last not in section and last in (usual or {}):
            put(tree, name, usual[last])
        elif is_more(section.get(last), limit):
            put(tree, name, limit)


def section_of(tree: dict[str, Any], name: str) -> Any:
    """The section of the setting; {} where its section is left to its defaults, None where that is none."""
    section: Any = tree
    for key in name.split(".")[:-1]:
        section = section.get(key, {}) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def is_more(value: Any, limit: int) -> bool:
    try:
        return float(value) > limit
    except (TypeError, ValueError, OverflowError):
        return False


# -- data

FIELDS = ("prompt", "answer", "chosen", "rejected", "another")
LONG = "1+" * 40


def messages(content: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    role = st.sampled_from(("user", "user", "assistant", "system", "nobody", None, 1))
    return st.lists(st.fixed_dictionaries({"role": role, "content": st.just("1+1=") | content}), max_size=3)


ODD = ("", " ", "1+1=", LONG, "\ud800", "a\x00b", "two\nlines", "π", "\ufeff", "<eos>")
VALUES = st.recursive(
    st.sampled_from((None, True, *NUMBERS, *ODD)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2) | messages(inner),
    max_leaves=6,
)
JSON_PIECES = (
    b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xed\xa0\x80", b"\r", b"\x0c", b"\xe2\x80\xa8", b"\n", b"\n\n", b"{}",
    b"null", b"[]", b"1", b"NaN", b"1e999", b"-", b'"', b",", b"\\", b"\\ud800", b"//",
)  # fmt: skip
JSON_LINES = (
    b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", b'{"a":' * 50000, b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800", "answer": "1"}', b'{"prompt": "1", "answer": "\\ud800"}', b'{"prompt": "\\u0000"}', b"[]",
    b"\xff", b'{"prompt": "1", "answer": NaN}', b'{"prompt": "1", "prompt": 2}',
    b'\xef\xbb\xbf{"prompt": "1", "answer": "1"}', b"1",
)  # fmt: skip
COLUMNS = (
    [b"\xff", b""], [datetime.date(2026, 8, 1), None], [datetime.datetime(2026, 8, 1), datetime.datetime(1, 1, 1)],
    [datetime.timedelta(1), None], [{"role": "user"}, {"content": "1"}], [["1", None], []], [2**63, 0], [None, None],
    [float("nan"), 1.5], [True, False],
)  # fmt: skip


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, list[str], str, bytes]:
    """A recipe, settings, and the name and the bytes of its training file."""
    recipe = draw(st.sampled_from(("sft", "grpo", "dpo")))
    any_field = st.sampled_from(FIELDS)
    options = {
        "data.chat_template": st.booleans(),
        "data.overlong_prompts": st.sampled_from(("error", "drop")),
        "data.prompt_field": st.just("prompt") | any_field,
        "data.answer_field": st.just("answer") | any_field,
    }
    chosen = draw(st.fixed_dictionaries({}, optional=options))
    kind = draw(st.sampled_from((*["jsonl"] * 4, "json", "csv", "parquet", "arrow")))
    if kind in ("parquet", "arrow"):
        content = in_columns(kind, draw(any_field), draw(st.none() | st.sampled_from(COLUMNS)))
    else:
        rows: list[Any] = records()
        for at in draw(st.sets(st.integers(0, len(rows) - 1), max_size=2)):
            rows[at] = draw(VALUES | st.dictionaries(any_field, VALUES).map(rows[at].__or__))
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind in ("jsonl", "json") and draw(st.integers(0, 5)) == 0:
        content = draw(with_a_line(content, JSON_LINES))
    elif draw(st.integers(0, 2)) == 0:
        content = draw(mutated_bytes(content, JSON_PIECES))
    return recipe, [f"{name}={json.dumps(value)}" for name, value in chosen.items()], f"train.{kind}", content


def in_columns(kind: str, field: str, values: list[Any] | None) -> bytes:
    """The records as a Parquet file or an Arrow stream, one column with other values where some are given."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in records()] for name in records()[0]}
    if values is not None:
        columns |= {field: (values * len(records()))[: len(records())]}
    table, file = pyarrow.table(columns), io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return file.getvalue()


# -- checkpoints and models

CHECKPOINT = (SUMS, "job.json", "index.gz", "rank-00000.safetensors")
MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MODEST = st.sampled_from((None, True, -1, 0, 1, 2, 3, 7, 0.5, math.nan, "", "a", "F64", [], {}, [1], [0, 4], {"a": 1}))
LARGE = st.sampled_from((2**31, 2**63, -(2**63), 10**30, 1e300, math.inf, "9" * 400, "\ud800"))

# -- tests


@pytest.fixture
def runs(tmp_path) -> Runs:
    """The files of the tiny job, of which each example works on a copy."""
    folder = tmp_path / "inputs"
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16, "max_positions": 64}
    make_tiny_model(folder / "model", "qwen3", characters="0123456789+-*=() abc\n", init_std=0.2, **sizes)
    lines = [json.dumps(record) + "\n" for record in records()]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:3]))
    (folder / "reward.py").write_text(REWARD)
    return Runs(folder, tmp_path / "above" / "job")


@pytest.fixture
def checkpointed(runs, tmp_path) -> dict[str, Path]:
    """The folder of a job with two checkpoints, by recipe; GRPO's has samples that wait for the rest of their group."""
    made = {}
    for recipe in ("sft", "grpo"):
        runs.begin()
        runs.check(recipe, checkpointing_job(recipe), "job.iterations=2")
        made[recipe] = runs.folder.rename(tmp_path / recipe)
    assert runs.ends == {0: 2}
    runs.ends.clear()
    return made


def checkpointing_job(recipe: str) -> dict[str, Any]:
    tree = tiny_job(recipe) | {"checkpoint": {"every": 1}}
    if recipe == "grpo":
        tree["rollout"] |= {"partial_rollout": True, "extra_prompts": 2, "max_running_requests": 3}
    return tree


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """`examples`: few of them in each run of the suite, many nightly."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.nightly)])


def for_each(examples: int, *strategies: st.SearchStrategy[Any]) -> Any:
    """Runs the decorated function at once, on that many examples; each is a process."""

    def decorator(one: Any) -> None:
        settings(max_examples=examples, suppress_health_check=list(HealthCheck))(given(*strategies)(one))()

    return decorator


@few_or_many(5, 250)
def test_fuzz_of_configurations_ends_well_or_in_one_line(runs, examples):
    @for_each(examples, configurations())
    def _(made):
        runs.begin()
        runs.check(*made)

    assert runs.some_of_both(0.15), runs.ends


@few_or_many(5, 125)
def test_fuzz_of_data_files_ends_well_or_in_one_line(runs, examples):
    @for_each(examples, data_files())
    def _(made):
        recipe, overrides, name, content = made
        (runs.begin() / name).write_bytes(content)
        runs.check(recipe, tiny_job(recipe), f"data.train={name}", *overrides)

    assert runs.some_of_both(0.05), runs.ends


@few_or_many(3, 95)
def test_fuzz_of_checkpoints_ends_well_or_in_one_line(runs, checkpointed, examples):
    resumed_earlier = []

    @for_each(examples, st.sampled_from(sorted(checkpointed)), damages(CHECKPOINT, MODEST | LARGE), st.integers(0, 3))
    def _(recipe, done, sums):
        last = runs.begin(checkpointed[recipe]) / "run" / "checkpoints" / "000002"
        for damage in done:
            damage.do(last)
        if sums and not any(damage.file == SUMS for damage in done):
            rewrite_sums(last)
        err = runs.check(recipe, checkpointing_job(recipe), "job.iterations=3")
        resumed_earlier.append("resumes after iteration 1" in err)

    assert runs.some_of_both(0.05), runs.ends
    assert sum(resumed_earlier) >= examples // 20


@few_or_many(3, 30)
def test_fuzz_of_models_ends_well_or_in_one_line(runs, examples):
    @for_each(examples, st.sampled_from(("sft", "grpo")), damages(MODEL, MODEST))  # a billion layers take for ever
    def _(recipe, done):
        folder = runs.begin()
        for damage in done:
            damage.do(folder / "model")
        runs.check(recipe, tiny_job(recipe))

    assert runs.some_of_both(0.05), runs.ends
