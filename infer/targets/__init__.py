"""The target: a frozen causal language model behind one wrapper, how it is loaded, and which models
are supported.

May import infer.trees, attention, ngrams and utils. Start with target.py; support.py has
what config.json decides.
"""
