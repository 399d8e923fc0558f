"""Which objects an artifact holds: names, shapes and formats, derived from a model configuration and a recipe.

One rule serves the two published models and the demo. The dense model stores `query_key` and `gate_value` apart (they
have different formats), the mixture-of-experts model fuses them. What a published `.ninfer` file holds is a closed
list; for the directory form the same names and shapes are required, while formats may differ within their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from .config import PUBLISHED, QWEN36_35B_A3B, ModelConfig, VisionConfig
from .errors import InventoryError, UnknownIdentityError
from .formats import BF16, FP32, I32, Q4, Q5, Q6, W8, format_of

Inventory = dict[str, tuple[tuple[int, ...], str]]

FRONTEND = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Resource names in file order; `.ninfer` files prefix them with `frontend/`."""

TOKEN_IDS = {"qwen3.6-27b": 248077, "qwen3.6-35b-a3b": 248077}
"""Ids that are tokens, by published model; the rows after them are padding."""

_VISION_FORMATS = {
    "vision/patch_embedding": Q6,
    "vision/attention/qkv": Q4,
    "vision/attention/output": Q5,
    "vision/mlp/fc1": Q4,
    "vision/mlp/fc2": Q5,
    "vision/merger/fc1": W8,
    "vision/merger/fc2": W8,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which format each matrix takes.

    `formats` maps a role to a grouped format. Roles are object names without `text/`, the layer number and the part
    number: `token_embedding`, `gdn/output`, `moe/routed_down`, `vision/mlp/fc1`; all matrices of the MTP layer share
    the role `mtp`. `layers` overrides single text layers. Norms, biases, convolution, decay parameters, router and the
    small GDN projections are always stored unquantized. `draft_rows`: rows of the reduced draft head, 0 for none, None
    for half the vocabulary rows.
    """

    name: str
    formats: Mapping[str, str]
    layers: Mapping[tuple[str, int], str] = field(default_factory=dict)
    draft_rows: int | None = None

    def format(self, role: str, layer: int = -1) -> str:
        """The format of a role in a text layer.

        Raises:
            UnknownIdentityError: the recipe does not mention the role.
        """
        found = self.layers.get((role, layer)) or self.formats.get(role)
        if found is None:
            raise UnknownIdentityError(f"recipe {self.name!r} has no format for {role!r}")
        return found

    def with_formats(self, **changes: str) -> Recipe:
        """A copy with some formats replaced; `__` in a keyword stands for `/`."""
        return replace(self, formats={**self.formats, **{k.replace("__", "/"): v for k, v in changes.items()}})


RECIPE_27B = Recipe(
    "qwen3_6_27b-v2",
    {
        "token_embedding": Q6,
        "output_head": Q6,
        "draft_head": Q4,
        "attention/query_key": Q4,
        "attention/gate_value": Q5,
        "attention/output": Q5,
        "gdn/query_key": Q4,
        "gdn/value_z": Q5,
        "gdn/output": Q5,
        "mlp/gate_up": Q4,
        "mlp/down": Q5,
        "mtp": W8,
        **_VISION_FORMATS,
    },
    draft_rows=131072,
)
RECIPE_35B = Recipe(
    "qwen3_6_35b_a3b-v2",
    {
        "token_embedding": W8,
        "output_head": Q6,
        "draft_head": Q4,
        "attention/query_key_gate_value": W8,
        "attention/output": W8,
        "gdn/query_key_value_z": W8,
        "gdn/output": W8,
        "moe/routed_gate_up": Q4,
        "moe/routed_down": Q5,
        "moe/shared_gate_up": W8,
        "moe/shared_down": W8,
        "mtp": W8,
        "dflash": W8,
        **_VISION_FORMATS,
    },
    layers={("moe/routed_down", layer): Q6 for layer in (34, 38, 39)},
    draft_rows=131072,
)
_MIXER_MATRICES = (
    "attention/query_key",
    "attention/gate_value",
    "attention/query_key_gate_value",
    "attention/output",
    "gdn/query_key",
    "gdn/value_z",
    "gdn/query_key_value_z",
    "gdn/output",
)
RECIPE_DEMO = Recipe(
    "demo",
    {
        **dict.fromkeys(_MIXER_MATRICES, Q5),
        "token_embedding": Q6,
        "output_head": Q6,
        "draft_head": Q4,
        "mlp/gate_up": Q4,
        "mlp/down": Q5,
        "moe/routed_gate_up": Q4,
        "moe/routed_down": Q5,
        "moe/shared_gate_up": W8,
        "moe/shared_down": W8,
        "mtp": W8,
        **_VISION_FORMATS,
    },
)
RECIPES = {"qwen3.6-27b": RECIPE_27B, "qwen3.6-35b-a3b": RECIPE_35B, "ninfer-demo": RECIPE_DEMO}


def default_recipe(config: ModelConfig) -> Recipe:
    """The published recipe of the model, the demo's for the demo, else the one for its kind of MLP.

    A small model whose vocabulary has fewer rows than the published draft head gets one of half its rows.
    """
    recipe = RECIPES.get(config.model_id) or (RECIPE_35B if config.is_moe else RECIPE_27B)
    if recipe.draft_rows is not None and recipe.draft_rows >= config.vocab_size:
        recipe = replace(recipe, draft_rows=None)
    return recipe


def draft_rows(config: ModelConfig, recipe: Recipe) -> int:
    """Rows of the draft head this recipe asks for; 0 for none."""
    return config.vocab_size // 2 if recipe.draft_rows is None else recipe.draft_rows


def inventory(
    config: ModelConfig,
    recipe: Recipe | None = None,
    *,
    mtp: bool | None = None,
    vision: bool | None = None,
    draft: bool | None = None,
    dflash: bool = False,
) -> Inventory:
    """All tensors of an artifact in file order: name -> (shape, format).

    Args:
        config: the model.
        recipe: formats; None takes `default_recipe(config)`.
        mtp: hold the MTP layer; None asks the config.
        vision: hold the vision tower; None asks the config.
        draft: hold the reduced draft head; None asks the recipe.
        dflash: hold the unused block-drafting objects of the second published 35B file.
    """
    recipe = recipe or default_recipe(config)
    h, v = config.hidden_size, config.vocab_size
    rows = draft_rows(config, recipe)
    out: Inventory = {"text/token_embedding": ((v, h), recipe.format("token_embedding"))}
    for layer, kind in enumerate(config.layer_types):
        for name, shape, fmt in _layer(config, recipe, kind, layer):
            out[f"text/layers/{layer}/{name}"] = (shape, fmt)
    out["text/final_norm"] = ((h,), BF16)
    out["text/output_head"] = ((v, h), recipe.format("output_head"))
    if draft if draft is not None else rows > 0:
        out["text/draft_head"] = ((rows, h), recipe.format("draft_head"))
        out["text/draft_head_token_ids"] = ((rows,), I32)
    if mtp if mtp is not None else config.mtp_num_hidden_layers > 0:
        out |= _mtp(config, recipe)
    if config.vision is not None and vision is not False:
        out |= _vision(config.vision, recipe)
    if dflash:
        out |= _dflash(recipe)
    return out


def _layer(config: ModelConfig, recipe: Recipe, kind: str, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """One text layer (or, with layer -1, the MTP layer, whose matrices all have the role `mtp`)."""
    h, q, kv, d = config.hidden_size, config.query_width, config.kv_width, config.head_dim

    def matrix(role: str, *shape: int) -> tuple[str, tuple[int, ...], str]:
        return role, shape, recipe.format("mtp" if layer < 0 else role, layer)

    yield "input_norm", (h,), BF16
    if kind == "full_attention":
        if config.is_moe or layer < 0:
            yield matrix("attention/query_key_gate_value", 2 * (q + kv), h)
        else:
            yield matrix("attention/query_key", q + kv, h)
            yield matrix("attention/gate_value", q + kv, h)
        yield "attention/query_norm", (d,), BF16
        yield "attention/key_norm", (d,), BF16
        yield matrix("attention/output", h, q)
    else:
        heads, key, value = config.linear_num_value_heads, config.gdn_key_width, config.gdn_value_width
        yield "gdn/a_log", (heads,), FP32
        yield "gdn/dt_bias", (heads,), FP32
        yield "gdn/convolution", (config.linear_conv_kernel_dim, config.conv_channels), BF16
        if config.is_moe:
            yield "gdn/a_b_projection", (2 * heads, h), BF16
            yield matrix("gdn/query_key_value_z", 2 * (key + value), h)
        else:
            yield "gdn/a_projection", (heads, h), BF16
            yield "gdn/b_projection", (heads, h), BF16
            yield matrix("gdn/query_key", 2 * key, h)
            yield matrix("gdn/value_z", 2 * value, h)
        yield "gdn/norm", (config.linear_value_head_dim,), BF16
        yield matrix("gdn/output", h, value)
    yield "post_attention_norm", (h,), BF16
    if config.is_moe:
        experts, width, shared = (
            config.num_experts,
            config.moe_intermediate_size,
            config.shared_expert_intermediate_size,
        )
        yield "moe/router_shared_gate", (experts + 1, h), BF16
        yield matrix("moe/routed_gate_up", experts * 2 * width, h)
        yield matrix("moe/routed_down", experts * h, width)
        yield matrix("moe/shared_gate_up", 2 * shared, h)
        yield matrix("moe/shared_down", h, shared)
    else:
        yield matrix("mlp/gate_up", 2 * config.intermediate_size, h)
        yield matrix("mlp/down", h, config.intermediate_size)


def _mtp(config: ModelConfig, recipe: Recipe) -> Inventory:
    h = config.hidden_size
    out: Inventory = {
        "mtp/input_projection": ((h, 2 * h), recipe.format("mtp")),
        "mtp/embedding_norm": ((h,), BF16),
        "mtp/hidden_norm": ((h,), BF16),
    }
    for name, shape, fmt in _layer(config, recipe, "full_attention", -1):
        out[f"mtp/layer/{name}"] = (shape, fmt)
    return out | {"mtp/final_norm": ((h,), BF16)}


def _vision(vision: VisionConfig, recipe: Recipe) -> Inventory:
    w, m = vision.hidden_size, vision.intermediate_size
    merged = w * vision.spatial_merge_size**2
    out: Inventory = {}

    def linear(name: str, rows: int, columns: int, role: str) -> None:
        out[f"vision/{name}"] = ((rows, columns), recipe.format(f"vision/{role}"))
        out[f"vision/{name}_bias"] = ((rows,), BF16)

    def norm(name: str) -> None:
        out[f"vision/{name}/weight"] = out[f"vision/{name}/bias"] = ((w,), BF16)

    linear("patch_embedding", w, vision.patch_dim, "patch_embedding")
    out["vision/position_embedding"] = ((vision.num_position_embeddings, w), BF16)
    for b in range(vision.depth):
        linear(f"layers/{b}/attention/qkv", 3 * w, w, "attention/qkv")
        linear(f"layers/{b}/attention/output", w, w, "attention/output")
        linear(f"layers/{b}/mlp/fc1", m, w, "mlp/fc1")
        linear(f"layers/{b}/mlp/fc2", w, m, "mlp/fc2")
        norm(f"layers/{b}/norm1")
        norm(f"layers/{b}/norm2")
    linear("merger/fc1", merged, merged, "merger/fc1")
    linear("merger/fc2", vision.out_hidden_size, merged, "merger/fc2")
    norm("merger/norm")
    return out


def _dflash(recipe: Recipe) -> Inventory:
    """The block-drafting objects of the second published 35B file: validated, never used."""
    h, heads, kv, d, inner, taps = 2048, 32, 8, 128, 6144, 8
    out: Inventory = {
        "dflash/feature_projection": ((h, taps * h), recipe.format("dflash")),
        "dflash/context_norm": ((h,), BF16),
    }
    for layer in range(6):
        p = f"dflash/layers/{layer}/"
        out[p + "input_norm"] = ((h,), BF16)
        out[p + "attention/query_key_value"] = (((heads + 2 * kv) * d, h), recipe.format("dflash"))
        out[p + "attention/query_norm"] = out[p + "attention/key_norm"] = ((d,), BF16)
        out[p + "attention/output"] = ((h, heads * d), recipe.format("dflash"))
        out[p + "post_attention_norm"] = ((h,), BF16)
        out[p + "mlp/gate_up"] = ((2 * inner, h), recipe.format("dflash"))
        out[p + "mlp/down"] = ((h, inner), recipe.format("dflash"))
    return out | {"dflash/final_norm": ((h,), BF16)}


def published_inventories(model_id: str) -> tuple[Inventory, ...]:
    """The inventories a `.ninfer` file of this model may have; the 35B file exists with and without `dflash/`.

    Raises:
        UnknownIdentityError: no published model has this id.
    """
    config = PUBLISHED.get(model_id)
    if config is None:
        raise UnknownIdentityError(
            f"model_id {model_id!r} is not one of {', '.join(PUBLISHED)}; a .ninfer file carries no configuration, "
            "so only these can be run from one"
        )
    plain = inventory(config)
    return (plain, inventory(config, dflash=True)) if config is QWEN36_35B_A3B else (plain,)


def check_inventory(found: Mapping[str, tuple[tuple[int, ...], str]], wanted: Inventory, *, exact: bool) -> None:
    """Compare tensors by name, shape and format; order does not matter.

    Args:
        found: tensors of the artifact.
        wanted: tensors of the model.
        exact: formats must be equal; otherwise any grouped format may stand for another.

    Raises:
        InventoryError: names the first object that is missing, unexpected or different.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    if missing or extra:
        parts = [f"{len(missing)} objects are missing, first {missing[0]!r}"] if missing else []
        parts += [f"{len(extra)} objects are not expected, first {extra[0]!r}"] if extra else []
        raise InventoryError(f"wrong set of tensors for this model ({len(found)} found): " + "; ".join(parts))
    for name, (shape, fmt) in wanted.items():
        got_shape, got_format = found[name]
        if got_shape != shape:
            raise InventoryError(f"{name}: shape {list(got_shape)} found, {list(shape)} expected")
        both_grouped = format_of(got_format).grouped and format_of(fmt).grouped
        if got_format != fmt and (exact or not both_grouped):
            raise InventoryError(f"{name}: format {got_format} found, {fmt} expected")
