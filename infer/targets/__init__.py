"""The target: the frozen causal language model whose decoding a drafter speeds up. This package
loads targets, decides which models are supported, and runs a target behind one wrapper.

This package may import infer.trees, infer.attention, infer.ngrams and infer.utils. Start reading
with target.py; support.py has the properties of a target that config.json decides.
"""
