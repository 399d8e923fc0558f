"""The batch example with Ray on the demo model, killed twice midway and resumed: no row is lost, none comes twice.

    python -m tests.tools.ray_batch [--rows 60] [--kills 2]

Needs `ninfer[ray]` and `ray[data]`; takes some minutes on two busy cores. Exits with 1 if a row is lost or repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray

from tests.tools.ray_support import Cluster, wait

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_batch.py"


def main() -> int:
    """Run, kill, resume, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--kills", type=int, default=2)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ninfer-ray-batch-"))
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say the number {row}."}) + "\n" for row in range(given.rows)))
    cluster = Cluster()
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, str(EXAMPLE), str(prompts), str(answers), "--max-tokens", "24"]

    def written() -> int:
        return answers.read_bytes().count(b"\n") if answers.exists() else 0

    try:
        for kill in range(given.kills):
            before = written()
            run = subprocess.Popen(command, env=environment)
            wait(lambda: written() > before or run.poll() is not None, "the run writes answers")
            assert run.poll() is None, f"the run ended before it could be killed, with {written()} rows"
            run.send_signal(signal.SIGKILL)
            run.wait()
            print(f"| killed ({kill + 1}) | {written()} of {given.rows} rows are there |", flush=True)
            with answers.open("ab") as file:  # as if it had been killed within a line
                file.write(b'{"row": 59, "pro')
        began = time.monotonic()
        subprocess.run(command, env=environment, check=True)
    finally:
        ray.shutdown()
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    numbers = sorted(row["row"] for row in rows)
    right = all(row["prompt"] == f"Say the number {row['row']}." and row["answer"] for row in rows)
    whole = numbers == list(range(given.rows)) and right
    print(
        f"| resumed | {len(rows)} rows, {'each once' if whole else f'WRONG: {numbers}'} | {time.monotonic() - began:.0f} s |"
    )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
