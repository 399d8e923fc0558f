"""The text decoder and the draft layer over the fused Triton kernels: the verbs of `Decoder` and `MTP` on a GPU.

Rows of a call lie in one `Workspace` of fixed buffers, so that a call can be captured in a CUDA graph
(`runtime.graphs`). A row's bits depend on its own sequence alone, for calls of up to 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import InvalidRequestError
from ..footprint import FEWEST_SPLITS, PAGE, SHARED_PARTS, attention_parts, splits_of
from ..kernels._order import Activation
from ..kernels._parts import PartialSums
from ..kernels._tiles import most_splits
from ..kernels.attention_decode import AttentionWorkspace, attention, pages_of
from ..kernels.embedding_decode import embed
from ..kernels.gated_delta_decode import gated_delta
from ..kernels.head_decode import Candidates, greedy, head
from ..kernels.linear_decode import project
from ..kernels.mlp_decode import gate_up
from ..kernels.moe_decode import ExpertRows, expert_down, expert_gate_up, route_and_shared
from ..kernels.residual_decode import project_residual
from ..kernels.rows_decode import draft_input, finish_rows, quantize_rows, rope_rows, rope_turns
from ..packed import PackedAttention, PackedGdn, PackedLayer, PackedMoe, PackedWeights
from ..state import RING, DeltaState, FusedState, KVLayer
from .decoder import Indices
from .prompt_chunk import PromptChunk, PromptReader

if TYPE_CHECKING:
    from .fused_prefill import FusedPrefill

ROWS = 64
"""Most rows in a call."""
WINDOW = RING // 2
"""Most rows of one sequence in a call."""


@dataclass(frozen=True, slots=True)
class FusedCall:
    """What the rows of a call are: `B` sequences of `rows` rows each, rows of a sequence together.

    int32 on the device: `tokens [T]`, `slots`, `lengths` (token index of the first row), `commits` (rows of the window
    before to apply first) `[B]`, `tables [B, P]`. `cos`, `sin` fp32 `[T, 64]`. `splits`: attention splits that cover
    every row's context.
    """

    rows: int
    tokens: Tensor
    slots: Tensor
    lengths: Tensor
    commits: Tensor
    tables: Tensor
    cos: Tensor
    sin: Tensor
    splits: int


class Workspace:
    """Buffers for calls of up to `rows` rows and `context` tokens; calls use their first rows.

    `parts` bounds rows x attention splits: a call over long contexts holds fewer rows (`rows_within`). `most` bounds
    the splits of a row, for all calls on a card: that of `card`, or of `device`.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str,
        *,
        rows: int = ROWS,
        context: int,
        card: torch.device | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.rows, self.config = rows, config
        width, hidden = config.gdn_value_width, config.hidden_size
        self.most = most_splits(card or self.device, config.num_key_value_heads)
        self.most_splits = max(FEWEST_SPLITS, splits_of(context + WINDOW, self.most))
        self.parts = attention_parts(rows, self.most_splits)
        heads = config.num_attention_heads
        f32 = {"dtype": torch.float32, "device": device}
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self.x = [torch.zeros(rows, hidden, **f32) for _ in range(2)]
        self.u, self.h = torch.zeros(rows, hidden, **f32), torch.zeros(rows, hidden, **f32)
        self.zero = torch.zeros(rows, hidden, **f32)
        self.a = Activation.empty(rows, hidden, hidden // 32, device)
        self.normed = Activation.empty(rows, hidden, hidden // 32, device)
        self.normed.ss.fill_(32.0)
        self.pair = Activation.empty(rows, 2 * hidden, 1, device)
        self.delta = Activation.empty(rows, width, config.linear_num_value_heads * 4, device)
        self.attended = Activation.empty(rows, config.query_width, 1, device)
        self.gdn_in = torch.zeros(rows, config.conv_channels + width, **bf16)
        self.gates = torch.zeros(rows, 2 * config.linear_num_value_heads, **f32)
        self.attention_in = torch.zeros(rows, 2 * (config.query_width + config.kv_width), **bf16)
        self._parts = torch.zeros(self.parts * heads * 256, **f32)
        self._stats = torch.zeros(2, self.parts * heads, **f32)
        if config.is_moe:
            experts, top_k = config.num_experts, config.num_experts_per_tok
            inner = config.moe_intermediate_size
            self.router = torch.zeros(rows, experts + 1, **f32)
            self.shared = torch.zeros(rows, 2 * inner, **f32)
            self.expert_rows = ExpertRows.empty(rows, top_k, inner, device, experts=experts, width=hidden)
            self.ids = torch.zeros(rows, top_k, dtype=torch.int32, device=device)
            self.shares = torch.zeros(rows, top_k, **f32)
        else:
            self.inner = Activation.empty(rows, config.intermediate_size, 1, device)
        self.sums = PartialSums.empty(rows, hidden, SHARED_PARTS, device)
        self.cos, self.sin = torch.zeros(rows, 64, **f32), torch.zeros(rows, 64, **f32)
        self.logits = torch.zeros(rows, config.vocab_size, **f32)
        self.candidates = Candidates.empty(rows, config.vocab_size, device)

    def splits(self, tokens: int) -> int:
        """Attention splits of a call whose rows see up to `tokens` tokens: a power of two, or the most there are."""
        need = max(FEWEST_SPLITS, splits_of(tokens, self.most))
        return min(self.most_splits, 1 << (need - 1).bit_length())

    def pages(self, splits: int, pages: int) -> int:
        """Leading pages, of `pages` in a table, that a call with so many splits may look at."""
        return pages if splits == self.most_splits else min(pages, pages_of(splits))

    def rows_within(self, splits: int) -> int:
        """Most rows of a call with so many splits."""
        return min(self.rows, self.parts // splits)

    def attention(self, rows: int, splits: int) -> AttentionWorkspace:
        """Partial results of `rows` rows."""
        heads, count = self.config.num_attention_heads, rows * splits * self.config.num_attention_heads
        top, mass = (s[:count].view(rows, heads, splits) for s in self._stats)
        return AttentionWorkspace(self._parts[: count * 256].view(rows, heads, splits, 256), top, mass, self.most)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in _tensors(list(vars(self).values())))


def _tensors(node: object) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, list):
        return [t for item in node for t in _tensors(item)]
    if isinstance(node, Activation | ExpertRows | Candidates | PartialSums):
        return [getattr(node, name) for name in node.__dataclass_fields__]
    return []


def workspace_bytes(config: ModelConfig, context: int, rows: int = ROWS, *, device: torch.device | None = None) -> int:
    """Bytes of a workspace for `device`, without allocating it."""
    return Workspace(config, "meta", rows=rows, context=context, card=device).nbytes


def first_rows(a: Activation, rows: int) -> Activation:
    """The blocks of `a` that hold its first `rows` rows."""
    blocks = -(-rows // 8)
    return Activation(a.q[:blocks], a.s[:blocks], a.ss[:blocks])


class FusedLayers:
    """Runs decoder layers over a workspace: the shared part of trunk and draft layer."""

    def __init__(self, config: ModelConfig, work: Workspace) -> None:
        self.config, self.work, self.eps = config, work, config.rms_norm_eps

    def run(
        self,
        layer: PackedLayer,
        store: DeltaState | KVLayer,
        call: FusedCall,
        next_norm: Tensor,
    ) -> None:
        """One layer: residual rows in `work.x[0]`, normed for the layer in `work.u` and `work.a`, both ways."""
        work, rows = self.work, call.tokens.shape[0]
        a, u, x, y = first_rows(work.a, rows), work.u[:rows], work.x[0][:rows], work.x[1][:rows]
        mixer = layer.mixer
        if isinstance(mixer, PackedGdn):
            assert isinstance(store, DeltaState)
            mixed, norm = first_rows(work.delta, rows), "head"
            project(mixer.proj, a, work.gdn_in[:rows], eps=self.eps, u=u, side=mixer.side, side_out=work.gates[:rows])
            gated_delta(
                work.gdn_in[:rows], work.gates[:rows], mixer.taps, mixer.a_log, mixer.dt_bias, mixer.norm, store,
                call.slots, call.lengths, call.commits, mixed, eps=self.eps,
            )  # fmt: skip
        else:
            assert isinstance(store, KVLayer)
            mixed, norm = first_rows(work.attended, rows), "none"
            project(mixer.proj, a, work.attention_in[:rows], eps=self.eps)
            attention(
                work.attention_in[:rows], mixer.q_norm, mixer.k_norm, call.cos, call.sin, store.codes, store.scales,
                call.tables, call.lengths, work.attention(rows, call.splits), mixed,
                heads=self.config.num_attention_heads, eps=self.eps,
            )  # fmt: skip
        project_residual(mixer.output, mixed, x, layer.post_norm, y, u, a, work.sums, eps=self.eps, norm=norm)
        self._ffn(layer, rows, next_norm)

    def _ffn(self, layer: PackedLayer, rows: int, next_norm: Tensor) -> None:
        work, ffn = self.work, layer.ffn
        a, u, x, y = first_rows(work.a, rows), work.u[:rows], work.x[0][:rows], work.x[1][:rows]
        if not isinstance(ffn, PackedMoe):
            inner = first_rows(work.inner, rows)
            gate_up(ffn.gate_up, a, rows, inner, work.sums, eps=self.eps)
            project_residual(ffn.down, inner, y, next_norm, x, u, a, work.sums, eps=self.eps, fine=False)
            return
        logits, shared, ids, shares = work.router[:rows], work.shared[:rows], work.ids[:rows], work.shares[:rows]
        route_and_shared(ffn.shared_gate_up, ffn.router, a, u, shared, logits, eps=self.eps)
        expert_gate_up(ffn.gate_up, a, logits, shared, work.expert_rows, ids, shares, eps=self.eps, ahead=ffn.down)
        expert_down(
            ffn.down, ffn.shared_down, work.expert_rows, ids, shares, logits, y, next_norm, x, u, a
        )  # fmt: skip


class FusedDecoder(PromptReader[FusedState]):
    """The trunk and its head; the interface of `Decoder`, with int32 tensors on the device inside.

    Args:
        weights: packed, on the device of the state.
        config: the model.
        context: most tokens of one sequence.
        chunks: reads prompts by the prefill kernels; without it `prefill` runs rows as a round does.
    """

    def __init__(
        self, weights: PackedWeights, config: ModelConfig, *, context: int, chunks: FusedPrefill | None = None
    ) -> None:
        self.weights, self.config, self.chunks = weights, config, chunks
        self.device = weights.final_norm.device
        self.work = Workspace(config, self.device, context=context)
        self.turns = rope_turns(config.rotary_dim, config.rope_theta, self.device)
        self._layers = FusedLayers(config, self.work)

    def call(
        self, tokens: Tensor, slots: Indices, lengths: Indices, commit: Indices, tables: Tensor, rope_delta: Indices
    ) -> FusedCall:
        """The description of a call from the arguments of `verify`."""
        batch, rows = tokens.shape
        splits = self.work.splits(tables.shape[1] * PAGE)
        if rows > WINDOW or batch * rows > self.work.rows_within(splits):
            raise InvalidRequestError(
                f"a call of {batch} x {rows} rows, but the workspace holds {WINDOW} rows of a sequence and "
                f"{self.work.rows_within(splits)} rows over {tables.shape[1]} pages; run fewer sequences at once"
            )
        int32 = [self._int32(values) for values in (slots, lengths, commit, rope_delta)]
        cos, sin = self.work.cos[: batch * rows], self.work.sin[: batch * rows]
        rope_rows(self.turns, int32[1], int32[3], cos, sin)
        flat = self._int32(tokens.reshape(-1))
        return FusedCall(rows, flat, int32[0], int32[1], int32[2], self._int32(tables).contiguous(), cos, sin, splits)

    def _int32(self, values: Indices) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    def forward(self, state: FusedState, call: FusedCall, keep: Tensor | None = None) -> Tensor:
        """Run a call: final-normed hidden rows `[T, E]` fp32, a view of the workspace; int8 in `work.normed`.

        `keep`: ring of hidden rows, see `rows_decode.finish_rows`.
        """
        work, rows, w = self.work, call.tokens.shape[0], self.weights
        embed(
            w.embedding, call.tokens, w.layers[0].input_norm, work.x[0][:rows], work.u[:rows], first_rows(work.a, rows)
        )
        counts = [0, 0]
        for i, layer in enumerate(w.layers):
            attends = isinstance(layer.mixer, PackedAttention)
            stores: Sequence[DeltaState | KVLayer] = state.kv if attends else state.gdn
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.final_norm
            self._layers.run(layer, stores[counts[attends]], call, following)
            counts[attends] += 1
        finish_rows(
            work.u[:rows], first_rows(work.a, rows), first_rows(work.normed, rows), work.h[:rows],
            eps=self.config.rms_norm_eps, keep=None if keep is None else (keep, call.slots, call.lengths),
        )  # fmt: skip
        return work.h[:rows]

    def choose(self, rows: int, addressable: int) -> tuple[Tensor, Candidates]:
        """Logits `[T, V]` fp32 of the rows in `work.normed`, and the best of every 32 ids below `addressable`."""
        work = self.work
        found = Candidates(work.candidates.value[:rows], work.candidates.row[:rows])
        normed = first_rows(work.normed, rows)
        head(self.weights.head, normed, found, work.logits[:rows], addressable=addressable, eps=0.0)
        return work.logits[:rows], found

    @torch.inference_mode()
    def verify(
        self,
        state: FusedState,
        tokens: Tensor,
        slots: Indices,
        lengths: Indices,
        commit: Indices,
        page_tables: Tensor,
        rope_delta: Indices,
    ) -> Tensor:
        """Run a window of rows of every sequence; see `Decoder.verify`. Hidden rows `[B, R, E]` fp32.

        Raises:
            InvalidRequestError: more rows than a call holds.
        """
        call = self.call(tokens, slots, lengths, commit, page_tables, rope_delta)
        return self.forward(state, call).clone().view(*tokens.shape, -1)

    @torch.inference_mode()
    def flush(self, state: FusedState, slots: Sequence[int], commit: Sequence[int], lengths: Sequence[int]) -> None:
        """Apply the first `commit[i]` rows of the pending window of `slots[i]`; `lengths`: tokens in the state then."""
        numbers = [self._int32(values) for values in (slots, lengths, commit)]
        work = self.work
        for layer, store in zip(
            (x for x in self.weights.layers if isinstance(x.mixer, PackedGdn)), state.gdn, strict=True
        ):
            mixer = layer.mixer
            assert isinstance(mixer, PackedGdn)
            gated_delta(
                work.gdn_in[:0], work.gates[:0], mixer.taps, mixer.a_log, mixer.dt_bias, mixer.norm, store, *numbers,
                work.delta, eps=self.config.rms_norm_eps,
            )  # fmt: skip

    @torch.inference_mode()
    def logits(self, h: Tensor) -> Tensor:
        """Logits `[.., vocab_size]` fp32 of hidden rows `[.., E]`, the bits that a round in a graph sees."""
        flat, found = h.reshape(-1, h.shape[-1]), []
        for part in flat.split(self.work.rows):
            quantize_rows(part.contiguous(), first_rows(self.work.normed, part.shape[0]))
            found.append(self.choose(part.shape[0], self.config.vocab_size)[0].clone())
        return torch.cat(found).view(*h.shape[:-1], -1)

    def begin(
        self,
        state: FusedState,
        tokens: Tensor,
        slot: int,
        start: int,
        page_table: Indices,
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> PromptChunk:
        """Begin one chunk of a prompt; see `Decoder.begin`. Without the prefill kernels all layers are one step."""
        if self.chunks is not None:
            return self.chunks.begin(state, tokens, slot, start, page_table, positions, embeddings)
        if positions is not None or embeddings is not None:
            raise InvalidRequestError("media rows need the prefill kernels", param="messages")
        cost = sum(self.costs(start, tokens.shape[0]))
        return PromptChunk(self._windows(state, tokens, slot, start, page_table), [cost])

    @torch.inference_mode()
    def _windows(
        self, state: FusedState, tokens: Tensor, slot: int, start: int, page_table: Indices
    ) -> Iterator[Tensor]:
        """The rows of a chunk as a round runs them, window by window, in one step."""
        if start == 0:
            state.clear_slot(slot)
        table = self._int32(page_table)[None]
        found, pending = [], 0
        for part in self._int32(tokens).split(WINDOW):
            found.append(self.verify(state, part[None], [slot], [start], [pending], table, [0])[0])
            start, pending = start + part.shape[0], part.shape[0]
        self.flush(state, [slot], [pending], [start])
        yield torch.cat(found)


class FusedMTP:
    """The draft layer over the fused kernels; the interface of `MTP`. Shares the workspace of its decoder.

    Raises:
        InvalidRequestError: the weights hold no draft layer.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        weights = decoder.weights
        if weights.mtp is None:
            raise InvalidRequestError("these weights hold no draft layer (mtp/ objects); use 0 draft tokens")
        self.weights, self.mtp, self.config, self.device = weights, weights.mtp, decoder.config, decoder.device
        self.decoder, self.work = decoder, decoder.work
        self._layers = FusedLayers(self.config, self.work)
        found = weights.draft_head
        self.head = found.weight if found is not None else weights.head
        self.ids = found.ids if found is not None else None
        limit = weights.draft_head.weight.rows if weights.draft_head is not None else self.config.vocab_size
        self.limit = limit
        self.candidates = Candidates.empty(self.work.rows, self.head.rows, self.device)

    def forward(self, state: FusedState, call: FusedCall, hidden: Tensor, pick: Tensor | None = None) -> Tensor:
        """Run draft rows: token and hidden row `[T, E]` each; results as `FusedDecoder.forward` leaves them.

        `pick` int32 `[B]`: only that row of every sequence is finished; keys and values of all rows are stored.
        """
        work, rows, eps = self.work, call.tokens.shape[0], self.config.rms_norm_eps
        a, u, x = first_rows(work.a, rows), work.u[:rows], work.x[0][:rows]
        embed(self.weights.embedding, call.tokens, self.mtp.embedding_norm, x, u, a)
        pair = first_rows(work.pair, rows)
        draft_input(u, a, hidden, self.mtp.hidden_norm, pair, eps=eps)
        project_residual(self.mtp.proj, pair, work.zero[:rows], self.mtp.layer.input_norm, x, u, a, work.sums, eps=eps)
        self._layers.run(self.mtp.layer, state.mtp_kv[0], call, self.mtp.final_norm)
        count = rows if pick is None else pick.shape[0]
        finish_rows(u, a, first_rows(work.normed, count), work.h[:count], eps=eps, pick=pick)
        return work.h[:count]

    def choose(self, rows: int, token: Tensor) -> None:
        """token `[B]` int32 = the best proposal of each of the rows in `work.normed`."""
        found = Candidates(self.candidates.value[:rows], self.candidates.row[:rows])
        head(self.head, first_rows(self.work.normed, rows), found, None, addressable=self.limit, eps=0.0)
        greedy(found, token, self.ids)

    @torch.inference_mode()
    def rows(
        self,
        state: FusedState,
        tokens: Tensor,
        hidden: Tensor,
        slots: Indices,
        starts: Indices,
        page_tables: Tensor,
        rope_delta: Indices,
        only: Indices | None = None,
    ) -> Tensor:
        """Run rows `starts .. starts + R - 1` of every sequence; see `MTP.rows`. fp32 `[B, R, E]` or `[B, 1, E]`."""
        batch, count = tokens.shape
        if batch == 1 and count > WINDOW:
            return self._long(state, tokens[0], hidden[0], starts, page_tables, rope_delta, only)
        call = self.decoder.call(tokens, slots, starts, [0] * batch, page_tables, rope_delta)
        pick = None if only is None else torch.as_tensor(only, dtype=torch.int32, device=self.device)
        h = self.forward(state, call, hidden.flatten(0, 1).float().contiguous(), pick)
        return h.clone().view(batch, -1, h.shape[1])

    def _long(
        self, state: FusedState, tokens: Tensor, hidden: Tensor, starts: Indices, tables: Tensor, rope_delta: Indices,
        only: Indices | None,
    ) -> Tensor:  # fmt: skip
        """More rows of one sequence than a window, window by window: `[1, T, E]` or `[1, 1, E]`."""
        start, found = int(torch.as_tensor(starts)[0]), []
        for part, rows in zip(tokens.split(WINDOW), hidden.split(WINDOW), strict=True):
            found.append(self.rows(state, part[None], rows[None], [0], [start], tables, rope_delta)[0])
            start += part.shape[0]
        x = torch.cat(found)
        return (x if only is None else x[torch.as_tensor(only, device=self.device).long()])[None]

    @torch.inference_mode()
    def prefill(
        self,
        state: FusedState,
        tokens: Tensor,
        hidden: Tensor,
        start: int,
        page_table: Indices,
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Store the rows `start .. start + T - 1` of one sequence; see `MTP.prefill`."""
        chunks = self.decoder.chunks
        if chunks is not None and tokens.shape[0] <= chunks.work.rows:
            chunks.fill_drafts(state, tokens, hidden, start, page_table, positions, embeddings)
            return
        if positions is not None or embeddings is not None:
            raise InvalidRequestError("media rows need the prefill kernels", param="messages")
        table = torch.as_tensor(page_table, dtype=torch.int32, device=self.device)[None]
        for part, rows in zip(tokens.split(WINDOW), hidden.split(WINDOW), strict=True):
            self.rows(state, part[None], rows[None], [0], [start], table, [0])
            start += part.shape[0]

    @torch.inference_mode()
    def draft(self, hidden: Tensor) -> Tensor:
        """The drafted tokens `[B]` (int64) of results `[B, E]`: argmax of the reduced head, or of the full one."""
        token = torch.empty(hidden.shape[0], dtype=torch.int32, device=self.device)
        for part, chosen in zip(hidden.float().split(self.work.rows), token.split(self.work.rows), strict=True):
            quantize_rows(part.contiguous(), first_rows(self.work.normed, len(part)))
            self.choose(len(part), chosen)
        return token.long()
