"""Answer a file of prompts with Ray Data: `python ray_batch.py PROMPTS.jsonl ANSWERS.jsonl [--engines N]`.

A line of PROMPTS is `{"prompt": "..."}`; a line of ANSWERS is `{"row": N, "prompt": "...", "answer": "..."}`, or with
"error" in place of "answer" where a prompt was refused, in the order in which they are made. Run it again after any
kind of end, also `kill -9`: rows that are in ANSWERS stay, the others follow, none comes twice.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

AT_ONCE = 8


class Answers:
    """One engine in an actor of its own; a batch of rows runs at once."""

    def __init__(self, model: str, tokens: int, options: dict[str, Any]) -> None:
        from ninfer_core import Engine

        self.tokens = tokens
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.engine = Engine.load(model, max_sequences=AT_ONCE, max_queue=AT_ONCE, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = list(self.pool.map(self.answer, batch["prompt"]))
        return {**batch, "answer": [answer for answer, _ in done], "error": [error for _, error in done]}

    def answer(self, prompt: Any) -> tuple[str, str]:
        """One row: the answer and no error, or the other way round. A failing engine ends the run instead."""
        from ninfer_core.errors import InvalidRequestError

        try:
            done = self.engine.generate(str(prompt), max_tokens=self.tokens, temperature=0.0, thinking=False)
        except InvalidRequestError as error:
            return "", str(error)
        return done.text, ""


def answered(file: BinaryIO) -> dict[int, str]:
    """The rows that are in the file with their prompts; what a killed run left of its last line is cut off."""
    file.seek(0)
    whole, rows = 0, {}
    for line in file:
        if not line.endswith(b"\n"):
            break
        whole += len(line)
        found = json.loads(line)
        rows[int(found["row"])] = found["prompt"]
    file.truncate(whole)
    file.seek(whole)
    return rows


def missing(prompts: Path, done: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """The rows still to be answered; a row's number is its line's."""
    with prompts.open(encoding="utf-8") as lines:
        for row, line in enumerate(lines):
            if not line.strip():
                continue
            prompt = json.loads(line)["prompt"]
            if row not in done:
                yield {"row": row, "prompt": prompt}
            elif done[row] != prompt:
                raise SystemExit(f"line {row + 1} of {prompts} is not what was answered: answers of another file?")


def keep(file: BinaryIO, batch: Mapping[str, Any]) -> None:
    """Write answers so that they are there after any end of this process, or of the machine."""
    rows = zip(batch["row"], batch["prompt"], batch["answer"], batch["error"], strict=True)
    for row, prompt, answer, error in rows:
        said = {"error": str(error)} if error else {"answer": str(answer)}
        line = json.dumps({"row": int(row), "prompt": str(prompt), **said}, ensure_ascii=False)
        file.write(line.encode("utf-8", "surrogatepass") + b"\n")
    file.flush()
    os.fsync(file.fileno())


def answer_with_ray(rows: list[dict[str, Any]], given: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    """Answered rows in batches, as they come."""
    import ray

    ray.init(log_to_driver=False)
    gpu = bool(ray.cluster_resources().get("GPU"))
    blocks = max(given.engines, len(rows) // AT_ONCE)
    work = ray.data.from_items(rows, override_num_blocks=min(blocks, len(rows))).map_batches(
        Answers,
        fn_constructor_args=(given.model, given.max_tokens, {} if gpu else {"device": "cpu", "threads": 1}),
        batch_size=AT_ONCE,
        compute=ray.data.ActorPoolStrategy(size=given.engines),
        num_gpus=1 if gpu else 0,
    )
    yield from work.iter_batches(batch_size=None, prefetch_batches=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    with given.answers.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two runs would answer the same rows
        except BlockingIOError:
            raise SystemExit(f"another run writes {given.answers}") from None
        done = answered(file)
        rows = list(missing(given.prompts, done))
        print(f"{len(done)} rows are answered, {len(rows)} are not", flush=True)
        if rows:
            for batch in answer_with_ray(rows, given):
                keep(file, batch)
        print("complete")


if __name__ == "__main__":
    main()
