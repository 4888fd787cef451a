"""The shipped scripts: the shell checker and SLURM itself accept them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])
JOBS = sorted(LAUNCH.rglob("*.sbatch"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_is_clean(script):
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slurm
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_sbatch_accepts_it(cluster, script):
    assert "to start at" in cluster.run("sbatch", "--test-only", str(script))


def test_all_three_kinds_of_jobs_are_there():
    assert {path.name for path in JOBS} == {"island.sbatch", "islands.sbatch", "lighthouse.sbatch"}
