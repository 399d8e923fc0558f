"""Which replica a conversation goes to: keys of request bodies, and the choice by prefix and load. Needs no Ray."""

import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray_ninfer.routing import Affinity, Balance, Key, conversation_key

SYSTEM = {"role": "system", "content": "You are brief."}
FIRST = {"role": "user", "content": "What is a lighthouse?"}
LATER = [{"role": "assistant", "content": "A tower."}, {"role": "user", "content": "And a buoy?"}]
NAMES = ["a", "b", "c"]


def test_routing_does_not_import_ray() -> None:
    code = "import sys, ray_ninfer.routing; print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("field", ["messages", "input"])
def test_every_turn_of_a_conversation_has_its_key(field: str) -> None:
    first = conversation_key({field: [SYSTEM, FIRST]})
    assert first is not None and first.head is not None
    assert conversation_key({field: [SYSTEM, FIRST, *LATER], "max_tokens": 7, "stream": True}) == first


def test_conversations_differ_and_share_their_head() -> None:
    one, other = (conversation_key({"messages": [SYSTEM, {**FIRST, "content": text}]}) for text in ("x", "y"))
    assert one and other
    assert one.head == other.head and one.conversation != other.conversation
    assert conversation_key({"messages": [{**SYSTEM, "content": "Be long."}, FIRST]}).head != one.head


@pytest.mark.parametrize(
    "change",
    [
        {"system": "Be brief."},
        {"instructions": "Be brief."},
        {"tools": [{"name": "look"}]},
    ],
)
def test_what_stands_before_the_turns_counts(change: dict) -> None:
    plain, changed = conversation_key({"messages": [FIRST]}), conversation_key({"messages": [FIRST], **change})
    assert plain.head is None and changed.head is not None
    assert plain.conversation != changed.conversation


def test_cache_marks_and_ids_do_not_change_the_key() -> None:
    text = FIRST["content"]
    marked = {"id": "m1", "role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "x"}}]}
    bare = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert conversation_key({"messages": [marked]}) == conversation_key({"messages": [bare]})
    assert conversation_key({"messages": [bare]}) == conversation_key({"messages": [FIRST]})


def test_images_count() -> None:
    with_image = {"messages": [{**FIRST, "images": ["abc"]}]}
    assert conversation_key(with_image) != conversation_key({"messages": [FIRST]})


def test_plain_prompts_are_known_by_their_beginning() -> None:
    start = "once " * 60
    key = conversation_key({"prompt": start + "and then"})
    assert key == conversation_key({"prompt": start + "or not", "stream": True})
    assert key != conversation_key({"prompt": "twice " * 60})
    assert key == conversation_key({"prompt": [start + "and then", "another"]})
    assert conversation_key({"input": "hello"}) == conversation_key({"prompt": "hello"})
    assert conversation_key({"prompt": [5, 6, 7]}) != conversation_key({"prompt": [5, 6, 8]})


@pytest.mark.parametrize("body", [None, [], "text", 5, {}, {"prompt": ""}, {"prompt": []}, {"input": []}])
def test_no_prompt_no_key(body: object) -> None:
    assert conversation_key(body) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "system", "tools"]), json_values))
def test_no_body_breaks_the_key(body: dict) -> None:
    assert conversation_key(body) == conversation_key(dict(body))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)), st.none() | st.builds(Key, st.none(), st.text()))
def test_every_replica_is_in_the_order_once(loads: dict, key: Key | None) -> None:
    assert sorted(Affinity(2).order(key, loads)) == sorted(loads)


def key(number: int, head: str | None = None) -> Key:
    return Key(head, f"conversation {number}")


def test_a_conversation_goes_home_until_home_is_overloaded() -> None:
    affinity = Affinity(spread=2)
    affinity.routed(key(1), "b")
    assert affinity.order(key(1), {"a": 0, "b": 2, "c": 1})[0] == "b"
    assert affinity.order(key(1), {"a": 0, "b": 3, "c": 1}) == ["a", "c", "b"]
    affinity.routed(key(1), "a")
    assert affinity.order(key(1), {"a": 1, "b": 0, "c": 0})[0] == "a"


def test_a_new_conversation_goes_to_the_idlest_and_there_to_its_head() -> None:
    affinity = Affinity(spread=4)
    affinity.routed(key(1, "tools"), "c")
    for number in range(20):
        assert affinity.order(key(100 + number, "tools"), dict.fromkeys(NAMES, 1))[0] == "c"
        assert affinity.order(key(100 + number, "tools"), {"a": 0, "b": 1, "c": 1})[0] == "a"


def test_routers_without_memory_agree_and_spread() -> None:
    loads = dict.fromkeys(NAMES, 0)
    chosen = [Affinity(0).order(key(number), loads)[0] for number in range(300)]
    assert chosen == [Affinity(0).order(key(number), dict(reversed(loads.items())))[0] for number in range(300)]
    assert all(chosen.count(name) > 60 for name in NAMES)


def test_a_lost_replica_moves_only_its_own() -> None:
    affinity = Affinity(0)
    loads = dict.fromkeys(NAMES, 0)
    before = {number: affinity.order(key(number), loads)[0] for number in range(100)}
    for number, home in before.items():
        affinity.routed(key(number), home)
    affinity.keep(["a", "c"])
    after = {number: affinity.order(key(number), {"a": 0, "c": 0})[0] for number in range(100)}
    assert all(after[number] == home for number, home in before.items() if home != "b")
    assert all(after[number] != "b" for number in before)


def test_memory_is_bounded_and_keeps_the_latest() -> None:
    affinity = Affinity(0, remembered=10)
    homes = {number: random.Random(number).choice(NAMES) for number in range(50)}
    for number, home in homes.items():
        affinity.routed(key(number), home)
    assert len(affinity._homes) == 10
    assert all(affinity.order(key(n), dict.fromkeys(NAMES, 0))[0] == homes[n] for n in range(40, 50))


def test_senseless_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="spread must be at least 0"):
        Affinity(-1)


def test_what_a_request_should_avoid_comes_last() -> None:
    affinity = Affinity(spread=4)
    affinity.routed(key(1), "b")
    assert affinity.order(key(1), {"a": 3, "b": 0, "c": 3}, avoid=("b",))[-1] == "b"
    assert affinity.order(None, {"a": 3, "b": 0, "c": 1}, avoid=("b",)) == ["c", "a", "b"]


def test_a_burst_spreads_before_anything_was_sent() -> None:
    balance = Balance(spread=0)
    chosen = [balance.order(f"r{n}", key(n), NAMES, now=1.0)[0] for n in range(9)]
    assert sorted(chosen) == sorted(NAMES * 3)
    assert {balance.order("r0", key(0), NAMES, now=1.0)[0] for _ in range(5)} == {
        chosen[0]
    }  # its own choice is no load


def test_what_was_chosen_and_not_followed_stops_counting() -> None:
    balance = Balance(spread=0)
    first = balance.order("r1", key(1), ["a", "b"], now=1.0)[0]
    assert balance.order("r2", key(1), ["a", "b"], now=1.5)[0] != first
    assert balance.order("r3", key(1), ["a", "b"], now=60.0)[0] == first


def test_loads_are_what_was_sent_and_has_not_ended() -> None:
    balance = Balance(spread=0)
    balance.sent("r1", key(1), "a")
    assert balance.order("r2", key(1), ["a", "b"], now=1.0)[0] == "b"
    balance.ended("r1")
    assert balance.order("r3", key(1), ["a", "b"], now=60.0)[0] == "a"
    balance.keep(["b"])
    assert balance.order("r4", key(1), ["b"], now=120.0) == ["b"]
