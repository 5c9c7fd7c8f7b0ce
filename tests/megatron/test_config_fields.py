"""The section `megatron`: each field of megatron-core's configurations is applied or refused with a reason."""

import dataclasses
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron import config_fields
from verl_mg.megatron.config_fields import PACKAGES, REFUSED_VALUES
from verl_mg.megatron.core_version import VERSION
from verl_mg.megatron.trainer import ddp_config, optimizer_config
from verl_mg.megatron.transformer_config import transformer_config
from verl_mg.training.model_spec import ModelSpec

NEWEST = pytest.mark.skipif(not VERSION.startswith("0.19"), reason="of fields that megatron-core 0.16 does not have")
FORMER = {"moe_use_legacy_grouped_gemm", "moe_extended_tp", "async_tensor_model_parallel_allreduce"}
"""Fields of megatron-core 0.16.1 that 0.19 does not have."""
VALUES = {
    "cp_comm_type": "all_gather",
    "grad_norm_skip_threshold": 1.5,
    "num_buckets": 2,
    "recompute_method": "block",
    "recompute_num_layers": 2,
}
"""Values of fields that have bounds or needs of their own."""
WITH = {"param_name_patterns_for_fp32_local_accumulation": {"grad_reduce_in_fp32": False}}
"""Further fields that a field needs."""


def build(part, kind, configs, given):
    """The configuration of megatron-core that a job with these fields uses."""
    megatron = MegatronConfig(**{part: given})
    if part == "ddp":
        return ddp_config(megatron)
    if part == "optimizer":
        return optimizer_config(OptimizerConfig(), megatron, torch.float32)
    model = configs["deepseek_v3" if kind is MLATransformerConfig else "qwen3"]
    return transformer_config(
        model, Layout.parse("pp2-vpp2"), ModelSpec(Path(), torch.float32, recompute=True, megatron=megatron)
    )


def table_of(part):
    return {"ddp": config_fields.DDP, "optimizer": config_fields.OPTIMIZER}.get(part, config_fields.TRANSFORMER)


PARTS = [
    ("transformer", TransformerConfig),
    ("transformer", MLATransformerConfig),
    ("optimizer", MegatronOptimizerConfig),
    ("ddp", DistributedDataParallelConfig),
]


def another_value(name, kind, default):
    """A value that a file can contain and that the job does not set by itself."""
    if name in VALUES:
        return VALUES[name]
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    for part in kinds:
        if get_origin(part) is Literal:
            return next(value for value in get_args(part) if value != default)
        if isinstance(part, type) and issubclass(part, Enum):
            return next(member for member, value in part.__members__.items() if value != default)
    samples = {
        bool: not default,
        int: (default if isinstance(default, int) else 0) + 1,
        float: (default if isinstance(default, int | float) else 0.0) + 0.5,
        str: "other",
        torch.dtype: "bf16",
        list: ["core_attn"],
        tuple: ("a*",),
    }
    return next((samples[plain] for part in kinds for plain in (part, get_origin(part)) if plain in samples), "object")


@pytest.mark.parametrize(("part", "kind"), PARTS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_of_megatron_core_is_applied_or_refused_with_a_reason(configs, part, kind):
    hints, applied, unchanged = get_type_hints(kind), set(), build(part, kind, configs, {})
    needs = config_fields.NEEDS_TRANSFORMER_ENGINE if part == "transformer" else ()
    for field in dataclasses.fields(kind):
        value = another_value(field.name, hints[field.name], getattr(unchanged, field.name))
        listed = any(fnmatchcase(field.name, pattern) for pattern in (*table_of(part), *needs))
        try:
            config = build(part, kind, configs, {field.name: value} | WITH.get(field.name, {}))
        except UserError as error:
            assert listed or value == "object" or (field.name, value) in PACKAGES | REFUSED_VALUES, error
            assert str(error).startswith(f"megatron.{part}.{field.name}") and str(error).endswith(".")
        else:
            assert not listed, f"{field.name} is in the table of refused fields and was applied"
            got = getattr(config, field.name)
            assert (got.name if isinstance(got, Enum) else got) == value != getattr(unchanged, field.name)
            applied.add(field.name)
    assert len(applied) >= 4


@NEWEST
def test_every_pattern_of_refused_fields_matches_a_field_of_megatron_core():
    for part, kinds in {"transformer": PARTS[:2], "optimizer": PARTS[2:3], "ddp": PARTS[3:]}.items():
        names = FORMER.union(field.name for _, kind in kinds for field in dataclasses.fields(kind))
        patterns = [*table_of(part), *(config_fields.NEEDS_TRANSFORMER_ENGINE if part == "transformer" else ())]
        assert not [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ("ddp", {"overlap_grad_reduction": True}, r"has no such field\. Did you mean overlap_grad_reduce\?"),
        ("transformer", {"zzz": 1}, r"transformer\.zzz: megatron-core \S+ has no such field\. Write the name"),
        ("ddp", {"bucket_size": "many"}, r"megatron\.ddp\.bucket_size: 'many' is invalid\. Write integer or null\."),
        ("ddp", {"bucket_size": True}, r"megatron\.ddp\.bucket_size: True is invalid\."),
        ("ddp", {"average_in_collective": True}, r"average_in_collective: losses are normalized over the whole"),
        pytest.param(
            "ddp",
            {"num_buckets": 2, "bucket_size": 5},
            r"ddp: megatron-core refuses num_buckets, bucket_size \(",
            marks=NEWEST,
        ),
        ("transformer", {"hidden_dropout": 0.1}, r"hidden_dropout: log-probs would be random"),
        ("transformer", {"tensor_model_parallel_size": 2}, r"Write actor\.layout"),
        ("transformer", {"fp8": "hybrid"}, r"transformer\.fp8: only layers of Transformer Engine have it\. Install"),
        ("transformer", {"fp8_param": True}, r"fp8_param: weight sync and exports read weights in"),
        ("transformer", {"timers": "x"}, r"timers: it is an object of Python"),
        ("transformer", {"moe_token_dispatcher_type": "flex"}, r"=flex: the package deep_ep is not installed\."),
        ("transformer", {"moe_token_dispatcher_type": "ring"}, r"'ring' is invalid\. Write allgather or alltoall"),
        ("optimizer", {"lr": 0.1}, r"sets it\. Write actor\.optimizer\.lr"),
        ("optimizer", {"overlap_param_gather": True}, r"Write megatron\.ddp\.overlap_param_gather"),
    ],
)
def test_megatron_field_that_cannot_be_set_names_the_remedy(configs, part, given, message):
    with pytest.raises(UserError, match=message) as caught:
        build(part, dict(PARTS)[part], configs, given)
    assert "\n" not in str(caught.value)


def test_optimizer_config_follows_the_overlap_of_ddp():
    megatron = MegatronConfig(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True})
    assert optimizer_config(OptimizerConfig(), megatron, torch.float32).overlap_param_gather
