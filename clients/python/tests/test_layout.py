"""The imports of the package's modules have no cycle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "epcache"
# A cycle for type checkers only: an artefact has a claim, and Claim.put returns an artefact.
TYPES_ONLY = ("epcache._artefact", "epcache._claim")


def imports(modules: dict[str, Path], name: str) -> set[str]:
    """Returns the modules that one imports, at its top, inside functions or for type checkers."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            found.update(
                full if (full := f"{base}.{one.name}") in modules else base for one in node.names
            )
    return found & set(modules) - {name}


def graph(directory: Path) -> dict[str, set[str]]:
    modules = {}
    for path in directory.rglob("*.py"):
        parts = path.relative_to(directory.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    # Without the package itself, which imports its modules at first use.
    return {name: imports(modules, name) for name in modules if name != directory.name}


def test_imports_have_no_cycle() -> None:
    found = graph(PACKAGE)
    module, other = TYPES_ONLY
    found[module].remove(other)
    list(TopologicalSorter(found).static_order())


@pytest.mark.parametrize(
    "back",
    [
        "from .one import x\n",
        "import some.one\n",
        "def f():\n    from . import one\n",
        "if TYPE_CHECKING:\n    from . import one\n",
    ],
)
def test_import_cycles_are_found(tmp_path: Path, back: str) -> None:
    package = tmp_path / "some"
    package.mkdir()
    (package / "__init__.py").write_text("from .one import x\n")
    (package / "one.py").write_text("from . import two\nx = 1\n")
    (package / "two.py").write_text(back)
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph(package)).static_order())
