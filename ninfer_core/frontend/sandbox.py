"""A Jinja sandbox with bounds on time, text and steps: filters, tests, methods and operators that count what they do.

A template comes with a downloaded file and is not trusted: it reaches no Python object and no file, and before
compilation its loops, calls, concatenations, literals and outputs are wrapped so that each is counted.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_round, do_trim
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 5_000_000
"""Loop rounds and calls in one rendering."""

MAX_CHARACTERS = 64_000_000
"""Characters made in one rendering, those of macros and intermediate strings counted each time."""

MAX_SECONDS = 5.0
"""Processor time of one rendering."""

MAX_LITERAL = 10_000
"""Values inside one list, tuple or mapping that a template builds, nested ones counted."""

MAX_ITEMS = 100_000
"""Items of one list that a filter, a method or `+` makes."""

MAX_BITS = 4096
"""Bits of an integer that a template computes with."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    "abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject "
    "rejectattr reverse round safe select selectattr sort string title trim unique upper"
)
_FREE_FILTERS = _words("count d default first last length")
"""They look at one item or none."""
_ITEM_FILTERS = _words("items list map reject rejectattr reverse select selectattr")
"""They pass items on without looking inside; all others turn values into text, or compare them."""
_COSTLY_TESTS = _words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
_STRING_METHODS = _words(
    "capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper lower "
    "lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines "
    "startswith strip title upper"
)
_METHODS = {
    str: _STRING_METHODS,
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
}

_DICT_NAMES = frozenset(dir(dict))


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = MAX_CHARACTERS
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        before = self.steps
        self.steps -= count
        if self.steps < 0:
            raise SecurityError(f"more than {MAX_STEPS:,} steps")
        if before >> 8 != self.steps >> 8 and time.thread_time() > self.deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} s of processor time")

    def write(self, count: int) -> None:
        before = self.characters
        self.characters -= count
        if self.characters < 0:
            raise SecurityError(f"more than {MAX_CHARACTERS:,} characters made")
        if before >> 16 != self.characters >> 16 and time.thread_time() > self.deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} s of processor time")

    def read(self, count: int) -> None:
        """Text that is looked at: cheaper than a step of the template, so many characters are one step."""
        self.step(1 + (count >> 8))


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


def counted(value: Any) -> Any:
    """Count a value that an operation made."""
    if isinstance(value, str):
        _budget.get().write(len(value))
    elif isinstance(value, list | tuple):
        _few(len(value))
        _budget.get().write(8 * len(value))
    elif isinstance(value, int):
        _small(value)
    return value


def _few(count: int) -> None:
    if count > MAX_ITEMS:
        raise SecurityError(f"a list of {count:,} items; {MAX_ITEMS:,} are allowed")


def _small(value: int) -> None:
    if value.bit_length() > MAX_BITS:
        raise SecurityError(f"an integer of {value.bit_length():,} bits; {MAX_BITS:,} are allowed")


def measure(value: Any) -> None:
    """Count the text of a value, what it holds included, before that text is made or compared.

    Shared parts count each time, and a value that holds itself runs into the limit.
    """
    budget = _budget.get()
    if isinstance(value, str):
        budget.write(len(value))
        return
    stack, count = [value], 0
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            count += 8 + len(item)
        elif isinstance(item, int):
            _small(item)
            count += 32
        else:
            count += 64
            if isinstance(item, list | tuple | set | frozenset):
                stack += item
            elif isinstance(item, Mapping):
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, Iterable) and hasattr(item, "__len__"):
                stack += islice(iter(item), MAX_STEPS)
        if count > 65536:
            budget.write(count)
            count = 0
    budget.write(count)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test whose arguments are counted before it works, and whose result after.

    While a template is compiled there is no budget: the look-up fails, and Jinja leaves the call for the rendering.
    """
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        made = list(args)
        for i in range(skip, len(made)):
            value = made[i]
            if isinstance(value, str):
                budget.read(len(value))
                if name in _ITEM_FILTERS and name != "reverse" and i == skip:
                    _few(len(value))
            elif isinstance(value, int):
                _small(value)
            elif name in _ITEM_FILTERS:
                budget.step(1 + (len(value) if hasattr(value, "__len__") else 0))
            else:
                if isinstance(value, Iterator):
                    made[i] = value = list(islice(value, MAX_ITEMS + 1))
                    _few(len(value))
                measure(value)
        for value in kwargs.values():
            measure(value)
        return counted(function(*made, **kwargs))

    return guarded


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    """The `round` filter for numbers of a usual size."""
    if not isinstance(precision, int) or not -100 <= precision <= 100:
        raise SecurityError(f"round({precision!r}): -100 to 100 is allowed")
    return do_round(value, precision, method)


def _trim(value: Any, chars: str | None = None) -> str:
    """The `trim` filter, whose time grows with both lengths."""
    _few_letters(chars)
    return do_trim(value, chars)


def _few_letters(chars: Any) -> None:
    if isinstance(chars, str) and len(chars) > 1000:
        raise SecurityError(f"{len(chars):,} characters to strip; 1,000 are allowed")


def _split(name: str, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    """`split` and `rsplit`, ended after the most pieces that are allowed."""
    found: list[str] = getattr(text, name)(sep, maxsplit if 0 <= maxsplit <= MAX_ITEMS else MAX_ITEMS)
    _few(len(found))
    return found


def _call_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a built-in value: its reading counted before, what it makes after."""
    owner, name = method.__self__, method.__name__
    if name == "replace":
        return _replace(owner, *args, **kwargs)
    if name in ("count", "index") and isinstance(owner, list | tuple):
        measure(owner)
    for value in (owner, *args, *kwargs.values()):
        if isinstance(value, str):
            _budget.get().read(len(value))
        elif value is not owner:
            measure(value)
    if name in ("split", "rsplit"):
        return counted(_split(name, owner, *args, **kwargs))
    if name == "splitlines":
        _few(sum(map(owner.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")))
    if name in ("strip", "lstrip", "rstrip") and args:
        _few_letters(args[0])
    return counted(method(*args, **kwargs))


@pass_context
def _sliced(_: Context, value: Any) -> Any:
    """What a slice made."""
    if isinstance(value, str | list | tuple):
        _budget.get().write(len(value))
    return value


@pass_context
def _compared(_: Context, value: Any) -> Any:
    """A side of a comparison; long text and containers take time."""
    if isinstance(value, str):
        if len(value) > 256:
            _budget.get().read(len(value))
    elif isinstance(value, list | tuple):
        measure(value)
    elif isinstance(value, int):
        _small(value)
    return value


@pass_context
def _searched(_: Context, value: Any) -> Any:
    """The right side of `in`: a mapping is looked up, a list is searched."""
    if isinstance(value, str):
        _budget.get().read(len(value))
    elif isinstance(value, list | tuple):
        _budget.get().step(1 + len(value))
    return value


@pass_context
def _each(_: Context, values: Any) -> Any:
    """The values of a loop, counted before it starts."""
    if not hasattr(values, "__len__"):
        values = list(islice(values, MAX_STEPS)) if isinstance(values, Iterable) else values
    if hasattr(values, "__len__"):
        _budget.get().step(len(values) + 1)
    return values


@pass_context
def _joined(_: Context, values: list[Any]) -> str:
    for value in values:
        measure(value)
    return "".join(map(str, values))


@pass_context
def _shown(_: Context, value: Any) -> Any:
    """A value that is printed."""
    measure(value)
    return value


@pass_context
def _fixed(_: Context, count: int) -> str:
    """Fixed text of the template that is printed next."""
    _budget.get().write(count)
    return ""


@pass_context
def _literal(_: Context, value: Any) -> Any:
    """A container the template builds: shared parts count each time, so nothing can grow exponentially."""
    left = MAX_LITERAL
    stack = [value]
    while stack:
        item = stack.pop()
        left -= 1
        if left < 0:
            raise SecurityError(f"a literal holds more than {MAX_LITERAL:,} values")
        if isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, Mapping):
            stack += item.values()
    return value


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    """The `join` filter, with the size known before the string is made."""
    parts = [item[attribute] if attribute is not None else item for item in islice(values, MAX_STEPS)]
    measure(parts)
    _budget.get().write(len(str(d)) * len(parts))
    return str(d).join(map(str, parts))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    """The `replace` filter and method, with the size known before the string is made."""
    measure(text)
    text, old, new = str(text), str(old), str(new)
    times = text.count(old) if old else len(text) + 1
    _budget.get().write(len(text) + len(new) * (min(times, count) if count >= 0 else times))
    return text.replace(old, new, count)


def _is_method(value: Any) -> bool:
    """Whether this is a method of a built-in object."""
    return isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType)


def _is_known(method: types.BuiltinMethodType) -> bool:
    return any(isinstance(method.__self__, kind) and method.__name__ in names for kind, names in _METHODS.items())


class _Counted(NodeTransformer):
    """Wraps what costs time or memory in counting filters."""

    @staticmethod
    def _wrap(node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._wrap(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._wrap(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._wrap(node, "_literal")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._wrap(node, "_literal")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._wrap(node, "_literal") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._wrap(node, "_sliced") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = self._wrap(node.expr, "_compared")
        for side in node.ops:
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._wrap(side.expr, "_searched" if side.op in ("in", "notin") else "_compared")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        made: list[nodes.Expr] = []
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                made += [self._wrap(nodes.Const(len(part.data), lineno=part.lineno), "_fixed"), part]
            else:
                made.append(self._wrap(part, "_shown"))
        node.nodes = made
        return node


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox: few filters, few methods, every operation counted, nothing to load."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "/", "//"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        changed: dict[str, Callable[..., Any]] = {"round": _round, "trim": _trim}
        filters: dict[str, Callable[..., Any]] = {name: changed.get(name, self.filters[name]) for name in _FILTERS}
        self.filters = {name: use if name in _FREE_FILTERS else _guarded(name, use) for name, use in filters.items()}
        self.tests = {
            name: _guarded(name, cast("Callable[..., Any]", use)) if name in _COSTLY_TESTS else use
            for name, use in self.tests.items()
        }
        wrappers: dict[str, Any] = {
            "_each": _each,
            "_joined": _joined,
            "_shown": _shown,
            "_fixed": _fixed,
            "_literal": _literal,
            "_sliced": _sliced,
            "_compared": _compared,
            "_searched": _searched,
        }
        self.filters |= {**wrappers, "join": _join, "replace": _replace}
        self.globals = {name: self.globals[name] for name in ("namespace", "range")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counted().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`, for a dictionary its item."""
        if type(obj) is dict and attribute not in _DICT_NAMES:  # most accesses of a chat template, without an exception
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it: of methods only the known ones."""
        return super().is_safe_attribute(obj, attr, value) and (not _is_method(value) or _is_known(value))

    def wrap_str_format(self, value: Any) -> None:
        """`format` is not among the methods, so it needs no wrapper."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, what it makes counted."""
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                _budget.get().write(len(left) + len(right))
                return left + right
            if isinstance(left, list | tuple) and isinstance(right, list | tuple):
                _few(len(left) + len(right))
            return counted(left + right)
        if operator == "**":
            raise SecurityError("** is not allowed")
        if not all(isinstance(side, int | float) and abs(side) < 2**63 for side in (left, right)):
            raise SecurityError(f"{operator} is for numbers below 2**63 only")
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call, counted as one step; of methods only the known ones."""
        _budget.get().step()
        if _is_method(__obj):
            if not _is_known(__obj):
                raise SecurityError(f"the method {__obj.__name__} is not allowed")
            given = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
            return _call_method(__obj, args, given)
        return super().call(__context, __obj, *args, **kwargs)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """One rendering: what it does inside is counted from zero; a bound that it passes is a `SecurityError`."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)
