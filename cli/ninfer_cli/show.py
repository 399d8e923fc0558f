"""`ninfer show`: what a model is, how it is stored, and the device memory it takes; also for models not installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ninfer_core import store
from ninfer_core.errors import ModelNotFoundError, NinferError

from .commands import FORMAT_HEADER, by_format, entry_json, format_rows
from .display import Console, size, table
from .presets import Preset, find_preset, preset_json

if TYPE_CHECKING:
    from ninfer_core.artifact import Artifact, TensorInfo
    from ninfer_core.config import ModelConfig
    from ninfer_core.footprint import Footprint

CONTEXTS = (4_096, 32_768, 131_072, 262_144)
CARDS = (24, 32, 48, 80)
"""Sizes of cards, GB of 10^9 bytes."""

DRAFTS, KV_CACHE = 3, "int8"


def show(model: str, console: Console, environ: Mapping[str, str], *, template: bool, as_json: bool) -> None:
    """Print what a model (of a preset, too) is, or its chat template alone."""
    from ninfer_core.artifact import Artifact

    preset = find_preset(model, environ)
    model = preset.model if preset else model
    try:
        entry = store.describe(model, environ)
    except ModelNotFoundError as error:
        known = next((known for known in store.KNOWN if known.name == store.canonical(model)), None)
        if template or known is None:
            raise
        facts = _facts_of_known(known)
        console.note(str(error))
    else:
        with Artifact.open(entry.path) as artifact:
            text = artifact.resource("chat_template.jinja").decode("utf-8", "replace")
            if template:
                _print_template(text, console, as_json)
                return
            facts = _facts(entry, artifact, text)
    if as_json:
        console.json({**facts, "preset": preset_json(preset) if preset else None})
    else:
        for line in [*(_preset_lines(preset) if preset else ()), *_fact_lines(facts)]:
            console.line(line)


def _preset_lines(preset: Preset) -> list[str]:
    thinking = {None: [], True: [("think", "on")], False: [("think", "off")]}[preset.thinking]
    pairs = [("preset", preset.name), *thinking, *((key, str(value)) for key, value in preset.parameters.items())]
    pairs += [("system", line) for line in (preset.system or "").splitlines()]
    return [*(f"{label:<19} {text}" for label, text in pairs), ""]


def _print_template(text: str, console: Console, as_json: bool) -> None:
    if as_json:
        console.json({"template": text})
    else:
        console.write(text if text.endswith("\n") else text + "\n")


# --- facts -----------------------------------------------------------------------------------------------------------


def _facts(entry: store.ModelEntry, artifact: Artifact, template: str) -> dict[str, Any]:
    return {
        **entry_json(entry),
        **_model_facts(artifact.config, artifact.tensors.values()),
        "capabilities": _capabilities(artifact.config, template),
        "recipe": artifact.recipe or None,
        "encoder": artifact.encoder or None,
        "files": _files(entry),
        "licence": entry.known.licence if entry.known else None,
        "checkpoint": (entry.known.checkpoint if entry.known else "") or None,
    }


def _facts_of_known(known: store.KnownModel) -> dict[str, Any]:
    """The same of a model that is not installed, from its published configuration and formats."""
    from ninfer_core.artifact import TensorInfo
    from ninfer_core.config import PUBLISHED
    from ninfer_core.formats import payload_bytes
    from ninfer_core.inventory import default_recipe, inventory

    config = PUBLISHED[known.model_id]
    objects = inventory(config)
    tensors = [TensorInfo(name, shape, fmt, payload_bytes(fmt, shape)) for name, (shape, fmt) in objects.items()]
    return {
        "name": known.name,
        "model_id": known.model_id,
        "path": None,
        "form": None,
        "size": sum(info.nbytes for info in tensors),
        "digest": None,
        "modified": None,
        **_model_facts(config, tensors),
        "capabilities": ["completion", "thinking", "tools", "drafting", "vision"],
        "recipe": default_recipe(config).name,
        "encoder": None,
        "files": [],
        "licence": known.licence,
        "checkpoint": known.checkpoint or None,
    }


def _model_facts(config: ModelConfig, tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    tensors = list(tensors)
    formats = by_format(tensors)
    weights = sum(row["weights"] for row in formats)
    return {
        "context_length": config.max_position_embeddings,
        "architecture": _architecture(config),
        "weights": weights,
        "bits_per_weight": 8 * sum(info.nbytes for info in tensors) / weights,
        "formats": formats,
        "memory": _memory(config, {info.name: (info.shape, info.format) for info in tensors}),
    }


def _capabilities(config: ModelConfig, template: str) -> list[str]:
    """What the model and its template offer."""
    found = ["completion"]
    if "<think>" in template:
        found.append("thinking")
    if "tools" in template:
        found.append("tools")
    if config.mtp_num_hidden_layers:
        found.append("drafting")
    if config.vision is not None:
        found.append("vision")
    return found


def _architecture(config: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "attention_layers": len(config.attention_layers),
        "gated_delta_layers": len(config.gdn_layers),
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "vision_tower": config.vision is not None,
    }
    if config.is_moe:
        facts |= {"experts": config.num_experts, "experts_per_token": config.num_experts_per_tok}
    return facts


def _files(entry: store.ModelEntry) -> list[dict[str, Any]]:
    """Name, bytes and sha256 of each file; a single `.ninfer` file does not store its digest, so that is None."""
    if entry.form == "ninfer":
        return [{"name": entry.path.name, "bytes": entry.size, "sha256": None}]
    listed = json.loads((entry.path / store.MANIFEST).read_bytes())["files"]
    return [{"name": name, "bytes": item["bytes"], "sha256": item["sha256"]} for name, item in listed.items()]


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(config: ModelConfig, objects: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
    """Bytes on a GPU for one sequence by context, the longest context of cards, or the `problem` with running there."""
    from ninfer_core.cards import cards
    from ninfer_core.footprint import CHUNKS, OVERHEAD, chunk_for, fused_footprint

    drafts = DRAFTS if config.mtp_num_hidden_layers else 0
    found = dict(objects)

    def of(chunk: int) -> Footprint:
        return fused_footprint(config, found, kv_cache=KV_CACHE, drafts=drafts, chunk=chunk)

    try:
        footprint = of(CHUNKS[-1])
    except NinferError as error:
        return {"problem": str(error)}
    limit = config.max_position_embeddings
    sizes = [(f"{gb} GB", gb * 10**9, False) for gb in CARDS] + [(card.name, card.total, True) for card in cards()]
    return {
        "problem": None,
        "sequences": 1,
        "kv_cache": KV_CACHE,
        "draft_tokens": drafts,
        "contexts": [
            _at_context(footprint, context, OVERHEAD)
            for context in sorted({min(context, limit) for context in (*CONTEXTS, limit)})
        ],
        "cards": [
            {
                "name": name,
                "bytes": total,
                "here": here,
                "longest": footprint.longest(total - OVERHEAD, limit),
                "chunk": chunk_for(config, of, total - OVERHEAD, limit),
            }
            for name, total, here in sizes
        ],
    }


def _at_context(footprint: Footprint, context: int, overhead: int) -> dict[str, int]:
    return {
        "context": context,
        "weights": footprint.weights,
        "kv_cache": footprint.pages(context) * footprint.page,
        "state": footprint.slot,
        "buffers": sum(footprint.workspaces(context).values()),
        "driver": overhead,
        "total": footprint.total(context) + overhead,
        "host_cache": footprint.kept(context),
    }


def _memory_lines(memory: Mapping[str, Any]) -> list[str]:
    if memory["problem"]:
        return [f"memory: {memory['problem']}"]
    header = ["CONTEXT", "WEIGHTS", "KV CACHE", "STATE", "BUFFERS", "DRIVER", "TOTAL"]
    header += [card["name"] for card in memory["cards"]]
    rows = []
    for row in memory["contexts"]:
        cells = [f"{row['context']:,}"]
        cells += [size(row[key]) for key in ("weights", "kv_cache", "state", "buffers", "driver", "total")]
        rows.append(cells + ["fits" if row["total"] <= card["bytes"] else "-" for card in memory["cards"]])
    longest = [f"{card['longest']:,}" if card["longest"] else "-" for card in memory["cards"]]
    rows.append(["longest context", "", "", "", "", "", "", *longest])
    chunks = [f"{card['chunk']:,}" if card["longest"] else "-" for card in memory["cards"]]
    rows.append(["prompt chunk", "", "", "", "", "", "", *chunks])
    drafting = f", {memory['draft_tokens']} drafts" if memory["draft_tokens"] else ""
    kept = ", ".join(f"{row['context']:,} tokens {size(row['host_cache'])}" for row in memory["contexts"])
    title = f"memory on a GPU, one sequence, {memory['kv_cache']} KV cache{drafting}:"
    kept = f"in host memory (host_cache_gb) a conversation takes: {kept}"
    return [title, *table(header, rows, right=range(1, len(header))), kept]


# --- lines -----------------------------------------------------------------------------------------------------------


def _fact_lines(facts: dict[str, Any]) -> list[str]:
    a = facts["architecture"]
    shape = f"{a['layers']} layers ({a['attention_layers']} attention, {a['gated_delta_layers']} gated delta)"
    if "experts" in a:
        shape += f", {a['experts']} experts ({a['experts_per_token']} per token)"
    shape += ", a vision tower" if a["vision_tower"] else ""
    shape += f", hidden size {a['hidden_size']:,}, vocabulary {a['vocabulary']:,}"
    pairs = [
        ("name", facts["name"]),
        ("model", facts["model_id"] + (f" (from {facts['checkpoint']})" if facts["checkpoint"] else "")),
        ("path", facts["path"] or "not installed"),
        ("size", f"{size(facts['size'])} ({facts['size']:,} bytes)"),
        ("context", f"{facts['context_length']:,} tokens"),
        ("can do", ", ".join(facts["capabilities"])),
        ("shape", shape),
        ("weights", f"{facts['weights']:,}, {facts['bits_per_weight']:.2f} bits each"),
        ("licence", facts["licence"] or "not stated"),
    ]
    if facts["recipe"]:
        encoder = f", encoder {facts['encoder']}" if facts["encoder"] else ""
        pairs.append(("made by", f"recipe {facts['recipe']}{encoder}"))
    lines = [f"{label:<10} {text}" for label, text in pairs]
    lines += ["", *_memory_lines(facts["memory"])]
    lines += ["", *table(FORMAT_HEADER, format_rows(facts), right=(1, 2, 3, 4))]
    if facts["files"]:
        rows = [(item["name"], f"{item['bytes']:,}", item["sha256"] or "not stored") for item in facts["files"]]
        lines += ["", *table(("FILE", "BYTES", "SHA256"), rows, right=(1,))]
    return lines
