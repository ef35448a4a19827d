"""The OpenAI-compatible server, decoding inside Hugging Face's `generate`, and new training data.

server.py is the entry point of the server. protocol.py defines its requests, responses.py its
responses, and guard.py its limits on requests. hf.py connects the engine to `generate`.
regenerate.py generates new answers for training data. The package may import infer.api and every
package except cli and the optional packages.
"""
