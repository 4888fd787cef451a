"""What every test process needs before anything else, and which tests are heavy wherever they stand."""

import os

import pytest

# torch asks the name server for the name of every address that it connects to, loopback included; an answer
# that is lost would cost 5 s, more than some tests wait for.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# First: what `-m` leaves out is decided in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """SLURM and network namespaces are heavy, always."""
    for item in items:
        if item.get_closest_marker("slurm") or item.get_closest_marker("netns"):
            item.add_marker("heavy")
