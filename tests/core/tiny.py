"""Small random models as artifacts on disk, for tests of the runtime and the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from ninfer_core import quant
from ninfer_core.artifact import write_artifact
from ninfer_core.config import config_from_dict
from ninfer_core.engine import Engine
from ninfer_core.inventory import RECIPE_DEMO, inventory
from ninfer_core.runtime.pace import Pacer
from ninfer_core.scripted import scripted_resources


def tiny_config(moe: bool = True, context: int = 1024, layers: int = 4) -> dict:
    text = {
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "full_attention_interval": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 384,
        "max_position_embeddings": context,
    }
    if moe:
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        }
    else:
        text |= {"intermediate_size": 256}
    return {"model_id": "ninfer-demo", "text_config": text}


def tiny_objects(config: dict, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    model = config_from_dict(config, "ninfer-demo")
    for name, (shape, fmt) in inventory(model, RECIPE_DEMO).items():
        if fmt == quant.I32:
            w = torch.randperm(270, generator=g)[: shape[0]].sort().values.int()
        else:
            w = torch.randn(shape, generator=g)
            w = w * (0.1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5 if "head" in name else 1 / shape[-1] ** 0.5)
            if name.endswith("token_embedding"):
                w = w * 10
            w = w.to(torch.float32 if fmt == quant.FP32 else torch.bfloat16)
        yield name, fmt, shape, quant.encode(w, fmt)


@cache
def tiny_artifact(moe: bool = True, seed: int = 0, context: int = 1024, layers: int = 4) -> Path:
    """The folder of a random model whose last layer is attention; made once per process."""
    config = tiny_config(moe, context, layers)
    path = Path(mkdtemp(prefix="ninfer-tiny-")) / "tiny"
    rows = config_from_dict(config, "ninfer-demo").vocab_size // 2
    assert rows < 270
    return write_artifact(path, config, scripted_resources(), tiny_objects(config, seed))


def tiny_engine(moe: bool = True, seed: int = 0, context: int = 1024, **options) -> Engine:
    options = {"device": "cpu", "threads": 1, "prefill_chunk": 64, "adaptive_drafts": False, **options}
    return Engine.load(str(tiny_artifact(moe, seed, context)), **options)


class Wandering(Pacer):
    """Takes another depth every round: one of `depths` after the other."""

    def __init__(self, most, depths):
        super().__init__(most, enabled=False)
        self._depths, self.looks = depths, 0

    def look(self, paces):
        self.depth = self._depths[self.looks % len(self._depths)]
        self.looks += 1


class Alternating(Pacer):
    """Rests every few rounds, whatever it costs."""

    def __init__(self, on, off):
        super().__init__(3, enabled=False)
        self._on, self._off, self.resumed = on, off, 0

    def update(self, pace, tokens, sequences, drafts):
        pace.rounds += 1
        if pace.drafting and pace.rounds >= self._on:
            pace.drafting, pace.rounds = False, 0
        elif not pace.drafting and pace.rounds >= self._off:
            pace.drafting, pace.rounds = True, 0
            self.resumed += 1
            return True
        return False
