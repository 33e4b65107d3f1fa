"""Weight-sharing groups on a real execution provider: loaded in order in one process, with the
right outputs, and replaced as a whole when damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon


@pytest.fixture
def run(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], tmp_path: Path
) -> Callable[[str], Any]:
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    return lambda what: child.run(
        "grouping", where, socket=daemon.socket, directory=str(tmp_path), what=what
    )


def test_two_groups_of_equal_names_and_shapes_in_one_process(run: Callable[[str], Any]) -> None:
    assert run("together") == {
        "outcomes": [["compiled"] * 3] * 2,
        "builds": [1, 1],
        "directories": [1, 1],
        "right": [True] * 6,
        "after": [True] * 3,
        "again": ["hit"] * 3,
        "right again": [True] * 3,
        "leases": 0,
    }


def test_a_model_of_a_group_alone(run: Callable[[str], Any]) -> None:
    assert run("alone") == {"outcomes": ["hit"] * 3, "same": True, "right": [True] * 3}


def test_a_group_that_does_not_load_is_replaced_as_a_whole(run: Callable[[str], Any]) -> None:
    assert run("refused") == {
        "outcomes": ["compiled"] * 3,
        "decisions": ["retry"],
        "right": [True] * 3,
    }
