"""A Slurm of this machine's own: two nodes in network namespaces, with daemons, keys and
configuration in a folder.

Nothing is installed or written outside that folder but /etc/netns, which `ip netns` lays over a
node's /etc and which goes again.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from _ranks import output_of
from gradcomp.launch.variables import NAMES

from gradcomp.bench.hosts import Hosts, unavailable
from gradcomp.plan.links import Link

PROGRAMS = ("srun", "sbatch", "slurmctld", "slurmd", "munged")
CONF = """\
ClusterName=gradcomp
SlurmctldHost={control}(10.77.0.1)
AuthInfo=socket={here}/munge.socket
SlurmUser=root
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool.%n
SlurmdPidFile={here}/slurmd.%n.pid
SlurmctldPidFile={here}/slurmctld.pid
SlurmdLogFile={here}/slurmd.%n.log
SlurmctldLogFile={here}/slurmctld.log
TmpFS={here}/tmp.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
NODE = "NodeName=node{k} NodeAddr={address} NodeHostname={host} CPUs=2 RealMemory=100 State=UNKNOWN"
START_S = 30.0


def missing():
    """Return why there can be no Slurm here, "" if there can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = ", ".join(name for name in PROGRAMS if shutil.which(name, path=path) is None)
    install = "apt-get install slurm-wlm munge libpmix-dev"
    return f"{absent} not found: {install}" if absent else unavailable()


@contextlib.contextmanager
def slurm(folder):
    """Yield a `Slurm`, whose daemons and nodes end with the block."""
    with contextlib.ExitStack() as closing:
        yield Slurm(folder, closing)


class Slurm:
    """The cluster: `run` starts a command on its first node, `batch` a job."""

    def __init__(self, folder, closing):
        self.folder, self._closing, self._started = folder, closing, []
        hosts = self._hosts = closing.enter_context(Hosts(2, Link(math.inf)))
        names = [hosts.command(k)[3] for k in range(2)]
        known = [f"{hosts.address(k)} node{k} {name}\n" for k, name in enumerate(names)]
        for k, name in enumerate(names):
            own = Path("/etc/netns") / name
            own.mkdir(parents=True)
            closing.callback(shutil.rmtree, own)
            (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
            for what in ("spool", "tmp"):
                (folder / f"{what}.node{k}").mkdir()
        (folder / "state").mkdir()
        nodes = [
            NODE.format(k=k, address=hosts.address(k), host=name) for k, name in enumerate(names)
        ]
        conf = CONF.format(here=folder, control=names[0], nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        folder.chmod(0o755)
        files = ("socket", "pid-file", "log-file", "seed-file")
        paths = [f"--{what}={folder / f'munge.{what}'}" for what in files]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *paths)
        self._until((folder / "munge.socket").exists, "munged")
        self._daemon(*hosts.command(0), "slurmctld", "-D")
        for k in range(2):
            self._daemon(*hosts.command(k), "slurmd", "-D", "-N", f"node{k}")
        self._until(self._is_idle, "slurmctld and slurmd")

    def _is_idle(self):
        return self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"]

    def run(self, *words, timeout=100, **variables):
        """Return the ended process of a command on node0, what it printed as text."""
        env = self._environment(**variables)
        return output_of(*self._hosts.command(0), *words, env=env, timeout=timeout)

    def batch(self, *words, timeout=100, **variables):
        """Submit with sbatch and return the state in which the job ends: sbatch's own --wait
        looks every half a minute.
        """
        submitted = self.run("sbatch", "--parsable", *words, **variables)
        assert submitted.returncode == 0, submitted.stderr
        begun = time.monotonic()
        while time.monotonic() - begun < timeout:
            told = self.run("scontrol", "show", "job", "-o", submitted.stdout.strip()).stdout
            (state,) = re.findall(r"JobState=(\w+)", told)
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
            time.sleep(0.3)
        raise TimeoutError(f"the job has not ended after {timeout} s:\n{told}")

    def _environment(self, **more):
        kept = {k: v for k, v in os.environ.items() if k not in NAMES}
        kept |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        kept["PATH"] += ":/usr/sbin:/sbin"
        return kept | {k: str(v) for k, v in more.items()}

    def _daemon(self, *words):
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        with open(self.folder / f"daemon{len(self._started)}.txt", "w") as out:
            process = subprocess.Popen(words, env=self._environment(), stdout=out, **pipes)
        self._started.append(process)
        self._closing.callback(self._end, process)

    def _end(self, process):
        for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                return

    def _until(self, is_there, what):
        deadline = time.monotonic() + START_S
        while not is_there():
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._started):
                files = sorted(self.folder.glob("*.txt"))
                said = [f"{path.name}: {path.read_text()[-2000:]}" for path in files]
                raise RuntimeError("\n".join([f"{what} did not start:", *said]))
            time.sleep(0.1)
