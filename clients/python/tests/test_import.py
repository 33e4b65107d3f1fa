"""The import of the package: every public name exists, and its module is imported at first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import epcache
import pytest
from runtimes import RUNTIMES

CLIENT = str(Path(__file__).parent.parent)


def test_every_public_name_can_be_imported() -> None:
    pytest.importorskip(
        "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
    )
    assert set(epcache._MODULES) | {"__version__"} == set(epcache.__all__)
    for name in epcache.__all__:
        assert getattr(epcache, name) is not None
        assert name in dir(epcache)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        epcache.nothing  # noqa: B018


def test_import_of_epcache_is_cheap() -> None:
    """Counts modules, because times depend on the machine."""
    code = (
        "import sys; before = set(sys.modules); import epcache\n"
        "ours = {name for name in sys.modules if name.startswith('epcache')}\n"
        "assert ours == {'epcache', 'epcache._version'}, ours\n"
        "heavy = {'dataclasses', 'inspect', 'pathlib', 'socket', 'threading', 'json', "
        "'onnxruntime'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "epcache.Client\n"
        "assert 'onnxruntime' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": CLIENT}
    )


# Modules that are slow to import, and that a session from the cache does not need.
HEAVY = (
    "asyncio concurrent.futures copy dataclasses glob importlib.metadata inspect json logging "
    "lzma mmap multiprocessing pathlib pkgutil "
    "random shutil signal subprocess tempfile threading urllib.parse"
).split()
NOT_OURS = (
    "_claim _compile _compiled_copy _doctor _events _explanation _functions _jobs _session_group "
    "_worker"
).split()


def test_cached_sessions_import_no_heavy_modules() -> None:
    """A first session from the cache does not import the modules for compiles, autostart and
    others.
    """
    if not RUNTIMES:
        pytest.skip("needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes")
    code = (
        "import sys, onnxruntime; before = set(sys.modules); import epcache\n"
        "epcache.InferenceSession, epcache.SessionOptions, epcache.ExecutionProvider\n"
        f"added = (set(sys.modules) - before) & (set({HEAVY}) | {{f'epcache.{{one}}' for one in "
        f"{NOT_OURS}}})\n"
        "assert not added, added\n"
    )
    paths = os.pathsep.join(
        [CLIENT, *(str(path) for path in RUNTIMES if path.name == "openvino-1.8.1")]
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths}
    )


def test_interpreter_exit_prints_nothing() -> None:
    """Frozen applications unload modules before the last objects, and Python prints errors of
    __del__.
    """
    code = """
import gc, sys
from epcache import _artefact, _claim, _client, _connections, _events
owned = [_artefact.Artefact, _claim.Claim, _connections.Connections, _events.Subscription]
objects = [one.__new__(one) for one in owned] + [_client.Client("/nowhere")]
for module in (_artefact, _claim, _client, _connections, _events):
    for name in [name for name in vars(module) if not name.startswith("__")]:
        setattr(module, name, None)
del objects
gc.collect()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": CLIENT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
