"""Temporary folders of untrusted programs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def temporary_folder(prefix: str) -> AsyncIterator[Path]:
    """Yields a new folder, and removes it with all that programs have left there."""
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(_remove, folder)


def _remove(folder: str) -> None:
    # `shutil.rmtree` holds a descriptor and a stack frame for each level, of which a program can make thousands.
    if os.geteuid():  # root needs no permission
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)
