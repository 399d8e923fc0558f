"""Trains the vision tower alone against the shipped artifact: its text part stays as it is, bit for bit.

    python -m ninfer_core.demo.make.train_tower train --out FOLDER --seconds 100
    python -m ninfer_core.demo.make.train_tower write --out FOLDER

`train` needs nothing but this repository: the trunk is decoded from the artifact and frozen, the tower starts from the
artifact's (or from FOLDER/tower.safetensors) and learns from captions and questions drawn as it goes. The answers alone
teach it colours and places, but shapes hardly. So the cell in the middle of every shape is also asked directly which
shape it is, at first without the trunk: along the directions in which the features of the shapes differ already, since
these are what the trunk reads. `write` encodes FOLDER/tower.safetensors and replaces the tower's objects in the artifact.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import queue
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...artifact import Artifact, write_artifact
from ...inventory import RECIPE_DEMO, inventory
from ...quant import encode
from ...weights import hf_objects
from .images import RGB, SHAPES, Scene, caption_task, pixels
from .model import Model, Shape
from .packing import CELL, SIZES, Batch, Packer
from .scoring import to_device

HERE = Path(__file__).parents[1]
ARTIFACT, TEMPLATE = HERE / "artifact", HERE / "chat_template.jinja"
TOWER = "tower.safetensors"


def trunk(artifact: Artifact, shape: Shape) -> dict[str, Tensor]:
    """The decoded trunk and head under the names of the training model."""
    get = artifact.tensor
    root = "language_model."
    out = {
        f"{root}embed_tokens.weight": get("text/token_embedding"),
        f"{root}norm.weight": get("text/final_norm"),
        "lm_head.weight": get("text/output_head"),
    }
    for i in range(shape.layers):
        source, target = f"text/layers/{i}/", f"{root}layers.{i}."
        out |= {target + name: value for name, value in _layer(get, artifact.tensors, source, shape)}
    return out


def _layer(get: Any, names: Any, source: str, c: Shape) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", get(source + "input_norm")
    yield "post_attention_layernorm.weight", get(source + "post_attention_norm")
    if source + "attention/output" in names:
        yield from _attention(get, names, source + "attention/", c)
    else:
        yield from _delta(get, names, source + "gdn/", c)
    moe = source + "moe/"
    router = get(moe + "router_shared_gate")
    yield "mlp.gate.weight", router[: c.experts]
    yield "mlp.shared_expert_gate.weight", router[c.experts : c.experts + 1]
    yield "mlp.experts.gate_up_proj", get(moe + "routed_gate_up").view(c.experts, 2 * c.width, c.hidden)
    yield "mlp.experts.down_proj", get(moe + "routed_down").view(c.experts, c.hidden, c.width)
    gate, up = get(moe + "shared_gate_up").chunk(2)
    yield "mlp.shared_expert.gate_proj.weight", gate
    yield "mlp.shared_expert.up_proj.weight", up
    yield "mlp.shared_expert.down_proj.weight", get(moe + "shared_down")


def _fused(get: Any, names: Any, prefix: str, whole: str, *parts: str) -> Tensor:
    return get(prefix + whole) if prefix + whole in names else torch.cat([get(prefix + part) for part in parts])


def _attention(get: Any, names: Any, source: str, c: Shape) -> Iterator[tuple[str, Tensor]]:
    rows = _fused(get, names, source, "query_key_gate_value", "query_key", "gate_value")
    query, key, gate, value = rows.split([c.heads * c.head, c.kv_heads * c.head] * 2)
    both = torch.stack((query.view(c.heads, c.head, -1), gate.view(c.heads, c.head, -1)), 1)
    yield "self_attn.q_proj.weight", both.flatten(0, 2)
    yield "self_attn.k_proj.weight", key
    yield "self_attn.v_proj.weight", value
    yield "self_attn.o_proj.weight", get(source + "output")
    yield "self_attn.q_norm.weight", get(source + "query_norm")
    yield "self_attn.k_norm.weight", get(source + "key_norm")


def _delta(get: Any, names: Any, source: str, c: Shape) -> Iterator[tuple[str, Tensor]]:
    rows = _fused(get, names, source, "query_key_value_z", "query_key", "value_z")
    width = c.value_heads * c.linear
    yield "linear_attn.in_proj_qkv.weight", rows[:-width]
    yield "linear_attn.in_proj_z.weight", rows[-width:]
    gates = _fused(get, names, source, "a_b_projection", "a_projection", "b_projection")
    a, b = gates.split(c.value_heads)
    yield "linear_attn.in_proj_a.weight", a
    yield "linear_attn.in_proj_b.weight", b
    yield "linear_attn.conv1d.weight", get(source + "convolution").t().unsqueeze(1)
    yield "linear_attn.A_log", get(source + "a_log")
    yield "linear_attn.dt_bias", get(source + "dt_bias")
    yield "linear_attn.norm.weight", get(source + "norm")
    yield "linear_attn.out_proj.weight", get(source + "output")


def tower_names(config: Any) -> dict[str, str]:
    """Object name -> name in the training model; taken from the engine's own map, by identity of the tensors."""
    model = Model(Shape())
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("model.mtp.")}
    places = {value.data_ptr(): name for name, value in tensors.items() if ".visual." in name}
    objects = hf_objects(tensors, config)
    return {
        name: places[value.data_ptr()].removeprefix("model.visual.")
        for name, value in objects.items()
        if name.startswith("vision/")
    }


def load(device: torch.device, resume: Path | None) -> Model:
    """The model with the artifact's trunk, frozen, and a tower to train."""
    with Artifact.open(ARTIFACT) as artifact:
        model = Model(Shape())
        names = tower_names(artifact.config)
        state = trunk(artifact, model.c)
        own = model.state_dict()
        for name, target in names.items():
            state[f"visual.{target}"] = artifact.tensor(name).view_as(own[f"visual.{target}"])
    if resume and resume.exists():
        state |= {f"visual.{name}": value.float() for name, value in load_file(resume).items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and all(name.startswith("mtp.") for name in missing), (missing, unknown)
    model.requires_grad_(False)
    model.visual.requires_grad_(True)  # type: ignore[union-attr]
    return model.to(device)


def captions(seed: int, rows: int, length: int, size: tuple[int, int] | None = None) -> Iterator[Batch]:
    """An endless stream of packed captions and questions, one image size to a batch."""
    packer = Packer(None, TEMPLATE, seed, rows, length, natural=0)
    packer.generator.makers, packer.generator.weights = [caption_task], [1.0]
    waiting: list[Any] = []
    while True:
        chosen = size or packer.rng.choice(SIZES)
        waiting = []
        tokens = 0
        while tokens < rows * length:
            task = packer.generator.task(caption_task)
            document = packer.document(task, chosen)
            document.kind = task.detail
            document.weights = np.where(document.weights < 1, 0, document.weights)
            waiting.append(document)
            tokens += len(document.ids)
        yield packer.batch(waiting, chosen)


def _work(box: Any, seed: int, rows: int, length: int) -> None:
    for batch in captions(seed, rows, length):
        box.put(batch)


def jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """What real files add to drawn images: a little blur, noise and rounding to whole levels."""
    if torch.rand((), generator=generator) < 0.3:
        pixels = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    level = float(torch.rand((), generator=generator)) * 6
    return (pixels + torch.randn_like(pixels) * level).clamp_(0, 255).round_()


def random_scenes(rng: random.Random, count: int) -> list[Scene]:
    """Scenes of shapes anywhere, without words."""
    made = []
    for _ in range(count):
        ground, *colours = rng.sample(list(RGB.values()), 4)
        spots = rng.sample([(x, y) for x in (0.25, 0.5, 0.75) for y in (0.25, 0.5, 0.75)], rng.choice((1, 2, 3)))
        shapes = tuple(
            (
                rng.choice(SHAPES),
                tuple(min(255.0, max(0.0, level + rng.uniform(-14, 14))) for level in colour),
                x + rng.uniform(-0.07, 0.07),
                y + rng.uniform(-0.07, 0.07),
                rng.uniform(0.1, 0.18),
            )
            for (x, y), colour in zip(spots, colours, strict=False)
        )
        made.append(Scene(tuple(map(float, ground)), shapes))  # type: ignore[arg-type]
    return made


def probe_loss(probe: torch.nn.Linear, features: Tensor, scenes: list[Scene], size: tuple[int, int]) -> Any:
    """Cross-entropy of the shape at the cell in its middle, and the share that is right; `features [n, cells, hidden]`."""
    high, wide = size[0] // CELL, size[1] // CELL
    table = [
        (i, min(high - 1, int(y * high)) * wide + min(wide - 1, int(x * wide)), SHAPES.index(kind))
        for i, scene in enumerate(scenes)
        for kind, _, x, y, _ in scene.shapes
    ]
    if not table:
        return features.new_zeros(()), features.new_zeros(())
    image, cell, kind = torch.tensor(table, device=features.device).unbind(1)
    logits = probe(features[image, cell].float())
    return F.cross_entropy(logits, kind), (logits.argmax(-1) == kind).float().mean()


@torch.no_grad()
def make_probe(tower: Any, device: torch.device, count: int) -> torch.nn.Linear:
    """Logits along the mean features of the shapes, from `count` images; a shape's own mean against another's: 2."""
    rng, side = random.Random(0), 160
    sums, seen = torch.zeros(len(SHAPES), tower.merger.linear_fc2.out_features, device=device), [0] * len(SHAPES)
    for _ in range(0, count, 64):
        scenes = random_scenes(rng, 64)
        features = tower(pixels(scenes, side, side, device=device)).float()
        for i, scene in enumerate(scenes):
            for kind, _, x, y, _ in scene.shapes:
                cell = int(y * side / CELL) * (side // CELL) + int(x * side / CELL)
                sums[SHAPES.index(kind)] += features[i, cell]
                seen[SHAPES.index(kind)] += 1
    means = sums / torch.tensor(seen, device=device)[:, None]
    apart = means - means.mean(0)
    weight = 2 * apart / apart.square().sum(1, keepdim=True)
    probe = torch.nn.Linear(weight.shape[1], weight.shape[0]).to(device).requires_grad_(False)
    probe.weight.copy_(weight)
    probe.bias.copy_(-weight @ means.mean(0))
    return probe


def warm(model: Model, probe: torch.nn.Linear, args: argparse.Namespace) -> None:
    """Shapes without the trunk: features stay near what they were, and tell the shape besides."""
    tower: Any = model.visual
    device = next(tower.parameters()).device
    before = copy.deepcopy(tower).requires_grad_(False)
    parameters = list(tower.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    first, step = time.time(), 0
    while (spent := time.time() - first) < args.warm:
        factor = min(1.0, (step + 1) / 50) * max(0.1, 1 - spent / args.warm)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * factor
        size, scenes = rng.choice(SIZES), random_scenes(rng, 192)
        drawn = jitter(pixels(scenes, *size, device=device), generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = tower(drawn).float()
            with torch.no_grad():
                wanted = before(drawn).float()
        loss, right = probe_loss(probe, features, scenes, size)
        (loss + 0.3 * F.mse_loss(features, wanted) / wanted.square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % args.every == 0:
            print(
                f"{spent:5.0f} s warm {step} images {step * 192:,} probe {loss.item():.4f} right {right.item():.4f}",
                flush=True,
            )


def hidden_rows(model: Model, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Final hidden states of a batch whose images went through the tower, and the features `[n, cells, hidden]`."""
    features = model.visual(data["pixels"]).float()  # type: ignore[misc]
    x = model.embed(data["ids"], features.reshape(-1, model.c.hidden), data["places"])
    return model.trunk(x, data["segments"], data["positions"])[0], features


def loss_of(model: Model, data: dict[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of answer tokens, and the share of them that the model would choose."""
    weight, target = data["weights"][:, 1:], data["ids"][:, 1:]
    chosen = (weight > 0.99) & (data["segments"][:, 1:] == data["segments"][:, :-1])
    logits = F.linear(hidden[:, :-1][chosen], model.lm_head.weight).float()
    return F.cross_entropy(logits, target[chosen]), (logits.argmax(-1) == target[chosen]).float().mean()


def train(args: argparse.Namespace) -> None:
    """Train for `--seconds`, save, score."""
    begun = time.time()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    box = context.Queue(4 * args.workers)
    workers = [
        context.Process(target=_work, args=(box, args.seed * 1000 + i, args.rows, args.length), daemon=True)
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    model = load(device, args.out / TOWER if args.resume else None)
    tower: Any = model.visual
    probe = make_probe(tower, device, args.probed)
    warm(model, probe, args)
    save(tower, args.out / f"warm_{TOWER}")
    parameters = list(tower.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[Tensor] = []
    step = images = skipped = 0
    first = time.time()
    seconds = args.end - first if args.end else args.seconds
    while (spent := time.time() - first) < seconds:
        done = spent / seconds
        factor = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * max(factor, 0.005)
        try:
            batch = box.get(timeout=120)
        except queue.Empty:
            raise RuntimeError("the workers make no batches") from None
        data = to_device(batch, device)
        data["pixels"] = jitter(data["pixels"], generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden, features = hidden_rows(model, data)
            loss, right = loss_of(model, data, hidden)
        shapes, _ = probe_loss(probe, features, batch.scenes, batch.size)
        (loss + 0.05 * shapes).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        if bool(norm.isfinite()):
            optimiser.step()
        else:
            skipped += 1
        optimiser.zero_grad(set_to_none=True)
        step, images = step + 1, images + len(batch.scenes)
        losses.append(torch.stack((loss.detach(), right, shapes.detach())))
        if step % args.every == 0:
            mean = torch.stack(losses[-args.every :]).mean(0).tolist()
            print(
                f"{spent:5.0f} s step {step} images {images:,} loss {mean[0]:.4f} right {mean[1]:.4f} probe {mean[2]:.4f}",
                flush=True,
            )
    for worker in workers:
        worker.terminate()
    save(tower, args.out / TOWER)
    print(f"{images:,} images in {step} steps, {skipped} skipped, {time.time() - begun:.0f} s", flush=True)
    if args.scored:
        score(model, device, args)


def save(tower: Any, path: Path) -> None:
    """Write a tower's weights in bf16."""
    save_file({name: value.to(torch.bfloat16).cpu() for name, value in tower.state_dict().items()}, path)


@torch.no_grad()
def score(model: Model, device: torch.device, args: argparse.Namespace) -> None:
    """Exact answers by kind of question, teacher-forced, over sizes that training drew from."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for number, size in enumerate(((128, 128), (160, 288), (256, 256), (224, 160))):
        stream = captions(900_000 + number, args.rows, args.length, size)
        for _ in range(args.scored):
            batch = next(stream)
            data = to_device(batch, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                hidden, _ = hidden_rows(model, data)
                chosen = torch.cat([F.linear(h, model.lm_head.weight).argmax(-1)[None] for h in hidden]).cpu().numpy()
            for kind, row, start, end in batch.spans:
                asked[kind] += 1
                right[kind] += bool((chosen[row, start - 1 : end - 1] == batch.ids[row, start:end]).all())
    made = {kind: [right[kind], count, round(right[kind] / count, 4)] for kind, count in sorted(asked.items())}
    print(json.dumps(made), flush=True)
    (args.out / "vision_scores.json").write_text(json.dumps(made, indent=1), encoding="utf-8")


def write(args: argparse.Namespace) -> None:
    """Replace the tower's objects in the artifact by the trained tower, in the formats of the demo recipe."""
    tower = load_file(args.out / TOWER)
    objects = []
    with Artifact.open(ARTIFACT) as artifact:
        names = tower_names(artifact.config)
        rows = artifact.tensors["text/draft_head_token_ids"].shape[0]
        recipe = replace(RECIPE_DEMO, draft_rows=rows)
        for name, (shape, fmt) in inventory(artifact.config, recipe).items():
            payload = artifact.payload(name).clone()
            if name in names:
                payload = encode(tower[names[name]].reshape(shape), fmt, search=True)
            objects.append((name, fmt, shape, payload))
        config = json.loads((ARTIFACT / "config.json").read_text(encoding="utf-8"))
        resources = dict(artifact.resources)
    write_artifact(ARTIFACT, config, resources, objects, recipe="demo", encoder="search", overwrite=True)
    print(f"{ARTIFACT}: {sum(path.stat().st_size for path in ARTIFACT.iterdir()) / 1e6:.3f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("train", "write", "score"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--warm", type=float, default=12, help="seconds with the probe alone, before --seconds")
    parser.add_argument(
        "--end", type=float, default=0, help="when to stop, in seconds of the epoch, instead of --seconds"
    )
    parser.add_argument("--probed", type=int, default=4096, help="images for the directions of the shapes")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--scored", type=int, default=4, help="scored batches of each size")
    parser.add_argument("--resume", action="store_true", help="start from the tower in --out")
    args = parser.parse_args()
    if args.verb == "train":
        train(args)
    elif args.verb == "write":
        write(args)
    else:
        score(load(torch.device(args.device), args.out / TOWER), torch.device(args.device), args)


if __name__ == "__main__":
    main()
