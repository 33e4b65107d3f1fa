# Runs at the start of every Python program that `epcachectl run` starts, and of its children,
# because this directory is on their PYTHONPATH.
#
# When the program imports onnxruntime, it loads epcache, which replaces ONNX Runtime's classes; see
# ../__init__.py. If anything fails here, the program runs as without it, and the report has the
# reason. The syntax is that of all Python versions, because the program's is not known.
#
# EPCACHE_RUN         the options, JSON; see ../_settings.py
# EPCACHE_RUN_REPORT  the file to which events are appended as lines of JSON; optional

import os
import sys

# The same as in importlib, because importing that would slow down the start of every program.
try:
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder, spec_from_file_location
except ImportError:  # another implementation of Python, or before 3.5
    if sys.version_info >= (3, 4):
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec, spec_from_file_location

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "onnxruntime"


def report(line):
    # A single write in append mode, so that lines of several processes do not mix.
    path = os.environ.get("EPCACHE_RUN_REPORT")
    if not path:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, line.encode("utf-8"))
        finally:
            os.close(fd)
    except OSError:
        pass  # epcachectl has ended, or this process has changed its user


class Loader(object):
    """Loads onnxruntime by its own loader; epcache changes it before the program gets it."""

    def __init__(self, finder, loader):
        self._finder = finder
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module)


class Finder(object):
    """Intercepts the import of onnxruntime and its execution providers, and finds them in the
    directory of --runtime.
    """

    def __init__(self):
        self._run = None  # epcache._run, after its import
        self._broken = False

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(NAME) or path is not None:
            return None
        spec = self._from_runtime(name) or self._found(name, path, target)
        if (
            name == NAME
            and spec is not None
            and hasattr(spec.loader, "exec_module")
            and not self._broken
        ):
            spec.loader = Loader(self, spec.loader)
        return spec

    def find_distributions(self, context=None):
        # So that importlib.metadata has the version of the imported package.
        name = getattr(context, "name", None) or ""
        run = self._loaded_run() if name.replace("-", "_").startswith(NAME) else None
        return run.runtime_distributions(name) if run is not None else []

    def invalidate_caches(self):
        pass

    def loaded(self, module):
        run = self._loaded_run()
        if run is not None:
            run.take_over(module)

    def _from_runtime(self, name):
        run = self._loaded_run()
        return run.runtime_spec(name) if run is not None else None

    def _found(self, name, path, target):
        if name == NAME + "_genai":  # also without an import of onnxruntime
            report(
                '{"kind": "other", "pid": %d, "what": "%s", '
                '"why": "it creates its sessions in C++"}\n' % (os.getpid(), name)
            )
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _loaded_run(self):
        if self._run is None and not self._broken:
            try:
                self._run = load()
            except BaseException as error:
                if not isinstance(error, Exception):
                    raise
                self._broken = True
                failed(error)
        return self._run


def load():
    """Loads epcache from the directory above this one. That is not on PYTHONPATH, because the
    program must not find the other packages beside epcache.
    """
    if "epcache" not in sys.modules:
        directory = os.path.dirname(os.path.dirname(HERE))
        init = os.path.join(directory, "__init__.py")
        spec = spec_from_file_location("epcache", init, submodule_search_locations=[directory])
        module = module_from_spec(spec)
        sys.modules["epcache"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["epcache"]
            raise
    __import__("epcache._run")
    return sys.modules["epcache._run"]


def failed(error):
    import json

    why = "epcache cannot be used in this process: %s: %s" % (type(error).__name__, error)
    report(json.dumps({"kind": "failed", "pid": os.getpid(), "why": why}) + "\n")


def chain():
    """Runs the sitecustomize that this one hides, if there is one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def begin():
    if not os.environ.get("EPCACHE_RUN"):
        return
    version = "%d.%d.%d" % sys.version_info[:3]
    old = sys.version_info < (3, 10)
    report(
        '{"kind": "python", "pid": %d, "version": "%s", "old": %s}\n'
        % (os.getpid(), version, str(old).lower())
    )
    if not old:
        sys.meta_path.insert(0, Finder())


begin()
if sys.version_info >= (3, 4):
    chain()
