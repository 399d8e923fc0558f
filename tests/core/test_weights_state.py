"""Loading weights from objects and checkpoints; sizes, copies and clearing of the device state."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B
from ninfer_core.errors import InvalidRequestError, InventoryError
from ninfer_core.footprint import page_bytes, slot_bytes
from ninfer_core.inventory import default_recipe, inventory
from ninfer_core.state import State
from ninfer_core.weights import from_state_dict, hf_objects, load_weights
from tests.cases import DEMO, tiny_config, tiny_dict
from tests.support import mtp_tensors, poisoned_state, reference_model, same_bits


@pytest.fixture(scope="module", params=["dense", "moe"])
def tensors(request):
    config = tiny_config(request.param)
    made = dict(reference_model(tiny_dict(request.param)).state_dict())
    return made | mtp_tensors(config, made), config


class Source:
    """Objects in the artifact's own naming, split as the dense model stores them."""

    def __init__(self, config, objects):
        self.config, self.tensors = config, objects

    def tensor(self, name, dtype=torch.float32):
        return self.tensors[name].to(dtype)


def test_checkpoint_and_artifact_naming_give_the_same_weights(tensors):
    """The objects are those of the inventory; the dense model's separate matrices fuse to the same rows."""
    made, config = tensors
    objects = hf_objects(made, config)
    want = inventory(config, default_recipe(config))
    cuts = {
        "attention/query_key_gate_value": ("query_key", "gate_value", config.query_width + config.kv_width),
        "gdn/query_key_value_z": ("query_key", "value_z", 2 * config.gdn_key_width),
        "gdn/a_b_projection": ("a_projection", "b_projection", config.linear_num_value_heads),
    }
    if not config.is_moe:
        for name in [n for n in objects if n.startswith("text/")]:
            for suffix, (first, second, row) in cuts.items():
                if name.endswith(suffix):
                    prefix = name.rsplit("/", 1)[0]
                    whole = objects.pop(name)
                    objects[f"{prefix}/{first}"], objects[f"{prefix}/{second}"] = whole[:row], whole[row:]
    drafts = {"text/draft_head", "text/draft_head_token_ids"}
    assert {n: tuple(t.shape) for n, t in objects.items()} == {n: s for n, (s, _) in want.items() if n not in drafts}
    loaded = load_weights(Source(config, objects))
    direct = from_state_dict(made, config)
    assert loaded.nbytes == direct.nbytes
    for a, b in zip(loaded.layers, direct.layers, strict=True):
        assert same_bits(a.mixer.proj.dense, b.mixer.proj.dense)
        assert same_bits(a.mixer.output.dense, b.mixer.output.dense)


def test_query_and_gate_rows_are_separated_per_head(tensors):
    made, config = tensors
    layer = config.attention_layers[0]
    raw = made[f"model.language_model.layers.{layer}.self_attn.q_proj.weight"]
    fused = hf_objects(made, config)[f"text/layers/{layer}/attention/query_key_gate_value"]
    width, keys = config.query_width, config.kv_width
    for r in (0, 255, 256, 257, width - 1):
        source = (r // 256) * 512 + r % 256
        assert torch.equal(fused[r], raw[source])
        assert torch.equal(fused[width + keys + r], raw[source + 256])


def test_parts_may_be_absent_but_not_half(tensors):
    made, config = tensors
    text = {n: t for n, t in made.items() if not n.startswith(("mtp.", "model.visual."))}
    bare = from_state_dict(text, config)
    assert bare.mtp is None and bare.vision is None and bare.draft_head is None
    plain = {n.replace("model.language_model.", "model."): t for n, t in text.items()}
    assert from_state_dict(plain, config).nbytes == bare.nbytes
    half = {n: t for n, t in made.items() if n != "mtp.norm.weight"}
    with pytest.raises(InventoryError, match=r"mtp\.norm\.weight"):
        from_state_dict(half, config)
    objects = hf_objects(made, config)
    del objects["text/final_norm"]
    with pytest.raises(InventoryError, match="text/final_norm"):
        load_weights(Source(config, objects))


def test_gains_and_decay_are_the_only_values_baked_in(tensors):
    made, config = tensors
    weights = from_state_dict(made, config)
    gdn = weights.layers[0].mixer
    root = "model.language_model.layers.0."
    heads = config.linear_num_value_heads
    assert same_bits(weights.layers[0].input_gain, 1 + made[root + "input_layernorm.weight"])
    assert same_bits(gdn.norm, made[root + "linear_attn.norm.weight"])
    assert same_bits(gdn.gate_scale[:heads], -made[root + "linear_attn.A_log"].exp())
    assert not gdn.gate_scale[heads:].any() and not gdn.gate_bias[heads:].any()
    assert same_bits(gdn.conv[3], made[root + "linear_attn.conv1d.weight"][:, 0, 3].contiguous())


def test_bytes_of_the_published_models():
    """KV of a page of 64 tokens, trunk and draft layer, by the published formulas; the recurrent state of a slot."""
    for config, int8, bf16, gdn in (
        (QWEN36_27B, 33792 + 2112, 65536 + 4096, 150_994_944),
        (QWEN36_35B_A3B, 10560 + 1056, 20480 + 2048, 62_914_560),
    ):
        assert page_bytes(config, "int8") == 64 * int8
        assert page_bytes(config, "bf16") == 64 * bf16
        layers, heads = len(config.gdn_layers), config.linear_num_value_heads
        window = 4 * (config.gdn_key_width + config.gdn_value_width + heads) + 7 * config.conv_channels
        assert slot_bytes(config, 3) == gdn + layers * window * 4


def test_copy_clear_and_account():
    state = poisoned_state(DEMO, slots=3, pages=2, kv_dtype="int8", max_draft=2)
    assert state.nbytes == 2 * state.kv_bytes_per_page + 3 * state.bytes_per_slot
    state.clear_slot(0)
    assert not state.s[:, 0].any() and not state.conv[:, 0].any() and not state.window_e[:, 0].any()
    assert state.s[:, 1].isnan().all()
    state.s[:, 2] = 3.0
    state.copy_slot(2, 1)
    assert (state.s[:, 1] == 3).all() and not state.s[:, 0].any()
    state.clear_pages([1])
    assert not state.kv_codes[:, :, :, 1].any() and (state.kv_codes[:, :, :, 0] == 77).all()


def test_state_limits():
    with pytest.raises(InvalidRequestError, match="kv_dtype"):
        State(DEMO, slots=1, pages=1, kv_dtype="fp8")
