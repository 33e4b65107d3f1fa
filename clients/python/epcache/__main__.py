"""The command line: python -m epcache doctor."""

from __future__ import annotations

import argparse
import sys

from ._version import __version__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m epcache",
        description="Compiled ONNX Runtime models from the machine's cache.",
    )
    parser.add_argument("--version", action="version", version=f"epcache {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    doctor = verbs.add_parser(
        "doctor",
        help="check what sessions in this Python would use, and find problems",
        description="Runs epcachectl doctor for the daemon and the machine, if it is installed. "
        "Then it looks for ONNX Runtime and for execution providers as a session would, starts "
        "each of them in a process of its own, and asks the daemon whether it would serve it. "
        "Changes nothing, compiles nothing, starts no daemon.",
        epilog="Exit status: 0 nothing is wrong, 1 there are problems, 2 wrong usage, 5 no daemon "
        "answers, and none would be started.",
    )
    doctor.add_argument("--socket", default="", help="use only the daemon at this socket")
    doctor.add_argument(
        "--json", action="store_true", help="print a JSON object, as epcachectl doctor does"
    )
    doctor.add_argument(
        "--application",
        action="store_true",
        help="check only this Python, as epcachectl doctor --python does",
    )
    given = parser.parse_args(arguments)
    from . import _doctor

    return _doctor.run(given.socket, given.json, given.application)


if __name__ == "__main__":
    sys.exit(main())
