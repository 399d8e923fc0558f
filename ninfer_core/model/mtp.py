"""The draft layer: predicts the token after next from a hidden row of the trunk and the embedding of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import InvalidRequestError
from ..kernels._op import as_index
from ..kernels.embedding import embedding
from ..kernels.head import draft_head
from ..kernels.linear import linear
from ..kernels.norm import rms_norm
from ..state import State
from ..weights import AttentionMixer, Weights
from .decoder import AttentionLayerRunner, ChunkCall, Indices, row_call


class MTP:
    """Runs rows of the draft layer.

    Row t takes token t + 1 and a hidden row: the trunk's final-normed hidden of token t, or, for chained drafts, the
    result of row t - 1. Its keys and values live at token t of the MTP pages, its rotary position is that of token t.
    Rows may be run again: that overwrites them (realignment after a round).

    Raises:
        InvalidRequestError: the weights hold no draft layer.
    """

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        if weights.mtp is None:
            raise InvalidRequestError("these weights hold no draft layer (mtp/ objects); use 0 draft tokens")
        self.weights, self.mtp, self.config = weights, weights.mtp, config
        self.device = weights.embedding.device
        mixer = self.mtp.layer.mixer
        assert isinstance(mixer, AttentionMixer)
        self._layer = AttentionLayerRunner(self.mtp.layer, mixer, config)

    @torch.inference_mode()
    def rows(
        self,
        state: State,
        tokens: Tensor,
        hidden: Tensor,
        slots: Indices,
        starts: Indices,
        page_tables: Tensor,
        rope_delta: Indices,
        only: Indices | None = None,
    ) -> Tensor:
        """Run rows `starts .. starts + R - 1` of every sequence.

        Args:
            state: device state; the MTP pages are written.
            tokens: ids `[B, R]`: of row t the token t + 1.
            hidden: `[B, R, E]`: of row t the trunk's hidden t, or the result of row t - 1.
            slots: GDN slots `[B]` (unused by this layer; kept for symmetry with `Decoder.verify`).
            starts: token index of the first row `[B]`.
            page_tables: pages `[B, P]`.
            rope_delta: rotary position minus token index `[B]`.
            only: the one row per sequence `[B]` whose result is wanted; all rows are stored all the same.

        Returns:
            Results `[B, R, E]` after the layer's final norm, or `[B, 1, E]` with `only`. A single sequence with more
            rows than a window is run as a prompt chunk (other last bits).
        """
        batch, count = tokens.shape
        if batch == 1 and count > state.window:
            x = self._chunk(state, tokens[0], hidden[0], starts, page_tables, rope_delta)
            return x if only is None else x[:, as_index(only, self.device)]
        none = [0] * batch
        call = row_call(self.config, count, slots, starts, none, page_tables, rope_delta, self.device, only)
        x = self._input(tokens.flatten(), hidden.flatten(0, 1), None, False)
        x = self._layer.rows(x, state.mtp_kv[0], call)
        return rms_norm(x, self.mtp.final_gain, self.config.rms_norm_eps).view(batch, -1, x.shape[1])

    @torch.inference_mode()
    def prefill(
        self,
        state: State,
        tokens: Tensor,
        hidden: Tensor,
        start: int,
        page_table: Indices,
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Store the rows `start .. start + T - 1` of one sequence. Only keys and values are made: nobody reads the
        rest.

        Args:
            state: device state; the MTP pages are written.
            tokens: ids `[T]`: of row t the token t + 1.
            hidden: the trunk's hidden rows `[T, E]` of tokens `start ..`.
            start: token index of the first row.
            page_table: pages `[P]`.
            positions: three-axis positions `[3, T]` of tokens `start ..`; None for text.
            embeddings: `(rows [M], features [M, E])` of media among `tokens`.
        """
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[0], device=self.device)
        call = ChunkCall(self.config, as_index(page_table, self.device), start, positions)
        x = self._input(call.pad(as_index(tokens, self.device)), call.pad(hidden), embeddings, True)
        self._layer.fill(x, state.mtp_kv[0], call)

    @torch.inference_mode()
    def draft(self, hidden: Tensor) -> Tensor:
        """The drafted tokens `[B]` of results `[B, E]`: argmax of the reduced head, or of the full one."""
        head = self.weights.draft_head
        if head is None:
            return draft_head(hidden, self.weights.head, None, self.weights.head.rows)
        return draft_head(hidden, head.weight, head.ids, head.weight.rows)

    def _chunk(
        self, state: State, tokens: Tensor, hidden: Tensor, starts: Indices, tables: Tensor, rope_delta: Indices
    ) -> Tensor:
        """Many rows of one sequence at once: results `[1, T, E]`."""
        count = tokens.shape[0]
        start, delta = int(as_index(starts, self.device)[0]), int(as_index(rope_delta, self.device)[0])
        positions = torch.arange(start + delta, start + delta + count, device=self.device)
        call = ChunkCall(self.config, as_index(tables, self.device)[0], start, positions)
        x = self._layer.chunk(self._input(call.pad(tokens), call.pad(hidden), None, True), state.mtp_kv[0], call)
        return rms_norm(x[:count], self.mtp.final_gain, self.config.rms_norm_eps).unsqueeze(0)

    def _input(self, tokens: Tensor, hidden: Tensor, media: tuple[Tensor, Tensor] | None, chunk: bool) -> Tensor:
        """The layer's residual input `[T, E]`: embedding half first, both halves normed."""
        eps = self.config.rms_norm_eps
        x = embedding(tokens, self.weights.embedding)
        if media is not None:
            x.index_copy_(0, as_index(media[0], self.device), media[1].to(x))
        halves = (rms_norm(x, self.mtp.embedding_gain, eps), rms_norm(hidden, self.mtp.hidden_gain, eps))
        return linear(torch.cat(halves, -1), self.mtp.proj, None, chunk)
