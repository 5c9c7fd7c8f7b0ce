"""A part of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: fields are typed, unknown ones are refused, nothing can be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)
