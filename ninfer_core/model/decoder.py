"""The text decoder of both models, in reading order: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import InvalidRequestError
from ..kernels._op import RowCall, as_index
from ..kernels.attention import attention_chunk, attention_rows, kv_fill
from ..kernels.embedding import embedding
from ..kernels.gated_delta import CHUNK, gated_delta_chunk, gated_delta_commit, gated_delta_rows
from ..kernels.head import head
from ..kernels.linear import linear, mlp
from ..kernels.mixer_input import mixer_input
from ..kernels.moe import moe
from ..kernels.norm import rms_norm
from ..kernels.rope import rope_tables
from ..state import GdnLayer, KVLayer, State
from ..weights import AttentionMixer, GdnMixer, Layer, Mlp, Weights
from .prompt_chunk import PromptChunk, PromptReader

Indices = Tensor | Sequence[int]


def run_ffn(x: Tensor, layer: Layer, config: ModelConfig, chunk: bool) -> Tensor:
    """The second half of a layer: norm, dense MLP or mixture of experts, residual. `x [T, E]` -> `[T, E]`."""
    eps = config.rms_norm_eps
    if isinstance(layer.ffn, Mlp):
        return mlp(x, layer.post_gain, eps, layer.ffn.gate_up, layer.ffn.down, chunk)
    return moe(x, layer.post_gain, eps, layer.ffn, config.num_experts_per_tok, chunk)


class ChunkCall:
    """A prefill chunk of one sequence, padded to whole blocks of 64 rows, with what all its layers share."""

    def __init__(self, config: ModelConfig, table: Tensor, start: int, positions: Tensor, slot: int = 0) -> None:
        self.real = positions.shape[-1]
        self.padding = -self.real % CHUNK
        self.slot, self.start = slot, start
        self.place = (table, start, self.real)
        padded = torch.nn.functional.pad(positions, (0, self.padding))
        self.tables = rope_tables(padded, config.rotary_dim, config.rope_theta, config.mrope_section)

    def pad(self, rows: Tensor) -> Tensor:
        """`rows [T, ..]` with zero rows up to the padded length."""
        return torch.cat((rows, rows.new_zeros(self.padding, *rows.shape[1:]))) if self.padding else rows


class AttentionLayerRunner:
    """A decoder layer with gated attention; the trunk's and the draft layer's."""

    def __init__(self, layer: Layer, mixer: AttentionMixer, config: ModelConfig) -> None:
        self.layer, self.mixer, self.config = layer, mixer, config
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps)

    def rows(self, x: Tensor, kv: KVLayer, call: RowCall) -> Tensor:
        """A row call: `x [B * R, E]` -> `[B * R, E]`, or `[B, E]` of the rows `call.only`."""
        proj = mixer_input(x, self.layer.input_gain, self.config.rms_norm_eps, self.mixer.proj)
        o = attention_rows(proj, self.mixer.qk_gain, kv, call, *self.shape)
        if call.only is not None:
            x = x.index_select(0, call.wanted)
        return run_ffn(linear(o, self.mixer.output, x), self.layer, self.config, False)

    def chunk(self, x: Tensor, kv: KVLayer, call: ChunkCall) -> Tensor:
        """A chunk call: `x [T padded, E]` -> `[T padded, E]`."""
        proj = mixer_input(x, self.layer.input_gain, self.config.rms_norm_eps, self.mixer.proj, True)
        o = attention_chunk(proj, self.mixer.qk_gain, kv, call.tables, call.place, *self.shape)
        return run_ffn(linear(o, self.mixer.output, x, True), self.layer, self.config, True)

    def fill(self, x: Tensor, kv: KVLayer, call: ChunkCall) -> None:
        """Store keys and values of a chunk; nothing else of it is needed."""
        proj = mixer_input(x, self.layer.input_gain, self.config.rms_norm_eps, self.mixer.proj, True)
        kv_fill(proj, self.mixer.qk_gain, kv, call.tables, call.place, *self.shape)


class GdnLayerRunner:
    """A decoder layer with Gated DeltaNet."""

    def __init__(self, layer: Layer, mixer: GdnMixer, config: ModelConfig) -> None:
        self.layer, self.mixer, self.config = layer, mixer, config
        self.shape = (config.linear_num_key_heads, config.rms_norm_eps)

    def rows(self, x: Tensor, state: GdnLayer, call: RowCall) -> Tensor:
        """A row call: `x [B * R, E]` -> `[B * R, E]`."""
        proj = mixer_input(x, self.layer.input_gain, self.config.rms_norm_eps, self.mixer.proj)
        o = gated_delta_rows(proj, self.mixer, state, call, *self.shape)
        return run_ffn(linear(o, self.mixer.output, x), self.layer, self.config, False)

    def chunk(self, x: Tensor, state: GdnLayer, call: ChunkCall) -> Tensor:
        """A chunk call: `x [T padded, E]` -> `[T padded, E]`."""
        proj = mixer_input(x, self.layer.input_gain, self.config.rms_norm_eps, self.mixer.proj, True)
        place = (call.slot, call.real, call.start == 0)
        o = gated_delta_chunk(proj, self.mixer, state, place, *self.shape)
        return run_ffn(linear(o, self.mixer.output, x, True), self.layer, self.config, True)


def row_call(
    config: ModelConfig,
    rows: int,
    slots: Indices,
    starts: Indices,
    commit: Indices,
    page_tables: Indices | Tensor,
    rope_delta: Indices,
    device: torch.device,
    only: Indices | None = None,
) -> RowCall:
    """Device tensors and rotary tables of a row call of `rows` rows per sequence."""
    slots, starts, commit, delta = (as_index(v, device) for v in (slots, starts, commit, rope_delta))
    positions = (starts + delta).unsqueeze(1) + torch.arange(rows, device=device)
    cos, sin = rope_tables(positions.flatten(), config.rotary_dim, config.rope_theta, config.mrope_section)
    only = None if only is None else as_index(only, device)
    return RowCall(slots, starts, commit, as_index(page_tables, device), cos, sin, rows, only)


class Decoder(PromptReader[State]):
    """Runs prompts in chunks and windows of rows through the trunk. Holds weights only; all state is `State`."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self.weights, self.config = weights, config
        self.device = weights.embedding.device
        self._layers: list[tuple[GdnLayerRunner | AttentionLayerRunner, int]] = []
        counts = [0, 0]
        for layer in weights.layers:
            kind = isinstance(layer.mixer, AttentionMixer)
            make = AttentionLayerRunner if kind else GdnLayerRunner
            self._layers.append((make(layer, layer.mixer, config), counts[kind]))  # type: ignore[arg-type]
            counts[kind] += 1

    @torch.inference_mode()
    def begin(
        self,
        state: State,
        tokens: Tensor,
        slot: int,
        start: int,
        page_table: Indices,
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> PromptChunk:
        """Begin one chunk of a prompt. Behind its last layer the state has advanced by all its rows.

        Between two layers anything may run for other sequences. Who gives the chunk up gives its state up too.

        Args:
            state: device state; the slot must have no pending window (`flush` first). With `start` 0 the slot's old
                content is ignored.
            tokens: ids `[T]`.
            slot: GDN slot of the sequence.
            start: token index of the first row. Splits at multiples of 64 keep the bits of the GDN chunks.
            page_table: pages of the sequence `[P]`, covering `start + T` tokens.
            positions: three-axis positions `[3, T]`; None for text, where they equal the token index.
            embeddings: `(rows [M], features [M, E])`: rows of this call that take a vision feature, not an embedding.

        Returns:
            The chunk, whose result are final-normed hidden rows `[T, E]`.

        Raises:
            InvalidRequestError: the page table is too short.
        """
        table = as_index(page_table, self.device)
        self._check_pages(state, table.shape[0], start + tokens.shape[0])
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[0], device=self.device)
        call = ChunkCall(self.config, table, start, positions, slot)
        x = embedding(as_index(tokens, self.device), self.weights.embedding)
        if embeddings is not None:
            x.index_copy_(0, as_index(embeddings[0], self.device), embeddings[1].to(x))
        return PromptChunk(self._run(state, call.pad(x), call), self.costs(start, call.real))

    @torch.inference_mode()
    def _run(self, state: State, x: Tensor, call: ChunkCall) -> Iterator[Tensor | None]:
        """The layers of a chunk, one a step."""
        last = self._layers[-1]
        for layer in self._layers:
            runner, index = layer
            if isinstance(runner, GdnLayerRunner):
                x = runner.chunk(x, state.gdn[index], call)
            else:
                x = runner.chunk(x, state.kv[index], call)
            if layer is not last:
                yield None
        yield rms_norm(x[: call.real], self.weights.final_gain, self.config.rms_norm_eps)

    @torch.inference_mode()
    def verify(
        self,
        state: State,
        tokens: Tensor,
        slots: Indices,
        lengths: Indices,
        commit: Indices,
        page_tables: Tensor,
        rope_delta: Indices,
    ) -> Tensor:
        """Run a window of rows of every sequence; GDN state takes them later, when it is known how many count.

        Args:
            state: device state.
            tokens: ids `[B, R]`: the anchor and its drafts.
            slots: GDN slots `[B]`, all different.
            lengths: token index of the first row `[B]`.
            commit: rows `[B]` of the sequence's previous window that count, applied first; 0 for none.
            page_tables: pages `[B, P]`, covering `lengths + R` tokens.
            rope_delta: rotary position minus token index `[B]`.

        Returns:
            Final-normed hidden rows `[B, R, E]`. On the CPU a row's bits depend on its sequence up to that row only.

        Raises:
            InvalidRequestError: more rows than the window of the state.
        """
        batch, rows = tokens.shape
        if rows > state.window:
            raise InvalidRequestError(
                f"a window of {rows} rows, but the state holds {state.window}; make it with max_draft={rows - 1}"
            )
        call = row_call(self.config, rows, slots, lengths, commit, page_tables, rope_delta, self.device)
        x = embedding(tokens.flatten(), self.weights.embedding)
        for runner, index in self._layers:
            if isinstance(runner, GdnLayerRunner):
                x = runner.rows(x, state.gdn[index], call)
            else:
                x = runner.rows(x, state.kv[index], call)
        return rms_norm(x, self.weights.final_gain, self.config.rms_norm_eps).view(batch, rows, -1)

    @torch.inference_mode()
    def flush(self, state: State, slots: Sequence[int], commit: Sequence[int], lengths: Sequence[int]) -> None:
        """Apply the first `commit[i]` rows of the pending window of `slots[i]`: before a checkpoint or a prefill.

        `lengths`: tokens in the state afterwards (this state does not need them).
        """
        for layer in state.gdn:
            gated_delta_commit(layer, list(slots), list(commit))

    @torch.inference_mode()
    def logits(self, h: Tensor) -> Tensor:
        """Logits `[.., vocab_size]` fp32 of hidden rows `[.., E]`; rows of the matrix without a token included."""
        flat = h.reshape(-1, h.shape[-1])
        return head(flat, self.weights.head).view(*h.shape[:-1], -1)

    def _check_pages(self, state: State, pages: int, tokens: int) -> None:
        if pages * state.page_size < tokens:
            raise InvalidRequestError(
                f"{pages} pages hold {pages * state.page_size} tokens, but the call reaches {tokens}; give more pages"
            )
