"""The config of a model. Families are presets of these fields, so that every architecture is data, not code."""

from typing import Any, Literal

from pydantic import Field, model_validator

from ingot.config.base import Section, rule_error

# What makes a family, where it differs from the field defaults below (which are MPT's). A recipe adds the size.
FAMILIES: dict[str, dict[str, Any]] = {
    "mpt": {},
    "mosaic_gpt": {},
    "gpt3": {"activation": "gelu_tanh", "init": "normal", "residual_init": "scaled", "vocab_size": 50257,
             "vocab_multiple": 128},
    "neox": {"positions": "rotary", "rotary_pct": 0.25, "parallel_residual": True, "tie_word_embeddings": False,
             "init": "small", "residual_init": "wang", "vocab_size": 50304},
    "llama": {"positions": "rotary", "rotary_base": 500000.0, "norm": "rmsnorm", "no_bias": True,
              "activation": "swiglu", "tie_word_embeddings": False, "init": "normal", "residual_init": "scaled",
              "vocab_size": 128256},
}  # fmt: skip


class ModelConfig(Section):
    """The shape and the parts of the GPT."""

    family: Literal["mpt", "mosaic_gpt", "gpt3", "neox", "llama"] = "mpt"
    """The preset for every field that is not set."""
    d_model: int = Field(default=2048, gt=0, le=1_000_000)
    """Width of the residual stream."""
    n_heads: int = Field(default=16, gt=0, le=1_000_000)
    """Attention heads; must divide d_model unless head_dim is given."""
    n_layers: int = Field(default=24, gt=0)
    """Transformer blocks."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Key/value heads: fewer than n_heads for grouped-query attention, 1 for multi-query. Default: n_heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of one head. Default: d_model / n_heads."""
    expansion_ratio: float = Field(default=4, gt=0)
    """MLP width as a multiple of d_model."""
    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """MLP width; overrides expansion_ratio."""
    vocab_size: int = Field(default=50368, gt=0)
    """Number of tokens in the vocabulary."""
    vocab_multiple: int = Field(default=1, gt=0)
    """Pad the embedding rows to a multiple of this (128 suits GPUs). Padding is never predicted or exported."""
    eos_token_id: int | None = Field(default=None, ge=0)
    """The token that ends a document; document_mask, document_positions and the run's mask_eos_loss need it."""
    document_mask: bool = False
    """Each token sees only its own document, in training and evaluation."""
    document_positions: bool = False
    """Positions restart at 0 with each document."""
    max_seq_len: int | None = Field(default=None, gt=0)
    """Longest sequence (rows of the learned position table). Default: the run's max_seq_len."""
    positions: Literal["learned", "alibi", "rotary", "none"] = "learned"
    """How the model encodes positions."""
    alibi_bias_max: float = Field(default=8, gt=0)
    """The steepest ALiBi slope is 2^-(alibi_bias_max / n_heads)."""
    rotary_pct: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head that is rotated."""
    rotary_base: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies (rope theta)."""
    norm: Literal["layernorm", "low_precision_layernorm", "rmsnorm"] = "layernorm"
    """Normalization; low_precision_layernorm computes in the autocast type instead of fp32."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance, for numerical stability."""
    no_bias: bool = False
    """Drop the biases of linear layers and norms."""
    norm_bias: bool | None = None
    """Whether norms have biases, if that differs from linear layers. Default: not no_bias."""
    qk_ln: bool | Literal["heads"] = False
    """Normalize queries and keys: true over the whole width, before the heads are split (MPT); heads for each head
    separately, with one weight for all heads (Megatron)."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Clamp queries, keys and values to [-clip_qkv, clip_qkv]."""
    softmax_scale: float | None = Field(default=None, gt=0)
    """Attention scale. Default: 1/sqrt(head_dim)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """How many of the latest tokens a token sees, itself included. Default: all."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """MLP activation: exact GELU, its tanh approximation, or the gated SwiGLU."""
    parallel_residual: bool = False
    """Compute x + attn(norm_1(x)) + mlp(norm_2(x)) instead of attention first and MLP second."""
    tie_word_embeddings: bool = True
    """Use the token embedding as the output head."""
    emb_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the embeddings."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the outputs of attention and MLP, before they are added to the residual stream."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on attention weights."""
    init: Literal["kaiming_normal", "normal", "small"] = "kaiming_normal"
    """Initial weights: N(0, sqrt(2/fan_in)); N(0, init_std); N(0, sqrt(2/(5 d_model)))."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of init: normal."""
    residual_init: Literal["scaled", "wang", "same"] = "scaled"
    """Initial weights of the projections back to the residual stream: init / sqrt(2 n_layers); N(0, 2/(n_layers
    sqrt(d_model))); the same as init."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {**FAMILIES.get(str(values.get("family", "mpt")), {}), **values}
        return values

    @model_validator(mode="after")
    def _check_shape(self) -> "ModelConfig":
        if self.head_dim is None and self.d_model % self.n_heads:
            fits = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
            near = min(fits, key=lambda n: abs(n - self.n_heads))
            raise rule_error(
                "n_heads", f"{self.n_heads} heads do not divide d_model {self.d_model}; use {near}, or set head_dim"
            )
        if self.n_heads % self.kv_heads:
            raise rule_error("n_kv_heads", f"{self.kv_heads} does not divide n_heads {self.n_heads}")
        if self.ffn_hidden_size is None and not float(self.expansion_ratio * self.d_model).is_integer():
            raise rule_error(
                "expansion_ratio", f"{self.expansion_ratio} x d_model {self.d_model} is not a whole number"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise rule_error("norm_bias", "rmsnorm has no bias; remove norm_bias")
        if self.eos_token_id is None and (self.document_mask or self.document_positions):
            raise rule_error("eos_token_id", "is missing; set it to the token that ends a document")
        if self.positions == "rotary" and self.rotary_dim % 2:
            raise rule_error("rotary_pct", f"rotates {self.rotary_dim} of {self.head_width} dimensions; must be even")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def has_norm_bias(self) -> bool:
        bias = not self.no_bias if self.norm_bias is None else self.norm_bias
        return bias and self.norm != "rmsnorm"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_width * self.rotary_pct)

    @property
    def ffn_width(self) -> int:
        return self.ffn_hidden_size or int(self.expansion_ratio * self.d_model)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def context(self) -> int:
        """Longest sequence that the model accepts."""
        return self.max_seq_len or 2048

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        heads, groups = self.n_heads * self.head_width, self.kv_heads * self.head_width
        norm = 2 if self.has_norm_bias else 1  # vectors of a norm
        normed = 2 * self.head_width if self.qk_ln == "heads" else heads + groups if self.qk_ln else 0
        up = self.ffn_width * (2 if self.activation == "swiglu" else 1)
        matrices = self.d_model * (2 * heads + 2 * groups) + self.d_model * (up + self.ffn_width)
        biases = 0 if self.no_bias else heads + 2 * groups + self.d_model + up + self.d_model
        return matrices + biases + norm * (2 * self.d_model + normed)

    @property
    def end_parameters(self) -> int:
        """Number of parameters outside the blocks: embeddings, head and final norm."""
        rows = self.vocab_rows * (1 if self.tie_word_embeddings else 2)
        rows += self.context if self.positions == "learned" else 0
        return self.d_model * (rows + (2 if self.has_norm_bias else 1))

    @property
    def parameters(self) -> int:
        """Exact number of parameters; no model is built for it."""
        return self.n_layers * self.block_parameters + self.end_parameters

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Training FLOPs per token, forward and backward: 6 N + 12 L d S.

        The attention term is the full square, as the field reports it; `causal` counts the half that is computed. N
        leaves out an input embedding that is not also the head.
        """
        n = self.parameters
        if not self.tie_word_embeddings:
            n -= self.vocab_rows * self.d_model
        attention = 12 * self.n_layers * self.n_heads * self.head_width * seq_len
        return 6 * n + attention / (2 if causal else 1)
