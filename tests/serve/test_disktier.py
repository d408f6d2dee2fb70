"""The disk tier: pieces outlive the process, belong to one model and one owner, and damaged files harm nobody."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from cllm.config import Settings
from cllm.engine.limits import MemoryLimits
from cllm.engine.memory.dealing import Memory
from cllm.engine.memory.hostpool import HostPool, Piece, n_bytes_of
from cllm.engine.memory.offload import Offload
from cllm.engine.memory.prefix import Key
from cllm.engine.memory.prices import Prices
from cllm.errors import StepFailed
from cllm.serve import disktier, statefiles, steploop
from cllm.serve.disktier import DiskTier
from cllm.serve.loading import load, open_disk
from cllm.serve.statefiles import SECRET_NAME, SUFFIX, StateFiles, StoredPiece
from cllm.testing.engine import RunningEngine
from cllm.testing.fake import FakeBackend, FakeModel
from tests.serve.conftest import TEST_S, Answer, make_spec, read_all, serving, text_alone, until

KEY, OTHER_KEY = ("", ""), ("salt of somebody", "")
TEXT = list(range(1000, 1500))
MODEL, OTHER_MODEL = "one model", "another model"
ROOM = 1 << 20


def piece(tokens: list[int], start: int = 0, *, key: tuple[str, str] = KEY, n_bytes: int = 1000) -> Piece:
    return Piece(key, tokens, start, os.urandom(n_bytes))


def open_tier(folder: Path, model: str = MODEL, n_bytes_max: int = ROOM) -> DiskTier:
    return DiskTier.open(str(folder), model, n_bytes_max)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def everything(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def fetched(
    tier: DiskTier,
    tokens: list[int],
    n_have: int = 0,
    *,
    key: tuple[str, str] = KEY,
    can_cut: bool = True,
    n_bytes_max: int = ROOM,
    takes_parts: bool = True,
) -> list[bytes]:
    pool = HostPool(n_bytes_max, can_cut=can_cut)
    pool.takes_parts = takes_parts
    return [one.state for one in await tier.fetch(key, tokens, n_have, pool)]


async def test_what_one_process_wrote_another_one_reads(tmp_path: Path) -> None:
    first, second = piece(TEXT[:200]), piece(TEXT[:400], 200)
    tier = open_tier(tmp_path)
    tier.offer([first, second])
    await tier.write_owed()
    again = open_tier(tmp_path)
    assert len(again) == 2
    assert await fetched(again, TEXT) == [first.state, second.state]
    assert await fetched(again, TEXT, 200) == [second.state]
    assert await fetched(again, [1, 2, 3]) == []


async def test_no_more_is_read_than_has_room_together_for_the_first_pieces_are_of_use_without_the_last(tmp_path: Path) -> None:
    pieces = [piece(TEXT[: 100 * (i + 1)], 100 * i) for i in range(4)]
    tier = open_tier(tmp_path)
    tier.offer(pieces)
    await tier.write_owed()
    n_bytes = [n_bytes_of(path_of(tmp_path, one).stat().st_size, one.start, len(one.tokens)) for one in pieces]
    assert await fetched(tier, TEXT, n_bytes_max=sum(n_bytes)) == [one.state for one in pieces]
    assert await fetched(tier, TEXT, n_bytes_max=sum(n_bytes[:3]) - 1) == [one.state for one in pieces[:2]]
    assert tier.totals.n_reads == 6


@pytest.mark.parametrize("n_awaited", [0, 2])
async def test_what_is_brought_in_does_not_take_its_own_beginnings_place(tmp_path: Path, n_awaited: int) -> None:
    pieces = [piece(TEXT[: 100 * (i + 1)], 100 * i) for i in range(4)]
    others = [piece(list(range(start, start + 100)), n_bytes=4000) for start in (5000, 6000)]
    tier = open_tier(tmp_path)
    tier.offer(pieces)
    await tier.write_owed()
    pool = HostPool(sum(one.n_bytes for one in (*pieces, others[0])), can_cut=True)
    for other in others:
        pool.put(other)
    pool.texts_awaited = lambda: [(KEY, other.tokens) for other in others[:n_awaited]]
    await tier._bring(KEY, TEXT, 0, pool)
    chain = pool.find(KEY, TEXT, 0)
    assert chain is not None
    assert chain.pieces[0].state == pieces[0].state
    assert all(other in pool for other in others[:n_awaited])
    pool.put(piece(list(range(7000, 7100)), n_bytes=2000))  # before whoever it was brought in for waits for it
    assert pool.find(KEY, TEXT, 0) is not None


async def test_a_pool_that_takes_no_parts_is_brought_what_begins_with_the_text_if_that_leads_on_by_itself(tmp_path: Path) -> None:
    first, second = piece(TEXT[:200]), piece(TEXT[:400], 200)
    tier = open_tier(tmp_path)
    tier.offer([first, second])
    await tier.write_owed()
    assert await fetched(tier, TEXT, takes_parts=False) == [first.state]
    assert await fetched(tier, TEXT, 100, takes_parts=False) == [first.state]
    assert await fetched(tier, TEXT, 200, takes_parts=False) == []
    assert tier.totals.n_reads == 2


async def test_what_goes_on_from_a_beginning_that_is_on_the_host_alone_is_read(tmp_path: Path) -> None:
    offload = Offload(HostPool(ROOM, can_cut=True), Prices(), can_save_part=True, n_cells_slot=4096, cell_n_bytes=5.0)
    memory = Memory(MemoryLimits(n_cells=4096, n_slots=4, can_share=True, can_trim=True), offload)
    offload.pool.put(piece(TEXT[:200]))
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:450], 200))
    await tier.recall(memory, KEY, [*TEXT[:150], *TEXT])  # it begins otherwise
    assert (tier.totals.n_reads, memory.n_kept(KEY, TEXT)) == (0, 200)
    await tier.recall(memory, KEY, TEXT)
    assert (tier.totals.n_reads, memory.n_kept(KEY, TEXT)) == (1, 450)


async def test_what_is_written_is_found_by_the_same_process(tmp_path: Path) -> None:
    tier, one = open_tier(tmp_path), piece(TEXT[:200])
    await tier.write(one)
    assert await fetched(tier, TEXT) == [one.state]
    assert tier.n_bytes == sum(path.stat().st_size for path in files(tmp_path))


async def test_a_small_gain_is_not_worth_a_file(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200]))
    assert await fetched(tier, TEXT[:10]) == []
    assert await fetched(tier, TEXT, 190) == []
    assert tier.totals.n_reads == 0


async def test_with_other_adapters_or_of_another_backend_nothing_is_found_whatever_the_fingerprint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "style.gguf"
    adapter.touch()

    def opened(*lora: str, backend: str = "fake") -> DiskTier:
        monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: (backend, FakeBackend()))
        settings = Settings(calibrate="off", cache_dir=str(tmp_path / "cache"), lora=lora)
        tier = open_disk(load(settings, lambda _share: True), settings)
        assert tier is not None
        return tier

    await opened().write(piece(TEXT[:200]))
    await opened(str(adapter)).write(piece(TEXT[:300]))
    monkeypatch.chdir(tmp_path)
    found = [opened(), opened(backend="other"), opened(f"{adapter}:0.5"), opened(str(adapter)), opened(adapter.name)]
    assert [len(await fetched(tier, TEXT)) for tier in found] == [1, 0, 0, 1, 1]


async def test_another_owner_finds_nothing_and_the_salt_is_nowhere_in_the_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200], key=OTHER_KEY))
    assert await fetched(tier, TEXT) == []
    assert len(await fetched(tier, TEXT, key=OTHER_KEY)) == 1
    for path in everything(tmp_path):
        assert OTHER_KEY[0].encode() not in path.read_bytes()
        assert OTHER_KEY[0] not in path.name


async def test_equal_texts_of_two_owners_are_two_files(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    mine, theirs = piece(TEXT[:200]), piece(TEXT[:200], key=OTHER_KEY)
    await tier.write(mine)
    await tier.write(theirs)
    assert await fetched(tier, TEXT) == [mine.state]
    assert await fetched(tier, TEXT, key=OTHER_KEY) == [theirs.state]


async def test_another_model_does_not_see_the_files_and_leaves_them(tmp_path: Path) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    other = open_tier(tmp_path, OTHER_MODEL)
    assert len(other) == 0
    assert await fetched(other, TEXT) == []
    assert len(files(tmp_path)) == 1
    await other.write(piece(TEXT[:200]))
    assert len(open_tier(tmp_path)) == 1


async def test_a_file_renamed_to_look_like_this_models_is_removed(tmp_path: Path) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    (path,) = files(tmp_path)
    mark = StateFiles.open(tmp_path, OTHER_MODEL).mark.hex()
    path.rename(tmp_path / f"{mark}-{path.name.partition('-')[2]}")
    assert len(open_tier(tmp_path, OTHER_MODEL)) == 0
    assert files(tmp_path) == []


@pytest.mark.parametrize("place", [0, 10, 30, 50, 100, 500], ids="byte {}".format)
async def test_a_file_with_a_damaged_head_is_removed_at_the_start(tmp_path: Path, place: int) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    spoil(files(tmp_path)[0], place)
    tier = open_tier(tmp_path)
    assert await fetched(tier, TEXT) == []
    assert files(tmp_path) == []


def spoil(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [-1, -500, -1000], ids="byte {}".format)
async def test_a_damaged_state_is_found_out_when_it_is_read_and_removed(tmp_path: Path, place: int) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    spoil(files(tmp_path)[0], place)
    tier = open_tier(tmp_path)
    assert len(tier) == 1
    assert await fetched(tier, TEXT) == []
    assert files(tmp_path) == []
    assert (len(tier), tier.totals.n_failures) == (0, 1)


@pytest.mark.parametrize("n_bytes", [0, 20, 500, 1500])
async def test_a_file_cut_short_is_removed_at_the_start(tmp_path: Path, n_bytes: int) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    (path,) = files(tmp_path)
    os.truncate(path, n_bytes)
    assert len(open_tier(tmp_path)) == 0
    assert files(tmp_path) == []


async def test_a_file_that_vanished_costs_nothing_but_its_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200]))
    files(tmp_path)[0].unlink()
    assert await fetched(tier, TEXT) == []
    assert (len(tier), tier.totals.n_failures) == (0, 0), "another process needed the room: nothing is at fault"


async def test_what_another_model_took_the_room_of_is_forgotten_and_written_again(tmp_path: Path) -> None:
    tier, other = open_tier(tmp_path), open_tier(tmp_path, OTHER_MODEL, n_bytes_max=5_100)
    one, two, three = (piece(list(range(start, start + 200))) for start in (1000, 2000, 3000))
    for each in (one, two):
        await tier.write(each)
    await other.write(piece(TEXT[:100]))
    assert len(files(tmp_path)) == 2, "the oldest had to go"
    await tier.write(three)
    assert len(tier) == 2
    assert tier.n_bytes == sum(path_of(tmp_path, each).stat().st_size for each in (two, three)), "it is not counted any more"
    path_of(tmp_path, two).unlink()
    for each in (one, two):
        await tier.write(each)
        assert await fetched(tier, each.tokens) == [each.state]
    assert tier.totals.n_failures == 0


async def test_a_file_from_a_time_to_come_does_not_outlive_what_is_of_use(tmp_path: Path) -> None:
    tier, ahead, *others = open_tier(tmp_path, n_bytes_max=5 * 1900), *(piece([i] * 200) for i in range(6))
    await tier.write(ahead)
    next_year = time.time() + 365 * 86_400
    os.utime(path_of(tmp_path, ahead), (next_year, next_year))
    for one in others:
        await tier.write(one)
    assert await fetched(tier, ahead.tokens) == []
    assert [await fetched(tier, one.tokens) for one in others] == [[one.state] for one in others]


async def test_what_cannot_be_removed_keeps_nobody_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, stuck, *others = open_tier(tmp_path, n_bytes_max=5 * 1900), *(piece([i] * 200) for i in range(8))
    await tier.write(stuck)
    path, unlink = path_of(tmp_path, stuck), Path.unlink

    def unlink_others(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(errno.EPERM, "it is immutable")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_others)
    for one in others:
        await tier.write(one)
    assert (tier.totals.n_failures, tier.totals.n_writes) == (0, 8)
    assert path in files(tmp_path)
    assert tier.n_bytes == sum(file.stat().st_size for file in files(tmp_path)) <= tier.n_bytes_max


async def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    foreign = [tmp_path / "notes.txt", tmp_path / f"x{SUFFIX}"]
    for path in foreign:
        path.write_text("mine")
    tier = open_tier(tmp_path, n_bytes_max=1)
    await tier.write(piece(TEXT[:200]))
    assert [path.read_text() for path in foreign] == ["mine", "mine"]


async def test_half_a_file_left_by_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200]))
    (path,) = files(tmp_path)
    half = path.rename(path.with_suffix(".partial"))
    open_tier(tmp_path)
    assert half.exists(), "another server of the same model may be writing it"
    minutes_ago = time.time() - 120
    os.utime(half, (minutes_ago, minutes_ago))
    open_tier(tmp_path)
    assert [path.name for path in everything(tmp_path)] == [SECRET_NAME]


async def test_half_a_file_of_a_process_that_died_just_before_goes_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    (path,) = files(tmp_path)
    half = path.rename(path.with_suffix(".partial"))
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:100]))
    assert half.exists()
    minutes_ago = time.time() - 120
    os.utime(half, (minutes_ago, minutes_ago))
    await tier.write(piece(TEXT[:150]))
    assert not half.exists()


async def test_half_a_file_of_another_model_is_removed_when_nobody_can_be_writing_it(tmp_path: Path) -> None:
    await open_tier(tmp_path, OTHER_MODEL).write(piece(TEXT[:200]))
    (path,) = files(tmp_path)
    half = path.rename(path.with_suffix(".partial"))
    open_tier(tmp_path)
    assert half.exists()
    yesterday = time.time() - 86_400
    os.utime(half, (yesterday, yesterday))
    open_tier(tmp_path)
    assert not half.exists()


async def test_after_a_write_that_failed_the_disk_has_a_rest_and_the_log_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def refuse(*_arguments: object) -> StoredPiece:
        raise OSError(errno.EROFS, "read-only file system")

    tier, pieces = open_tier(tmp_path), [piece(TEXT[i : i + 200]) for i in range(9)]
    with monkeypatch.context() as some:
        some.setattr(StateFiles, "write", refuse)
        tier.offer(pieces[:8])
        await tier.write_owed()
    assert (tier.totals.n_failures, tier.totals.n_lost) == (1, 7)
    await trio.sleep(disktier.REST_S)
    tier.offer(pieces[8:])
    await tier.write_owed()
    assert tier.totals.n_writes == 1


async def test_a_disk_that_takes_nothing_is_not_tried_for_every_piece_when_the_server_goes_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> StoredPiece:
        raise OSError(errno.EROFS, "read-only file system")

    tier = open_tier(tmp_path)
    monkeypatch.setattr(StateFiles, "write", refuse)
    await tier.keep([piece(TEXT[i : i + 200]) for i in range(9)])
    assert tier.totals.n_failures == disktier.N_FAILURES_KEEPING


async def test_a_folder_that_was_listed_in_part_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, one = open_tier(tmp_path), piece(TEXT[:200])
    await tier.write(one)
    monkeypatch.setattr(StateFiles, "all", lambda _self: [])
    await tier.write(piece(TEXT[200:400]))
    assert await fetched(tier, TEXT) == [one.state]


async def test_the_longest_unused_files_make_room_for_new_ones(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_bytes_max=5 * 1900)
    texts = [[i] * 200 for i in range(6)]
    for i, text in enumerate(texts[:5]):
        await tier.write(piece(text))
        newest = max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (i, i))
    assert len(await fetched(tier, texts[0])) == 1
    await tier.write(piece(texts[5]))
    assert [len(await fetched(tier, text)) for text in texts] == [1, 0, 1, 1, 1, 1]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= tier.n_bytes_max


async def test_a_bound_that_was_made_lower_holds_from_the_start_on(tmp_path: Path) -> None:
    tier, *pieces = open_tier(tmp_path), *(piece([i] * 200) for i in range(5))
    for one in pieces:
        await tier.write(one)
    lower = open_tier(tmp_path, n_bytes_max=tier.n_bytes * 2 // 5)
    assert len(lower) == len(files(tmp_path)) == 2
    for i, one in enumerate(pieces):
        assert (await fetched(lower, one.tokens) != []) is (i >= 3), "the newest stay"


async def test_the_bound_holds_over_all_models_files(tmp_path: Path) -> None:
    for i in range(8):
        await open_tier(tmp_path, f"model {i}", n_bytes_max=10_000).write(piece(TEXT[:200]))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    assert len(open_tier(tmp_path, "model 7")) == 1


async def test_a_piece_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, n_bytes_max=500)
    await tier.write(piece(TEXT[:200]))
    assert files(tmp_path) == []


async def test_what_is_on_disk_is_not_written_twice(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200]))
    await tier.write(piece(TEXT[:200]))
    assert tier.totals.n_writes == len(files(tmp_path)) == 1


async def test_a_disk_that_takes_nothing_costs_nothing_but_the_reuse(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache")
    for path in everything(tmp_path / "cache"):
        path.unlink()
    (tmp_path / "cache").rmdir()
    await tier.write(piece(TEXT[:200]))
    assert tier.totals.n_failures == 1
    assert await fetched(tier, TEXT) == []


async def test_going_down_what_was_of_use_last_is_kept_and_stays_the_newest(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    oldest, older, newer, newest = (piece(list(range(start, start + 200))) for start in (0, 1000, 2000, 3000))
    await tier.write(newest)  # it is on disk already, from before the others
    tier.offer([oldest])  # the pool has given it up, and it is not written yet
    await tier.keep([older, newer, newest])
    used_at = {one.tokens[0]: path_of(tmp_path, one).stat().st_mtime_ns for one in (newest, older, oldest, newer)}
    assert sorted(used_at, key=used_at.__getitem__) == [0, 1000, 2000, 3000]


async def test_going_down_the_oldest_of_what_there_is_no_room_for_is_not_written(tmp_path: Path) -> None:
    given_up, older, newer = (piece(list(range(start, start + 200)), n_bytes=10_000) for start in (0, 1000, 2000))
    tier = open_tier(tmp_path, n_bytes_max=2 * max(older.n_bytes, StateFiles.n_bytes_of(older)))
    tier.offer([given_up])
    await tier.keep([older, newer])
    again = open_tier(tmp_path)
    assert [len(await fetched(again, one.tokens)) for one in (given_up, older, newer)] == [0, 1, 1]


async def test_what_is_too_large_to_be_kept_does_not_keep_what_is_not_from_it(tmp_path: Path) -> None:
    small, huge = piece(TEXT[:200]), piece(TEXT[100:], n_bytes=100_000)
    tier = open_tier(tmp_path, n_bytes_max=50_000)
    await tier.keep([small, huge])
    assert await fetched(open_tier(tmp_path), TEXT) == [small.state]


async def test_what_begins_with_the_text_is_written_in_one_though_its_parts_are_there(tmp_path: Path) -> None:
    tier, whole = open_tier(tmp_path), piece(TEXT[:400])
    for one in (piece(TEXT[:200]), piece(TEXT[:400], 200), whole, whole):
        await tier.write(one)
    assert tier.totals.n_writes == 3
    assert await fetched(tier, TEXT, takes_parts=False) == [whole.state]


async def test_the_beginning_of_what_is_read_stays_longer_than_what_is_of_no_use_without_it(tmp_path: Path) -> None:
    tier, first, second = open_tier(tmp_path), piece(TEXT[:200]), piece(TEXT[:400], 200)
    for one in (first, second):
        await tier.write(one)
    assert await fetched(tier, TEXT) == [first.state, second.state]
    assert path_of(tmp_path, first).stat().st_mtime_ns > path_of(tmp_path, second).stat().st_mtime_ns


def path_of(folder: Path, one: Piece) -> Path:
    (path,) = (path for path in files(folder) if one.state in path.read_bytes())
    return path


async def test_half_a_file_for_which_there_was_no_room_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    tier = open_tier(tmp_path)
    before = everything(tmp_path)
    monkeypatch.setattr(statefiles, "touch", full)
    await tier.write(piece(TEXT[:200]))
    assert tier.totals.n_failures == 1
    assert everything(tmp_path) == before


async def test_two_who_write_the_same_piece_at_once_do_not_spoil_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, one = open_tier(tmp_path), open_tier(tmp_path), piece(TEXT[:200])
    touch = statefiles.touch

    def touch_late(path: Path, used_ns: int | None = None) -> None:
        monkeypatch.setattr(statefiles, "touch", touch)
        second._files.write(one)  # between the first one's last byte and its name
        touch(path, used_ns)

    monkeypatch.setattr(statefiles, "touch", touch_late)
    await first.write(one)
    assert (first.totals.n_failures, len(everything(tmp_path))) == (0, 2)
    assert await fetched(open_tier(tmp_path), TEXT) == [one.state]


async def test_an_empty_secret_is_replaced_and_what_was_written_with_another_is_not_found(tmp_path: Path) -> None:
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    (tmp_path / SECRET_NAME).write_bytes(b"")  # as a power cut may leave it
    again, one = open_tier(tmp_path), piece(TEXT[:200])
    assert await fetched(again, TEXT) == []
    await again.write(one)
    assert await fetched(open_tier(tmp_path), TEXT) == [one.state]


def test_a_secret_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        open_tier(tmp_path)
    assert everything(tmp_path) == []


async def test_on_a_full_disk_the_longest_unused_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_if_two_fit(self: StateFiles, one: Piece, used_ns: int | None = None) -> StoredPiece:
        if len(files(tmp_path)) >= 2:
            raise OSError(errno.ENOSPC, "no space left")
        return write(self, one, used_ns)

    write = StateFiles.write
    monkeypatch.setattr(StateFiles, "write", write_if_two_fit)
    tier = open_tier(tmp_path)
    first, *others = (piece(list(range(start, start + 200))) for start in (0, 1000, 2000))
    for one in (first, *others):
        await tier.write(one)
    assert await fetched(tier, first.tokens) == []
    assert [await fetched(tier, one.tokens) for one in others] == [[one.state] for one in others]
    assert (tier.totals.n_failures, len(tier), tier.n_bytes) == (0, 2, sum(path.stat().st_size for path in files(tmp_path)))


async def test_where_that_is_not_enough_what_was_removed_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> StoredPiece:
        raise OSError(errno.ENOSPC, "no space left")

    tier = open_tier(tmp_path)
    await tier.write(piece(TEXT[:200]))
    monkeypatch.setattr(StateFiles, "write", refuse)
    await tier.write(piece(TEXT[200:400]))
    assert (tier.totals.n_failures, len(tier), tier.n_bytes, files(tmp_path)) == (1, 0, 0, [])


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many open files"), MemoryError()])
async def test_a_machine_that_opens_no_more_files_costs_the_use_and_not_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_self: StateFiles, _stored: StoredPiece, _key: Key) -> Piece:
        raise error

    tier, one = open_tier(tmp_path), piece(TEXT[:200])
    await tier.write(one)
    with monkeypatch.context() as some:
        some.setattr(StateFiles, "read", refuse)
        assert await fetched(tier, TEXT) == []
    assert await fetched(tier, TEXT) == [one.state]
    assert tier.totals.n_failures == 1


async def test_what_lies_on_a_disk_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    tier, good, bad = open_tier(tmp_path), piece(TEXT[:200]), piece(TEXT[200:400])
    for one in (good, bad):
        await tier.write(one)
    (damaged,) = (path for path in files(tmp_path) if bad.state in path.read_bytes())
    damaged.write_bytes(damaged.read_bytes()[:-1] + bytes((bad.state[-1] ^ 1,)))
    monkeypatch.setattr(disktier, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert await fetched(tier, TEXT) == [good.state]
    assert await fetched(tier, TEXT[200:]) == []
    assert damaged.exists()
    assert tier.totals.n_failures == 1


async def test_what_is_damaged_or_half_a_file_on_a_disk_that_can_only_be_read_keeps_nobody_from_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    tier, good, bad = open_tier(tmp_path), piece(TEXT[:200]), piece(TEXT[200:400])
    for one in (good, bad):
        await tier.write(one)
    spoil(path_of(tmp_path, bad), 0)
    half = path_of(tmp_path, good).with_suffix(".partial")
    half.touch()
    os.utime(half, (0, 0))
    monkeypatch.setattr(Path, "unlink", refuse)
    again = open_tier(tmp_path)
    assert len(again) == 1
    assert await fetched(again, TEXT) == [good.state]


async def test_where_a_filesystem_has_no_links_the_folder_has_a_secret_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_paths: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    await open_tier(tmp_path).write(piece(TEXT[:200]))
    assert len(await fetched(open_tier(tmp_path), TEXT)) == 1
    assert [path.name for path in everything(tmp_path) if path.suffix != SUFFIX] == [SECRET_NAME]


async def test_what_is_owed_when_writing_is_cancelled_is_written_later(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.offer([piece(TEXT[:200]), piece(TEXT[200:400])])
    with trio.CancelScope() as scope:
        scope.cancel()
        await tier.write_owed()
    assert files(tmp_path) == []
    await tier.write_owed()
    assert len(files(tmp_path)) == 2


async def test_folder_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    await open_tier(tmp_path / "cache").write(piece(TEXT[:200]))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in everything(tmp_path / "cache")} == {0o600}


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_tier(tmp_path / "file")


async def test_pieces_that_come_faster_than_the_disk_takes_them_are_let_go_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.serve.disktier.N_BYTES_OWED_MAX", 30_000)
    tier = open_tier(tmp_path)
    tier.offer([piece([i] * 200) for i in range(10)])
    await tier.write_owed()
    assert tier.totals.n_lost == 7
    assert [len(await fetched(tier, [i] * 200)) for i in range(10)] == [0] * 7 + [1] * 3


@pytest.mark.parametrize("place", [0, 3])
async def test_nothing_is_let_go_for_what_is_on_disk_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr("cllm.serve.disktier.N_BYTES_OWED_MAX", 30_000)
    tier = open_tier(tmp_path)
    read, new = [piece([i] * 200) for i in range(3)], piece([9] * 200)
    for one in read:
        await tier.write(one)
    tier.offer([*read[:place], new, *read[place:]])
    await tier.write_owed()
    assert (tier.totals.n_lost, await fetched(tier, new.tokens)) == (0, [new.state])


# --- with an engine ---------------------------------------------------------------------------------------------------

PROMPT = "a long beginning that many requests have in common, " * 4


class DearPrices(Prices):
    """Of a model for which a restore is always worth it, and any time that reading takes."""

    def prefill_s(self, n_rows: int) -> float:
        """See `Prices.prefill_s`."""
        return n_rows * 1.0


async def answer(running: RunningEngine, prompt: str, prices: type[Prices] = DearPrices) -> Answer:
    assert running.scheduler.memory.offload is not None
    running.scheduler.memory.offload.prices = prices()
    spec = make_spec(prompt)
    await running.engine.prepared([spec])
    (given,) = await read_all(running.engine.open([spec]))
    return given


async def test_an_engine_finds_again_what_the_one_before_it_computed(tmp_path: Path) -> None:
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:
        first = await answer(running, PROMPT)
        await running.loop.keep_prefixes()
    model = FakeModel()
    async with serving(model, disk=open_tier(tmp_path)) as running:
        again = await answer(running, PROMPT)
        other = await answer(running, PROMPT + "and then they part")
        assert running.scheduler.memory.offload is not None
        assert running.scheduler.memory.offload.pool.totals.n_restores == 1
    assert first.text == again.text == text_alone(PROMPT, 8)
    assert other.text == text_alone(PROMPT + "and then they part", 8)
    assert first.finished.usage.n_cached == 0
    assert again.finished.usage.n_cached == len(PROMPT) - 1
    assert other.finished.usage.n_cached == len(PROMPT)


async def test_where_slots_cannot_be_cut_what_ends_with_the_prompt_does_not_hide_what_can_be_had(tmp_path: Path) -> None:
    longer = PROMPT + "and then they part, by more than what is worth opening a file for, which is a gain of 64 cells"
    async with serving(FakeModel(can_trim=False), disk=open_tier(tmp_path)) as running:
        await answer(running, PROMPT)
        await answer(running, longer)
        await running.loop.keep_prefixes()
    async with serving(FakeModel(can_trim=False), disk=open_tier(tmp_path)) as running:
        again = await answer(running, longer)
    assert again.text == text_alone(longer, 8)
    assert again.finished.usage.n_cached == len(PROMPT)


async def test_requests_that_come_together_read_a_file_once(tmp_path: Path) -> None:
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:
        await answer(running, PROMPT)
        await running.loop.keep_prefixes()
    tier = open_tier(tmp_path)
    async with serving(FakeModel(), disk=tier) as running, trio.open_nursery() as nursery:
        for end in "abcd":
            nursery.start_soon(answer, running, PROMPT + end)
    assert tier.totals.n_reads == 1


async def test_reading_that_takes_longer_than_computing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:
        await answer(running, PROMPT)
        await running.loop.keep_prefixes()

    def read_slowly(self: StateFiles, stored: StoredPiece, key: Key) -> Piece:
        is_over.wait(TEST_S)
        return read(self, stored, key)

    is_over, read = threading.Event(), StateFiles.read
    monkeypatch.setattr(StateFiles, "read", read_slowly)
    tier = open_tier(tmp_path)
    async with serving(FakeModel(), disk=tier) as running:
        try:
            with trio.fail_after(TEST_S / 2):
                given = await answer(running, PROMPT, Prices)
        finally:
            is_over.set()
    assert given.text == text_alone(PROMPT, 8)
    assert (given.finished.usage.n_cached, tier.totals.n_slow, tier.totals.n_hits) == (0, 1, 0)


async def test_a_state_that_fits_no_more_costs_nothing_but_its_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await tier.write(piece(list(PROMPT.encode()), n_bytes=5000))
    (stored,) = files(tmp_path)
    async with serving(FakeModel(), disk=tier) as running:
        given = await answer(running, PROMPT)
        await tier.write_owed()
        assert not stored.exists(), "every such prompt would read it again, and no better one could be written"
        assert running.scheduler.memory.offload is not None
        assert running.scheduler.memory.offload.pool.totals.n_failures == 1
        assert len(running.scheduler.memory.offload.pool) == 0
    assert given.text == text_alone(PROMPT, 8)
    assert given.finished.usage.n_cached == 0


async def test_what_the_host_pool_gives_up_is_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    model = FakeModel(n_cells=1024, n_ctx_train=1024)
    async with serving(model, Settings(host_cache_mb=1), disk=tier) as running:
        assert running.scheduler.memory.offload is not None
        running.scheduler.memory.offload.pool.n_bytes_max = 20_000  # as if a cell were large
        for letter in "abcdefgh":
            await answer(running, letter * 400)
        await tier.write_owed()
    assert tier.totals.n_writes > 0
    assert len(open_tier(tmp_path)) == tier.totals.n_writes


async def test_a_request_that_shares_nothing_reads_nothing(tmp_path: Path) -> None:
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:
        await answer(running, PROMPT)
        await running.loop.keep_prefixes()
    tier = open_tier(tmp_path)
    async with serving(FakeModel(), disk=tier) as running:
        await running.engine.prepared([make_spec(PROMPT, cache_prompt=False), make_spec(PROMPT, cache_salt="mine")])
    assert tier.totals.n_reads == 0


# --- while nothing is to do -------------------------------------------------------------------------------------------


async def until_written(tier: DiskTier, n_writes: int) -> None:
    await until(lambda: tier.totals.n_writes >= n_writes)


async def test_what_is_cached_is_written_while_nobody_asks_and_outlives_a_process_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steploop, "BACK_UP_AFTER_S", 0.0)
    tier = open_tier(tmp_path)
    async with serving(FakeModel(), disk=tier) as running, trio.open_nursery() as nursery:
        nursery.start_soon(tier.beside, trio.sleep_forever)
        await answer(running, PROMPT)
        await until_written(tier, 1)
        longer = PROMPT + "and a good deal more of it, which is a piece of its own behind the first one"
        given = await answer(running, longer)
        assert given.finished.usage.n_cached == len(PROMPT), "the copy left the cells where they were"
        await until_written(tier, 2)
        nursery.cancel_scope.cancel()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) == 2
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:  # nothing was kept at the end of the one before
        again = await answer(running, longer)
    assert again.text == text_alone(longer, 8)
    assert again.finished.usage.n_cached == len(longer) - 1


async def test_what_has_no_room_on_the_host_is_written_all_the_same_and_once_and_nothing_leaves_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steploop, "BACK_UP_AFTER_S", 0.0)
    tier = open_tier(tmp_path)
    other = "what somebody else asked, a good deal longer than what is worth a file of its own"
    async with serving(FakeModel(), disk=tier) as running, trio.open_nursery() as nursery:
        nursery.start_soon(tier.beside, trio.sleep_forever)
        await answer(running, PROMPT)
        await until_written(tier, 1)
        offload = running.scheduler.memory.offload
        assert offload is not None
        kept = offload.pool.pieces()
        offload.pool.n_bytes_max = int(1.2 * offload.pool.n_bytes)  # no room for another
        await answer(running, other)
        await until_written(tier, 2)
        await answer(running, "short")
        await trio.testing.wait_all_tasks_blocked()
        assert offload.pool.pieces() == kept
        nursery.cancel_scope.cancel()
    assert tier.totals.n_writes == 2
    async with serving(FakeModel(), disk=open_tier(tmp_path)) as running:
        assert (await answer(running, other)).finished.usage.n_cached == len(other) - 1


async def test_a_copy_is_no_hindrance_to_other_models_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(steploop, "BACK_UP_AFTER_S", 5.0)
    tier = open_tier(tmp_path)
    async with serving(FakeModel(), disk=tier) as running, trio.open_nursery() as nursery:
        nursery.start_soon(tier.beside, trio.sleep_forever)
        thread = running.engine._loop.thread
        await answer(running, PROMPT)
        for _ in range(10):
            await thread.run(lambda: None)  # as another model's step
            slow_clock.jump(2.0)
            await trio.testing.wait_all_tasks_blocked()
        assert tier.totals.n_writes == 0
        for _ in range(2):  # it may have looked before the last of those
            slow_clock.jump(6.0)
            await trio.testing.wait_all_tasks_blocked()
        await until_written(tier, 1)
        nursery.cancel_scope.cancel()


async def test_no_more_is_written_than_there_is_room_for_on_disk(tmp_path: Path) -> None:
    pieces = [piece(TEXT[i:]) for i in (0, 10, 20, 30)]
    tier = open_tier(tmp_path)
    await tier.write(pieces[-1])
    tier.n_bytes_max = sum(one.n_bytes for one in pieces[-2:])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.beside, trio.sleep_forever)
        for _ in range(2):
            tier.back_up(pieces)
            await trio.testing.wait_all_tasks_blocked()
            await until(lambda: not tier._spare)
            await tier.write_owed()
        nursery.cancel_scope.cancel()
    assert tier.totals.n_writes == 2
    assert {len(stored.tokens) for stored in open_tier(tmp_path)._stored.values()} == {470, 480}, "the last ones"


async def test_what_is_refused_while_the_system_has_no_thread_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, one, two = open_tier(tmp_path), piece(TEXT[:200]), piece(TEXT[200:400])
    for each in (one, two):
        await tier.write(each)
    path, other = path_of(tmp_path, one), path_of(tmp_path, two)
    spoil(other, 0)

    def unlink(_path: Path) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as some:
        some.setattr(disktier, "_unlink", unlink)
        tier.refuse([one])
        await tier.write_owed()
        assert await fetched(tier, TEXT[200:]) == []
    assert path.exists()
    assert other.exists()
    await tier.keep([])
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "it can only be read"), RuntimeError("can't start new thread")])
async def test_a_disk_that_takes_nothing_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tier = open_tier(tmp_path)

    def write(*_arguments: object) -> StoredPiece:
        raise error

    monkeypatch.setattr(disktier, "_write_within", write)
    async with trio.open_nursery() as nursery:
        tier.back_up([piece(TEXT[i:]) for i in range(5)])
        nursery.start_soon(tier.beside, trio.sleep_forever)
        await until(lambda: tier.totals.n_failures > 0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert tier.totals.n_failures == 1


async def test_a_copy_that_fails_is_tried_once_and_the_next_request_does_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steploop, "BACK_UP_AFTER_S", 0.0)
    model, tried = FakeModel(), []

    def save(slot: int, start: int = 0) -> bytes:
        tried.append(slot)
        raise StepFailed("no memory for a copy")

    monkeypatch.setattr(model, "save", save)
    async with serving(model, disk=open_tier(tmp_path)) as running:
        await answer(running, PROMPT)
        await until(lambda: bool(tried))
        await trio.testing.wait_all_tasks_blocked()
        again = await answer(running, PROMPT)
    assert again.text == text_alone(PROMPT, 8)
    assert again.finished.usage.n_cached == len(PROMPT) - 1


async def test_what_cannot_wait_is_written_before_what_can(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    spare, owed = [piece(TEXT[i:]) for i in (0, 10, 20)], piece(TEXT[30:])
    async with trio.open_nursery() as nursery:
        tier.back_up(spare)
        tier.offer([owed])
        nursery.start_soon(tier.beside, trio.sleep_forever)
        await until_written(tier, 4)
        nursery.cancel_scope.cancel()
    newest_first = sorted(open_tier(tmp_path)._stored.values(), key=lambda stored: -stored.path.stat().st_mtime_ns)
    assert [len(stored.tokens) for stored in newest_first] == [470, 480, 490, 500]


async def test_it_stops_as_soon_as_there_is_something_else_to_do(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.back_up([piece(TEXT), piece(TEXT[10:])])
    tier.back_up_no_more()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.beside, trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert not files(tmp_path)
