"""One SLURM for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, missing_requirement


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[SlurmCluster]:
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The session's cluster, empty before and after the test."""
    yield running_cluster
    running_cluster.cancel_all()
