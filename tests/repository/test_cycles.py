"""No module depends on itself, in Python or in C.

Python: an edge is an import anywhere in a file, also inside a function and under TYPE_CHECKING. C: an edge is a symbol that
one object file of the shim uses and another one defines.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.shim.build import SHIM, make_shim

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("snapshotd", "migrator", "shim")

Graph = Mapping[str, set[str]]

#: Cycles that are still there. They may shrink; one that is gone must be removed from the list.
PYTHON_KNOWN: list[set[str]] = []


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected components with more than one node, by Tarjan's algorithm without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for root in sorted(graph):
        work: list[tuple[str, Iterator[str]]] = [] if root in index else [(root, iter(sorted(graph[root])))]
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for other in rest:
                if other not in index:
                    work.append((other, iter(sorted(graph.get(other, ())))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
                    if len(component) > 1 or node in graph.get(node, ()):
                        found.append(component)
    return sorted(found, key=sorted)


def python_modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, modules: Iterable[str]) -> Iterator[str]:
    """The modules of this repository that a file imports; `from package import name` means the module, if there is one."""
    known = set(modules)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else str(node.module)


def object_graph() -> dict[str, set[str]]:
    make_shim("all")
    built = SHIM / "build"
    sources = {path.relative_to(SHIM / "lib").with_suffix("") for path in (SHIM / "lib").glob("*/*.c")}
    objects = [path for path in sorted(built.glob("*/*.o")) if path.relative_to(built).with_suffix("") in sources]
    defined: defaultdict[str, set[str]] = defaultdict(set)
    used: defaultdict[str, set[str]] = defaultdict(set)
    listed = subprocess.run(["nm", "-A", *objects], capture_output=True, text=True, check=True).stdout
    for path, kind, symbol in re.findall(r"^(\S+?):[\da-f]*\s+(\w) (\S+)$", listed, re.MULTILINE):
        name = str(Path(path).relative_to(built).with_suffix(""))
        if kind == "U":
            used[name].add(symbol)
        elif kind.isupper():
            defined[symbol].add(name)
    # Each file in `criu` is a library of its own: what it replaces there is not used here.
    shared = {name for name in used if not name.startswith("criu/")}
    return {name: {owner for symbol in used[name] for owner in defined[symbol] & shared} - {name} for name in shared}


HINT = "these depend on each other: move what both need into a third file, or pass it as an argument"


def test_no_python_module_imports_itself_over_others() -> None:
    modules = python_modules()
    graph = {name: set(imports(path, modules)) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 100
    found = cycles(graph)
    fresh = [sorted(cycle) for cycle in found if not any(cycle <= known for known in PYTHON_KNOWN)]
    assert not fresh, HINT
    gone = [sorted(known) for known in PYTHON_KNOWN if not any(cycle <= known for cycle in found)]
    assert not gone, "these cycles are gone: remove them from PYTHON_KNOWN"


@pytest.mark.parametrize(
    "absent",
    [("memory/", "sharing/"), ("core/driver_only", "sharing/"), ("core/driver_only", "core/no_sharing")],
    ids=["libsnapshim.so", "libsnapshim-offload.so", "libsnapshim-shared.so"],
)
def test_no_c_file_uses_itself_over_others(absent: tuple[str, ...]) -> None:
    """`driver_only` takes the place of the files in `memory` in the library that leaves device memory to the driver,
    `no_sharing` that of the files in `sharing` where what processes share does not move."""
    whole = object_graph()
    graph = {
        name: {other for other in used if not other.startswith(absent)}
        for name, used in whole.items()
        if not name.startswith(absent)
    }
    assert sum(map(len, graph.values())) > 50
    assert not [sorted(cycle) for cycle in cycles(graph)], HINT


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles(graph) == [{"a", "b", "c"}, {"d", "e"}]
    assert cycles({"a": {"b"}, "b": set()}) == []
