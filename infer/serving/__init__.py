"""The OpenAI-compatible server, decoding by Hugging Face's `generate`, and new answers for data.

The package may import infer.api and every package except cli and the optional packages. server.py
is the entry point of the server. protocol.py defines its requests, responses.py its responses, and
guard.py its limits on requests. hf.py connects the engine to `generate`. regenerate.py generates
the answers for training data.
"""
