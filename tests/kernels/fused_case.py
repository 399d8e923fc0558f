"""A whole tiny model through the fused kernels under Triton's interpreter, against the torch path: `moe` or `dense`.

Minutes of work. Prints one JSON line of relative errors. Run with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from ninfer_core.config import ModelConfig, config_from_dict
from ninfer_core.inventory import RECIPE_DEMO
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.fused import FusedDecoder, FusedMTP
from ninfer_core.model.mtp import MTP
from ninfer_core.packed import random_packed, reference_weights
from ninfer_core.state import FusedState, State
from tests.kernels.interpreter import quicken


def config_of(kind: str) -> ModelConfig:
    """One DeltaNet and one attention layer."""
    text = {
        "hidden_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 384, "max_position_embeddings": 1024,
    }  # fmt: skip
    if kind == "moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        text |= {"shared_expert_intermediate_size": 128}
    else:
        text |= {"intermediate_size": 256}
    return config_from_dict({"text_config": text}, "ninfer-demo")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def main(kind: str) -> None:
    """Prompt rows, a window behind them, its logits, the draft layer."""
    quicken()
    config = config_of(kind)
    weights = random_packed(config, seed=1, device="cpu", recipe=RECIPE_DEMO)
    other = reference_weights(weights, config)
    decoder, reference = FusedDecoder(weights, config, context=256), Decoder(other, config)
    mtp, reference_mtp = FusedMTP(decoder), MTP(other, config)
    state = FusedState(config, slots=2, pages=3, device="cpu")
    expected = State(config, slots=2, pages=3)
    tokens = torch.randint(0, 384, (5,), generator=torch.Generator().manual_seed(0))
    table, place = torch.tensor([[2, 0]]), ([1], [3], [0])
    found = {}
    hidden, want = (d.prefill(s, tokens[:3], 1, 0, table[0]) for d, s in ((decoder, state), (reference, expected)))
    found["prompt"] = error(hidden, want)
    hidden, want = (
        d.verify(s, tokens[None, 3:], *place, table, [0]) for d, s in ((decoder, state), (reference, expected))
    )
    found["window"] = error(hidden, want)
    found["logits"] = error(decoder.logits(hidden), reference.logits(want))
    rows, want = (
        m.rows(s, tokens[None, 3:], h, [1], [3], table, [0], [1])
        for m, s, h in ((mtp, state, hidden), (reference_mtp, expected, want))
    )
    found["draft layer"] = error(rows, want)
    found["draft"] = float(mtp.draft(rows[:, 0]) != reference_mtp.draft(rows[:, 0]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
