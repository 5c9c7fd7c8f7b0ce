"""Fields of megatron-core's configurations that the section `megatron` sets, checked against the installed version."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from traceback import extract_tb
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import PlainValidator, TypeAdapter, ValidationError

from verl_mg.config.reference import in_words
from verl_mg.errors import UserError
from verl_mg.megatron.core_version import VERSION
from verl_mg.megatron.refused_fields import NEEDS_TRANSFORMER_ENGINE, Refusals

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    **dict.fromkeys(("uint8", "fp8"), torch.uint8),  # as Transformer Engine's optimizer names 8-bit moments
}
"""Data types by their names in torch and in megatron-core."""
APEX = "fused_weight_gradient_mlp_cuda"  # kernel of Apex, for layers without Transformer Engine
PACKAGES = {
    ("gradient_accumulation_fusion", True): APEX,
    ("moe_enable_deepep", True): "deep_ep",
    ("moe_flex_dispatcher_backend", "deepep"): "deep_ep",
    ("moe_flex_dispatcher_backend", "hybridep"): "deep_ep",
    ("moe_flex_dispatcher_backend", "ncclep"): "transformer_engine",
    ("moe_token_dispatcher_type", "flex"): "deep_ep",
}
"""{(field, value): package that must be installed}."""
REFUSED_VALUES = {
    ("moe_token_dispatcher_type", "allgather"): "it needs as many tokens on every rank. Write alltoall or flex",
}
"""{(field, value): what is wrong with the value, and the remedy}."""

Built = TypeVar("Built")
Fields = dict[str, Any]


def given_fields(part: str, kind: type, given: Mapping[str, Any], refused: Refusals) -> Fields:
    """Returns the values of a part of the section `megatron`, of the types that megatron-core declares."""
    types = {field.name: hint for field, hint in _declared(kind)}
    values = {}
    for name, value in given.items():
        key = f"megatron.{part}.{name}"
        if name not in types:
            raise UserError(f"{key}: megatron-core {VERSION} has no such field. {_nearest(name, types)}")
        if reason := next((reason for pattern, reason in refused.items() if fnmatchcase(name, pattern)), None):
            raise UserError(f"{key}: {reason}.")
        if not _is_plain(types[name]):
            raise UserError(f"{key}: it is an object of Python, which a configuration cannot contain. Leave it out.")
        values[name] = _converted(key, types[name], value)
    return values


def check_values(given: Mapping[str, Any], transformer_engine: bool) -> None:
    """Checks that the given fields of `megatron.transformer` fit packed rows, and that what they need is installed."""
    for name, value in given.items():
        key = f"megatron.transformer.{name}"
        if not transformer_engine and any(fnmatchcase(name, pattern) for pattern in NEEDS_TRANSFORMER_ENGINE):
            raise UserError(
                f"{key}: only layers of Transformer Engine have it. Install transformer-engine on a machine with GPUs, "
                "and write model.kernels=transformer_engine."
            )
        choice = (name, value) if isinstance(value, str | bool) else (name, None)
        if choice in REFUSED_VALUES:
            raise UserError(f"{key}={value}: {REFUSED_VALUES[choice]}.")
        package = PACKAGES.get(choice)
        # Transformer Engine's layers have such a kernel themselves.
        if transformer_engine and package == APEX:
            continue
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"{key}={value}: the package {package} is not installed. Install it, or leave the key out.")


def build_config(part: str, kind: Callable[..., Built], fields: Fields, given: Mapping[str, Any]) -> Built:
    """Creates a configuration of megatron-core."""
    try:
        return kind(**{**fields, **given})
    except (ValueError, AssertionError, RuntimeError, ImportError, NotImplementedError) as error:
        if not given:
            raise  # a mistake of this project, not of the configuration
        # Some of its assertions have no message, but all have a condition.
        reason = " ".join(str(error).split()).rstrip(".") or extract_tb(error.__traceback__)[-1].line
        raise UserError(
            f"megatron.{part}: megatron-core refuses {', '.join(given)} ({reason}). Correct or remove them."
        ) from None


def _declared(kind: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind) if field.init]


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    similar = difflib.get_close_matches(name, names, 1)
    return f"Did you mean {similar[0]}?" if similar else "Write the name as megatron-core has it."


def _is_plain(kind: Any) -> bool:
    """Returns whether a file can contain values of a type, None apart."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_plain(part) for part in get_args(kind) if part is not type(None))
    plain = (bool, int, float, str, list, tuple, dict, torch.dtype)
    return get_origin(kind) in (Literal, *plain) or (isinstance(kind, type) and issubclass(kind, (*plain, Enum)))


def _converted(key: str, kind: Any, value: Any) -> Any:
    try:
        result = TypeAdapter(_readable(kind)).validate_python(value)
    except ValidationError:
        result = ...
    # pydantic reads true as the number 1. None is a valid result, so `...` marks a failure.
    if result is ... or (isinstance(value, bool) and not isinstance(result, bool)):
        raise UserError(f"{key}: {value!r} is invalid. Write {_values_of(kind)}.")
    return result


def _readable(kind: Any) -> Any:
    """Returns a type with the same values that reads data types and enumerations by their names."""
    if kind is torch.dtype:
        return Annotated[Any, PlainValidator(partial(_named, DTYPES))]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Annotated[Any, PlainValidator(partial(_named, dict(kind.__members__)))]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # A union may contain classes that no file has values of: only the plain parts are read.
        return Union[tuple(_readable(part) for part in arguments if part is type(None) or _is_plain(part))]  # noqa: UP007
    return GenericAlias(list, (_readable(arguments[0]),)) if origin is list else kind


def _named(values: Mapping[str, Any], name: Any) -> Any:
    if name not in values:
        raise ValueError(f"not one of {', '.join(values)}")
    return values[name]


def _values_of(kind: Any) -> str:
    parts = [kind] if get_origin(kind) not in (Union, UnionType) else get_args(kind)
    words = []
    for part in parts:
        if part is torch.dtype:
            words.append("float32, bfloat16 or float16")
        elif isinstance(part, type) and issubclass(part, Enum):
            words.append(" or ".join(part.__members__))
        elif part is type(None) or _is_plain(part):
            words.append(in_words(part))
    return " or ".join(words)
