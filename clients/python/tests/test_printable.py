"""Text of foreign origin controls no terminal, whatever prints it."""

from __future__ import annotations

import re

import pytest
from epcache import _doctor, _errors, _progress_display, _refusal
from epcache._artefact import Progress

HOSTILE = "a\x1b[2J\x07\r\x7f\x9b31m\u202eb\u2066\udc9b\u2028 größer 模型\n\tnext"
CLEAN = r"a\x1b[2J\x07\r\x7f\x9b31m\u202eb\u2066\udc9b\u2028 größer 模型" + "\n\tnext"


def test_control_characters_are_escaped() -> None:
    assert _errors.printable(HOSTILE) == CLEAN
    assert _errors.printable("größer") == "größer"


def test_errors_and_decisions() -> None:
    error = _errors.from_wire(3, HOSTILE, HOSTILE, {"file": HOSTILE})
    assert str(error) == f"{CLEAN} ({CLEAN})"
    assert (error.text, error.hint, error.facts["file"]) == (CLEAN, CLEAN, HOSTILE)
    assert str(_refusal.Decision("sound", HOSTILE, HOSTILE)) == f"sound: {CLEAN} ({CLEAN})"


def test_progress_and_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = _progress_display._View(HOSTILE)
    view._plain = True
    view.step(Progress(HOSTILE, 0, 0))
    assert capsys.readouterr().err == f"{CLEAN}: {CLEAN}\n"
    finding = _doctor.Finding("warning", HOSTILE, HOSTILE, HOSTILE)
    monkeypatch.setattr(_doctor, "check", lambda *_: ([finding], True))
    for as_json in False, True:
        _doctor.run("", as_json, False)
        out = capsys.readouterr().out
        assert "31m" in out
        assert not re.search(r"[^\n\t -~\u00a1-\u1fff\u3000-\ud7ff]", out)
