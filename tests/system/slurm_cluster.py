"""A real Slurm on this machine: slurmctld, a slurmd for each virtual node, and munge.

Everything is in one folder and on loopback; /etc/slurm and /etc/munge are neither read nor
changed. Run it by hand with ``python tests/system/slurm_cluster.py FOLDER``.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel")
PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
# slurmd and slurmctld are where an ordinary user's PATH does not look.
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_SECONDS = 240.0

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
{listen}
# Without cgroups: the processes of a job are found through /proc.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# Without a database.
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
# CPUs, memory and GPUs are given out one by one, so that jobs wait as on a real cluster.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
# The nodes below are believed: they may claim more CPUs than the machine has.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=10
MessageTimeout=100
TCPTimeout=30
BatchStartTimeout=120
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Virtual nodes n0, n1, ... with fake GPUs.

    Parameters
    ----------
    folder : Path
        An empty folder for all that Slurm writes.
    nodes, cpus, memory_mib, gpus : int
        The nodes, and what each of them claims to have.
    """

    def __init__(
        self, folder: Path, nodes: int = 2, cpus: int = 8, memory_mib: int = 16_000, gpus: int = 2
    ) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(nodes)]
        self._node = f"CPUs={cpus} CoresPerSocket={cpus} RealMemory={memory_mib} Gres=gpu:{gpus}"
        self._gpus = gpus
        self._daemons: list[subprocess.Popen] = []

    @property
    def environment(self) -> dict[str, str]:
        """What sbatch, srun and squeue need to find this Slurm."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH}

    def start(self) -> None:
        """Start every daemon, and wait until the nodes take jobs."""
        missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} not found; these tests need a real Slurm: "
                f"apt-get install --no-install-recommends {PACKAGES}"
            )
        self._write_configuration()
        with self._stopped_if_it_fails():
            # --force: a folder that others may read is good enough for a test.
            munged = ["munged", "--foreground", "--force", "--num-threads=2"]
            for option in ("key", "seed", "log"):
                munged.append(f"--{option}-file={self.folder}/munge.{option}")
            munged += [
                f"--socket={self.folder}/munge.socket",
                f"--pid-file={self.folder}/munge.pid",
            ]
            self._start(munged)
            self._wait_for("munged", ["munge", "-S", f"{self.folder}/munge.socket", "-n"])
            self._start(["slurmctld", "-D"])
            self._wait_for("slurmctld", ["scontrol", "ping"])
            for name in self.names:
                self._start(["slurmd", "-D", "-N", name])
            self._wait_for("the nodes", ["sinfo", "-h", "-N", "-o", "%T"], "idle", len(self.names))

    def stop(self) -> None:
        """Cancel every job, and end the daemons that were started here, by their ids."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.run("scancel", "--quiet", f"--user={os.getuid()}")
            wait_until(lambda: not self.run("squeue", "-h"), "jobs to end", 20.0)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def run(self, *command: str | Path) -> str:
        """Run one of Slurm's commands; returns what it printed."""
        done = subprocess.run(
            [*map(str, command)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"{command} left with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job, by the names that scontrol gives."""
        pairs = self.run("scontrol", "show", "job", job_id, "--oneliner").split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def jobs(self) -> list[str]:
        """Ids of the jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%A").split()

    def _start(self, command: list[str]) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_for(self, what: str, command: list[str], word: str = "", times: int = 0) -> None:
        wait_until(
            lambda: self.run(*command).count(word) >= times, f"{what} to answer", START_SECONDS
        )

    @contextlib.contextmanager
    def _stopped_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.stop()
            for log in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
                error.add_note(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}")
            raise

    def _write_configuration(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for number in range(self._gpus):
            # A link, because Slurm leaves CUDA_VISIBLE_DEVICES unset where this is a plain file.
            (self.folder / f"nvidia{number}").symlink_to("/dev/null")
        host = socket.gethostname().partition(".")[0]
        port, *ports = _free_ports(1 + len(self.names))
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {self._node}"
            for name, port in zip(self.names, ports, strict=True)
        ]
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=host,
                port=port,
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=self.folder,
                listen=_listen(host),
                nodes="\n".join(nodes),
            )
        )
        devices = f"{self.folder}/nvidia[0-{self._gpus - 1}]"
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={name} Name=gpu File={devices}\n" for name in self.names)
        )
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={_cgroup_plugin()}\n")


def wait_until(is_true, what: str, seconds: float = 120.0):
    """Ask again and again; returns the first answer that is true, and no RuntimeError.

    Raises
    ------
    TimeoutError
        It is not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RuntimeError):  # a daemon that is late
            if answer := is_true():
                return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} seconds for {what}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _listen(host: str) -> str:
    """Loopback only, where the host's name is there: slurmctld binds to what the name means."""
    try:
        is_loopback = socket.gethostbyname(host).startswith("127.")
    except OSError:
        is_loopback = False
    return "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if is_loopback else ""


def _cgroup_plugin() -> str:
    """The plugin that touches nothing: slurmd loads one although nothing above uses it."""
    slurmd = shutil.which("slurmd", path=SEARCH)
    words = subprocess.run([slurmd, "-V"], capture_output=True, text=True, check=True).stdout
    year, month = words.split()[-1].split(".")[:2]
    return "disabled" if (int(year), int(month)) >= (24, 5) else "cgroup/v1"


def main(folder: Path) -> None:
    """A Slurm to try things with, until it is interrupted."""
    folder.mkdir(parents=True)
    cluster = SlurmCluster(folder.resolve())
    cluster.start()
    sys.stdout.write(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
