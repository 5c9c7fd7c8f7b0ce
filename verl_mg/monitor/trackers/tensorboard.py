"""TensorBoard."""

from __future__ import annotations

from pathlib import Path


class TensorBoardTracker:
    """Event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        """`first_step`: later ones already in the folder are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
