"""Predicted gains of options: what each change can and cannot do."""

import re

from tools.predict_options import CHANGES, JOBS, show

CELLS = r"\| (?P<change>.+?) \| (?P<rate>[\d,]+) \| (?P<used>[\d.]+)% \| (?P<gib>[\d.]+) \| (?P<time>[\d.]+) \|"
ROW = re.compile(CELLS)


def test_show_has_every_change_with_its_effect(capsys):
    show("h100")
    tables = capsys.readouterr().out.split("\n\n")
    assert len(tables) == len(JOBS)
    for table, job in zip(tables, JOBS, strict=True):
        rows = {row["change"]: row for row in ROW.finditer(table)}
        dense = "b_a" not in job.model and "deepseek" not in job.model
        assert set(rows) == {change.name for change in CHANGES if not (dense and change.mixtures_only)}
        time, gib = ({name: float(row[key]) for name, row in rows.items()} for key in ("time", "gib"))
        assert time["no option"] == 1 and all(0 < float(row["used"]) < 90 for row in rows.values())
        assert time["fp8"] < 1
        for name in ("tp_comm_overlap", "overlap of gradients and weights"):
            assert time[name] <= 1 and gib[name] == gib["no option"]
        assert time["model.kernels=torch"] > 1 and time["recompute=true"] > time["recompute=[layernorm, mlp, moe]"] > 1
        assert gib["recompute=true"] < gib["recompute=[layernorm, mlp, moe]"] < gib["recompute=[layernorm]"]
        assert gib["bf16 moments"] < gib["no option"] and gib["optimizer_cpu_offload"] < gib["no option"]
