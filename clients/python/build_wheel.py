"""Writes the wheels of epcache, each with the programs epcached, epcachectl, epcached-ort and
epcached-remote for one architecture.

    python build_wheel.py DIR [amd64] [arm64]

The same commit makes the same bytes, in whatever directory: times are the commit's
(SOURCE_DATE_EPOCH), order and modes are fixed, and the programs hold no paths. epcached and
epcachectl are static; epcached-ort needs the system's loader and libc, but no symbol versions, so
the wheel has the oldest tag, glibc 2.17.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
PROGRAMS = ("epcached", "epcachectl", "epcached-ort", "epcached-remote")


def commit_time() -> int:
    """Returns the time of all files in the wheel: SOURCE_DATE_EPOCH, else the commit's."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    return int(
        subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=PROJECT, text=True)
    )


def version() -> str:
    """Returns the version that programs print, with the commit: EPCACHED_COMMIT, else git's."""
    stated = re.search(
        r'(?m)^var version = "(.*)"', (PROJECT / "cmd" / "epcached" / "main.go").read_text()
    )
    assert stated is not None
    commit = os.environ.get("EPCACHED_COMMIT") or subprocess.check_output(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=PROJECT, text=True
    )
    return f"{stated[1]}+{commit.strip()}"


def go(*arguments: str, machine: str) -> str:
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOOS": "linux",
        "GOARCH": machine,
        "GOFLAGS": "",
        "GOAMD64": "v1",
        "GOARM64": "v8.0",
    }
    return subprocess.check_output(["go", *arguments], cwd=PROJECT, env=environment, text=True)


def programs(machine: str, directory: Path) -> None:
    """Builds the programs. They contain neither the directory nor the state of the working copy."""
    commands = [f"./cmd/{name}" for name in PROGRAMS]
    go(
        "build",
        "-trimpath",
        "-buildvcs=false",
        f"-ldflags=-s -w -buildid= -X main.version={version()}",
        "-o",
        f"{directory}/",
        *commands,
        machine=machine,
    )


def notices(machine: str) -> bytes:
    """Returns the licences of the modules linked into the programs, which require it."""
    template = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}|{{.Dir}}{{end}}{{end}}"
    modules = sorted(
        set(go("list", "-deps", "-f", template, "./cmd/...", machine=machine).split("\n")) - {""}
    )
    texts = [
        (
            "The Go programming language",
            Path(go("env", "GOROOT", machine=machine).strip()) / "LICENSE",
        )
    ]
    for module in modules:
        name, _, directory = module.partition("|")
        found = sorted(
            p
            for p in Path(directory).iterdir()
            if p.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE"))
        )
        if not found:
            raise SystemExit(f"wheel: {name} has no licence that could be given along")
        texts += [(name, path) for path in found]
    return "".join(
        f"{name}: {path.name}\n\n{path.read_text()}\n\n" for name, path in texts
    ).encode()


def metadata(work: Path) -> Path:
    """Returns the directory of metadata, as setuptools makes it of pyproject.toml. A copy is read:
    it leaves files beside its input.
    """
    from setuptools import build_meta

    source = work / "source"
    shutil.copytree(
        HERE / "epcache", source / "epcache", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in (HERE / "pyproject.toml", HERE / "README.md", PROJECT / "LICENSE"):
        shutil.copy(path, source)
    made = work / "metadata"
    made.mkdir()
    before = os.getcwd()
    os.chdir(source)
    try:
        return made / build_meta.prepare_metadata_for_build_wheel(str(made))
    finally:
        os.chdir(before)


def write(path: Path, files: dict[str, tuple[bytes, int]], info: str, when: int) -> None:
    """Writes the archive: the files in the order of their names, with their record at the end."""
    record = []
    stamp = time.gmtime(max(when, 315532800))[:6]  # 1980, the earliest time in an archive
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(name: str, data: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(name, stamp)
            entry.create_system, entry.external_attr, entry.compress_type = (
                3,
                (0o100000 | mode) << 16,
                zipfile.ZIP_DEFLATED,
            )
            archive.writestr(entry, data)

        for name in sorted(files):
            data, mode = files[name]
            add(name, data, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        add(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode(), 0o644)


def wheel(machine: str, out: Path, when: int) -> Path:
    """Builds the wheel for a machine, and returns its path."""
    with tempfile.TemporaryDirectory(prefix="epcache-wheel-") as directory:
        work = Path(directory)
        made = metadata(work)
        name, version = made.name.removesuffix(".dist-info").rsplit("-", 1)
        built = work / "programs"
        built.mkdir()
        programs(machine, built)
        kind = MACHINES[machine]
        tags = [f"manylinux_2_17_{kind}", f"manylinux2014_{kind}"]
        head = "Wheel-Version: 1.0\nGenerator: epcache\nRoot-Is-Purelib: false\n"
        files = {
            f"{made.name}/WHEEL": (
                (head + "".join(f"Tag: py3-none-{tag}\n" for tag in tags)).encode(),
                0o644,
            )
        }
        files[f"{made.name}/licenses/PROGRAMS"] = (notices(machine), 0o644)
        for path in sorted(made.rglob("*")):
            if path.is_file():
                files[f"{made.name}/{path.relative_to(made)}"] = (path.read_bytes(), 0o644)
        for path in sorted((HERE / "epcache").rglob("*")):
            if path.suffix == ".py" or path.name == "py.typed":
                files[str(path.relative_to(HERE))] = (path.read_bytes(), 0o644)
        for program in PROGRAMS:
            files[f"{name}-{version}.data/scripts/{program}"] = (
                (built / program).read_bytes(),
                0o755,
            )
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{name}-{version}-py3-none-{'.'.join(tags)}.whl"
        write(path, files, made.name, when)
        return path


def main() -> None:
    out, *machines = sys.argv[1:] or sys.exit(__doc__)
    when = commit_time()
    for machine in machines or MACHINES:
        print(wheel(machine, Path(out).resolve(), when))


if __name__ == "__main__":
    main()
