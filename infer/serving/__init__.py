"""Serves models over an OpenAI-compatible HTTP API, decodes inside Hugging Face's `generate`, and
generates training data.

server.py starts the server. protocol.py defines its requests, responses.py its responses, and
guard.py the limits on requests. The package may import infer.api and every package except cli and
the optional packages.
"""
