"""Between text and tokens: tokenizer, chat template, prompts, and the reading of outputs. Never imports torch."""
