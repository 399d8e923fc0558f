"""The chunked gated delta rule for training: batched products around one short scan over chunks.

The scan and the triangular inverse are opaque operators with their own gradients: a compiler sees no unrolled loop, and
a step launches few kernels. N chunks of C tokens, G = batch x value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """Diagonal blocks [m, n, size, size] of [m, n*size, n*size]."""
    m, n = matrix.shape[0], matrix.shape[1] // size
    return matrix.view(m, n, size, n, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


@torch.library.custom_op("ninfer_demo::unit_lower_inverse", mutates_args=(), schema="(Tensor lower) -> Tensor")
def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower A [.., C, C]: 16-blocks by nilpotent products in full fp32, then merged by halves."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    C = lower.shape[-1]
    a = lower.reshape(-1, C, C)
    size = min(16, C)
    block = _blocks(a, size).contiguous()
    x = torch.eye(size, device=a.device, dtype=a.dtype) - block
    for _ in range(3):
        block = block @ block
        x = x + x @ block
    while size < C:
        first, second = x[:, 0::2], x[:, 1::2]
        corner = _blocks(a, 2 * size)[:, :, size:, :size]
        joined = x.new_zeros(x.shape[0], x.shape[1] // 2, 2 * size, 2 * size)
        joined[..., :size, :size] = first
        joined[..., size:, size:] = second
        joined[..., size:, :size] = -(second @ corner @ first)
        x, size = joined, 2 * size
    torch.set_float32_matmul_precision(precision)
    return x.reshape(lower.shape).clone(memory_format=torch.contiguous_format)


@unit_lower_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty(lower.shape, dtype=lower.dtype, device=lower.device)


def _keep_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_gradient(ctx: Any, grad: Tensor) -> Tensor:
    transposed = ctx.saved_tensors[0].transpose(-1, -2)
    return -(transposed @ grad @ transposed).tril(-1)


unit_lower_inverse.register_autograd(_inverse_gradient, setup_context=_keep_inverse)


@torch.library.custom_op(
    "ninfer_demo::scan", mutates_args=(), schema="(Tensor U, Tensor W, Tensor K, Tensor c) -> (Tensor, Tensor)"
)
def scan(U: Tensor, W: Tensor, K: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """E_n = U_n - W_n S_n and S_{n+1} = c_n S_n + K_n^T E_n from S_0 = 0.

    U, W, K [N,G,C,d], c [N,G,1,1] -> the states before each chunk [N,G,d,d] and E [N,G,C,d].
    """
    N, G, _, d = U.shape
    states, errors = U.new_zeros(N, G, d, d), torch.empty(U.shape, dtype=U.dtype, device=U.device)
    for n in range(N):
        torch.baddbmm(U[n], W[n], states[n], alpha=-1, out=errors[n])
        if n + 1 < N:
            torch.baddbmm(states[n] * c[n], K[n].transpose(1, 2), errors[n], out=states[n + 1])
    return states, errors


@scan.register_fake
def _(U: Tensor, W: Tensor, K: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    N, G, _, d = U.shape
    return U.new_empty(N, G, d, d), torch.empty(U.shape, dtype=U.dtype, device=U.device)


@torch.library.custom_op(
    "ninfer_demo::scan_back",
    mutates_args=(),
    schema="(Tensor W, Tensor K, Tensor c, Tensor dS, Tensor dE) -> (Tensor, Tensor)",
)
def scan_back(W: Tensor, K: Tensor, c: Tensor, dS: Tensor, dE: Tensor) -> tuple[Tensor, Tensor]:
    """The scan backwards: the full gradients of every E_n, and of the state after every chunk."""
    N, G, _, d = W.shape
    after, errors = W.new_zeros(N, G, d, d), torch.empty(W.shape, dtype=W.dtype, device=W.device)
    for n in range(N - 1, -1, -1):
        torch.baddbmm(dE[n], K[n], after[n], out=errors[n])
        if n:
            torch.baddbmm(
                torch.addcmul(dS[n], after[n], c[n]), W[n].transpose(1, 2), errors[n], alpha=-1, out=after[n - 1]
            )
    return errors, after


@scan_back.register_fake
def _(W: Tensor, K: Tensor, c: Tensor, dS: Tensor, dE: Tensor) -> tuple[Tensor, Tensor]:
    N, G, _, d = W.shape
    return torch.empty(W.shape, dtype=W.dtype, device=W.device), W.new_empty(N, G, d, d)


def _keep_scan(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    _, W, K, c = inputs
    ctx.save_for_backward(W, K, c, *output)


def _scan_gradient(ctx: Any, dS: Tensor, dE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    W, K, c, states, errors = ctx.saved_tensors
    dU, after = scan_back(W, K, c, dS.contiguous(), dE.contiguous())
    return (
        dU,
        -(dU @ states.transpose(-1, -2)),
        errors @ after.transpose(-1, -2),
        (states * after).sum((-1, -2), keepdim=True),
    )


scan.register_autograd(_scan_gradient, setup_context=_keep_scan)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule in fp32. q, k [B,T,Hk,d] normalised (q scaled); v [B,T,Hv,d]; g, beta [B,T,Hv]; out as v."""
    B, T, Hv, d = v.shape
    N, Hk = T // chunk, k.shape[2]

    def split(x: Tensor) -> Tensor:
        """[B,T,Hk*x,..] -> [N,B,Hk,x,C,..]."""
        x = x.reshape(B, N, chunk, Hk, -1, *x.shape[3:])
        return x.permute(1, 0, 3, 4, 2, *range(5, x.dim()))

    q, k, v = split(q), split(k), split(v)
    G = split(g).cumsum(-1)
    beta = split(beta).unsqueeze(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(later, float("-inf")).exp()
    inverse = unit_lower_inverse(((k @ k.transpose(-1, -2)) * decay * beta).tril(-1))
    start = G.exp().unsqueeze(-1)

    def flat(x: Tensor) -> Tensor:
        return x.reshape(N, B * Hv, *x.shape[4:]).contiguous()

    U, W = flat(inverse @ (v * beta)), flat(inverse @ (k * (beta * start)))
    keys = flat(k * (G[..., -1:] - G).exp().unsqueeze(-1))
    states, errors = scan(U, W, keys, flat(G[..., -1].exp()[..., None, None]))
    out = flat(q * start) @ states + flat((q @ k.transpose(-1, -2)) * decay) @ errors
    return out.reshape(N, B, Hv, chunk, d).permute(1, 0, 3, 2, 4).reshape(B, T, Hv, d)
