"""Mutants of a source: copies of it with one small thing computed otherwise."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature

Spot = tuple[str, str, str]  # (file, line, change); lines are named by what they say, because their numbers change


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    text: str  # the line that it changes
    change: str  # "before -> after"
    source: str  # of the whole file
    lines: range | None = None  # of the statement that it changes; None if that runs when the file is imported

    @property
    def spot(self) -> Spot:
        return self.file, self.text, self.change


SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
LEFT_ALONE = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitOr, ast.BitAnd)
RIGHT_ALONE = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)
COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
PAIRS = (("min", "max"), ("any", "all"), ("floor", "ceil"), ("minimum", "maximum"))
OPPOSITE = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
# zip(strict=True) guards against what does not happen, and on a CPU the others change nothing.
WITHOUT_EFFECT = ("strict", "non_blocking", "device")


def mutants(file: str, source: str, scope: Mapping[str, object]) -> Iterator[Mutant]:
    """All mutants of a source; the scope is what its names mean."""
    tree = ast.parse(source)
    texts = source.splitlines()
    for node in _computing(tree):
        for old, new in _changes(node, scope):
            text = texts[old.lineno - 1].strip()
            yield Mutant(file, old.lineno, text, _change(old, new), _spliced(source, old, new), _lines(tree, old))


def _lines(tree: ast.Module, node: ast.expr | ast.AugAssign) -> range | None:
    """Of the innermost statement around the node; of a compound one, those before its body."""
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.stmt) and each.lineno <= node.lineno <= (each.end_lineno or each.lineno)
    ]
    if not any(isinstance(each, ast.FunctionDef) for each in around):
        return None
    inner = max(around, key=lambda each: (each.lineno, -(each.end_lineno or 0)))
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body else (inner.end_lineno or inner.lineno)
    return range(inner.lineno, max(inner.lineno, last) + 1)


def _change(node: ast.AST, other: ast.AST) -> str:
    if isinstance(node, ast.Call) and isinstance(other, ast.Call) and len(node.keywords) > len(other.keywords):
        [gone] = [keyword for keyword in node.keywords if keyword not in other.keywords]
        return f"{ast.unparse(node.func)}(...) without {ast.unparse(gone)}"
    return f"{ast.unparse(node)} -> {ast.unparse(other)}"


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """What a result rests on: not annotations, defaults and decorators, nor what is there to raise an error."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        yield from (each for part in node.orelse for each in _computing(part))
        return
    if isinstance(node, ast.FunctionDef):
        parts = node.body
    elif isinstance(node, ast.ClassDef):
        parts = [part for part in node.body if not isinstance(part, ast.AnnAssign)]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.value] if node.value else []
    elif isinstance(node, ast.Lambda):
        parts = [node.body]
    elif isinstance(node, ast.keyword) and node.arg in WITHOUT_EFFECT:
        return
    elif isinstance(node, ast.Assign) and all(isinstance(to, ast.Name) and to.id.isupper() for to in node.targets):
        return  # a named constant is a choice
    yield node
    for part in parts:
        yield from _computing(part)


Change = tuple[ast.expr | ast.AugAssign, ast.expr | ast.AugAssign]  # (before, after)


def _changes(node: ast.AST, scope: Mapping[str, object]) -> Iterator[Change]:
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield from _negated(test)
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield from _negated(test)
        case ast.Expr(ast.Call() as call):
            yield call, ast.Constant(None)
        case ast.expr() | ast.AugAssign():
            for other in _instead(node, scope):
                yield node, other


def _negated(test: ast.expr) -> Iterator[Change]:
    """Comparisons, `not` and parts of `and` and `or` have mutants of their own."""
    if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
        yield test, ast.UnaryOp(ast.Not(), test)


def _instead(node: ast.expr | ast.AugAssign, scope: Mapping[str, object]) -> Iterator[ast.expr | ast.AugAssign]:
    match node:
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
            pass  # a step of a key's path: any other word names a stream of draws as good
        case ast.BinOp(left, op, right):
            if swapped := SWAPPED.get(type(op)):
                yield ast.BinOp(left, swapped(), right)
            if isinstance(op, LEFT_ALONE):
                yield left
            if isinstance(op, RIGHT_ALONE) and ast.dump(left) != ast.dump(right):
                yield right
        case ast.AugAssign(target, op, value) if swapped := SWAPPED.get(type(op)):
            yield ast.AugAssign(target, swapped(), value)
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.BoolOp(op, values):
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.Compare(left, ops, comparators):
            for index, old in enumerate(ops):
                for new in COMPARED.get(type(old), ()):
                    yield ast.Compare(left, [*ops[:index], new(), *ops[index + 1 :]], comparators)
        case ast.Call(func, positional, keywords):
            for other in _namesake(func):
                yield ast.Call(other, positional, keywords)
            for index, keyword in enumerate(keywords):
                if _may_go(func, keyword, scope):
                    yield ast.Call(func, positional, keywords[:index] + keywords[index + 1 :])
        case ast.Constant(value=bool() as flag):
            yield ast.Constant(not flag)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)


def _namesake(func: ast.expr) -> Iterator[ast.expr]:
    """The function that is easily taken for this one."""
    match func:
        case ast.Name(name) if name in OPPOSITE:
            yield ast.Name(OPPOSITE[name])
        case ast.Attribute(value, name) if name in OPPOSITE:
            yield ast.Attribute(value, OPPOSITE[name])


def _may_go(func: ast.expr, keyword: ast.keyword, scope: Mapping[str, object]) -> bool:
    """Whether the function can do without the keyword: a call that only raises would prove nothing."""
    if keyword.arg is None or keyword.arg in WITHOUT_EFFECT:
        return False
    try:
        parameters = signature(_meaning(func, scope)).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not known before it runs, or written in C
        return True
    return keyword.arg not in parameters or parameters[keyword.arg].default is not Parameter.empty


def _meaning(func: ast.expr, scope: Mapping[str, object]) -> object:
    if isinstance(func, ast.Name):
        return scope.get(func.id, getattr(builtins, func.id, None))
    return getattr(_meaning(func.value, scope), func.attr, None) if isinstance(func, ast.Attribute) else None


def _spliced(source: str, node: ast.expr | ast.AugAssign, other: ast.expr | ast.AugAssign) -> str:
    """The source with one node written anew; columns are counted in bytes."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    new = ast.unparse(other) if isinstance(other, ast.AugAssign) else f"({ast.unparse(other)})"
    parts = [*lines[:first], lines[first][: node.col_offset], new.encode(), lines[last][node.end_col_offset :]]
    return b"".join([*parts, *lines[last + 1 :]]).decode()
