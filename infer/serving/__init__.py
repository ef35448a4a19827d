"""Serves models over OpenAI's HTTP API, decodes inside `generate` of transformers, and regenerates
training data. server.py starts the server. protocol.py defines the requests, responses.py the
responses, and guard.py the limits on requests. This package may import infer.api and all packages
of infer except cli and the optional ones.
"""
