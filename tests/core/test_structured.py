"""Structured output as a whole: every answer is valid, in every mode, whatever the model says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from constrained import (
    BASH,
    EDIT,
    FRONTEND,
    NOW,
    SCHEMAS,
    SIZE,
    TOOLS,
    USER,
    asking,
    closed,
    good,
    good_calls,
    plan_of,
    play,
)
from tiny import tiny_engine

from ninfer_core.engine import Engine
from ninfer_core.runtime import grammar, language, sampler
from ninfer_core.runtime import schema as schemas
from ninfer_core.runtime.grammar import Grammar
from ninfer_core.runtime.rounds import Rounds
from ninfer_core.types import Message, Request, ResponseFormat, Sampling, Tool, ToolChoice

ID = FRONTEND.tokenizer.id


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_is_valid_in_every_mode(name):
    """With 512 tokens the value is always whole; drafts change nothing.

    Over all schemas every cell of {thinking} x {k = 0, 3} x {greedy, sampled} comes up.
    """
    schema = SCHEMAS[name]
    for thinking in (False, True):
        request = asking(schema, thinking=thinking)
        plan = plan_of(request)
        temperature = float((list(SCHEMAS).index(name) + thinking) % 2)
        seed = len(name) * 7 + thinking
        plain, tokens, _ = play(request, plan=plan, temperature=temperature, seed=seed)
        assert plain.finish_reason == "stop" and good(plain, schema), plain
        assert bool(plain.message.reasoning) == thinking
        truth = list(tokens)

        def right(done, truth=truth):  # drafts that are accepted, every third one wrong
            ahead = [*truth[len(done) : len(done) + 3], 65, 66, 67]
            return [t if (len(done) + i) % 3 else 97 for i, t in enumerate(ahead)]

        drafted, again, _ = play(request, plan=plan, temperature=temperature, seed=seed, k=3, propose=right)
        assert again == tokens and drafted.text == plain.text
        assert drafted.usage.accepted_tokens > 0 or len(tokens) < 4


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("budget", [90, 128, 200])
def test_a_tight_budget_still_gives_a_whole_value(seed, budget):
    for name in ("nested", "array of objects", "recursive", "edit", "defs", "map", "union", "anything"):
        completion, tokens, _ = play(asking(SCHEMAS[name], thinking=False), budget=budget, seed=seed)
        assert completion.finish_reason == "stop" and good(completion, SCHEMAS[name]), (name, completion)
        assert len(tokens) <= budget

        def right(done, truth=tokens):  # through the close and behind it, where rows were worked out before it began
            return [*truth[len(done) : len(done) + 5], 65, 66, 67, 68, 69]

        drafted = play(asking(SCHEMAS[name], thinking=False), budget=budget, seed=seed, k=5, propose=right)
        assert drafted[1] == tokens and drafted[0].text == completion.text


def test_a_budget_that_no_value_fits_is_reported_as_cut():
    schema = closed({"a_rather_long_name": {"enum": ["an even longer value than that"]}})
    completion, tokens, _ = play(asking(schema, thinking=False), budget=12)
    assert completion.finish_reason == "length" and len(tokens) == 12
    call, _, _ = play(Request(USER, tools=(EDIT,), tool_choice=ToolChoice("required"), thinking=False), budget=70)
    assert call.finish_reason == "length" and call.truncated_call


def test_thinking_is_closed_in_time_for_the_answer():
    bias = np.zeros(384, np.float32)
    bias[ID("</think>")] = -100.0  # it would never stop thinking
    schema = SCHEMAS["person"]
    for budget in (120, 512):
        completion, tokens, _ = play(asking(schema), budget=budget, bias=bias)
        assert completion.finish_reason == "stop" and good(completion, schema)
        assert completion.message.reasoning and len(tokens) <= budget
    short, _, _ = play(asking(schema, thinking_budget=5), budget=512, bias=bias)
    assert short.usage.reasoning_tokens == 5 and good(short, schema)


def test_an_end_cannot_hide_in_the_think_block():
    """Neither the end of the turn, nor a call, nor marks spelled letter by letter leave the think block."""
    tools = {"tools": TOOLS, "tool_choice": ToolChoice("required")}
    for text in ("</think>", "<tool_call>\n<function=now>\n</function>", "<|im_end|>"):
        ids = [*text.encode()] if text.startswith("</") else FRONTEND.tokenizer.encode(text)
        wanted = [*FRONTEND.tokenizer.encode("Hm "), *ids]

        def eager(tokens, wanted=wanted):
            return wanted[len(tokens) : len(tokens) + 3]

        bias = np.zeros(384, np.float32)
        completion, _, _ = play(Request(USER, **tools), k=3, propose=eager, bias=bias, budget=400)
        assert good_calls(completion) and completion.message.content == ""


# tool choice


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_are_valid(parallel, thinking, temperature):
    request = Request(
        USER,
        tools=TOOLS,
        tool_choice=ToolChoice("required"),
        thinking=thinking,
        parallel_tool_calls=parallel,
    )
    plan = plan_of(request)
    for seed in range(2):
        completion, tokens, _ = play(request, plan=plan, seed=seed, temperature=temperature)
        assert good_calls(completion), completion
        assert completion.finish_reason in ("tool_calls", "length") and completion.text == ""
        assert parallel or len(completion.message.tool_calls) == 1
        again, same, _ = play(request, plan=plan, seed=seed, temperature=temperature, k=3)
        assert same == tokens and len(again.message.tool_calls) == len(completion.message.tool_calls)


def test_a_named_tool_and_a_subset_are_enforced():
    for names in (("now",), ("bash",), ("bash", "now")):
        for seed in range(3):
            request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("required", names), thinking=False)
            completion, _, _ = play(request, seed=seed, budget=200)
            assert completion.message.tool_calls and good_calls(completion)
            assert {call.name for call in completion.message.tool_calls} <= set(names)


def test_none_means_no_call():
    bias = np.zeros(384, np.float32)
    bias[ID("<tool_call>")] = 50.0
    for thinking in (True, False):
        request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("none"), thinking=thinking)
        _, tokens, _ = play(request, bias=bias, budget=100)
        assert ID("<tool_call>") not in tokens


def test_auto_with_names_keeps_other_tools_away():
    bias = np.zeros(384, np.float32)
    bias[ID("<tool_call>")] = 8.0
    called = 0
    for seed in range(6):
        request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("auto", ("now",)), thinking=False)
        completion, tokens, _ = play(request, bias=bias, budget=120, seed=seed)
        assert {call.name for call in completion.message.tool_calls} <= {"now"}
        called += len(completion.message.tool_calls)
        same = play(request, bias=bias, budget=120, seed=seed, k=5)[1]
        assert same == tokens
    assert called > 6


def test_strict_tools_are_typed_even_when_calls_are_free():
    strict = Tool("bash", parameters=BASH.parameters, strict=True)
    bias = np.zeros(384, np.float32)
    bias[ID("<tool_call>")] = 8.0
    seen = 0
    for seed in range(2):
        completion, _, _ = play(Request(USER, tools=(strict,), thinking=False), bias=bias, seed=seed)
        whole = completion.message.tool_calls[: -1 if completion.truncated_call else None]
        seen += len(whole)
        for call in whole:
            assert isinstance(call.arguments["command"], str) and isinstance(call.arguments.get("timeout", 0), int)
    assert seen


def test_a_call_or_an_answer():
    """Tools and a schema in one request: one or the other, each valid; both ways happen."""
    schema = SCHEMAS["person"]
    ways = set()
    for seed in range(6):
        bias = np.zeros(384, np.float32)
        bias[ID("<tool_call>")] = 4.0 * (seed % 2)
        completion, _, _ = play(asking(schema, tools=TOOLS, thinking=bool(seed % 3)), seed=seed, bias=bias, budget=256)
        if completion.message.tool_calls:
            assert good_calls(completion) and completion.text == ""
            ways.add("call")
        else:
            assert good(completion, schema) and completion.finish_reason == "stop"
            ways.add("answer")
    assert ways == {"call", "answer"}


def test_string_arguments_are_raw_text_and_other_types_json():
    text = (
        "<tool_call>\n<function=edit.file>\n<parameter=path>\n/a/b\n</parameter>\n<parameter=mode>\nreplace all\n"
        "</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=at>\nnull\n</parameter>\n<parameter=force>\n"
        "true\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=bash>\n<parameter=command>\n"
        'echo "a\\n" <b> {1}\n\n</parameter>\n</function>\n</tool_call><|im_end|>'
    )
    ids = FRONTEND.tokenizer.encode(text)
    request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("required"), thinking=False)
    plan = plan_of(request)
    matcher = plan.matcher.deep_copy()
    assert matcher.try_consume_tokens(ids[:-1]) == len(ids) - 1 and matcher.is_accepting()
    wrong = text.replace("\nnull\n", "\nnone\n"), text.replace("true", "yes"), text.replace("/a/b", "a/b")
    for other in (*wrong, text.replace("[1, 2]", "[1, 2.5]"), text.replace("replace all", "replace")):
        matcher = plan.matcher.deep_copy()
        assert matcher.try_consume_tokens(FRONTEND.tokenizer.encode(other)[:-1]) < len(ids) - 8


# other forms


def test_json_object_mode():
    for seed in range(3):
        completion, _, _ = play(
            Request(USER, response_format=ResponseFormat("json"), thinking=bool(seed % 2)), seed=seed
        )
        assert isinstance(json.loads(completion.text), dict) and completion.finish_reason == "stop"


def test_regex_choice_and_grammar():
    forms = [
        (ResponseFormat("regex", pattern=r"[0-9]{3}-(ab|c/d)+\."), r"[0-9]{3}-(ab|c/d)+\."),
        (ResponseFormat("choice", choices=("yes", "no", "no way", '"ü"\n')), r'yes|no|no way|"ü"\n'),
        (ResponseFormat("grammar", pattern='start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"'), None),
        (ResponseFormat("grammar", pattern='root ::= "a" [0-9]+ ";"'), r"a[0-9]+;"),
    ]
    for form, pattern in forms:
        for seed in range(5):
            request = Request(USER, response_format=form, thinking=bool(seed % 2))
            completion, tokens, _ = play(request, seed=seed, budget=200)
            assert completion.finish_reason == "stop"
            if pattern is not None:
                assert re.fullmatch(pattern, completion.text), completion.text
            else:
                assert completion.text.count("(") == completion.text.count(")")
            assert play(request, seed=seed, budget=200, k=4)[1] == tokens


def test_tools_with_a_users_own_grammar():
    form = ResponseFormat("grammar", pattern='start: "yes" | "no"')
    for seed in range(6):
        bias = np.zeros(384, np.float32)
        bias[ID("<tool_call>")] = 4.0 * (seed % 2)
        completion, _, _ = play(Request(USER, response_format=form, tools=(NOW,), thinking=False), seed=seed, bias=bias)
        assert completion.text in ("yes", "no") or completion.message.tool_calls[0].name == "now"


# the law


def test_where_everything_is_allowed_the_law_is_unchanged():
    """A grammar of any text: the same tokens as without, up to marks that are no text."""
    anything = Request(USER, response_format=ResponseFormat("regex", pattern="(?s:.*)"), thinking=False)
    free = Request(USER, thinking=False)
    bias = np.zeros(384, np.float32)
    bias[:32] = bias[127:SIZE] = -60.0  # printable ASCII only, so that both see the same alternatives
    for seed in range(3):
        for temperature in (0.0, 1.0):
            settings = {"seed": seed, "temperature": temperature, "bias": bias, "budget": 60, "logprobs": 3}
            _, with_grammar, a = play(anything, **settings)
            _, without, b = play(free, **settings)
            shared = min(len(with_grammar), len(without), 40)  # before the end comes in sight
            assert with_grammar[:shared] == without[:shared] and a[:shared] == b[:shared]


# the public case: the grammar begins inside a burst


@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_burst_is_accepted_only_as_far_as_the_grammar_allows(k):
    """One round proposes `</think>`, `{`, `"location"`; the schema wants `city`."""
    schema = closed({"city": {"type": "string"}})
    burst = [ID("</think>"), *FRONTEND.tokenizer.encode('{"location"')]
    start = {}

    def propose(tokens):
        if ID("</think>") not in tokens:
            start["at"] = len(tokens)
            return burst
        return FRONTEND.tokenizer.encode('"location"')

    bias = np.zeros(384, np.float32)
    bias[ID("</think>")] = 20.0
    for letter in '{"location':
        bias[ord(letter)] += 6.0
    for seed in range(3):
        completion, tokens, _ = play(asking(schema), k=k, seed=seed, bias=bias, propose=propose, budget=100)
        assert good(completion, schema) and completion.finish_reason == "stop"
        assert list(json.loads(completion.text)) == ["city"]
        assert play(asking(schema), seed=seed, bias=bias, budget=100)[1] == tokens


# what it costs


def test_forced_tokens_are_not_sampled(monkeypatch):
    """A call with one way to be written: its tokens are emitted without a draw, and without a round of their own."""
    drawn = []
    pick = sampler.pick
    monkeypatch.setattr(sampler, "pick", lambda *given: drawn.append(1) or pick(*given))
    request = Request(USER, tools=(NOW,), tool_choice=ToolChoice("required"), parallel_tool_calls=False, thinking=False)
    for k in (0, 3):
        drawn.clear()
        completion, tokens, records = play(request, k=k, logprobs=0)
        assert good_calls(completion, (NOW,)) and len(tokens) > 25
        certain = [value for _, value, _ in records if value == 0.0]
        assert len(drawn) <= 3 and len(certain) >= len(tokens) - 3
        assert completion.usage.rounds <= 3


class Watched:
    """Logits that tell when the host begins to wait for them."""

    def __init__(self, logits, log):
        self._logits, self._log = logits, log

    def cpu(self):
        self._log.append("waits")
        return self._logits.cpu()


@pytest.mark.parametrize("drafts", [0, 3])
def test_masks_are_made_while_the_device_works(drafts, monkeypatch):
    """Launched, masks of all rows, then the wait; behind it no mask is worked out again."""
    log: list[str] = []
    rows = Grammar.rows
    monkeypatch.setattr(Grammar, "rows", lambda self, given: log.append("masks") or rows(self, given))
    request = asking(SCHEMAS["person"], thinking=False, sampling=Sampling(seed=4), max_tokens=60)
    with tiny_engine(draft_tokens=drafts, max_sequences=1) as engine:
        decoder = engine._runner._decoder
        logits = decoder.logits

        def watched(hidden):
            log.append("launched")
            return Watched(logits(hidden), log)

        decoder.logits = watched
        completion = engine.submit(request).result(300)
    assert good(completion, SCHEMAS["person"])
    assert log[:3] == ["launched", "waits", "masks"], "the first token comes from the prompt"
    rounds = " ".join(log[3:]).split("launched ")[1:]  # those that only read known tokens need no masks
    assert {entry.strip() for entry in rounds} <= {"masks waits", "waits"}
    assert log.count("masks") == 1 + completion.usage.rounds > 6


def test_what_is_not_constrained_pays_nothing(monkeypatch):
    """No plan, grammar or mask is made, and the device's round has nothing to do meanwhile."""

    def never(*_, **__):
        raise AssertionError("a request without constraints met a grammar")

    for owner, name in ((Grammar, "__init__"), (grammar, "plan_for"), (sampler, "allowed_ids")):
        monkeypatch.setattr(owner, name, never)
    verify, meanwhile = Rounds.verify, []
    monkeypatch.setattr(
        Rounds, "verify", lambda self, windows, work=None: meanwhile.append(work) or verify(self, windows, work)
    )
    requests = [
        Request(USER, thinking=False, max_tokens=8, sampling=Sampling(seed=1)),
        Request(USER, tools=TOOLS, max_tokens=8, sampling=Sampling(temperature=0.0)),
    ]
    with tiny_engine(context=2048, draft_tokens=3, max_sequences=2) as engine:
        handles = [engine.submit(request) for request in requests]
        assert all(handle.result(300).usage.completion_tokens for handle in handles)
    assert meanwhile and not any(meanwhile)


# the engine


def test_the_engine_with_drafts_and_neighbours():
    """A random model through the real runner: alone or together, with and without drafts, the same valid answers."""
    requests = [
        asking(SCHEMAS["person"], thinking=False, sampling=Sampling(temperature=0.0), max_tokens=60),
        asking(SCHEMAS["enum"], thinking=True, thinking_budget=8, sampling=Sampling(seed=1), max_tokens=90),
        Request(
            USER,
            tools=(NOW,),
            tool_choice=ToolChoice("required", ("now",)),
            thinking=False,
            parallel_tool_calls=False,
            sampling=Sampling(seed=2),
            max_tokens=60,
            logprobs=2,
        ),
        Request(USER, thinking=False, sampling=Sampling(seed=3), max_tokens=30),
    ]
    results = []
    for k, together in ((0, True), (3, True)):
        with tiny_engine(draft_tokens=k, max_sequences=4 if together else 1) as engine:
            made = [handle.result(120) for handle in [engine.submit(request) for request in requests]]
        assert good(made[0], SCHEMAS["person"]) and good(made[1], SCHEMAS["enum"])
        assert [c.name for c in made[2].message.tool_calls] == ["now"]
        results.append([(c.text, c.message.reasoning, c.finish_reason, c.logprobs) for c in made])
    assert results[0] == results[1]


def test_the_demo_model():
    schema = closed({"answer": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}})
    made = []
    for k in (0, 3):
        with Engine.load("demo", draft_tokens=k, max_sequences=3) as engine:
            handles = [
                engine.submit(
                    asking(schema, thinking=thinking, sampling=Sampling(temperature=t, seed=1), max_tokens=90)
                )
                for thinking, t in ((False, 0.0), (True, 1.0))
            ]
            call = engine.submit(
                Request(
                    (Message("user", "List the files."),),
                    tools=(BASH,),
                    tool_choice=ToolChoice("required"),
                    thinking=False,
                    max_tokens=120,
                    sampling=Sampling(temperature=0.0),
                )
            )
            answers = [handle.result(200) for handle in handles]
            assert all(good(c, schema) and c.finish_reason == "stop" for c in answers)
            assert good_calls(call.result(200), (BASH,))
            made.append([c.text for c in answers] + [str(call.result().message.tool_calls[0].arguments)])
    assert made[0] == made[1]


# the page


def test_the_page_states_the_limits_and_its_example_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "structured.md").read_text(encoding="utf-8")
    limits = (
        schemas.BYTES, language.SCHEMAS, schemas.DEPTH, schemas.CONJUNCTS, schemas.REPETITIONS, language.CHOICES,
        language.LENGTH, language.COUNTED, 2 * language.COUNTED,
    )  # fmt: skip
    told = re.findall(r"[0-9][0-9,]*", " ".join(re.findall(r"^\| .*? \| ([0-9][0-9,; ]*) \|$", page, re.M)))
    assert [int(number.replace(",", "")) for number in told] == list(limits)
    assert all(f in page for f in schemas.FORMATS) and all(k in page for k in ("unevaluatedItems", "$dynamicRef"))
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["city", "people"] and answer["people"] >= 0 and len(answer["city"]) <= 40
