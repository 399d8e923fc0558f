"""Containers, inventories and the folder form: what opens, what is refused and with which error."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ninfer_core import errors, quant
from ninfer_core.artifact import PUBLISHED_FILES, Artifact, write_artifact
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B, config_from_dict
from ninfer_core.container import parse_directory, plan_directory, read_directory
from ninfer_core.inventory import FRONTEND, RECIPE_35B, RECIPE_DEMO, check_inventory, inventory, published_inventories
from ninfer_core.manifest import shard_plan

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "quant_vectors.json").read_text())
BOX = VECTORS["container"]
torch.set_num_threads(1)

# --- the example container and its mutations --------------------------------------------------------------------


def payload_of(key: str) -> bytes:
    if key.startswith("utf-8"):
        return key.split("'")[1].encode()
    kind, *_, name = key.split()
    if kind == "direct":
        return bytes.fromhex(next(v for v in VECTORS["direct"] if v["name"] == name)["payload_hex"])
    v = next(v for v in VECTORS["quantized"] if v["name"] == name)
    rows = [torch.tensor([int(w, 16) for w in r.split()], dtype=torch.int32).to(torch.int16) for r in v["input_bf16"]]
    return quant.encode(torch.stack(rows).view(torch.bfloat16), v["format"]).numpy().tobytes()


def example() -> bytes:
    out = bytearray(BOX["file_bytes"])
    text = BOX["directory"].encode()
    out[: 16 + len(text)] = bytes.fromhex(BOX["prefix_hex"]) + text
    for name, key in BOX["payloads"].items():
        start, stop = BOX["absolute_spans"][name]
        out[start:stop] = payload_of(key)
    return bytes(out)


def with_text(data: bytes, text: bytes) -> bytes:
    start = quant.up(16 + len(text), 4096)
    return (data[:8] + len(text).to_bytes(8, "little") + text).ljust(start, b"\0") + data[BOX["payload_offset"] :]


def point(root, pointer: str, value):
    keys = pointer.split("/")[1:]
    if not keys:
        return value
    at = root
    for key in keys[:-1]:
        at = at[int(key)] if isinstance(at, list) else at[key]
    key = int(keys[-1]) if isinstance(at, list) else keys[-1]
    if value == "__delete__":
        del at[key]
    else:
        at[key] = value
    return root


def mutate(m: dict) -> bytes:
    data = example()
    if "set" in m:
        root = json.loads(BOX["directory"])
        for pointer, value in m["set"]:
            root = point(root, pointer, copy.deepcopy(value))
        data = with_text(data, json.dumps(root, separators=(",", ":")).encode())
    if "replace_first" in m:
        data = with_text(data, BOX["directory"].replace(*m["replace_first"], 1).encode())
    for source, length, target in m.get("move", []):
        out = bytearray(data.ljust(target + length, b"\0"))
        out[target : target + length] = data[source : source + length]
        data = bytes(out)
    for at, text in m.get("patch", []):
        raw = bytes.fromhex(text)
        data = data[:at] + raw + data[at + len(raw) :]
    data += bytes.fromhex(m.get("append", ""))
    return data[: m["truncate"]] if "truncate" in m else data


def test_example_container(tmp_path):
    import hashlib

    data = example()
    assert hashlib.sha256(data).hexdigest() == BOX["file_sha256"]
    path = tmp_path / "x.ninfer"
    path.write_bytes(data)
    with Artifact.open(path, inspect=True) as artifact:
        assert artifact.model_id == "demo-model" and artifact.form == "ninfer"
        assert artifact.resource("note.txt") == b"hello"
        assert artifact.tensor("demo/scalar").item() == pytest.approx(-3.1415927)
        assert artifact.tensor("demo/q4")[0, :2].tolist() == [7, -7]
        assert artifact.verify().tensors == 4
        with pytest.raises(errors.UnknownIdentityError, match="demo-model"):
            _ = artifact.config
    with pytest.raises(errors.UnknownIdentityError, match="demo-model"):
        Artifact.open(path)
    # our own planner lays the same objects out to the same bytes
    tensors = {o["name"]: (o["shape"], o["format"]) for o in json.loads(BOX["directory"])["objects"][1:]}
    directory, prefix = plan_directory("demo-model", {"frontend/note.txt": 5}, tensors)
    assert prefix == data[: BOX["payload_offset"]] and directory.file_bytes == len(data)


@pytest.mark.parametrize(
    "m", BOX["reject_file"] + BOX["reject_directory"] + BOX["reject_text"], ids=lambda m: m["name"].replace(" ", "-")
)
def test_rejected(m, tmp_path):
    path = tmp_path / "x.ninfer"
    path.write_bytes(mutate(m))
    with pytest.raises(errors.ArtifactError) as caught:
        read_directory(path)
    assert type(caught.value).__name__ == m["error"]
    assert "\n" not in str(caught.value)


def test_all_vectors_are_used():
    assert len(BOX["reject_file"] + BOX["reject_directory"] + BOX["reject_text"]) == 54 and len(BOX["accept"]) == 4


@pytest.mark.parametrize("m", BOX["accept"], ids=lambda m: m["name"].replace(" ", "-"))
def test_accepted(m, tmp_path):
    path = tmp_path / "x.ninfer"
    path.write_bytes(mutate(m))
    with Artifact.open(path, inspect=True) as artifact:
        assert artifact.tensor("demo/q5").shape == (2, 130)
        artifact.verify()


@pytest.mark.parametrize(
    "text", [b'{"model_id":NaN,"objects":[]}', b"\xef\xbb\xbf{}", b"[" * 100000, b'{"a":' + b"1" * 5000 + b"}"]
)
def test_hostile_json(text):
    with pytest.raises(errors.DirectoryError):
        parse_directory(text, 4096, 10)


def test_foreign_files(tmp_path):
    for name, data, word in (
        ("a.gguf", b"GGUF" + b"\0" * 100, "GGUF"),
        ("a.safetensors", b"\x40\0\0\0\0\0\0\0{" + b" " * 100, "safetensors"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(errors.FramingError, match=word):
            Artifact.open(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Artifact.open(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.FramingError, match=r"manifest\.json"):
        Artifact.open(tmp_path / "folder")


# --- published inventories ---------------------------------------------------------------------------------------

RESOURCE_BYTES = [f"frontend/{name}" for name in FRONTEND]
CASES = {
    "27b": (QWEN36_27B, 0, 17_495_365_888, 176_128, (582, 96, 1, 183, 246, 3, 7), 28_452_647_664, 17_482_342_304),
    "35b-first": (
        QWEN36_35B_A3B,
        0,
        22_373_184_256,
        143_360,
        (461, 60, 1, 95, 91, 5, 170),
        36_220_389_232,
        22_360_191_904,
    ),
    "35b-second": (
        QWEN36_35B_A3B,
        1,
        22_783_246_080,
        151_552,
        (487, 60, 1, 95, 91, 5, 195),
        36_606_295_408,
        22_770_245_536,
    ),
}
OFFSETS = {
    "text/token_embedding": (12_833_536, 12_833_536),
    "text/layers/0/input_norm": (1_006_113_536, 553_177_856),
    "text/layers/3/attention/query_norm": (1_731_752_960, 2_078_505_984),
    "text/final_norm": (15_397_872_384, 20_653_987_072),
    "text/output_head": (15_397_882_624, 20_653_991_168),
    "text/draft_head": (16_391_162_624, 21_051_303_168),
    "text/draft_head_token_ids": (16_747_678_464, 21_193_909_504),
    "mtp/input_projection": (16_748_202_752, 21_194_433_792),
    "mtp/final_norm": (17_199_460_096, 22_092_364_032),
    "vision/patch_embedding": (17_199_470_336, 22_092_368_128),
    "vision/layers/26/norm2/bias": (17_447_535_104, 22_340_432_896),
    "vision/merger/norm/bias": (17_495_187_456, 22_373_038_592),
}


@pytest.mark.parametrize("case", CASES)
def test_published_layout(case):
    config, variant, file_bytes, payload_start, counts, elements, tensor_bytes = CASES[case]
    tensors = published_inventories(config.model_id)[variant]
    by_format = Counter(fmt for _, fmt in tensors.values())
    order = (quant.BF16, quant.FP32, quant.I32, quant.Q4, quant.Q5, quant.Q6, quant.W8)
    assert tuple(by_format[f] for f in order) == counts
    assert sum(torch.Size(shape).numel() for shape, _ in tensors.values()) == elements
    assert sum(quant.payload_bytes(fmt, shape) for shape, fmt in tensors.values()) == tensor_bytes
    sizes = dict(zip(RESOURCE_BYTES, RESOURCE_SIZES, strict=True))
    assert sum(sizes.values()) == 12_833_441
    directory, _ = plan_directory(config.model_id, sizes, tensors)
    assert directory.payload_start == payload_start
    assert directory.file_bytes == file_bytes and file_bytes in PUBLISHED_FILES
    offsets = {r.name: r.offset for r in directory.records}
    column = 0 if config is QWEN36_27B else 1
    assert {name: offsets[name] for name in OFFSETS} == {name: both[column] for name, both in OFFSETS.items()}
    if variant:
        assert (offsets["dflash/feature_projection"], offsets["dflash/final_norm"]) == (22_373_040_896, 22_783_090_432)


RESOURCE_SIZES = (12_807_982, 16_709, 7_764, 214, 390, 382)  # as many digits as the real ones, and their sum


def sparse_published(path: Path, model_id: str, tensors: dict, drop: str = "") -> Path:
    """A file of the published size and directory whose payload is a hole, but for the draft head's ids."""
    names = [n for n in FRONTEND if n != drop]
    sizes = {f"frontend/{n}": size for n, size in zip(FRONTEND, RESOURCE_SIZES, strict=True) if n in names}
    directory, prefix = plan_directory(model_id, sizes, {n: t for n, t in tensors.items() if n != drop})
    ids = next(r for r in directory.records if r.name == "text/draft_head_token_ids")
    with open(path, "wb") as out:
        out.write(prefix)
        out.truncate(directory.file_bytes)
        out.seek(directory.payload_start + ids.offset)
        out.write(torch.arange(131072, dtype=torch.int32).numpy().tobytes())
    return path


@pytest.mark.parametrize("case", CASES)
def test_published_files_open(case, tmp_path):
    config, variant, file_bytes, *_ = CASES[case]
    tensors = published_inventories(config.model_id)[variant]
    path = sparse_published(tmp_path / "x.ninfer", config.model_id, tensors)
    assert path.stat().st_size == file_bytes
    with Artifact.open(path) as artifact:
        assert artifact.config is config and len(artifact.tensors) == len(tensors)
        assert any(n.startswith("dflash/") for n in artifact.tensors) is bool(variant)
        name = "text/layers/3/attention/query_norm"
        assert artifact.tensor(name).shape == (256,) and len(artifact.resource("tokenizer.json")) == RESOURCE_SIZES[0]
        assert artifact.tensor("text/draft_head_token_ids").dtype == torch.int32
    path.unlink()
    drops = ["tokenizer.json", "text/final_norm"] + ["dflash/layers/5/mlp/down"] * variant
    for drop in drops:
        sparse_published(path, config.model_id, tensors, drop)
        with pytest.raises(errors.InventoryError, match=drop.replace(".", r"\.")) as caught:
            Artifact.open(path)
        assert "\n" not in str(caught.value)
        path.unlink()


GEOMETRY = [
    (quant.Q4, (262144, 2048), 0, 268_435_456, 285_212_672),
    (quant.Q5, (524288, 512), 134_217_728, 167_772_160, 176_160_768),
    (quant.Q5, (1152, 4304), 2_506_752, 3_133_440, 3_290_112),
    (quant.Q6, (248320, 5120), 635_699_200, 953_548_800, 993_280_000),
    (quant.Q6, (524288, 512), 134_217_728, 201_326_592, 209_715_200),
    (quant.Q6, (1152, 1536), 884_736, 1_327_104, 1_382_400),
    (quant.W8, (2048, 16384), 0, 33_554_432, 35_651_584),
    (quant.W8, (2048, 512), 0, 1_048_576, 1_114_112),
    (quant.Q4, (4304, 1152), 0, 2_479_104, 2_634_048),
]


@pytest.mark.parametrize(("fmt", "shape", "high", "scale", "nbytes"), GEOMETRY)
def test_published_geometry(fmt, shape, high, scale, nbytes):
    p = quant.planes(fmt, shape)
    assert (p.scale_offset, p.nbytes) == (scale, nbytes)
    assert not high or p.high_offset == high


ADDRESSES = [
    ((quant.Q4, (7168, 5120)), 6144, 100, 15_728_690, None, 19_333_122),
    ((quant.Q5, (12288, 5120)), 7043, 4001, 18_032_080, 35_965_300, 40_448_604),
    ((quant.Q6, (248320, 5120)), 248046, 5119, 635_000_319, 953_199_359, 993_236_318),
    ((quant.Q5, (1152, 4304)), 10, 4303, 23_911, 2_512_729, 3_134_934),
    ((quant.Q4, (262144, 2048)), 38405, 300, 39_326_870, None, 270_893_384),
    ((quant.Q5, (524288, 512)), 524287, 511, 134_217_727, 167_772_159, 176_160_766),
    ((quant.W8, (524288, 512)), 75781, 300, 38_800_172, None, 270_860_466),
]


@pytest.mark.parametrize(("kind", "row", "column", "base", "high", "scale"), ADDRESSES)
def test_published_addresses(kind, row, column, base, high, scale):
    p, f = quant.planes(*kind), quant.format_of(kind[0])
    b, h, s = p.spans(row, row + 1)
    assert b[0] + (column if f.bits == 8 else column // 2) == base
    if high is not None:
        assert h[0] + column * f.high_bits // 8 == high
    assert s[0] + 2 * (column // f.group) == scale


def test_inventory_errors():
    wanted = inventory(QWEN36_35B_A3B)
    for change, word in (
        (lambda d: d.pop("text/final_norm"), "missing, first 'text/final_norm'"),
        (lambda d: d.update({"text/extra": ((4,), "BF16")}), "not expected, first 'text/extra'"),
        (lambda d: d.update({"text/final_norm": ((4,), "BF16")}), r"shape \[4\] found, \[2048\] expected"),
        (lambda d: d.update({"text/output_head": ((248320, 2048), quant.W8)}), "format W8G32_F16S found"),
    ):
        found = dict(wanted)
        change(found)
        with pytest.raises(errors.InventoryError, match=word):
            check_inventory(found, wanted, exact=True)
    some = dict(published_inventories("qwen3.6-35b-a3b")[1])
    del some["dflash/layers/5/mlp/down"]
    with pytest.raises(errors.InventoryError, match="dflash/layers/5/mlp/down"):
        check_inventory(some, published_inventories("qwen3.6-35b-a3b")[1], exact=True)
    relaxed = dict(wanted) | {"text/output_head": ((248320, 2048), quant.W8)}
    check_inventory(relaxed, wanted, exact=False)
    with pytest.raises(errors.InventoryError):
        check_inventory(relaxed | {"text/final_norm": ((2048,), "FP32")}, wanted, exact=False)


def test_recipe():
    recipe = RECIPE_35B.with_formats(moe__routed_down=quant.Q6, mtp=quant.Q5)
    tensors = inventory(QWEN36_35B_A3B, recipe)
    assert (
        tensors["text/layers/0/moe/routed_down"][1] == quant.Q6 and tensors["mtp/layer/moe/routed_down"][1] == quant.Q5
    )
    with pytest.raises(errors.UnknownIdentityError, match="mlp/gate_up"):
        inventory(
            QWEN36_27B,
            RECIPE_35B.with_formats(**{"attention/query_key": "x"}, gdn__query_key=quant.Q4, gdn__value_z=quant.Q4),
        )


# --- the folder form ---------------------------------------------------------------------------------------------


def tiny_config(moe: bool, vision: bool = True) -> dict:
    text = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    text |= (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        }
        if moe
        else {"intermediate_size": 256}
    )
    tower = {"depth": 1, "hidden_size": 128, "num_heads": 2, "intermediate_size": 200, "out_hidden_size": 128}
    out = {"model_id": "ninfer-demo", "text_config": text}
    return out | {"vision_config": tower | {"num_position_embeddings": 64}} if vision else out


RESOURCES = {name: f"{{}} {name}".encode() for name in FRONTEND}


def tiny_objects(config: dict, **kw):
    g = torch.Generator().manual_seed(0)
    for name, (shape, fmt) in inventory(config_from_dict(config, "ninfer-demo"), RECIPE_DEMO, **kw).items():
        if fmt == quant.I32:
            w = torch.randperm(512, generator=g, dtype=torch.int64)[: shape[0]].int()
        else:
            w = torch.randn(shape, generator=g).to(torch.float32 if fmt == quant.FP32 else torch.bfloat16)
        yield name, fmt, shape, quant.encode(w, fmt)


def write_tiny(path: Path, moe: bool = True, vision: bool = True, **kw) -> Path:
    config = tiny_config(moe, vision)
    return write_artifact(path, config, RESOURCES, tiny_objects(config), max_shard=200_000, **kw)


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("vision", [True, False])
def test_folder_round_trip(tmp_path, moe, vision):
    path = write_tiny(tmp_path / "a", moe, vision)
    assert not (tmp_path / "a.partial").exists()
    wanted = {name: (shape, fmt, payload) for name, fmt, shape, payload in tiny_objects(tiny_config(moe, vision))}
    with Artifact.open(path) as artifact:
        assert artifact.form == "safetensors" and artifact.model_id == "ninfer-demo"
        assert artifact.config.is_moe is moe and (artifact.config.vision is not None) is vision
        assert list(artifact.tensors) == list(wanted)
        for name, (shape, fmt, payload) in wanted.items():
            info = artifact.tensors[name]
            assert (info.shape, info.format, info.nbytes) == (tuple(shape), fmt, payload.numel())
            assert torch.equal(artifact.payload(name), payload)
            assert artifact.tensor(name).shape == torch.Size(shape)
        assert artifact.resource("tokenizer.json") == RESOURCES["tokenizer.json"]
        assert dict(artifact.resources) == RESOURCES
        assert artifact.verify().tensors == len(wanted)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2 and all(s.stat().st_size < 350_000 for s in shards)
    with safe_open(shards[0], "pt") as other:  # the shards are ordinary safetensors files
        name = next(iter(other.keys()))
        assert torch.equal(other.get_tensor(name).reshape(-1).view(torch.uint8), wanted[name][2])


def test_payload_outlives_the_artifact(tmp_path):
    with Artifact.open(write_tiny(tmp_path / "a")) as artifact:
        payload = artifact.payload("text/token_embedding")
        copy_ = payload.clone()
    assert torch.equal(payload, copy_)


def edit_manifest(path: Path, change) -> None:
    root = json.loads((path / "manifest.json").read_text())
    change(root)
    (path / "manifest.json").write_text(json.dumps(root))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda m: m.update(version=2), errors.UnknownIdentityError, "version 2 found, this ninfer supports version 1"),
        (lambda m: m.update(format="else"), errors.FramingError, "ninfer-artifact"),
        (lambda m: m.update(model_id=""), errors.DirectoryError, "model_id"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), errors.DirectoryError, "plain file name"),
        (lambda m: m["objects"]["text/final_norm"].update(format="Q3"), errors.UnknownIdentityError, "Q3"),
        (lambda m: m["objects"]["text/final_norm"].update(shape=[129]), errors.GeometryError, "text/final_norm"),
        (lambda m: m["objects"]["text/final_norm"].update(shape=[0]), errors.DirectoryError, "positive"),
        (lambda m: m["objects"]["text/final_norm"].update(shard="x"), errors.DirectoryError, "not a listed file"),
        (lambda m: m["objects"].pop("text/final_norm"), errors.InventoryError, "text/final_norm"),
        (lambda m: m["files"].pop("tokenizer.json"), errors.InventoryError, r"tokenizer\.json missing"),
        (lambda m: m["files"].pop("config.json"), errors.InventoryError, r"config\.json"),
    ],
)
def test_damaged_manifest(tmp_path, change, error, word):
    path = write_tiny(tmp_path / "a")
    edit_manifest(path, change)
    with pytest.raises(error, match=word) as caught:
        Artifact.open(path)
    assert type(caught.value) is error and "\n" not in str(caught.value)


def test_damaged_files(tmp_path):
    path = write_tiny(tmp_path / "a")
    shard = sorted(path.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(errors.GeometryError, match=f"{shard.name} is cut off"):
        Artifact.open(path)
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with Artifact.open(path) as artifact, pytest.raises(errors.ContentError, match=f"{shard.name} is damaged"):
        artifact.verify()
    shard.write_bytes(data)
    (path / "tokenizer.json").unlink()
    with pytest.raises(errors.InventoryError, match=r"tokenizer\.json is missing"):
        Artifact.open(path)


def test_draft_ids_are_checked(tmp_path):
    config = tiny_config(True)
    for bad, word in (([0, 0], "repeated"), ([0, 512], "0 to 511 allowed"), ([-1, 3], "-1")):
        ids = torch.arange(256, dtype=torch.int32)
        ids[:2] = torch.tensor(bad)
        objects = [
            (n, f, s, quant.encode(ids, f) if n == "text/draft_head_token_ids" else p)
            for n, f, s, p in tiny_objects(config)
        ]
        path = write_artifact(tmp_path / "a", config, RESOURCES, objects, overwrite=True)
        with pytest.raises(errors.ContentError, match=word):
            Artifact.open(path)


def test_parts_may_be_absent(tmp_path):
    config = tiny_config(True)
    path = write_artifact(tmp_path / "a", config, RESOURCES, tiny_objects(config, mtp=False, vision=False, draft=False))
    with Artifact.open(path) as artifact:
        assert artifact.config.vision is None and artifact.config.mtp_num_hidden_layers == 0
        assert "text/draft_head" not in artifact.tensors


def test_write_refuses(tmp_path):
    config = tiny_config(True)
    path = write_tiny(tmp_path / "a")
    with pytest.raises(FileExistsError, match="already exists"):
        write_tiny(path)
    write_tiny(path, overwrite=True)
    with pytest.raises(errors.GeometryError, match="x: BF16"):
        write_artifact(tmp_path / "b", config, RESOURCES, [("x", "BF16", (4,), torch.zeros(7, dtype=torch.uint8))])
    assert not (tmp_path / "b").exists()


def test_shard_plan():
    tensors = {f"t{i}": ((100,), "BF16") for i in range(5)} | {"big": ((1000,), "BF16")}
    plan = shard_plan(tensors, 450)
    assert [len(names) for names in plan.values()] == [2, 2, 1, 1]
    assert next(iter(plan)) == "model-00001-of-00004.safetensors"
    for config in (QWEN36_27B, QWEN36_35B_A3B):
        tensors = inventory(config)
        for names in shard_plan(tensors).values():
            assert sum(quant.payload_bytes(tensors[n][1], tensors[n][0]) for n in names) <= 2 << 30
