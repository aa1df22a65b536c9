"""A calculator as a tool: answers calls in the form that Qwen's chat templates teach. For rollout.multi_turn.function.

As one of rollout.multi_turn.tools (recipes/turns/calculator.py:calculate) the template is told of it. As a function
between turns, tell the model about it by data.chat_template_kwargs, whose ``tools`` the template writes into the
prompt:

    data:
      chat_template_kwargs:
        tools:
          - type: function
            function:
              name: calculate
              description: The value of an expression of numbers, + - * / and parentheses.
              parameters: {type: object, properties: {expression: {type: string}}, required: [expression]}
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def respond(messages: list[dict[str, str]], ground_truth: str, extra_info: dict) -> list[dict[str, str]] | None:
    """Return the answer to each call in the model's turn; None, which ends the response, where it calls nothing."""
    calls = CALL.findall(messages[-1]["content"])
    return [{"role": "tool", "content": answer(call)} for call in calls] or None


def answer(call: str) -> str:
    """Return the value as text, or what is wrong with the call: the model may learn from that."""
    try:
        asked = json.loads(call)
        if asked["name"] != "calculate":
            return "error: the only tool is calculate"
        return calculate(asked["arguments"]["expression"])
    except (ArithmeticError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}: {error}"


def calculate(expression: str) -> str:
    """
    Return the value of an expression.

    Args:
        expression: Of numbers, + - * / and parentheses.
    """
    found = value(ast.parse(expression, mode="eval").body)
    return str(found) if isinstance(found, int) else f"{found:.15g}"


def value(node: ast.AST) -> float:
    """Return an expression's value by its tree; nothing is run that is not in OPERATORS."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(operand))
    raise ValueError("only numbers, + - * / and parentheses")
