"""A prompt chunk on its way through the layers, some at a time, so that other work goes on between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from ..config import ModelConfig
from ..state import DeviceState

LEAST = 1024
"""Rows that the matrices of a layer cost at least: for few rows too weights are read and kernels launched."""


Held = TypeVar("Held", bound=DeviceState)


class PromptChunk:
    """A chunk between two layers. Its rows are in the state of the layers that have run, and in no other.

    Args:
        layers: runs one layer at each step, or a part of one; what the last gives are the hidden rows.
        costs: of each step, in operations.
    """

    def __init__(self, layers: Iterator[Tensor | None], costs: Sequence[float]) -> None:
        self._layers, self._costs = layers, costs
        self._done = 0
        self._hidden: Tensor | None = None

    @property
    def left(self) -> Sequence[float]:
        """Operations of the steps that have not run."""
        return self._costs[self._done :]

    def advance(self) -> None:
        """Run the next step."""
        self._hidden = next(self._layers)
        self._done += 1

    @property
    def hidden(self) -> Tensor:
        """Final-normed hidden rows `[T, E]`, once no layer is left."""
        assert self._hidden is not None
        return self._hidden

    def finish(self) -> Tensor:
        """Run all steps that are left; `hidden`."""
        while self.left:
            self.advance()
        return self.hidden


def layer_operations(config: ModelConfig, start: int, rows: int, block: int | None = None) -> list[float]:
    """About the multiplications and additions of every step for the rows of tokens `start .. start + rows - 1`.

    A step is a layer; with `block` one that attends has a step for as many rows, and its MLP belongs to the last one.
    They tell layers apart, not machines: attention costs the more the more tokens lie before, the rest never does.
    """
    hidden = config.hidden_size
    if config.is_moe:
        inner = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
        mlp = hidden * (3 * inner + config.num_experts)
    else:
        mlp = 3 * hidden * config.intermediate_size
    gdn = hidden * (config.conv_channels + 2 * config.gdn_value_width)
    attention = hidden * (3 * config.query_width + 2 * config.kv_width)
    steps, full = [], set(config.attention_layers)
    for layer in range(config.num_hidden_layers):
        for first in range(0, rows, block or rows) if layer in full else ():
            count = min(rows - first, block or rows)
            pairs = count * (start + first + count / 2) * 2 * config.query_width
            last = first + count == rows
            steps.append(2.0 * (max(count, LEAST) * attention + pairs + last * max(rows, LEAST) * mlp))
        if layer not in full:
            steps.append(2.0 * max(rows, LEAST) * (gdn + mlp))
    return steps


class PromptReader(ABC, Generic[Held]):
    """A trunk that reads prompts in chunks. `config`: the model's."""

    config: ModelConfig

    @abstractmethod
    def begin(
        self,
        state: Held,
        tokens: Tensor,
        slot: int,
        start: int,
        page_table: Tensor | Sequence[int],
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> PromptChunk:
        """Begin one chunk of a prompt; see `Decoder.begin`."""

    def prefill(
        self,
        state: Held,
        tokens: Tensor,
        slot: int,
        start: int,
        page_table: Tensor | Sequence[int],
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run one chunk of a prompt; see `Decoder.begin`. Final-normed hidden rows `[T, E]`."""
        return self.begin(state, tokens, slot, start, page_table, positions, embeddings).finish()

    def costs(self, start: int, rows: int) -> list[float]:
        """About the operations of every layer for the prompt rows of tokens `start .. start + rows - 1`."""
        return layer_operations(self.config, start, rows)
