"""The demo's task generator and tokenizer: answers in the template's own words, words cut alike, nothing held out leaks."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer_core.demo.make.delta import delta_rule
from ninfer_core.demo.make.dialogue import answer_text, assistant, prompt_text
from ninfer_core.demo.make.tasks import MIX, Generator
from ninfer_core.demo.make.tokenizer import ADDRESSABLE, SPECIAL, token_id
from ninfer_core.demo.make.words import CITY, FIRST, LAST, Pools
from ninfer_core.frontend.template import ChatTemplate

DEMO = Path(__file__).parents[2] / "ninfer_core" / "demo"


@pytest.fixture(scope="module")
def template():
    return ChatTemplate((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "artifact" / "tokenizer.json"))


@pytest.mark.parametrize("maker", [maker for _, maker in MIX], ids=lambda maker: maker.__name__)
def test_prompt_and_answer_are_what_the_template_writes(template, maker):
    generator = Generator(None, template, 3, test=True)
    for _ in range(25):
        task = generator.task(maker)
        last = assistant(task.answer, task.reasoning if task.thinking else "", task.calls)
        whole = template.render(messages=[*task.messages, last], tools=task.tools, preserve_thinking=task.preserve)
        assert prompt_text(task, template) + answer_text(task) + "\n" == whole


def test_a_seed_decides_everything(template):
    first, second = (Generator(None, template, 11, test=True) for _ in range(2))
    assert [first.render(first.task()) for _ in range(50)] == [second.render(second.task()) for _ in range(50)]


def test_no_word_is_in_both_splits():
    words = (DEMO / "make" / "held_out_words.txt").read_text(encoding="utf-8").split()
    assert len(words) > 500
    assert Pools.split(words, False).words == []
    train, test = Pools.split(words, False), Pools.split(words, True)
    for name, pool in (("first", FIRST), ("last", LAST), ("city", CITY)):
        kept, held = set(getattr(train, name)), set(getattr(test, name))
        assert not kept & held and kept | held == set(pool) and len(held) >= 5


def test_words_are_cut_the_same_way_everywhere(tokenizer):
    def pieces(text):
        return [piece for piece in (p.lstrip("Ġ") for p in tokenizer.encode(text).tokens) if piece]

    words = random.Random(1).sample(Pools.held_out().words, 300)
    for word in words:
        bare = pieces(word)
        assert pieces(" " + word) == bare
        for mark in ("\n", '"', "=", "_"):
            assert pieces(mark + word)[1:] == bare, (mark, word)


def test_special_tokens_are_the_last_addressable_ids(tokenizer):
    assert tokenizer.token_to_id("<|endoftext|>") == token_id("<|endoftext|>") == ADDRESSABLE - 33
    assert [tokenizer.token_to_id(text) for text in SPECIAL[:26]] == [token_id(text) for text in SPECIAL[:26]]
    assert tokenizer.get_vocab_size() == ADDRESSABLE - 7


def test_delta_rule_equals_the_recurrence_with_gradients():
    import torch

    torch.manual_seed(0)
    rows, tokens, keys, values, width = 2, 64, 2, 4, 16
    q, k = (torch.nn.functional.normalize(torch.randn(rows, tokens, keys, width).double(), dim=-1) for _ in range(2))
    k[:, 10:30] = k[:, 10:11]  # repeated keys are the hard case of the inverse
    v = torch.randn(rows, tokens, values, width).double()
    g, beta = -torch.rand(rows, tokens, values).double() * 0.3, torch.rand(rows, tokens, values).double()
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    S, want = torch.zeros(rows, values, width, width).double(), []
    for t in range(tokens):
        key, query = (x[:, t].repeat_interleave(values // keys, 1) for x in (k, q))
        S = S * g[:, t].exp()[..., None, None]
        error = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", key, S))
        S = S + key[..., None] * error[..., None, :]
        want.append(torch.einsum("bhk,bhkv->bhv", query, S))
    want = torch.stack(want, 1)
    got = delta_rule(*inputs, 32)
    weight = torch.randn_like(want)
    assert np.allclose(got.detach(), want.detach(), atol=1e-12)
    pairs = zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((want * weight).sum(), inputs),
        strict=True,
    )
    assert all(np.allclose(a, b, atol=1e-10) for a, b in pairs)
