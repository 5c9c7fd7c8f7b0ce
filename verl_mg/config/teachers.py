"""Configuration of teachers."""

from __future__ import annotations

from verl_mg.config.roles import ReferenceConfig


class TeacherConfig(ReferenceConfig):
    """One of several teachers, for recipes that distill; without any, the reference is the teacher."""

    sources: list[str] = []
    """Sources of `data.train` whose samples this teacher scores. []: those that no other teacher names."""
