"""Training of masked diffusion language models, which starts from a causal language model. Read
objective.py (the upper bound on the negative log-likelihood) first, then diffusion.py. This package
is optional: only the table of commands in infer/main.py refers to it. It may import infer, data,
train's modules and train.run."""
