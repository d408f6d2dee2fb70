"""GBNF: what is derived from a grammar is taken, whatever its rules are called, and no answer gets where it cannot end."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.bigstack import call_with_stack
from cllm.errors import GrammarInvalid
from cllm.testing.fake import END_OF_TURN, N_TOKENS_LEAST, FakeVocabulary
from cllm.text import gbnf, gbnf_lexemes
from cllm.text.grammar import N_BYTES_STACK, Grammar, Grammars, GrammarSource, Kind
from tests.text.conftest import allowed, compiled, takes


def of(text: str) -> Grammar:
    return compiled(GrammarSource(Kind.GRAMMAR, text))


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
BLOCKS = 'root ::= block\nblock ::= text ("<" block ">")* text "END"\ntext ::= [a-zA-Z ]*'
ASKED = 'root ::= "Q: " text "\\nA: " value\ntext ::= .*\nvalue ::= "[" value? "]" | num\nnum ::= [0-9]'
SENTENCES = 'root ::= s\ns ::= subj " is " obj ("." s)?\nsubj ::= [a-z ]+\nobj ::= [a-z ]+'

NUMBERS = r"""
root  ::= "[" ws (value ("," ws value)*)? "]"
value ::= float | int ws | root
int   ::= [0-9]+ ws
float ::= [0-9]+ "." [0-9]+
ws    ::= [ \n]*
"""
STATEMENTS = r"""
root ::= stmt+
stmt ::= decl ";" | name " "? "=" num ";" | "{" stmt "}"
decl ::= "int " [a-z]+
name ::= [a-z]+ " "?
num  ::= [0-9]+
"""
SELECT = r"""
root ::= "SELECT " item ("," item)*
item ::= agg "(" item ")" | name " " | name
agg  ::= "SUM" | "COUNT" | "AVG"
name ::= [A-Z]+ " "?
"""


@pytest.mark.parametrize(
    ("grammar", "text", "fits"),
    [
        (ARITHMETIC, "1+2=3\n", True),
        (ARITHMETIC, "1 +2\n= 3 \n(1+2)=3\nx_1*2=y\n\n\n", True),
        (ARITHMETIC, "1+2=", False),
        (ARITHMETIC, "1+2=3", False),
        (BLOCKS, "a END", True),
        (BLOCKS, "a <b END> c END", True),
        (BLOCKS, "ENTER ENDEND", True),
        (BLOCKS, "a <b END c END", False),
        (ASKED, "Q: hi\nA: 5", True),
        (ASKED, "Q: A: \nA: 7\nA: [[5]]", True),
        (ASKED, "Q: hi\nA: [5", False),
        (SENTENCES, "the cat is red", True),
        (SENTENCES, "this is is is. a is b", True),
        (SENTENCES, "the cat", False),
        (JSON, '{"a b": [1, -2.5e3, "\\u00e9\\n", true], "c": {}}', True),
        (JSON, '{ "a":\n  null\n}\n', True),
        (JSON, '{"a": 01}', False),
        (NUMBERS, "[55,5.5]", True),
        (NUMBERS, "[55 , 5.55,[7\n]]", True),
        (STATEMENTS, "int x;{index=5;}in =6;", True),
        (SELECT, "SELECT COST,SUM(COUNT ),SIZE", True),
        ('root ::= t v\nt ::= "<t>" .* "</t>"\nv ::= "[" v* "]"', "<t>a</t></t>[[]]", True),
        ('root ::= x "c" root | ";"\nx ::= [a-z]+ "b"', "abc;", True),
        ('root ::= x "c" root | ";"\nx ::= [a-z]+ "b"', "abcbbc;", True),
        ('root ::= x "c" root | "."\nx ::= ("a" | "ab") ("b" | "cd")', "abcabcdc.", True),
        ('root ::= x "c" root | "."\nx ::= "a" | "ab" | "ac"', "acaccabc.", True),
        ('root ::= x "=" root | "."\nx ::= "<" | "<<" | "<="', "<=<<=<==.", True),
        ('root ::= x "\\n" root | "."\nx ::= "a" | "a\\x0ab"', "a\na\nb\n.", True),
        ('root ::= "a"? "bc" | "ab" root | ";"', "abc", True),
        ('root ::= "a"* "bc" | "ab" root | ";"', "abababc", True),
        ('root ::= [a-z]* "1" | "ab" root | ";"', "abc1", True),
        ('root ::= x | "(" root ")"\nx ::= ("a" | "ab") "c"', "(abc)", True),
        ('root ::= x "b" | "(" root ")"\nx ::= "a" | "ab"', "(abb)", True),
        ('root ::= x "b" | "(" root ")"\nx ::= "a" | "ab"', "(ab)", True),
        ('root ::= x{2} "b" | "(" root ")"\nx ::= "a" "b"?', "abab", True),
        ('root ::= x{2} "b" | "(" root ")"\nx ::= "a" "b"?', "abbb", False),
        ('root ::= x{2} "b" | "(" root ")"\nx ::= "a" "b"?', "(aabb)", True),
        ('root ::= "\\[x\\]" [\\[\\]]+', "[x][]", True),
        ('root ::= "50%json" | "(" root ")"', "(50%json)", True),
        ('root ::= Foo foo | "(" root ")"\nFoo ::= "a"\nfoo ::= "b" root?', "aba", False),
        ('root ::= Foo foo | "(" root ")"\nFoo ::= "a"\nfoo ::= "b" root?', "(abab)", True),
        ('root ::= a-b a_b fooBar foo-bar\na-b ::= "1"\na_b ::= "2"\nfooBar ::= "3"\nfoo-bar ::= "4"', "1234", True),
    ],
)
def test_a_grammar_takes_what_is_derived_from_it(grammar: str, text: str, fits: bool) -> None:
    assert takes(of(grammar), text) is fits


def test_what_can_be_matched_whole_is_matched_whole() -> None:
    lark = gbnf.to_lark(JSON)
    assert any(line.startswith("R4: ") and '"\\""' in line for line in lark.splitlines()), "strings are one terminal"
    spaced = gbnf.to_lark(JSON.replace('string ":" ws value', 'string [ ] ":" ws value'))
    assert "r4_0" not in spaced
    assert any(line.startswith("R4_") and '"\\""' in line for line in spaced.splitlines()), "they are up to the quote, where blanks follow"


def test_a_rule_that_is_not_there_is_named_as_it_was_written() -> None:
    with pytest.raises(GrammarInvalid, match="'r0' not found"):
        of('root ::= r0\nother ::= "x"')


def test_of_a_grammar_that_takes_too_long_to_look_through_all_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gbnf_lexemes, "N_VISITS_MAX", 10)
    lark = gbnf.to_lark(ARITHMETIC)
    assert not any(line[0].isupper() for line in lark.splitlines())
    assert takes(compiled(GrammarSource(Kind.LARK, lark)), "1+2=3\n")


def test_looking_through_a_grammar_has_a_bound() -> None:
    n = 300
    chain = "\n".join(f'x{i} ::= "a"* x{i + 1}' for i in range(n)) + f'\nx{n} ::= "b" | [a-z]*'
    nested = 'root ::= (x0 "a" | "(" root ")")' + 5000 * " | x1 x2 x3"
    begin = time.process_time()
    gbnf.to_lark(f"{nested}\n{chain}")
    assert time.process_time() - begin < 30, "it is two seconds"


# --- with a vocabulary of words -----------------------------------------------------------------------------------------


WORD_LETTERS = "abcdefghijklmnopqrstuvwxyz" * 3 + " éß漢字\n\"'<>{}[]().,:;|#*-=/\\"


class Words(FakeVocabulary):
    """Has words beside bytes, as real ones have, whose masks take so much longer."""

    def __init__(self) -> None:
        super().__init__(N_TOKENS_LEAST + 60_000)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        if not N_TOKENS_LEAST <= token < self.n_tokens:
            return super().token_bytes(token, special=special)
        number, letters = token * 2_654_435_761 % 2**32, ""  # any words, of which few begin alike
        for _ in range(6):
            number, letter = divmod(number, len(WORD_LETTERS))
            letters += WORD_LETTERS[letter]
        return letters.encode()


@pytest.fixture(scope="module")
def words() -> Grammars:
    return Grammars(Words())


STRING = '"\\"" ([^"\\\\] | "\\\\" .)* "\\"" ws\nws ::= [ \\n]*'
WORDED = {
    "reasoning before JSON": (
        'root ::= "<think>" [^<]* "</think>" object' + JSON.partition("::= object")[2],
        '<think>ab</think>{"ab": ["cd',
    ),
    "text and calls": (
        'root ::= (text call)* text\ntext ::= [^<]*\ncall ::= "<call>" ws json "</call>"\njson ::= "{" ws pair ("," ws pair)* "}" ws\n'
        f'pair ::= string ":" ws (string | json)\nstring ::= {STRING}',
        'ab <call>{"ab":"cd',
    ),
    "keys of letters": (
        f'root ::= "{{" pair ("," pair)* "}}"\npair ::= "\\"" key "\\"" ws ":" ws (string | root)\nkey ::= [a-zA-Z_]+\nstring ::= {STRING}',
        '{"ab":"cd',
    ),
    "turns": ('root ::= turn+\nturn ::= name ": " line "\\n" | "(" turn ")"\nname ::= [A-Z] [a-z]*\nline ::= [^\\n]+', "Ab: cd"),
    "elements": ('root ::= el+\nel ::= "<div>" (el | text)* "</div>" | "<p>" text "</p>"\ntext ::= [^<>]+', "<div>ab"),
    "blocks": (BLOCKS, "ab"),
    "sentences": (SENTENCES, "ab"),
}


@pytest.mark.parametrize(("grammar", "text"), WORDED.values(), ids=list(WORDED))
def test_a_mask_is_found_in_the_middle_of_a_word(words: Grammars, grammar: str, text: str) -> None:
    compiled_here = call_with_stack(partial(words.compile, GrammarSource(Kind.GRAMMAR, grammar)), N_BYTES_STACK)
    state = compiled_here.start(text.encode())
    assert len(allowed(state.mask())) > 10_000, state.failure
    assert state.failure is None


# --- against the rules themselves -------------------------------------------------------------------------------------

Node: TypeAlias = tuple[str, ...] | tuple[str, "Node"] | tuple[str, "Node", "Node"]  # type: ignore[misc]
LETTERS = "ab()"
N_TEXTS_MAX = 1000


def nodes(names: list[str]) -> st.SearchStrategy[Node]:
    leaves = st.sampled_from([("text", "a"), ("text", "b"), ("text", "ab"), ("class", "ab"), *(("rule", name) for name in names)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["star", "plus", "maybe"]), inner), st.tuples(st.sampled_from(["then", "or"]), inner, inner)
        ),
        max_leaves=5,
    )


def shown(node: Node) -> str:
    kind, *rest = node
    if kind == "text":
        return f'"{rest[0]}"'
    if kind == "class":
        return f"[{rest[0]}]"
    if kind == "rule":
        return str(rest[0])
    inner = [shown(part) for part in rest]
    signs = {"star": "*", "plus": "+", "maybe": "?"}
    return f"({inner[0]}){signs[kind]}" if kind in signs else f"({(' ' if kind == 'then' else ' | ').join(inner)})"


def ends(node: Node, rules: dict[str, Node], text: str, starts: frozenset[int]) -> frozenset[int]:
    """Where what a node derives may end in `text`."""
    kind, *rest = node
    if kind == "text":
        return frozenset(i + len(rest[0]) for i in starts if text.startswith(rest[0], i))
    if kind == "class":
        return frozenset(i + 1 for i in starts if text[i : i + 1] and text[i] in rest[0])
    if kind == "rule":
        return ends(rules[rest[0]], rules, text, starts) if starts else starts
    if kind == "or":
        return ends(rest[0], rules, text, starts) | ends(rest[1], rules, text, starts)
    if kind == "then":
        return ends(rest[1], rules, text, ends(rest[0], rules, text, starts))
    found = frozenset() if kind == "plus" else starts
    latest = starts
    while latest:
        latest = ends(rest[0], rules, text, latest) - found
        found |= latest
        if kind == "maybe":
            break
    return found


def can_end(grammar: Grammar, written: bytes) -> bool:
    """Whether some text ends what was written, of those that are looked at."""
    texts = [written]
    for text in texts:
        state = grammar.start(text)
        may = allowed(state.mask())
        if state.is_done or END_OF_TURN in may:
            return True
        if len(texts) < N_TEXTS_MAX:
            texts += [text + bytes([letter]) for letter in sorted(may)]
    return len(texts) >= N_TEXTS_MAX


def n_kept(lark: str) -> int:
    """Pieces of several characters that are matched as far as they go, beside others; 0 where all is matched as it stands."""
    bodies = [line for line in lark.splitlines() if line[:1].islower()]
    return 0 if "WHOLE_OF_IT" in lark else len(set(re.findall(r'[RW][\d_]+|"[^"]{2,}"', "\n".join(bodies))))


@settings(max_examples=200, deadline=None)
@given(nodes(["x", "y"]), nodes(["y"]), nodes([]), st.lists(st.sampled_from(LETTERS), max_size=7).map("".join))
def test_what_is_taken_is_derived_and_every_answer_can_be_ended(root: Node, x: Node, y: Node, text: str) -> None:
    rules: dict[str, Node] = {"root": ("or", root, ("then", ("text", "("), ("then", ("rule", "root"), ("text", ")")))), "x": x, "y": y}
    source = "\n".join(f"{name} ::= {shown(node)}" for name, node in rules.items())
    grammar = of(source)
    state, written = grammar.start(), b""
    for letter in text.encode():
        if state.is_done or letter not in allowed(state.mask()):
            break
        state.accept(letter)
        written += bytes([letter])
    assert state.failure is None
    assert can_end(grammar, written), written
    is_derived = len(text) in ends(("rule", "root"), rules, text, frozenset([0]))
    if n_kept(gbnf.to_lark(source)) < 2:  # or one that begins as another does may be read in its place
        assert takes(grammar, text) is is_derived
    elif takes(grammar, text):
        assert is_derived
