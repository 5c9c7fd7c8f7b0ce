"""Configuration of teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from verl_mg.config.roles import FrozenConfig


class TeacherConfig(FrozenConfig):
    """One of several teachers, for recipes that distill; without any, the reference is the teacher."""

    sources: list[str] = []
    """Sources of `data.train` whose samples this teacher scores. []: those that no other teacher names."""
    url: str | None = None
    """Address of a running server that has this teacher, such as http://node7:30000. It returns log-probs of
    given tokens and the likeliest ones, not distributions over the whole vocabulary. null: the model of `path`, on
    ranks of the job."""
    protocol: Literal["sglang", "openai"] = "sglang"
    """Protocol of `url`. sglang: `/generate` of an SGLang server. openai: `/v1/completions` with vLLM's field
    `prompt_logprobs`."""
    served_model: str = ""
    """Name of the model on the server, with `protocol: openai`."""
    api_key_env: str | None = None
    """Name of the environment variable with the key of the server."""
    parallel: PositiveInt = 32
    """Requests to the server that each rank has in flight."""

    weights: Literal["fixed", "actor", "reference"] = "fixed"
    """Weights of the teacher. fixed: the model of `path` or of the server. actor: the policy itself before each update,
    which makes sense with another `prompt` (self-distillation). reference: the reference, with
    `reference.refresh_every` an earlier policy."""
    prompt: str | None = None
    """Template of the prompt that the teacher reads in place of the student's, such as "{prompt} The answer is
    {answer}.": {prompt} is the student's text, {answer} and other names are fields of the record. null: the same."""

    tokenizer: Path | None = None
    """Directory of the teacher's tokenizer, where it is not that of the policy: the teacher then reads the text, and
    log-probs are compared span by span, by recipes/distillation.py. null: the policy's tokens."""

    @field_validator("url")
    @classmethod
    def _one_model(cls, url: str | None, info: Any) -> str | None:
        if url is not None and info.data.get("path") is not None:
            raise ValueError("the teacher is the model of path already. Leave one of them out")
        return url

    @field_validator("weights")
    @classmethod
    def _of_one_model(cls, weights: str, info: Any) -> str:
        if weights != "fixed" and (info.data.get("path") or info.data.get("url")):
            raise ValueError("the teacher is that role, without a path and a url. Leave them out")
        return weights

    @property
    def has_model(self) -> bool:
        """Whether the job loads a model for this teacher."""
        return self.url is None and self.weights == "fixed"
