"""Training of masked diffusion models: a causal language model becomes a bidirectional one. This
package is optional: only the table of commands in infer/main.py refers to it. It may import infer,
data, train's modules and train.run. Read objective.py (the upper bound on the negative
log-likelihood) first, then diffusion.py (the training)."""
