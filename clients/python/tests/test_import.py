"""The package as it is imported: every public name is there, and none costs anything before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import epcache
import pytest

CLIENT = str(Path(__file__).parent.parent)


def test_every_name_is_there() -> None:
    pytest.importorskip("onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes")
    assert set(epcache._MODULES) | {"__version__"} == set(epcache.__all__)
    for name in epcache.__all__:
        assert getattr(epcache, name) is not None
        assert name in dir(epcache)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        epcache.nothing  # noqa: B018


def test_import_brings_nothing_heavy() -> None:
    """Counted in modules, for times are those of the machine: onnxruntime brings the few that are left."""
    code = (
        "import sys; before = set(sys.modules); import epcache\n"
        "ours = {name for name in sys.modules if name.startswith('epcache')}\n"
        "assert ours == {'epcache', 'epcache._version'}, ours\n"
        "heavy = {'dataclasses', 'inspect', 'pathlib', 'socket', 'threading', 'json', 'onnxruntime'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "epcache.Client\n"
        "assert 'onnxruntime' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": CLIENT})
