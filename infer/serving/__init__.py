"""The OpenAI-compatible server, a loop for Hugging Face's `generate`, and regenerated answers.

May import every package but cli and the optional ones, and infer.api. Start with server.py;
protocol.py has the requests, responses.py the responses, guard.py the limits.
"""
