"""Runs programs, each in a process forked from this one, which has imported torch and tenure.

Reads requests as lines of JSON and answers each with its exit code. A program is `__main__` in its
process, and ends with what is registered for its end.
"""

import atexit
import gc
import importlib
import json
import os
import sys
import types

import torch  # noqa: F401  # what takes long is imported before the fork

import tenure.adaptive
import tenure.paging
import tenure.profiler  # noqa: F401

for name in sys.argv[1:]:
    importlib.import_module(name)


def _next_program():
    """The request that this process is to run; it is a child then."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    # nobody asks any more
    os._exit(0)


def _become(request):
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    if request["hides"]:
        gc.freeze()
        gc.unfreeze = lambda: None
    main = types.ModuleType("__main__")
    sys.argv = [request["path"] or "-c"]
    if request["path"]:
        main.__file__ = request["path"]
    # this module stays, though it is not in the list any more
    main.__dict__["__server__"] = sys.modules["__main__"]
    sys.modules["__main__"] = main
    return main.__dict__


def _run(request):
    """Its exit code, once all that is registered for the end has run."""
    names, code = _become(request), 0
    try:
        exec(compile(request["code"], request["path"] or "<string>", "exec"), names)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


# Not to the end of Python, which takes all of torch apart: that costs more than the program.
os._exit(_run(_next_program()))
