"""Trains the demo model within a time budget, writing checkpoints as it goes, and scores it at the end.

`python -m ninfer_core.demo.make.train --folder DATA --out OUT --seconds 400` expects in DATA: `text/` (of
`fetch_corpus`), `tok/` (of `tokenizer`), `corpus.xz` and `held.xz` (of `--prepare`). A run stops at its budget, so the
number of steps depends on the machine; `--resume FOLDER` continues from a written checkpoint, `--tower` takes the vision
tower of the shipped artifact instead of the checkpoint's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import scoring, train_tower
from .export import load_checkpoint, write_shards
from .images import RGB, SHAPES
from .model import Model, Shape
from .optimiser import Optimiser
from .packing import Packer, Workers, load_tokens, natural_tokens, save_tokens
from .rounding import Rounding
from .tokenizer import token_id

TEMPLATE = Path(__file__).parents[1] / "chat_template.jinja"
AHEAD = 4
STARTED = time.time()


def head_loss(hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of selected rows and whether each row's argmax is the target."""
    logits = F.linear(hidden, weight).float()
    nats = F.cross_entropy(logits, target, reduction="none")
    return (nats * scale).sum(), logits.detach().argmax(-1) == target


class Core(torch.nn.Module):
    """Everything between the input embeddings and the loss; all shapes are fixed."""

    def __init__(self, model: Model, head: Any) -> None:
        super().__init__()
        self.layers, self.norm = model.language_model.layers, model.language_model.norm
        self.lm_head, self.mtp = model.lm_head, model.mtp
        self.plain = [model, head]

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, segment: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """The loss, then what the log shows."""
        model, head = self.plain
        T = ids.shape[1] - AHEAD
        hidden, balance, load = model.trunk(x[:, :T], segment[:, :T], positions[:, :T])
        some = max(1, ids.shape[0] // 4)

        def part(h: Tensor, ahead: int, share: float) -> tuple[Tensor, Tensor]:
            rows = h.shape[0]
            target = ids[:rows, ahead : ahead + T]
            same = segment[:rows, :T] == segment[:rows, ahead : ahead + T]
            weight = weights[:rows, ahead : ahead + T] * same
            # Answers and text first, prompt tokens at random.
            chosen = (
                (weight + 0.05 * torch.rand_like(weight)).flatten().topk(int(rows * T * share), sorted=False).indices
            )
            scale = weight.flatten()[chosen]
            loss, right = head(
                h.reshape(-1, h.shape[-1])[chosen],
                model.lm_head.weight,
                target.flatten()[chosen],
                scale / scale.sum().clamp(min=1),
            )
            answers = scale > 0.99
            return loss, (right & answers).sum() / answers.sum().clamp(min=1)

        main, accuracy = part(hidden, 1, 0.4)
        drafts, extra = model.drafts(hidden[:some], x[:some], segment[:some], positions[:some])
        parts = [part(h, 2 + k, 0.4) for k, h in enumerate(drafts)]
        mtp = torch.stack([p[0] for p in parts]).mean()
        loss = main + 0.3 * mtp + 0.01 * (balance + 0.3 * extra)
        shown = (main, mtp, accuracy, *(p[1] for p in parts), load.min(), load.max())
        return (loss, *(value.detach() for value in shown))


NAMES = ("main", "mtp", "answers", "draft1", "draft2", "draft3", "low", "high", "skipped", "shapes")


class Probe(torch.nn.Module):
    """Asks the cell in the middle of every drawn shape directly for its shape and colour: answers alone teach shapes slowly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape, self.colour = torch.nn.Linear(width, len(SHAPES)), torch.nn.Linear(width, len(RGB))

    def forward(self, features: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the share of shapes that is right. features [cells, width]; marks [n, 3] (cell, shape, colour)."""
        cells = features[marks[:, 0]].float()
        shape, colour = self.shape(cells), self.colour(cells)
        loss = F.cross_entropy(shape, marks[:, 1]) + F.cross_entropy(colour, marks[:, 2])
        return loss, (shape.detach().argmax(-1) == marks[:, 1]).float().mean()


class Trainer:
    """One training step over a packed batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = Model(Shape()).to(self.device)
        if args.resume:
            load_checkpoint(self.model, args.resume)
        if args.tower:
            tower = train_tower.load(torch.device("cpu"), None).visual
            self.model.visual.load_state_dict(tower.state_dict())  # type: ignore[union-attr]
        self.probe = Probe(self.model.c.hidden).to(self.device)
        self.probe_adam = torch.optim.AdamW(self.probe.parameters(), lr=2e-3)
        self.rounding = Rounding(self.model)
        self.jitter = torch.Generator().manual_seed(args.seed)
        self.seen = torch.zeros((), device=self.device)
        self.optimiser = Optimiser(self.model)
        self.skipped = torch.zeros((), dtype=torch.long, device=self.device)
        head = head_loss
        if args.compile:
            for layer in self.model.language_model.layers:
                layer.compile(dynamic=False)
            self.model.mtp.compile(dynamic=False)
            head = torch.compile(head_loss, dynamic=False)
        self.core: Any = Core(self.model, head)

    def autocast(self) -> Any:
        """bf16 products on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)

    def step(self, data: dict[str, Any], factor: float, rounded: bool = False) -> tuple[Tensor, ...]:
        """Forward, backward, clip, update; at `rounded` the gradients are those of the weights as the artifact holds them."""
        if data["pixels"] is not None:
            data["pixels"] = train_tower.jitter(data["pixels"], self.jitter)
        with self.rounding.applied() if rounded else contextlib.nullcontext():
            with self.autocast():
                features = self.model.visual(data["pixels"]).float() if data["pixels"] is not None else None  # type: ignore[misc]
                x = scoring.embeddings(self.model, data, features)
                loss, *shown = self.core(x, data["ids"], data["weights"], data["segments"], data["positions"])
            if len(data["marks"]) and features is not None:
                asked, self.seen = self.probe(features.flatten(0, 1), data["marks"])
                loss = loss + 0.05 * asked
            loss.backward()
        self.clip()
        self.optimiser.step(factor)
        self.probe_adam.step()
        self.probe_adam.zero_grad(set_to_none=True)
        return (*shown, self.skipped, self.seen)

    @torch.no_grad()
    def clip(self) -> None:
        """Clip the gradient to norm 1; a gradient that is not finite becomes zero. Never waits for the device."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        fine = norm.isfinite()
        self.skipped += ~fine
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_mul_(grads, torch.where(fine, (1 / (norm + 1e-6)).clamp(max=1), torch.zeros_like(norm)))


def rate(done: float, step: int) -> float:
    """Warm-up over 40 steps, constant, then linear to zero over the last 65 % of the time."""
    return min(1.0, (step + 1) / 40) * min(1.0, max(0.005, (1 - done) / 0.65))


def loader(args: argparse.Namespace, device: torch.device) -> tuple[queue.Queue[dict[str, Any]], Workers]:
    """Batches on the device, made ahead by worker processes and one copying thread."""
    workers = Workers(args.workers, args.folder, TEMPLATE, args.seed, args.rows, args.length + AHEAD, 0.2)
    ready: queue.Queue[dict[str, Any]] = queue.Queue(4)

    def fill() -> None:
        while True:
            ready.put(scoring.to_device(workers.next(), device))

    threading.Thread(target=fill, daemon=True).start()
    return ready, workers


def run(args: argparse.Namespace) -> Trainer:
    """Train until the budget is used."""
    trainer = Trainer(args)
    log = (args.out / "train.log").open("a", encoding="utf-8")

    def say(text: str) -> None:
        print(text, flush=True)
        log.write(text + "\n")
        log.flush()

    count = sum(p.numel() for p in trainer.model.parameters())
    say(f"parameters {count / 1e6:.2f} M, rows {args.rows} x {args.length}")
    begun = time.time()
    ready, workers = loader(args, trainer.device)
    first, saved, step, seen = 0.0, time.time(), 0, 0
    while True:
        data = ready.get(timeout=120)
        now = time.time()
        first = first or now
        budget = args.seconds if not args.until else args.until - (first - STARTED)
        if now - first >= budget or (args.steps and step >= args.steps):
            break
        done = (now - first) / budget
        shown = trainer.step(data, args.peak * rate(done, step), done > args.rounded)
        step += 1
        seen += args.rows * args.length
        if step % args.every == 0:
            values = dict(zip(NAMES, (float(value) for value in shown), strict=True))
            spent = time.time() - first
            text = " ".join(f"{key} {value:.3f}" for key, value in values.items())
            say(f"{spent:5.0f} s step {step} {seen / 1e6:.1f} M tokens {seen / max(spent, 1e-9) / 1e6:.3f} M/s {text}")
            if values["main"] != values["main"]:
                raise RuntimeError("the loss is not a number")
        if time.time() - saved > 60:
            write_shards(trainer.model, args.out)
            saved = time.time()
    workers.close()
    write_shards(trainer.model, args.out)
    say(f"trained {seen / 1e6:.1f} M tokens in {step} steps, {time.time() - begun:.0f} s")
    return trainer


def finish(args: argparse.Namespace, trainer: Trainer) -> None:
    """Score the bf16 weights on held-out words and write `scores.json`."""
    # A fresh copy: neither compiled nor captured.
    model = Model(Shape()).to(trainer.device).eval()
    load_checkpoint(model, args.out)
    tokenizer = Tokenizer.from_file(str(args.folder / "tok" / "tokenizer.json"))
    packer = Packer(args.folder, TEMPLATE, 99, args.rows, args.length + AHEAD, test=True, natural=0)
    began = time.time()
    with torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.device.type == "cuda"):
        out: dict[str, Any] = {"answers": scored(args, model, packer, trainer.device)}
        text = scoring.table(out["answers"])
        out["bits_per_byte"], out["bytes"] = scoring.bits_per_byte(
            model, load_tokens(args.folder / "held.xz"), tokenizer, trainer.device, args.rows, args.length
        )
        print(text, flush=True)
        (args.out / "scores.json").write_text(json.dumps(out, indent=1), encoding="utf-8")
        if args.free:
            out["free"] = free_running(args, model, packer, trainer.device)
    print(
        f"bits per byte {out['bits_per_byte']:.3f} over {out['bytes']} bytes",
        out.get("free"),
        f"{time.time() - began:.0f} s",
        sep="\n",
        flush=True,
    )
    (args.out / "scores.json").write_text(json.dumps(out, indent=1), encoding="utf-8")
    with (args.out / "train.log").open("a", encoding="utf-8") as log:
        log.write(text + f"\nbits per byte {out['bits_per_byte']:.4f}\nfree {out.get('free')}\n")


def scored(args: argparse.Namespace, model: Model, packer: Packer, device: torch.device) -> dict[str, Any]:
    """Answers of every kind; sums with a think block, images of several sizes."""
    result: dict[str, Any] = {}
    sight = ("caption", "video")
    plain = [kind for kind in scoring.MAKERS if kind not in (*sight, "sum99", "sum999")]
    counts = dict.fromkeys(plain, args.items) | {"tool": 3 * args.items}
    result |= scoring.score(model, packer, counts, device)
    result |= scoring.score(model, packer, {"sum99": args.items, "sum999": args.items}, device, thinking=True)
    for size in ((128, 128), (160, 288), (256, 256), (224, 160)):
        counts = {"caption": 4 * args.items, "video": max(1, args.items // 4)}
        for kind, entry in scoring.score(model, packer, counts, device, size=size).items():
            kept = result.setdefault(kind, entry)
            if kept is not entry:
                for key, value in entry.items():
                    kept[key] = (
                        [a + b for a, b in zip(kept[key], value, strict=True)]
                        if isinstance(value, list)
                        else kept[key] + value
                    )
    return result


def free_running(args: argparse.Namespace, model: Model, packer: Packer, device: torch.device) -> dict[str, int]:
    """How many greedy answers of at most 256 tokens end with the end mark, and how many are exact."""
    wanted: list[list[int]] = []
    prompts: list[list[int]] = []
    while len(prompts) < args.free:
        task = packer.generator.task()
        prompt, answer = packer.generator.render(task)
        ids = packer.encode(prompt)
        if not task.images and len(ids) + 256 <= args.length:
            prompts.append(ids)
            wanted.append(packer.encode(answer) if task.fixed else [])
    stop = token_id("<|im_end|>")
    answers = scoring.generate(model, prompts, stop, device, args.rows, args.length)
    ended = sum(answer[-1] == stop for answer in answers)
    exact = sum(answer == want for answer, want in zip(answers, wanted, strict=True))
    for asked, said in list(zip(prompts, answers, strict=True))[:8]:
        print(
            repr(packer.tokenizer.decode(asked[-40:], skip_special_tokens=False)),
            "->",
            repr(packer.tokenizer.decode(said, skip_special_tokens=False)),
        )
    return {"prompts": len(answers), "ended": ended, "exact": exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument(
        "--until", type=float, default=0, help="seconds after the start at which training ends, instead of --seconds"
    )
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: by time only)")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--items", type=int, default=200, help="scored examples of each kind")
    parser.add_argument("--free", type=int, default=96, help="free-running answers")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--tower", action="store_true", help="start from the shipped artifact's vision tower")
    parser.add_argument("--rounded", type=float, default=0.65, help="share of the time after which weights are rounded")
    parser.add_argument("--prepare", action="store_true", help="only tokenise the corpus into the folder")
    args = parser.parse_args()
    if args.prepare:
        train, held = natural_tokens(
            args.folder / "text", Tokenizer.from_file(str(args.folder / "tok" / "tokenizer.json"))
        )
        save_tokens(args.folder / "corpus.xz", train)
        save_tokens(args.folder / "held.xz", held)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    trainer = run(args)
    finish(args, trainer)


if __name__ == "__main__":
    main()
