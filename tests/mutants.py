"""Small faults in the modules between the rollout and the weights: each mutant is one module with one change.

    flip    a + b -> a - b     a < b -> a > b     a and b -> a or b     a in b -> a not in b     ~a -> a
    negate  if a: -> if not a:
    extreme min(a, b) -> max(a, b)
    swap    f(a, b) -> f(b, a)
    drop    f(a) -> pass       a.b = c -> pass    a[b] = c -> pass
    scale   3.0 -> 6.0         True -> False
    shift   a[0] -> a[1]       a[:n] -> a[:n + 1]

No two mutants of a module are the same program, and their names are unique. The text of a mutated module is
made when it is asked for: a listing of all mutants takes seconds.
"""

import ast
import hashlib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

PACKAGES = (
    *("checkpoint", "data", "export", "inference", "ledger", "loss", "model", "orchestrator", "packing"),
    *("trainer", "transport"),
)
BESIDE = {
    "data": "alarms files list_payload model_folder plain rules tokenizer vocabulary",
    "export": "arrow distribution frames jsonl_source optional parquet_source paths process reader shapes "
    "slices source summary",
    "inference": "client entrance fake http openai pool server servers vllm_engine",
    "ledger": "reconcile settings weights",
    "loss": "script",
    "model": "proof tiny",
    "orchestrator": "alarms built_in failures tasks taskset",
    "trainer": "alarms many sft sft_tokens",
    "transport": "digests zmq_link zmq_receiver zmq_sender",
}
"""Modules and folders of `PACKAGES` that no sampled token, logprob or reward passes on its way into weights
and record, or that are about sockets, reports, other engines and other data."""

PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
    (ast.Lt, ast.Gt),
    (ast.LtE, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
FLIPPED = {
    **dict(PAIRS),
    **{second: first for first, second in PAIRS},
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
EXTREMES = (
    *(("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax")),
    ("clamp_min", "clamp_max"),
)
OTHER_EXTREME = {**dict(EXTREMES), **{second: first for first, second in EXTREMES}}

SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "bases", "type_params", "pattern")
SKIPPED_NODES = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
WORDS = {
    *("logger", "log", "warnings", "say", "working"),
    *("isinstance", "issubclass", "getattr", "setattr", "super", "cast"),
}
"""Calls of these are talk, or about types."""
MAX_BRIEF = 90


@dataclass(frozen=True, slots=True)
class Module:
    """The text of a module, and where its lines begin; positions are in bytes, as those of `ast`."""

    file: str
    text: bytes
    line_starts: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, file: str, source: str) -> "Module":
        text = source.encode()
        starts = accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0)
        return cls(file, text, tuple(starts), hashlib.sha256(text).hexdigest()[:12])

    def position(self, line: int, column: int) -> int:
        return self.line_starts[line - 1] + column


@dataclass(frozen=True)
class Mutant:
    module: Module = field(repr=False)
    kind: str
    node: Any
    """An expression or statement of the module."""
    replacement: ast.AST

    @property
    def file(self) -> str:
        return self.module.file

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def lines(self) -> range:
        return range(self.node.lineno, self.node.end_lineno + 1)

    @cached_property
    def name(self) -> str:
        before, after = _briefly(ast.unparse(self.node), ast.unparse(self.replacement))
        return f"{self.file}:{self.node.lineno}:{self.node.col_offset + 1} {self.kind}: {before} -> {after}"

    @property
    def source(self) -> str:
        """The whole module, mutated."""
        node, text = self.node, self.module.text
        start = self.module.position(node.lineno, node.col_offset)
        end = self.module.position(node.end_lineno, node.end_col_offset)
        after = ast.unparse(ast.fix_missing_locations(self.replacement))
        written = f"({after})" if isinstance(node, ast.expr) else after
        return (text[:start] + written.encode() + text[end:]).decode()


def all_mutants(package: Path) -> list[Mutant]:
    return [mutant for file in rooms(package) for mutant in mutants_of(file, (package / file).read_text())]


def rooms(package: Path) -> list[str]:
    """Lists the modules that a sampled token, its logprob or its reward passes into weights and record."""
    found = []
    for name in PACKAGES:
        beside = set(BESIDE.get(name, "").split())
        if name != "checkpoint":  # in the others, `__init__` only imports or starts things
            beside.add("__init__")
        for path in sorted((package / name).rglob("*.py")):
            parts = path.relative_to(package / name).with_suffix("").parts
            if not beside & set(parts):
                found.append(path.relative_to(package).as_posix())
    return found


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    module = Module.of(file, source)
    for node in _mutable(ast.parse(source)):
        for kind, replacement in _variants(node):
            yield Mutant(module, kind, node.test if kind == "negate" else node, replacement)


def _mutable(tree: ast.AST) -> Iterator[Any]:
    """Yields every expression and statement that computes."""
    for name, value in ast.iter_fields(tree):
        if name in SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SKIPPED_NODES) or _is_talk(child):
                continue
            if isinstance(child, ast.expr | ast.stmt) and not _is_index(tree, child):
                yield child
            yield from _mutable(child)


def _is_index(parent: ast.AST, node: ast.AST) -> bool:
    """Tells whether `node` is a constant that `shift` changes already."""
    return isinstance(parent, ast.Subscript | ast.Slice) and isinstance(node, ast.Constant)


def _is_talk(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Constant):
        return isinstance(call.value, str)
    if not isinstance(call, ast.Call):
        return False
    function = call.func
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and function.id in WORDS


def _variants(node: Any) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in FLIPPED:
            yield "flip", _with(node, op=FLIPPED[type(op)]())
        case ast.AugAssign(op=op):
            if type(op) in FLIPPED:
                yield "flip", _with(node, op=FLIPPED[type(op)]())
            yield "drop", ast.Pass()
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "flip", operand
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                yield "flip", _with(node, ops=[*ops[:index], FLIPPED[type(op)](), *ops[index + 1 :]])
        case ast.Call():
            yield from _calls(node)
        case ast.Expr(value=ast.Call()):
            yield "drop", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop", ast.Pass()
        case ast.If(test=test) | ast.IfExp(test=test) if _is_worth_negating(test):
            yield "negate", ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool() as truth):
            yield "scale", ast.Constant(not truth)
        case ast.Constant(value=int() | float() as number):
            yield "scale", ast.Constant(2 * number if number else number + 1)
        case ast.Subscript(slice=ast.Slice() as part):
            for bound in ("lower", "upper"):
                if (value := getattr(part, bound)) is not None:
                    yield "shift", _with(node, slice=_with(part, **{bound: _one_more(value)}))
        case ast.Subscript(slice=ast.Constant(value=int()) as index):
            yield "shift", _with(node, slice=_one_more(index))


def _calls(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for index in range(len(call.args) - 1):
        first, second = call.args[index : index + 2]
        is_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if is_plain and ast.dump(first) != ast.dump(second):
            swapped = [*call.args[:index], second, first, *call.args[index + 2 :]]
            yield "swap", _with(call, args=swapped)
    match call.func:
        case ast.Name(id=name) if name in OTHER_EXTREME:
            yield "extreme", _with(call, func=ast.Name(OTHER_EXTREME[name]))
        case ast.Attribute(attr=name) if name in OTHER_EXTREME:
            yield "extreme", _with(call, func=_with(call.func, attr=OTHER_EXTREME[name]))


def _is_worth_negating(test: ast.expr) -> bool:
    """Tells whether no flip of `test` negates it already, or almost."""
    is_flipped = isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and len(test.ops) == 1)
    return not is_flipped and not _is_talk(test)


def _with(node: Any, **fields: Any) -> Any:
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _one_more(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _briefly(before: str, after: str) -> tuple[str, str]:
    """One line each; of long ones the part around the first difference."""
    texts = [" ".join(text.split()) for text in (before, after)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, same - MAX_BRIEF // 3) if max(map(len, texts)) > MAX_BRIEF else 0
    first, second = (
        ("..." if start else "")
        + text[start : start + MAX_BRIEF]
        + ("..." if text[start + MAX_BRIEF :] else "")
        for text in texts
    )
    return first, second
