"""Small models of many kinds, with inputs of four samples, for plans to be tried on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 4, 6
Built = tuple[nn.Module, dict[str, Tensor]]


def _features(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _tokens(length: int = 8, vocabulary: int = 17) -> Tensor:
    return torch.randint(1, vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(1))


class Calls(nn.Module):
    """A model whose forward pass is a function of it and of its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Any:
        """Apply the function."""
        return self._function(self, x)


@dataclass
class Result:
    """A result that is no container of PyTorch's."""

    first: Tensor
    second: Tensor


def _linear(out: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, out, **options)


def _changed_in_forward(model: Any, x: Tensor) -> Tensor:
    model.seen.mul_(0.9).add_(0.1 * x.detach().mean())
    return model.layer(x) - model.seen


def _experts(model: Any, x: Tensor) -> Tensor:
    chosen = model.router(x).argmax(-1)
    found = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows = chosen == number
        if rows.any():
            found = found.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
    return found


def _nested() -> nn.Module:
    inner = nn.ModuleList([nn.ModuleList([_linear(), nn.LayerNorm(WIDTH)]) for _ in range(2)])

    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block[1](block[0](x))
        return x

    return Calls(forward, blocks=inner)


def _tied() -> nn.Module:
    model = Calls(
        lambda m, x: m.head(m.tokens(x)), tokens=nn.Embedding(17, WIDTH), head=_linear(17, bias=False)
    )
    model.head.weight = model.tokens.weight
    return model


def _u_net(model: Any, x: Tensor) -> Tensor:
    down = F.gelu(model.down(x))
    return model.last(torch.cat([x, model.up(down)], 1))


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(_linear(10), nn.GELU(), nn.Linear(10, WIDTH)),
    "two outputs": lambda: Calls(lambda m, x: (m.a(x), {"b": m.b(x)}), a=_linear(), b=_linear()),
    "own result": lambda: Calls(lambda m, x: Result(m.a(x), m.b(x)), a=_linear(), b=_linear()),
    "used twice": lambda: Calls(lambda m, x: m.layer(F.silu(m.layer(x))), layer=_linear()),
    "frozen": lambda: nn.Sequential(_linear().requires_grad_(False), nn.Tanh(), _linear()),
    "unused": lambda: Calls(lambda m, x: m.used(x), used=_linear(), unused=_linear()),
    "scalar": lambda: Calls(
        lambda m, x: m.scale * m.layer(x), scale=nn.Parameter(torch.tensor(2.0)), layer=_linear()
    ),
    "nested lists": _nested,
    "checkpointed": lambda: Calls(
        lambda m, x: checkpoint(m.layer, x, use_reentrant=False), layer=nn.Sequential(_linear(), nn.GELU())
    ),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(_linear()), nn.GELU(), _linear()),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(_linear()), nn.GELU(), _linear()),
    "low rank": lambda: Calls(
        lambda m, x: m.whole(x) + m.up(m.down(x)),
        whole=_linear().requires_grad_(False),
        down=_linear(2, bias=False),
        up=nn.Linear(2, WIDTH, bias=False),
    ),
    "experts": lambda: Calls(_experts, router=_linear(2), experts=nn.ModuleList([_linear(), _linear()])),
    "own running mean": lambda: Calls(_changed_in_forward, layer=_linear(), seen=torch.zeros(())),
    "batch norm": lambda: nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH)),
    "bilinear": lambda: Calls(lambda m, x: m.layer(x, x), layer=nn.Bilinear(WIDTH, WIDTH, 3)),
    "prelu": lambda: nn.Sequential(_linear(), nn.PReLU(), _linear()),
}
"""Models of ``[batch, width]``."""

SHAPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 1)),
        (3, 5, 5),
    ),
    "u-net": (
        lambda: Calls(
            _u_net, down=nn.Conv2d(3, 4, 2, 2), up=nn.ConvTranspose2d(4, 3, 2, 2), last=nn.Conv2d(6, 2, 1)
        ),
        (3, 4, 4),
    ),
    "instance norm": (lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, affine=True)), (3, 5)),
    "running instance norm": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)),
        (3, 5),
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last),
        (3, 5, 5),
    ),
    "lstm": (
        lambda: Calls(lambda m, x: m.layer(x)[0], layer=nn.LSTM(WIDTH, 5, batch_first=True)),
        (7, WIDTH),
    ),
    "gru": (
        lambda: Calls(
            lambda m, x: m.layer(x)[0], layer=nn.GRU(WIDTH, 5, 2, batch_first=True, bidirectional=True)
        ),
        (7, WIDTH),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 10, 0.0, batch_first=True), 2),
        (7, WIDTH),
    ),
    "attention": (
        lambda: Calls(
            lambda m, x: m.layer(x, x, x, need_weights=False)[0],
            layer=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        ),
        (7, WIDTH),
    ),
}
"""Models of other features, with their shape."""

OF_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Sequential(nn.Embedding(17, WIDTH), _linear()),
    "tied embedding": _tied,
    "bag": lambda: Calls(lambda m, x: m.layer(x), layer=nn.EmbeddingBag(17, WIDTH)),
    "largest norm": lambda: Calls(lambda m, x: m.layer(x), layer=nn.Embedding(17, WIDTH, max_norm=0.5)),
    "sparse": lambda: Calls(lambda m, x: m.layer(x), layer=nn.Embedding(17, WIDTH, sparse=True)),
}
"""Models of ``[batch, 8]`` tokens."""

_SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
_GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_inner": 20}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OPT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 20}
_T5 = {"d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SIZES, "num_key_value_heads": 1}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_SIZES, "num_key_value_heads": 1, "num_local_experts": 2},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 8}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_OPT, "dropout": 0.0, "word_embed_proj_dim": 12}),
    "t5": ("T5EncoderModel", "T5Config", _T5),
}
"""By name the class, its configuration's class, and sizes."""

NAMES = (*PLAIN, *SHAPED, *OF_TOKENS, *TRANSFORMERS)


def build(name: str) -> Built:
    """Return a model in double precision, and its inputs by name."""
    torch.manual_seed(0)
    if name in PLAIN:
        return _named(PLAIN[name]().double(), _features(WIDTH))
    if name in SHAPED:
        make, shape = SHAPED[name]
        return _named(make().double(), _features(*shape))
    if name in OF_TOKENS:
        return _named(OF_TOKENS[name]().double(), _tokens())
    import transformers

    network, config, sizes = TRANSFORMERS[name]
    settings = getattr(transformers, config)(vocab_size=17, pad_token_id=0, **sizes)
    settings._experts_implementation = "eager"  # the others have no double precision
    made = getattr(transformers, network)(settings)
    return made.double().train(), {"input_ids": _tokens()}


def _named(model: nn.Module, x: Tensor) -> Built:
    return model, {next(iter(inspect.signature(model.forward).parameters)): x}
