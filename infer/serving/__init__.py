"""The OpenAI-compatible server, decoding inside Hugging Face's `generate`, and new training data.

server.py starts the server. protocol.py defines its requests, responses.py its responses, and
guard.py limits on requests. The package may import infer.api and every package except cli and the
optional packages.
"""
