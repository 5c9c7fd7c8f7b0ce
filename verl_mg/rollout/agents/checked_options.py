"""Options of agents whose values are checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from verl_mg.errors import UserError


@dataclass(frozen=True)
class CheckedOptions:
    """Dataclass for `read_options` that raises a UserError where a value does not have the type of its field."""

    def __post_init__(self) -> None:
        for name, kind in self._types().items():
            try:
                kind.validate_python(getattr(self, name), strict=True)
            except ValidationError as error:
                problem = error.errors()[0]
                place = ".".join(map(str, (name, *problem["loc"])))
                raise UserError(f"rollout.agent_options.{place}: {problem['msg']}. Correct it.") from None

    @classmethod
    @functools.cache
    def _types(cls) -> dict[str, TypeAdapter[Any]]:
        return {name: TypeAdapter(kind) for name, kind in get_type_hints(cls).items()}
