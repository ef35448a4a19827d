"""Training of masked diffusion language models. The training starts from a causal language model
and makes it bidirectional.

Read objective.py (the upper bound on the negative log-likelihood) first, then diffusion.py (the
training). This package is optional: only the table of commands in infer/main.py refers to it. It
may import infer, data, train's modules and train.run.
"""
