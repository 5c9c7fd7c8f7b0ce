"""Requests that travel to an engine in one message.

Samples 7 and 8 of a prompt with the tokens 11 and 12 send these once:

    shared    {"temperature": 1.0, ...}
    contexts  [[11, 12]]
    images    {}
    items     [{"rid": "7.0", "context": 0, "max_new_tokens": 8, "seed": 3, "images": []},
               {"rid": "8.1", "context": 0, "max_new_tokens": 8, "seed": 4, "images": []}]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Fields of `Sampling` that engines get as they are, the same for all requests of a batch.
SHARED = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "excluded_token_ids")


@dataclass(frozen=True)
class RequestBatch:
    """Requests with the same sampling parameters, see the drawing above."""

    shared: Mapping[str, Any]  # sampling parameters, and what samples contain
    contexts: Sequence[Sequence[int]]  # tokens in front of the first new one
    images: Mapping[str, str]  # files in base64, by their keys
    items: Sequence[Mapping[str, Any]]  # of each request: see above

    def keys(self, version: int) -> dict[str, str]:
        """Returns what each request has in common with its repetition by a further rank, by its id.

        `version` is the policy version of the weights with which it is generated.
        """
        shared, contexts = _digest([version, self.shared]), [_digest(context) for context in self.contexts]
        # An id is SAMPLE.NUMBER, and numbers differ between ranks.
        return {
            item["rid"]: _digest(
                [
                    item["rid"].partition(".")[0],
                    shared,
                    contexts[item["context"]],
                    *(item[name] for name in ("max_new_tokens", "seed", "images")),
                ]
            )
            for item in self.items
        }

    def requests(self) -> dict[str, dict[str, Any]]:
        """Returns the fields of each request by its id, the same ones whatever batch it is in."""
        return {
            item["rid"]: {
                **self.shared,
                "tokens": self.contexts[item["context"]],
                "max_new_tokens": item["max_new_tokens"],
                "seed": item["seed"],
                "images": [self.images[key] for key in item["images"]],
            }
            for item in self.items
        }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
