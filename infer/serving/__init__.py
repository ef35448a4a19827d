"""The OpenAI-compatible server, a decoding loop for Hugging Face's `generate`, and functions that
generate new answers for a data set.

This package may import infer.api and every package except cli and the optional packages. server.py
is the entry point of the server. protocol.py defines the requests, responses.py the responses, and
guard.py the limits on requests.
"""
