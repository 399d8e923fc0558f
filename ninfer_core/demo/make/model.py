"""The trainable twin of the engine's model in plain torch: hybrid trunk, mixture of experts, MTP, vision tower.

Module names follow the published checkpoints, so `state_dict` keys are the checkpoint's names without the prefix
`model.` (see `export.py`). Rows hold several packed documents: `segment` numbers them, and attention, convolution and
the Gated DeltaNet state never cross from one into the next.

B rows, T tokens a row, C chunk, H query heads, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .delta import delta_rule

EPS = 1e-6


@dataclass(frozen=True)
class Vision:
    """Shape of the vision tower."""

    depth: int = 2
    hidden: int = 128
    heads: int = 2
    inner: int = 512
    patch: int = 16
    temporal: int = 2
    merge: int = 2
    positions: int = 576


@dataclass(frozen=True)
class Shape:
    """Shape of the model; the defaults are the shipped demo."""

    vocab: int = 6144
    hidden: int = 256
    layers: int = 8
    interval: int = 4
    heads: int = 2
    kv_heads: int = 1
    head: int = 256
    rotary: int = 64
    theta: float = 1e7
    sections: tuple[int, int, int] = (11, 11, 10)
    key_heads: int = 2
    value_heads: int = 4
    linear: int = 128
    conv: int = 4
    experts: int = 8
    top: int = 2
    width: int = 128
    shared: int = 128
    chunk: int = 64
    vision: Vision | None = field(default_factory=Vision)


class Norm(nn.Module):
    """RMSNorm with a zero-centred weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1 + self.weight.float())


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


class GatedNorm(nn.Module):
    """RMSNorm with a plain weight; the caller multiplies the gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight.float()


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.c = c
        K, V = c.key_heads * c.linear, c.value_heads * c.linear
        self.sizes = [K, K, V]
        self.in_proj_qkv = nn.Linear(c.hidden, 2 * K + V, bias=False)
        self.in_proj_z = nn.Linear(c.hidden, V, bias=False)
        self.in_proj_b = nn.Linear(c.hidden, c.value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden, c.value_heads, bias=False)
        self.conv1d = nn.Conv1d(2 * K + V, 2 * K + V, c.conv, groups=2 * K + V, bias=False)
        step = torch.exp(torch.rand(c.value_heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.log(torch.linspace(0.02, 4, c.value_heads)))
        self.norm = GatedNorm(c.linear)
        self.out_proj = nn.Linear(V, c.hidden, bias=False)

    def forward(self, x: Tensor, segment: Tensor) -> Tensor:
        c = self.c
        B, T, _ = x.shape
        raw = self.in_proj_qkv(x)
        mixed = raw * self.conv1d.weight[:, 0, -1]
        for back in range(1, c.conv):
            same = F.pad(segment[:, back:] == segment[:, :-back], (back, 0)).unsqueeze(-1)
            mixed = mixed + F.pad(raw, (0, 0, back, 0))[:, :T] * same * self.conv1d.weight[:, 0, -1 - back]
        q, k, v = F.silu(mixed.float()).split(self.sizes, -1)

        def heads(t: Tensor) -> Tensor:
            return t.reshape(B, T, -1, c.linear)

        first = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0)).unsqueeze(-1)
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        g = torch.where(first, torch.full_like(g, -60.0), g)
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(unit(heads(q)) * c.linear**-0.5, unit(heads(k)), heads(v), g, beta, c.chunk)
        o = self.norm(o) * F.silu(self.in_proj_z(x).reshape(B, T, -1, c.linear).float())
        return self.out_proj(o.reshape(B, T, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first dims. x [B,H,T,D]; cos, sin [B,T,rotary/2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Gated full attention with normed queries and keys."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head * 2, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head, c.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(c.head), Norm(c.head)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, older: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B,T,hidden]; mask [B,1,T,T] true where visible.

        `older` holds keys and values of the aligned rows and of earlier chained rows: then row t sees the aligned rows
        of the mask, the chained rows made for it before, and itself - the rule of the engine's draft rounds.
        Returns the output and this call's rotated keys and values.
        """
        c = self.c
        B, T, _ = x.shape
        q, gate = self.q_proj(x).view(B, T, c.heads, 2 * c.head).chunk(2, -1)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin) * c.head**-0.5
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, c.kv_heads, c.head)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(B, T, c.kv_heads, c.head).transpose(1, 2).float()
        group = c.heads // c.kv_heads
        with torch.autocast(x.device.type, enabled=False):
            q = q.reshape(B, c.kv_heads, group * T, c.head)
            base_k, base_v = older[0] if older else (k, v)
            scores = (q @ base_k.transpose(-1, -2)).view(B, c.heads, T, T).masked_fill(~mask, float("-inf"))
            if not older:
                o = scores.softmax(-1).view(B, c.kv_heads, group * T, T) @ base_v
            else:
                q = q.view(B, c.kv_heads, group, T, c.head)
                own = [*older[1:], (k, v)]
                extra = torch.stack([(q * key.unsqueeze(2)).sum(-1).reshape(B, c.heads, T) for key, _ in own], -1)
                weights = torch.cat([scores, extra], -1).softmax(-1)
                o = weights[..., :T].reshape(B, c.kv_heads, group * T, T) @ base_v
                o = o.view(B, c.kv_heads, group, T, c.head)
                for n, (_, value) in enumerate(own):
                    o = o + weights[..., T + n].view(B, c.kv_heads, group, T, 1) * value.unsqueeze(2)
        o = o.reshape(B, c.heads, T, c.head).transpose(1, 2) * gate.float().sigmoid()
        return self.o_proj(o.reshape(B, T, -1)), (k, v)


class Shared(nn.Module):
    """The shared expert."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.shared, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.shared, bias=False)
        self.down_proj = nn.Linear(c.shared, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All routed experts as two stacked tensors, [out, in] per expert."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(c.experts, 2 * c.width, c.hidden) * 0.7 / math.sqrt(c.hidden))
        self.down_proj = nn.Parameter(torch.randn(c.experts, c.hidden, c.width) * 0.5 / math.sqrt(c.width * c.layers))


class MixtureOfExperts(nn.Module):
    """Top-k routing computed as one dense product with a mask: exact, no sorting, cheap at this width."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.c = c
        self.gate = nn.Linear(c.hidden, c.experts, bias=False)
        self.experts = Experts(c)
        self.shared_expert = Shared(c)
        self.shared_expert_gate = nn.Linear(c.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the balance loss and the load of each expert."""
        c = self.c
        shape = x.shape
        x = x.reshape(-1, c.hidden)
        with torch.autocast(x.device.type, enabled=False):
            p = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        w, chosen = p.topk(c.top, -1)
        w = w / w.sum(-1, keepdim=True)
        routing = torch.zeros_like(p).scatter(1, chosen, w)
        inner = F.linear(x, self.experts.gate_up_proj.reshape(-1, c.hidden)).view(-1, c.experts, 2 * c.width)
        a, b = inner.chunk(2, -1)
        h = (F.silu(a) * b * routing[..., None].to(a.dtype)).reshape(-1, c.experts * c.width)
        y = F.linear(h, self.experts.down_proj.permute(1, 0, 2).reshape(c.hidden, -1))
        y = y + torch.sigmoid(self.shared_expert_gate(x).float()).to(y.dtype) * self.shared_expert(x)
        load = (routing > 0).float().mean(0)
        return y.reshape(shape), c.experts * (load * p.mean(0)).sum() / c.top, load / c.top


class Layer(nn.Module):
    """One decoder layer; `index` decides which mixer it has."""

    def __init__(self, c: Shape, full: bool) -> None:
        super().__init__()
        self.full = full
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden), Norm(c.hidden)
        if full:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = MixtureOfExperts(c)

    def forward(self, x: Tensor, segment: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, older: Any = None) -> Any:
        """Returns (output, balance loss, expert load, keys and values or None)."""
        u = self.input_layernorm(x)
        cache = None
        if self.full:
            y, cache = self.self_attn(u, cos, sin, mask, older)
        else:
            y = self.linear_attn(u, segment)
        x = x + y.float()
        y, balance, load = self.mlp(self.post_attention_layernorm(x))
        return x + y.float(), balance, load, cache


class MTP(nn.Module):
    """The draft layer: embedding of the next token and the last hidden state -> hidden state of the token after."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden), Norm(c.hidden)
        self.layers = nn.ModuleList([Layer(c, True)])
        self.norm = Norm(c.hidden)

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        segment: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        older: Any = None,
    ) -> Any:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)).float()
        x, balance, load, cache = self.layers[0](x, segment, cos, sin, mask, older)
        return self.norm(x), balance, load, cache


class LanguageModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList([Layer(c, (i + 1) % c.interval == 0) for i in range(c.layers)])
        self.norm = Norm(c.hidden)


class Model(nn.Module):
    """Trunk, head, MTP and vision tower."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        from .tower import Tower

        self.c = c
        self.language_model = LanguageModel(c)
        self.lm_head = nn.Linear(c.hidden, c.vocab, bias=False)
        self.mtp = MTP(c)
        self.visual = Tower(c.vision, c.hidden) if c.vision else None
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Scaled normal weights; residual outputs shrink with depth."""
        depth = 1 / math.sqrt(self.c.layers)
        for name, p in self.named_parameters():
            if name.startswith("visual.") or p.dim() != 2:
                continue
            p.normal_(std=0.02 if "embed_tokens" in name else 0.7 / math.sqrt(p.shape[1]))
            if name.endswith(("out_proj.weight", "o_proj.weight", "shared_expert.down_proj.weight")):
                p.mul_(depth)
            if name.endswith("mlp.gate.weight"):
                p.mul_(0.3)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                module.weight.normal_(std=0.3)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B,T,rotary/2] of three-axis positions [B,T,3]; pair i turns with axis i mod 3."""
        pairs = self.c.rotary // 2
        index = torch.arange(pairs, device=positions.device)
        frequency = self.c.theta ** (-index.float() / pairs)
        angle = positions[..., index % 3].float() * frequency
        return angle.cos(), angle.sin()

    def embed(self, ids: Tensor, features: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """Embeddings [B,T,hidden]; vision `features` [n,hidden] replace the flat indices `places` [n]."""
        x = self.language_model.embed_tokens(ids)
        if features is not None and places is not None:
            x = x.reshape(-1, x.shape[-1]).index_copy(0, places, features.to(x.dtype)).view_as(x)
        return x

    def trunk(self, x: Tensor, segment: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Final-normed hidden states [B,T,hidden], the mean balance loss and the load [layers, experts]."""
        cos, sin = self.angles(positions)
        mask = visible(segment)
        balances, loads = [], []
        for layer in self.language_model.layers:
            x, balance, load, _ = layer(x, segment, cos, sin, mask)
            balances.append(balance)
            loads.append(load)
        return self.language_model.norm(x), torch.stack(balances).mean(), torch.stack(loads)

    def drafts(
        self, hidden: Tensor, embeddings: Tensor, segment: Tensor, positions: Tensor, steps: int = 3
    ) -> tuple[list[Tensor], Tensor]:
        """Hidden states of `steps` draft depths; `embeddings` and `positions` reach `steps` tokens past T.

        Depth k (0-based) of index t reads the token t+1+k at position t+k and predicts token t+2+k.
        """
        T = hidden.shape[1]
        segment, mask = segment[:, :T], visible(segment[:, :T])
        older: list[tuple[Tensor, Tensor]] = []
        out, balance = [], hidden.new_zeros(())
        for k in range(steps):
            cos, sin = self.angles(positions[:, k : k + T])
            hidden, extra, _, cache = self.mtp(
                embeddings[:, 1 + k : 1 + k + T], hidden, segment, cos, sin, mask, older or None
            )
            older.append(cache)
            out.append(hidden)
            balance = balance + extra / steps
        return out, balance


def visible(segment: Tensor) -> Tensor:
    """Causal mask [B,1,T,T] inside documents."""
    T = segment.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=segment.device).tril()
    return ((segment[:, :, None] == segment[:, None, :]) & causal)[:, None]
