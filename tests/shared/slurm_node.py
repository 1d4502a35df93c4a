"""A real Slurm on this machine: one node, a private munge, nothing outside one folder. As root, on Debian:

    apt-get install slurm-wlm munge
    python tests/shared/slurm_node.py /tmp/slurm      # runs until Ctrl-C, and says how to use it
    SLURM_CONF=/tmp/slurm/slurm.conf make sweep EXP=batching LAUNCHER=slurm

Jobs of the partition `urgent` push those of `usual` back into the queue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SETTINGS = {
    "partition": "", "account": "", "qos": "", "constraint": "", "minutes": 30, "warning_seconds": 90, "gpus": 0,
    "cpus": None, "memory_gb": None, "setup": [], "further": {},
}  # fmt: skip
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
GPUS = 2  # of the node
_CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SchedulerParameters=bf_interval=1,sched_interval=1
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why no Slurm can be started here; "" if it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd has to be started by root"


@contextlib.contextmanager
def slurm_node(folder: Path, cpus: int = 2, tracking: str = "linuxproc") -> Iterator[Path]:
    """Start munged, slurmctld and slurmd; gives the file for SLURM_CONF. All of them end with the block.

    With the `tracking` linuxproc every process of a job hears Slurm's signals; with pgid, as with cgroup, the first.
    """
    (folder / "munge").mkdir(parents=True, mode=0o700)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for gpu in range(GPUS):  # Slurm deals them out by their device files: these are two of /dev/null
        os.mknod(folder / f"nvidia{gpu}", stat.S_IFCHR | 0o600, os.stat("/dev/null").st_rdev)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-{GPUS - 1}]\n")
    controller, daemon = _free_ports(2)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    numbers = {"controller": controller, "daemon": daemon, "cpus": cpus, "gpus": GPUS}
    config.write_text(_CONFIG.format(folder=folder, host=host, tracking=tracking, **numbers))
    munge = folder / "munge"
    place = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={munge}/socket", *place],
        ["slurmctld", "-D", "-i", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config)],
    ]
    processes: list[subprocess.Popen] = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}.out").open("wb")
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
            log.close()
            time.sleep(0.5)
        _wait_until_idle(environment, processes)
        yield config
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=30)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(processes):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_idle(environment: dict[str, str], processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 60
    while True:
        said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if said.returncode == 0 and "idle" in said.stdout:
            return
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with {process.returncode}: see its log")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no node became idle: {said.stdout} {said.stderr}")
        time.sleep(0.3)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    if trouble := why_not():
        sys.exit(trouble)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with slurm_node(Path(sys.argv[1]).absolute()) as made, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={made}", flush=True)
        signal.pause()
