"""A Jinja environment for chat templates that may be hostile: what templates may call, and what each call costs.

Chat templates are written for the environment that Hugging Face transformers gives them ("Chat templates" in its documentation), so
this one renders as that one does: `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a `tojson` that leaves
HTML alone, and ``{% generation %}``, which here means nothing. Beyond that, whatever a template does is paid for at its `Meter`.
Jinja's sandbox bounds what templates reach, and nothing of what they use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, is_internal_attribute
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from cllm.errors import TemplateLimitExceeded
from cllm.text.meter import CONTAINERS, N_BITS_MAX, Meter

N_INDENT_MAX: Final = 64  # characters for each level of `tojson`, and of its separators
N_FORMAT_MAX: Final = 256  # characters of the format of `strftime_now`
N_SEARCH_MAX: Final = 2**28  # characters times characters, for searches that are quadratic at worst


class TemplateRefused(TemplateError):
    """The template called `raise_exception`."""


def raise_exception(message: Any) -> NoReturn:
    raise TemplateRefused(str(message))


class MeteredContext(Context):
    """The variables of one render, and its meter."""

    meter: Meter


class _OpaqueNamespace(Namespace):
    """A namespace whose `repr` does not unfold what it holds: being mutable, it could not be weighed."""

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is a block like any other."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


# --- the compiler: generated code pays for what it does without a call --------------------------------------------------------


_REFUSED_NODES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.EvalContextModifier)
_BUFFERING_NODES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.For)


class _MeteredCode(CodeGenerator):
    """Compiles loops, ``~``, comparisons, slices and containers to code that pays."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for refused in node.find_all(_REFUSED_NODES):
            # There are no other templates to refer to; autoescape evaluates its argument while compiling.
            self.fail(f"{type(refused).__name__} has no place in a chat template", refused.lineno)
        for buffering in list(node.find_all(_BUFFERING_NODES)):
            _pay_for_data(buffering)
        for loop in list(node.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "for each", [], [], None, None, lineno=loop.lineno)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate(context, ")
        self._write_list(node.nodes, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(context.meter.step() and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(context, ")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            self.visit(bound or nodes.Const(None), frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._held(node, frame, super().visit_List)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._held(node, frame, super().visit_Dict)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._held(node, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def _held(self, node: nodes.Expr, frame: Frame, visit: Callable[[Any, Frame], None]) -> None:
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):  # no larger than the source
            visit(node, frame)
            return
        self.write("context.meter.hold(")
        visit(node, frame)
        self.write(")")

    def _write_list(self, expressions: list[nodes.Expr], frame: Frame) -> None:
        self.write("[")
        for expression in expressions:
            self.visit(expression, frame)
            self.write(", ")
        self.write("]")


def _pay_for_data(buffering: nodes.Node) -> None:
    """Make the template's own text an expression, which is paid for, where it is collected instead of put out."""
    if isinstance(buffering, nodes.For) and not buffering.recursive:
        return
    for output in buffering.find_all(nodes.Output):
        output.nodes = [nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n for n in output.nodes]


# --- what a call would make, before it is made --------------------------------------------------------------------------------

# Each gets (meter, the text, the call's arguments) and returns the arguments to call with.
_Args = tuple[Any, ...]


def _pay_width(meter: Meter, text: str, args: _Args) -> _Args:
    if args and isinstance(args[0], int):
        meter.text(args[0])
    return args


def _pay_tabs(meter: Meter, text: str, args: _Args) -> _Args:
    meter.text(text.count("\t") * (args[0] if args and isinstance(args[0], int) else 8))
    return args


def _pay_replace(meter: Meter, text: str, args: _Args) -> _Args:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        meter.text(text.count(args[0]) * len(args[1]))
    return args


def _pay_join(meter: Meter, text: str, args: _Args) -> _Args:
    if len(args) != 1 or isinstance(args[0], (str, dict)):
        meter.text(len(text) * sum(map(len, args)))
        return args
    pieces = meter.hold(list(args[0]))
    meter.text(len(text) * len(pieces))
    return (pieces,)


def _pay_search(meter: Meter, text: str, args: _Args) -> _Args:
    if args and isinstance(args[0], str) and len(text) * len(args[0]) > N_SEARCH_MAX:
        raise TemplateLimitExceeded("the chat template searches a long text for a long one")
    return args


def _widths(text: str) -> int:
    """The sum of the numbers in a format, any of which may be a width."""
    numbers: list[str] = re.findall(r"\d+", text)
    if any(len(digits) > N_BITS_MAX for digits in numbers):
        raise TemplateLimitExceeded("the chat template makes a number of too many digits")
    return sum(map(int, numbers))


def _pay_format(meter: Meter, text: str, args: _Args) -> None:
    """``text.format(...)``: widths are digits in the text. A width that is a field itself could come from anywhere."""
    if re.search(r":[^{}:]*\{", text):
        raise TemplateLimitExceeded("the chat template computes the width of a format")
    n_chars = _widths(text)
    meter.text(n_chars + text.count("{") * sum(map(meter.weight, args)))


def _pay_percent(meter: Meter, text: str, values: Any) -> None:
    """``text % values``: a width is digits or a star, which takes a number from the values; a mapping's may be named often."""
    n_chars = _widths(text)
    if re.search(r"%[-+ #0\d.]*\*", text):
        n_chars += sum(abs(v) for v in (values if isinstance(values, tuple) else (values,)) if isinstance(v, int))
    times = text.count("%") if isinstance(values, dict) else 1
    meter.text(n_chars + times * meter.weight(values))


_PAY_METHOD: Final[Mapping[str, Callable[[Meter, str, _Args], _Args]]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pay_width),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"), _pay_search),
    "expandtabs": _pay_tabs,
    "replace": _pay_replace,
    "join": _pay_join,
}


def _pay_arguments(meter: Meter, function: Any, owner: Any, args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    """Pay for what `function`, a method of `owner` or of nothing, will make of its arguments; return those to call it with."""
    values = (*args, *(value for name, value in kwargs.items() if name not in _JINJAS_ARGUMENTS))
    if isinstance(owner, str):
        pay = _PAY_METHOD.get(function.__name__)
        paid = values if pay is None else pay(meter, owner, values)
        return paid if len(values) == len(args) else args
    text = getattr(getattr(function, "__wrapped__", None), "__self__", None)
    if isinstance(text, str):  # Jinja's wrapper of str.format
        _pay_format(meter, text, values)
    elif not (isinstance(function, Macro) and not function.catch_varargs and not function.catch_kwargs):
        meter.hold(values)
    return args


# What generated code passes along with every call within a loop or a block.
_JINJAS_ARGUMENTS: Final = frozenset({"_loop_vars", "_block_vars"})

# Encoders and tables of replacements have costs of their own, and no use in a prompt.
_CLOSED_STR: Final = frozenset({"encode", "maketrans", "translate", "format_map"})
_CLOSED_INT: Final = frozenset({"to_bytes", "from_bytes"})


# --- filters ------------------------------------------------------------------------------------------------------------------


_COMPACT_JSON: Final = json.JSONEncoder(ensure_ascii=False)


@pass_context
def _tojson(
    context: MeteredContext,
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as `json.dumps` does, leaving `<`, `>` and `&` alone: a prompt is not HTML."""
    if not (ensure_ascii or indent is not None or separators or sort_keys):
        return context.meter.take(_COMPACT_JSON.encode(x))
    for piece in (indent, *(separators or ())):
        if (piece if isinstance(piece, int) else len(piece or "")) > N_INDENT_MAX:
            raise TemplateLimitExceeded("the chat template indents JSON too far")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces = []
    for text in encoder.iterencode(x):
        context.meter.text(len(text))
        pieces.append(text)
    return "".join(pieces)


@pass_context
def _from_json(context: MeteredContext, text: str) -> Any:
    """Decode JSON: not in the reference, but templates written for llama.cpp use it."""
    return context.meter.take(json.loads(text))


@pass_context
def _for_each(context: MeteredContext, iterable: Any) -> Iterator[Any]:
    """What every loop goes over; a name with a space cannot be said in a template."""
    step = context.meter.step
    for item in iterable:
        step()
        yield item


@pass_context
def _center(context: MeteredContext, value: str, width: int = 80) -> Any:
    context.meter.text(width)
    return FILTERS["center"](value, width)


@pass_context
def _indent(context: MeteredContext, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    # Lines end in other ways too, each of them one character that splitlines knows.
    n_lines = len(str(s).splitlines()) + 1
    context.meter.text(len(s) + n_lines * (len(width) if isinstance(width, str) else width))
    return FILTERS["indent"](s, width, first, blank)


@pass_context
def _replace(context: MeteredContext, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    s, old, new = str(s), str(old), str(new)
    _pay_replace(context.meter, s, (old, new))
    return context.meter.take(s.replace(old, new, -1 if count is None else count))


@pass_context
def _format(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
    _pay_percent(context.meter, str(value), kwargs or args)
    return context.meter.take(FILTERS["format"](value, *args, **kwargs))


def _pay_attribute(meter: Meter, values: Any, attribute: Any) -> None:
    """A name may be many, with commas and dots between: each is looked up of each value, and may be kept."""
    if isinstance(attribute, str) and (n_more := attribute.count(",") + attribute.count(".")):
        meter.elements(n_more * (len(values) if hasattr(values, "__len__") else 1))


@pass_context
def _join(context: MeteredContext, value: Any, d: Any = "", attribute: str | int | None = None) -> Any:
    values = context.meter.hold(list(value))
    _pay_attribute(context.meter, values, attribute)
    context.meter.text(len(str(d)) * len(values))
    return context.meter.take(FILTERS["join"](context.eval_ctx, values, d, attribute))


@pass_context
def _batch(context: MeteredContext, value: Any, linecount: int, fill_with: Any = None) -> Any:
    context.meter.elements(linecount)
    return context.meter.hold(list(FILTERS["batch"](value, linecount, fill_with)))


@pass_context
def _slice(context: MeteredContext, value: Any, slices: int, fill_with: Any = None) -> Any:
    context.meter.elements(slices)
    return context.meter.hold(list(FILTERS["slice"](context.eval_ctx, value, slices, fill_with)))


@pass_context
def _round(context: MeteredContext, value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > N_INDENT_MAX:  # 10**precision is computed
        raise TemplateLimitExceeded("the chat template rounds to too many digits")
    return FILTERS["round"](value, precision, method)


@pass_context
def _int(context: MeteredContext, value: Any, default: int = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > N_BITS_MAX:
        raise TemplateLimitExceeded("the chat template makes a number of too many digits")
    return FILTERS["int"](value, default, base)


@pass_context
def _sum(context: MeteredContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):  # sums of lists are quadratic
        raise TemplateLimitExceeded("the chat template sums up what are not numbers")
    values = list(_for_each(context, iterable))
    _pay_attribute(context.meter, values, attribute)
    return FILTERS["sum"](context.environment, values, attribute, start)


@pass_context
def _trim(context: MeteredContext, value: Any, chars: str | None = None) -> Any:
    _pay_search(context.meter, str(value), (chars,))
    return context.meter.take(FILTERS["trim"](value, chars))


# Those that grow no more than a few times what they are given. `first` must not drain what it takes one element from.
_PLAIN_FILTERS: Final = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "items"),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr"),
    *("sort", "string", "title", "truncate", "unique", "upper", "wordcount"),
)

# Where among its arguments a filter takes the name of an attribute; others take it by name, or take none.
_ATTRIBUTE_AT: Final[Mapping[str, int]] = {"sort": 2, "unique": 1, "min": 1, "max": 1, "groupby": 0, "selectattr": 0, "rejectattr": 0}


def _metered(name: str) -> Callable[..., Any]:
    """Return Jinja's filter `name`, its result paid for. A lazy argument is drained step by step first."""
    function = FILTERS[name]
    pass_arg = getattr(function, "jinja_pass_arg", None)
    wants = pass_arg.name if pass_arg is not None else None

    @pass_context
    def metered(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.meter.step()
        if isinstance(value, str):  # which is read, whatever comes of it: to count words takes 70 ms of a million characters
            context.meter.step(len(value))
        if isinstance(value, Iterator) and name != "first":
            value = list(_for_each(context, value))
        place = _ATTRIBUTE_AT.get(name, len(args))
        _pay_attribute(context.meter, value, args[place] if place < len(args) else kwargs.get("attribute"))
        if wants is None:
            result = function(value, *args, **kwargs)
        elif wants == "environment":
            result = function(context.environment, value, *args, **kwargs)
        else:
            result = function(context if wants == "context" else context.eval_ctx, value, *args, **kwargs)
        return context.meter.take(result)

    return metered


_OWN_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "for each": _for_each,
    "tojson": _tojson,
    "from_json": _from_json,
    "center": _center,
    "indent": _indent,
    "replace": _replace,
    "format": _format,
    "join": _join,
    "batch": _batch,
    "slice": _slice,
    "round": _round,
    "int": _int,
    "sum": _sum,
    "trim": _trim,
}

_COMPARING_TESTS: Final = ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne")


def _metered_test(name: str) -> Callable[..., Any]:
    function: Any = TESTS[name]

    @pass_context
    def metered(context: MeteredContext, value: Any, *args: Any) -> Any:
        context.meter.step()
        return function(value, *args)

    return metered


# --- the environment ----------------------------------------------------------------------------------------------------------


@pass_context
def _finalize(context: MeteredContext, value: Any) -> Any:
    """Pay for every expression that is put out. Passing the context also keeps Jinja from evaluating constants while compiling."""
    text = value if isinstance(value, str) else str(value)
    context.meter.text(len(text))
    return text


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders chat templates; its contexts are to be given a `Meter` before rendering."""

    context_class = MeteredContext
    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # evaluating constants while compiling is work that no meter counts
            extensions=[GenerationBlock, loopcontrols],
            finalize=_finalize,
        )
        self.filters = {name: _metered(name) for name in _PLAIN_FILTERS} | dict(_OWN_FILTERS)
        self.tests = dict(TESTS) | {name: _metered_test(name) for name in _COMPARING_TESTS}
        del self.globals["lipsum"]
        self.globals["namespace"] = _OpaqueNamespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: _strftime(now(), format)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _CLOSED_STR:
            return False
        if isinstance(obj, int) and attr in _CLOSED_INT:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # Jinja gives an undefined value, which prints as nothing. That is right for a dict's `update`, which may be meant as a key.
        if attribute.startswith("_") or is_internal_attribute(obj, attribute):
            raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = __context.meter
        meter.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            meter.step(len(owner))  # which is read, whatever comes of it
        if isinstance(owner, CONTAINERS):  # what it gives is a part of what it has, or all of it
            if __obj.__name__ == "copy":
                meter.elements(len(owner))
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, LoopContext):  # a recursive loop over the next level
            args = tuple(_for_each(__context, arg) for arg in args)
        elif args or kwargs:
            args = _pay_arguments(meter, __obj, owner, args, kwargs)
        return meter.take(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter: Meter = context.meter
        if isinstance(left, str):
            if operator == "+" and type(left) is type(right) is str:  # one that is marked as safe has the other escaped
                meter.text(len(left) + len(right))
                return left + right
            if operator == "%":
                _pay_percent(meter, left, right)
        if isinstance(left, int) and isinstance(right, int):
            _bound_integers(operator, left, right)
        elif operator == "*":
            _pay_repetition(meter, left, right)
        return meter.take(self.binop_table[operator](left, right))

    def concatenate(self, context: MeteredContext, values: list[Any]) -> str:
        """``a ~ b``, in generated code."""
        texts = [value if isinstance(value, str) else context.meter.take(str(value)) for value in values]
        context.meter.text(sum(map(len, texts)))
        return "".join(texts)

    def cut(self, context: MeteredContext, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``, in generated code."""
        part = value[start:stop:step]
        if isinstance(part, str):
            context.meter.text(len(part))
        elif isinstance(part, CONTAINERS):
            context.meter.elements(len(part))
        return part


def _bound_integers(operator: str, left: int, right: int) -> None:
    n_bits = max(left.bit_length(), right.bit_length())
    if operator == "**" and right > 0:
        n_bits = max(n_bits, left.bit_length() * right)
    if n_bits > N_BITS_MAX:
        raise TemplateLimitExceeded("the chat template makes a number of too many digits")


def _pay_repetition(meter: Meter, left: Any, right: Any) -> None:
    times, sequence = (left, right) if isinstance(left, int) else (right, left)
    if not isinstance(times, int) or times <= 0:
        return
    if isinstance(sequence, str):
        meter.text(times * len(sequence))
    elif isinstance(sequence, CONTAINERS):
        meter.elements(times * len(sequence))


def _strftime(moment: datetime, format: str) -> str:
    if len(format) > N_FORMAT_MAX:
        raise TemplateLimitExceeded("the chat template formats a date at length")
    return moment.strftime(format)
