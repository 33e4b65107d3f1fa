"""Writes doc/python-api.md from the docstrings, signatures and comments of clients/python/epcache.

    python api_doc.py PAGE          writes the page
    python api_doc.py --check PAGE  fails where it is not up to date, or a name has no description

It reads the source and imports nothing, so it needs no ONNX Runtime and gives the same page under every Python.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent / "epcache"

# What stands together on the page, in this order. A public name that is in none of them fails the check.
SECTIONS = {
    "Sessions": "InferenceSession SessionOptions SessionGroup",
    "What a session knows of itself": "Report Decision",
    "Without a session": "why warm Warmed compile Compiled",
    "The client": "Client default_sockets Artefact File Member Progress Claim",
    "What a request says": "ExecutionProvider Device Output Runtime Library",
    "Why, what happened, what is being done": "Explanation Candidate Difference Neighbour Event Subscription Jobs Job Failure",
    "Errors": "Error NotFound Stale CompileFailed Busy DeadlineExceeded BadModel BadRequest NotAllowed NoSpace VersionMismatch "
    "Unavailable Internal Cancelled NoDaemon ProtocolError EpcacheWarning",
}
# How the client itself puts a request into the protocol's words.
NOT_FOR_CALLERS = frozenset(("message", "described", "neighbours"))
HEAD = """# Python API

Generated from the package's docstrings by `make api-doc`. How it is used is told in [its README](../clients/python/README.md) and in
[quickstart-python.md](quickstart-python.md). All times are seconds; moments are Unix time unless something else is said. Nothing here imports ONNX Runtime before
a session class, or one of `why`, `warm` and `compile`, is used.

| in signatures | |
|---|---|
| `Source` | a model: its path, or its bytes |
| `ModelSource` | the same, or an open binary file |
| `EPSpec` | an execution provider: `"Name"`, `"Name:DEVICE"`, `("Name", options)` or an `ExecutionProvider` |
| `Names`, `NameOptions` | ONNX Runtime's own `providers` and `provider_options` |
| `Progressing` | a function that takes a `Progress`; or `True`: shown on standard error |
"""


class Module:
    """A module's source, with the comments behind its lines."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.tree = ast.parse(text)
        self.comments: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.strip() != token.string and not token.string.startswith("# type:"):
                self.comments[token.start[0]] = token.string.lstrip("# ")

    def find(self, name: str) -> ast.ClassDef | ast.FunctionDef:
        return next(node for node in self.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name)


def public() -> dict[str, str]:
    """Returns the public names with their modules, as __init__.py has them."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    named = next(n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_FROM")
    modules: dict[str, str] = ast.literal_eval(named)
    return {name: module for module, names in modules.items() for name in names.split()}


class Page:
    """The page as it grows, and what is wrong with it."""

    def __init__(self) -> None:
        self.parts = [HEAD]
        self.missing: list[str] = []
        self._modules: dict[str, Module] = {}
        where = public()
        self.missing += [f"{name}: in no section of {Path(__file__).name}" for name in sorted(set(where) - set(" ".join(SECTIONS.values()).split()))]
        for title, names in SECTIONS.items():
            self.parts.append(f"## {title}\n")
            for name in names.split():
                self._add(name, where[name])

    def _add(self, name: str, module_name: str) -> None:
        if module_name not in self._modules:
            self._modules[module_name] = Module(PACKAGE / f"{module_name}.py")
        module = self._modules[module_name]
        node = module.find(name)
        if isinstance(node, ast.FunctionDef):
            self.parts.append(f"### `{name}`\n\n" + _signature(node, name) + self._text(node, name))
        else:
            self._add_class(node, module)

    def _add_class(self, node: ast.ClassDef, module: Module) -> None:
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("NamedTuple",)]
        derived = f" ({', '.join(f'`{base}`' for base in bases)})" if bases else ""
        self.parts.append(f"### `{node.name}`{derived}\n\n" + self._text(node, node.name))
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        constructor = next((one for one in methods if one.name == "__init__"), None)
        dataclass = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        if constructor is not None and len(constructor.args.args + constructor.args.kwonlyargs) > 1:
            self.parts.append(_signature(constructor, node.name))
        if dataclass:
            self._add_fields(node, module)
        for method in methods:
            if method.name.startswith("_") or method.name in NOT_FOR_CALLERS:
                continue
            full = f"{node.name}.{method.name}"
            if any(ast.unparse(one) == "property" for one in method.decorator_list):
                result = f": `{ast.unparse(method.returns)}`" if method.returns else ""
                self.parts.append(f"#### `{full}`{result}\n\n" + self._text(method, full))
            else:
                self.parts.append(f"#### `{full}`\n\n" + _signature(method, method.name) + self._text(method, full))

    def _add_fields(self, node: ast.ClassDef, module: Module) -> None:
        lines = ["| field | type | default | |", "|---|---|---|---|"]
        for one in node.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id.startswith("_"):
                continue
            name, said = one.target.id, module.comments.get(one.end_lineno or 0, "")
            if not said and f"`{name}`" not in (ast.get_docstring(node) or ""):
                self.missing.append(f"{node.name}.{name}: no comment, and no word in the docstring")
            kind = ast.unparse(one.annotation).replace("|", "\\|")
            lines.append(f"| `{name}` | `{kind}` | {_default(one.value)} | {_cell(said)} |")
        self.parts.append("\n".join(lines) + "\n")

    def _text(self, node: ast.ClassDef | ast.FunctionDef, name: str) -> str:
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        if not text:
            self.missing.append(f"{name}: no docstring")
        return text + "\n"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Returns the call as Python has it, a parameter in each line where it is long."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg == "self":
        arguments.args = arguments.args[1:]
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{name}({ast.unparse(arguments)}){result}"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in _parameters(arguments)) + f"){result}"
    return f"```python\n{text}\n```\n\n"


def _parameters(arguments: ast.arguments) -> list[str]:
    """Returns the parameters one by one, the marks between them too."""
    shown = []
    first = len(arguments.args) - len(arguments.defaults)
    for i, one in enumerate(arguments.args):
        shown.append(_parameter(one, arguments.defaults[i - first] if i >= first else None))
    if arguments.vararg:
        shown.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append(f"**{ast.unparse(arguments.kwarg)}")
    return shown


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) + (f" = {ast.unparse(default)}" if default is not None else "")


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    text = ast.unparse(value)
    made = {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}
    return f"`{made.get(text, text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
