"""Measure the memory of a conversion with sparse source files of the real shapes.

    python tests/tools/convert_memory.py roles --model 35b      # one real-size tensor per role, then a bit-for-bit check
    python tests/tools/convert_memory.py model --model 27b --layers 4 --encoder maxabs

`roles` makes a source file of the real size for each kind of matrix (holes, with random rows at both ends), encodes it
as `convert` does and prints the peak resident set; `--check` rows are then compared with a direct encoding. `model` runs
`convert` over a whole sparse checkpoint with a limited number of layers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import ninfer_core.convert as convert_module
from ninfer_core import quant
from ninfer_core.checkpoint import Checkpoint
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B, ModelConfig
from ninfer_core.container import plan_safetensors
from ninfer_core.convert import convert
from ninfer_core.inventory import default_recipe, inventory
from ninfer_core.sources import RowReader, Source, bind

MODELS = {"27b": QWEN36_27B, "35b": QWEN36_35B_A3B}


class Recorder:
    """Stands for a checkpoint that holds whatever is asked for, and remembers it."""

    class _All(dict):
        def __contains__(self, name: object) -> bool:
            return "experts.0.gate_proj" not in str(name)

    def __init__(self) -> None:
        self.tensors = self._All()


def source_shapes(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, Source]]:
    """All source tensors of a model, from the converter's own binding."""
    found: dict[str, tuple[int, ...]] = {}
    import ninfer_core.sources as sources

    keep = sources._check
    sources._check = lambda bound, checkpoint: None  # the tensors are about to be made from this very list
    try:
        bound = bind(config, inventory(config), Recorder())  # type: ignore[arg-type]
    finally:
        sources._check = keep
    for source in bound.values():
        found |= {part.source: part.shape for part in source.parts}
    return found, bound


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], edge_rows: int = 64) -> None:
    """A safetensors file of BF16 tensors: holes but for random rows at both ends of every tensor."""
    plan = {name: ("BF16", shape, 2 * torch.Size(shape).numel()) for name, shape in shapes.items()}
    entries, head = plan_safetensors(plan)
    generator = torch.Generator().manual_seed(1)
    with open(path, "wb") as out:
        out.write(head)
        out.truncate(max(e.start + e.nbytes for e in entries.values()))
        for entry in entries.values():
            count = min(torch.Size(entry.shape).numel(), edge_rows * entry.shape[-1])
            for at in (entry.start, entry.start + entry.nbytes - 2 * count):
                out.seek(at)
                out.write(torch.randn(count, generator=generator).bfloat16().view(torch.uint8).numpy().data)


def peak() -> float:
    """Peak resident set of this process so far, GiB; `getrusage` would count the parent's, from before `exec`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20  # type: ignore[index]


ROLES = {
    "27b": "text/token_embedding text/draft_head text/layers/0/gdn/value_z text/layers/0/mlp/gate_up "
    "text/layers/0/mlp/down text/layers/3/attention/query_key mtp/input_projection "
    "mtp/layer/attention/query_key_gate_value vision/layers/0/mlp/fc2 vision/merger/fc1",
    "35b": "text/token_embedding text/output_head text/draft_head text/layers/0/gdn/query_key_value_z "
    "text/layers/3/attention/query_key_gate_value text/layers/0/moe/routed_gate_up text/layers/0/moe/routed_down "
    "text/layers/34/moe/routed_down text/layers/0/moe/shared_gate_up mtp/layer/moe/routed_gate_up",
}


def roles(args: argparse.Namespace) -> None:
    """One process per role, so that each peak is its own."""
    if args.role:
        return one_role(args)
    for role in ROLES[args.model].split():
        command = [sys.executable, __file__, "roles", "--model", args.model, "--role", role, "--encoder", args.encoder]
        subprocess.run(command + (["--check"] if args.check else []), check=True)


def one_role(args: argparse.Namespace) -> None:
    """Encode one object of the real size from a sparse file, streamed; then compare with a direct encoding."""
    config = MODELS[args.model]
    shape, fmt = inventory(config)[args.role]
    _, bound = source_shapes(config)
    source = bound[args.role]
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = Path(folder)
        (path / "config.json").write_text("{}")
        write_sparse(path / "model.safetensors", {p.source: p.shape for p in source.parts})
        checkpoint = Checkpoint(path)
        out = path / "payload"
        with open(out, "wb") as file:
            file.truncate(quant.payload_bytes(fmt, shape))
        ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(3))[: shape[0]]
        reader = RowReader(checkpoint, source, shape[1])
        started = time.monotonic()
        for start, stop in quant.row_blocks(shape[0], shape[1], convert_module.CHUNK_WEIGHTS):
            w = reader.gather(ids[start:stop]) if source.kind == "draft" else reader.read(start, stop)
            convert_module._put(out, convert_module.encode_rows(w, fmt, shape, start, 0, args.encoder == "search"))
        seconds, streamed_peak = time.monotonic() - started, peak()
        note = ""
        if args.check:
            whole = reader.gather(ids) if source.kind == "draft" else reader.read(0, shape[0])
            direct = quant.encode(whole, fmt, search=args.encoder == "search")
            streamed = torch.from_file(str(out), shared=False, size=direct.numel(), dtype=torch.uint8)
            assert torch.equal(direct, streamed), f"{args.role}: streamed and direct encodings differ"
            note = "  equal to the direct encoding"
        print(f"{args.role:45} {fmt:11} {shape!s:16} {seconds:6.1f} s  peak {streamed_peak:5.2f} GiB{note}", flush=True)


def model(args: argparse.Namespace) -> None:
    """Convert a whole sparse checkpoint with few layers; all other shapes are real."""
    full = MODELS[args.model]
    config = replace(full, num_hidden_layers=args.layers, layer_types=full.layer_types[: args.layers])
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        src, dst = Path(folder) / "src", Path(folder) / "dst"
        src.mkdir()
        shapes, _ = source_shapes(config)
        write_sparse(src / "model.safetensors", shapes)
        (src / "config.json").write_text(json.dumps(config_json(config)))
        for name, data in frontend(config.vocab_size - 243).items():
            (src / name).write_bytes(data)
        counts = torch.arange(config.vocab_size - 243, 0, -1)
        report = convert(
            src, dst, encoder=args.encoder, counts=counts, workers=args.workers, recipe=default_recipe(full)
        )
        source_bytes = os.path.getsize(src / "model.safetensors")
        print(
            f"{args.model}, {args.layers} layers, {args.encoder}, {args.workers} workers: {source_bytes / 1e9:.1f} GB -> "
            f"{report.nbytes / 1e9:.2f} GB, {report.objects} objects in {report.seconds:.0f} s, peak {peak():.2f} GiB"
        )
        shutil.rmtree(dst)


def config_json(config: ModelConfig) -> dict:
    """A `config.json` for the converter, from a configuration."""
    keys = (
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
        "linear_num_value_heads linear_key_head_dim linear_value_head_dim vocab_size max_position_embeddings "
        "intermediate_size num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
    )
    assert config.vision is not None
    tower_keys = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size")
    tower = {key: getattr(config.vision, key) for key in tower_keys}
    return {"text_config": {key: getattr(config, key) for key in keys.split()}, "vision_config": tower}


def frontend(ids: int) -> dict[str, bytes]:
    """Frontend files with a vocabulary of `ids` entries."""
    vocab = json.dumps({"model": {"vocab": {f"w{i}": i for i in range(ids)}}}).encode()
    rest = ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json")
    return {"tokenizer.json": vocab, "chat_template.jinja": b"x"} | dict.fromkeys(rest, b"{}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("roles", "model"))
    parser.add_argument("--model", choices=tuple(MODELS), default="35b")
    parser.add_argument("--encoder", choices=quant.ENCODERS, default="maxabs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--role", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dir", default=None, help="where the sparse files go")
    args = parser.parse_args()
    roles(args) if args.what == "roles" else model(args)


if __name__ == "__main__":
    main()
