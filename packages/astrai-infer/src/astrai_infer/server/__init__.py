"""The OpenAI and Anthropic APIs over HTTP; needs ``astrai-infer[server]``."""
