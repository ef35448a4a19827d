"""The target: a frozen causal language model behind one wrapper. This package also loads targets
and decides which models are supported.

This package may import infer.trees, infer.attention, infer.ngrams and infer.utils. Start reading
with target.py; support.py has the properties of a target that config.json decides.
"""
