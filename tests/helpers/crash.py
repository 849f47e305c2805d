"""Work that is killed on its way, for the scripts that the fixture `run_script` runs.

It is forked from a process that has everything imported, so that a kill costs milliseconds.
"""

import os
import signal
import time
import traceback


def attempt(work, due=lambda: False):
    """Call `work` in a process of its own, killed as soon as `due()`: the number that it returned, 0 for none, 1 where
    it raised an error, -9 where it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    killed = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if not killed and due():
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.0005)


def after(seconds):
    """Whether so many seconds from now have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def die_in_write(number):
    """Die just before the given sync of a file or folder; a file that is still under its temporary name is torn."""
    sync, left = os.fsync, [number]

    def deadly(descriptor):
        left[0] -= 1
        if not left[0]:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = deadly
