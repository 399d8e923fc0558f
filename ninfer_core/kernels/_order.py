"""Load-time repacking of published weight payloads into kernel order, and the int8 activation codec's torch twin.

Kernel order of an [N, K] matrix (N a multiple of 16): tiles of 16 rows; within a tile the units of K (32 values for
W8, 64 for Q4, Q5, Q6); within a unit for each of 32 lanes the four operand registers of `mma.m16n8k32`, one 16-byte
load. Lane 4 g + c holds in register i the values of row g (i even) or g + 8 (i odd), K = 4 c + 16 (i // 2) + 0..3 of
the unit; a 4-bit code of the second 32 values sits in the high nibble. No byte is added or lost: a weight costs in
memory what it costs in the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = {"W8": 32, "Q4": 64, "Q5": 64, "Q6": 64}
CODE = {"W8": 8, "Q4": 4, "Q5": 5, "Q6": 6}
HIGH_WORDS = {"W8": 0, "Q4": 0, "Q5": 1, "Q6": 2}


@dataclass(frozen=True, slots=True)
class KernelMatrix:
    """One grouped matrix in kernel order; `rows`, `columns` are the logical shape, `format` is W8, Q4, Q5 or Q6.

    `words` [N/16, U, 32, 4] int32, `high` [N/16, U, 32, 0|1|2] int32, `scales` [N/16, U, 8] int32: the fp16 scales of
    rows g (low half) and g + 8. U = K over the group length.
    """

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


def _to_words(byte: torch.Tensor) -> torch.Tensor:
    """Pack the last axis of four byte values (0..255) into little-endian int32 words."""
    return byte.to(torch.uint8).contiguous().view(torch.int32).squeeze(-1)


def _by_lane(registers: torch.Tensor) -> torch.Tensor:
    """Words [.., registers, 32 lanes] as [.., 32 lanes, registers]."""
    return registers.transpose(-1, -2).contiguous()


def pack_codes(codes: torch.Tensor, scales: torch.Tensor, format: str) -> KernelMatrix:
    """Codes [N, K] (integers in the format's range) and scales [N, K/group] fp16 to kernel order.

    Raises:
        ValueError: N is not a multiple of 16, or K not a multiple of 64.
    """
    rows, columns = codes.shape
    if rows % 16 or columns % 64:
        raise ValueError(
            f"kernel order needs rows in multiples of 16 and columns in multiples of 64, got {tuple(codes.shape)}"
        )
    group = GROUP[format]
    units = columns // group
    tiles = rows // 16
    # [tile, row half, g, unit, value half, K half, c, byte] -> [tile, unit, value half, K half, row half, g, c, byte]
    parts = codes.to(torch.int8).view(tiles, 2, 8, units, group // 32, 2, 4, 4).permute(0, 3, 4, 5, 1, 2, 6, 7)
    parts = parts.reshape(tiles, units, group // 32, 4, 32, 4)
    pairs = scales.view(tiles, 2, 8, units).permute(0, 3, 2, 1).contiguous().view(torch.int32).squeeze(-1)
    high = torch.empty(tiles, units, 32, 0, dtype=torch.int32, device=codes.device)
    if format == "W8":
        return KernelMatrix(_by_lane(_to_words(parts[:, :, 0])), high, pairs, format, rows, columns)
    words = _by_lane(_to_words((parts[:, :, 0] & 15) | ((parts[:, :, 1] & 15) << 4)))
    if format == "Q5":  # bit 7 - i of a byte: register i of the first 32 values; bit 3 - i: of the second
        bit = (parts >> 4) & 1
        shift = torch.tensor([[7, 6, 5, 4], [3, 2, 1, 0]], device=codes.device).view(2, 4, 1, 1)
        high = _to_words((bit.to(torch.int32) << shift).sum((2, 3))).unsqueeze(3)
    elif format == "Q6":  # bits 6 - 2 i and the next of a byte: register i; a word for each 32 values
        bits = (parts >> 4) & 3
        shift = torch.tensor([6, 4, 2, 0], device=codes.device).view(4, 1, 1)
        high = _by_lane(_to_words((bits.to(torch.int32) << shift).sum(3)))
    return KernelMatrix(words, high, pairs, format, rows, columns)


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


def from_kernel_order(matrix: KernelMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `pack_codes`: codes [N, K] int8 and scales [N, K/group] fp16."""
    tiles, units, halves = matrix.rows // 16, matrix.groups, GROUP[matrix.format] // 32
    words = matrix.words.view(torch.int8).view(tiles, units, 32, 4, 4).transpose(2, 3)
    if matrix.format == "W8":
        parts = words.unsqueeze(2)
    else:
        parts = torch.stack([words & 15, (words >> 4) & 15], 2)
        high = matrix.high.view(torch.uint8).view(tiles, units, 32, -1, 4).transpose(2, 3).unsqueeze(3)
        if matrix.format == "Q5":
            shift = torch.tensor([[7, 6, 5, 4], [3, 2, 1, 0]], dtype=torch.uint8, device=words.device)
            parts = parts | (((high >> shift.view(2, 4, 1, 1)) & 1) << 4).view(torch.int8)
        elif matrix.format == "Q6":
            shift = torch.tensor([6, 4, 2, 0], dtype=torch.uint8, device=words.device)
            parts = parts | (((high >> shift.view(4, 1, 1)) & 3) << 4).view(torch.int8)
        sign = 1 << (CODE[matrix.format] - 1)
        parts = (parts ^ sign) - sign
    parts = parts.view(tiles, units, halves, 2, 2, 8, 4, 4).permute(0, 4, 5, 1, 2, 3, 6, 7)
    scales = matrix.scales.view(torch.float16).view(tiles, units, 8, 2).permute(0, 3, 2, 1)
    return parts.reshape(matrix.rows, matrix.columns), scales.reshape(matrix.rows, units)


@dataclass(frozen=True, slots=True)
class Activation:
    """Int8 activation rows as kernels pass them on, in blocks of eight rows (the columns of one matrix product).

    Two planes: a value is s (first + second / 8), the second from -4 to 3, eleven bits in all. The mixers' projections
    read both; the rest of a layer and the heads read the first.

    `q` [B, G, 8 rows, 16 words] int32: four words for each lane of a row, K = 4 c + 16 i + 0..3 of the group in word
    4 c + i of the first plane and 4 c + 2 + i of the second. `s` [B, G, 8] fp32 scales, `ss` [B, P, 8] fp32 partial
    sums of squares of the values before the norm weight: the reader applies the RMS factor to its result, so no kernel
    waits for a whole row. G = K / 32. Rows beyond the call's last are never read into a result.
    """

    q: torch.Tensor
    s: torch.Tensor
    ss: torch.Tensor

    @staticmethod
    def empty(rows: int, columns: int, parts: int, device: torch.device | str) -> Activation:
        """Zeroed buffers for `rows` rows of `columns` values."""
        blocks, groups = -(-rows // 8), columns // 32
        return Activation(
            torch.zeros(blocks, groups, 8, 16, dtype=torch.int32, device=device),
            torch.zeros(blocks, groups, 8, dtype=torch.float32, device=device),
            torch.zeros(blocks, parts, 8, dtype=torch.float32, device=device),
        )

    @staticmethod
    def from_rows(u: torch.Tensor, parts: torch.Tensor) -> Activation:
        """Rows `u` [T, K] quantised by the twin, and their partial sums of squares `parts` [T, P]."""
        out = Activation.empty(u.shape[0], u.shape[1], parts.shape[1], u.device)
        q, s = fine_rows_ref(u)
        for t in range(u.shape[0]):
            out.q[t // 8, :, t % 8] = q[t]
            out.s[t // 8, :, t % 8] = s[t]
            out.ss[t // 8, :, t % 8] = parts[t]
        return out

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first `count` rows as q [T, G, 16], s [T, G], ss [T, P]."""
        q = self.q.transpose(1, 2).flatten(0, 1)[:count]
        return q, self.s.transpose(1, 2).flatten(0, 1)[:count], self.ss.transpose(1, 2).flatten(0, 1)[:count]

    def values(self, count: int, fine: bool = True) -> torch.Tensor:
        """The first `count` rows dequantised, or their first plane: [T, K] fp32."""
        q, s, _ = self.rows(count)
        return fine_values_ref(q, s, fine)


def fine_rows_ref(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the kernels' epilogue codec: `u` [T, K] fp32 to words [T, G, 16] of `Activation` and scales [T, G]."""
    parts = u.float().view(u.shape[0], -1, 32)
    top = parts.abs().amax(-1)
    inverse = torch.where(top > 0, 1016.0 / top, torch.zeros_like(top))
    codes = torch.round(parts * inverse[..., None]).to(torch.int32)
    first = (codes + 4) >> 3
    planes = torch.stack([first, codes - 8 * first], 2).to(torch.int8)  # [T, G, plane, 32]
    words = planes.unflatten(3, (2, 4, 4)).permute(0, 1, 4, 2, 3, 5).contiguous()  # [T, G, c, plane, half, byte]
    return words.view(u.shape[0], parts.shape[1], 64).view(torch.int32), top / 127.0


def fine_values_ref(q: torch.Tensor, s: torch.Tensor, fine: bool = True) -> torch.Tensor:
    """Inverse of `fine_rows_ref`, or the first plane alone: [T, K] fp32."""
    rows, groups, _ = q.shape
    planes = q.contiguous().view(torch.int8).view(rows, groups, 4, 2, 2, 4).permute(0, 1, 3, 4, 2, 5).float()
    codes = planes[:, :, 0] + (planes[:, :, 1] / 8 if fine else 0.0)
    return (codes.reshape(rows, groups, 32) * s[..., None]).view(rows, groups * 32)


def quantize_rows_ref(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one plane, as of the experts' inner widths: words [T, G, 8] and scales [T, G] = absmax / 127."""
    parts = u.float().view(u.shape[0], -1, 32)
    top = parts.abs().amax(-1)
    inverse = torch.where(top > 0, 127.0 / top, torch.zeros_like(top))
    codes = torch.round(parts * inverse[..., None]).to(torch.int8).contiguous()
    return codes.view(torch.int32), top / 127.0


def dequantize_rows_ref(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize_rows_ref`: [T, K] fp32."""
    rows, groups, _ = q.shape
    codes = q.contiguous().view(torch.int8).view(rows, groups, 32).float()
    return (codes * s[..., None]).view(rows, groups * 32)
