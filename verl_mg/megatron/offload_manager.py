"""Whose state is on this rank's device."""

from __future__ import annotations

from verl_mg.megatron.offload import CpuOffload


class OffloadManager:
    """Of the roles that wait on the host while others compute, one at a time is on the device."""

    def __init__(self) -> None:
        self._waiting: list[CpuOffload] = []

    def join(self, role: CpuOffload) -> None:
        """From now on it waits on the host while others compute."""
        self._waiting.append(role)

    def enter(self, role: CpuOffload, training: bool = True) -> None:
        """The others leave, it comes. training: with all that an update needs; otherwise its weights alone."""
        for other in self._waiting:
            if other is not role:
                other.leave()
        if not training and role in self._waiting:
            role.leave(weights=False)
        role.come_back(training)

    def clear(self) -> None:
        """All of them leave."""
        for role in self._waiting:
            role.leave()
