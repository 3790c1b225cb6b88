"""Small models with random weights, made from configurations, and what transformers' own eager
attention computes with them.
"""

import tokenizers
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

SIZES = dict(vocab_size=512, hidden_size=256, num_hidden_layers=3, max_position_embeddings=1024)
# Large weights, so that scores differ by several units
LLAMA = dict(SIZES, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2)
LLAMA |= dict(initializer_range=0.1, tie_word_embeddings=False, head_dim=32)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    # Smaller weights, tied: it repeats a few tokens, as drafts from the text before suppose
    "repeating": lambda: transformers.LlamaConfig(
        **dict(LLAMA, tie_word_embeddings=True, initializer_range=0.05)
    ),
    "one_key_head": lambda: transformers.LlamaConfig(**dict(LLAMA, num_key_value_heads=1)),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=24),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **LLAMA,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=ALTERNATING,
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **LLAMA, sliding_window=24, layer_types=ALTERNATING, pad_token_id=0
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=512, hidden_size=256, n_layer=3, n_head=8, initializer_range=0.1
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **dict(LLAMA, tie_word_embeddings=True, initializer_range=0.2),
        sliding_window=24,
        layer_types=ALTERNATING,
        hidden_act="gelu_pytorch_tanh",  # SGLang's name of hidden_activation
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
    ),
    "bert": lambda: transformers.BertConfig(
        **SIZES,
        intermediate_size=512,
        num_attention_heads=8,
        initializer_range=0.1,
        position_embedding_type="absolute",
    ),
}


def make(name, folder):
    """Writes the model `name` to a folder."""
    torch.manual_seed(0)
    kind = AutoModel if name == "bert" else AutoModelForCausalLM
    model = kind.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for key, x in model.named_parameters():
        if key.endswith(("sinks", "bias")):
            torch.nn.init.normal_(x, std=1 if key.endswith("sinks") else 0.1)
    model.save_pretrained(folder)
    if name == "bert":  # vLLM asks a model of embeddings for its tokenizer
        words = tokenizers.models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words), unk_token="t0"
        )
        tokenizer.save_pretrained(folder)


def load(folder, **options):
    options = dict(attn_implementation="eager", dtype=torch.float32) | options
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.eos_token_id = None
    if model.config.model_type == "bloom":  # transformers approximates GELU, engines do not
        for layer in model.transformer.h:
            layer.mlp.gelu_impl = torch.nn.GELU()
    return model


@torch.no_grad()
def generate(folder, prompts, count):
    """For each prompt its greedy tokens, their log-probabilities, and the distances between the two
    largest logits.
    """
    model, found = load(folder), []
    for prompt in prompts:
        x = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = x.sequences[0, len(prompt) :]
        logits = torch.cat(x.logits)
        chosen = logits.log_softmax(-1).gather(1, tokens[:, None]).flatten()
        first, second = logits.topk(2).values.unbind(1)
        found.append((tokens.tolist(), chosen.tolist(), (first - second).tolist()))
    return found


@torch.no_grad()
def score(folder, prompts, **options):
    """Log-probabilities of each prompt's tokens but the first."""
    model, found = load(folder, **options), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, ids[0, 1:, None]).flatten().tolist())
    return found


@torch.no_grad()
def embed(folder, prompts):
    """Hidden states of the last layer."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return [model.eval()(torch.tensor([x])).last_hidden_state[0].tolist() for x in prompts]


def rounded_attention(round_rows):
    """transformers' eager attention over K and V as a cache of 8 bits holds them."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def attend(module, query, key, value, *args, **options):
        key, value = (round_rows(x, name) for x, name in ((key, "k"), (value, "v")))
        return eager_attention_forward(module, query, key, value, *args, **options)

    transformers.AttentionInterface.register("rounded", attend)
    transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
    return dict(attn_implementation="rounded")
