"""`verl-mg models`: what works with a model, or with a tiny one of each family: sizes, engines, adapters, images.

There is no list of what is supported, which could become wrong: a size is possible where the check that a job runs
raises no error, and the message of the error is the reason. Checks by weight tables take no time; checks by
libraries take the seconds of their imports: they are for families without a table, and for `--full`.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.peft import adapted_tensors, module_name
from verl_mg.config import Config
from verl_mg.config.checks import refuse
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.errors import UserError
from verl_mg.hub import HubName
from verl_mg.job.engine_checks import MODEL_REFUSALS, ModelCase, check_job
from verl_mg.layout import EngineLayout, Layout
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.hf_families import FAMILIES, SAME_AS, VISION_LANGUAGE
from verl_mg.models.hf_tensors import MULTI_TOKEN_ARCHITECTURES, with_multi_token_layer
from verl_mg.models.named_models import MODEL_FILES, local_model
from verl_mg.models.transformers_module import has_images, meta_module, read_module_config, read_tokenizer
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.traced_table import EngineName
from verl_mg.sharding.weight_table import weight_table

if TYPE_CHECKING:
    import torch

    from verl_mg.fsdp import family_check, mesh
    from verl_mg.fsdp import model as fsdp_model
    from verl_mg.megatron import model_runner, transformer_config
    from verl_mg.models import tiny_model, tiny_vision_model
    from verl_mg.training import model_spec
else:
    torch = lazy_import("torch")
    family_check = lazy_import("verl_mg.fsdp.family_check")
    mesh = lazy_import("verl_mg.fsdp.mesh")
    fsdp_model = lazy_import("verl_mg.fsdp.model")
    model_runner = lazy_import("verl_mg.megatron.model_runner")
    transformer_config = lazy_import("verl_mg.megatron.transformer_config")
    tiny_model = lazy_import("verl_mg.models.tiny_model")
    tiny_vision_model = lazy_import("verl_mg.models.tiny_vision_model")
    model_spec = lazy_import("verl_mg.training.model_spec")

T = TypeVar("T")
LARGEST = 64
"""Largest size of a dimension that is tried, except pp and ep, which are tried up to all layers and experts."""
MEGATRON = {"tp": "tp{}", "pp": "pp{}", "vpp": "pp2-vpp{}", "cp": "cp{}", "ep": "ep{}"}
"""Layouts by which the sizes of Megatron's dimensions are tried."""
FSDP = {"tp": "tp{}", "pp": "pp{}", "cp": "cp{}", "ep": "ep{}"}  # the same for the backend fsdp
ENGINES = {"tp": "tp{}", "pp": "pp{}", "ep": "tp{0}-ep{0}", "adp": "tp{0}-adp{0}"}
"""Layouts by which the sizes of an engine's dimensions are tried."""
EXIT_PROBLEMS = 1  # exit code where no backend can train the model, or files are missing
SMALL_FILES = tuple(pattern for pattern in MODEL_FILES if pattern != "*.safetensors")
"""Files of a model without its weights."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
"""Files that have the vocabulary of a tokenizer."""
LAYERS = 4  # layers of a tiny model, so that pipeline stages can be interleaved
MULTI_TOKEN = "multi-token prediction of the family"
"""Topic that tiny models cannot answer: `transformers` writes no such layers."""
COLUMNS = {
    "backend megatron": "Megatron",
    "backend fsdp": "FSDP",
    "engine hf": "hf",
    "engine sglang": "SGLang",
    "engine vllm": "vLLM",
    "LoRA": "LoRA",
    "experts' LoRA": "LoRA of experts",
    "images": "images",
    MULTI_TOKEN: "MTP",
}
"""Topics that have a column, and its name; sizes of a backend or an engine are in its column."""
WITH_REASONS = ("backend", "engine", "megatron", "fsdp", "sglang", "vllm")
"""First words of the topics whose reasons are listed."""
INTRODUCTION = """\
# Models

What works with each family of models, by its `model_type` in config.json. The table is written by
`python -m tools.docs.write_models_doc`, which asks the code that decides in jobs about a tiny model of each family.
`verl-mg models` prints it, and `verl-mg models DIR`, or with the name of a model on a hub, says for one model which
sizes of each dimension are possible, what does not work and why, and which files are missing. It downloads no weights.
For a family with a weight table it answers by the table; `--full` asks `transformers` and megatron-core too.

In the columns of backends and engines are the dimensions that can be above 1: tensor (tp), pipeline (pp), virtual
pipeline (vpp), context (cp) and expert (ep) parallelism, and data-parallel attention (adp) of engines. *traced*: there
is no built-in table of the engine's parameters, and a job traces them from the engine's loader as it begins, see
[resharding.md](resharding.md). MTP: a layer of multi-token prediction is kept in training and exports. Other families
work with the backend fsdp where `transformers` has them.
"""


@dataclass(frozen=True)
class Answer:
    """Whether something works with a model."""

    topic: str  # the question, such as "megatron tp"
    works: bool  # whether it works
    text: str  # sizes or names that work, or why nothing does
    smallest: int = 0  # of the sizes that work

    def __str__(self) -> str:
        return f"{'yes' if self.works else 'no'}{': ' if self.text else ''}{self.text}"


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Returns the result of a function and "", or None and the message of its UserError."""
    try:
        return work(), ""
    except UserError as error:
        return None, str(error)


def ask(topic: str, check: Callable[[], object], text: str = "") -> Answer:
    """Returns the answer of a check, which raises a UserError for no; `text` is the text of the answer yes."""
    _, reason = attempt(check)
    return Answer(topic, not reason, reason or text)


def ask_sizes(topic: str, layout: str, largest: int, check: Callable[[str], object]) -> Answer:
    """Returns which sizes of a dimension, up to `largest`, pass the check of a layout such as "tp{}", or why not 2."""
    sizes = range(2, max(2, largest) + 1)
    reasons = {size: attempt(partial(check, layout.format(size)))[1] for size in sizes}
    possible = [size for size, reason in reasons.items() if not reason]
    if not possible:
        return Answer(topic, False, reasons[2])
    return Answer(topic, True, format_sizes(possible), possible[0])


def format_sizes(sizes: Sequence[int]) -> str:
    """Returns sizes as text, neighbours as a range: "2 4 8", "2-28"."""
    # Neighbours have the same difference between size and index.
    runs = [[size for _, size in run] for _, run in groupby(enumerate(sizes), lambda pair: pair[1] - pair[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


@dataclass(frozen=True)
class ModelSupport:
    """Answers for a model directory."""

    model_dir: Path  # Hugging Face directory; config.json is enough for all answers except the ones about files
    has_weights: bool = True  # whether the weights should be in the directory
    by_tables: bool = False  # whether a family with a table is answered by its tables, without torch
    starts_ranks: bool = False  # whether ranks of a family that has to be checked are started, which takes seconds

    # Each is an attempt: a directory that one part of the code refuses may work with another.
    @cached_property
    def _config(self) -> tuple[HFConfig | None, str]:
        return attempt(lambda: with_multi_token_layer(read_config(self.model_dir), self.model_dir))

    @cached_property
    def _module(self) -> tuple[Any, str]:
        return attempt(lambda: meta_module(read_module_config(self.model_dir), self.model_dir))

    @cached_property
    def _table(self) -> tuple[ModelTable | None, str]:
        config, _ = self._config
        return attempt(lambda: weight_table(config) if config else module_table(self.model_dir))

    @property
    def on_paper(self) -> bool:
        """Whether no library is asked, and what only libraries know is left out."""
        return self.by_tables and self._config[0] is not None

    def answers(self) -> list[Answer]:
        """Returns the answers to all questions, the size of the model first."""
        backends = (*self.megatron(), *(() if self.on_paper else self.fsdp()))
        return [self.sizes(), *self.files(), *backends, *self.engines(), *self.adapters(), *self.parts()]

    def sizes(self) -> Answer:
        """Returns the architecture and the size of the model."""
        table, reason = self._table
        if table is None:
            return Answer("model", False, reason)
        weights = sum(math.prod(entry.tensor.shape) for entry in table.tensor_index.entries.values())
        return Answer("model", True, f"{table.config.architecture}, {table.config.layers} layers, {weights:,} weights")

    def files(self) -> Iterator[Answer]:
        """Yields whether the directory has all files."""
        yield ask("config.json", lambda: None if self.on_paper else read_module_config(self.model_dir))
        yield self._weights() if self.has_weights else Answer("weights", True, "not downloaded, so not checked")
        if self.on_paper:
            names = [name for name in TOKENIZERS if (self.model_dir / name).exists()]
            yield Answer("tokenizer", bool(names), names[0] if names else f"no {', '.join(TOKENIZERS)}")
            return
        tokenizer, reason = attempt(lambda: read_tokenizer(self.model_dir))
        template = "with a chat template" if getattr(tokenizer, "chat_template", None) else "without a chat template"
        yield Answer("tokenizer", tokenizer is not None, reason or template)
        if not self._module[1] and has_images(self._module[0].config):
            yield ask("processor of images", lambda: ImageProcessor.read(self.model_dir))

    def _weights(self) -> Answer:
        table, _ = self._table
        stacked = table.tensor_index.stacked if table else None
        directory, reason = attempt(lambda: ModelDirectory.find(self.model_dir, stacked))
        if directory is None or table is None:
            return Answer("weights", directory is not None, reason)
        count = len(set(directory.file_of.values()))
        return ask(
            "weights",
            lambda: directory.check(table.huggingface(), copies=table.tensor_index.copies),
            f"{count} file{'s' * (count > 1)}",
        )

    def megatron(self) -> Iterator[Answer]:
        """Yields whether the backend megatron can train the model, and under which sizes."""
        config, reason = self._config
        if config is None:
            yield Answer("backend megatron", False, reason)
            return

        def check_on_paper(text: str) -> None:
            weight_table(config).check_training(Layout.parse(text))

        def check_as_jobs(text: str) -> None:
            layout, spec = Layout.parse(text), model_spec.ModelSpec(self.model_dir, torch.bfloat16)
            model_runner.check_layout(config, layout, spec)
            transformer_config.transformer_config(config, layout, spec)

        check = check_on_paper if self.on_paper else check_as_jobs

        yield ask("backend megatron", lambda: check("tp1"))
        largest = {"pp": config.layers, "ep": config.experts.count if config.experts else 1}
        for dimension, layout in MEGATRON.items():
            yield ask_sizes(f"megatron {dimension}", layout, largest.get(dimension, LARGEST), check)

    def fsdp(self) -> Iterator[Answer]:
        """Yields whether the backend fsdp can train the model, and under which sizes."""
        where = str(self.model_dir / "config.json")
        built = partial(fsdp_model.build_module, self.model_dir, "language", torch.bfloat16, is_packed=False)
        module, reason = attempt(built)
        if module is None:
            yield Answer("backend fsdp", False, reason)
            return
        table, reason = attempt(lambda: module_table(self.model_dir))
        if table is None:
            yield Answer("backend fsdp", False, reason)
            return
        longest = table.config.max_positions
        form, reason = attempt(lambda: family_check.form_of(table, longest))
        logits = ask("backend fsdp", lambda: fsdp_model.logit_scale_of(module, "language", self.model_dir))
        yield logits if form and logits.works else Answer("backend fsdp", False, reason or logits.text)
        if form:
            yield Answer("rows on fsdp", True, f"of up to {longest} tokens: {form.chosen}")

        def check(text: str) -> None:
            layout = Layout.parse(text)
            mesh.check_mesh(layout, replicas=1)
            fsdp_model.check_module_layout(module, layout, where)
            if form:
                form.check(layout, where)
            if layout.tp > 1:
                fsdp_model.tensor_plan(module, where)

        for dimension, layout in FSDP.items():
            sizes = ask_sizes(f"fsdp {dimension}", layout, LARGEST, check)
            if not (sizes.works and family_check.needs_proof(table)):
                yield sizes
            elif not self.starts_ranks:
                yield replace(sizes, text=f"{sizes.text}, if ranks compute what one does")
            else:  # the smallest size stands for all
                smallest = Layout.parse(layout.format(sizes.smallest))
                _, reason = attempt(partial(family_check.form_on_ranks, self.model_dir, "language", longest, smallest))
                yield Answer(sizes.topic, not reason, reason or sizes.text)

    def engines(self) -> Iterator[Answer]:
        """Yields which engines can generate, and under which sizes."""
        reason = "" if self.on_paper else self._module[1]
        yield Answer("engine hf", not reason, reason)
        table, reason = self._table
        for engine in get_args(EngineName):
            if table is None:
                yield Answer(f"engine {engine}", False, reason)
            elif not table.has_engine_rules:
                command = f"verl-mg trace {self.model_dir} --engine {engine}"
                yield Answer(f"engine {engine}", True, f"traced, if it has the architecture: try {command}")
            else:
                yield from self._by_rules(engine, table.for_engine(engine))

    def _by_rules(self, engine: EngineName, table: ModelTable) -> Iterator[Answer]:
        def check(text: str) -> None:
            table.check_engine_layout(EngineLayout.parse(text))

        yield ask(f"engine {engine}", lambda: check("tp1"), "built-in table")
        largest = {"pp": table.config.layers, "ep": table.model_dims.experts}
        for dimension, layout in ENGINES.items():
            yield ask_sizes(f"{engine} {dimension}", layout, largest.get(dimension, LARGEST), check)

    def adapters(self) -> Iterator[Answer]:
        """Yields whether adapters can be trained, and sent to engines without the weights under them."""
        table, reason = self._table
        if table is None:
            yield Answer("LoRA", False, reason)
            return
        names, reason = attempt(lambda: adapted_tensors(table, None))
        modules = " ".join(dict.fromkeys(map(module_name, names or ())))
        yield Answer("LoRA", bool(names), reason or modules or "no linear layers are known")
        yield ask("experts' LoRA", lambda: adapted_tensors(table, None, experts=True))
        for engine in () if self.on_paper else get_args(EngineName):  # it depends on the device
            yield ask(f"adapters sent to {engine}", partial(self._check_adapters, table, engine))

    def _check_adapters(self, table: ModelTable, engine: EngineName) -> None:
        # Engines take adapters of attention with any model, of feed-forward layers only with models without experts.
        attention = [module_name(name) for name in adapted_tensors(table, None) if "_attn" in name]
        config = Config.model_validate(
            {
                "model": {"path": self.model_dir},
                "data": {"train": "unread"},
                "actor": {"lora": {"targets": attention or None}},
                "rollout": {"engine": engine, "adapters": True, "sleep": False},
            }
        )
        refuse(MODEL_REFUSALS, ModelCase(check_job(config, 1), table))

    def parts(self) -> Iterator[Answer]:
        """Yields which parts the model has besides a language model."""
        config, reason = self._config
        if self.on_paper:
            images, no_module = bool(config and config.with_vision), ""
        else:
            module, no_module = self._module
            images = module is not None and has_images(module.config)
        yield Answer("images", images, no_module or ("" if images else "it has no vision tower"))
        if config and config.multi_token:
            yield Answer("multi-token prediction", True, "")
        else:
            yield Answer("multi-token prediction", False, reason or "there is no layer of it among the weights")


def show_model(name: Path, full: bool) -> int:
    """Prints what works with a model directory, or a name on a hub, and returns the exit code.

    `full`: libraries are asked too, which takes seconds, of a model whose family has a table.
    """
    folder = local_model(name, "model", SMALL_FILES)
    if not folder.is_dir():
        raise UserError(f"{name}: no such model directory. Write a directory, or the name of a model as OWNER/NAME.")
    is_remote = HubName.parse(name) is not None
    has_weights = not is_remote or any(folder.glob("*.safetensors"))
    support = ModelSupport(folder, has_weights, by_tables=not full, starts_ranks=True)
    size, *answers = support.answers()
    print(f"{folder if is_remote else name}: {size.text}")
    width = max(len(answer.topic) for answer in answers)
    for answer in answers:
        print(f"  {answer.topic:{width}}  {answer}")
    if support.on_paper:
        print("By the tables of the family. --full adds backend fsdp, tokenizer and adapters in engines.")
    trains = any(answer.works for answer in answers if answer.topic.startswith("backend "))
    complete = all(answer.works for answer in support.files())
    return 0 if trains and complete else EXIT_PROBLEMS


def markdown() -> str:
    """Returns the document: the table, and the reasons for what does not work."""
    makers: dict[str, Callable[..., Path]] = {
        **{kind: partial(tiny_model.make_tiny_model, tie_embeddings=family.tied) for kind, family in FAMILIES.items()},
        **dict.fromkeys(tiny_vision_model.ARCHITECTURES, tiny_vision_model.make_tiny_vision_model),
    }
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        rows = {kind: _answers(make(Path(folder, kind), kind, layers=LAYERS)) for kind, make in makers.items()}
    lines = [f"| model_type | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, answers in rows.items():
        names = ", ".join(f"`{name}`" for name in (kind, *(other for other, same in SAME_AS.items() if same == kind)))
        lines.append(f"| {names} | {' | '.join(_cell(topic, answers) for topic in COLUMNS)} |")
    return "\n".join([INTRODUCTION, *lines, "", "## Why not", "", *_reasons(rows), ""])


def _answers(model: Path) -> list[Answer]:
    """Returns the answers for a directory, in words that hold for the whole family."""
    # Reasons name the temporary directory and the model_type, and are joined where they are equal otherwise.
    kind = VISION_LANGUAGE.get(model.name, model.name)
    with_layer = Answer(MULTI_TOKEN, kind in MULTI_TOKEN_ARCHITECTURES, "")
    answers = [*ModelSupport(model).answers(), with_layer]
    texts = [a.text.replace(f"{model}/", "").replace(kind, "this family") for a in answers]
    return [replace(a, text=text.replace(model.name, "this family")) for a, text in zip(answers, texts, strict=True)]


def _cell(topic: str, answers: Sequence[Answer]) -> str:
    """Returns the cell of a column: no, or the dimensions that can be above 1, or yes."""
    answer = next(answer for answer in answers if answer.topic == topic)
    if not answer.works:
        return "no"
    prefix = topic.split()[-1] + " "
    sizes = [a.topic.removeprefix(prefix) for a in answers if a.topic.startswith(prefix) and a.works]
    return ", ".join(sizes) or ("traced" if answer.text.startswith("traced") else "yes")


def _reasons(rows: dict[str, list[Answer]]) -> Iterator[str]:
    """Yields a line for each reason why something does not work, with the families that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, answers in rows.items():
        for answer in answers:
            if not answer.works and answer.topic.startswith(WITH_REASONS):
                reasons[answer.topic, answer.text].append(kind)
    for (topic, text), kinds in reasons.items():
        yield f"- {topic}, {'all' if len(kinds) == len(rows) else ', '.join(f'`{kind}`' for kind in kinds)}: {text}"
