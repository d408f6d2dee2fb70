"""The host pool: what was saved is found by its tokens, by nobody else's, and never takes more than its bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.memory.hostpool import HostPool, Piece
from cllm.engine.memory.pieces import PieceTree

KEY, OTHER_KEY = ("", ""), ("somebody else", "")
TEXT = list(range(100, 200))


def make_pool(n_bytes_max: int = 1 << 20, *, can_cut: bool = True) -> HostPool:
    return HostPool(n_bytes_max, can_cut=can_cut)


def piece(tokens: list[int], start: int = 0, *, key: tuple[str, str] = KEY, n_bytes: int = 10) -> Piece:
    return Piece(key, list(tokens), start, bytes(n_bytes))


def found(pool: HostPool, tokens: list[int], n_have: int = 0, key: tuple[str, str] = KEY) -> tuple[int, int, list[int]] | None:
    """Where the chain begins and ends, and where its pieces begin."""
    chain = pool.find(key, tokens, n_have)
    return None if chain is None else (chain.start, chain.end, [one.start for one in chain.pieces])


def test_an_empty_pool_finds_nothing() -> None:
    assert found(make_pool(), TEXT) is None


def test_a_piece_is_found_by_a_text_that_begins_with_it() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50]))
    assert found(pool, TEXT) == (0, 50, [0])


def test_a_piece_is_good_for_the_part_that_a_text_has_in_common_with_it() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50]))
    assert found(pool, [*TEXT[:20], 7, 8]) == (0, 20, [0])


def test_where_cells_cannot_be_cut_a_piece_is_good_only_for_a_text_that_goes_on_from_its_end() -> None:
    pool = make_pool(can_cut=False)
    pool.put(piece(TEXT[:50]))
    pool.put(piece(TEXT[:20]))
    assert found(pool, TEXT) == (0, 50, [0])
    assert found(pool, TEXT[:50]) == (0, 50, [0])
    assert found(pool, [*TEXT[:49], 7]) == (0, 20, [0])
    assert found(pool, TEXT[:19]) is None


def test_another_key_finds_nothing() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50]))
    assert found(pool, TEXT, key=OTHER_KEY) is None
    pool.put(piece(TEXT[:30], key=OTHER_KEY))
    assert found(pool, TEXT, key=OTHER_KEY) == (0, 30, [0])


def test_a_piece_behind_a_prefix_is_of_use_to_who_has_the_prefix() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50], 20))
    assert found(pool, TEXT, 20) == (20, 50, [20])
    assert found(pool, TEXT, 35) == (20, 50, [20])
    assert found(pool, TEXT, 19) is None


def test_what_is_known_already_is_not_found() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50]))
    assert found(pool, TEXT, 50) is None
    assert found(pool, TEXT[:40], 40) is None


def test_pieces_that_follow_each_other_make_a_chain() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:20]))
    pool.put(piece(TEXT[:50], 20))
    pool.put(piece([*TEXT[:50], 1, 2, 3], 50))
    assert found(pool, TEXT) == (0, 50, [0, 20])
    assert found(pool, [*TEXT[:50], 1, 2, 9]) == (0, 52, [0, 20, 50])


def test_a_chain_with_a_gap_leads_to_the_gap() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:20]))
    pool.put(piece(TEXT[:80], 50))
    assert found(pool, TEXT) == (0, 20, [0])
    assert found(pool, TEXT, 50) == (50, 80, [50])


def test_a_chain_goes_through_a_longer_piece_up_to_where_the_next_one_begins() -> None:
    pool = make_pool()
    pool.put(piece([*TEXT[:20], 1, 1, 1]))
    pool.put(piece(TEXT[:50], 20))
    chain = pool.find(KEY, TEXT, 0)
    assert chain is not None
    assert [(one.start, cut) for one, cut in chain.cuts()] == [(0, 20), (20, 50)]


def test_no_more_is_restored_than_is_needed() -> None:
    pool = make_pool()
    pool.put(piece([*TEXT[:50], 1]))
    pool.put(piece([*TEXT[:50], 2], 30))
    assert found(pool, TEXT[:50], 30) == (30, 50, [30])
    assert found(pool, TEXT[:50], 10) == (0, 50, [0])


def test_what_was_unused_for_longest_makes_room() -> None:
    size = piece(TEXT[:10]).n_bytes
    pool = make_pool(3 * size)
    texts = [[i] * 10 for i in range(4)]
    for text in texts[:3]:
        pool.put(piece(text))
    chain = pool.find(KEY, texts[0], 0)
    assert chain is not None
    pool.touch(chain)
    pool.put(piece(texts[3]))
    assert [found(pool, text) is not None for text in texts] == [True, False, True, True]
    assert pool.totals.n_evictions == 1


def pool_for_three(texts: list[list[int]], awaited: list[list[int]]) -> HostPool:
    """A pool with room for three of these texts, which were used in this order, while others wait for their turns to go on from some."""
    pool = make_pool(3 * piece(texts[0]).n_bytes)
    pool.texts_awaited = lambda: [(KEY, text) for text in awaited]
    for text in texts:
        pool.put(piece(text))
    pool.check()
    return pool


LETTERS = [[i] * 10 for i in range(4)]


def test_what_somebody_waits_for_stays_before_what_was_used_since() -> None:
    pool = pool_for_three(LETTERS, awaited=[[*LETTERS[0], 7]])
    assert [found(pool, text) is not None for text in LETTERS] == [True, False, True, True]


def test_where_all_is_awaited_the_one_whose_turn_comes_last_loses_what_it_would_go_on_from() -> None:
    pool = pool_for_three(LETTERS, awaited=[LETTERS[3], LETTERS[0], LETTERS[2], LETTERS[1]])
    assert [found(pool, text) is not None for text in LETTERS] == [True, False, True, True]


def test_what_is_awaited_by_nobody_is_not_kept_where_all_else_is() -> None:
    pool = pool_for_three(LETTERS, awaited=LETTERS[:3])
    assert [found(pool, text) is not None for text in LETTERS] == [True, True, True, False]


def test_of_a_chain_that_is_awaited_the_end_goes_before_the_beginning() -> None:
    text = list(range(30))
    sizes = [piece(text[:end], end - 10).n_bytes for end in (10, 20, 30)]
    pool = make_pool(sum(sizes))
    pool.texts_awaited = lambda: [(KEY, text)]
    for end in (10, 20, 30):
        pool.put(piece(text[:end], end - 10))
    pool.put(piece([7] * 10))
    assert found(pool, text) == (0, 30, [0, 10, 20]), "what nobody waits for makes room first"
    pool.n_bytes_max -= 1
    pool.put(piece([8]))
    assert found(pool, text) == (0, 20, [0, 10])


def test_a_long_text_in_parts_is_charged_its_beginning_once_but_for_its_places_in_their_lists() -> None:
    text, pool = list(range(10_000)), make_pool(1 << 30)
    ends = range(250, len(text) + 1, 250)
    for end in ends:
        pool.put(piece(text[:end], end - 250, n_bytes=0))
    whole = piece(text, n_bytes=0).n_bytes
    assert pool.n_bytes == whole + sum(8 * (end - 250) for end in ends)


def test_a_piece_is_awaited_though_what_is_before_it_is_in_the_models_memory() -> None:
    pool = make_pool(2 * piece(TEXT[:50], 30).n_bytes)
    pool.texts_awaited = lambda: [(KEY, TEXT)]
    pool.put(piece(TEXT[:50], 30))
    for letter in (1, 2):
        pool.put(piece([letter] * 50, 30))
    assert found(pool, TEXT[:50], 30) == (30, 50, [30])


def test_a_piece_larger_than_the_pool_is_not_kept_and_drives_nothing_out() -> None:
    pool = make_pool(1000)
    pool.put(piece(TEXT[:10]))
    pool.put(piece([1] * 10, n_bytes=1000))
    assert found(pool, [1] * 10) is None
    assert found(pool, TEXT) == (0, 10, [0])


def test_what_is_here_already_is_not_kept_twice() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:50]))
    pool.put(piece(TEXT[:50]))
    pool.put(piece(TEXT[:30]))
    assert len(pool) == 1
    assert pool.covers(KEY, TEXT[:40], 10)
    assert not pool.covers(KEY, TEXT[:51], 10)


def test_a_longer_piece_takes_the_place_of_those_it_contains() -> None:
    pool = make_pool()
    pool.put(piece(TEXT[:20]))
    pool.put(piece(TEXT[:50], 20))
    pool.put(piece([*TEXT[:20], 1], 20))
    pool.put(piece(TEXT[:60]))
    assert len(pool) == 2
    assert found(pool, [*TEXT[:20], 1, 2]) == (0, 21, [0, 20])


def test_a_spare_piece_that_finds_no_room_leaves_what_it_contains() -> None:
    short, other, long = piece(TEXT[:20]), piece([1] * 30), piece(TEXT[:50])
    pool = make_pool(short.n_bytes + other.n_bytes)
    pool.keep_evicted()
    pool.put(short)
    pool.put(other)
    pool.put(long, is_spare=True)
    assert (pool.pieces(), pool.take_evicted()) == ([short, other], [long])
    assert found(pool, TEXT) == (0, 20, [0])
    pool.check()


def test_a_spare_piece_has_the_room_of_what_it_contains() -> None:
    short, long = piece(TEXT[:20]), piece(TEXT[:50])
    pool = make_pool(long.n_bytes)
    pool.put(short)
    pool.put(long, is_spare=True)
    assert pool.pieces() == [long]
    pool.check()


def test_a_state_that_cannot_be_cut_stays_beside_a_longer_one() -> None:
    pool = make_pool(can_cut=False)
    pool.put(piece(TEXT[:20]))
    pool.put(piece(TEXT[:50]))
    assert len(pool) == 2
    assert not pool.covers(KEY, TEXT[:40], 0)


def test_evicted_pieces_are_given_to_who_asks_for_them_once() -> None:
    pool = make_pool(piece(TEXT[:10]).n_bytes)
    pool.put(piece([1] * 10))
    pool.put(piece([2] * 10))
    assert pool.take_evicted() == []
    pool.keep_evicted()
    pool.put(piece([3] * 10))
    assert [one.tokens[0] for one in pool.take_evicted()] == [2]
    assert pool.take_evicted() == []


# --- against a plain definition ---------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
pieces = st.lists(st.tuples(texts, st.integers(0, 7)).map(lambda pair: (pair[0], pair[1] % len(pair[0]))), max_size=12)


def furthest(known: list[Piece], tokens: list[int], n_have: int, *, can_cut: bool) -> int:
    """How far one gets, by trying everything until nothing is gained."""
    reach, more = n_have, True
    while more:
        more = False
        for one in known:
            n = next((i for i, pair in enumerate(zip(one.tokens, tokens)) if pair[0] != pair[1]), min(len(one.tokens), len(tokens)))  # noqa: B905
            if one.start <= reach < n and (can_cut or n == len(one.tokens)):
                reach, more = n, True
    return reach


@given(pieces, texts, st.integers(0, 8), st.booleans())
def test_a_chain_leads_as_far_as_anything_could(some: list[tuple[list[int], int]], tokens: list[int], n_have: int, can_cut: bool) -> None:
    tree: PieceTree[Piece] = PieceTree()
    known = [piece(text, start if can_cut else 0) for text, start in some]
    for one in known:
        tree.add(one)
    chain = tree.find(KEY, tokens, n_have, can_cut=can_cut)
    assert (n_have if chain is None else chain.end) == furthest(known, tokens, n_have, can_cut=can_cut)
    if chain is not None:
        assert chain.start <= n_have
        at = chain.start
        for one, cut in chain.cuts():
            assert one.start == at
            assert one.tokens[:cut] == tokens[:cut]
            assert can_cut or len(one.tokens) == cut
            at = cut
        assert at == chain.end


@given(pieces, st.data())
def test_a_tree_from_which_all_is_removed_is_as_new(some: list[tuple[list[int], int]], data: st.DataObject) -> None:
    tree: PieceTree[Piece] = PieceTree()
    known = [piece(*pair) for pair in some]
    for one in known:
        tree.add(one)
    for one in data.draw(st.permutations(known)):
        tree.remove(one)
    assert not tree._roots


@given(pieces, st.integers(100, 2000))
def test_a_pool_never_holds_more_than_its_bytes(some: list[tuple[list[int], int]], n_bytes_max: int) -> None:
    pool = make_pool(n_bytes_max)
    for text, start in some:
        pool.put(piece(text, start))
        pool.check()
        for one in pool.pieces():
            assert pool.covers(one.key, one.tokens, one.start)


def test_several_that_come_at_once_have_those_who_wait_looked_through_once() -> None:
    asked = []
    pool = make_pool(25)
    pool.texts_awaited = lambda: asked.append(None) or ()  # type: ignore[func-returns-value]
    spare, first, second, third = (piece([n] * 20) for n in range(4))
    n_bytes = spare.n_bytes
    pool.n_bytes_max = 2 * n_bytes
    pool.put_all([(spare, True), (first, False), (second, False), (third, False)])
    assert [one in pool for one in (spare, first, second, third)] == [False, False, True, True]
    assert len(asked) == 1
    assert pool.n_bytes == 2 * n_bytes


def n_nodes(tree: PieceTree[Piece]) -> int:
    nodes, n = list(tree._roots.values()), 0
    while nodes:
        n += 1
        nodes += nodes.pop().children.values()
    return n


def test_a_text_that_others_parted_from_is_one_path_again_when_they_are_gone() -> None:
    tree: PieceTree[Piece] = PieceTree()
    stays = piece(TEXT)
    tree.add(stays)
    n_before = n_nodes(tree)
    parted = [piece([*TEXT[:n], 0, 1, 2], start) for n in range(4, 100, 4) for start in (0, n // 2)]
    for one in parted:
        tree.add(one)
    assert n_nodes(tree) > n_before + len(parted)
    for one in parted:
        tree.remove(one)
    assert n_nodes(tree) == n_before
    chain = tree.find(KEY, TEXT, 0, can_cut=False)
    assert chain is not None
    assert chain.pieces == (stays,)


@given(st.data())
def test_a_tree_that_pieces_have_left_is_as_one_that_they_never_came_to(data: st.DataObject) -> None:
    texts = st.lists(st.integers(0, 1), min_size=1, max_size=8)
    some = [piece(text, data.draw(st.integers(0, len(text) - 1))) for text in data.draw(st.lists(texts, max_size=8))]
    tree: PieceTree[Piece] = PieceTree()
    for one in some:
        tree.add(one)
    gone = data.draw(st.permutations(some))[: data.draw(st.integers(0, len(some)))]
    for one in gone:
        tree.remove(one)
    left, anew = [one for one in some if one not in gone], PieceTree[Piece]()
    for one in left:
        anew.add(one)
    assert n_nodes(tree) == n_nodes(anew)
    text, n_have, can_cut = data.draw(texts), data.draw(st.integers(0, 3)), data.draw(st.booleans())
    assert tree.n_leading(KEY, text) == anew.n_leading(KEY, text)
    ends = [
        None if chain is None else (chain.start, chain.end)
        for chain in (one.find(KEY, text, n_have, can_cut=can_cut) for one in (tree, anew))
    ]
    assert ends[0] == ends[1]
    for one in left:
        assert {*map(id, tree.within(one))} == {*map(id, anew.within(one))}
