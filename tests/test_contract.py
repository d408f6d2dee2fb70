"""The contract suite, run as a plugin's author runs it: on the fake model, on the example, on llama.cpp with each kind of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cllm.testing.tiny import ARCHITECTURES

FAKE = "cllm.testing.fake:make_backend"
LAYOUTS = ("unified", pytest.param("streams", marks=pytest.mark.slow))
QUIET = ("-q", "-rN", "--tb=short", "-W", "error", "-p", "no:cacheprovider")


def the_first_everywhere(*cases: tuple[Any, ...] | str) -> list[Any]:
    """The other cases are slow: what they try is the same on every Python."""
    rest = [pytest.param(*([case] if isinstance(case, str) else case), marks=pytest.mark.slow) for case in cases[1:]]
    return [cases[0], *rest]


# What a death and the next life come to does not depend on how cells lie, and the suite tries it in a process that it makes by itself:
# once for each kind of memory is enough.
BUT_FOR_DEATHS = ("-k", "not test_deaths")
DEATHS = ("-k", "test_deaths")


def run_contract(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process of its own, so that a backend that crashes fails one test and not the whole run."""
    return run_pytest("--pyargs", "cllm.testing.contract", *QUIET, *options, folder=folder)


def run_pytest(*options: str, folder: Path, all_plugins: bool = False) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(folder)}
    if not all_plugins:  # saves a second or two
        environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ("-p", "cllm.testing.contract.plugin", *options)
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=1200, check=False)


def check(run: subprocess.CompletedProcess[str]) -> None:
    if run.returncode != 0:
        pytest.fail(f"{run.stdout}\n{run.stderr}", pytrace=False)


def check_fails(run: subprocess.CompletedProcess[str], seen_by: str) -> None:
    """The suite ends with a failure, and the test of that name is the one that saw it, or one of them; an error before it saw nothing."""
    assert run.returncode == 1, run.stdout + run.stderr
    assert seen_by in run.stdout
    assert " error" not in run.stdout.splitlines()[-1], run.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("can_trim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_fake_model_keeps_the_contract(tmp_path: Path, layout: str, can_trim: int) -> None:
    options = ("--kv", layout, "--backend-option", f"can_trim={can_trim}", *BUT_FOR_DEATHS)
    check(run_contract("--backend", FAKE, *options, folder=tmp_path))


@pytest.mark.slow
def test_the_fake_model_keeps_the_contract_when_its_process_dies(tmp_path: Path) -> None:
    check(run_contract("--backend", FAKE, *DEATHS, folder=tmp_path))


def test_the_fake_model_that_can_be_laid_out_anew_keeps_the_contract(tmp_path: Path) -> None:
    run = run_contract("--backend", FAKE, "--backend-option", "lays_out=1", "-k", "layouts", "-rs", folder=tmp_path)
    check(run)
    assert "skipped" not in run.stdout


@pytest.mark.slow
def test_a_model_whose_states_fit_one_layout_alone_keeps_the_contract(tmp_path: Path) -> None:
    options = ("--backend-option", "lays_out=1", "--backend-option", "carries_states=0", "-k", "layouts")
    check(run_contract("--backend", FAKE, *options, folder=tmp_path))


def test_a_model_whose_states_do_not_go_from_layout_to_layout_as_it_says_fails_the_suite(tmp_path: Path) -> None:
    (tmp_path / "carrying.py").write_text(CARRYING)
    run = run_contract("--backend", "carrying:Backend", "-k", "layouts", folder=tmp_path)
    check_fails(run, "test_states_go_from_layout_to_layout")


def test_a_model_that_could_be_one_pool_and_does_not_begin_so_fails_the_suite(tmp_path: Path) -> None:
    (tmp_path / "parted.py").write_text(PARTED)
    run = run_contract("--backend", "parted:Backend", "-k", "layouts", folder=tmp_path)
    check_fails(run, "test_where_it_is_left_the_choice_of_layouts_it_begins_as_one_pool")


PARTED = """
from cllm.backend import KvLayout
from cllm.testing.fake import FakeBackend, FakeModel

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        return FakeModel(n_rows_max=spec.n_rows_max, n_slots=4, kv_layout=KvLayout.STREAMS, lays_out=True)
"""

CARRYING = """
from cllm.testing.fake import FakeBackend, FakeModel

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        model = FakeModel(n_rows_max=spec.n_rows_max, lays_out=True, carries_states=False)
        model.carries_states = "as it says"
        return model
"""


@pytest.mark.slow
def test_a_model_that_can_do_the_least_keeps_the_contract(tmp_path: Path) -> None:
    options = ("--backend-option", "can_trim=0", "--backend-option", "can_save=0", *BUT_FOR_DEATHS)
    check(run_contract("--backend", FAKE, *options, folder=tmp_path))


def test_a_model_that_draws_tokens_keeps_the_contract(tmp_path: Path) -> None:
    check(run_contract("--backend", FAKE, "--backend-option", "draws=1", "-k", "drawing or step", folder=tmp_path))


DRAWING = """
from cllm.testing.fake import FakeBackend
from cllm.testing import fake_drawing
{meddle}

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        return fake_drawing.DrawingFakeModel(n_rows_max=spec.n_rows_max)
"""
MISTAKES = {
    "draw_one = fake_drawing.draw_one; fake_drawing.draw_one = lambda row, draw, key: draw_one(row, draw, 1)": "other_keys_draw_others",
    "fake_drawing.draw_one = lambda row, draw, key: key % 97": "leave_the_likeliest_that_they_say",
    "import os; draw_one = fake_drawing.draw_one; fake_drawing.draw_one = lambda row, draw, key: draw_one(row, draw, os.getrandom(1)[0])": (
        "a_key_draws_the_same_token_again"
    ),
    "import attrs; draw_one = fake_drawing.draw_one; "
    "fake_drawing.draw_one = lambda row, draw, key: draw_one(row, attrs.evolve(draw, temperature=1.0), key)": "temperature_says_how_often",
    "import attrs; draw_one = fake_drawing.draw_one; "
    "fake_drawing.draw_one = lambda row, draw, key: draw_one(row, attrs.evolve(draw, truncation_temperature=1.0), key)": "truncations_own",
    "import attrs; Model = fake_drawing.DrawingFakeModel; draw = Model.step_and_draw; "
    "Model.step_and_draw = lambda *how: attrs.evolve(drawn := draw(*how), valid=drawn.valid.view('u1'))": "outputs_without_a_draw",
    "Model = fake_drawing.DrawingFakeModel; draw = Model.step_and_draw; "
    "Model.step_and_draw = lambda *how: (drawn := draw(*how)).logits.setflags(write=False) or drawn": "outputs_without_a_draw",
    "import attrs; Model = fake_drawing.DrawingFakeModel; draw = Model.step_and_draw; "
    "Model.step_and_draw = lambda *how: attrs.evolve(drawn := draw(*how), logits=drawn.logits.astype('f8'))": "outputs_without_a_draw",
}


@pytest.mark.parametrize("meddle", the_first_everywhere(*MISTAKES))
def test_a_model_that_draws_otherwise_than_it_is_told_fails_the_suite(tmp_path: Path, meddle: str) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING.format(meddle=meddle))
    run = run_contract("--backend", "drawing:Backend", "-k", "drawing", folder=tmp_path)
    check_fails(run, MISTAKES[meddle])


SORTING = """
import numpy as np
from cllm.testing.fake import FakeBackend, FakeModel

class Sorting(FakeModel):
    def step(self, batch):
        logits = super().step(batch)
        order = np.argsort(batch.slots[:batch.n_rows], kind="stable")[::{step}]
        for column in (batch.slots, batch.tokens, batch.positions, batch.outputs):
            column[:batch.n_rows] = column[order]
        return logits

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        return Sorting(n_rows_max=spec.n_rows_max)
"""


def test_a_model_that_writes_to_its_batch_fails_the_suite(tmp_path: Path) -> None:
    """The next step is made from the same columns, while this one runs: two clients' rows would change places."""
    (tmp_path / "sorting.py").write_text(SORTING.format(step=-1))
    check_fails(run_contract("--backend", "sorting:Backend", "-k", "test_step", folder=tmp_path), "the step has written to its batch")


ABORTABLE = """
from cllm.testing.fake import FakeBackend, FakeModel

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        model = FakeModel(n_rows_max=spec.n_rows_max, can_abort=True, step_s=lambda batch: 1e-4 * batch.n_rows)
        {meddle}
        return model
"""


def test_a_model_that_can_be_aborted_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "abortable.py").write_text(ABORTABLE.format(meddle=""))
    check(run_contract("--backend", "abortable:Backend", "-k", "abort and not load", folder=tmp_path))


@pytest.mark.parametrize(
    ("meddle", "seen_by"),
    the_first_everywhere(
        ("model.abort = lambda: None", "test_a_model_that_says_that_it_can_be_aborted_can"),
        ("model._aborted.clear = lambda: None", "test_a_step_after_an_aborted_one_is_not_aborted_too"),
    ),
)
def test_a_model_that_cannot_be_aborted_as_it_says_fails_the_suite(tmp_path: Path, meddle: str, seen_by: str) -> None:
    (tmp_path / "abortable.py").write_text(ABORTABLE.format(meddle=meddle))
    run = run_contract("--backend", "abortable:Backend", "-k", "abort and not load", folder=tmp_path)
    check_fails(run, seen_by)


@pytest.mark.parametrize(
    "make", ["make_backend", *(pytest.param(name, marks=pytest.mark.slow) for name in ("make_text_backend", "make_heeding_backend"))]
)
def test_the_fake_model_that_schedules_itself_keeps_the_contract(tmp_path: Path, make: str) -> None:
    check(run_contract("--backend", f"cllm.testing.fake_streams:{make}", *BUT_FOR_DEATHS, folder=tmp_path))


@pytest.mark.parametrize("make", ["make_backend", "make_text_backend"])
@pytest.mark.slow
def test_the_fake_model_that_schedules_itself_keeps_the_contract_when_its_process_dies(tmp_path: Path, make: str) -> None:
    check(run_contract("--backend", f"cllm.testing.fake_streams:{make}", *DEATHS, folder=tmp_path))


@pytest.mark.slow
def test_a_model_that_schedules_itself_keeps_the_contract_in_a_process_of_its_own(tmp_path: Path) -> None:
    check(run_contract("--backend", "cllm.testing.fake_streams:make_isolated", *BUT_FOR_DEATHS, folder=tmp_path))


def test_a_model_that_tells_of_those_that_were_given_up_fails_the_suite(tmp_path: Path) -> None:
    """One that takes no notice of a cancel has no place for the next."""
    (tmp_path / "deaf.py").write_text(
        "import time\n"
        "from cllm.testing.fake_streams import FakeStreamBackend, FakeStreamModel\n"
        "FakeStreamModel.cancel = lambda self, seq_id: None\n"
        "go = FakeStreamModel.go\n"
        "FakeStreamModel.go = lambda self: (time.sleep(0.01), go(self))\n"  # so that none ends by itself before there should be room
        "def make_backend(): return FakeStreamBackend()\n"
    )
    run = run_contract("--backend", "deaf:make_backend", "-k", "given_up", folder=tmp_path)
    check_fails(run, "test_one_that_is_given_up_makes_room_at_once")


def test_what_a_model_heeds_is_tried_where_it_says_so(tmp_path: Path) -> None:
    run = run_contract(
        "--backend", "cllm.testing.fake_streams:make_heeding_backend", "-k", "who_heeds and not form", "-rs", folder=tmp_path
    )
    check(run)
    assert "skipped" not in run.stdout


LYING = """
import attrs
from cllm.testing.fake_streams import FakeStreamBackend, HeedingFakeModel

class Lying(HeedingFakeModel):
    def start(self, seq_id, request):
        super().start(seq_id, attrs.evolve(request, {meddle}))

def make_backend(): return FakeStreamBackend(Lying)
"""


@pytest.mark.parametrize(
    ("meddle", "seen_by"),
    the_first_everywhere(
        ("n_logprobs=None", "test_who_heeds_logprobs"),
        ("n_logprobs=0", "test_who_heeds_logprobs"),
        ("n_logprobs=request.n_logprobs and request.n_logprobs - 1", "test_who_heeds_logprobs"),
        ("n_tokens_min=0", "test_who_heeds_a_least_number_of_tokens"),
        ("top_k=0", "test_who_heeds_it_says_the_likeliest_token_where_no_other_is_left[top_k"),
        ("top_p=1.0", "test_who_heeds_it_says_the_likeliest_token_where_no_other_is_left[top_p"),
        ("min_p=0.0", "test_who_heeds_it_says_the_likeliest_token_where_no_other_is_left[min_p"),
        ("repeat_penalty=1.0", "test_who_heeds_a_penalty_of_repeats"),
        ("barred_tokens=frozenset()", "test_tokens_that_are_barred"),
    ),
)
def test_a_model_that_says_that_it_heeds_what_it_does_not_fails_the_suite(tmp_path: Path, meddle: str, seen_by: str) -> None:
    (tmp_path / "lying.py").write_text(LYING.format(meddle=meddle))
    run = run_contract("--backend", "lying:make_backend", "-k", "who_heeds or barred", folder=tmp_path)
    check_fails(run, seen_by)


TELLING = """
import threading
import time

import attrs
import numpy as np
from cllm.backend import Batch, StreamEnd, StreamToken
from cllm.errors import StepFailed
from cllm.testing.fake import FakeModel
from cllm.testing.fake_streams import FakeStreamBackend, FakeTextModel, HeedingFakeModel

class Uncut(FakeTextModel):
    def open(self, tell):
        super().open(lambda event: tell(attrs.evolve(event, is_cut=False) if isinstance(event, StreamEnd) else event))

class Short(FakeTextModel):
    n_tokens = 5

    def start(self, seq_id, request):
        super().start(seq_id, attrs.evolve(request, n_tokens_max=min(request.n_tokens_max or 1000, self.n_tokens)))

class Early(Short, Uncut):
    pass

class Sampled(HeedingFakeModel):
    def start(self, seq_id, request):
        self.is_sure = request.top_k == 1
        super().start(seq_id, request)

    def open(self, tell):
        super().open(lambda event: tell(self.told(event)))

    def told(self, event):
        return attrs.evolve(event, logprob=0.0) if isinstance(event, StreamToken) and event.logprob is not None and self.is_sure else event

class Numpys(HeedingFakeModel):
    def open(self, tell):
        super().open(lambda event: tell(self.told(event)))

    def told(self, event):
        has_logprob = isinstance(event, StreamToken) and event.logprob is not None
        return attrs.evolve(event, logprob=np.float64(event.logprob)) if has_logprob else event

class Tight(HeedingFakeModel):
    def start(self, seq_id, request):
        if len(request.prompt) + request.n_tokens_max >= self.n_ctx:
            raise StepFailed("no room for the last one")
        super().start(seq_id, request)

class Scored(HeedingFakeModel):
    # Of a text the logits behind each token are the fake's own; the mistakes are a shift by one, and one array for all texts.
    shift, keeps = 0, False

    def logits(self, tokens):
        model, rows = FakeModel(n_cells=256), []
        batch = Batch(1)
        for position, token in enumerate(tokens):
            batch.n_rows = batch.n_outputs = batch.outputs[0] = 1
            batch.tokens[0], batch.positions[0], batch.slots[0] = token, position, 0
            rows.append(model.step(batch)[0].copy())
        told = np.roll(np.array(rows, np.float32), self.shift, axis=0)
        if not self.keeps:
            return told
        self.all = getattr(self, "all", told)
        self.all[:] = told
        return self.all

class Shifted(Scored):
    shift = 1

class Reused(Scored):
    keeps = True

class Crossed(HeedingFakeModel):
    def open(self, tell):
        super().open(lambda event: tell(self.crossed(event)))

    def crossed(self, event):
        live = sorted(self._live)
        if not isinstance(event, StreamToken):
            return event
        return attrs.evolve(event, seq_id=live[(live.index(event.seq_id) + 1) % len(live)])

class Muddled(HeedingFakeModel):
    def open(self, tell):
        super().open(lambda event: tell(self.muddled(event)))

    def muddled(self, event):
        is_alone = len(self._live) == 1
        return event if is_alone or not isinstance(event, StreamToken) else attrs.evolve(event, token=(event.token + len(self._live)) % 256)

class Ignorant(HeedingFakeModel):
    def start(self, seq_id, request):
        super().start(seq_id, attrs.evolve(request, prompt=(65, 66, 67)))

class Cruel(HeedingFakeModel):
    def cancel(self, seq_id):
        super().cancel(seq_id)
        for other in list(self._live):
            self.end(other, "the wire is cut")

class Late(HeedingFakeModel):
    def close(self):
        super().close()
        threading.Thread(target=self.tell_more, daemon=True).start()

    def tell_more(self):
        for _ in range(20):
            time.sleep(0.05)
            self._tell(StreamToken(0, 65))

class Backend(FakeStreamBackend):
    crossed = classmethod(lambda cls: cls(Crossed))
    muddled = classmethod(lambda cls: cls(Muddled))
    ignorant = classmethod(lambda cls: cls(Ignorant))
    cruel = classmethod(lambda cls: cls(Cruel))
    late = classmethod(lambda cls: cls(Late))
    tight = classmethod(lambda cls: cls(Tight))
    scored = classmethod(lambda cls: cls(Scored))
    shifted = classmethod(lambda cls: cls(Shifted))
    reused = classmethod(lambda cls: cls(Reused))
    uncut = classmethod(lambda cls: cls(Uncut))
    short = classmethod(lambda cls: cls(Short))
    early = classmethod(lambda cls: cls(Early))
    sampled = classmethod(lambda cls: cls(Sampled))
    numpys = classmethod(lambda cls: cls(Numpys))
"""


@pytest.mark.parametrize(
    ("make", "seen_by"),
    the_first_everywhere(
        ("uncut", "test_a_sequence_gives_as_many_tokens_as_it_may_and_one_end"),
        ("short", "test_a_sequence_gives_as_many_tokens_as_it_may_and_one_end"),
        ("sampled", "test_logprobs_are_the_models_own_whatever_is_done_before_a_token_is_drawn"),
        ("numpys", "test_who_heeds_logprobs_tells_each_tokens_own"),
        ("tight", "test_a_sequence_may_be_as_long_as_it_says"),
        ("shifted", "test_who_tells_logits_tells_each_tokens_successor"),
        ("reused", "test_who_tells_logits_tells_each_tokens_successor"),
        ("crossed", "test_each_of_several_at_once_gets_the_answer_to_its_own_prompt"),
        ("muddled", "test_each_of_several_at_once_gets_the_answer_to_its_own_prompt"),
        ("ignorant", "test_each_of_several_at_once_gets_the_answer_to_its_own_prompt"),
        ("cruel", "test_one_that_is_given_up_makes_room_at_once"),
        ("late", "test_nothing_is_told_after_close"),
    ),
)
def test_a_model_that_tells_what_is_not_so_fails_the_suite(tmp_path: Path, make: str, seen_by: str) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    chosen = "as_it_may or heeds_logprobs or models_own or as_it_says or tells_logits or own_prompt or given_up_makes or after_close"
    check_fails(run_contract("--backend", f"telling:Backend.{make}", "-k", chosen, folder=tmp_path), seen_by)


def test_a_model_that_tells_its_logits_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    run = run_contract("--backend", "telling:Backend.scored", "-k", "as_it_says or tells_logits", "-rs", folder=tmp_path)
    check(run)
    assert "tells no logits" not in run.stdout


CRAMPED = """
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_embedder import FakeEmbedder

class Cramped(FakeEmbedder):
    def __init__(self, more):
        super().__init__()
        for name, n in more.items():
            setattr(self, name, getattr(self, name) + n)
            self.has = {**getattr(self, "has", {}), name: getattr(self, name) - n}

    def _check(self, batch):
        told = {name: getattr(self, name) for name in self.has}
        vars(self).update(self.has)
        try:
            super()._check(batch)
        finally:
            vars(self).update(told)

class Backend(FakeBackend):
    more = {}

    def load(self, spec, on_progress):
        model = super().load(spec, on_progress)
        model.make_embedder = lambda _spec: Cramped(self.more)
        return model

class Longer(Backend):
    more = {"n_tokens_max": 1}

class Fuller(Backend):
    more = {"n_cells": 16}
"""


@pytest.mark.parametrize("backend", the_first_everywhere("Longer", "Fuller"))
def test_an_embedder_that_takes_less_than_it_says_fails_the_suite(tmp_path: Path, backend: str) -> None:
    (tmp_path / "cramped.py").write_text(CRAMPED)
    run = run_contract("--backend", f"cramped:{backend}", "-k", "test_embedder", folder=tmp_path)
    check_fails(run, "test_an_input_may_be_as_long_as_it_says_and_all_together_too")


SHRINKING = """
from cllm.testing.fake import FakeBackend
from cllm.testing.fake_embedder import FakeEmbedder

def make_embedder(spec):
    n_cells = spec.n_cells or 8192
    return FakeEmbedder(n_cells=n_cells, n_tokens_max=min(512, n_cells))

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        model = super().load(spec, on_progress)
        model.make_embedder = make_embedder
        return model
"""


def test_an_embedder_that_would_be_another_one_in_its_next_life_fails_the_suite(tmp_path: Path) -> None:
    """It takes what is said of one input for what is said of all of them."""
    (tmp_path / "shrinking.py").write_text(SHRINKING)
    run = run_contract("--backend", "shrinking:Backend", "-k", "test_embedder", folder=tmp_path)
    check_fails(run, "test_one_that_is_asked_for_the_sizes_of_another_has_them")


JUDGING = """
from cllm.backend import Pooling
from cllm.testing.fake import FakeModel, make_backend
from cllm.testing.fake_embedder import FakeEmbedder

def deaf(self, spec):
    return FakeEmbedder()

def unbounded(self, spec):
    embedder = FakeEmbedder(pooling=spec.pooling or Pooling.MEAN)
    embedder._table = 10 * embedder._table - 5
    return embedder

FakeModel.make_embedder = {make}
"""


@pytest.mark.parametrize(
    ("make", "seen_by"),
    the_first_everywhere(("unbounded", "test_who_judges_gives_each_pair"), ("deaf", "test_it_has_the_pooling_that_it_is_asked_for")),
)
def test_an_embedder_that_does_not_give_what_it_is_asked_for_fails_the_suite(tmp_path: Path, make: str, seen_by: str) -> None:
    (tmp_path / "judging.py").write_text(JUDGING.format(make=make))
    check_fails(run_contract("--backend", "judging:make_backend", "-k", "judges or asked_for", folder=tmp_path), seen_by)


UNWRITABLE = """
import numpy as np
from cllm.testing.fake import FakeBackend, FakeVocabulary

tokenize = FakeVocabulary.tokenize
FakeVocabulary.tokenize = lambda self, text, **how: list(np.array(tokenize(self, text, **how), np.int32))

def make_backend(): return FakeBackend()
"""


@pytest.mark.parametrize("seen_by", the_first_everywhere("test_no_text_does_harm", "test_the_same_text_gives_the_same_tokens"))
def test_a_vocabulary_whose_tokens_cannot_be_written_as_json_fails_the_suite(tmp_path: Path, seen_by: str) -> None:
    (tmp_path / "unwritable.py").write_text(UNWRITABLE)
    check_fails(run_contract("--backend", "unwritable:make_backend", "-k", seen_by, folder=tmp_path), seen_by)


def test_a_text_model_that_ends_by_itself_where_nobody_can_keep_it_from_that_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    check(run_contract("--backend", "telling:Backend.early", "-k", "as_it_may or given_up or many_at_once", folder=tmp_path))


CARELESS = """
from cllm.testing import fake, fake_streams

class Steps(fake.FakeBackend):
    def load(self, spec, on_progress):
        assert spec.n_cells > 0 and spec.n_live > 0
        return super().load(spec, on_progress)

class Streams(fake_streams.FakeStreamBackend):
    def load(self, spec, on_progress):
        assert spec.n_cells > 0 and spec.n_live > 0
        return super().load(spec, on_progress)

class Limited(fake_streams.FakeTextModel):
    def start(self, seq_id, request):
        assert request.n_tokens_max > 0
        super().start(seq_id, request)

class Texts(fake_streams.FakeStreamBackend):
    made = classmethod(lambda cls: cls(Limited))
"""


@pytest.mark.parametrize(
    ("backend", "seen_by"),
    the_first_everywhere(
        ("Steps", "test_a_model_that_was_left_the_choice_of_its_sizes_computes_the_same"),
        ("Streams", "test_a_model_that_was_left_the_choice_of_its_sizes_answers"),
        ("Texts.made", "test_a_text_without_a_limit_is_begun_and_can_be_given_up"),
    ),
)
def test_a_model_that_takes_what_is_left_open_for_a_number_fails_the_suite(tmp_path: Path, backend: str, seen_by: str) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    run = run_contract("--backend", f"careless:{backend}", "-k", "left_the_choice or without_a_limit", folder=tmp_path)
    check_fails(run, seen_by)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in ARCHITECTURES])
def test_llama_cpp_keeps_the_contract(tmp_path: Path, architecture: str, layout: str) -> None:
    options = ("--model", f"tiny:{architecture}", "--kv", layout, *BUT_FOR_DEATHS)
    check(run_contract("--backend", "llama-cpu", *options, folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])  # of the latter no cell can be trimmed
def test_llama_cpp_keeps_the_contract_when_its_process_dies(tmp_path: Path, architecture: str) -> None:
    check(run_contract("--backend", "llama-cpu", "--model", f"tiny:{architecture}", *DEATHS, folder=tmp_path))


def test_llama_cpp_keeps_the_contract_when_it_is_laid_out_anew(tmp_path: Path) -> None:
    run = run_contract("--backend", "llama-cpu", "--kv", "auto", "-k", "layouts", "-rs", folder=tmp_path)
    check(run)
    assert "skipped" not in run.stdout


@pytest.mark.parametrize(
    ("make", "options"),
    [("make_isolated_fake", ("-k", "step or slots")), ("make_isolated_llama", ("--model", "tiny:qwen3", *BUT_FOR_DEATHS))],
)
@pytest.mark.slow
def test_a_model_in_a_process_of_its_own_keeps_the_contract(tmp_path: Path, make: str, options: tuple[str, ...]) -> None:
    check(run_contract("--backend", f"cllm.testing.mortal:{make}", *options, folder=tmp_path))


CHANGEABLE = """
import pathlib
import numpy as np
from cllm.testing.fake import FakeVocabulary, make_backend
from cllm.testing.fake_embedder import FakeEmbedder

with pathlib.Path(__file__).with_name("lives").open("a") as lives:
    lives.write("one more")
    LIFE = lives.tell() // 8
{meddle}
"""


@pytest.mark.parametrize(
    ("meddle", "seen_by"),
    the_first_everywhere(
        (
            "FakeVocabulary.tokenize = lambda self, text, **how: [*text.encode(), LIFE]",
            "test_a_text_whose_tokenising_a_death_interrupts_is_tokenised_in_the_next_life",
        ),
        ("FakeEmbedder.pair = lambda self, query, document: [LIFE]", "test_a_query_and_a_document_are_tokenised_in_the_next_life"),
        (
            "FakeEmbedder.step = lambda self, batch: np.tile(np.eye(8, dtype=np.float32)[LIFE % 8], (batch.n_rows, 1))",
            "test_a_death_in_the_middle_of_an_embedders_call_is_told_and_the_next_life_begins_empty[step]",
        ),
    ),
)
def test_a_model_that_is_another_one_in_its_next_life_fails_the_suite(tmp_path: Path, meddle: str, seen_by: str) -> None:
    (tmp_path / "changeable.py").write_text(CHANGEABLE.format(meddle=meddle))
    run = run_contract("--backend", "changeable:make_backend", "-k", seen_by.partition("[")[0], folder=tmp_path)
    check_fails(run, seen_by)


def test_the_command_in_the_suites_docstring_works(tmp_path: Path) -> None:
    """That is with the options found through the entry point, whatever other plugins of pytest are installed."""
    options = ("--backend", FAKE, "--backend-option", "n_tokens=300", "-k", "probe")
    run = run_pytest("--pyargs", "cllm.testing.contract", *options, folder=tmp_path, all_plugins=True)
    check(run)
    assert f"backend: {FAKE}" in run.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    the_first_everywhere(
        ([], "--backend NAME is missing"),
        (["--backend", "llama-cup"], "no backend llama-cup; did you mean llama-cpu?"),
        (["--backend", FAKE, "--model", "tiny:qwen9"], "no tiny model of architecture qwen9 can be made"),
        (["--backend", FAKE, "--backend-option", "n_cells"], "--backend-option takes NAME=VALUE, not n_cells"),
    ),
)
def test_a_command_that_cannot_be_is_told_in_one_line(tmp_path: Path, options: list[str], complaint: str) -> None:
    run = run_contract(*options, folder=tmp_path)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert len(run.stderr.strip().splitlines()) == 1
    assert complaint in run.stderr


def test_a_backend_that_breaks_its_word_fails_the_suite(tmp_path: Path) -> None:
    """One that trims nothing though it says that it can: the suite must see what it is there to see."""
    (tmp_path / "forgetful.py").write_text(
        "from cllm.testing.fake import FakeBackend, FakeModel\n"
        "FakeModel.trim = lambda self, slot, n_keep: None\n"
        "def make_backend(): return FakeBackend()\n"
    )
    run = run_contract("--backend", "forgetful:make_backend", "-k", "trim", folder=tmp_path)
    check_fails(run, "test_a_trimmed_slot_goes_on_with_other_tokens")


def test_options_are_added_to_no_other_run_of_pytest(tmp_path: Path) -> None:
    """Other projects call an option of theirs --backend as well."""
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--backend')\n")
    (tmp_path / "test_it.py").write_text("def test_it(pytestconfig): assert pytestconfig.getoption('backend') == 'theirs'\n")
    check(run_pytest("--backend", "theirs", folder=tmp_path))
