"""The prefix cache: what is found, shared, kept and given up. Over the hash model, which checks every page it reads."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from engine_support import text
from hash_model import FRONTEND, Machine, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core.errors import EngineFailedError
from ninfer_core.runtime.pool import Pool
from ninfer_core.runtime.prefix import Checkpoint, PrefixCache, common_length
from ninfer_core.runtime.reuse import chunk_ends, prompt_keys, worth
from ninfer_core.types import Message, Request

# the tree


class Books:
    """A cache over pools, with checkpoints that own one page each."""

    def __init__(self, slots=4, pages=100):
        self.pages, self.slots = Pool(pages, "page"), Pool(slots, "slot")
        self.cache = PrefixCache(self.pages, self.slots)

    def keep(self, keys, kind="turn"):
        slot = self.cache.admit(keys, len(keys))
        if slot is None:
            return None
        made = Checkpoint(len(keys), slot, tuple(self.pages.take(1)), kind, True)
        self.cache.insert(keys, made)
        return made

    def ask(self, keys):
        """Resume as deep as possible, then keep the end: whether it was known."""
        found = self.cache.match(keys, len(keys)).checkpoint
        if found is not None:
            self.cache.use(found)
        if found is None or found.length < len(keys):
            self.keep(keys)
        return found.length if found is not None else 0


words = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["keep", "drop", "look"]), words, st.integers(0, 8)), max_size=40))
def test_the_tree_is_a_set_of_prefixes(actions):
    books, model = Books(slots=500, pages=500), {}
    for action, word, limit in actions:
        key = tuple(word)
        if action == "keep" and key not in model:
            model[key] = books.keep(key)
        elif action == "drop" and key in model:
            books.cache.drop(model.pop(key))
        match = books.cache.match(key, limit)
        known = [p for p in model if p == key[: len(p)] and len(p) <= limit]
        assert match.checkpoint is (model[max(known, key=len)] if known else None)
        common = max((common_length(p, key, 0) for p in model), default=0)
        assert match.common == common
        if match.instead:
            stored = key[:common] + match.instead
            assert common < len(key) and stored[common] != key[common]
            assert any(p[: len(stored)] == stored for p in model)
        assert books.slots.free == 500 - len(model) == books.pages.free
    books.cache.clear()
    assert not books.cache._root.children and books.slots.free == 500


def test_a_page_is_never_given_back_twice():
    pool = Pool(3, "page", first=5)
    taken = pool.take(2)
    pool.share(taken)
    pool.give(taken)
    assert pool.free == 1 and pool.owners(5) == 1
    pool.give([5])
    assert pool.free == 2 and pool.owners(5) == 0
    for action in (pool.give, pool.share):
        with pytest.raises(ValueError, match="page 5"):
            action([5])


def test_two_checkpoints_at_one_place_are_refused():
    books = Books()
    books.keep((1, 2))
    with pytest.raises(ValueError, match="position 2"):
        books.cache.insert((1, 2), Checkpoint(2, 9, (), "turn", True))


def test_a_long_conversation_outlives_many_side_requests_but_not_forever():
    books = Books(slots=4)
    long = text(20_000)
    books.ask(long)
    for i in range(200):
        books.ask(text(53, seed=i + 2))
    assert books.ask(long) == 20_000
    for i in range(1500):
        books.ask(text(53, seed=i + 300))
    assert books.ask(long) == 0


def test_hits_resume_when_more_conversations_come_than_fit():
    """12 systems twice with room for 8: oldest first, and no state in which nothing is ever found again."""
    books = Books(slots=8)
    systems = [text(500, seed=i + 1) for i in range(12)]
    for _ in range(2):
        for system in systems:
            books.ask(system)
    assert [books.ask(s) for s in systems[4:]] == [500] * 8
    assert books.ask(systems[0]) == 0 and books.ask(systems[0]) == 500


def test_a_conversation_gives_up_its_own_past_first():
    books = Books(slots=4)
    other = text(100, seed=9)
    books.ask(other)
    talk = ()
    for turn in range(10):
        talk = (*talk, *text(300, seed=turn + 20))
        books.ask(talk)
    assert books.ask(other) == 100
    assert books.cache.match(talk, len(talk)).checkpoint.length == 3000


def test_a_place_where_two_conversations_part_is_not_past():
    books = Books(slots=4)
    trunk = text(100)
    books.ask(trunk)
    for seed in (3, 4):
        books.ask((*trunk, *text(100, seed)))
    for seed in (5, 6):
        books.ask(text(90, seed))
    assert books.ask((*trunk, 249)) == 100


# chunks


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2000), unique=True, max_size=20), st.integers(1, 2000), st.integers(1, 2000))
def test_a_longer_prompt_is_read_in_the_same_chunks(cuts, first, second):
    short, long = sorted((first, second))
    cuts.sort()
    before = chunk_ends([c for c in cuts if c < short], short, 256)
    after = chunk_ends(cuts, long, 256)
    assert before[:-1] == [end for end in after if end < short]
    assert before[-1] == short and after == sorted(set(after)) and after[-1] == long
    for a, b in zip([0, *after], after, strict=False):
        assert 0 < b - a <= 256 and (b % 256 == 0 or b - a >= 64 or b == long)


def test_long_chunks_end_at_short_turns_too():
    """With chunks of thousands of tokens, turns of some hundred are still resumed from, and long prompts at 16,384."""
    assert worth(256) == 64 and worth(2048) == worth(8192) == 512
    assert chunk_ends([400, 900, 1500, 8300, 9000], 20_000, 8192) == [900, 1500, 8192, 9000, 16_384, 20_000]
    prompt = FRONTEND.prepare(Request(prompt=text(70_000)))
    for chunk, step in ((2048, 16_384), (8192, 16_384), (32_768, 32_768)):
        reuse = Machine(pages=4, checkpoints=64, slots=2, chunk=chunk).reuse
        kept = reuse.wanted(prompt, chunk_ends([], 70_000, chunk))
        turn = 69_999 // chunk * chunk
        assert kept == dict.fromkeys(range(step, turn, step), ("ladder", True)) | {turn: ("turn", False)}


def test_prompts_with_media_are_not_known_by_their_tokens_alone():
    prompt = FRONTEND.prepare(Request(prompt=text(9)))
    assert prompt_keys(prompt) == list(text(9))
    placed = SimpleNamespace(media=SimpleNamespace(digest=b"one"), spans=((2, 4), (6, 8)))
    object.__setattr__(prompt, "media", (placed,))
    keys, tokens = prompt_keys(prompt), list(text(9))
    assert keys[2] == (b"one", 0) and keys[6] == (b"one", 1)
    assert [i for i in range(9) if keys[i] != tokens[i]] == [2, 6]


def chat(*turns, tools=()):
    roles = ("user", "assistant")
    messages = [Message("system", "Be brief. " * 20), *(Message(roles[i % 2], turn) for i, turn in enumerate(turns))]
    return FRONTEND.prepare(Request(tuple(messages), tools=tools, thinking=True))


def test_the_cuts_of_a_conversation_stay_where_they_were():
    first, second = chat("What? " * 30), chat("What? " * 30, "That.", "And? " * 30)
    assert set(first.checkpoints) <= set(first.cuts) and len(first.cuts) == 2
    assert second.cuts[:2] == first.cuts and len(second.cuts) == 3
    assert second.token_ids[: first.cuts[-1]] == first.token_ids[: first.cuts[-1]]


# sequences


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 131])
def test_a_b_a(drafts, length):
    machine = Machine(drafts=drafts)
    a, b = text(length), text(length + 20, seed=2)
    first, cold = machine.ask(a, 12)
    machine.ask(b, 20)
    again, usage = machine.ask(a, 12)
    assert first == again == answer(a, 12)
    assert usage.cached_tokens == (length - 1) // 64 * 64
    assert usage.accepted_by_position == cold.accepted_by_position
    machine.audit()


def test_a_conversation_goes_on_from_its_answers():
    """64 turns: each reads what is new, and drafts after a resume are as good as ever."""
    machine = Machine(pages=80, checkpoints=5)
    talk = list(text(100))
    for turn in range(64):
        made, usage = machine.ask(talk, 9)
        assert made == answer(talk, 9)
        assert usage.accepted_tokens == usage.drafted_tokens == 6 and usage.rounds == 2
        if turn:
            assert usage.prompt_tokens - usage.cached_tokens <= 64 + 40
        talk += made + list(text(31, seed=turn))
        machine.audit()
    assert machine.scheduler.stats()["checkpoints"] == 5


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_the_state_behind_an_answer_leaves_rejected_drafts_out(kept):
    machine = Machine()
    machine.runner.proposal = lambda s, made: [t if i < kept else (t + 1) % 250 for i, t in enumerate(made)]
    prompt = text(70)
    made, _ = machine.ask(prompt, 22)
    (behind,) = (c for c in machine.reuse.cache.checkpoints if c.kind == "answer")
    assert behind.length == 70 + 21 and not behind.exact
    more = (*prompt, *made, *text(10, seed=3))
    assert machine.expect(more, 8).cached_tokens == 91


def test_an_answer_of_one_token_can_be_gone_on_from():
    machine = Machine()
    prompt = text(90)
    made, _ = machine.ask(prompt, 1)
    more = (*prompt, *made, 5)
    usage = machine.expect(more, 6)
    assert usage.cached_tokens == 90
    assert (usage.rounds, usage.accepted_by_position) == (2, (1, 1, 1))


def test_without_answers_no_state_is_made_by_decoding():
    machine = Machine(answers=False)
    made, _ = machine.ask(text(70), 30)
    assert all(c.exact and c.kind != "answer" for c in machine.reuse.cache.checkpoints)
    assert machine.ask((*text(70), *made, 1), 4)[1].cached_tokens == 64


def test_an_edit_in_the_middle_reuses_up_to_the_nearest_checkpoint():
    machine = Machine(pages=200, checkpoints=12, slots=1)
    talk = text(64 * 40)
    machine.ask(talk, 2)
    edited = (*talk[:1500], 249, *talk[1501:])
    assert machine.expect(edited, 3).cached_tokens == 1024  # a ladder of 512 tokens, thinned to fit


def test_a_system_prompt_is_found_by_other_conversations():
    machine = Machine()
    ask = {}
    for question in ("first question " * 12, "another one " * 12):
        prompt = chat(question)
        handle = machine.submit(prompt.token_ids, 4)
        handle.session.prompt = prompt
        machine.scheduler._waiting[0][0].prompt = prompt
        machine.run(handle)
        ask[question] = (prompt, handle.session.usage.cached_tokens)
    (first, none), (_, cached) = ask.values()
    assert none == 0 and cached == first.checkpoints[0] > 150
    machine.audit()


def test_three_conversations_in_three_rounds_find_themselves_again():
    """In turns, with fewer checkpoints than turns: each reads only what is new, also once the budget was used up."""
    machine = Machine(pages=120, checkpoints=6, slots=2)
    talks = [list(text(300, seed=seed)) for seed in (3, 4, 5)]
    for turn in range(3):
        for i, talk in enumerate(talks):
            made, usage = machine.ask(talk, 9)
            assert made == answer(talk, 9)
            if turn:
                assert usage.prompt_tokens - usage.cached_tokens <= 31 + 1 + 64, (turn, i)
            talk += [*made, *text(31, seed=10 * turn + i)]
            machine.audit()
    assert machine.scheduler.stats()["prefix_hits"] == 6


def test_side_requests_do_not_push_a_conversation_out():
    machine = Machine(pages=400, checkpoints=5, slots=2, chunk=256)
    talk = text(20_000)
    machine.ask(talk, 4)
    for i in range(12):
        machine.ask(text(300, seed=i + 5), 8)
    more = (*talk, *text(200, seed=4))
    assert machine.expect(more, 4).cached_tokens >= 0.95 * 20_000


@pytest.mark.parametrize("blocks", [0, 400])
def test_a_second_turn_behind_a_small_side_request_reads_what_is_new(blocks):
    """20,000 tokens, a title for them in 53, and the next turn: with host memory also after the device was swept."""
    machine = Machine(pages=340 if blocks else 400, checkpoints=4, slots=1, chunk=256, blocks=blocks)
    talk = text(20_000)
    _, first = machine.ask(talk, 30)
    title, side = machine.ask(text(53, seed=8), 12)
    assert title == answer(text(53, seed=8), 12) and side.cached_tokens == 0 == first.cached_tokens
    if blocks:
        machine.ask(text(20_400, seed=5), 4)
        assert machine.reuse.cache.match(talk, len(talk)).checkpoint is None
    more = (*talk, *answer(talk, 30), *text(80, seed=4))
    usage = machine.expect(more, 12)
    assert usage.cached_tokens >= 0.95 * 20_000 and usage.known_tokens >= usage.cached_tokens
    assert machine.scheduler.stats()["host_restored"] == bool(blocks)
    machine.audit()


def test_cached_pages_make_room_before_a_request_is_refused():
    machine = Machine(pages=10, checkpoints=8, slots=2)
    for i in range(6):
        prompt = text(250, seed=i)
        machine.expect(prompt, 40)
        machine.audit()
    whole = text(600)
    machine.expect(whole, 36)
    assert machine.scheduler.stats()["pages_free"] == 10


def test_the_last_page_is_taken_over_where_no_other_is_free():
    """All pages belong to one request: its prompt's checkpoint is used up rather than not used."""
    machine = Machine(pages=5, checkpoints=4, slots=1, drafts=3)
    prompt = text(200)
    machine.ask(prompt, 5)
    made, usage = machine.ask(prompt, 320 - 200 - 2)
    assert made == answer(prompt, len(made)) and usage.cached_tokens == 192
    machine.audit()


def test_a_shared_page_is_not_written_by_two():
    """Two requests resume from one state at once, at an odd place, and each writes its own rows."""
    machine = Machine()
    prompt = text(100)
    made, _ = machine.ask(prompt, 20)
    handles = [machine.submit((*prompt, *made, *text(30, seed=s)), 20) for s in (2, 3)]
    while not all(h.done for h in handles):
        machine.scheduler.step()
        machine.audit()
    for handle in handles:
        assert machine.tokens[handle.id] == answer(handle.request.prompt, 20)
        assert handle.session.usage.cached_tokens == 119


def test_equal_beginnings_that_come_at_once_are_read_once():
    """Three choices of one prompt, and another prompt behind the same system text."""
    machine = Machine(slots=4, pages=80)
    prompt = text(300)
    handles = [machine.submit(p, 10) for p in (prompt, prompt, prompt, (*text(290), 1, 2, 3))]
    machine.run(*handles)
    for handle in handles:
        assert machine.tokens[handle.id] == answer(handle.request.prompt, 10)
    assert [h.session.usage.cached_tokens for h in handles] == [0, 256, 256, 256]
    assert machine.scheduler.totals.chunks == 5 + 3
    first, second = machine.submit(text(400, seed=3), 10), machine.submit(text(400, seed=3), 10)
    machine.scheduler.step()
    first.cancel()  # what was waited for does not come
    machine.run(second)
    assert machine.tokens[second.id] == answer(second.request.prompt, 10)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_request_leaves_only_what_is_true(after):
    """Cancelled in the queue, in prefill and in decoding; then A, B, A."""
    machine = Machine()
    gone = machine.submit(text(200), 50)
    for _ in range(after * 2):
        machine.scheduler.step()
    gone.cancel()
    machine.run(*[machine.submit(text(40, seed=8), 3)])
    machine.audit()
    assert gone.done and machine.scheduler.stats()["running"] == 0
    for prompt in (text(200), text(220, seed=2), text(200)):
        machine.expect(prompt, 12)


def test_nothing_is_offered_that_was_not_written():
    machine = Machine()
    copy = machine.state.copy_slot

    def broken(source, target):
        raise RuntimeError("copying failed")

    machine.state.copy_slot = broken
    with pytest.raises(EngineFailedError):
        machine.ask(text(150), 4)
    assert len(machine.reuse.cache) == 0
    machine.state.copy_slot = copy
    machine.audit()
    assert machine.ask(text(150), 4)[1].cached_tokens == 0


def test_what_a_failed_request_kept_is_not_offered():
    machine = Machine()
    machine.ask(text(100), 4)
    logits = machine.runner._decoder.logits
    machine.runner._decoder.logits = lambda h: logits(h) * float("nan")
    prompt = (*text(100), *text(200, seed=2))
    with pytest.raises(EngineFailedError):
        machine.ask(prompt, 4)
    machine.runner._decoder.logits = logits
    machine.audit()
    assert machine.expect(prompt, 4).cached_tokens == 0  # nor what it resumed from, which may be to blame


def test_after_a_shared_fault_no_shared_page_is_written_again():
    machine = Machine(pages=60)
    prompt = text(300)
    first = machine.submit(prompt, 30)
    machine.reach(5, first)
    second = machine.submit(prompt, 30)  # resumes from what the first has kept
    machine.reach(5, second)
    assert second.session.cached_tokens == 256
    verify, failed = machine.runner._decoder.verify, []

    def once(*args):
        if not failed:
            failed.append(True)
            raise RuntimeError("a device fault")
        return verify(*args)

    machine.runner._decoder.verify = once
    while not (first.done and second.done):
        machine.scheduler.step()
        machine.audit()
    assert failed and machine.tokens[first.id] == machine.tokens[second.id] == answer(prompt, 30)


def test_the_log_says_where_a_prompt_differs(caplog):
    machine = Machine(describe=FRONTEND.tokenizer.decode)
    encode = FRONTEND.tokenizer.encode
    before = encode("It was a bright cold day in April, and the clocks were striking thirteen. " * 3)
    after = list(before)
    after[100] = encode("Z")[0]
    with caplog.at_level(logging.INFO, "ninfer.engine"):
        machine.ask(before, 2)
        _, usage = machine.ask(after, 2)
    assert usage.known_tokens == 100 and usage.cached_tokens == 0
    line = caplog.messages[-1]
    assert f"0 of {len(after)} prompt tokens from the cache" in line and "the first 100 are known" in line
    seen = FRONTEND.tokenizer.decode(before[88:100])
    assert repr(seen) in line and "this one 'Z" in line


def test_off_means_off():
    machine = Machine(checkpoints=0)
    for _ in range(2):
        assert machine.expect(text(200), 5).cached_tokens == 0
    assert machine.reuse.pages.free == machine.reuse.pages.size
