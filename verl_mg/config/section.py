"""A part of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of things, or one of them: what is written down and read again fits every format and tensor on the way."""


class ConfigSection(BaseModel):
    """A part of the configuration: fields are typed, unknown ones are refused, nothing can be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeConfig(ConfigSection):
    """Base class of a recipe's own section, `algorithm`: a recipe writes `class Config(RecipeConfig)`."""
