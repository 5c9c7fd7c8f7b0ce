"""Base classes of configuration sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from verl_mg.stores.url import COPY_FIRST, names_store

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Non-negative integer that every file format, JSON number and tensor represents exactly."""


def _can_end_a_response(strings: list[str]) -> list[str]:
    if "" in strings:
        raise ValueError("an empty string would end every response immediately. Leave it out")
    # A token that ends within a character is decoded to U+FFFD, which the string would find by chance.
    if any("\ufffd" in string for string in strings):
        raise ValueError("U+FFFD stands for a part of a character. Write strings of whole characters")
    return strings


StopStrings = Annotated[list[str], AfterValidator(_can_end_a_response)]
"""Strings that end a response."""


def refused_values(**rows: tuple[Callable[[Any, Mapping[str, Any]], object], str]) -> Any:
    """Returns a validator by field: when a value is refused, given the fields before it too, and the error."""

    def check(value: Any, info: ValidationInfo) -> Any:
        refuses, message = rows[str(info.field_name)]
        if refuses(value, info.data):
            raise ValueError(message)
        return value

    return field_validator(*rows)(check)


class ConfigSection(BaseModel):
    """Section of the configuration: typed and immutable, unknown keys are errors.

    The string literal below a field is its description in `--help-config` and docs/configuration.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_no_store(cls, value: Any) -> Any:
        if isinstance(value, Path) and names_store(value):
            raise ValueError(COPY_FIRST)
        return value


class RecipeConfig(ConfigSection):
    """Base class of a recipe's `Config`, the section `algorithm`.

    A recipe gives a subsection other defaults by an instance, as in `kl: KLConfig = KLConfig(placement="reward")`. Keys
    of the subsection that are not written keep these defaults.
    """

    support: Literal["sampled", "policy", "full"] = "sampled"
    """Tokens that distributions are over where `rollout.top_p`, `top_k` or `min_p` limit what is drawn. sampled: in the
    place of each token the candidates of its draw, for the policy, for references and for teachers, so that what is
    trained is what was sampled, and equal weights have a divergence of 0. policy: the same for the policy only; a
    penalty then also has a part for what references and teachers give to other tokens. full: the whole vocabulary, for
    engines too."""

    @model_validator(mode="before")
    @classmethod
    def _complete_subsections(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        completed = dict(value)
        for name, field in cls.model_fields.items():
            # pydantic would fill the missing keys from the class of the subsection, not from the recipe's instance.
            if isinstance(field.default, ConfigSection) and isinstance(value.get(name), dict):
                completed[name] = field.default.model_dump(exclude_unset=True) | value[name]
        return completed
