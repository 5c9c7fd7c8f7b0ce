"""The document of families is that of the code, and has a row for each."""

from tools.docs.write_models_doc import DOCUMENT
from verl_mg.models.hf_families import FAMILIES
from verl_mg.support import markdown


def test_models_document_is_current():
    text = markdown()
    assert DOCUMENT.read_text(encoding="utf-8") == text, "run python -m tools.docs.write_models_doc"
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert rows.keys() >= FAMILIES.keys()
    assert rows["qwen3_moe"].split(" | ")[1:3] == ["tp, pp, vpp, cp, ep", "tp, cp"]
    assert rows["gemma2"].split(" | ")[1] == "tp, pp, vpp, cp" and rows["gemma2"].split(" | ")[4] == "tp"
