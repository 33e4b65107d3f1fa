"""The wheel: its build is reproducible, and its programs find each other. `make wheel-proof` runs a
model with it as a new user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not shutil.which("go"), reason="building the programs needs Go")


def build(project: Path, out: Path) -> Path:
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": "1700000001",
        "EPCACHED_COMMIT": "0123456789ab",
    }
    command = [
        sys.executable,
        str(project / "clients" / "python" / "build_wheel.py"),
        str(out),
        "amd64",
    ]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROJECT, tmp_path_factory.mktemp("wheel"))


def test_same_bytes_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    names = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=PROJECT
    ).split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (PROJECT / name).is_file():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, tmp_path / "copy" / name)
    assert build(tmp_path / "copy", tmp_path / "out").read_bytes() == wheel.read_bytes()


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        info = next(name for name in entries if name.endswith("/WHEEL"))
        assert "Tag: py3-none-manylinux_2_17_x86_64\n" in archive.read(info).decode()
        assert b"go.etcd.io/bbolt" in archive.read(info.replace("WHEEL", "licenses/PROGRAMS"))
    programs = {
        name.rpartition("/")[2]: entry
        for name, entry in entries.items()
        if ".data/scripts/" in name
    }
    assert set(programs) == {"epcached", "epcachectl", "epcached-ort", "epcached-remote"}
    assert {entry.external_attr >> 16 for entry in programs.values()} == {0o100755}
    assert {entry.date_time for entry in entries.values()} == {(2023, 11, 14, 22, 13, 20)}


def test_programs_state_the_commit(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/epcachectl"))
        program = Path(archive.extract(name, tmp_path))
    program.chmod(0o755)
    for ask in ("version", "--version"):
        assert "+0123456789ab" in subprocess.check_output([program, ask], text=True)


def test_installed_programs_find_each_other(wheel: Path, tmp_path: Path) -> None:
    """With pip --target, where the programs are beside the package, and in an environment."""
    for where in ([f"--prefix={tmp_path / 'prefix'}"], ["--target", str(tmp_path / "target")]):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
        ]
        subprocess.run([*command, *where, str(wheel)], check=True, capture_output=True)
    for package in (tmp_path / "target", *tmp_path.glob("prefix/lib/python3*/site-packages")):
        ask = "from epcache import _autostart, _worker; print(_autostart.find(), _worker.find())"
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package)}
        found = subprocess.check_output(
            [sys.executable, "-c", ask], env=environment, cwd=tmp_path, text=True
        ).split()
        assert [os.path.basename(path) for path in found] == ["epcached", "epcached-ort"]
        for path in found:
            assert path.startswith(str(tmp_path)) and os.access(path, os.X_OK)
        assert subprocess.check_output([found[0], "--version"], text=True).startswith(
            "epcached version "
        )
