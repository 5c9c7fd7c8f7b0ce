"""Writes docs/models.md, what works with each family of models: `python -m tools.docs.write_models_doc`."""

from __future__ import annotations

from pathlib import Path

from verl_mg.support import markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

if __name__ == "__main__":
    DOCUMENT.write_text(markdown(), encoding="utf-8")
    print(DOCUMENT)
