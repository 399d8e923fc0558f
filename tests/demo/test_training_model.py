"""The demo's training model against transformers and the engine: packed rows, an image, the rule of draft rounds."""

import pytest
import torch

from ninfer_core.config import config_from_dict
from ninfer_core.demo.make.export import checkpoint_tensors, config
from ninfer_core.demo.make.model import Model, Shape, Vision
from ninfer_core.demo.make.tower import patch_rows
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.mtp import MTP
from ninfer_core.state import State
from ninfer_core.weights import from_state_dict

SHAPE = Shape(
    vocab=6144,
    layers=4,
    experts=8,
    width=64,
    shared=64,
    vision=Vision(depth=2, hidden=64, heads=2, inner=96, positions=36),
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Model(SHAPE).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
        model.visual.merger.linear_fc2.weight.mul_(10)
    return model


@pytest.fixture(scope="module")
def reference(model):
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    reference = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**config(SHAPE))).eval().float()
    tensors = checkpoint_tensors(model, torch.float32)
    result = reference.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("mtp.")}, strict=False)
    assert not result.missing_keys and not result.unexpected_keys
    return reference


def plain(count, rows=1):
    return torch.arange(count)[None, :, None].expand(rows, count, 3)


@torch.no_grad()
def test_text_logits_equal_transformers(model, reference):
    ids = torch.randint(0, 6000, (2, 128))
    hidden, _, load = model.trunk(model.embed(ids), torch.zeros_like(ids), plain(128, 2))
    ours, theirs = model.lm_head(hidden), reference(ids).logits
    assert theirs.std() > 0.3
    assert (ours - theirs).abs().max() < 5e-5
    assert torch.allclose(load.sum(-1), torch.ones(SHAPE.layers))


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model, reference):
    ids = torch.randint(0, 6000, (1, 128))
    segment = torch.zeros_like(ids)
    segment[:, 70:] = 1
    positions = torch.cat([plain(70), plain(58)], 1)
    hidden, _, _ = model.trunk(model.embed(ids), segment, positions)
    second = reference(ids[:, 70:]).logits
    assert (model.lm_head(hidden[:, 70:]) - second).abs().max() < 5e-5


@torch.no_grad()
def test_image_features_and_positions_equal_transformers(model, reference):
    pixels = torch.randint(0, 256, (1, 3, 64, 96)).float()
    grid = torch.tensor([[1, 4, 6]])
    features = model.visual(pixels)[0]
    theirs = reference.model.get_image_features(
        patch_rows(pixels, SHAPE.vision)[0], grid, return_dict=True
    ).pooler_output
    theirs = theirs[0] if isinstance(theirs, (list, tuple)) else theirs
    assert theirs.std() > 0.05
    assert (features - theirs.reshape(features.shape)).abs().max() < 2e-5


@torch.no_grad()
def test_drafts_follow_the_rule_of_the_engine(model):
    """Depth k of row t equals the k-th chained row of a round that starts there, computed one row at a time."""
    T, steps = 64, 3
    ids = torch.randint(0, 6000, (1, T + 4))
    x, segment = model.embed(ids), torch.zeros(1, T + 4, dtype=torch.int32)
    hidden, _, _ = model.trunk(x[:, :T], segment[:, :T], plain(T))
    drafts, _ = model.drafts(hidden, x, segment, plain(T + 4), steps)
    for t in (5, 40):
        count = t + steps
        h = torch.cat([hidden[:, : t + 1], torch.zeros(1, steps - 1, SHAPE.hidden)], 1)
        cos, sin = model.angles(plain(count))
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        for k in range(steps):
            out, _, _, _ = model.mtp(x[:, 1 : 1 + count], h, segment[:, :count], cos, sin, mask)
            assert (out[0, t + k] - drafts[k][0, t]).abs().max() < 2e-5
            if k + 1 < steps:
                h[:, t + k + 1] = out[:, t + k]


@torch.no_grad()
def test_engine_computes_the_same_logits_and_drafts(model):
    """The engine's decoder and draft layer on the exported weights, in fp32, with chained rows as in a round."""
    config_ = config_from_dict(config(SHAPE), "ninfer-demo")
    weights = from_state_dict(checkpoint_tensors(model, torch.float32), config_)
    T, steps = 128, 3
    ids = torch.randint(0, 6000, (1, T + 4))
    segment, x = torch.zeros(1, T + 4, dtype=torch.int32), model.embed(ids)
    hidden, _, _ = model.trunk(x[:, :T], segment[:, :T], plain(T))
    drafts, _ = model.drafts(hidden, x, segment, plain(T + 4), steps)
    state = State(config_, slots=1, pages=3, kv_dtype="fp32", max_draft=3)
    table = torch.arange(3)
    decoder, mtp = Decoder(weights, config_), MTP(weights, config_)
    rows = decoder.prefill(state, ids[0, :T], 0, 0, table)
    assert (decoder.logits(rows) - model.lm_head(hidden[0])).abs().max() < 1e-4
    last = 100
    mtp.prefill(state, ids[0, 1 : last + 1], rows[:last], 0, table)
    h = rows[last]
    for k in range(steps):
        token = ids[:, last + 1 + k : last + 2 + k]
        h = mtp.rows(state, token, h.view(1, 1, -1), [0], [last + k], table[None], [0])[0, 0]
        assert (h - drafts[k][0, last]).abs().max() < 1e-4
