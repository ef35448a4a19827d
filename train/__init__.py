"""Training of block-diffusion drafters. Imports `infer` and `data`; nothing imports `train`."""
