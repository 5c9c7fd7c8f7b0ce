"""`Choice`: what a part of a job computes with, as the object that has chosen it says at the start of the job."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """Row of the table of a start; a part may have several, such as layers of different kinds."""

    part: str  # what computes, such as "attention, window of 128 tokens"
    chosen: str  # what with, such as "torch's FlashAttention 2"
    warning: str = ""  # why that is slow or untried on a GPU, and the remedy; empty where it is neither
