"""Templates that loop, allocate or reach: each ends in its named error, in bounded time and memory, and the next render works."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import tracemalloc

import pytest

from cllm.errors import InvalidRequest, RequestError, TemplateFailed, TemplateInvalid, TemplateLimitExceeded, TemplateSlow
from cllm.text.meter import RenderLimits
from cllm.text.template import ChatTemplate

# Small, so that the table is quick. Times are the thread's own: what a busy machine does meanwhile is no template's doing.
LIMITS = RenderLimits(timeout_s=0.1, n_chars_max=2**18, n_chars_total=2**20)
WITHIN_S = 1.5
clock = time.thread_time
WITHIN_BYTES = 64 * 2**20

GUARD = "{% if messages[0].content == 'attack' %}"  # probing at load says other things, and must not trip
ATTACK = [{"role": "user", "content": "attack"}]

BIG = "{% set s = 'a' * 200000 %}"
GROWN_LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}"
GROWN_TUPLE = "{% set ns = namespace(x=(1,)) %}{% for i in range(5000) %}{% set ns.x = (ns.x,) %}{% endfor %}"

LOOPS = {
    "loop in loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "endless data": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}",
    "collected data": "{% set x %}{% for a in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    "collected data of a macro": "{% macro m() %}{% for a in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endmacro %}{{ m() }}",
    "collected data of a recursive loop": "{% for a in range(99999) recursive %}" + "y" * 5000 + "{% endfor %}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro that doubles": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "colons before a format": "{{ (':' * 100000 ~ '}:{').format(1) }}",
    "widths that give back": "{% set x = 'a'.center(-(10 ** 15)) %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a width that is no number": "{% set x = [1] | batch('nan' | float) %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "words counted over and over": "{% set s = 'a b ' * 50000 %}{% for i in range(99999) %}{% set n = s | wordcount %}{% endfor %}",
    "a text's tags taken off over and over": "{% set s = ('<a>' * 80000) | safe %}"
    "{% for i in range(99999) %}{% if s.striptags() or s.striptags() or s.striptags() or s.striptags() %}{% endif %}{% endfor %}",
    "sorting by many names": "{{ range(200) | list | sort(attribute='x,' * 50000) }}",
    "sorting by many names, by place": "{{ range(200) | list | sort(false, false, 'x,' * 50000) }}",
    "sorting by many names, from the end": "{{ range(9999) | reverse | sort(attribute='x,' * 10000) }}",
    "a long way to an attribute": "{{ (['a' * 9] * 999) | map(attribute='0.' * 9999 ~ '0') | list }}",
    "a long way to an attribute of some": "{{ (['a' * 9] * 999) | selectattr('0.' * 9999 ~ '0') | list }}",
    "a long way to what is joined": "{{ (['a' * 9] * 999) | join('', attribute='0.' * 9999 ~ '0') }}",
    "a long way to what is summed up": "{{ (['1' * 9] * 999) | sum(attribute='0.' * 9999 ~ '0') }}",
    "comparing all with all": "{{ range(9999) | select('in', range(99999) | map('string') | list) | list | length }}",
}

ALLOCATIONS = {
    "a namespace's text in a format": "{% set ns = namespace(a='x' * 200000) %}{{ ('{0.a}' * 1000).format(ns) }}",
    "a joiner's text in a format": "{% set j = joiner('x' * 200000) %}{{ ('{0.sep}' * 1000).format(j) }}",
    "a joiner's text, joined": "{% set j = joiner('x' * 200000) %}{{ ([j] * 1000) | join('', attribute='sep') }}",
    "a namespace's text to sort by": "{% set ns = namespace(a='x' * 200000) %}{{ ([ns] * 1000) | sort(attribute='a') }}",
    "text that is escaped": "{% set s = (''|safe) + ('<' * 200000) %}",
    "repeated text": "{{ 'a' * 10 ** 9 }}",
    "repeated text, reversed": "{{ 10 ** 9 * 'a' }}",
    "repeated list": "{{ [0] * 10 ** 9 }}",
    "repeated list of texts": BIG + "{{ [s] * 10000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling with ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling a list": GROWN_LIST.replace("GROW", "ns.x + ns.x"),
    "nesting lists": GROWN_LIST.replace("GROW", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nesting dicts": GROWN_LIST.replace("GROW", "{1: ns.x, 2: ns.x}") + "{{ ns.x | tojson }}",
    "nesting views": GROWN_LIST.replace("GROW", "[{1: ns.x, 2: ns.x}.values()]") + "{{ ns.x }}",
    "nesting by batch": GROWN_LIST.replace("GROW", "[1] | batch(3, ns.x) | first") + "{{ ns.x }}",
    "nesting by default": GROWN_LIST.replace("GROW", "[0, 0] | map('default', ns.x, true) | list") + "{{ ns.x == 1 }}{{ ns.x }}",
    "nesting by dict": GROWN_LIST.replace("GROW", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "nesting by varargs": "{% set ns = namespace(x=[1]) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
    "nesting by kwargs": "{% set ns = namespace(x=[1]) %}{% macro m() %}{% set ns.x = kwargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(a=ns.x, b=ns.x) }}{% endfor %}{{ ns.x }}",
    "nesting by cycler": GROWN_LIST.replace("GROW", "cycler(ns.x, ns.x).items") + "{{ ns.x }}",
    "a deep tuple to hash": GROWN_TUPLE + "{{ {ns.x: 1} }}",
    "a deep tuple to look up": GROWN_TUPLE + "{{ {}[ns.x] }}",
    "a wide tuple": "{{ {(1,) * 9999: 1} }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center, in a map": "{{ ['a'] | map('center', 10 ** 9) | list }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "indent by text": BIG + "{{ ('a\n' * 9999) | indent(s) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 5 | round(10 ** 9, 'ceil') }}",
    "round, below": "{{ 5 | round(-(10 ** 9)) }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "int": BIG + "{{ s | int(0, 16) }}",
    "format %": "{{ '%1000000000d' % 1 }}",
    "format %, with zeros": "{{ '%00000000001000000000d' % 1 }}",
    "format % by a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format % by name": BIG + "{{ ('%(a)s' * 9999) % {'a': s} }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format method, with zeros": "{{ '{:00000000001000000000}'.format(1) }}",
    "format method, with other zeros": "{{ '{:\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u06601000000000}'.format(1) }}",
    "format method, a width of many digits": "{{ '{:" + "9" * 5000 + "}'.format(1) }}",
    "format method, computed width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format method, repeated": BIG + "{{ ('{0}' * 9999).format(s) }}",
    "format_map method": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "replace": BIG + "{{ s.replace('a', s) }}",
    "replace filter": BIG + "{{ s | replace('a', s) }}",
    "replace nothing": BIG + "{{ s.replace('', s) }}",
    "join": BIG + "{{ s.join(s) }}",
    "join of many": BIG + "{{ ''.join([s] * 9) }}{{ ''.join(range(9999) | map('replace', '1', s)) }}",
    "join filter": BIG + "{{ range(9999) | join(s) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ '1'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "expandtabs by name": "{{ '\t'.expandtabs(tabsize=10 ** 9) }}",
    "searching backwards": BIG + "{{ s.rfind('b' ~ 'a' * 100000) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "json separators": BIG + "{{ range(9999) | list | tojson(separators=(s, s)) }}",
    "json nested": GROWN_TUPLE.replace("(ns.x,)", "[ns.x]") + "{{ ns.x | tojson(indent=9) }}",
    "many slices": BIG + "".join(f"{{% set s{i} = s[1:] %}}" for i in range(50)),
    "many macro results": "{% macro m() %}" + "x" * 9999 + "{% endmacro %}{% for i in range(9999) %}{% set a = m() %}{% endfor %}",
    "joining what is written longer": "{% set l = ['\U000e0001' * 200000] %}{{ " + " ~ ".join(["l"] * 60) + " }}",
    "many copies": "{% set l = [0] * 10000 %}" + "".join(f"{{% set a{i} = l.copy() %}}" for i in range(12)),
    "a long date": "{{ strftime_now('%c' * 9999) }}",
}

REACHES = {
    "class": "{{ ''.__class__ }}",
    "class of class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "item": "{{ ''['__class__'] }}",
    "map": "{{ [''] | map(attribute='__class__') | list }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "the context": "{{ self._TemplateReference__context }}",
    "the loop's": "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "mro": "{{ dict.mro() }}",
}

# Sandboxed to an undefined value, as in the reference: calling or looking further is the error.
CLOSED = {
    "list append": "{% set x = [] %}{{ x.append(1) }}",
    "dict update": "{{ messages[0].update({'role': 'x'}) }}",
    "encode": "{{ 'a'.encode('idna') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9) }}",
    "the loop filter by name": "{{ messages['for each'].x }}",
}


def made(source: str, limits: RenderLimits = LIMITS) -> ChatTemplate:
    return ChatTemplate(GUARD + source + "{% else %}fine{% endif %}", bos_token="", eos_token="", limits=limits, clock=clock)


def attacked(source: str) -> RequestError:
    template = made(source)
    begin = clock()
    with pytest.raises(RequestError) as ended:
        template.render(ATTACK)
    assert clock() - begin < WITHIN_S
    assert template.render([{"role": "user", "content": "hi"}]) == "fine"
    return ended.value


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    assert isinstance(attacked(source), TemplateLimitExceeded)


@pytest.mark.parametrize("source", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_a_template_that_grows_is_ended_before_it_has_grown(source: str) -> None:
    template = made(source)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitExceeded):
            template.render(ATTACK)
        assert tracemalloc.get_traced_memory()[1] < WITHIN_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", REACHES.values(), ids=REACHES)
def test_a_template_that_reaches_for_attributes_fails(source: str) -> None:
    error = attacked(source)
    assert type(error) is TemplateFailed
    assert error.status == 500


@pytest.mark.parametrize("source", CLOSED.values(), ids=CLOSED)
def test_a_template_that_uses_what_is_closed_to_it_is_refused(source: str) -> None:
    assert isinstance(attacked(source), (InvalidRequest, TemplateFailed))


CONSTANTS = {name: source for name, source in ALLOCATIONS.items() if source.startswith("{{")}


@pytest.mark.parametrize("source", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_are_not_evaluated_while_compiling(source: str) -> None:
    begin = clock()
    made(source)
    assert clock() - begin < WITHIN_S


@pytest.mark.parametrize("source", ["{{ lipsum(9999) }}", "{{ cycler.__init__.__globals__ }}"])
def test_a_bare_hostile_template_cannot_keep_the_model_from_loading(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, bos_token="", eos_token="", limits=LIMITS).render(ATTACK)


@pytest.mark.parametrize("name", ["pprint", "urlize", "xmlattr", "wordwrap"])
def test_filters_that_no_prompt_needs_are_not_there(name: str) -> None:
    with pytest.raises(TemplateInvalid, match=name):
        ChatTemplate("{{ 'a' | " + name + " }}", bos_token="", eos_token="")


def test_messages_that_are_too_long_are_the_clients_affair() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="", limits=LIMITS)
    with pytest.raises(InvalidRequest, match="too long"):
        template.render([{"role": "user", "content": "a" * 300_000}])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_the_time_limit_is_the_clocks() -> None:
    ticks = itertools.count()
    template = ChatTemplate(ENDLESS, bos_token="", eos_token="", clock=lambda: next(ticks) / 10)
    for timeout_s, told in ((None, "10"), (2.0, "2"), (20.0, "10")):
        with pytest.raises(TemplateSlow, match=f"longer than {told} s"):
            template.render(ATTACK, timeout_s)


STUMBLES = """{% if tools %}{% for a in range(N) %}{% endfor %}{{ "=" + tools[0].function.parameters.properties.a.default }}{% endif %}"""


def test_a_template_that_is_tried_again_with_plainer_tools_has_the_time_of_one_render_for_both() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [5], "default": 5}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]

    def rendered(n: int, timeout_s: float | None) -> str:
        ticks = itertools.count()  # one for each 100 steps of a loop
        template = ChatTemplate(STUMBLES.replace("N", str(n)), bos_token="", eos_token="", clock=lambda: next(ticks) / 10)
        return template.render(ATTACK, timeout_s, tools=tools)

    assert rendered(3000, None) == "=5"
    with pytest.raises(InvalidRequest, match="can only concatenate"):
        rendered(6000, None)
    with pytest.raises(TemplateSlow):  # more time than was given might do
        rendered(6000, 8.0)


def test_whose_fault_it_is_that_nothing_can_be_rendered_is_found_out_in_that_time_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]

    def rendered(timeout_s: float | None) -> str:
        ticks = itertools.count()
        source = "{% for a in range(3000) %}{% endfor %}{% if tools %}{{ 1 + 'a' }}{% endif %}"
        template = ChatTemplate(source, bos_token="", eos_token="", clock=lambda: next(ticks) / 10)
        return template.render(ATTACK, timeout_s, tools=tools)

    with pytest.raises(InvalidRequest) as caught:
        rendered(None)
    assert caught.value.param == "tools"
    with pytest.raises(TemplateSlow):  # between two renders and three
        rendered(8.0)


def test_loading_does_not_wait_for_an_endless_template_as_long_as_a_conversation_may_take() -> None:
    ticks = itertools.count()
    ChatTemplate(ENDLESS, bos_token="", eos_token="", clock=lambda: next(ticks) / 10)
    n_probes = 60
    assert next(ticks) < n_probes * 15


def test_more_time_than_was_given_might_do_for_messages_that_are_too_long() -> None:
    template = made(ENDLESS)
    long = [*ATTACK, {"role": "assistant", "content": "a" * 100_000}]
    with pytest.raises(TemplateSlow):
        template.render(long, 0.01)
    with pytest.raises(InvalidRequest, match="too long"):
        template.render(long)


def test_a_long_conversation_stays_well_within_the_limits() -> None:
    source = "{% for m in messages[::-1] %}{% set c = m.content.strip() %}{{ '<' + m.role + '>' ~ c ~ '\\n' }}{% endfor %}"
    template = ChatTemplate(source, bos_token="", eos_token="", clock=clock)
    text = template.render([{"role": "user", "content": "a word " * 100}] * 5000)  # 3.5 million characters
    assert len(text) > 3_000_000


def test_a_template_that_looks_at_all_messages_for_each_has_the_time_for_a_long_session_beside_other_threads() -> None:
    look = "{% for n in messages %}{% if n.role == 'x' or n.content == m.role %}{{ n.role }}{% endif %}{% endfor %}"
    source = "{% for m in messages %}" + look + "{{ loop.index }} {% endfor %}"
    session = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": "ok"}] * 100
    took_s = []
    for _ in range(3):
        begun_at = time.thread_time()
        ChatTemplate(source, bos_token="", eos_token="").render(session)
        took_s.append(time.thread_time() - begun_at)
    # Beside two others that spin it takes three times as long by the clock.
    limits, is_over = RenderLimits(timeout_s=2 * max(took_s)), threading.Event()
    template = ChatTemplate(source, bos_token="", eos_token="", limits=limits)

    def spin() -> None:
        while not is_over.is_set():
            pass

    spinning = [threading.Thread(target=spin) for _ in range(2)]
    for one in spinning:
        one.start()
    try:
        assert template.render(session).endswith(" 200 ")
    finally:
        is_over.set()
        for one in spinning:
            one.join()


def test_the_deadline_holds() -> None:
    template = made(LOOPS["loop in loop"], RenderLimits(timeout_s=1.0))
    begin = clock()
    with pytest.raises(TemplateLimitExceeded):
        template.render(ATTACK)
    assert clock() - begin < 2.0


def test_the_recursion_limit_is_left_as_it_was() -> None:
    before = sys.getrecursionlimit()
    attacked(LOOPS["macro without end"])
    assert sys.getrecursionlimit() == before
