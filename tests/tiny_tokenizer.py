"""Small real tokenizers, trained in a moment on a few sentences. Used by tests only; no test lives here."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "What is two plus three? The answer is five.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "State the final answer to the following arithmetic problem: 12 + 30 - 4 = 38",
    "system user assistant 0 1 2 3 4 5 6 7 8 9 #### answer",
] * 4


def write_bpe_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Train a byte-level BPE of 400 ids, save it as a Hugging Face folder, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))
    return folder


def write_sentencepiece_model(folder: Path) -> Path:
    """Train a sentencepiece unigram model of about 100 pieces, and return the .model file."""
    import sentencepiece

    prefix = folder / "tiny"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(prefix),
        vocab_size=100,
        hard_vocab_limit=False,
        byte_fallback=False,
        num_threads=1,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")
