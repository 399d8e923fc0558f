"""Arithmetic tasks: sums, differences and products, with every column and its carry written out in the think block."""

from __future__ import annotations

from .dialogue import Task, user
from .words import Draw

FORMS = {
    "+": ("What is {a} + {b}?", "{a} + {b}", "{a} + {b} =", "Add {a} and {b}.", "What is {a} plus {b}?", "Calculate {a} + {b}.",
          "What's {a} + {b}?", "How much is {a} + {b}?"),
    "-": ("What is {a} - {b}?", "{a} - {b}", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}."),
    "*": ("What is {a} * {b}?", "{a} * {b}", "What is {a} times {b}?", "Multiply {a} by {b}."),
}  # fmt: skip


def columns(a: int, b: int) -> str:
    """Addition digit by digit, least significant first: each column with its carry, then the whole."""
    steps, carry = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        steps.append(f"{p} + {q}" + (f" + {carry}" if carry else "") + f" = {total}")
        carry = total // 10
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def borrows(a: int, b: int) -> str:
    """Subtraction digit by digit for a >= b: ten is added where a column would fall below zero."""
    steps, taken = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i]) if i < len(y) else 0
        lent = 10 if p - q - taken < 0 else 0
        step = (f"{lent} + " if lent else "") + f"{p} - {q}" + (f" - {taken}" if taken else "")
        steps.append(f"{step} = {lent + p - q - taken}")
        taken = lent // 10
    return "; ".join(steps) + f". So {a} - {b} = {a - b}."


def sum_of(draw: Draw, most: int, kind: str = "sum") -> Task:
    """One sum of two numbers up to `most`, every length of number as likely."""

    def number() -> int:
        return draw.rng.randint(0, min(most, 10 ** draw.rng.randint(1, len(str(most))) - 1))

    a, b = number(), number()
    text = draw.one(FORMS["+"]).format(a=a, b=b)
    return Task(kind, [user(text)], f"{a} + {b} = {a + b}", columns(a, b))


def sum_task(draw: Draw) -> Task:
    """Sums, differences, small products."""
    pick = draw.rng.random()
    if pick < 0.65:
        return sum_of(draw, draw.one((9, 99, 99, 999, 999, 999)))
    if pick < 0.85:
        digits = draw.one((1, 2, 2, 3))
        b, a = sorted(draw.rng.randint(0, 10**digits - 1) for _ in range(2))
        text = draw.one(FORMS["-"]).format(a=a, b=b)
        return Task("sum", [user(text)], f"{a} - {b} = {a - b}", borrows(a, b))
    a, b = draw.rng.randint(0, 12), draw.rng.randint(0, 12)
    text = draw.one(FORMS["*"]).format(a=a, b=b)
    return Task("sum", [user(text)], f"{a} * {b} = {a * b}", f"{a} * {b} = {a * b}.")


def sum99_task(draw: Draw) -> Task:
    """A sum of two numbers of one or two digits."""
    return sum_of(draw, 99)


def sum999_task(draw: Draw) -> Task:
    """A sum of two numbers of up to three digits."""
    return sum_of(draw, 999)
