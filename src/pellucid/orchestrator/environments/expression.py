"""Whole numbers, `+`, `-`, `*` and parentheses; nothing else is computed, however it is written."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_MAX_CHARACTERS = 200
_RULE = "only whole numbers, +, -, * and parentheses"


def evaluate(expression: str) -> int:
    """`evaluate("2*(3+4)") == 14`; ValueError for what is not such an expression."""
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"more than {_MAX_CHARACTERS} characters")
    if not re.fullmatch(r"[\d+\-*() ]+", expression, re.ASCII):
        raise ValueError(_RULE)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _NODES:
            return OPERATIONS[_NODES[type(op)]](_value(left), _value(right))
    raise ValueError(_RULE)
