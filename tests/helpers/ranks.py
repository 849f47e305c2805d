"""A program for the tests: forks trainings of several processes, told by lines of JSON, from one that has everything
imported. Each line is answered by the exit status of every process and what was said."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.tensorboard
from rich.console import Console
from torch import nn
from torch.distributed import TCPStore

import atas
from atas import recipes
from atas.cli import report_errors
from atas.training import TrainingProgress
from helpers.probes import one_collapse

torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)  # imports for seconds, as TensorBoard does; let it be done before the fork

EXAMPLES = 33  # four shards are unequal, and the last batch of eight has one example


class Net(nn.Module):
    """Two smooth layers in float64, whatever comes in, so that only the order of sums tells processes apart."""

    def __init__(self, norm):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, 3)
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) if norm else nn.Identity() for width in (4, 6))
        self.double()

    def forward(self, x):
        x = F.softplus(self.norm1(self.conv1(x.double())))
        return self.fc(F.softplus(self.norm2(self.conv2(x))).mean((2, 3)))


class Rigid(nn.Module):
    """A network that cannot take an empty batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        return self.fc(x.view(len(x), -1))


class Flat(nn.Module):
    """A network that has one value of an image in each channel that it normalises."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x.flatten(1))))


class Acting(TrainingProgress):
    """Does something after so many batches."""

    def __init__(self, act, after, quiet):
        super().__init__(Console(quiet=quiet, file=sys.stdout, width=300))
        self._act, self._left = act, after

    def due(self):
        self._left -= 1
        if self._left == 0:
            self._act()
        return False


def train(job, rank):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(EXAMPLES, 1, 8, 8, generator=generator)
    labels = (torch.arange(EXAMPLES) + job.get("other_data", {}).get(str(rank), 0)) % 3
    data = atas.data.from_arrays("noise", images, labels, images[:6], labels[:6])
    torch.manual_seed(1 + rank)  # the first process's weights are everyone's
    net = {"plain": lambda: Net(False), "norm": lambda: Net(True), "rigid": Rigid, "flat": Flat}[job["net"]]()
    acts = job.get("acts", {}).get(str(rank), [None, 0])
    act = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "int": lambda: signal.raise_signal(signal.SIGINT)}
    live = Acting(act.get(acts[0]), acts[1], rank > 0)
    settings = recipes.load(job["recipe"]).with_values(job.get("values", {}))
    probe = one_collapse(Path(job["out"]), job["collapse_in"]) if "collapse_in" in job else None
    resume = job.get("resume", False)
    run = atas.train(settings, out=job["out"], model=net, data=data, resume=resume, live=live, probe=probe)
    torch.save(run.model.state_dict(), f"{job['out']}/rank{rank}.pt")


def child(job, rank, port, said):
    port = os.read(port, 8).decode()  # sent once all processes are forked
    if job["processes"] > 1:
        count = str(job["processes"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.dup2(said, 1)
    os.dup2(said, 2)
    status = 3
    try:
        with contextlib.redirect_stdout(os.fdopen(1, "w", closefd=False)) as out:
            try:
                with report_errors():
                    train(job, rank)
                status = 0
            finally:
                out.flush()
    except SystemExit as end:
        status = end.code
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def run(job):
    """Start the processes; as under torchrun, their parent holds the store, on a port that the system chose.

    The store comes after the forks: a process that is forked while the store's thread holds a lock of the C library
    waits for that lock for ever.
    """
    children, pipes = [], []
    with tempfile.TemporaryFile("w+") as said:
        for rank in range(job["processes"]):
            pipes.append(os.pipe())
            pid = os.fork()
            if pid == 0:
                child(job, rank, pipes[rank][0], said.fileno())
            children.append(pid)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for read, write in pipes:
            os.write(write, str(store.port).encode())
            os.close(read)
            os.close(write)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        said.seek(0)
        return {"codes": codes, "said": said.read()}


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
