"""The OpenAI-compatible server, decoding by Hugging Face's `generate`, and new answers for data.
This package may import infer.api and every package except cli and the optional packages. server.py
is the entry point. protocol.py defines requests, responses.py responses, and guard.py the limits on
requests."""
