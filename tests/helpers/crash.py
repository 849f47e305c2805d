"""Work that is killed on its way, for the scripts that the fixture `run_script` runs.

It is forked from a process that has everything imported, so a kill costs milliseconds. When it is killed is counted in
calls or writes, not in seconds: the same on a fast and on a busy machine, and again for the same seed.
"""

import os
import signal
import sys
import traceback


def attempt(work):
    """Call `work` in a process of its own: the number that it returned, 0 for none, 1 if it raised an error, -9 if it
    was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_calls(work):
    """Return how many functions `work` calls in a process of its own; it must end well."""
    reader, writer = os.pipe()

    def counted():
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        status = work()
        sys.setprofile(None)
        os.write(writer, str(calls).encode())
        return status

    status = attempt(counted)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert status == 0, status
        return int(answer.read())


def die_at_call(number):
    """Die when the main thread has called or left this many functions, in units of `count_calls`."""
    left = number

    def count(frame, event, argument):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def die_in_write(number):
    """Die just before the given sync of a file or folder; a file that is still under its temporary name is torn."""
    left = number

    def due():
        nonlocal left
        left -= 1
        return left == 0

    die_in_write_when(due)


def die_in_write_when(due):
    """Die just before the first sync of a file or folder for which `due()`."""
    sync = os.fsync

    def deadly(descriptor):
        if due():
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = deadly
