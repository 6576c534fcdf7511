"""The peers of benchmarks/gpu.py, each as its users have it, with ingot's initial weights put in.

`nanogpt` is nanoGPT's model written down again: learned positions, SDPA, tied head, cross-entropy over fp32 logits.
`hf` is transformers' GPT-2 with SDPA. `torch` is nn.TransformerEncoder. All take tokens and labels and give the summed
loss, under autocast, compiled whole, with torch's fused AdamW.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model.gpt import IGNORE
from ingot.model.precision import autocast
from ingot.parallel.executors.base import to_device

# ingot's name within a block: nanoGPT's and GPT-2's, nn.TransformerEncoderLayer's
BLOCK = {
    "norm_1": ("ln_1", "norm1"), "attn.qkv": ("attn.c_attn", "self_attn.in_proj_"),
    "attn.out": ("attn.c_proj", "self_attn.out_proj"), "norm_2": ("ln_2", "norm2"), "mlp.up": ("mlp.c_fc", "linear1"),
    "mlp.down": ("mlp.c_proj", "linear2"),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, config: RunConfig):
        super().__init__()
        m = config.model
        self.wte, self.wpe = nn.Embedding(m.vocab_size, m.d_model), nn.Embedding(m.context, m.d_model)
        self.h = nn.ModuleList(Block(m.d_model, m.n_heads, m.ffn_width) for _ in range(m.n_layers))
        self.ln_f = nn.LayerNorm(m.d_model)
        self.recomputed = False  # which a large one needs when it is not compiled
        self.stream = torch.float32  # type of the residual stream

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = (self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))).to(self.stream)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(F.linear(self.ln_f(x), self.wte.weight), labels)

    def blocks(self) -> list[nn.Module]:
        return list(self.h)


class Encoder(nn.Module):
    def __init__(self, config: RunConfig):
        super().__init__()
        m = config.model
        self.wte, self.wpe = nn.Embedding(m.vocab_size, m.d_model), nn.Embedding(m.context, m.d_model)
        layer = nn.TransformerEncoderLayer(
            m.d_model, m.n_heads, m.ffn_width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, m.n_layers, nn.LayerNorm(m.d_model), enable_nested_tensor=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.wte(tokens) + self.wpe(torch.arange(time, device=tokens.device))
        return summed_loss(F.linear(self.encoder(x, mask=mask, is_causal=True), self.wte.weight), labels)


class HuggingFace(nn.Module):
    def __init__(self, config: RunConfig):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        m = config.model
        self.gpt = GPT2LMHeadModel(GPT2Config(
            vocab_size=m.vocab_size, n_positions=m.context, n_embd=m.d_model, n_layer=m.n_layers, n_head=m.n_heads,
            n_inner=m.ffn_width, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False, attn_implementation="sdpa",
        ))  # fmt: skip

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(self.gpt(input_ids=tokens).logits, labels)


class LargePeer(nn.Module):
    """transformers' Llama or GPT-NeoX with SDPA, of a config of the same family."""

    def __init__(self, config: RunConfig):
        import transformers

        super().__init__()
        m = config.model
        given: dict[str, Any] = {
            "vocab_size": m.vocab_size, "hidden_size": m.d_model, "num_hidden_layers": m.n_layers,
            "num_attention_heads": m.n_heads, "intermediate_size": m.ffn_width, "use_cache": False,
            "max_position_embeddings": m.context, "attn_implementation": "sdpa",
            "tie_word_embeddings": m.tie_word_embeddings,
        }  # fmt: skip
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.rotary_base}
        if m.family == "llama":
            self.gpt: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                **given, num_key_value_heads=m.n_kv_heads or m.n_heads, rope_parameters=rope
            ))  # fmt: skip
        else:
            rope["partial_rotary_factor"] = m.rotary_pct
            self.gpt = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**given, rope_parameters=rope))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.gpt.base_model(input_ids=tokens).last_hidden_state, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(self.gpt.get_output_embeddings()(x), labels)

    def blocks(self) -> list[nn.Module]:
        return list(self.gpt.base_model.layers)


PEERS: dict[str, type[nn.Module]] = {"nanogpt": NanoGPT, "hf": HuggingFace, "torch": Encoder}


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def build_peer(system: str, config: RunConfig, weights: dict[str, Tensor], device: torch.device) -> nn.Module:
    """A peer's model with ingot's weights."""
    with torch.device(device):
        model = PEERS[system](config)
    own = dict(model.named_parameters())
    prefix = {"nanogpt": "", "hf": "gpt.transformer.", "torch": ""}[system]
    blocks, last = ("encoder.layers", "encoder.norm") if system == "torch" else (f"{prefix}h", f"{prefix}ln_f")
    used = set()
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if name.startswith("blocks."):
            _, layer, part = name.split(".", 2)
            part = part.removesuffix(f".{kind}")
            theirs = BLOCK[part][system == "torch"]
            if part == "attn.qkv":  # ours lies by heads, theirs by queries, keys and values
                heads = config.model.n_heads
                weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            if system == "hf" and weight.ndim == 2:
                weight = weight.t()
            name = f"{blocks}.{layer}.{theirs}" + (kind if theirs.endswith("_") else f".{kind}")
        else:
            name = f"{last}.{kind}" if name.startswith("norm_f") else prefix + name
        with torch.no_grad():
            own[name].copy_(weight)
        used.add(name)
    assert used == own.keys(), used ^ own.keys()
    return model


class PeerStep:
    """The loop that every such project has: microbatches, clipping, fused AdamW."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device, micro: int):
        self.config, self.model, self.device, self.micro = config, model, device, micro
        o = config.optimizer
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=0.0, fused=True
        )

    def set_lr(self, multiplier: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * multiplier

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, total = batch.labels.size, torch.zeros((), device=self.device)
        for start in range(0, len(batch.tokens), self.micro):
            rows = slice(start, start + self.micro)
            inputs, labels = (to_device(a[rows], self.device) for a in (batch.tokens, batch.labels))
            with autocast(self.config.precision, self.device):
                loss = self.model(inputs, labels) / tokens
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.gradient_clipping or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm
