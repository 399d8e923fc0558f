"""The decoder and the vision tower against transformers, fp32, both families, random norms."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.model.decoder import Decoder
from ninfer_core.weights import from_state_dict
from tests.cases import tiny_config, tiny_dict
from tests.support import GDN_STATE, LOGITS_DENSE, LOGITS_MOE, error, poisoned_state, reference_model

KINDS = ("dense", "moe")
BOUND = {"dense": LOGITS_DENSE, "moe": LOGITS_MOE}
torch.set_num_threads(1)


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    kind = request.param
    model = reference_model(tiny_dict(kind))
    config = tiny_config(kind)
    return kind, model, Decoder(from_state_dict(model.state_dict(), config), config)


def text_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 290, (count,), generator=torch.Generator().manual_seed(3))


def pages(count: int = 8) -> torch.Tensor:
    """A page table in scrambled order, over a pool of 11."""
    return torch.tensor([7, 2, 9, 0, 5, 10, 1, 3])[:count]


def new_state(decoder, kv_dtype="fp32"):
    return poisoned_state(decoder.config, slots=3, pages=11, kv_dtype=kv_dtype, max_draft=5)


def oracle(model, tokens):
    with torch.inference_mode():
        out = model(input_ids=tokens[None], use_cache=True)
    return out.logits[0], out.past_key_values


def first(kept):
    """The tensor of a cache entry, which newer transformers hold in a dictionary."""
    return next(iter(kept.values())) if isinstance(kept, dict) else kept


def gdn_errors(state, cache, config, slot):
    """Largest error of S and of the three raw rows over all GDN layers."""
    found = []
    for i, layer in enumerate(config.gdn_layers):
        kept = cache.layers[layer]
        found.append(error(state.s[i, slot], first(kept.recurrent_states)[0]))
        found.append(error(state.conv[i, slot, :3], first(kept.conv_states)[0, :, -3:].t()))
    return max(found)


def test_prefill_logits_and_state(pair):
    kind, model, decoder = pair
    tokens = text_tokens(150)
    want, cache = oracle(model, tokens)
    state = new_state(decoder)
    got = decoder.logits(decoder.prefill(state, tokens, 1, 0, pages()))
    print(kind, "prefill", error(got, want), "state", gdn_errors(state, cache, decoder.config, 1))
    assert error(got, want) < BOUND[kind]
    assert gdn_errors(state, cache, decoder.config, 1) < GDN_STATE
