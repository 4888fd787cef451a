"""`dilocox submit`: site files, job scripts, and what is handed to sbatch (a recording stand-in here)."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.cli import main
from dilocox.config.load import load_config
from dilocox.errors import ConfigError
from dilocox.submit.jobs import SubmittedRun, jobs_of
from dilocox.submit.script import launch_folder
from dilocox.submit.site import parse_site

LIGHTHOUSE = "http://10.0.0.1:29510"
RECORDER = """#!/bin/bash
n=$(ls "$RECORD" | wc -l)
{ echo "$0 $*"; pwd; cat; } > "$RECORD/$(printf %02d "$n")"
echo "$((100 + n))"
"""


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "run: {name: trial, device: cpu}\n"
        "parallel: {num_islands: 2, ranks_per_island: 4, nodes_per_island: 2}\n"
        "inner: {global_batch_size: 4}\n"
    )
    return tmp_path


@pytest.fixture
def recorded(run_folder, monkeypatch):
    """sbatch and ssh that record their arguments, folder and input; sbatch counts job ids from 100."""
    commands, record = run_folder / "bin", run_folder / "record"
    commands.mkdir()
    record.mkdir()
    for name in ("sbatch", "ssh"):
        (commands / name).write_text(RECORDER)
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(record))
    return lambda: [path.read_text() for path in sorted(record.iterdir())]


def write_site(folder, text, name="here"):
    (folder / f"{name}.yaml").write_text(text)
    return f"{name}.yaml"


def submit(*arguments):
    return main(["submit", "run.yaml", *arguments])


def jobs(folder, **site):
    config = load_config(folder / "run.yaml")
    return {
        job.name: job
        for job in jobs_of(parse_site({"name": "here"} | site), SubmittedRun(config, "run.yaml", ()))
    }


def head(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def test_dry_run_writes_the_files_and_submits_nothing(run_folder, recorded, capsys):
    site = write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\n")
    assert submit("--site", site, "--dry-run") == 0
    assert recorded() == []
    folder = run_folder / "runs/trial/submit/here"
    assert sorted(path.name for path in folder.iterdir()) == ["island_0.sbatch", "island_1.sbatch"]
    assert "runs/trial/submit/here/island_0.sbatch" in capsys.readouterr().out


def test_submits_each_island_and_says_how_to_watch_and_stop(run_folder, recorded, capsys):
    site = write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\n")
    assert submit("--site", site) == 0
    calls = recorded()
    assert len(calls) == 2
    assert "export ISLAND_ID=1" in calls[1]
    assert calls[0].splitlines()[1] == str(run_folder)
    assert (run_folder / "runs/trial/logs").is_dir()
    printed = capsys.readouterr().out
    for line in ("island_0: job 100", "squeue --jobs=100,101", "scancel --batch --signal=TERM 100 101"):
        assert line in printed


def test_the_head_is_the_shipped_one_with_the_site_put_in(run_folder):
    script = jobs(
        run_folder,
        lighthouse=LIGHTHOUSE,
        partition="gpu",
        account="abc",
        time="12:00:00",
        gpus_per_node=4,
        constraint="a100&ib",
        exclusive=True,
        grace_s=600,
        sbatch_lines=["--mail-type=END"],
    )["island_0"].script
    options = head(script)
    expected = {
        "job-name": "trial-island_0",
        "nodes": "2",
        "partition": "gpu",
        "account": "abc",
        "time": "12:00:00",
        "gpus-per-node": "4",
        "constraint": "a100&ib",
        "exclusive": "",
        "signal": "B:USR1@600",
        "requeue": "",
        "open-mode": "append",
        "mail-type": "END",
        "output": "runs/trial/logs/%x-%j.log",
    }
    assert expected.items() <= options.items()
    assert "##SBATCH" not in script
    # One source: from the settings on, the script is the shipped file.
    shipped = (launch_folder() / "slurm/island.sbatch").read_text()
    assert script.endswith(shipped[shipped.index("# --- Settings:") :])


def test_settings_of_site_and_run_reach_the_script(run_folder):
    script = jobs(
        run_folder,
        lighthouse=LIGHTHOUSE,
        modules=["gcc/12", "cuda/12.4"],
        venv="/home/x_y/.venv",
        interface="eth1",
        port_range="29600-29700",
        fabric_interface="ib0",
        container={"kind": "apptainer", "image": "dilocox.sif"},
        environment={"NCCL_IB_HCA": "mlx5"},
    )["island_1"].script
    for line in (
        "MODULES='gcc/12 cuda/12.4'", "VENV=/home/x_y/.venv", "INTERFACE=eth1", "PORT_RANGE=29600-29700",
        "FABRIC_INTERFACE=ib0", "CONTAINER=apptainer", "CONTAINER_IMAGE=dilocox.sif", "NCCL_IB_HCA=mlx5",
        f"LIGHTHOUSE={LIGHTHOUSE}", "ISLAND_ID=1", "RANKS_PER_NODE=2", "RUN_NAME=trial",
    ):  # fmt: skip
        assert f"export {line}\n" in script


def test_python_is_the_submitting_one_only_where_nothing_else_is_said(run_folder):
    assert f"export PYTHON={sys.executable}\n" in jobs(run_folder, lighthouse=LIGHTHOUSE)["island_0"].script
    with_venv = jobs(run_folder, lighthouse=LIGHTHOUSE, venv="/v")["island_0"].script
    assert "export PYTHON=/" not in with_venv


def test_a_lighthouse_job_comes_first_and_is_found_by_its_file(run_folder, recorded):
    stale = run_folder / "runs/trial/lighthouse"
    stale.parent.mkdir(parents=True)
    stale.write_text("http://dead:1\n")
    assert submit("--site", write_site(run_folder, "lighthouse: job\nlighthouse_port: 29999\n")) == 0
    lighthouse, island, _ = recorded()
    assert "export LIGHTHOUSE_PORT=29999" in lighthouse
    assert "export LIGHTHOUSE_FILE=runs/trial/lighthouse" in lighthouse
    assert "export LIGHTHOUSE_FILE=runs/trial/lighthouse" in island
    assert not stale.exists()


def test_one_allocation_is_one_job_of_all_nodes(run_folder):
    (job,) = jobs(run_folder, layout="one_allocation").values()
    assert head(job.script)["nodes"] == "4"
    assert "export NUM_ISLANDS=2" in job.script


def test_a_chain_waits_for_the_link_before_and_does_not_requeue(run_folder, recorded, capsys):
    site = write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\nchain: 3\nislands: [0]\n")
    assert submit("--site", site) == 0
    first, second, third = recorded()
    assert "--dependency" not in first.splitlines()[0]
    assert "--dependency=afterany:100" in second.splitlines()[0]
    assert "--dependency=afterany:101" in third.splitlines()[0]
    assert "export AT_LIMIT=exit" in first
    assert "island_0: job 100 then 101 then 102" in capsys.readouterr().out


def test_several_sites_in_one_call_one_of_them_over_ssh(run_folder, recorded, capsys):
    here = write_site(run_folder, f"islands: [0]\nlighthouse: {LIGHTHOUSE}\n")
    there = write_site(
        run_folder,
        f"islands: [1]\nlighthouse: {LIGHTHOUSE}\n"
        "host: user@far\nworkdir: /scratch/run\nlaunch_dir: /opt/launch\n",
        name="far",
    )
    assert submit("--site", here, "--site", there) == 0
    first, second = recorded()
    assert first.splitlines()[0].endswith("sbatch --parsable")
    called = second.splitlines()[0]
    assert "ssh user@far cd /scratch/run && mkdir -p runs/trial/logs && sbatch --parsable" in called
    assert "export LAUNCH_DIR=/opt/launch" in second
    assert "export CONFIG=run.yaml" in second
    assert "ssh user@far scancel" in capsys.readouterr().out


def test_overrides_and_islands_of_the_command_line(run_folder, recorded):
    site = write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\n")
    assert submit("--site", site, "--islands", "1", "--set", "inner.lr=1e-4") == 0
    (call,) = recorded()
    assert "export ISLAND_ID=1" in call
    assert "export TRAIN_ARGUMENTS='--set inner.lr=1e-4'" in call


def test_a_refusal_of_sbatch_is_one_line_with_its_reason(run_folder, recorded, capsys):
    refusing = run_folder / "bin/sbatch"
    refusing.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpux' >&2; exit 1\n")
    assert submit("--site", write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\n")) == 1
    said = capsys.readouterr().err
    assert "job island_0 was refused: sbatch: error: invalid partition specified: gpux" in said


WRONG_SITES = {
    "nonsense: 1": "site.nonsense",
    "partition: 3": "site.partition",
    "time: 24": "site.time",
    "time: soon": "site.time",
    "layout: round": "site.layout",
    "host: far": "site.workdir",
    "{venv: /a, conda_env: b, lighthouse: job}": "site.conda_env",
    "{layout: one_allocation, lighthouse: job}": "site.lighthouse",
    "{layout: one_allocation, islands: [0]}": "site.layout",
    "{lighthouse: job, islands: [0]}": "site.lighthouse",
    "lighthouse: 10.0.0.1": "site.lighthouse",
    "{lighthouse: job, container: {kind: docker, image: x}}": "site.container.kind",
    "{lighthouse: 'http://a:1', islands: [0, 0]}": "site.islands",
    "{lighthouse: 'http://a:1', islands: [7]}": "site.islands",
    "{lighthouse: job, gpus_per_node: 1}": "site.gpus_per_node",
    "name: here": "site.lighthouse",
    "sbatch_lines: [mail]": "site.sbatch_lines.0",
    "[1, 2]": "--site",
    "a: [": "--site",
}


@pytest.mark.parametrize("text", WRONG_SITES)
def test_a_wrong_site_is_one_line_that_names_the_field(run_folder, recorded, capsys, text):
    assert submit("--site", write_site(run_folder, text + "\n")) == 2
    said = capsys.readouterr().err
    assert f"error: {WRONG_SITES[text]} = " in said
    assert said.count("\n") == 1
    assert recorded() == []
    assert not (run_folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--site", "missing.yaml"], "--site"),
        (["--site", "here.yaml", "--islands", "a"], "--islands"),
        (["--site", "here.yaml", "--site", "here.yaml", "--islands", "0"], "--islands"),
        (["--site", "here.yaml", "--site", "here.yaml"], "site.islands"),
        (["--site", "here.yaml", "--set", "data.split=9, 1,0"], "--set"),
    ],
)
def test_wrong_arguments_are_one_line(run_folder, recorded, capsys, arguments, field):
    write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\n")
    assert submit(*arguments) == 2
    assert f"error: {field} = " in capsys.readouterr().err
    assert recorded() == []


def test_generated_scripts_are_valid_bash(run_folder):
    for layout in ({"lighthouse": "job"}, {"layout": "one_allocation"}):
        for job in jobs(run_folder, **layout).values():
            assert subprocess.run(["bash", "-n"], input=job.script, text=True, check=False).returncode == 0


def test_the_launch_files_travel_with_the_package():
    assert launch_folder() == (Path(__file__).parents[2] / "launch").resolve()
    with pytest.raises(ConfigError):
        parse_site({})


def test_a_home_folder_is_expanded_where_it_is(recorded, run_folder, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(run_folder / "home"))
    site = write_site(run_folder, f"lighthouse: {LIGHTHOUSE}\nvenv: ~/env\nislands: [0]\n")
    assert submit("--site", site, "--set", "run.output_dir=~/runs") == 0
    (job,) = recorded()
    home = f"{run_folder}/home"
    assert f"#SBATCH --output={home}/runs/trial/logs" in job and f"OUTPUT_DIR={home}/runs" in job
    assert "export VENV=~/env" in job
    remote = write_site(
        run_folder, f"lighthouse: {LIGHTHOUSE}\nhost: login\nworkdir: ~/w\nlaunch_dir: /l\n", name="far"
    )
    assert submit("--site", remote, "--set", "run.output_dir=~/runs") == 2
    assert "another folder on login" in capsys.readouterr().err
    assert submit("--site", remote) == 0
    assert "cd ~/w &&" in recorded()[1]
