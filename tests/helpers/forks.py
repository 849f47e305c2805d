"""A program for the tests: runs scripts, told by lines of JSON, in forks of a process that has everything imported.

Each line is answered by the exit status of the script, its standard output and its standard error.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback

import torch
import torch.utils.tensorboard

import atas.autotrain
import atas.cli
import atas.evaluation
import atas.report
import atas.sweeps
import atas.training  # noqa: F401

torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)  # imports for seconds; let it be done before the fork


def child(job, out, err):
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = [job["script"], *job["arguments"]]
    status = 1
    try:
        runpy.run_path(job["script"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            child(job, out, err)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return {"status": status, "out": out.read(), "err": err.read()}


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
