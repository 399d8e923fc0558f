"""What each weight format, KV cache and the int8 activations cost: loss, KL, agreement and task scores.

    python -m tests.tools.quality --checkpoint FOLDER               # the demo model, from its bf16 checkpoint
    python -m tests.tools.quality --layers                          # full-size layers with random weights
    python -m tests.tools.quality --write docs/quality.md           # the page, from the results kept

Results are kept in tests/bench/results/quality.json. The reference of all differences is the bf16 checkpoint in fp32
arithmetic with an fp32 KV cache. Losses are teacher-forced over answers on held-out words; scores are answers that
the engine generates.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ninfer_core import quant
from ninfer_core.artifact import Artifact
from ninfer_core.benchmarks.results import commit_of, device_of, versions
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B, ModelConfig
from ninfer_core.demo.make import evaluate
from ninfer_core.demo.make.tasks import Generator
from ninfer_core.engine import Engine
from ninfer_core.frontend.template import ChatTemplate
from ninfer_core.inventory import RECIPE_27B, RECIPE_35B, Recipe, default_recipe, inventory
from ninfer_core.kernels import head, linear, mixer_input, moe
from ninfer_core.model.decoder import Decoder
from ninfer_core.quant import BF16, Q4, Q5, Q6, W8
from ninfer_core.state import State
from ninfer_core.weights import Weights, hf_objects, load_weights

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "quality.json"
GROUP = 32
Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class Variant:
    """One row of the table. `recipe` None: bf16 weights."""

    name: str
    recipe: Recipe | None = None
    encoder: str = "search"
    kv: str = "fp32"
    int8_activations: bool = False
    drafts: int = 3


def same(fmt: str, recipe: Recipe) -> Recipe:
    """A recipe that stores every matrix in one format."""
    return replace(recipe, name=fmt, formats=dict.fromkeys(recipe.formats, fmt), layers={})


def plain_formats(own: Recipe) -> list[Variant]:
    """The first rows of every table: bf16 weights, then each format alone."""
    return [Variant("bf16 weights"), *(Variant(fmt[:2], same(fmt, own)) for fmt in (W8, Q6, Q5, Q4))]


def variants(own: Recipe) -> list[Variant]:
    """All rows for a model whose own recipe is `own`."""
    return [
        *plain_formats(own),
        Variant("Q4, largest magnitude instead of scale search", same(Q4, own), "maxabs"),
        Variant("published 35B-A3B recipe, largest magnitude", RECIPE_35B, "maxabs"),
        Variant("published 35B-A3B recipe, scale search", RECIPE_35B),
        Variant("the demo's recipe, scale search", own),
        Variant("bf16 weights, bf16 KV cache", kv="bf16"),
        Variant("bf16 weights, INT8 KV cache", kv="int8"),
        Variant("bf16 weights, int8 activations", int8_activations=True),
        Variant("the demo's recipe, INT8 KV cache, as shipped", own, kv="int8"),
        Variant("as shipped, without drafts", own, kv="int8", drafts=0),
        Variant("as shipped, int8 activations", own, kv="int8", int8_activations=True),
    ]


class Quantized:
    """Objects of a model, their matrices encoded by a recipe and decoded again: what `load_weights` reads."""

    def __init__(self, config: ModelConfig, get: Get, names: list[str], variant: Variant) -> None:
        self.config, self.tensors = config, dict.fromkeys(names)
        recipe = variant.recipe
        self._get, self._search = get, variant.encoder == "search"
        formats = {} if recipe is None else inventory(config, recipe, vision=False)
        self._formats = {name: fmt for name, (_, fmt) in formats.items()}

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One object in fp32."""
        value = self._get(name)
        fmt = self._formats.get(name, BF16)
        if not quant.format_of(fmt).grouped:
            return value.to(torch.int64 if name.endswith("token_ids") else dtype)
        payload = quant.encode(value.float(), fmt, search=self._search)
        return quant.decode(payload, fmt, value.shape)


def int8(x: Tensor) -> Tensor:
    """Values rounded to int8 in groups of 32 with the group's largest magnitude as 127."""
    groups = nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scale).round() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


@contextmanager
def int8_activations(config: ModelConfig, enabled: bool) -> Iterator[None]:
    """Round what enters every product, as the GPU path does; router and the gates a and b keep their full rows."""
    if not enabled:
        yield
        return
    plain, row_experts, swiglu = linear.product, moe._row_experts, linear.swiglu
    gates = config.conv_channels + config.gdn_value_width

    def product(x: Tensor, weight: Any, chunk: bool) -> Tensor:
        if config.is_moe and weight.rows == config.num_experts + 1:
            return plain(x, weight, chunk)
        y = plain(int8(x), weight, chunk)
        if weight.rows == gates + 2 * config.linear_num_value_heads:
            y[:, gates:] = plain(x, weight, chunk)[:, gates:]
        return y

    with ExitStack() as stack:
        for module in (linear, mixer_input, moe, head):
            stack.enter_context(mock.patch.object(module, "product", product))
        stack.enter_context(mock.patch.object(moe, "_row_experts", lambda u, *rest: row_experts(int8(u), *rest)))
        stack.enter_context(mock.patch.object(moe, "swiglu", lambda x: int8(swiglu(x))))
        yield


def logits_of(weights: Weights, config: ModelConfig, variant: Variant, ids: list[int], start: int) -> Tensor:
    """Logits that judge the ids from `start` on."""
    pages = -(-len(ids) // 64)
    state = State(config, slots=1, pages=pages, kv_dtype=variant.kv, max_draft=0)
    with int8_activations(config, variant.int8_activations):
        decoder = Decoder(weights, config)
        hidden = decoder.prefill(state, torch.tensor(ids), 0, 0, torch.arange(pages))
        return decoder.logits(hidden[start - 1 : len(ids) - 1])


def compare(reference: list[Tensor], found: list[Tensor], targets: list[Tensor] | None) -> dict[str, float]:
    """Mean KL in nats, agreement of the first choice, relative error of the logits, and loss where targets are known."""
    kl = agree = count = nats = 0.0
    difference = size = 0.0
    for i, (a, b) in enumerate(zip(reference, found, strict=True)):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        agree += float((a.argmax(-1) == b.argmax(-1)).sum())
        difference += float((a.double() - b.double()).square().sum())
        size += float(a.double().square().sum())
        count += len(a)
        if targets is not None:
            nats += float(nn.functional.cross_entropy(b, targets[i], reduction="sum"))
    made = {"kl": kl / count, "top1": agree / count, "logit_error": (difference / size) ** 0.5}
    return made | ({"nats": nats / count} if targets is not None else {})


# --- the demo model --------------------------------------------------------------------------------------------------


def demo_objects(folder: Path) -> tuple[ModelConfig, Get, list[str]]:
    """Configuration and objects of the demo from its bf16 checkpoint; the draft head's rows as the artifact has them."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors |= {name: tensor for name, tensor in load_file(path).items() if "visual" not in name}
    with Artifact.open(evaluate.ARTIFACT) as artifact:
        config = replace(artifact.config, vision=None)
        ids = artifact.tensor("text/draft_head_token_ids").clone()
    objects = hf_objects(tensors, config)
    objects["text/draft_head_token_ids"] = ids
    objects["text/draft_head"] = objects["text/output_head"][ids.long()]
    return config, objects.__getitem__, list(objects)


def demo_own_recipe() -> Recipe:
    """The recipe the artifact was made with: the demo's, with its number of draft-head rows."""
    with Artifact.open(evaluate.ARTIFACT) as artifact:
        return replace(default_recipe(artifact.config), draft_rows=artifact.tensors["text/draft_head"].shape[0])


def sized(recipe: Recipe | None, own: Recipe) -> Recipe | None:
    """A recipe with the draft-head rows of the artifact."""
    return None if recipe is None else replace(recipe, draft_rows=own.draft_rows)


def score(weights: Weights, variant: Variant, drawn: list[tuple[str, Any]]) -> dict[str, float]:
    """Exact answers, ends and accepted drafts of the engine with these weights."""
    options: dict[str, Any] = {"draft_tokens": variant.drafts, "kv_cache": variant.kv, "prefix_cache": False}
    with ExitStack() as stack:
        stack.enter_context(mock.patch("ninfer_core.runtime.loading.load_weights", lambda *_, **__: weights))
        engine = stack.enter_context(Engine.load("demo", device="cpu", **options))
        stack.enter_context(int8_activations(engine.config, variant.int8_activations))
        found = evaluate.answers(engine, drawn)
    total = {
        key: sum(entry[key] for entry in found.values()) for key in ("count", "exact", "ended", "accepted", "offered")
    }
    made: dict[str, float] = {"tasks": total["count"], "exact": total["exact"], "ended": total["ended"]}
    return made | ({"accepted": total["accepted"] / total["offered"]} if total["offered"] else {})


def run_demo(folder: Path, items: int, samples: int, only: str, keep: Callable[[str, Any], None]) -> None:
    """All variants of the demo model."""
    config, get, names = demo_objects(folder)
    own = demo_own_recipe()
    template = ChatTemplate((evaluate.ARTIFACT.parent / "chat_template.jinja").read_text(encoding="utf-8"))
    generator = Generator(None, template, 2027, test=True)
    per = items or samples // len(evaluate.MAKERS) + 1
    counts = {kind: per * (4 if kind == "tool" else 1) for kind in evaluate.MAKERS}
    drawn = list(evaluate.draw(generator, counts))
    with Engine.load("demo", device="cpu") as engine:
        encode = engine.tokenizer.encode
    texts = []
    for _, task in drawn[:: max(1, len(drawn) // max(1, samples))][:samples]:
        prompt, answer = generator.render(task)
        head = encode(prompt)
        texts.append(([*head, *encode(answer)], len(head)))
    targets = [torch.tensor(ids[start:]) for ids, start in texts]
    reference: list[Tensor] = []
    for variant in variants(own):
        if only and only not in variant.name and (reference or not samples):
            continue
        variant = replace(variant, recipe=sized(variant.recipe, own))
        began = time.monotonic()
        weights = load_weights(Quantized(config, get, names, variant), vision=False)
        entry: dict[str, Any] = {"bits": bits(config, variant.recipe)}
        if samples:
            found = [logits_of(weights, config, variant, ids, start) for ids, start in texts]
            reference = reference or found
            entry |= compare(reference, found, targets) | {"answer_tokens": sum(map(len, targets))}
        if items:
            entry |= score(weights, variant, drawn)
        keep(variant.name, entry)
        print(f"{variant.name}: {time.monotonic() - began:.0f} s, {entry}", flush=True)


def bits(config: ModelConfig, recipe: Recipe | None) -> float:
    """Bits per weight of all text and draft-layer matrices, scales included."""
    if recipe is None:
        return 16.0
    size = count = 0
    for name, (shape, fmt) in inventory(config, recipe, vision=False).items():
        if len(shape) == 2 and quant.format_of(fmt).grouped and name != "text/draft_head":
            size += quant.payload_bytes(fmt, shape)
            count += shape[0] * shape[1]
    return round(8 * size / count, 3)


# --- full-size layers ------------------------------------------------------------------------------------------------


def layer_models() -> Mapping[str, tuple[ModelConfig, Recipe]]:
    """Layers of the published models at full width: few of them, a short vocabulary, and 16 of 256 experts."""
    one = ("linear_attention", "full_attention")
    small: dict[str, Any] = {
        "num_hidden_layers": 2, "layer_types": one, "vocab_size": 8192, "vision": None, "mtp_num_hidden_layers": 0,
    }  # fmt: skip
    return {
        "35B-A3B": (replace(QWEN36_35B_A3B, num_experts=16, **small), replace(RECIPE_35B, draft_rows=0)),
        "27B": (replace(QWEN36_27B, **small), replace(RECIPE_27B, draft_rows=0)),
    }


def random_objects(config: ModelConfig, recipe: Recipe) -> tuple[Get, list[str]]:
    """Random bf16 objects, heavier in the tails than a Gaussian (Student t, 5 degrees of freedom), made when first asked for."""
    made: dict[str, Tensor] = {}
    shapes = {name: shape for name, (shape, _) in inventory(config, recipe, vision=False).items()}

    def get(name: str) -> Tensor:
        if name not in made:
            made[name] = drawn(name)
        return made[name].float()

    def drawn(name: str) -> Tensor:
        shape = shapes[name]
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919)
        value = torch.randn(*shape, generator=generator)
        if len(shape) == 2:
            spread = torch.zeros(shape[0], 1)
            for _ in range(5):
                spread += torch.randn(shape[0], 1, generator=generator).square()
            value *= (5 / spread).sqrt() * (3 / 5) ** 0.5 * shape[1] ** -0.5
        else:
            value *= 0.1
        return value.bfloat16()

    return get, list(shapes)


def layer_variants(recipe: Recipe) -> list[Variant]:
    """All rows for layers whose published recipe is `recipe`."""
    everything = "published recipe, scale search, INT8 KV cache, int8 activations"
    return [
        *plain_formats(recipe),
        Variant("published recipe, largest magnitude", recipe, "maxabs"),
        Variant("published recipe, scale search", recipe),
        Variant("bf16 weights, INT8 KV cache", kv="int8"),
        Variant("bf16 weights, int8 activations", int8_activations=True),
        Variant(everything, recipe, kv="int8", int8_activations=True),
    ]


def run_layers(keep: Callable[[str, Any], None], only: str) -> None:
    """A DeltaNet and an attention layer of each published model, 128 random tokens."""
    for name, (config, recipe) in layer_models().items():
        first, *others = layer_variants(recipe)
        others = [variant for variant in others if only in f"{name}: {variant.name}"]
        if not others:
            continue
        get, names = random_objects(config, recipe)
        ids = torch.randint(0, config.vocab_size, (129,), generator=torch.Generator().manual_seed(5)).tolist()
        reference: list[Tensor] = []
        for variant in (first, *others):
            began = time.monotonic()
            weights = load_weights(Quantized(config, get, names, variant), vision=False)
            found = [logits_of(weights, config, variant, ids, 1)]
            del weights
            reference = reference or found
            entry = compare(reference, found, None)
            entry |= {"bits": bits(config, variant.recipe), "positions": len(found[0])}
            keep(f"{name}: {variant.name}", entry)
            print(f"{name}: {variant.name}: {time.monotonic() - began:.0f} s, {entry}", flush=True)


# --- results ---------------------------------------------------------------------------------------------------------


def demo_weights() -> str:
    """The beginning of the digest of the shipped weights, as in the model's card."""
    (file,) = evaluate.ARTIFACT.glob("model-*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def keep_in(section: str, command: str, fresh: bool, **of_what: str) -> Callable[[str, Any], None]:
    """A function that keeps one row of a section of the result file, after every row; `fresh` drops older rows first."""
    if fresh and RESULTS.exists():
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        found.pop(section, None)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def keep(name: str, entry: Any) -> None:
        found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        rounded = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in entry.items()}
        about: dict[str, Any] = {"commit": commit_of(), "versions": versions(), "device": device_of("cpu").name}
        about |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", **of_what}
        part = found.setdefault(section, {"rows": {}})
        about["commands"] = list(dict.fromkeys([*part.get("made", {}).get("commands", ()), command]))
        part["rows"].setdefault(name, {}).update(rounded)
        part["made"] = about
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    return keep


def ordered(rows: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    """Rows in the order of `names`.

    Raises:
        ValueError: a row has another name, or one is missing.
    """
    if set(rows) != set(names):
        raise ValueError(f"rows and variants differ in {sorted(set(rows) ^ set(names))}: measure again")
    return [(name, rows[name]) for name in names]


def page(found: dict[str, Any]) -> str:
    """`docs/quality.md` from the results."""
    from ninfer_core.benchmarks.report import markdown

    lines = ["# What quantisation costs", "", _INTRODUCTION]
    demo = found.get("demo")
    if demo:
        rows = []
        for name, row in ordered(demo["rows"], [variant.name for variant in variants(demo_own_recipe())]):
            drafts = f"{100 * row['accepted']:.1f} %" if "accepted" in row else ""
            tasks = f"{row['exact']} of {row['tasks']}" if "exact" in row else ""
            cells = (f"{row['bits']:.2f}", f"{row['nats']:.4f}", f"{row['kl']:.5f}", f"{100 * row['top1']:.2f} %")
            rows.append((name, *cells, tasks, drafts))
        header = ("demo model", "bits", "nats a token", "KL", "same choice", "tasks exact", "drafts accepted")
        count = next(iter(demo["rows"].values()))["answer_tokens"]
        lines += ["", "## The demo model", "", _demo_note(count), "", markdown(header, rows), "", _made(demo)]
    layers = found.get("layers")
    if layers:
        models = layer_models().items()
        names = [f"{name}: {variant.name}" for name, (_, recipe) in models for variant in layer_variants(recipe)]
        rows = []
        for name, row in ordered(layers["rows"], names):
            cells = (f"{row['bits']:.2f}", f"{row['kl']:.5f}", f"{100 * row['top1']:.1f} %")
            rows.append((name, *cells, f"{100 * row['logit_error']:.2f} %"))
        header = ("two full-size layers", "bits", "KL", "same choice", "error of the logits")
        lines += ["", "## Full-size layers", "", _LAYERS, "", markdown(header, rows), "", _made(layers)]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """Differences to the same model with bf16 weights, fp32 arithmetic and an fp32 KV cache. *KL* is the mean divergence in
nats of the next-token distribution from that of the reference, *same choice* how often the most likely token is the same.
Formats and recipes are those of `ninfer_core/quant.py` and `ninfer_core/inventory.py`. *int8 activations* rounds what enters
every product to int8 in groups of 32. The GPU kernels do so but at the mixers' projections, which keep three bits more."""

_LAYERS = """One Gated DeltaNet and one attention layer of each published model at full width (16 of the 256 experts, 8,192
vocabulary rows), random weights with heavy tails, 128 positions. Random weights have near-flat distributions and close
ties, so the first choice flips easily: this is the hard case."""


def _demo_note(tokens: int) -> str:
    return (
        f"Loss and differences over {tokens:,} answer tokens on held-out words, teacher-forced; tasks are answered by the "
        "engine, greedy. Drafts never change an answer: rows that differ in drafts alone have the same scores."
    )


def _made(section: dict[str, Any]) -> str:
    about = section["made"]
    commands = ", ".join(f"`{command}`" for command in about["commands"])
    weights = f", from the checkpoint of the weights `{about['weights']}...`" if "weights" in about else ""
    return f"Made by {commands} on {about['device']}, {about['date']}, commit {about['commit']}{weights}."


def main() -> None:
    """Measure what is asked for, keep it, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="bf16 checkpoint of the demo model")
    parser.add_argument("--layers", action="store_true", help="full-size layers with random weights")
    parser.add_argument(
        "--items", type=int, default=4, help="tasks of each kind, four times as many tool calls; 0: none"
    )
    parser.add_argument("--samples", type=int, default=60, help="answers that are teacher-forced; 0: none")
    parser.add_argument("--only", default="", help="rows whose name holds this text; the other rows stay as they are")
    parser.add_argument("--write", type=Path, help="write the page from the results kept")
    args = parser.parse_args()
    if args.checkpoint:
        command = f"python -m tests.tools.quality --checkpoint FOLDER --items {args.items} --samples {args.samples}"
        keep = keep_in("demo", command, not args.only, weights=demo_weights())
        run_demo(args.checkpoint, args.items, args.samples, args.only, keep)
    if args.layers:
        run_layers(keep_in("layers", "python -m tests.tools.quality --layers", not args.only), args.only)
    if args.write:
        args.write.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
