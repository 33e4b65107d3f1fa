"""Writes doc/python-api.md from the docstrings, signatures and comments of clients/python/epcache.

    python api_doc.py PAGE          writes the page
    python api_doc.py --check PAGE  fails where it is not up to date, or a name has no description

It reads the source and imports nothing, so it needs no ONNX Runtime and gives the same page under
every Python.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent / "epcache"

# The sections of the page. The check fails for a public name that is in none of them.
SECTIONS = {
    "Sessions": "InferenceSession SessionOptions SessionGroup",
    "Reports of sessions": "Report Decision",
    "Without a session": "why warm Warmed compile Compiled",
    "The client": "Client default_sockets Artefact File Member Progress Claim",
    "Requests": "ExecutionProvider Device Output Runtime Library",
    "Explanations, events and jobs": "Explanation Candidate Difference Neighbour Event "
    "Subscription Jobs Job Failure",
    "Errors": "Error NotFound Stale CompileFailed Busy DeadlineExceeded BadModel BadRequest "
    "NotAllowed NoSpace VersionMismatch "
    "Unavailable Internal Cancelled NoDaemon ProtocolError EpcacheWarning",
}
# Methods by which the client itself encodes a request.
MADE_BY_CLIENT = frozenset(("Artefact", "Claim", "Subscription"))  # no caller constructs them
COLUMNS = 100
SHORT = 240  # characters of a method that is a list item
NUMBERS = {
    name: number
    for path in PACKAGE.glob("*.py")
    for name, number in re.findall(r"(?m)^([A-Z_]+) = ([0-9.]+)\b", path.read_text())
}
NOT_FOR_CALLERS = frozenset(("message", "described", "neighbours", "with_neighbours"))
HEAD = """# Python API

Generated from docstrings by `make api-doc`. [quickstart-python.md](quickstart-python.md) and [the
package's README](../clients/python/README.md) show how to use it; `help()` has the types of all
parameters. Times are seconds, points in time are Unix time. ONNX Runtime is imported by the session
classes, `why`, `warm` and `compile` only.

| parameter | accepts |
|---|---|
| `model`, `path_or_bytes` | a path, or bytes; for `Client` also an open binary file |
| `ep`, `eps` | an execution provider (EP), or a list of them in order of preference |
| an EP | `"Name"`, `"Name:DEVICE"`, `("Name", options)` or an `ExecutionProvider` |
| `providers`, `provider_options` | ONNX Runtime's own |
| `progress` | a function that takes a `Progress`; for sessions also `True`: print to stderr |
"""


class Module:
    """A module's source, with the comments behind its lines."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.tree = ast.parse(text)
        self.comments: dict[int, str] = {}
        above: list[str] = []  # comments on their own lines, before the commented line
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type != tokenize.COMMENT:
                if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT):
                    if above:
                        self.comments.setdefault(token.start[0], " ".join(above))
                    above = []
            elif token.line.strip() == token.string:
                above.append(token.string.lstrip("# "))
            elif not token.string.startswith("# type:"):
                self.comments[token.start[0]] = token.string.lstrip("# ")

    def find(self, name: str) -> ast.ClassDef | ast.FunctionDef:
        return next(
            node
            for node in self.tree.body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
        )


def public() -> dict[str, str]:
    """Returns the public names with their modules, as __init__.py has them."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    named = next(
        n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_FROM"
    )
    modules: dict[str, str] = ast.literal_eval(named)
    return {name: module for module, names in modules.items() for name in names.split()}


class Page:
    """The page under construction, and its faults."""

    def __init__(self) -> None:
        self.parts = [HEAD]
        self.missing: list[str] = []
        self._modules: dict[str, Module] = {}
        where = public()
        self.missing += [
            f"{name}: in no section of {Path(__file__).name}"
            for name in sorted(set(where) - set(" ".join(SECTIONS.values()).split()))
        ]
        for title, names in SECTIONS.items():
            self.parts.append(f"## {title}\n")
            if title == "Errors":
                self._add_errors(names.split(), where)
                continue
            for name in names.split():
                self._add(name, where[name])

    def _add_errors(self, names: Sequence[str], where: dict[str, str]) -> None:
        """Adds the base class, and a row for each of the others."""
        self._add(names[0], where[names[0]])
        rows = [
            (
                f"| `{name}` | "
                f"{' '.join(self._docstring(self._module(where[name]).find(name), name).split())} |"
            )
            for name in names[1:]
        ]
        self.parts.append("\n".join(["| error | meaning |", "|---|---|", *rows]) + "\n")

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module(PACKAGE / f"{name}.py")
        return self._modules[name]

    def _add(self, name: str, module_name: str) -> None:
        module = self._module(module_name)
        node = module.find(name)
        if isinstance(node, ast.FunctionDef):
            self.parts.append(f"### `{name}`\n\n{_signature(node, name)}\n{self._text(node, name)}")
        else:
            self._add_class(node, module)

    def _add_class(self, node: ast.ClassDef, module: Module) -> None:
        bases = [
            ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("NamedTuple",)
        ]
        derived = f" ({', '.join(f'`{base}`' for base in bases)})" if bases else ""
        self.parts.append(f"### `{node.name}`{derived}\n")
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        constructor = next((one for one in methods if one.name == "__init__"), None)
        if (
            constructor is not None
            and node.name not in MADE_BY_CLIENT
            and len(constructor.args.args + constructor.args.kwonlyargs) > 1
        ):
            self.parts.append(_signature(constructor, node.name))
        self.parts.append(self._text(node, node.name))
        items = (
            self._fields(node, module)
            if any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            else []
        )
        long = []
        for method in methods:
            if method.name.startswith("_") or method.name in NOT_FOR_CALLERS:
                continue
            full = f"{node.name}.{method.name}"
            is_property = any(ast.unparse(one) == "property" for one in method.decorator_list)
            call = method.name if is_property else _call(method, method.name)
            text = self._docstring(method, full)
            if len(text) > SHORT or len(call) > SHORT:
                shown = "" if is_property else _signature(method, method.name) + "\n"
                long.append(f"#### `{full}`\n\n{shown}{_wrapped(text)}")
            else:
                items.append(_item(f"`{call}`: {text}"))
        if items:
            self.parts.append("\n".join(items) + "\n")
        self.parts += long

    def _fields(self, node: ast.ClassDef, module: Module) -> list[str]:
        """Returns an item for each field that has a comment; those that have none are in the
        docstring.
        """
        items = []
        for one in node.body:
            if (
                not isinstance(one, ast.AnnAssign)
                or not isinstance(one.target, ast.Name)
                or one.target.id.startswith("_")
            ):
                continue
            if "_wire." in ast.unparse(one.annotation):
                continue  # private fields
            name, said = one.target.id, module.comments.get(one.end_lineno or 0, "")
            if said:
                items.append(_item(f"`{name}: {ast.unparse(one.annotation)}`: {said}"))
            elif f"`{name}`" not in (ast.get_docstring(node) or ""):
                self.missing.append(f"{node.name}.{name}: no comment, and no word in the docstring")
        return items

    def _docstring(self, node: ast.ClassDef | ast.FunctionDef, name: str) -> str:
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        if not text:
            self.missing.append(f"{name}: no docstring")
        return text

    def _text(self, node: ast.ClassDef | ast.FunctionDef, name: str) -> str:
        return _wrapped(self._docstring(node, name))


def _call(node: ast.FunctionDef, name: str) -> str:
    """Returns the call in Python's syntax, without types."""
    arguments = node.args
    shown = [one.arg for one in arguments.args if one.arg != "self"]
    for i, value in enumerate(reversed(arguments.defaults)):
        shown[-1 - i] += f"={_value(value)}"
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(one.arg + (f"={_value(value)}" if value is not None else ""))
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return f"{name}({', '.join(shown)})"


def _value(value: ast.expr) -> str:
    """Returns a default value; for a named number its value."""
    text = ast.unparse(value)
    return NUMBERS.get(text, "inf" if text == "math.inf" else text)


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Returns a code block of the call and its result."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return (
        textwrap.fill(
            _call(node, name) + result, COLUMNS, initial_indent="    ", subsequent_indent="        "
        )
        + "\n"
    )


def _item(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        subsequent_indent="  ",
        initial_indent="- ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(text: str) -> str:
    """Returns a docstring wrapped: its paragraphs and list items, but not its examples."""
    parts = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(paragraph)
        elif paragraph.startswith("- "):
            parts.append("\n".join(_item(one) for one in re.split(r"(?m)^- ", paragraph)[1:]))
        else:
            parts.append(
                textwrap.fill(paragraph, COLUMNS, break_long_words=False, break_on_hyphens=False)
            )
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    check = arguments[:1] == ["--check"]
    if len(arguments) != 1 + check:
        print("usage: api_doc.py [--check] PAGE", file=sys.stderr)
        return 2
    page, path = Page(), Path(arguments[-1])
    text = "\n".join(page.parts)
    wrong = list(page.missing)
    if check and (not path.exists() or path.read_text() != text):
        wrong.append(f"{path} is not what the source says: make api-doc")
    if wrong:
        print(*(f"api_doc: {one}" for one in wrong), sep="\n", file=sys.stderr)
        return 1
    if not check:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
