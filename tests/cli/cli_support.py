"""What the command line tests share: a tiny artifact, a scripted engine behind the real program, a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("scripted_ninfer.py")
NINFER = [sys.executable, "-m", "ninfer_cli"]
SCRIPTED = [sys.executable, str(DRIVER)]

TINY_CONFIG: dict[str, Any] = {
    "model_id": "ninfer-demo",
    "text_config": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "intermediate_size": 256,
    },
}


def environment(home: Path, **changes: str) -> dict[str, str]:
    """A clean environment whose caches, state and home lie under `home`."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        "NINFER_HOST": "127.0.0.1:9",  # no server: one that happens to run here must not answer for a test
        **changes,
    }


def ended(child: Any) -> tuple[int | None, str]:
    """The exit status of a program on a terminal (none if a signal ended it) and what it printed last.

    Closing the terminal of one that has closed its output but not yet ended would kill it: a busy machine shows that.
    """
    import pexpect

    child.expect(pexpect.EOF)
    child.wait()
    child.close()
    return child.exitstatus, child.before


def write_tiny_artifact(path: Path, *, model_id: str = "ninfer-demo") -> Path:
    """A complete artifact folder of zeros: 4 layers, 512 tokens, byte-level vocabulary."""
    import torch

    from ninfer_core import quant
    from ninfer_core.artifact import write_artifact
    from ninfer_core.config import config_from_dict
    from ninfer_core.inventory import RECIPE_DEMO, inventory
    from ninfer_core.testing import scripted_resources

    objects = []
    for name, (shape, fmt) in inventory(config_from_dict(TINY_CONFIG), RECIPE_DEMO).items():
        if fmt == quant.I32:
            payload = torch.arange(shape[0], dtype=torch.int32).view(torch.uint8)
        else:
            payload = torch.zeros(quant.payload_bytes(fmt, shape), dtype=torch.uint8)
        objects.append((name, fmt, shape, payload))
    config = {**TINY_CONFIG, "model_id": model_id}
    return write_artifact(path, config, scripted_resources(), objects, recipe="demo", encoder="search")


def plain(text: str) -> str:
    """Terminal output without escape codes and carriage returns."""
    return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])", "", text).replace("\r", "")
