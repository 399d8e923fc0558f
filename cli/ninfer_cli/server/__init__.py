"""The HTTP server: OpenAI, Anthropic and Ollama interfaces over one engine."""
