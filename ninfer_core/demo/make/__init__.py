"""How the demo model is made: corpus, tokenizer, tasks, training, export and evaluation."""
