"""What the documents say: links, files, keys, messages and pictures are real, and what they show runs."""

import ast
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import verl_mg.megatron  # noqa: F401  # else torch compiles functions of megatron-core in the ranks of all tests

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tests.helpers.json_lines import read_lines
from tests.helpers.launched import finished
from tests.helpers.machine import PEERS
from tests.helpers.tiny_jobs import run_recipe
from tools.docs import write_verl_tables as verl_tables
from tools.docs.draw_docs import DRAWN, PICTURES
from verl_mg.cli import _parser
from verl_mg.config import ConfigSection, MegatronConfig, load_config
from verl_mg.config.tree import Config
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.recipes.tasks import repeat_digit
from verl_mg.rewards import Sample, load_reward

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md")]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *TOP], key=str)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERL = PEERS / "verl" / "trainer" / "config"
ENOUGH = 15
"""Letters of a message that the source has to contain unchanged."""


def blocks(page: str, kind: str) -> list[tuple[str, str]]:
    """(info string without the kind, text) of the fenced blocks of a page."""
    found = [(head.strip(), text) for head, text in BLOCK.findall(TEXTS[page])]
    return [(head.removeprefix(kind).strip(), text) for head, text in found if head.split(" ")[0] == kind]


def shown(page: str, name: str) -> str:
    (text,) = [text for kind in ("python", "yaml") for head, text in blocks(page, kind) if head == name]
    return text


def anchors(page: Path) -> set[str]:
    lines = re.sub(BLOCK, "", page.read_text(encoding="utf-8")).splitlines()
    heads = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


# -- links and names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_with_links_names_existing_targets(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_page_with_paths_names_existing_files(name):
    for path in re.findall(r"\b(?:recipes|verl_mg|tools|launch|tests|docs)/[\w./-]*\w", TEXTS[name]):
        if not any(mark in path for mark in ("NAME", "bench_", ".partial")):
            assert (ROOT / path).exists(), f"{name} names {path}"


def test_index_of_docs_links_every_page():
    index = TEXTS["docs/README.md"]
    assert all(f"]({page.name})" in index for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


# -- configuration

SECTIONS = tuple(Config.model_fields)
FIELDS_OF_RECORDS = {"reward_model.ground_truth"}
"""Fields of verl's records, which look like keys."""
MODULES = ("megatron.core", "model.layers", "model.language_model")
"""Beginnings of names of modules, which look like keys; so do files."""
FILES = (".py", ".md", ".yaml", ".json", ".jsonl", ".parquet", ".png")
KEY = re.compile(rf"(?<![\w./:-])(?:{'|'.join(SECTIONS)})(?:\.[a-z][a-z0-9_]*)+")


MEGATRON_CORE = {
    "transformer": MLATransformerConfig,
    "optimizer": MegatronOptimizerConfig,
    "ddp": DistributedDataParallelConfig,
}


def algorithms() -> list[type[ConfigSection]]:
    return [load_recipe(file).config for file in sorted((ROOT / "recipes").glob("[!_]*.py"))]


def is_key(key: str, kinds: list[type[ConfigSection]]) -> bool:
    section, *names = key.split(".")
    found = kinds if section == "algorithm" else [Config.model_fields[section].annotation]
    return any(_has(kind, names) for kind in found)


def _has(kind: object, names: list[str]) -> bool:
    for name in names:
        fields = getattr(kind, "model_fields", {})
        if kind is MegatronConfig and len(names) == 2:
            return names[1] in MEGATRON_CORE[names[0]].__dataclass_fields__
        if kind == dict[str, Any]:  # an engine's arguments by their own names
            return True
        if name not in fields:
            return False
        kind = fields[name].annotation
    return True


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "docs/families.md"])  # which names modules
def test_page_with_configuration_keys_names_existing_keys(name):
    kinds = algorithms()
    text = re.sub(BLOCK, "", TEXTS[name])
    if name == "docs/coming_from_verl.md":
        text = "\n".join(line.split("|")[2] for line in text.splitlines() if line.count("|") > 3)
    for key in KEY.findall(text):
        of_job = key.startswith("job.") and _is_of_job(key.split(".")[1])
        if key.startswith(MODULES) or key in FIELDS_OF_RECORDS:
            continue
        if not of_job and not key.endswith(FILES):
            assert is_key(key, kinds), f"{name} names {key}"


def _is_of_job(name: str) -> bool:
    known = (*RunningJob.__annotations__, "iteration", "state", "prompts", "tokenizer")
    return hasattr(RunningJob, name) or name in known


def test_verl_tables_are_those_of_the_command():
    assert TEXTS["docs/coming_from_verl.md"] == verl_tables.document(), "python -m tools.docs.write_verl_tables"


@pytest.mark.skipif(not VERL.exists(), reason="verl is installed by tools/install/peers.sh")
def test_verl_table_with_options_names_existing_options():
    files = [VERL / f"_generated_{name}.yaml" for name in ("ppo_trainer", "ppo_megatron_trainer")]
    trees = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    rows = [line.split("|")[1] for line in TEXTS["docs/coming_from_verl.md"].splitlines() if line.count("|") > 3]
    named = [
        key for row in rows for key in re.findall(r"`((?:aorr|algorithm|data|critic|reward|trainer)\.[\w.]+)`", row)
    ]
    assert len(named) > 150
    # A job adds options of its reward, which no file has.
    for key in (key.rstrip(".") for key in named if "reward_kwargs" not in key):
        assert any(_is_in(tree, key.replace("aorr.", "actor_rollout_ref.").split(".")) for tree in trees), key


def _is_in(tree: Any, parts: list[str]) -> bool:
    return not parts or (isinstance(tree, dict) and parts[0] in tree and _is_in(tree[parts[0]], parts[1:]))


# -- commands and messages


def test_page_with_commands_is_accepted_by_the_parser():
    parser = _parser()
    for name, text in TEXTS.items():
        joined = re.sub(r" *\\\n *", " ", text)
        for line in re.findall(r"^ {4}(verl-mg (?!trace DIR)[^│\n]*)$", joined, re.MULTILINE):
            words = line.split("#")[0].split()[1:]
            _, rest = parser.parse_known_args(words)
            assert all("=" in word for word in rest), f"{name}: {line}"


def texts_in_source() -> list[list[str | None]]:
    """The parts of each text; None: what is filled in."""
    found = []
    for file in (ROOT / "verl_mg").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if len(texts) == 1 and isinstance(texts[0], str):  # rows of checks are templates: {c.rollout.mode}
                texts = [None if text.startswith("{") else text for text in re.split(r"(\{[\w.]+\})", texts[0])]
            if (
                all(text is None or isinstance(text, str) for text in texts)
                and len("".join(filter(None, texts))) >= ENOUGH
            ):
                found.append(texts)
    return found


def contains(line: str, texts: list[str | None]) -> bool:
    """Whether a line has a text, whatever is filled in."""
    # Hardly any text has all its parts in the line; a search with several open places takes milliseconds.
    if not all(text in line for text in texts if text is not None):
        return False
    return re.search("".join(".+" if text is None else re.escape(text) for text in texts), line) is not None


MESSAGES = [text.strip().splitlines() for _, text in blocks("docs/troubleshooting.md", "")]


def test_troubleshooting_messages_are_in_the_source(monkeypatch):
    monkeypatch.chdir(ROOT)
    known = texts_in_source()
    assert len(MESSAGES) > 20
    for *command, line in MESSAGES:
        message = line.removeprefix("error: ")
        if command:
            assert refusal(command[0]) == message
        else:
            assert any(contains(line, texts) for texts in known), line


def refusal(command: str) -> str:
    """What is said of the configuration of a `$ verl-mg train ...`."""
    recipe, _, config, *overrides = command.split(" ", 6)[3:]
    with pytest.raises(UserError) as reported:
        load_config(config, overrides, load_recipe(recipe).config)
    return str(reported.value)


def test_recipe_in_the_readme_equals_the_file():
    source = (ROOT / "recipes" / "grpo.py").read_text(encoding="utf-8")
    functions = {
        node.name: ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    (page,) = [text for _, text in blocks("README.md", "python")]
    assert page == f"{functions['policy_loss']}\n\n\n{functions['iteration']}\n"


# -- what is shown runs


@pytest.mark.parametrize("name", TEXTS)
def test_page_with_python_blocks_compiles(name):
    for head, text in blocks(name, "python"):
        try:
            compile(text, f"{name}: {head}", "exec")
        except SyntaxError:
            pytest.fail(f"{name}:\n{text}")


def test_page_with_assertions_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    ran = 0
    for name in ("docs/writing_a_recipe.md", "docs/resharding.md"):
        for _, text in blocks(name, "python"):
            if "assert" in text:
                exec(compile(text, name, "exec"), {})
                ran += 1
    assert ran == 2


def test_first_run_reward_scores_sums_in_the_configuration_shown(tmp_path):
    file = tmp_path / "digits.py"
    file.write_text(shown("docs/first_run.md", "digits.py"))
    text = re.sub(r" *\\\n *", " ", TEXTS["docs/first_run.md"])
    command = re.compile(r"train (\w+) --config (\w+) (reward\.function=.*)$", re.MULTILINE)
    ((recipe, config, overrides),) = command.findall(text)
    read = load_config(ROOT / "recipes" / "configs" / f"{config}.yaml", overrides.split(), load_recipe(recipe).config)
    assert read.reward.function == "digits.py:score"
    sample = Sample("88+77=", "175", "165", {}, "stop")
    assert load_reward(f"{file}:score")(sample).value == pytest.approx(2 / 3)


def test_first_run_recipe_improves_reward(ranks, tmp_path):
    for name in ("mine.py", "mine.yaml"):
        (tmp_path / name).write_text(shown("docs/first_run.md", name))
    code = [line for line in shown("docs/first_run.md", "mine.py").splitlines() if line]
    assert len(code) <= 30
    (snippet,) = [text for head, text in blocks("docs/observing_a_run.md", "python") if head == "run"]
    rewards = ranks.run(2, _first_run, tmp_path, snippet)[0]
    assert rewards[-1] > rewards[0] + 0.2


def _first_run(folder: Path, snippet: str) -> list[float]:
    with contextlib.chdir(folder):
        if dist.get_rank() == 0:
            repeat_digit.make(Path("runs/repeat_digit"))
        dist.barrier()
        run_recipe("mine.py", ["job.iterations=14", "job.console=false"], file="mine.yaml")
        dist.barrier()
        if dist.get_rank() == 0:
            exec(compile(snippet, "docs/observing_a_run.md", "exec"), {})
        lines = map(json.loads, Path("runs/mine/metrics.jsonl").read_text().splitlines())
        return [line["reward/mean"] for line in lines if "reward/mean" in line]


def test_data_of_other_frameworks_trains_with_the_commands_shown(ranks, tmp_path):
    for name in ("write_data.py", "my_reward.py", "my_rm.py"):
        (tmp_path / name).write_text(shown("docs/data.md", name))
    text = re.sub(r" *\\\n *", " ", TEXTS["docs/data.md"])
    commands = re.findall(r"^ {4}python -m verl_mg train (\S+) (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for recipe, overrides in commands:
        lines = ranks.run(1, _data_of_others, tmp_path, recipe, overrides.split())[0]
        assert [0 < line["reward/mean"] < 1 for line in lines] == [True, True], overrides


def _data_of_others(folder: Path, name: str, overrides: list[str]) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module in ("slime", "slime.utils", "slime.utils.types"):
            patch.delitem(sys.modules, module, raising=False)
        exec(compile(Path("write_data.py").read_text(), "write_data.py", "exec"), {})
        short = ["job.iterations=2", "job.console=false", "algorithm.prompts_per_iteration=8"]
        config = run_recipe(name, [*overrides, *short])
        return read_lines(config.job.output / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "overrides_of_agent"),
    [
        ("agent.py", []),
        pytest.param("debate.py", ["rollout.agent_names=[solver, critic]"], marks=pytest.mark.nightly),
    ],
)
def test_agent_of_the_page_trains_with_the_command_shown(ranks, tmp_path, name, overrides_of_agent):
    (tmp_path / "agent.py").write_text(shown("docs/agents.md", name))
    text = re.sub(r" *\\\n *", " ", TEXTS["docs/agents.md"])
    ((config, overrides),) = re.findall(r"train recipes/grpo.py --config (\S+) (.*)$", text, re.MULTILINE)
    repeat_digit.make(tmp_path / "runs" / "repeat_digit")
    lines = ranks.run(2, _with_agent, tmp_path, ROOT / config, [*overrides.split(), *overrides_of_agent])[0]
    assert [line["reward/length"] > 0 for line in lines] == [True, True]


def _with_agent(folder: Path, file: Path, overrides: list[str]) -> list[dict[str, float]]:
    with contextlib.chdir(folder):
        short = ["job.iterations=2", "job.console=false", "job.save=false", "algorithm.prompts_per_iteration=4"]
        score = f"reward.function={ROOT / 'recipes' / 'tasks' / 'repeat_digit.py'}:score"
        config = run_recipe("grpo", [*overrides, *short, score, "data.test=null"], file=file)
        return read_lines(config.job.output / "metrics.jsonl")


def test_first_run_script_from_python_trains(tmp_path):
    repeat_digit.make(tmp_path / "runs" / "repeat_digit")
    text = shown("docs/first_run.md", "my_job.py").replace("iterations=60", "iterations=2")
    (tmp_path / "my_job.py").write_text(text.replace("recipes/grpo.py", str(ROOT / "recipes" / "grpo.py")))
    finished(["my_job.py"], cwd=tmp_path, PYTHONPATH=str(ROOT)).completed()
    assert len((tmp_path / "runs" / "mine_from_python" / "metrics.jsonl").read_text().splitlines()) == 2


# -- pictures


@pytest.mark.parametrize("name", DRAWN)
def test_picture_of_docs_equals_its_drawing(name):
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == str(DRAWN[name]())
