"""doc/python-api.md is up to date, and describes every public name and field."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1]
PAGE = CLIENT.parents[1] / "doc" / "python-api.md"


def test_api_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, CLIENT / "api_doc.py", "--check", PAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_api_page_has_every_public_name() -> None:
    import epcache

    text = PAGE.read_text()
    assert [
        name
        for name in epcache.__all__
        if name != "__version__" and not re.search(rf"(?m)^(### |\| )`{name}`", text)
    ] == []
