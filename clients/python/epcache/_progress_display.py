"""Shows progress on standard error for progress=True, by tqdm if it is installed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Union

from ._artefact import Progress
from ._errors import printable

Progressing = Union[Callable[[Progress], None], bool, None]


@contextlib.contextmanager
def displayed(progress: Progressing, name: str) -> Iterator[Callable[[Progress], None] | None]:
    """Yields the function to call with each step: the application's, or for True one that displays
    it.
    """
    if progress is not True:
        yield progress or None
        return
    view = _View(name)
    try:
        yield view.step
    finally:
        view.close()


class _View:
    """A progress bar, or lines without tqdm. Shows nothing before the first step, because a hit has
    none.
    """

    def __init__(self, name: str) -> None:
        self._name = printable(name)
        self._bar: Any = None
        self._phase = ""
        self._plain = False

    def step(self, progress: Progress) -> None:
        if self._bar is None and not self._plain:
            self._open()
        if self._bar is not None:
            self._advance(progress)
        elif progress.phase != self._phase:
            print(f"{self._name}: {_text(progress)}", file=sys.stderr, flush=True)
        self._phase = progress.phase

    def _open(self) -> None:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            self._plain = True
            return
        self._bar = tqdm(
            total=None,
            desc=self._name,
            unit="s",
            bar_format="{desc}: {n:.1f} s{postfix}",
            leave=False,
        )

    def _advance(self, progress: Progress) -> None:
        bar = self._bar
        estimate = progress.estimate_seconds
        if estimate > 0 and bar.total is None:
            bar.bar_format = "{desc}: {bar} {n:.1f} s of about {total:.0f} s{postfix}"
        # If it takes longer than estimated, the bar stays full.
        bar.total = max(estimate, progress.elapsed_seconds) if estimate > 0 else None
        bar.set_postfix_str(printable(progress.phase), refresh=False)
        bar.n = progress.elapsed_seconds
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _text(progress: Progress) -> str:
    about = (
        f", about {progress.estimate_seconds:.0f} s in all" if progress.estimate_seconds > 0 else ""
    )
    return f"{printable(progress.phase)}{about}"


def model_name(model: object) -> str:
    """Returns the model's name for messages: its file name, or "model"."""
    return os.path.basename(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else "model"
