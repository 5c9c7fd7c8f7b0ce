"""The ways to start a job: the launcher and its signals, mpirun, nobody; and the scripts around them."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run

from tests.helpers.launched import (
    HELD,
    PATIENCE_S,
    ROOT,
    error_lines,
    finished,
    hold,
    program_of,
    started,
    torchrun,
    train_command,
    watched,
    write_inputs,
)
from tests.helpers.tiny_jobs import metrics_of
from verl_mg.distributed import rendezvous
from verl_mg.distributed.watchdog import EXIT_RANK_LOST
from verl_mg.launch.command import _parsed

MPIRUN = ["mpirun", "--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_launcher_given_a_signal_ends_all_ranks(number):
    with started([*torchrun(2), *watched()]) as launcher:
        launcher.wait_for_steps()
        launcher.send_signal(number)
        assert launcher.ended() == (128 + number, "", "")


@pytest.mark.parametrize("unnamed", [None, 29500])
def test_launcher_of_one_node_without_an_address_uses_a_local_rendezvous(monkeypatch, unnamed):
    """The parser of torch 2.11 has the port as its default."""
    parser = run.get_args_parser()
    parser.set_defaults(master_port=unnamed)
    monkeypatch.setattr(run, "get_args_parser", lambda: parser)
    parsed = _parsed(["--nproc-per-node", "2", "job.py"])
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint) == ("c10d", "localhost:0")
    assert _parsed(["--master-port", "1234", "job.py"]).rdzv_backend == "static"


def test_launcher_without_its_other_host_reports_one_line():
    elsewhere = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=1", "--rdzv-conf=timeout=2"]
    reported = finished([*torchrun(1, *elsewhere), *watched()]).refusal(EXIT_RANK_LOST)
    assert "hosts do not reach each other" in reported and "(127.0.0.1, 1)" in reported


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_job_ended_by_a_signal_resumes_bitwise_identical(tmp_path, number):
    inputs = write_inputs(tmp_path / "inputs")
    settings = ["checkpoint.every=0", "job.iterations=9"]
    whole, parts = (
        [*torchrun(2), *train_command(inputs, tmp_path / name, *settings, recipe=HELD)] for name in ("whole", "parts")
    )
    hold(tmp_path / "parts", 4)
    with started(parts) as launcher:
        launcher.iterations_done(tmp_path / "parts", 3)
        launcher.send_signal(number)
        code, _, err = launcher.ended()
    (checkpoint,) = (tmp_path / "parts" / "checkpoints").iterdir()
    done = len(metrics_of(tmp_path / "parts"))
    # Ranks that are slow get the signal before they begin the iteration in which they are held.
    assert code == 128 + number and int(checkpoint.name) == done in (3, 4)
    assert f"stopped on request after iteration {done}; the same command resumes from there" in err
    for command in (parts, whole):
        finished(command).completed()
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


def catches(pid: int, number: int) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (number - 1) & 1)


def test_launcher_waiting_for_hosts_ends_on_sigterm(tmp_path):
    waiting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "alone"]
    with started([*torchrun(1, *waiting), *watched()]) as launcher:
        while not catches(program_of(launcher.pid), signal.SIGTERM):
            time.sleep(0.1)
        launcher.terminate()
        code, _, err = launcher.ended()
    assert code == 128 + signal.SIGTERM and "Traceback" not in err


def test_launcher_given_sigint_ends_without_traceback():
    # Ranks ignore it where the test process does, as a shell's jobs in the background do.
    with started([*torchrun(2, "--shutdown-timeout", "1"), *watched()]) as launcher:
        launcher.wait_for_steps()
        launcher.send_signal(signal.SIGINT)
        code, _, err = launcher.ended()
    assert code == 128 + signal.SIGINT and "SignalException" not in err


@needs_mpirun
def test_ranks_of_mpirun_are_one_job():
    steps = watched("if step == 3: raise UserError(f'rank {rank} of {world.size}')")
    code, out, err = finished(steps, [*MPIRUN, "-n", "2"], warm=False)
    assert code == 2 and out.startswith("steps done\n") and [line[-5:] for line in error_lines(err)] == [" of 2"], err


@pytest.mark.nightly
@needs_mpirun
def test_mpirun_and_torchrun_train_bitwise_identical(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    for name, before, launcher in (("torchrun", [], torchrun(2)), ("mpirun", [*MPIRUN, "-n", "2"], [])):
        layout = ["actor.layout=tp2", "job.iterations=3", "job.save=true"]
        # A program that mpirun starts is the process that PMIx knows, so there it is no fork of another.
        command = [*launcher, *train_command(inputs, tmp_path / name, *layout)]
        finished(command, before, warm=name == "torchrun").completed()
    metrics = metrics_of(tmp_path / "torchrun")
    assert len(metrics) == 3 and metrics == metrics_of(tmp_path / "mpirun")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("torchrun", "mpirun")]
    assert models[0] == models[1]


@pytest.mark.nightly
@needs_mpirun
def test_train_under_mpirun_with_a_mistake_exits_with_one_line(tmp_path):
    command = train_command(tmp_path, tmp_path / "run", recipe="nowhere.py")
    assert "nowhere.py: no such recipe" in finished(command, [*MPIRUN, "-n", "2"], warm=False).refusal()


def test_join_with_another_mpi_names_it(tmp_path):
    pytest.importorskip("mpi4py")
    variables = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    assert "mpi4py: it sees one rank" in finished(train_command(tmp_path, tmp_path), **variables).refusal()


def test_join_without_mpi4py_names_the_package(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')\n")
    variables = {"PMI_SIZE": "4", "PMI_RANK": "0", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    assert "pip install mpi4py" in finished(train_command(tmp_path, tmp_path), **variables).refusal()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, True),
        ({"PMI_SIZE": "8"}, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "16"}, True),
    ],
)
def test_started_by_mpi_given_launcher_variables_detects_mpi(monkeypatch, environment, expected):
    for name in (*rendezvous.SIZE_VARIABLES, "PMIX_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.started_by_mpi() is expected


def test_start_store_with_master_addr_listens_there(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    store = rendezvous._start_store(2, one_host=False)
    assert store.host == "localhost" and store.port > 0
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(rendezvous.UserError, match=r"192\.0\.2\.1: rank 0 cannot listen there .*Set MASTER_ADDR"):
        rendezvous._start_store(2, one_host=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_of_launch_parses_and_names_no_machine(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "kill" not in text.replace("--kill-on-bad-exit", "")
    if script.name not in ("environment.sh", "python.sh"):  # which are sourced
        assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text


def scripted(script: str, tmp_path: Path, *arguments: str, **environment: str) -> str:
    """What a script prints where `python`, `mpirun` and Slurm's commands only tell how they were called."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    answers = {
        "python": '[[ " $* " == *" status "* ]] && exit 3 || exit 0',
        "mpirun": "",
        "scontrol": '[[ $1 != show ]] || printf "node%d\\n" {1..20000}',
        "srun": f"echo files: $(ulimit -Sn) locked: $(ulimit -Sl)\nexit {environment.get('SRUN_ENDS_WITH', '0')}",
    }
    for name, answer in answers.items():
        reported = 'echo "called: $(basename "$0") $*" >&2'
        (tools / name).write_text(f"#!/usr/bin/env bash\n{reported}\n{answer}\n")
        (tools / name).chmod(0o755)
    result = subprocess.run(
        ["bash", "-c", 'ulimit -Sn 128; ulimit -Sl 64; exec bash "$@"', "-", ROOT / "launch" / script, *arguments],
        env={"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return f"{result.stdout}code {result.returncode}"


def test_torchrun_script_on_one_or_many_nodes_starts_launcher(tmp_path):
    one = scripted("torchrun.sh", tmp_path, "r.py", "a=b c", RANKS="2")
    launcher = "called: python -m verl_mg.launch --nproc-per-node 2 --max-restarts 3"
    assert f"{launcher} --standalone -m verl_mg train r.py a=b c" in one
    assert "$ 'python' '-m' 'verl_mg.launch'" in one and "'a=b c'" in one
    assert "RENDEZVOUS=HOST:PORT" in scripted("torchrun.sh", tmp_path, "r.py", NODES="2")
    many = scripted("torchrun.sh", tmp_path, "r.py", NODES="2:4", SPARES="1", RENDEZVOUS="first:4711", JOB="mine")
    nodes = "--nnodes 2:4 --spares 1 --rdzv-backend c10d --rdzv-endpoint first:4711 --rdzv-id mine"
    assert f"{nodes} -m verl_mg train r.py" in many


def test_mpirun_script_with_options_starts_ranks(tmp_path):
    reported = scripted("mpirun.sh", tmp_path, "r.py", "a=1", RANKS="4", MPI_OPTIONS="--hostfile hosts")
    assert "called: mpirun -n 4 --bind-to none --hostfile hosts python -m verl_mg train r.py a=1" in reported
    assert "RANKS" in scripted("mpirun.sh", tmp_path, "r.py")


@pytest.mark.parametrize(("code", "again"), [(0, False), (138, True), (143, True), (2, False)])
def test_slurm_script_with_unfinished_job_requeues_it(tmp_path, code, again):
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "70123", "SLURM_JOB_NUM_NODES": "2"}
    reported = scripted("slurm.sbatch", tmp_path, "r.py", RUN="runs/x", RANKS="8", SRUN_ENDS_WITH=str(code), **slurm)
    assert "called: srun" in reported and "--rdzv-endpoint node1:30123" in reported and "job.output=runs/x" in reported
    assert ("called: scontrol requeue 70123" in reported) is again
    assert reported.endswith(f"code {code}")


def test_slurm_script_gives_ranks_the_largest_limits(tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "70123", "SLURM_JOB_NUM_NODES": "2"}
    reported = scripted("slurm.sbatch", tmp_path, "r.py", RUN="runs/x", **slurm)
    hard = subprocess.run(["bash", "-c", "echo files: $(ulimit -Hn) locked: $(ulimit -Hl)"], stdout=subprocess.PIPE)
    assert hard.stdout.decode() in reported and "files: 128" not in reported


def kubernetes_worker() -> dict[str, Any]:
    job = yaml.safe_load((ROOT / "launch" / "k8s" / "pytorchjob.yaml").read_text())
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]


@pytest.mark.parametrize(
    ("ends", "code"), [("exit 0", 0), ("exit 2", 2), ("exit 3", 137), ("while true; do sleep 0.1; done", 143)]
)
def test_kubernetes_pod_forwards_signals_and_exits_with_retryable_code(tmp_path, ends, code):
    (tmp_path / "python").write_text(f"#!/usr/bin/env bash\ntrap 'exit 143' TERM\necho starts\n{ends}\n")
    (tmp_path / "python").chmod(0o755)
    (container,) = kubernetes_worker()["template"]["spec"]["containers"]
    pod = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert pod.stdout.readline() == "starts\n"
    if "while" in ends:
        while not pod.stderr.readline().startswith("+ wait "):  # which it writes after its trap
            assert pod.poll() is None
        pod.terminate()
    pod.communicate(timeout=PATIENCE_S)
    assert pod.returncode == code


def test_kubernetes_file_of_workers_starts_launcher_with_rdma_and_shared_memory():
    worker = kubernetes_worker()
    (container,) = worker["template"]["spec"]["containers"]
    assert worker["restartPolicy"] == "ExitCode" and "python -m verl_mg.launch -m verl_mg" in container["args"][0]
    pod = worker["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert any(name.startswith("rdma/") for name in container["resources"]["limits"])
    (name,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == name]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
