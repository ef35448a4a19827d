"""Training of masked diffusion models: a causal language model made bidirectional. An optional
package: infer/main.py names it.
May import infer, data, train's modules and train.run.
Start with objective.py (the bound on the likelihood), then diffusion.py (the training)."""
