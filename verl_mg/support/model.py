"""Report of what works with one model directory: its files, training backends, rollout engines, adapters, images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import torch

from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.peft import adapted_tensors, module_name
from verl_mg.config import Config, MegatronConfig
from verl_mg.config.checks import refuse
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.fsdp.mesh import check_mesh
from verl_mg.fsdp.model import build_module, logit_scale_of, tensor_plan
from verl_mg.fsdp.model_runner import check_module_layout
from verl_mg.job.engine_checks import MODEL_REFUSALS, ModelCase, check_job
from verl_mg.layout import EngineLayout, Layout
from verl_mg.megatron.model_runner import check_layout
from verl_mg.megatron.multi_token import check_multi_token
from verl_mg.megatron.transformer_config import transformer_config
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.multi_token import with_multi_token_layer
from verl_mg.models.tokenizer import read_tokenizer
from verl_mg.models.transformers_module import has_images, meta_module, read_module_config
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.traced_table import EngineName
from verl_mg.sharding.weight_table import weight_table
from verl_mg.support.answers import Answer, ask, ask_sizes, attempt

LARGEST = 64
"""Largest size of a dimension that is tried, except pp and ep, which are tried up to all layers and experts."""
MEGATRON = {"tp": "tp{}", "pp": "pp{}", "vpp": "pp2-vpp{}", "cp": "cp{}", "ep": "ep{}"}
"""Layouts by which the sizes of Megatron's dimensions are tried."""
FSDP = {"tp": "tp{}", "pp": "pp{}", "cp": "cp{}", "ep": "ep{}"}
"""The same for the backend fsdp."""
ENGINES = {"tp": "tp{}", "pp": "pp{}", "ep": "tp{0}-ep{0}", "adp": "tp{0}-adp{0}"}
"""Layouts by which the sizes of an engine's dimensions are tried."""


@dataclass(frozen=True)
class ModelSupport:
    """Answers for a model directory."""

    model_dir: Path
    """Hugging Face directory; config.json is enough for all answers except the ones about files."""
    has_weights: bool = True
    """Whether the weights should be in the directory."""

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

    def answers(self) -> list[Answer]:
        """Returns the answers to all questions, the size of the model first."""
        return [self.sizes(), *self.files(), *self.backends(), *self.engines(), *self.adapters(), *self.parts()]

    def sizes(self) -> Answer:
        """Returns the architecture and the size of the model."""
        table, reason = self._table
        if table is None:
            return Answer("model", False, reason)
        weights = sum(math.prod(entry.tensor.shape) for entry in table.tensor_index.entries.values())
        return Answer("model", True, f"{table.config.architecture}, {table.config.layers} layers, {weights:,} weights")

    def files(self) -> Iterator[Answer]:
        """Yields whether the directory has all files."""
        yield ask("config.json", lambda: read_module_config(self.model_dir))
        yield self._weights() if self.has_weights else Answer("weights", True, "not downloaded, so not checked")
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
        return ask("weights", lambda: directory.check(table.huggingface()), f"{count} file{'s' * (count > 1)}")

    def backends(self) -> Iterator[Answer]:
        """Yields which training backends can train the model, and under which sizes."""
        yield from self.megatron()
        yield from self.fsdp()

    def megatron(self) -> Iterator[Answer]:
        """Yields whether the backend megatron can train the model, and under which sizes."""
        config, reason = self._config
        if config is None:
            yield Answer("backend megatron", False, reason)
            return

        def check(text: str) -> None:
            layout = Layout.parse(text)
            check_layout(config, layout, megatron=MegatronConfig())
            transformer_config(config, layout, torch.bfloat16, False)

        yield ask("backend megatron", lambda: check("tp1"))
        largest = {"pp": config.layers, "ep": config.experts.count if config.experts else 1}
        for dimension, layout in MEGATRON.items():
            yield ask_sizes(f"megatron {dimension}", layout, largest.get(dimension, LARGEST), check)

    def fsdp(self) -> Iterator[Answer]:
        """Yields whether the backend fsdp can train the model, and under which sizes."""
        where = str(self.model_dir / "config.json")
        module, reason = attempt(lambda: build_module(self.model_dir, "language", torch.bfloat16))
        if module is None:
            yield Answer("backend fsdp", False, reason)
            return
        yield ask("backend fsdp", lambda: logit_scale_of(module, "language", self.model_dir))

        def check(text: str) -> None:
            layout = Layout.parse(text)
            check_mesh(layout, replicas=1)
            check_module_layout(module, layout, where)
            if layout.tp > 1:
                tensor_plan(module, where)

        for dimension, layout in FSDP.items():
            yield ask_sizes(f"fsdp {dimension}", layout, LARGEST, check)

    def engines(self) -> Iterator[Answer]:
        """Yields which engines can generate, and under which sizes."""
        yield Answer("engine hf", not self._module[1], self._module[1])
        table, reason = self._table
        for engine in get_args(EngineName):
            if table is None:
                yield Answer(f"engine {engine}", False, reason)
            elif not table.has_engine_rules:
                yield Answer(
                    f"engine {engine}",
                    True,
                    f"traced, if it has the architecture: try verl-mg trace {self.model_dir} --engine {engine}",
                )
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
        for engine in get_args(EngineName):
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
        module, reason = self._module
        images = module is not None and has_images(module.config)
        yield Answer("images", images, reason or ("" if images else "it has no vision tower"))
        config, reason = self._config
        if config and config.multi_token:
            megatron = MegatronConfig(transformer={"mtp_loss_scaling_factor": 0.1})
            yield ask("multi-token prediction", lambda: check_multi_token(config, megatron, lora=False))
        else:
            yield Answer("multi-token prediction", False, reason or "there is no layer of it among the weights")
