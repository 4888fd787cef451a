"""Take level 2 away and a Megatron trainer remains."""

import importlib.abc
import sys

from tests.distributed.forkserver import run_ranks
from tests.inner.runs import LAYOUTS, make_config


class NoOuter(importlib.abc.MetaPathFinder):
    """Refuses every import of level 2."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "dilocox.outer" or fullname.startswith("dilocox.outer."):
            raise ImportError(f"{fullname} is blocked")
        return


def _train(rank, layout):
    # The fork server has the whole package loaded: import what is left of it anew.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("dilocox", "tests")]:
        del sys.modules[name]
    sys.meta_path.insert(0, NoOuter())
    from tests.inner import runs

    config = runs.make_config(parallel=layout)
    inner = runs.make_inner(config, runs.join_island(rank, config))
    return runs.train(inner, config, range(20)), [name for name in sys.modules if "dilocox.outer" in name]


def test_an_island_trains_with_imports_of_level_2_blocked():
    layout = LAYOUTS["TP2"]
    answers = run_ranks(_train, make_config(parallel=layout).parallel.ranks_per_island, layout)
    for steps, loaded in answers:
        assert loaded == []
        assert steps[-1][0] < steps[0][0] - 0.5
