"""Everything a running sequence keeps on the device: KV pages, GDN state, convolution rows, the uncommitted window.

Tensors only, no cursors: which rows are valid, and how many rows of a window were accepted, is the caller's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .errors import InvalidRequestError
from .footprint import KV_GROUP, RING

_KV_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Pages of one attention layer. Keys are stored after norm and rotation, values as projected.

    `codes [2, K, pages, page_size, D]` (0 keys, 1 values) in fp32, bf16 or int8; `scales [2, K, pages, page_size, D
    / 64]` fp16 for int8, else None.
    """

    codes: Tensor
    scales: Tensor | None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.codes.shape[3]


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """State of one GDN layer for all slots, with the rows of the last window that wait for their commit.

    `s [slots, V, dk, dv]` fp32: the committed state. `conv [slots, 3 + R, C]` fp32: three committed raw rows, then the
    raw rows of the window. `k [slots, R, G, dk]` (normalised), `e [slots, R, V, dv]`, `decay [slots, R, V]` (`exp(g)`):
    row i of the window updates the state by `S <- decay_i S + k_i e_i^T`. After a window of which `j` rows count, the
    three committed raw rows are `conv[slot, j : j + 3]`.
    """

    s: Tensor
    conv: Tensor
    k: Tensor
    e: Tensor
    decay: Tensor


class DeviceState:
    """What both layouts of the state share: their bytes, and copying and clearing slots and pages.

    `kv_codes`, `kv_scales` (None unless INT8): the pages of all layers on axis 3. `_slot_tensors`: what a slot holds,
    with the slots on axis 1.
    """

    pages: int
    page_size: int
    slots: int
    device: torch.device
    kv_dtype: str
    kv_codes: Tensor
    kv_scales: Tensor | None
    kv: tuple[KVLayer, ...]
    mtp_kv: tuple[KVLayer, ...]
    _slot_tensors: tuple[Tensor, ...]

    def _make_pages(self, config: ModelConfig) -> None:
        """Zeroed pages, and the views of them for each layer."""
        attention = len(config.attention_layers)
        count = attention + config.mtp_num_hidden_layers
        shape, device = (count, 2, config.num_key_value_heads, self.pages, self.page_size), self.device
        self.kv_codes = torch.zeros(*shape, config.head_dim, dtype=_KV_TYPES[self.kv_dtype], device=device)
        self.kv_scales = (
            torch.zeros(*shape, config.head_dim // KV_GROUP, dtype=torch.float16, device=device)
            if self.kv_dtype == "int8"
            else None
        )
        layers = tuple(
            KVLayer(self.kv_codes[i], None if self.kv_scales is None else self.kv_scales[i]) for i in range(count)
        )
        self.kv, self.mtp_kv = layers[:attention], layers[attention:]

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        """What a page holds: codes, and scales if there are any."""
        return (self.kv_codes,) if self.kv_scales is None else (self.kv_codes, self.kv_scales)

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes of one page over all attention layers and the MTP layer, scales included."""
        return sum(t.numel() * t.element_size() for t in self.page_tensors) // self.pages

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot: GDN state and what it has not taken yet."""
        return sum(t.numel() * t.element_size() for t in self._slot_tensors) // self.slots

    @property
    def nbytes(self) -> int:
        """Bytes of everything held here."""
        return self.kv_bytes_per_page * self.pages + self.bytes_per_slot * self.slots

    def free(self) -> None:
        """Give the memory back now, whoever still holds a tensor of it. Nothing may be using the state."""
        for tensor in (*self.page_tensors, *self._slot_tensors):
            tensor.untyped_storage().resize_(0)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the GDN state of one slot, with what it has not taken yet, to another."""
        for tensor in self._slot_tensors:
            tensor[:, target].copy_(tensor[:, source])

    def copy_page(self, source: int, target: int) -> None:
        """Copy one KV page, of all layers, to another."""
        for tensor in self.page_tensors:
            tensor[:, :, :, target].copy_(tensor[:, :, :, source])

    def slot_parts(self, slot: int) -> Iterator[Tensor]:
        """What a slot holds, in contiguous parts; always in the same order."""
        for tensor in self._slot_tensors:
            yield from tensor[:, slot]

    def clear_slot(self, slot: int) -> None:
        """Make a slot that of a sequence without tokens."""
        for tensor in self._slot_tensors:
            tensor[:, slot].zero_()

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Overwrite KV pages with zeros."""
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        for tensor in self.page_tensors:
            tensor[:, :, :, index] = 0


class State(DeviceState):
    """Device memory for `slots` running sequences and `pages` KV pages shared by them.

    Args:
        config: the model.
        slots: sequences and checkpoints that hold GDN state at once.
        pages: KV pages, shared by all sequences; one page table serves the trunk and the MTP layer.
        page_size: tokens in a page.
        kv_dtype: "int8" (groups of 64, fp16 scales), "bf16" or "fp32".
        max_draft: most drafts in a window; a window has `max_draft + 1` rows.
        device: where the tensors live.

    Raises:
        InvalidRequestError: an unknown `kv_dtype`, or a head size that INT8 groups do not divide.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        page_size: int = 64,
        kv_dtype: str = "int8",
        max_draft: int = 3,
        device: torch.device | str = "cpu",
    ) -> None:
        if kv_dtype not in _KV_TYPES:
            raise InvalidRequestError(f"kv_dtype is {kv_dtype!r}; use one of {', '.join(_KV_TYPES)}", param="kv_dtype")
        if kv_dtype == "int8" and config.head_dim % KV_GROUP:
            raise InvalidRequestError(
                f"INT8 pages need a head size that is a multiple of {KV_GROUP}, not {config.head_dim}: use bf16",
                param="kv_dtype",
            )
        self.config, self.slots, self.pages, self.page_size = config, slots, pages, page_size
        self.kv_dtype, self.window, self.device = kv_dtype, max_draft + 1, torch.device(device)
        self._make_pages(config)
        count, heads = len(config.gdn_layers), config.linear_num_value_heads
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
        rows = (count, slots, self.window)
        history = config.linear_conv_kernel_dim - 1
        self.s = torch.zeros(count, slots, heads, dk, dv, device=device)
        self.conv = torch.zeros(count, slots, history + self.window, config.conv_channels, device=device)
        self.window_k = torch.zeros(*rows, config.linear_num_key_heads, dk, device=device)
        self.window_e = torch.zeros(*rows, heads, dv, device=device)
        self.window_decay = torch.ones(*rows, heads, device=device)
        self._slot_tensors = (self.s, self.conv, self.window_k, self.window_e, self.window_decay)
        self.gdn = tuple(
            GdnLayer(self.s[i], self.conv[i], self.window_k[i], self.window_e[i], self.window_decay[i])
            for i in range(count)
        )


@dataclass(frozen=True, slots=True)
class DeltaState:
    """Recurrent state of one GDN layer for all slots, as the fused kernels keep it.

    `s [slots, V, 128 v, 128 k]` fp32: the committed state, transposed. The rest are rings of the last `RING` tokens, at
    token index modulo `RING`: raw convolution inputs `conv [slots, RING, C]` bf16; keys before their norm `k [slots,
    RING, G * 128]`, updates `e [slots, RING, V * 128]` (with the inverse norm of the key) and log decays `g [slots,
    RING, V]`, fp32. Token t updates the state by `S <- exp(g_t) S + e_t k_t^T` once it is committed.
    """

    s: Tensor
    conv: Tensor
    k: Tensor
    e: Tensor
    g: Tensor

    @staticmethod
    def empty(slots: int, key_heads: int, value_heads: int, device: torch.device | str) -> DeltaState:
        """Zeroed state of one layer."""
        return DeltaState(*(t[0] for t in _delta_tensors(1, slots, key_heads, value_heads, device)))


def _delta_tensors(
    layers: int, slots: int, key_heads: int, value_heads: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tensors of `DeltaState` with a leading axis of layers."""

    def ring(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(layers, slots, RING, width, dtype=dtype, device=device)

    s = torch.zeros(layers, slots, value_heads, 128, 128, device=device)
    conv = ring((2 * key_heads + value_heads) * 128, torch.bfloat16)
    return s, conv, ring(key_heads * 128), ring(value_heads * 128), ring(value_heads)


class FusedState(DeviceState):
    """What `State` is, in the layouts of the fused kernels: pages of 64 tokens and `DeltaState` per GDN layer.

    A window needs no room of its own: its rows lie in the rings, so a slot serves windows of up to `RING / 2` rows.

    Args:
        config: the model.
        slots: sequences and checkpoints that hold GDN state at once.
        pages: KV pages, shared by all sequences; one page table serves the trunk and the MTP layer.
        kv_dtype: "int8" (groups of 64, fp16 scales) or "bf16".
        max_draft: most drafts in a window.
        device: where the tensors live.

    Raises:
        InvalidRequestError: head sizes, pages or a window that the fused kernels do not serve.
    """

    page_size = 64

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        kv_dtype: str = "int8",
        max_draft: int = 3,
        device: torch.device | str = "cuda",
    ) -> None:
        if kv_dtype not in ("int8", "bf16"):
            raise InvalidRequestError(
                f"kv_dtype is {kv_dtype!r}; the fused kernels read int8 or bf16", param="kv_dtype"
            )
        sizes = (config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
        if sizes != (256, 128, 128):
            raise InvalidRequestError(
                f"the head sizes are {sizes}; the fused kernels serve attention heads of 256 and GDN heads of 128"
            )
        if max_draft + 1 > RING // 2:
            raise InvalidRequestError(
                f"a window of {max_draft + 1} rows does not fit; use at most {RING // 2 - 1} drafts",
                param="draft_tokens",
            )
        self.config, self.slots, self.pages, self.device = config, slots, pages, torch.device(device)
        self.kv_dtype, self.window = kv_dtype, max_draft + 1
        self._make_pages(config)
        self._slot_tensors = _delta_tensors(
            len(config.gdn_layers), slots, config.linear_num_key_heads, config.linear_num_value_heads, device
        )
        self.gdn = tuple(DeltaState(*(t[i] for t in self._slot_tensors)) for i in range(len(config.gdn_layers)))
