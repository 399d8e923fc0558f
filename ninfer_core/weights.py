"""Artifact or checkpoint tensors -> the tree of weights that the model runs on.

Every weight is read by the object name of the published artifact format. A checkpoint with Hugging Face names is first
regrouped into the same objects, so that there is one builder. Matrices are decoded once, transposed, and padded with
zero rows to a multiple of 32 outputs: rows of results then start at aligned addresses and hold whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .config import ModelConfig, VisionConfig
from .errors import InventoryError

ALIGN = 32
"""Outputs of a product are padded to a multiple of this."""

Get = Callable[[str], Tensor]


class Source(Protocol):
    """What the loader needs of an artifact. Progress needs the `nbytes` of its tensors too."""

    @property
    def config(self) -> ModelConfig: ...  # noqa: D102

    @property
    def tensors(self) -> Mapping[str, Any]: ...  # noqa: D102

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight `W [rows, K]` as `dense [K, rows padded to 32]`: its transpose, contiguous; `weight` views it as `W`."""

    dense: Tensor
    rows: int
    weight: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", self.dense.t())


@dataclass(frozen=True, slots=True)
class GdnMixer:
    """Gated DeltaNet. `proj` rows: query, key, value, z, a, b; the rest as `kernels._op.GdnWeights` says."""

    proj: Matrix
    conv: Tensor
    gate_scale: Tensor
    gate_bias: Tensor
    qk_scale: Tensor
    norm: Tensor
    output: Matrix


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Gated attention. `proj` rows: query, key, gate, value; `qk_gain [H + K, D]`: 1 + w of the q and k norms."""

    proj: Matrix
    qk_gain: Tensor
    output: Matrix


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense SwiGLU; `gate_up` has the gate rows first."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Moe:
    """Router (the last row gates the shared expert), experts `[2I, E]` and `[E, I]` each, shared expert."""

    router: Matrix
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    shared_gate_up: Matrix
    shared_down: Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Gains are 1 + w."""

    input_gain: Tensor
    mixer: GdnMixer | AttentionMixer
    post_gain: Tensor
    ffn: Mlp | Moe


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The draft layer: `proj` takes the normed embedding (first) and the normed hidden row."""

    embedding_gain: Tensor
    hidden_gain: Tensor
    proj: Matrix
    layer: Layer
    final_gain: Tensor


@dataclass(frozen=True, slots=True)
class VisionLinear:
    """A product with bias: `dense [K, N]`, `bias [N]`."""

    dense: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class VisionNorm:
    """LayerNorm weight and bias."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One block of the vision tower."""

    norm1: VisionNorm
    qkv: VisionLinear
    output: VisionLinear
    norm2: VisionNorm
    fc1: VisionLinear
    fc2: VisionLinear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower; `position [side * side, width]` is the learned table in row-major order."""

    patch: VisionLinear
    position: Tensor
    blocks: tuple[VisionBlock, ...]
    merger_norm: VisionNorm
    merger_fc1: VisionLinear
    merger_fc2: VisionLinear


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A reduced output head; row i proposes token `ids[i]`."""

    weight: Matrix
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. Parts that the source does not hold are None."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_gain: Tensor
    head: Matrix
    draft_head: DraftHead | None
    mtp: MtpWeights | None
    vision: VisionWeights | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, views counted once."""
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in _tensors(self)}.values())


def _tensors(node: object) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [t for item in node for t in _tensors(item)]
    if hasattr(node, "__dataclass_fields__"):
        return [t for name in node.__dataclass_fields__ for t in _tensors(getattr(node, name))]
    return []


def load_weights(
    artifact: Source,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    mtp: bool = True,
    vision: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Decode all objects of an artifact onto a device.

    Args:
        artifact: an open `artifact.Artifact`.
        device: where the tensors go.
        dtype: of the matrices; norms, gates, convolution and router are always fp32.
        mtp: load the draft layer and the reduced draft head if present.
        vision: load the vision tower if present.
        progress: called with (stored bytes done, stored bytes of all objects).

    Raises:
        ArtifactError: an object is missing or damaged.
    """
    names, done = artifact.tensors, 0
    total = sum(info.nbytes for info in names.values()) if progress is not None else 0

    def get(name: str) -> Tensor:
        nonlocal done
        value = artifact.tensor(name)
        if progress is not None:
            done += names[name].nbytes
            progress(done, total)
        return value

    return _Builder(artifact.config, get, set(names), torch.device(device), dtype).weights(mtp, vision)


def load_tower(artifact: Source, config: VisionConfig, device: torch.device | str, dtype: torch.dtype) -> VisionWeights:
    """Decode the vision tower of an artifact alone; see `load_weights`.

    Raises:
        ArtifactError: an object is missing or damaged.
    """
    return _Builder(artifact.config, artifact.tensor, set(artifact.tensors), torch.device(device), dtype).vision(config)


def from_state_dict(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """Weights from tensors under their Hugging Face checkpoint names (`model.language_model...`, `mtp...`,
    `lm_head...`).

    A text-only naming (`model.layers...`) is accepted too. Vision and MTP are optional; a partial MTP is refused.

    Raises:
        InventoryError: a tensor is missing.
    """
    objects = hf_objects(tensors, config)

    def get(name: str) -> Tensor:
        return objects[name].float()

    return from_objects(config, get, set(objects), device, dtype)


def from_objects(
    config: ModelConfig, get: Get, names: set[str], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Weights:
    """Weights from a function that gives an object's values by its artifact name; `names` are those it knows.

    Raises:
        InventoryError: an object is missing.
    """
    return _Builder(config, get, names, torch.device(device), dtype).weights(True, True)


class _Builder:
    """Builds the tree from objects by artifact name."""

    def __init__(
        self, config: ModelConfig, get: Get, names: set[str], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.names, self.device, self.dtype = config, names, device, dtype
        self._get = get

    def get(self, name: str) -> Tensor:
        if name not in self.names:
            raise InventoryError(f"the weights lack {name!r}, which {self.config.model_id or 'this model'} needs")
        return self._get(name)

    def gain(self, name: str) -> Tensor:
        return (1 + self.get(name).float()).to(self.device)

    def matrix(self, *names: str, dtype: torch.dtype | None = None) -> Matrix:
        return self.fused([self.get(name) for name in names], dtype)

    def fused(self, parts: list[Tensor], dtype: torch.dtype | None = None) -> Matrix:
        rows = sum(p.shape[0] for p in parts)
        dense = torch.zeros(parts[0].shape[1], -(-rows // ALIGN) * ALIGN, dtype=dtype or self.dtype, device=self.device)
        first = 0
        for part in parts:
            dense[:, first : first + part.shape[0]] = part.to(self.device).t()
            first += part.shape[0]
        return Matrix(dense, rows)

    def weights(self, mtp: bool, vision: bool) -> Weights:
        kinds = self.config.layer_types
        draft = None
        if mtp and "text/draft_head" in self.names:
            ids = self.get("text/draft_head_token_ids").to(torch.int64).to(self.device)
            draft = DraftHead(self.matrix("text/draft_head"), ids)
        has_mtp = mtp and any(name.startswith("mtp/") for name in self.names)
        has_vision = vision and self.config.vision is not None and any(n.startswith("vision/") for n in self.names)
        return Weights(
            embedding=self.get("text/token_embedding").to(self.dtype).to(self.device),
            layers=tuple(self.layer(f"text/layers/{i}/", kind) for i, kind in enumerate(kinds)),
            final_gain=self.gain("text/final_norm"),
            head=self.matrix("text/output_head"),
            draft_head=draft,
            mtp=self.mtp() if has_mtp else None,
            vision=self.vision(self.config.vision) if has_vision and self.config.vision else None,
        )

    def layer(self, prefix: str, kind: str) -> Layer:
        mixer = self.attention(prefix) if kind == "full_attention" else self.gdn(prefix)
        return Layer(
            input_gain=self.gain(prefix + "input_norm"),
            mixer=mixer,
            post_gain=self.gain(prefix + "post_attention_norm"),
            ffn=self.moe(prefix + "moe/") if self.config.is_moe else self.mlp(prefix + "mlp/"),
        )

    def attention(self, prefix: str) -> AttentionMixer:
        prefix += "attention/"
        fused = prefix + "query_key_gate_value"
        names = (fused,) if fused in self.names else (prefix + "query_key", prefix + "gate_value")
        q = self.gain(prefix + "query_norm").expand(self.config.num_attention_heads, -1)
        k = self.gain(prefix + "key_norm").expand(self.config.num_key_value_heads, -1)
        return AttentionMixer(self.matrix(*names), torch.cat((q, k)).contiguous(), self.matrix(prefix + "output"))

    def gdn(self, prefix: str) -> GdnMixer:
        prefix += "gdn/"
        fused = prefix + "query_key_value_z"
        names = [fused] if fused in self.names else [prefix + "query_key", prefix + "value_z"]
        gates = prefix + "a_b_projection"
        names += [gates] if gates in self.names else [prefix + "a_projection", prefix + "b_projection"]
        proj = self.matrix(*names)
        config = self.config
        heads = config.linear_num_value_heads
        width = proj.dense.shape[1] - config.conv_channels - config.gdn_value_width
        scale, bias = (torch.zeros(width, device=self.device) for _ in range(2))
        scale[:heads] = -torch.exp(self.get(prefix + "a_log").float())
        bias[:heads] = self.get(prefix + "dt_bias").float()
        qk_scale = torch.ones(2 * config.linear_num_key_heads, 1, device=self.device)
        qk_scale[: config.linear_num_key_heads] = config.linear_key_head_dim**-0.5
        return GdnMixer(
            proj=proj,
            conv=self.get(prefix + "convolution").float().to(self.device).contiguous(),
            gate_scale=scale,
            gate_bias=bias,
            qk_scale=qk_scale,
            norm=self.get(prefix + "norm").float().to(self.device),
            output=self.matrix(prefix + "output"),
        )

    def mlp(self, prefix: str) -> Mlp:
        return Mlp(self.matrix(prefix + "gate_up"), self.matrix(prefix + "down"))

    def moe(self, prefix: str) -> Moe:
        return Moe(
            router=self.matrix(prefix + "router_shared_gate", dtype=torch.float32),
            gate_up=self.experts(prefix + "routed_gate_up"),
            down=self.experts(prefix + "routed_down"),
            shared_gate_up=self.matrix(prefix + "shared_gate_up"),
            shared_down=self.matrix(prefix + "shared_down"),
        )

    def experts(self, name: str) -> tuple[Matrix, ...]:
        return tuple(self.fused([w]) for w in self.get(name).unflatten(0, (self.config.num_experts, -1)))

    def mtp(self) -> MtpWeights:
        return MtpWeights(
            embedding_gain=self.gain("mtp/embedding_norm"),
            hidden_gain=self.gain("mtp/hidden_norm"),
            proj=self.matrix("mtp/input_projection"),
            layer=self.layer("mtp/layer/", "full_attention"),
            final_gain=self.gain("mtp/final_norm"),
        )

    def vision(self, config: VisionConfig) -> VisionWeights:
        def linear(name: str) -> VisionLinear:
            weight = self.get(f"vision/{name}").to(self.dtype).to(self.device)
            return VisionLinear(weight.t().contiguous(), self.get(f"vision/{name}_bias").to(self.dtype).to(self.device))

        def norm(name: str) -> VisionNorm:
            weight, bias = (self.get(f"vision/{name}/{part}") for part in ("weight", "bias"))
            return VisionNorm(weight.float().to(self.device), bias.float().to(self.device))

        def block(prefix: str) -> VisionBlock:
            return VisionBlock(
                norm(prefix + "norm1"),
                linear(prefix + "attention/qkv"),
                linear(prefix + "attention/output"),
                norm(prefix + "norm2"),
                linear(prefix + "mlp/fc1"),
                linear(prefix + "mlp/fc2"),
            )

        return VisionWeights(
            patch=linear("patch_embedding"),
            position=self.get("vision/position_embedding").float().to(self.device),
            blocks=tuple(block(f"layers/{b}/") for b in range(config.depth)),
            merger_norm=norm("merger/norm"),
            merger_fc1=linear("merger/fc1"),
            merger_fc2=linear("merger/fc2"),
        )


def hf_objects(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Regroup checkpoint tensors under the object names of the artifact format (fused naming).

    Nothing is baked in: norms stay without their 1, `A_log` stays a logarithm, heads keep their order. The query
    projection's rows are separated into query and gate; the convolution becomes tap-major.

    Raises:
        InventoryError: a tensor is missing.
    """
    text = "model.language_model." if "model.language_model.embed_tokens.weight" in tensors else "model."

    def get(name: str) -> Tensor:
        if name not in tensors:
            raise InventoryError(f"the checkpoint lacks {name!r}, which {config.model_id or 'this model'} needs")
        return tensors[name]

    objects = {
        "text/token_embedding": get(text + "embed_tokens.weight"),
        "text/final_norm": get(text + "norm.weight"),
        "text/output_head": get("lm_head.weight"),
    }
    for index, kind in enumerate(config.layer_types):
        objects |= _hf_layer(get, f"{text}layers.{index}.", f"text/layers/{index}/", kind, config)
    if any(name.startswith("mtp.") for name in tensors):
        names = {
            "input_projection": "fc",
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "final_norm": "norm",
        }
        objects |= {f"mtp/{ours}": get(f"mtp.{theirs}.weight") for ours, theirs in names.items()}
        objects |= _hf_layer(get, "mtp.layers.0.", "mtp/layer/", "full_attention", config)
    if config.vision is not None and "model.visual.pos_embed.weight" in tensors:
        objects |= _hf_vision(get, config.vision)
    return objects


def _hf_layer(get: Get, source: str, target: str, kind: str, config: ModelConfig) -> dict[str, Tensor]:
    objects = {
        "input_norm": get(source + "input_layernorm.weight"),
        "post_attention_norm": get(source + "post_attention_layernorm.weight"),
    }
    if kind == "full_attention":
        attn = source + "self_attn."
        heads = get(attn + "q_proj.weight").unflatten(0, (config.num_attention_heads, 2, config.head_dim))
        query, gate = (heads[:, half].flatten(0, 1) for half in (0, 1))
        rows = (query, get(attn + "k_proj.weight"), gate, get(attn + "v_proj.weight"))
        objects["attention/query_key_gate_value"] = torch.cat(rows)
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm"), ("output", "o_proj")):
            objects[f"attention/{ours}"] = get(f"{attn}{theirs}.weight")
    else:
        gdn = source + "linear_attn."
        objects["gdn/query_key_value_z"] = torch.cat((get(gdn + "in_proj_qkv.weight"), get(gdn + "in_proj_z.weight")))
        objects["gdn/a_b_projection"] = torch.cat((get(gdn + "in_proj_a.weight"), get(gdn + "in_proj_b.weight")))
        objects["gdn/convolution"] = get(gdn + "conv1d.weight").squeeze(1).t()
        objects["gdn/a_log"], objects["gdn/dt_bias"] = get(gdn + "A_log"), get(gdn + "dt_bias")
        objects["gdn/norm"], objects["gdn/output"] = get(gdn + "norm.weight"), get(gdn + "out_proj.weight")
    mlp = source + "mlp."
    if config.is_moe:
        objects["moe/router_shared_gate"] = torch.cat(
            (get(mlp + "gate.weight"), get(mlp + "shared_expert_gate.weight"))
        )
        objects["moe/routed_gate_up"] = get(mlp + "experts.gate_up_proj").flatten(0, 1)
        objects["moe/routed_down"] = get(mlp + "experts.down_proj").flatten(0, 1)
        shared = mlp + "shared_expert."
        gate_up = (get(shared + "gate_proj.weight"), get(shared + "up_proj.weight"))
        objects["moe/shared_gate_up"] = torch.cat(gate_up)
        objects["moe/shared_down"] = get(shared + "down_proj.weight")
    else:
        objects["mlp/gate_up"] = torch.cat((get(mlp + "gate_proj.weight"), get(mlp + "up_proj.weight")))
        objects["mlp/down"] = get(mlp + "down_proj.weight")
    return {target + name: tensor for name, tensor in objects.items()}


def _hf_vision(get: Get, config: VisionConfig) -> dict[str, Tensor]:
    root = "model.visual."
    objects = {
        "patch_embedding": get(root + "patch_embed.proj.weight").flatten(1),
        "patch_embedding_bias": get(root + "patch_embed.proj.bias"),
        "position_embedding": get(root + "pos_embed.weight"),
    }
    linears = {"merger/fc1": "merger.linear_fc1", "merger/fc2": "merger.linear_fc2"}
    norms = {"merger/norm": "merger.norm"}
    for b in range(config.depth):
        names = {"attention/qkv": "attn.qkv", "attention/output": "attn.proj", "mlp/fc1": "mlp.linear_fc1"}
        names["mlp/fc2"] = "mlp.linear_fc2"
        linears |= {f"layers/{b}/{ours}": f"blocks.{b}.{theirs}" for ours, theirs in names.items()}
        norms |= {f"layers/{b}/{name}": f"blocks.{b}.{name}" for name in ("norm1", "norm2")}
    for ours, theirs in linears.items():
        objects[ours], objects[f"{ours}_bias"] = get(f"{root}{theirs}.weight"), get(f"{root}{theirs}.bias")
    for ours, theirs in norms.items():
        objects[f"{ours}/weight"], objects[f"{ours}/bias"] = get(f"{root}{theirs}.weight"), get(f"{root}{theirs}.bias")
    return {f"vision/{name}": tensor for name, tensor in objects.items()}
