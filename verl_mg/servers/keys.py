"""Keys with which a job may use SGLang servers, from environment variables; they are in no message and no file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from verl_mg.errors import UserError

# Paths that SGLang protects with its `--api-key`; others that we use with `--admin-api-key`, where there is one.
OPEN_TO_ALL = ("/generate", "/server_info", "/model_info", "/v1/")


@dataclass(frozen=True)
class ServerKeys:
    """Keys of all servers of a job; empty ones are not sent."""

    api: str = field(default="", repr=False)  # key of SGLang's argument `--api-key`
    admin: str = field(default="", repr=False)  # key of SGLang's argument `--admin-api-key`

    @classmethod
    def from_environment(cls, api_variable: str | None, admin_variable: str | None) -> ServerKeys:
        """Reads the keys of a job from variables of its environment; None: servers without such a key."""
        return cls(read_key("rollout.api_key_env", api_variable), read_key("rollout.admin_key_env", admin_variable))

    def headers(self, path: str) -> dict[str, str]:
        """Returns the HTTP headers of a request to a path."""
        key = self.api if path.startswith(OPEN_TO_ALL) else self.admin or self.api
        return {"Authorization": f"Bearer {key}"} if key else {}


def read_key(key: str, variable: str | None) -> str:
    """Returns the key in an environment variable, "" for None; UserError where it is not set or not printable."""
    if variable is None:
        return ""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(f"{key}={variable}: this environment variable is not set. Set it on every rank.")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"{key}={variable}: the value of this environment variable is not printable ASCII. Correct it.")
    return value
