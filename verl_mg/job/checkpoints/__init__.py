"""Checkpoints: what a run that was ended goes on from, under the same layout or another.

    checkpoints/000012/
        job.json                    the iteration, where data and schedules stand, what the rollout has not finished
        rank-00000.safetensors      boxes of weights and moments, rows that wait in a buffer, states of random numbers
        rank-00000.json             samples that this rank has begun
        SHA256SUMS                  of all of them; `sha256sum -c` reads it

`contents` says what stands in them, `saver` writes them while training goes on, `intact` chooses one to go on from.
"""

from verl_mg.job.checkpoints.contents import restore
from verl_mg.job.checkpoints.intact import newest_intact
from verl_mg.job.checkpoints.saver import Saver

__all__ = ["Saver", "newest_intact", "restore"]
