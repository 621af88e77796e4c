"""Language models as shapes: how many parameters, how many bytes, what a step reads.

Counts follow from the shape alone and match the published ones (data/models.csv notes each difference).
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lessonlib.catalog import look_up, read_table
from lessonlib.checks import check_choice, check_count, check_number

WEIGHT_BITS = (2, 3, 4, 6, 8, 16, 32)
PARTS = ("embedding", "head", "norms")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer's shape. Widths are numbers of values; a count of 0 means "has none".

    Raises ValueError for a size that is not a whole number above 0, for query heads that are not a multiple of the
    KV heads, and for experts, windows or ranks that do not fit together.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """width of the MLP, or of one expert"""
    vocab_size: int
    max_context: int
    tied_embeddings: bool = False
    """whether the output head is the input embedding"""
    gated_mlp: bool = True
    sliding_window: int = 0
    num_windowed_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    num_dense_layers: int = 0
    """layers of a mixture of experts that have one plain MLP instead"""
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """total width of the experts that every token uses"""
    shared_expert_gate: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """above 0: multi-head latent attention (MLA)"""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    router_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    num_positions: int = 0
    """rows of a learned position table"""
    key: str = ""
    org: str = ""
    year: int | None = None
    license: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        optional = {
            field.name for field in dataclasses.fields(self) if field.default == 0 and field.type in ("int", int)
        }
        for field in dataclasses.fields(self):
            if field.type in ("int", int):
                check_count(field.name, getattr(self, field.name), 0 if field.name in optional else 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts ({self.num_experts}), got {self.experts_per_token}"
            )
        if self.num_experts and not self.experts_per_token:
            raise ValueError(f"experts_per_token must be at least 1 with {self.num_experts} experts, got 0")
        for name in ("num_windowed_layers", "num_dense_layers"):
            if getattr(self, name) > self.num_layers:
                raise ValueError(f"{name} must be at most num_layers ({self.num_layers}), got {getattr(self, name)}")
        if self.num_windowed_layers and not self.sliding_window:
            raise ValueError("sliding_window must be at least 1 where num_windowed_layers is not 0, got 0")
        if self.kv_lora_rank and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            raise ValueError("kv_lora_rank (MLA) also needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim above 0")

    @classmethod
    def from_hf_config(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> "ModelConfig":
        """The shape in a Hugging Face config.json: its path, its folder, its text, or its content as a dict.

        Raises FileNotFoundError, or ValueError for what is not a config of a supported family; the message names
        the fields that are missing or wrong.
        """
        from lessonlib.hf_config import read_config  # noqa: PLC0415  (it builds a ModelConfig)

        return read_config(config)

    @property
    def attention_kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.kv_lora_rank:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def kv_values_per_token_per_layer(self) -> int:
        """Numbers that one token leaves in one layer's cache: a key and a value per KV head, or MLA's one vector."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part; they add up to `num_parameters`. A tied head counts under "embedding" only."""
        layers, hidden = self.num_layers, self.hidden_size
        norm = hidden * (2 if self.norm_bias else 1)
        sparse_layers = layers - self.num_dense_layers if self.num_experts else 0
        mlp = (layers - sparse_layers) * self._mlp(self.dense_intermediate_size or self.intermediate_size)
        mlp += sparse_layers * self.num_experts * self._mlp(self.intermediate_size)
        mlp += sparse_layers * self._mlp(self.shared_intermediate_size)
        router = (hidden + self.router_bias) * self.num_experts + self.shared_expert_gate * hidden
        return {
            "embedding": self.vocab_size * hidden,
            "positions": self.num_positions * hidden,
            "attention": layers * self._attention(),
            "mlp": mlp,
            "router": sparse_layers * router,
            "norms": (layers * self.norms_per_layer + 1) * norm,
            "head": 0 if self.tied_embeddings else self.head_params,
        }

    def _attention(self) -> int:
        hidden, heads = self.hidden_size, self.num_heads
        if self.kv_lora_rank:
            query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
            q = hidden * query
            if self.q_lora_rank:
                q = (hidden + 1 + query) * self.q_lora_rank
            kv = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
            expand = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            return q + kv + expand + heads * self.v_head_dim * hidden
        qkv = self.head_dim * (heads + 2 * self.num_kv_heads)
        biases = self.qkv_bias * qkv + self.output_bias * hidden
        extras = self.qk_norm * 2 * self.head_dim + self.attention_sinks * heads
        return hidden * qkv + heads * self.head_dim * hidden + biases + extras

    def _mlp(self, width: int) -> int:
        if not width:
            return 0
        wide = 2 if self.gated_mlp else 1
        return (wide + 1) * self.hidden_size * width + self.mlp_bias * (wide * width + self.hidden_size)

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied table counted once."""
        return sum(self.parameter_counts().values())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of the routed experts only its own."""
        return self.num_parameters - round(self._experts_beyond(self.experts_per_token))

    def _experts_beyond(self, experts: float) -> float:
        """Parameters of the routed experts that are not among `experts` of each layer."""
        sparse_layers = self.num_layers - self.num_dense_layers if self.num_experts else 0
        return sparse_layers * (self.num_experts - experts) * self._mlp(self.intermediate_size)

    @property
    def head_params(self) -> int:
        """The output head's matrix, tied or not."""
        return self.vocab_size * self.hidden_size

    def distinct_experts(self, num_tokens: int = 1) -> float:
        """Experts of one layer that `num_tokens` tokens touch, on average, if routing is even: E (1 - (1 - k/E)^n)."""
        check_count("num_tokens", num_tokens)
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)

    def streamed_params(self, num_tokens: int = 1) -> float:
        """Parameters that one step over `num_tokens` tokens reads.

        Embedding and position tables are look-ups; a tied table is read as the head. Of the routed experts only
        those that some token uses are read.
        """
        parts = self.parameter_counts()
        look_ups = parts["positions"] + (0 if self.tied_embeddings else parts["embedding"])
        return self.num_parameters - look_ups - self._experts_beyond(self.distinct_experts(num_tokens))

    @property
    def matmul_params(self) -> int:
        """Parameters that each token is multiplied with: 2 FLOPs each."""
        return round(self.streamed_params(1))

    def weight_bytes(
        self,
        weight_bits: int = 16,
        group_size: int | None = None,
        scale_bits: int = 16,
        zero_bits: int = 0,
        unquantized: Collection[str] = (),
    ) -> float:
        """Bytes of all weights in memory; the parts named in `unquantized` (of PARTS) stay at 16 bits.

        Raises ValueError for a `weight_bits` that is not in WEIGHT_BITS or an unknown part.
        """
        return self._bytes(
            self.num_parameters, unquantized, effective_bits(weight_bits, group_size, scale_bits, zero_bits)
        )

    def streamed_weight_bytes(
        self,
        weight_bits: int = 16,
        group_size: int | None = None,
        scale_bits: int = 16,
        zero_bits: int = 0,
        unquantized: Collection[str] = (),
        num_tokens: int = 1,
    ) -> float:
        """Bytes of weights that one step over `num_tokens` tokens reads. Arguments as in `weight_bytes`."""
        kept = _parts(unquantized)
        if self.tied_embeddings:
            kept = kept - {"embedding"} | ({"head"} if kept & {"embedding", "head"} else set())
        elif "embedding" in kept:
            kept.remove("embedding")  # not read
        bits = effective_bits(weight_bits, group_size, scale_bits, zero_bits)
        return self._bytes(self.streamed_params(num_tokens), kept, bits)

    def _bytes(self, params: float, unquantized: Collection[str], bits: float) -> float:
        parts = self.parameter_counts()
        sizes = {"embedding": parts["embedding"], "head": self.head_params, "norms": parts["norms"]}
        kept = {"embedding" if part == "head" and self.tied_embeddings else part for part in _parts(unquantized)}
        left = sum(sizes[part] for part in kept)
        return ((params - left) * bits + left * max(16.0, bits)) / 8


def _parts(unquantized: Collection[str]) -> set[str]:
    names = {unquantized} if isinstance(unquantized, str) else set(unquantized)
    return {check_choice("unquantized", name, PARTS) for name in names}


def effective_bits(weight_bits: int, group_size: int | None = None, scale_bits: int = 16, zero_bits: int = 0) -> float:
    """Bits a weight takes with its share of its group's scale and zero point.

    Raises ValueError for a width that is not in WEIGHT_BITS, a group below 1 or a negative overhead.
    """
    check_choice("weight_bits", weight_bits, WEIGHT_BITS)
    overhead = check_number("scale_bits", scale_bits) + check_number("zero_bits", zero_bits)
    if group_size is None or (check_count("group_size", group_size) and weight_bits >= 16):
        return float(weight_bits)
    return weight_bits + overhead / group_size


@cache
def _catalog() -> dict[str, ModelConfig]:
    return {row["key"]: _from_row(row) for row in read_table("models.csv")}


def _from_row(row: dict[str, str]) -> ModelConfig:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        text = row.get(field.name, "")
        if field.type in (bool, "bool"):
            values[field.name] = text == "yes"
        elif field.type in (str, "str"):
            values[field.name] = text
        else:
            values[field.name] = int(text or 0)
    return ModelConfig(**values)


def get_model(key: str) -> ModelConfig:
    """The model of the catalog with this key, such as "llama-3.1-8b". Raises ValueError, naming near keys."""
    return _catalog()[look_up("model", key, list_models())]


def list_models() -> list[str]:
    """All keys of the catalog."""
    return list(_catalog())
