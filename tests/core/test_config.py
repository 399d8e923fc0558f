"""Damaged models are refused by name: config.json, the manifest, the frontend files; and replaced ones are read anew."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from importlib import resources
from pathlib import Path

import pytest

from ninfer_core.artifact import Artifact
from ninfer_core.config import config_from_dict
from ninfer_core.engine import EngineOptions, ModelCard
from ninfer_core.errors import ArtifactError, ContextOverflowError, InvalidRequestError, InventoryError
from ninfer_core.types import Message, Request

DEMO = Path(str(resources.files("ninfer_core"))) / "demo" / "artifact"
CONFIG = json.loads((DEMO / "config.json").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 4.0),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("vocab_size", 10**12),
        ("head_dim", "x"),
        ("full_attention_interval", 0),
        ("layer_types", 5),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", "NaN"),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rope_parameters", {"rope_theta": -1}),
        ("rope_parameters", {"partial_rotary_factor": 1e300}),
        ("rope_parameters", {"mrope_section": 7}),
        ("rope_parameters", [1]),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", 10**15),
        ("num_key_value_heads", 0),
    ],
)
def test_values_of_a_wrong_type_or_size_are_named(key, value):
    begin = time.thread_time()
    with pytest.raises(InventoryError, match=next(iter(value)) if isinstance(value, dict) else key):
        config_from_dict({**CONFIG, "text_config": {**CONFIG["text_config"], key: value}})
    assert time.thread_time() - begin < 1


def test_more_experts_per_token_than_experts_are_refused():
    sizes = {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    text = {**CONFIG["text_config"], **sizes, "num_experts_per_tok": 5}
    with pytest.raises(InventoryError, match="num_experts_per_tok is 5, but num_experts is 4"):
        config_from_dict({**CONFIG, "text_config": text})


@pytest.mark.parametrize(
    "config", [[], {"text_config": []}, {**CONFIG, "vision_config": [1]}, {**CONFIG, "image_token_id": "x"}]
)
def test_sections_of_a_wrong_type_are_named(config):
    with pytest.raises(InventoryError, match="must be"):
        config_from_dict(config)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(DEMO, tmp_path / "model", copy_function=shutil.copyfile)
    return tmp_path / "model"


def put(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change(folder: Path, name: str, **fields: object) -> None:
    put(folder, name, json.dumps({**json.loads((folder / name).read_text()), **fields}).encode())


def card(folder: Path) -> ModelCard:
    return ModelCard(EngineOptions(model=str(folder)))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "config.json"]
)
@pytest.mark.parametrize("data", [b"\xff\xfe\0{", b"[]", b"{% if"])
def test_garbage_in_a_file_is_an_artifact_error(folder, name, data):
    put(folder, name, data if name != "chat_template.jinja" or data != b"[]" else b"{{")
    with pytest.raises(ArtifactError, match=name.split(".")[0]):
        card(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": "abc"},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [10**9]},
        {"eos_token_id": -5},
        {"temperature": "hot"},
        {"temperature": -3},
        {"top_k": 2.5},
        {"top_p": 7},
        {"repetition_penalty": 0},
    ],
)
def test_wrong_generation_defaults_are_named(folder, fields):
    change(folder, "generation_config.json", **fields)
    with pytest.raises(ArtifactError, match=next(iter(fields))):
        card(folder)


def test_wrong_added_tokens_are_named(folder):
    change(folder, "tokenizer_config.json", added_tokens_decoder={"x": 5})
    with pytest.raises(ArtifactError, match="added_tokens_decoder"):
        card(folder)


def test_a_tokenizer_that_panics_is_refused_at_load(folder):
    change(folder, "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"})
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        card(folder)


@pytest.mark.parametrize("what", ["shard", "version", "name", "surrogate", "nul"])
def test_a_damaged_manifest_is_an_artifact_error(folder, what):
    manifest = json.loads((folder / "manifest.json").read_text())
    if what == "shard":
        next(iter(manifest["objects"].values()))["shard"] = ["x"]
    elif what == "version":
        manifest["version"] = 1.0
    else:
        name = {"name": "a" * 300, "surrogate": "a\ud800", "nul": "a\0b"}[what]
        manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError):
        Artifact.open(folder)


def test_a_damaged_shard_header_is_an_artifact_error(folder):
    shard = next(folder.glob("*.safetensors"))
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[next(key for key in header if key != "__metadata__")]["dtype"] = ["U8"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    put(folder, shard.name, len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ArtifactError, match="damaged header entry"):
        Artifact.open(folder)


def test_an_empty_template_is_a_client_error(folder):
    put(folder, "chat_template.jinja", b"")
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        card(folder).prepare(Request((Message("user", "x"),)))


def test_a_model_replaced_at_its_path_is_read_anew(folder):
    assert card(folder).frontend is card(folder).frontend
    put(folder, "chat_template.jinja", b"new")
    assert card(folder).render("x") == "new"


def test_a_text_far_too_long_is_refused_unread():
    made = card(DEMO)
    text = "many words " * 300_000
    for request in (Request((Message("user", text),)), Request(prompt=text)):
        begin = time.thread_time()
        with pytest.raises(ContextOverflowError) as info:
            made.prepare(request, 512)
        assert time.thread_time() - begin < 2
        assert info.value.n_prompt_tokens > 512 and info.value.n_ctx == 512
    for text in ("many words " * 90, "e\u0301\u1fbe " * 99, " " * 3000, "<|im_end|>" * 50, "\U0001f600" * 40):
        exact = made.count_tokens(text)
        assert 0 < made.frontend.tokenizer.least(made.render(text)) <= exact
        assert len(made.prepare(Request((Message("user", text),)), exact).token_ids) == exact
