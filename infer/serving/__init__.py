"""Texts for others: the OpenAI-compatible server, Hugging Face's `generate`, and the target's
answers to a data set.

May import every package but cli and the optional ones, and infer.api. Start with server.py;
protocol.py has the formats, guard.py the limits.
"""
