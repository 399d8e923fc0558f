"""Weights in kernel order: the same values as the artifact, in one allocation of the size told before."""

from __future__ import annotations

import pytest
import torch

from ninfer_core import packed, quant, store
from ninfer_core.artifact import Artifact, write_artifact
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B, config_from_dict
from ninfer_core.errors import GeometryError, InventoryError
from ninfer_core.footprint import ALIGN
from ninfer_core.inventory import RECIPE_DEMO, default_recipe, inventory
from ninfer_core.kernels._order import from_kernel_order, pack_codes
from ninfer_core.scripted import scripted_resources
from ninfer_core.weights import load_weights
from tests.core.tiny import tiny_artifact, tiny_config
from tests.support import same_bits


def artifact_of(tmp_path, config_json, recipe, seed=0):
    """An artifact of random weights in some formats, opened."""
    config = config_from_dict(config_json, "ninfer-demo")
    generator = torch.Generator().manual_seed(seed)

    def objects():
        for name, (shape, fmt) in inventory(config, recipe).items():
            if fmt == quant.I32:
                w = torch.randperm(config.vocab_size, generator=generator)[: shape[0]].int()
            else:
                w = torch.randn(shape, generator=generator).to(torch.float32 if fmt == quant.FP32 else torch.bfloat16)
            yield name, fmt, shape, quant.encode(w, fmt)

    path = write_artifact(tmp_path / "a", config_json, scripted_resources(), objects(), max_shard=200_000)
    return Artifact.open(path)


def parts_of(name, source):
    """The stored objects behind a fused one."""
    if name in source.tensors:
        return [name]
    prefix, last = name.rsplit("/", 1)
    parts = {
        "query_key_gate_value": ("query_key", "gate_value"),
        "query_key_value_z": ("query_key", "value_z"),
        "a_b_projection": ("a_projection", "b_projection"),
    }[last]
    return [f"{prefix}/{part}" for part in parts]


def assert_equal(weights, source):
    seen = set()
    for name, found in packed.named(weights):
        parts = parts_of(name, source)
        seen.update(parts)
        want = torch.cat([source.tensor(part) for part in parts])
        if isinstance(found, torch.Tensor):
            assert same_bits(found.to(want.dtype), want), name
            continue
        got = packed.dequantize(found)
        if name.endswith("mlp/gate_up"):
            half = found.rows // 2
            for row in (0, 31, 32, half - 1):
                assert same_bits(got[row // 32 * 64 + row % 32], want[row]), (name, row)
                assert same_bits(got[row // 32 * 64 + 32 + row % 32], want[half + row]), (name, row)
            got = got.view(-1, 2, 32, found.columns).transpose(0, 1).reshape(want.shape)
        assert same_bits(got, want), name
    assert seen == {name for name in source.tensors if not name.startswith("vision/")}


@pytest.mark.parametrize("fmt", ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"])
@pytest.mark.parametrize("moe", [True, False])
def test_values_survive_in_every_format(fmt, moe, monkeypatch, tmp_path):
    monkeypatch.setattr(packed, "JOB_CODES", 1 << 14)  # many jobs a matrix, the last one short
    recipe = RECIPE_DEMO.with_formats(**{role.replace("/", "__"): fmt for role in RECIPE_DEMO.formats})
    with artifact_of(tmp_path, tiny_config(moe), recipe) as source:
        weights = packed.load_packed(source, "cpu", threads=3, verify=True)
        assert weights.layers[0].mixer.proj.format == fmt[:2]
        assert weights.embedding.format in ("Q6", "W8")
        assert_equal(weights, source)


def test_parts_in_two_formats_become_one_matrix_in_the_wider(tmp_path):
    recipe = RECIPE_DEMO.with_formats(
        gdn__query_key=quant.Q4, gdn__value_z=quant.Q5, attention__query_key=quant.Q6, attention__gate_value=quant.W8
    )
    with artifact_of(tmp_path, tiny_config(False), recipe) as source:
        weights = packed.load_packed(source, "cpu")
        assert weights.layers[0].mixer.proj.format == "Q5" and weights.layers[3].mixer.proj.format == "W8"
        assert_equal(weights, source)


@pytest.mark.parametrize("model", ["demo", "moe", "dense"])
def test_an_artifact_on_disk_reaches_the_reference_path_unchanged(model):
    path = store.demo_path() if model == "demo" else tiny_artifact(model == "moe")
    seen = []
    with Artifact.open(path) as artifact:
        weights = packed.load_packed(artifact, "cpu", progress=lambda done, total: seen.append((done, total)))
        want = load_weights(artifact, vision=False)
        assert_equal(weights, artifact)
        found = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
        assert weights.nbytes == packed.packed_bytes(found)
        got = packed.reference_weights(weights, artifact.config)
    assert seen == sorted(seen) and len(seen) > 50 and seen[-1][0] == seen[-1][1] > 0
    assert same_bits(got.head.dense, want.head.dense) and same_bits(got.embedding, want.embedding)
    for a, b in zip((*got.layers, got.mtp.layer), (*want.layers, want.mtp.layer), strict=True):
        assert same_bits(a.mixer.proj.dense, b.mixer.proj.dense) and same_bits(a.input_gain, b.input_gain)
    assert torch.equal(got.draft_head.ids, want.draft_head.ids) and same_bits(got.mtp.proj.dense, want.mtp.proj.dense)


def test_all_tensors_share_one_allocation():
    with Artifact.open(tiny_artifact()) as artifact:
        weights = packed.load_packed(artifact, "cpu", mtp=False)
    assert weights.mtp is None and weights.draft_head is None
    storages = set()
    for _, found in packed.named(weights):
        tensors = (found,) if isinstance(found, torch.Tensor) else (found.words, found.high, found.scales)
        for tensor in tensors:
            storages.add(tensor.untyped_storage().data_ptr())
            assert tensor.storage_offset() * tensor.element_size() % ALIGN == 0 or tensor.numel() == 0
    assert len(storages) == 1


def test_the_embedding_can_lie_apart():
    with Artifact.open(tiny_artifact()) as artifact:
        found = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
        weights = packed.load_packed(artifact, "cpu", host_embedding=True)
        assert_equal(weights, artifact)
    assert weights.nbytes == packed.packed_bytes(found, embedding=False)
    table = weights.embedding.words.untyped_storage()
    assert table.data_ptr() != weights.final_norm.untyped_storage().data_ptr()
    assert weights.nbytes + table.nbytes() == packed.packed_bytes(found)
    weights.free()
    assert weights.nbytes == 0 and packed.dequantize(weights.embedding).abs().sum() > 0


def test_random_weights_keep_activations_of_order_one():
    config = config_from_dict(tiny_config(), "ninfer-demo")
    weights = packed.random_packed(config, seed=3, device="cpu")
    again = packed.random_packed(config, seed=3, device="cpu")
    other = packed.random_packed(config, seed=4, device="cpu")
    matrices = {name: m for name, m in packed.named(weights) if not isinstance(m, torch.Tensor)}
    for name, matrix in matrices.items():
        assert torch.equal(matrix.words, dict(packed.named(again))[name].words), name
        assert not torch.equal(matrix.words, dict(packed.named(other))[name].words), name
        w = packed.dequantize(matrix)
        wanted = 1.0 if name == "text/token_embedding" else matrix.columns**-0.5
        assert 0.85 * wanted < w.std() < 1.2 * wanted, name
        codes, scales = from_kernel_order(matrix)
        limits = {"Q4": (-8, 7), "Q5": (-16, 15), "Q6": (-32, 31), "W8": (-127, 127)}[matrix.format]
        assert (int(codes.min()), int(codes.max())) == limits, name
        assert abs(float(codes.float().mean())) < 0.02 * limits[1], name
        # The one code a row of the longer side makes 0.16 of it, chance over 192 rows at most four times 0.07.
        assert abs(w.sum(1).mean()) < 0.45 * wanted * matrix.columns**0.5, name
        assert bool((scales > 0).all()) and bool(scales.isfinite().all())
    ids = weights.draft_head.ids
    assert ids.dtype == torch.int32 and bool((ids[1:] > ids[:-1]).all()) and int(ids[-1]) < config.vocab_size
    for name, found in packed.named(weights):
        assert not isinstance(found, torch.Tensor) or bool(found.float().isfinite().all()), name


@pytest.mark.parametrize(("config", "low", "high"), [(QWEN36_27B, 17.1e9, 17.6e9), (QWEN36_35B_A3B, 21.9e9, 22.3e9)])
def test_bytes_of_the_published_models(config, low, high):
    """The text model of the published files; only the 27B's query and key rows widen, by one bit a weight."""
    objects = inventory(config, vision=False)
    stored = sum(quant.payload_bytes(fmt, shape) for shape, fmt in objects.values())
    size = packed.packed_bytes(objects)
    assert low < size < high
    widened = 0
    if not config.is_moe:
        widened = sum(s[0] * s[1] // 8 for n, (s, _) in objects.items() if n.endswith("query_key"))
    assert abs(size - stored - widened) < 1 << 20
    assert packed.packed_bytes(objects, mtp=False) < size
    assert default_recipe(config).format("moe/routed_down" if config.is_moe else "mlp/down") == quant.Q5


def test_shapes_and_formats_the_kernels_do_not_take_are_named(tmp_path):
    config = tiny_config(False)
    config["text_config"]["vocab_size"] = 392
    refused = pytest.raises(GeometryError, match=r"text/draft_head \[196, 128\].*multiples of 16")
    with artifact_of(tmp_path / "1", config, RECIPE_DEMO) as source, refused:
        packed.load_packed(source, "cpu")
    objects = inventory(config_from_dict(config, "ninfer-demo"), RECIPE_DEMO)
    objects["text/output_head"] = ((384, 128), quant.BF16)
    with pytest.raises(GeometryError, match="text/output_head is stored as BF16"):
        packed.packed_bytes(objects)
    with artifact_of(tmp_path / "2", tiny_config(False), RECIPE_DEMO) as source:
        source.tensors.pop("text/output_head")
        with pytest.raises(InventoryError, match="text/output_head"):
            packed.load_packed(source, "cpu")


def test_a_row_block_of_kernel_order_stands_alone():
    """Jobs and `dequantize` rely on it: rows in multiples of 16 are tiles along the first axis."""
    for fmt, group in (("Q4", 64), ("Q5", 64), ("Q6", 64), ("W8", 32)):
        codes = torch.randint(-8, 8, (64, 256), dtype=torch.int8)
        scales = torch.rand(64, 256 // group).half()
        whole, part = pack_codes(codes, scales, fmt), pack_codes(codes[16:48], scales[16:48], fmt)
        for a, b in ((whole.words, part.words), (whole.high, part.high), (whole.scales, part.scales)):
            assert torch.equal(a[1:3], b)


def test_random_layers_do_not_collapse():
    """Hidden rows of different tokens stay different through the layers, and of order 1."""
    from ninfer_core.model.decoder import Decoder
    from ninfer_core.state import State

    config = config_from_dict(tiny_config(), "ninfer-demo")
    weights = packed.reference_weights(packed.random_packed(config, seed=1, device="cpu"), config)
    decoder = Decoder(weights, config)
    state = State(config, slots=1, pages=1, max_draft=0)
    hidden = decoder.prefill(
        state, torch.arange(20) * 7 % 300, slot=0, start=0, page_table=torch.zeros(1, dtype=torch.long)
    )
    rows = torch.nn.functional.normalize(hidden.float(), dim=-1)
    assert 0.7 < hidden.std() < 1.5 and abs(hidden.mean()) < 0.3
    assert (rows @ rows.T - torch.eye(20)).abs().max() < 0.9
