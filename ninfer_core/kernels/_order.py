"""Load-time repacking of published weight payloads into kernel order, and the int8 activation codec's torch twin.

Kernel order of an [N, K] matrix (N a multiple of 32, K of the group): row tiles of 32; within a tile, plane by plane,
row by row, group by group. `words` [N/32, 8, 32, G] int32, `high` [N/32, 0|2|4, 32, G] int32, `scales` [N, G] fp16.
No byte is added or lost, so a weight costs in memory what it costs in the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = {"W8": 32, "Q4": 64, "Q5": 64, "Q6": 64}
CODE = {"W8": 8, "Q4": 4, "Q5": 5, "Q6": 6}
HIGH_PLANES = {"W8": 0, "Q4": 0, "Q5": 2, "Q6": 4}


@dataclass(frozen=True, slots=True)
class KernelMatrix:
    """One grouped matrix in kernel order. `format` is W8, Q4, Q5 or Q6; `rows`, `columns` the logical shape."""

    words: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor
    format: str
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        """Scale groups in a row."""
        return self.columns // GROUP[self.format]

    @property
    def code(self) -> int:
        """Bits per code: the kernels' FMT."""
        return CODE[self.format]

    @property
    def nbytes(self) -> int:
        """Bytes a full read moves."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.high, self.scales))


def _even_odd(groups: int, device: torch.device | str) -> torch.Tensor:
    """Order of groups of 32: even ones, then odd ones, so that both halves of groups of 64 lie contiguous."""
    index = torch.arange(groups, device=device)
    return torch.cat([index[0::2], index[1::2]])


def _to_words(byte: torch.Tensor) -> torch.Tensor:
    """Pack the last axis of four byte values (0..255, int32) into little-endian int32 words."""
    shifted = byte.to(torch.int64) << torch.arange(0, 32, 8, device=byte.device)
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def pack_codes(codes: torch.Tensor, scales: torch.Tensor, format: str) -> KernelMatrix:
    """Codes [N, K] (integers in the format's range) and scales [N, K/group] fp16 to kernel order.

    Raises:
        ValueError: N is not a multiple of 32, or K not a multiple of 64.
    """
    rows, columns = codes.shape
    if rows % 32 or columns % 64:
        raise ValueError(f"kernel order needs rows in multiples of 32 and columns in multiples of 64, got {codes.shape}")
    group = GROUP[format]
    groups = columns // group
    tiles = rows // 32
    device = codes.device
    # [tile, row, group, half, plane, byte]
    parts = codes.to(torch.int32).view(tiles, 32, groups, group // 32, 8, 4)
    if format == "W8":
        order = _even_odd(groups, device)
        words = _to_words(parts[:, :, order, 0] & 255).permute(0, 3, 1, 2)
        high = torch.empty(tiles, 0, 32, groups, dtype=torch.int32, device=device)
        return KernelMatrix(words.contiguous(), high, scales[:, order].contiguous(), format, rows, columns)
    low = (parts[:, :, :, 0] & 15) | ((parts[:, :, :, 1] & 15) << 4)
    words = _to_words(low).permute(0, 3, 1, 2).contiguous()
    top = (parts >> 4) & ((1 << (CODE[format] - 4)) - 1) if format != "Q4" else None
    if top is None:
        high = torch.empty(tiles, 0, 32, groups, dtype=torch.int32, device=device)
    elif format == "Q5":
        shift = torch.arange(7, -1, -1, device=device)[:, None]
        high = _to_words((top << shift).sum(-2)).permute(0, 3, 1, 2).contiguous()
    else:
        quads = top.view(tiles, 32, groups, 2, 2, 4, 4)
        shift = torch.arange(6, -1, -2, device=device)[:, None]
        high = _to_words((quads << shift).sum(-2)).reshape(tiles, 32, groups, 4).permute(0, 3, 1, 2).contiguous()
    return KernelMatrix(words, high, scales.contiguous(), format, rows, columns)


def unpack_payload(payload: torch.Tensor, format: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A published payload (uint8, planes at multiples of 256) to codes [N, K] int8 and scales [N, K/group] fp16.

    Columns must be a multiple of 128, which holds for every text and MTP matrix of the two models.
    """
    if columns % 128:
        raise ValueError(f"columns must be a multiple of 128, got {columns}")

    def up(n: int) -> int:
        return -(-n // 256) * 256

    groups = columns // GROUP[format]
    base_bytes = rows * columns // (1 if format == "W8" else 2)
    high_bytes = {"W8": 0, "Q4": 0, "Q5": rows * columns // 8, "Q6": rows * columns // 4}[format]
    high_at = up(base_bytes)
    scale_at = high_at + up(high_bytes)
    scales = payload[scale_at : scale_at + rows * groups * 2].view(torch.float16).view(rows, groups)
    base = payload[:base_bytes]
    if format == "W8":
        return base.view(torch.int8).view(rows, columns), scales
    codes = torch.stack([base & 15, base >> 4], -1).view(rows, columns).to(torch.int16)
    if format != "Q4":
        step = 1 if format == "Q5" else 2
        shift = torch.arange(0, 8, step, dtype=torch.uint8, device=payload.device)
        top = (payload[high_at : high_at + high_bytes, None] >> shift) & ((1 << step) - 1)
        codes = codes | (top.view(rows, columns).to(torch.int16) << 4)
    sign = 1 << (CODE[format] - 1)
    return ((codes ^ sign) - sign).to(torch.int8), scales


def to_kernel_order(payload: torch.Tensor, format: str, rows: int, columns: int) -> KernelMatrix:
    """Repack one published payload; `format` is W8, Q4, Q5 or Q6 (the word before the group length)."""
    codes, scales = unpack_payload(payload, format, rows, columns)
    return pack_codes(codes, scales, format)


@dataclass(frozen=True, slots=True)
class Activation:
    """Int8 activation rows as kernels pass them on.

    `q` [T, 8, G] int32 words, `s` [T, G] fp32 scales, `ss` [T, P] fp32 partial sums of squares of the values before
    the norm weight: the reader applies the RMS factor to its result, so no kernel waits for a whole row. G = K / 32,
    even groups before odd ones.
    """

    q: torch.Tensor
    s: torch.Tensor
    ss: torch.Tensor

    @staticmethod
    def empty(rows: int, columns: int, parts: int, device: torch.device | str) -> Activation:
        """Uninitialised buffers for `rows` rows of `columns` values."""
        groups = columns // 32
        return Activation(
            torch.empty(rows, 8, groups, dtype=torch.int32, device=device),
            torch.empty(rows, groups, dtype=torch.float32, device=device),
            torch.empty(rows, parts, dtype=torch.float32, device=device),
        )


def quantize_rows_ref(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the kernels' epilogue codec: `u` [T, K] fp32 to (q [T, 8, G], s [T, G]), scale = absmax / 127."""
    rows, columns = u.shape
    groups = columns // 32
    parts = u.float().view(rows, groups, 32)[:, _even_odd(groups, u.device)]
    top = parts.abs().amax(-1)
    inverse = torch.where(top > 0, 127.0 / top, torch.zeros_like(top))
    codes = torch.round(parts * inverse[..., None]).to(torch.int32) & 255
    return _to_words(codes.view(rows, groups, 8, 4)).permute(0, 2, 1).contiguous(), top / 127.0


def dequantize_rows_ref(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize_rows_ref`: [T, K] fp32."""
    rows, _, groups = q.shape
    codes = q.permute(0, 2, 1).contiguous().view(torch.int8).view(rows, groups, 32).float() * s[..., None]
    out = torch.empty_like(codes)
    out[:, _even_odd(groups, q.device)] = codes
    return out.view(rows, groups * 32)
