"""Runs programs, each in a process forked from this one, which has imported what takes long.

Reads requests as lines of JSON. Answers each with the id of its process, and then with its exit
code. A program finds its process as Python starts one: what was imported here is hidden from it,
and comes back, all of it at once and at no cost, with the first import of any of it.
"""

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import signal
import sys
import threading
import types

# the folder of this file, where `torch` names tests
if not sys.flags.safe_path:
    del sys.path[0]

# what the command line has before its program imports torch
importlib.import_module("tenure._cli._program")
assert "torch" not in sys.modules
_BEFORE = {*sys.modules}
for name in ("torch", *sys.argv[1:]):
    importlib.import_module(name)


class _Hidden(importlib.abc.MetaPathFinder):
    """Modules that a program does not have until it imports the first.

    Those of Python's own library stay: nobody asks whether a program has imported them.
    """

    def __init__(self):
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in _BEFORE and name.partition(".")[0] not in sys.stdlib_module_names
        }
        for name in self._modules:
            del sys.modules[name]
            home, _, attribute = name.rpartition(".")
            # else its package would give it without an import
            if home in _BEFORE:
                vars(sys.modules[home]).pop(attribute, None)
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._modules:
            return None
        if fullname != "torch":
            # by an import of its own, which the program may watch
            importlib.import_module("torch")
        return importlib.machinery.ModuleSpec(fullname, _Loader(self))

    def give(self, name):
        return self._modules[name]

    def show(self):
        sys.meta_path.remove(self)
        for name, module in self._modules.items():
            sys.modules[name] = module
            home, _, attribute = name.rpartition(".")
            if home in _BEFORE:
                setattr(sys.modules[home], attribute, module)


class _Loader(importlib.abc.Loader):
    def __init__(self, hidden):
        self._hidden = hidden

    def create_module(self, spec):
        module = self._hidden.give(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self._spec
        self._hidden.show()


def _next_program():
    """The request that this process is to run; it is a child then."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    # nobody asks any more
    os._exit(0)


def _become(request):
    modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_TRUNC] * 2)
    for number, (path, mode) in enumerate(zip(request["files"], modes, strict=True)):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["hides"]:
        gc.freeze()
        gc.unfreeze = lambda: None
    main = types.ModuleType("__main__")
    # this module stays, though it is not in the list any more
    main.__dict__["__server__"] = sys.modules["__main__"]
    sys.modules["__main__"] = main
    _Hidden()
    return main.__dict__


def _execute(request, names):
    first, *rest = request["words"]
    path = {"-c": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.realpath(first)))
    if not sys.flags.safe_path:
        sys.path.insert(0, path)
    if first == "-m":
        sys.argv = rest
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), names)
    else:
        sys.argv = [first, *rest]
        names["__file__"] = path = os.path.abspath(first)
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec"), names)


def _run(request):
    """Its exit code, once all that is registered for the end has run."""
    names, code = _become(request), 0
    try:
        _execute(request, names)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        # without the frames of this file
        error.__traceback__ = error.__traceback__.tb_next.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = found = sys.exc_info()
        sys.excepthook(*found)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code & 0xFF


# Not to the end of Python, which takes all of torch apart: that costs more than the program.
os._exit(_run(_next_program()))
