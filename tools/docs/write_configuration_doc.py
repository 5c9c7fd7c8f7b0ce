"""Writes docs/configuration.md from the configuration models: `python -m tools.docs.write_configuration_doc`."""

from __future__ import annotations

from pathlib import Path

from verl_mg.config.reference import markdown
from verl_mg.job.recipe import load_recipe

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"


def document() -> str:
    """Returns the text of docs/configuration.md."""
    recipes = {file.stem: load_recipe(file).config for file in sorted((ROOT / "recipes").glob("[!_]*.py"))}
    return markdown(recipes)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT)
