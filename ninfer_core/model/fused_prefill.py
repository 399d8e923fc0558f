"""Prompts in chunks over the prefill kernels: the trunk, and the draft layer's keys and values.

A chunk of up to `rows` rows of one sequence runs through the layers as matrix products on tensor cores. All buffers are
made once (`PrefillWorkspace`); nothing in a chunk reads the device from the host. What the state holds afterwards is
what the decode kernels read next: the recurrent state committed, the last rows of the convolution in the ring.

The mixers take a chunk in blocks of `BLOCK` rows, one after the other; the experts, of which each has the more rows
the longer the chunk, take it whole. A chunk may wait between two layers, and between two blocks of one that attends
(`PromptChunk`): rounds, and rows of the draft layer for other sequences, run then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import InvalidRequestError
from ..footprint import BLOCK
from ..kernels import attention_prefill as attention
from ..kernels import moe_prefill as moe
from ..kernels._tiles_prefill import expert_tiles, fused_attention
from ..kernels.gated_delta_prefill import DeltaWorkspace, gated_delta_chunk
from ..kernels.linear_prefill import open_all, packed_product, product, rows_of
from ..kernels.norm_prefill import add_norm, embed_rows, swiglu
from ..kernels.rope import rope_tables
from ..packed_tree import PackedAttention, PackedGdn, PackedLayer, PackedMlp, PackedMoe, PackedMtp, PackedWeights
from ..state import DeltaState, FusedState, KVLayer
from .decoder import Indices
from .prompt_chunk import PromptChunk, layer_operations

SCRATCH = 64 << 20
"""Values of the scratch that dense weights are opened into, 128 MB: a wider matrix is opened and used in parts."""


def _align(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


class _Buffers:
    """Hands out pieces of one buffer from its start; without a buffer it only counts."""

    def __init__(self, memory: Tensor | None) -> None:
        self.memory, self.used = memory, 0

    def take(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        start, self.used = self.used, self.used + _align(nbytes)
        if self.memory is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self.memory[start : start + nbytes].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _GdnBuffers:
    proj: Tensor
    ab: Tensor
    mixed: Tensor
    delta: DeltaWorkspace

    @staticmethod
    def take(memory: Tensor | None, config: ModelConfig, rows: int) -> tuple[_GdnBuffers, int]:
        b, heads = _Buffers(memory), config.linear_num_value_heads
        width = config.gdn_value_width
        delta = DeltaWorkspace(
            *(
                b.take(*shape, dtype=dtype)
                for shape, dtype in DeltaWorkspace.shapes(rows, config.linear_num_key_heads, heads)
            )
        )
        proj, ab = b.take(rows, config.conv_channels + width), b.take(rows, 2 * heads, dtype=torch.float32)
        return _GdnBuffers(proj, ab, b.take(rows, width), delta), b.used


@dataclass(frozen=True, slots=True)
class _AttentionBuffers:
    proj: Tensor
    mixed: Tensor
    attention: attention.AttentionWorkspace

    @staticmethod
    def take(memory: Tensor | None, config: ModelConfig, rows: int, tokens: int) -> tuple[_AttentionBuffers, int]:
        """For up to `rows` rows among the first `tokens` tokens."""
        b, heads = _Buffers(memory), config.num_attention_heads
        room = attention.room_for(tokens)
        proj, mixed = b.take(rows, 2 * (config.query_width + config.kv_width)), b.take(rows, config.query_width)
        work = attention.AttentionWorkspace(
            q=b.take(attention.query_rows(rows), heads, config.head_dim, dtype=torch.float16),
            kv=b.take(2 * config.num_key_value_heads, room, config.head_dim, dtype=torch.float16),
            acc=b.take(rows, config.query_width, dtype=torch.float32),
            sums=b.take(heads * rows, dtype=torch.float32),
        )
        return _AttentionBuffers(proj, mixed, work), b.used


@dataclass(frozen=True, slots=True)
class _MoeBuffers:
    logits: Tensor
    shared: Tensor
    shared_inner: Tensor
    shared_out: Tensor
    inner: Tensor
    routed: Tensor
    routing: moe.Routing

    @staticmethod
    def take(memory: Tensor | None, config: ModelConfig, rows: int, tokens: int) -> tuple[_MoeBuffers, int]:
        b, active, experts = _Buffers(memory), config.num_experts_per_tok, config.num_experts
        width, inner, shared = config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size
        parts = (b.take(n, dtype=dtype) for n, dtype in moe.Routing.shapes(rows, experts, active, tokens))
        routing = moe.Routing(tokens, *parts)
        return _MoeBuffers(
            b.take(rows, router_rows(experts), dtype=torch.float32), b.take(rows, 2 * shared), b.take(rows, shared),
            b.take(rows, width), b.take(rows * active, inner), b.take(rows * active, width), routing,
        ), b.used  # fmt: skip


@dataclass(frozen=True, slots=True)
class _MlpBuffers:
    gate_up: Tensor
    inner: Tensor
    out: Tensor

    @staticmethod
    def take(memory: Tensor | None, config: ModelConfig, rows: int) -> tuple[_MlpBuffers, int]:
        b, inner = _Buffers(memory), config.intermediate_size
        return _MlpBuffers(b.take(rows, 2 * inner), b.take(rows, inner), b.take(rows, config.hidden_size)), b.used


@dataclass(frozen=True, slots=True)
class _DraftBuffers:
    """Of the draft layer's rows: none is a buffer that a chunk of the trunk holds between two steps."""

    proj: Tensor
    x: Tensor
    u: Tensor
    out: Tensor
    pair: Tensor

    @staticmethod
    def take(memory: Tensor | None, config: ModelConfig, rows: int) -> tuple[_DraftBuffers, int]:
        b, hidden, block = _Buffers(memory), config.hidden_size, min(rows, BLOCK)
        proj = b.take(block, 2 * (config.query_width + config.kv_width))
        x = b.take(rows, hidden, dtype=torch.float32)
        return _DraftBuffers(proj, x, b.take(block, hidden), b.take(block, hidden), b.take(block, 2 * hidden)), b.used


def router_rows(experts: int) -> int:
    """Rows of the padded router: the experts, the shared gate, zeros up to a multiple of 8."""
    return -(-(experts + 1) // 8) * 8


class PrefillWorkspace:
    """Buffers for chunks of up to `rows` rows that end within `context` tokens.

    The parts of a layer follow each other, so that their buffers are views of the same memory, and so are those of the
    draft layer. Between two steps a chunk holds `x`, `u`, `out` and `counts`.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str, *, rows: int, context: int) -> None:
        self.config, self.rows, self.context, self.block = config, rows, context, min(rows, BLOCK)
        context = max(context, rows)
        sizes = [
            _GdnBuffers.take(None, config, self.block)[1],
            _AttentionBuffers.take(None, config, self.block, context)[1],
            self._ffn_bytes(rows),
            _DraftBuffers.take(None, config, rows)[1] if config.mtp_num_hidden_layers else 0,
        ]
        self.memory = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        hidden = config.hidden_size
        self.x = torch.empty(rows, hidden, device=device)
        self.u = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        widest = max(config.conv_channels + config.gdn_value_width, 2 * (config.query_width + config.kv_width))
        most = max(widest, 2 * config.intermediate_size) * max(hidden, config.intermediate_size)
        if rows > self.block:  # the weights of a Gated DeltaNet together (`_gdn`)
            most = max(most, (config.conv_channels + 2 * config.gdn_value_width) * hidden)
        self.scratch = torch.empty(min(most, SCRATCH), dtype=torch.bfloat16, device=device)
        layers = config.num_hidden_layers
        self.counts = torch.empty(layers, max(1, config.num_experts), dtype=torch.int32, device=device)

    def _ffn_bytes(self, rows: int) -> int:
        if self.config.is_moe:
            return _MoeBuffers.take(None, self.config, rows, 1)[1]
        return _MlpBuffers.take(None, self.config, rows)[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))


class _Views:
    """Buffers of the parts of a layer as views of a workspace, made once for a number of rows: they cost the host."""

    def __init__(self, work: PrefillWorkspace) -> None:
        memory, config = work.memory, work.config
        self.gdn = lru_cache(4)(lambda rows: _GdnBuffers.take(memory, config, rows)[0])
        tokens = max(work.context, work.rows)  # one layout for all chunks: plans of the fused attention know strides
        self.attention = _AttentionBuffers.take(memory, config, work.block, tokens)[0]
        self.moe = lru_cache(4)(lambda rows, tokens: _MoeBuffers.take(memory, config, rows, tokens)[0])
        self.mlp = lru_cache(4)(lambda rows: _MlpBuffers.take(memory, config, rows)[0])
        self.drafts = lru_cache(4)(lambda rows: _DraftBuffers.take(memory, config, rows)[0])


def prefill_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """Bytes that a `FusedPrefill` takes beside the weights, without allocating: workspace, routers, and what lives for
    one chunk: the hidden rows, once more with the row that waited, and two results of attention, which meet.
    """
    routers = config.num_hidden_layers * router_rows(config.num_experts) * config.hidden_size * 2
    workspace = PrefillWorkspace(config, "meta", rows=rows, context=context).nbytes
    passing = rows * 2 * 4 * config.hidden_size
    passing += 2 * min(rows, BLOCK) * (2 * config.query_width + 4 * config.num_attention_heads)
    return workspace + passing + (routers if config.is_moe else 0)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `first .. first + rows - 1` of a chunk, token index of the first, their rotary tables, how they attend."""

    first: int
    rows: int
    start: int
    cos: Tensor
    sin: Tensor
    route: attention.Route


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What all layers of a chunk share: rows, the slot, page table int32 `[P]`, the blocks of the mixers."""

    rows: int
    slot: int
    table: Tensor
    blocks: list[_Block]


class FusedPrefill:
    """Runs prompt chunks. Holds the workspace and routers in operand order; all state is `FusedState`.

    Args:
        weights: packed, on the device of the state.
        config: the model.
        rows: most rows of a chunk; longer calls are refused.
        context: most tokens of a sequence.
    """

    def __init__(self, weights: PackedWeights, config: ModelConfig, *, rows: int, context: int) -> None:
        self.weights, self.config, self.eps = weights, config, config.rms_norm_eps
        self.device = weights.final_norm.device
        self.work = PrefillWorkspace(config, self.device, rows=rows, context=context)
        self._views = _Views(self.work)
        self.fused = fused_attention(weights.final_norm)
        self.routers = [self._router(layer.ffn) for layer in weights.layers]
        self._begun = 0

    def _router(self, ffn: PackedMoe | PackedMlp) -> Tensor | None:
        """Router and shared gate with zero rows up to a multiple of 8, columns in operand order."""
        if not isinstance(ffn, PackedMoe):
            return None
        count, width = ffn.router.shape
        out = ffn.router.new_zeros(router_rows(count - 1), width)
        out[:count, moe.slots(width, self.device)] = ffn.router
        return out

    @torch.inference_mode()
    def warm(self) -> Iterator[None]:
        """Have the matrix library and the fused attention get ready for what prompts will ask of them, step by step.

        Both do so for the thread that calls. Not between the layers of a chunk: the buffers are theirs.
        """
        u = self.work.u[:64]
        product(u, u, self.work.out[: u.shape[0], : u.shape[0]])
        yield
        own = self._views.attention.attention
        if self.fused:
            for rows, keys, causal in attention.planned(own.q.shape[0], own.kv.shape[1]):
                attention.fused_part(own, rows, 0, keys, causal)
                yield

    @torch.inference_mode()
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
        """Begin a chunk of a prompt, whose hidden rows are fp32; see `Decoder.begin`.

        The workspace is that of one chunk: one that waits between its layers while another begins cannot go on.

        Raises:
            InvalidRequestError: more rows or tokens than the workspace holds, or a page table that is too short.
        """
        call = self._call(tokens, slot, start, page_table, positions)
        work, rows = self.work, call.rows
        self._begun += 1
        self._embed(tokens, embeddings, work.x[:rows])
        add_norm(work.x[:rows], None, self.weights.layers[0].input_norm, work.u[:rows], self.eps)
        work.counts.zero_()
        return PromptChunk(
            self._run(state, call, self._begun), layer_operations(self.config, start, call.rows, work.block)
        )

    @torch.inference_mode()
    def _run(self, state: FusedState, call: _Chunk, number: int) -> Iterator[Tensor | None]:
        """The layers of the chunk that was begun as the `number`-th, one a step; one a block where they attend."""
        layers, u, counts = self.weights.layers, self.work.u[: call.rows], [0, 0]
        for i, layer in enumerate(layers):
            attends = isinstance(layer.mixer, PackedAttention)
            for block in call.blocks if attends else call.blocks[-1:]:
                if number != self._begun:
                    raise RuntimeError("another prompt chunk has begun in the workspace of this one")
                if isinstance(layer.mixer, PackedAttention):
                    self._attention(layer.mixer, state.kv[counts[True]], call, block)
                else:
                    self._gdn(layer.mixer, state.gdn[counts[False]], call)
                if block is not call.blocks[-1]:
                    yield None
            counts[attends] += 1
            if i + 1 < len(layers):
                self._ffn(layer, i, call.rows, layers[i + 1].input_norm, u)
                yield None
                continue
            hidden = torch.empty_like(self.work.x[: call.rows])
            self._ffn(layer, i, call.rows, self.weights.final_norm, hidden)
            yield hidden

    @torch.inference_mode()
    def fill_drafts(
        self,
        state: FusedState,
        tokens: Tensor,
        hidden: Tensor,
        start: int,
        page_table: Indices,
        positions: Tensor | None = None,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Store the draft layer's keys and values of rows `start .. start + T - 1`. See `MTP.prefill`.

        Raises:
            InvalidRequestError: no draft layer, or as `begin`.
        """
        mtp = self.weights.mtp
        if mtp is None:
            raise InvalidRequestError("these weights hold no draft layer (mtp/ objects); use 0 draft tokens")
        call = self._call(tokens, 0, start, page_table, positions)
        own = self._views.drafts(call.rows)
        self._embed(tokens, embeddings, own.x)
        for block in call.blocks:
            rows = slice(block.first, block.first + block.rows)
            self._draft_rows(own, mtp, own.x[rows], hidden[rows], state.mtp_kv[0], call.table, block)

    def _draft_rows(
        self, own: _DraftBuffers, mtp: PackedMtp, x: Tensor, hidden: Tensor, kv: KVLayer, table: Tensor, block: _Block
    ) -> None:
        """Keys and values of the draft layer for the rows of a block with embedding `x` and trunk rows `hidden`."""
        width, scratch = self.config.hidden_size, self.work.scratch
        u, out, pair, proj = (t[: block.rows] for t in (own.u, own.out, own.pair, own.proj))
        add_norm(x, None, mtp.embedding_norm, pair[:, :width], self.eps)
        add_norm(hidden.contiguous(), None, mtp.hidden_norm, pair[:, width:], self.eps)
        packed_product(pair, mtp.proj, scratch, out)
        add_norm(out, None, mtp.layer.input_norm, u, self.eps)
        mixer = mtp.layer.mixer
        assert isinstance(mixer, PackedAttention)
        queries, values = self.config.query_width, self.config.kv_width
        for first, last in ((queries, queries + values), (2 * queries + values, 2 * (queries + values))):
            packed_product(u, rows_of(mixer.proj, first, last), scratch, proj[:, first:last])
        attention.append(
            proj, mixer.q_norm, mixer.k_norm, block.cos, block.sin, kv.codes, kv.scales, table, block.start, None,
            heads=self.config.num_attention_heads, eps=self.eps,
        )  # fmt: skip

    def _call(self, tokens: Tensor, slot: int, start: int, page_table: Indices, positions: Tensor | None) -> _Chunk:
        rows, work = tokens.shape[0], self.work
        if rows > work.rows or start + rows > work.context:
            raise InvalidRequestError(
                f"a chunk of {rows} rows up to token {start + rows}, but the workspace holds {work.rows} rows and "
                f"{work.context} tokens; split the chunk or plan a longer context"
            )
        table = torch.as_tensor(page_table, dtype=torch.int32, device=self.device)
        if table.shape[0] * FusedState.page_size < start + rows:
            raise InvalidRequestError(
                f"{table.shape[0]} pages hold {table.shape[0] * FusedState.page_size} tokens, but the call reaches "
                f"{start + rows}; give more pages"
            )
        if positions is None:
            positions = torch.arange(start, start + rows, device=self.device)
        config = self.config
        cos, sin = rope_tables(positions, config.rotary_dim, config.rope_theta, config.mrope_section)
        capacity, blocks = self._views.attention.attention.q.shape[0], []
        for first in range(0, rows, work.block):
            part = slice(first, min(first + work.block, rows))
            count, at = part.stop - first, start + first
            route = attention.Route.of(at, count, capacity, self.fused)
            blocks.append(_Block(first, count, at, cos[part], sin[part], route))
        return _Chunk(rows, slot, table, blocks)

    def _embed(self, tokens: Tensor, embeddings: tuple[Tensor, Tensor] | None, x: Tensor) -> None:
        embed_rows(self.weights.embedding, tokens.to(device=self.device, dtype=torch.int32), x)
        if embeddings is not None:
            places, features = embeddings
            x.index_copy_(0, torch.as_tensor(places, dtype=torch.int64, device=self.device), features.to(x))

    def _gdn(self, mixer: PackedGdn, store: DeltaState, call: _Chunk) -> None:
        """Gated DeltaNet of the rows in `work.u`, block by block, and its output projection to `work.out`.

        With several blocks the weights are opened once for all, where both fit in the scratch.
        """
        work, packed = self.work, (mixer.proj, mixer.output)
        opened = open_all(packed, work.scratch) if len(call.blocks) > 1 else None
        for block in call.blocks:
            u, out = (t[block.first : block.first + block.rows] for t in (work.u, work.out))
            g = self._views.gdn(block.rows)
            if opened:
                product(u, opened[0], g.proj)
            else:
                packed_product(u, mixer.proj, work.scratch, g.proj)
            product(u, mixer.side, g.ab)
            gated_delta_chunk(
                g.proj, g.ab, mixer.taps, mixer.a_log, mixer.dt_bias, mixer.norm, store, call.slot, block.start,
                g.delta, g.mixed, eps=self.eps,
            )  # fmt: skip
            if opened:
                product(g.mixed, opened[1], out)
            else:
                packed_product(g.mixed, mixer.output, work.scratch, out)

    def _attention(self, mixer: PackedAttention, store: KVLayer, call: _Chunk, block: _Block) -> None:
        """The attention of a block of the rows in `work.u`, and its output projection to `work.out`."""
        work, config, rows = self.work, self.config, block.rows
        u, out = (t[block.first : block.first + rows] for t in (work.u, work.out))
        buffers, heads, lead = self._views.attention, config.num_attention_heads, block.route.lead
        proj, mixed, own = buffers.proj[:rows], buffers.mixed[:rows], buffers.attention
        packed_product(u, mixer.proj, work.scratch, proj)
        attention.append(
            proj, mixer.q_norm, mixer.k_norm, block.cos, block.sin, store.codes, store.scales, call.table, block.start,
            own.q[lead : lead + rows], heads=heads, eps=self.eps,
        )  # fmt: skip
        attention.attention_chunk(
            proj, store.codes, store.scales, call.table, block.start, own, mixed, heads=heads, route=block.route
        )
        packed_product(mixed, mixer.output, work.scratch, out)

    def _ffn(self, layer: PackedLayer, index: int, rows: int, next_norm: Tensor, next_u: Tensor) -> None:
        """Residual sum of `work.out`, the MLP, and the next layer's normed rows into `next_u`."""
        work, config, ffn = self.work, self.config, layer.ffn
        x, u, out = work.x[:rows], work.u[:rows], work.out[:rows]
        if isinstance(ffn, PackedMlp):
            add_norm(x, out, layer.post_norm, u, self.eps)
            d = self._views.mlp(rows)
            packed_product(u, ffn.gate_up, work.scratch, d.gate_up)
            swiglu(d.gate_up, d.inner, 32)
            packed_product(d.inner, ffn.down, work.scratch, d.out)
            add_norm(x, d.out, next_norm, next_u, self.eps)
            return
        experts, active = config.num_experts, config.num_experts_per_tok
        up, down = expert_tiles(x, rows * active, experts)
        m = self._views.moe(rows, up.tokens)
        router = self.routers[index]
        assert router is not None
        add_norm(x, out, layer.post_norm, u, self.eps, slots=True)
        product(u, router, m.logits)
        moe.route(m.logits, work.counts[index], m.routing, experts, active)
        moe.expert_gate_up(ffn.gate_up, u, m.routing, m.inner, up)
        moe.expert_down(ffn.down, m.inner, m.routing, m.routed, down)
        packed_product(u, ffn.shared_gate_up, work.scratch, m.shared, slots=True)
        swiglu(m.shared, m.shared_inner, config.shared_expert_intermediate_size)
        packed_product(m.shared_inner, ffn.shared_down, work.scratch, m.shared_out)
        moe.combine(m.routed, m.routing, m.shared_out, m.logits, x, next_norm, next_u, experts, self.eps)
