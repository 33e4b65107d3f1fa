"""The wheel of a new user: installed into its own environment, without a service or Go, with an
empty home, as an ordinary user if the tests run as root.

`make wheel-proof` does the same with pip's own commands, both wheels from the index, and a second
build.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE
from running import PROGRAMS, python

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
NOBODY = 65534
QNN = "QNNExecutionProvider"  # because it compiles on any x86-64
PROGRAM = f"""
import epcache
options = epcache.SessionOptions()
session = epcache.InferenceSession("model.onnx", options, ep=("{QNN}:CPU", {{"soc_model": "60"}}))
print(session.epcache.outcome, session.get_providers()[0], epcache.__file__)
"""

pytestmark = [
    pytest.mark.skipif(not shutil.which("go"), reason="building the programs needs Go"),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the execution provider of this test is for x86-64"
    ),
]


class User:
    """A user with only the wheel, for the duration of a test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / ".local" / "state" / "epcached"
        self._as: dict[str, Any] = {}
        packages = subprocess.check_output(
            [python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        if os.geteuid() == 0:
            nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            if (
                subprocess.run(["/usr/bin/test", "-x", packages], check=False, **nobody).returncode
                == 0
            ):
                self._as = nobody
                os.chown(home, NOBODY, NOBODY)
            else:
                print(
                    f"{packages} is closed to others: the wheel is tried as root",
                    file=sys.__stderr__,
                )
        # For numpy, and for pip.
        self._environment = {
            "HOME": str(home),
            "PATH": f"{home}/venv/bin:/usr/bin:/bin",
            "PYTHONPATH": packages,
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def __call__(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        line = [str(one) for one in command]
        return subprocess.run(
            line,
            cwd=self.home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=100,
            **self._as,
        )

    def output_of(self, *command: str | Path) -> str:
        ended = self(*command)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def interpreter(self) -> str:
        """Returns a Python of the tests' version that this user may run, because their packages are
        for that version; "" if there is none.
        """
        wanted = "%d.%d\n"
        for one in (python(), "/usr/bin/python3"):
            try:
                ended = self(one, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
            except PermissionError:  # it is in a directory that is closed to others
                continue
            if ended.stdout == wanted % sys.version_info[:2]:
                return one
        return ""

    def pip(self, *arguments: str | Path) -> str:
        # The tests' pip, because installing pip into the environment would take longer than
        # everything else.
        return self.output_of(
            self.interpreter(),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "--python",
            self.home / "venv/bin/python",
            *arguments,
        )

    def kept(self) -> list[Path]:
        """Returns the files in the store."""
        directories = [self.state / name for name in ("objects", "views", "staging", "manifests")]
        return [  # os.walk, because the daemon may remove a directory meanwhile
            Path(above) / name
            for directory in directories
            for above, _, names in os.walk(directory)
            for name in names
        ]

    def daemons(self) -> list[int]:
        return [
            int(pid.name)
            for pid in Path("/proc").iterdir()
            if pid.name.isdigit() and f"--state\0{self.state}\0".encode() in line_of(pid)
        ]


def line_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


@pytest.fixture
def user(models: Any) -> Iterator[User]:
    home = Path(tempfile.mkdtemp(prefix="epc-"))  # a short path, for sockets
    home.chmod(0o755)
    one = User(home)
    if not one.interpreter():
        shutil.rmtree(home)
        pytest.skip(
            f"an ordinary user may run neither {python()} nor another Python of its version"
        )
    shutil.copy(models.path("tiny-mlp"), home / "model.onnx")
    (home / "program.py").write_text(PROGRAM)
    shutil.copy(PROGRAMS / "plain.py", home / "plain.py")
    yield one
    for pid in one.daemons():
        os.kill(pid, signal.SIGTERM)
    limit = time.monotonic() + 120
    while one.daemons() and time.monotonic() < limit:
        time.sleep(0.02)
    for path in home.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(home)


def test_quickstart_with_an_installed_wheel(
    user: User, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    build = [
        python(),
        str(HERE.parents[1] / "build_wheel.py"),
        str(tmp_path),
        MACHINES[platform.machine()],
    ]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    shutil.copy(wheel, user.home)
    user.output_of(user.interpreter(), "-m", "venv", "--without-pip", user.home / "venv")
    user.pip("install", "--no-index", user.home / wheel.name)
    [packages] = (user.home / "venv" / "lib").glob("python3*/site-packages")
    # as `pip install onnxruntime-qnn onnxruntime` leaves them
    for one in runtime("qnn-2.7.0").glob("onnxruntime*"):
        (packages / one.name).symlink_to(one)

    for outcome in ("compiled", "hit"):
        said = user.output_of(user.home / "venv/bin/python", "-W", "error", "program.py").split()
        assert said[:2] == [outcome, QNN] and said[2].startswith(str(user.home))
    assert len(user.daemons()) == 1
    assert user.output_of(
        "epcachectl", "get", "model.onnx", "--ep", f"{QNN}:CPU", "--option", "soc_model=60"
    ).startswith("hit ")

    # epcachectl run finds its hook in the environment, and the program imports epcache from there.
    flags = (
        "--ep",
        f"{QNN}:CPU",
        "--option",
        "soc_model=60",
        "--verify-output",
        "0",
        f"--report={user.home}/report",
        "--json",
    )
    code = (
        "import os, onnxruntime; onnxruntime.InferenceSession('model.onnx'); "
        "print(os.environ['PYTHONPATH'].split(':')[0])"
    )
    assert f"{packages}/epcache/_run/hook\n" in user.output_of(
        "epcachectl", "run", *flags, "--", "python", "-c", code
    )
    report = json.loads((user.home / "report").read_text())
    assert report["outcomes"] == {"hit": 1} and report["notes"] == [], report

    user.output_of("epcachectl", "rm", "--all", "--yes")
    user.pip("uninstall", "--yes", "epcache")
    left = {str(path.relative_to(user.home)) for path in user.home.rglob("*epcach*")}
    assert left - {wheel.name} <= {
        str(path.relative_to(user.home)) for path in (user.state, *user.state.rglob("*"))
    }
    limit = time.monotonic() + 120
    while (kept := user.kept()) and time.monotonic() < limit:
        time.sleep(0.1)  # the daemon may still be measuring the build's gain, in staging
    assert not kept
