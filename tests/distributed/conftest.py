"""Fixtures for tests with real ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.forked_ranks import ForkedRanks


@pytest.fixture(scope="session")
def forked_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRanks]:
    """Process that forks the ranks of jobs."""
    forked = ForkedRanks(tmp_path_factory.mktemp("forked_ranks"))
    yield forked
    forked.stop()
