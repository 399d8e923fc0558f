"""The decoder and the vision tower against transformers, fp32, both families, random norms."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.errors import InvalidRequestError
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.vision import VisionTower
from ninfer_core.weights import from_state_dict
from tests.cases import tiny_config, tiny_dict
from tests.support import GDN_STATE, LOGITS_DENSE, LOGITS_MOE, VISION, error, poisoned_state, reference_model

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
    assert error(got, want) < BOUND[kind]
    assert gdn_errors(state, cache, decoder.config, 1) < GDN_STATE


def test_chunked_prefill_then_single_tokens(pair):
    kind, model, decoder = pair
    tokens = text_tokens(155)
    want, cache = oracle(model, tokens)
    state = new_state(decoder)
    parts = [decoder.prefill(state, tokens[:70], 1, 0, pages()), decoder.prefill(state, tokens[70:147], 1, 70, pages())]
    for i in range(147, 155):
        row = tokens[None, i : i + 1]
        parts.append(decoder.verify(state, row, [1], [i], [int(i > 147)], pages()[None], [0])[0])
    decoder.flush(state, [1], [1], [155])
    assert error(decoder.logits(torch.cat(parts)), want) < BOUND[kind]
    assert gdn_errors(state, cache, decoder.config, 1) < GDN_STATE


def test_image_prompt_with_three_axis_positions(pair):
    """5 text, vision start, image of 2 x 3 merged cells, vision end, 4 text, then one decoded token."""
    kind, model, decoder = pair
    config = decoder.config
    text = text_tokens(10)
    start, end = config.vision_start_token_id, config.vision_end_token_id
    tokens = torch.cat((text[:5], torch.tensor([start, *[config.image_token_id] * 6, end]), text[5:9]))
    positions = torch.tensor(
        [
            [0, 1, 2, 3, 4, 5, *[6] * 6, 9, 10, 11, 12, 13],
            [0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 7, 7, 9, 10, 11, 12, 13],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10, 11, 12, 13],
        ]
    )
    patches = torch.randn(24, 1536, generator=torch.Generator().manual_seed(5))
    kinds = (tokens == config.image_token_id).int()[None]
    with torch.inference_mode():
        out = model(
            input_ids=tokens[None],
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, 4, 6]]),
            mm_token_type_ids=kinds,
            use_cache=True,
        )
        after = model(
            input_ids=text[None, 9:],
            past_key_values=out.past_key_values,
            position_ids=torch.full((3, 1, 1), 14),
            use_cache=True,
        ).logits[0]
    features = VisionTower(decoder.weights.vision, config.vision).features(patches, [(1, 4, 6)])
    state = new_state(decoder)
    rows = torch.nonzero(tokens == config.image_token_id).flatten()
    got = decoder.prefill(state, tokens, 0, 0, pages(), positions, (rows, features))
    assert error(decoder.logits(got), out.logits[0]) < BOUND[kind]
    got = decoder.verify(state, text[None, 9:], [0], [17], [0], pages()[None], [-3])
    assert error(decoder.logits(got[0]), after) < BOUND[kind]


def test_vision_tower(pair):
    """An image and a video of two pairs in one call: slices and media do not see each other."""
    _, model, decoder = pair
    grids = [(1, 4, 6), (2, 8, 2)]
    patches = torch.randn(56, 1536, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        out = model.model.visual(patches, grid_thw=torch.tensor(grids))
        want = getattr(out, "pooler_output", out)
    got = VisionTower(decoder.weights.vision, decoder.config.vision).features(patches, grids)
    assert error(got, want) < VISION
    with pytest.raises(InvalidRequestError, match="patch rows"):
        VisionTower(decoder.weights.vision, decoder.config.vision).features(patches[:-1], grids)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_stored_kv_formats_stay_close(pair, kv_dtype):
    """Rounded keys and values change logits by about their own rounding, in prefill and in rows alike."""
    _, model, decoder = pair
    tokens = text_tokens(100)
    want, _ = oracle(model, tokens)
    state = new_state(decoder, kv_dtype)
    parts = [decoder.prefill(state, tokens[:96], 1, 0, pages())]
    parts.append(decoder.verify(state, tokens[None, 96:], [1], [96], [0], pages()[None], [0])[0])
    assert 1e-6 < error(decoder.logits(torch.cat(parts)), want) < 0.03
