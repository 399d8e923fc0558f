"""Runs the evaluation recipe of docs/evaluation.md end to end: our server, Inspect, the local questions, the report.

    python -m venv /tmp/evaluation && /tmp/evaluation/bin/pip install inspect-ai openai
    python -m tests.tools.evaluation --python /tmp/evaluation/bin/python

Inspect's dependencies are too many for the test environment, so it runs by hand, in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ninfer_cli.bench import own_server

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "evaluation" / "local_tasks.py"


def main() -> int:
    """Print the scores; 1 if the run failed, lacks answers or scores less than `--least`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python of the environment with inspect-ai")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", default=f"{TASKS}@short_answers")
    parser.add_argument("--least", type=float, default=0.7, help="accuracy that must be reached")
    args = parser.parse_args()
    with own_server(args.model, 4, "auto", True) as url, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NINFER_BASE_URL": url, "NINFER_API_KEY": "none"}
        command = [args.python, "-m", "inspect_ai", "eval", args.task, "--model", f"openai-api/ninfer/{args.model}"]
        command += ["--max-connections", "4", "--temperature", "0", "--max-tokens", "512", "--epochs", "1"]
        command += ["--log-dir", folder, "--log-format", "json", "--display", "plain"]
        done = subprocess.run(command, env=environment, check=False)
        logs = sorted(Path(folder).glob("*.json"))
        if done.returncode or not logs:
            print(f"inspect ended with code {done.returncode} and {len(logs)} logs")
            return 1
        log = json.loads(logs[-1].read_text(encoding="utf-8"))
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    answered = log["results"]["completed_samples"]
    print(f"{log['eval']['task']}: {answered} of {log['results']['total_samples']} answered, accuracy {accuracy:.3f}")
    for sample in log["samples"]:
        ((_, score),) = sample["scores"].items()
        print(f"  {score['value']}  {sample['input']!r} -> {score['answer']!r}")
    return 0 if log["status"] == "success" and answered and accuracy >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
